"""Loops that solve a layer, their stopping rule and statistics, and gradients of a solution.

    f    the paper's iteration y ← f(y)
    F    every token's own equation (cell.py), solved given the y of the tokens before it

A solution y* satisfies y* = f(y*) = F(y*). `solve_sequential` solves one token after the other.
`solve_windows` iterates f or F within windows of tokens. `solve_paper` iterates f for all tokens of
a batch at once, until the batch has converged (App. B.4). No gradient flows through an iteration:
`implicit_gradient` (of f) and `adjoint_gradient` (of F) attach the gradient of the solution, which
they compute by an iteration in the backward.

`solve_paper` and `solve_windows` raise an error at NaN or infinity. `solve_sequential` can return
them; the model then raises the error, after the layer. The error names the place, the cause and a
cure.

Shape suffixes: b batch, l length, d channels; w tokens of a window.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from .configuration_fprnn import PAPER_RULES
from .state import BlockState


class NonFiniteError(FloatingPointError):
    """A forward pass, or the solve of a layer in it, became NaN or infinite."""


def all_finite(x: torch.Tensor) -> torch.Tensor:
    """Return whether a tensor has no NaN and no infinity, as a bool tensor (,) on its device."""
    return torch.isfinite(x.detach()).all()


def stack_flags(flags: list[torch.Tensor]) -> torch.Tensor:
    """Stack bool tensors (,) on the device of the last one, without waiting for a device."""
    return torch.stack([flag.to(flags[-1].device) for flag in flags])


def read_flags(flags: list[torch.Tensor]) -> list[bool]:
    """Read bool tensors (,); the host waits for the device once."""
    return stack_flags(flags).tolist()


def explain_nonfinite(place: str, module: nn.Module, config: Any, symptom: str) -> NonFiniteError:
    """Return an error that names the cause of NaN or infinity, and a cure.

    Args:
        place: First place whose output is not finite, such as "layer 3".
        module: Module at this place.
        config: FPRNNConfig of the model.
        symptom: Description of the output, such as "its output is NaN or infinite".
    """
    is_layer = hasattr(module, "kind")  # an FPRNNLayer, not the embedding, final norm or head
    kind = module.kind if is_layer else config.block
    layer_config = module.block.config if is_layer else config
    bad_names = [name for name, p in module.named_parameters() if not all_finite(p)]
    if bad_names:
        cause = f"its parameter {bad_names[0]} is NaN or infinite ({len(bad_names)} are)"
        cure = "the checkpoint is damaged, or its training had diverged: use an earlier one"
    elif isinstance(module, nn.Embedding):
        cause = "inputs_embeds holds a NaN or an infinity"
        cure = "correct the code that computes them"
    elif any(p.dtype == torch.float16 for p in module.parameters()):
        cause = "its parameters are finite, but its activations exceed the range of fp16"
        cure = "compute in bf16 or fp32"
    elif kind == "fp_rnn" and layer_config.contractive is None:
        cause = (
            f"fp_rnn iterates its state without a norm. With mixer {layer_config.mixer} and"
            " contractive null, ‖I − Q‖ may be above 1, so the state may grow without bound"
        )
        cure = "set contractive to a number below 1, such as 0.95"
        if (
            layer_config.mixer in ("kronecker", "mixture")
            and layer_config.kronecker_norm != "spectral"
        ):
            cure += ", or kronecker_norm to spectral"
    else:
        cause = f"its parameters are finite, but activations of the {kind} grew too large"
        cure = (
            "compute in fp32 or bf16 if this was under fp16 autocast; in training lower the"
            " learning rate or clip the gradient"
        )
        if kind.startswith("fp_"):
            cure += "; or bound the mixer (contractive: 0.95)"
    return NonFiniteError(f"{place}: {symptom}. Cause: {cause}. What helps: {cure}.")


class Rule(NamedTuple):
    """Stopping and damping of an iteration (paper App. B.4)."""

    tol: float = 0.1  # relative residual below which a sequence or token has converged
    max_iters: int = 100  # ℓmax of the paper
    quantile: float = 1.0  # solve_paper: quantile of the batch's residuals that must be below tol
    stepsize: float = 0.99  # first step size
    stepsize_decay: float = 0.9
    patience: int = 15  # iterations without improvement before the step size decays
    min_stepsize: float = 1e-3  # stop below this step size


class FixedPointStats(NamedTuple):
    """Statistics of a solve, (b,) each; `token_iters` is (b,l).

    The model stacks them over layers, to (n_layer,b) and (n_layer,b,l). "The paper's procedure" is
    `solve_paper` from zero, see `measure_num_iters`; its fields are None if it was not run.
    """

    evaluations: torch.Tensor  # evaluations of f or F per token
    failed: torch.Tensor  # share of tokens that are not solved to the tolerance
    bisected: torch.Tensor  # share whose iteration does not converge, solved by another method
    grad_limited: torch.Tensor  # share whose gradient may be shortened (cell.MAX_GAIN)
    residual: torch.Tensor  # relative residual of the returned solution
    num_iters: torch.Tensor | None = None  # ℓ*: iterations that the paper's procedure needs
    converged: torch.Tensor | None = None  # bool: whether the paper's procedure has converged
    token_iters: torch.Tensor | None = None  # iterations until all tokens up to this one converge
    # share of tokens at which the paper's procedure ends at another solution than this solve
    other_solution: torch.Tensor | None = None
    # max_t ‖g_t‖ / max_t ‖v_t‖, where v is the gradient that y gets from the layer's output, and g
    # also includes the gradient through later tokens. The backward writes it here; None without a
    # gradient.
    adjoint_norm: torch.Tensor | None = None


# Largest relative distance at which two iterates count as the same solution. It is above the
# tolerance of the paper's procedure, 0.1.
MAX_DISTANCE = 0.5
RESIDUAL_FLOOR = 1e-8  # added to ‖g‖∞ in a relative residual
SHARES = ("failed", "bisected", "grad_limited")  # statistics that are shares of the tokens

# The status of a token is a sum of these flags; 0 means solved.
FAILED = 1  # no solution was found, or iterations ended before this token had converged
BISECTED = 2  # Picard does not converge; bisection or `find_certified_pairs` gave the solution
GRAD_LIMITED = 4  # ‖(I − φ′)⁻¹‖ is above cell.MAX_GAIN, so the gradient may be shortened


class Solution(NamedTuple):
    """Result of a solve."""

    y: torch.Tensor  # (b,l,d)
    stats: FixedPointStats
    f_y: torch.Tensor | None = None  # (b,l,d) f(y) or F(y); None: not computed
    h: torch.Tensor | None = None  # recurrence's state after the last token; None: not computed


class MapValue(NamedTuple):
    """Value of f or F at an iterate y of a window."""

    f_y: torch.Tensor  # (b,w,d) f(y) or F(y)
    h: torch.Tensor  # recurrence's state after the window
    status: torch.Tensor  # (b,w) of each token's own equation
    residual: torch.Tensor  # (b,w) `token_residual` of y


def token_residual(y: torch.Tensor, f_y: torch.Tensor) -> torch.Tensor:
    """Return ‖y − f(y)‖∞ / (‖f(y)‖∞ + 1e-8) of every token, (b,l). y, f_y: (b,l,d)."""
    return (y - f_y).abs().amax(-1) / (f_y.abs().amax(-1) + RESIDUAL_FLOOR)


def relative_residual(y: torch.Tensor, f_y: torch.Tensor) -> torch.Tensor:
    """Return the largest `token_residual` of every sequence, (b,). y, f_y: (b,l,d)."""
    return token_residual(y, f_y).amax(-1)


def _read_iteration_flags(residual, iteration, *flags):
    """Read the flags of an iteration, bool tensors (,); the host waits for the device once.

    Raises:
        NonFiniteError: If a residual (b,) is NaN or infinite.
    """
    is_finite = torch.isfinite(residual)
    is_batch_finite, *flags = torch.stack([is_finite.all(), *flags]).tolist()
    if not is_batch_finite:
        raise NonFiniteError(
            f"the fixed-point iterate became NaN or infinite at iteration {iteration} in"
            f" sequence(s) {(~is_finite).nonzero().flatten().tolist()} of the batch"
        )
    return flags


class Damping:
    """Step size of every sequence or token (App. B.4).

    It is multiplied by `stepsize_decay` after `patience` iterations without a new lowest residual.
    """

    def __init__(self, rule: Rule, like: torch.Tensor) -> None:
        """Start with the first step size. like: A tensor with the shape of the residuals."""
        self.rule = rule
        self.stepsize = torch.full_like(like, rule.stepsize)
        self.lowest_residual = torch.full_like(like, torch.inf)
        self.stale_iters = torch.zeros_like(like, dtype=torch.long)

    def update(self, residual: torch.Tensor) -> None:
        """Update the step sizes with the residuals of this iteration."""
        stale_iters = torch.where(residual < self.lowest_residual, 0, self.stale_iters + 1)
        self.lowest_residual = torch.minimum(self.lowest_residual, residual)
        is_stale = stale_iters >= self.rule.patience
        decayed = self.stepsize * self.rule.stepsize_decay
        self.stepsize = torch.where(is_stale, decayed, self.stepsize)
        self.stale_iters = stale_iters.masked_fill(is_stale, 0)

    def select(self, indices: torch.Tensor) -> None:
        """Continue with these sequences or tokens only."""
        self.stepsize = self.stepsize[indices]
        self.lowest_residual = self.lowest_residual[indices]
        self.stale_iters = self.stale_iters[indices]


@torch.no_grad()
def solve_paper(
    f: Callable[[torch.Tensor], Any],
    y: torch.Tensor,
    rule: Rule,
    trace: list[tuple[torch.Tensor, ...]] | None = None,
) -> Solution:
    """Solve y = f(y) as the paper does (App. B.4): all tokens at once, one stopping rule per batch.

    The number of iterations depends on the whole batch and on later tokens (docs/model.md).

    Args:
        f: Map from y (b,l,d) to f(y) (b,l,d).
        y: First iterate, (b,l,d).
        rule: Stopping and damping.
        trace: List that receives (residual, lowest residual, step size, stale iterations) after
            every iteration, (b,) each.

    Returns:
        Solution with ℓ*, and the residual of the last iterate that was evaluated.

    Raises:
        NonFiniteError: If a residual is NaN or infinite.
    """
    damping = Damping(rule, y[:, 0, 0])
    iterations = 0  # of the batch
    num_iters = torch.zeros(len(y), dtype=torch.long, device=y.device)
    token_iters = torch.ones(y.shape[:2], dtype=torch.long, device=y.device)
    while True:
        # 1. Evaluate f, and count the iterations of sequences and tokens that have not converged.
        f_y = f(y)
        token_residuals = token_residual(y, f_y)
        residual = token_residuals.amax(1)
        iterations += 1
        is_unfinished = damping.lowest_residual >= rule.tol
        num_iters = num_iters + is_unfinished
        has_large_residual = token_residuals.cummax(1).values >= rule.tol  # at it or before it
        needs_another = has_large_residual & is_unfinished[:, None]
        token_iters = torch.where(needs_another, iterations + 1, token_iters)
        # 2. Take a damped step.
        y = torch.lerp(y, f_y, damping.stepsize[:, None, None])
        damping.update(residual)
        if trace is not None:
            trace.append((residual, damping.lowest_residual, damping.stepsize, damping.stale_iters))
        # 3. Stop if the batch has converged, or if it does not move any more.
        has_unfinished = torch.quantile(damping.lowest_residual, rule.quantile) >= rule.tol
        is_moving = damping.stepsize.max() >= rule.min_stepsize
        has_unfinished, is_moving = _read_iteration_flags(
            residual, iterations, has_unfinished, is_moving
        )
        if not has_unfinished or not is_moving or iterations >= rule.max_iters:
            break
    converged = damping.lowest_residual < rule.tol
    token_iters = torch.minimum(token_iters, num_iters[:, None])
    stats = FixedPointStats(
        evaluations=torch.full_like(residual, iterations),
        failed=(~converged).to(residual.dtype),
        bisected=torch.zeros_like(residual),
        grad_limited=torch.zeros_like(residual),
        residual=residual,
        num_iters=num_iters,
        converged=converged,
        token_iters=token_iters,
    )
    return Solution(y, stats)


def _num_iters_rule(block):
    """Return the rule that defines ℓ*: the block's damping in the paper, and tolerance 0.1."""
    damping = {**PAPER_RULES[block], "quantile": 1.0}
    return Rule(tol=0.1, max_iters=1000, patience=15, **damping)


