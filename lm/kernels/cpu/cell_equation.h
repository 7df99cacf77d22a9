// The small equation of one token, s = φ(s) for r numbers: value and slope of φ, Newton's step.
//
//   φ(s) = (α + Β s) / √(γ0 + 2 γ1·s + sᵀ Γ2 s) + δ
//
// It is computed in double precision even for float kernels: it is cheap, and near a fold a rounding
// error would select another root.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace {

constexpr int MAX_REFLECTIONS = 8;  // as in lm/kernels/cell_arguments.py

// Constants with the names and values of lm/model/cell.py and lm/model/solver.py (`Rule`, outcomes);
// tests/lm/kernels/test_constants.py compares them.
constexpr int MAX_PICARD_STEPS = 300, MAX_NEWTON_STEPS = 10, BISECTIONS = 60, PATIENCE = 15;
constexpr double STEPSIZE = 0.99, STEPSIZE_DECAY = 0.9;
constexpr double MAX_PICARD_RATIO = 0.99, MAX_NEWTON_DISTANCE = 0.05;
constexpr double ROUNDING = 8, SOLVED = 256, MIN_INVERSE_NORM = 1e-18, MAX_GAIN = 20;
constexpr int MAX_DIRECT_STEPS = 12;

enum Outcome : uint8_t { FAILED = 1, BISECTED = 2, GRAD_LIMITED = 4 };

// Return r as a compile-time constant if R is not 0.
template <int R> inline int rank_of(int64_t r) { return R ? R : int(r); }

// Coefficients of φ.
struct Equation {
    double alpha[MAX_REFLECTIONS], beta[MAX_REFLECTIONS][MAX_REFLECTIONS], delta[MAX_REFLECTIONS];
    double gamma0, gamma1[MAX_REFLECTIONS], gamma2[MAX_REFLECTIONS][MAX_REFLECTIONS];
    double floor;     // lower bound of the radicand
    double rounding;  // machine epsilon of the kernel's type
    mutable int32_t evaluations = 0;  // number of evaluations of φ, for benchmarks/root_search.py
};

// A point s with the value of φ and the terms of its slope.
struct Point {
    double s[MAX_REFLECTIONS], psi[MAX_REFLECTIONS];            // ψ = φ(s) − s
    double numerator[MAX_REFLECTIONS], slant[MAX_REFLECTIONS];  // α + Β s, γ1 + Γ2 s
    double inverse, residual, scale;  // 1/√…, max |ψ|, magnitude of ψ's terms (for rounding tests)
};

// Compute the other fields of a point from s.
template <int R> inline void evaluate(const Equation &eq, int64_t r_, Point &point) {
    const int r = rank_of<R>(r_);
    ++eq.evaluations;
    double radicand = eq.gamma0;
    for (int i = 0; i < r; ++i) {
        double slant = eq.gamma1[i];
        for (int j = 0; j < r; ++j) slant += eq.gamma2[i][j] * point.s[j];
        point.slant[i] = slant;
        radicand += point.s[i] * (eq.gamma1[i] + slant);
    }
    point.inverse = 1 / std::sqrt(radicand < eq.floor ? eq.floor : radicand);
    point.residual = point.scale = 0;
    double sum = 0;  // NaN if any ψ is NaN
    for (int i = 0; i < r; ++i) {
        double numerator = eq.alpha[i], size = std::abs(eq.alpha[i]);
        double beta_s = 0;
        for (int j = 0; j < r; ++j) beta_s += eq.beta[i][j] * point.s[j];
        numerator += beta_s;
        size = (size + std::abs(beta_s)) * point.inverse + std::abs(eq.delta[i]) + std::abs(point.s[i]);
        point.numerator[i] = numerator;
        point.psi[i] = numerator * point.inverse + eq.delta[i] - point.s[i];
        sum += point.psi[i];
        const double magnitude = std::abs(point.psi[i]);
        point.residual = magnitude > point.residual ? magnitude : point.residual;
        point.scale = size > point.scale ? size : point.scale;
    }
    if (!(std::abs(sum) <= std::numeric_limits<double>::max())) point.residual = sum - sum;  // NaN
}

// Return true if ψ is at most `epsilons` machine epsilons of its terms.
inline bool is_at_rounding(const Equation &eq, const Point &point, double epsilons) {
    return point.residual <= epsilons * eq.rounding * point.scale;
}

