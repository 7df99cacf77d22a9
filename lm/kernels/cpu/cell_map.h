// The map T of a token's reflections, in I − Q = Uᵀ T U, and the small vectors of its gradient.
//
// The kernels of the CPU and the persistent kernels of ../cuda share this file. cell_gradient.h has the
// notation of the gradient.

#pragma once

#include "cell_equation.h"

namespace {

struct ReflectionMap {
    double gate[MAX_REFLECTIONS];                           // a
    double gram[MAX_REFLECTIONS][MAX_REFLECTIONS];          // u_i·u_j for j < i
    double unscaled_map[MAX_REFLECTIONS][MAX_REFLECTIONS];  // T before the factor `shrink`
    double map[MAX_REFLECTIONS][MAX_REFLECTIONS];           // T
    double shrink;                                          // κ / max(κ, Σ a)
};

struct MapGradient {
    double phi_slope[MAX_REFLECTIONS][MAX_REFLECTIONS];    // φ′
    double d_root[MAX_REFLECTIONS], eta[MAX_REFLECTIONS];  // ḡ, η
    double d_mix_weights[MAX_REFLECTIONS];                 // gradient of T (s − U x)
    double d_Ux[MAX_REFLECTIONS];                          // gradient of U x
    double d_gate[MAX_REFLECTIONS];                        // gradient of the row's gates, before the sigmoid
    double d_gram[MAX_REFLECTIONS][MAX_REFLECTIONS];       // symmetric
};

// Compute T from the gates a: diag(a) for reflections that are added (dplr); for reflections in sequence
// (householder) T = diag(a) (I − G T) with G the entries u_i·u_j below the diagonal.
template <int R>
inline void compute_reflection_map(int64_t r_, bool is_sequential, double kappa, ReflectionMap &map) {
    const int r = rank_of<R>(r_);
    double sum = 0;
    for (int i = 0; i < r; ++i) sum += map.gate[i];
    map.shrink = kappa > 0 && sum > kappa ? kappa / sum : 1;
    for (int i = 0; i < r; ++i)
        for (int j = 0; j < r; ++j) {
            double entry = i == j;
            for (int l = j; l < i && is_sequential; ++l) entry -= map.gram[i][l] * map.unscaled_map[l][j];
            map.unscaled_map[i][j] = j > i ? 0 : map.gate[i] * entry;
            map.map[i][j] = map.shrink * map.unscaled_map[i][j];
        }
}

// Compute ḡ = Tᵀ z from the gradient z of U x̃.
template <int R> inline void backprop_root(int64_t r_, const ReflectionMap &map, const double *z, double *d_root) {
    const int r = rank_of<R>(r_);
    for (int j = 0; j < r; ++j) {
        d_root[j] = 0;
        for (int l = j; l < r; ++l) d_root[j] += map.map[l][j] * z[l];
    }
}

// Compute φ′ = z_uᵀ T. Column i of z_u is z(u_i).
template <int R>
inline void compute_phi_slope(int64_t r_, const ReflectionMap &map, const double (*z_u)[MAX_REFLECTIONS],
                              double (*phi_slope)[MAX_REFLECTIONS]) {
    const int r = rank_of<R>(r_);
    for (int i = 0; i < r; ++i)
        for (int j = 0; j < r; ++j) {
            phi_slope[i][j] = 0;
            for (int l = j; l < r; ++l) phi_slope[i][j] += z_u[l][i] * map.map[l][j];
        }
}

// Compute η = (I − φ′)⁻ᵀ ḡ, shortened to MAX_GAIN ‖ḡ‖, because it is unbounded near a fold. If the
// search for the root failed, η is ḡ.
template <int R> inline void solve_adjoint(int64_t r_, bool has_failed, MapGradient &grads) {
    const int r = rank_of<R>(r_);
    double M[MAX_REFLECTIONS][MAX_REFLECTIONS], square_g = 0, square_eta = 0;
    for (int i = 0; i < r; ++i) {
        grads.eta[i] = grads.d_root[i];
        square_g += grads.d_root[i] * grads.d_root[i];
        for (int j = 0; j < r; ++j) M[i][j] = (i == j) - grads.phi_slope[j][i];
    }
    if (has_failed) return;
    eliminate<R>(M, grads.eta, r);
    for (int i = 0; i < r; ++i) square_eta += grads.eta[i] * grads.eta[i];
    const bool is_finite = square_eta <= std::numeric_limits<double>::max();
    if (is_finite && square_eta <= MAX_GAIN * MAX_GAIN * square_g) return;
    // A singular matrix gives no direction: use the direction of ḡ.
    const double factor = is_finite ? MAX_GAIN * std::sqrt(square_g / square_eta) : MAX_GAIN;
    for (int i = 0; i < r; ++i) grads.eta[i] = factor * (is_finite ? grads.eta[i] : grads.d_root[i]);
}

// Backpropagate from T (s − U x) to U x, the gates and all u_i·u_j. `distance` (r) is s − U x.
template <int R>
inline void backprop_map(int64_t r_, bool is_sequential, double kappa, double scale, const ReflectionMap &map,
                         const double *distance, MapGradient &grads) {
    const int r = rank_of<R>(r_);
    double d_unscaled_map[MAX_REFLECTIONS][MAX_REFLECTIONS], d_shrink = 0, sum = 0;
    for (int j = 0; j < r; ++j) {
        grads.d_Ux[j] = grads.d_gate[j] = 0;
        sum += map.gate[j];
        for (int l = j; l < r; ++l) {
            const double d_map = grads.d_mix_weights[l] * distance[j];
            grads.d_Ux[j] -= map.map[l][j] * grads.d_mix_weights[l];
            d_shrink += d_map * map.unscaled_map[l][j];
            d_unscaled_map[l][j] = d_map * map.shrink;
        }
        for (int l = 0; l < r; ++l) grads.d_gram[j][l] = 0;
    }
    for (int i = r - 1; i >= 0; --i)
        for (int j = 0; j <= i; ++j) {
            double entry = i == j;
            for (int l = j; l < i && is_sequential; ++l) {
                entry -= map.gram[i][l] * map.unscaled_map[l][j];
                grads.d_gram[i][l] -= d_unscaled_map[i][j] * map.gate[i] * map.unscaled_map[l][j];
                d_unscaled_map[l][j] -= d_unscaled_map[i][j] * map.gate[i] * map.gram[i][l];
            }
            grads.d_gate[i] += d_unscaled_map[i][j] * entry;
        }
    const bool is_shrunk = kappa > 0 && sum > kappa;
    for (int i = 0; i < r; ++i) {
        if (is_shrunk) grads.d_gate[i] -= d_shrink * map.shrink / sum;
        grads.d_gate[i] *= map.gate[i] * (1 - map.gate[i] / scale);  // through the sigmoid
        for (int l = 0; l < i; ++l) grads.d_gram[l][i] = grads.d_gram[i][l];
    }
}

}  // namespace
