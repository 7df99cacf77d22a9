"""The short convolution in Triton, and what the Triton kernels of lm.kernels share.

Shape suffixes: b batch, l length, d channels, k taps.

Other files take from here: `usable`, how blocks are chosen and how rows are read. All is computed
in fp32 whatever is read.
"""

import os
from functools import cache

import torch
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
except ImportError:  # the file can be read nonetheless: `usable` says what is missing
    triton = tl = None

jit = triton.jit if triton else lambda kernel: kernel
constexpr = tl.constexpr if triton else None

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def usable() -> tuple[bool, str]:
    """Whether the kernels run here, and if not, why not, in a sentence. The first call compiles one
    and checks it. They run on CUDA tensors; on CPU tensors, slowly, where TRITON_INTERPRET=1 was
    set when this file was imported."""
    if os.environ.get("FPRNN_NO_KERNELS", "0") not in ("", "0"):
        return False, "FPRNN_NO_KERNELS is set"
    return _probe()


@cache
def _probe():
    if triton is None:
        return False, "triton is not installed"
    device = "cpu"
    if isinstance(_conv_kernel, triton.runtime.jit.JITFunction):  # not interpreted
        device = "cuda"
        if not torch.cuda.is_available():
            return False, "there is no CUDA device"
        capability = torch.cuda.get_device_capability()
        if capability < (8, 0):
            found = ".".join(map(str, capability))
            return False, f"the GPU has compute capability {found}, the kernels need 8.0"
    try:
        with torch.inference_mode(False), torch.no_grad():
            x = torch.linspace(-2, 2, 15, device=device).view(1, 5, 3)
            taps = torch.linspace(1, -1, 6, device=device).view(3, 1, 2)
            ours = short_conv(x, taps, None)
            before = torch.nn.functional.pad(x[:, :-1], (0, 0, 1, 0))
            theirs = torch.nn.functional.silu(taps[:, 0, 1] * x + taps[:, 0, 0] * before)
            error = (ours - theirs).abs().max().item()
    except Exception as wrong:  # whatever a compiler or a driver raises: there is the plain version
        return False, f"a Triton kernel fails: {type(wrong).__name__}: {str(wrong)[-300:]}"
    if not error < 1e-4:
        return False, f"a Triton kernel computes something else than PyTorch: off by {error:.1e}"
    return True, ""


def check(**tensors):
    """Check name=(tensor, shape); tensors that are None are left out.

    Raises:
        TypeError: a dtype is not among DTYPES. ValueError: a shape is wrong, or the devices differ.
    """
    device = None
    for name, (t, shape) in tensors.items():
        if t is None:
            continue
        device = device or t.device
        if t.dtype not in DTYPES:
            raise TypeError(
                f"{name} is {t.dtype}: the Triton kernels compute in float32, from float32,"
                " bfloat16 or float16; anything else is for the plain version"
            )
        if t.shape != tuple(shape):
            raise ValueError(f"{name} is {tuple(t.shape)} where {tuple(shape)} is expected")
        if t.device != device:
            raise ValueError(f"{name} is on {t.device} and the tensors before it on {device}")


def launch(kernel, programs, *args, **constants):
    """Run a kernel on the device of its tensors, unless there is nothing to do."""
    if 0 not in programs:
        with torch.cuda.device_of(next(t for t in args if torch.is_tensor(t))):
            kernel[programs](*args, **constants)