// Solve M x = b by elimination with row exchanges. x replaces b; M is overwritten. Returns the
// determinant; x is invalid if it is zero or NaN.
template <int R> inline double eliminate(double (*M)[MAX_REFLECTIONS], double *b, int64_t r_) {
    const int r = rank_of<R>(r_);
    if (r == 1) {
        b[0] /= M[0][0];
        return M[0][0];
    }
    double determinant = 1;
    for (int i = 0; i < r; ++i) {
        int pivot = i;
        for (int j = i + 1; j < r; ++j)
            if (std::abs(M[j][i]) > std::abs(M[pivot][i])) pivot = j;
        if (pivot != i) {
            for (int j = 0; j < r; ++j) std::swap(M[i][j], M[pivot][j]);
            std::swap(b[i], b[pivot]);
            determinant = -determinant;
        }
        determinant *= M[i][i];
        for (int j = i + 1; j < r; ++j) {
            const double factor = M[j][i] / M[i][i];
            for (int l = i; l < r; ++l) M[j][l] -= factor * M[i][l];
            b[j] -= factor * b[i];
        }
    }
    for (int i = r - 1; i >= 0; --i) {
        for (int j = i + 1; j < r; ++j) b[i] -= M[i][j] * b[j];
        b[i] /= M[i][i];
    }
    return determinant;
}

// Compute M = I − φ′.
template <int R>
inline void identity_minus_slope(const Equation &eq, int64_t r_, const Point &point,
                                 double (*M)[MAX_REFLECTIONS]) {
    const int r = rank_of<R>(r_);
    const double inverse3 = point.inverse * point.inverse * point.inverse;
    for (int i = 0; i < r; ++i)
        for (int j = 0; j < r; ++j) {
            const double slope = eq.beta[i][j] * point.inverse - point.numerator[i] * point.slant[j] * inverse3;
            M[i][j] = (i == j) - slope;
        }
}

// Compute Newton's step (I − φ′)⁻¹ ψ.
template <int R>
inline void newton_step(const Equation &eq, int64_t r_, const Point &point, double *step) {
    const int r = rank_of<R>(r_);
    double M[MAX_REFLECTIONS][MAX_REFLECTIONS];
    identity_minus_slope<R>(eq, r, point, M);
    for (int i = 0; i < r; ++i) step[i] = point.psi[i];
    eliminate<R>(M, step, r);
}

// Return true if sufficiently damped Picard converges to the root from every point near it, that is, if
// all eigenvalues of M = I − φ′ have a positive real part. The characteristic polynomial det(λ + M)
// (Faddeev and LeVerrier) and Routh's array decide it.
template <int R> inline bool attracts(const Equation &eq, int64_t r_, const Point &point) {
    const int r = rank_of<R>(r_);
    double M[MAX_REFLECTIONS][MAX_REFLECTIONS], power[MAX_REFLECTIONS][MAX_REFLECTIONS];
    double next[MAX_REFLECTIONS][MAX_REFLECTIONS], coefficient[MAX_REFLECTIONS + 2] = {1};
    identity_minus_slope<R>(eq, r, point, M);
    if (r == 1) return M[0][0] > 0;
    for (int i = 0; i < r; ++i)
        for (int j = 0; j < r; ++j) power[i][j] = i == j;
    for (int k = 1; k <= r; ++k) {  // the coefficients of det(λ + M)
        double trace = 0;
        for (int i = 0; i < r; ++i)
            for (int j = 0; j < r; ++j) {
                next[i][j] = 0;
                for (int l = 0; l < r; ++l) next[i][j] -= M[i][l] * power[l][j];
                if (i == j) trace += next[i][j];
            }
        coefficient[k] = -trace / k;
        for (int i = 0; i < r; ++i)
            for (int j = 0; j < r; ++j) power[i][j] = next[i][j] + (i == j) * coefficient[k];
    }
    double upper_row[MAX_REFLECTIONS] = {}, lower_row[MAX_REFLECTIONS] = {};
    for (int j = 0; 2 * j <= r; ++j) {
        upper_row[j] = coefficient[2 * j];
        lower_row[j] = coefficient[2 * j + 1];
    }
    for (int k = 1; k <= r; ++k) {
        if (!(lower_row[0] > 0)) return false;
        for (int j = 0; j + 1 < MAX_REFLECTIONS; ++j) {
            const double next_entry = upper_row[j + 1] - upper_row[0] / lower_row[0] * lower_row[j + 1];
            upper_row[j] = lower_row[j];
            lower_row[j] = next_entry;
        }
    }
    return true;
}

}  // namespace
