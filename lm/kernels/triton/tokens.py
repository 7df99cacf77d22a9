"""All tokens' own equations at once in Triton: what windows and the parallel schedule iterate.

One pass over memory forwards, one back, a program a token; the equations are those of token.py. A
token is given what a scan has made of the iterate:

    history = o − dt (B·C) x̃        y = norm(g ⊙ (history + γ ⊙ (Q x + (I − Q) y)))
    γ = dt (B·C) + D                g = silu(z)

Shape suffixes: b batch, l length, d channels, h heads, g groups, r reflections.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from lm.kernels import Unsupported
from lm.kernels.cell import MOST_REFLECTIONS, fits_a_gpu
from lm.kernels.triton import build as triton_build
from lm.kernels.triton.build import activate, activate_grad, as_rows, check, launch, needs_grad
from lm.kernels.triton.token import FAILED, mixed_of, normed_of, reflections, solve, transposed

# Maximal number of rows of partial sums. One program writes each row, for many tokens: enough
# programs to fill a GPU, few enough rows to be small next to the tokens.
MOST_PARTIALS = 512
RESIDUAL_FLOOR = tl.constexpr(1e-8)  # as in lm/model/solver.py


class Options(NamedTuple):
    """What a token computes; as in lm.kernels.cell."""

    rank: int
    scale: float
    act: str
    sequential: bool
    eps: float
    contractive: float | None
    norm: str
    norm_eps: float


fits = fits_a_gpu


def usable() -> tuple[bool, str]:
    """Whether this runs here, and if not, why not; see `triton_build.usable`."""
    return triton_build.usable(_self_check)


def _self_check(device) -> float:
    """The deviation from the equation iterated, gradients included, on a small problem."""
    b, length, d = 2, 3, 19
    wide = torch.linspace(-3, 70, b * length * (7 * d + 2)).sin().reshape(b, length, -1)
    inputs = [t.detach().requires_grad_() for t in wide.split([d + 1, *[d] * 5, d, 1], -1)]
    row, x, o, mixed, dt, z, line, bc = inputs
    weight = line[0, 0].detach().requires_grad_()
    options = Options(1, 1.0, "silu", True, 1e-6, None, "layer", 1e-5)
    inputs = [row, x, o, mixed, dt, bc, z, weight]
    ours, _ = solve_tokens(options, row, x, o, mixed, dt, bc, weight, z, weight, weight)
    u = F.normalize(F.silu(row[..., :d]), dim=-1)
    a, own = torch.sigmoid(row[..., d:]), dt * bc
    y = torch.zeros_like(x)
    for _ in range(60):
        new = x + a * (u * (y - x)).sum(-1, keepdim=True) * u
        whole = F.silu(z) * (o - own * mixed + (own + weight) * new)
        y = F.layer_norm(whole, (d,), weight, weight, 1e-5)
    grads = [torch.autograd.grad(t.square().sum(), inputs) for t in (ours, y)]
    return triton_build.deviation((ours, *grads[0]), (y, *grads[1]), 1e-3)


@triton.jit
def _largest(v):
    """Return max |v| of every row, NaN if there is one (tl.max may drop it).

    Read as integers, the bits of numbers without a sign are in the order of the numbers, and the
    bits of NaN come last.
    """
    bits = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, 1).to(tl.float32, bitcast=True)


@triton.jit
def _line(pointer, at, live):
    """The numbers of one token, in fp32, zero where there are none."""
    return tl.load(pointer + at, mask=live, other=0.0).to(tl.float32)


@triton.jit
def _step(
    mixed, dt, bc, t, col, live, d, headdim, mixed_row, dt_row, GROUPS: tl.constexpr
):  # fmt: skip
    """dt, B·C, and x̃ as the scan has read it, (WIDE,) each."""
    step = _line(dt, t * dt_row + col // headdim, live)
    times = tl.where(live, 1.0, 0.0)
    if bc is not None:
        times = _line(bc, t * GROUPS + col // (d // GROUPS), live)
    return step, times, _line(mixed, t * mixed_row + col, live)


@triton.jit
def _surroundings(
    o, mixed, dt, bc, D, z, weight, bias, t, col, live, d, headdim,
    o_row, mixed_row, dt_row, z_row, GROUPS: tl.constexpr,
):  # fmt: skip
    """What a token has besides x and its reflections: history, gain, gate, the norm's weight and
    bias. All (WIDE,)."""
    ones = tl.where(live, 1.0, 0.0)
    step, times, before = _step(mixed, dt, bc, t, col, live, d, headdim, mixed_row, dt_row, GROUPS)
    history = _line(o, t * o_row + col, live) - step * times * before
    gain = step * times
    if D is not None:
        gain += _line(D, col, live)
    gate = ones
    if z is not None:
        gate = activate(_line(z, t * z_row + col, live), "silu")
    scale = ones
    if weight is not None:
        scale = _line(weight, col, live)
    shift = ones * 0.0
    if bias is not None:
        shift = _line(bias, col, live)
    return history, gain, gate, scale, shift


@triton.jit
def tokens_kernel(
    rows, x, o, mixed, dt, bc, D, z, weight, bias, y,  # in
    out, roots, outcome, residual,
    rows_row, x_row, o_row, mixed_row, dt_row, z_row, y_row, scale, eps, kappa, norm_eps,
    d: tl.constexpr, headdim: tl.constexpr,
    r: tl.constexpr, ACT: tl.constexpr, SEQUENTIAL: tl.constexpr, NORM: tl.constexpr,
    GROUPS: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """One token. What is None is not read or not written; residual is that of y."""
    t = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, WIDE)
    live = col < d
    history, gain, gate, norm_weight, norm_bias = _surroundings(
        o, mixed, dt, bc, D, z, weight, bias, t, col, live, d, headdim,
        o_row, mixed_row, dt_row, z_row, GROUPS,
    )  # fmt: skip
    x_d = _line(x, t * x_row + col, live)
    u, _, _, _, _, _, map, _, seen = reflections(
        rows + t * rows_row, x_d, col, live, d, r, 0, r * d, scale, eps, kappa, ACT, SEQUENTIAL, R
    )
    s, found = solve(
        u, map, seen, x_d, history, gain, gate, norm_weight, norm_bias, live, d, norm_eps,
        NORM, r, R,
    )  # fmt: skip
    _, new = mixed_of(u, map, seen, s, x_d)
    normed, _ = normed_of((history + gain * new) * gate, live, d, norm_eps, NORM)
    g = normed * norm_weight + norm_bias
    tl.store(out + t * d + col, g, mask=live)
    tl.store(outcome + t, found.to(tl.uint8))
    if roots is not None:
        j = tl.arange(0, R)
        tl.store(roots + t * r + j, s, mask=j < r)
    if residual is not None:
        change = _line(y, t * y_row + col, live) - g
        relative = _largest(change[None, :]) / (_largest(g[None, :]) + RESIDUAL_FLOOR)
        tl.store(residual + t + tl.arange(0, 1), relative)


@triton.jit
def tokens_back_kernel(
    rows, x, o, mixed, dt, bc, D, z, weight, bias, roots, outcome, grad,  # in
    d_rows, dx, do, d_mixed, ddt, d_bc, dz, partials,
    tokens, rows_row, x_row, o_row, mixed_row, dt_row, z_row, grad_row, scale, eps, kappa,
    norm_eps, d: tl.constexpr, headdim: tl.constexpr,
    r: tl.constexpr, ACT: tl.constexpr, SEQUENTIAL: tl.constexpr, NORM: tl.constexpr,
    GROUPS: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """partials: (programs,3,d), what each adds to the gradients of D, weight and bias."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    col, j = tl.arange(0, WIDE), tl.arange(0, R)
    live = col < d
    t = program.to(tl.int64)
    while t < tokens:
        # 1. The token again.
        history, gain, gate, norm_weight, norm_bias = _surroundings(
            o, mixed, dt, bc, D, z, weight, bias, t, col, live, d, headdim,
            o_row, mixed_row, dt_row, z_row, GROUPS,
        )  # fmt: skip
        x_d = _line(x, t * x_row + col, live)
        u, vectors, length, a, gram, own, map, shrink, seen = reflections(
            rows + t * rows_row, x_d, col, live, d, r, 0, r * d, scale, eps, kappa,
            ACT, SEQUENTIAL, R,
        )  # fmt: skip
        s = tl.load(roots + t * r + j, mask=j < r, other=0.0)
        failed = (tl.load(outcome + t).to(tl.int32) & FAILED) != 0
        lambda_ = _line(grad, t * grad_row + col, live)
        # 2. Through its equation. A constant zero takes no registers; `lambda_ * 0.0`, which may be
        # NaN, would.
        nothing_else = tl.zeros([WIDE], tl.float32)
        e, d_gain, d_gate, d_x, d_vectors, d_a, of_weight, of_bias, _ = transposed(
            lambda_, nothing_else, failed, u, vectors, length, a, gram, own, map, shrink, seen, s,
            x_d, history, gain, gate, norm_weight, norm_bias, live, d, norm_eps, scale, eps, kappa,
            NORM, ACT, SEQUENTIAL, R,
        )  # fmt: skip
        # 3. What it was made of.
        some = (j < r)[:, None] & live[None, :]
        at = t * (r * d + r)
        tl.store(d_rows + at + j[:, None] * d + col[None, :], d_vectors, mask=some)
        tl.store(d_rows + at + r * d + j, d_a, mask=j < r)
        tl.store(do + t * d + col, e, mask=live)
        if dx is not None:
            tl.store(dx + t * d + col, d_x, mask=live)
        if dz is not None:
            slope = activate_grad(_line(z, t * z_row + col, live), "silu")
            tl.store(dz + t * d + col, d_gate * slope, mask=live)
        if partials is not None:
            to = partials + program.to(tl.int64) * 3 * d + col
            tl.store(to, _line(to, 0, live) + d_gain, mask=live)
            tl.store(to + d, _line(to + d, 0, live) + of_weight, mask=live)
            tl.store(to + 2 * d, _line(to + 2 * d, 0, live) + of_bias, mask=live)
        # 4. Its own x̃. Read again, after a barrier: registers do not hold all of a token.
        tl.debug_barrier()
        step, times, before = _step(
            mixed, dt, bc, t, col, live, d, headdim, mixed_row, dt_row, GROUPS
        )
        tl.store(d_mixed + t * d + col, -e * step * times, mask=live)
        d_own = d_gain - e * before
        if ddt is not None:
            tl.store(ddt + t * d + col, d_own * times, mask=live)
        if d_bc is not None:
            for g in tl.static_range(GROUPS):
                of_group = tl.where(col // (d // GROUPS) == g, d_own * step, 0.0)
                tl.store(d_bc + t * GROUPS + g, tl.sum(of_group, 0))
        t += programs


NAMES = ("rows", "x", "o", "mixed", "dt", "bc", "D", "z", "weight", "bias")


class _Problem:
    """The arguments as the kernels take them."""

    def __init__(self, options: Options, given: dict[str, Any]) -> None:
        self.options, self.shape = options, given["x"].shape
        b, length, d = self.shape
        self.tokens, self.d = b * length, d
        heads = given["dt"].shape[-1]
        self.headdim = d // heads
        self.groups = 1 if given["bc"] is None else given["bc"].shape[-1]
        self.tensors, self.rows = {}, {}
        for name, t in given.items():
            if name in ("D", "weight", "bias", "bc"):
                self.tensors[name] = None if t is None else t.contiguous()
            else:
                self.tensors[name], self.rows[f"{name}_row"] = as_rows(t)

    def options_of_kernel(self) -> dict[str, Any]:
        """What both kernels are given besides tensors."""
        o, wide = self.options, triton.next_power_of_2(self.d)
        return dict(
            d=self.d, headdim=self.headdim, scale=o.scale, eps=o.eps, kappa=o.contractive or 0.0,
            norm_eps=o.norm_eps, r=o.rank, ACT=o.act, SEQUENTIAL=o.sequential, NORM=o.norm,
            GROUPS=self.groups, WIDE=wide, R=triton.next_power_of_2(o.rank),
            num_warps=max(1, min(16, wide // 128)), **self.rows,
        )  # fmt: skip


def _forward(problem, y, keep_roots):
    """g (b,l,d), the outcome (b,l), the roots (b,l,r) or None, the residual of y (b,l) or None."""
    shape, like = problem.shape, problem.tensors["x"]
    out = like.new_empty(shape, dtype=torch.float32)
    outcome = like.new_empty(shape[:2], dtype=torch.uint8)
    roots = residual = None
    if keep_roots:
        roots = out.new_empty(*shape[:2], problem.options.rank)
    if y is not None:
        residual = out.new_empty(shape[:2])
    y, y_row = as_rows(y)
    launch(
        tokens_kernel, (problem.tokens,), **problem.tensors, y=y, out=out, roots=roots,
        outcome=outcome, residual=residual, y_row=y_row, **problem.options_of_kernel(),
    )  # fmt: skip
    return out, outcome, roots, residual


class _Tokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options, *given):
        problem = _Problem(options, dict(zip(NAMES, given)))
        g, outcome, roots, _ = _forward(problem, None, True)
        ctx.options = options
        ctx.save_for_backward(*given, roots, outcome)
        ctx.mark_non_differentiable(outcome)
        ctx.set_materialize_grads(False)
        return g, outcome

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        *given, roots, outcome = ctx.saved_tensors
        given = dict(zip(NAMES, given))
        if grad is None:
            return (None,) * (1 + len(given))
        wanted = dict(zip(NAMES, ctx.needs_input_grad[1:]))
        problem = _Problem(ctx.options, given)
        grad, grad_row = as_rows(grad)
        d, made = problem.d, {}
        for name in ("rows", "o", "mixed"):
            made[name] = torch.empty_like(given[name], memory_format=torch.contiguous_format)
        for name in ("x", "bc", "z"):
            if wanted[name]:
                made[name] = torch.empty_like(given[name], memory_format=torch.contiguous_format)
        if wanted["dt"]:
            made["dt"] = grad.new_empty(problem.shape)
        programs, partials = problem.tokens, None
        if any(wanted[name] for name in ("D", "weight", "bias")):
            programs = min(programs, MOST_PARTIALS)
            partials = grad.new_zeros(programs, 3, d)
        launch(
            tokens_back_kernel, (programs,), **problem.tensors, roots=roots, outcome=outcome,
            grad=grad, d_rows=made["rows"], do=made["o"], d_mixed=made["mixed"],
            dx=made.get("x"), ddt=made.get("dt"), d_bc=made.get("bc"), dz=made.get("z"),
            partials=partials, tokens=problem.tokens, grad_row=grad_row,
            **problem.options_of_kernel(),
        )  # fmt: skip
        if wanted["dt"] and problem.headdim > 1:
            made["dt"] = made["dt"].unflatten(-1, (-1, problem.headdim)).sum(-1)
        if partials is not None:
            made.update(zip(("D", "weight", "bias"), partials.sum(0)))
        grads = [made[n].to(given[n].dtype) if wanted[n] else None for n in NAMES]
        return None, *grads


def _problem(
    given_options: Options | tuple, given: tuple[Tensor | None, ...], y: Tensor | None
) -> _Problem:
    """given: by NAMES.

    Raises:
        TypeError, ValueError, Unsupported: see `solve_tokens`.
    """
    options = Options(*given_options)
    tensors: dict[str, Any] = dict(zip(NAMES, given))
    rows, x, dt, bc = (tensors[name] for name in ("rows", "x", "dt", "bc"))
    b, length, d = x.shape
    r = options.rank
    if not fits_a_gpu(r, d):
        raise Unsupported(f"{r} reflections of {d} channels: at most {MOST_REFLECTIONS}, or less")
    heads, groups = dt.shape[-1], 1 if bc is None else bc.shape[-1]
    if d % heads or heads % groups:
        raise ValueError(f"{d} channels, {heads} heads and {groups} groups do not divide evenly")
    wide = (b, length, d)
    check(
        rows=(rows, (b, length, r * d + r)),
        dt=(dt, (b, length, heads)),
        bc=(bc, (b, length, groups)),
        y=(y, wide),
        **{name: (tensors[name], wide) for name in ("x", "o", "mixed", "z")},
        **{name: (tensors[name], (d,)) for name in ("D", "weight", "bias")},
    )
    return _Problem(options, tensors)


def solve_tokens(
    options: Options | tuple,
    rows: Tensor,
    x: Tensor,
    o: Tensor,
    mixed: Tensor,
    dt: Tensor,
    bc: Tensor | None,
    D: Tensor | None,
    z: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """y (b,l,d) that solves each token's equation, and the outcome (b,l) uint8; differentiable
    once, by the implicit function theorem.

    Args:
        options: an Options. rows: (b,l,r·d+r) the vectors before act and nrm, then the gates before
        the sigmoid. x: (b,l,d) what is mixed. o: (b,l,d) the recurrence's output of `mixed`
        (b,l,d), x̃. dt: (b,l,h). bc: (b,l,g) B·C; None: 1. D: (d,), None: 0. z: (b,l,d) of the gate
        silu(z); None: 1. weight, bias: (d,) of the norm; None: 1, 0.
    Raises:
        TypeError, ValueError: devices, shapes. Unsupported: dtypes, rank, width.
    """
    given = rows, x, o, mixed, dt, bc, D, z, weight, bias
    problem = _problem(options, given, None)
    if needs_grad(*given):
        return _Tokens.apply(problem.options, *given)
    return _forward(problem, None, False)[:2]


def solve_tokens_residual(
    options: Options | tuple, *given: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`solve_tokens` and the relative residual (b,l) of an iterate y (b,l,d), the last argument; no
    gradient. The others: as there."""
    *tensors, y = given
    g, outcome, _, residual = _forward(_problem(options, tuple(tensors), y), y, False)
    return g, outcome, residual
