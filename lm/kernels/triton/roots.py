"""The `roots` kernel for GPUs: solves the small equations of many tokens.

A token's equation s = φ(s) has r unknowns (lm/model/cell.py). Plain PyTorch searches for all roots
together, with some fifty small kernels for each of up to three hundred steps; here each program
finishes its own tokens. The search uses fp64, whatever the dtype of the coefficients: near a fold a
rounding error would select another root. It has the same steps as cell_root.h, except that two
reflections are searched for without a certificate, as more reflections are.

Shape suffixes: n tokens, r rank; T tokens of a program, R the power of two at or above r. An
`equation` is a tuple (α, Β, δ, γ0, γ1, Γ2, lower bound of the radicand) of T tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lm.kernels import Unsupported
from lm.kernels.checks import FAILED, roots_deviation
from lm.kernels.cpu.roots import BISECTED, MAX_RANK, Roots
from lm.kernels.triton import build as triton_build
from lm.kernels.triton.build import check, launch

# Constants with the names and values of lm/model/cell.py and its `Rule`; test_constants.py compares
# them. Triton 3.7's interpreter cannot multiply a constexpr by a tensor: put the tensor first.
MAX_PICARD_STEPS, MAX_NEWTON_STEPS, BISECTIONS = 300, 10, 60
MAX_DIRECT_STEPS, MAX_GAIN = tl.constexpr(12), tl.constexpr(20.0)
STEPSIZE, STEPSIZE_DECAY, PATIENCE = tl.constexpr(0.99), tl.constexpr(0.9), tl.constexpr(15)
MAX_PICARD_RATIO, MAX_NEWTON_DISTANCE = tl.constexpr(0.99), tl.constexpr(0.05)
MIN_INVERSE_NORM = tl.constexpr(1e-18)
ROUNDING, SOLVED = tl.constexpr(8.0), tl.constexpr(256.0)  # machine epsilons


def usable() -> tuple[bool, str]:
    """Return whether the kernel runs here, and the reason if not; see `usable` of build.py."""
    return triton_build.usable(_self_check)


def _self_check():
    return roots_deviation(find_roots, torch.float32)


@triton.jit
def _any(mask):
    """Return whether any entry of a mask (T,) is true."""
    return tl.max(mask.to(tl.int32), 0) > 0


@triton.jit
def _evaluate(s, equation):
    """Evaluate φ and the terms of its slope at s (T,R).

    Returns:
        ψ = φ(s) − s (T,R); α + Β s (T,R); γ1 + Γ2 s (T,R); 1/√… (T,); max |ψ| (T,), infinity if ψ
        is not finite; the magnitude of ψ's terms (T,), for rounding tests.
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
    """Solve M x = b by Gauss-Jordan elimination with row exchanges.

    Args:
        M: (T,R,R).
        b: (T,R).
        R: Size of the system.

    Returns:
        x (T,R).
    """
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

    The characteristic polynomial (Faddeev and LeVerrier) and Routh's array decide it.
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
        is_place = row == k // 2
        upper_row = tl.where(is_place & (k % 2 == 0), coefficient[:, None], upper_row)
        lower_row = tl.where(is_place & (k % 2 == 1), coefficient[:, None], lower_row)
    next_one = row[:, None, :] == row[:, :, None] + 1
    stable = tl.sum(M * 0.0, 2) == 0.0  # (T,R), False for NaN
    stable = tl.sum(stable.to(tl.int32), 1) == R
    for _ in range(R):
        first = tl.sum(tl.where(row == 0, lower_row, 0.0), 1)
        stable = stable & (first > 0.0)
        ratio = tl.sum(tl.where(row == 0, upper_row, 0.0), 1) / first
        shifted_upper = tl.sum(tl.where(next_one, upper_row[:, None, :], 0.0), 2)
        shifted_lower = tl.sum(tl.where(next_one, lower_row[:, None, :], 0.0), 2)
        upper_row = lower_row
        lower_row = shifted_upper - ratio[:, None] * shifted_lower
    return stable


