// The small equation of one token, s = φ(s) for r numbers: its value and its slope.
//
//   φ(s) = (α + Β s) / √(γ0 + 2 γ1·s + sᵀ Γ2 s) + δ
//
// In double, whatever the kernel's type is: these are a few numbers for each token, and near a fold
// a rounding decides which root is taken.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace {

constexpr int MOST = 8;  // reflections; as in cpu_cell.py

// The constants of lm/model/cell.py, under its names, and of lm/model/solver.py (`Rule`, outcomes).
// tests/lm/kernels/test_constants.py compares them.
constexpr int MOST_PICARD = 300, MOST_NEWTON = 10, BISECTIONS = 60, PATIENCE = 15;
constexpr double STEPSIZE = 0.99, STEPSIZE_DECAY = 0.9, SLOWEST = 0.99, NEAR = 0.05;
constexpr double ROUNDING = 8, SOLVED = 256, LEAST_INVERSE = 1e-18, MOST_GAIN = 20;
constexpr int MAX_DIRECT_STEPS = 12;

enum Outcome : uint8_t { FAILED = 1, BISECTED = 2, GRAD_LIMITED = 4 };

// r, a constant where the code was made for one.
template <int R> inline int rank_of(int64_t r) { return R ? R : int(r); }

struct Equation {
    double alpha[MOST], beta[MOST][MOST], delta[MOST];
    double gamma0, gamma1[MOST], gamma2[MOST][MOST];
    double floor;     // of what is under the root
    double rounding;  // of the kernel's type
    mutable int32_t evaluations = 0;  // of φ, for benchmarks/root_search.py
};

// φ and what Newton needs of it at one s.
struct Point {
    double s[MOST], psi[MOST];               // ψ = φ(s) − s
    double numerator[MOST], slant[MOST];     // α + Β s, γ1 + Γ2 s
    double inverse, residual, scale;         // 1/√…, max |ψ|, what rounding is measured against
};

template <int R> inline void evaluate(const Equation &e, int64_t r_, Point &at) {
    const int r = rank_of<R>(r_);
    ++e.evaluations;
    double under = e.gamma0;
    for (int i = 0; i < r; ++i) {
        double slant = e.gamma1[i];
        for (int j = 0; j < r; ++j) slant += e.gamma2[i][j] * at.s[j];
        at.slant[i] = slant;
        under += at.s[i] * (e.gamma1[i] + slant);
    }
    at.inverse = 1 / std::sqrt(under < e.floor ? e.floor : under);
    at.residual = at.scale = 0;
    double sum = 0;  // NaN where one ψ is
    for (int i = 0; i < r; ++i) {
        double numerator = e.alpha[i], size = std::abs(e.alpha[i]);
        double moved = 0;
        for (int j = 0; j < r; ++j) moved += e.beta[i][j] * at.s[j];
        numerator += moved;
        size = (size + std::abs(moved)) * at.inverse + std::abs(e.delta[i]) + std::abs(at.s[i]);
        at.numerator[i] = numerator;
        at.psi[i] = numerator * at.inverse + e.delta[i] - at.s[i];
        sum += at.psi[i];
        const double off = std::abs(at.psi[i]);
        at.residual = off > at.residual ? off : at.residual;
        at.scale = size > at.scale ? size : at.scale;
    }
    if (!(std::abs(sum) <= std::numeric_limits<double>::max())) at.residual = sum - sum;  // NaN
}

inline bool at_rounding(const Equation &e, const Point &at, double times) {
    return at.residual <= times * e.rounding * at.scale;
}

// x with M x = b by elimination with row exchanges, in place of b; the determinant. M is overwritten.
// Where that is zero or NaN, x is not to be used.
template <int R> inline double eliminate(double (*M)[MOST], double *b, int64_t r_) {
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
            const double times = M[j][i] / M[i][i];
            for (int l = i; l < r; ++l) M[j][l] -= times * M[i][l];
            b[j] -= times * b[i];
        }
    }
    for (int i = r - 1; i >= 0; --i) {
        for (int j = i + 1; j < r; ++j) b[i] -= M[i][j] * b[j];
        b[i] /= M[i][i];
    }
    return determinant;
}

// I − φ′.
template <int R>
inline void rest_of(const Equation &e, int64_t r_, const Point &at, double (*M)[MOST]) {
    const int r = rank_of<R>(r_);
    const double inverse3 = at.inverse * at.inverse * at.inverse;
    for (int i = 0; i < r; ++i)
        for (int j = 0; j < r; ++j) {
            const double slope = e.beta[i][j] * at.inverse - at.numerator[i] * at.slant[j] * inverse3;
            M[i][j] = (i == j) - slope;
        }
}

// Newton's step (I − φ′)⁻¹ ψ.
template <int R>
inline void newton_step(const Equation &e, int64_t r_, const Point &at, double *step) {
    const int r = rank_of<R>(r_);
    double M[MOST][MOST];
    rest_of<R>(e, r, at, M);
    for (int i = 0; i < r; ++i) step[i] = at.psi[i];
    eliminate<R>(M, step, r);
}

// Whether Picard, damped enough, comes nearer from all around: all eigenvalues of I − φ′ have a
// positive real part. By the characteristic polynomial (Faddeev and LeVerrier) and Routh's array.
template <int R> inline bool attracts(const Equation &e, int64_t r_, const Point &at) {
    const int r = rank_of<R>(r_);
    double M[MOST][MOST], power[MOST][MOST], next[MOST][MOST], coefficient[MOST + 2] = {1};
    rest_of<R>(e, r, at, M);
    if (r == 1) return M[0][0] > 0;
    for (int i = 0; i < r; ++i)
        for (int j = 0; j < r; ++j) power[i][j] = i == j;
    for (int k = 1; k <= r; ++k) {  // of det(λ + M): all eigenvalues of −M left of the axis
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
    double above[MOST] = {}, row[MOST] = {};
    for (int j = 0; 2 * j <= r; ++j) {
        above[j] = coefficient[2 * j];
        row[j] = coefficient[2 * j + 1];
    }
    for (int k = 1; k <= r; ++k) {
        if (!(row[0] > 0)) return false;
        for (int j = 0; j + 1 < MOST; ++j) {
            const double below = above[j + 1] - above[0] / row[0] * row[j + 1];
            above[j] = row[j];
            row[j] = below;
        }
    }
    return true;
}

}  // namespace
