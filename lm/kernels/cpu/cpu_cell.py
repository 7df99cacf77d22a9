"""The `cell` kernels for the CPU: the exact solve of a whole layer, with its gradient.

lm/kernels/cell_arguments.py has the equations and the arguments. This file checks and packs the
arguments for cell_forward.cpp and cell_backward.cpp. States are stored as (b,n,d), as in scan.py.
A sequence gives the same bits in any batch, with any number of threads, and if its tokens are cut
into several calls.

Shape suffixes: b batch, l length, d channels, n states, r reflections, K columns of raw, k columns
of raw that depend on y_{t−1} (the first ones), c centroids.
"""

import functools
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lm.kernels import cell_arguments
from lm.kernels.cell_arguments import (
    ACTS,
    DIFFERENTIABLE,
    NORMS,
    CellArguments,
    Readout,
    as_cell_arguments,
    check_sizes,
    expected_shapes,
)
from lm.kernels.checks import cell_deviation, needs_grad
from lm.kernels.cpu import build as cpu_build
from lm.kernels.cpu.build import (
    check,
    choose_checkpoint_interval,
    get_address,
    load_functions,
    space_tokens_evenly,
)

# Two capability flags: lm/model reads them and `fits` before it calls `cell`.
NARROW = False  # whether raw and weight_y may have a narrower dtype than the other tensors
CENTROIDS = True  # whether y_{t−1} may be read through centroids
NO_READOUT = Readout(None, None, None, None)  # type: ignore[arg-type]
# Tensors of CellArguments (raw to h0), then of its readout, in the order of `struct Cell`.
TENSOR_NAMES = (*CellArguments._fields[2:-2], *Readout._fields)
_KINDS = {"mamba1": 0, "mamba2": 1, "rnn": 2}
_NORMS, _ACTS = ({name: i for i, name in enumerate(names)} for names in (NORMS, ACTS))


class _Sizes(NamedTuple):
    """The whole numbers of `struct Cell` in cell_token.h, in its order."""

    b: int
    length: int
    d: int
    n: int
    kind: int
    heads: int
    groups: int
    rank: int
    act: int
    sequential: bool
    bc_norm: bool
    norm: int
    columns: int
    y_columns: int
    vectors_column: int  # the first column of a part in a row, as in Layout
    gates_column: int
    B_column: int
    C_column: int
    centroids: int
    raw_step: int  # entries between two tokens of raw
    checkpoint_interval: int  # tokens
    threads: int


class _Problem(NamedTuple):
    """Inputs of `struct Cell`: whole numbers, real numbers and tensors, in its order."""

    sizes: _Sizes
    real_numbers: tuple[float, ...]
    tensors: tuple[Tensor | None, ...]  # by TENSOR_NAMES

    @property
    def x(self) -> Tensor:
        """Input of the mixer. All tensors have its dtype."""
        x = self.tensors[TENSOR_NAMES.index("x")]
        assert x is not None
        return x


_REAL_COUNT, _ADDRESS_COUNT = 4, 38  # real numbers and addresses of `struct Cell`
_pack = struct.Struct(f"{len(_Sizes._fields)}q{_REAL_COUNT}d{_ADDRESS_COUNT}q").pack


def fits(r: int, d: int) -> bool:
    """Return whether the kernel can solve tokens with r reflections; d, the width, is unlimited."""
    return r <= cell_arguments.MAX_REFLECTIONS


def _self_check(dtype):
    return cell_deviation(cell, dtype)


usable = functools.partial(cpu_build.usable, _self_check)


