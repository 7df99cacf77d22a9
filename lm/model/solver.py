"""How a fixed point y* = f(y*) is found: schedules, damping, stopping, statistics.

Two rules for stopping. `causal` (ours, docs/fixed-point.md): a token has converged when it and all
before it have; it is then frozen, and what follows is iterated a window at a time. `paper` (App.
B.4): all tokens of the batch at once, until the batch has converged. No gradients flow through a
solve.

Shapes: b batch, l length, d channels; r sequences still being solved, w tokens of a window.
"""

from typing import NamedTuple, Protocol

import torch


class NonFiniteError(FloatingPointError):
    """An iterate became NaN or infinite."""


class Rule(NamedTuple):
    """When to stop and how to damp (paper App. B.4)."""

    tol: float = 0.1  # relative residual at which a sequence (causal: a token) has converged
    max_iters: int = 100  # ℓmax, of the solve (causal: of a token)
    quantile: float = 1.0  # of the batch's residuals that must be below tol; `paper` only
    stepsize: float = 0.99  # s₀
    stepsize_decay: float = 0.9
    patience: int = 15  # iterations without improvement before s ← s·decay
    min_stepsize: float = 1e-3  # give up below


class FixedPointStats(NamedTuple):
    """What a solve needed, on the device of the iterate. Shapes (b,) and, of `token_iters`, (b,l);
    stacked over layers by the model to (n_layer,b) and (n_layer,b,l)."""

    num_iters: torch.Tensor  # ℓ*: iterations until the sequence had converged, else all that ran
    converged: torch.Tensor  # bool: its residual (causal: that of each token) was below tol
    hit_max: torch.Tensor  # bool: ℓmax (or the smallest step) was reached without that
    residual: torch.Tensor  # relative residual of what the solve returned
    jacobian: torch.Tensor  # estimate of ‖∂f/∂y‖_F² / (l d) at y*; zero unless jacobian_reg is on
    work: torch.Tensor  # evaluations of f per token, all that were computed
    unconverged: torch.Tensor  # share of the tokens that did not converge
    token_iters: torch.Tensor  # int: evaluations of f before the token was frozen


class Solution(NamedTuple):
    """y (b,l,d); with causal stopping also f(y) (b,l,d) and the recurrence's state h after the last
    token, both as of the last evaluation."""

    y: torch.Tensor
    stats: FixedPointStats
    f_y: torch.Tensor | None = None
    h: torch.Tensor | None = None


def token_residual(y, g):
    """‖y − g‖∞ / (‖g‖∞ + 1e-8) of every token. y, g: (b,l,d) → (b,l)."""
    return (y - g).abs().amax(-1) / (g.abs().amax(-1) + 1e-8)


def relative_residual(y, g):
    """max over tokens of `token_residual`, per sequence. y, g: (b,l,d) → (b,)."""
    return token_residual(y, g).amax(-1)


