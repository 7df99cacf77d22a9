"""The roots of tokens' own equations in Triton, one program for several tokens.

A token's equation s = φ(s) is r numbers large (lm/model/cell.py). Plain PyTorch searches for all
roots together, with some fifty small kernels for each of up to three hundred steps; here a program
takes its tokens to the end by itself. All is computed in fp64, whatever is read: near a fold a
rounding decides which root is taken. The search is the one of cell_root.h, step for step, without
its certificate for two reflections: they are searched for as more reflections are.

Shape suffixes: n tokens, r rank; T tokens of a program, R the power of two at or above r. An
`equation` is (α, Β, δ, γ0, γ1, Γ2, the floor of the square) of T tokens.
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

# The constants of lm/model/cell.py, under its names, and of its `Rule`: see test_constants.py.
# Triton 3.7's interpreter cannot multiply a constexpr by a tensor: the tensor stands first.
MOST_PICARD, MOST_NEWTON, BISECTIONS = 300, 10, 60
MAX_DIRECT_STEPS, MOST_GAIN = tl.constexpr(12), tl.constexpr(20.0)
STEPSIZE, STEPSIZE_DECAY, PATIENCE = tl.constexpr(0.99), tl.constexpr(0.9), tl.constexpr(15)
SLOWEST, NEAR, LEAST_INVERSE = tl.constexpr(0.99), tl.constexpr(0.05), tl.constexpr(1e-18)
ROUNDING, SOLVED = tl.constexpr(8.0), tl.constexpr(256.0)  # machine epsilons


def usable() -> tuple[bool, str]:
    """Return whether it runs here, and the reason if it does not; see `usable` of build.py."""
    return triton_build.usable(_self_check)


def _self_check():
    return roots_deviation(find_roots, torch.float32)


@triton.jit
def _any(mask):
    return tl.max(mask.to(tl.int32), 0) > 0


@triton.jit
def _evaluate(s, equation):
    """Of φ at s (T,R): ψ = φ(s) − s, α + Β s, γ1 + Γ2 s, 1/√…, max |ψ| (infinite where ψ is not
    finite), and what rounding is measured against."""
    alpha, beta, delta, gamma0, gamma1, gamma2, floor = equation
    moved = tl.sum(beta * s[:, None, :], 2)
    slant = gamma1 + tl.sum(gamma2 * s[:, None, :], 2)
    under = gamma0 + tl.sum(s * (gamma1 + slant), 1)
    inverse = 1.0 / tl.sqrt(tl.where(under < floor, floor, under))
    numerator = alpha + moved
    psi = numerator * inverse[:, None] + delta - s
    size = (tl.abs(alpha) + tl.abs(moved)) * inverse[:, None] + tl.abs(delta) + tl.abs(s)
    finite = tl.abs(tl.sum(psi, 1)) < float("inf")  # tl.max would drop a NaN
    residual = tl.where(finite, tl.max(tl.abs(psi), 1), float("inf"))
    return psi, numerator, slant, inverse, residual, tl.max(size, 1)


@triton.jit
def _eliminate(M, b, R: tl.constexpr):
    """x (T,R) with M x = b, by Gauss and Jordan with row exchanges. M: (T,R,R), b: (T,R)."""
    row = tl.arange(0, R)[None, :]
    column = tl.arange(0, R)[None, None, :]
    for k in range(R):
        # 1. The row with the largest entry of column k comes to place k.
        sizes = tl.abs(tl.sum(tl.where(column == k, M, 0.0), 2))
        eligible = (row >= k) & (sizes >= 0.0)  # no NaN
        at = tl.argmax(tl.where(eligible, sizes, -1.0), 1)[:, None]
        pivot_row = tl.sum(tl.where((row == at)[:, :, None], M, 0.0), 1)
        other_row = tl.sum(tl.where((row == k)[:, :, None], M, 0.0), 1)
        pivot_b = tl.sum(tl.where(row == at, b, 0.0), 1)[:, None]
        other_b = tl.sum(tl.where(row == k, b, 0.0), 1)[:, None]
        M = tl.where((row == at)[:, :, None], other_row[:, None, :], M)
        M = tl.where((row == k)[:, :, None], pivot_row[:, None, :], M)
        b = tl.where(row == at, other_b, b)
        b = tl.where(row == k, pivot_b, b)
        # 2. It is taken from all others.
        pivot = tl.sum(tl.where(row == k, pivot_row, 0.0), 1)[:, None]
        times = tl.sum(tl.where(column == k, M, 0.0), 2) / pivot
        times = tl.where(row == k, 0.0, times)
        M -= times[:, :, None] * pivot_row[:, None, :]
        b -= times * pivot_b
    diagonal = tl.sum(tl.where(row[:, :, None] == column, M, 0.0), 2)
    return b / diagonal


@triton.jit
def _rest(beta, numerator, slant, inverse, R: tl.constexpr):
    """I − φ′ (T,R,R)."""
    inverse = inverse[:, None, None]
    slope = beta * inverse - numerator[:, :, None] * slant[:, None, :] * inverse * inverse * inverse
    eye = tl.arange(0, R)[None, :, None] == tl.arange(0, R)[None, None, :]
    return tl.where(eye, 1.0, 0.0) - slope


@triton.jit
def _attracts(M, R: tl.constexpr):
    """Whether all eigenvalues of M = I − φ′ have a positive real part (T,): by the characteristic
    polynomial (Faddeev and LeVerrier) and Routh's array."""
    row = tl.arange(0, R)[None, :]
    eye = row[:, :, None] == row[:, None, :]
    # What is added times zero gives the shape, and keeps a NaN.
    power = tl.where(eye, 1.0, 0.0) + M * 0.0
    above = tl.where(row == 0, 1.0, 0.0) + tl.sum(M, 2) * 0.0  # coefficients 0, 2, 4, …
    below = tl.sum(M, 2) * 0.0  # 1, 3, 5, …
    for k in range(1, R + 1):
        product = -tl.sum(M[:, :, :, None] * power[:, None, :, :], 2)
        trace = tl.sum(tl.sum(tl.where(eye, product, 0.0), 2), 1)
        coefficient = -trace / k
        power = product + tl.where(eye, coefficient[:, None, None], 0.0)
        here = row == k // 2
        above = tl.where(here & (k % 2 == 0), coefficient[:, None], above)
        below = tl.where(here & (k % 2 == 1), coefficient[:, None], below)
    next_one = row[:, None, :] == row[:, :, None] + 1
    stable = tl.sum(M * 0.0, 2) == 0.0  # (T,R) True but for NaN
    stable = tl.sum(stable.to(tl.int32), 1) == R
    for _ in range(R):
        first = tl.sum(tl.where(row == 0, below, 0.0), 1)
        stable = stable & (first > 0.0)
        ratio = tl.sum(tl.where(row == 0, above, 0.0), 1) / first
        shifted = tl.sum(tl.where(next_one, above[:, None, :], 0.0), 2)
        from_below = tl.sum(tl.where(next_one, below[:, None, :], 0.0), 2)
        above = below
        below = shifted - ratio[:, None] * from_below
    return stable


