"""The `selective_scan` kernel for the CPU (scan.cpp), with its gradient.

lm.model.scan.selective_scan computes the same in plain PyTorch and is the oracle of the tests.

States have the shape (b,d,n) but are stored as (b,n,d), so that neighbouring channels fill a
vector. A state that this kernel returned can therefore be passed to it without a copy, and so can A
if it is the transpose of an (n,d) tensor.

Shape suffixes: b batch, l length, d channels, n states.
"""

import functools
import struct

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lm.kernels.checks import needs_grad, scan_deviation
from lm.kernels.cpu import build as cpu_build
from lm.kernels.cpu.build import (
    check,
    choose_checkpoint_interval,
    get_address,
    load_functions,
    space_tokens_evenly,
)

# `struct Problem` of scan.cpp.
_SIZE_COUNT, _ADDRESS_COUNT = 8, 18
_pack = struct.Struct(f"{_SIZE_COUNT + _ADDRESS_COUNT}q").pack


def _self_check(dtype):
    return scan_deviation(selective_scan, dtype)


usable = functools.partial(cpu_build.usable, _self_check)


def _call(name, sizes, *tensors):
    """Call a function of the library with the tensors of `struct Problem`, in its order.

    Missing tensors at the end are null.
    """
    addresses = [get_address(t) for t in tensors]
    nulls = [0] * (_ADDRESS_COUNT - len(tensors))
    load_functions()[name][tensors[0].dtype](_pack(*sizes, *addresses, *nulls))


def _prepare(x, dt, A, B, C, h0, keep):
    """Check the arguments; return the sizes and the input tensors for `_call`."""
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
    (B, B_step), (C, C_step) = space_tokens_evenly(B), space_tokens_evenly(C)
    interval, threads = choose_checkpoint_interval(length), torch.get_num_threads()
    sizes = b, length, d, n, interval, threads, B_step, C_step
    return sizes, (x.contiguous(), dt.contiguous(), A, B, C, h0, keep)


def _allocate_state(sizes, like):
    """Allocate a state of shape (b,d,n), stored as (b,n,d)."""
    b, _, d, n = sizes[:4]
    return like.new_empty_strided((b, d, n), (n * d, 1, d))


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dt, A, B, C, h0, keep):
        sizes, tensors = _prepare(x, dt, A, B, C, h0, keep)
        b, length, d, n, interval = sizes[:5]
        y, final = torch.empty_like(tensors[0]), _allocate_state(sizes, x)
        checkpoints = x.new_empty(b, -(-length // interval), n, d)
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
        dh0 = None if h0 is None else _allocate_state(ctx.sizes, x)
        grads = dx, ddt, dA, dB, dC, dh0
        results = None, None, checkpoints  # the backward pass needs neither y nor the final state
        _call("scan_backward", ctx.sizes, *tensors, *results, grad_y, grad_final, *grads)
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
    """Compute Mamba-1's selective scan; differentiable once.

        h_t = keep_t exp(dt_t A) ⊙ h_{t−1} + (dt_t ⊙ x_t) B_tᵀ        y_t = h_t C_t

    The arguments are as in `lm.model.scan.selective_scan`, all in fp32 or all in fp64. The result
    and its gradients do not depend on the number of threads.

    Returns:
        y (b,l,d) and the final state (b,d,n).

    Raises:
        TypeError: If a tensor is not on the CPU.
        ValueError: If a shape is wrong.
        Unsupported: If dtypes differ or are neither fp32 nor fp64.
    """
    if needs_grad(x, dt, A, B, C, h0):
        return _SelectiveScan.apply(x, dt, A, B, C, h0, keep)
    sizes, tensors = _prepare(x, dt, A, B, C, h0, keep)
    y, final = torch.empty_like(tensors[0]), _allocate_state(sizes, x)
    _call("scan", sizes, *tensors, y, final)
    return y, final