def measure_num_iters(
    f: Callable[[torch.Tensor], Any],
    y: torch.Tensor,
    block: str,
    stats: FixedPointStats,
    mask: torch.Tensor | None,
) -> FixedPointStats:
    """Add ℓ* to the statistics: the iterations that `solve_paper` needs from zero.

    Args:
        f: The paper's iteration, (b,l,d) → (b,l,d).
        y: The model's own solution, (b,l,d), which the result of `solve_paper` is compared with.
        block: Name of the block, such as "fp_mamba1".
        stats: Statistics of the model's own solve.
        mask: False at padding, (b,l), or None.
    """
    rule = _num_iters_rule(block)
    try:
        paper_y, paper_stats, *_ = solve_paper(f, torch.zeros_like(y), rule)
        token_iters, num_iters = paper_stats.token_iters, paper_stats.num_iters
        converged = paper_stats.converged
    except NonFiniteError:  # f may diverge although the tokens' own equations have a solution
        paper_y = torch.nan * y
        token_iters = torch.full(y.shape[:2], rule.max_iters, device=y.device)
        num_iters = token_iters[:, 0]
        converged = torch.zeros_like(num_iters, dtype=torch.bool)
    return stats._replace(
        num_iters=num_iters,
        converged=converged,
        token_iters=token_iters,
        other_solution=_share_other_solution(paper_y, y, mask),
    )