@triton.jit
def _shortcut(s, trying, residual, q, equation, eps, MOST: tl.constexpr, R: tl.constexpr):
    """Newton from s (T,R), where Picard contracts by q (T,) → where it came to, and whether (T,)
    that is what Picard would have found."""
    beta = equation[1]
    start = s
    most = (2.0 * residual / (1.0 - q))[:, None]
    found = trying & (residual < 0.0)  # none yet
    psi, numerator, slant, inverse, now, scale = _evaluate(s, equation)
    M = _rest(beta, numerator, slant, inverse, R)
    tries = 0
    while (tries < MOST) & _any(trying):
        # 1. A step, which is taken where it comes closer.
        ahead = s + _eliminate(M, psi, R)
        near = tl.sum((tl.abs(ahead - start) <= most).to(tl.int32), 1) == R
        trying = trying & near
        psi_there, numerator, slant, inverse, after, scale_there = _evaluate(ahead, equation)
        halved = after <= now / 2.0
        taken = trying & (halved | (after < now))
        s = tl.where(taken[:, None], ahead, s)
        psi = tl.where(taken[:, None], psi_there, psi)
        M = tl.where(taken[:, None, None], _rest(beta, numerator, slant, inverse, R), M)
        now = tl.where(taken, after, now)
        scale = tl.where(taken, scale_there, scale)
        # 2. Whether that is a root, and one that attracts.
        no_better = (now <= eps * scale * SOLVED) & (halved == 0)
        at_rounding = (now <= eps * scale * ROUNDING) | no_better
        ended = trying & at_rounding
        if _any(ended):
            found = found | (ended & _attracts(M, R))
        trying = trying & halved & (ended == 0)
        tries += 1
    return s, found


