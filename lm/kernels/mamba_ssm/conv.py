"""causal-conv1d's short convolution, compiled for CUDA, behind the signature of ShortConv's."""

import torch
from causal_conv1d import causal_conv1d_fn
from torch import Tensor

from lm.kernels import Unsupported
from lm.kernels.checks import deviation
from lm.kernels.triton import build as triton_build

TAPS = (2, 3, 4)  # that it was compiled for


def usable() -> tuple[bool, str]:
    """Whether it runs here, and if not, why not, in a sentence; see `triton_build.usable`."""
    return triton_build.usable(_self_check, "causal-conv1d's kernels")


def _self_check() -> float:
    """The `deviation` on a small problem, gradients included."""
    x = torch.linspace(-2, 2, 40).view(1, 5, 8).requires_grad_()
    taps = torch.linspace(1, -1, 16).view(8, 1, 2).requires_grad_()
    before = torch.nn.functional.pad(x[:, :-1], (0, 0, 1, 0))
    theirs = torch.nn.functional.silu(taps[:, 0, 1] * x + taps[:, 0, 0] * before)
    results = [(y, *torch.autograd.grad(y.sum(), (x, taps))) for y in (short_conv(x, taps), theirs)]
    ours, expected = results
    return deviation(ours, expected, 1e-4)


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    segments: Tensor | None = None,
    before: Tensor | None = None,
) -> Tensor:
    """silu(lm.model.scan.causal_conv(x, weight, bias, segments, before)) by causal-conv1d.

    Args:
        x: (b,l,d). weight: (d,1,k). bias: (d,) or None. segments: (b,l) int64 document index, or
        None. before: (b,k−1,d) the inputs before x, of document 0; zero if None.
    Raises:
        Unsupported: fp64, no tokens, k outside TAPS, d no multiple of 8; documents after a state.
    """
    (_, length, d), k = x.shape, weight.shape[-1]
    if x.dtype not in triton_build.DTYPES or length == 0 or k not in TAPS or d % 8:
        raise Unsupported(
            f"x is {x.dtype} {tuple(x.shape)}, k = {k}: causal-conv1d takes fp32, fp16 and bf16,"
            f" a d that 8 divides, and k of {TAPS}"
        )
    if segments is not None and before is not None:
        raise Unsupported("causal-conv1d takes documents or what is before x, not both")
    index = None if segments is None else segments.to(torch.int32).contiguous()
    # Channels last in memory, as it wants them with documents and a state: (b,d,l) is a view.
    channels = x.contiguous().transpose(1, 2)
    initial = None if before is None else before.to(x.dtype).contiguous().transpose(1, 2)
    y = causal_conv1d_fn(
        channels, weight.squeeze(1), bias, index, initial_states=initial, activation="silu"
    )
    return y.transpose(1, 2)
