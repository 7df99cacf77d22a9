"""How time is gone through: token by token, in windows, or by the paper's procedure; statistics.

With `token: exact` (cell.py) the recurrence is explicit, y_t = F(what comes before t): it has one
solution, which `solve_sequential` computes and `solve_windows` iterates to. With `token: iterate`
the paper's f is iterated: by `solve_paper`, all tokens of the batch at once until the batch has
converged (App. B.4), or by `solve_windows`. No gradients flow through an iteration:
`implicit_gradient` and `adjoint_gradient` attach the gradient of the solution, which they find by
an iteration in the backward.

A number that is not finite is never returned: it would be a loss of NaN, or a token sampled from
it, without a word. Where, why and what helps is said.

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
    """Whether a tensor holds no NaN and no infinity: (,) bool on its device, not waited for."""
    return torch.isfinite(x.detach()).all()


def stack_flags(flags: list[torch.Tensor]) -> torch.Tensor:
    """Stack flags, (,) bool each, on the device of the last one, without waiting for a device."""
    return torch.stack([flag.to(flags[-1].device) for flag in flags])


def read_flags(flags: list[torch.Tensor]) -> list[bool]:
    """Read flags, (,) bool each, waiting for the device once."""
    return stack_flags(flags).tolist()


def explained(where: str, module: nn.Module, config: Any, what: str) -> NonFiniteError:
    """The NonFiniteError to raise.

    Args:
        where: "layer 3" or the like: the first place that is not finite.
        module: the module there. config: the FPRNNConfig. what: what was seen there.
    """
    kind = getattr(module, "kind", config.block)  # of a layer
    own = module.block.config if hasattr(module, "kind") else config
    damaged = [name for name, p in module.named_parameters() if not all_finite(p)]
    if damaged:
        cause = f"its parameter {damaged[0]} is NaN or infinite ({len(damaged)} are)"
        cure = "the checkpoint is damaged, or its training had diverged: take an earlier one"
    elif isinstance(module, nn.Embedding):
        cause = "inputs_embeds holds a NaN or an infinity"
        cure = "mend what computes them"
    elif any(p.dtype == torch.float16 for p in module.parameters()):
        cause = "its parameters are finite, but what it computes with them is above what fp16 holds"
        cure = "compute in bf16 or fp32"
    elif kind == "fp_rnn" and own.contractive is None:
        cause = (
            f"fp_rnn iterates its state without a norm, and with mixer {own.mixer} and"
            " contractive null nothing keeps ‖I − Q‖ below 1, so that the state may grow without"
            " bound"
        )
        cure = "set contractive to a number below 1, such as 0.95"
        if own.mixer in ("kronecker", "mixture") and own.kronecker_norm != "spectral":
            cure += ", or kronecker_norm to spectral"
    else:
        cause = f"its parameters are finite: numbers of the {kind} grew too large on the way"
        cure = (
            "compute in fp32 or bf16 if this was under fp16 autocast; in training lower the"
            " learning rate or clip the gradient"
        )
        if kind.startswith("fp_"):
            cure += "; or bound the mixer (contractive: 0.95)"
    return NonFiniteError(f"{where}: {what}. Cause: {cause}. What helps: {cure}.")


class Rule(NamedTuple):
    """When to stop and how to damp (paper App. B.4)."""

    tol: float = 0.1  # relative residual at which a sequence (causal: a token) has converged
    max_iters: int = 100  # ℓmax
    quantile: float = 1.0  # of the batch's residuals that must be below tol; the paper's alone
    stepsize: float = 0.99  # s₀
    stepsize_decay: float = 0.9
    patience: int = 15  # iterations without improvement before s ← s·decay
    min_stepsize: float = 1e-3  # give up below


class FixedPointStats(NamedTuple):
    """What a solve needed, (b,) each and, of `token_iters`, (b,l); stacked over layers by the model
    to (n_layer,b) and (n_layer,b,l). The last five are None where they were not asked for."""

    evaluations: torch.Tensor  # evaluations a token that were done, of f or of F
    failed: torch.Tensor  # share of the tokens that were not solved, or not to the tolerance
    bisected: torch.Tensor  # of those that bisection found, since the iteration runs into nothing
    grad_limited: torch.Tensor  # of those whose gradient may be shortened (GRAD_LIMITED)
    residual: torch.Tensor  # relative residual of what the solve returned
    num_iters: torch.Tensor | None = None  # ℓ*: iterations that the paper's procedure needs
    converged: torch.Tensor | None = None  # bool: it did
    token_iters: torch.Tensor | None = None  # the one after which all tokens up to it stay within
    other_solution: torch.Tensor | None = (
        None  # share of the tokens where it ends in another solution
    )
    # max over tokens of ‖adjoint‖ by that of what came from above, which the backward through time
    # writes here; until then, and without one, 0
    adjoint_norm: torch.Tensor | None = None


# Distance, in lengths of y, beyond which the paper's procedure, whose own tolerance is 0.1 of the
# largest entry, has ended in another solution.
FAR = 0.5
RESIDUAL_FLOOR = 1e-8  # added to ‖g‖∞ in a relative residual
SHARES = ("failed", "bisected", "grad_limited")  # of the tokens that are no padding

# A token's outcome is a sum of these, 0 where all is well.
FAILED = 1  # no solution was found, or the way through time has not come to it
BISECTED = 2  # its own equation's iteration ran into none; bisection found one (cell.py)
GRAD_LIMITED = 4  # ‖(I − φ′)⁻¹‖ is above cell.MOST_GAIN, which can then shorten a gradient


class Solution(NamedTuple):
    """What a solve returns."""

    y: torch.Tensor  # (b,l,d)
    stats: FixedPointStats
    f_y: torch.Tensor | None = None  # (b,l,d) the map at y, and
    h: torch.Tensor | None = None  # the recurrence's state after the last token; None: not computed


def token_residual(y: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """‖y − g‖∞ / (‖g‖∞ + 1e-8) of every token. y, g: (b,l,d) → (b,l)."""
    return (y - g).abs().amax(-1) / (g.abs().amax(-1) + RESIDUAL_FLOOR)


def relative_residual(y: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """max over tokens of `token_residual`, per sequence. y, g: (b,l,d) → (b,)."""
    return token_residual(y, g).amax(-1)


def _read(residual, iteration, *flags):
    """The flags of an iteration, (,) bool each, as a list: the device is waited for once.

    Raises:
        NonFiniteError: a residual (b,) is NaN or infinite.
    """
    finite = torch.isfinite(residual)
    all_finite, *flags = torch.stack([finite.all(), *flags]).tolist()
    if not all_finite:
        raise NonFiniteError(
            f"the fixed-point iterate became NaN or infinite at iteration {iteration} in"
            f" sequence(s) {(~finite).nonzero().flatten().tolist()} of the batch"
        )
    return flags


class Damping:
    """The step size s of every sequence or token: s ← s·decay after `patience` iterations without a
    residual that is lower than all before (App. B.4)."""

    def __init__(self, rule: Rule, like: torch.Tensor) -> None:
        self.rule = rule
        self.step = torch.full_like(like, rule.stepsize)
        self.lowest = torch.full_like(like, torch.inf)
        self.waited = torch.zeros_like(like, dtype=torch.long)

    def update(self, residual: torch.Tensor) -> None:
        """residual: of this iteration, of the shape of `like`."""
        waited = torch.where(residual < self.lowest, 0, self.waited + 1)
        self.lowest = torch.minimum(self.lowest, residual)
        stale = waited >= self.rule.patience
        self.step = torch.where(stale, self.step * self.rule.stepsize_decay, self.step)
        self.waited = waited.masked_fill(stale, 0)

    def take(self, which: torch.Tensor) -> None:
        """Go on with these alone."""
        self.step, self.lowest, self.waited = (
            t[which] for t in (self.step, self.lowest, self.waited)
        )


@torch.no_grad()
def solve_paper(
    f: Callable[[torch.Tensor], Any],
    y: torch.Tensor,
    rule: Rule,
    trace: list[tuple[torch.Tensor, ...]] | None = None,
) -> Solution:
    """The paper's solver (App. B.4): all tokens at once, damped, one stopping rule for the batch.

    Known limits (docs/fixed-point.md): the count depends on the whole batch and on later tokens.

    Args:
        f: maps y (b,l,d) → f(y) (b,l,d).
        y: the start. rule: see `Rule`.
        trace: a list that receives, per iteration, (residual, lowest, stepsize, waited), all (b,).
    Returns:
        Solution, whose residual is that of the last iterate evaluated; with ℓ*.
    Raises:
        NonFiniteError: a residual is NaN or infinite.
    """
    damping, iterations = Damping(rule, y[:, 0, 0]), 0
    num_iters = torch.zeros(len(y), dtype=torch.long, device=y.device)
    token_iters = torch.ones(y.shape[:2], dtype=torch.long, device=y.device)
    while True:
        g = f(y)
        of_tokens = token_residual(y, g)
        residual = of_tokens.amax(1)
        iterations += 1
        unfinished = damping.lowest >= rule.tol
        num_iters = num_iters + unfinished
        outside = of_tokens.cummax(1).values >= rule.tol
        token_iters = torch.where(outside & unfinished[:, None], iterations + 1, token_iters)
        y = torch.lerp(y, g, damping.step[:, None, None])
        damping.update(residual)
        if trace is not None:
            trace.append((residual, damping.lowest, damping.step, damping.waited))
        left = torch.quantile(damping.lowest, rule.quantile) >= rule.tol
        moving = damping.step.max() >= rule.min_stepsize
        left, moving = _read(residual, iterations, left, moving)
        if not left or not moving or iterations >= rule.max_iters:
            break
    converged = damping.lowest < rule.tol
    token_iters = torch.minimum(token_iters, num_iters[:, None])
    evaluations = torch.full_like(residual, iterations)
    failed = (~converged).to(residual.dtype)
    zero = torch.zeros_like(residual)
    counts = num_iters, converged, token_iters
    stats = FixedPointStats(evaluations, failed, zero, zero, residual, *counts)
    return Solution(y, stats)


def probe_rule(block: str) -> Rule:
    """The Rule by which ℓ* is measured: the paper's damping for a block, the tolerance 0.1, every
    sequence."""
    damping = {**PAPER_RULES[block], "quantile": 1.0}
    return Rule(tol=0.1, max_iters=1000, patience=15, **damping)


def count_iterations_of(
    f: Callable[[torch.Tensor], Any],
    y: torch.Tensor,
    block: str,
    stats: FixedPointStats,
    mask: torch.Tensor | None,
) -> FixedPointStats:
    """The stats with ℓ*: what `solve_paper` needs with f from zero, and whether it ends where the
    model's own solution y is. block: the name of the block that f is of. mask: (b,l), or None."""
    rule = probe_rule(block)
    try:
        there, counted, *_ = solve_paper(f, torch.zeros_like(y), rule)
        parts = counted.num_iters, counted.converged, counted.token_iters
    except NonFiniteError:  # it need not be stable where the tokens' own equations are
        there, most = torch.nan * y, torch.full(y.shape[:2], rule.max_iters, device=y.device)
        parts = most[:, 0], torch.zeros_like(most[:, 0], dtype=torch.bool), most
    counts = dict(zip(("num_iters", "converged", "token_iters"), parts))
    return stats._replace(**counts, other_solution=_share_other_solution(there, y, mask))