@triton.jit
def _last_resort(equation, eps, MOST_TRIES: tl.constexpr, MOST: tl.constexpr, R: tl.constexpr):
    """A root by bisection of g = 1/√…, in which the equation is linear, polished by Newton; and
    whether (T,) it is one."""
    eye = tl.arange(0, R)[None, :, None] == tl.arange(0, R)[None, None, :]
    eye = tl.where(eye, 1.0, 0.0)
    alpha, beta, delta, floor = equation[0], equation[1], equation[2], equation[6]
    low = floor * 0.0 + LEAST_INVERSE
    high = 1.0 / tl.sqrt(floor)
    for _ in range(MOST_TRIES):
        g = tl.sqrt(low * high)
        s = _eliminate(eye - g[:, None, None] * beta, g[:, None] * alpha + delta, R)
        _, _, _, inverse, _, _ = _evaluate(s, equation)
        below = inverse >= g  # NaN is above
        low = tl.where(below, g, low)
        high = tl.where(below, high, g)
    s = _eliminate(eye - low[:, None, None] * beta, low[:, None] * alpha + delta, R)
    going = low > 0.0
    for _ in range(MOST):
        psi, numerator, slant, inverse, before, scale = _evaluate(s, equation)
        moved = s + _eliminate(_rest(beta, numerator, slant, inverse, R), psi, R)
        _, _, _, _, after, _ = _evaluate(moved, equation)
        going = going & (before > eps * scale * ROUNDING) & (after < before)
        s = tl.where(going[:, None], moved, s)
    _, _, _, _, residual, scale = _evaluate(s, equation)
    return s, residual <= eps * scale * SOLVED


@triton.jit
def _square(s, equation):
    """D(s) of one reflection. equation: seven tensors (T,)."""
    return equation[3] + s * (equation[4] + equation[4] + equation[5] * s)


@triton.jit
def _has_no_zero(c0, c1, c2, c3):
    """Whether the Bernstein coefficients of a cubic on [0, 1] have one sign."""
    b1 = c0 * 3.0 + c1
    b2 = b1 + c1 + c2
    b3 = c0 + c1 + c2 + c3
    positive = (c0 > 0.0) & (b1 > 0.0) & (b2 > 0.0) & (b3 > 0.0)
    return positive | ((c0 < 0.0) & (b1 < 0.0) & (b2 < 0.0) & (b3 < 0.0))


@triton.jit
def _is_picards_root(equation, phi_0, root):
    """Whether damped Picard from zero comes to a root (T,): lm/model/certified_root.py, step for
    step."""
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
    most = tl.where(rises, r, phi_0)
    stays = rises
    if _any(rises == 0):
        turn = -n0 / n1
        at_turn = (alpha + beta * turn) / tl.sqrt(_square(turn, mirrored)) + delta
        most = tl.where(rises | falls, most, at_turn)
        # 2. Beyond the root φ falls, and not below zero.
        lowest = (alpha + beta * most) / tl.sqrt(_square(most, mirrored)) + delta
        stays = rises | ((n0 + n1 * most <= 0.0) & (r <= most) & (lowest >= 0.0))
    # 3. D stays above its floor on [0, most].
    vertex = -gamma1 / gamma2
    at_most = _square(most, mirrored)
    least = tl.where(at_most < gamma0, at_most, gamma0)
    least = tl.where((vertex > 0.0) & (vertex < most), gamma0 + gamma1 * vertex, least)
    # 4. There is no other root below.
    zero = -alpha / beta
    left = r - delta
    cut_at_delta = (delta > phi_0) & (delta < r)
    cut_at_zero = (zero > phi_0) & (zero < r)
    cut = tl.where(cut_at_delta, delta, zero)
    w = tl.where(cut_at_delta == cut_at_zero, phi_0, cut) - r
    slant = gamma1 + gamma2 * r
    at_root = _square(r, mirrored)
    q0 = (left * (left * slant + at_root) - (alpha + beta * r) * beta) * 2.0
    q1 = left * (left * gamma2 + slant * 4.0) + at_root - beta * beta
    q2 = (left * gamma2 + slant) * 2.0
    is_lowest = _has_no_zero(q0, q1 * w, q2 * w * w, gamma2 * w * w * w)
    is_lowest = is_lowest | falls | (phi_0 >= r)
    return (phi_0 > 0.0) & stays & (least >= equation[6]) & is_lowest


