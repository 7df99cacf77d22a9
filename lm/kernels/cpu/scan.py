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

from lm.kernels.cpu import build as cpu_build
from lm.kernels.cpu.build import DTYPES, check, checkpoint_steps, functions, token_step

# `struct Problem` of scan.cpp: sizes, then addresses.
_SIZES, _ADDRESSES = 8, 20
_pack = struct.Struct(f"{_SIZES + _ADDRESSES}q").pack


def usable() -> tuple[bool, str]:
    """Whether the scan runs here, and if not, why not, in a sentence. The first call builds it
    (seconds; then it comes from the user's cache directory) and checks it against a loop."""
    return cpu_build.usable(_self_check)


def _self_check() -> float:
    """The largest difference between the kernel and a loop over time, gradients included, on a
    small problem; NaN if there is one."""
    errors = []
    for dtype in DTYPES:
        x, dt = torch.linspace(0, 1, 2 * 5 * 19, dtype=dtype).reshape(2, 1, 5, 19)
        A = -torch.linspace(0.1, 9, 19 * 3, dtype=dtype).reshape(19, 3)
        B, C = torch.linspace(-1, 1, 2 * 5 * 3, dtype=dtype).reshape(2, 1, 5, 3)
        x, dt, A, B, C = inputs = [t.clone().requires_grad_() for t in (x, dt, A, B, C)]
        ours = _SelectiveScan.apply(*inputs, None, None, None)
        h, ys = x.new_zeros(1, 19, 3), []
        for t in range(5):
            u = (dt[:, t] * x[:, t]).unsqueeze(-1)
            h = torch.exp(dt[:, t].unsqueeze(-1) * A) * h + u * B[:, t].unsqueeze(-2)
            ys.append((h * C[:, t].unsqueeze(-2)).sum(-1))
        theirs = torch.stack(ys, 1), h
        grads = [torch.autograd.grad(y.sum() + h.sum(), inputs) for y, h in (ours, theirs)]
        pairs = [*zip(ours, theirs), *zip(*grads)]
        errors += [(a - b).detach().abs().max().double() for a, b in pairs]
    return torch.stack(errors).max().item()


def _call(name, sizes, *tensors):
    """Call a function of the library on what `struct Problem` holds, as far as it is needed."""
    addresses = [0 if t is None else t.data_ptr() for t in tensors]
    missing = [0] * (_ADDRESSES - len(tensors))
    functions()[name][tensors[0].dtype](_pack(*sizes, *addresses, *missing))


def _prepare(x, dt, A, B, C, h0, keep, D):
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
        ("D", D, (d,)),
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
    D = None if D is None else D.contiguous()
    return sizes, (x.contiguous(), dt.contiguous(), A, B, C, D, h0, keep)


def _state(sizes, like):
    """Memory for states: (b,d,n), stored as (b,n,d)."""
    b, _, d, n = sizes[:4]
    return like.new_empty_strided((b, d, n), (n * d, 1, d))


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dt, A, B, C, h0, keep, D):
        sizes, tensors = _prepare(x, dt, A, B, C, h0, keep, D)
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
        x, dt, A, B, C, D, h0, _ = tensors
        b, length, d, n = ctx.sizes[:4]
        grad_y, grad_final = grad_y.contiguous(), grad_final.transpose(1, 2).contiguous()
        dx, ddt = torch.empty_like(x), torch.empty_like(dt)
        dA, dB, dC = A.new_empty(n, d), B.new_empty(b, length, n), C.new_empty(b, length, n)
        dD = None if D is None else torch.empty_like(D)
        dh0 = None if h0 is None else _state(ctx.sizes, x)
        grads = dx, ddt, dA, dB, dC, dD, dh0
        _call("backward", ctx.sizes, *tensors, None, None, checkpoints, grad_y, grad_final, *grads)
        return dx, ddt, dA.t(), dB, dC, dh0, None, dD


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    h0: Tensor | None = None,
    keep: Tensor | None = None,
    D: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mamba-1's selective scan, differentiable once; lm.model.scan.selective_scan, compiled.

        h_t = keep_t exp(dt_t A) ⊙ h_{t−1} + (dt_t ⊙ x_t) B_tᵀ        y_t = h_t C_t + D ⊙ x_t

    The result does not depend on the number of threads, gradients included.

    Args:
        x, dt: (b,l,d). A: (d,n). B, C: (b,l,n). h0: (b,d,n), zero if None. All fp32 or all fp64.
        keep: (b,l) of 1, and 0 at tokens that start from an empty state; not differentiated.
        D: (d,), or None to leave its term out.
    Returns:
        y (b,l,d) and the final state (b,d,n).
    Raises:
        TypeError, ValueError: devices or shapes. Unsupported: dtypes.
    """
    if torch.is_grad_enabled():
        inputs = (x, dt, A, B, C, h0, D)
        if any(t is not None and t.requires_grad for t in inputs):
            return _SelectiveScan.apply(x, dt, A, B, C, h0, keep, D)
    sizes, tensors = _prepare(x, dt, A, B, C, h0, keep, D)
    y, final = torch.empty_like(tensors[0]), _state(sizes, x)
    _call("scan", sizes, *tensors, y, final)
    return y, final
