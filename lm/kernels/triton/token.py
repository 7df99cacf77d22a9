"""Device functions for one token of the exact solve, forward and backward.

A program holds a whole token: vectors of d channels, r reflections as tiles (r,d), and the small
equation. lm/kernels/cell_arguments.py has the equations; roots.py has the search for the root. The
search uses fp64, everything else fp32.

Names, each (D,): `history` is exp(dt A) h_{t−1} C, `gain` is γ, `mixed` is x̃, `normed` is y before
the norm's weight and bias, `channel` is the index of a channel; `d_…` is a gradient.

    inputs        x, dt, gate, the skip weights D, norm_weight, norm_bias, each (D,)
    reflections   u (R,D); raw_vectors (R,D), before act and nrm; vector_lengths (R,); the gates a
                  (R,); gram (R,R), u_i · u_j for j < i; unscaled_map (R,R), T before the factor
                  `shrink`; T (R,R); shrink = κ / max(κ, Σ a); Ux (R,) = U x

Arguments in capitals are compile-time constants. Vectors are zero beyond d. Shape suffixes: D and R
are the powers of two at or above d and r.
"""

import triton
import triton.language as tl

from lm.kernels import cell_arguments
from lm.kernels.triton.build import activate, activate_grad
from lm.kernels.triton.roots import (
    BISECTED,
    FAILED,
    MAX_GAIN,
    _eliminate,
    _evaluate,
    _identity_minus_slope,
    search,
)

GRAD_LIMITED = tl.constexpr(cell_arguments.GRAD_LIMITED)
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
    """Return matrixᵀ · tile, (R,D), for a matrix (R,R)."""
    result = tl.zeros_like(tile)
    row = tl.arange(0, R)[:, None]
    for j in tl.static_range(R):
        result = tl.where(row == j, combine(get_column(matrix, j, R), tile)[None, :], result)
    return result


@triton.jit
def clamp_length(length, eps):
    """Return max(length, eps); NaN stays NaN."""
    return tl.where(length < eps, eps, length)


# Reflections of a token


@triton.jit
def compute_reflections(
    row, x, channel, d, r, vectors_column, gates_column, scale, eps, kappa, ACT, SEQUENTIAL, R
):
    """Compute `reflections` from a token's row.

    Args:
        row: Address of the row.
        x: Input of the mixer, (D,).
        channel: Indices of the channels, (D,).
        d: Number of channels.
        r: Number of reflections.
        vectors_column: First column of the vectors in the row.
        gates_column: First column of the gates in the row.
        scale: Factor of the gates.
        eps: Smallest length by which a vector is divided.
        kappa: κ, the bound of the sum of the gates, or 0.
        ACT: Activation of the vectors.
        SEQUENTIAL: True: householder; False: dplr.
        R: Power of two at or above r.
    """
    i = tl.arange(0, R)
    is_reflection = i < r
    mask = is_reflection[:, None] & (channel < d)[None, :]
    vectors = row + vectors_column + i[:, None] * d + channel[None, :]
    raw_vectors = tl.load(vectors, mask=mask, other=0.0).to(tl.float32)
    u = activate(raw_vectors, ACT)
    vector_lengths = tl.sqrt(tl.sum(u * u, 1))
    u = u / tl.where(is_reflection, clamp_length(vector_lengths, eps), 1.0)[:, None]
    a = tl.load(row + gates_column + i, mask=is_reflection, other=0.0).to(tl.float32)
    a = tl.where(is_reflection, scale * tl.sigmoid(a), 0.0)
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
            i[:, None] == k, get_entry(a, k, R) * map_row[None, :], unscaled_map
        )
    total = tl.sum(a, 0)
    shrink = tl.where((kappa > 0) & (total > kappa), kappa / total, 1.0)
    Ux = tl.sum(u * x[None, :], 1)
    T = unscaled_map * shrink
    return u, raw_vectors, vector_lengths, a, gram, unscaled_map, T, shrink, Ux


# Equation of a token


@triton.jit
def subtract_mean(v, channel, d, NORM: tl.constexpr):
    """Return v (·,D), minus its mean over the channels if the norm is LayerNorm; zero beyond d."""
    if NORM == "layer":
        v = tl.where((channel < d)[None, :], v - (tl.sum(v, 1) / d)[:, None], 0.0)
    return v


