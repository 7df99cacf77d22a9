"""Kernels of the exact solve's loop over time in Triton; triton_cell.py launches them.

    forward, per chunk:    add_inflow, then for each token: product, token
    backward, per chunk:   recompute, states, then for each token, the last first: token_back,
                           product_back

All addresses and the position of the chunk are in a table in the GPU's memory; SLOTS names its
entries. The arguments of a launch are therefore the same for all chunks, layers and passes, so that
a CUDA graph can be replayed for them. The last chunk may be longer than the sequence: programs
beyond the last token return at once. token.py defines `inputs` and `reflections`; `units` are the
normalized B and C of a token, (2,g·n).

Arguments of the kernels: columns K; y_columns k; …_column the first column of a part in a row, as
in Layout; group_width d/g; headdim the channels of a head; ACT, BC_NORM, eps and others as in
Options; KIND as in Sizes; …_DTYPE the dtype of raw, W_y or rows; STATES the states that are loaded
at once; N the power of two at or above n. Arguments in capitals are compile-time constants.

Shape suffixes: b sequences, l length, d channels, n states, g groups, r reflections, K columns of
raw, k columns of raw that depend on y_{t−1} (the first ones), c tokens of a chunk; D, R the powers
of two at or above d, r.
"""

import triton
import triton.language as tl

from lm.kernels.triton.token import (
    FAILED,
    apply_norm,
    backprop_token,
    clamp_length,
    compute_mixed,
    compute_reflections,
    solve_equation,
)

# Numbers: the chunk's first token, and the tokens of a sequence.
SLOTS: tuple[str, ...] = ("first", "length")
# Arguments, as in CellArguments; A is (n,d).
SLOTS += ("raw", "weight", "x", "dt", "A", "keep", "gate", "D", "norm_weight", "norm_bias")
# Results (b,l,…), and for the backward pass rows (b,l,K), roots (b,l,r), and h before every chunk
# (b,chunks,n,d).
SLOTS += ("y", "outcome", "rows", "roots", "checkpoints")
# Between two tokens: y_{t−1} (b,d) in W_y's dtype; h_{t−1} (b,n,d) without the addition of token
# t−1, which is inflow (b,d) times B; the units of the last even and the last odd token
# (b,2,2,g·n). The state of an FP-RNN is y, (b,d).
SLOTS += ("y_before", "state", "inflow", "units")
# The caller's gradient of y (b,l,d); the largest norm of all λ (b,), see `_load_lambda`; the
# gradient of y_{t−1} through W_y (b,d); the gradient of the state after the token, μ (b,n,d).
SLOTS += ("grad_y", "max_lambda", "d_y_before", "mu")
# Recomputed for a chunk: states after their decay (b,c,n,d), history H C (b,c,d), inflows (b,c,d),
# units (b,c,2,g·n). The gradient of a token's units, without its part through B·C (b,2,g·n).
SLOTS += ("H", "history", "inflows", "all_units", "d_units")
# Gradients of the arguments. dD, d_norm_weight and d_norm_bias are sums over time. So is dA, except
# in an FP-RNN.
SLOTS += ("d_raw", "dx", "ddt", "dA", "d_gate", "dD", "d_norm_weight", "d_norm_bias")

# AT_NAME is the index of a slot.
AT_FIRST, AT_LENGTH = (tl.constexpr(i) for i in range(2))
AT_RAW, AT_WEIGHT, AT_X, AT_DT, AT_A = (tl.constexpr(i) for i in range(2, 7))
AT_KEEP, AT_GATE, AT_D, AT_NORM_WEIGHT, AT_NORM_BIAS = (tl.constexpr(i) for i in range(7, 12))
AT_Y, AT_OUTCOME, AT_ROWS, AT_ROOTS, AT_CHECKPOINTS = (tl.constexpr(i) for i in range(12, 17))
AT_Y_BEFORE, AT_STATE, AT_INFLOW, AT_UNITS = (tl.constexpr(i) for i in range(17, 21))
AT_GRAD_Y, AT_MAX_LAMBDA, AT_D_Y_BEFORE, AT_MU = (tl.constexpr(i) for i in range(21, 25))
AT_H, AT_HISTORY, AT_INFLOWS, AT_ALL_UNITS, AT_D_UNITS = (tl.constexpr(i) for i in range(25, 30))
AT_D_RAW, AT_DX, AT_DDT, AT_DA = (tl.constexpr(i) for i in range(30, 34))
AT_D_GATE, AT_DD, AT_D_NORM_WEIGHT, AT_D_NORM_BIAS = (tl.constexpr(i) for i in range(34, 38))
FP32 = tl.constexpr(tl.float32)


