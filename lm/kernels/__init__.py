"""Compiled backends of slow operations, and the selection of a backend.

A backend is imported only if it may be used, and its results are compared with plain PyTorch before
its first use. The environment variable `FPRNN_KERNELS` is `auto` (the default), `plain` (only plain
PyTorch), or a backend of MODULES, which is then preferred on its device. It is an error if that
backend cannot run.
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

# lm/model/scan.py compares this value before it uses the package. The text rules out another
# package that is called `lm`. The number is the version of `find`, `compute` and the arguments of
# the kernels: an exported model has a copy of scan.py, which may be older or newer.
INTERFACE = ("fprnn-kernels", 6)

# Backend → operation → module in lm.kernels. Earlier backends are preferred. If a backend lacks an
# operation, another backend computes it.
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
    "cuda": {"cell": "cuda.cuda_cell"},
    "mamba_ssm": {
        "ssd_scan": "mamba_ssm.ssd",
        "mamba_scan": "mamba_ssm.scan",
        "mamba2_scan": "mamba_ssm.ssd",
        "short_conv": "mamba_ssm.conv",
    },
}
# Operation that computes the whole recurrence of a Mamba layer (bias and softplus of Δ, scan, skip,
# gate) → operation that computes only its scan.
FUSED = {"mamba_scan": "selective_scan", "mamba2_scan": "ssd_scan"}
OPERATIONS = ("selective_scan", "ssd_scan", *FUSED, "short_conv", "cell", "roots")
BACKENDS_WITHOUT_FP64 = ("triton", "cuda", "mamba_ssm")
BACKENDS_BY_NAME_ONLY = ("cuda",)  # used only if FPRNN_KERNELS names them: never run on a GPU
Result = TypeVar("Result")


class BackendError(UserError, ValueError):
    """FPRNN_KERNELS names a backend that is unknown or cannot run; the message has the reason."""


class Unsupported(ValueError):
    """Valid arguments that a kernel does not support; raised before the kernel runs."""


def run_in_clean_threads(*computations: Callable[[], Result]) -> list[Result]:
    """Run computations in parallel, each in a new thread, and wait for all.

    A new thread starts without the caller's modes (gradients, inference, autocast, dispatch modes,
    saved-tensor hooks). This matters because a kernel may be used for the first time inside the
    hooks of a checkpoint. The threads use the caller's CUDA device.

    Returns:
        The results, in the order of the computations.

    Raises:
        BaseException: The first error in the order of the computations, after all have ended.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1

    def run(compute):
        with torch.cuda.device(device):  # −1 changes nothing
            return compute()

    with ThreadPoolExecutor(len(computations), "fprnn-kernels") as pool:
        futures = [pool.submit(run, compute) for compute in computations]
    return [future.result() for future in futures]  # the pool has waited for all


def requested_backend() -> str:
    """Return the value of FPRNN_KERNELS: auto, plain or a backend.

    Raises:
        BackendError: If there is no such backend.
    """
    name = os.environ.get("FPRNN_KERNELS") or "auto"
    if name not in ("auto", "plain", *MODULES):
        raise BackendError(
            f"FPRNN_KERNELS is `{name}`: it must be auto, plain or one of {', '.join(MODULES)}"
        )
    return name


def _get_device_type(backend):
    """Return the type of device, "cpu" or "cuda", on which a backend's kernels run."""
    is_interpreted = backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    return "cpu" if backend == "cpu" or is_interpreted else "cuda"


def _import(backend, operation):
    """Return the module of a backend for an operation and "", or None and the reason."""
    try:
        return importlib.import_module(f"lm.kernels.{MODULES[backend][operation]}"), ""
    except ModuleNotFoundError as error:
        return None, f"{error.name or error} is not installed"
    except Exception as error:  # for example, the package was compiled for another torch
        return None, f"it cannot be imported: {type(error).__name__}: {error}"