def _share_other_solution(paper_y, y, mask):
    """Return the share of tokens (b,) at which two iterates (b,l,d) are different solutions."""
    distance, size = (torch.linalg.vector_norm(t.float(), dim=-1) for t in (paper_y - y, y))
    is_different = ~(distance <= MAX_DISTANCE * size)  # NaN counts as different
    is_token = torch.ones_like(is_different) if mask is None else mask
    return (is_different & is_token).sum(1) / is_token.sum(1).clamp_min(1)


@torch.no_grad()
def solve_windows(
    evaluate: Callable[[Any, torch.Tensor], MapValue], inputs: Any, rule: Rule, width: int
) -> Solution:
    """Solve a window of tokens at once, then the next one from the state after it.

    A token has converged when the residuals of this token and of all tokens before it are below the
    tolerance. It is then frozen at the iterate that has this residual. So its result depends only
    on the tokens up to it, and not on other sequences.

    Args:
        evaluate: Function of (inputs of a window, iterate y).
        inputs: SolveInputs.
        rule: Stopping rule. The step size does not decay, and max_iters counts per window.
        width: Tokens per window.

    Returns:
        Solution, with the residual of its y.

    Raises:
        NonFiniteError: If the iterate becomes NaN or infinite.
    """
    length = inputs.x.shape[1]
    state = inputs.seqs.state
    results, token_evaluations = [], 0
    for start in range(0, length, width):
        window = inputs.cut(start, min(start + width, length), state)
        y, value, iterations = _solve_window(evaluate, window, rule)
        token_evaluations += iterations * y.shape[1]
        results.append((y, value.f_y, value.residual, value.status))
        state = BlockState(y[:, -1], None, value.h, ())
    y, f_y, residual, status = (torch.cat(tensors, 1) for tensors in zip(*results))
    return Solution(y, make_stats(residual, status, token_evaluations / length), f_y, state.h)


