"""The `roots` kernel for GPUs: solves the small equations of many tokens.

A token's equation s = φ(s) = (α + Β s) / √D(s) + δ, D(s) = γ0 + 2 γ1·s + sᵀ Γ2 s, has r unknowns
(lm/model/cell.py). Plain PyTorch searches for all roots together, with some fifty small kernels for
each of up to three hundred steps; here each program finishes its own tokens.

Picard's root is the root to which damped Picard from zero converges. The search uses fp64 for any
dtype of the coefficients: near a fold, where two roots meet, a rounding error would select another
root. The search has the steps of cpu/cell_root.h, except that it proves that a root is Picard's
only for r = 1, not for r = 2.

ψ = φ(s) − s. An `equation` is the tuple (α, Β, δ, γ0, γ1, Γ2, lower bound of D) of T tokens.

Shape suffixes: n tokens, r rank; T tokens of a program, R the power of two at or above r.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from lm.kernels import cell_arguments
from lm.kernels.checks import roots_deviation
from lm.kernels.cpu.roots import Roots
from lm.kernels.triton import build as triton_build
from lm.kernels.triton.build import check, launch

# cell.py, certified_root.py and solver.py (`Rule`) of lm/model define and explain these constants;
# test_constants.py compares the values. Triton 3.7's interpreter cannot multiply a constexpr by a
# tensor: put the tensor first.
MAX_PICARD_STEPS, MAX_NEWTON_STEPS = tl.constexpr(300), tl.constexpr(10)
MAX_DIRECT_STEPS, BISECTIONS, MAX_GAIN = tl.constexpr(12), tl.constexpr(60), tl.constexpr(20.0)
STEPSIZE, STEPSIZE_DECAY, PATIENCE = tl.constexpr(0.99), tl.constexpr(0.9), tl.constexpr(15)
MAX_PICARD_RATIO, MAX_NEWTON_DISTANCE = tl.constexpr(0.99), tl.constexpr(0.05)
MIN_INVERSE_NORM = tl.constexpr(1e-18)
ROUNDING, SOLVED = tl.constexpr(8.0), tl.constexpr(256.0)  # machine epsilons
FAILED, BISECTED = tl.constexpr(cell_arguments.FAILED), tl.constexpr(cell_arguments.BISECTED)


def _self_check():
    return roots_deviation(find_roots, torch.float32)


usable = functools.partial(triton_build.usable, _self_check)


@triton.jit
def _any(mask):
    """Return whether any entry of a mask (T,) is true."""
    return tl.max(mask.to(tl.int32), 0) > 0


@triton.jit
def _evaluate(s, equation):
    """Evaluate φ and the terms of its slope at s (T,R).

    Returns:
        ψ (T,R); numerator α + Β s (T,R); slant γ1 + Γ2 s (T,R); inverse 1/√D (T,); residual max |ψ|
        (T,), infinity if ψ is not finite; scale, the magnitude of ψ's terms (T,), for rounding
        tests.
    """
    alpha, beta, delta, gamma0, gamma1, gamma2, floor = equation
    beta_s = tl.sum(beta * s[:, None, :], 2)
    slant = gamma1 + tl.sum(gamma2 * s[:, None, :], 2)
    radicand = gamma0 + tl.sum(s * (gamma1 + slant), 1)
    inverse = 1.0 / tl.sqrt(tl.where(radicand < floor, floor, radicand))
    numerator = alpha + beta_s
    psi = numerator * inverse[:, None] + delta - s
    size = (tl.abs(alpha) + tl.abs(beta_s)) * inverse[:, None] + tl.abs(delta) + tl.abs(s)
    is_finite = tl.abs(tl.sum(psi, 1)) < float("inf")  # tl.max would drop a NaN
    residual = tl.where(is_finite, tl.max(tl.abs(psi), 1), float("inf"))
    return psi, numerator, slant, inverse, residual, tl.max(size, 1)


@triton.jit
def _eliminate(M, b, R: tl.constexpr):
    """Solve M (T,R,R) x = b (T,R) by Gauss-Jordan elimination with row exchanges."""
    row = tl.arange(0, R)[None, :]
    column = tl.arange(0, R)[None, None, :]
    for k in range(R):
        # 1. Exchange row k and the row with the largest entry of column k.
        sizes = tl.abs(tl.sum(tl.where(column == k, M, 0.0), 2))
        eligible = (row >= k) & (sizes >= 0.0)  # False for NaN
        pivot_index = tl.argmax(tl.where(eligible, sizes, -1.0), 1)[:, None]
        pivot_row = tl.sum(tl.where((row == pivot_index)[:, :, None], M, 0.0), 1)
        other_row = tl.sum(tl.where((row == k)[:, :, None], M, 0.0), 1)
        pivot_b = tl.sum(tl.where(row == pivot_index, b, 0.0), 1)[:, None]
        other_b = tl.sum(tl.where(row == k, b, 0.0), 1)[:, None]
        M = tl.where((row == pivot_index)[:, :, None], other_row[:, None, :], M)
        M = tl.where((row == k)[:, :, None], pivot_row[:, None, :], M)
        b = tl.where(row == pivot_index, other_b, b)
        b = tl.where(row == k, pivot_b, b)
        # 2. Subtract row k from all other rows.
        pivot = tl.sum(tl.where(row == k, pivot_row, 0.0), 1)[:, None]
        factors = tl.sum(tl.where(column == k, M, 0.0), 2) / pivot
        factors = tl.where(row == k, 0.0, factors)
        M -= factors[:, :, None] * pivot_row[:, None, :]
        b -= factors * pivot_b
    diagonal = tl.sum(tl.where(row[:, :, None] == column, M, 0.0), 2)
    return b / diagonal


@triton.jit
def _identity_minus_slope(beta, numerator, slant, inverse, R: tl.constexpr):
    """Return I − φ′ (T,R,R)."""
    inverse = inverse[:, None, None]
    slope = beta * inverse - numerator[:, :, None] * slant[:, None, :] * inverse * inverse * inverse
    eye = tl.arange(0, R)[None, :, None] == tl.arange(0, R)[None, None, :]
    return tl.where(eye, 1.0, 0.0) - slope


@triton.jit
def _attracts(M, R: tl.constexpr):
    """Return whether all eigenvalues of M = I − φ′ have a positive real part (T,).

    They do if the first column of Routh's array is positive. The array is computed from the
    characteristic polynomial of −M, which the method of Faddeev and LeVerrier computes.
    """
    row = tl.arange(0, R)[None, :]
    eye = row[:, :, None] == row[:, None, :]
    # Adding M times zero gives the shape, and preserves NaN.
    power = tl.where(eye, 1.0, 0.0) + M * 0.0
    upper_row = tl.where(row == 0, 1.0, 0.0) + tl.sum(M, 2) * 0.0  # coefficients 0, 2, 4, …
    lower_row = tl.sum(M, 2) * 0.0  # 1, 3, 5, …
    for k in range(1, R + 1):
        product = -tl.sum(M[:, :, :, None] * power[:, None, :, :], 2)
        trace = tl.sum(tl.sum(tl.where(eye, product, 0.0), 2), 1)
        coefficient = -trace / k
        power = product + tl.where(eye, coefficient[:, None, None], 0.0)
        is_entry = row == k // 2
        upper_row = tl.where(is_entry & (k % 2 == 0), coefficient[:, None], upper_row)
        lower_row = tl.where(is_entry & (k % 2 == 1), coefficient[:, None], lower_row)
    is_next_entry = row[:, None, :] == row[:, :, None] + 1
    is_stable = tl.sum(M * 0.0, 2) == 0.0  # (T,R), False for NaN
    is_stable = tl.sum(is_stable.to(tl.int32), 1) == R
    for _ in range(R):
        first = tl.sum(tl.where(row == 0, lower_row, 0.0), 1)
        is_stable = is_stable & (first > 0.0)
        ratio = tl.sum(tl.where(row == 0, upper_row, 0.0), 1) / first
        shifted_upper = tl.sum(tl.where(is_next_entry, upper_row[:, None, :], 0.0), 2)
        shifted_lower = tl.sum(tl.where(is_next_entry, lower_row[:, None, :], 0.0), 2)
        upper_row = lower_row
        lower_row = shifted_upper - ratio[:, None] * shifted_lower
    return is_stable


@triton.jit
def _try_newton(s, tries_newton, residual, q, equation, eps, R: tl.constexpr):
    """Run Newton from points at which Picard contracts.

    Args:
        s: Points, (T,R).
        tries_newton: Mask of the tokens to solve, (T,).
        residual: Residuals at s, (T,).
        q: Ratio of the last two residuals of Picard, (T,).
        equation: The equations.
        eps: Machine epsilon of the coefficients, (T,).
        R: Size of the equations.

    Returns:
        The last points (T,R), and whether each is a root to which Picard would converge (T,).
    """
    beta = equation[1]
    start = s
    max_move = (2.0 * residual / (1.0 - q))[:, None]
    has_root = tries_newton & (residual < 0.0)  # none yet
    psi, numerator, slant, inverse, current_residual, scale = _evaluate(s, equation)
    M = _identity_minus_slope(beta, numerator, slant, inverse, R)
    step_count = 0
    while (step_count < MAX_NEWTON_STEPS) & _any(tries_newton):
        # 1. Take a step if it reduces the residual.
        ahead = s + _eliminate(M, psi, R)
        is_near = tl.sum((tl.abs(ahead - start) <= max_move).to(tl.int32), 1) == R
        tries_newton = tries_newton & is_near
        next_psi, numerator, slant, inverse, next_residual, next_scale = _evaluate(ahead, equation)
        is_halved = next_residual <= current_residual / 2.0
        is_better = tries_newton & (is_halved | (next_residual < current_residual))
        s = tl.where(is_better[:, None], ahead, s)
        psi = tl.where(is_better[:, None], next_psi, psi)
        M = tl.where(
            is_better[:, None, None], _identity_minus_slope(beta, numerator, slant, inverse, R), M
        )
        current_residual = tl.where(is_better, next_residual, current_residual)
        scale = tl.where(is_better, next_scale, scale)
        # 2. Check whether the point is a root, and whether the root attracts.
        is_stalled = (current_residual <= eps * scale * SOLVED) & (is_halved == 0)
        is_at_rounding = (current_residual <= eps * scale * ROUNDING) | is_stalled
        is_done = tries_newton & is_at_rounding
        if _any(is_done):
            has_root = has_root | (is_done & _attracts(M, R))
        tries_newton = tries_newton & is_halved & (is_done == 0)
        step_count += 1
    return s, has_root


@triton.jit
def _find_by_bisection(equation, eps, R: tl.constexpr):
    """Find roots by bisection of g = 1/√D, for which the equation is linear, and then by Newton.

    Returns:
        The points (T,R), and whether each is a root (T,).
    """
    eye = tl.arange(0, R)[None, :, None] == tl.arange(0, R)[None, None, :]
    eye = tl.where(eye, 1.0, 0.0)
    alpha, beta, delta, floor = equation[0], equation[1], equation[2], equation[6]
    low = floor * 0.0 + MIN_INVERSE_NORM
    high = 1.0 / tl.sqrt(floor)
    for _ in range(BISECTIONS):
        g = tl.sqrt(low * high)
        s = _eliminate(eye - g[:, None, None] * beta, g[:, None] * alpha + delta, R)
        _, _, _, inverse, _, _ = _evaluate(s, equation)
        is_below = inverse >= g  # NaN is above
        low = tl.where(is_below, g, low)
        high = tl.where(is_below, high, g)
    s = _eliminate(eye - low[:, None, None] * beta, low[:, None] * alpha + delta, R)
    is_active = low > 0.0
    for _ in range(MAX_NEWTON_STEPS):
        psi, numerator, slant, inverse, residual, scale = _evaluate(s, equation)
        ahead = s + _eliminate(_identity_minus_slope(beta, numerator, slant, inverse, R), psi, R)
        _, _, _, _, next_residual, _ = _evaluate(ahead, equation)
        is_active = is_active & (residual > eps * scale * ROUNDING) & (next_residual < residual)
        s = tl.where(is_active[:, None], ahead, s)
    _, _, _, _, residual, scale = _evaluate(s, equation)
    return s, residual <= eps * scale * SOLVED


@triton.jit
def _compute_radicand(s, equation):
    """Return D(s) of one reflection, (T,); all tensors of `equation` are (T,)."""
    return equation[3] + s * (equation[4] + equation[4] + equation[5] * s)


@triton.jit
def _has_no_zero(c0, c1, c2, c3):
    """Return whether c0 + c1 x + c2 x² + c3 x³ is proven to have no zero on [0, 1].

    The proof is that its Bernstein coefficients b have the same sign.
    """
    # b0 = c0; b1 and b2 are three times as large as the coefficients.
    b1 = c0 * 3.0 + c1
    b2 = b1 + c1 + c2
    b3 = c0 + c1 + c2 + c3
    is_positive = (c0 > 0.0) & (b1 > 0.0) & (b2 > 0.0) & (b3 > 0.0)
    return is_positive | ((c0 < 0.0) & (b1 < 0.0) & (b2 < 0.0) & (b3 < 0.0))


@triton.jit
def _is_picards_root(equation, phi_0, root):
    """Return whether damped Picard from zero converges to a root (T,).

    docs/proofs.md ("Newton's root and its proof") explains the steps. Equations with a negative
    root are mirrored, so that `r` = |root| is their root. n0 + n1 s has the sign of φ′(s).

    Args:
        equation: The equations.
        phi_0: φ(0), (T,).
        root: A root of each equation, (T,).
    """
    side = tl.where(root < 0.0, -1.0, 1.0)
    alpha = equation[0] * side
    beta = equation[1]
    delta = equation[2] * side
    gamma0 = equation[3]
    gamma1 = equation[4] * side
    gamma2 = equation[5]
    mirrored = (alpha, beta, delta, gamma0, gamma1, gamma2)
    r = root * side
    phi_0 = phi_0 * side
    n0 = beta * gamma0 - alpha * gamma1
    n1 = beta * gamma1 - alpha * gamma2
    # 1. The largest value of φ on [0, root].
    is_rising = (n0 >= 0.0) & (n0 + n1 * r >= 0.0)
    is_falling = (is_rising == 0) & (n0 <= 0.0)
    max_phi = tl.where(is_rising, r, phi_0)
    stays_positive = is_rising
    if _any(is_rising == 0):
        turn = -n0 / n1
        phi_at_turn = (alpha + beta * turn) / tl.sqrt(_compute_radicand(turn, mirrored)) + delta
        max_phi = tl.where(is_rising | is_falling, max_phi, phi_at_turn)
        # 2. Beyond the root φ falls, and not below zero.
        min_phi = (alpha + beta * max_phi) / tl.sqrt(_compute_radicand(max_phi, mirrored)) + delta
        stays_positive = is_rising | (
            (n0 + n1 * max_phi <= 0.0) & (r <= max_phi) & (min_phi >= 0.0)
        )
    # 3. D stays above its floor on [0, max_phi].
    vertex = -gamma1 / gamma2
    D_at_max = _compute_radicand(max_phi, mirrored)
    min_D = tl.where(D_at_max < gamma0, D_at_max, gamma0)
    min_D = tl.where((vertex > 0.0) & (vertex < max_phi), gamma0 + gamma1 * vertex, min_D)
    # 4. There is no other root between 0 and this root.
    zero = -alpha / beta
    linear = r - delta
    cuts_at_delta = (delta > phi_0) & (delta < r)
    cuts_at_zero = (zero > phi_0) & (zero < r)
    cut = tl.where(cuts_at_delta, delta, zero)
    w = tl.where(cuts_at_delta == cuts_at_zero, phi_0, cut) - r
    slant = gamma1 + gamma2 * r
    D_at_root = _compute_radicand(r, mirrored)
    q0 = (linear * (linear * slant + D_at_root) - (alpha + beta * r) * beta) * 2.0
    q1 = linear * (linear * gamma2 + slant * 4.0) + D_at_root - beta * beta
    q2 = (linear * gamma2 + slant) * 2.0
    is_lowest = _has_no_zero(q0, q1 * w, q2 * w * w, gamma2 * w * w * w)
    is_lowest = is_lowest | is_falling | (phi_0 >= r)
    return (phi_0 > 0.0) & stays_positive & (min_D >= equation[6]) & is_lowest


@triton.jit
def _find_directly(equation, is_token, eps):
    """Find roots by Newton, and prove that they are Picard's.

    One loop serves both starting points: a token that Newton from zero has not solved starts again
    at φ's extremum, or at φ's limit.

    Args:
        equation: Seven tensors (T,).
        is_token: Mask of the tokens that exist, (T,).
        eps: Machine epsilon of the coefficients, (T,).

    Returns:
        The roots (T,), and whether each is proven to be Picard's (T,).
    """
    alpha, beta, delta, gamma0, gamma1, gamma2, floor = equation
    root = tl.zeros_like(gamma0)
    s = root
    is_proven = is_token & (root > 0.0)  # none yet
    is_active = is_token
    previous_residual = root + float("inf")
    phi_0 = alpha / tl.sqrt(tl.where(gamma0 < floor, floor, gamma0)) + delta
    step_count = (root * 0.0).to(tl.int32)  # since the last start
    is_second_start = root > 0.0
    while _any(is_active):
        # 1. φ at s.
        slant = gamma1 + gamma2 * s
        radicand = gamma0 + s * (gamma1 + slant)
        inverse = 1.0 / tl.sqrt(tl.where(radicand < floor, floor, radicand))
        beta_s = beta * s
        numerator = alpha + beta_s
        psi = numerator * inverse + delta - s
        one_minus_slope = 1.0 - (beta * inverse - numerator * slant * (inverse * inverse * inverse))
        scale = (tl.abs(alpha) + tl.abs(beta_s)) * inverse + tl.abs(delta) + tl.abs(s)
        residual = tl.abs(psi)
        # 2. Check whether Newton has converged.
        is_sound = (one_minus_slope > 0.0) & (residual < float("inf"))
        is_halved = residual <= previous_residual / 2.0
        is_stalled = (is_halved == 0) & (residual <= eps * scale * SOLVED)
        is_at_rounding = residual <= eps * scale * ROUNDING
        is_at_rounding = is_at_rounding & (residual < float("inf"))
        is_zero_root = is_active & is_at_rounding & (s == 0.0) & (is_second_start == 0)
        is_done = is_active & is_sound & (is_at_rounding | is_stalled) & (is_zero_root == 0)
        ahead = s + psi / one_minus_slope
        candidate = tl.where(one_minus_slope * MAX_GAIN >= 1.0, ahead, s)
        root = tl.where(is_done, candidate, root)
        is_proven = is_proven | is_zero_root
        if _any(is_done):
            is_proven = is_proven | (is_done & _is_picards_root(equation, phi_0, root))
        # 3. Continue, or restart from the second point: φ's extremum or its limit.
        is_active = is_active & (is_proven == 0)
        is_stuck = is_active & (is_done | (is_sound == 0) | (step_count == MAX_DIRECT_STEPS - 1))
        needs_restart = is_stuck & (is_second_start == 0)
        is_active = is_active & ((is_stuck & is_second_start) == 0)
        previous_residual = tl.where(needs_restart, float("inf"), residual)
        s = ahead
        if _any(needs_restart):
            n0 = beta * gamma0 - alpha * gamma1  # n0 + n1 s has the sign of φ′(s)
            n1 = beta * gamma1 - alpha * gamma2
            side = tl.where(phi_0 < 0.0, -1.0, 1.0)
            limit = delta + beta * side / tl.sqrt(gamma2)
            turn = -n0 / n1
            has_turn = (n0 > 0.0) & (turn * side > 0.0) & ((turn * side >= tl.abs(limit)) == 0)
            s = tl.where(needs_restart, tl.where(has_turn, turn, limit), s)
            is_second_start = is_second_start | needs_restart
        step_count = tl.where(needs_restart, 0, step_count + 1)
    return tl.where(is_proven, root, 0.0), is_proven


@triton.jit
def search(equation, is_token, eps, R: tl.constexpr):
    """Find the roots to which damped Picard from zero converges.

    Args:
        equation: Equations of T tokens, in fp64.
        is_token: Mask of the tokens that exist, (T,).
        eps: Machine epsilon of the dtype in which the coefficients were computed, (T,).
        R: Size of the equations.

    Returns:
        The roots (T,R) in fp64; whether there is a root (T,); whether Picard does not converge, so
        that the root comes from the bisection (T,).
    """
    # 1. With one reflection, Newton's root if it is proven to be Picard's. Otherwise damped Picard
    # from zero, shortened by Newton.
    s = tl.zeros_like(equation[0])
    root = s
    best_s = s
    zeros = tl.zeros_like(equation[3])  # (T,)
    best_residual = zeros + float("inf")
    previous_residual = best_residual
    step = zeros + STEPSIZE
    stalled_steps = zeros.to(tl.int32)
    is_active = is_token
    is_solved = is_token & (zeros > 0)
    is_bisected = is_solved
    is_nonfinite = is_solved
    if R == 1:
        scalars = (
            tl.sum(equation[0], 1),
            tl.sum(tl.sum(equation[1], 2), 1),
            tl.sum(equation[2], 1),
            equation[3],
            tl.sum(equation[4], 1),
            tl.sum(tl.sum(equation[5], 2), 1),
            equation[6],
        )
        direct_root, is_solved = _find_directly(scalars, is_token, eps)
        root = direct_root[:, None]
        is_active = is_token & (is_solved == 0)
    iteration = 0
    while (iteration < MAX_PICARD_STEPS) & _any(is_active):
        psi, _, _, _, residual, scale = _evaluate(s, equation)
        is_done = is_active & (residual < float("inf")) & (residual <= eps * scale * ROUNDING)
        is_nonfinite = is_nonfinite | (is_active & (residual == float("inf")))
        is_active = is_active & (is_done == 0) & (is_nonfinite == 0)
        root = tl.where(is_done[:, None], s, root)
        q = residual / previous_residual
        contracts = (q > 0.0) & (q < MAX_PICARD_RATIO)
        is_near = residual / (1.0 - q) <= scale * MAX_NEWTON_DISTANCE
        tries_newton = is_active & contracts & is_near
        if _any(tries_newton):
            ahead, has_root = _try_newton(s, tries_newton, residual, q, equation, eps, R)
            root = tl.where(has_root[:, None], ahead, root)
            is_done = is_done | has_root
            is_active = is_active & (has_root == 0)
        is_solved = is_solved | is_done
        is_better = residual < best_residual
        best_residual = tl.where(is_better, residual, best_residual)
        best_s = tl.where(is_better[:, None], s, best_s)
        stalled_steps = tl.where(is_better, 0, stalled_steps + 1)
        step = tl.where(stalled_steps >= PATIENCE, step * STEPSIZE_DECAY, step)
        stalled_steps = tl.where(stalled_steps >= PATIENCE, 0, stalled_steps)
        s = tl.where(is_active[:, None], s + step[:, None] * psi, s)
        previous_residual = residual
        iteration += 1

    # 2. If Picard does not converge: bisection, or else the iterate with the smallest residual.
    if _any(is_active):
        bisection_root, has_root = _find_by_bisection(equation, eps, R)
        fallback = tl.where(has_root[:, None], bisection_root, best_s)
        root = tl.where(is_active[:, None], fallback, root)
        is_bisected = is_bisected | (is_active & has_root)
    root = tl.where(is_nonfinite[:, None], float("nan"), root)
    return root, is_solved | is_bisected, is_bisected


@triton.jit
def _roots_kernel(
    alpha,  # in (n,r)
    beta,  # in (n,r,r)
    delta,  # in (n,r)
    gamma0,  # in (n,)
    gamma1,  # in (n,r)
    gamma2,  # in (n,r,r)
    roots,  # out (n,r)
    outcomes,  # out (n,) of uint8
    n,
    r,
    floor,
    eps,
    R: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Solve the equations of TOKENS tokens; see `find_roots`."""
    # 1. Load the equations; entries beyond r are zero, and so is their solution.
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    row = tl.arange(0, R)
    is_token = token < n
    mask = is_token[:, None] & (row < r)[None, :]
    offset = token[:, None] * r + row[None, :]
    matrix_mask = mask[:, :, None] & (row < r)[None, None, :]
    matrix_offset = offset[:, :, None] * r + row[None, None, :]
    alpha = tl.load(alpha + offset, mask=mask, other=0.0).to(tl.float64)
    delta = tl.load(delta + offset, mask=mask, other=0.0).to(tl.float64)
    gamma1 = tl.load(gamma1 + offset, mask=mask, other=0.0).to(tl.float64)
    beta = tl.load(beta + matrix_offset, mask=matrix_mask, other=0.0).to(tl.float64)
    gamma2 = tl.load(gamma2 + matrix_offset, mask=matrix_mask, other=0.0).to(tl.float64)
    gamma0 = tl.load(gamma0 + token, mask=is_token, other=1.0).to(tl.float64)
    floor = tl.zeros([TOKENS], tl.float64) + floor
    eps = tl.zeros([TOKENS], tl.float64) + eps

    # 2. Find the roots.
    equation = (alpha, beta, delta, gamma0, gamma1, gamma2, floor)
    root, has_root, is_bisected = search(equation, is_token, eps, R)
    tl.store(roots + offset, root.to(tl.float32), mask=mask)
    outcome = tl.where(has_root, tl.where(is_bisected, BISECTED, 0), FAILED)
    tl.store(outcomes + token, outcome.to(tl.uint8), mask=is_token)


