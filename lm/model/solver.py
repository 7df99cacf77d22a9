"""How a fixed point y* = f(y*) is found: schedules, damping, stopping, statistics.

A schedule is a function (f, y0, rule) → (y, FixedPointStats), registered in SCHEDULES under the
names that `FPRNNConfig.schedule` and `.stopping` take. No gradients flow through a solve.
"""

from typing import NamedTuple

import torch


class NonFiniteError(FloatingPointError):
    """An iterate became NaN or infinite."""


class Rule(NamedTuple):
    """When to stop and how to damp (paper App. B.4)."""

    tol: float = 0.1  # relative residual at which a sequence has converged
    max_iters: int = 100  # ℓmax
    quantile: float = 1.0  # of the batch's residuals that must be below tol
    stepsize: float = 0.99  # s₀
    stepsize_decay: float = 0.9
    patience: int = 15  # iterations without improvement before s ← s·decay
    min_stepsize: float = 1e-3  # give up below


class FixedPointStats(NamedTuple):
    """What a solve needed, per sequence, on the device of the iterate. Shapes (b,); stacked over
    layers by the model to (n_layer,b)."""

    num_iters: torch.Tensor  # ℓ*: iterations until its residual was below tol, else all that ran
    converged: torch.Tensor  # bool: its residual was below tol at some iteration
    hit_max: torch.Tensor  # bool: the solve ran to ℓmax (or to the smallest step) without that
    residual: torch.Tensor  # relative residual of what the solve returned
    jacobian: torch.Tensor  # estimate of ‖∂f/∂y‖_F² / (l d) at y*; zero unless jacobian_reg is on


def relative_residual(y, g):
    """max over tokens of ‖y − g‖∞ / (‖g‖∞ + 1e-8), per sequence. y, g: (b,l,d) → (b,)."""
    per_token = (y - g).abs().amax(-1) / (g.abs().amax(-1) + 1e-8)
    return per_token.amax(-1)


def solve_parallel_paper(f, y, rule, trace=None):
    """The paper's solver (App. B.4): all tokens at once, damped, one stopping rule for the batch.

    Known limits (docs/model.md): the count depends on the whole batch and on later tokens.

    Args:
        f: maps (b,l,d) → (b,l,d). y: the start. rule: see `Rule`.
        trace: a list that receives, per iteration, (residual, lowest, stepsize, waited), all (b,).
    Returns:
        y (b,l,d) and FixedPointStats, whose `residual` is that of the last iterate evaluated.
    Raises:
        NonFiniteError: a residual is NaN or infinite.
    """
    batch = y.shape[0]
    lowest = y.new_full((batch,), torch.inf)
    step = y.new_full((batch,), rule.stepsize)
    waited = torch.zeros(batch, dtype=torch.long, device=y.device)
    num_iters = torch.zeros(batch, dtype=torch.long, device=y.device)
    residual, iters, left, going = lowest, 0, torch.inf, True
    while going and iters < rule.max_iters:
        g = f(y)
        residual = relative_residual(y, g)
        num_iters += lowest >= rule.tol  # counts this iteration for those not yet converged
        s = step[:, None, None]
        y = s * g + (1 - s) * y
        improved = residual < lowest
        lowest = torch.minimum(lowest, residual)
        waited = torch.where(improved, 0, waited + 1)
        stale = waited >= rule.patience
        step = torch.where(stale, step * rule.stepsize_decay, step)
        waited = torch.where(stale, 0, waited)
        if trace is not None:
            trace.append((residual, lowest, step, waited))
        iters += 1
        # One transfer to the host per iteration decides.
        left, largest_step, finite = torch.stack(
            [
                torch.quantile(lowest, rule.quantile),
                step.max(),
                torch.isfinite(residual).all().to(step.dtype),
            ]
        ).tolist()
        if not finite:
            bad = (~torch.isfinite(residual)).nonzero().flatten().tolist()
            raise NonFiniteError(
                f"the fixed-point iterate became NaN or infinite at iteration {iters}"
                f" in sequence(s) {bad} of the batch"
            )
        going = left >= rule.tol and largest_step >= rule.min_stepsize
    converged = lowest < rule.tol
    hit_max = ~converged if left >= rule.tol else torch.zeros_like(converged)
    return y, FixedPointStats(num_iters, converged, hit_max, residual, torch.zeros_like(residual))


SCHEDULES = {("parallel", "paper"): solve_parallel_paper}


def solve(f, y0, rule, schedule="parallel", stopping="paper"):
    """Find y = f(y) without gradients. See the schedule's own function for what it promises."""
    with torch.no_grad():
        return SCHEDULES[schedule, stopping](f, y0, rule)


def implicit_gradient(f, y_star, first, rule):
    """`first` = f(y*) with the true gradient of the fixed point attached (paper Eq. 16).

    The cotangent v of y* becomes g = (I − J)⁻ᵀ v, J = ∂f/∂y at y*, the fixed point of the Neumann
    iteration g ← v + Jᵀ g, found in the backward by the solver of the forward, with its damping.

    Args:
        f: the iteration. y_star: (b,l,d), detached. first: f(y*), which carries the graph to the
        parameters. rule: tolerance and ℓmax of the backward solve.
    """
    if not (torch.is_grad_enabled() and first.requires_grad):
        return first
    y0 = y_star.detach().requires_grad_()
    f0 = f(y0)

    def solve_for_g(v):
        def neumann(g):
            return v + torch.autograd.grad(f0, y0, g, retain_graph=True)[0]

        return solve(neumann, v, rule._replace(quantile=1.0))[0]

    y = first.view_as(first)
    y.register_hook(solve_for_g)
    return y


def spectral_norm(f, y, iterations, per_token=False, linear=False):
    """‖∂f/∂y‖₂ at y by power iteration on JᵀJ: Jᵀ by reverse mode, J by a central difference (exact
    for a linear f).

    Args:
        f: (b,l,d) → (b,l,d). per_token: f acts on each token by itself.
    Returns:
        (b,), or (b,l) per token.
    """
    over = (-1,) if per_token else (-2, -1)
    generator = torch.Generator(y.device).manual_seed(0)
    v = torch.randn(y.shape, generator=generator, dtype=y.dtype, device=y.device)
    with torch.enable_grad():
        at = y.detach().requires_grad_()
        value = f(at)

    def norm(t):
        return torch.linalg.vector_norm(t, dim=over, keepdim=True)

    for _ in range(iterations):
        v = v / norm(v).clamp_min(1e-30)
        with torch.no_grad():
            if linear:
                Jv = f(v)
            else:
                h = 1e-3 * norm(y).clamp_min(1.0)
                Jv = (f(y + h * v) - f(y - h * v)) / (2 * h)
        sigma = norm(Jv)
        v = torch.autograd.grad(value, at, Jv, retain_graph=True)[0]
    return sigma.squeeze(over)
