"""The selective scan compiled for this CPU (scan.cpp, built by cpu_build), with its gradient.

Shape suffixes: b batch, l length, d channels, n states.

The mathematics is that of lm.model.scan.selective_scan, its oracle. States live in memory as
(b,n,d), so that neighbouring channels fill a vector: a state that comes from here, (b,d,n) by its
shape, goes back in without a copy; so does A where it is the transpose of an (n,d) tensor.
"""

import struct

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lm.kernels.checks import needs_grad, scan_deviation
from lm.kernels.cpu import build as cpu_build
from lm.kernels.cpu.build import address, check, checkpoint_steps, functions, token_step

# `struct Problem` of scan.cpp: sizes, then addresses.
_SIZES, _ADDRESSES = 8, 18
_pack = struct.Struct(f"{_SIZES + _ADDRESSES}q").pack


def usable() -> tuple[bool, str]:
    """Return whether it runs here, and the reason if it does not; see `usable` of build.py."""
    return cpu_build.usable(_self_check)


def _self_check(dtype):
    return scan_deviation(selective_scan, dtype)


def _call(name, sizes, *tensors):
    """Call a function of the library on what `struct Problem` holds, as far as it is needed."""
    addresses = [address(t) for t in tensors]
    missing = [0] * (_ADDRESSES - len(tensors))
    functions()[name][tensors[0].dtype](_pack(*sizes, *addresses, *missing))


def _prepare(x, dt, A, B, C, h0, keep):
    """Check the arguments; the sizes and tensors that `_call` takes, but for the results."""
    (b, length, d), n = x.shape, A.shape[-1]
    check(
        x.dtype,
        ("x", x, (b, length, d)),
        ("dt", dt, (b, length, d)),
        ("A", A, (d, n)),
        ("B", B, (b, length, n)),
        ("C", C, (b, length, n)),
        ("h0", h0, (b, d, n)),
    )
    if keep is not None:
        keep = keep.to(x.dtype).contiguous()
        check(x.dtype, ("keep", keep, (b, length)))
    if A.stride() != (1, d):
        A = A.t().contiguous().t()
    if h0 is not None and h0.stride() != (n * d, 1, d):
        h0 = h0.transpose(1, 2).contiguous().transpose(1, 2)
    (B, B_step), (C, C_step) = token_step(B), token_step(C)
    sizes = b, length, d, n, checkpoint_steps(length), torch.get_num_threads(), B_step, C_step
    return sizes, (x.contiguous(), dt.contiguous(), A, B, C, h0, keep)


def _state(sizes, like):
    """Memory for states: (b,d,n), stored as (b,n,d)."""
    b, _, d, n = sizes[:4]
    return like.new_empty_strided((b, d, n), (n * d, 1, d))


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dt, A, B, C, h0, keep):
        sizes, tensors = _prepare(x, dt, A, B, C, h0, keep)
        b, length, d, n, every = sizes[:5]
        y, final = torch.empty_like(tensors[0]), _state(sizes, x)
        checkpoints = x.new_empty(b, -(-length // every), n, d)
        _call("scan", sizes, *tensors, y, final, checkpoints)
        ctx.sizes = sizes
        ctx.save_for_backward(*tensors, checkpoints)
        return y, final

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, grad_final):
        *tensors, checkpoints = ctx.saved_tensors
        x, dt, A, B, C, h0, _ = tensors
        b, length, d, n = ctx.sizes[:4]
        grad_y, grad_final = grad_y.contiguous(), grad_final.transpose(1, 2).contiguous()
        dx, ddt = torch.empty_like(x), torch.empty_like(dt)
        dA, dB, dC = A.new_empty(n, d), B.new_empty(b, length, n), C.new_empty(b, length, n)
        dh0 = None if h0 is None else _state(ctx.sizes, x)
        grads = dx, ddt, dA, dB, dC, dh0
        _call("backward", ctx.sizes, *tensors, None, None, checkpoints, grad_y, grad_final, *grads)
        return dx, ddt, dA.t(), dB, dC, dh0, None


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    h0: Tensor | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mamba-1's selective scan, differentiable once; lm.model.scan.selective_scan, compiled.

        h_t = keep_t exp(dt_t A) ⊙ h_{t−1} + (dt_t ⊙ x_t) B_tᵀ        y_t = h_t C_t

    The result does not depend on the number of threads, gradients included.

    Args:
        x, dt: (b,l,d). A: (d,n). B, C: (b,l,n). h0: (b,d,n), zero if None. All fp32 or all fp64.
        keep: (b,l) of 1, and 0 at tokens that start from an empty state; not differentiated.
    Returns:
        y (b,l,d) and the final state (b,d,n).
    Raises:
        TypeError, ValueError: devices or shapes. Unsupported: dtypes.
    """
    if needs_grad(x, dt, A, B, C, h0):
        return _SelectiveScan.apply(x, dt, A, B, C, h0, keep)
    sizes, tensors = _prepare(x, dt, A, B, C, h0, keep)
    y, final = torch.empty_like(tensors[0]), _state(sizes, x)
    _call("scan", sizes, *tensors, y, final)
    return y, final
