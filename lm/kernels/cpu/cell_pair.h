// Two reflections: computes all roots on Picard's side and selects the root to which Picard converges.
//
// lm/model/certified_root.py is the same search in plain PyTorch. It defines F, P, N² and det, and gives
// the reasons for the constants.
// notes/2026-11-two-reflections.md has the proof.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "cell_equation.h"

namespace {

constexpr int PIECE_COUNT = 8, DEGREE = 6, MAX_PAIR_STEPS = 20, MAX_POLISH_STEPS = 2;
constexpr int DECIDE_AFTER = 12, UNKNOWN_COUNT = 9;  // 9: more than P can have
constexpr double PIECES[PIECE_COUNT] = {0.25, 0.5, 0.75, 0.9, 0.97, 0.99, 0.999, 1.0};
constexpr double WIDE_PIECES[PIECE_COUNT - 1] = {0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 4.0};
constexpr double MIN_SIDE = 1e-4, CERTAIN = 1e-13, STILL = 1e-12;

// Compute the ends of the pieces of the interval of g that contains Picard's root. Return false if the
// interval is unknown.
inline bool find_bounds(const Equation &eq, double *ends) {
    const auto &b = eq.beta;
    const double half_trace = (b[0][0] + b[1][1]) / 2, det = b[0][0] * b[1][1] - b[0][1] * b[1][0];
    const double half_difference = (b[0][0] - b[1][1]) / 2;
    const double discriminant = half_difference * half_difference + b[0][1] * b[1][0];
    const double max_eigenvalue = half_trace + std::sqrt(discriminant > 0 ? discriminant : 0);
    // A normal w with wᵀ B = max_eigenvalue · wᵀ. Both rows are multiples of w; the longer one is used.
    const double first[2] = {b[1][0], max_eigenvalue - b[0][0]}, second[2] = {max_eigenvalue - b[1][1], b[0][1]};
    const auto dot = [](const double *x, const double *y) { return x[0] * y[0] + x[1] * y[1]; };
    const double *w = dot(second, second) > dot(first, first) ? second : first;
    const double length = std::sqrt(dot(w, w));
    const double scale_alpha = length * std::sqrt(dot(eq.alpha, eq.alpha)), side_alpha = dot(w, eq.alpha);
    const double scale_delta = length * std::sqrt(dot(eq.delta, eq.delta)), side_delta = dot(w, eq.delta);
    const bool is_alpha_clear = std::abs(side_alpha) > MIN_SIDE * scale_alpha;
    const bool is_delta_clear = std::abs(side_delta) > MIN_SIDE * scale_delta;
    const bool is_side_known = (side_alpha * side_delta > 0 && is_alpha_clear && is_delta_clear) ||
                       (scale_alpha == 0 && is_delta_clear) || (scale_delta == 0 && is_alpha_clear);
    const double max_g = 1 / std::sqrt(eq.floor);
    ends[0] = 0;
    if (discriminant > 0 && max_eigenvalue * max_g > 1 && is_side_known) {
        for (int i = 0; i < PIECE_COUNT; ++i) ends[i + 1] = PIECES[i] / max_eigenvalue;
        return true;
    }
    if (!(discriminant < 0 || max_eigenvalue <= 0)) return false;
    const double unit = std::min(1 / std::sqrt(std::abs(det)), max_g / 8);  // all pieces end below max_g
    for (int i = 0; i < PIECE_COUNT - 1; ++i) ends[i + 1] = unit * WIDE_PIECES[i];
    ends[PIECE_COUNT] = max_g;
    return true;
}

// Coefficients of det, of the numerators, of N² and of P in powers of g.
struct Polynomials {
    double det[3], numerator[3][2], n_square[5], p[DEGREE + 1];