def _prepare(arguments: CellArguments) -> _Problem:
    """Check the arguments and convert them to what `struct Cell` contains."""
    kind, options, layout, x = arguments.kind, arguments.options, arguments.layout, arguments.x
    sizes = check_sizes(arguments)
    b, length, d = sizes.b, sizes.length, sizes.d
    if options.norm == "none":
        arguments = arguments._replace(norm_weight=None, norm_bias=None)
    if options.norm == "rms" and arguments.norm_bias is not None:
        raise ValueError("RMSNorm has no bias")
    if arguments.keep is not None:
        arguments = arguments._replace(keep=arguments.keep.to(x.dtype).contiguous())
    shapes, fields = expected_shapes(sizes), arguments._asdict()
    check(x.dtype, *((name, fields[name], shape) for name, shape in shapes.items()))
    readout = arguments.readout or NO_READOUT
    centroids = 0 if readout.keys is None else len(readout.keys)
    readout_shapes = (centroids, d), (centroids,), (centroids, d), (b, length, d)
    check(x.dtype, *zip(readout._fields, readout, readout_shapes))

    raw, raw_step = space_tokens_evenly(arguments.raw)
    A, h0 = arguments.A, arguments.h0
    if kind != "mamba1":
        A = A.contiguous()
    elif A.stride() != (1, d):
        A = A.t().contiguous().t()
    if h0 is not None:
        h0 = _store_channels_last(h0, kind)
    contiguous = {
        name: _make_contiguous(fields[name]) for name in shapes if name not in ("raw", "A", "h0")
    }
    converted = {**contiguous, "raw": raw, "A": A, "h0": h0}
    tensors = (*(converted[name] for name in shapes), *map(_make_contiguous, readout))
    struct_sizes = _Sizes(
        b=b,
        length=length,
        d=d,
        n=sizes.n,
        kind=_KINDS[kind],
        heads=sizes.heads,
        groups=options.groups,
        rank=options.rank,
        act=_ACTS[options.act],
        sequential=options.sequential,
        bc_norm=options.bc_norm,
        norm=_NORMS[options.norm],
        columns=sizes.columns,
        y_columns=sizes.y_columns,
        vectors_column=layout.vectors,
        gates_column=layout.gates,
        B_column=layout.B,
        C_column=layout.C,
        centroids=centroids,
        raw_step=raw_step,
        checkpoint_interval=choose_checkpoint_interval(length),
        threads=torch.get_num_threads(),
    )
    real_numbers = options.scale, options.eps, options.contractive or 0.0, options.norm_eps
    return _Problem(struct_sizes, real_numbers, tensors)


def _make_contiguous(t):
    return None if t is None else t.contiguous()


def _store_channels_last(h, kind):
    """Return a state whose channels are last in memory, copied if necessary."""
    if kind == "mamba1":
        return h if h.transpose(1, 2).is_contiguous() else h.mT.contiguous().mT
    if kind == "mamba2":
        stored = h.permute(0, 3, 1, 2)
        return h if stored.is_contiguous() else stored.contiguous().permute(0, 2, 3, 1)
    return h.contiguous()


def _allocate_results(problem):
    """Allocate y (b,l,d), the state after the last token, and the outcomes (b,l)."""
    sizes, x = problem.sizes, problem.x
    b, d, n = sizes.b, sizes.d, sizes.n
    y = x.new_empty(b, sizes.length, d)
    if sizes.kind == _KINDS["mamba1"]:
        state = x.new_empty_strided((b, d, n), (n * d, 1, d))
    elif sizes.kind == _KINDS["mamba2"]:
        headdim = d // sizes.heads
        state = x.new_empty_strided((b, sizes.heads, headdim, n), (n * d, headdim, 1, d))
    else:
        state = x.new_empty(b, d)
    return y, state, torch.empty(b, sizes.length, dtype=torch.uint8, device=x.device)


def _call(name, problem, *results):
    """Call a function of the library.

    Args:
        name: "cell" or "cell_backward".
        problem: A _Problem.
        results: The tensors that follow in `struct Cell`. Missing ones at the end are null.
    """
    addresses = [get_address(t) for t in (*problem.tensors, *results)]
    nulls = [0] * (_ADDRESS_COUNT - len(addresses))
    function = load_functions()[name][problem.x.dtype]
    function(_pack(*problem.sizes, *problem.real_numbers, *addresses, *nulls))