def _solve_window(evaluate, window, rule):
    """Iterate one window; return y (b,w,d), the MapValue at y, and the number of iterations."""
    y = torch.zeros_like(window.x)
    is_frozen = torch.zeros(y.shape[:2], dtype=torch.bool, device=y.device)
    iterations = 0
    while True:
        value = evaluate(window, y)
        iterations += 1
        is_frozen = (is_frozen | (value.residual < rule.tol)).cumprod(1).bool()
        (is_done,) = _read_iteration_flags(value.residual.amax(1), iterations, is_frozen.all())
        if iterations >= rule.max_iters or is_done:
            status = torch.where(is_frozen, value.status, value.status | FAILED)
            status = window.seqs.zero_status(status)
            return y, value._replace(status=status), iterations
        next_y = value.f_y if rule.stepsize == 1 else torch.lerp(y, value.f_y, rule.stepsize)
        y = torch.where(is_frozen.unsqueeze(-1), y, next_y)


def solve_sequential(
    solve_token: Callable[[Any], tuple[torch.Tensor, torch.Tensor, torch.Tensor]], inputs: Any
) -> Solution:
    """Solve one token after the other, each once; differentiable if gradients are enabled.

    Args:
        solve_token: Function of a single token's inputs. It returns y (b,1,d), the recurrence's
            state, and the token's status (b,1).
        inputs: SolveInputs.

    Returns:
        Solution. The graph of its y goes through all tokens: backpropagation through time.
    """
    state, results = inputs.seqs.state, []
    for t in range(inputs.x.shape[1]):
        y, h, status = solve_token(inputs.cut(t, t + 1, state))
        results.append((y, status))
        state = BlockState(y[:, 0], None, h, ())
    y, status = (torch.cat(tensors, 1) for tensors in zip(*results))
    residual = torch.zeros_like(y[..., 0])
    return Solution(y, make_stats(residual, status, evaluations=1.0), y, h)


