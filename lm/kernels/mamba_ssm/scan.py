"""The `mamba_scan` kernel: the recurrence of a Mamba layer by mamba-ssm's scan for CUDA.

Shape suffixes: b batch, l length, d channels, n states, r rank of Δ.
"""

import torch
import torch.nn.functional as F
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from torch import Tensor

from lm.kernels import Unsupported
from lm.kernels.checks import gradient_deviation, loop_over_time
from lm.kernels.triton import build as triton_build

MAX_STATES = 256  # largest n of mamba-ssm's kernel


def usable() -> tuple[bool, str]:
    """Return whether the kernel runs here, and the reason if not; see `usable` of triton/build.py.

    The package mamba-ssm may be installed without its compiled kernels.
    """
    return triton_build.usable(_self_check, "mamba-ssm's kernels")


def _self_check():
    """Return the `deviation` of `mamba_scan` from a loop, gradients included."""
    x, z, low_rank = torch.sin(torch.arange(3 * 6 * 4.0)).reshape(3, 1, 6, 4)
    weight, A = torch.cos(torch.arange(2 * 4 * 4.0)).reshape(2, 4, 4)
    B, C = torch.cos(torch.arange(2 * 6 * 4.0)).reshape(2, 1, 6, 4)
    D, bias = torch.linspace(0.5, -1, 8).reshape(2, 4)
    tensors = (x, low_rank, weight, bias, -A.exp(), B, C, D, z)

    def loss(y, h):
        return y.square().sum()

    return gradient_deviation(mamba_scan, _unfused, tensors, loss, 1e-4)


def _unfused(x, low_rank, weight, bias, A, B, C, D, z):
    """Compute `mamba_scan` token by token."""
    # Use the same product as `mamba_scan`: another product may be rounded differently in TF32.
    dt = _step_sizes(low_rank, weight).transpose(1, 2)
    y, h = loop_over_time(x, F.softplus(dt + bias), A, B, C)
    return (y + D * x) * F.silu(z), h


class _NoGradient(torch.autograd.Function):
    """Identity without a gradient, for the final state: mamba-ssm ignores its gradient."""

    @staticmethod
    def forward(ctx, h):
        return h.view_as(h)

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError(
            "mamba-ssm's selective scan has no gradient of its final state; Triton's has"
        )


def mamba_scan(
    x: Tensor,
    low_rank: Tensor,
    weight: Tensor,
    bias: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence of a Mamba layer in one kernel, as mamba-ssm's own layer does.

    y = (scan(x, softplus(Δ), A, B, C) + D x) ⊙ silu(z), Δ = low_rank weightᵀ + bias.

    Args:
        x: Input after the convolution, (b,l,d).
        low_rank: Low-rank Δ, (b,l,r).
        weight: Weight of the map to Δ, (d,r).
        bias: Bias of Δ, (d,), fp32.
        A: (d,n), negative, fp32.
        B: (b,l,n).
        C: (b,l,n).
        D: (d,), fp32.
        z: Gate, (b,l,d).

    Returns:
        y (b,l,d) in x's dtype, and the final state (b,d,n), which has no gradient.

    Raises:
        Unsupported: If the dtypes differ or are fp64, there are no tokens, or n > 256.
    """
    _check(A, x, low_rank, B, C, z)
    dt = _step_sizes(low_rank, weight)
    x, B, C, z = (t.transpose(1, 2) for t in (x, B, C, z))
    y, h = selective_scan_fn(
        x, dt, A, B, C, D=D, z=z, delta_bias=bias, delta_softplus=True, return_last_state=True
    )
    return y.transpose(1, 2), _NoGradient.apply(h.float())


def _step_sizes(low_rank, weight):
    """Return low_rank weightᵀ as (b,d,l), contiguous in l: mamba-ssm would copy other layouts."""
    dt = weight.to(low_rank.dtype) @ low_rank.flatten(0, 1).t()  # (d,b·l)
    return dt.unflatten(1, low_rank.shape[:2]).transpose(0, 1)


def _check(A, x, *others):
    """Raise Unsupported if the kernel cannot read a tensor; x and the others need one dtype."""
    n, dtypes = A.shape[1], {t.dtype for t in (x, *others)}
    can_read = len(dtypes) == 1 and x.dtype in triton_build.DTYPES and A.dtype == torch.float32
    if not can_read or x.numel() == 0 or n > MAX_STATES:
        raise Unsupported(
            f"x is {tuple(x.shape)}, A is {A.dtype}, n = {n}, the other dtypes are {dtypes}:"
            " mamba-ssm's scan takes A in fp32, x, Δ, B, C and z in one of fp32, fp16 and bf16, at"
            f" least one token, and n up to {MAX_STATES}"
        )