@triton.jit
def _exceeds_max_gain(M, r: tl.constexpr, R: tl.constexpr):
    """Return whether the Frobenius norm of M⁻¹ is above MAX_GAIN or NaN. M: (1,R,R)."""
    row = tl.arange(0, R)[None, :]
    squares = tl.sum(tl.sum(M, 2), 1) * 0.0
    for j in tl.static_range(r):
        column = _eliminate(M, tl.where(row == j, 1.0, 0.0).to(tl.float64), R)
        squares += tl.sum(column * column, 1)
    return (squares <= MAX_GAIN * MAX_GAIN) == 0


@triton.jit
def solve_equation(reflections, inputs, history, gain, channel, d, norm_eps, NORM, r, R):
    """Solve s = U y with y = norm(gate ⊙ (history + gain ⊙ x̃)); see lm/model/cell.py.

    Returns:
        s (R,), and the outcome, an int32: 0, BISECTED or FAILED. GRAD_LIMITED is added if the
        gradient may be shortened, because ‖(I − φ′)⁻¹‖ exceeds MAX_GAIN.
    """
    u, _, _, _, _, _, T, _, Ux = reflections
    x, _, gate, _, norm_weight, norm_bias = inputs
    # 1. y = norm(c + Σ_j m_j s_j).
    c = (history + gain * (x - combine(apply(T, Ux), u))) * gate
    m = combine_rows(T, u, R) * (gain * gate)[None, :]
    c = subtract_mean(c[None, :], channel, d, NORM)
    m = subtract_mean(m, channel, d, NORM)
    # 2. The coefficients of s = φ(s).
    weighted_u = u * norm_weight[None, :]
    alpha = tl.sum(weighted_u * c, 1)[None, :].to(tl.float64)
    beta = pairwise_products(weighted_u, m, R)[None, :, :].to(tl.float64)
    row = tl.arange(0, R)
    eye = tl.where(row[None, :, None] == row[None, None, :], 1.0, 0.0)
    if NORM == "none":
        M = eye - beta
        s = _eliminate(M, alpha, R)
        has_root = tl.abs(tl.sum(s, 1)) < float("inf")
        outcome = tl.where(has_root, 0, FAILED)
    else:
        delta = tl.sum(u * norm_bias[None, :], 1)[None, :].to(tl.float64)
        gamma0 = (tl.sum(c * c, 1) / d).to(tl.float64) + norm_eps
        gamma1 = (tl.sum(m * c, 1) / d)[None, :].to(tl.float64)
        gamma2 = (pairwise_products(m, m, R) / d)[None, :, :].to(tl.float64)
        floor = gamma0 * 0.0 + norm_eps
        equation = (alpha, beta, delta, gamma0, gamma1, gamma2, floor)
        is_token = tl.zeros_like(floor) == 0.0
        eps = tl.zeros_like(floor) + EPS
        # 3. Find its root.
        s, has_root, is_bisected = search(equation, is_token, eps, R)
        outcome = tl.where(has_root, tl.where(is_bisected, BISECTED, 0), FAILED)
        _, numerator, slant, inverse, _, _ = _evaluate(s, equation)
        M = _identity_minus_slope(beta, numerator, slant, inverse, R)
    outcome = tl.where(has_root & _exceeds_max_gain(M, r, R), outcome + GRAD_LIMITED, outcome)
    return tl.sum(s, 0).to(tl.float32), tl.sum(outcome, 0)


@triton.jit
def compute_mixed(reflections, s, x):
    """Return the weights T (s − U x) (R,) and x̃ = x + Σ_i u_i (T (s − U x))_i (D,)."""
    u, _, _, _, _, _, T, _, Ux = reflections
    mix_weights = apply(T, s - Ux)
    return mix_weights, x + combine(mix_weights, u)


@triton.jit
def apply_norm(v, channel, d, norm_eps, NORM: tl.constexpr):
    """Return v (D,) after the norm, without its weight and bias, and the factor 1/√…."""
    inverse = tl.sum(v, 0) * 0.0 + 1.0
    if NORM == "layer":
        v = tl.where(channel < d, v - tl.sum(v, 0) / d, 0.0)
    if NORM != "none":
        inverse = 1.0 / tl.sqrt(tl.sum(v * v, 0) / d + norm_eps)
    return v * inverse, inverse


# Gradient of a token


