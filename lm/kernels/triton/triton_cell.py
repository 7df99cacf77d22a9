"""The exact token on a GPU: a layer's whole solve, token by token over all sequences at once.

The equations are those of lm/kernels/cell_arguments.py. A token is two launches, the product with
W_y over the batch and one program a sequence for everything else; its gradient is two, the last
token first, with the states of a chunk computed again from the one that entered it
(cell_kernels.py). The launches of a chunk are a CUDA graph (launches.py); the gradient of W_y is
one product at the end. Nothing waits for the GPU.

Products are those of W_y's dtype, accumulated in fp32; rows are kept in raw's dtype; all else is
fp32. A sequence's results do not depend on the batch, bit for bit, but for what `tl.dot` makes of
its place in a block.

Shape suffixes: b rows, l length, d channels, n states, g groups, r reflections, K columns of raw, k
those of them that read sh(y), c steps of a chunk.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from lm.kernels import Unsupported, cell_arguments
from lm.kernels.cell_arguments import Layout, Options, shapes_of, sizes_of
from lm.kernels.checks import cell_deviation, needs_grad
from lm.kernels.triton import build as triton_build
from lm.kernels.triton import cell_kernels
from lm.kernels.triton.build import INTERPRETED, check
from lm.kernels.triton.launches import Launch, Schedule, schedule

CHUNK = 64  # tokens of a CUDA graph, and between two states that the backward starts from
MOST_AGAIN = 512 * 2**20  # bytes of a chunk's states, computed again
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


fits = cell_arguments.fits_a_gpu
NARROW = True  # raw and weight_y may be narrower than the rest
CENTROIDS = False


def usable() -> tuple[bool, str]:
    """Return whether it runs here, and the reason if it does not; see `usable` of build.py."""
    return triton_build.usable(_self_check)


def _self_check():
    return cell_deviation(cell, torch.float32)


class Plan(NamedTuple):
    """All that the launches of a chunk depend on, but for their addresses."""

    layout: Layout
    options: Options
    kind: str
    b: int
    d: int
    n: int
    heads: int
    columns: int
    reading: int
    raw_step: int  # entries between two tokens of raw
    chunk: int
    raw: torch.dtype
    weight: torch.dtype
    device: torch.device
    given: tuple[str, ...]  # which of the arguments that may be None are not
    kept: bool  # for a backward
    precision: str  # of products in fp32

    def shared(self) -> dict[str, Any]:
        """The arguments that all kernels of whole tokens have."""
        o, d = self.options, self.d
        return dict(
            columns=self.columns, vectors=self.layout.vectors, gates=self.layout.gates,
            B_at=self.layout.B, C_at=self.layout.C, scale=o.scale, eps=o.eps,
            kappa=o.contractive or 0.0, headdim=d // self.heads, d=d, n=self.n, r=o.rank,
            KIND=self.kind, GROUPS=o.groups, ACT=o.act, SEQUENTIAL=o.sequential,
            BC_NORM=o.bc_norm, ROWS=DTYPES[self.raw], R=triton.next_power_of_2(o.rank),
            D=triton.next_power_of_2(d), N=triton.next_power_of_2(self.n),
            NB=min(4, triton.next_power_of_2(self.n)),
        )  # fmt: skip

    def of_norm(self) -> dict[str, Any]:
        """Those of the two that go through the norm as well."""
        there = {name.upper(): name in self.given for name in ("keep", "gate")}
        return dict(
            **there, norm_eps=self.options.norm_eps, NORM=self.options.norm,
            SKIP="D" in self.given, WEIGHTED="norm_weight" in self.given,
            BIASED="norm_bias" in self.given,
        )  # fmt: skip

    def warps(self, most: int) -> int:
        """Of a program that holds a whole token: `most` channels a warp, fewer where there are
        several reflections, whose vectors it holds as well. Fewer warps wait less for each other,
        as long as little spills (docs/kernels.md). A power of two."""
        channels = max(128, min(most, 2 * most // triton.next_power_of_2(self.options.rank)))
        return max(1, min(16, triton.next_power_of_2(self.d) // channels))


def _products(plan, deep, at_once=128):
    """The blocks and the dtypes of a product. deep: how many entries are summed, and at most how
    many at once."""
    wide = DTYPES[torch.float32 if INTERPRETED else plan.weight]
    return dict(
        KEEP="keep" in plan.given, WEIGHT=DTYPES[plan.weight], ROWS=DTYPES[plan.raw], WIDE=wide,
        PRECISION=plan.precision, TALL=max(16, min(64, triton.next_power_of_2(plan.b))),
        COLUMNS=16, DEPTH=max(16, min(at_once, triton.next_power_of_2(deep))), num_warps=4,
    )  # fmt: skip


def _blocks(plan, wide):
    """The grid of a product of so many columns."""
    constants = _products(plan, 1)
    return triton.cdiv(wide, constants["COLUMNS"]), triton.cdiv(plan.b, constants["TALL"])


def _channels(plan):
    """Return the grid of a kernel whose programs share the channels, and the channels of each."""
    wide = min(128, triton.next_power_of_2(plan.d))
    return (plan.b, triton.cdiv(plan.d, wide)), wide


def forward_launches(plan: Plan) -> list[Launch]:
    """A chunk's, from its first token to its last."""
    launches = []
    if plan.kept and plan.kind != "rnn":
        launches.append(_settle(plan, True))
    products = _products(plan, plan.d, 512 // plan.weight.itemsize)
    of_product = dict(
        b=plan.b, d=plan.d, columns=plan.columns, reading=plan.reading, raw_step=plan.raw_step,
        KEPT=plan.kept, RAW=DTYPES[plan.raw], **products,
    )  # fmt: skip
    of_token = dict(
        KEPT=plan.kept, WEIGHT=DTYPES[plan.weight], num_warps=plan.warps(512),
        **plan.shared(), **plan.of_norm(),
    )  # fmt: skip
    for step in range(plan.chunk):
        grid = _blocks(plan, plan.columns)
        launches.append(Launch(cell_kernels.product_kernel, grid, dict(step=step, **of_product)))
        grid = (plan.b,)
        launches.append(Launch(cell_kernels.token_kernel, grid, dict(step=step, **of_token)))
    return launches


def _settle(plan, entering):
    grid, wide = _channels(plan)
    args = dict(
        chunk=plan.chunk, d=plan.d, n=plan.n, wide=plan.d // plan.options.groups,
        ENTERING=entering, GROUPS=plan.options.groups, D=wide,
        NB=min(16, triton.next_power_of_2(plan.n)),
    )  # fmt: skip
    return Launch(cell_kernels.settle_kernel, grid, args)


def backward_launches(plan: Plan) -> list[Launch]:
    """A chunk's, from its last token to its first."""
    shared = plan.shared()
    launches = []
    if plan.kind != "rnn":
        again = dict(chunk=plan.chunk, num_warps=plan.warps(512), **shared)
        launches.append(Launch(cell_kernels.again_kernel, (plan.b, plan.chunk), again))
        grid, wide = _channels(plan)
        of_states = dict(
            chunk=plan.chunk, d=plan.d, n=plan.n, wide=plan.d // plan.options.groups,
            headdim=plan.d // plan.heads, KIND=plan.kind, GROUPS=plan.options.groups,
            KEEP="keep" in plan.given, D=wide, NB=triton.next_power_of_2(plan.n),
        )  # fmt: skip
        launches.append(Launch(cell_kernels.states_kernel, grid, of_states))
    of_token = dict(
        chunk=plan.chunk, START="h0" in plan.given, num_warps=plan.warps(256),
        **shared, **plan.of_norm(),
    )  # fmt: skip
    of_product = dict(b=plan.b, d=plan.d, columns=plan.columns, reading=plan.reading)
    of_product.update(_products(plan, plan.reading))
    for step in reversed(range(plan.chunk)):
        grid = (plan.b,)
        launches.append(Launch(cell_kernels.token_back_kernel, grid, dict(step=step, **of_token)))
        grid = _blocks(plan, plan.d)
        back = dict(step=step, **of_product)
        launches.append(Launch(cell_kernels.product_back_kernel, grid, back))
    return launches


def _precision():
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _aligned(t):
    """t contiguous, beginning where 16 bytes do."""
    if t is None:
        return None
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def _wide(t):
    return None if t is None else _aligned(t.float())


def _prepare(layout, options, kind, raw, weight_y, x, dt, A, keep, gate, D, weight, bias, y0, h0):
    """Plan but for its chunk, Sizes, and the tensors as the kernels read them, by name."""
    sizes = sizes_of(kind, layout, options, raw, weight_y, x, A)
    if options.norm == "none":
        weight = bias = None
    if options.norm == "rms" and bias is not None:
        raise ValueError("RMSNorm has no bias")
    given = raw, weight_y, x, dt, A, keep, gate, D, weight, bias, y0, h0
    keep_as_read = None if keep is None else keep.float()
    shapes = shapes_of(sizes)
    named = {**dict(zip(shapes, given)), "keep": keep_as_read}
    check(**{name: (t, shapes[name]) for name, t in named.items()})
    if not fits(options.rank, sizes.d):
        most = cell_arguments.MOST_ENTRIES
        raise Unsupported(f"{options.rank} vectors of {sizes.d} channels: it holds {most} entries")
    if weight_y.is_cuda and torch.cuda.is_current_stream_capturing():
        raise Unsupported("a CUDA graph is being recorded, and the exact token replays its own")
    as_they_are = "raw", "weight_y"
    tensors = {name: _aligned(t) if name in as_they_are else _wide(t) for name, t in named.items()}
    if kind == "mamba1":
        tensors["A"] = _wide(A.t())
    return sizes, tensors


def _plan(layout, options, kind, sizes, tensors, kept):
    chunk = min(CHUNK, triton.next_power_of_2(max(1, sizes.length)))
    if kept:
        most = max(1, MOST_AGAIN // max(1, 4 * sizes.b * sizes.n * sizes.d))
        chunk = min(chunk, 1 << int(math.log2(most)))
    optional = ("keep", "gate", "D", "norm_weight", "norm_bias", "h0")
    return Plan(
        layout, options, kind, sizes.b, sizes.d, sizes.n, sizes.heads,
        sizes.columns, sizes.reading, sizes.columns, chunk, tensors["raw"].dtype,
        tensors["weight_y"].dtype, tensors["raw"].device,
        tuple(name for name in optional if tensors[name] is not None), kept, _precision(),
    )  # fmt: skip


def _state(h0, sizes, like):
    """h_0 as the kernels keep it, (b,n,d), or (b,d) of an FP-RNN; a copy."""
    b, d, n = sizes.b, sizes.d, sizes.n
    if h0 is None:
        return like.new_zeros(b, n * d)
    if sizes.kind == "mamba1":
        h0 = h0.transpose(1, 2)
    elif sizes.kind == "mamba2":
        h0 = h0.permute(0, 3, 1, 2)
    return h0.float().reshape(b, n * d).clone()


def _as_returned(state, sizes):
    """The other way round."""
    if sizes.kind == "mamba1":
        return state.view(sizes.b, sizes.n, sizes.d).transpose(1, 2)
    if sizes.kind == "mamba2":
        return state.view(sizes.b, sizes.n, sizes.heads, -1).permute(0, 2, 3, 1)
    return state.view(sizes.b, sizes.d)


def _run(direction, plan, sizes, tensors, firsts):
    """Run the launches of `direction` for the chunks that begin at `firsts`. tensors: by SLOTS."""

    def make():
        table = torch.zeros(len(cell_kernels.SLOTS), dtype=torch.int64, device=plan.device)
        return Schedule(table, direction(plan))

    if not sizes.b:
        return
    made = schedule((direction.__name__, plan), make)
    addresses = [tensors.get(name) for name in cell_kernels.SLOTS[2:]]
    with made.lock:
        made.point([0, sizes.length, *(0 if t is None else t.data_ptr() for t in addresses)])
        for first in firsts:
            made.run(first)


def _forward(plan, sizes, tensors):
    """y, h, the outcome, and what a backward needs: rows, roots, checkpoints."""
    b, length, d, n = sizes.b, sizes.length, sizes.d, sizes.n
    like = tensors["x"]
    before = tensors["y0"]
    before = like.new_zeros(b, d) if before is None else before.clone()
    chunks = triton.cdiv(length, plan.chunk)
    of_rows = (b, length) if plan.kept else (b,)
    units = 2 * plan.options.groups * n
    scratch = dict(
        weight=tensors["weight_y"],
        y=like.new_empty(b, length, d),
        outcome=torch.empty(b, length, dtype=torch.uint8, device=plan.device),
        rows=like.new_empty(*of_rows, sizes.columns, dtype=plan.raw),
        before=before.to(plan.weight),
        state=_state(tensors["h0"], sizes, like),
    )
    if plan.kind != "rnn":
        scratch["inflow"] = like.new_zeros(b, d)
        scratch["units"] = like.new_zeros(b, 2 * units)
    if plan.kept:
        scratch["roots"] = like.new_empty(b, length, plan.options.rank)
    if plan.kept and plan.kind != "rnn":
        scratch["checkpoints"] = like.new_empty(b, chunks, n * d)
    given = {**tensors, **scratch}
    _run(forward_launches, plan, sizes, given, range(0, length, plan.chunk))
    if plan.kind != "rnn":
        _run(_last_settle, plan, sizes, given, [0])
    return scratch


def _last_settle(plan):
    return [_settle(plan, False)]


def _backward(plan, sizes, tensors, kept, grad_y):
    """The gradients by the names of the arguments, and the largest adjoint (b,)."""
    b, length, d, n = sizes.b, sizes.length, sizes.d, sizes.n
    like, units = tensors["x"], 2 * plan.options.groups * n
    most = torch.linalg.vector_norm(grad_y, dim=-1).amax(1) if length else like.new_zeros(b)
    zeros, empty, steps = like.new_zeros, like.new_empty, (b, plan.chunk)
    scratch = dict(
        weight=tensors["weight_y"], grad_y=grad_y,
        largest=zeros(b), carried=zeros(b, d), mu=zeros(b, n * d),
        d_raw=zeros(b, length, sizes.columns, dtype=plan.raw), dx=empty(b, length, d),
        ddt=empty(b, length, d),
    )  # fmt: skip
    if plan.kind == "rnn":
        scratch["dA"] = empty(b, length, d)
        scratch["state"] = tensors["h0"]
    else:
        scratch.update(
            H=empty(*steps, n * d), past=empty(*steps, d), inflows=empty(*steps, d),
            all_units=empty(*steps, units), sums=empty(b, units),
            dA=zeros(b, n * d if plan.kind == "mamba1" else d),
        )  # fmt: skip
    sums = dict(D="dD", norm_weight="d_weight", norm_bias="d_bias")
    for name, grad in sums.items():
        if tensors[name] is not None:
            scratch[grad] = zeros(b, d)
    if tensors["gate"] is not None:
        scratch["d_gate"] = empty(b, length, d)
    firsts = reversed(range(0, length, plan.chunk))
    _run(backward_launches, plan, sizes, {**tensors, **kept, **scratch}, firsts)
    found = dict(raw=scratch["d_raw"], x=scratch["dx"], gate=scratch.get("d_gate"))
    found.update((name, scratch[grad].sum(0)) for name, grad in sums.items() if grad in scratch)
    found["dt"], found["A"] = _of_time(scratch["ddt"], scratch["dA"], sizes)
    found["weight_y"] = _of_weight(scratch["d_raw"], tensors, kept["y"], sizes)
    adjoint = torch.where(most == 0, 0, scratch["largest"] / most)
    return found, adjoint


def _of_time(ddt, dA, sizes):
    """The gradients of dt and A, as they are given."""
    if sizes.kind == "mamba1":
        return ddt, dA.sum(0).view(sizes.n, sizes.d).t()
    if sizes.kind == "mamba2":
        heads = sizes.heads
        return ddt.unflatten(-1, (heads, -1)).sum(-1), dA.sum(0).view(heads, -1).sum(-1)
    return ddt, dA


def _of_weight(d_raw, tensors, y, sizes):
    """Σ_t d_rowᵀ y_{t−1}: one product."""
    y0, keep, weight_y = (tensors[name] for name in ("y0", "keep", "weight_y"))
    before = torch.empty_like(y, dtype=weight_y.dtype)
    before[:, :1] = 0 if y0 is None else y0.unsqueeze(1)
    before[:, 1:] = y[:, :-1]
    if keep is not None:
        before *= keep.unsqueeze(-1)
    of_rows = d_raw[..., : sizes.reading].flatten(0, 1).to(weight_y.dtype)
    return of_rows.t() @ before.flatten(0, 1)


class _Cell(torch.autograd.Function):
    @staticmethod
    def forward(ctx, raw, weight_y, x, dt, A, gate, D, weight, bias, others):
        layout, options, kind, keep, y0, h0, adjoint = others
        given = raw, weight_y, x, dt, A, keep, gate, D, weight, bias, y0, h0
        sizes, tensors = _prepare(layout, options, kind, *given)
        plan = _plan(layout, options, kind, sizes, tensors, True)
        found = _forward(plan, sizes, tensors)
        kept = {name: found.get(name) for name in ("y", "outcome", "rows", "roots", "checkpoints")}
        final = _as_returned(found["state"], sizes)
        ctx.mark_non_differentiable(final, found["outcome"])
        ctx.set_materialize_grads(False)
        tensors["raw"] = None  # it is in the rows
        ctx.save_for_backward(*tensors.values(), *kept.values())
        ctx.names = *tensors, *kept
        ctx.dtypes = [None if t is None else t.dtype for t in (raw, weight_y, x, dt, A, gate)]
        ctx.dtypes += [None if t is None else t.dtype for t in (D, weight, bias)]
        ctx.others = plan, sizes, adjoint
        return found["y"], final, found["outcome"]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, *_):
        saved = dict(zip(ctx.names, ctx.saved_tensors))
        plan, sizes, adjoint = ctx.others
        grad_y = torch.zeros_like(saved["y"]) if grad_y is None else _wide(grad_y)
        found, largest = _backward(plan, sizes, saved, saved, grad_y)
        if adjoint is not None:
            adjoint.copy_(largest)
        names = "raw", "weight_y", "x", "dt", "A", "gate", "D", "norm_weight", "norm_bias"
        grads = [found.get(name) for name in names]
        grads = [None if g is None else g.to(dtype) for g, dtype in zip(grads, ctx.dtypes)]
        return *grads, None


def _solve(layout, options, kind, raw, weight_y, x, dt, A, keep, gate, D, weight, bias, *rest):
    y0, h0, adjoint = rest
    inputs = raw, weight_y, x, dt, A, gate, D, weight, bias
    if needs_grad(*inputs):
        return _Cell.apply(*inputs, (layout, options, kind, keep, y0, h0, adjoint))
    given = raw, weight_y, x, dt, A, keep, gate, D, weight, bias, y0, h0
    sizes, tensors = _prepare(layout, options, kind, *given)
    found = _forward(_plan(layout, options, kind, sizes, tensors, False), sizes, tensors)
    return found["y"], _as_returned(found["state"], sizes), found["outcome"]


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
    """As `lm.kernels.cpu.cpu_cell.cell`; y and the state in fp32. raw, weight_y: also bf16, fp16.

    Raises:
        TypeError, ValueError: devices, shapes, names. Unsupported: dtypes, rank, width.
    """
    layout, options = Layout(*layout), Options(*options)
    kind = "mamba1" if A.dim() == 2 else "mamba2"
    given = raw, weight_y, x, dt, A, keep, gate, D, norm_weight, norm_bias, y0, h0, adjoint
    return _solve(layout, options, kind, *given)


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
    """As `lm.kernels.cpu.cpu_cell.cell_rnn`; see `cell`."""
    layout, options = Layout(*layout), Options(*options)._replace(norm="none", groups=1)
    given = raw, weight_y, x, fresh, decay, keep, None, None, None, None, y0, h0, adjoint
    return _solve(layout, options, "rnn", *given)
