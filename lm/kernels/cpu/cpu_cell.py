"""The exact token compiled for this CPU: a layer's whole solve, token by token, with its gradient.

The equations are those of lm/kernels/cell_arguments.py. States live in memory as (b,n,d), as those
of scan.py do. A sequence's results depend neither on the batch nor on how its tokens are cut into
calls, none on the number of threads, bit for bit.

Shape suffixes: b batch, l length, d channels, n states, r reflections, K columns of raw, k those of
them that read sh(y).
"""

import functools
import struct
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lm.kernels import cell_arguments
from lm.kernels.cell_arguments import ACTS, NORMS, Layout, Options, Readout, shapes_of, sizes_of
from lm.kernels.checks import cell_deviation, needs_grad
from lm.kernels.cpu import build as cpu_build
from lm.kernels.cpu.build import (
    address,
    check,
    checkpoint_steps,
    functions,
    token_step,
)

# `struct Cell` of cell_token.h: sizes, numbers, addresses.
_SIZES, _NUMBERS, _ADDRESSES = 22, 4, 38
NARROW = False  # all tensors have one dtype
CENTROIDS = True  # it reads through them
NO_READOUT = Readout(None, None, None, None)  # type: ignore[arg-type]
_pack = struct.Struct(f"{_SIZES}q{_NUMBERS}d{_ADDRESSES}q").pack
_KINDS = {"mamba1": 0, "mamba2": 1, "rnn": 2}
_NORMS, _ACTS = ({name: i for i, name in enumerate(names)} for names in (NORMS, ACTS))


class _Problem(NamedTuple):
    """What goes into `struct Cell`, but for results: sizes, numbers and tensors in its order."""

    sizes: tuple
    numbers: tuple
    tensors: tuple


def fits(r: int, d: int) -> bool:
    """Whether it solves a token of r reflections of d channels."""
    return r <= cell_arguments.MOST_REFLECTIONS


def usable() -> tuple[bool, str]:
    """Return whether it runs here, and the reason if it does not; see `usable` of build.py."""
    return cpu_build.usable(_self_check)


def _self_check(dtype):
    return cell_deviation(cell, dtype)


@functools.cache
def _settled(layout, options, kind, d, n, heads, columns, reading):
    """The sizes and numbers of `struct Cell` that do not depend on the batch: (of the model, of the
    equation, of the row, numbers)."""
    groups, act, norm = options.groups, _ACTS[options.act], _NORMS[options.norm]
    equation = options.rank, act, options.sequential, options.bc_norm, norm
    row = columns, reading, layout.vectors, layout.gates, layout.B, layout.C
    kappa = options.contractive or 0.0
    numbers = options.scale, options.eps, kappa, options.norm_eps
    return (d, n, _KINDS[kind], heads, groups), equation, row, numbers


def _prepare(
    layout, options, kind, raw, weight_y, x, dt, A, keep, gate, D, weight, bias, y0, h0, readout
):
    """Check the arguments; see _Problem."""
    sizes = sizes_of(kind, layout, options, raw, weight_y, x, A)
    b, length, d = sizes.b, sizes.length, sizes.d
    settled = _settled(layout, options, kind, *sizes[3:])
    model, equation, row, numbers = settled
    if options.norm == "none":
        weight = bias = None
    if options.norm == "rms" and bias is not None:
        raise ValueError("RMSNorm has no bias")
    if keep is not None:
        keep = keep.to(x.dtype).contiguous()
    given = raw, weight_y, x, dt, A, keep, gate, D, weight, bias, y0, h0
    shapes = shapes_of(sizes)
    check(x.dtype, *((name, t, shapes[name]) for name, t in zip(shapes, given)))
    centroids = 0 if readout.keys is None else len(readout.keys)
    wanted = (centroids, d), (centroids,), (centroids, d), (b, length, d)
    check(x.dtype, *zip(readout._fields, readout, wanted))
    raw, raw_step = token_step(raw)
    if kind == "mamba1" and A.stride() != (1, d):
        A = A.t().contiguous().t()
    elif kind != "mamba1":
        A = A.contiguous()
    if h0 is not None:
        h0 = _stored(h0, kind)
    tensors = raw, *map(_contiguous, (weight_y, x, dt)), A, keep
    tensors = (*tensors, *map(_contiguous, (gate, D, weight, bias, y0)), h0)
    tensors = (*tensors, *map(_contiguous, readout))
    run = checkpoint_steps(length), torch.get_num_threads()
    fields = (b, length, *model, *equation, *row, centroids, raw_step, *run)
    return _Problem(fields, numbers, tensors)