@triton.jit
def _solve_adjoint(phi_slope, d_s, has_failed, R: tl.constexpr):
    """Return η = (I − φ′)⁻ᵀ ḡ, shortened to MAX_GAIN ‖ḡ‖; ḡ itself if the search failed.

    phi_slope: φ′, (R,R). d_s: ḡ, the gradient of s, (R,).
    """
    row = tl.arange(0, R)
    eye = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    M = (eye - tl.trans(phi_slope))[None, :, :].to(tl.float64)
    eta = _eliminate(M, d_s[None, :].to(tl.float64), R)
    eta = tl.sum(eta, 0)
    square_g = tl.sum((d_s * d_s).to(tl.float64), 0)
    square_eta = tl.sum(eta * eta, 0)
    is_finite = square_eta < float("inf")  # a singular matrix gives no direction: use ḡ's
    direction = tl.where(is_finite, eta, d_s.to(tl.float64))
    # Triton 3.7's interpreter cannot use the product of a constexpr and a tensor: tensor first.
    factor = tl.where(is_finite, tl.sqrt(square_g / square_eta) * MAX_GAIN, MAX_GAIN)
    is_short = is_finite & (square_eta <= square_g * (MAX_GAIN * MAX_GAIN))
    eta = tl.where(is_short, eta, factor * direction)
    return tl.where(has_failed, d_s, eta.to(tl.float32))


@triton.jit
def _backprop_root(
    lambda_, d_mixed, has_failed, reflections, inputs, normed, inverse, gain, d, NORM, R
):
    """Backpropagate from y and x̃ to the root s.

    Returns:
        η (R,), and the means of g and of g ⊙ normed over the channels, where g is
        (λ + Uᵀ η) ⊙ the norm's weight. A mean that the norm does not need is 0.
    """
    u, _, _, _, _, _, T, _, _ = reflections
    _, _, gate, _, norm_weight, _ = inputs
    weighted_u = u * norm_weight[None, :]
    v_slope = u * (gain * gate)[None, :]  # of v = gate ⊙ (history + gain ⊙ x̃) by the mix weights
    d_normed = lambda_ * norm_weight
    d_mix_weights = tl.sum(v_slope * d_normed[None, :], 1)
    y_slope = pairwise_products(weighted_u, v_slope, R)  # of U y by the mix weights
    mean_g = tl.sum(d_normed, 0) * 0.0
    mean_g_normed = mean_g
    mean_u = tl.zeros([R], tl.float32)
    mean_u_normed = mean_u
    if NORM != "none":
        mean_g_normed = tl.sum(d_normed * normed, 0) / d
        mean_u_normed = tl.sum(weighted_u * normed[None, :], 1) / d
        sum_v_normed = tl.sum(v_slope * normed[None, :], 1)
        d_mix_weights -= mean_g_normed * sum_v_normed
        y_slope -= mean_u_normed[:, None] * sum_v_normed[None, :]
    if NORM == "layer":
        mean_g = tl.sum(d_normed, 0) / d
        mean_u = tl.sum(weighted_u, 1) / d
        sum_v = tl.sum(v_slope, 1)
        d_mix_weights -= mean_g * sum_v
        y_slope -= mean_u[:, None] * sum_v[None, :]
    d_mix_weights = inverse * d_mix_weights + tl.sum(u * d_mixed[None, :], 1)
    d_s = apply_transposed(T, d_mix_weights)
    y_slope = y_slope * inverse
    phi_slope = tl.zeros([R, R], tl.float32)
    column = tl.arange(0, R)[None, :]
    for j in tl.static_range(R):
        T_column = get_column(T, j, R)
        phi_slope = tl.where(
            column == j, tl.sum(y_slope * T_column[None, :], 1)[:, None], phi_slope
        )
    eta = _solve_adjoint(phi_slope, d_s, has_failed, R)
    mean_g += tl.sum(eta * mean_u, 0)
    mean_g_normed += tl.sum(eta * mean_u_normed, 0)
    return eta, mean_g, mean_g_normed


