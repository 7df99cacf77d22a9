"""One token's own equation, solved where the paper iterates (docs/fixed-point.md).

Given all that comes before token t, Q_t, B_t, C_t and Δ_t are known, and with M = I − Q_t

    y = norm(gate ⊙ (history + gain ⊙ (Q x + M y))),

history what the recurrence's state gives, gain what the token's own x̃ is multiplied by. Where M has
rank r, M = Uᵀ T U, y = norm(c + Σ_j m_j s_j) with s = U y: r equations in r unknowns,

    s = φ(s) = (α + Β s) / √(γ₀ + 2 γ₁·s + sᵀ Γ₂ s) + δ.

Of several solutions it is the one that damped Picard from s = 0 runs into, as the paper's iteration
does, polished by Newton. For other mixers y itself is iterated, Q_t held fixed.

Shape suffixes: b batch, l length, d channels (d_inner), r rank; n tokens, whatever their shape.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from .certified_root import (
    DECIDE_AFTER,
    MOST_GAIN,
    ROUNDING,
    SOLVED,
    find_certified_pairs,
    find_certified_roots,
)
from .certified_root import MAX_DIRECT_STEPS as MAX_DIRECT_STEPS
from .scan import faster
from .solver import BISECTED, FAILED, GRAD_LIMITED, Damping, Rule

# The search for s, by the paper's damping.
MOST_PICARD, MOST_NEWTON = 300, 10
LEAST_INVERSE, BISECTIONS = 1e-18, 60  # of the norm, where Picard has found nothing
# Newton is tried where Picard's residual shrinks by this or better, and what is left of the way is
# at most so much of the terms' size: nearer than another solution could be.
SLOWEST, NEAR = 0.99, 0.05


class Norm(NamedTuple):
    """The norm that ends an iteration."""

    kind: str  # "layer", "rms", or "none"
    weight: torch.Tensor | None = None  # (d,)
    bias: torch.Tensor | None = None  # (d,), of "layer" alone
    eps: float = 0.0

    def centred(self, v: torch.Tensor) -> torch.Tensor:
        return v - v.mean(-1, keepdim=True) if self.kind == "layer" else v

    def __call__(self, v: torch.Tensor) -> torch.Tensor:
        """v: (…,d) → (…,d)"""
        if self.kind == "none":
            return v
        weight = self.weight.to(v.dtype)  # type: ignore[union-attr]
        if self.kind == "layer":
            return F.layer_norm(v, weight.shape, weight, self.bias.to(v.dtype), self.eps)  # type: ignore[union-attr]
        return v * torch.rsqrt(v.square().mean(-1, keepdim=True) + self.eps) * weight


class Token(NamedTuple):
    """What the equations of tokens (b,l) are made of, besides their mixers."""

    x: torch.Tensor  # (b,l,d) what is mixed
    history: torch.Tensor  # (b,l,d)
    gain: torch.Tensor  # (b,l,d)
    gate: torch.Tensor | None  # (b,l,d), None: 1
    norm: Norm

    def value(self, mixed: torch.Tensor) -> torch.Tensor:
        """y, of x̃ = Q x + M y (b,l,d)."""
        v = self.history + self.gain * mixed
        return self.norm(v if self.gate is None else v * self.gate)


class Own(NamedTuple):
    """What a token's own x̃ becomes: norm(silu(z) ⊙ (history + (dt (B·C) + D) ⊙ x̃))."""

    dt: torch.Tensor  # (b,l,d), or (b,l,h) of heads
    bc: torch.Tensor | None  # (b,l,g) B·C of every group; None: 1
    D: torch.Tensor | None  # (d,), None: 0
    z: torch.Tensor | None  # (b,l,d), None: no gate
    norm: Norm

    def gain(self, d: int) -> torch.Tensor:
        """dt (B·C), what a recurrence's output has of x̃: (b,l,d)."""
        gain, heads, bc = self.dt, self.dt.shape[-1], self.bc
        if bc is not None:
            groups = bc.shape[-1]
            of_heads = bc if groups == 1 else bc.repeat_interleave(heads // groups, -1)
            gain = gain * of_heads
        return gain if heads == d else gain.repeat_interleave(d // heads, -1)

    def token(self, x: torch.Tensor, history: torch.Tensor, gain: torch.Tensor) -> Token:
        """The Token. gain: `gain`."""
        gate = None if self.z is None else F.silu(self.z.to(x.dtype))
        whole = gain if self.D is None else gain + self.D.to(gain.dtype)
        return Token(x, history, whole, gate, self.norm)


class LowRank(NamedTuple):
    """M = I − Q = Uᵀ T U of every token."""

    U: torch.Tensor  # (…,r,d)
    T: torch.Tensor  # (…,r,r)

    def project(self, v: torch.Tensor) -> torch.Tensor:
        """U v, (…,r). v: (…,d)"""
        return (self.U @ v.unsqueeze(-1)).squeeze(-1)

    def combine(self, s: torch.Tensor) -> torch.Tensor:
        """Uᵀ T s, (…,d). s: (…,r)"""
        return ((self.T @ s.unsqueeze(-1)).transpose(-1, -2) @ self.U).squeeze(-2)


class AtPoint(NamedTuple):
    """What φ is made of at some s."""

    top: torch.Tensor  # (n,r) α + Β s
    half_slope: torch.Tensor  # (n,r) half the derivative of the square under the root
    inverse: torch.Tensor  # (n,1) of the root


class Coefficients(NamedTuple):
    """φ of n tokens."""

    alpha: torch.Tensor  # (n,r)
    beta: torch.Tensor  # (n,r,r)
    delta: torch.Tensor  # (n,r)
    gamma0: torch.Tensor  # (n,)
    gamma1: torch.Tensor  # (n,r)
    gamma2: torch.Tensor  # (n,r,r)
    floor: float  # of the square

    def take(self, which: torch.Tensor) -> "Coefficients":
        return Coefficients(*(t[which] for t in self[:-1]), self.floor)  # type: ignore[call-arg]

    def detached(self) -> "Coefficients":
        return Coefficients(*(t.detach() for t in self[:-1]), self.floor)  # type: ignore[call-arg]

    def phi(self, s: torch.Tensor) -> tuple[torch.Tensor, AtPoint]:
        """φ(s) (n,r), and what it, its derivative and its rounding are made of. s: (n,r)"""
        top = self.alpha + _times(self.beta, s)
        half_slope = self.gamma1 + _times(self.gamma2, s)
        square = self.gamma0 + ((self.gamma1 + half_slope) * s).sum(-1)
        inverse = square.clamp_min(self.floor).rsqrt().unsqueeze(-1)
        return top * inverse + self.delta, AtPoint(top, half_slope, inverse)

    def jacobian(self, there: AtPoint) -> torch.Tensor:
        """φ′ (n,r,r). there: the second of `phi`."""
        top, half_slope, inverse = there
        inverse = inverse.unsqueeze(-1)
        return self.beta * inverse - top.unsqueeze(-1) * half_slope.unsqueeze(-2) * inverse**3

    def size(self, s: torch.Tensor, there: AtPoint) -> torch.Tensor:
        """Of the terms of φ(s) − s, (n,)."""
        size = (self.alpha.abs() + _times(self.beta.abs(), s.abs())) * there.inverse
        return (size + self.delta.abs() + s.abs()).amax(-1)

    def rounding(self, s: torch.Tensor, there: AtPoint) -> torch.Tensor:
        """One machine epsilon of the terms of φ(s) − s, (n,)."""
        return self.size(s, there) * torch.finfo(s.dtype).eps


def _times(matrix, vector):
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


class Guess(NamedTuple):
    """Where a search is."""

    s: torch.Tensor  # (n,r)
    value: torch.Tensor  # (n,r) φ(s)
    there: AtPoint

    def residual(self) -> torch.Tensor:
        """The largest of |φ(s) − s|, (n,)."""
        return (self.value - self.s).abs().amax(-1)

    def replaced(self, other: "Guess", which: torch.Tensor) -> "Guess":
        """The other guess where `which` (n,) says so."""
        which = which.unsqueeze(-1)
        there = (torch.where(which, new, old) for new, old in zip(other.there, self.there))
        return Guess(
            torch.where(which, other.s, self.s),
            torch.where(which, other.value, self.value),
            AtPoint(*there),
        )


def _newton_step(coefficients, guess):
    """The Guess after a step of Newton's method; the same where there is none."""
    s, value, there = guess
    eye = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
    rest = eye - coefficients.jacobian(there)
    step = torch.linalg.solve_ex(rest, (value - s).unsqueeze(-1))[0].squeeze(-1)
    moved = s + torch.where(torch.isfinite(step), step, 0)
    return Guess(moved, *coefficients.phi(moved))


def _newton(coefficients, s, residual, reach):
    """Newton from where Picard is, as long as every step at least halves the residual.

    Args: s: (n,r). residual: (n,) there. reach: (n,) how far from s the root may lie.
    Returns: the root (n,r), and whether (n,) it is one that Picard would have come to.
    """
    start = s
    best, sound = residual, torch.ones_like(residual, dtype=torch.bool)
    guess = Guess(s, *coefficients.phi(s))
    for _ in range(MOST_NEWTON):
        next_guess = _newton_step(coefficients, guess)
        size = next_guess.residual()
        better = sound & (size <= 0.5 * best)
        guess = guess.replaced(next_guess, better)
        best = torch.where(better, size, best)
        sound = better
        if not better.any():
            break
    s, _, there = guess
    near = (s - start).abs().amax(-1) <= reach
    solved = best <= SOLVED * coefficients.rounding(s, there)
    return s, solved & near & _attracts(coefficients.jacobian(there))


def _attracts(slope):
    """Whether small steps of Picard stay where φ′ is `slope` (n,r,r): no eigenvalue is above 1."""
    if slope.shape[-1] == 1:
        return slope[:, 0, 0] < 1
    slope = torch.where(torch.isfinite(slope), slope, 2.0)
    return torch.linalg.eigvals(slope).real.amax(-1) < 1


def _last_resort(coefficients):
    """A root where Picard has not converged, found by bisection: one always exists.

    With g = 1/√(γ₀ + 2γ₁·s + sᵀΓ₂s) the equation is linear, s(g) = (I − gΒ)⁻¹ (gα + δ), and one
    number is unknown: g² (γ₀ + 2γ₁·s(g) + s(g)ᵀΓ₂s(g)) = 1. The left is 0 at g = 0, at least 1 at
    the largest g that the norm's eps allows, and +∞ on both sides of a pole: it crosses 1 between.

    Returns: s (n,r), and whether (n,) it solves the equation.
    """
    alpha, beta, delta, gamma0, *_, floor = coefficients
    eye = torch.eye(alpha.shape[-1], dtype=alpha.dtype, device=alpha.device)

    def at(g):
        rest = eye - g[:, None, None] * beta
        right = g[:, None] * alpha + delta
        s = torch.linalg.solve_ex(rest, right.unsqueeze(-1))[0].squeeze(-1)
        _, there = coefficients.phi(s)
        return s, ~(there.inverse.squeeze(-1) >= g)  # the left side is above 1

    low = torch.full_like(gamma0, LEAST_INVERSE)
    high = torch.full_like(gamma0, floor**-0.5)
    for _ in range(BISECTIONS):
        middle = (low * high).sqrt()
        _, above = at(middle)
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    s = at(low)[0]
    guess = Guess(s, *coefficients.phi(s))
    for _ in range(MOST_NEWTON):
        next_guess = _newton_step(coefficients, guess)
        guess = guess.replaced(next_guess, next_guess.residual() < guess.residual())
    return guess.s, guess.residual() <= SOLVED * coefficients.rounding(guess.s, guess.there)


@torch.no_grad()
def find_root(coefficients: Coefficients) -> tuple[torch.Tensor, torch.Tensor]:
    """The solution of s = φ(s) that damped Picard from zero runs into.

    Args: coefficients: of n tokens.
    Returns: s (n,r) and the outcome (n,) uint8: FAILED, BISECTED or 0.
    """
    alpha = coefficients.alpha
    compiled = faster("roots", "find_roots", alpha, *coefficients)
    return _find_root_plain(coefficients) if compiled is None else compiled


def _find_root_plain(coefficients):
    """`find_root` in plain PyTorch, for all tokens at once."""
    if coefficients.alpha.shape[1] != 1:
        return _find_root_by_picard(coefficients, decides=True)
    roots, is_proven = find_certified_roots(coefficients)
    outcome = torch.zeros(len(roots), dtype=torch.uint8, device=roots.device)
    rest = (~is_proven).nonzero().squeeze(1)
    if len(rest):
        roots[rest], outcome[rest] = _find_root_by_picard(coefficients.take(rest))
    return roots, outcome


def _find_root_by_picard(coefficients, decides=False):
    """Find the roots by damped Picard from zero, and by bisection if it does not converge.

    Args:
        coefficients: Of n tokens.
        decides: Whether, for two reflections, `find_certified_pairs` decides after a few steps.

    Returns:
        As `find_root`.
    """
    alpha = coefficients.alpha
    roots = torch.zeros_like(alpha)
    outcome = alpha.new_full((len(alpha),), FAILED, dtype=torch.uint8)
    searched = torch.arange(len(alpha), device=alpha.device)  # the tokens still searched for
    s = torch.zeros_like(alpha)
    damping = Damping(Rule(), alpha[:, 0])
    residual_before = torch.full_like(alpha[:, 0], torch.inf)
    for iteration in range(MOST_PICARD):
        # 1. Where Picard is, and whether that is a root.
        value, there = coefficients.phi(s)
        psi = value - s
        residual = psi.abs().amax(-1)
        done = (residual <= ROUNDING * coefficients.rounding(s, there)) & torch.isfinite(residual)
        # 2. Newton goes the rest of a way that is short.
        found, by_newton = _polished(coefficients, s, there, residual, residual_before, ~done)
        done = done | by_newton
        outcomes = torch.zeros_like(done, dtype=torch.uint8)
        if decides and alpha.shape[1] == 2 and iteration == DECIDE_AFTER:
            found, done, outcomes = _decided(coefficients, found, done)
        # 3. What is found is taken out; of what is NaN or infinite there is no solution.
        lost = ~torch.isfinite(residual)
        roots[searched[done]] = found[done]
        outcome[searched[done]] = outcomes[done]
        roots[searched[lost]] = torch.nan
        # 4. The others take a damped step.
        damping.update(residual)
        s = s + damping.step.unsqueeze(-1) * psi
        residual_before = residual
        left = (~(done | lost)).nonzero().squeeze(1)
        if len(left) == len(searched):
            continue
        if not len(left):
            return roots, outcome
        coefficients, searched = coefficients.take(left), searched[left]
        s, residual_before = s[left], residual_before[left]
        damping.take(left)
    roots[searched], found = _last_resort(coefficients)
    outcome[searched[found]] = BISECTED
    return roots, outcome


def _decided(coefficients, found, done):
    """Add the roots that `find_certified_pairs` proves.

    Returns:
        The roots (n,2), which of them are done (n,), and their outcomes (n,): BISECTED where Picard
        converges to no root.
    """
    pairs, attracts, is_proven = find_certified_pairs(coefficients)
    is_new = is_proven & ~done
    outcomes = torch.where(is_new & ~attracts, BISECTED, 0).to(torch.uint8)
    return torch.where(is_new.unsqueeze(-1), pairs, found), done | is_new, outcomes


def _polished(coefficients, s, there, residual, residual_before, unfinished):
    """s (n,r) with Newton's roots where Picard has come near, and which (n,) those are."""
    shrinks = residual / residual_before  # 0 the first time: there it says nothing
    way = residual / (1 - shrinks)
    near = way <= NEAR * coefficients.size(s, there)
    trying = (unfinished & (shrinks > 0) & (shrinks < SLOWEST) & near).nonzero().squeeze(1)
    by_newton = torch.zeros_like(unfinished)
    if not len(trying):
        return s, by_newton
    reach = 2 * way[trying]
    root, good = _newton(coefficients.take(trying), s[trying], residual[trying], reach)
    found = s.index_copy(0, trying, torch.where(good.unsqueeze(-1), root, s[trying]))
    return found, by_newton.index_copy(0, trying, good)


class _Implicit(torch.autograd.Function):
    """s* with the gradient of s = φ(s): that of φ(s*) by (I − φ′)⁻ᵀ, at most MOST_GAIN times as
    long; where s* is no solution, that of φ(s*) alone. rest: I − φ′. outcome: of the search."""

    @staticmethod
    def forward(ctx, value, s, rest, outcome):
        ctx.save_for_backward(rest, outcome)
        return s.clone()

    @staticmethod
    def backward(ctx, grad):
        rest, outcome = ctx.saved_tensors
        solved = (outcome & FAILED) == 0
        with torch.autocast(grad.device.type, enabled=False):
            through = torch.linalg.solve_ex(rest.transpose(-1, -2), grad.unsqueeze(-1))[0]
            through = through.squeeze(-1)
            size, own = (torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t in (through, grad))
            limited = through * (MOST_GAIN * own / size.clamp_min(1e-30)).clamp_max(1.0)
            sound = solved.unsqueeze(-1) & torch.isfinite(limited)
            return torch.where(sound, limited, grad), None, None, None


def solve_low_rank(
    token: Token, low_rank: LowRank
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The token's equation, M of low rank, with the gradient of its solution.

    Args: token: Token. low_rank: LowRank of the same tokens.
    Returns: y (b,l,d), x̃ = Q x + M y (b,l,d), and the outcome (b,l) of the search.
    """
    U, T = low_rank
    norm, gate = token.norm, token.gate
    reflected = token.x - low_rank.combine(low_rank.project(token.x))  # Q x
    c = token.history + token.gain * reflected
    m = (T.transpose(-1, -2) @ U) * token.gain.unsqueeze(-2)  # (b,l,r,d), a row for every s_j
    if gate is not None:
        c, m = c * gate, m * gate.unsqueeze(-2)
    if norm.kind == "none":
        s, outcome = _linear(c, m, U)
    else:
        s, outcome = _through_the_norm(c, m, U, norm)
    y = norm(c + (s.unsqueeze(-2) @ m).squeeze(-2))
    return y, reflected + low_rank.combine(s), outcome


def _linear(c, m, U):
    """s = U (c + Σ_j m_j s_j): Sherman, Morrison & Woodbury."""
    alpha, beta = _times(U, c), U @ m.transpose(-1, -2)
    rest = _rest_of(beta.detach())
    s = torch.linalg.solve_ex(rest, alpha.detach().unsqueeze(-1))[0].squeeze(-1)
    outcome = torch.where(torch.isfinite(s).all(-1), 0, FAILED).to(torch.uint8)
    return _attached(alpha + _times(beta, s), s, rest, outcome)


def _through_the_norm(c, m, U, norm):
    """s = U norm(c + Σ_j m_j s_j)."""
    d, weight = c.shape[-1], norm.weight.to(c.dtype)
    c, m = norm.centred(c).unsqueeze(-1), norm.centred(m)
    weighted = U * weight
    gamma1, gamma2 = (m @ c).squeeze(-1) / d, m @ m.transpose(-1, -2) / d
    gamma0 = c.square().mean((-2, -1)) + norm.eps
    delta = torch.zeros_like(gamma1) if norm.bias is None else U @ norm.bias.to(c.dtype)
    alpha, beta = (weighted @ c).squeeze(-1), weighted @ m.transpose(-1, -2)
    shape, r = gamma1.shape[:-1], gamma1.shape[-1]
    coefficients = Coefficients(
        alpha.reshape(-1, r),
        beta.reshape(-1, r, r),
        delta.reshape(-1, r),
        gamma0.flatten(),
        gamma1.reshape(-1, r),
        gamma2.reshape(-1, r, r),
        norm.eps,
    )
    s, outcome = find_root(coefficients.detached())
    value, there = coefficients.phi(s)
    with torch.no_grad():
        rest = _rest_of(coefficients.jacobian(there))
    s, outcome = _attached(value, s, rest, outcome)
    return s.unflatten(0, shape), outcome.unflatten(0, shape)


def _rest_of(slope):
    """I − φ′. slope: (…,r,r) φ′."""
    return torch.eye(slope.shape[-1], dtype=slope.dtype, device=slope.device) - slope


def _attached(value, s, rest, outcome):
    """Return s (…,r) with the gradient of s = φ(s), and the outcome (…,) with GRAD_LIMITED in it.
    value: φ(s), attached. rest: I − φ′."""
    limited = torch.linalg.matrix_norm(torch.linalg.inv_ex(rest)[0]) <= MOST_GAIN
    limited = ~limited & (outcome & FAILED == 0)  # NaN is limited, too
    if value.requires_grad:
        s = _Implicit.apply(value, s, rest, outcome)
    return s, torch.where(limited, outcome | GRAD_LIMITED, outcome)
