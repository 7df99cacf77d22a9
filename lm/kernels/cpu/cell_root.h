// The small equation of one token, s = φ(s) for r numbers: its root and its slope.
//
//   φ(s) = (α + Β s) / √(γ0 + 2 γ1·s + sᵀ Γ2 s) + δ
//
// Where it has several roots, the one that damped Picard from zero runs into is wanted. Newton's
// steps only shorten that way: they are taken where Picard already contracts and may not lead
// further than it could still go. In double whatever the kernel's type is: these are a few numbers
// a token, and near a fold a rounding decides which root is taken.

#pragma once

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

enum Outcome : uint8_t { FAILED = 1, BISECTED = 2, LIMITED = 4 };

// r, a constant where the code was made for one.
template <int R> inline int rank_of(int64_t r) { return R ? R : int(r); }

struct Equation {
    double alpha[MOST], beta[MOST][MOST], delta[MOST];
    double gamma0, gamma1[MOST], gamma2[MOST][MOST];
    double floor;     // of what is under the root
    double rounding;  // of the kernel's type
};

// φ and what Newton needs of it at one s.
struct Point {
    double s[MOST], psi[MOST];               // ψ = φ(s) − s
    double numerator[MOST], slant[MOST];     // α + Β s, γ1 + Γ2 s
    double inverse, residual, scale;         // 1/√…, max |ψ|, what rounding is measured against
};

template <int R> inline void evaluate(const Equation &e, int64_t r_, Point &at) {
    const int r = rank_of<R>(r_);
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

// Newton from a point where Picard contracts by q; whether it found what Picard would have.
template <int R>
inline bool shortcut(const Equation &e, int64_t r_, const Point &from, double q, Point &at) {
    const int r = rank_of<R>(r_);
    const double most = 2 * from.residual / (1 - q);
    double step[MOST];
    at = from;
    for (int tried = 0; tried < MOST_NEWTON; ++tried) {
        newton_step<R>(e, r, at, step);
        const double before = at.residual;
        Point next;
        for (int i = 0; i < r; ++i) {
            next.s[i] = at.s[i] + step[i];
            if (!(std::abs(next.s[i] - from.s[i]) <= most)) return false;
        }
        evaluate<R>(e, r, next);
        const bool halved = next.residual <= before / 2;
        if (halved || next.residual < before) at = next;
        const bool there = at_rounding(e, at, ROUNDING);
        if (there || (!halved && at_rounding(e, at, SOLVED))) return attracts<R>(e, r, at);
        if (!halved) return false;
    }
    return false;
}

// s of g = 1/sqrt(...): (I − gΒ)⁻¹ (gα + δ). Whether its own 1/sqrt(...) is below g.
template <int R> inline bool above(const Equation &e, int64_t r_, double g, Point &at) {
    const int r = rank_of<R>(r_);
    double M[MOST][MOST];
    for (int i = 0; i < r; ++i) {
        at.s[i] = g * e.alpha[i] + e.delta[i];
        for (int j = 0; j < r; ++j) M[i][j] = (i == j) - g * e.beta[i][j];
    }
    eliminate<R>(M, at.s, r);
    evaluate<R>(e, r, at);
    return !(at.inverse >= g);
}

// Where Picard has not converged: bisection of the one number g = 1/sqrt(γ0 + …), in which the
// equation is linear. g²(γ0 + …) is 0 at g = 0, at least 1 at the largest g, +∞ on both sides of a
// pole: a root always exists (lm/model/cell.py).
template <int R> inline bool last_resort(const Equation &e, int64_t r_, Point &at) {
    const int r = rank_of<R>(r_);
    double low = LEAST_INVERSE, high = 1 / std::sqrt(e.floor), step[MOST];
    for (int tried = 0; tried < BISECTIONS; ++tried) {
        const double middle = std::sqrt(low * high);
        (above<R>(e, r, middle, at) ? high : low) = middle;
    }
    above<R>(e, r, low, at);
    for (int tried = 0; tried < MOST_NEWTON && !at_rounding(e, at, ROUNDING); ++tried) {
        newton_step<R>(e, r, at, step);
        Point next;
        for (int i = 0; i < r; ++i) next.s[i] = at.s[i] + step[i];
        evaluate<R>(e, r, next);
        if (!(next.residual < at.residual)) break;
        at = next;
    }
    return at_rounding(e, at, SOLVED);
}

// Whether ‖(I − φ′)⁻¹‖ is above MOST_GAIN, or not known. M: I − φ′.
template <int R> inline bool limited(double (*M)[MOST], int64_t r_) {
    const int r = rank_of<R>(r_);
    double squares = 0;
    for (int j = 0; j < r; ++j) {
        double copy[MOST][MOST], column[MOST] = {};
        for (int i = 0; i < r; ++i)
            for (int l = 0; l < r; ++l) copy[i][l] = M[i][l];
        column[j] = 1;
        eliminate<R>(copy, column, r);
        for (int i = 0; i < r; ++i) squares += column[i] * column[i];
    }
    return !(squares <= MOST_GAIN * MOST_GAIN);
}

// The root into s, and FAILED where none was found: s is then the best that was met.
template <int R> inline uint8_t solve(const Equation &e, int64_t r_, double *s) {
    const int r = rank_of<R>(r_);
    double step = STEPSIZE, before = std::numeric_limits<double>::infinity();
    int waited = 0;
    Point at, best;
    for (int i = 0; i < r; ++i) at.s[i] = 0;
    best.residual = before;
    const auto take = [&](const Point &found) {
        for (int i = 0; i < r; ++i) s[i] = found.s[i];
    };
    for (int iteration = 0; iteration < MOST_PICARD; ++iteration) {
        evaluate<R>(e, r, at);
        if (at_rounding(e, at, ROUNDING)) return take(at), 0;
        if (!(at.residual <= std::numeric_limits<double>::max())) {  // NaN: so is the token
            return take(at), FAILED;
        }
        const double q = at.residual / before;
        // What is left of the way is short beside the terms: no other root can be as near.
        const bool near = at.residual / (1 - q) <= NEAR * at.scale;
        if (q > 0 && q < SLOWEST && near) {  // the first time q is 0
            Point found;
            if (shortcut<R>(e, r, at, q, found)) return take(found), 0;
        }
        if (at.residual < best.residual) {
            best = at;
            waited = 0;
        } else if (++waited >= PATIENCE) {
            step *= STEPSIZE_DECAY;
            waited = 0;
        }
        for (int i = 0; i < r; ++i) at.s[i] += step * at.psi[i];
        before = at.residual;
    }
    Point found = best;
    if (last_resort<R>(e, r, found)) return take(found), BISECTED;
    return take(best), FAILED;
}

// Without a norm φ is linear: s = (I − Β)⁻¹ α.
template <int R> inline uint8_t solve_linear(const Equation &e, int64_t r_, double *s) {
    const int r = rank_of<R>(r_);
    double M[MOST][MOST], sum = 0;
    for (int i = 0; i < r; ++i) {
        s[i] = e.alpha[i];
        for (int j = 0; j < r; ++j) M[i][j] = (i == j) - e.beta[i][j];
    }
    const double determinant = eliminate<R>(M, s, r);
    for (int i = 0; i < r; ++i) sum += s[i];
    const bool found = determinant != 0 && std::abs(sum) <= std::numeric_limits<double>::max();
    return found ? 0 : FAILED;
}

}  // namespace