def find_roots(
    alpha: Tensor,
    beta: Tensor,
    delta: Tensor,
    gamma0: Tensor,
    gamma1: Tensor,
    gamma2: Tensor,
    floor: float,
) -> Roots:
    """Solve the equations of many tokens, with the arguments of `lm.kernels.cpu.roots.find_roots`.

    All tensors are on one GPU, in fp32, bf16 or fp16.

    Returns:
        The Roots; s is in fp32.

    Raises:
        TypeError: If tensors are not on one GPU.
        ValueError: If a shape is wrong.
        Unsupported: If a dtype is not supported, or if r is above 8.
    """
    n, r = alpha.shape
    cell_arguments.check_rank(r)
    check(
        alpha=(alpha, (n, r)),
        beta=(beta, (n, r, r)),
        delta=(delta, (n, r)),
        gamma0=(gamma0, (n,)),
        gamma1=(gamma1, (n, r)),
        gamma2=(gamma2, (n, r, r)),
    )
    inputs = [t.contiguous() for t in (alpha, beta, delta, gamma0, gamma1, gamma2)]
    padded_r = triton.next_power_of_2(r)
    # One entry of a token's matrix per thread: in fp64 the registers do not hold more. A matrix of
    # eight reflections fills two warps. With two reflections, programs of one warp would spill 112
    # bytes per thread.
    num_warps = 2 if padded_r in (2, 8) else 1
    program_tokens = 32 * num_warps // padded_r**2
    s = alpha.new_empty((n, r), dtype=torch.float32)
    outcome = torch.empty(n, dtype=torch.uint8, device=alpha.device)
    launch(
        _roots_kernel,
        (triton.cdiv(n, program_tokens),),
        *inputs,
        s,
        outcome,
        n,
        r,
        float(floor),
        torch.finfo(alpha.dtype).eps,
        R=padded_r,
        TOKENS=program_tokens,
        num_warps=num_warps,
    )
    return Roots(s, outcome)
