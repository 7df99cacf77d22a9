"""One token of the exact recurrence in Triton, forwards and back: what kernels are made of.

A program holds one token whole: vectors of d channels, r reflections as tiles (r,d), the small
equation. The equations are those of lm/kernels/cpu/cpu_cell.py, the search that of roots.py. All is
computed in fp32 and the search in fp64, whatever is read.

Shape suffixes: D the power of two at or above d, R that at or above r; g groups, n states.
"""

import triton
import triton.language as tl

from lm.kernels.triton.build import activate, activate_grad
from lm.kernels.triton.roots import BISECTIONS as MOST_BISECTIONS
from lm.kernels.triton.roots import MOST_NEWTON as MOST_NEWTON_STEPS
from lm.kernels.triton.roots import MOST_PICARD as MOST_PICARD_STEPS
from lm.kernels.triton.roots import _eliminate, _evaluate, _rest, search

MOST_PICARD = tl.constexpr(MOST_PICARD_STEPS)
MOST_NEWTON = tl.constexpr(MOST_NEWTON_STEPS)
BISECTIONS = tl.constexpr(MOST_BISECTIONS)
FAILED, BISECTED, GRAD_LIMITED = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)  # solver.py
MOST_GAIN = tl.constexpr(20.0)  # as in lm/model/cell.py
EPS = tl.constexpr(2.0**-23)  # of fp32


# Small matrices and tiles.


@triton.jit
def row_of(tile, i: tl.constexpr, R: tl.constexpr):
    """Row i of a tile (R,·)."""
    here = tl.arange(0, R)[:, None] == i
    return tl.sum(tl.where(here, tile, 0.0), 0)


@triton.jit
def column_of(matrix, j: tl.constexpr, R: tl.constexpr):
    """Column j of a matrix (R,R)."""
    here = tl.arange(0, R)[None, :] == j
    return tl.sum(tl.where(here, matrix, 0.0), 1)


@triton.jit
def entry_of(vector, i: tl.constexpr, R: tl.constexpr):
    """Entry i of a vector (R,)."""
    return tl.sum(tl.where(tl.arange(0, R) == i, vector, 0.0), 0)


@triton.jit
def apply(matrix, vector):
    """matrix · vector, (R,)."""
    return tl.sum(matrix * vector[None, :], 1)


@triton.jit
def apply_transposed(matrix, vector):
    """matrixᵀ · vector, (R,)."""
    return tl.sum(matrix * vector[:, None], 0)


@triton.jit
def combine(vector, tile):
    """Σ_i vector_i tile_i, (D,)."""
    return tl.sum(tile * vector[:, None], 0)


@triton.jit
def products(a, b, R: tl.constexpr):
    """a_i · b_j of the rows of two tiles (R,D): (R,R)."""
    found = tl.zeros([R, R], tl.float32)
    column = tl.arange(0, R)[None, :]
    for j in tl.static_range(R):
        dots = tl.sum(a * row_of(b, j, R)[None, :], 1)
        found = tl.where(column == j, dots[:, None], found)
    return found


@triton.jit
def rows_combined(matrix, tile, R: tl.constexpr):
    """matrixᵀ · tile, (R,D)."""
    found = tl.zeros_like(tile)
    row = tl.arange(0, R)[:, None]
    for j in tl.static_range(R):
        found = tl.where(row == j, combine(column_of(matrix, j, R), tile)[None, :], found)
    return found


@triton.jit
def at_least(length, eps):
    """max(length, eps); NaN stays NaN."""
    return tl.where(length < eps, eps, length)


# The reflections of a token.


