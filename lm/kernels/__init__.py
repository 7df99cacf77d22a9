"""The faster backends and the choice among them.

Each is imported only where it may be used, and compared with plain PyTorch before it is.
`FPRNN_KERNELS` names one: `auto` (the default), `plain` (none), or a backend of MODULES: it then
comes first on the device that it is for, and it is an error where it cannot run at all.
"""

import functools
import importlib
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, TypeVar

import torch

from lm.common.errors import UserError

# What lm/model/scan.py asks for before it uses this package: a name, since another package may be
# called `lm`, and the version of `find`, `compute` and of what they call the kernels with. An
# exported model carries a scan.py of its own, which may be older or newer than what is installed.
INTERFACE = ("fprnn-kernels", 4)

# backend → operation → its module, the backend to be preferred first. An operation that a backend
# lacks is computed by another.
MODULES = {
    "cpu": {
        "selective_scan": "cpu.scan",
        "cell": "cpu.cpu_cell",
        "roots": "cpu.roots",
    },
    "triton": {
        "selective_scan": "triton.scan",
        "cell": "triton.triton_cell",
        "roots": "triton.roots",
    },
    "mamba_ssm": {
        "ssd_scan": "mamba_ssm.ssd",
        "mamba_scan": "mamba_ssm.scan",
        "mamba2_scan": "mamba_ssm.ssd",
        "short_conv": "mamba_ssm.conv",
    },
}
Result = TypeVar("Result")
# The scan that a layer's whole recurrence (bias and softplus of Δ, scan, skip, gate) contains.
FUSED = {"mamba_scan": "selective_scan", "mamba2_scan": "ssd_scan"}
OPERATIONS = ("selective_scan", "ssd_scan", *FUSED, "short_conv", "cell", "roots")
NO_DOUBLE = ("triton", "mamba_ssm")


class BackendError(UserError, ValueError):
    """A backend that is not known or cannot be used, and why."""


class Unsupported(ValueError):
    """Arguments that are right, but more than a kernel can compute; raised before it runs."""


def run_in_clean_threads(*computations: Callable[[], Result]) -> list[Result]:
    """Run computations side by side, each in a new thread, and wait for all.

    A new thread has none of the caller's modes: neither gradients, inference or autocast, nor modes
    and hooks that take part in every operation. A kernel may be used first inside the saved-tensor
    hooks of a checkpoint. The threads use the caller's CUDA device.

    Returns:
        The results, in the order of the computations.

    Raises:
        BaseException: The first error in the order of the computations, after all have ended.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1

    def run(compute):
        with torch.cuda.device(device):  # −1: leave it
            return compute()

    with ThreadPoolExecutor(len(computations), "fprnn-kernels") as pool:
        futures = [pool.submit(run, compute) for compute in computations]
    return [future.result() for future in futures]


def requested_backend() -> str:
    """What FPRNN_KERNELS names.

    Raises:
        BackendError: no such backend.
    """
    name = os.environ.get("FPRNN_KERNELS") or "auto"
    if name not in ("auto", "plain", *MODULES):
        raise BackendError(
            f"FPRNN_KERNELS is `{name}`: it must be auto, plain or one of {', '.join(MODULES)}"
        )
    return name


def _device_of(name):
    """The kind of device on which a backend's kernels run."""
    interpreted = name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    return "cpu" if name == "cpu" or interpreted else "cuda"


def _import(name, operation):
    """Return the module of a backend for an operation and "", or None and the reason."""
    try:
        return importlib.import_module(f"lm.kernels.{MODULES[name][operation]}"), ""
    except ModuleNotFoundError as missing:
        return None, f"{missing.name or missing} is not installed"
    except Exception as wrong:  # compiled for another torch, say
        return None, f"it cannot be imported: {type(wrong).__name__}: {wrong}"


@functools.cache
def _load(name, operation):
    """Return the module of a backend for an operation and "" if it works here, or None and the
    reason."""
    module, why = _import(name, operation)
    if module is None:
        return None, why
    works, why = module.usable()
    if not works and not __name__.startswith("lm."):  # an export's own: nothing else says it
        _warn_of_the_missing(why)
    return (module, "") if works else (None, why)


@functools.cache
def _warn_of_the_missing(why):
    warnings.warn(
        f"fprnn's kernels are not used, and the model is computed in plain PyTorch: {why}",
        RuntimeWarning,
        stacklevel=2,
    )


def _backends(operation, device_type, name):
    """List the backends that may compute an operation on such a device, the named one first.

    A named backend that has a layer's scan computes it, without another backend's fused form.
    """
    named = MODULES.get(name, {})
    if operation not in named and FUSED.get(operation) in named:
        return []
    may = [
        backend
        for backend, modules in MODULES.items()
        if operation in modules
        and name != "plain"
        and _device_of(backend) == device_type
        # Interpreted, Triton is for tests: only when asked for.
        and (backend == name or (device_type == "cpu") == (backend == "cpu"))
    ]
    return sorted(may, key=lambda backend: backend != name)