@triton.jit
def _find_directly(equation, live, eps):
    """The roots by Newton (T,), and whether each is proven to be Picard's. equation: seven tensors
    (T,). One loop serves both starts: a token that Newton from zero has not solved begins again
    where φ is largest, or at its limit."""
    alpha, beta, delta, gamma0, gamma1, gamma2, floor = equation
    root = tl.zeros_like(gamma0)
    s = root
    proven = live & (root > 0.0)  # none yet
    going = live
    before = root + float("inf")
    phi_0 = alpha / tl.sqrt(tl.where(gamma0 < floor, floor, gamma0)) + delta
    steps = (root * 0.0).to(tl.int32)  # from the present start
    second = root > 0.0
    while _any(going):
        # 1. φ at s.
        slant = gamma1 + gamma2 * s
        under = gamma0 + s * (gamma1 + slant)
        inverse = 1.0 / tl.sqrt(tl.where(under < floor, floor, under))
        moved = beta * s
        numerator = alpha + moved
        psi = numerator * inverse + delta - s
        rest = 1.0 - (beta * inverse - numerator * slant * (inverse * inverse * inverse))
        scale = (tl.abs(alpha) + tl.abs(moved)) * inverse + tl.abs(delta) + tl.abs(s)
        residual = tl.abs(psi)
        # 2. Whether Newton is there.
        sound = (rest > 0.0) & (residual < float("inf"))
        halved = residual <= before / 2.0
        no_better = (halved == 0) & (residual <= eps * scale * SOLVED)
        at_rounding = residual <= eps * scale * ROUNDING
        at_rounding = at_rounding & (residual < float("inf"))
        zero = going & at_rounding & (s == 0.0) & (second == 0)
        ended = going & sound & (at_rounding | no_better) & (zero == 0)
        ahead = s + psi / rest
        there = tl.where(rest * MOST_GAIN >= 1.0, ahead, s)
        root = tl.where(ended, there, root)
        proven = proven | zero
        if _any(ended):
            proven = proven | (ended & _is_picards_root(equation, phi_0, root))
        # 3. On; or from the second start.
        going = going & (proven == 0)
        stuck = going & (ended | (sound == 0) | (steps == MAX_DIRECT_STEPS - 1))
        again = stuck & (second == 0)
        going = going & ((stuck & second) == 0)
        before = tl.where(again, float("inf"), residual)
        s = ahead
        if _any(again):
            n0 = beta * gamma0 - alpha * gamma1
            n1 = beta * gamma1 - alpha * gamma2
            side = tl.where(phi_0 < 0.0, -1.0, 1.0)
            limit = delta + beta * side / tl.sqrt(gamma2)
            turn = -n0 / n1
            turns = (n0 > 0.0) & (turn * side > 0.0) & ((turn * side >= tl.abs(limit)) == 0)
            s = tl.where(again, tl.where(turns, turn, limit), s)
            second = second | again
        steps = tl.where(again, 0, steps + 1)
    return tl.where(proven, root, 0.0), proven