@triton.jit
def _try_newton(
    s, tries_newton, residual, q, equation, eps, MAX_STEPS: tl.constexpr, R: tl.constexpr
):
    """Run Newton from points at which Picard contracts.

    Args:
        s: Points, (T,R).
        tries_newton: Which tokens to search for, (T,).
        residual: Residuals at s, (T,).
        q: Contraction of Picard, (T,).
        equation: The equations.
        eps: Machine epsilon of the coefficients, (T,).
        MAX_STEPS: Number of steps.
        R: Size of the equations.

    Returns:
        The last points (T,R), and whether each is a root to which Picard would converge (T,).
    """
    beta = equation[1]
    start = s
    max_move = (2.0 * residual / (1.0 - q))[:, None]
    has_root = tries_newton & (residual < 0.0)  # none yet
    psi, numerator, slant, inverse, current, scale = _evaluate(s, equation)
    M = _identity_minus_slope(beta, numerator, slant, inverse, R)
    attempts = 0
    while (attempts < MAX_STEPS) & _any(tries_newton):
        # 1. Take a step if it reduces the residual.
        ahead = s + _eliminate(M, psi, R)
        is_near = tl.sum((tl.abs(ahead - start) <= max_move).to(tl.int32), 1) == R
        tries_newton = tries_newton & is_near
        next_psi, numerator, slant, inverse, next_residual, next_scale = _evaluate(ahead, equation)
        is_halved = next_residual <= current / 2.0
        is_better = tries_newton & (is_halved | (next_residual < current))
        s = tl.where(is_better[:, None], ahead, s)
        psi = tl.where(is_better[:, None], next_psi, psi)
        M = tl.where(
            is_better[:, None, None], _identity_minus_slope(beta, numerator, slant, inverse, R), M
        )
        current = tl.where(is_better, next_residual, current)
        scale = tl.where(is_better, next_scale, scale)
        # 2. Check whether the point is a root, and whether the root attracts.
        no_better = (current <= eps * scale * SOLVED) & (is_halved == 0)
        is_at_rounding = (current <= eps * scale * ROUNDING) | no_better
        is_done = tries_newton & is_at_rounding
        if _any(is_done):
            has_root = has_root | (is_done & _attracts(M, R))
        tries_newton = tries_newton & is_halved & (is_done == 0)
        attempts += 1
    return s, has_root


@triton.jit
def _find_by_bisection(
    equation, eps, MAX_BISECTIONS: tl.constexpr, MAX_STEPS: tl.constexpr, R: tl.constexpr
):
    """Find roots by bisection of g = 1/√…, for which the equation is linear, and then by Newton.

    Returns:
        The points (T,R), and whether each is a root (T,).
    """
    eye = tl.arange(0, R)[None, :, None] == tl.arange(0, R)[None, None, :]
    eye = tl.where(eye, 1.0, 0.0)
    alpha, beta, delta, floor = equation[0], equation[1], equation[2], equation[6]
    low = floor * 0.0 + MIN_INVERSE_NORM
    high = 1.0 / tl.sqrt(floor)
    for _ in range(MAX_BISECTIONS):
        g = tl.sqrt(low * high)
        s = _eliminate(eye - g[:, None, None] * beta, g[:, None] * alpha + delta, R)
        _, _, _, inverse, _, _ = _evaluate(s, equation)
        is_below = inverse >= g  # NaN is above
        low = tl.where(is_below, g, low)
        high = tl.where(is_below, high, g)
    s = _eliminate(eye - low[:, None, None] * beta, low[:, None] * alpha + delta, R)
    is_active = low > 0.0
    for _ in range(MAX_STEPS):
        psi, numerator, slant, inverse, previous, scale = _evaluate(s, equation)
        ahead = s + _eliminate(_identity_minus_slope(beta, numerator, slant, inverse, R), psi, R)
        _, _, _, _, next_residual, _ = _evaluate(ahead, equation)
        is_active = is_active & (previous > eps * scale * ROUNDING) & (next_residual < previous)
        s = tl.where(is_active[:, None], ahead, s)
    _, _, _, _, residual, scale = _evaluate(s, equation)
    return s, residual <= eps * scale * SOLVED


@triton.jit
def _square(s, equation):
    """Return D(s) of one reflection. equation: seven tensors (T,)."""
    return equation[3] + s * (equation[4] + equation[4] + equation[5] * s)


@triton.jit
def _has_no_zero(c0, c1, c2, c3):
    """Return whether the Bernstein coefficients of cubics on [0, 1] have the same sign."""
    b1 = c0 * 3.0 + c1
    b2 = b1 + c1 + c2
    b3 = c0 + c1 + c2 + c3
    positive = (c0 > 0.0) & (b1 > 0.0) & (b2 > 0.0) & (b3 > 0.0)
    return positive | ((c0 < 0.0) & (b1 < 0.0) & (b2 < 0.0) & (b3 < 0.0))


