"""mamba-ssm's selective scan, compiled for CUDA, behind the signature of lm.model.scan's."""

import torch
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
    return triton_scan.self_check(selective_scan, with_state=False)


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
    n, dtypes = A.shape[1], {t.dtype for t in (x, dt, B, C)}
    fits = len(dtypes) == 1 and x.dtype in triton_build.DTYPES and A.dtype == torch.float32
    if not fits or x.numel() == 0 or n > MAX_STATES:
        raise Unsupported(
            f"x is {tuple(x.shape)}, A {A.dtype} of n = {n}, the others {dtypes}: mamba-ssm's scan"
            f" takes an A in fp32, all else in one of its dtypes, and n up to {MAX_STATES}"
        )
    x, dt, B, C = (t.transpose(1, 2) for t in (x, dt, B, C))
    y, h = selective_scan_fn(x, dt, A, B, C, return_last_state=True)
    return y.transpose(1, 2).float(), _NoGradient.apply(h.float())
