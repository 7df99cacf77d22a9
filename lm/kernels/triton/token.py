"""Device functions for one token of the exact solve, forward and backward.

A program holds a whole token: vectors of d channels, r reflections as tiles (r,d), and the small
equation. lm/kernels/cell_arguments.py has the equations; roots.py has the search for the root. All
is computed in fp32, except the search, which uses fp64.

Shape suffixes: D the power of two at or above d, R the power of two at or above r; g groups, n
states.
"""

import triton
import triton.language as tl

from lm.kernels.triton.build import activate, activate_grad
from lm.kernels.triton.roots import BISECTIONS as BISECTION_COUNT
from lm.kernels.triton.roots import MAX_NEWTON_STEPS as NEWTON_STEPS
from lm.kernels.triton.roots import MAX_PICARD_STEPS as PICARD_STEPS
from lm.kernels.triton.roots import _eliminate, _evaluate, _identity_minus_slope, search

MAX_PICARD_STEPS = tl.constexpr(PICARD_STEPS)
MAX_NEWTON_STEPS = tl.constexpr(NEWTON_STEPS)
BISECTIONS = tl.constexpr(BISECTION_COUNT)
FAILED, BISECTED, GRAD_LIMITED = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)  # solver.py
MAX_GAIN = tl.constexpr(20.0)  # as in lm/model/cell.py
EPS = tl.constexpr(2.0**-23)  # machine epsilon of fp32


# Small matrices and tiles


@triton.jit
def get_row(tile, i: tl.constexpr, R: tl.constexpr):
    """Return row i of a tile (R,·)."""
    is_selected = tl.arange(0, R)[:, None] == i
    return tl.sum(tl.where(is_selected, tile, 0.0), 0)


@triton.jit
def get_column(matrix, j: tl.constexpr, R: tl.constexpr):
    """Return column j of a matrix (R,R)."""
    is_selected = tl.arange(0, R)[None, :] == j
    return tl.sum(tl.where(is_selected, matrix, 0.0), 1)


@triton.jit
def get_entry(vector, i: tl.constexpr, R: tl.constexpr):
    """Return entry i of a vector (R,)."""
    return tl.sum(tl.where(tl.arange(0, R) == i, vector, 0.0), 0)


@triton.jit
def apply(matrix, vector):
    """Return matrix · vector, (R,)."""
    return tl.sum(matrix * vector[None, :], 1)


@triton.jit
def apply_transposed(matrix, vector):
    """Return matrixᵀ · vector, (R,)."""
    return tl.sum(matrix * vector[:, None], 0)


@triton.jit
def combine(vector, tile):
    """Return Σ_i vector_i tile_i, (D,)."""
    return tl.sum(tile * vector[:, None], 0)


@triton.jit
def pairwise_products(a, b, R: tl.constexpr):
    """Return a_i · b_j for the rows of two tiles (R,D): (R,R)."""
    result = tl.zeros([R, R], tl.float32)
    column = tl.arange(0, R)[None, :]
    for j in tl.static_range(R):
        dots = tl.sum(a * get_row(b, j, R)[None, :], 1)
        result = tl.where(column == j, dots[:, None], result)
    return result


@triton.jit
def combine_rows(matrix, tile, R: tl.constexpr):
    """Return matrixᵀ · tile, (R,D)."""
    result = tl.zeros_like(tile)
    row = tl.arange(0, R)[:, None]
    for j in tl.static_range(R):
        result = tl.where(row == j, combine(get_column(matrix, j, R), tile)[None, :], result)
    return result


@triton.jit
def max_length(length, eps):
    """Return max(length, eps), or NaN for NaN."""
    return tl.where(length < eps, eps, length)


# Reflections of a token


