"""Mamba-2's chunked scan (state-space duality, Dao & Gu 2024) on a GPU, in Triton, with gradients.

Shape suffixes: b batch, l length, h heads, p head dimension, g groups, n states; i chunks, c steps
within a chunk.

The mathematics is that of lm.model.scan.ssd_scan, its oracle. With L_k the sum of dt A up to and
with step k of a chunk, and every factor zero across a reset:

    y_k = Σ_{j≤k} (C_k·B_j) exp(L_k − L_j) dt_j x_j  +  exp(L_k) S C_k        S enters the chunk
    S ← exp(L_c) S + Σ_j exp(L_c − L_j) dt_j x_j B_jᵀ

One program works on one head of one chunk of one row. `_states` computes what every chunk adds to
the state, `_carry` the states that enter the chunks, `_output` y. The backward computes the
entering states again, by the same two kernels run the other way the gradients of the leaving ones,
and `_backward` the rest. Where one chunk suffices, `_output` and `_backward` work alone. What sums
over heads or chunks is written in parts and added up by torch: no atomics, the same bits each time.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from lm.kernels import Unsupported
from lm.kernels.triton import build as triton_build
from lm.kernels.triton.build import check, check_keep, dense, launch, load, store

MAX_STATES = 128  # a program holds all n in registers


@triton.jit
def _place(heads, chunks, groups):
    """Row, chunk, head and group of this program; heads change fastest, as they share B and C."""
    program = tl.program_id(0)
    head = program % heads
    row = (program // heads // chunks).to(tl.int64)
    return row, (program // heads) % chunks, head, head // (heads // groups)


@triton.jit
def _tile(pointer, stride, rows, inside, first, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Columns first … first + BLOCK of some rows of a matrix with SIZE columns, in fp32, zero
    outside."""
    column = first + tl.arange(0, BLOCK)
    return load(pointer, rows, stride, column, inside[:, None] & (column < SIZE)[None, :])


