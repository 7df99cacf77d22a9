"""The short convolution and its silu in Triton, one pass over memory, with gradients.

Shape suffixes: b batch, l length, d channels, k taps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from lm.kernels.triton import build as triton_build
from lm.kernels.triton.build import activate, activate_grad, check, dense, launch, load, store


def usable() -> tuple[bool, str]:
    """Whether the convolution runs here, and if not, why not; see `triton_build.usable`."""
    return triton_build.usable(_self_check)


def _self_check(device) -> float:
    """The `deviation` on a small problem, gradients included."""
    x = torch.linspace(-2, 2, 15).view(1, 5, 3).requires_grad_()
    taps = torch.linspace(1, -1, 6).view(3, 1, 2).requires_grad_()
    before = torch.nn.functional.pad(x[:, :-1], (0, 0, 1, 0))
    theirs = torch.nn.functional.silu(taps[:, 0, 1] * x + taps[:, 0, 0] * before)
    results = [(y, *torch.autograd.grad(y.sum(), (x, taps))) for y in (short_conv(x, taps), theirs)]
    ours, theirs = results
    return triton_build.deviation(ours, theirs, 1e-4)


@triton.jit
def _inputs(x, before, batch, at, col, inside, length, d, x_batch, x_time, K: tl.constexpr):
    """The inputs at times `at` ≥ 1 − K of a row, in fp32; zero where there is none."""
    there = (at >= 0) & (at < length)
    value = load(x + batch * x_batch, at, x_time, col, there[:, None] & inside[None, :])
    if before is not None:
        there = (at >= 1 - K) & (at < 0)
        own = before + batch * (K - 1) * d
        value += load(own, at + K - 1, d, col, there[:, None] & inside[None, :])
    return value


@triton.jit
def _same(segments, batch, later, earlier, length):
    """Whether two times are of one document; what is before the row is of document 0."""
    own = segments + batch * length
    first = tl.load(own + later, mask=(later >= 0) & (later < length), other=0)
    second = tl.load(own + earlier, mask=(earlier >= 0) & (earlier < length), other=0)
    return (first == second)[:, None]


@triton.jit
def _tap(weight, col, inside, lag, K: tl.constexpr):
    return tl.load(weight + col * K + K - 1 - lag, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _convolved(
    x,
    before,
    segments,
    weight,
    bias,
    batch,
    at,
    col,
    inside,
    length,
    d,
    x_batch,
    x_time,
    K: tl.constexpr,
):
    """The convolution at times `at`, before silu."""
    total = tl.zeros([1, 1], tl.float32)
    if bias is not None:
        total += tl.load(bias + col, mask=inside, other=0.0).to(tl.float32)[None, :]
    for lag in tl.static_range(K):
        value = _inputs(x, before, batch, at - lag, col, inside, length, d, x_batch, x_time, K)
        if segments is not None:
            value = tl.where(_same(segments, batch, at, at - lag, length), value, 0.0)
        total += value * _tap(weight, col, inside, lag, K)
    return total


@triton.jit
def _conv_kernel(
    x,  # in (b,l,d)
    weight,  # in (d,K)
    bias,  # in (d,)
    segments,  # in (b,l)
    before,  # in (b,K−1,d)
    out,  # out (b,l,d)
    length,
    d,
    blocks,
    x_batch,
    x_time,
    K: tl.constexpr,
    TIMES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks).to(tl.int64) * TIMES + tl.arange(0, TIMES)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = col < d
    value = _convolved(
        x, before, segments, weight, bias, batch, at, col, inside, length, d, x_batch, x_time, K
    )
    mask = (at < length)[:, None] & inside[None, :]
    store(out + batch * length * d, at, d, col, mask, activate(value, "silu"))


@triton.jit
def _grad_before_silu(
    grad,
    x,
    before,
    segments,
    weight,
    bias,
    batch,
    at,
    col,
    inside,
    length,
    d,
    x_batch,
    x_time,
    K: tl.constexpr,
):
    """The gradient of `_convolved` at times `at`, zero where there is no such time."""
    value = _convolved(
        x, before, segments, weight, bias, batch, at, col, inside, length, d, x_batch, x_time, K
    )
    there = (at >= 0) & (at < length)
    g = load(grad + batch * length * d, at, d, col, there[:, None] & inside[None, :])
    return g * activate_grad(value, "silu")


@triton.jit
def _conv_grad_kernel(
    x,  # in (b,l,d)
    weight,  # in (d,K)
    bias,  # in (d,)
    segments,  # in (b,l)
    before,  # in (b,K−1,d)
    grad,  # in (b,l,d)
    dx,  # out (b,l,d)
    dbefore,  # out (b,K−1,d)
    partials,  # out, see below
    length,
    d,
    blocks,
    x_batch,
    x_time,
    K: tl.constexpr,
    TIMES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """partials: (programs over time,K+1,d), what each adds to dweight and, in the last row, dbias.

    The convolution is computed again at every lag, from inputs that are in the cache by then: that
    costs less than keeping it, or its gradient, in memory.
    """
    # 1. Which times of which row, and COLUMNS of its channels.
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks).to(tl.int64) * TIMES + tl.arange(0, TIMES)
    if before is not None:
        at -= K - 1  # the first are those of `before`
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = col < d
    g = _grad_before_silu(
        grad,
        x,
        before,
        segments,
        weight,
        bias,
        batch,
        at,
        col,
        inside,
        length,
        d,
        x_batch,
        x_time,
        K,
    )
    # 2. This program's parts of dbias and, lag by lag, of dweight.
    own = partials + tl.program_id(0).to(tl.int64) * (K + 1) * d + col
    tl.store(own + K * d, tl.sum(g, 0), mask=inside)
    for lag in tl.static_range(K):
        value = _inputs(x, before, batch, at - lag, col, inside, length, d, x_batch, x_time, K)
        if segments is not None:
            value = tl.where(_same(segments, batch, at, at - lag, length), value, 0.0)
        tl.store(own + (K - 1 - lag) * d, tl.sum(g * value, 0), mask=inside)
    # 3. The gradient of an input: from all the times that read it.
    total = g * _tap(weight, col, inside, 0, K)
    for lag in range(1, K):
        g = _grad_before_silu(
            grad,
            x,
            before,
            segments,
            weight,
            bias,
            batch,
            at + lag,
            col,
            inside,
            length,
            d,
            x_batch,
            x_time,
            K,
        )
        if segments is not None:
            g = tl.where(_same(segments, batch, at + lag, at, length), g, 0.0)
        total += g * _tap(weight, col, inside, lag, K)
    mask = ((at >= 0) & (at < length))[:, None] & inside[None, :]
    store(dx + batch * length * d, at, d, col, mask, total)
    if before is not None:
        early = (at < 0)[:, None] & inside[None, :]
        store(dbefore + batch * (K - 1) * d, at + K - 1, d, col, early, total)


def _conv_block(times, d):
    """64 channels fill a memory transaction; 64 times read few of their neighbours' inputs again,
    and leave few partial sums. With 16 warps a thread has 8 entries."""
    sides = (min(64, triton.next_power_of_2(max(1, n))) for n in (times, d))
    return dict(zip(("TIMES", "COLUMNS"), sides), num_warps=16)


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, segments, before):
        ctx.save_for_backward(x, weight, bias, segments, before)
        (b, length, d), k = x.shape, weight.shape[-1]
        out = x.new_empty(x.shape)
        block = _conv_block(length, d)
        blocks = triton.cdiv(length, block["TIMES"])
        x = dense(x)
        launch(
            _conv_kernel,
            (b * blocks, triton.cdiv(d, block["COLUMNS"])),
            x,
            weight,
            bias,
            segments,
            before,
            out,
            length,
            d,
            blocks,
            *x.stride()[:2],
            K=k,
            **block,
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, bias, segments, before = ctx.saved_tensors
        (b, length, d), k = x.shape, weight.shape[-1]
        dx = x.new_empty(x.shape)
        dbefore = None if before is None else before.new_empty(before.shape)
        times = length if before is None else length + k - 1
        block = _conv_block(times, d)
        blocks = triton.cdiv(times, block["TIMES"])
        partials = x.new_empty(b * blocks, k + 1, d, dtype=torch.float32)
        x = dense(x)
        launch(
            _conv_grad_kernel,
            (b * blocks, triton.cdiv(d, block["COLUMNS"])),
            x,
            weight,
            bias,
            segments,
            before,
            grad.contiguous(),
            dx,
            dbefore,
            partials,
            length,
            d,
            blocks,
            *x.stride()[:2],
            K=k,
            **block,
        )
        *dweight, dbias = partials.sum(0)
        dweight = torch.stack(dweight, -1).unsqueeze(1).to(weight.dtype)
        return dx, dweight, None if bias is None else dbias.to(bias.dtype), None, dbefore


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    segments: Tensor | None = None,
    before: Tensor | None = None,
) -> Tensor:
    """silu(lm.model.scan.causal_conv(x, weight, bias, segments, before)), differentiable once.

    Args:
        x: (b,l,d). weight: (d,1,k). bias: (d,) or None. segments: (b,l) int64 document index, or
        None. before: (b,k−1,d) the inputs before x, of document 0; zero if None.
    Returns:
        (b,l,d) in the dtype of x
    Raises:
        TypeError, ValueError: devices or shapes. Unsupported: dtypes.
    """
    (b, length, d), k = x.shape, weight.shape[-1]
    check(
        x=(x, x.shape),
        weight=(weight, (d, 1, k)),
        bias=(bias, (d,)),
        before=(before, (b, k - 1, d)),
    )
    if segments is not None and (segments.dtype != torch.int64 or segments.shape != (b, length)):
        found = f"{segments.dtype} {tuple(segments.shape)}"
        raise ValueError(f"segments is {found} where torch.int64 {b, length} is expected")
    weight, bias, segments, before = (
        None if t is None else t.contiguous() for t in (weight, bias, segments, before)
    )
    return _ShortConv.apply(x, weight, bias, segments, before if k > 1 else None)
