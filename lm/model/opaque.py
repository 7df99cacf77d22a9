"""A function as one operator of PyTorch, which torch.compile and torch.export do not look into.

What takes as many steps as the data say cannot be traced, and compiled kernels have nothing to
trace. Outside of a compiler such a function is called as it is: an operator costs time.
"""

import inspect
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

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
