"""Kernels of the exact solve's loop over time in Triton; triton_cell.py launches them.

    forward, per chunk:    settle, then for each token product, token
    backward, per chunk:   recompute, states, then for each token, the last first, token_back and
                           product_back

All addresses and the position of the chunk are in a table in the GPU's memory (SLOTS). The
arguments of a launch are therefore the same for all chunks, layers and passes, so that a CUDA graph
can be replayed for them. Programs beyond the last token return at once.

State between two tokens: `before` (b,d), y_{t−1} in the weight's dtype; `state` (b,n,d), h_{t−1}
without the addition of token t−1, which is `inflow` (b,d) times B; `units` (b,2,2,g·n), the
normalised B and C of the last even and the last odd token. For an FP-RNN, whose state is y, `state`
is (b,d).

Shape suffixes: b rows, l length, d channels, n states, g groups, r reflections, K columns of raw,
k columns of raw that depend on y_{t−1} (the first ones), c steps of a chunk; D, R the powers of two
at or above d, r.
"""

import triton
import triton.language as tl

from lm.kernels.triton.token import (
    FAILED,
    apply_norm,
    backprop_token,
    compute_mixed,
    compute_reflections,
    max_length,
    solve_equation,
)

SLOTS = (
    *("first", "length"),  # the chunk's first token, the number of tokens
    *("raw", "weight", "x", "dt", "A", "keep", "gate", "D", "norm_weight", "norm_bias"),
    *("y", "outcome", "rows", "roots", "checkpoints"),
    *("before", "state", "inflow", "units"),
    *("grad_y", "largest", "carried", "mu"),
    *("H", "past", "inflows", "all_units", "sums"),  # of the recomputed chunk
    *("d_raw", "dx", "ddt", "dA", "d_gate", "dD", "d_weight", "d_bias"),
)
AT_FIRST, AT_LENGTH = (tl.constexpr(i) for i in range(2))
AT_RAW, AT_WEIGHT, AT_X, AT_DT, AT_A = (tl.constexpr(i) for i in range(2, 7))
AT_KEEP, AT_GATE, AT_D, AT_NORM_WEIGHT, AT_NORM_BIAS = (tl.constexpr(i) for i in range(7, 12))
AT_Y, AT_OUTCOME, AT_ROWS, AT_ROOTS, AT_CHECKPOINTS = (tl.constexpr(i) for i in range(12, 17))
AT_BEFORE, AT_STATE, AT_INFLOW, AT_UNITS = (tl.constexpr(i) for i in range(17, 21))
AT_GRAD_Y, AT_LARGEST, AT_CARRIED, AT_MU = (tl.constexpr(i) for i in range(21, 25))
AT_H, AT_PAST, AT_INFLOWS, AT_ALL_UNITS, AT_SUMS = (tl.constexpr(i) for i in range(25, 30))
AT_D_RAW, AT_DX, AT_DDT, AT_DA = (tl.constexpr(i) for i in range(30, 34))
AT_D_GATE, AT_DD, AT_D_WEIGHT, AT_D_BIAS = (tl.constexpr(i) for i in range(34, 38))
FP32 = tl.constexpr(tl.float32)


@triton.jit
def address(table, slot: tl.constexpr, DTYPE: tl.constexpr = FP32):
    """Return the tensor whose address is in a slot of the table."""
    return tl.load(table + slot).to(tl.pointer_type(DTYPE), bitcast=True)


@triton.jit
def aligned_address(table, slot: tl.constexpr, DTYPE: tl.constexpr = FP32):
    """Return the tensor of a slot that begins at a multiple of 16 bytes, for loads of 16 bytes.

    Kernels of whole tokens do not use it: they would have three times as many barriers; this was
    not measured on a GPU.
    """
    pointer = tl.load(table + slot).to(tl.pointer_type(DTYPE), bitcast=True)
    return tl.multiple_of(pointer, 16)


# Products with W_y


