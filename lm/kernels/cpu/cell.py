"""The exact token compiled for this CPU: a layer's whole solve, token by token, with its gradient.

Shape suffixes: b batch, l length, d channels, n states, r reflections, K columns of raw, k those of
them that read sh(y).

Token t, given y_{t−1} and h_{t−1} (docs/model.md derives it):

    row = raw_t + [W_y y_{t−1}, 0]                  u_i = nrm(act(·)), a, B, C: parts of the row
    M v = Σ_i u_i (T U v)_i                         T from a: householder or dplr
    v(s) = g ⊙ (exp(dt A) h_{t−1} C + γ ⊙ x̃(s))     x̃(s) = x + Σ_i u_i (T (s − U x))_i
    s = U norm(v(s)): r equations; y_t = norm(v(s))  γ = dt (B·C) + D
    h_t = exp(dt A) h_{t−1} + (dt ⊙ x̃) Bᵀ           of the s that was found

The gradient is backpropagation through that recurrence, with the implicit function theorem in the
token. States live in memory as (b,n,d), as those of scan.py do. A sequence's results depend
neither on the batch nor on how its tokens are cut into calls, none on the number of threads, bit
for bit.
"""

import functools
import math
import struct
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lm.kernels import Unsupported
from lm.kernels.cpu import build as cpu_build
from lm.kernels.cpu.build import DTYPES, address, check, functions, token_step

MOST_REFLECTIONS = 8
# `struct Cell` of cell.h: sizes, numbers, addresses.
_SIZES, _NUMBERS, _ADDRESSES = 21, 5, 29
_pack = struct.Struct(f"{_SIZES}q{_NUMBERS}d{_ADDRESSES}q").pack
_MAMBA1, _MAMBA2, _RNN = range(3)
_NORMS = {"layer": 0, "rms": 1, "none": 2}
_ACTS = {"silu": 0, "relu": 1, "identity": 2}


class Layout(NamedTuple):
    """The first column of each part within a row of raw."""

    vectors: int  # r·d columns: the vectors before act and nrm, the i-th at vectors + i·d
    gates: int  # r columns: before the sigmoid
    B: int = 0  # groups·n columns
    C: int = 0


class Options(NamedTuple):
    """What a token computes."""

    rank: int
    scale: float  # of the gates: 2 for eigenvalues in [−1, 1], 1 for [0, 1]
    act: str  # "silu", "relu" or "identity", of the vectors
    sequential: bool  # householder; else dplr
    eps: float  # the least that a vector is divided by
    contractive: float | None  # κ: T is scaled by κ / max(κ, Σ a)
    bc_norm: bool
    groups: int  # of B and C
    norm: str  # "layer", "rms" or "none"
    norm_eps: float
    adjoint_clip: float  # the most that ‖W_yᵀ …‖ may be, in largest ‖∂y‖ of its sequence; inf: none
    states: int = 0  # n of FP-Mamba-2; 0: B and C reach to the next part of the row


class _Problem(NamedTuple):
    """What goes into `struct Cell`, but for results: sizes, numbers and tensors in its order."""

    sizes: tuple
    numbers: tuple
    tensors: tuple


def usable() -> tuple[bool, str]:
    """Whether this runs here, and if not, why not, in a sentence; see build.usable."""
    return cpu_build.usable(_self_check)


def _self_check() -> float:
    """The largest difference between the kernel and a loop over time, gradients included, on a
    small problem with one reflection; NaN if there is one."""
    errors = []
    b, length, d, n = 2, 3, 19, 3
    layout = Layout(0, d, d + 1, d + 1 + n)
    options = Options(1, 1.0, "silu", True, 1e-6, None, True, 1, "layer", 1e-5, math.inf)
    for dtype in DTYPES:

        def wave(*shape, dtype=dtype):
            return torch.linspace(-3, 40, math.prod(shape), dtype=dtype).sin().reshape(shape)

        columns = d + 1 + 2 * n
        given = (
            wave(b, length, columns),
            wave(columns, d) / 9,
            wave(b, length, d),
            wave(b, length, d).abs() / 4,
            -1 - wave(n, d).abs().t(),
            wave(b, length, d) / 2 + 1,
            wave(d) / 4,
            wave(d) + 1,
            wave(d) / 4,
        )
        inputs = [t.detach().requires_grad_() for t in given]
        others = layout, options, _MAMBA1, None, None, None, None
        ours = _Cell.apply(*inputs, others)[0]
        theirs = _plain_loop(*inputs)
        grads = [torch.autograd.grad(y.square().sum(), inputs) for y in (ours, theirs)]
        pairs = [(ours, theirs), *zip(*grads)]
        errors += [(a - b).detach().abs().max().double() / (1 + b.abs().max()) for a, b in pairs]
    return torch.stack(errors).max().item()