def _load_on_gpu(device_type, operations):
    """Call `_load` for the modules of a GPU's backends, side by side; its cache keeps the results.

    A self-check compiles its kernels, and Triton's compiler releases the GIL for about 9 of 11 s.
    Modules are imported one after the other, because packages may import each other in circles. The
    first one is also checked before the others, because that initializes CUDA and Triton. A module
    with several operations is checked in one thread, because Triton's autotuner is not thread-safe.
    """
    name = requested_backend()
    loads: dict[str, tuple[str, str]] = {}  # module → one (backend, operation) that it has
    for operation in operations:
        for backend in _backends(operation, device_type, name):
            if _device_of(backend) == "cuda" and _import(backend, operation)[0] is not None:
                loads.setdefault(MODULES[backend][operation], (backend, operation))
    first, others = list(loads.values())[:1], list(loads.values())[1:]
    for load in first:
        _load(*load)
    if others:
        run_in_clean_threads(*(functools.partial(_load, *load) for load in others))


@functools.cache
def _candidates(operation, device_type, name):
    """The backends that compute an operation on such a device, [(backend, module)].

    Raises:
        BackendError: the one asked for by name cannot.
    """
    if operation in MODULES.get(name, ()):
        module, why = _load(name, operation)
        if module is None:
            raise BackendError(
                f"FPRNN_KERNELS is `{name}`, which cannot compute {operation} here: {why}"
            )
    found = [(b, _load(b, operation)[0]) for b in _backends(operation, device_type, name)]
    return [(backend, module) for backend, module in found if module is not None]


@functools.cache
def _find(operation, device_type, dtype, name):
    """The modules that can compute an operation, the one to be used first."""
    return tuple(
        module
        for backend, module in _candidates(operation, device_type, name)
        if not (dtype == torch.float64 and backend in NO_DOUBLE)
    )


def find(operation: str, like: torch.Tensor) -> ModuleType | None:
    """The module to compute an operation with, None for plain PyTorch.

    Args:
        operation: one of OPERATIONS. like: a tensor of the device and dtype it is computed in.
    Raises:
        BackendError: FPRNN_KERNELS names what is not there.
    """
    found = _find(operation, like.device.type, like.dtype, requested_backend())
    return found[0] if found else None


def compute(operation: str, function: str, like: torch.Tensor, *args: Any) -> Any:
    """What a function of the first backend that can compute it returns, None where plain PyTorch
    must. Where that is because of the arguments, a warning says so once.

    Args:
        operation, like: as in `find`. function: a name in its module. args: what it is called with.
    Raises:
        BackendError: FPRNN_KERNELS names what is not there.
    """
    reasons = []
    for module in _find(operation, like.device.type, like.dtype, requested_backend()):
        try:
            return getattr(module, function)(*args)
        except Unsupported as unsupported:
            reasons.append(str(unsupported))
    if reasons:
        _warn(function, "; ".join(reasons))
    return None


@functools.cache
def _warn(function, reasons):
    warnings.warn(
        f"{function} is computed in plain PyTorch, which is slower: {reasons}",
        RuntimeWarning,
        stacklevel=4,
    )


def choose_backends(
    device_type: str = "cpu", operations: Sequence[str] = OPERATIONS
) -> dict[str, tuple[str, ...]]:
    """Return the backends that compute each operation on a device, the preferred one first.

    Args:
        device_type: "cpu" or "cuda".
        operations: The operations to look at. Others are neither compiled nor checked.

    Raises:
        BackendError: FPRNN_KERNELS names what cannot run here.
    """
    _load_on_gpu(device_type, operations)
    return {
        operation: tuple(
            backend for backend, _ in _candidates(operation, device_type, requested_backend())
        )
        for operation in operations
    }


def describe_backends(device_type: str = "cpu", operations: Sequence[str] = OPERATIONS) -> str:
    """Describe which backends compute the operations on a device, and why others cannot.

    Args:
        device_type, operations: As in `choice`.

    Raises:
        BackendError: FPRNN_KERNELS names what can compute nothing here.
    """
    name = requested_backend()
    parts: list[str] = []
    missing: dict[str, dict[str, list[str]]] = {}  # backend → why → operations
    if name == "plain":
        return "plain PyTorch (FPRNN_KERNELS is plain)"
    _load_on_gpu(device_type, operations)
    for operation in operations:
        may = _backends(operation, device_type, name)
        tried = dict.fromkeys([*may, name] if operation in MODULES.get(name, ()) else may)
        whys = {backend: _load(backend, operation)[1] for backend in tried}
        works = [backend for backend in may if not whys[backend]]
        parts += [f"{operation} {' or '.join(works)}"] if works else []
        for backend, why in whys.items():
            if why:
                missing.setdefault(backend, {}).setdefault(why, []).append(operation)
    sentences = []
    for backend, whys in missing.items():
        count = len(set(MODULES[backend]) & set(operations))
        only = len(whys) == 1 and len(*whys.values()) == count
        sentences += [
            f"{backend}: {why}" if only else f"{backend} for {' and '.join(lacking)}: {why}"
            for why, lacking in whys.items()
        ]
        if backend == name and sum(map(len, whys.values())) == count:
            raise BackendError(f"FPRNN_KERNELS names what cannot be used: {'; '.join(sentences)}")
    words = ", ".join(parts) or "plain PyTorch"
    return f"{words} ({'; '.join(sentences)})" if sentences else words
