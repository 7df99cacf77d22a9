"""The kernels of the exact token's loop over time in Triton; triton_cell.py launches them.

    forward, of a chunk:   settle, then for each token product, token
    backward, of a chunk:  again, states, then for each token, the last first, token_back and
                           product_back

All addresses and the chunk's place stand in a table in the GPU's memory (SLOTS): what is launched
is the same for all chunks, layers and passes, so that a CUDA graph can be replayed for them. What
is past the last token returns at once.

Between tokens lie `before` (b,d), y_{t−1} in the weight's dtype; `state` (b,n,d), h_{t−1} without
what token t−1 itself has added, which is `inflow` (b,d) times B; `units` (b,2,2,g·n), B and C
normalised, of the last even token and of the last odd one. Of an FP-RNN, whose state is y, `state`
is (b,d).

Shape suffixes: b rows, l length, d channels, n states, g groups, r reflections, K columns of raw, k
those of them that read sh(y), c steps of a chunk; D, R the powers of two at or above d, r.
"""

import triton
import triton.language as tl

from lm.kernels.triton.token import (
    FAILED,
    at_least,
    mixed_of,
    normed_of,
    reflections,
    solve,
    transposed,
)

SLOTS = (
    *("first", "length"),  # the chunk's first token, and how many there are
    *("raw", "weight", "x", "dt", "A", "keep", "gate", "D", "norm_weight", "norm_bias"),
    *("y", "outcome", "rows", "roots", "checkpoints"),
    *("before", "state", "inflow", "units"),
    *("grad_y", "largest", "carried", "mu"),
    *("H", "past", "inflows", "all_units", "sums"),  # of the chunk, computed again
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
    """The tensor whose address stands in a slot."""
    return tl.load(table + slot).to(tl.pointer_type(DTYPE), bitcast=True)


@triton.jit
def aligned(table, slot: tl.constexpr, DTYPE: tl.constexpr = FP32):
    """The same, known to begin at a multiple of 16 bytes, so that as many are read at once. Kernels
    of whole tokens would have three times the barriers then; no card has compared them."""
    there = tl.load(table + slot).to(tl.pointer_type(DTYPE), bitcast=True)
    return tl.multiple_of(there, 16)


# A token's products with y: rows = raw + W_y y_{t−1}, and their transpose.


@triton.jit(do_not_specialize=["step"])
def product_kernel(
    table, step, b, columns, raw_step, d: tl.constexpr, reading: tl.constexpr,
    KEEP: tl.constexpr, KEPT: tl.constexpr, RAW: tl.constexpr, WEIGHT: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    TALL: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """TALL rows of the batch and COLUMNS columns. KEPT: rows is (b,l,K), else (b,K). WIDE: the
    dtype in which is multiplied."""
    t = tl.load(table + AT_FIRST) + step
    length = tl.load(table + AT_LENGTH)
    if t >= length:
        return
    row = tl.program_id(1) * TALL + tl.arange(0, TALL)
    col = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    deep = tl.arange(0, DEPTH)
    there, reads = row < b, col < reading
    before, weight = aligned(table, AT_BEFORE, WEIGHT), aligned(table, AT_WEIGHT, WEIGHT)
    found = tl.zeros([TALL, COLUMNS], tl.float32)
    if tl.program_id(0) * COLUMNS < reading:
        for first in range(0, d, DEPTH):
            c = first + deep
            y = tl.load(
                before + row[:, None] * d + c[None, :],
                mask=there[:, None] & (c < d)[None, :],
                other=0.0,
            )
            w = tl.load(
                weight + col[None, :].to(tl.int64) * d + c[:, None],
                mask=reads[None, :] & (c < d)[:, None],
                other=0.0,
            )
            found = tl.dot(y.to(WIDE), w.to(WIDE), found, input_precision=PRECISION)
    at = row.to(tl.int64) * length + t
    if KEEP:
        found *= tl.load(address(table, AT_KEEP) + at, mask=there, other=0.0)[:, None]
    some = there[:, None] & (col < columns)[None, :]
    raw = address(table, AT_RAW, RAW) + at[:, None] * raw_step + col[None, :]
    found += tl.load(raw, mask=some, other=0.0).to(tl.float32)
    to = at if KEPT else row.to(tl.int64)
    tl.store(address(table, AT_ROWS, ROWS) + to[:, None] * columns + col[None, :], found, mask=some)


@triton.jit(do_not_specialize=["step"])
def product_back_kernel(
    table, step, b, columns, d: tl.constexpr, reading: tl.constexpr,
    KEEP: tl.constexpr, WEIGHT: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, TALL: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """carried (b,d) = keep · W_yᵀ d_row, of TALL rows and COLUMNS channels."""
    t = tl.load(table + AT_FIRST) + step
    length = tl.load(table + AT_LENGTH)
    if t >= length:
        return
    row = tl.program_id(1) * TALL + tl.arange(0, TALL)
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    deep = tl.arange(0, DEPTH)
    there = row < b
    at = row.to(tl.int64) * length + t
    d_raw, weight = aligned(table, AT_D_RAW, ROWS), aligned(table, AT_WEIGHT, WEIGHT)
    found = tl.zeros([TALL, COLUMNS], tl.float32)
    for first in range(0, reading, DEPTH):
        col = first + deep
        d_row = tl.load(
            d_raw + at[:, None] * columns + col[None, :],
            mask=there[:, None] & (col < reading)[None, :],
            other=0.0,
        )
        w = tl.load(
            weight + col[:, None].to(tl.int64) * d + c[None, :],
            mask=(col < reading)[:, None] & (c < d)[None, :],
            other=0.0,
        )
        found = tl.dot(d_row.to(WIDE), w.to(WIDE), found, input_precision=PRECISION)
    if KEEP:
        found *= tl.load(address(table, AT_KEEP) + at, mask=there, other=0.0)[:, None]
    to = address(table, AT_CARRIED) + row[:, None] * d + c[None, :]
    tl.store(to, found, mask=there[:, None] & (c < d)[None, :])


# What a token reads.


@triton.jit
def _vector(table, slot: tl.constexpr, at, live, GIVEN: tl.constexpr, missing: tl.constexpr):
    """A vector that may not be there: then `missing` where there are channels."""
    vector = tl.where(live, missing, 0.0)
    if GIVEN:
        vector = tl.load(address(table, slot) + at, mask=live, other=0.0)
    return vector


@triton.jit
def _units(
    row, to, B_at, C_at, col, wide, eps, n,
    BC_NORM: tl.constexpr, GROUPS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """B and C normalised into `to` (2,g·n); B·C of every channel's group (D,). N: at or above n."""
    bc = col * 0.0
    i = tl.arange(0, N)
    some = i < n
    for g in tl.static_range(GROUPS):
        B = tl.load(row + B_at + g * n + i, mask=some, other=0.0).to(tl.float32)
        C = tl.load(row + C_at + g * n + i, mask=some, other=0.0).to(tl.float32)
        if BC_NORM:
            B /= at_least(tl.sqrt(tl.sum(B * B, 0)), eps)
            C /= at_least(tl.sqrt(tl.sum(C * C, 0)), eps)
        tl.store(to + g * n + i, B, mask=some)
        tl.store(to + GROUPS * n + g * n + i, C, mask=some)
        bc = tl.where(col // wide == g, tl.sum(B * C, 0), bc)
    return bc


@triton.jit
def _of_groups(units, i, col, n, wide, GROUPS: tl.constexpr):
    """The entries i (NB,) of a unit vector, as every channel's group has them: (NB,1) or (NB,D)."""
    if GROUPS == 1:
        entries = tl.load(units + i, mask=i < n, other=0.0)[:, None]
    else:
        at = (col // wide)[None, :] * n + i[:, None]
        some = (i < n)[:, None] & (col < GROUPS * wide)[None, :]
        entries = tl.load(units + at, mask=some, other=0.0)
    return entries


@triton.jit
def _step_size(table, at, col, live, d, headdim, KIND: tl.constexpr):
    """dt (D,), of each channel."""
    place = at * d + col
    if KIND == "mamba2":
        place = at * (d // headdim) + col // headdim
    return tl.load(address(table, AT_DT) + place, mask=live, other=0.0)


@triton.jit
def _rates(table, i, col, live, d, n, headdim, KIND: tl.constexpr):
    """A of the states i (NB,): (NB,D), or (1,D) where it is a head's."""
    A = address(table, AT_A)
    if KIND == "mamba2":
        rates = tl.load(A + col // headdim, mask=live, other=0.0)[None, :]
    else:
        some = (i < n)[:, None] & live[None, :]
        rates = tl.load(A + i[:, None] * d + col[None, :], mask=some, other=0.0)
    return rates


@triton.jit
def _kept(table, at, KEEP: tl.constexpr):
    kept = 1.0
    if KEEP:
        kept = tl.load(address(table, AT_KEEP) + at)
    return kept


# The token.


@triton.jit(do_not_specialize=["step"])
def token_kernel(
    table, step, columns, vectors, gates, B_at, C_at, scale, eps, kappa, norm_eps, headdim,
    d: tl.constexpr, n: tl.constexpr, r: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr,
    ACT: tl.constexpr, SEQUENTIAL: tl.constexpr, BC_NORM: tl.constexpr, NORM: tl.constexpr,
    KEEP: tl.constexpr, GATE: tl.constexpr, SKIP: tl.constexpr, WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr, KEPT: tl.constexpr, ROWS: tl.constexpr, WEIGHT: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, NB: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One token of one sequence, its program's: from rows and the state to y and the next state."""
    t = tl.load(table + AT_FIRST) + step
    length = tl.load(table + AT_LENGTH)
    if t >= length:
        return
    # 1. What it reads.
    b = tl.program_id(0).to(tl.int64)
    at = b * length + t
    col = tl.arange(0, D)
    live = col < d
    wide: tl.constexpr = d // GROUPS
    row = address(table, AT_ROWS, ROWS) + (at if KEPT else b) * columns
    x = tl.load(address(table, AT_X) + at * d + col, mask=live, other=0.0)
    dt = _step_size(table, at, col, live, d, headdim, KIND)
    kept = _kept(table, at, KEEP)
    gate = _vector(table, AT_GATE, at * d + col, live, GATE, 1.0)
    skip = _vector(table, AT_D, col, live, SKIP, 0.0)
    weight = _vector(table, AT_NORM_WEIGHT, col, live, WEIGHTED, 1.0)
    bias = _vector(table, AT_NORM_BIAS, col, live, BIASED, 0.0)
    state = address(table, AT_STATE) + b * (n * d)
    inflow_at = address(table, AT_INFLOW) + b * d + col
    units = address(table, AT_UNITS) + b * (4 * GROUPS * n)
    # 2. The token before ends, and this one's history begins.
    if KIND == "rnn":
        decay = tl.load(address(table, AT_A) + at * d + col, mask=live, other=0.0) * kept
        history = decay * tl.load(state + col, mask=live, other=0.0)
        gain = dt + skip
    else:
        here = units + (t % 2) * (2 * GROUPS * n)
        B_before = units + ((t + 1) % 2) * (2 * GROUPS * n)
        bc = _units(row, here, B_at, C_at, col, wide, eps, n, BC_NORM, GROUPS, N)
        tl.debug_barrier()  # what one thread has written the others read
        inflow = tl.load(inflow_at, mask=live, other=0.0)
        history = tl.zeros([D], tl.float32)
        for first in range(0, n, NB):
            i = first + tl.arange(0, NB)
            place = state + i[:, None] * d + col[None, :]
            some = (i < n)[:, None] & live[None, :]
            h = tl.load(place, mask=some, other=0.0)
            h += inflow[None, :] * _of_groups(B_before, i, col, n, wide, GROUPS)
            h *= tl.exp(dt[None, :] * _rates(table, i, col, live, d, n, headdim, KIND)) * kept
            tl.store(place, h, mask=some)
            history += tl.sum(h * _of_groups(here + GROUPS * n, i, col, n, wide, GROUPS), 0)
        gain = dt * bc + skip
    # 3. Its equation.
    u, _, _, _, _, _, map, _, seen = reflections(
        row, x, col, live, d, r, vectors, gates, scale, eps, kappa, ACT, SEQUENTIAL, R
    )
    s, outcome = solve(
        u, map, seen, x, history, gain, gate, weight, bias, live, d, norm_eps, NORM, r, R
    )
    _, mixed = mixed_of(u, map, seen, s, x)
    normed, _ = normed_of((history + gain * mixed) * gate, live, d, norm_eps, NORM)
    y = normed * weight + bias
    # 4. What it leaves.
    tl.store(address(table, AT_Y) + at * d + col, y, mask=live)
    tl.store(address(table, AT_BEFORE, WEIGHT) + b * d + col, y, mask=live)
    tl.store(address(table, AT_OUTCOME, tl.uint8) + at, outcome.to(tl.uint8))
    if KEPT:
        j = tl.arange(0, R)
        tl.store(address(table, AT_ROOTS) + at * r + j, s, mask=j < r)
    if KIND == "rnn":
        tl.store(state + col, y, mask=live)
    else:
        tl.store(inflow_at, dt * mixed, mask=live)


@triton.jit
def settle_kernel(
    table, chunk, d, wide, n: tl.constexpr, ENTERING: tl.constexpr, GROUPS: tl.constexpr,
    D: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """h = state + inflow Bᵀ, D channels of one sequence: what enters the chunk, into its checkpoint
    (b,chunks,n,d); or not ENTERING, after the last token, in place."""
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
    B_before = address(table, AT_UNITS) + (b * 2 + (t + 1) % 2) * (2 * GROUPS * n)
    for first in range(0, n, NB):
        i = first + tl.arange(0, NB)
        some = (i < n)[:, None] & live[None, :]
        h = tl.load(state + i[:, None] * d + col[None, :], mask=some, other=0.0)
        h += inflow[None, :] * _of_groups(B_before, i, col, n, wide, GROUPS)
        tl.store(to + i[:, None] * d + col[None, :], h, mask=some)


# The way back.


@triton.jit
def again_kernel(
    table, columns, vectors, gates, B_at, C_at, scale, eps, kappa, headdim, chunk,
    d: tl.constexpr, n: tl.constexpr, r: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr,
    ACT: tl.constexpr, SEQUENTIAL: tl.constexpr, BC_NORM: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, NB: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Of one token of the chunk: what it has added to the state, `inflows` (b,c,d) and `all_units`
    (b,c,2,g·n)."""
    b = tl.program_id(0).to(tl.int64)
    step = tl.program_id(1)
    t = tl.load(table + AT_FIRST) + step
    length = tl.load(table + AT_LENGTH)
    if t >= length:
        return
    at = b * length + t
    col = tl.arange(0, D)
    live = col < d
    row = address(table, AT_ROWS, ROWS) + at * columns
    x = tl.load(address(table, AT_X) + at * d + col, mask=live, other=0.0)
    dt = _step_size(table, at, col, live, d, headdim, KIND)
    u, _, _, _, _, _, map, _, seen = reflections(
        row, x, col, live, d, r, vectors, gates, scale, eps, kappa, ACT, SEQUENTIAL, R
    )
    j = tl.arange(0, R)
    s = tl.load(address(table, AT_ROOTS) + at * r + j, mask=j < r, other=0.0)
    _, mixed = mixed_of(u, map, seen, s, x)
    to = b * chunk + step
    tl.store(address(table, AT_INFLOWS) + to * d + col, dt * mixed, mask=live)
    units = address(table, AT_ALL_UNITS) + to * (2 * GROUPS * n)
    _units(row, units, B_at, C_at, col, d // GROUPS, eps, n, BC_NORM, GROUPS, N)


@triton.jit
def states_kernel(
    table, d, n, wide, headdim, chunk: tl.constexpr,
    KIND: tl.constexpr, GROUPS: tl.constexpr, KEEP: tl.constexpr,
    D: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """The chunk's states after their decay, `H` (b,c,n,d), and `past` = H C (b,c,d), of D channels
    of one sequence. NB: at or above n."""
    b = tl.program_id(0).to(tl.int64)
    first = tl.load(table + AT_FIRST)
    length = tl.load(table + AT_LENGTH)
    col = tl.program_id(1) * D + tl.arange(0, D)
    live = col < d
    i = tl.arange(0, NB)
    some = (i < n)[:, None] & live[None, :]
    place = i[:, None] * d + col[None, :]
    chunks = (length + chunk - 1) // chunk
    entering = address(table, AT_CHECKPOINTS) + (b * chunks + first // chunk) * n * d
    h = tl.load(entering + place, mask=some, other=0.0)
    A = _rates(table, i, col, live, d, n, headdim, KIND)
    for step in range(0, chunk):
        t = first + step
        if t < length:
            at = b * length + t
            within = b * chunk + step
            dt = _step_size(table, at, col, live, d, headdim, KIND)
            h *= tl.exp(dt[None, :] * A) * _kept(table, at, KEEP)
            tl.store(address(table, AT_H) + within * n * d + place, h, mask=some)
            units = address(table, AT_ALL_UNITS) + within * (2 * GROUPS * n)
            past = tl.sum(h * _of_groups(units + GROUPS * n, i, col, n, wide, GROUPS), 0)
            tl.store(address(table, AT_PAST) + within * d + col, past, mask=live)
            inflow = tl.load(address(table, AT_INFLOWS) + within * d + col, mask=live, other=0.0)
            h += inflow[None, :] * _of_groups(units, i, col, n, wide, GROUPS)


@triton.jit
def _received(table, at, b, col, live, d):
    """What later tokens send to y_t (D,), and ∂y_t."""
    carried = tl.load(address(table, AT_CARRIED) + b * d + col, mask=live, other=0.0)
    own = tl.load(address(table, AT_GRAD_Y) + at * d + col, mask=live, other=0.0)
    lambda_ = own + carried
    size = tl.sqrt(tl.sum(lambda_ * lambda_, 0))
    largest = address(table, AT_LARGEST) + b
    before = tl.load(largest)
    tl.debug_barrier()
    tl.store(largest, tl.where(size <= before, before, size))
    return lambda_


@triton.jit
def _add(table, slot: tl.constexpr, at, value, live):
    """Added to a sum over time."""
    to = address(table, slot) + at
    tl.store(to, tl.load(to, mask=live, other=0.0) + value, mask=live)


@triton.jit
def _through_units(
    row, d_row, sums, units, column, own: tl.constexpr, group, d_bc, eps, n,
    GROUPS: tl.constexpr, BC_NORM: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """From the gradient of a group's B (own 0) or C (own 1), with that of B·C, to its part of the
    row. sums, units: (2,g·n) of the token. column: of B or C. N: at or above n."""
    some = tl.arange(0, N) < n
    i = group * n + tl.arange(0, N)
    unit = tl.load(units + own * GROUPS * n + i, mask=some, other=0.0)
    other = tl.load(units + (1 - own) * GROUPS * n + i, mask=some, other=0.0)
    gradient = tl.load(sums + own * GROUPS * n + i, mask=some, other=0.0) + d_bc * other
    if BC_NORM:
        before = tl.load(row + column + i, mask=some, other=0.0).to(tl.float32)
        length = tl.sqrt(tl.sum(before * before, 0))
        dot = tl.where(length < eps, 0.0, tl.sum(gradient * unit, 0))
        gradient = (gradient - dot * unit) / at_least(length, eps)
    tl.store(d_row + column + i, gradient, mask=some)


@triton.jit(do_not_specialize=["step"])
def token_back_kernel(
    table, step, columns, vectors, gates, B_at, C_at, scale, eps, kappa, norm_eps, headdim, chunk,
    d: tl.constexpr, n: tl.constexpr, r: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr,
    ACT: tl.constexpr, SEQUENTIAL: tl.constexpr, BC_NORM: tl.constexpr, NORM: tl.constexpr,
    KEEP: tl.constexpr, GATE: tl.constexpr, SKIP: tl.constexpr, WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr, START: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, NB: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One token of one sequence: from the gradients of y_t and of the state after it to those of
    all that it was made of, and of the state before. START: an FP-RNN's `state` (b,d) is h_0."""
    first_token = tl.load(table + AT_FIRST)
    t = first_token + step
    length = tl.load(table + AT_LENGTH)
    if t >= length:
        return
    # 1. What it has read.
    b = tl.program_id(0).to(tl.int64)
    at = b * length + t
    within = b * chunk + step
    col = tl.arange(0, D)
    live = col < d
    wide: tl.constexpr = d // GROUPS
    row = address(table, AT_ROWS, ROWS) + at * columns
    d_row = address(table, AT_D_RAW, ROWS) + at * columns
    x = tl.load(address(table, AT_X) + at * d + col, mask=live, other=0.0)
    dt = _step_size(table, at, col, live, d, headdim, KIND)
    kept = _kept(table, at, KEEP)
    gate = _vector(table, AT_GATE, at * d + col, live, GATE, 1.0)
    skip = _vector(table, AT_D, col, live, SKIP, 0.0)
    weight = _vector(table, AT_NORM_WEIGHT, col, live, WEIGHTED, 1.0)
    bias = _vector(table, AT_NORM_BIAS, col, live, BIASED, 0.0)
    j = tl.arange(0, R)
    s = tl.load(address(table, AT_ROOTS) + at * r + j, mask=j < r, other=0.0)
    failed = (tl.load(address(table, AT_OUTCOME, tl.uint8) + at).to(tl.int32) & FAILED) != 0
    u, before, size, a, gram, own, map, shrink, seen = reflections(
        row, x, col, live, d, r, vectors, gates, scale, eps, kappa, ACT, SEQUENTIAL, R
    )
    lambda_ = _received(table, at, b, col, live, d)
    mu = address(table, AT_MU) + b * (n * d)
    # 2. The history, and what the state after the token sends to what it has added.
    mu_B = tl.zeros([D], tl.float32)
    if KIND == "rnn":
        lambda_ += tl.load(mu + col, mask=live, other=0.0)
        decay = tl.load(address(table, AT_A) + at * d + col, mask=live, other=0.0)
        before_it = col < tl.where(t > 0, d, 0)
        h = tl.load(address(table, AT_Y) + (at - 1) * d + col, mask=before_it, other=0.0)
        if START:
            at_first = live & (before_it == 0)
            h += tl.load(address(table, AT_STATE) + b * d + col, mask=at_first, other=0.0)
        history = decay * kept * h
        bc = tl.where(live, 1.0, 0.0)
    else:
        units = address(table, AT_ALL_UNITS) + within * (2 * GROUPS * n)
        sums = address(table, AT_SUMS) + b * (2 * GROUPS * n)
        inflow = tl.load(address(table, AT_INFLOWS) + within * d + col, mask=live, other=0.0)
        history = tl.load(address(table, AT_PAST) + within * d + col, mask=live, other=0.0)
        for first in range(0, n, NB):
            i = first + tl.arange(0, NB)
            some = (i < n)[:, None] & live[None, :]
            mu_i = tl.load(mu + i[:, None] * d + col[None, :], mask=some, other=0.0)
            mu_B += tl.sum(mu_i * _of_groups(units, i, col, n, wide, GROUPS), 0)
            for g in tl.static_range(GROUPS):
                of_group = tl.where((col // wide == g)[None, :], mu_i * inflow[None, :], 0.0)
                tl.store(sums + g * n + i, tl.sum(of_group, 1), mask=i < n)
        bc = col * 0.0
        for g in tl.static_range(GROUPS):
            all_of = tl.arange(0, N)
            B = tl.load(units + g * n + all_of, mask=all_of < n, other=0.0)
            C = tl.load(units + (GROUPS + g) * n + all_of, mask=all_of < n, other=0.0)
            bc = tl.where(col // wide == g, tl.sum(B * C, 0), bc)
    # 3. Through the token.
    e, d_gain, d_gate, dx, d_before, d_a, d_weight, d_bias, mixed = transposed(
        lambda_, dt * mu_B, failed, u, before, size, a, gram, own, map, shrink, seen, s,
        x, history, dt * bc + skip, gate, weight, bias, live, d, norm_eps, scale, eps, kappa,
        NORM, ACT, SEQUENTIAL, R,
    )  # fmt: skip
    of_vectors = (j < r)[:, None] & live[None, :]
    tl.store(d_row + vectors + j[:, None] * d + col[None, :], d_before, mask=of_vectors)
    tl.store(d_row + gates + j, d_a, mask=j < r)
    tl.store(address(table, AT_DX) + at * d + col, dx, mask=live)
    if GATE:
        tl.store(address(table, AT_D_GATE) + at * d + col, d_gate, mask=live)
    if SKIP:
        _add(table, AT_DD, b * d + col, d_gain, live)
    if WEIGHTED:
        _add(table, AT_D_WEIGHT, b * d + col, d_weight, live)
    if BIASED:
        _add(table, AT_D_BIAS, b * d + col, d_bias, live)
    # 4. Through the recurrence.
    if KIND == "rnn":
        tl.store(address(table, AT_DDT) + at * d + col, d_gain, mask=live)
        tl.store(address(table, AT_DA) + at * d + col, e * h * kept, mask=live)
        tl.store(mu + col, e * decay * kept, mask=live)
    else:
        ddt = d_gain * bc + mixed * mu_B
        d_A = tl.zeros([D], tl.float32)  # of a head
        H = address(table, AT_H) + within * (n * d)
        for first in range(0, n, NB):
            i = first + tl.arange(0, NB)
            some = (i < n)[:, None] & live[None, :]
            place = i[:, None] * d + col[None, :]
            H_i = tl.load(H + place, mask=some, other=0.0)
            A_i = _rates(table, i, col, live, d, n, headdim, KIND)
            d_H = tl.load(mu + place, mask=some, other=0.0)
            d_H += e[None, :] * _of_groups(units + GROUPS * n, i, col, n, wide, GROUPS)
            for g in tl.static_range(GROUPS):
                of_group = tl.where((col // wide == g)[None, :], H_i * e[None, :], 0.0)
                tl.store(sums + (GROUPS + g) * n + i, tl.sum(of_group, 1), mask=i < n)
            d_log = d_H * H_i
            ddt += tl.sum(d_log * A_i, 0)
            if KIND == "mamba1":
                _add(table, AT_DA, b * (n * d) + place, d_log * dt[None, :], some)
            else:
                d_A += tl.sum(d_log, 0) * dt
            tl.store(mu + place, d_H * tl.exp(dt[None, :] * A_i) * kept, mask=some)
        tl.store(address(table, AT_DDT) + at * d + col, ddt, mask=live)
        if KIND == "mamba2":
            _add(table, AT_DA, b * d + col, d_A, live)
        tl.debug_barrier()  # what one thread has written the others read
        for g in tl.static_range(GROUPS):
            d_bc = tl.sum(tl.where(col // wide == g, d_gain * dt, 0.0), 0)
            _through_units(row, d_row, sums, units, B_at, 0, g, d_bc, eps, n, GROUPS, BC_NORM, N)
            _through_units(row, d_row, sums, units, C_at, 1, g, d_bc, eps, n, GROUPS, BC_NORM, N)
