"""The memory-bound parts of a fixed-point iteration in Triton, each one pass over memory.

Shape suffixes: b batch, l length, d channels (d_inner), r rank, n entries of a group.

What each computes is written with lm.model in its docstring, which is also its oracle. A program
holds whole tokens: their channels, padded to a power of two, are one row of its block, so that sums
over channels stay inside it. All is computed in fp32 whatever is read. Gradients that sum over
tokens are written as one row per program and summed by torch: deterministic, no atomics.

Inputs are read in place, with a stride per token: slices of wider projections are not copied.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from lm.kernels.triton import build as triton_build
from lm.kernels.triton.build import (
    activate,
    activate_grad,
    as_rows,
    block_for,
    check,
    launch,
    load,
    needs_grad,
    store,
    tile,
)

ACTIVATIONS = ("silu", "relu", "identity")
KINDS = ("layer", "rms")
# Most rows of partial sums, each made by one program over many tokens: enough programs to fill a
# GPU, few enough that the rows weigh little beside the tokens.
MOST_PARTIALS = 512
RESIDUAL_FLOOR = tl.constexpr(1e-8)  # as in lm/model/solver.py


def usable() -> tuple[bool, str]:
    """Whether these run here, and if not, why not, in a sentence; see `triton_build.usable`."""
    return triton_build.usable(_self_check)


def _self_check(device) -> float:
    """The `deviation` on a small problem, gradients included."""
    wide = torch.linspace(-3, 70, 2 * 3 * 96).sin().reshape(2, 3, 96)
    x, y, v, z, D, gate = (t.detach().requires_grad_() for t in wide.split([19] * 5 + [1], -1))
    u = F.normalize(F.silu(v), dim=-1)
    mixed = x - torch.sigmoid(gate) * (u * (x - y)).sum(-1, keepdim=True) * u
    weight, results = D[0, 0], []
    normed = F.layer_norm((x + weight * y) * F.silu(z), weight.shape, weight, weight, 1e-5)
    end = x, y, weight, z, weight, weight, 1e-5, "layer"
    ours = mix(gate, v, x, y, 1, 1.0, 1e-5, "silu", True), normalise(v, 1, 1e-5)
    theirs = mixed, F.normalize(v, dim=-1), normed
    for outs in ((*ours, finish(*end)), theirs):
        loss = sum((out * wide[..., :19]).sum() for out in outs)
        results.append([*outs, *torch.autograd.grad(loss, (x, y, v, z, D, gate))])
    change = (y - normed).abs().amax(-1) / normed.abs().amax(-1)
    results[0].append(finish_residual(*end, y)[1])
    return triton_build.deviation(results[0], [*results[1], change], 1e-4)


@triton.jit
def _unit(w, eps):
    """w / max(‖w‖, eps) of every row, 1 / max(‖w‖, eps), and where eps was larger."""
    norm = tl.sqrt(tl.sum(w * w, 1))
    small = norm < eps
    inverse = 1.0 / tl.where(small, eps, norm)  # tl.maximum would drop a NaN
    return w * inverse[:, None], inverse, small


@triton.jit
def _mix_kernel(
    gates,
    vectors,
    x,
    y,
    out,
    dots,
    tokens,
    d,
    gates_row,
    vectors_row,
    x_row,
    y_row,
    scale,
    eps,
    RANK: tl.constexpr,
    ACT: tl.constexpr,
    SEQUENTIAL: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, col, live, mask = tile(tokens, d, TOKENS, COLUMNS)
    one, first = live[:, None], tl.arange(0, 1)  # a column of its own, for what is one a token
    y_d = load(y, row, y_row, col, mask)
    v = load(x, row, x_row, col, mask) - y_d
    mixed = v
    for i in tl.static_range(RANK):
        a = scale * tl.sigmoid(load(gates, row, gates_row, first + i, one))
        p = load(vectors, row, vectors_row, i * d + col, mask)
        u, _, _ = _unit(activate(p, ACT), eps)
        if SEQUENTIAL:
            v = mixed
        dot = tl.sum(u * v, 1)[:, None]
        if dots is not None:
            store(dots, row, RANK, first + i, one, dot)
        mixed -= a * dot * u
    store(out, row, d, col, mask, mixed + y_d)


@triton.jit
def _mix_grad_kernel(
    gates,
    vectors,
    kept,
    y,
    dots,
    grad,
    dgates,
    dvectors,
    dx,
    dy,
    tokens,
    d,
    gates_row,
    vectors_row,
    kept_row,
    y_row,
    grad_row,
    scale,
    eps,
    RANK: tl.constexpr,
    ACT: tl.constexpr,
    SEQUENTIAL: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """With v before a reflection and g the gradient after it, s = u·v, t = u·g:
    da = −s t, du = −a (s g + t v), hence u·du = −2 a s t; and the gradient before it is g − a t u.
    A product is undone from its end: v + a s u."""
    row, col, live, mask = tile(tokens, d, TOKENS, COLUMNS)
    one, first = live[:, None], tl.arange(0, 1)
    v = load(kept, row, kept_row, col, mask) - load(y, row, y_row, col, mask)
    after = load(grad, row, grad_row, col, mask)
    g, before = after, after
    for step in tl.static_range(RANK):
        i = RANK - 1 - step
        gate = tl.sigmoid(load(gates, row, gates_row, first + i, one))
        a = scale * gate
        p = load(vectors, row, vectors_row, i * d + col, mask)
        u, inverse, small = _unit(activate(p, ACT), eps)
        s = load(dots, row, RANK, first + i, one)
        if SEQUENTIAL:
            g = before
            v += a * s * u
        t = tl.sum(u * g, 1)[:, None]
        along = tl.where(small[:, None], 0.0, 2.0 * s * t)  # eps is no function of the vector
        dp = -a * inverse[:, None] * (s * g + t * v - along * u) * activate_grad(p, ACT)
        store(dvectors, row, RANK * d, i * d + col, mask, dp)
        store(dgates, row, RANK, first + i, one, -s * t * a * (1.0 - gate))
        before -= a * t * u
    if dx is not None:
        store(dx, row, d, col, mask, before)
    if dy is not None:
        store(dy, row, d, col, mask, after - before)


def _mix(gates, vectors, x, y, options, with_dots=False):
    rank, scale, eps, act, sequential = options
    out = torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
    dots = out.new_empty(*x.shape[:-1], rank) if with_dots else None
    rows, strides = zip(*map(as_rows, (gates, vectors, x, y)))
    tokens, d = rows[2].shape
    block = block_for(d)
    launch(
        _mix_kernel,
        (triton.cdiv(tokens, block["TOKENS"]),),
        *rows,
        out,
        dots,
        tokens,
        d,
        *strides,
        scale,
        eps,
        RANK=rank,
        ACT=act,
        SEQUENTIAL=sequential,
        **block,
    )
    return out, dots


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gates, vectors, x, y, options):
        out, dots = _mix(gates, vectors, x, y, options, with_dots=True)
        ctx.options, ctx.x_dtype = options, x.dtype
        # A product is undone from its end, which is there already: the scan after it keeps it.
        ctx.save_for_backward(gates, vectors, out if options[-1] else x, y, dots)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        gates, vectors, kept, y, dots = ctx.saved_tensors
        rank, scale, eps, act, sequential = ctx.options
        dgates, dvectors = (t.new_empty(t.shape) for t in (gates, vectors))
        dx = y.new_empty(y.shape, dtype=ctx.x_dtype) if ctx.needs_input_grad[2] else None
        dy = y.new_empty(y.shape) if ctx.needs_input_grad[3] else None
        (*rows, grad), strides = zip(*map(as_rows, (gates, vectors, kept, y, grad)))
        tokens, d = grad.shape
        block = block_for(d, per_warp=256)  # more of each spills on sm_80
        launch(
            _mix_grad_kernel,
            (triton.cdiv(tokens, block["TOKENS"]),),
            *rows,
            dots,
            grad,
            dgates,
            dvectors,
            dx,
            dy,
            tokens,
            d,
            *strides,
            scale,
            eps,
            RANK=rank,
            ACT=act,
            SEQUENTIAL=sequential,
            **block,
        )
        return dgates, dvectors, dx, dy, None


def mix(
    gates: Tensor,
    vectors: Tensor,
    x: Tensor,
    y: Tensor,
    rank: int,
    scale: float,
    eps: float,
    act: str,
    sequential: bool,
) -> Tensor:
    """x̃ = M(x − y) + y, M a product or a sum of reflections (lm.model.mixers.Reflections), with
    a = scale σ(gates) and u_i = nrm(act(vectors)). Differentiable once.

    Args:
        gates: (…,r). vectors: (…,r·d), u_1 first. x, y: (…,d). act: one of ACTIVATIONS.
        sequential: householder; else dplr.
    Returns:
        (…,d) fp32
    Raises:
        TypeError, ValueError: devices, shapes, unknown names. Unsupported: dtypes, widths.
    """
    *lead, d = x.shape
    check(
        x=(x, x.shape),
        y=(y, x.shape),
        gates=(gates, (*lead, rank)),
        vectors=(vectors, (*lead, rank * d)),
    )
    if act not in ACTIVATIONS:
        raise ValueError(f"unknown act `{act}`: one of {', '.join(ACTIVATIONS)}")
    inputs = gates, vectors, x, y
    options = rank, float(scale), float(eps), act, bool(sequential)
    if needs_grad(*inputs):
        return _Mix.apply(*inputs, options)
    return _mix(*inputs, options)[0]


@triton.jit
def _normalise_kernel(
    v,
    grad,
    out,
    rows,
    n,
    groups,
    v_row,
    eps,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A row is a group of a token. With grad, out is the gradient of v rather than nrm(v)."""
    row, col, _, mask = tile(rows, n, TOKENS, COLUMNS)
    token, start = row // groups, (row % groups * n)[:, None]
    u, inverse, small = _unit(load(v + start, token, v_row, col, mask), eps)
    if grad is not None:
        g = load(grad, row, n, col, mask)
        along = tl.where(small, 0.0, tl.sum(u * g, 1))[:, None]  # eps is no function of v
        u = (g - along * u) * inverse[:, None]
    store(out, row, n, col, mask, u)


