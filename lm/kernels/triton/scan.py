"""The `selective_scan` kernel for GPUs: Mamba-1's scan with its gradient, in Triton.

Shape suffixes: b batch, l length, d channels, n states; k chunks of time, t tiles of TILE steps. A
step is a token.

    h_t = keep_t exp(dt_t A) ⊙ h_{t−1} + (dt_t ⊙ x_t) B_tᵀ        y_t = h_t C_t

lm.model.scan.selective_scan computes the same in plain PyTorch and is the oracle of the tests. A
program goes through time with the states of BLOCK_D channels in registers: each column of the (n,d)
tile belongs to one thread, so that y needs no exchange between threads. The loop over time leaves
most of a GPU idle if the batch has few sequences and channels. Long inputs are then cut into k
chunks (`_chunk_length`):

    1. `_scan_kernel` computes the final state of every chunk except the last, from a zero state,
       and the chunk's decay exp(A Σdt).
    2. `_carry_kernel` computes the state before every chunk, in a loop over the chunks.
    3. `_scan_kernel` computes y in every chunk, from the state before the chunk.

The gradient of a state, p_{t−1} = keep_t exp(dt_t A) ⊙ (p_t + grad_y_t C_tᵀ), is the same
recurrence in reverse time, and uses the same kernels. The backward pass stores h and p at the
borders of tiles; within a tile `_grad_kernel` computes all gradients, for one of the n states at a
time. The kernels store partial sums over channels and tiles, and torch adds them, so that results
are the same in every run. Nothing of size (b,l,d,n) is stored.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from lm.kernels import Unsupported
from lm.kernels.checks import needs_grad, scan_deviation
from lm.kernels.triton import build as triton_build
from lm.kernels.triton.build import MAX_GRID_SIZE, check, launch, make_dense

TILE = 16  # steps whose states the backward pass holds in registers
# Time is cut until this many warps run: about five for each of the 528 schedulers of an H100. More
# would not pay, because all chunks except the last are scanned twice.
TARGET_WARPS = 2560
MIN_CHUNK = 64  # steps
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["length", "chunk", "chunks", "zero"])
def _scan_kernel(
    value,  # in (b,l,d): x, or grad_y if REVERSE
    dt,  # in (b,l,d)
    A,  # in (n,d)
    vector,  # in (b,l,n): B, or C if REVERSE
    C,  # in (b,l,n)
    keep,  # in (b,l)
    initial_states,  # in (b,k,n,d): the state before each chunk
    chunk_states,  # out (b,k,n,d): final states from a zero state
    chunk_decays,  # out (b,k,n,d): decay over the whole chunk
    y,  # out (b,l,d)
    tile_states,  # out (b,t,n,d): the state at the border of every tile
    final_state,  # out (b,n,d): the state after the last chunk
    length,
    chunk,  # steps of a chunk
    chunks,  # number of chunks
    d,
    n,
    zero,  # 0
    value_stride_b,
    value_stride_l,
    dt_stride_b,
    dt_stride_l,
    vector_stride_b,
    vector_stride_l,
    C_stride_b,
    C_stride_l,
    REVERSE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Scan one chunk of a sequence for BLOCK_D channels.

    Arguments that are None are neither read nor written. REVERSE: go backwards in time; the state
    is then the gradient p.
    """
    # 1. Select a chunk of a sequence and BLOCK_D channels, and load their A (n,d) in base 2.
    sequence, chunk_index = tl.program_id(2).to(tl.int64), tl.program_id(1)
    if REVERSE and chunk_states is not None:
        chunk_index += 1  # the first chunk has no predecessor that needs its result
    channel, state = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    is_channel, is_state = channel < d, state < n
    mask = is_state[:, None] & is_channel[None, :]
    # `zero` is unknown at compile time and hides the alignment of the addresses. Otherwise a thread
    # would get four neighbouring channels, the states of a channel would be divided among threads,
    # and every step would exchange them.
    entry = state[:, None] * d + channel[None, :] + zero
    A_log2 = tl.load(A + entry, mask=mask, other=0.0).to(tl.float32) * LOG2E

    # 2. Compute pointers to the chunk's first step, or to its last step if REVERSE.
    begin = chunk_index * chunk
    steps = tl.minimum(chunk, length - begin)
    t = begin
    if REVERSE:
        t = begin + steps - 1
    value += sequence * value_stride_b + t.to(tl.int64) * value_stride_l
    dt += sequence * dt_stride_b + t.to(tl.int64) * dt_stride_l
    vector += sequence * vector_stride_b + t.to(tl.int64) * vector_stride_l
    if y is not None:
        C += sequence * C_stride_b + t.to(tl.int64) * C_stride_l
        y += (sequence * length + t) * d
    if REVERSE:
        value_stride_l, dt_stride_l = -value_stride_l, -dt_stride_l
        vector_stride_l = -vector_stride_l

    # 3. Load the state (n,d) before that step, and the step's value and dt. While the loop computes
    # a step, it loads value and dt of the next step from the GPU's memory.
    h = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    state_offset = (sequence * chunks + chunk_index) * n * d + entry
    if initial_states is not None:
        h = tl.load(initial_states + state_offset, mask=mask, other=0.0)
    total_dt, total_log_keep = tl.zeros([BLOCK_D], tl.float32), 0.0
    next_end = tl.where(steps > 0, d, 0)  # channels to load for the next step; 0 after the last
    next_value = tl.load(value + channel, mask=channel < next_end, other=0.0)
    next_dt = tl.load(dt + channel, mask=channel < next_end, other=0.0)
    # 4. For each step: store the state at a tile's border, update the state, and compute y.
    i = 0
    while i < steps:  # Triton 3.6 cannot interpret a range with numpy 2.4
        i += 1
        if tile_states is not None:
            if REVERSE:
                is_border = (t % TILE == TILE - 1) | (i == 1)
            else:
                is_border = t % TILE == 0
            if is_border:
                tile_index = sequence * tl.cdiv(length, TILE) + t // TILE
                tl.store(tile_states + tile_index * n * d + entry, h, mask=mask)
        value_t, dt_t = next_value.to(tl.float32), next_dt.to(tl.float32)
        next_end = tl.where(i < steps, d, 0)
        value += value_stride_l
        dt += dt_stride_l
        next_value = tl.load(value + channel, mask=channel < next_end, other=0.0)
        next_dt = tl.load(dt + channel, mask=channel < next_end, other=0.0)
        vector_t = tl.load(vector + state, mask=is_state, other=0.0).to(tl.float32)
        vector += vector_stride_l

        exponent = dt_t[None, :] * A_log2
        if keep is not None:  # a reset is a decay of 2^−∞, at no cost
            log_keep = tl.where(tl.load(keep + sequence * length + t) == 0, float("-inf"), 0.0)
            exponent += log_keep
            total_log_keep += log_keep
        if REVERSE:
            h = tl.exp2(exponent) * (h + value_t[None, :] * vector_t[:, None])
            t -= 1
        else:
            h = tl.exp2(exponent) * h + (dt_t * value_t)[None, :] * vector_t[:, None]
            t += 1
        if y is not None:
            C_t = tl.load(C + state, mask=is_state, other=0.0).to(tl.float32)
            tl.store(y + channel, tl.sum(h * C_t[:, None], axis=0), mask=is_channel)
            C += C_stride_l
            y += d
        total_dt += dt_t

    # 5. Store the results for the next kernel, and the state after the last chunk.
    if chunk_states is not None:
        tl.store(chunk_states + state_offset, h, mask=mask)
        chunk_decay = tl.exp2(total_dt[None, :] * A_log2 + total_log_keep)
        tl.store(chunk_decays + state_offset, chunk_decay, mask=mask)
    if final_state is not None:
        last = chunks - 1
        if REVERSE:
            last = 0
        if chunk_index == last:
            tl.store(final_state + sequence * n * d + entry, h, mask=mask)


