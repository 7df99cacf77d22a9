// The root of a token's small equation (cell_equation.h).
//
// Where it has several roots, the search returns the one to which damped Picard from zero converges.
// For one reflection it runs Newton first, and proves that the root is Picard's (`find_directly`).
// Otherwise it runs Picard (`solve_by_picard`), which Newton shortens: Newton's steps are taken where
// Picard already contracts, and may not lead further than Picard could. For two reflections, after a
// few steps, it finds all roots on Picard's side and decides among them (`find_pair`).

#pragma once

#include <limits>

#include "cell_pair.h"

namespace {

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

// One reflection: Newton's root, and a proof that damped Picard from zero would have come to it.
// docs/proofs.md ("Newton's root and its proof") has the proof; φ′ = (n0 + n1 s) / D(s)^(3/2)
// with D = γ0 + 2 γ1 s + γ2 s².

// Return true if the Bernstein coefficients of c0 + c1 x + c2 x² + c3 x³ on [0, 1] have one sign:
// then it has no zero there.
inline bool has_no_zero(double c0, double c1, double c2, double c3) {
    const double b0 = 3 * c0, b1 = b0 + c1, b2 = b1 + c1 + c2, b3 = c0 + c1 + c2 + c3;
    return (b0 > 0 && b1 > 0 && b2 > 0 && b3 > 0) || (b0 < 0 && b1 < 0 && b2 < 0 && b3 < 0);
}

// Return true if damped Picard from zero converges to `root`, a root of ψ, with any step sizes in
// (0, 1].
inline bool is_picards_root(const Equation &e, double phi_of_0, double root) {
    // Mirrored, so that the root is positive.
    const double side = root < 0 ? -1 : 1, r = side * root;
    const double alpha = side * e.alpha[0], beta = e.beta[0][0], delta = side * e.delta[0];
    const double gamma0 = e.gamma0, gamma1 = side * e.gamma1[0], gamma2 = e.gamma2[0][0];
    const double n0 = beta * gamma0 - alpha * gamma1, n1 = beta * gamma1 - alpha * gamma2;
    const auto square = [&](double s) { return gamma0 + s * (gamma1 + gamma1 + gamma2 * s); };
    const auto phi = [&](double s) {
        ++e.evaluations;
        return (alpha + beta * s) / std::sqrt(square(s)) + delta;
    };
    const double phi_0 = side * phi_of_0;
    if (!(phi_0 > 0)) return false;
    // 1. The largest value of φ on [0, root]: no step leads beyond it.
    const bool rises = n0 >= 0 && n0 + n1 * r >= 0;
    double most = r;
    if (!rises) most = n0 > 0 ? phi(-n0 / n1) : phi_0;
    // 2. Beyond the root φ falls, and not below zero: no step leads below zero.
    if (!rises && !(n0 + n1 * most <= 0 && r <= most && phi(most) >= 0)) return false;
    // 3. D stays above its floor on [0, most].
    const double vertex = -gamma1 / gamma2;
    double least = std::min(gamma0, square(most));
    if (vertex > 0 && vertex < most) least = gamma0 + gamma1 * vertex;
    if (!(least >= e.floor)) return false;
    // 4. There is no other root below. Where φ falls there is none. Otherwise φ is at least φ(0)
    // below the root, so that another one would lie in [φ(0), root]. It would be a root of the quartic
    // (s − δ)² D − (α + β s)² where s − δ and α + β s have one sign: where they have not, nothing
    // needs to be shown. With s = root + t the quartic is t (q0 + q1 t + q2 t² + q3 t³).
    if ((!rises && n0 <= 0) || phi_0 >= r) return true;
    const double zero = -alpha / beta, left = r - delta, top = alpha + beta * r;
    const bool cut_at_delta = delta > phi_0 && delta < r, cut_at_zero = zero > phi_0 && zero < r;
    const double low = cut_at_delta == cut_at_zero ? phi_0 : cut_at_delta ? delta : zero;
    const double w = low - r;
    const double slant = gamma1 + gamma2 * r, at_root = square(r);
    const double q0 = 2 * (left * (left * slant + at_root) - top * beta);
    const double q1 = left * (left * gamma2 + 2 * (slant + slant)) + at_root - beta * beta;
    const double q2 = 2 * (left * gamma2 + slant), q3 = gamma2;
    return has_no_zero(q0, q1 * w, q2 * w * w, q3 * w * w * w);
}

// Run Newton from a point; return true if it converged to a root.
inline bool newton_from(const Equation &e, Point at, double &root) {
    double before = std::numeric_limits<double>::infinity();
    for (int tried = 0; tried < MAX_DIRECT_STEPS; ++tried) {
        double rest[1][MOST];
        rest_of<1>(e, 1, at, rest);
        if (!(rest[0][0] > 0 && at.residual <= std::numeric_limits<double>::max())) return false;
        const double next = at.s[0] + at.psi[0] / rest[0][0];
        const bool halved = at.residual <= before / 2;
        if (at_rounding(e, at, ROUNDING) || (!halved && at_rounding(e, at, SOLVED))) {
            root = rest[0][0] * MOST_GAIN >= 1 ? next : at.s[0];
            return true;
        }
        before = at.residual;
        at.s[0] = next;
        evaluate<1>(e, 1, at);
    }
    return false;
}

// Find the root by Newton, from zero and then from further out; return whether it is proven to be
// Picard's.
inline bool find_directly(const Equation &e, double &root) {
    Point at;
    at.s[0] = root = 0;
    evaluate<1>(e, 1, at);
    if (at_rounding(e, at, ROUNDING)) return true;
    const double psi_0 = at.psi[0], side = psi_0 < 0 ? -1 : 1;
    if (newton_from(e, at, root) && is_picards_root(e, psi_0, root)) return true;
    // The second start: the point of the largest φ on that side, or its limit if that is nearer.
    const double alpha = e.alpha[0], beta = e.beta[0][0], gamma1 = e.gamma1[0];
    const double n0 = beta * e.gamma0 - alpha * gamma1, n1 = beta * gamma1 - alpha * e.gamma2[0][0];
    const double turn = -n0 / n1, limit = e.delta[0] + side * beta / std::sqrt(e.gamma2[0][0]);
    const bool turns = n0 > 0 && turn * side > 0 && !(turn * side >= std::abs(limit));
    at.s[0] = turns ? turn : limit;
    evaluate<1>(e, 1, at);
    return newton_from(e, at, root) && is_picards_root(e, psi_0, root);
}

// The root by Picard, into s, and FAILED where none was found: s is then the best that was met.
// DECIDES: for two reflections, `find_pair` decides after DECIDE_AFTER steps if it can.
template <int R, bool DECIDES = false>
inline uint8_t solve_by_picard(const Equation &e, int64_t r_, double *s) {
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
        if constexpr (R == 2 && DECIDES) {
            bool is_attracting;
            if (iteration == DECIDE_AFTER && find_pair(e, s, is_attracting))
                return is_attracting ? 0 : BISECTED;
        }
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

// The root that Picard runs into, into s, and its outcome; see `solve_by_picard`.
template <int R> inline uint8_t solve(const Equation &e, int64_t r, double *s) {
    if constexpr (R == 1)
        if (find_directly(e, s[0])) return 0;
    return solve_by_picard<R, true>(e, r, s);
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
