"""The faster backends and the choice among them.

Each is imported only where it may be used, and compared with a loop before it is.
`FPRNN_KERNELS` names one: `auto` (the default), `plain` (none), or a backend of MODULES, which is
an error where it cannot run.
"""

import functools
import importlib
import os

import torch

# backend → operation → its module. An operation that a backend lacks is computed by another.
MODULES = {
    "cpu": {"selective_scan": "cpu", "step": "cpu_step"},
    "triton": {
        "selective_scan": "triton_scan", "ssd_scan": "triton_ssd", "step": "triton_step",
        "short_conv": "triton_conv",
    },
    "mamba_ssm": {"selective_scan": "mamba_ssm", "ssd_scan": "mamba_ssm"},
}  # fmt: skip
OPERATIONS = ("selective_scan", "ssd_scan", "step", "short_conv")
NO_GRADIENT = {("cpu", "step")}
NO_DOUBLE = ("triton", "mamba_ssm")


class BackendError(ValueError):
    """A backend that is not known or cannot be used, and why."""


def asked() -> str:
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


@functools.cache
def _load(name, operation):
    """The module of a backend for an operation and "", or None and why not."""
    try:
        module = importlib.import_module(f"lm.kernels.{MODULES[name][operation]}")
    except ImportError as missing:
        return None, f"{missing.name or missing} is not installed"
    works, why = module.usable()
    return (module, "") if works else (None, why)


@functools.cache
def _candidates(operation, device_type, name):
    """The backends that compute an operation on such a device, [(backend, module)].

    Raises:
        BackendError: the one asked for by name cannot.
    """
    if name == "plain":
        return []
    found = []
    for backend in MODULES:
        # Interpreted, Triton is for tests: only when asked for.
        if backend != name and (device_type == "cpu") != (backend == "cpu"):
            continue
        if operation not in MODULES[backend] or _device_of(backend) != device_type:
            continue
        module, why = _load(backend, operation)
        if backend == name and module is None:
            raise BackendError(f"FPRNN_KERNELS is `{name}`, which cannot be used here: {why}")
        if module is not None:
            found.append((backend, module))
    return sorted(found, key=lambda pair: pair[0] != name)


@functools.cache
def _find(operation, device_type, dtype, grad, name):
    found = [
        (backend, module)
        for backend, module in _candidates(operation, device_type, name)
        if not (dtype == torch.float64 and backend in NO_DOUBLE)
        and not (grad and (backend, operation) in NO_GRADIENT)
    ]
    if len(found) > 1 and found[0][0] != name:
        from lm.kernels import fastest

        found = fastest.first(operation, found)
    return found[0][1] if found else None


def find(operation, like):
    """The module to compute an operation with, None for plain PyTorch.

    Args:
        operation: one of OPERATIONS. like: a tensor of the device and dtype it is computed in.
    Raises:
        BackendError: FPRNN_KERNELS names what is not there.
    """
    return _find(operation, like.device.type, like.dtype, torch.is_grad_enabled(), asked())


def available(device_type="cpu") -> str:
    """What computes what on such a device, and what cannot be used and why, in words.

    Raises:
        BackendError: FPRNN_KERNELS names what is not there.
    """
    name, parts, missing = asked(), [], {}
    for operation in OPERATIONS:
        found = _candidates(operation, device_type, name)
        if found:
            parts.append(f"{operation} {' or '.join(backend for backend, _ in found)}")
        for backend in MODULES if name == "auto" else ():
            if operation in MODULES[backend] and _device_of(backend) == device_type:
                why = _load(backend, operation)[1]
                missing |= {backend: why} if why else {}
    if name == "plain":
        return "plain PyTorch (FPRNN_KERNELS is plain)"
    reasons = "; ".join(f"{backend}: {why}" for backend, why in missing.items())
    return (", ".join(parts) or "plain PyTorch") + (f" ({reasons})" if reasons else "")