def _contiguous(t):
    return None if t is None else t.contiguous()


def _stored(h, kind):
    """A state with its channels last in memory; copied where they are not."""
    if kind == "mamba1":
        return h if h.transpose(1, 2).is_contiguous() else h.mT.contiguous().mT
    if kind == "mamba2":
        last = h.permute(0, 3, 1, 2)
        return h if last.is_contiguous() else last.contiguous().permute(0, 2, 3, 1)
    return h.contiguous()


def _results(problem):
    """Memory for y (b,l,d), the state and the outcome (b,l)."""
    b, length, d, n, kind, heads = problem.sizes[:6]
    x = problem.tensors[2]
    y = x.new_empty(b, length, d)
    if kind == _KINDS["mamba1"]:
        final = x.new_empty_strided((b, d, n), (n * d, 1, d))
    elif kind == _KINDS["mamba2"]:
        wide = d // heads
        final = x.new_empty_strided((b, heads, wide, n), (n * d, wide, 1, d))
    else:
        final = x.new_empty(b, d)
    return y, final, torch.empty(b, length, dtype=torch.uint8)


def _call(name, problem, *results):
    """Call a function of the library on what `struct Cell` holds, as far as it is needed."""
    addresses = [address(t) for t in (*problem.tensors, *results)]
    missing = [0] * (_ADDRESSES - len(addresses))
    function = functions()[name][problem.tensors[2].dtype]
    function(_pack(*problem.sizes, *problem.numbers, *addresses, *missing))


class _Cell(torch.autograd.Function):
    @staticmethod
    def forward(ctx, raw, weight_y, x, dt, A, gate, D, weight, bias, *rest):
        *readout, (layout, options, kind, keep, y0, h0, adjoint) = rest
        given = raw, weight_y, x, dt, A, keep, gate, D, weight, bias, y0, h0, Readout(*readout)
        problem = _prepare(layout, options, kind, *given)
        b, length, d, n = problem.sizes[:4]
        results = y, final, outcome = _results(problem)
        rows = x.new_empty(raw.shape) if len(weight_y) else None
        roots = x.new_empty(b, length, options.rank)
        chunks = -(-length // problem.sizes[-2])
        checkpoints = None if kind == "rnn" else x.new_empty(b, chunks, n, d)
        alphas = reads = None
        if centroids := problem.sizes[-4]:
            alphas, reads = x.new_empty(b, length, centroids), x.new_empty(b, length, d)
        _call("cell", problem, *results, rows, roots, checkpoints, alphas, reads)
        ctx.mark_non_differentiable(final, outcome)
        ctx.set_materialize_grads(False)
        kept = problem.tensors
        if rows is not None:  # raw is in them, and is not needed any more
            kept = (None, *kept[1:])
        ctx.save_for_backward(*kept, y, outcome, rows, roots, checkpoints, alphas, reads)
        ctx.problem = problem._replace(tensors=())
        ctx.adjoint = adjoint
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, *_):
        *tensors, y, outcome, rows, roots, checkpoints, alphas, reads = ctx.saved_tensors
        if grad_y is None:
            grad_y = torch.zeros_like(y)
        raw, weight_y, x, dt, A, _, gate, D, weight, bias, y0, *_, noise = tensors
        problem = ctx.problem._replace(tensors=tuple(tensors))
        d_raw = x.new_empty((raw if rows is None else rows).shape)
        adjoint = x.new_empty(len(x))
        dA = torch.empty_like(A)  # as it lies in memory
        like = [None if t is None else torch.empty_like(t) for t in (x, dt)]
        ends = [None if t is None else torch.empty_like(t) for t in (gate, D, weight, bias)]
        d_weight_y = torch.empty_like(weight_y) if ctx.needs_input_grad[1] else None
        grads = d_raw, d_weight_y, *like, dA, *ends
        d_logits, d_reads, d_noise = (
            None if t is None else torch.empty_like(t) for t in (alphas, reads, noise)
        )
        kept = y, None, outcome, rows, roots, checkpoints, alphas, reads
        of_reading = d_logits, d_reads, d_noise
        _call("cell_backward", problem, *kept, grad_y.contiguous(), adjoint, *grads, *of_reading)
        if ctx.adjoint is not None:
            ctx.adjoint.copy_(adjoint)
        d_readout: tuple[Tensor | None, ...] = NO_READOUT
        if d_logits is not None:
            before = _before(y, y0, noise)
            d_keys = torch.einsum("blk,bld->kd", d_logits, before)
            d_values = torch.einsum("blk,bld->kd", alphas, d_reads)
            d_readout = d_keys, d_logits.sum((0, 1)), d_values, d_noise
        return *grads, *d_readout, None


