// The equation of a sequence's token: from sums over channels to the root and the token's record.
//
// The equation and the norm need only sums over channels: with v_i the vector of a reflection after its
// activation, the output before the norm is f + Σ_i θ_i m_i with f = g (past + γ x) and m_i = g γ v_i. past
// is the part of the output from the states of earlier tokens, γ = Δ B·C + D, and g is the output gate.
// θ = τ (s − U x), where s is the root of the equation, u_i = v_i / LENGTH_i, τ_ij = T_ij / LENGTH_i and
// LENGTH_i is max(‖v_i‖, eps).

#pragma once

#include "team.h"

// Sums over channels of one sequence, in the order of the words that carry them. The names list the
// factors of the terms: V is v, X is x, F is f, M is m, W is the norm's weight, B its bias. There is one
// sum per pair of reflections for two factors V or M, and one per reflection for one.
enum ForwardSum {
    VV,
    VX = VV + PAIRS,
    F = VX + REFLECTIONS,
    M,
    FF = M + REFLECTIONS,
    FM,
    MM = FM + REFLECTIONS,
    WVF = MM + PAIRS,
    WVM = WVF + REFLECTIONS,
    WV = WVM + PAIRS,
    VB = WV + REFLECTIONS
};
static_assert(VB + REFLECTIONS == FORWARD_SUMS);

namespace {
// Reflections of a sequence's token: x̃ = x + Σ_i v_i (Σ_j τ_ij s_j − k_i) for the root s.
struct Reflections : ReflectionMap {
    double length[REFLECTIONS], u_x[REFLECTIONS], tau[REFLECTIONS][REFLECTIONS], k[REFLECTIONS];

    DEVICE Reflections(const Cell &cell, const double *sum, const float *gate_entries) {
        for (int i = 0; i < REFLECTIONS; ++i) {
            length[i] = at_least(sqrt(float(sum[VV + pair_index(i, i)])), cell.eps);
            u_x[i] = sum[VX + i] / length[i];
            gate[i] = cell.scale / (1 + exp(-double(gate_entries[i])));
            for (int j = 0; j < i; ++j) gram[i][j] = sum[VV + pair_index(i, j)] / (length[i] * length[j]);
        }
        compute_reflection_map<REFLECTIONS>(REFLECTIONS, cell.sequential, cell.kappa, *this);
        for (int i = 0; i < REFLECTIONS; ++i) {
            k[i] = 0;
            for (int j = 0; j < REFLECTIONS; ++j) {
                tau[i][j] = map[i][j] / length[i];
                k[i] += tau[i][j] * u_x[j];
            }
        }
    }
};
}  // namespace

// Means of f and m over channels, 0 for RMSNorm, and means or sums of the products of f − mean_f and
// m − mean_m: ff, fm and mm are means, w v f and w v m are sums.
struct CentredSums {
    double mean_f, mean_m[REFLECTIONS], ff, fm[REFLECTIONS], mm[REFLECTIONS][REFLECTIONS];
    double wvf[REFLECTIONS], wvm[REFLECTIONS][REFLECTIONS];

    DEVICE CentredSums(const Cell &cell, const double *sum) {
        const double d = D_INNER;
        mean_f = cell.layer_norm ? sum[F] / d : 0;
        ff = sum[FF] / d - mean_f * mean_f;
        for (int i = 0; i < REFLECTIONS; ++i) {
            mean_m[i] = cell.layer_norm ? sum[M + i] / d : 0;
            fm[i] = sum[FM + i] / d - mean_f * mean_m[i];
            wvf[i] = sum[WVF + i] - mean_f * sum[WV + i];
        }
        for (int i = 0; i < REFLECTIONS; ++i)
            for (int j = 0; j < REFLECTIONS; ++j) {
                mm[i][j] = sum[MM + pair_index(i, j)] / d - mean_m[i] * mean_m[j];
                wvm[i][j] = sum[WVM + pair_index(i, j)] - mean_m[j] * sum[WV + i];
            }
    }
};

// Compute the coefficients of φ (cell_equation.h).
DEVICE void compute_coefficients(const Cell &cell, const double *sum, const Reflections &of,
                                 const CentredSums &centred, Equation &e) {
    e.gamma0 = centred.ff;
    for (int i = 0; i < REFLECTIONS; ++i) e.gamma0 -= 2 * of.k[i] * centred.fm[i];
    for (int i = 0; i < REFLECTIONS; ++i)
        for (int j = 0; j < REFLECTIONS; ++j) e.gamma0 += of.k[i] * of.k[j] * centred.mm[i][j];
    e.gamma0 += cell.norm_eps;
    e.floor = cell.norm_eps;
    e.rounding = 0x1p-23;
    for (int i = 0; i < REFLECTIONS; ++i) {
        double alpha = centred.wvf[i];
        for (int l = 0; l < REFLECTIONS; ++l) alpha -= of.k[l] * centred.wvm[i][l];
        e.alpha[i] = alpha / of.length[i];
        e.delta[i] = sum[VB + i] / of.length[i];
        e.gamma1[i] = 0;
        for (int j = 0; j < REFLECTIONS; ++j) e.beta[i][j] = e.gamma2[i][j] = 0;
    }
    for (int l = 0; l < REFLECTIONS; ++l) {
        double slant = centred.fm[l];
        for (int p = 0; p < REFLECTIONS; ++p) slant -= of.k[p] * centred.mm[l][p];
        for (int j = 0; j <= l; ++j) {  // τ_lj is 0 for j > l
            e.gamma1[j] += of.tau[l][j] * slant;
            for (int i = 0; i < REFLECTIONS; ++i)
                e.beta[i][j] += of.tau[l][j] / of.length[i] * centred.wvm[i][l];
            for (int p = 0; p < REFLECTIONS; ++p)
                for (int i = 0; i <= p; ++i) e.gamma2[j][i] += of.tau[l][j] * of.tau[p][i] * centred.mm[l][p];
        }
    }
}