def _share_other_solution(there, y, mask):
    """The share of the tokens (b,) at which two iterates (b,l,d) are further apart than FAR."""
    distance, size = (torch.linalg.vector_norm(t.float(), dim=-1) for t in (there - y, y))
    apart = ~(distance <= FAR * size)  # NaN is
    real = torch.ones_like(apart) if mask is None else mask
    return (apart & real).sum(1) / real.sum(1).clamp_min(1)


@torch.no_grad()
def solve_windows(
    step: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]],
    s: Any,
    rule: Rule,
    width: int,
) -> Solution:
    """Solve `width` tokens at once, then the next, each going on from the state before it.

    A token has converged when its residual and those of all tokens before it are below tol. It is
    then frozen at the iterate of which that is the residual: where it stops depends on tokens up to
    it of its own sequence only.

    Args:
        step: (window, y) → the map at y (b,w,d), the recurrence's state after the window, the
        outcome (b,w) of each token's own equation, and the `token_residual` (b,w) of y. s:
        Prepared. rule: see `Rule`; its step size is not decayed, and its ℓmax is that of a window.
        width: of a window.
    Returns:
        Solution. Its residual is that of y.
    Raises:
        NonFiniteError: the iterate became NaN or infinite.
    """
    length = s.x.shape[1]
    state, parts, evaluated = s.seqs.state, [], 0
    for start in range(0, length, width):
        window = s.cut(start, min(start + width, length), state)
        y, g, residual, outcome, h, iterations = _solve_window(step, window, rule)
        evaluated += iterations * y.shape[1]
        parts.append((y, g, residual, outcome))
        state = BlockState(y[:, -1], None, h, ())
    y, f_y, residual, outcome = (torch.cat(part, 1) for part in zip(*parts))
    return Solution(y, stats_of(residual, outcome, evaluated / length), f_y, h)