@triton.jit
def reflections(
    row, x, col, live, d, r, vectors, gates, scale, eps, kappa,
    ACT: tl.constexpr, SEQUENTIAL: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """What I − Q is made of. row: where the token's row begins. x: (D,) what is mixed.

    Returns: u (R,D); before act and nrm (R,D); their lengths (R,); the gates a (R,); u_i · u_j
    (R,R) where one follows another; T before and after `contractive` (R,R), and its factor; U x
    (R,).
    """
    i = tl.arange(0, R)
    there = i < r
    some = there[:, None] & live[None, :]
    before = tl.load(row + vectors + i[:, None] * d + col[None, :], mask=some, other=0.0)
    before = before.to(tl.float32)
    u = activate(before, ACT)
    length = tl.sqrt(tl.sum(u * u, 1))
    u = u / tl.where(there, at_least(length, eps), 1.0)[:, None]
    gate = tl.load(row + gates + i, mask=there, other=0.0).to(tl.float32)
    gate = tl.where(there, scale * tl.sigmoid(gate), 0.0)
    gram = tl.zeros([R, R], tl.float32)
    if SEQUENTIAL and R > 1:
        gram = products(u, u, R)
        gram = tl.where(i[:, None] > i[None, :], gram, 0.0)
    own = tl.zeros([R, R], tl.float32)
    for k in tl.static_range(R):
        line = tl.where(i == k, 1.0, 0.0)
        if SEQUENTIAL and k > 0:
            line -= apply_transposed(own, row_of(gram, k, R))
        own = tl.where(i[:, None] == k, entry_of(gate, k, R) * line[None, :], own)
    total = tl.sum(gate, 0)
    shrink = tl.where((kappa > 0) & (total > kappa), kappa / total, 1.0)
    seen = tl.sum(u * x[None, :], 1)
    return u, before, length, gate, gram, own, own * shrink, shrink, seen


# Its equation.


@triton.jit
def centred(v, live, d, NORM: tl.constexpr):
    """v (·,D) without its mean, zero beyond d; only of LayerNorm."""
    if NORM == "layer":
        v = tl.where(live[None, :], v - (tl.sum(v, 1) / d)[:, None], 0.0)
    return v


@triton.jit
def _limited(M, r: tl.constexpr, R: tl.constexpr):
    """Whether ‖M⁻¹‖ is above MOST_GAIN, or not known. M: (1,R,R)."""
    row = tl.arange(0, R)[None, :]
    squares = tl.sum(tl.sum(M, 2), 1) * 0.0
    for j in tl.static_range(r):
        column = _eliminate(M, tl.where(row == j, 1.0, 0.0).to(tl.float64), R)
        squares += tl.sum(column * column, 1)
    return (squares <= MOST_GAIN * MOST_GAIN) == 0


@triton.jit
def solve(
    u, map, seen, x, history, gain, gate, weight, bias, live, d, norm_eps,
    NORM: tl.constexpr, r: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """s = U y (R,) and the outcome, an int32, of y = norm(gate ⊙ (history + gain ⊙ x̃)); see
    lm/model/cell.py. Vectors are (D,), zero beyond d."""
    # 1. y = norm(c + Σ_j m_j s_j).
    c = (history + gain * (x - combine(apply(map, seen), u))) * gate
    m = rows_combined(map, u, R) * (gain * gate)[None, :]
    c = centred(c[None, :], live, d, NORM)
    m = centred(m, live, d, NORM)
    # 2. The coefficients of s = φ(s).
    weighted = u * weight[None, :]
    alpha = tl.sum(weighted * c, 1)[None, :].to(tl.float64)
    beta = products(weighted, m, R)[None, :, :].to(tl.float64)
    row = tl.arange(0, R)
    eye = tl.where(row[None, :, None] == row[None, None, :], 1.0, 0.0)
    if NORM == "none":
        rest = eye - beta
        s = _eliminate(rest, alpha, R)
        found = tl.abs(tl.sum(s, 1)) < float("inf")
        outcome = tl.where(found, 0, FAILED)
    else:
        delta = tl.sum(u * bias[None, :], 1)[None, :].to(tl.float64)
        gamma0 = (tl.sum(c * c, 1) / d).to(tl.float64) + norm_eps
        gamma1 = (tl.sum(m * c, 1) / d)[None, :].to(tl.float64)
        gamma2 = (products(m, m, R) / d)[None, :, :].to(tl.float64)
        floor = gamma0 * 0.0 + norm_eps
        equation = (alpha, beta, delta, gamma0, gamma1, gamma2, floor)
        live_tokens = tl.zeros_like(floor) == 0.0
        eps = tl.zeros_like(floor) + EPS
        # 3. Its root.
        s, found, bisected = search(
            equation, live_tokens, eps, MOST_PICARD, MOST_NEWTON, BISECTIONS, R
        )
        outcome = tl.where(found, tl.where(bisected, BISECTED, 0), FAILED)
        _, numerator, slant, inverse, _, _ = _evaluate(s, equation)
        rest = _rest(beta, numerator, slant, inverse, R)
    outcome = tl.where(found & _limited(rest, r, R), outcome + GRAD_LIMITED, outcome)
    return tl.sum(s, 0).to(tl.float32), tl.sum(outcome, 0)


@triton.jit
def mixed_of(u, map, seen, s, x):
    """T (s − U x) (R,) and x̃ = x + Σ_i u_i (T (s − U x))_i (D,)."""
    moves = apply(map, s - seen)
    return moves, x + combine(moves, u)


@triton.jit
def normed_of(v, live, d, norm_eps, NORM: tl.constexpr):
    """v (D,) after the norm, before its weight and bias, and what it was multiplied by."""
    inverse = tl.sum(v, 0) * 0.0 + 1.0
    if NORM == "layer":
        v = tl.where(live, v - tl.sum(v, 0) / d, 0.0)
    if NORM != "none":
        inverse = 1.0 / tl.sqrt(tl.sum(v * v, 0) / d + norm_eps)
    return v * inverse, inverse


# Its gradient.


@triton.jit
def _attached(slope, received, failed, R: tl.constexpr):
    """η = (I − φ′)⁻ᵀ ḡ, no longer than MOST_GAIN ‖ḡ‖; ḡ where there is no root. slope: (R,R) φ′."""
    row = tl.arange(0, R)
    eye = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    rest = (eye - tl.trans(slope))[None, :, :].to(tl.float64)
    eta = _eliminate(rest, received[None, :].to(tl.float64), R)
    eta = tl.sum(eta, 0)
    before = tl.sum((received * received).to(tl.float64), 0)
    after = tl.sum(eta * eta, 0)
    finite = after < float("inf")  # of a singular matrix no direction is known: ḡ's own
    along = tl.where(finite, eta, received.to(tl.float64))
    # Triton 3.7's interpreter cannot use the product of a constexpr and a tensor: tensor first.
    times = tl.where(finite, tl.sqrt(before / after) * MOST_GAIN, MOST_GAIN)
    short = finite & (after <= before * (MOST_GAIN * MOST_GAIN))
    eta = tl.where(short, eta, times * along)
    return tl.where(failed, received, eta.to(tl.float32))


@triton.jit
def _through_map(
    d_moves, distance, gate, gram, own, map, shrink, scale, kappa,
    SEQUENTIAL: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """From d(T (s − U x)) (R,) to U x (R,), the gates before the sigmoid (R,), and the u_i · u_j,
    symmetric (R,R). distance: (R,) s − U x."""
    i = tl.arange(0, R)
    below = i[:, None] >= i[None, :]
    d_map = tl.where(below, d_moves[:, None] * distance[None, :], 0.0)
    d_seen = -apply_transposed(map, d_moves)
    d_shrink = tl.sum(tl.sum(d_map * own, 1), 0)
    d_own = d_map * shrink
    d_gate = tl.zeros([R], tl.float32)
    d_gram = tl.zeros([R, R], tl.float32)
    for k in tl.static_range(R - 1, -1, -1):
        d_line = row_of(d_own, k, R)
        line = tl.where(i == k, 1.0, 0.0)
        a = entry_of(gate, k, R)
        if SEQUENTIAL and k > 0:
            following = row_of(gram, k, R)  # zero from k on
            line -= apply_transposed(own, following)
            of_gram = tl.where(i < k, -a * apply(own, d_line), 0.0)
            d_gram = tl.where(i[:, None] == k, of_gram[None, :], d_gram)
            d_own -= a * following[:, None] * d_line[None, :]
        d_gate = tl.where(i == k, tl.sum(d_line * line, 0), d_gate)
    total = tl.sum(gate, 0)
    shrunk = (kappa > 0) & (total > kappa)
    d_gate -= tl.where(shrunk, d_shrink * shrink / total, 0.0)
    d_gate *= gate * (1.0 - gate / scale)
    return d_seen, d_gate, d_gram + tl.trans(d_gram)


@triton.jit
def transposed(
    lambda_, extra, failed, u, before, length, a, gram, own, map, shrink, seen, s,
    x, history, gain, gate, weight, bias, live, d, norm_eps, scale, eps, kappa,
    NORM: tl.constexpr, ACT: tl.constexpr, SEQUENTIAL: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """From λ, the gradient of y, and `extra`, that of x̃ from elsewhere, to all that the token is
    made of; cell_gradient.h derives it.

    Returns: those of history, gain, gate, x, the vectors before act (R,D), the gates before the
    sigmoid (R,), weight and bias; and x̃.
    """
    # 1. The token again.
    moves, mixed = mixed_of(u, map, seen, s, x)
    whole = history + gain * mixed
    normed, inverse = normed_of(whole * gate, live, d, norm_eps, NORM)
    # 2. What s receives, and φ′; what the norm takes off.
    weighted = u * weight[None, :]
    into = u * (gain * gate)[None, :]
    from_y = lambda_ * weight
    received = tl.sum(into * from_y[None, :], 1)
    slope = products(weighted, into, R)  # (i,l)
    mean = tl.sum(from_y, 0) * 0.0
    along = mean
    mean_u = tl.zeros([R], tl.float32)
    along_u = mean_u
    if NORM != "none":
        along = tl.sum(from_y * normed, 0) / d
        along_u = tl.sum(weighted * normed[None, :], 1) / d
        into_along = tl.sum(into * normed[None, :], 1)
        received -= along * into_along
        slope -= along_u[:, None] * into_along[None, :]
    if NORM == "layer":
        mean = tl.sum(from_y, 0) / d
        mean_u = tl.sum(weighted, 1) / d
        into_mean = tl.sum(into, 1)
        received -= mean * into_mean
        slope -= mean_u[:, None] * into_mean[None, :]
    received = inverse * received + tl.sum(u * extra[None, :], 1)
    received = apply_transposed(map, received)
    slope = slope * inverse
    through = tl.zeros([R, R], tl.float32)
    column = tl.arange(0, R)[None, :]
    for j in tl.static_range(R):
        times = column_of(map, j, R)
        through = tl.where(column == j, tl.sum(slope * times[None, :], 1)[:, None], through)
    eta = _attached(through, received, failed, R)
    # 3. From then on s is a constant and λ + Uᵀ η the gradient of y.
    lambda_ += combine(eta, u)
    mean += tl.sum(eta * mean_u, 0)
    along += tl.sum(eta * along_u, 0)
    e = (lambda_ * weight - mean - normed * along) * inverse
    e = tl.where(live, e, 0.0)
    d_gate = e * whole
    e *= gate
    d_gain = e * mixed
    d_mixed = gain * e + extra
    # 4. Through x̃, the map of the reflections and the vectors.
    d_moves = tl.sum(u * d_mixed[None, :], 1)
    d_seen, d_a, d_gram = _through_map(
        d_moves, s - seen, a, gram, own, map, shrink, scale, kappa, SEQUENTIAL, R
    )
    dx = d_mixed + combine(d_seen, u)
    y = normed * weight + bias
    d_u = (
        moves[:, None] * d_mixed[None, :] + eta[:, None] * y[None, :] + d_seen[:, None] * x[None, :]
    )
    if SEQUENTIAL and R > 1:
        d_u += rows_combined(d_gram, u, R)
    dots = tl.where(length < eps, 0.0, tl.sum(d_u * u, 1))
    d_u = (d_u - u * dots[:, None]) / at_least(length, eps)[:, None]
    d_before = d_u * activate_grad(before, ACT)
    return e, d_gain, d_gate, dx, d_before, d_a, lambda_ * normed, lambda_, mixed