@functools.cache
def _load_checked(backend, operation):
    """Import the module of a backend for an operation, and run its self-check.

    Returns:
        The module and "", or None and the reason why it cannot be used.
    """
    module, reason = _import(backend, operation)
    if module is None:
        return None, reason
    is_usable, reason = module.usable()
    # A training run prints its backends at startup. An export prints nothing, so it warns.
    is_bundled = not __name__.startswith("lm.")
    if not is_usable and is_bundled:
        _warn_of_failed_check(reason)
    return (module, "") if is_usable else (None, reason)


@functools.cache
def _warn_of_failed_check(reason):
    warnings.warn(
        f"fprnn's kernels are not used, and the model is computed in plain PyTorch: {reason}",
        RuntimeWarning,
        stacklevel=2,
    )


def _list_backends(operation, device_type, requested):
    """List the backends that have an operation for a type of device, the preferred one first.

    Args:
        operation: One of OPERATIONS.
        device_type: "cpu" or "cuda".
        requested: Value of FPRNN_KERNELS.
    """
    if requested == "plain":
        return []
    # For example, FPRNN_KERNELS=triton has selective_scan but not mamba_scan. Then no backend is
    # returned for mamba_scan, so that the layer calls selective_scan.
    requested_operations = MODULES.get(requested, {})
    if operation not in requested_operations and FUSED.get(operation) in requested_operations:
        return []
    backends = []
    for backend, modules in MODULES.items():
        # Interpreted Triton runs on a CPU. It is for tests, so it is used only on request.
        is_interpreted = device_type == "cpu" and backend != "cpu"
        needs_request = is_interpreted or backend in BACKENDS_BY_NAME_ONLY
        has_operation = operation in modules and _get_device_type(backend) == device_type
        if has_operation and (backend == requested or not needs_request):
            backends.append(backend)
    return sorted(backends, key=lambda backend: backend != requested)


def _check_gpu_modules(device_type, operations):
    """Fill the cache of `_load_checked` for all modules that run on a GPU, in parallel.

    A self-check compiles its kernels, and Triton's compiler releases the GIL for about 9 of 11 s.
    Modules are imported one after the other, because packages may have circular imports.
    """
    requested = requested_backend()
    # Module → arguments of `_load_checked`. A module with several operations is checked in one
    # thread, because Triton's autotuner is not thread-safe.
    checks: dict[str, tuple[str, str]] = {}
    for operation in operations:
        for backend in _list_backends(operation, device_type, requested):
            if _get_device_type(backend) == "cuda" and _import(backend, operation)[0] is not None:
                checks.setdefault(MODULES[backend][operation], (backend, operation))
    if not checks:
        return
    # The first check initializes CUDA and Triton, so the others start after it.
    first, *others = checks.values()
    _load_checked(*first)
    if others:
        run_in_clean_threads(*(functools.partial(_load_checked, *pair) for pair in others))


@functools.cache
def _find_working(operation, device_type, requested):
    """Return the working backends of an operation: backend → module, the preferred one first.

    Raises:
        BackendError: If the backend named by FPRNN_KERNELS cannot run.
    """
    if operation in MODULES.get(requested, ()):
        module, reason = _load_checked(requested, operation)
        if module is None:
            raise BackendError(
                f"FPRNN_KERNELS is `{requested}`, which cannot compute {operation} here: {reason}"
            )
    backends = _list_backends(operation, device_type, requested)
    modules = {backend: _load_checked(backend, operation)[0] for backend in backends}
    return {backend: module for backend, module in modules.items() if module is not None}


@functools.cache
def _find_modules(operation, device_type, dtype, requested):
    """Return the modules that can compute an operation, the preferred one first."""
    excluded = BACKENDS_WITHOUT_FP64 if dtype == torch.float64 else ()
    modules = _find_working(operation, device_type, requested).items()
    return tuple(module for backend, module in modules if backend not in excluded)


def find(operation: str, like: torch.Tensor) -> ModuleType | None:
    """Return the module that computes an operation, or None for plain PyTorch.

    Args:
        operation: One of OPERATIONS.
        like: Tensor with the device and the dtype of the computation.

    Raises:
        BackendError: If FPRNN_KERNELS names a backend that is unknown or cannot run.
    """
    modules = _find_modules(operation, like.device.type, like.dtype, requested_backend())
    return modules[0] if modules else None