@torch.no_grad()
def solve_paper(f, y, rule, trace=None):
    """The paper's solver (App. B.4): all tokens at once, damped, one stopping rule for the batch.

    Known limits (docs/fixed-point.md): the count depends on the whole batch and on later tokens.

    Args:
        f: maps (b,l,d) → (b,l,d). y: the start. rule: see `Rule`.
        trace: a list that receives, per iteration, (residual, lowest, stepsize, waited), all (b,).
    Returns:
        Solution, whose residual is that of the last iterate evaluated.
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
    work = torch.full_like(residual, iters)
    per_token = num_iters[:, None].expand(y.shape[:2])
    unconverged = (~converged).to(residual.dtype)
    zero = torch.zeros_like(residual)
    stats = FixedPointStats(
        num_iters, converged, hit_max, residual, zero, work, unconverged, per_token
    )
    return Solution(y, stats)


# `auto`: the width grows by AUTO_FACTOR when as many tokens as it spans were frozen within
# max(AUTO_ITERS, half the width) iterations, and shrinks when that took twice as many.
AUTO_START, AUTO_MOST, AUTO_FACTOR, AUTO_ITERS = 4, 4**10, 4, 6


class Iteration(Protocol):
    """f of one solve, on any window of its tokens (fixed_point.Windows is the model's)."""

    shape: tuple[int, int, int]  # (b,l,d)
    dtype: torch.dtype
    device: torch.device
    y_before: torch.Tensor  # (b,d) the iterate before the first token
    h_before: torch.Tensor | None  # the recurrence's state there; None: zero
    wants_state: bool  # Solution.h is to be filled

    def place(self, rows, position, valid, y_before, h):
        """The window of the tokens position (r,w), one after the other, of the sequences rows (r,).
        valid: (r,w), False beyond a sequence's end. y_before, h: of the token before the first."""

    def step(self, window, y):
        """f(y) on the window, (r,w,d), and what `advance` needs."""

    def advance(self, window, carry, counts):
        """The recurrence's state after the window's first counts (r,) tokens."""


class _Rows(NamedTuple):
    """The sequences still being solved, (r,) each."""

    index: torch.Tensor  # in the batch
    base: torch.Tensor  # first token of the window
    frozen: torch.Tensor  # how many of the window's tokens are
    width: torch.Tensor  # how many are iterated after those
    step: torch.Tensor  # damping, watched at the first token that is not frozen
    lowest: torch.Tensor
    waited: torch.Tensor
    iters: torch.Tensor  # `auto`: since as many tokens as the width spans were frozen
    count: torch.Tensor  # tokens frozen since then
    y_before: torch.Tensor  # (r,d) and
    h: torch.Tensor | None  # (r,…): of the token before the window

    def take(self, which):
        return _Rows(*(None if t is None else t[which] for t in self))


def _after_iteration(rows, residual, frozen, rule, adapt):
    """The rows after an iteration that froze up to `frozen` tokens of their windows: damping and,
    to adapt, the width. Both depend on tokens up to the first that is not frozen: the solve stays
    causal."""
    newly = frozen - rows.frozen
    watched = rows.frozen.clamp_max(residual.shape[1] - 1)
    watched = residual.gather(1, watched[:, None]).squeeze(1)
    moved, improved = newly > 0, watched < rows.lowest
    waited = torch.where(moved | improved, 0, rows.waited + 1)
    stale = waited >= rule.patience
    step = torch.where(stale, rows.step * rule.stepsize_decay, rows.step)
    rows = rows._replace(
        frozen=frozen,
        step=torch.where(moved, rule.stepsize, step),
        lowest=torch.where(moved, torch.inf, torch.minimum(rows.lowest, watched)),
        waited=waited.masked_fill(stale, 0),
    )
    return _adapt(rows, newly) if adapt else rows


def _adapt(rows, newly):
    """`auto` after an iteration that froze newly (r,) tokens; see AUTO_ITERS."""
    iters, count = rows.iters + 1, rows.count + newly
    limit = (rows.width // 2).clamp_min(AUTO_ITERS)
    spanned, slow = count >= rows.width, iters >= 2 * limit
    wider = torch.where(spanned & (iters <= limit), rows.width * AUTO_FACTOR, rows.width)
    again = spanned | slow
    return rows._replace(
        width=torch.where(slow, rows.width // AUTO_FACTOR, wider).clamp(1, AUTO_MOST),
        iters=iters.masked_fill(again, 0),
        count=count.masked_fill(again, 0),
    )


@torch.no_grad()
def solve_causal(f, rule, width, adapt=False):
    """Freeze the converged prefix of each sequence and iterate `width` tokens ahead of it.

    Token t has converged when its residual and those of all tokens before it are below tol. It is
    then frozen at the iterate of which that is the residual. Whether and where it stops, and the
    damping on the way, depend on tokens ≤ t of its own sequence only. A token that has had
    ℓmax iterations is frozen as it is, and counted in `unconverged`.

    Args:
        f: an Iteration. rule: see `Rule`. width: of the window; l is `parallel`, 1 `sequential`.
        adapt: the width follows the work (`auto`).
    Returns:
        Solution. Its residual is that of y: f_y is f at y itself.
    Raises:
        NonFiniteError: the iterate became NaN or infinite.
    """
    b, length, d = f.shape
    like, ints = {"device": f.device, "dtype": f.dtype}, {"device": f.device, "dtype": torch.long}
    # One token more: what lies beyond a sequence's end is written there.
    y, f_y = torch.zeros(2, b * length + 1, d, **like)
    residual, work = torch.zeros(b * length + 1, **like), torch.zeros(b, **like)
    token_iters, num_iters = torch.zeros(b * length + 1, **ints), torch.zeros(b, **ints)
    zero, inf = torch.zeros(b, **ints), torch.full((b,), torch.inf, **like)
    rows = _Rows(
        index=torch.arange(b, **ints), base=zero, frozen=zero, width=zero + width,
        step=torch.full_like(inf, rule.stepsize), lowest=inf, waited=zero, iters=zero, count=zero,
        y_before=f.y_before, h=f.h_before,
    )  # fmt: skip
    h_end, total, waiting = None, 0, []
    while len(rows.index):
        widest = width
        if adapt:  # those whose widths differ wait: all in a window have the same
            widest = int(rows.width.mode().values)
            turn = rows.width == widest
            waiting, rows = [rows.take(~turn)], rows.take(turn)
        # A few tokens to spare, so that the window need not be placed anew at every iteration.
        span = min(widest + widest // 4, length - int(rows.base.min()))
        offset = torch.arange(span, **ints)
        position = rows.base[:, None] + offset
        valid = position < length
        at = torch.where(valid, rows.index[:, None] * length + position, b * length).flatten()
        window = f.place(rows.index, position.clamp_max(length - 1), valid, rows.y_before, rows.h)
        y_w, iters_w = (t.index_select(0, at).unflatten(0, valid.shape) for t in (y, token_iters))
        while True:
            g, carry = f.step(window, y_w)
            total += 1
            residual_w = token_residual(y_w, g)
            ahead = offset - rows.frozen[:, None]
            live = valid & (ahead >= 0) & (ahead < rows.width[:, None])
            num_iters[rows.index] += live.any(1)
            work[rows.index] += valid.sum(1).to(work.dtype)
            iters_w = iters_w + live
            given_up = (ahead == 0) & (rows.step < rule.min_stepsize)[:, None]
            done = (residual_w < rule.tol) | (iters_w >= rule.max_iters) | given_up
            frozen = ((ahead < 0) | (live & done)).long().cumprod(1).sum(1)
            step = rows.step[:, None, None]
            moves = (live & (offset >= frozen[:, None])).unsqueeze(-1)
            y_w = torch.where(moves, step * g + (1 - step) * y_w, y_w)
            rows = _after_iteration(rows, residual_w, frozen, rule, adapt)
            # One transfer to the host per iteration decides.
            end = rows.base + rows.frozen
            short = (rows.frozen + rows.width > span) & (rows.base + span < length)
            bad = (live & ~torch.isfinite(residual_w)).any(1)
            flags = (end < length).any(), short.any(), rows.frozen.sum(), bad.any()
            left, short, count, any_bad = torch.stack([v.long() for v in flags]).tolist()
            if any_bad:
                raise NonFiniteError(
                    f"the fixed-point iterate became NaN or infinite at iteration {total}"
                    f" in sequence(s) {rows.index[bad].tolist()} of the batch"
                )
            if not left or short or 2 * count >= len(rows.index) * span:
                break
        for t, t_w in ((y, y_w), (f_y, g), (residual, residual_w), (token_iters, iters_w)):
            t.index_copy_(0, at, t_w.flatten(0, 1))
        going = end < length
        if left or f.wants_state:
            h = f.advance(window, carry, rows.frozen)
            h_end = h.new_zeros(b, *h.shape[1:]) if h_end is None else h_end
            h_end[rows.index] = h
            last = y.index_select(0, (rows.index * length + end - 1).clamp_min(0))
            y_before = torch.where((end > 0).unsqueeze(-1), last, rows.y_before)
            rows = rows._replace(y_before=y_before, h=h)
        rows = rows._replace(base=end, frozen=torch.zeros_like(end)).take(going)
        for other in waiting:
            rows = _Rows(*map(torch.cat, zip(rows, other))) if len(other.index) else rows
    y, f_y, residual, token_iters = (
        t[:-1].unflatten(0, (b, length)) for t in (y, f_y, residual, token_iters)
    )
    missed = residual >= rule.tol
    converged = ~missed.any(1)
    stats = FixedPointStats(
        num_iters, converged, ~converged, residual.amax(1), torch.zeros_like(work), work / length,
        missed.to(work.dtype).mean(1), token_iters,
    )  # fmt: skip
    return Solution(y, stats, f_y, h_end)


def direct_stats(y, f_y, rule):
    """The FixedPointStats of a y that took no iterations. y, f_y: (b,l,d)."""
    residual = token_residual(y, f_y)
    missed = residual >= rule.tol
    zero = torch.zeros_like(residual[:, 0])
    ones = torch.ones_like(residual, dtype=torch.long)
    return FixedPointStats(
        ones[:, 0], ~missed.any(1), missed.any(1), residual.amax(1), zero, zero + 1,
        missed.to(y.dtype).mean(1), ones,
    )  # fmt: skip


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

        return solve_paper(neumann, v, rule._replace(quantile=1.0)).y

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