def _plain_loop(raw, weight_y, x, dt, A, gate, D, weight, bias):
    """y of `_self_check`, its equation iterated."""
    (b, length, d), n = x.shape, A.shape[1]
    y, h, ys = x.new_zeros(b, d), x.new_zeros(b, d, n), []
    normalize, layer_norm = torch.nn.functional.normalize, torch.nn.functional.layer_norm
    for t in range(length):
        vector, a, B, C = (raw[:, t] + y @ weight_y.t()).split([d, 1, n, n], -1)
        u = normalize(torch.nn.functional.silu(vector), dim=-1)
        B, C = normalize(B, dim=-1), normalize(C, dim=-1)
        h = torch.exp(dt[:, t].unsqueeze(-1) * A) * h
        past = (h * C.unsqueeze(1)).sum(-1)
        for _ in range(40):
            moved = torch.sigmoid(a) * (u * (y - x[:, t])).sum(-1, keepdim=True)
            mixed = x[:, t] + moved * u
            gamma = dt[:, t] * (B * C).sum(-1, keepdim=True) + D
            y = layer_norm(gate[:, t] * (past + gamma * mixed), (d,), weight, bias, 1e-5)
        moved = torch.sigmoid(a) * (u * (y - x[:, t])).sum(-1, keepdim=True)
        h = h + (dt[:, t] * (x[:, t] + moved * u)).unsqueeze(-1) * B.unsqueeze(1)
        ys.append(y)
    return torch.stack(ys, 1)


@functools.cache
def _settled(layout, options, kind, columns, reading, d, n, heads):
    """The sizes and numbers of `struct Cell` that do not depend on the batch: (of the model, of the
    equation, of the row, numbers).

    Raises:
        Unsupported: more reflections than there is code for. ValueError: what cannot be.
    """
    r, groups = options.rank, options.groups
    if r > MOST_REFLECTIONS:
        raise Unsupported(f"{r} reflections: the CPU kernel solves up to {MOST_REFLECTIONS}")
    if r < 1 or options.act not in _ACTS or options.norm not in _NORMS:
        raise ValueError(
            f"rank {r} of 1 and above, act `{options.act}` of {', '.join(_ACTS)}, norm"
            f" `{options.norm}` of {', '.join(_NORMS)}"
        )
    if heads < 1 or groups < 1 or d % heads or heads % groups:
        raise ValueError(f"{d} channels, {heads} heads and {groups} groups do not divide evenly")
    parts = [(layout.vectors, r * d), (layout.gates, r)]
    parts += [] if kind == _RNN else [(layout.B, groups * n), (layout.C, groups * n)]
    ends = [0, *(first + wide for first, wide in sorted(parts))]
    starts = [*(first for first, _ in sorted(parts)), columns]
    if any(end > start for end, start in zip(ends, starts)) or reading > columns:
        raise ValueError(
            f"parts {sorted(parts)} overlap or exceed the {columns} columns of raw, {reading} of"
            " which read y"
        )
    equation = r, _ACTS[options.act], options.sequential, options.bc_norm, _NORMS[options.norm]
    row = columns, reading, layout.vectors, layout.gates, layout.B, layout.C
    kappa = options.contractive or 0.0
    numbers = options.scale, options.eps, kappa, options.norm_eps, options.adjoint_clip
    return (d, n, kind, heads, groups), equation, row, numbers