@triton.jit(do_not_specialize=["step"])
def product_kernel(
    table,
    step,
    b,
    columns,
    raw_step,
    d: tl.constexpr,
    y_columns: tl.constexpr,
    KEEP: tl.constexpr,
    SAVES: tl.constexpr,
    RAW: tl.constexpr,
    WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    PRODUCT_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    TALL: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute rows = raw + W_y y_{t−1} for TALL rows of the batch and COLUMNS columns.

    SAVES: rows is (b,l,K), otherwise (b,K). PRODUCT_DTYPE: dtype of the factors.
    """
    t = tl.load(table + AT_FIRST) + step
    length = tl.load(table + AT_LENGTH)
    if t >= length:
        return
    row = tl.program_id(1) * TALL + tl.arange(0, TALL)
    col = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    in_batch, reads_y = row < b, col < y_columns
    y_before = aligned_address(table, AT_BEFORE, WEIGHT)
    weight = aligned_address(table, AT_WEIGHT, WEIGHT)
    product = tl.zeros([TALL, COLUMNS], tl.float32)
    if tl.program_id(0) * COLUMNS < y_columns:
        for first in range(0, d, DEPTH):
            c = first + depth
            y = tl.load(
                y_before + row[:, None] * d + c[None, :],
                mask=in_batch[:, None] & (c < d)[None, :],
                other=0.0,
            )
            w = tl.load(
                weight + col[None, :].to(tl.int64) * d + c[:, None],
                mask=reads_y[None, :] & (c < d)[:, None],
                other=0.0,
            )
            product = tl.dot(
                y.to(PRODUCT_DTYPE), w.to(PRODUCT_DTYPE), product, input_precision=PRECISION
            )
    token = row.to(tl.int64) * length + t
    if KEEP:
        product *= tl.load(address(table, AT_KEEP) + token, mask=in_batch, other=0.0)[:, None]
    mask = in_batch[:, None] & (col < columns)[None, :]
    raw = address(table, AT_RAW, RAW) + token[:, None] * raw_step + col[None, :]
    product += tl.load(raw, mask=mask, other=0.0).to(tl.float32)
    to = token if SAVES else row.to(tl.int64)
    tl.store(
        address(table, AT_ROWS, ROWS) + to[:, None] * columns + col[None, :], product, mask=mask
    )


@triton.jit(do_not_specialize=["step"])
def product_back_kernel(
    table,
    step,
    b,
    columns,
    d: tl.constexpr,
    y_columns: tl.constexpr,
    KEEP: tl.constexpr,
    WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    PRODUCT_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    TALL: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute carried (b,d) = keep · W_yᵀ d_row for TALL rows and COLUMNS channels."""
    t = tl.load(table + AT_FIRST) + step
    length = tl.load(table + AT_LENGTH)
    if t >= length:
        return
    row = tl.program_id(1) * TALL + tl.arange(0, TALL)
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    in_batch = row < b
    token = row.to(tl.int64) * length + t
    d_raw = aligned_address(table, AT_D_RAW, ROWS)
    weight = aligned_address(table, AT_WEIGHT, WEIGHT)
    product = tl.zeros([TALL, COLUMNS], tl.float32)
    for first in range(0, y_columns, DEPTH):
        col = first + depth
        d_row = tl.load(
            d_raw + token[:, None] * columns + col[None, :],
            mask=in_batch[:, None] & (col < y_columns)[None, :],
            other=0.0,
        )
        w = tl.load(
            weight + col[:, None].to(tl.int64) * d + c[None, :],
            mask=(col < y_columns)[:, None] & (c < d)[None, :],
            other=0.0,
        )
        product = tl.dot(
            d_row.to(PRODUCT_DTYPE), w.to(PRODUCT_DTYPE), product, input_precision=PRECISION
        )
    if KEEP:
        product *= tl.load(address(table, AT_KEEP) + token, mask=in_batch, other=0.0)[:, None]
    to = address(table, AT_CARRIED) + row[:, None] * d + c[None, :]
    tl.store(to, product, mask=in_batch[:, None] & (c < d)[None, :])


# Loads of a token


@triton.jit
def _load_vector(
    table, slot: tl.constexpr, offset, live, IS_GIVEN: tl.constexpr, default: tl.constexpr
):
    """Load a vector, or return `default` in all channels unless IS_GIVEN."""
    vector = tl.where(live, default, 0.0)
    if IS_GIVEN:
        vector = tl.load(address(table, slot) + offset, mask=live, other=0.0)
    return vector


@triton.jit
def _normalize_units(
    row,
    to,
    B_column,
    C_column,
    col,
    wide,
    eps,
    n,
    BC_NORM: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
):
    """Write the normalised B and C into `to` (2,g·n), and return B·C of every channel's group (D,).

    N: power of two at or above n.
    """
    bc = col * 0.0
    i = tl.arange(0, N)
    mask = i < n
    for g in tl.static_range(GROUPS):
        B = tl.load(row + B_column + g * n + i, mask=mask, other=0.0).to(tl.float32)
        C = tl.load(row + C_column + g * n + i, mask=mask, other=0.0).to(tl.float32)
        if BC_NORM:
            B /= max_length(tl.sqrt(tl.sum(B * B, 0)), eps)
            C /= max_length(tl.sqrt(tl.sum(C * C, 0)), eps)
        tl.store(to + g * n + i, B, mask=mask)
        tl.store(to + GROUPS * n + g * n + i, C, mask=mask)
        bc = tl.where(col // wide == g, tl.sum(B * C, 0), bc)
    return bc


@triton.jit
def _load_units(units, i, col, n, wide, GROUPS: tl.constexpr):
    """Load the entries i (NB,) of B or C for the group of every channel.

    Returns:
        (NB,1) with one group, otherwise (NB,D).
    """
    if GROUPS == 1:
        entries = tl.load(units + i, mask=i < n, other=0.0)[:, None]
    else:
        entry = (col // wide)[None, :] * n + i[:, None]
        mask = (i < n)[:, None] & (col < GROUPS * wide)[None, :]
        entries = tl.load(units + entry, mask=mask, other=0.0)
    return entries


@triton.jit
def _load_dt(table, token, col, live, d, headdim, KIND: tl.constexpr):
    """Load dt of each channel (D,)."""
    offset = token * d + col
    if KIND == "mamba2":
        offset = token * (d // headdim) + col // headdim
    return tl.load(address(table, AT_DT) + offset, mask=live, other=0.0)


@triton.jit
def _load_rates(table, i, col, live, d, n, headdim, KIND: tl.constexpr):
    """Load A of the states i (NB,): (NB,D), or (1,D) for FP-Mamba-2."""
    A = address(table, AT_A)
    if KIND == "mamba2":
        rates = tl.load(A + col // headdim, mask=live, other=0.0)[None, :]
    else:
        mask = (i < n)[:, None] & live[None, :]
        rates = tl.load(A + i[:, None] * d + col[None, :], mask=mask, other=0.0)
    return rates


@triton.jit
def _load_keep(table, token, KEEP: tl.constexpr):
    """Load keep of a token, or return 1."""
    keep = 1.0
    if KEEP:
        keep = tl.load(address(table, AT_KEEP) + token)
    return keep


# Forward pass


@triton.jit(do_not_specialize=["step"])
def token_kernel(
    table,
    step,
    columns,
    vectors,
    gates,
    B_column,
    C_column,
    scale,
    eps,
    kappa,
    norm_eps,
    headdim,
    d: tl.constexpr,
    n: tl.constexpr,
    r: tl.constexpr,
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,
    ACT: tl.constexpr,
    SEQUENTIAL: tl.constexpr,
    BC_NORM: tl.constexpr,
    NORM: tl.constexpr,
    KEEP: tl.constexpr,
    GATE: tl.constexpr,
    SKIP: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    SAVES: tl.constexpr,
    ROWS: tl.constexpr,
    WEIGHT: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    NB: tl.constexpr,
    N: tl.constexpr,
):
    """Solve a token of a sequence: from the row and the state to y and the next state.

    SAVES: rows is (b,l,K), and the roots are stored for a backward pass.
    """
    t = tl.load(table + AT_FIRST) + step
    length = tl.load(table + AT_LENGTH)
    if t >= length:
        return
    # 1. Load the inputs.
    b = tl.program_id(0).to(tl.int64)
    token = b * length + t
    col = tl.arange(0, D)
    live = col < d
    wide: tl.constexpr = d // GROUPS
    row = address(table, AT_ROWS, ROWS) + (token if SAVES else b) * columns
    x = tl.load(address(table, AT_X) + token * d + col, mask=live, other=0.0)
    dt = _load_dt(table, token, col, live, d, headdim, KIND)
    keep = _load_keep(table, token, KEEP)
    gate = _load_vector(table, AT_GATE, token * d + col, live, GATE, 1.0)
    skip = _load_vector(table, AT_D, col, live, SKIP, 0.0)
    weight = _load_vector(table, AT_NORM_WEIGHT, col, live, WEIGHTED, 1.0)
    bias = _load_vector(table, AT_NORM_BIAS, col, live, BIASED, 0.0)
    state = address(table, AT_STATE) + b * (n * d)
    inflow_address = address(table, AT_INFLOW) + b * d + col
    units = address(table, AT_UNITS) + b * (4 * GROUPS * n)
    # 2. Complete the state of the previous token, let it decay, and compute the history H C.
    if KIND == "rnn":
        decay = tl.load(address(table, AT_A) + token * d + col, mask=live, other=0.0) * keep
        history = decay * tl.load(state + col, mask=live, other=0.0)
        gain = dt + skip
    else:
        current_units = units + (t % 2) * (2 * GROUPS * n)
        previous_B = units + ((t + 1) % 2) * (2 * GROUPS * n)
        bc = _normalize_units(
            row, current_units, B_column, C_column, col, wide, eps, n, BC_NORM, GROUPS, N
        )
        tl.debug_barrier()  # threads read what other threads have written
        inflow = tl.load(inflow_address, mask=live, other=0.0)
        history = tl.zeros([D], tl.float32)
        for first in range(0, n, NB):
            i = first + tl.arange(0, NB)
            offset = state + i[:, None] * d + col[None, :]
            mask = (i < n)[:, None] & live[None, :]
            h = tl.load(offset, mask=mask, other=0.0)
            h += inflow[None, :] * _load_units(previous_B, i, col, n, wide, GROUPS)
            h *= tl.exp(dt[None, :] * _load_rates(table, i, col, live, d, n, headdim, KIND)) * keep
            tl.store(offset, h, mask=mask)
            history += tl.sum(
                h * _load_units(current_units + GROUPS * n, i, col, n, wide, GROUPS), 0
            )
        gain = dt * bc + skip
    # 3. Solve the equation.
    u, _, _, _, _, _, map, _, Ux = compute_reflections(
        row, x, col, live, d, r, vectors, gates, scale, eps, kappa, ACT, SEQUENTIAL, R
    )
    s, outcome = solve_equation(
        u, map, Ux, x, history, gain, gate, weight, bias, live, d, norm_eps, NORM, r, R
    )
    _, mixed = compute_mixed(u, map, Ux, s, x)
    normed, _ = apply_norm((history + gain * mixed) * gate, live, d, norm_eps, NORM)
    y = normed * weight + bias
    # 4. Store the results.
    tl.store(address(table, AT_Y) + token * d + col, y, mask=live)
    tl.store(address(table, AT_BEFORE, WEIGHT) + b * d + col, y, mask=live)
    tl.store(address(table, AT_OUTCOME, tl.uint8) + token, outcome.to(tl.uint8))
    if SAVES:
        j = tl.arange(0, R)
        tl.store(address(table, AT_ROOTS) + token * r + j, s, mask=j < r)
    if KIND == "rnn":
        tl.store(state + col, y, mask=live)
    else:
        tl.store(inflow_address, dt * mixed, mask=live)


@triton.jit
def settle_kernel(
    table,
    chunk,
    d,
    wide,
    n: tl.constexpr,
    ENTERING: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    NB: tl.constexpr,
):
    """Compute h = state + inflow Bᵀ for D channels of a sequence.

    ENTERING: store the state before the chunk in its checkpoint (b,chunks,n,d). Otherwise: after
    the last token, store the final state in place.
    """
    b = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * D + tl.arange(0, D)
    live = col < d
    state = address(table, AT_STATE) + b * n * d
    t = tl.load(table + AT_FIRST)
    to = state
    if ENTERING:
        chunks = (tl.load(table + AT_LENGTH) + chunk - 1) // chunk
        to = address(table, AT_CHECKPOINTS) + (b * chunks + t // chunk) * n * d
    else:
        t = tl.load(table + AT_LENGTH)
    inflow = tl.load(address(table, AT_INFLOW) + b * d + col, mask=live, other=0.0)
    previous_B = address(table, AT_UNITS) + (b * 2 + (t + 1) % 2) * (2 * GROUPS * n)
    for first in range(0, n, NB):
        i = first + tl.arange(0, NB)
        mask = (i < n)[:, None] & live[None, :]
        h = tl.load(state + i[:, None] * d + col[None, :], mask=mask, other=0.0)
        h += inflow[None, :] * _load_units(previous_B, i, col, n, wide, GROUPS)
        tl.store(to + i[:, None] * d + col[None, :], h, mask=mask)


# Backward pass


@triton.jit
def recompute_kernel(
    table,
    columns,
    vectors,
    gates,
    B_column,
    C_column,
    scale,
    eps,
    kappa,
    headdim,
    chunk,
    d: tl.constexpr,
    n: tl.constexpr,
    r: tl.constexpr,
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,
    ACT: tl.constexpr,
    SEQUENTIAL: tl.constexpr,
    BC_NORM: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    NB: tl.constexpr,
    N: tl.constexpr,
):
    """Recompute a token's addition to the state: `inflows` (b,c,d) and `all_units` (b,c,2,g·n)."""
    b = tl.program_id(0).to(tl.int64)
    step = tl.program_id(1)
    t = tl.load(table + AT_FIRST) + step
    length = tl.load(table + AT_LENGTH)
    if t >= length:
        return
    token = b * length + t
    col = tl.arange(0, D)
    live = col < d
    row = address(table, AT_ROWS, ROWS) + token * columns
    x = tl.load(address(table, AT_X) + token * d + col, mask=live, other=0.0)
    dt = _load_dt(table, token, col, live, d, headdim, KIND)
    u, _, _, _, _, _, map, _, Ux = compute_reflections(
        row, x, col, live, d, r, vectors, gates, scale, eps, kappa, ACT, SEQUENTIAL, R
    )
    j = tl.arange(0, R)
    s = tl.load(address(table, AT_ROOTS) + token * r + j, mask=j < r, other=0.0)
    _, mixed = compute_mixed(u, map, Ux, s, x)
    to = b * chunk + step
    tl.store(address(table, AT_INFLOWS) + to * d + col, dt * mixed, mask=live)
    units = address(table, AT_ALL_UNITS) + to * (2 * GROUPS * n)
    _normalize_units(row, units, B_column, C_column, col, d // GROUPS, eps, n, BC_NORM, GROUPS, N)


@triton.jit
def states_kernel(
    table,
    d,
    n,
    wide,
    headdim,
    chunk: tl.constexpr,
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,
    KEEP: tl.constexpr,
    D: tl.constexpr,
    NB: tl.constexpr,
):
    """Recompute the chunk's states after their decay, `H` (b,c,n,d), and `past` = H C (b,c,d).

    A program computes D channels of a sequence. NB: power of two at or above n.
    """
    b = tl.program_id(0).to(tl.int64)
    first = tl.load(table + AT_FIRST)
    length = tl.load(table + AT_LENGTH)
    col = tl.program_id(1) * D + tl.arange(0, D)
    live = col < d
    i = tl.arange(0, NB)
    mask = (i < n)[:, None] & live[None, :]
    offset = i[:, None] * d + col[None, :]
    chunks = (length + chunk - 1) // chunk
    entering = address(table, AT_CHECKPOINTS) + (b * chunks + first // chunk) * n * d
    h = tl.load(entering + offset, mask=mask, other=0.0)
    A = _load_rates(table, i, col, live, d, n, headdim, KIND)
    for step in range(0, chunk):
        t = first + step
        if t < length:
            token = b * length + t
            chunk_token = b * chunk + step
            dt = _load_dt(table, token, col, live, d, headdim, KIND)
            h *= tl.exp(dt[None, :] * A) * _load_keep(table, token, KEEP)
            tl.store(address(table, AT_H) + chunk_token * n * d + offset, h, mask=mask)
            units = address(table, AT_ALL_UNITS) + chunk_token * (2 * GROUPS * n)
            past = tl.sum(h * _load_units(units + GROUPS * n, i, col, n, wide, GROUPS), 0)
            tl.store(address(table, AT_PAST) + chunk_token * d + col, past, mask=live)
            inflow = tl.load(
                address(table, AT_INFLOWS) + chunk_token * d + col, mask=live, other=0.0
            )
            h += inflow[None, :] * _load_units(units, i, col, n, wide, GROUPS)


@triton.jit
def _load_lambda(table, token, b, col, live, d):
    """Return λ = ∂y_t + carried (D,), and update the largest ‖λ‖ of the sequence."""
    carried = tl.load(address(table, AT_CARRIED) + b * d + col, mask=live, other=0.0)
    grad_y = tl.load(address(table, AT_GRAD_Y) + token * d + col, mask=live, other=0.0)
    lambda_ = grad_y + carried
    size = tl.sqrt(tl.sum(lambda_ * lambda_, 0))
    largest = address(table, AT_LARGEST) + b
    previous = tl.load(largest)
    tl.debug_barrier()
    tl.store(largest, tl.where(size <= previous, previous, size))
    return lambda_


@triton.jit
def _accumulate(table, slot: tl.constexpr, offset, value, live):
    """Add a value to a sum over time."""
    to = address(table, slot) + offset
    tl.store(to, tl.load(to, mask=live, other=0.0) + value, mask=live)


@triton.jit
def _backprop_units(
    row,
    d_row,
    sums,
    units,
    column,
    part: tl.constexpr,
    group,
    d_bc,
    eps,
    n,
    GROUPS: tl.constexpr,
    BC_NORM: tl.constexpr,
    N: tl.constexpr,
):
    """Backpropagate from a group's B (part 0) or C (part 1), and from B·C, to the row.

    sums, units: (2,g·n) of the token. column: first column of B or C in the row. N: power of two at
    or above n.
    """
    mask = tl.arange(0, N) < n
    i = group * n + tl.arange(0, N)
    unit = tl.load(units + part * GROUPS * n + i, mask=mask, other=0.0)
    other = tl.load(units + (1 - part) * GROUPS * n + i, mask=mask, other=0.0)
    gradient = tl.load(sums + part * GROUPS * n + i, mask=mask, other=0.0) + d_bc * other
    if BC_NORM:
        raw_unit = tl.load(row + column + i, mask=mask, other=0.0).to(tl.float32)
        length = tl.sqrt(tl.sum(raw_unit * raw_unit, 0))
        dot = tl.where(length < eps, 0.0, tl.sum(gradient * unit, 0))
        gradient = (gradient - dot * unit) / max_length(length, eps)
    tl.store(d_row + column + i, gradient, mask=mask)


@triton.jit(do_not_specialize=["step"])
def token_back_kernel(
    table,
    step,
    columns,
    vectors,
    gates,
    B_column,
    C_column,
    scale,
    eps,
    kappa,
    norm_eps,
    headdim,
    chunk,
    d: tl.constexpr,
    n: tl.constexpr,
    r: tl.constexpr,
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,
    ACT: tl.constexpr,
    SEQUENTIAL: tl.constexpr,
    BC_NORM: tl.constexpr,
    NORM: tl.constexpr,
    KEEP: tl.constexpr,
    GATE: tl.constexpr,
    SKIP: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    START: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    NB: tl.constexpr,
    N: tl.constexpr,
):
    """Backpropagate through a token of a sequence.

    It computes the gradients of the token's inputs and of the state before it, from the gradients
    of y_t and of the state after it. START: an FP-RNN's `state` (b,d) is h_0.
    """
    first_token = tl.load(table + AT_FIRST)
    t = first_token + step
    length = tl.load(table + AT_LENGTH)
    if t >= length:
        return
    # 1. Load the inputs of the forward pass.
    b = tl.program_id(0).to(tl.int64)
    token = b * length + t
    chunk_token = b * chunk + step
    col = tl.arange(0, D)
    live = col < d
    wide: tl.constexpr = d // GROUPS
    row = address(table, AT_ROWS, ROWS) + token * columns
    d_row = address(table, AT_D_RAW, ROWS) + token * columns
    x = tl.load(address(table, AT_X) + token * d + col, mask=live, other=0.0)
    dt = _load_dt(table, token, col, live, d, headdim, KIND)
    keep = _load_keep(table, token, KEEP)
    gate = _load_vector(table, AT_GATE, token * d + col, live, GATE, 1.0)
    skip = _load_vector(table, AT_D, col, live, SKIP, 0.0)
    weight = _load_vector(table, AT_NORM_WEIGHT, col, live, WEIGHTED, 1.0)
    bias = _load_vector(table, AT_NORM_BIAS, col, live, BIASED, 0.0)
    j = tl.arange(0, R)
    s = tl.load(address(table, AT_ROOTS) + token * r + j, mask=j < r, other=0.0)
    failed = (tl.load(address(table, AT_OUTCOME, tl.uint8) + token).to(tl.int32) & FAILED) != 0
    u, raw_vectors, size, a, gram, unscaled_map, map, shrink, Ux = compute_reflections(
        row, x, col, live, d, r, vectors, gates, scale, eps, kappa, ACT, SEQUENTIAL, R
    )
    lambda_ = _load_lambda(table, token, b, col, live, d)
    mu = address(table, AT_MU) + b * (n * d)
    # 2. Compute the history, and the gradient of the token's addition to the state.
    mu_B = tl.zeros([D], tl.float32)
    if KIND == "rnn":
        lambda_ += tl.load(mu + col, mask=live, other=0.0)
        decay = tl.load(address(table, AT_A) + token * d + col, mask=live, other=0.0)
        has_previous = col < tl.where(t > 0, d, 0)
        h = tl.load(address(table, AT_Y) + (token - 1) * d + col, mask=has_previous, other=0.0)
        if START:
            is_first = live & (has_previous == 0)
            h += tl.load(address(table, AT_STATE) + b * d + col, mask=is_first, other=0.0)
        history = decay * keep * h
        bc = tl.where(live, 1.0, 0.0)
    else:
        units = address(table, AT_ALL_UNITS) + chunk_token * (2 * GROUPS * n)
        sums = address(table, AT_SUMS) + b * (2 * GROUPS * n)
        inflow = tl.load(address(table, AT_INFLOWS) + chunk_token * d + col, mask=live, other=0.0)
        history = tl.load(address(table, AT_PAST) + chunk_token * d + col, mask=live, other=0.0)
        for first in range(0, n, NB):
            i = first + tl.arange(0, NB)
            mask = (i < n)[:, None] & live[None, :]
            mu_i = tl.load(mu + i[:, None] * d + col[None, :], mask=mask, other=0.0)
            mu_B += tl.sum(mu_i * _load_units(units, i, col, n, wide, GROUPS), 0)
            for g in tl.static_range(GROUPS):
                in_group = tl.where((col // wide == g)[None, :], mu_i * inflow[None, :], 0.0)
                tl.store(sums + g * n + i, tl.sum(in_group, 1), mask=i < n)
        bc = col * 0.0
        for g in tl.static_range(GROUPS):
            index = tl.arange(0, N)
            B = tl.load(units + g * n + index, mask=index < n, other=0.0)
            C = tl.load(units + (GROUPS + g) * n + index, mask=index < n, other=0.0)
            bc = tl.where(col // wide == g, tl.sum(B * C, 0), bc)
    # 3. Backpropagate through the token.
    e, d_gain, d_gate, dx, d_vectors, d_a, d_weight, d_bias, mixed = backprop_token(
        lambda_,
        dt * mu_B,
        failed,
        u,
        raw_vectors,
        size,
        a,
        gram,
        unscaled_map,
        map,
        shrink,
        Ux,
        s,
        x,
        history,
        dt * bc + skip,
        gate,
        weight,
        bias,
        live,
        d,
        norm_eps,
        scale,
        eps,
        kappa,
        NORM,
        ACT,
        SEQUENTIAL,
        R,
    )
    vector_mask = (j < r)[:, None] & live[None, :]
    tl.store(d_row + vectors + j[:, None] * d + col[None, :], d_vectors, mask=vector_mask)
    tl.store(d_row + gates + j, d_a, mask=j < r)
    tl.store(address(table, AT_DX) + token * d + col, dx, mask=live)
    if GATE:
        tl.store(address(table, AT_D_GATE) + token * d + col, d_gate, mask=live)
    if SKIP:
        _accumulate(table, AT_DD, b * d + col, d_gain, live)
    if WEIGHTED:
        _accumulate(table, AT_D_WEIGHT, b * d + col, d_weight, live)
    if BIASED:
        _accumulate(table, AT_D_BIAS, b * d + col, d_bias, live)
    # 4. Backpropagate through the recurrence.
    if KIND == "rnn":
        tl.store(address(table, AT_DDT) + token * d + col, d_gain, mask=live)
        tl.store(address(table, AT_DA) + token * d + col, e * h * keep, mask=live)
        tl.store(mu + col, e * decay * keep, mask=live)
    else:
        ddt = d_gain * bc + mixed * mu_B
        d_A = tl.zeros([D], tl.float32)  # summed over states
        H = address(table, AT_H) + chunk_token * (n * d)
        for first in range(0, n, NB):
            i = first + tl.arange(0, NB)
            mask = (i < n)[:, None] & live[None, :]
            offset = i[:, None] * d + col[None, :]
            H_i = tl.load(H + offset, mask=mask, other=0.0)
            A_i = _load_rates(table, i, col, live, d, n, headdim, KIND)
            d_H = tl.load(mu + offset, mask=mask, other=0.0)
            d_H += e[None, :] * _load_units(units + GROUPS * n, i, col, n, wide, GROUPS)
            for g in tl.static_range(GROUPS):
                in_group = tl.where((col // wide == g)[None, :], H_i * e[None, :], 0.0)
                tl.store(sums + (GROUPS + g) * n + i, tl.sum(in_group, 1), mask=i < n)
            d_log = d_H * H_i
            ddt += tl.sum(d_log * A_i, 0)
            if KIND == "mamba1":
                _accumulate(table, AT_DA, b * (n * d) + offset, d_log * dt[None, :], mask)
            else:
                d_A += tl.sum(d_log, 0) * dt
            tl.store(mu + offset, d_H * tl.exp(dt[None, :] * A_i) * keep, mask=mask)
        tl.store(address(table, AT_DDT) + token * d + col, ddt, mask=live)
        if KIND == "mamba2":
            _accumulate(table, AT_DA, b * d + col, d_A, live)
        tl.debug_barrier()  # threads read what other threads have written
        for g in tl.static_range(GROUPS):
            d_bc = tl.sum(tl.where(col // wide == g, d_gain * dt, 0.0), 0)
            _backprop_units(
                row, d_row, sums, units, B_column, 0, g, d_bc, eps, n, GROUPS, BC_NORM, N
            )
            _backprop_units(
                row, d_row, sums, units, C_column, 1, g, d_bc, eps, n, GROUPS, BC_NORM, N
            )