def make_stats(residual: torch.Tensor, status: torch.Tensor, evaluations: float) -> FixedPointStats:
    """Return the statistics of tokens with these residuals and statuses, (b,l) each."""
    residual = residual.detach().amax(1)
    evaluations = torch.full_like(residual, evaluations)
    failed, bisected, grad_limited = (
        (status & flag != 0).to(residual.dtype).mean(1) for flag in (FAILED, BISECTED, GRAD_LIMITED)
    )
    return FixedPointStats(evaluations, failed, bisected, grad_limited, residual)


DIVERGENCE = "the solve in the backward of `gradient: implicit` diverged"
DIVERGENCE_CURE = (
    "The layer does not contract at its fixed point: use gradient exact (with token exact),"
    " one_step, or bound the mixer (contractive: 0.9)"
)

MAX_GROWTH = 1e3  # max|g| / max|v| above which an unfinished iteration counts as diverged

# The sum of `adjoint_gradient` also ends when its change is below this many machine epsilons of the
# products and no longer shrinks. Under bf16 the change would never fall below the tolerance.
ROUNDING = 8


def implicit_gradient(
    f: Callable[[torch.Tensor], torch.Tensor],
    y_star: torch.Tensor,
    f_y_star: torch.Tensor,
    rule: Rule,
) -> torch.Tensor:
    """Return f(y*) with the true gradient of the fixed point attached.

    The gradient v of y* becomes g = (I − J)⁻ᵀ v with J = ∂f/∂y at y*. It is the fixed point of the
    Neumann iteration g ← v + Jᵀ g, which the backward solves as the paper does, with damping.

    Args:
        f: The iteration, (b,l,d) → (b,l,d).
        y_star: The fixed point, (b,l,d), detached.
        f_y_star: f(y*), with the graph to the parameters.
        rule: Tolerance and maximal iterations of the solve in the backward.

    Raises:
        NonFiniteError: In the backward, if the iteration for g diverges. The backward warns if the
            iteration has not converged.

    Source: paper, Eq. 16.
    """
    if not (torch.is_grad_enabled() and f_y_star.requires_grad):
        return f_y_star
    y0 = y_star.detach().requires_grad_()
    f0 = f(y0)

    def solve_for_g(v):
        def neumann_step(g):
            return v + torch.autograd.grad(f0, y0, g, retain_graph=True)[0]

        try:  # quantile 1: until every sequence has converged
            g, stats, *_ = solve_paper(neumann_step, v, rule._replace(quantile=1.0))
        except NonFiniteError as error:
            raise NonFiniteError(f"{DIVERGENCE}: {error}. {DIVERGENCE_CURE}") from None
        if not stats.converged.all():
            growth = (g.abs().max() / v.abs().max()).item()
            if growth > MAX_GROWTH:
                raise NonFiniteError(f"{DIVERGENCE}: it grew {growth:.0e}-fold. {DIVERGENCE_CURE}")
            residual = f"relative residual {stats.residual.max():.1e}, not below {rule.tol:g}"
            text = f"the implicit gradient is not exact: {residual}. {DIVERGENCE_CURE}"
            warnings.warn(text, stacklevel=2)
        return g

    y = f_y_star.view_as(f_y_star)
    y.register_hook(solve_for_g)
    return y