def _prepare(layout, options, kind, raw, weight_y, x, dt, A, keep, gate, D, weight, bias, y0, h0):
    """Check the arguments; see _Problem."""
    (b, length, d), columns, reading = x.shape, raw.shape[-1], len(weight_y)
    tokens, heads, n = (b, length, d), 1, 1
    if kind == _MAMBA2:
        heads, n = len(A), _states(raw, layout, options)
    elif kind == _MAMBA1:
        n = A.shape[-1]
    settled = _settled(layout, options, kind, columns, reading, d, n, heads)
    model, equation, row, numbers = settled
    of_A = {_MAMBA1: (d, n), _MAMBA2: (heads,), _RNN: tokens}[kind]
    of_state = {_MAMBA1: (b, d, n), _MAMBA2: (b, heads, d // heads, n), _RNN: (b, d)}[kind]
    if options.norm == "none":
        weight = bias = None
    if options.norm == "rms" and bias is not None:
        raise ValueError("RMSNorm has no bias")
    if keep is not None:
        keep = keep.to(x.dtype).contiguous()
    check(
        x.dtype,
        ("x", x, tokens),
        ("raw", raw, (b, length, columns)),
        ("weight_y", weight_y, (reading, d)),
        ("dt", dt, (b, length, heads) if kind == _MAMBA2 else tokens),
        ("A", A, of_A),
        ("keep", keep, (b, length)),
        ("gate", gate, tokens),
        ("D", D, (d,)),
        ("norm_weight", weight, (d,)),
        ("norm_bias", bias, (d,)),
        ("y0", y0, (b, d)),
        ("h0", h0, of_state),
    )
    raw, raw_step = token_step(raw)
    if kind == _MAMBA1 and A.stride() != (1, d):
        A = A.t().contiguous().t()
    elif kind != _MAMBA1:
        A = A.contiguous()
    if h0 is not None:
        h0 = _stored(h0, kind)
    tensors = raw, *map(_contiguous, (weight_y, x, dt)), A, keep
    tensors = (*tensors, *map(_contiguous, (gate, D, weight, bias, y0)), h0)
    sizes = (b, length, *model, *equation, *row, raw_step, _every(length), torch.get_num_threads())
    return _Problem(sizes, numbers, tensors)


def _states(raw, layout, options):
    """n of FP-Mamba-2, whose A does not tell it: B and C reach to the next part or the end."""
    if options.states:
        return options.states
    starts = (*layout, raw.shape[-1])
    ends = [min([at for at in starts if at > first], default=first) for first in layout[2:]]
    return min(end - first for end, first in zip(ends, layout[2:])) // options.groups


def _contiguous(t):
    return None if t is None else t.contiguous()


def _stored(h, kind):
    """A state with its channels last in memory; copied where they are not."""
    if kind == _MAMBA1:
        return h if h.transpose(1, 2).is_contiguous() else h.mT.contiguous().mT
    if kind == _MAMBA2:
        last = h.permute(0, 3, 1, 2)
        return h if last.is_contiguous() else last.contiguous().permute(0, 2, 3, 1)
    return h.contiguous()


@functools.cache
def _every(length):
    """Steps between two checkpoints: the power of two at or above √length."""
    return 1 << math.ceil(math.log2(max(1.0, length**0.5)))


def _results(problem):
    """Memory for y (b,l,d), the state and the outcome (b,l)."""
    b, length, d, n, kind, heads = problem.sizes[:6]
    x = problem.tensors[2]
    y = x.new_empty(b, length, d)
    if kind == _MAMBA1:
        final = x.new_empty_strided((b, d, n), (n * d, 1, d))
    elif kind == _MAMBA2:
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
    def forward(ctx, raw, weight_y, x, dt, A, gate, D, weight, bias, others):
        layout, options, kind, keep, y0, h0, adjoint = others
        given = raw, weight_y, x, dt, A, keep, gate, D, weight, bias, y0, h0
        problem = _prepare(layout, options, kind, *given)
        b, length, d, n = problem.sizes[:4]
        results = y, final, outcome = _results(problem)
        rows = x.new_empty(raw.shape) if len(weight_y) else None
        roots = x.new_empty(b, length, options.rank)
        chunks = -(-length // problem.sizes[-2])
        checkpoints = None if kind == _RNN else x.new_empty(b, chunks, n, d)
        _call("cell", problem, *results, rows, roots, checkpoints)
        ctx.mark_non_differentiable(final, outcome)
        ctx.set_materialize_grads(False)
        kept = problem.tensors
        if rows is not None:  # raw is in them, and is not needed any more
            kept = (None, *kept[1:])
        ctx.save_for_backward(*kept, y, outcome, rows, roots, checkpoints)
        ctx.problem = problem._replace(tensors=())
        ctx.adjoint = adjoint
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, *_):
        *tensors, y, outcome, rows, roots, checkpoints = ctx.saved_tensors
        if grad_y is None:
            grad_y = torch.zeros_like(y)
        raw, weight_y, x, dt, A, _keep, gate, D, weight, bias, *_ = tensors
        problem = ctx.problem._replace(tensors=tuple(tensors))
        d_raw = x.new_empty((raw if rows is None else rows).shape)
        adjoint = x.new_empty(len(x))
        dA = torch.empty_like(A)  # as it lies in memory
        like = [None if t is None else torch.empty_like(t) for t in (x, dt)]
        ends = [None if t is None else torch.empty_like(t) for t in (gate, D, weight, bias)]
        d_weight_y = torch.empty_like(weight_y) if ctx.needs_input_grad[1] else None
        grads = d_raw, d_weight_y, *like, dA, *ends
        kept = y, None, outcome, rows, roots, checkpoints
        _call("cell_backward", problem, *kept, grad_y.contiguous(), adjoint, *grads)
        if ctx.adjoint is not None:
            ctx.adjoint.copy_(adjoint)
        return *grads, None


def _run(layout, options, kind, raw, weight_y, x, dt, A, keep, gate, D, weight, bias, *rest):
    y0, h0, adjoint = rest
    if torch.is_grad_enabled():
        inputs = (raw, weight_y, x, dt, A, gate, D, weight, bias)
        if any(t is not None and t.requires_grad for t in inputs):
            others = layout, options, kind, keep, y0, h0, adjoint
            return _Cell.apply(*inputs, others)
    given = raw, weight_y, x, dt, A, keep, gate, D, weight, bias, y0, h0
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
    Returns:
        y (b,l,d); the state after the last token; the outcome (b,l) of each token's search,
        uint8, see lm/model/solver.py. Only y is differentiable.
    Raises:
        TypeError, ValueError: devices, shapes, names. Unsupported: dtypes, rank.
    """
    layout, options = Layout(*layout), Options(*options)
    kind = _MAMBA1 if A.dim() == 2 else _MAMBA2
    given = raw, weight_y, x, dt, A, keep, gate, D, norm_weight, norm_bias, y0, h0, adjoint
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
    given = raw, weight_y, x, fresh, decay, keep, None, None, None, None, y0, h0, adjoint
    return _run(layout, options, _RNN, *given)
