// Search for the root of a token's small equation (cell_equation.h).
//
// If there are several roots, the search returns the one to which damped Picard from zero converges.
// For one reflection it runs Newton first and proves that the root is Picard's (`find_directly`).
// Otherwise it runs Picard (`solve_by_picard`). Once Picard contracts, Newton's steps shorten it; they
// may not lead further than Picard could. For two reflections the search computes, after a few
// steps, all roots on Picard's side and selects one of them (`find_pair`).

#pragma once

#include <limits>

#include "cell_pair.h"

namespace {

// Run Newton from a point at which Picard contracts by q. Return true if it converges to a root to
// which Picard would converge as well.
template <int R>
inline bool try_newton(const Equation &eq, int64_t r_, const Point &from, double q, Point &point) {
    const int r = rank_of<R>(r_);
    const double max_move = 2 * from.residual / (1 - q);
    double step[MAX_REFLECTIONS];
    point = from;
    for (int attempt = 0; attempt < MAX_NEWTON_STEPS; ++attempt) {
        newton_step<R>(eq, r, point, step);
        const double previous = point.residual;
        Point next;
        for (int i = 0; i < r; ++i) {
            next.s[i] = point.s[i] + step[i];
            if (!(std::abs(next.s[i] - from.s[i]) <= max_move)) return false;
        }
        evaluate<R>(eq, r, next);
        const bool is_halved = next.residual <= previous / 2;
        if (is_halved || next.residual < previous) point = next;
        const bool is_solved = is_at_rounding(eq, point, ROUNDING);
        if (is_solved || (!is_halved && is_at_rounding(eq, point, SOLVED))) return attracts<R>(eq, r, point);
        if (!is_halved) return false;
    }
    return false;
}

// Compute s = (I − gΒ)⁻¹ (gα + δ) for a given g, which stands for 1/√(γ0 + …). Return true if 1/√(γ0 + …)
// at that s is below g or NaN.
template <int R> inline bool is_g_too_large(const Equation &eq, int64_t r_, double g, Point &point) {
    const int r = rank_of<R>(r_);
    double M[MAX_REFLECTIONS][MAX_REFLECTIONS];
    for (int i = 0; i < r; ++i) {
        point.s[i] = g * eq.alpha[i] + eq.delta[i];
        for (int j = 0; j < r; ++j) M[i][j] = (i == j) - g * eq.beta[i][j];
    }
    eliminate<R>(M, point.s, r);
    evaluate<R>(eq, r, point);
    return !(point.inverse >= g);
}

// Find a root by bisection if Picard does not converge. For a given g = 1/√(γ0 + …) the equation is
// linear, so that only the number g is searched. g²(γ0 + …) is 0 at g = 0, at least 1 at the largest
// g, and +∞ on both sides of a pole: a root always exists (lm/model/cell.py).
template <int R> inline bool find_by_bisection(const Equation &eq, int64_t r_, Point &point) {
    const int r = rank_of<R>(r_);
    double low = MIN_INVERSE_NORM, high = 1 / std::sqrt(eq.floor), step[MAX_REFLECTIONS];
    for (int attempt = 0; attempt < BISECTIONS; ++attempt) {
        const double middle = std::sqrt(low * high);
        (is_g_too_large<R>(eq, r, middle, point) ? high : low) = middle;
    }
    is_g_too_large<R>(eq, r, low, point);
    for (int attempt = 0; attempt < MAX_NEWTON_STEPS; ++attempt) {
        if (is_at_rounding(eq, point, ROUNDING)) break;
        newton_step<R>(eq, r, point, step);
        Point next;
        for (int i = 0; i < r; ++i) next.s[i] = point.s[i] + step[i];
        evaluate<R>(eq, r, next);
        if (!(next.residual < point.residual)) break;
        point = next;
    }
    return is_at_rounding(eq, point, SOLVED);
}

// Return true if the Frobenius norm of M⁻¹ is above MAX_GAIN or NaN; M is I − φ′.
template <int R> inline bool is_gain_limited(double (*M)[MAX_REFLECTIONS], int64_t r_) {
    const int r = rank_of<R>(r_);
    double squares = 0;
    for (int j = 0; j < r; ++j) {
        double copy[MAX_REFLECTIONS][MAX_REFLECTIONS], column[MAX_REFLECTIONS] = {};
        for (int i = 0; i < r; ++i)
            for (int l = 0; l < r; ++l) copy[i][l] = M[i][l];
        column[j] = 1;
        eliminate<R>(copy, column, r);
        for (int i = 0; i < r; ++i) squares += column[i] * column[i];
    }
    return !(squares <= MAX_GAIN * MAX_GAIN);
}

// From here to find_directly: one reflection. Newton finds a root, and a test proves that damped Picard
// from zero converges to it.
// docs/proofs.md ("Newton's root and its proof") explains the test. Notation:
// φ′ = (n0 + n1 s) / D(s)^(3/2) with D = γ0 + 2 γ1 s + γ2 s².

// Return true if the Bernstein coefficients of c0 + c1 x + c2 x² + c3 x³ on [0, 1] have the same
// sign: the polynomial then has no zero there.
inline bool has_no_zero(double c0, double c1, double c2, double c3) {
    const double b0 = 3 * c0, b1 = b0 + c1, b2 = b1 + c1 + c2, b3 = c0 + c1 + c2 + c3;
    return (b0 > 0 && b1 > 0 && b2 > 0 && b3 > 0) || (b0 < 0 && b1 < 0 && b2 < 0 && b3 < 0);
}

// Return true if damped Picard from zero converges to `root`, a root of ψ, with any step sizes in
// (0, 1].
inline bool is_picards_root(const Equation &eq, double phi_of_0, double root) {
    // Mirror the equation, so that the root is positive.
    const double side = root < 0 ? -1 : 1, r = side * root;
    const double alpha = side * eq.alpha[0], beta = eq.beta[0][0], delta = side * eq.delta[0];
    const double gamma0 = eq.gamma0, gamma1 = side * eq.gamma1[0], gamma2 = eq.gamma2[0][0];
    const double n0 = beta * gamma0 - alpha * gamma1, n1 = beta * gamma1 - alpha * gamma2;
    const auto D = [&](double s) { return gamma0 + s * (gamma1 + gamma1 + gamma2 * s); };
    const auto phi = [&](double s) {
        ++eq.evaluations;
        return (alpha + beta * s) / std::sqrt(D(s)) + delta;
    };
    const double phi_0 = side * phi_of_0;
    if (!(phi_0 > 0)) return false;
    // 1. The largest value of φ on [0, root]: no step leads beyond it.
    const bool is_rising = n0 >= 0 && n0 + n1 * r >= 0;
    double max_phi = r;
    if (!is_rising) max_phi = n0 > 0 ? phi(-n0 / n1) : phi_0;
    // 2. Beyond the root φ falls, and not below zero: no step leads below zero.
    if (!is_rising && !(n0 + n1 * max_phi <= 0 && r <= max_phi && phi(max_phi) >= 0)) return false;
    // 3. D stays above its floor on [0, max_phi].
    const double vertex = -gamma1 / gamma2;
    double min_D = std::min(gamma0, D(max_phi));
    if (vertex > 0 && vertex < max_phi) min_D = gamma0 + gamma1 * vertex;
    if (!(min_D >= eq.floor)) return false;
    // 4. There is no other root between 0 and this root. If φ falls there, this is certain. Otherwise
    // φ is at least φ(0) on [0, root], so that another root would be in [φ(0), root]. It would be a
    // zero of the quartic (s − δ)² D − (α + β s)² at which s − δ and α + β s have the same sign, so
    // that intervals with different signs are excluded. With s = root + t the quartic is
    // t (q0 + q1 t + q2 t² + q3 t³).
    if ((!is_rising && n0 <= 0) || phi_0 >= r) return true;
    const double zero = -alpha / beta;
    const double linear = r - delta, numerator = alpha + beta * r;  // s − δ and α + β s at the root
    const bool cuts_at_delta = delta > phi_0 && delta < r, cuts_at_zero = zero > phi_0 && zero < r;
    const double low = cuts_at_delta == cuts_at_zero ? phi_0 : cuts_at_delta ? delta : zero;
    const double w = low - r;
    const double slant = gamma1 + gamma2 * r, D_at_root = D(r);
    const double q0 = 2 * (linear * (linear * slant + D_at_root) - numerator * beta);
    const double q1 = linear * (linear * gamma2 + 2 * (slant + slant)) + D_at_root - beta * beta;
    const double q2 = 2 * (linear * gamma2 + slant), q3 = gamma2;
    return has_no_zero(q0, q1 * w, q2 * w * w, q3 * w * w * w);
}

// Run Newton from a point; return true if it converged to a root.
inline bool newton_from(const Equation &eq, Point point, double &root) {
    double previous = std::numeric_limits<double>::infinity();
    for (int attempt = 0; attempt < MAX_DIRECT_STEPS; ++attempt) {
        double M[1][MAX_REFLECTIONS];
        identity_minus_slope<1>(eq, 1, point, M);
        if (!(M[0][0] > 0 && point.residual <= std::numeric_limits<double>::max())) return false;
        const double next = point.s[0] + point.psi[0] / M[0][0];
        const bool is_halved = point.residual <= previous / 2;
        if (is_at_rounding(eq, point, ROUNDING) || (!is_halved && is_at_rounding(eq, point, SOLVED))) {
            root = M[0][0] * MAX_GAIN >= 1 ? next : point.s[0];
            return true;
        }
        previous = point.residual;
        point.s[0] = next;
        evaluate<1>(eq, 1, point);
    }
    return false;
}

// Run Newton from zero and, if necessary, from a second point. Return true if the root is proven to
// be Picard's.
inline bool find_directly(const Equation &eq, double &root) {
    Point point;
    point.s[0] = root = 0;
    evaluate<1>(eq, 1, point);
    if (is_at_rounding(eq, point, ROUNDING)) return true;
    const double psi_0 = point.psi[0], side = psi_0 < 0 ? -1 : 1;
    if (newton_from(eq, point, root) && is_picards_root(eq, psi_0, root)) return true;
    // The second point is the extremum of φ on the same side, or the limit of φ if it is nearer to 0.
    const double alpha = eq.alpha[0], beta = eq.beta[0][0], gamma1 = eq.gamma1[0];
    const double n0 = beta * eq.gamma0 - alpha * gamma1, n1 = beta * gamma1 - alpha * eq.gamma2[0][0];
    const double turn = -n0 / n1, limit = eq.delta[0] + side * beta / std::sqrt(eq.gamma2[0][0]);
    const bool has_turn = n0 > 0 && turn * side > 0 && !(turn * side >= std::abs(limit));
    point.s[0] = has_turn ? turn : limit;
    evaluate<1>(eq, 1, point);
    return newton_from(eq, point, root) && is_picards_root(eq, psi_0, root);
}

// Run Picard from zero and write the root into s. Return the outcome; after FAILED, s is the iterate
// with the smallest residual. DECIDES: for two reflections, try `find_pair` after DECIDE_AFTER steps.
template <int R, bool DECIDES = false>
inline uint8_t solve_by_picard(const Equation &eq, int64_t r_, double *s) {
    const int r = rank_of<R>(r_);
    double step = STEPSIZE, previous = std::numeric_limits<double>::infinity();
    int stalled_steps = 0;
    Point point, best;
    for (int i = 0; i < r; ++i) point.s[i] = 0;
    best.residual = previous;
    const auto set_root = [&](const Point &candidate) {
        for (int i = 0; i < r; ++i) s[i] = candidate.s[i];
    };
    for (int iteration = 0; iteration < MAX_PICARD_STEPS; ++iteration) {
        if constexpr (R == 2 && DECIDES) {
            bool is_attracting;
            if (iteration == DECIDE_AFTER && find_pair(eq, s, is_attracting))
                return is_attracting ? 0 : BISECTED;
        }
        evaluate<R>(eq, r, point);
        if (is_at_rounding(eq, point, ROUNDING)) return set_root(point), 0;
        if (!(point.residual <= std::numeric_limits<double>::max())) {  // NaN or infinity: no step can help
            return set_root(point), FAILED;
        }
        const double q = point.residual / previous;
        // The remaining distance is small compared with the terms of φ: no other root is that near.
        const bool is_near = point.residual / (1 - q) <= MAX_NEWTON_DISTANCE * point.scale;
        if (q > 0 && q < MAX_PICARD_RATIO && is_near) {  // in the first iteration q is 0
            Point candidate;
            if (try_newton<R>(eq, r, point, q, candidate)) return set_root(candidate), 0;
        }
        if (point.residual < best.residual) {
            best = point;
            stalled_steps = 0;
        } else if (++stalled_steps >= PATIENCE) {
            step *= STEPSIZE_DECAY;
            stalled_steps = 0;
        }
        for (int i = 0; i < r; ++i) point.s[i] += step * point.psi[i];
        previous = point.residual;
    }
    Point candidate = best;
    if (find_by_bisection<R>(eq, r, candidate)) return set_root(candidate), BISECTED;
    return set_root(best), FAILED;
}

// Write the root to which Picard converges into s, and return the outcome; see `solve_by_picard`.
template <int R> inline uint8_t solve(const Equation &eq, int64_t r, double *s) {
    if constexpr (R == 1)
        if (find_directly(eq, s[0])) return 0;
    return solve_by_picard<R, true>(eq, r, s);
}

// Solve the equation of a layer without a norm, for which φ is linear: s = (I − Β)⁻¹ α.
template <int R> inline uint8_t solve_linear(const Equation &eq, int64_t r_, double *s) {
    const int r = rank_of<R>(r_);
    double M[MAX_REFLECTIONS][MAX_REFLECTIONS], sum = 0;
    for (int i = 0; i < r; ++i) {
        s[i] = eq.alpha[i];
        for (int j = 0; j < r; ++j) M[i][j] = (i == j) - eq.beta[i][j];
    }
    const double determinant = eliminate<R>(M, s, r);
    for (int i = 0; i < r; ++i) sum += s[i];
    const bool is_solved = determinant != 0 && std::abs(sum) <= std::numeric_limits<double>::max();
    return is_solved ? 0 : FAILED;
}

}  // namespace