def needs_grad(*tensors):
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def block_for(width, per_warp=512):
    """The block of a program for tokens of `width` entries, and its warps.

    A block has 1024 entries or more, so that narrow tokens share one. A warp has per_warp of them
    (512 are 16 a thread), as long as 16 warps suffice; less where a kernel keeps much of each.
    """
    columns = triton.next_power_of_2(width)
    tokens = max(1, 1024 // columns)
    warps = max(1, min(16, tokens * columns // per_warp))
    return {"TOKENS": tokens, "COLUMNS": columns, "num_warps": warps}


def as_rows(t):
    """t (…,k) as (tokens,k) and the stride between tokens; a copy only where one stride does not
    reach them all. None stays None."""
    if t is None:
        return None, 0
    if t.shape[-1] > 1 and t.stride(-1) != 1:
        t = t.contiguous()
    t = t.flatten(0, -2)
    return t, t.stride(0)


@jit
def tile(tokens, width, TOKENS: constexpr, COLUMNS: constexpr):
    """The tokens and columns of this program's block, which tokens there are, and which entries."""
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    col = tl.arange(0, COLUMNS)
    live = row < tokens
    return row, col, live, live[:, None] & (col < width)[None, :]


@jit
def load(pointer, row, stride, col, mask):
    """Rows of a (tokens,k) tensor, in fp32; zero outside the mask. bf16 is widened right here: the
    interpreter cannot compute with it."""
    at = pointer + row[:, None] * stride + col[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@jit
def store(pointer, row, stride, col, mask, value):
    tl.store(pointer + row[:, None] * stride + col[None, :], value, mask=mask)


@jit
def activate(p, ACT: constexpr):
    if ACT == "silu":
        p *= tl.sigmoid(p)
    elif ACT == "relu":
        p = tl.where(p < 0, 0.0, p)  # tl.maximum would drop a NaN
    return p


@jit
def activate_grad(p, ACT: constexpr):
    slope = tl.full(p.shape, 1.0, tl.float32)
    if ACT == "silu":
        gate = tl.sigmoid(p)
        slope = gate * (1.0 + p * (1.0 - gate))
    elif ACT == "relu":
        slope = tl.where(p > 0, 1.0, 0.0)
    return slope


@jit
def _inputs(x, before, batch, at, col, inside, length, d, x_batch, x_time, K: constexpr):
    """The inputs at times `at` ≥ 1 − K of a row, in fp32; zero where there is none."""
    there = (at >= 0) & (at < length)
    value = load(x + batch * x_batch, at, x_time, col, there[:, None] & inside[None, :])
    if before is not None:
        there = (at >= 1 - K) & (at < 0)
        own = before + batch * (K - 1) * d
        value += load(own, at + K - 1, d, col, there[:, None] & inside[None, :])
    return value


@jit
def _same(segments, batch, later, earlier, length):
    """Whether two times are of one document; what is before the row is of document 0."""
    own = segments + batch * length
    first = tl.load(own + later, mask=(later >= 0) & (later < length), other=0)
    second = tl.load(own + earlier, mask=(earlier >= 0) & (earlier < length), other=0)
    return (first == second)[:, None]


@jit
def _tap(weight, col, inside, lag, K: constexpr):
    return tl.load(weight + col * K + K - 1 - lag, mask=inside, other=0.0).to(tl.float32)[None, :]


@jit
def _convolved(
    x, before, segments, weight, bias, batch, at, col, inside, length, d, x_batch, x_time,
    K: constexpr,
):  # fmt: skip
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


@jit
def _conv_kernel(
    x, weight, bias, segments, before, out, length, d, blocks, x_batch, x_time,
    K: constexpr, TIMES: constexpr, COLUMNS: constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks).to(tl.int64) * TIMES + tl.arange(0, TIMES)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = col < d
    value = _convolved(
        x, before, segments, weight, bias, batch, at, col, inside, length, d, x_batch, x_time, K
    )
    mask = (at < length)[:, None] & inside[None, :]
    store(out + batch * length * d, at, d, col, mask, activate(value, "silu"))


@jit
def _grad_before_silu(
    grad, x, before, segments, weight, bias, batch, at, col, inside, length, d, x_batch, x_time,
    K: constexpr,
):  # fmt: skip
    """The gradient of `_convolved` at times `at`, zero where there is no such time."""
    value = _convolved(
        x, before, segments, weight, bias, batch, at, col, inside, length, d, x_batch, x_time, K
    )
    there = (at >= 0) & (at < length)
    g = load(grad + batch * length * d, at, d, col, there[:, None] & inside[None, :])
    return g * activate_grad(value, "silu")


@jit
def _conv_grad_kernel(
    x, weight, bias, segments, before, grad, dx, dbefore, partials,
    length, d, blocks, x_batch, x_time, K: constexpr, TIMES: constexpr, COLUMNS: constexpr,
):  # fmt: skip
    """partials: (programs over time,K+1,d), what each adds to dweight and, in the last row, dbias.

    The convolution is computed again at every lag, from inputs that are in the cache by then: that
    costs less than keeping it, or its gradient, in memory.
    """
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks).to(tl.int64) * TIMES + tl.arange(0, TIMES)
    if before is not None:
        at -= K - 1  # the first are those of `before`
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = col < d
    g = _grad_before_silu(
        grad, x, before, segments, weight, bias, batch, at, col, inside, length, d, x_batch, x_time,
        K,
    )  # fmt: skip
    own = partials + tl.program_id(0).to(tl.int64) * (K + 1) * d + col
    tl.store(own + K * d, tl.sum(g, 0), mask=inside)
    for lag in tl.static_range(K):
        value = _inputs(x, before, batch, at - lag, col, inside, length, d, x_batch, x_time, K)
        if segments is not None:
            value = tl.where(_same(segments, batch, at, at - lag, length), value, 0.0)
        tl.store(own + (K - 1 - lag) * d, tl.sum(g * value, 0), mask=inside)
    total = g * _tap(weight, col, inside, 0, K)
    for lag in range(1, K):
        g = _grad_before_silu(
            grad, x, before, segments, weight, bias, batch, at + lag, col, inside, length, d,
            x_batch, x_time, K,
        )  # fmt: skip
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


def _dense(x):
    """x (b,l,d), a view where channels lie next to each other, and its two strides."""
    x = x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()
    return x, x.stride(0), x.stride(1)


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, segments, before):
        ctx.save_for_backward(x, weight, bias, segments, before)
        (b, length, d), k = x.shape, weight.shape[-1]
        out = x.new_empty(x.shape)
        block = _conv_block(length, d)
        blocks = triton.cdiv(length, block["TIMES"])
        x, *strides = _dense(x)
        launch(
            _conv_kernel, (b * blocks, triton.cdiv(d, block["COLUMNS"])),
            x, weight, bias, segments, before, out, length, d, blocks, *strides, K=k, **block,
        )  # fmt: skip
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
        x, *strides = _dense(x)
        launch(
            _conv_grad_kernel, (b * blocks, triton.cdiv(d, block["COLUMNS"])),
            x, weight, bias, segments, before, grad.contiguous(), dx, dbefore, partials,
            length, d, blocks, *strides, K=k, **block,
        )  # fmt: skip
        *dweight, dbias = partials.sum(0)
        dweight = torch.stack(dweight, -1).unsqueeze(1).to(weight.dtype)
        return dx, dweight, None if bias is None else dbias.to(bias.dtype), None, dbefore


def short_conv(x, weight, bias, segments=None, before=None):
    """silu(lm.model.scan.causal_conv(x, weight, bias, segments, before)), differentiable once.

    Args:
        x: (b,l,d). weight: (d,1,k). bias: (d,) or None. segments: (b,l) int64 document index, or
        None. before: (b,k−1,d) the inputs before x, of document 0; zero if None.
    Returns:
        (b,l,d) in the dtype of x
    Raises:
        TypeError, ValueError: dtypes or shapes.
    """
    (b, length, d), k = x.shape, weight.shape[-1]
    check(
        x=(x, x.shape), weight=(weight, (d, 1, k)), bias=(bias, (d,)),
        before=(before, (b, k - 1, d)),
    )  # fmt: skip
    if segments is not None and (segments.dtype != torch.int64 or segments.shape != (b, length)):
        found = f"{segments.dtype} {tuple(segments.shape)}"
        raise ValueError(f"segments is {found} where torch.int64 {b, length} is expected")
    weight, bias, segments, before = (
        None if t is None else t.contiguous() for t in (weight, bias, segments, before)
    )
    return _ShortConv.apply(x, weight, bias, segments, before if k > 1 else None)