def _normalise(v, groups, eps, out, grad=None):
    n = v.shape[-1] // groups
    v, v_row = as_rows(v)
    rows, block = v.shape[0] * groups, block_for(n)
    grad = None if grad is None else grad.contiguous()
    launch(
        _normalise_kernel,
        (triton.cdiv(rows, block["TOKENS"]),),
        v,
        grad,
        out,
        rows,
        n,
        groups,
        v_row,
        eps,
        **block,
    )
    return out


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v, groups, eps):
        ctx.save_for_backward(v)
        ctx.options = groups, eps
        return _normalise(v, groups, eps, v.new_empty(v.shape, dtype=torch.float32))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (v,) = ctx.saved_tensors
        return _normalise(v, *ctx.options, v.new_empty(v.shape), grad), None, None


def normalise(v: Tensor, groups: int, eps: float) -> Tensor:
    """nrm(v) of each group of n entries (lm.model.mixers.nrm). Differentiable once.

    Args:
        v: (…,groups·n). eps: the least to divide by.
    Returns:
        (…,groups·n) fp32
    Raises:
        TypeError, ValueError: devices, shapes. Unsupported: dtypes, widths.
    """
    check(v=(v, v.shape))
    if v.shape[-1] % groups:
        raise ValueError(f"{v.shape[-1]} entries cannot be {groups} groups of equal size")
    # Without a gradient autograd keeps nothing, and the kernel is the same.
    return _Normalise.apply(v, groups, float(eps))