@triton.jit
def search(
    equation,
    live,
    eps,
    MOST_PICARD: tl.constexpr,
    MOST_NEWTON: tl.constexpr,
    BISECTIONS: tl.constexpr,
    R: tl.constexpr,
):
    """Find the root that damped Picard from zero converges to.

    Args:
        equation: Of T tokens, in fp64.
        live: Which tokens there are, (T,).
        eps: Machine epsilon of the dtype in which the coefficients were computed, (T,).

    Returns:
        The roots (T,R) in fp64; whether (T,) there is one; and whether (T,) Picard does not
        converge, so that a root found by bisection stands in its place.
    """
    # 1. With one reflection Newton's root, if it is proven to be Picard's. Otherwise damped Picard
    # from zero, shortened by Newton.
    s = tl.zeros_like(equation[0])
    root = s
    best_s = s
    none = tl.zeros_like(equation[3])  # (T,)
    best = none + float("inf")
    before = best
    step = none + STEPSIZE
    waited = none.to(tl.int32)
    active = live
    solved = live & (none > 0)
    bisected = solved
    lost = solved
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
        direct, solved = _find_directly(ones, live, eps)
        root = direct[:, None]
        active = live & (solved == 0)
    iteration = 0
    while (iteration < MOST_PICARD) & _any(active):
        psi, _, _, _, residual, scale = _evaluate(s, equation)
        done = active & (residual < float("inf")) & (residual <= eps * scale * ROUNDING)
        lost = lost | (active & (residual == float("inf")))
        active = active & (done == 0) & (lost == 0)
        root = tl.where(done[:, None], s, root)
        q = residual / before
        near = (q > 0.0) & (q < SLOWEST) & (residual / (1.0 - q) <= scale * NEAR)
        trying = active & near
        if _any(trying):
            ahead, found = _shortcut(s, trying, residual, q, equation, eps, MOST_NEWTON, R)
            root = tl.where(found[:, None], ahead, root)
            done = done | found
            active = active & (found == 0)
        solved = solved | done
        better = residual < best
        best = tl.where(better, residual, best)
        best_s = tl.where(better[:, None], s, best_s)
        waited = tl.where(better, 0, waited + 1)
        step = tl.where(waited >= PATIENCE, step * STEPSIZE_DECAY, step)
        waited = tl.where(waited >= PATIENCE, 0, waited)
        s = tl.where(active[:, None], s + step[:, None] * psi, s)
        before = residual
        iteration += 1

    # 2. Where that has found nothing: bisection, or the best that was met.
    if _any(active):
        last, found = _last_resort(equation, eps, BISECTIONS, MOST_NEWTON, R)
        chosen = tl.where(found[:, None], last, best_s)
        root = tl.where(active[:, None], chosen, root)
        bisected = bisected | (active & found)
    root = tl.where(lost[:, None], float("nan"), root)
    return root, solved | bisected, bisected


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
    MOST_PICARD: tl.constexpr,
    MOST_NEWTON: tl.constexpr,
    BISECTIONS: tl.constexpr,
    FAILED: tl.constexpr,
    BISECTED: tl.constexpr,
    R: tl.constexpr,
    TOKENS: tl.constexpr,
):
    # 1. The equations; what is beyond r is zero, and stays where it is.
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    row = tl.arange(0, R)
    live = token < tokens
    some = live[:, None] & (row < r)[None, :]
    at = token[:, None] * r + row[None, :]
    all_of = some[:, :, None] & (row < r)[None, None, :]
    at_all = at[:, :, None] * r + row[None, None, :]
    alpha = tl.load(alpha + at, mask=some, other=0.0).to(tl.float64)
    delta = tl.load(delta + at, mask=some, other=0.0).to(tl.float64)
    gamma1 = tl.load(gamma1 + at, mask=some, other=0.0).to(tl.float64)
    beta = tl.load(beta + at_all, mask=all_of, other=0.0).to(tl.float64)
    gamma2 = tl.load(gamma2 + at_all, mask=all_of, other=0.0).to(tl.float64)
    gamma0 = tl.load(gamma0 + token, mask=live, other=1.0).to(tl.float64)
    floor = tl.zeros([TOKENS], tl.float64) + floor
    eps = tl.zeros([TOKENS], tl.float64) + eps

    # 2. The roots.
    equation = (alpha, beta, delta, gamma0, gamma1, gamma2, floor)
    root, found, bisected = search(equation, live, eps, MOST_PICARD, MOST_NEWTON, BISECTIONS, R)
    tl.store(out + at, root.to(tl.float32), mask=some)
    outcome = tl.where(found, tl.where(bisected, BISECTED, 0), FAILED)
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
    """As `lm.kernels.cpu.roots.find_roots`; s in fp32.

    Raises:
        TypeError, ValueError: devices, shapes. Unsupported: dtypes, rank.
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
    given = [t.contiguous() for t in (alpha, beta, delta, gamma0, gamma1, gamma2)]
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
        *given,
        s,
        outcome,
        n,
        r,
        float(floor),
        torch.finfo(alpha.dtype).eps,
        MOST_PICARD=MOST_PICARD,
        MOST_NEWTON=MOST_NEWTON,
        BISECTIONS=BISECTIONS,
        FAILED=FAILED,
        BISECTED=BISECTED,
        R=width,
        TOKENS=tokens,
        num_warps=warps,
    )
    return Roots(s, outcome)