@triton.jit(do_not_specialize=["chunks"])
def _carry_kernel(
    initial_state, states, decays, chunks, entries, REVERSE: tl.constexpr, BLOCK: tl.constexpr
):
    """Replace the final state of each chunk from zero by the state before the chunk.

    states and decays are (b,k,n·d), initial_state is (b,n·d), entries is n·d. REVERSE: go from
    the last chunk to the first.
    """
    sequence = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < entries
    state = tl.zeros([BLOCK], tl.float32)
    if initial_state is not None:
        state = tl.load(initial_state + sequence * entries + entry, mask=mask, other=0.0)
    i = 0
    while i < chunks:
        k = i
        if REVERSE:
            k = chunks - 1 - i
        i += 1
        offset = (sequence * chunks + k) * entries + entry
        has_next = entry < tl.where(i < chunks, entries, 0)  # not computed for the last chunk
        chunk_state = tl.load(states + offset, mask=has_next, other=0.0)
        decay = tl.load(decays + offset, mask=has_next, other=0.0)
        tl.store(states + offset, state, mask=mask)
        state = decay * state + chunk_state


@triton.jit(do_not_specialize=["length"])
def _grad_kernel(
    x,  # in (b,l,d)
    dt,  # in (b,l,d)
    A,  # in (n,d)
    B,  # in (b,n,l), l padded with zeros to whole tiles
    C,  # in (b,n,l), padded alike
    keep,  # in (b,l)
    grad_y,  # in (b,l,d)
    h_tiles,  # in (b,t,n,d): h before each tile; out: the tile's part of dA
    p_tiles,  # in (b,t,n,d): p after each tile
    dx,  # out (b,l,d)
    ddt,  # out (b,l,d)
    dB,  # out (blocks of d,b,n,l), padded: torch adds the blocks
    dC,  # out, as dB
    length,
    d,
    n,
    b,
    x_stride_b,
    x_stride_l,
    dt_stride_b,
    dt_stride_l,
    grad_stride_b,
    grad_stride_l,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute all gradients of one tile, TILE steps and BLOCK_D channels, from h_tiles and p_tiles.

    The loops over the steps are unrolled, and a tuple has one entry per step, in the order of time;
    dus and ddts are in reverse order. Δ is dt, u = Δ x.
    """
    block, sequence = tl.program_id(0), tl.program_id(2).to(tl.int64)
    tile, tiles = tl.program_id(1), tl.num_programs(1)
    channel = block * BLOCK_D + tl.arange(0, BLOCK_D)
    is_channel, start = channel < d, tile.to(tl.int64) * TILE
    x += sequence * x_stride_b + start * x_stride_l
    dt += sequence * dt_stride_b + start * dt_stride_l
    grad_y += sequence * grad_stride_b + start * grad_stride_l
    out_offset = (sequence * length + start) * d + channel

    # 1. Load the steps of the tile: u, Δ and the gradient of y, each (BLOCK_D,).
    us, dts, grads_y, log_keeps, dus, ddts = (), (), (), (), (), ()
    for j in tl.static_range(TILE):
        # Beyond the end dt = 0 and grad_y = 0: h and p pass through unchanged.
        is_step = channel < tl.where(start + j < length, d, 0)
        dt_t = tl.load(dt + j * dt_stride_l + channel, mask=is_step, other=0.0).to(tl.float32)
        dts += (dt_t,)
        x_t = tl.load(x + j * x_stride_l + channel, mask=is_step, other=0.0).to(tl.float32)
        us += (x_t * dt_t,)
        grad_t = tl.load(grad_y + j * grad_stride_l + channel, mask=is_step, other=0.0)
        grads_y += (grad_t.to(tl.float32),)
        if keep is not None:
            keep_t = tl.load(keep + sequence * length + start + j, mask=start + j < length, other=1)
            log_keeps += (tl.where(keep_t == 0, float("-inf"), 0.0),)
        dus += (tl.zeros([BLOCK_D], tl.float32),)
        ddts += (tl.zeros([BLOCK_D], tl.float32),)

    # 2. For each of the n states: go forward through the tile for h, and back for p and all
    #    gradients.
    state = 0
    while state < n:
        state_offset = ((sequence * tiles + tile) * n + state) * d + channel
        BC_offset = ((sequence * n + state) * tiles + tile) * TILE
        part_offset = (((block * b + sequence) * n + state) * tiles + tile) * TILE
        A_s = tl.load(A + state * d + channel, mask=is_channel, other=0.0).to(tl.float32)
        h = tl.load(h_tiles + state_offset, mask=is_channel, other=0.0)
        p = tl.load(p_tiles + state_offset, mask=is_channel, other=0.0)
        Bs, Cs, decays, hs = (), (), (), (h,)
        for j in tl.static_range(TILE):
            Bs += (tl.load(B + BC_offset + j),)
            # C is loaded here, because the loop below stores: a load must not pass these stores.
            Cs += (tl.load(C + BC_offset + j),)
            exponent = dts[j] * (A_s * LOG2E)
            if keep is not None:
                exponent += log_keeps[j]
            decays += (tl.exp2(exponent),)
            h = decays[j] * h + us[j] * Bs[j]
            hs += (h,)
        dA_s, new_dus, new_ddts = tl.zeros([BLOCK_D], tl.float32), (), ()
        for j in tl.static_range(TILE - 1, -1, -1):
            p += grads_y[j] * Cs[j]  # gradient of h_t
            tl.store(dC + part_offset + j, tl.sum(hs[j + 1] * grads_y[j], axis=0))
            tl.store(dB + part_offset + j, tl.sum(p * us[j], axis=0))
            new_dus += (dus[TILE - 1 - j] + p * Bs[j],)
            p *= decays[j]
            d_log = p * hs[j]
            new_ddts += (ddts[TILE - 1 - j] + d_log * A_s,)
            dA_s += d_log * dts[j]
        dus, ddts = new_dus, new_ddts
        tl.store(h_tiles + state_offset, dA_s, mask=is_channel)
        state += 1

    # 3. Compute the gradients of x and Δ from the gradient of u = Δ x.
    for j in tl.static_range(TILE):
        is_step = channel < tl.where(start + j < length, d, 0)
        x_t = tl.load(x + j * x_stride_l + channel, mask=is_step, other=0.0).to(tl.float32)
        du, d_dt = dus[TILE - 1 - j], ddts[TILE - 1 - j] + dus[TILE - 1 - j] * x_t
        tl.store(dx + out_offset + j * d, (du * dts[j]).to(dx.dtype.element_ty), mask=is_step)
        tl.store(ddt + out_offset + j * d, d_dt.to(ddt.dtype.element_ty), mask=is_step)


def _self_check():
    return scan_deviation(selective_scan)


usable = functools.partial(triton_build.usable, _self_check)


def _block_sizes(d, n):
    """Return BLOCK_D, BLOCK_N and num_warps of `_scan_kernel`: at most 16 states per thread.

    Up to n = 16 a thread has all states of a channel. Beyond that 2, 4, … threads of one warp share
    a channel, so that no sum over n crosses warps.
    """
    block_n = triton.next_power_of_2(n)
    block_d = max(1, min(64, 512 // block_n if block_n > 16 else 64, triton.next_power_of_2(d)))
    return block_d, block_n, 2 if block_d == 64 else 1


def _chunk_length(b, length, d, n):
    """Return the number of steps per chunk.

    There is one chunk if sequences and channels fill the GPU or if the sequences are short.
    Otherwise there are enough chunks for TARGET_WARPS warps, each a multiple of MIN_CHUNK steps.
    """
    block_d, _, num_warps = _block_sizes(d, n)
    warps = b * triton.cdiv(d, block_d) * num_warps
    chunks = min(triton.cdiv(TARGET_WARPS, max(1, warps)), length // MIN_CHUNK)
    return length if chunks < 2 else triton.cdiv(length, chunks * MIN_CHUNK) * MIN_CHUNK


def _prepare(x, dt, A, B, C, h0, keep):
    """Check the arguments and convert them to what the kernels read.

    Returns:
        The same arguments with a contiguous last dimension; A as (n,d), h0 as (b,n,d) in fp32.

    Raises:
        TypeError: If tensors are not on one GPU.
        ValueError: If a shape is wrong.
        Unsupported: If a dtype or a size is not supported.
    """
    (b, length, d), n = x.shape, A.shape[-1]
    keep = None if keep is None else keep.float().contiguous()
    check(
        x=(x, x.shape),
        dt=(dt, x.shape),
        A=(A, (d, n)),
        B=(B, (b, length, n)),
        C=(C, (b, length, n)),
        h0=(h0, (b, d, n)),
        keep=(keep, (b, length)),
    )
    # The backward pass has one program per tile; the forward pass must not run if it cannot.
    if max(b, triton.cdiv(length, TILE)) > MAX_GRID_SIZE:
        limit = f"at most {MAX_GRID_SIZE} sequences and {MAX_GRID_SIZE * TILE} tokens"
        raise Unsupported(f"x is {tuple(x.shape)}: the Triton scan takes {limit}")
    if h0 is not None:
        h0 = h0.transpose(1, 2).float().contiguous()
    A = A.t().contiguous()
    return make_dense(x), make_dense(dt), A, make_dense(B), make_dense(C), h0, keep


def _count_chunks(length, chunk):
    return max(1, triton.cdiv(length, max(1, chunk)))


def _compute_initial_states(value, dt, A, vector, keep, initial_state, chunk, reverse=False):
    """Return the states before the chunks, (b,k,n,d); with one chunk `initial_state`, (b,n,d)."""
    b, chunks, entries = value.shape[0], _count_chunks(value.shape[1], chunk), A.numel()
    block = 256  # entries of a program
    if chunks == 1:
        return initial_state
    states, decays = value.new_empty(2, b, chunks, *A.shape, dtype=torch.float32)
    outputs = dict(chunk_states=states, chunk_decays=decays)
    _launch_scan(value, dt, A, vector, keep, chunk, reverse, **outputs)
    launch(
        _carry_kernel,
        (triton.cdiv(entries, block), b),
        initial_state,
        states,
        decays,
        chunks,
        entries,
        REVERSE=reverse,
        BLOCK=block,
        num_warps=2,
    )
    return states


def _launch_scan(
    value,
    dt,
    A,
    vector,
    keep,
    chunk,
    reverse=False,
    C=None,
    initial_states=None,
    chunk_states=None,
    chunk_decays=None,
    y=None,
    tile_states=None,
    final_state=None,
):
    """Launch `_scan_kernel`; its arguments that are None are neither read nor written."""
    (b, length, d), n, chunks = value.shape, A.shape[0], _count_chunks(value.shape[1], chunk)
    block_d, block_n, num_warps = _block_sizes(d, n)
    # No chunk needs the final state of the last one.
    grid = triton.cdiv(d, block_d), chunks if chunk_states is None else chunks - 1, b
    C_strides = (0, 0) if C is None else C.stride()[:2]
    launch(
        _scan_kernel,
        grid,
        value,
        dt,
        A,
        vector,
        C,
        keep,
        initial_states,
        chunk_states,
        chunk_decays,
        y,
        tile_states,
        final_state,
        length,
        chunk,
        chunks,
        d,
        n,
        0,  # `zero`
        *value.stride()[:2],
        *dt.stride()[:2],
        *vector.stride()[:2],
        *C_strides,
        REVERSE=reverse,
        TILE=TILE,
        BLOCK_D=block_d,
        BLOCK_N=block_n,
        num_warps=num_warps,
    )


def _forward(x, dt, A, B, C, h0, keep):
    """Return y (b,l,d), the final state (b,n,d), and the states before the chunks."""
    (b, length, d), n = x.shape, A.shape[0]
    chunk = _chunk_length(b, length, d, n)
    states = _compute_initial_states(x, dt, A, B, keep, h0, chunk)
    y = x.new_empty(b, length, d, dtype=torch.float32)
    final = x.new_empty(b, n, d, dtype=torch.float32)
    _launch_scan(x, dt, A, B, keep, chunk, C=C, initial_states=states, y=y, final_state=final)
    return y, final, states


def _backward(x, dt, A, B, C, keep, states, grad_y, grad_final):
    """Return the gradients of x, dt (b,l,d), A (n,d), B, C (b,l,n) and h0 (b,n,d)."""
    (b, length, d), n = x.shape, A.shape[0]
    chunk, tiles = _chunk_length(b, length, d, n), triton.cdiv(length, TILE)
    h_tiles, p_tiles = x.new_empty(2, b, tiles, n, d, dtype=torch.float32)
    _launch_scan(x, dt, A, B, keep, chunk, initial_states=states, tile_states=h_tiles)
    dh0 = torch.empty_like(grad_final)
    reverse_inputs = grad_y, dt, A, C, keep
    p_states = _compute_initial_states(*reverse_inputs, grad_final, chunk, reverse=True)
    outputs = dict(tile_states=p_tiles, final_state=dh0)
    _launch_scan(*reverse_inputs, chunk, reverse=True, initial_states=p_states, **outputs)

    block_d = min(32, triton.next_power_of_2(d))  # one warp, so that sums over d stay within it
    blocks = triton.cdiv(d, block_d)
    padded_BC = x.new_zeros(2, b, n, tiles * TILE, dtype=torch.float32)
    for padded, t in zip(padded_BC, (B, C)):
        padded[..., :length] = t.transpose(1, 2)
    dBC = x.new_empty(2, blocks, b, n, tiles * TILE, dtype=torch.float32)
    dx, ddt = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, dt))
    launch(
        _grad_kernel,
        (blocks, tiles, b),
        x,
        dt,
        A,
        *padded_BC,
        keep,
        grad_y,
        h_tiles,
        p_tiles,
        dx,
        ddt,
        *dBC,
        length,
        d,
        n,
        b,
        *x.stride()[:2],
        *dt.stride()[:2],
        *grad_y.stride()[:2],
        TILE=TILE,
        BLOCK_D=block_d,
        num_warps=1,
    )
    dB, dC = dBC.sum(1)[..., :length].transpose(2, 3)
    return dx, ddt, h_tiles.sum((0, 1)), dB, dC, dh0


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dt, A, B, C, h0, keep):
        ctx.dtypes = [None if t is None else t.dtype for t in (x, dt, A, B, C, h0)]
        x, dt, A, B, C, h0, keep = _prepare(x, dt, A, B, C, h0, keep)
        y, final, states = _forward(x, dt, A, B, C, h0, keep)
        ctx.save_for_backward(x, dt, A, B, C, keep, states)
        return y, final.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, grad_final):
        grad_final = grad_final.transpose(1, 2).contiguous()
        grads = _backward(*ctx.saved_tensors, make_dense(grad_y), grad_final)
        dx, ddt, dA, dB, dC, dh0 = (
            None if dtype is None else t.to(dtype)  # None: there is no h0
            for t, dtype in zip(grads, ctx.dtypes)
        )
        return dx, ddt, dA.t(), dB, dC, None if dh0 is None else dh0.transpose(1, 2), None


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    h0: Tensor | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute Mamba-1's selective scan in fp32; differentiable once.

        h_t = keep_t exp(dt_t A) ⊙ h_{t−1} + (dt_t ⊙ x_t) B_tᵀ        y_t = h_t C_t

    The arguments are as in `lm.model.scan.selective_scan`. Each tensor may be fp32, bf16 or fp16,
    with any strides. x, dt, B and C are copied unless their last stride is 1; A and h0 unless they
    are stored as (n,d) and (b,n,d), as the final state is. The result and its gradients are the
    same in every run.

    Returns:
        y (b,l,d) and the final state (b,d,n), in fp32.

    Raises:
        TypeError: If tensors are not on one GPU.
        ValueError: If a shape is wrong.
        Unsupported: If a dtype or a size is not supported.
    """
    inputs = (x, dt, A, B, C, h0)
    if needs_grad(*inputs):
        return _SelectiveScan.apply(*inputs, keep)
    y, final, _ = _forward(*_prepare(*inputs, keep))
    return y, final.transpose(1, 2)