@triton.jit
def _put(pointer, stride, rows, inside, first, tile, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Write what `_tile` would read."""
    column = first + tl.arange(0, BLOCK)
    store(pointer, rows, stride, column, inside[:, None] & (column < SIZE)[None, :], tile)


@triton.jit
def _decays(
    dt, A, keep, row, chunk, head, length, dt_b, dt_l, dt_h, keep_b, keep_l, CHUNK: tl.constexpr
):
    """What a chunk's decays are made of: its steps (c,), which of them exist, dt, L, the number of
    resets so far; the decays to the chunk's end, from its start, and over all of it."""
    k = tl.arange(0, CHUNK)
    t = chunk.to(tl.int64) * CHUNK + k
    inside = t < length
    dt_c = tl.load(dt + row * dt_b + t * dt_l + head * dt_h, mask=inside, other=0.0).to(tl.float32)
    log = tl.cumsum(dt_c * tl.load(A + head).to(tl.float32), 0)
    resets = tl.zeros((CHUNK,), tl.int32)
    if keep is not None:
        kept = tl.load(keep + row * keep_b + t * keep_l, mask=inside, other=1).to(tl.float32)
        resets = tl.cumsum((kept == 0).to(tl.int32), 0)
    log_end = tl.sum(tl.where(k == CHUNK - 1, log, 0.0))
    to_end = tl.where(resets == tl.max(resets), tl.exp(log_end - log), 0.0)
    from_start = tl.where(resets == 0, tl.exp(log), 0.0)
    over = tl.sum(tl.where(k == CHUNK - 1, from_start, 0.0))
    return t, inside, dt_c, log, resets, to_end, from_start, over


@triton.jit
def _between(log, resets, CHUNK: tl.constexpr):
    """exp(L_k − L_j), (c,c), zero for j > k and across a reset."""
    k = tl.arange(0, CHUNK)
    allowed = (k[:, None] >= k[None, :]) & (resets[:, None] == resets[None, :])
    # Masked before the exponential: above the diagonal it would overflow.
    return tl.exp(tl.where(allowed, log[:, None] - log[None, :], float("-inf")))


@triton.jit
def _states(
    v,  # (b,l,h,p): x, or ∂y
    w,  # (b,l,g,n): B, or C
    dt,  # (b,l,h)
    A,  # (h,)
    keep,  # (b,l)
    states,  # out (b,i,h,p,n)
    over,  # out (b,i,h)
    length,
    heads,
    chunks,
    groups,
    v_b,
    v_l,
    v_h,
    w_b,
    w_l,
    w_g,
    dt_b,
    dt_l,
    dt_h,
    keep_b,
    keep_l,
    P: tl.constexpr,
    N: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """What a chunk adds to the state that leaves it, from v = x and w = B; REVERSE: to the gradient
    of the state that enters it, from v = ∂y and w = C. states: (b,i,h,p,n), over: (b,i,h)."""
    row, chunk, head, group = _place(heads, chunks, groups)
    t, inside, dt_c, _, _, to_end, from_start, over_c = _decays(
        dt, A, keep, row, chunk, head, length, dt_b, dt_l, dt_h, keep_b, keep_l, CHUNK
    )
    weight = from_start if REVERSE else dt_c * to_end
    first = tl.program_id(1) * BP
    v_cp = _tile(v + row * v_b + head * v_h, v_l, t, inside, first, P, BP)
    w_cn = _tile(w + row * w_b + group * w_g, w_l, t, inside, 0, N, BN)
    state = tl.dot(tl.trans(v_cp * weight[:, None]), w_cn, input_precision=PRECISION)
    at, p = tl.program_id(0).to(tl.int64), first + tl.arange(0, BP)
    _put(states + at * P * N, N, p, p < P, 0, state, N, BN)
    if tl.program_id(1) == 0:
        tl.store(over + at, over_c)


@triton.jit
def _carry(
    states,  # in and out (b,i,h,p·n)
    over,  # in (b,i,h)
    first,  # in (b,h,p·n)
    last,  # out (b,h,p·n)
    heads,
    chunks,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Replace what every chunk adds by the state it starts from, chunk by chunk; REVERSE: the last
    chunk is the first. first, last: (b,h,p·n), the state before (None: zero) and after it all."""
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = k < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + k
    state = tl.zeros((BLOCK,), tl.float32)
    if first is not None:
        state = tl.load(first + at, mask=mask, other=0.0).to(tl.float32)
    step = 0
    while step < chunks:  # the interpreter of Triton 3.6 has no range() over what is not constexpr
        i = chunks - 1 - step if REVERSE else step
        here = (row * chunks + i) * heads + head
        added = tl.load(states + here * SIZE + k, mask=mask, other=0.0)
        tl.store(states + here * SIZE + k, state, mask=mask)
        state = tl.load(over + here) * state + added
        step += 1
    tl.store(last + at, state, mask=mask)


@triton.jit
def _output(
    x,  # (b,l,h,p)
    B,  # (b,l,g,n)
    C,  # (b,l,g,n)
    dt,  # (b,l,h)
    A,  # (h,)
    keep,  # (b,l)
    states,  # in (b,i,h,p,n)
    y,  # out (b,l,h,p)
    final,  # out (b,h,p,n)
    length,
    heads,
    chunks,
    groups,
    x_b,
    x_l,
    x_h,
    B_b,
    B_l,
    B_g,
    C_b,
    C_l,
    C_g,
    dt_b,
    dt_l,
    dt_h,
    keep_b,
    keep_l,
    P: tl.constexpr,
    N: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y of a chunk from its entering state (None: zero), and the final state unless None (then the
    chunk is the only one)."""
    row, chunk, head, group = _place(heads, chunks, groups)
    t, inside, dt_c, log, resets, to_end, from_start, over_c = _decays(
        dt, A, keep, row, chunk, head, length, dt_b, dt_l, dt_h, keep_b, keep_l, CHUNK
    )
    first = tl.program_id(1) * BP
    x_cp = _tile(x + row * x_b + head * x_h, x_l, t, inside, first, P, BP)
    B_cn = _tile(B + row * B_b + group * B_g, B_l, t, inside, 0, N, BN)
    C_cn = _tile(C + row * C_b + group * C_g, C_l, t, inside, 0, N, BN)
    scores = tl.dot(C_cn, tl.trans(B_cn), input_precision=PRECISION)
    scores *= _between(log, resets, CHUNK) * dt_c[None, :]
    out = tl.dot(scores, x_cp, input_precision=PRECISION)
    at, p = tl.program_id(0).to(tl.int64), first + tl.arange(0, BP)
    if states is not None:
        S_pn = _tile(states + at * P * N, N, p, p < P, 0, N, BN)
        out += from_start[:, None] * tl.dot(C_cn, tl.trans(S_pn), input_precision=PRECISION)
    _put(y + row * length * heads * P + head * P, heads * P, t, inside, first, out, P, BP)
    if final is not None:
        weighted = x_cp * (dt_c * to_end)[:, None]
        S_new = tl.dot(tl.trans(weighted), B_cn, input_precision=PRECISION)
        if states is not None:
            S_new += over_c * S_pn
        _put(final + at * P * N, N, p, p < P, 0, S_new, N, BN)


@triton.jit
def _backward(
    x,  # (b,l,h,p)
    B,  # (b,l,g,n)
    C,  # (b,l,g,n)
    dt,  # (b,l,h)
    A,  # (h,)
    keep,  # (b,l)
    grad_y,  # (b,l,h,p)
    states,  # in (b,i,h,p,n)
    grad_states,  # in (b,i,h,p,n)
    dx,  # out (b,l,h,p)
    ddt,  # out (b,l,h)
    dA,  # out (b,i,h)
    dB,  # out (b,l,h,n)
    dC,  # out (b,l,h,n)
    dh0,  # out (b,h,p,n)
    length,
    heads,
    chunks,
    groups,
    x_b,
    x_l,
    x_h,
    B_b,
    B_l,
    B_g,
    C_b,
    C_l,
    C_g,
    dt_b,
    dt_l,
    dt_h,
    keep_b,
    keep_l,
    y_b,
    y_l,
    y_h,
    P: tl.constexpr,
    N: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients of a chunk from its entering state and that of its leaving one (None: zero).

    dA is (b,i,h), dB and dC are (b,l,h,n): parts to be summed. dh0: None, or the chunk is the only
    one. With scores and dscores (c,c) those of the forward without dt and their gradients, the
    gradient of dt_t A is what passes step t: from j < t to k ≥ t, to the end, from the start, and
    from the start to the end.
    """
    # 1. The chunk's decays (c,), B and C (c,n), and the forward's scores (c,c).
    row, chunk, head, group = _place(heads, chunks, groups)
    t, inside, dt_c, log, resets, to_end, from_start, over_c = _decays(
        dt, A, keep, row, chunk, head, length, dt_b, dt_l, dt_h, keep_b, keep_l, CHUNK
    )
    B_cn = _tile(B + row * B_b + group * B_g, B_l, t, inside, 0, N, BN)
    C_cn = _tile(C + row * C_b + group * C_g, C_l, t, inside, 0, N, BN)
    between = _between(log, resets, CHUNK)
    scores = tl.dot(C_cn, tl.trans(B_cn), input_precision=PRECISION) * between
    dscores = tl.zeros((CHUNK, CHUNK), tl.float32)
    dB_cn = tl.zeros((CHUNK, BN), tl.float32)
    dC_cn = tl.zeros((CHUNK, BN), tl.float32)
    x_du = tl.zeros((CHUNK,), tl.float32)
    through = 0.0
    at = tl.program_id(0).to(tl.int64)
    flat = row * length * heads + head  # of this row and head in (b,l,h)
    # 2. BP rows of the head at a time: dx, and their shares of dscores, dB and dC.
    for first in range(0, P, BP):
        x_cp = _tile(x + row * x_b + head * x_h, x_l, t, inside, first, P, BP)
        g_cp = _tile(grad_y + row * y_b + head * y_h, y_l, t, inside, first, P, BP)
        p = first + tl.arange(0, BP)
        dscores += tl.dot(g_cp, tl.trans(x_cp), input_precision=PRECISION)
        du = tl.dot(tl.trans(scores), g_cp, input_precision=PRECISION)
        if states is not None:
            S_pn = _tile(states + at * P * N, N, p, p < P, 0, N, BN)
            dC_cn += tl.dot(g_cp, S_pn, input_precision=PRECISION)
        if grad_states is not None:
            D_pn = _tile(grad_states + at * P * N, N, p, p < P, 0, N, BN)
            dB_cn += tl.dot(x_cp, D_pn, input_precision=PRECISION)
            du += to_end[:, None] * tl.dot(B_cn, tl.trans(D_pn), input_precision=PRECISION)
            if states is not None:
                through += tl.sum(S_pn * D_pn)
        if dh0 is not None:
            weighted = g_cp * from_start[:, None]
            dS = tl.dot(tl.trans(weighted), C_cn, input_precision=PRECISION)
            if grad_states is not None:
                dS += over_c * D_pn
            _put(dh0 + at * P * N, N, p, p < P, 0, dS, N, BN)
        x_du += tl.sum(x_cp * du, 1)
        _put(dx + flat * P, heads * P, t, inside, first, du * dt_c[:, None], P, BP)

    # 3. The gradient of dt_t A: what passes step t.
    dC_cn *= from_start[:, None]
    dB_cn *= (dt_c * to_end)[:, None]
    started, ended = tl.sum(dC_cn * C_cn, 1), tl.sum(dB_cn * B_cn, 1)
    dscores *= dt_c[None, :]
    k = tl.arange(0, CHUNK)
    # Without the diagonal, which would only cancel: rounding would be all that is left of it.
    pairs = tl.where(k[:, None] > k[None, :], scores * dscores, 0.0)
    started += tl.sum(pairs, 1) - tl.sum(pairs, 0)
    before = k[:, None] < k[None, :]
    dlog = tl.sum(tl.where(before, 0.0, started[:, None]), 0)
    dlog += tl.sum(tl.where(before, ended[:, None], 0.0), 0) + over_c * through
    A_h = tl.load(A + head).to(tl.float32)
    tl.store(ddt + flat + t * heads, (dlog * A_h + x_du).to(ddt.dtype.element_ty), mask=inside)
    tl.store(dA + at, tl.sum(dlog * dt_c))

    dscores *= between
    dC_cn += tl.dot(dscores, B_cn, input_precision=PRECISION)
    dB_cn += tl.dot(tl.trans(dscores), C_cn, input_precision=PRECISION)
    _put(dB + flat * N, heads * N, t, inside, 0, dB_cn, N, BN)
    _put(dC + flat * N, heads * N, t, inside, 0, dC_cn, N, BN)


def _blocks(length, p, n, precision, backward):
    """Steps of a chunk, columns of a block of p, warps.

    A short l gets one chunk that fits. Beyond, chunks are as large as registers allow, since what
    the states cost goes with the number of chunks: chosen by what ptxas spills on sm_80 and sm_90
    for p, n = 64 and 128 (the backward always does), and with less than 99 KB of shared memory.
    """
    if precision == "ieee":  # products on the ordinary cores, whose operands all lie in registers
        chunk, block, warps = 32, 32, 8
    elif backward:
        chunk, block, warps = 64 if n <= 64 else 32, 32, 8
    else:
        chunk, block, warps = 64, 64 if n <= 64 else 32, 4
    if length <= chunk:
        chunk = max(16, triton.next_power_of_2(length))
    return chunk, min(block, max(16, triton.next_power_of_2(p))), warps if chunk > 16 else 4


def _strides(name, tensor, dimensions):
    strides = (0,) * len(dimensions) if tensor is None else tensor.stride()
    return {f"{name}_{d}": stride for d, stride in zip(dimensions, strides)}


def _shared(x, dt, A, B, C, keep, backward=False):
    """The arguments that the kernels have in common."""
    _, length, heads, p = x.shape
    groups, n = B.shape[2:]
    # TF32 holds bf16 and fp16 inputs exactly, and what is made of them better than bf16 would.
    precision = "ieee" if torch.float32 in (x.dtype, B.dtype, C.dtype) else "tf32"
    chunk, block, warps = _blocks(length, p, n, precision, backward)
    return dict(
        x=x,
        dt=dt,
        A=A,
        B=B,
        C=C,
        keep=keep,
        length=length,
        heads=heads,
        groups=groups,
        chunks=max(1, triton.cdiv(length, chunk)),
        **_strides("x", x, "blh"),
        **_strides("dt", dt, "blh"),
        **_strides("B", B, "blg"),
        **_strides("C", C, "blg"),
        **_strides("keep", keep, "bl"),
        P=p,
        N=n,
        BP=block,
        CHUNK=chunk,
        PRECISION=precision,
        BN=max(16, triton.next_power_of_2(n)),
        num_warps=warps,
        num_stages=1,
    )


def _run(kernel, rows, columns, arguments):
    """Launch a kernel on rows × columns programs with those of the arguments that it takes."""
    takes = (*kernel.arg_names, "num_warps", "num_stages")
    launch(kernel, (rows, columns), **{k: v for k, v in arguments.items() if k in takes})


def _carried(shared, v, w, first, reverse=False):
    """The states (b,i,h,p,n) that enter the chunks and the one after them all, (b,h,p,n); reverse:
    the gradients of those that leave the chunks and of the one before them all. See `_states`."""
    (b, _, h, p), n, i = v.shape, w.shape[3], shared["chunks"]
    states, over, last = (
        v.new_empty(shape, dtype=torch.float32)
        for shape in ((b, i, h, p, n), (b, i, h), (b, h, p, n))
    )
    own = dict(v=v, w=w, **_strides("v", v, "blh"), **_strides("w", w, "blg"))
    own |= dict(states=states, over=over, first=first, last=last, REVERSE=reverse)
    block = min(512, triton.next_power_of_2(p * n))
    own |= dict(SIZE=p * n, BLOCK=block)
    _run(_states, b * i * h, triton.cdiv(p, shared["BP"]), shared | own)
    _run(_carry, b * h, triton.cdiv(p * n, block), shared | own)
    return states, last


class _SSDScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dt, A, B, C, h0, keep):
        ctx.save_for_backward(x, dt, A, B, C, h0, keep)
        ctx.set_materialize_grads(False)
        (b, _, h, p), shared = x.shape, _shared(x, dt, A, B, C, keep)
        y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        own = dict(y=y, states=h0, final=None)
        if shared["chunks"] == 1:
            final = own["final"] = y.new_empty(b, h, p, B.shape[3])
        else:
            own["states"], final = _carried(shared, x, B, h0)
        _run(_output, b * shared["chunks"] * h, triton.cdiv(p, shared["BP"]), shared | own)
        return y, final

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, grad_final):
        x, dt, A, B, C, h0, keep = ctx.saved_tensors
        (b, length, h, _), (g, n) = x.shape, B.shape[2:]
        shared = _shared(x, dt, A, B, C, keep, backward=True)
        grad_y = torch.zeros_like(x) if grad_y is None else dense(grad_y)
        grad_final = None if grad_final is None else grad_final.contiguous()
        dA = x.new_empty(b, shared["chunks"], h, dtype=torch.float32)
        dB, dC = x.new_empty(2, b, length, h, n, dtype=torch.float32)
        own = dict(dx=torch.empty(x.shape, dtype=x.dtype, device=x.device), dA=dA, dB=dB, dC=dC)
        own |= dict(ddt=torch.empty(dt.shape, dtype=dt.dtype, device=x.device))
        own |= dict(grad_y=grad_y, **_strides("y", grad_y, "blh"))
        if shared["chunks"] == 1:
            dh0 = None if h0 is None else torch.empty_like(h0)
            own |= dict(states=h0, grad_states=grad_final, dh0=dh0)
        else:
            states, _ = _carried(shared, x, B, h0)
            grad_states, dh0 = _carried(shared, grad_y, C, grad_final, reverse=True)
            own |= dict(states=states, grad_states=grad_states, dh0=None)
            dh0 = None if h0 is None else dh0.to(h0.dtype)
        _run(_backward, b * shared["chunks"] * h, 1, shared | own)
        dB, dC = (t.unflatten(2, (g, h // g)).sum(3).to(B.dtype) for t in (dB, dC))
        return own["dx"], own["ddt"], dA.sum((0, 1)).to(A.dtype), dB, dC.to(C.dtype), dh0, None


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    h0: Tensor | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mamba-2's scan, differentiable once; lm.model.scan.ssd_scan on a GPU.

        S_t = keep_t exp(dt_t A_h) S_{t−1} + dt_t x_t B_tᵀ  (p×n per head)        y_t = S_t C_t

    Views whose last dimension is contiguous are read where they are.

    Args:
        x: (b,l,h,p). dt: (b,l,h). A: (h,) negative. B, C: (b,l,g,n), g divides h, n ≤ 128.
        h0: (b,h,p,n), zero if None. Each in fp32, bf16 or fp16; computed in fp32, with matrix
        products in TF32 where none of x, B and C is fp32.
        keep: (b,l) of 1, and 0 at tokens that start from an empty state; not differentiated.
    Returns:
        y (b,l,h,p) and the final state (b,h,p,n), in fp32.
    Raises:
        TypeError, ValueError: devices or shapes. Unsupported: dtypes, or n > 128.
    """
    if x.ndim != 4 or B.ndim != 4 or B.shape[2] == 0 or x.shape[2] % B.shape[2]:
        raise ValueError(
            f"x is {tuple(x.shape)} and B {tuple(B.shape)}: they must be (b,l,h,p) and (b,l,g,n)"
            " with h a multiple of g"
        )
    (b, length, h, p), (g, n) = x.shape, B.shape[2:]
    if n > MAX_STATES:
        raise Unsupported(f"B has n = {n} states: at most {MAX_STATES} fit")
    check(
        x=(x, x.shape),
        dt=(dt, (b, length, h)),
        A=(A, (h,)),
        B=(B, (b, length, g, n)),
        C=(C, (b, length, g, n)),
        h0=(h0, (b, h, p, n)),
    )
    check_keep(keep, x)
    h0 = None if h0 is None else h0.contiguous()
    return _SSDScan.apply(dense(x), dt, A.contiguous(), dense(B), dense(C), h0, keep)


def usable() -> tuple[bool, str]:
    """Whether the scan runs here, and if not, why not, in a sentence; see `triton_build.usable`."""
    return triton_build.usable(_self_check)


def _self_check(device) -> float:
    allowed = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
    return torch.tensor([self_check(ssd_scan, *own) for own in allowed.items()]).max().item()


def self_check(scan: Callable[..., Any], dtype: torch.dtype, allowed: float) -> float:
    """How far a scan is from a loop over time, gradients included, on a small problem of several
    chunks: the `deviation`."""
    x = torch.sin(torch.arange(66 * 2 * 3.0)).reshape(1, 66, 2, 3)
    B, C = torch.cos(torch.arange(2 * 66 * 2.0)).reshape(2, 1, 66, 1, 2)
    dt, A = torch.linspace(0.1, 1, 66 * 2).reshape(1, 66, 2), torch.tensor([-0.1, -1.0])
    inputs = [t.to(dtype).requires_grad_() for t in (x, dt, A, B, C, x[:, :2].reshape(1, 2, 3, 2))]
    keep = (torch.arange(66.0) % 40 != 20)[None]
    ours = scan(*inputs, keep)
    x, dt, A, B, C, S = rounded = [t.detach().float().requires_grad_() for t in inputs]
    ys = []
    for t in range(66):
        u = (dt[:, t, :, None] * x[:, t]).unsqueeze(-1)
        decay = keep[:, t, None] * torch.exp(dt[:, t] * A)
        S = decay[..., None, None] * S + u * B[:, t].unsqueeze(-2)
        ys.append((S * C[:, t].unsqueeze(-2)).sum(-1))
    results = [
        (y, S, *torch.autograd.grad(y.sum() + S.sum(), leaves))
        for (y, S), leaves in ((ours, inputs), ((torch.stack(ys, 1), S), rounded))
    ]
    ours, theirs = results
    return triton_build.deviation(ours, theirs, allowed)
