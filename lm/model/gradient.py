"""Gradients at a solution: by an iteration in the backward, or of the exact solve, token by token.

The exact solve of a layer is a function of tensors alone, a kernel's or this: `lm.kernels.cell`
has the equations and what the arguments are. Under torch.compile and torch.export it is one
operator, which takes the kernel where it runs.

Shape suffixes: b batch, l length, d channels, n states, r reflections, K columns of raw.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .cell import Norm, Token, solve_low_rank
from .mixers import ACTIVATIONS, nrm, reflections_of
from .operators import compiling, opaque
from .scan import faster
from .solver import NonFiniteError, Rule, solve_paper

FAILED = "the solve in the backward of `gradient: implicit` diverged"
CURE = (
    "The layer does not contract at its fixed point: use gradient exact (with token exact),"
    " one_step, or bound the mixer (contractive: 0.9)"
)

MOST_GROWTH = 1e3  # of g over v, beyond which an iteration that has not converged will not do so

# Machine epsilons of the products below which a change of the adjoint that no longer shrinks is
# rounding: under bf16 it stays there for ever.
ROUNDING = 8


def implicit_gradient(
    f: Callable[[torch.Tensor], torch.Tensor], y_star: torch.Tensor, first: torch.Tensor, rule: Rule
) -> torch.Tensor:
    """`first` = f(y*) with the true gradient of the fixed point attached (paper Eq. 16).

    The cotangent v of y* becomes g = (I − J)⁻ᵀ v, J = ∂f/∂y at y*, the fixed point of the Neumann
    iteration g ← v + Jᵀ g, found in the backward by the paper's solver, with its damping.

    Args:
        f: the iteration. y_star: (b,l,d), detached. first: f(y*), which carries the graph to the
        parameters. rule: tolerance and ℓmax of the backward solve.
    Raises (in the backward):
        NonFiniteError: the iteration for g diverged. One that has not converged is warned of.
    """
    if not (torch.is_grad_enabled() and first.requires_grad):
        return first
    y0 = y_star.detach().requires_grad_()
    f0 = f(y0)

    def solve_for_g(v):
        def neumann(g):
            return v + torch.autograd.grad(f0, y0, g, retain_graph=True)[0]

        try:
            g, stats, *_ = solve_paper(neumann, v, rule._replace(quantile=1.0))
        except NonFiniteError as e:
            raise NonFiniteError(f"{FAILED}: {e}. {CURE}") from None
        if not stats.converged.all():
            growth = (g.abs().max() / v.abs().max()).item()
            if growth > MOST_GROWTH:
                raise NonFiniteError(f"{FAILED}: it grew {growth:.0e}-fold. {CURE}")
            missed = f"relative residual {stats.residual.max():.1e}, not below {rule.tol:g}"
            text = f"the implicit gradient is not exact: {missed}. {CURE}"
            warnings.warn(text, stacklevel=2)
        return g

    y = first.view_as(first)
    y.register_hook(solve_for_g)
    return y


def adjoint_gradient(
    F: Callable[[torch.Tensor], torch.Tensor],
    F_of_y: Callable[[torch.Tensor], torch.Tensor],
    y_star: torch.Tensor,
    terms: int | None,
    norms: torch.Tensor | None,
    tol: float,
    products: torch.dtype,
) -> torch.Tensor:
    """F(y*) with the gradient of the explicit recurrence's solution attached.

    The cotangent v of y* becomes g = Σ_k (Jᵀ)ᵏ v, J = ∂F/∂y at y*. F at token t reads tokens before
    t alone, so Jᴸ = 0 and L terms are all there are. Fewer do: later ones are below the tolerance
    that y* itself was found to, or rounding.

    Args:
        F: (b,l,d) → (b,l,d). F_of_y: the same, whose graph goes to y alone; it is computed in the
        backward, under the autocast of now.
        y_star: (b,l,d), detached. terms: K, of the sum's terms after the first; None: until the
        largest change of a sequence is below tol of the largest entry, or rounding.
        norms: where the backward writes max ‖g_t‖ / max ‖v_t‖ of every sequence, (b,).
        products: the dtype that F multiplies in.
    """
    first = F(y_star)
    if not first.requires_grad:
        return first
    device = y_star.device.type
    dtype, on = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    autocast = torch.autocast(device, dtype, enabled=on)

    def sum_up(v):
        most = v.shape[1] if terms is None else terms
        longest, g = _longest(v), v
        with torch.enable_grad(), autocast:  # a graph of its own: `first`'s may be a checkpoint's
            y0 = y_star.detach().requires_grad_()
            F0 = F_of_y(y0)
        lowest = torch.full_like(v[:, 0, 0], torch.inf)
        for _ in range(most):
            (again,) = torch.autograd.grad(F0, y0, g, retain_graph=True)
            before, g = g, v + again
            if terms is None:
                change = _largest(g - before) / _largest(g).clamp_min(1e-30)
                rounding = change <= ROUNDING * torch.finfo(products).eps
                if ((change < tol) | (rounding & (change >= lowest))).all():
                    break
                lowest = torch.minimum(lowest, change)
        if norms is not None:
            norms.copy_((_longest(g) / longest.clamp_min(1e-30)).squeeze(1).detach())
        return g

    first.register_hook(sum_up)
    return first


def _largest(v):
    """The largest |entry| of every sequence. (b,l,d) → (b,)"""
    return torch.linalg.vector_norm(v, torch.inf, dim=(1, 2))


def _longest(v):
    """The largest ‖v_t‖₂ of every sequence. (b,l,d) → (b,1)"""
    return torch.linalg.vector_norm(v, dim=-1).amax(1, keepdim=True)


def whole_solve(
    layout: tuple[int, ...],
    options: tuple[Any, ...],
    tensors: tuple[Any, ...],
    adjoint: Tensor | None,
    readout: tuple[Tensor | None, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """y (b,l,d), the state after the last token, and the outcome (b,l), see solver.py;
    None: there is no kernel.

    Args:
        layout, options: as lm.kernels.cell has them.
        tensors: raw, weight_y, x, dt, A, keep, gate, D, norm_weight, norm_bias, y0, h0, as `cell`
        there has them; of an FP-RNN dt is `fresh`, A is `decay`, both (b,l,d).
        adjoint: as there; left as it is under a compiler.
        readout: as there, a Readout; not under a compiler.
    """
    if compiling():
        assert readout is None  # such a layer is computed outside
        y, h, outcome = _operator(*tensors, list(layout), *options)
        return y, h.detach(), outcome
    return _by_kernel(layout, options, tensors, adjoint, readout)


def _by_kernel(layout, options, tensors, adjoint, readout=None):
    raw, weight_y, x, dt, A, keep, *others, y0, h0 = tensors
    if A.dim() == 3:
        given = raw, weight_y, x, A, dt, keep, y0, h0, adjoint
        return faster("cell", "cell_rnn", x, layout, options, *given)
    others = [*others, y0, h0, adjoint]
    if readout is not None:
        others.append(readout)
    return faster("cell", "cell", x, layout, options, raw, weight_y, x, dt, A, keep, *others)


def _whole_solve(
    raw: Tensor,
    weight_y: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    keep: Tensor | None,
    gate: Tensor | None,
    D: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    y0: Tensor | None,
    h0: Tensor | None,
    layout: list[int],
    rank: int,
    scale: float,
    act: str,
    sequential: bool,
    eps: float,
    contractive: float | None,
    bc_norm: bool,
    groups: int,
    norm: str,
    norm_eps: float,
    states: int,
) -> tuple[Tensor, Tensor, Tensor]:
    mixer = rank, scale, act, sequential, eps, contractive
    options = *mixer, bc_norm, groups, norm, norm_eps, states
    tensors = raw, weight_y, x, dt, A, keep, gate, D, norm_weight, norm_bias, y0, h0
    found = _by_kernel(tuple(layout), options, tensors, None)
    if found is None:
        tensors = raw.to(x.dtype), weight_y.to(x.dtype), *tensors[2:]
        found = whole_solve_plain(tuple(layout), options, tensors)
    y, h, outcome = found
    return y, h.contiguous(), outcome


def _shapes(raw, weight_y, x, dt, A, *others):
    b, _, d = x.shape
    states = others[-1]
    state: tuple[int, ...]
    if A.dim() == 2:
        state = (b, d, A.shape[1])
    elif A.dim() == 1:
        state = (b, len(A), d // len(A), states)
    else:
        state = (b, d)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(state), torch.empty(x.shape[:2], dtype=torch.uint8, device=x.device)


_operator = opaque(_whole_solve, _shapes, 1)


def whole_solve_plain(
    layout: tuple[int, ...], options: tuple[Any, ...], tensors: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """`whole_solve` as a loop over time, differentiable; its arguments."""
    raw, weight_y, x, dt, A, keep, gate, D, weight, bias, y0, h0 = tensors
    norm = Norm(options[8], weight, bias, options[9])
    shapes = _shapes(*tensors, *options)
    y = torch.zeros_like(x[:, 0]) if y0 is None else y0
    h = torch.zeros_like(shapes[1]) if h0 is None else h0.to(x.dtype)
    ys, outcomes = [], []
    for t in range(x.shape[1]):
        before, row, now = y, raw[:, t], x[:, t]
        if keep is not None:
            alive = keep[:, t, None].to(x.dtype)
            before, h = before * alive, h * alive.view(-1, *[1] * (h.dim() - 1))
        if len(weight_y):
            row = row + F.pad(before @ weight_y.t(), (0, row.shape[-1] - len(weight_y)))
        time = _recurrence(h, row, dt[:, t], A[:, t] if A.dim() == 3 else A, layout, options)
        gain = time.gain if D is None else time.gain + D
        token = Token(now, time.history, gain, None if gate is None else gate[:, t], norm)
        y, mixed, outcome = solve_low_rank(token, _low_rank(row, now.shape[-1], layout, options))
        h = time.state + time.grown(mixed)
        ys.append(y)
        outcomes.append(outcome)
    return torch.stack(ys, 1), h, torch.stack(outcomes, 1)


def _low_rank(row, d, layout, options):
    """I − Q of the tokens of a row (b,K), a LowRank."""
    rank, scale, act, sequential, eps, kappa, *_ = options
    u = row[:, layout[0] : layout[0] + rank * d].unflatten(-1, (rank, d))
    a = scale * torch.sigmoid(row[:, layout[1] : layout[1] + rank])
    found = reflections_of(a, nrm(ACTIVATIONS[act](u), eps), sequential)
    if kappa is None:
        return found
    shrink = kappa / a.sum(-1, keepdim=True).clamp_min(kappa)
    return found._replace(T=found.T * shrink.unsqueeze(-1))


class _Time(NamedTuple):
    """What the recurrence says of one token before it is solved."""

    history: Tensor  # (b,d) its output without the token
    state: Tensor  # without the token
    gain: Tensor  # (b,d) what its output has of x̃
    grown: Callable[[Tensor], Tensor]  # x̃ (b,d) → what the token adds to the state


def _recurrence(h, row, dt, A, layout, options):
    """_Time. h: the state before. row: (b,K). dt, A: of this token."""
    if A.dim() == 2 and A.shape == h.shape:  # FP-RNN's decay
        past = A * h
        return _Time(past, past, dt, lambda mixed: dt * mixed)
    *_, eps, _, bc_norm, groups, _, _, _ = options
    n = h.shape[-1]
    B, C = (row[:, at : at + groups * n].unflatten(-1, (groups, n)) for at in layout[2:])
    if bc_norm:
        B, C = nrm(B, eps), nrm(C, eps)
    if A.dim() == 2:  # FP-Mamba-1
        past = torch.exp(dt.unsqueeze(-1) * A) * h
        gain = dt * (B * C).sum(-1)
        return _Time((past * C).sum(-1), past, gain, lambda mixed: (dt * mixed).unsqueeze(-1) * B)
    B, C = (part.repeat_interleave(len(A) // groups, 1).unsqueeze(2) for part in (B, C))
    past = torch.exp(dt * A)[..., None, None] * h
    wide = h.shape[2]

    def grown(mixed):
        return (dt.unsqueeze(-1) * mixed.unflatten(-1, (-1, wide))).unsqueeze(-1) * B

    gain = (dt * (B * C).sum((-2, -1))).repeat_interleave(wide, -1)
    return _Time((past * C).sum(-1).flatten(1), past, gain, grown)