// Write the record of a sequence for the root s, without B·C and the lengths of B and C, which
// normalize_B_and_C has written.
DEVICE void write_record(const Cell &cell, const double *sum, const Reflections &of, const CentredSums &centred,
                         const double *root, float *record) {
    const double d = D_INNER;
    double theta[REFLECTIONS], mean = centred.mean_f, variance = centred.ff;
    for (int i = 0; i < REFLECTIONS; ++i) {
        theta[i] = 0;
        for (int j = 0; j <= i; ++j)  // the root is rounded as in the CPU kernel, which saves it
            theta[i] += of.tau[i][j] * (double(float(root[j])) - of.u_x[j]);
        mean += theta[i] * centred.mean_m[i];
    }
    for (int i = 0; i < REFLECTIONS; ++i) {
        double slope = 2 * centred.fm[i];
        for (int j = 0; j < REFLECTIONS; ++j) slope += theta[j] * centred.mm[i][j];
        variance += theta[i] * slope;
    }
    const double inverse = 1 / sqrt((variance < 0 ? 0 : variance) + cell.norm_eps);
    record[MEAN] = mean;
    record[INVERSE] = inverse;
    for (int i = 0; i < REFLECTIONS; ++i) {
        double wv_n = sum[WVF + i], n_m = sum[FM + i];
        for (int j = 0; j < REFLECTIONS; ++j) {
            wv_n += theta[j] * sum[WVM + pair_index(i, j)];
            n_m += theta[j] * sum[MM + pair_index(i, j)];
        }
        wv_n = (wv_n - mean * sum[WV + i]) * inverse;
        n_m = (n_m - mean * sum[M + i]) * inverse;
        record[THETA + i] = theta[i];
        record[LENGTH + i] = of.length[i];
        record[U_X + i] = of.u_x[i];
        record[U_Y + i] = (wv_n + sum[VB + i]) / of.length[i];
        record[DISTANCE + i] = double(float(root[i])) - of.u_x[i];
        record[MEAN_U + i] = cell.layer_norm ? sum[WV + i] / of.length[i] / d : 0;
        record[ALONG_U + i] = wv_n / of.length[i] / d;
        record[SUM_M + i] = sum[M + i] / of.length[i];
        record[SUM_NM + i] = n_m / of.length[i];
    }
    for (int i = 0; i < REFLECTIONS; ++i)
        for (int j = 0; j < REFLECTIONS; ++j) {
            const double slope = sum[WVM + pair_index(i, j)] / (of.length[i] * of.length[j]) -
                                 double(record[MEAN_U + j]) * record[SUM_M + i] -
                                 double(record[ALONG_U + j]) * record[SUM_NM + i];
            record[SLOPE + i * REFLECTIONS + j] = slope * inverse;
            if (j < i) record[GRAM + pair_index(i, j)] = of.gram[i][j];
        }
}

// Compute φ′ from a record.
DEVICE void compute_recorded_slope(const float *record, const ReflectionMap &map,
                                   double (*phi_slope)[MAX_REFLECTIONS]) {
    double z_u[REFLECTIONS][MAX_REFLECTIONS];
    for (int i = 0; i < REFLECTIONS; ++i)
        for (int j = 0; j < REFLECTIONS; ++j) z_u[i][j] = record[SLOPE + i * REFLECTIONS + j];
    compute_phi_slope<REFLECTIONS>(REFLECTIONS, map, z_u, phi_slope);
}

// Solve the equation of a sequence and write its record. Return the outcome.
DEVICE int solve_sequence(const Cell &cell, const double *sum, const float *gate_entries, float *record) {
    const Reflections reflections(cell, sum, gate_entries);
    const CentredSums centred(cell, sum);
    Equation e;
    compute_coefficients(cell, sum, reflections, centred, e);
    double root[MAX_REFLECTIONS], M[MAX_REFLECTIONS][MAX_REFLECTIONS];
    int outcome = solve<REFLECTIONS>(e, REFLECTIONS, root);
    write_record(cell, sum, reflections, centred, root, record);
    compute_recorded_slope(record, reflections, M);
    for (int i = 0; i < REFLECTIONS; ++i)
        for (int j = 0; j < REFLECTIONS; ++j) M[i][j] = (i == j) - M[i][j];  // I − φ′
    if (!(outcome & FAILED) && is_gain_limited<REFLECTIONS>(M, REFLECTIONS)) outcome |= GRAD_LIMITED;
    return outcome;
}