@triton.jit
def _gated(o, x, D, z, row, col, mask, d, o_row, x_row, z_row):
    """x, D, o + D x, and what the gate multiplies that with."""
    x_d = load(x, row, x_row, col, mask)
    D_d = tl.load(D + col, mask=col < d, other=0.0).to(tl.float32)[None, :]
    ungated = load(o, row, o_row, col, mask) + D_d * x_d
    gate = 1.0
    if z is not None:
        gate = activate(load(z, row, z_row, col, mask), "silu")
    return x_d, D_d, ungated, gate


@triton.jit
def _standardise(w, mask, d, eps, KIND: tl.constexpr):
    """(w − mean) / deviation (layer) or w / root mean square (rms) of every row, and the factor."""
    if KIND == "layer":
        w = tl.where(mask, w - tl.sum(w, 1)[:, None] / d, 0.0)
    factor = tl.rsqrt(tl.sum(w * w, 1) / d + eps)[:, None]
    return tl.where(mask, w * factor, 0.0), factor


@triton.jit
def _largest(v):
    """max |v| of every row, NaN if there is one (tl.max may drop it): read as integers, the bits of
    numbers without a sign are in the order of the numbers, and those of NaN come last."""
    bits = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, 1).to(tl.float32, bitcast=True)


@triton.jit
def _finish_kernel(
    o,
    x,
    D,
    z,
    weight,
    bias,
    y,
    out,
    residual,
    tokens,
    d,
    o_row,
    x_row,
    z_row,
    y_row,
    eps,
    KIND: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, col, live, mask = tile(tokens, d, TOKENS, COLUMNS)
    inside = col < d
    _, _, w, gate = _gated(o, x, D, z, row, col, mask, d, o_row, x_row, z_row)
    g, _ = _standardise(w * gate, mask, d, eps, KIND)
    g *= tl.load(weight + col, mask=inside, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        g += tl.load(bias + col, mask=inside, other=0.0).to(tl.float32)[None, :]
    store(out, row, d, col, mask, g)
    if residual is not None:
        change = _largest(load(y, row, y_row, col, mask) - g)
        tl.store(residual + row, change / (_largest(g) + RESIDUAL_FLOOR), mask=live)


@triton.jit
def _finish_grad_kernel(
    o,
    x,
    D,
    z,
    weight,
    bias,
    grad,
    do,
    dx,
    dz,
    partials,
    tokens,
    d,
    o_row,
    x_row,
    z_row,
    grad_row,
    eps,
    KIND: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """partials: (programs,2 or 3,d), what each adds to dD, dweight and, if there is one, dbias."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    col = tl.arange(0, COLUMNS)
    inside = col < d
    scale = tl.load(weight + col, mask=inside, other=0.0).to(tl.float32)[None, :]
    dD = tl.zeros([COLUMNS], tl.float32)
    dweight, dbias = dD, dD
    first = program * TOKENS
    while first < tokens:  # not a range: Triton 3.6 cannot interpret one with numpy 2.4
        row = (first + tl.arange(0, TOKENS)).to(tl.int64)
        live = row < tokens
        mask = live[:, None] & inside[None, :]
        x_d, D_d, w, gate = _gated(o, x, D, z, row, col, mask, d, o_row, x_row, z_row)
        unit, factor = _standardise(w * gate, mask, d, eps, KIND)
        g = load(grad, row, grad_row, col, mask)
        dweight += tl.sum(g * unit, 0)
        dbias += tl.sum(g, 0)
        g *= scale
        dw = g - unit * (tl.sum(g * unit, 1) / d)[:, None]
        if KIND == "layer":
            dw -= (tl.sum(g, 1) / d)[:, None]
        dw *= factor
        if z is not None:
            dgate = activate_grad(load(z, row, z_row, col, mask), "silu")
            store(dz, row, d, col, mask, dw * w * dgate)
            dw *= gate
        store(do, row, d, col, mask, dw)
        store(dx, row, d, col, mask, dw * D_d)
        dD += tl.sum(tl.where(mask, dw * x_d, 0.0), 0)
        first += programs * TOKENS
    count = 2
    if bias is not None:
        count = 3
    own = partials + program * count * d + col
    tl.store(own, dD, mask=inside)
    tl.store(own + d, dweight, mask=inside)
    if bias is not None:
        tl.store(own + 2 * d, dbias, mask=inside)


def _finish(o, x, D, z, weight, bias, eps, kind, y=None):
    out = o.new_empty(o.shape, dtype=torch.float32)
    residual = None if y is None else out.new_empty(o.shape[:-1])
    (o, x, z, y), (o_row, x_row, z_row, y_row) = zip(*map(as_rows, (o, x, z, y)))
    tokens, d = o.shape
    block = block_for(d)
    launch(
        _finish_kernel,
        (triton.cdiv(tokens, block["TOKENS"]),),
        o,
        x,
        D,
        z,
        weight,
        bias,
        y,
        out,
        residual,
        tokens,
        d,
        o_row,
        x_row,
        z_row,
        y_row,
        eps,
        KIND=kind,
        **block,
    )
    return out, residual


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o, x, D, z, weight, bias, eps, kind):
        ctx.save_for_backward(o, x, D, z, weight, bias)
        ctx.options = eps, kind
        return _finish(o, x, D, z, weight, bias, eps, kind)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        o, x, D, z, weight, bias = ctx.saved_tensors
        eps, kind = ctx.options
        do, dx, dz = (None if t is None else t.new_empty(t.shape) for t in (o, x, z))
        (o, x, z, grad), strides = zip(*map(as_rows, (o, x, z, grad)))
        tokens, d = o.shape
        block = block_for(d, per_warp=256)
        programs = min(MOST_PARTIALS, triton.cdiv(tokens, block["TOKENS"]))
        partials = D.new_empty(programs, 2 if bias is None else 3, d, dtype=torch.float32)
        launch(
            _finish_grad_kernel,
            (programs,),
            o,
            x,
            D,
            z,
            weight,
            bias,
            grad,
            do,
            dx,
            dz,
            partials,
            tokens,
            d,
            *strides,
            eps,
            KIND=kind,
            **block,
        )
        dD, dweight, *dbias = partials.sum(0)
        dbias = dbias[0].to(bias.dtype) if dbias else None
        return do, dx, dD.to(D.dtype), dz, dweight.to(weight.dtype), dbias, None, None


def _finish_inputs(o, x, D, z, weight, bias, eps, kind, y=None):
    full, d = o.shape, o.shape[-1]
    check(
        o=(o, full),
        x=(x, full),
        D=(D, (d,)),
        z=(z, full),
        weight=(weight, (d,)),
        bias=(bias, (d,)),
        y=(y, full),
    )
    if kind not in KINDS:
        raise ValueError(f"unknown kind `{kind}`: one of {', '.join(KINDS)}")
    D, weight, bias = (None if t is None else t.contiguous() for t in (D, weight, bias))
    return o, x, D, z, weight, bias, float(eps), kind


def finish(
    o: Tensor,
    x: Tensor | None,
    D: Tensor | None,
    z: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    kind: str,
) -> Tensor:
    """The end of an iteration (lm.model.blocks.finish): w = (o + D ⊙ x) ⊙ silu(z), and its
    LayerNorm (kind "layer") or RMSNorm ("rms") over d. Differentiable once.

    Args:
        o, x: (…,d) what the scan returned, and what it was given. D, weight, bias: (d,). z: (…,d).
        No gate where z is None, nothing added where bias is.
    Returns:
        (…,d) fp32
    Raises:
        TypeError, ValueError: devices, shapes, unknown names. Unsupported: dtypes, widths.
    """
    return _Finish.apply(*_finish_inputs(o, x, D, z, weight, bias, eps, kind))


@torch.no_grad()
def finish_residual(
    o: Tensor,
    x: Tensor | None,
    D: Tensor | None,
    z: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    kind: str,
    y: Tensor,
) -> tuple[Tensor, Tensor]:
    """`finish` and, in the same pass, how far y was from it; no gradient.

    Args and errors: as in `finish`; y: (…,d) the iterate that the tokens came from.
    Returns:
        g (…,d) fp32, and ‖y − g‖∞ / (‖g‖∞ + 1e-8) of every token (…) fp32
        (lm.model.solver.token_residual), NaN where y or g has one.
    """
    checked = _finish_inputs(o, x, D, z, weight, bias, eps, kind, y)
    o, x, D, z, weight, bias, eps, kind = checked
    return _finish(o, x, D, z, weight, bias, eps, kind, y)
