"""The `ssd_scan` and `mamba2_scan` kernels: mamba-ssm's chunked scan of Mamba-2, in Triton.

A head has a state S (p,n), S_t = exp(dt_t A) S_{t−1} + dt_t x_t B_tᵀ, with S_0 = h0, and the output
S_t C_t.

Shape suffixes: b batch, l length, h heads, p channels of a head, g groups, n states.
"""

import torch
import torch.nn.functional as F
import triton
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
from torch import Tensor
from triton.runtime.errors import OutOfResources

from lm.kernels import Unsupported
from lm.kernels.checks import gradient_deviation
from lm.kernels.triton import build as triton_build

CHUNK = 256  # tokens, as in Mamba-2
LENGTH = 266  # tokens of the self-check: one chunk and a part of a second
# Allowed relative error if products are in TF32.
TF32_ERROR = 5e-3


def usable() -> tuple[bool, str]:
    """Return whether the kernels run here, and the reason if not; see `usable` of triton/build.py.

    If the kernels multiply fp32 tensors in TF32, they pass the self-check only after
    torch.set_float32_matmul_precision("high"), which allows TF32 in PyTorch's own products.
    """
    return triton_build.usable(_self_check, "mamba-ssm's kernels")


def _self_check() -> float:
    """Compare `ssd_scan` with a loop, and `mamba2_scan` with `ssd_scan` and PyTorch's operations.

    Returns:
        The `deviation` on problems of LENGTH tokens, gradients included.
    """
    allows_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    allowed = TF32_ERROR if allows_tf32 else 1e-4
    error = _scan_deviation(allowed)
    if not error < 1:  # also if it is NaN
        return error
    x, z = torch.sin(torch.arange(2 * LENGTH * 2 * 3.0)).reshape(2, 1, LENGTH, 2, 3)
    B, C = torch.cos(torch.arange(2 * LENGTH * 2.0)).reshape(2, 1, LENGTH, 1, 2)
    dt = torch.linspace(-2, 1, LENGTH * 2).reshape(1, LENGTH, 2)
    bias, A, D = torch.tensor([[0.5, -0.5], [-0.1, -1.0], [2.0, -1.0]])
    tensors = (x, dt, bias, A, B, C, D, z)
    return gradient_deviation(mamba2_scan, _unfused, tensors, _loss, allowed)


def _loss(y, S):
    return y.sum() + S.sum()


def _unfused(x, dt, bias, A, B, C, D, z):
    """Compute `mamba2_scan` with `ssd_scan`."""
    y, S = ssd_scan(x, F.softplus(dt + bias), A, B, C)
    return (y + D.unsqueeze(-1) * x) * F.silu(z), S


def _scan_deviation(allowed):
    """Return the `deviation` of `ssd_scan` from a loop over time."""
    x = torch.sin(torch.arange(LENGTH * 2 * 3.0)).reshape(1, LENGTH, 2, 3)
    B, C = torch.cos(torch.arange(2 * LENGTH * 2.0)).reshape(2, 1, LENGTH, 1, 2)
    dt, A = torch.linspace(0.1, 1, LENGTH * 2).reshape(1, LENGTH, 2), torch.tensor([-0.1, -1.0])
    h0 = x[:, :2].reshape(1, 2, 3, 2)
    tensors = (x, dt, A, B, C, h0)
    keep = (torch.arange(float(LENGTH)) % 40 != 20)[None]  # resets at tokens 20, 60, …

    def scan(x, dt, A, B, C, S):
        return ssd_scan(x, dt, A, B, C, S, keep)

    def loop(x, dt, A, B, C, S):
        outputs = []
        for t in range(LENGTH):
            scaled_x = (dt[:, t, :, None] * x[:, t]).unsqueeze(-1)
            decay = keep[:, t, None] * torch.exp(dt[:, t] * A)
            S = decay[..., None, None] * S + scaled_x * B[:, t].unsqueeze(-2)
            outputs.append((S * C[:, t].unsqueeze(-2)).sum(-1))
        return torch.stack(outputs, 1), S

    return gradient_deviation(scan, loop, tensors, _loss, allowed)


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    h0: Tensor | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute Mamba-2's scan; differentiable once. Arguments are as in lm.model.scan.ssd_scan.

    Returns:
        The outputs (b,l,h,p) and the final state (b,h,p,n), in fp32.

    Raises:
        Unsupported: If the dtypes of x, B and C differ or are fp64, there are no tokens, or the GPU
            has too little shared memory.
    """
    y, S = _chunk_scan(x, dt, A, B, C, h0, keep)
    return y.float(), S


def mamba2_scan(
    x: Tensor,
    dt: Tensor,
    bias: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    h0: Tensor | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence of a Mamba-2 layer up to its norm, as mamba-ssm's own layer does.

    y = (scan(x, softplus(dt + bias), A, B, C, h0, keep) + D x) ⊙ silu(z)

    Args:
        x: Input after the convolution, (b,l,h,p).
        dt: Step size before bias and softplus, (b,l,h).
        bias: (h,), fp32.
        A: (h,), negative, fp32.
        B: (b,l,g,n).
        C: (b,l,g,n).
        D: (h,), fp32.
        z: Gate, (b,l,h,p).
        h0: State before the first token, (b,h,p,n); zero if None.
        keep: (b,l), 0 at tokens that start from an empty state, else 1.

    Returns:
        y (b,l,h,p) in x's dtype, and the final state (b,h,p,n) in fp32.

    Raises:
        Unsupported: As for `ssd_scan`.
    """
    return _chunk_scan(x, dt, A, B, C, h0, keep, D=D, z=z, dt_bias=bias, dt_softplus=True)


def _chunk_scan(x, dt, A, B, C, h0, keep, **fused):
    """Call mamba-ssm's function, with `fused` as further arguments, or raise Unsupported."""
    dtypes = {t.dtype for t in (x, B, C)}  # the other tensors may have other dtypes
    if len(dtypes) > 1 or x.dtype not in triton_build.DTYPES or x.numel() == 0:
        raise Unsupported(
            f"x is {tuple(x.shape)}, the dtypes of x, B, C are {dtypes}: mamba-ssm's scan takes"
            " fp32, fp16 or bf16"
        )
    # mamba-ssm calls a document a sequence; the state h0 belongs to sequence 0.
    document = None if keep is None else (keep == 0).cumsum(1, dtype=torch.int32)
    chunk = min(CHUNK, max(16, triton.next_power_of_2(x.shape[1])))
    options = dict(initial_states=h0, seq_idx=document, return_final_states=True)
    try:
        y, S = mamba_chunk_scan_combined(x, dt, A, B, C, chunk, **options, **fused)
    except OutOfResources as error:
        raise Unsupported(f"mamba-ssm's scan does not fit this GPU: {error}") from error
    return y, S.float()
