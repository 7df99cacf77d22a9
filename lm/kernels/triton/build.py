"""What the Triton kernels share: whether they run here, checks and launches.

They run on CUDA tensors; on CPU tensors, slowly, where TRITON_INTERPRET=1 was set when this file
was imported. All is computed in fp32 whatever is read.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from lm.kernels import Unsupported
from lm.kernels.checks import find_fault

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MaybeTensor = TypeVar("MaybeTensor", bound=torch.Tensor | None)
MOST_PROGRAMS = 65535  # along the second and the third axis of a grid


def usable(
    self_check: Callable[[], float], kernels: str = "the Triton kernels"
) -> tuple[bool, str]:
    """Check once whether kernels run here; see `lm.kernels.checks.find_fault`.

    Args:
        self_check: Compiles the kernels (seconds; afterwards Triton's cache has them). torch's
            default device is the device to check.
        kernels: Their name in the sentence.

    Returns:
        Whether they run, and a sentence that gives the reason if they do not.
    """
    fault = _find_fault(self_check, kernels)
    return not fault, fault


@functools.cache
def _find_fault(self_check, kernels):
    if INTERPRETED:
        return find_fault(self_check, "cpu", kernels)
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        found = ".".join(map(str, capability))
        return f"the GPU has compute capability {found}, {kernels} need 8.0"
    return find_fault(self_check, "cuda", kernels)


def check(**tensors: tuple[torch.Tensor | None, Sequence[int]]) -> None:
    """Check name=(tensor, shape); tensors that are None are left out.

    Raises:
        ValueError: a shape is wrong. TypeError: they are not all on one device that the kernels run
        on. Unsupported: a dtype is not among DTYPES.
    """
    device = None
    for name, (t, shape) in tensors.items():
        if t is None:
            continue
        device = device or t.device
        if t.dtype not in DTYPES:
            raise Unsupported(f"{name} is {t.dtype}: Triton reads float32, bfloat16 and float16")
        if t.shape != tuple(shape):
            raise ValueError(f"{name} is {tuple(t.shape)} where {tuple(shape)} is expected")
        if t.device != device or not (t.is_cuda or INTERPRETED):
            raise TypeError(f"{name} is on {t.device}: all must be on one GPU, as {device} is")


def launch(kernel: Any, programs: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run a kernel on the device of its tensors, unless there is nothing to do.

    Raises:
        Unsupported: it takes more than the GPU has, or more programs than a grid can have.
    """
    if 0 in programs:
        return
    if max(programs[1:], default=0) > MOST_PROGRAMS:
        raise Unsupported(f"{programs} programs are more than a grid can have")
    tensors = (*args, *constants.values())
    try:
        with torch.cuda.device_of(next(t for t in tensors if torch.is_tensor(t))):
            kernel[programs](*args, **constants)
    except OutOfResources as wrong:
        raise Unsupported(f"{kernel.__name__} does not fit this GPU: {wrong}") from wrong


def dense(t: MaybeTensor) -> MaybeTensor:
    """t, its last dimension contiguous; a copy only where it is not. None stays None."""
    return t if t is None or t.shape[-1] == 1 or t.stride(-1) == 1 else t.contiguous()


@triton.jit
def activate(p, ACT: tl.constexpr):
    if ACT == "silu":
        p *= tl.sigmoid(p)
    elif ACT == "relu":
        p = tl.where(p < 0, 0.0, p)  # tl.maximum would drop a NaN
    return p


@triton.jit
def activate_grad(p, ACT: tl.constexpr):
    slope = tl.full(p.shape, 1.0, tl.float32)
    if ACT == "silu":
        gate = tl.sigmoid(p)
        slope = gate * (1.0 + p * (1.0 - gate))
    elif ACT == "relu":
        slope = tl.where(p > 0, 1.0, 0.0)
    return slope


INTERPRETED = not isinstance(activate, triton.JITFunction)