def compute(operation: str, function: str, like: torch.Tensor, *args: Any) -> Any:
    """Call a function of the first backend that supports the arguments.

    A warning is issued once if backends exist but none supports the arguments, or if FPRNN_KERNELS
    names a backend of BACKENDS_BY_NAME_ONLY that does not support them.

    Args:
        operation: One of OPERATIONS.
        function: Name of a function in the operation's modules.
        like: As for `find`.
        args: Arguments of the function.

    Returns:
        The function's result, or None if plain PyTorch must compute it.

    Raises:
        BackendError: If FPRNN_KERNELS names a backend that is unknown or cannot run.
    """
    reasons: list[str] = []
    requested = requested_backend()
    for module in _find_modules(operation, like.device.type, like.dtype, requested):
        try:
            result = getattr(module, function)(*args)
        except Unsupported as unsupported:
            reasons.append(str(unsupported))
            continue
        if reasons and requested in BACKENDS_BY_NAME_ONLY and operation in MODULES[requested]:
            _warn_of_fallback(function, f"another backend than {requested}", "; ".join(reasons))
        return result
    if reasons:
        _warn_of_fallback(function, "plain PyTorch, which is slower", "; ".join(reasons))
    return None


@functools.cache
def _warn_of_fallback(function, substitute, reasons):
    warnings.warn(
        f"{function} is computed in {substitute}: {reasons}",
        RuntimeWarning,
        stacklevel=4,
    )


def choose_backends(
    device_type: str = "cpu", operations: Sequence[str] = OPERATIONS
) -> dict[str, tuple[str, ...]]:
    """Return the backends that compute each operation on a device, the preferred one first.

    Args:
        device_type: "cpu" or "cuda".
        operations: Operations to include. Others are neither compiled nor checked.

    Raises:
        BackendError: If FPRNN_KERNELS names a backend that cannot run here.
    """
    _check_gpu_modules(device_type, operations)
    requested = requested_backend()
    return {
        operation: tuple(_find_working(operation, device_type, requested))
        for operation in operations
    }


def describe_backends(device_type: str = "cpu", operations: Sequence[str] = OPERATIONS) -> str:
    """Describe the backends of each operation on a device, and the reasons why others cannot run.

    Args:
        device_type: "cpu" or "cuda".
        operations: Operations to include. Others are neither compiled nor checked.

    Raises:
        BackendError: If FPRNN_KERNELS names a backend that can compute none of the operations.
    """
    requested = requested_backend()
    if requested == "plain":
        return "plain PyTorch (FPRNN_KERNELS is plain)"
    _check_gpu_modules(device_type, operations)
    choices: list[str] = []  # such as "cell triton", or "cell triton or cpu"
    failures: dict[str, dict[str, list[str]]] = {}  # backend → reason → operations
    for operation in operations:
        backends = _list_backends(operation, device_type, requested)
        checked = backends  # backends whose failures are reported
        if operation in MODULES.get(requested, ()) and requested not in backends:
            checked = [*backends, requested]  # for another device: print the reason
        reasons = {backend: _load_checked(backend, operation)[1] for backend in checked}
        working = [backend for backend in backends if not reasons[backend]]
        if working:
            choices.append(f"{operation} {' or '.join(working)}")
        for backend, reason in reasons.items():
            if reason:
                failures.setdefault(backend, {}).setdefault(reason, []).append(operation)
    notes = []
    for backend, failed_by_reason in failures.items():
        operation_count = len(set(MODULES[backend]) & set(operations))
        failed_count = sum(map(len, failed_by_reason.values()))
        has_failed = failed_count == operation_count
        is_one_reason_for_all = has_failed and len(failed_by_reason) == 1
        for reason, failed in failed_by_reason.items():
            suffix = "" if is_one_reason_for_all else f" for {' and '.join(failed)}"
            notes.append(f"{backend}{suffix}: {reason}")
        if backend == requested and has_failed:
            raise BackendError(
                f"FPRNN_KERNELS names a backend that cannot be used: {'; '.join(notes)}"
            )
    text = ", ".join(choices) or "plain PyTorch"
    return f"{text} ({'; '.join(notes)})" if notes else text