def _solve_window(step, window, rule):
    y = torch.zeros_like(window.x)
    frozen = torch.zeros(y.shape[:2], dtype=torch.bool, device=y.device)
    iterations = 0
    while True:
        g, h, outcome, residual = step(window, y)
        iterations += 1
        frozen = (frozen | (residual < rule.tol)).cumprod(1).bool()
        (done,) = _read(residual.amax(1), iterations, frozen.all())
        if iterations >= rule.max_iters or done:
            return y, g, residual, torch.where(frozen, outcome, outcome | FAILED), h, iterations
        moved = g if rule.stepsize == 1 else torch.lerp(y, g, rule.stepsize)
        y = torch.where(frozen.unsqueeze(-1), y, moved)


def solve_sequential(
    token: Callable[[Any], tuple[torch.Tensor, torch.Tensor, torch.Tensor]], s: Any
) -> Solution:
    """Solve one token after the other, once each; differentiable where gradients are on.

    Args:
        token: (window of one token) → y (b,1,d), the recurrence's state, the outcome (b,1).
        s: Prepared.
    Returns:
        Solution. Its y is attached to all tokens before: backpropagation through time.
    """
    state, parts = s.seqs.state, []
    for t in range(s.x.shape[1]):
        y, h, outcome = token(s.cut(t, t + 1, state))
        parts.append((y, outcome))
        state = BlockState(y[:, 0], None, h, ())
    y, outcome = (torch.cat(part, 1) for part in zip(*parts))
    return Solution(y, stats_of(torch.zeros_like(y[..., 0]), outcome, 1.0), y, h)