@triton.jit
def _is_picards_root(equation, phi_0, root):
    """Return whether damped Picard from zero converges to a root (T,).

    It has the same steps as `is_picards_root` in lm/model/certified_root.py.
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
    rises = (n0 >= 0.0) & (n0 + n1 * r >= 0.0)
    falls = (rises == 0) & (n0 <= 0.0)
    max_phi = tl.where(rises, r, phi_0)
    stays_positive = rises
    if _any(rises == 0):
        turn = -n0 / n1
        at_turn = (alpha + beta * turn) / tl.sqrt(_square(turn, mirrored)) + delta
        max_phi = tl.where(rises | falls, max_phi, at_turn)
        # 2. Beyond the root φ falls, and not below zero.
        lowest = (alpha + beta * max_phi) / tl.sqrt(_square(max_phi, mirrored)) + delta
        stays_positive = rises | ((n0 + n1 * max_phi <= 0.0) & (r <= max_phi) & (lowest >= 0.0))
    # 3. D stays above its floor on [0, max_phi].
    vertex = -gamma1 / gamma2
    square_at_max = _square(max_phi, mirrored)
    min_square = tl.where(square_at_max < gamma0, square_at_max, gamma0)
    min_square = tl.where((vertex > 0.0) & (vertex < max_phi), gamma0 + gamma1 * vertex, min_square)
    # 4. There is no other root between 0 and this root.
    zero = -alpha / beta
    linear = r - delta
    cut_at_delta = (delta > phi_0) & (delta < r)
    cut_at_zero = (zero > phi_0) & (zero < r)
    cut = tl.where(cut_at_delta, delta, zero)
    w = tl.where(cut_at_delta == cut_at_zero, phi_0, cut) - r
    slant = gamma1 + gamma2 * r
    at_root = _square(r, mirrored)
    q0 = (linear * (linear * slant + at_root) - (alpha + beta * r) * beta) * 2.0
    q1 = linear * (linear * gamma2 + slant * 4.0) + at_root - beta * beta
    q2 = (linear * gamma2 + slant) * 2.0
    is_lowest = _has_no_zero(q0, q1 * w, q2 * w * w, gamma2 * w * w * w)
    is_lowest = is_lowest | falls | (phi_0 >= r)
    return (phi_0 > 0.0) & stays_positive & (min_square >= equation[6]) & is_lowest


@triton.jit
def _find_directly(equation, live, eps):
    """Find roots by Newton, and prove that they are Picard's.

    One loop serves both starting points: a token that Newton from zero has not solved starts again
    at the largest φ, or at the limit of φ.

    Args:
        equation: Seven tensors (T,).
        live: Which tokens exist, (T,).
        eps: Machine epsilon of the coefficients, (T,).

    Returns:
        The roots (T,), and whether each is proven to be Picard's (T,).
    """
    alpha, beta, delta, gamma0, gamma1, gamma2, floor = equation
    root = tl.zeros_like(gamma0)
    s = root
    proven = live & (root > 0.0)  # none yet
    is_active = live
    previous = root + float("inf")
    phi_0 = alpha / tl.sqrt(tl.where(gamma0 < floor, floor, gamma0)) + delta
    steps = (root * 0.0).to(tl.int32)  # since the last start
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
        is_halved = residual <= previous / 2.0
        no_better = (is_halved == 0) & (residual <= eps * scale * SOLVED)
        is_at_rounding = residual <= eps * scale * ROUNDING
        is_at_rounding = is_at_rounding & (residual < float("inf"))
        zero = is_active & is_at_rounding & (s == 0.0) & (is_second_start == 0)
        is_done = is_active & is_sound & (is_at_rounding | no_better) & (zero == 0)
        ahead = s + psi / one_minus_slope
        result = tl.where(one_minus_slope * MAX_GAIN >= 1.0, ahead, s)
        root = tl.where(is_done, result, root)
        proven = proven | zero
        if _any(is_done):
            proven = proven | (is_done & _is_picards_root(equation, phi_0, root))
        # 3. Continue, or restart from the second point.
        is_active = is_active & (proven == 0)
        stuck = is_active & (is_done | (is_sound == 0) | (steps == MAX_DIRECT_STEPS - 1))
        restarts = stuck & (is_second_start == 0)
        is_active = is_active & ((stuck & is_second_start) == 0)
        previous = tl.where(restarts, float("inf"), residual)
        s = ahead
        if _any(restarts):
            n0 = beta * gamma0 - alpha * gamma1
            n1 = beta * gamma1 - alpha * gamma2
            side = tl.where(phi_0 < 0.0, -1.0, 1.0)
            limit = delta + beta * side / tl.sqrt(gamma2)
            turn = -n0 / n1
            turns = (n0 > 0.0) & (turn * side > 0.0) & ((turn * side >= tl.abs(limit)) == 0)
            s = tl.where(restarts, tl.where(turns, turn, limit), s)
            is_second_start = is_second_start | restarts
        steps = tl.where(restarts, 0, steps + 1)
    return tl.where(proven, root, 0.0), proven


@triton.jit
def search(
    equation,
    live,
    eps,
    MAX_PICARD_STEPS: tl.constexpr,
    MAX_NEWTON_STEPS: tl.constexpr,
    BISECTIONS: tl.constexpr,
    R: tl.constexpr,
):
    """Find the roots to which damped Picard from zero converges.

    Args:
        equation: Equations of T tokens, in fp64.
        live: Which tokens exist, (T,).
        eps: Machine epsilon of the dtype in which the coefficients were computed, (T,).
        MAX_PICARD_STEPS: Steps of Picard.
        MAX_NEWTON_STEPS: Steps of Newton.
        BISECTIONS: Steps of the bisection.
        R: Size of the equations.

    Returns:
        The roots (T,R) in fp64; whether there is one (T,); whether Picard does not converge, so
        that the root comes from the bisection (T,).
    """
    # 1. With one reflection, Newton's root if it is proven to be Picard's. Otherwise damped Picard
    # from zero, shortened by Newton.
    s = tl.zeros_like(equation[0])
    root = s
    best_s = s
    zeros = tl.zeros_like(equation[3])  # (T,)
    best = zeros + float("inf")
    previous = best
    step = zeros + STEPSIZE
    stalled_steps = zeros.to(tl.int32)
    active = live
    is_solved = live & (zeros > 0)
    bisected = is_solved
    is_nonfinite = is_solved
    if R == 1:
        ones = (
            tl.sum(equation[0], 1),
            tl.sum(tl.sum(equation[1], 2), 1),
            tl.sum(equation[2], 1),
            equation[3],
            tl.sum(equation[4], 1),
            tl.sum(tl.sum(equation[5], 2), 1),
            equation[6],
        )
        direct, is_solved = _find_directly(ones, live, eps)
        root = direct[:, None]
        active = live & (is_solved == 0)
    iteration = 0
    while (iteration < MAX_PICARD_STEPS) & _any(active):
        psi, _, _, _, residual, scale = _evaluate(s, equation)
        done = active & (residual < float("inf")) & (residual <= eps * scale * ROUNDING)
        is_nonfinite = is_nonfinite | (active & (residual == float("inf")))
        active = active & (done == 0) & (is_nonfinite == 0)
        root = tl.where(done[:, None], s, root)
        q = residual / previous
        is_near = residual / (1.0 - q) <= scale * MAX_NEWTON_DISTANCE
        is_near = (q > 0.0) & (q < MAX_PICARD_RATIO) & is_near
        tries_newton = active & is_near
        if _any(tries_newton):
            ahead, has_root = _try_newton(
                s, tries_newton, residual, q, equation, eps, MAX_NEWTON_STEPS, R
            )
            root = tl.where(has_root[:, None], ahead, root)
            done = done | has_root
            active = active & (has_root == 0)
        is_solved = is_solved | done
        better = residual < best
        best = tl.where(better, residual, best)
        best_s = tl.where(better[:, None], s, best_s)
        stalled_steps = tl.where(better, 0, stalled_steps + 1)
        step = tl.where(stalled_steps >= PATIENCE, step * STEPSIZE_DECAY, step)
        stalled_steps = tl.where(stalled_steps >= PATIENCE, 0, stalled_steps)
        s = tl.where(active[:, None], s + step[:, None] * psi, s)
        previous = residual
        iteration += 1

    # 2. If Picard does not converge: bisection, or else the iterate with the smallest residual.
    if _any(active):
        bisection_root, has_root = _find_by_bisection(
            equation, eps, BISECTIONS, MAX_NEWTON_STEPS, R
        )
        fallback = tl.where(has_root[:, None], bisection_root, best_s)
        root = tl.where(active[:, None], fallback, root)
        bisected = bisected | (active & has_root)
    root = tl.where(is_nonfinite[:, None], float("nan"), root)
    return root, is_solved | bisected, bisected


@triton.jit
def _roots_kernel(
    alpha,  # in (n,r)
    beta,  # in (n,r,r)
    delta,  # in (n,r)
    gamma0,  # in (n,)
    gamma1,  # in (n,r)
    gamma2,  # in (n,r,r)
    out,  # out (n,r)
    outcome_out,  # out (n,) of uint8
    tokens,
    r,
    floor,
    eps,
    MAX_PICARD_STEPS: tl.constexpr,
    MAX_NEWTON_STEPS: tl.constexpr,
    BISECTIONS: tl.constexpr,
    FAILED: tl.constexpr,
    BISECTED: tl.constexpr,
    R: tl.constexpr,
    TOKENS: tl.constexpr,
):
    # 1. Load the equations; entries beyond r are zero, and so is their solution.
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    row = tl.arange(0, R)
    live = token < tokens
    mask = live[:, None] & (row < r)[None, :]
    offset = token[:, None] * r + row[None, :]
    matrix_mask = mask[:, :, None] & (row < r)[None, None, :]
    matrix_offset = offset[:, :, None] * r + row[None, None, :]
    alpha = tl.load(alpha + offset, mask=mask, other=0.0).to(tl.float64)
    delta = tl.load(delta + offset, mask=mask, other=0.0).to(tl.float64)
    gamma1 = tl.load(gamma1 + offset, mask=mask, other=0.0).to(tl.float64)
    beta = tl.load(beta + matrix_offset, mask=matrix_mask, other=0.0).to(tl.float64)
    gamma2 = tl.load(gamma2 + matrix_offset, mask=matrix_mask, other=0.0).to(tl.float64)
    gamma0 = tl.load(gamma0 + token, mask=live, other=1.0).to(tl.float64)
    floor = tl.zeros([TOKENS], tl.float64) + floor
    eps = tl.zeros([TOKENS], tl.float64) + eps

    # 2. Find the roots.
    equation = (alpha, beta, delta, gamma0, gamma1, gamma2, floor)
    root, has_root, bisected = search(
        equation, live, eps, MAX_PICARD_STEPS, MAX_NEWTON_STEPS, BISECTIONS, R
    )
    tl.store(out + offset, root.to(tl.float32), mask=mask)
    outcome = tl.where(has_root, tl.where(bisected, BISECTED, 0), FAILED)
    tl.store(outcome_out + token, outcome.to(tl.uint8), mask=live)


def find_roots(
    alpha: Tensor,
    beta: Tensor,
    delta: Tensor,
    gamma0: Tensor,
    gamma1: Tensor,
    gamma2: Tensor,
    floor: float,
) -> Roots:
    """Solve the equations of many tokens.

    Args:
        alpha: (n,r), as in `lm.kernels.cpu.roots.find_roots`. All tensors are on one GPU, in fp32,
            bf16 or fp16.
        beta: (n,r,r).
        delta: (n,r).
        gamma0: (n,).
        gamma1: (n,r).
        gamma2: (n,r,r).
        floor: Lower bound of the expression under the square root.

    Returns:
        The Roots; s is in fp32.

    Raises:
        TypeError: If tensors are not on one GPU.
        ValueError: If a shape is wrong.
        Unsupported: If a dtype is not supported, or if r is above 8.
    """
    n, r = alpha.shape
    if r > MAX_RANK:
        raise Unsupported(f"mixers of rank {r}: the Triton kernel solves up to {MAX_RANK}")
    check(
        alpha=(alpha, (n, r)),
        beta=(beta, (n, r, r)),
        delta=(delta, (n, r)),
        gamma0=(gamma0, (n,)),
        gamma1=(gamma1, (n, r)),
        gamma2=(gamma2, (n, r, r)),
    )
    inputs = [t.contiguous() for t in (alpha, beta, delta, gamma0, gamma1, gamma2)]
    width = triton.next_power_of_2(r)
    # One entry of a token's matrix per thread: in fp64 the registers do not hold more. With two
    # reflections two warps: ptxas spills 112 bytes per thread in programs of one warp.
    warps = 2 if width in (2, 8) else 1
    tokens = 32 * warps // width**2  # of a program
    s = alpha.new_empty((n, r), dtype=torch.float32)
    outcome = torch.empty(n, dtype=torch.uint8, device=alpha.device)
    launch(
        _roots_kernel,
        (triton.cdiv(n, tokens),),
        *inputs,
        s,
        outcome,
        n,
        r,
        float(floor),
        torch.finfo(alpha.dtype).eps,
        MAX_PICARD_STEPS=MAX_PICARD_STEPS,
        MAX_NEWTON_STEPS=MAX_NEWTON_STEPS,
        BISECTIONS=BISECTIONS,
        FAILED=FAILED,
        BISECTED=BISECTED,
        R=width,
        TOKENS=tokens,
        num_warps=warps,
    )
    return Roots(s, outcome)
