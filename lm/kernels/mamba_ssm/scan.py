"""mamba-ssm's selective scan, compiled for CUDA, behind the signature of lm.model.scan's."""

import torch
import torch.nn.functional as F
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from torch import Tensor

from lm.kernels import Unsupported
from lm.kernels.triton import build as triton_build
from lm.kernels.triton import scan as triton_scan

MAX_STATES = 256


def usable() -> tuple[bool, str]:
    """Whether it runs here, and if not, why not, in a sentence; see `triton_build.usable`. That the
    package can be imported says little: it may have been built without its kernels."""
    return triton_build.usable(_self_check, "mamba-ssm's kernels")


def _self_check(device) -> float:
    """Compare the scan with a loop, then `mamba_scan` with the scan inside PyTorch's operations.

    Returns:
        The `deviation`, gradients included.
    """
    error = triton_scan.self_check(selective_scan, with_state=False)
    if not error < 1:
        return error
    x, z, low_rank = torch.sin(torch.arange(3 * 6 * 4.0)).reshape(3, 1, 6, 4)
    weight, A = torch.cos(torch.arange(2 * 4 * 4.0)).reshape(2, 4, 4)
    B, C = torch.cos(torch.arange(2 * 6 * 4.0)).reshape(2, 1, 6, 4)
    D, bias = torch.linspace(0.5, -1, 8).reshape(2, 4)
    tensors = (x, low_rank, weight, bias, -A.exp(), B, C, D, z)

    def loss(y, h):
        return y.square().sum()

    return triton_build.gradient_deviation(mamba_scan, _unfused, tensors, loss, 1e-4)


def _unfused(x, low_rank, weight, bias, A, B, C, D, z):
    # The same product as in `mamba_scan`: another one may be rounded otherwise in TF32.
    dt = _step_sizes(low_rank, weight).transpose(1, 2)
    y, h = selective_scan(x, F.softplus(dt + bias), A, B, C)
    return (y + D * x) * F.silu(z), h


class _NoGradient(torch.autograd.Function):
    """The final state, of which mamba-ssm's backward silently takes no gradient."""

    @staticmethod
    def forward(ctx, h):
        return h.view_as(h)

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError(
            "mamba-ssm's selective scan has no gradient of its final state; Triton's has"
        )


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    h0: Tensor | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mamba-1's selective scan by mamba-ssm; shapes as in lm.model.scan.selective_scan. y is
    differentiable, the final state is not: to ask for its gradient is an error.

    Raises:
        Unsupported: a state before it, resets, dtypes that differ or are fp64, no tokens, n > 256.
    """
    if h0 is not None or keep is not None:
        raise Unsupported("mamba-ssm's selective scan has no state before it and no resets")
    _check(A, x, dt, B, C)
    x, dt, B, C = (t.transpose(1, 2) for t in (x, dt, B, C))
    y, h = selective_scan_fn(x, dt, A, B, C, return_last_state=True)
    return y.transpose(1, 2).float(), _NoGradient.apply(h.float())


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
        weight: (d,r).
        bias: (d,), fp32.
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
    """Return low_rank weightᵀ as (b,d,l), consecutive in l: the kernel copies other layouts."""
    dt = weight.to(low_rank.dtype) @ low_rank.flatten(0, 1).t()  # (d,b·l)
    return dt.unflatten(1, low_rank.shape[:2]).transpose(0, 1)


def _check(A, x, *others):
    """Raise Unsupported if the kernel cannot read A, x and others, which have x's dtype."""
    n, dtypes = A.shape[1], {t.dtype for t in (x, *others)}
    fits = len(dtypes) == 1 and x.dtype in triton_build.DTYPES and A.dtype == torch.float32
    if not fits or x.numel() == 0 or n > MAX_STATES:
        raise Unsupported(
            f"x is {tuple(x.shape)}, A {A.dtype} of n = {n}, the others {dtypes}: mamba-ssm's scan"
            f" takes an A in fp32, all else in one of its dtypes, and n up to {MAX_STATES}"
        )