def stats_of(residual: torch.Tensor, outcome: torch.Tensor, evaluations: float) -> FixedPointStats:
    """FixedPointStats of tokens with these residuals and outcomes, (b,l) each."""
    residual = residual.detach().amax(1)
    evaluations = torch.full_like(residual, evaluations)
    failed, bisected, grad_limited = (
        (outcome & what != 0).to(residual.dtype).mean(1)
        for what in (FAILED, BISECTED, GRAD_LIMITED)
    )
    return FixedPointStats(evaluations, failed, bisected, grad_limited, residual)


DIVERGED = "the solve in the backward of `gradient: implicit` diverged"
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
            raise NonFiniteError(f"{DIVERGED}: {e}. {CURE}") from None
        if not stats.converged.all():
            growth = (g.abs().max() / v.abs().max()).item()
            if growth > MOST_GROWTH:
                raise NonFiniteError(f"{DIVERGED}: it grew {growth:.0e}-fold. {CURE}")
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
        y_star: (b,l,d), detached. tol: the sum ends when the largest change of a sequence is below
        tol of the largest entry, or rounding.
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
        longest, g = _longest(v), v
        with torch.enable_grad(), autocast:  # a graph of its own: `first`'s may be a checkpoint's
            y0 = y_star.detach().requires_grad_()
            F0 = F_of_y(y0)
        lowest = torch.full_like(v[:, 0, 0], torch.inf)
        for _ in range(v.shape[1]):
            (again,) = torch.autograd.grad(F0, y0, g, retain_graph=True)
            before, g = g, v + again
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
