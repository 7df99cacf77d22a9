"""The true gradient at a fixed point, by a solve in the backward."""

import warnings

import torch

from .non_finite import NonFiniteError
from .solver import solve_paper

FAILED = "the solve in the backward of `gradient: implicit` diverged"
CURE = (
    "The layer does not contract at its fixed point: use gradient one_step or phantom:K, or bound"
    " the mixer (contractive: 0.9)"
)

MOST_GROWTH = 1e3  # of g over v, beyond which an iteration that has not converged will not do so


def implicit_gradient(f, y_star, first, rule):
    """`first` = f(y*) with the true gradient of the fixed point attached (paper Eq. 16).

    The cotangent v of y* becomes g = (I − J)⁻ᵀ v, J = ∂f/∂y at y*, the fixed point of the Neumann
    iteration g ← v + Jᵀ g, found in the backward by the solver of the forward, with its damping.

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
