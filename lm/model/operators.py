"""Access of the model's code to compiled functions.

`opaque` makes one operator of PyTorch of a function, which torch.compile and torch.export do not
look into: compiled kernels cannot be traced, and neither can a loop whose length the data decide.

`bundled_kernels` finds the kernels that an export brings along, for where fprnn is not installed.
`fprnn export` writes the text of lm/kernels into FILES (lm/export/export_code.py); here it is
empty. At first use they are written to the user's cache as a package of their own, and g++ compiles
the CPU's there.
"""

import hashlib
import importlib.util
import inspect
import os
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

logger = logging.get_logger(__name__)

SAID = "fprnn is not installed: the kernels that came with the model are used"
LOCK = threading.Lock()  # around the first import
FILES: dict[str, str] = {}  # path in the package → text


def bundled_kernels() -> ModuleType | None:
    """Return the package made of FILES, or None if there are none.

    Raises:
        OSError, RuntimeError: there is no place to write them to.
    """
    if not FILES:
        return None
    digest = hashlib.sha256("\0".join(f"{k}\0{v}" for k, v in sorted(FILES.items())).encode())
    name = f"fprnn_kernels_{digest.hexdigest()[:16]}"  # two exports may bring two versions
    with LOCK:
        return sys.modules.get(name) or _import_package(name)


def _import_package(name):
    folder = _write_package(name)
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _write_package(name):
    """The folder in the user's cache that holds FILES; what was changed there is not run."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    parent = Path(base) / "fprnn" / "kernels"
    # The name holds the digest of the texts: what they import of lm is beside them.
    texts = {
        file: text.replace("lm.kernels", name).replace("lm.common.", f"{name}.")
        for file, text in FILES.items()
    }
    folder = parent / name
    if all(_reads(folder / file) == text for file, text in texts.items()):
        _refuse_if_open(folder)
        return folder
    logger.warning(f"{SAID}, from {folder}; on a CPU the first use compiles them (up to a minute)")
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Other processes may do the same: each file is written beside its place, then moved there.
    folder.mkdir(exist_ok=True, mode=0o700)
    _refuse_if_open(folder)
    with tempfile.TemporaryDirectory(dir=parent) as own:
        for file, text in texts.items():
            written = Path(own) / Path(file).name
            written.write_text(text, encoding="utf-8")
            (folder / file).parent.mkdir(exist_ok=True, mode=0o700)
            os.replace(written, folder / file)
    return folder


def _refuse_if_open(folder):
    """Raises OSError where others than this user may write into it: their files would run."""
    for place in (folder, folder.parent):
        found = place.stat()
        if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & 0o022):
            raise OSError(f"{place} is not this user's alone to write in")


def _reads(file):
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


# An export's files, whose module has another name, register operators of their own.
NAMESPACE = "fprnn"
if not __name__.startswith("lm."):
    NAMESPACE += f"_{zlib.crc32(__name__.rpartition('.')[0].encode()):08x}"


def compiling() -> bool:
    """Whether torch.compile or torch.export is reading what runs."""
    return torch.compiler.is_compiling()


def opaque(
    function: Callable[..., tuple[Tensor, ...]],
    shapes: Callable[..., tuple[Tensor, ...]],
    differentiable: int,
) -> Callable[..., tuple[Tensor, ...]]:
    """The operator NAMESPACE::name of a function. Its backward computes the function once more.

    Args:
        function: annotated, of tensors, numbers and names; returns tensors that are contiguous and
        none of which is an argument. shapes: of the same arguments, empty tensors like those that
        it returns. differentiable: how many of these are, the first ones.
    """
    name = f"{NAMESPACE}::{function.__name__.strip('_')}"
    parameters = list(inspect.signature(function).parameters)
    operator = torch.library.custom_op(name, function, mutates_args=())
    operator.register_fake(shapes)
    schema = torch.library.infer_schema(function, mutates_args=())
    arguments = schema[1 : schema.index(") ->")]

    def backward(grads, wanted, *args):
        return _gradients(function, differentiable, grads, wanted, args)

    def backward_shapes(grads, wanted, *args):
        return [torch.empty_like(args[i], memory_format=torch.contiguous_format) for i in wanted]

    schema = f"(Tensor[] grads, SymInt[] wanted, {arguments}) -> Tensor[]"
    gradient = torch.library.custom_op(f"{name}_backward", backward, mutates_args=(), schema=schema)
    gradient.register_fake(backward_shapes)

    def keep(ctx, inputs, output):
        ctx.tensors = [i for i, value in enumerate(inputs) if torch.is_tensor(value)]
        ctx.save_for_backward(*(inputs[i] for i in ctx.tensors))
        ctx.others = [None if torch.is_tensor(value) else value for value in inputs]

    def attach(ctx, *grads):
        args = list(ctx.others)
        for i, tensor in zip(ctx.tensors, ctx.saved_tensors):
            args[i] = tensor
        wanted = [i for i in ctx.tensors if ctx.needs_input_grad[i]]
        found = gradient([g.contiguous() for g in grads[:differentiable]], wanted, *args)
        result: list[Any] = [None] * len(parameters)
        for i, grad in zip(wanted, found):
            result[i] = grad
        return tuple(result)

    operator.register_autograd(attach, setup_context=keep)
    return operator


def _gradients(
    function: Callable[..., tuple[Tensor, ...]],
    differentiable: int,
    grads: Sequence[Tensor],
    wanted: Sequence[int],
    args: Sequence[Any],
) -> list[Tensor]:
    """Those of the arguments `wanted`, contiguous."""
    args = list(args)
    with _differentiating(), torch.enable_grad():
        inputs = [args[i].detach().requires_grad_() for i in wanted]
        for i, tensor in zip(wanted, inputs):
            args[i] = tensor
        outputs = function(*args)[:differentiable]
        found = torch.autograd.grad(outputs, inputs, grads, allow_unused=True)
    return [
        torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        if grad is None
        else grad.clone(memory_format=torch.contiguous_format)
        for tensor, grad in zip(inputs, found)
    ]


def _differentiating():
    """A context in which operations are recorded again: within an operator they are not."""
    keys = torch._C.DispatchKey
    recording = torch._C.DispatchKeySet(keys.ADInplaceOrView)
    for name in ("AutogradCPU", "AutogradCUDA", "AutogradOther", "AutogradXPU", "AutogradMPS"):
        recording = recording | torch._C.DispatchKeySet(getattr(keys, name))
    excluded = torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), excluded - recording
    )