@triton.jit
def compute_reflections(
    row,
    x,
    col,
    live,
    d,
    r,
    vectors,
    gates,
    scale,
    eps,
    kappa,
    ACT: tl.constexpr,
    SEQUENTIAL: tl.constexpr,
    R: tl.constexpr,
):
    """Compute the vectors, gates and map of I − Q.

    Args:
        row: Address of the token's row.
        x: Input of the mixer, (D,).
        col: Channels, (D,).
        live: Which channels exist, (D,).
        d: Number of channels.
        r: Number of reflections.
        vectors: First column of the vectors in the row.
        gates: First column of the gates in the row.
        scale: Factor of the gates.
        eps: Smallest length by which a vector is divided.
        kappa: Bound of the sum of the gates, or 0.
        ACT: Activation of the vectors.
        SEQUENTIAL: True: householder; False: dplr.
        R: Power of two at or above r.

    Returns:
        u (R,D); the vectors before act and nrm (R,D); their lengths (R,); the gates a (R,); u_i ·
        u_j for j < i (R,R); T before and after the factor of `kappa` (R,R); that factor; U x (R,).
    """
    i = tl.arange(0, R)
    is_reflection = i < r
    mask = is_reflection[:, None] & live[None, :]
    raw_vectors = tl.load(row + vectors + i[:, None] * d + col[None, :], mask=mask, other=0.0)
    raw_vectors = raw_vectors.to(tl.float32)
    u = activate(raw_vectors, ACT)
    length = tl.sqrt(tl.sum(u * u, 1))
    u = u / tl.where(is_reflection, max_length(length, eps), 1.0)[:, None]
    gate = tl.load(row + gates + i, mask=is_reflection, other=0.0).to(tl.float32)
    gate = tl.where(is_reflection, scale * tl.sigmoid(gate), 0.0)
    gram = tl.zeros([R, R], tl.float32)
    if SEQUENTIAL and R > 1:
        gram = pairwise_products(u, u, R)
        gram = tl.where(i[:, None] > i[None, :], gram, 0.0)
    unscaled_map = tl.zeros([R, R], tl.float32)
    for k in tl.static_range(R):
        map_row = tl.where(i == k, 1.0, 0.0)
        if SEQUENTIAL and k > 0:
            map_row -= apply_transposed(unscaled_map, get_row(gram, k, R))
        unscaled_map = tl.where(
            i[:, None] == k, get_entry(gate, k, R) * map_row[None, :], unscaled_map
        )
    total = tl.sum(gate, 0)
    shrink = tl.where((kappa > 0) & (total > kappa), kappa / total, 1.0)
    Ux = tl.sum(u * x[None, :], 1)
    return u, raw_vectors, length, gate, gram, unscaled_map, unscaled_map * shrink, shrink, Ux


# Equation of a token


@triton.jit
def subtract_mean(v, live, d, NORM: tl.constexpr):
    """Subtract the mean of v (·,D) if the norm is LayerNorm; zero beyond d."""
    if NORM == "layer":
        v = tl.where(live[None, :], v - (tl.sum(v, 1) / d)[:, None], 0.0)
    return v


@triton.jit
def _is_gain_limited(M, r: tl.constexpr, R: tl.constexpr):
    """Return whether ‖M⁻¹‖ is above MAX_GAIN or NaN. M: (1,R,R)."""
    row = tl.arange(0, R)[None, :]
    squares = tl.sum(tl.sum(M, 2), 1) * 0.0
    for j in tl.static_range(r):
        column = _eliminate(M, tl.where(row == j, 1.0, 0.0).to(tl.float64), R)
        squares += tl.sum(column * column, 1)
    return (squares <= MAX_GAIN * MAX_GAIN) == 0


@triton.jit
def solve_equation(
    u,
    map,
    Ux,
    x,
    history,
    gain,
    gate,
    weight,
    bias,
    live,
    d,
    norm_eps,
    NORM: tl.constexpr,
    r: tl.constexpr,
    R: tl.constexpr,
):
    """Solve s = U y with y = norm(gate ⊙ (history + gain ⊙ x̃)); see lm/model/cell.py.

    All vectors are (D,) and zero beyond d.

    Returns:
        s (R,), and the outcome, an int32.
    """
    # 1. y = norm(c + Σ_j m_j s_j).
    c = (history + gain * (x - combine(apply(map, Ux), u))) * gate
    m = combine_rows(map, u, R) * (gain * gate)[None, :]
    c = subtract_mean(c[None, :], live, d, NORM)
    m = subtract_mean(m, live, d, NORM)
    # 2. The coefficients of s = φ(s).
    weighted = u * weight[None, :]
    alpha = tl.sum(weighted * c, 1)[None, :].to(tl.float64)
    beta = pairwise_products(weighted, m, R)[None, :, :].to(tl.float64)
    row = tl.arange(0, R)
    eye = tl.where(row[None, :, None] == row[None, None, :], 1.0, 0.0)
    if NORM == "none":
        M = eye - beta
        s = _eliminate(M, alpha, R)
        has_root = tl.abs(tl.sum(s, 1)) < float("inf")
        outcome = tl.where(has_root, 0, FAILED)
    else:
        delta = tl.sum(u * bias[None, :], 1)[None, :].to(tl.float64)
        gamma0 = (tl.sum(c * c, 1) / d).to(tl.float64) + norm_eps
        gamma1 = (tl.sum(m * c, 1) / d)[None, :].to(tl.float64)
        gamma2 = (pairwise_products(m, m, R) / d)[None, :, :].to(tl.float64)
        floor = gamma0 * 0.0 + norm_eps
        equation = (alpha, beta, delta, gamma0, gamma1, gamma2, floor)
        live_tokens = tl.zeros_like(floor) == 0.0
        eps = tl.zeros_like(floor) + EPS
        # 3. Find its root.
        s, has_root, bisected = search(
            equation, live_tokens, eps, MAX_PICARD_STEPS, MAX_NEWTON_STEPS, BISECTIONS, R
        )
        outcome = tl.where(has_root, tl.where(bisected, BISECTED, 0), FAILED)
        _, numerator, slant, inverse, _, _ = _evaluate(s, equation)
        M = _identity_minus_slope(beta, numerator, slant, inverse, R)
    outcome = tl.where(has_root & _is_gain_limited(M, r, R), outcome + GRAD_LIMITED, outcome)
    return tl.sum(s, 0).to(tl.float32), tl.sum(outcome, 0)