def _before(y, y0, noise):
    """Return the vectors that every token reads of the token before it, (b,l,d).

    Documents need no mask, because a document's first token has no gradient of its logits.
    """
    first = torch.zeros_like(y[:, :1]) if y0 is None else y0.unsqueeze(1)
    before = torch.cat([first, y[:, :-1]], 1)
    return before if noise is None else before + noise


def _run(layout, options, kind, raw, weight_y, x, dt, A, keep, gate, D, weight, bias, *rest):
    y0, h0, adjoint, readout = rest
    readout = readout or NO_READOUT
    inputs = (raw, weight_y, x, dt, A, gate, D, weight, bias, *readout)
    if needs_grad(*inputs):
        return _Cell.apply(*inputs, (layout, options, kind, keep, y0, h0, adjoint))
    given = raw, weight_y, x, dt, A, keep, gate, D, weight, bias, y0, h0, readout
    problem = _prepare(layout, options, kind, *given)
    results = _results(problem)
    _call("cell", problem, *results)
    return results


def cell(
    layout: Layout | tuple,
    options: Options | tuple,
    raw: Tensor,
    weight_y: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    keep: Tensor | None,
    gate: Tensor | None,
    D: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    y0: Tensor | None,
    h0: Tensor | None,
    adjoint: Tensor | None,
    readout: Readout | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The solve of an FP-Mamba-1 or 2 layer, token by token; differentiable once.

    Args:
        layout, options: Layout, Options, or tuples of what is in them.
        raw: (b,l,K), the x part, biases in, of all that may read sh(y); its first k columns do.
        weight_y: (k,d), k may be 0. x: (b,l,d), what the mixer mixes.
        dt, A: (b,l,d) and (d,n), FP-Mamba-1; (b,l,heads) and (heads,), FP-Mamba-2. dt = 0
        leaves the state as it is.
        keep: (b,l) of 1, and 0 at tokens that start from nothing; or None; not differentiated.
        gate: (b,l,d), or None. D: (d,). norm_weight, norm_bias: (d,) each, or None.
        y0: (b,d), h0: (b,d,n) or (b,heads,d/heads,n), before the first token; zero if None; not
        differentiated.
        adjoint: None or (b,), which the backward fills with max_t ‖λ_t‖ / max_t ‖∂y_t‖, λ_t being
        ∂y_t with what W_y carries back to it.
        readout: of which sh(y) is read through centroids; None: as it is.
    Returns:
        y (b,l,d); the state after the last token; the outcome (b,l) of each token's search,
        uint8, see lm/model/solver.py. Only y is differentiable.
    Raises:
        TypeError, ValueError: devices, shapes, names. Unsupported: dtypes, rank.
    """
    layout, options = Layout(*layout), Options(*options)
    readout = None if readout is None else Readout(*readout)
    kind = "mamba1" if A.dim() == 2 else "mamba2"
    given = raw, weight_y, x, dt, A, keep, gate, D, norm_weight, norm_bias, y0, h0, adjoint, readout
    return _run(layout, options, kind, *given)


def cell_rnn(
    layout: Layout | tuple,
    options: Options | tuple,
    raw: Tensor,
    weight_y: Tensor,
    x: Tensor,
    decay: Tensor,
    fresh: Tensor,
    keep: Tensor | None,
    y0: Tensor | None,
    h0: Tensor | None,
    adjoint: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The solve of an FP-RNN layer: y_t = h_t = decay_t ⊙ h_{t−1} + fresh_t ⊙ x̃_t.

    Args:
        decay, fresh: (b,l,d). y0, h0: (b,d) or None. Others: as `cell`. Of the options, those of B,
        C and the norm are not read.
    Returns, Raises:
        As `cell`; the state is (b,d).
    """
    layout, options = Layout(*layout), Options(*options)._replace(norm="none", groups=1)
    given = raw, weight_y, x, fresh, decay, keep, None, None, None, None, y0, h0, adjoint, None
    return _run(layout, options, "rnn", *given)
