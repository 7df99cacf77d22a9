"""The gradient at a solution, by an iteration in the backward.

Shapes: b batch, l length, d channels.
"""

import warnings
from collections.abc import Callable

import torch

from .non_finite import NonFiniteError
from .solver import Rule, solve_paper

FAILED = "the solve in the backward of `gradient: implicit` diverged"
CURE = (
    "The layer does not contract at its fixed point: use gradient exact (with token exact),"
    " one_step, or bound the mixer (contractive: 0.9)"
)

MOST_GROWTH = 1e3  # of g over v, beyond which an iteration that has not converged will not do so

# Relative change of the adjoint at which `exact` has converged.
ADJOINT_TOL = {torch.float32: 1e-6, torch.float64: 1e-13}


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
    y_star: torch.Tensor,
    terms: int | None,
    clip: float | None,
    norms: torch.Tensor | None,
) -> torch.Tensor:
    """F(y*) with the gradient of the explicit recurrence's solution attached.

    The cotangent v of y* becomes g = Σ_k (Jᵀ)ᵏ v, J = ∂F/∂y at y*. F at token t reads tokens before
    t alone, so Jᴸ = 0 and L terms are all there are; fewer do where later ones are rounding.

    Args:
        F: (b,l,d) → (b,l,d). y_star: (b,l,d), detached. terms: K, of the sum's terms after the
        first; None: until they are rounding.
        clip: Jᵀ g of a token is at most so many times as long as the longest v of its sequence.
        norms: where the backward writes max ‖g_t‖ / max ‖v_t‖ of every sequence, (b,).
    """
    first = F(y_star)
    if not first.requires_grad:
        return first

    def sum_up(v):
        most = v.shape[1] if terms is None else terms
        longest, g = _longest(v), v
        with torch.enable_grad():  # a graph of its own: that of `first` may be a checkpoint's
            y0 = y_star.detach().requires_grad_()
            F0 = F(y0)
        for _ in range(most):
            (again,) = torch.autograd.grad(F0, y0, g, retain_graph=True)
            before, g = g, v + clipped(again, clip, longest)
            change = (g - before).abs().amax((1, 2)) / g.abs().amax((1, 2)).clamp_min(1e-30)
            if terms is None and (change < ADJOINT_TOL[v.dtype]).all():
                break
        if norms is not None:
            norms.copy_((_longest(g) / longest.clamp_min(1e-30)).squeeze(1).detach())
        return g

    first.register_hook(sum_up)
    return first


def _longest(v):
    """The largest ‖v_t‖₂ of every sequence. (b,l,d) → (b,1)"""
    return torch.linalg.vector_norm(v, dim=-1).amax(1, keepdim=True)


def clipped(carried: torch.Tensor, clip: float | None, longest: torch.Tensor) -> torch.Tensor:
    """carried (b,l,d), each token's at most clip · longest (b,1) long; clip None: as it is."""
    if clip is None:
        return carried
    size = torch.linalg.vector_norm(carried, dim=-1)
    share = (clip * longest / size.clamp_min(1e-30)).clamp_max(1.0)
    return carried * share.unsqueeze(-1)
