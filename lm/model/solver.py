"""How a fixed point y* = f(y*) is found: schedules, damping, stopping, statistics.

Two rules for stopping. `causal` (ours, docs/fixed-point.md): a token has converged when it and all
before it have; it is then frozen, and what follows is iterated a window at a time. `paper` (App.
B.4): all tokens of the batch at once, until the batch has converged. No gradients flow through a
solve.

Shapes: b batch, l length, d channels; r sequences still being solved, w tokens of a window.
"""

from collections import deque
from typing import NamedTuple, Protocol

import torch

from .non_finite import NonFiniteError


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
    penalty: torch.Tensor  # to be added to the loss; zero unless a regulariser is on
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


class _Flags:
    """What an iteration says to the host. Reading it waits for the device; so on an accelerator it
    is read when the next iteration has been queued, and when it says stop that one is dropped.

    Args: delay: iterations between sending and reading, by default 1 on an accelerator, else 0.
    """

    def __init__(self, device, delay=None):
        self.delay, self.sent = (device.type == "cuda") if delay is None else delay, deque()

    def exchange(self, state, *flags):
        """Send an iteration's flags, (,) each, and keep the state that they are of.

        Returns: the flags that are due, as a list, and their state; None while none are.
        """
        flags, event = torch.stack([flag.to(torch.long) for flag in flags]), None
        if flags.is_cuda:
            stream, event = torch.cuda.current_stream(flags.device), torch.cuda.Event()
            flags = flags.to("cpu", non_blocking=True)
            event.record(stream)
        self.sent.append((flags, event, state))
        if len(self.sent) <= self.delay:
            return None
        flags, event, state = self.sent.popleft()
        if event is not None:
            event.synchronize()
        return flags.tolist(), state


def _not_finite(iteration, sequences):
    return NonFiniteError(
        f"the fixed-point iterate became NaN or infinite at iteration {iteration} in sequence(s)"
        f" {sequences} of the batch"
    )


@torch.no_grad()
def solve_paper(f, y, rule, trace=None, delay=None):
    """The paper's solver (App. B.4): all tokens at once, damped, one stopping rule for the batch.

    Known limits (docs/fixed-point.md): the count depends on the whole batch and on later tokens.

    Args:
        f: maps y (b,l,d) → f(y) (b,l,d), or to that and its `token_residual` (b,l).
        y: the start. rule: see `Rule`. delay: see `_Flags`.
        trace: a list that receives, per iteration, (residual, lowest, stepsize, waited), all (b,).
    Returns:
        Solution, whose residual is that of the last iterate evaluated.
    Raises:
        NonFiniteError: a residual is NaN or infinite.
    """
    batch, flags, iters = y.shape[0], _Flags(y.device, delay), 0
    lowest = y.new_full((batch,), torch.inf)
    step = y.new_full((batch,), rule.stepsize)
    waited, num_iters = torch.zeros(2, batch, dtype=torch.long, device=y.device)
    while True:
        g = f(y)
        g, residual = g if isinstance(g, tuple) else (g, token_residual(y, g))
        residual = residual.amax(1)
        num_iters = num_iters + (lowest >= rule.tol)  # this one, for those not yet converged
        y = torch.lerp(y, g, step[:, None, None])
        improved = residual < lowest
        lowest = torch.minimum(lowest, residual)
        waited = torch.where(improved, 0, waited + 1)
        stale = waited >= rule.patience
        step = torch.where(stale, step * rule.stepsize_decay, step)
        waited = torch.where(stale, 0, waited)
        iters += 1
        if trace is not None:
            trace.append((residual, lowest, step, waited))
        left = torch.quantile(lowest, rule.quantile) >= rule.tol
        going = left & (step.max() >= rule.min_stepsize)
        state = iters, y, residual, lowest, num_iters
        due = flags.exchange(state, left, going, torch.isfinite(residual).all())
        if due is None:
            continue
        (left, going, finite), (iters_then, y_then, residual, lowest_then, num_iters_then) = due
        if not finite:
            raise _not_finite(iters_then, (~torch.isfinite(residual)).nonzero().flatten().tolist())
        if not going or iters_then >= rule.max_iters:
            break
    converged = lowest_then < rule.tol
    hit_max = ~converged if left else torch.zeros_like(converged)
    work, missed = torch.full_like(residual, iters_then), (~converged).to(residual.dtype)
    per_token = num_iters_then[:, None].expand(y.shape[:2])
    zero = torch.zeros_like(residual)
    stats = FixedPointStats(
        num_iters_then, converged, hit_max, residual, zero, work, missed, per_token
    )
    return Solution(y_then, stats)


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
    spare: int  # tokens whose evaluation takes as long as all else of an iteration

    def place(self, rows, position, valid, y_before, h):
        """The window of the tokens position (r,w), one after the other, of the sequences rows (r,).
        valid: (r,w), False beyond a sequence's end. y_before, h: of the token before the first."""

    def step(self, window, y):
        """f(y) on the window, (r,w,d), its `token_residual` (r,w), and what `advance` needs."""

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
        return _Rows(*(None if t is None else t.index_select(0, which) for t in self))

    def join(self, other):
        return _Rows(*(None if a is None else torch.cat([a, b]) for a, b in zip(self, other)))


