"""Helpers of the Triton kernels: self-check, checks of arguments, launches, activations.

The kernels run on CUDA tensors. If TRITON_INTERPRET=1 was set when this file was imported, Triton's
interpreter runs them slowly on CPU tensors. They compute in fp32 for all dtypes of their arguments.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from lm.kernels import Unsupported
from lm.kernels.checks import find_fault, find_gpu_fault

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MaybeTensor = TypeVar("MaybeTensor", bound=torch.Tensor | None)
MAX_GRID_SIZE = 65535  # programs along the second and the third axis of a grid


def usable(
    self_check: Callable[[], float], kernels: str = "the Triton kernels"
) -> tuple[bool, str]:
    """Check whether kernels run here; the result is cached. See `lm.kernels.checks.find_fault`.

    Args:
        self_check: Function that computes on torch's default device and returns a
            `lm.kernels.checks.deviation`. Its first call takes seconds, because Triton compiles the
            kernels and caches them on disk.
        kernels: Name of the kernels in the returned sentence.

    Returns:
        True and "" if the kernels run, otherwise False and a sentence with the reason.
    """
    fault = _find_fault(self_check, kernels)
    return not fault, fault


@functools.cache
def _find_fault(self_check, kernels):
    if INTERPRETED:
        return find_fault(self_check, "cpu", kernels)
    return find_gpu_fault(self_check, kernels)


def check(**tensors: tuple[torch.Tensor | None, Sequence[int]]) -> None:
    """Check that kernels can read their tensors; ignore tensors that are None.

    Args:
        tensors: name=(tensor or None, expected shape).

    Raises:
        ValueError: If a shape is wrong.
        TypeError: If the tensors are not all on one device on which the kernels run.
        Unsupported: If a dtype is not among DTYPES.
    """
    device = None
    for name, (t, shape) in tensors.items():
        if t is None:
            continue
        device = device or t.device
        if t.dtype not in DTYPES:
            raise Unsupported(f"{name} is {t.dtype}: Triton reads float32, bfloat16 and float16")
        if t.shape != tuple(shape):
            raise ValueError(f"{name} is {tuple(t.shape)}, but {tuple(shape)} is expected")
        if t.device != device or not (t.is_cuda or INTERPRETED):
            raise TypeError(
                f"{name} is on {t.device}: all tensors must be on one GPU, such as {device}"
            )


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **named_args: Any) -> None:
    """Run a kernel on the device of its tensors.

    Args:
        kernel: The jitted function.
        grid: Numbers of programs along its axes. If one is 0, the kernel is not launched.
        args: Arguments of the kernel.
        named_args: Further arguments of the kernel and launch options, such as num_warps.

    Raises:
        Unsupported: If the kernel needs more memory than the GPU has, or the grid is too large.
    """
    if 0 in grid:
        return
    if max(grid[1:], default=0) > MAX_GRID_SIZE:
        raise Unsupported(f"a grid of {grid} programs is larger than CUDA allows")
    all_args = (*args, *named_args.values())
    try:
        with torch.cuda.device_of(next(t for t in all_args if torch.is_tensor(t))):
            kernel[grid](*args, **named_args)
    except OutOfResources as error:
        raise Unsupported(f"{kernel.__name__} does not fit this GPU: {error}") from error


def make_dense(t: MaybeTensor) -> MaybeTensor:
    """Return a tensor whose last dimension is contiguous, copied if necessary; None stays None."""
    return t if t is None or t.shape[-1] == 1 or t.stride(-1) == 1 else t.contiguous()


@triton.jit
def activate(p, ACT: tl.constexpr):
    """Return act(p), in the dtype of p."""
    if ACT == "silu":
        p *= tl.sigmoid(p)
    elif ACT == "relu":
        p = tl.where(p < 0, 0.0, p)  # tl.maximum would drop a NaN
    return p


@triton.jit
def activate_grad(p, ACT: tl.constexpr):
    """Return act′(p)."""
    slope = tl.full(p.shape, 1.0, tl.float32)
    if ACT == "silu":
        sigmoid = tl.sigmoid(p)
        slope = sigmoid * (1.0 + p * (1.0 - sigmoid))
    elif ACT == "relu":
        slope = tl.where(p > 0, 1.0, 0.0)
    return slope


INTERPRETED = not isinstance(activate, triton.JITFunction)
