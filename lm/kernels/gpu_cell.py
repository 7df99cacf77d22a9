"""Autograd function of the `cell` kernels for GPUs, which Triton and the persistent kernels share.

Shape suffixes: b batch, l length, d channels, K columns of raw.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lm.kernels.cell_arguments import DIFFERENTIABLE, CellArguments, as_cell_arguments
from lm.kernels.checks import needs_grad

# Parameters whose gradients the kernels sum over time: their buffers have the shape (b,d).
VECTORS = ("D", "norm_weight", "norm_bias")


class SolvedLayer(NamedTuple):
    """Results of a forward pass, and its backward pass."""

    y: Tensor  # (b,l,d)
    state: Tensor  # after the last token
    outcome: Tensor  # of each token's search, (b,l)
    saved: Mapping[str, Tensor | None] = {}  # the tensors that `compute_grads` reads, by name
    # Function of `saved` and ∂y (b,l,d). It returns gradients by the names of DIFFERENTIABLE,
    # without weight_y and with (b,d) for VECTORS, and max_t ‖λ_t‖ of each sequence. It must not
    # contain tensors: autograd frees only `saved`.
    compute_grads: Callable[..., tuple[dict[str, Tensor | None], Tensor]] | None = None


Solve = Callable[[CellArguments, bool], SolvedLayer]


def solve(solve_layer: Solve, arguments: CellArguments | Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Solve a layer, so that autograd can differentiate y once.

    Args:
        solve_layer: Function of the arguments, and of True if a backward pass may follow.
        arguments: CellArguments, or a mapping with its fields.

    Returns:
        y, the state and the outcomes of a SolvedLayer.
    """
    arguments = as_cell_arguments(arguments)
    inputs = [getattr(arguments, name) for name in DIFFERENTIABLE]
    if needs_grad(*inputs):
        return _Cell.apply(solve_layer, arguments, *inputs)
    return solve_layer(arguments, False)[:3]


class _Cell(torch.autograd.Function):
    @staticmethod
    def forward(ctx, solve_layer, arguments, *inputs):
        """Solve a layer and save what its gradient needs.

        `inputs` are the tensors of `arguments` that have a gradient, because autograd finds only
        tensors that are inputs themselves.
        """
        solved = solve_layer(arguments, True)
        ctx.mark_non_differentiable(solved.state, solved.outcome)
        ctx.set_materialize_grads(False)
        ctx.names = [*solved.saved]
        ctx.save_for_backward(*solved.saved.values())
        ctx.dtypes = [None if t is None else t.dtype for t in inputs]
        ctx.compute_grads, ctx.adjoint = solved.compute_grads, arguments.adjoint
        return solved[:3]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, *_):
        saved = dict(zip(ctx.names, ctx.saved_tensors))
        grad_y = torch.zeros_like(saved["y"]) if grad_y is None else grad_y
        grads, max_lambda = ctx.compute_grads(saved, grad_y)
        grads["weight_y"] = compute_weight_grad(grads["raw"], saved)
        grads |= {name: grads[name].sum(0) for name in VECTORS if grads.get(name) is not None}
        if ctx.adjoint is not None:
            norms = torch.linalg.vector_norm(grad_y.float(), dim=-1)
            norm = norms.amax(1) if norms.shape[1] else torch.zeros_like(max_lambda)
            ctx.adjoint.copy_(torch.where(norm == 0, 0, max_lambda / norm))
        grads = [grads.get(name) for name in DIFFERENTIABLE]
        grads = [None if g is None else g.to(dtype) for g, dtype in zip(grads, ctx.dtypes)]
        return None, None, *grads  # None: the first two arguments have no gradient


def compute_weight_grad(d_raw: Tensor, saved: Mapping[str, Tensor]) -> Tensor:
    """Return the gradient of W_y, Σ_t d_rowᵀ y_{t−1}, as one product.

    Args:
        d_raw: Gradient of raw, (b,l,K).
        saved: Tensors of the forward pass by name: y, y0, keep and weight_y.
    """
    y, y0, keep, weight_y = (saved[name] for name in ("y", "y0", "keep", "weight_y"))
    y_before = torch.empty_like(y, dtype=weight_y.dtype)
    y_before[:, :1] = 0 if y0 is None else y0.unsqueeze(1)
    y_before[:, 1:] = y[:, :-1]
    if keep is not None:
        y_before *= keep.unsqueeze(-1)
    d_rows = d_raw[..., : len(weight_y)].flatten(0, 1).to(weight_y.dtype)
    return d_rows.t() @ y_before.flatten(0, 1)