@triton.jit
def compute_mixed(u, map, Ux, s, x):
    """Return T (s − U x) (R,) and x̃ = x + Σ_i u_i (T (s − U x))_i (D,)."""
    mix_weights = apply(map, s - Ux)
    return mix_weights, x + combine(mix_weights, u)


@triton.jit
def apply_norm(v, live, d, norm_eps, NORM: tl.constexpr):
    """Return v (D,) after the norm, without its weight and bias, and the factor 1/√…."""
    inverse = tl.sum(v, 0) * 0.0 + 1.0
    if NORM == "layer":
        v = tl.where(live, v - tl.sum(v, 0) / d, 0.0)
    if NORM != "none":
        inverse = 1.0 / tl.sqrt(tl.sum(v * v, 0) / d + norm_eps)
    return v * inverse, inverse


# Gradient of a token


@triton.jit
def _solve_adjoint(slope, received, failed, R: tl.constexpr):
    """Return η = (I − φ′)⁻ᵀ ḡ, shortened to MAX_GAIN ‖ḡ‖; ḡ itself if the search failed.

    Args:
        slope: φ′, (R,R).
        received: ḡ, (R,).
        failed: Whether the token has no root.
        R: Size of the equation.
    """
    row = tl.arange(0, R)
    eye = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    M = (eye - tl.trans(slope))[None, :, :].to(tl.float64)
    eta = _eliminate(M, received[None, :].to(tl.float64), R)
    eta = tl.sum(eta, 0)
    square_g = tl.sum((received * received).to(tl.float64), 0)
    square_eta = tl.sum(eta * eta, 0)
    is_finite = square_eta < float("inf")  # a singular matrix gives no direction: use ḡ's
    direction = tl.where(is_finite, eta, received.to(tl.float64))
    # Triton 3.7's interpreter cannot use the product of a constexpr and a tensor: tensor first.
    factor = tl.where(is_finite, tl.sqrt(square_g / square_eta) * MAX_GAIN, MAX_GAIN)
    is_short = is_finite & (square_eta <= square_g * (MAX_GAIN * MAX_GAIN))
    eta = tl.where(is_short, eta, factor * direction)
    return tl.where(failed, received, eta.to(tl.float32))


@triton.jit
def _backprop_map(
    d_mix_weights,
    distance,
    gate,
    gram,
    unscaled_map,
    map,
    shrink,
    scale,
    kappa,
    SEQUENTIAL: tl.constexpr,
    R: tl.constexpr,
):
    """Backpropagate from T (s − U x).

    Args:
        d_mix_weights: Gradient of T (s − U x), (R,).
        distance: s − U x, (R,).
        gate: Gates a, (R,).
        gram: u_i · u_j for j < i, (R,R).
        unscaled_map: T before the factor `shrink`, (R,R).
        map: T, (R,R).
        shrink: Factor of `kappa`.
        scale: Factor of the gates.
        kappa: Bound of the sum of the gates, or 0.
        SEQUENTIAL: True: householder; False: dplr.
        R: Size of the map.

    Returns:
        The gradients of U x (R,), of the gates before the sigmoid (R,), and of u_i · u_j, symmetric
        (R,R).
    """
    i = tl.arange(0, R)
    is_lower = i[:, None] >= i[None, :]
    d_map = tl.where(is_lower, d_mix_weights[:, None] * distance[None, :], 0.0)
    d_Ux = -apply_transposed(map, d_mix_weights)
    d_shrink = tl.sum(tl.sum(d_map * unscaled_map, 1), 0)
    d_unscaled_map = d_map * shrink
    d_gate = tl.zeros([R], tl.float32)
    d_gram = tl.zeros([R, R], tl.float32)
    for k in tl.static_range(R - 1, -1, -1):
        d_row = get_row(d_unscaled_map, k, R)
        map_row = tl.where(i == k, 1.0, 0.0)
        a = get_entry(gate, k, R)
        if SEQUENTIAL and k > 0:
            gram_row = get_row(gram, k, R)  # zero from k on
            map_row -= apply_transposed(unscaled_map, gram_row)
            d_gram_row = tl.where(i < k, -a * apply(unscaled_map, d_row), 0.0)
            d_gram = tl.where(i[:, None] == k, d_gram_row[None, :], d_gram)
            d_unscaled_map -= a * gram_row[:, None] * d_row[None, :]
        d_gate = tl.where(i == k, tl.sum(d_row * map_row, 0), d_gate)
    total = tl.sum(gate, 0)
    is_shrunk = (kappa > 0) & (total > kappa)
    d_gate -= tl.where(is_shrunk, d_shrink * shrink / total, 0.0)
    d_gate *= gate * (1.0 - gate / scale)
    return d_Ux, d_gate, d_gram + tl.trans(d_gram)