    explicit Polynomials(const Equation &eq) {
        const auto &b = eq.beta;
        det[0] = 1;
        det[1] = -(b[0][0] + b[1][1]);
        det[2] = b[0][0] * b[1][1] - b[0][1] * b[1][0];
        const auto apply_shifted_beta = [&](const double *x, double *to) {  // (B − tr B · I) x
            to[0] = b[0][1] * x[1] - b[1][1] * x[0];
            to[1] = b[1][0] * x[0] - b[0][0] * x[1];
        };
        double shifted_alpha[2], shifted_delta[2], gamma1_v[3];
        apply_shifted_beta(eq.alpha, shifted_alpha);
        apply_shifted_beta(eq.delta, shifted_delta);
        for (int i = 0; i < 2; ++i) {
            numerator[0][i] = eq.delta[i];
            numerator[1][i] = eq.alpha[i] + shifted_delta[i];
            numerator[2][i] = shifted_alpha[i];
        }
        for (int k = 0; k < 3; ++k)
            gamma1_v[k] = 2 * (numerator[k][0] * eq.gamma1[0] + numerator[k][1] * eq.gamma1[1]);
        for (double &x : n_square) x = 0;
        for (double &x : p) x = 0;
        for (int k = 0; k < 3; ++k)
            for (int l = 0; l < 3; ++l) {
                double pair = eq.gamma0 * det[k] * det[l] + gamma1_v[k] * det[l];
                for (int i = 0; i < 2; ++i)
                    for (int j = 0; j < 2; ++j)
                        pair += numerator[k][i] * eq.gamma2[i][j] * numerator[l][j];
                n_square[k + l] += pair;
                p[k + l] -= det[k] * det[l];
            }
        for (int k = 0; k < 5; ++k) p[k + 2] += n_square[k];
    }
};

// Replace the power coefficients of a polynomial by its Bernstein coefficients on [low, high].
inline void to_bernstein(double *c, double low, double high) {
    constexpr double CHOICES[DEGREE + 1] = {1, 6, 15, 20, 15, 6, 1};  // binomial coefficients
    for (int j = 0; j < DEGREE; ++j)
        for (int i = DEGREE - 1; i >= j; --i) c[i] += low * c[i + 1];
    double power = 1;
    for (int i = 0; i <= DEGREE; ++i) {
        c[i] *= power / CHOICES[i];
        power *= high - low;
    }
    for (int j = 0; j < DEGREE; ++j)
        for (int i = DEGREE - 1; i >= j; --i) c[i + 1] += c[i];
}

// Return an upper bound of the number of zeros of P on [low, high], or UNKNOWN_COUNT; at_end is P(high).
inline int count_sign_changes(const double *p, double low, double high, double &at_end) {
    double c[DEGREE + 1], sizes[DEGREE + 1];
    for (int i = 0; i <= DEGREE; ++i) {
        c[i] = p[i];
        sizes[i] = std::abs(p[i]);
    }
    to_bernstein(c, low, high);
    to_bernstein(sizes, low, high);
    at_end = c[DEGREE];
    int changes = 0;
    for (int i = 0; i <= DEGREE; ++i) {
        if (!(std::abs(c[i]) > CERTAIN * sizes[i])) return UNKNOWN_COUNT;
        if (i) changes += (c[i] > 0) != (c[i - 1] > 0);
    }
    return changes;
}

// Find the zero of F = det − g N between low and high by Newton with bisection bounds. is_rising: P rises
// from negative to positive there, and F falls from positive to negative.
inline double find_zero(const Equation &eq, const Polynomials &polynomials, double low, double high,
                        bool is_rising) {
    const auto middle = [&] { return low > 0 ? std::sqrt(low * high) : high / 2; };
    double g = middle();
    for (int step = 0; step < MAX_PAIR_STEPS; ++step) {
        ++eq.evaluations;
        const double d = polynomials.det[0] + g * (polynomials.det[1] + g * polynomials.det[2]);
        const double d_slope = polynomials.det[1] + 2 * g * polynomials.det[2];
        double n_square = 0, n_slope = 0;
        for (int i = 4; i >= 0; --i) {
            n_slope = n_slope * g + n_square;
            n_square = n_square * g + polynomials.n_square[i];
        }
        const double n = std::sqrt(n_square), value = d - g * n;
        const double slope = d_slope - n - g * n_slope / (2 * n);
        ((value > 0) == is_rising ? low : high) = g;
        const double newton_g = g - value / slope;
        const double next = newton_g > low && newton_g < high ? newton_g : middle();
        if (std::abs(next - g) <= STILL * g) return next;
        g = next;
    }
    return g;
}

// Find all roots on Picard's side and write one into `root`: the root that attracts, or the first root
// if none attracts. Return false if there may be more roots, or if several attract.
inline bool find_pair(const Equation &eq, double *root, bool &is_attracting) {
    double ends[PIECE_COUNT + 1];
    is_attracting = false;
    if (!find_bounds(eq, ends)) return false;
    const Polynomials polynomials(eq);
    bool has_zero[PIECE_COUNT], is_rising[PIECE_COUNT];
    for (int piece = 0; piece < PIECE_COUNT; ++piece) {
        double at_end;
        const int changes = count_sign_changes(polynomials.p, ends[piece], ends[piece + 1], at_end);
        if (changes > 1) return false;
        has_zero[piece] = changes == 1;
        is_rising[piece] = at_end > 0;
    }
    if (!is_rising[PIECE_COUNT - 1]) return false;
    bool has_root = false;
    for (int piece = 0; piece < PIECE_COUNT; ++piece) {
        if (!has_zero[piece]) continue;
        const double g = find_zero(eq, polynomials, ends[piece], ends[piece + 1], is_rising[piece]);
        const double d = polynomials.det[0] + g * (polynomials.det[1] + g * polynomials.det[2]);
        const auto &v = polynomials.numerator;
        Point point;
        for (int i = 0; i < 2; ++i)
            point.s[i] = (v[0][i] + g * (v[1][i] + g * v[2][i])) / d;
        evaluate<2>(eq, 2, point);
        const double rounding = ROUNDING * std::numeric_limits<double>::epsilon();
        for (int step = 0; step < MAX_POLISH_STEPS; ++step) {
            if (point.residual <= rounding * point.scale) break;
            double step_s[MAX_REFLECTIONS];
            newton_step<2>(eq, 2, point, step_s);
            for (int i = 0; i < 2; ++i) point.s[i] += step_s[i];
            evaluate<2>(eq, 2, point);
        }
        if (!is_at_rounding(eq, point, SOLVED)) return false;
        const bool is_attractor = attracts<2>(eq, 2, point);
        if (is_attractor && is_attracting) return false;
        if (is_attractor || !has_root)
            for (int i = 0; i < 2; ++i) root[i] = point.s[i];
        has_root = true;
        is_attracting = is_attracting || is_attractor;
    }
    return has_root;
}

}  // namespace