class _Cell(torch.autograd.Function):
    @staticmethod
    def forward(ctx, arguments, *_):
        """Solve a layer and save what its gradient needs.

        The other inputs are the tensors of `arguments` that have a gradient, because autograd finds
        only tensors that are inputs themselves.
        """
        problem = _prepare(arguments)
        sizes, x = problem.sizes, arguments.x
        b, length, d = sizes.b, sizes.length, sizes.d
        results = y, state, outcome = _allocate_results(problem)
        rows = x.new_empty(arguments.raw.shape) if sizes.y_columns else None
        roots = x.new_empty(b, length, sizes.rank)
        chunks = -(-length // sizes.checkpoint_interval)
        checkpoints = None
        if arguments.kind != "rnn":
            checkpoints = x.new_empty(b, chunks, sizes.n, d)
        centroid_weights = centroid_means = None  # α_i, and Σ_i α_i c_i of the centroids c_i
        if sizes.centroids:
            centroid_weights = x.new_empty(b, length, sizes.centroids)
            centroid_means = x.new_empty(b, length, d)
        saved = rows, roots, checkpoints, centroid_weights, centroid_means
        _call("cell", problem, *results, *saved)
        ctx.mark_non_differentiable(state, outcome)
        ctx.set_materialize_grads(False)
        inputs = problem.tensors
        if rows is not None:  # the rows contain raw, which is not needed any more
            inputs = (None, *inputs[1:])
        ctx.save_for_backward(*inputs, y, outcome, *saved)
        ctx.problem = problem._replace(tensors=())
        ctx.adjoint = arguments.adjoint
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, *_):
        all_saved = ctx.saved_tensors  # a checkpoint permits to read them only once
        input_count = len(TENSOR_NAMES)
        inputs = all_saved[:input_count]
        y, outcome, *saved = all_saved[input_count:]
        rows, _roots, _checkpoints, centroid_weights, centroid_means = saved
        if grad_y is None:
            grad_y = torch.zeros_like(y)
        problem = ctx.problem._replace(tensors=inputs)
        tensors, x = dict(zip(TENSOR_NAMES, inputs)), problem.x
        adjoint = x.new_empty(len(x))  # max_t ‖λ_t‖ / max_t ‖∂y_t‖ of each sequence
        d_raw = x.new_empty((tensors["raw"] if rows is None else rows).shape)
        needs_d_weight_y = ctx.needs_input_grad[2]  # after `arguments` and raw
        d_weight_y = torch.empty_like(tensors["weight_y"]) if needs_d_weight_y else None
        other_grads = (_empty_like(tensors[name]) for name in DIFFERENTIABLE[2:])
        grads = d_raw, d_weight_y, *other_grads
        d_logits, d_centroid_means = map(_empty_like, (centroid_weights, centroid_means))
        d_noise = _empty_like(tensors["noise"])
        results = y, None, outcome, *saved  # no final state
        all_grads = grad_y.contiguous(), adjoint, *grads, d_logits, d_centroid_means, d_noise
        _call("cell_backward", problem, *results, *all_grads)
        if ctx.adjoint is not None:
            ctx.adjoint.copy_(adjoint)
        d_readout: tuple[Tensor | None, ...] = NO_READOUT
        if d_logits is not None:
            queries = _compute_queries(y, tensors["y0"], tensors["noise"])
            d_keys = torch.einsum("blc,bld->cd", d_logits, queries)
            d_values = torch.einsum("blc,bld->cd", centroid_weights, d_centroid_means)
            d_readout = d_keys, d_logits.sum((0, 1)), d_values, d_noise
        return None, *grads, *d_readout


def _empty_like(t):
    return None if t is None else torch.empty_like(t)


def _compute_queries(y, y0, noise):
    """Return y_{t−1} + noise, which every token compares with the keys, (b,l,d).

    Documents need no mask, because a document's first token has no gradient of its logits.
    """
    y0 = torch.zeros_like(y[:, 0]) if y0 is None else y0
    before = torch.cat([y0.unsqueeze(1), y[:, :-1]], 1)
    return before if noise is None else before + noise


def _solve(arguments):
    readout = arguments.readout or NO_READOUT
    inputs = (*(getattr(arguments, name) for name in DIFFERENTIABLE), *readout)
    if needs_grad(*inputs):
        return _Cell.apply(arguments, *inputs)
    problem = _prepare(arguments)
    results = _allocate_results(problem)
    _call("cell", problem, *results)
    return results


def cell(arguments: CellArguments | Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Solve an FP-Mamba-1, FP-Mamba-2 or FP-RNN layer, token by token; differentiable once.

    Args:
        arguments: CellArguments, or a mapping with its fields. All tensors are on the CPU, all in
            fp32 or all in fp64.

    Returns:
        y (b,l,d); the state after the last token, with the shape of h0; the outcome of each token's
        search (b,l), uint8, see lm/model/solver.py. Only y is differentiable.

    Raises:
        TypeError: If a tensor is not on the CPU.
        ValueError: If a shape or an option is wrong.
        Unsupported: If dtypes differ or are neither fp32 nor fp64, or if there are too many
            reflections.
    """
    return _solve(as_cell_arguments(arguments))
