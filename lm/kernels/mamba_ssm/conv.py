"""The `short_conv` kernel: causal-conv1d's short convolution, compiled for CUDA.

Shape suffixes: b batch, l length, d channels, k taps (the kernel size).
"""

import torch
from causal_conv1d import causal_conv1d_fn
from torch import Tensor

from lm.kernels import Unsupported
from lm.kernels.checks import deviation
from lm.kernels.triton import build as triton_build

KERNEL_SIZES = (2, 3, 4)  # values of k for which causal-conv1d has code


def usable() -> tuple[bool, str]:
    """Return whether the kernel runs here, and the reason if not; as `triton.build.usable`."""
    return triton_build.usable(_self_check, "causal-conv1d's kernels")


def _self_check() -> float:
    """Return the `deviation` on a small problem, gradients included."""
    x = torch.linspace(-2, 2, 40).view(1, 5, 8).requires_grad_()
    taps = torch.linspace(1, -1, 16).view(8, 1, 2).requires_grad_()
    shifted = torch.nn.functional.pad(x[:, :-1], (0, 0, 1, 0))
    reference = torch.nn.functional.silu(taps[:, 0, 1] * x + taps[:, 0, 0] * shifted)

    def add_gradients(y):
        return y, *torch.autograd.grad(y.sum(), (x, taps))

    return deviation(add_gradients(short_conv(x, taps)), add_gradients(reference), 1e-4)


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    segments: Tensor | None = None,
    before: Tensor | None = None,
) -> Tensor:
    """Compute silu(lm.model.scan.causal_conv(x, weight, bias, segments, before)) by causal-conv1d.

    Args:
        x: Input, (b,l,d).
        weight: Weight of the convolution, (d,1,k).
        bias: (d,), or None.
        segments: Document index of each token, (b,l) int64, or None.
        before: Inputs before x, in document 0, (b,k−1,d); zero if None.

    Returns:
        The output, (b,l,d).

    Raises:
        Unsupported: If x is fp64 or empty, if k is not in KERNEL_SIZES, if 8 does not divide
            d, or if there are both documents and inputs before x.
    """
    (_, length, d), k = x.shape, weight.shape[-1]
    if x.dtype not in triton_build.DTYPES or length == 0 or k not in KERNEL_SIZES or d % 8:
        raise Unsupported(
            f"x is {x.dtype} {tuple(x.shape)}, k = {k}: causal-conv1d takes fp32, fp16 and bf16,"
            f" at least one token, a d that 8 divides, and k of {KERNEL_SIZES}"
        )
    if segments is not None and before is not None:
        raise Unsupported("causal-conv1d takes documents or inputs before x, not both")
    documents = None if segments is None else segments.to(torch.int32).contiguous()
    # causal-conv1d takes (b,d,l), but with documents or initial states the channels must be last in
    # memory: pass views.
    transposed = x.contiguous().transpose(1, 2)
    initial = None if before is None else before.to(x.dtype).contiguous().transpose(1, 2)
    y = causal_conv1d_fn(
        transposed, weight.squeeze(1), bias, documents, initial_states=initial, activation="silu"
    )
    return y.transpose(1, 2)