@triton.jit
def _backprop_map(
    d_mix_weights, s, reflections, scale, kappa, SEQUENTIAL: tl.constexpr, R: tl.constexpr
):
    """Backpropagate from the weights T (s − U x), with s as a constant.

    Returns:
        The gradients of U x (R,), of the gates before the sigmoid (R,), and of u_i · u_j, symmetric
        (R,R).
    """
    _, _, _, a, gram, unscaled_map, T, shrink, Ux = reflections
    i = tl.arange(0, R)
    is_lower = i[:, None] >= i[None, :]
    d_T = tl.where(is_lower, d_mix_weights[:, None] * (s - Ux)[None, :], 0.0)
    d_Ux = -apply_transposed(T, d_mix_weights)
    d_shrink = tl.sum(tl.sum(d_T * unscaled_map, 1), 0)
    d_unscaled_map = d_T * shrink
    d_a = tl.zeros([R], tl.float32)
    d_gram = tl.zeros([R, R], tl.float32)
    for k in tl.static_range(R - 1, -1, -1):
        d_row = get_row(d_unscaled_map, k, R)
        map_row = tl.where(i == k, 1.0, 0.0)
        a_k = get_entry(a, k, R)
        if SEQUENTIAL and k > 0:
            gram_row = get_row(gram, k, R)  # zero from k on
            map_row -= apply_transposed(unscaled_map, gram_row)
            d_gram_row = tl.where(i < k, -a_k * apply(unscaled_map, d_row), 0.0)
            d_gram = tl.where(i[:, None] == k, d_gram_row[None, :], d_gram)
            d_unscaled_map -= a_k * gram_row[:, None] * d_row[None, :]
        d_a = tl.where(i == k, tl.sum(d_row * map_row, 0), d_a)
    total = tl.sum(a, 0)
    is_shrunk = (kappa > 0) & (total > kappa)
    d_a -= tl.where(is_shrunk, d_shrink * shrink / total, 0.0)
    d_a *= a * (1.0 - a / scale)
    return d_Ux, d_a, d_gram + tl.trans(d_gram)


@triton.jit
def backprop_token(
    lambda_,
    d_mixed_of_state,
    has_failed,
    reflections,
    inputs,
    s,
    history,
    gain,
    channel,
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

    The arguments after `has_failed` are the same as in the forward pass.

    Args:
        lambda_: Gradient of y, (D,).
        d_mixed_of_state: Gradient of x̃ from the state, (D,).
        has_failed: True if the token has no root.

    Returns:
        The gradients of history, gain, gate, x, the vectors before act (R,D), the gates a before
        the sigmoid (R,), the norm's weight and its bias (which is the gradient of y); and x̃.
    """
    u, raw_vectors, vector_lengths, _, _, _, _, _, _ = reflections
    x, _, gate, _, norm_weight, norm_bias = inputs
    # 1. Recompute the token.
    mix_weights, mixed = compute_mixed(reflections, s, x)
    ungated = history + gain * mixed
    normed, inverse = apply_norm(ungated * gate, channel, d, norm_eps, NORM)
    # 2. Treat s as a constant, and λ + Uᵀ η as the gradient of y.
    eta, mean_g, mean_g_normed = _backprop_root(
        lambda_,
        d_mixed_of_state,
        has_failed,
        reflections,
        inputs,
        normed,
        inverse,
        gain,
        d,
        NORM,
        R,
    )
    d_y = lambda_ + combine(eta, u)
    # 3. Backpropagate through the norm and the gate.
    d_gated = (d_y * norm_weight - mean_g - normed * mean_g_normed) * inverse
    d_gated = tl.where(channel < d, d_gated, 0.0)
    d_history = d_gated * gate
    d_mixed = gain * d_history + d_mixed_of_state
    # 4. Backpropagate through x̃, the map of the reflections and the vectors.
    d_mix_weights = tl.sum(u * d_mixed[None, :], 1)
    d_Ux, d_a, d_gram = _backprop_map(d_mix_weights, s, reflections, scale, kappa, SEQUENTIAL, R)
    dx = d_mixed + combine(d_Ux, u)
    y = normed * norm_weight + norm_bias
    d_u = (
        mix_weights[:, None] * d_mixed[None, :]
        + eta[:, None] * y[None, :]
        + d_Ux[:, None] * x[None, :]
    )
    if SEQUENTIAL and R > 1:
        d_u += combine_rows(d_gram, u, R)
    dots = tl.where(vector_lengths < eps, 0.0, tl.sum(d_u * u, 1))
    d_u = (d_u - u * dots[:, None]) / clamp_length(vector_lengths, eps)[:, None]
    d_vectors = d_u * activate_grad(raw_vectors, ACT)
    d_gain, d_gate, d_norm_weight = d_history * mixed, d_gated * ungated, d_y * normed
    return d_history, d_gain, d_gate, dx, d_vectors, d_a, d_norm_weight, d_y, mixed