@triton.jit
def backprop_token(
    lambda_,
    extra,
    failed,
    u,
    raw_vectors,
    length,
    a,
    gram,
    unscaled_map,
    map,
    shrink,
    Ux,
    s,
    x,
    history,
    gain,
    gate,
    weight,
    bias,
    live,
    d,
    norm_eps,
    scale,
    eps,
    kappa,
    NORM: tl.constexpr,
    ACT: tl.constexpr,
    SEQUENTIAL: tl.constexpr,
    R: tl.constexpr,
):
    """Backpropagate through a token; cell_gradient.h derives the equations.

    The arguments after `failed` are the same as in the forward pass.

    Args:
        lambda_: Gradient of y, (D,).
        extra: Gradient of x̃ from the state, (D,).
        failed: Whether the token has no root.

    Returns:
        The gradients of history, gain, gate, x, the vectors before act (R,D), the gates before the
        sigmoid (R,), the weight and the bias; and x̃.
    """
    # 1. Recompute the token.
    mix_weights, mixed = compute_mixed(u, map, Ux, s, x)
    ungated = history + gain * mixed
    normed, inverse = apply_norm(ungated * gate, live, d, norm_eps, NORM)
    # 2. Compute ḡ, the gradient of s, and φ′; the means belong to the norm's gradient.
    weighted = u * weight[None, :]
    into = u * (gain * gate)[None, :]
    from_y = lambda_ * weight
    received = tl.sum(into * from_y[None, :], 1)
    slope = pairwise_products(weighted, into, R)  # (i,l)
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
    root_slope = tl.zeros([R, R], tl.float32)
    column = tl.arange(0, R)[None, :]
    for j in tl.static_range(R):
        map_column = get_column(map, j, R)
        root_slope = tl.where(
            column == j, tl.sum(slope * map_column[None, :], 1)[:, None], root_slope
        )
    eta = _solve_adjoint(root_slope, received, failed, R)
    # 3. Treat s as a constant, and λ + Uᵀ η as the gradient of y.
    lambda_ += combine(eta, u)
    mean += tl.sum(eta * mean_u, 0)
    along += tl.sum(eta * along_u, 0)
    e = (lambda_ * weight - mean - normed * along) * inverse
    e = tl.where(live, e, 0.0)
    d_gate = e * ungated
    e *= gate
    d_gain = e * mixed
    d_mixed = gain * e + extra
    # 4. Backpropagate through x̃, the map of the reflections and the vectors.
    d_mix_weights = tl.sum(u * d_mixed[None, :], 1)
    d_Ux, d_a, d_gram = _backprop_map(
        d_mix_weights, s - Ux, a, gram, unscaled_map, map, shrink, scale, kappa, SEQUENTIAL, R
    )
    dx = d_mixed + combine(d_Ux, u)
    y = normed * weight + bias
    d_u = (
        mix_weights[:, None] * d_mixed[None, :]
        + eta[:, None] * y[None, :]
        + d_Ux[:, None] * x[None, :]
    )
    if SEQUENTIAL and R > 1:
        d_u += combine_rows(d_gram, u, R)
    dots = tl.where(length < eps, 0.0, tl.sum(d_u * u, 1))
    d_u = (d_u - u * dots[:, None]) / max_length(length, eps)[:, None]
    d_vectors = d_u * activate_grad(raw_vectors, ACT)
    return e, d_gain, d_gate, dx, d_vectors, d_a, lambda_ * normed, lambda_, mixed