class _Tokens(NamedTuple):
    """What is known of the tokens, of all sequences or of a window."""

    y: torch.Tensor  # (b,l,d) the iterate
    f_y: torch.Tensor  # (b,l,d) f there
    residual: torch.Tensor  # (b,l) of both
    iters: torch.Tensor  # (b,l) evaluations of f before the token was frozen


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


def _turn(widths, spare):
    """Which sequences are iterated next, on windows of one span: the narrowest and, as long as the
    tokens that this adds to the narrower ones' windows take less time than iterations of their own,
    wider ones. What a sequence comes to does not depend on it.

    Args: widths: of the sequences, [r].
    Returns: their places in `widths`, and the widest width among them.
    """
    widest = count = 0
    for width in sorted(set(widths)):
        if count * (width - widest) > spare:
            break
        widest, count = width, sum(w <= width for w in widths)
    return [i for i, w in enumerate(widths) if w <= widest], widest


@torch.no_grad()
def solve_causal(f, rule, width, adapt=False, delay=None):
    """Freeze the converged prefix of each sequence and iterate `width` tokens ahead of it.

    Token t has converged when its residual and those of all tokens before it are below tol. It is
    then frozen at the iterate of which that is the residual. Whether and where it stops, and the
    damping on the way, depend on tokens ≤ t of its own sequence only. A token that has had
    ℓmax iterations is frozen as it is, and counted in `unconverged`.

    Args:
        f: an Iteration. rule: see `Rule`. width: of the window; l is `parallel`, 1 `sequential`.
        adapt: the width follows the work (`auto`). delay: see `_Flags`.
    Returns:
        Solution. Its residual is that of y: f_y is f at y itself.
    Raises:
        NonFiniteError: the iterate became NaN or infinite.
    """
    b, length, d = f.shape
    if length == 1 and b <= f.spare:
        return _solve_token(f, rule, delay)
    like, ints = {"device": f.device, "dtype": f.dtype}, {"device": f.device, "dtype": torch.long}
    size = b * length + 1  # one more: what lies beyond a sequence's end is written there
    y, f_y = torch.zeros(2, size, d, **like)
    tokens = _Tokens(y, f_y, torch.zeros(size, **like), torch.zeros(size, **ints))
    zero, inf = torch.zeros(b, **ints), torch.full((b,), torch.inf, **like)
    rows = _Rows(
        index=torch.arange(b, **ints), base=zero, frozen=zero, width=zero + width,
        step=torch.full_like(inf, rule.stepsize), lowest=inf, waited=zero, iters=zero, count=zero,
        y_before=f.y_before, h=f.h_before,
    )  # fmt: skip
    work, num_iters, h_end = torch.zeros_like(inf), zero.clone(), None
    while len(rows.index):
        bases, widths = torch.stack([rows.base, rows.width]).tolist()
        turn, widest = _turn(widths, f.spare)
        waiting = None
        if len(turn) < len(widths):
            rest = sorted(set(range(len(widths))) - set(turn))
            waiting, rows = (rows.take(torch.tensor(part, **ints)) for part in (rest, turn))
        # A few tokens to spare, so that the window need not be placed anew at every iteration.
        span = widest + max(widest // 4, min(f.spare // len(turn), 4 * widest))
        span = min(span, length - min(bases[i] for i in turn))
        position = rows.base[:, None] + torch.arange(span, **ints)
        valid = position < length
        at = torch.where(valid, rows.index[:, None] * length + position, size - 1).flatten()
        window = f.place(rows.index, position.clamp_max(length - 1), valid, rows.y_before, rows.h)
        here = _Tokens(*(t.index_select(0, at).unflatten(0, valid.shape) for t in tokens))
        flags = _Flags(f.device, delay)
        rows, here, carry, ran, had = _iterate(f, window, rows, here, valid, rule, adapt, flags)
        for t, t_here in zip(tokens, here):
            t.index_copy_(0, at, t_here.flatten(0, 1))
        work.index_add_(0, rows.index, ran * valid.sum(1).to(work.dtype))
        num_iters.index_add_(0, rows.index, had)
        end = rows.base + rows.frozen
        going = (end < length).nonzero().squeeze(1)
        if len(going) or f.wants_state:
            h = f.advance(window, carry, rows.frozen)
            h_end = h.new_zeros(b, *h.shape[1:]) if h_end is None else h_end
            h_end[rows.index] = h
            last = tokens.y.index_select(0, (rows.index * length + end - 1).clamp_min(0))
            y_before = torch.where((end > 0).unsqueeze(-1), last, rows.y_before)
            rows = rows._replace(y_before=y_before, h=h)
        rows = rows._replace(base=end, frozen=torch.zeros_like(end)).take(going)
        rows = rows if waiting is None else waiting.join(rows)
    y, f_y, residual, iters = (t[:-1].unflatten(0, (b, length)) for t in tokens)
    return Solution(y, _stats(residual, rule, num_iters, work / length, iters), f_y, h_end)


def _solve_token(f, rule, delay):
    """`solve_causal` of one token a sequence, as in decoding: nothing to place, and sequences so
    few that those which have finished may stay."""
    b, _, d = f.shape
    y = torch.zeros(b, 1, d, device=f.device, dtype=f.dtype)
    counts = torch.ones(b, device=f.device, dtype=torch.long)
    position = torch.zeros_like(counts).unsqueeze(1)
    rows = torch.arange(b, device=f.device)
    window = f.place(rows, position, position == 0, f.y_before, f.h_before)
    step, lowest = y.new_full((b,), rule.stepsize), y.new_full((b,), torch.inf)
    iters = waited = torch.zeros_like(counts)
    frozen, ran, flags = iters > 0, 0, _Flags(f.device, delay)
    while True:
        g, residual, carry = f.step(window, y)
        ran += 1
        found = residual.squeeze(1)
        bad = ~(frozen | (found < torch.inf))
        iters = iters + ~frozen
        done = (found < rule.tol) | (iters >= rule.max_iters) | (step < rule.min_stepsize)
        frozen = frozen | done
        state = y, g, residual, carry, iters, ran, bad
        y = torch.lerp(y, g, (step * ~frozen)[:, None, None])
        waited = torch.where(found < lowest, 0, waited + 1)
        stale = waited >= rule.patience
        lowest, waited = torch.minimum(lowest, found), waited.masked_fill(stale, 0)
        step = torch.where(stale, step * rule.stepsize_decay, step)
        due = flags.exchange(state, frozen.all(), bad.any())
        if due is None:
            continue
        (finished, any_bad), state = due
        if any_bad:
            raise _not_finite(state[5], state[6].nonzero().flatten().tolist())
        if finished:
            break
    y, g, residual, carry, iters, ran, _ = state
    stats = _stats(residual, rule, iters, torch.full_like(lowest, ran), iters.unsqueeze(1))
    h = f.advance(window, carry, counts) if f.wants_state else None
    return Solution(y, stats, g, h)


def _iterate(f, window, rows, tokens, valid, rule, adapt, flags):
    """Iterate the tokens of a window until no sequence has any left, or half of them are frozen, or
    one's width reaches beyond it.

    Args: rows, tokens: of the window. valid: (r,w), False beyond a sequence's end.
    Returns:
        rows and tokens as they are then, what `advance` needs, how many iterations ran, and (r,) in
        how many of them each sequence had tokens to iterate.
    """
    (r, span), remaining = valid.shape, f.shape[1] - rows.base
    offset, ends = torch.arange(span, device=valid.device), valid.sum(1)
    y, _, _, iters = tokens
    ran, had = 0, torch.zeros_like(ends)
    while True:
        g, residual, carry = f.step(window, y)
        ran += 1
        first, end = rows.frozen, torch.minimum(rows.frozen + rows.width, ends)
        before = offset < first[:, None]
        live = (offset < end[:, None]) & ~before
        iters = iters + live
        had = had + (first < end)
        given_up = (rows.step < rule.min_stepsize)[:, None] & (offset == first[:, None])
        done = (residual < rule.tol) | (iters >= rule.max_iters) | given_up
        frozen = torch.where(live, done, before).cumprod(1, dtype=torch.long).sum(1)
        moves = live & (offset >= frozen[:, None])
        y = torch.lerp(y, g, (moves * rows.step[:, None]).unsqueeze(-1))
        rows = _after_iteration(rows, residual, frozen, rule, adapt)
        bad = live & ~(residual < torch.inf)
        short = (remaining > span) & (frozen + rows.width > span)
        state = rows, _Tokens(y, g, residual, iters), carry, ran, had
        left = (frozen < remaining).any()
        due = flags.exchange((state, bad), left, short.any(), frozen.sum(), bad.any())
        if due is None:
            continue
        (left, any_short, count, any_bad), (state, bad) = due
        if any_bad:
            raise _not_finite(state[3], rows.index[bad.any(1)].tolist())
        if not left or any_short or 2 * count >= r * span:
            return state


def _stats(residual, rule, num_iters, work, token_iters):
    """The FixedPointStats of a solution whose tokens have the residuals (b,l)."""
    missed = residual >= rule.tol
    any_missed = missed.any(1)
    return FixedPointStats(
        num_iters, ~any_missed, any_missed, residual.amax(1), torch.zeros_like(work), work,
        missed.to(work.dtype).mean(1), token_iters,
    )  # fmt: skip


def direct_stats(y, f_y, rule):
    """The FixedPointStats of a y that took no iterations. y, f_y: (b,l,d)."""
    residual = token_residual(y, f_y)
    once = torch.ones_like(residual, dtype=torch.long)
    return _stats(residual, rule, once[:, 0], torch.ones_like(residual[:, 0]), once)


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