def adjoint_gradient(
    F: Callable[[torch.Tensor], torch.Tensor],
    F_detached: Callable[[torch.Tensor], torch.Tensor],
    y_star: torch.Tensor,
    adjoint_norm: torch.Tensor | None,
    tol: float,
    product_dtype: torch.dtype,
) -> torch.Tensor:
    """Return F(y*) with the gradient of the solution of y = F(y) attached.

    The gradient v of y* becomes the adjoint g = Σ_k (Jᵀ)ᵏ v with J = ∂F/∂y at y*. F at token t
    reads earlier tokens only, so Jᴸ = 0 for length L, and the sum has at most L terms. It ends
    earlier if its change is below the tolerance, or if the change is a rounding error.

    Args:
        F: Map (b,l,d) → (b,l,d).
        F_detached: The same map with detached inputs. Only its gradient with respect to y is used.
            The backward computes it, under the autocast mode of the forward.
        y_star: The solution, (b,l,d), detached.
        adjoint_norm: Tensor (b,) that the backward writes max ‖g_t‖ / max ‖v_t‖ into, or None.
        tol: Change of a sequence, relative to its largest entry, below which the sum ends.
        product_dtype: dtype that F multiplies in.
    """
    F_y_star = F(y_star)
    if not F_y_star.requires_grad:
        return F_y_star
    device = y_star.device.type
    dtype, is_enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    autocast = torch.autocast(device, dtype, enabled=is_enabled)

    def sum_terms(v):
        g = v
        # This is a new graph, because the graph of F_y_star may be checkpointed.
        with torch.enable_grad(), autocast:
            y0 = y_star.detach().requires_grad_()
            F0 = F_detached(y0)
        lowest_change = torch.full_like(v[:, 0, 0], torch.inf)
        for _ in range(v.shape[1]):
            (term,) = torch.autograd.grad(F0, y0, g, retain_graph=True)
            previous_g, g = g, v + term
            change = _max_entry(g - previous_g) / _max_entry(g).clamp_min(1e-30)
            is_rounding = change <= ROUNDING * torch.finfo(product_dtype).eps
            if ((change < tol) | (is_rounding & (change >= lowest_change))).all():
                break
            lowest_change = torch.minimum(lowest_change, change)
        if adjoint_norm is not None:
            relative_norm = _max_token_norm(g) / _max_token_norm(v).clamp_min(1e-30)
            adjoint_norm.copy_(relative_norm.detach())
        return g

    F_y_star.register_hook(sum_terms)
    return F_y_star


def _max_entry(v):
    """Return the largest |entry| of every sequence of v (b,l,d), (b,)."""
    return torch.linalg.vector_norm(v, torch.inf, dim=(1, 2))


def _max_token_norm(v):
    """Return the largest ‖v_t‖₂ of every sequence of v (b,l,d), (b,)."""
    return torch.linalg.vector_norm(v, dim=-1).amax(1)