@triton.jit
def address(table, slot: tl.constexpr, DTYPE: tl.constexpr = FP32):
    """Return a pointer to the tensor whose address is in a slot of the table."""
    return tl.load(table + slot).to(tl.pointer_type(DTYPE), bitcast=True)


@triton.jit
def aligned_address(table, slot: tl.constexpr, DTYPE: tl.constexpr = FP32):
    """Return a pointer to a tensor that begins at a multiple of 16 bytes, for loads of 16 bytes.

    Kernels of whole tokens do not use it: they would have three times as many barriers; this was
    not measured on a GPU.
    """
    # The alignment would be lost if this called `address`.
    pointer = tl.load(table + slot).to(tl.pointer_type(DTYPE), bitcast=True)
    return tl.multiple_of(pointer, 16)


# Products with W_y. A program computes BLOCK_B sequences and BLOCK_COLUMNS columns of the result,
# and sums DEPTH entries at once.


@triton.jit(do_not_specialize=["step"])
def product_kernel(
    table,
    step,
    b,
    columns,
    d: tl.constexpr,
    y_columns: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    SAVES: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
    ROW_DTYPE: tl.constexpr,
    PRODUCT_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute rows = raw + W_y y_{t−1}.

    SAVES: rows is (b,l,K), otherwise (b,K). PRODUCT_DTYPE: dtype of the factors.
    """
    t = tl.load(table + AT_FIRST) + step
    length = tl.load(table + AT_LENGTH)
    if t >= length:
        return
    sequence = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    depth = tl.arange(0, DEPTH)
    in_batch, reads_y = sequence < b, column < y_columns
    y_before = aligned_address(table, AT_Y_BEFORE, WEIGHT_DTYPE)
    weight = aligned_address(table, AT_WEIGHT, WEIGHT_DTYPE)
    product = tl.zeros([BLOCK_B, BLOCK_COLUMNS], tl.float32)
    if tl.program_id(0) * BLOCK_COLUMNS < y_columns:
        for first_channel in range(0, d, DEPTH):
            channel = first_channel + depth
            y = tl.load(
                y_before + sequence[:, None] * d + channel[None, :],
                mask=in_batch[:, None] & (channel < d)[None, :],
                other=0.0,
            )
            w = tl.load(
                weight + column[None, :].to(tl.int64) * d + channel[:, None],
                mask=reads_y[None, :] & (channel < d)[:, None],
                other=0.0,
            )
            product = tl.dot(
                y.to(PRODUCT_DTYPE), w.to(PRODUCT_DTYPE), product, input_precision=PRECISION
            )
    token = sequence.to(tl.int64) * length + t
    if HAS_KEEP:
        product *= tl.load(address(table, AT_KEEP) + token, mask=in_batch, other=0.0)[:, None]
    mask = in_batch[:, None] & (column < columns)[None, :]
    raw = address(table, AT_RAW, ROW_DTYPE) + token[:, None] * columns + column[None, :]
    product += tl.load(raw, mask=mask, other=0.0).to(tl.float32)
    row_index = token if SAVES else sequence.to(tl.int64)
    rows = address(table, AT_ROWS, ROW_DTYPE) + row_index[:, None] * columns + column[None, :]
    tl.store(rows, product, mask=mask)


@triton.jit(do_not_specialize=["step"])
def product_back_kernel(
    table,
    step,
    b,
    columns,
    d: tl.constexpr,
    y_columns: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
    ROW_DTYPE: tl.constexpr,
    PRODUCT_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute the gradient of y_{t−1} through W_y, keep · W_yᵀ d_row (b,d)."""
    t = tl.load(table + AT_FIRST) + step
    length = tl.load(table + AT_LENGTH)
    if t >= length:
        return
    sequence = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    channel = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    depth = tl.arange(0, DEPTH)
    in_batch = sequence < b
    token = sequence.to(tl.int64) * length + t
    d_raw = aligned_address(table, AT_D_RAW, ROW_DTYPE)
    weight = aligned_address(table, AT_WEIGHT, WEIGHT_DTYPE)
    product = tl.zeros([BLOCK_B, BLOCK_COLUMNS], tl.float32)
    for first_column in range(0, y_columns, DEPTH):
        column = first_column + depth
        d_row = tl.load(
            d_raw + token[:, None] * columns + column[None, :],
            mask=in_batch[:, None] & (column < y_columns)[None, :],
            other=0.0,
        )
        w = tl.load(
            weight + column[:, None].to(tl.int64) * d + channel[None, :],
            mask=(column < y_columns)[:, None] & (channel < d)[None, :],
            other=0.0,
        )
        product = tl.dot(
            d_row.to(PRODUCT_DTYPE), w.to(PRODUCT_DTYPE), product, input_precision=PRECISION
        )
    if HAS_KEEP:
        product *= tl.load(address(table, AT_KEEP) + token, mask=in_batch, other=0.0)[:, None]
    d_y_before = address(table, AT_D_Y_BEFORE) + sequence[:, None] * d + channel[None, :]
    tl.store(d_y_before, product, mask=in_batch[:, None] & (channel < d)[None, :])


# Loads of a token


@triton.jit
def _load_or_default(
    table, slot: tl.constexpr, offset, is_channel, EXISTS: tl.constexpr, default: tl.constexpr
):
    """Load a vector, or return `default` in all channels if it does not exist."""
    vector = tl.where(is_channel, default, 0.0)
    if EXISTS:
        vector = tl.load(address(table, slot) + offset, mask=is_channel, other=0.0)
    return vector


@triton.jit
def _load_inputs(
    table, token, channel, d, headdim, KIND, HAS_GATE, HAS_D, HAS_NORM_WEIGHT, HAS_NORM_BIAS
):
    """Load the `inputs` of a token: x, dt, gate, D, norm_weight, norm_bias, each (D,)."""
    offset, is_channel = token * d + channel, channel < d
    x = tl.load(address(table, AT_X) + offset, mask=is_channel, other=0.0)
    dt = _load_dt(table, token, channel, d, headdim, KIND)
    gate = _load_or_default(table, AT_GATE, offset, is_channel, HAS_GATE, 1.0)
    skip = _load_or_default(table, AT_D, channel, is_channel, HAS_D, 0.0)
    weight = _load_or_default(table, AT_NORM_WEIGHT, channel, is_channel, HAS_NORM_WEIGHT, 1.0)
    bias = _load_or_default(table, AT_NORM_BIAS, channel, is_channel, HAS_NORM_BIAS, 0.0)
    return x, dt, gate, skip, weight, bias


@triton.jit
def _normalize_units(
    row, units, B_column, C_column, channel, group_width, eps, n, BC_NORM, GROUPS, N
):
    """Write the normalized B and C into `units`; return B·C of every channel's group (D,)."""
    bc = channel * 0.0
    i = tl.arange(0, N)
    mask = i < n
    for g in tl.static_range(GROUPS):
        B = tl.load(row + B_column + g * n + i, mask=mask, other=0.0).to(tl.float32)
        C = tl.load(row + C_column + g * n + i, mask=mask, other=0.0).to(tl.float32)
        if BC_NORM:
            B /= clamp_length(tl.sqrt(tl.sum(B * B, 0)), eps)
            C /= clamp_length(tl.sqrt(tl.sum(C * C, 0)), eps)
        tl.store(units + g * n + i, B, mask=mask)
        tl.store(units + GROUPS * n + g * n + i, C, mask=mask)
        bc = tl.where(channel // group_width == g, tl.sum(B * C, 0), bc)
    return bc


@triton.jit
def _load_units(B_or_C, i, channel, n, group_width, GROUPS: tl.constexpr):
    """Load the entries i (STATES,) of B or C for the group of every channel.

    Returns:
        (STATES,1) with one group, otherwise (STATES,D).
    """
    if GROUPS == 1:
        entries = tl.load(B_or_C + i, mask=i < n, other=0.0)[:, None]
    else:
        offset = (channel // group_width)[None, :] * n + i[:, None]
        mask = (i < n)[:, None] & (channel < GROUPS * group_width)[None, :]
        entries = tl.load(B_or_C + offset, mask=mask, other=0.0)
    return entries


@triton.jit
def _load_dt(table, token, channel, d, headdim, KIND: tl.constexpr):
    """Load dt of each channel (D,)."""
    offset = token * d + channel
    if KIND == "mamba2":
        offset = token * (d // headdim) + channel // headdim
    return tl.load(address(table, AT_DT) + offset, mask=channel < d, other=0.0)


@triton.jit
def _load_decay_rates(table, i, channel, d, n, headdim, KIND: tl.constexpr):
    """Load A of the states i (STATES,): (STATES,D), or (1,D) for FP-Mamba-2."""
    A = address(table, AT_A)
    if KIND == "mamba2":
        A_i = tl.load(A + channel // headdim, mask=channel < d, other=0.0)[None, :]
    else:
        mask = (i < n)[:, None] & (channel < d)[None, :]
        A_i = tl.load(A + i[:, None] * d + channel[None, :], mask=mask, other=0.0)
    return A_i


@triton.jit
def _load_keep(table, token, HAS_KEEP: tl.constexpr):
    """Load keep of a token, or return 1."""
    keep = 1.0
    if HAS_KEEP:
        keep = tl.load(address(table, AT_KEEP) + token)
    return keep


# Forward pass


@triton.jit(do_not_specialize=["step"])
def token_kernel(
    table,
    step,
    columns,
    vectors_column,
    gates_column,
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
    HAS_KEEP: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_NORM_WEIGHT: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr,
    SAVES: tl.constexpr,
    ROW_DTYPE: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    STATES: tl.constexpr,
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
    sequence = tl.program_id(0).to(tl.int64)
    token = sequence * length + t
    channel = tl.arange(0, D)
    is_channel = channel < d
    group_width: tl.constexpr = d // GROUPS
    row = address(table, AT_ROWS, ROW_DTYPE) + (token if SAVES else sequence) * columns
    inputs = _load_inputs(
        table, token, channel, d, headdim, KIND, HAS_GATE, HAS_D, HAS_NORM_WEIGHT, HAS_NORM_BIAS
    )
    x, dt, gate, skip, norm_weight, norm_bias = inputs
    keep = _load_keep(table, token, HAS_KEEP)
    state = address(table, AT_STATE) + sequence * (n * d)
    inflow_address = address(table, AT_INFLOW) + sequence * d + channel
    units = address(table, AT_UNITS) + sequence * (4 * GROUPS * n)
    # 2. Complete the state of the previous token, let it decay, and compute the history H C.
    if KIND == "rnn":
        decay = tl.load(address(table, AT_A) + token * d + channel, mask=is_channel, other=0.0)
        history = decay * keep * tl.load(state + channel, mask=is_channel, other=0.0)
        gain = dt + skip
    else:
        current_units = units + (t % 2) * (2 * GROUPS * n)
        previous_B = units + ((t + 1) % 2) * (2 * GROUPS * n)
        bc = _normalize_units(
            row, current_units, B_column, C_column, channel, group_width, eps, n, BC_NORM, GROUPS, N
        )
        tl.debug_barrier()  # threads read units that other threads have written
        inflow = tl.load(inflow_address, mask=is_channel, other=0.0)
        C = current_units + GROUPS * n
        history = tl.zeros([D], tl.float32)
        for first_state in range(0, n, STATES):
            i = first_state + tl.arange(0, STATES)
            h_address = state + i[:, None] * d + channel[None, :]
            mask = (i < n)[:, None] & is_channel[None, :]
            h = tl.load(h_address, mask=mask, other=0.0)
            h += inflow[None, :] * _load_units(previous_B, i, channel, n, group_width, GROUPS)
            h *= (
                tl.exp(dt[None, :] * _load_decay_rates(table, i, channel, d, n, headdim, KIND))
                * keep
            )
            tl.store(h_address, h, mask=mask)
            history += tl.sum(h * _load_units(C, i, channel, n, group_width, GROUPS), 0)
        gain = dt * bc + skip
    # 3. Solve the equation.
    reflections = compute_reflections(
        row, x, channel, d, r, vectors_column, gates_column, scale, eps, kappa, ACT, SEQUENTIAL, R
    )
    s, outcome = solve_equation(
        reflections, inputs, history, gain, channel, d, norm_eps, NORM, r, R
    )
    _, mixed = compute_mixed(reflections, s, x)
    normed, _ = apply_norm((history + gain * mixed) * gate, channel, d, norm_eps, NORM)
    y = normed * norm_weight + norm_bias
    # 4. Store the results.
    tl.store(address(table, AT_Y) + token * d + channel, y, mask=is_channel)
    y_before = address(table, AT_Y_BEFORE, WEIGHT_DTYPE) + sequence * d + channel
    tl.store(y_before, y, mask=is_channel)
    tl.store(address(table, AT_OUTCOME, tl.uint8) + token, outcome.to(tl.uint8))
    if SAVES:
        j = tl.arange(0, R)
        tl.store(address(table, AT_ROOTS) + token * r + j, s, mask=j < r)
    if KIND == "rnn":
        tl.store(state + channel, y, mask=is_channel)
    else:
        tl.store(inflow_address, dt * mixed, mask=is_channel)


@triton.jit
def add_inflow_kernel(
    table,
    chunk,
    d,
    group_width,
    n: tl.constexpr,
    IS_CHECKPOINT: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    STATES: tl.constexpr,
):
    """Complete the state after a token, h = state + inflow Bᵀ, for D channels of a sequence.

    IS_CHECKPOINT: store the state before the chunk in `checkpoints`. Otherwise: after the last
    token, store the final state in place.
    """
    sequence = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * D + tl.arange(0, D)
    is_channel = channel < d
    state = address(table, AT_STATE) + sequence * n * d
    t = tl.load(table + AT_FIRST)  # the token before which the state is complete
    target = state
    if IS_CHECKPOINT:
        chunk_count = (tl.load(table + AT_LENGTH) + chunk - 1) // chunk
        target = address(table, AT_CHECKPOINTS) + (sequence * chunk_count + t // chunk) * n * d
    else:
        t = tl.load(table + AT_LENGTH)
    inflow_address = address(table, AT_INFLOW) + sequence * d + channel
    inflow = tl.load(inflow_address, mask=is_channel, other=0.0)
    previous_B = address(table, AT_UNITS) + (sequence * 2 + (t + 1) % 2) * (2 * GROUPS * n)
    for first_state in range(0, n, STATES):
        i = first_state + tl.arange(0, STATES)
        mask = (i < n)[:, None] & is_channel[None, :]
        h = tl.load(state + i[:, None] * d + channel[None, :], mask=mask, other=0.0)
        h += inflow[None, :] * _load_units(previous_B, i, channel, n, group_width, GROUPS)
        tl.store(target + i[:, None] * d + channel[None, :], h, mask=mask)


# Backward pass


@triton.jit
def recompute_kernel(
    table,
    columns,
    vectors_column,
    gates_column,
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
    ROW_DTYPE: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    STATES: tl.constexpr,
    N: tl.constexpr,
):
    """Recompute a token's addition to the state: `inflows` and `all_units`."""
    sequence = tl.program_id(0).to(tl.int64)
    step = tl.program_id(1)
    t = tl.load(table + AT_FIRST) + step
    length = tl.load(table + AT_LENGTH)
    if t >= length:
        return
    token = sequence * length + t
    channel = tl.arange(0, D)
    is_channel = channel < d
    row = address(table, AT_ROWS, ROW_DTYPE) + token * columns
    x = tl.load(address(table, AT_X) + token * d + channel, mask=is_channel, other=0.0)
    dt = _load_dt(table, token, channel, d, headdim, KIND)
    reflections = compute_reflections(
        row, x, channel, d, r, vectors_column, gates_column, scale, eps, kappa, ACT, SEQUENTIAL, R
    )
    j = tl.arange(0, R)
    s = tl.load(address(table, AT_ROOTS) + token * r + j, mask=j < r, other=0.0)
    _, mixed = compute_mixed(reflections, s, x)
    chunk_token = sequence * chunk + step
    inflows = address(table, AT_INFLOWS) + chunk_token * d + channel
    tl.store(inflows, dt * mixed, mask=is_channel)
    units = address(table, AT_ALL_UNITS) + chunk_token * (2 * GROUPS * n)
    _normalize_units(
        row, units, B_column, C_column, channel, d // GROUPS, eps, n, BC_NORM, GROUPS, N
    )


@triton.jit
def states_kernel(
    table,
    d,
    n,
    group_width,
    headdim,
    chunk: tl.constexpr,
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    D: tl.constexpr,
    STATES: tl.constexpr,
):
    """Recompute the chunk's states after their decay, `H`, and `history` = H C.

    A program computes D channels of a sequence. STATES: power of two at or above n.
    """
    sequence = tl.program_id(0).to(tl.int64)
    first = tl.load(table + AT_FIRST)
    length = tl.load(table + AT_LENGTH)
    channel = tl.program_id(1) * D + tl.arange(0, D)
    is_channel = channel < d
    i = tl.arange(0, STATES)
    mask = (i < n)[:, None] & is_channel[None, :]
    offset = i[:, None] * d + channel[None, :]
    chunk_count = (length + chunk - 1) // chunk
    checkpoint = address(table, AT_CHECKPOINTS) + (sequence * chunk_count + first // chunk) * n * d
    h = tl.load(checkpoint + offset, mask=mask, other=0.0)
    A = _load_decay_rates(table, i, channel, d, n, headdim, KIND)
    for step in range(0, chunk):
        t = first + step
        if t < length:
            token = sequence * length + t
            chunk_token = sequence * chunk + step
            dt = _load_dt(table, token, channel, d, headdim, KIND)
            h *= tl.exp(dt[None, :] * A) * _load_keep(table, token, HAS_KEEP)
            tl.store(address(table, AT_H) + chunk_token * n * d + offset, h, mask=mask)
            B = address(table, AT_ALL_UNITS) + chunk_token * (2 * GROUPS * n)
            C = B + GROUPS * n
            history = tl.sum(h * _load_units(C, i, channel, n, group_width, GROUPS), 0)
            history_address = address(table, AT_HISTORY) + chunk_token * d + channel
            tl.store(history_address, history, mask=is_channel)
            inflow_address = address(table, AT_INFLOWS) + chunk_token * d + channel
            inflow = tl.load(inflow_address, mask=is_channel, other=0.0)
            h += inflow[None, :] * _load_units(B, i, channel, n, group_width, GROUPS)


@triton.jit
def _load_lambda(table, token, sequence, channel, d):
    """Return λ, the gradient of y_t, and update the sequence's largest ‖λ‖.

    λ (D,) is the sum of the caller's gradient and the gradient through W_y of the next token.
    """
    offset, is_channel = sequence * d + channel, channel < d
    d_y_before = tl.load(address(table, AT_D_Y_BEFORE) + offset, mask=is_channel, other=0.0)
    grad_y = tl.load(address(table, AT_GRAD_Y) + token * d + channel, mask=is_channel, other=0.0)
    lambda_ = grad_y + d_y_before
    lambda_norm = tl.sqrt(tl.sum(lambda_ * lambda_, 0))
    max_lambda = address(table, AT_MAX_LAMBDA) + sequence
    previous = tl.load(max_lambda)
    tl.debug_barrier()
    tl.store(max_lambda, tl.where(lambda_norm <= previous, previous, lambda_norm))
    return lambda_


@triton.jit
def _accumulate(table, slot: tl.constexpr, offset, value, mask):
    """Add a value to a sum over time."""
    total = address(table, slot) + offset
    tl.store(total, tl.load(total, mask=mask, other=0.0) + value, mask=mask)


@triton.jit
def _backprop_units(
    row, d_row, d_units, units, column, part, group, d_bc, eps, n, GROUPS, BC_NORM, N
):
    """Backpropagate from a group's B (part 0) or C (part 1), and from B·C, to the row.

    column: first column of B or C in the row.
    """
    mask = tl.arange(0, N) < n
    i = group * n + tl.arange(0, N)
    unit = tl.load(units + part * GROUPS * n + i, mask=mask, other=0.0)
    other = tl.load(units + (1 - part) * GROUPS * n + i, mask=mask, other=0.0)
    gradient = tl.load(d_units + part * GROUPS * n + i, mask=mask, other=0.0) + d_bc * other
    if BC_NORM:
        raw_unit = tl.load(row + column + i, mask=mask, other=0.0).to(tl.float32)
        raw_length = tl.sqrt(tl.sum(raw_unit * raw_unit, 0))
        dot = tl.where(raw_length < eps, 0.0, tl.sum(gradient * unit, 0))
        gradient = (gradient - dot * unit) / clamp_length(raw_length, eps)
    tl.store(d_row + column + i, gradient, mask=mask)


@triton.jit
def _backprop_inflow(
    mu, inflow, units, d_units, channel, d, n, GROUPS: tl.constexpr, STATES: tl.constexpr
):
    """Backpropagate from the state to inflow Bᵀ: write B's gradient, return inflow's (D,)."""
    d_inflow = tl.zeros_like(inflow)
    for first_state in range(0, n, STATES):
        i = first_state + tl.arange(0, STATES)
        mask = (i < n)[:, None] & (channel < d)[None, :]
        mu_i = tl.load(mu + i[:, None] * d + channel[None, :], mask=mask, other=0.0)
        d_inflow += tl.sum(mu_i * _load_units(units, i, channel, n, d // GROUPS, GROUPS), 0)
        for g in tl.static_range(GROUPS):
            in_group = (channel // (d // GROUPS) == g)[None, :]
            d_B = tl.sum(tl.where(in_group, mu_i * inflow[None, :], 0.0), 1)
            tl.store(d_units + g * n + i, d_B, mask=i < n)
    return d_inflow


@triton.jit
def _compute_bc(units, channel, group_width, n, GROUPS: tl.constexpr, N: tl.constexpr):
    """Return B·C of every channel's group (D,)."""
    bc = channel * 0.0
    for g in tl.static_range(GROUPS):
        i = tl.arange(0, N)
        B = tl.load(units + g * n + i, mask=i < n, other=0.0)
        C = tl.load(units + (GROUPS + g) * n + i, mask=i < n, other=0.0)
        bc = tl.where(channel // group_width == g, tl.sum(B * C, 0), bc)
    return bc


@triton.jit
def _backprop_state(
    table, sequence, tensors, d_history, dt, keep, ddt, channel, headdim, d, n, KIND, GROUPS, STATES
):
    """Backpropagate from the history H C, and through the decay of the state.

    tensors: H, C, μ, and the gradient of C, which is written. μ is replaced by the gradient of the
    state before the token. The gradient of A is added to its sum.

    Returns:
        ddt plus the gradient of dt through the decay, (D,).
    """
    H, C, mu, d_C = tensors
    group_width: tl.constexpr = d // GROUPS
    is_channel = channel < d
    d_A = tl.zeros_like(dt)  # summed over states
    for first_state in range(0, n, STATES):
        i = first_state + tl.arange(0, STATES)
        mask = (i < n)[:, None] & is_channel[None, :]
        offset = i[:, None] * d + channel[None, :]
        H_i = tl.load(H + offset, mask=mask, other=0.0)
        A_i = _load_decay_rates(table, i, channel, d, n, headdim, KIND)
        d_H = tl.load(mu + offset, mask=mask, other=0.0)
        d_H += d_history[None, :] * _load_units(C, i, channel, n, group_width, GROUPS)
        for g in tl.static_range(GROUPS):
            in_group = (channel // group_width == g)[None, :]
            d_C_g = tl.sum(tl.where(in_group, H_i * d_history[None, :], 0.0), 1)
            tl.store(d_C + g * n + i, d_C_g, mask=i < n)
        d_log_decay = d_H * H_i
        ddt += tl.sum(d_log_decay * A_i, 0)
        if KIND == "mamba1":
            dA_offset = sequence * (n * d) + offset
            _accumulate(table, AT_DA, dA_offset, d_log_decay * dt[None, :], mask)
        else:
            d_A += tl.sum(d_log_decay, 0) * dt
        tl.store(mu + offset, d_H * tl.exp(dt[None, :] * A_i) * keep, mask=mask)
    if KIND == "mamba2":
        _accumulate(table, AT_DA, sequence * d + channel, d_A, is_channel)
    return ddt


@triton.jit(do_not_specialize=["step"])
def token_back_kernel(
    table,
    step,
    columns,
    vectors_column,
    gates_column,
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
    HAS_KEEP: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_NORM_WEIGHT: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr,
    HAS_H0: tl.constexpr,
    ROW_DTYPE: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    STATES: tl.constexpr,
    N: tl.constexpr,
):
    """Backpropagate through a token of a sequence.

    It computes the gradients of the token's inputs and of the state before it, from the gradients
    of y_t and of the state after it. HAS_H0: an FP-RNN's `state` (b,d) is h_0.
    """
    t = tl.load(table + AT_FIRST) + step
    length = tl.load(table + AT_LENGTH)
    if t >= length:
        return
    # 1. Load the inputs of the forward pass.
    sequence = tl.program_id(0).to(tl.int64)
    token = sequence * length + t
    chunk_token = sequence * chunk + step
    channel = tl.arange(0, D)
    is_channel = channel < d
    group_width: tl.constexpr = d // GROUPS
    row = address(table, AT_ROWS, ROW_DTYPE) + token * columns
    d_row = address(table, AT_D_RAW, ROW_DTYPE) + token * columns
    inputs = _load_inputs(
        table, token, channel, d, headdim, KIND, HAS_GATE, HAS_D, HAS_NORM_WEIGHT, HAS_NORM_BIAS
    )
    x, dt, _, skip, _, _ = inputs
    keep = _load_keep(table, token, HAS_KEEP)
    j = tl.arange(0, R)
    s = tl.load(address(table, AT_ROOTS) + token * r + j, mask=j < r, other=0.0)
    outcome = tl.load(address(table, AT_OUTCOME, tl.uint8) + token).to(tl.int32)
    has_failed = (outcome & FAILED) != 0
    reflections = compute_reflections(
        row, x, channel, d, r, vectors_column, gates_column, scale, eps, kappa, ACT, SEQUENTIAL, R
    )
    lambda_ = _load_lambda(table, token, sequence, channel, d)
    mu = address(table, AT_MU) + sequence * (n * d)
    # 2. Load the history, and compute the gradient of the token's addition to the state.
    d_inflow = tl.zeros([D], tl.float32)
    if KIND == "rnn":
        lambda_ += tl.load(mu + channel, mask=is_channel, other=0.0)
        decay = tl.load(address(table, AT_A) + token * d + channel, mask=is_channel, other=0.0)
        has_previous = channel < tl.where(t > 0, d, 0)
        previous_y = address(table, AT_Y) + (token - 1) * d + channel
        h = tl.load(previous_y, mask=has_previous, other=0.0)
        if HAS_H0:
            is_first = is_channel & (has_previous == 0)
            h0 = address(table, AT_STATE) + sequence * d + channel
            h += tl.load(h0, mask=is_first, other=0.0)
        history = decay * keep * h
        bc = tl.where(is_channel, 1.0, 0.0)
    else:
        units = address(table, AT_ALL_UNITS) + chunk_token * (2 * GROUPS * n)
        d_units = address(table, AT_D_UNITS) + sequence * (2 * GROUPS * n)
        offset = chunk_token * d + channel
        inflow = tl.load(address(table, AT_INFLOWS) + offset, mask=is_channel, other=0.0)
        history = tl.load(address(table, AT_HISTORY) + offset, mask=is_channel, other=0.0)
        d_inflow = _backprop_inflow(mu, inflow, units, d_units, channel, d, n, GROUPS, STATES)
        bc = _compute_bc(units, channel, group_width, n, GROUPS, N)
    # 3. Backpropagate through the token.
    gain = dt * bc + skip
    d_history, d_gain, d_gate, dx, d_vectors, d_a, d_norm_weight, d_norm_bias, mixed = (
        backprop_token(
            lambda_,
            dt * d_inflow,
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
            NORM,
            ACT,
            SEQUENTIAL,
            R,
        )
    )
    vector_mask = (j < r)[:, None] & is_channel[None, :]
    d_vectors_address = d_row + vectors_column + j[:, None] * d + channel[None, :]
    tl.store(d_vectors_address, d_vectors, mask=vector_mask)
    tl.store(d_row + gates_column + j, d_a, mask=j < r)
    tl.store(address(table, AT_DX) + token * d + channel, dx, mask=is_channel)
    if HAS_GATE:
        tl.store(address(table, AT_D_GATE) + token * d + channel, d_gate, mask=is_channel)
    sum_offset = sequence * d + channel
    if HAS_D:
        _accumulate(table, AT_DD, sum_offset, d_gain, is_channel)
    if HAS_NORM_WEIGHT:
        _accumulate(table, AT_D_NORM_WEIGHT, sum_offset, d_norm_weight, is_channel)
    if HAS_NORM_BIAS:
        _accumulate(table, AT_D_NORM_BIAS, sum_offset, d_norm_bias, is_channel)
    # 4. Backpropagate through the recurrence.
    ddt_address = address(table, AT_DDT) + token * d + channel
    if KIND == "rnn":
        tl.store(ddt_address, d_gain, mask=is_channel)
        d_decay = d_history * h * keep
        tl.store(address(table, AT_DA) + token * d + channel, d_decay, mask=is_channel)
        tl.store(mu + channel, d_history * decay * keep, mask=is_channel)
    else:
        ddt = d_gain * bc + mixed * d_inflow
        H = address(table, AT_H) + chunk_token * (n * d)
        C, d_C = units + GROUPS * n, d_units + GROUPS * n
        tensors = (H, C, mu, d_C)
        ddt = _backprop_state(
            table,
            sequence,
            tensors,
            d_history,
            dt,
            keep,
            ddt,
            channel,
            headdim,
            d,
            n,
            KIND,
            GROUPS,
            STATES,
        )
        tl.store(ddt_address, ddt, mask=is_channel)
        tl.debug_barrier()  # threads read gradients that other threads have written
        for g in tl.static_range(GROUPS):
            d_bc = tl.sum(tl.where(channel // group_width == g, d_gain * dt, 0.0), 0)
            _backprop_units(
                row, d_row, d_units, units, B_column, 0, g, d_bc, eps, n, GROUPS, BC_NORM, N
            )
            _backprop_units(
                row, d_row, d_units, units, C_column, 1, g, d_bc, eps, n, GROUPS, BC_NORM, N
            )
