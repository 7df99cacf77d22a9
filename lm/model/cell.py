"""The exact solution of a token's own equation (docs/fixed-point.md).

Given all tokens before t, Q_t, B_t, C_t and Δ_t are known. With M = I − Q_t the equation of y is

    y = norm(gate ⊙ (history + gain ⊙ (Q x + M y))),

where history comes from the recurrence's state and gain multiplies the token's own x̃ = Q x + M y.
If M has rank r, M = Uᵀ T U and y = norm(c + Σ_j m_j s_j) with s = U y, c = gate ⊙ (history + gain ⊙
Q x) and m_j = gate ⊙ gain ⊙ (Tᵀ U)_j. These are r equations in r unknowns,

    s = φ(s) = (α + Β s) / √(γ₀ + 2 γ₁·s + sᵀ Γ₂ s) + δ.

`_solve_normalized` computes α, Β, γ₀, γ₁, Γ₂ and δ. There may be several solutions. The layer uses
the solution that the paper's damped fixed-point iteration from s = 0 ("Picard") reaches. With one
unknown, Newton's method finds a root first, and Picard runs only if no proof shows that the root is
Picard's. With two unknowns, a search over all roots follows Picard's first steps. With more, Picard
runs and Newton steps shorten it. For mixers of full rank, full_rank.py iterates y itself with Q_t
held fixed.

Shape suffixes: b batch, l length, d channels (d_inner), r rank; n tokens, all batch dimensions in
one.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from .certified_root import (
    DECIDE_AFTER,
    MAX_GAIN,
    ROUNDING,
    SOLVED,
    find_certified_pairs,
    find_certified_roots,
)
from .scan import try_kernel
from .solver import BISECTED, FAILED, GRAD_LIMITED, Damping, Rule

MAX_PICARD_STEPS, MAX_NEWTON_STEPS = 300, 10  # of the search for s
# If Picard fails: steps of the bisection on 1/√(…) in φ, and its lower end.
BISECTIONS, MIN_INVERSE_NORM = 60, 1e-18
# Newton is tried if an iteration multiplies Picard's residual by less than MAX_PICARD_RATIO, and if
# the distance to the root, relative to the size of φ's terms, is at most MAX_NEWTON_DISTANCE:
# another solution is rarely that near.
MAX_PICARD_RATIO, MAX_NEWTON_DISTANCE = 0.99, 0.05


class Norm(NamedTuple):
    """The norm that ends an iteration."""

    kind: str  # "layer", "rms", or "none"
    weight: torch.Tensor | None = None  # (d,)
    bias: torch.Tensor | None = None  # (d,), for "layer" only
    eps: float = 0.0

    def center(self, v: torch.Tensor) -> torch.Tensor:
        """Subtract the mean over channels if this is a LayerNorm. v: (…,d)."""
        return v - v.mean(-1, keepdim=True) if self.kind == "layer" else v

    def __call__(self, v: torch.Tensor) -> torch.Tensor:
        """Normalize v (…,d)."""
        if self.kind == "none":
            return v
        weight = self.weight.to(v.dtype)  # type: ignore[union-attr]
        if self.kind == "layer":
            return F.layer_norm(v, weight.shape, weight, self.bias.to(v.dtype), self.eps)  # type: ignore[union-attr]
        return v * torch.rsqrt(v.square().mean(-1, keepdim=True) + self.eps) * weight


class EquationTerms(NamedTuple):
    """Terms of the equations of tokens (b,l), without their mixers."""

    x: torch.Tensor  # (b,l,d) input that the mixer mixes with y
    history: torch.Tensor  # (b,l,d) output of the recurrence without the token's own input
    gain: torch.Tensor  # (b,l,d) factor on the token's own mixed input
    gate: torch.Tensor | None  # (b,l,d); None: 1
    norm: Norm

    def value(self, mixed: torch.Tensor) -> torch.Tensor:
        """Return y for the mixed input x̃ = Q x + M y, both (b,l,d)."""
        v = self.history + self.gain * mixed
        return self.norm(v if self.gate is None else v * self.gate)


class TokenEquation(NamedTuple):
    """Terms of y = norm(silu(z) ⊙ (history + (dt (B·C) + D) ⊙ x̃)), except history and x̃."""

    dt: torch.Tensor  # (b,l,d), or (b,l,·) per head; FP-RNN: 1 − λ
    bc: torch.Tensor | None  # (b,l,·) B·C of every group of heads; None: 1
    D: torch.Tensor | None  # (d,) skip weights; None: 0
    z: torch.Tensor | None  # (b,l,d) gate; None: no gate
    norm: Norm

    def recurrence_gain(self, d: int) -> torch.Tensor:
        """Return dt (B·C) (b,l,d), the factor on x̃ in the recurrence's output."""
        gain, heads, bc = self.dt, self.dt.shape[-1], self.bc
        if bc is not None:
            groups = bc.shape[-1]
            gain = gain * (bc if groups == 1 else bc.repeat_interleave(heads // groups, -1))
        return gain if heads == d else gain.repeat_interleave(d // heads, -1)

    def add_history(
        self, x: torch.Tensor, history: torch.Tensor, gain: torch.Tensor
    ) -> EquationTerms:
        """Return all terms of the equations.

        Args:
            x: Input that the mixer mixes with y, (b,l,d).
            history: Output of the recurrence without the token's own input, (b,l,d).
            gain: Result of `recurrence_gain`; the terms' own gain adds D to it.
        """
        gate = None if self.z is None else F.silu(self.z.to(x.dtype))
        total_gain = gain if self.D is None else gain + self.D.to(gain.dtype)
        return EquationTerms(x, history, total_gain, gate, self.norm)


class LowRank(NamedTuple):
    """M = I − Q = Uᵀ T U of every token."""

    U: torch.Tensor  # (…,r,d)
    T: torch.Tensor  # (…,r,r)

    def project(self, v: torch.Tensor) -> torch.Tensor:
        """Return s = U v (…,r) for v (…,d)."""
        return (self.U @ v.unsqueeze(-1)).squeeze(-1)

    def combine(self, s: torch.Tensor) -> torch.Tensor:
        """Return Uᵀ T s (…,d) for s (…,r)."""
        return ((self.T @ s.unsqueeze(-1)).transpose(-1, -2) @ self.U).squeeze(-2)


class PhiParts(NamedTuple):
    """Parts of φ at some s; the derivative and the rounding error of φ also need them."""

    numerator: torch.Tensor  # (n,r) α + Β s
    half_slope: torch.Tensor  # (n,r) γ₁ + Γ₂ s, half the derivative of the radicand
    inverse_root: torch.Tensor  # (n,1) 1/√(γ₀ + 2 γ₁·s + sᵀ Γ₂ s)


class Coefficients(NamedTuple):
    """Coefficients of φ for n tokens."""

    alpha: torch.Tensor  # (n,r)
    beta: torch.Tensor  # (n,r,r)
    delta: torch.Tensor  # (n,r)
    gamma0: torch.Tensor  # (n,)
    gamma1: torch.Tensor  # (n,r)
    gamma2: torch.Tensor  # (n,r,r)
    floor: float  # lower bound of the radicand γ₀ + 2 γ₁·s + sᵀ Γ₂ s

    def select(self, indices: torch.Tensor) -> "Coefficients":
        """Return the coefficients of the tokens with these indices."""
        return Coefficients(*(t[indices] for t in self[:-1]), self.floor)  # type: ignore[call-arg]

    def detach(self) -> "Coefficients":
        """Return the coefficients without gradients."""
        return Coefficients(*(t.detach() for t in self[:-1]), self.floor)  # type: ignore[call-arg]

    def phi(self, s: torch.Tensor) -> tuple[torch.Tensor, PhiParts]:
        """Return φ(s) (n,r) and its parts, for s (n,r)."""
        numerator = self.alpha + _times(self.beta, s)
        half_slope = self.gamma1 + _times(self.gamma2, s)
        radicand = self.gamma0 + ((self.gamma1 + half_slope) * s).sum(-1)
        inverse_root = radicand.clamp_min(self.floor).rsqrt().unsqueeze(-1)
        return numerator * inverse_root + self.delta, PhiParts(numerator, half_slope, inverse_root)

    def jacobian(self, parts: PhiParts) -> torch.Tensor:
        """Return φ′ (n,r,r)."""
        numerator, half_slope, inverse_root = parts
        inverse_root = inverse_root.unsqueeze(-1)
        outer = numerator.unsqueeze(-1) * half_slope.unsqueeze(-2)
        return self.beta * inverse_root - outer * inverse_root**3

    def size(self, s: torch.Tensor, parts: PhiParts) -> torch.Tensor:
        """Return the sum of the absolute values of the terms of φ(s) − s, (n,)."""
        size = (self.alpha.abs() + _times(self.beta.abs(), s.abs())) * parts.inverse_root
        return (size + self.delta.abs() + s.abs()).amax(-1)

    def rounding(self, s: torch.Tensor, parts: PhiParts) -> torch.Tensor:
        """Return the machine epsilon times `size`: a rounding error of φ(s) − s, (n,)."""
        return self.size(s, parts) * torch.finfo(s.dtype).eps


def _times(matrix, vector):
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


class Guess(NamedTuple):
    """A point s of the search, with φ there."""

    s: torch.Tensor  # (n,r)
    value: torch.Tensor  # (n,r) φ(s)
    parts: PhiParts

    def residual(self) -> torch.Tensor:
        """Return the largest entry of |φ(s) − s| of every token, (n,)."""
        return (self.value - self.s).abs().amax(-1)

    def replace(self, other: "Guess", is_replaced: torch.Tensor) -> "Guess":
        """Return the other guess where `is_replaced` (n,) is true, and this guess elsewhere."""
        is_replaced = is_replaced.unsqueeze(-1)
        pairs = zip(other.parts, self.parts)
        return Guess(
            torch.where(is_replaced, other.s, self.s),
            torch.where(is_replaced, other.value, self.value),
            PhiParts(*(torch.where(is_replaced, new, old) for new, old in pairs)),
        )


def _newton_step(coefficients, guess):
    """Return the Guess after one Newton step; s stays where the step is NaN or infinite."""
    s, value, parts = guess
    eye = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
    matrix = eye - coefficients.jacobian(parts)
    step = torch.linalg.solve_ex(matrix, (value - s).unsqueeze(-1))[0].squeeze(-1)
    next_s = s + torch.where(torch.isfinite(step), step, 0)
    return Guess(next_s, *coefficients.phi(next_s))


def _newton(coefficients, start, residual, max_distance):
    """Run Newton from an iterate of Picard, as long as every step at least halves the residual.

    Args:
        coefficients: Equations of n tokens.
        start: Iterate of Picard, (n,r).
        residual: Residual at `start`, (n,).
        max_distance: Largest distance of the root from `start`, (n,).

    Returns:
        The root (n,r), and whether (n,) Picard would have converged to it.
    """
    is_active = torch.ones_like(residual, dtype=torch.bool)
    guess = Guess(start, *coefficients.phi(start))
    for _ in range(MAX_NEWTON_STEPS):
        next_guess = _newton_step(coefficients, guess)
        next_residual = next_guess.residual()
        is_active = is_active & (next_residual <= 0.5 * residual)
        guess = guess.replace(next_guess, is_active)
        residual = torch.where(is_active, next_residual, residual)
        if not is_active.any():
            break
    s, _, parts = guess
    is_near = (s - start).abs().amax(-1) <= max_distance
    is_root = residual <= SOLVED * coefficients.rounding(s, parts)
    return s, is_root & is_near & _attracts(coefficients.jacobian(parts))


def _attracts(slope):
    """Return whether Picard with small steps converges to a root with φ′ = slope (n,r,r)."""
    if slope.shape[-1] == 1:
        return slope[:, 0, 0] < 1
    slope = torch.where(torch.isfinite(slope), slope, 2.0)  # eigvals raises an error at NaN
    return torch.linalg.eigvals(slope).real.amax(-1) < 1


def _bisect(coefficients):
    """Find a root by bisection, for equations whose Picard iteration does not converge.

    For a fixed g = 1/√(γ₀ + 2γ₁·s + sᵀΓ₂s) the equation is linear: s(g) = (I − gΒ)⁻¹ (gα + δ). The
    only unknown is g, in the equation g² (γ₀ + 2γ₁·s(g) + s(g)ᵀΓ₂s(g)) = 1. Its left side is 0 at
    g = 0, at least 1 at the largest g that the norm's eps allows, and +∞ on both sides of a pole.
    So it crosses 1.

    Returns:
        s (n,r), and whether (n,) it solves the equation.
    """
    alpha, beta, delta, gamma0, *_, floor = coefficients
    eye = torch.eye(alpha.shape[-1], dtype=alpha.dtype, device=alpha.device)

    def solve_linear(g):
        matrix = eye - g[:, None, None] * beta
        right = g[:, None] * alpha + delta
        s = torch.linalg.solve_ex(matrix, right.unsqueeze(-1))[0].squeeze(-1)
        _, parts = coefficients.phi(s)
        is_above = ~(parts.inverse_root.squeeze(-1) >= g)  # whether the left side is above 1
        return s, is_above

    low = torch.full_like(gamma0, MIN_INVERSE_NORM)
    high = torch.full_like(gamma0, floor**-0.5)
    for _ in range(BISECTIONS):
        middle = (low * high).sqrt()  # in logarithms: g may have any magnitude
        _, is_above = solve_linear(middle)
        low, high = torch.where(is_above, low, middle), torch.where(is_above, middle, high)
    s, _ = solve_linear(low)
    guess = Guess(s, *coefficients.phi(s))
    for _ in range(MAX_NEWTON_STEPS):
        next_guess = _newton_step(coefficients, guess)
        guess = guess.replace(next_guess, next_guess.residual() < guess.residual())
    is_root = guess.residual() <= SOLVED * coefficients.rounding(guess.s, guess.parts)
    return guess.s, is_root


@torch.no_grad()
def find_root(coefficients: Coefficients) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the solution of s = φ(s) that damped Picard from zero converges to.

    Args:
        coefficients: Equations of n tokens.

    Returns:
        s (n,r), and the status (n,) uint8: FAILED, BISECTED or 0.
    """
    result = try_kernel("roots", "find_roots", coefficients.alpha, *coefficients)
    return _find_root_plain(coefficients) if result is None else result


def _find_root_plain(coefficients):
    """Find the roots in plain PyTorch, for all tokens at once; see `find_root`."""
    if coefficients.alpha.shape[1] != 1:
        return _find_root_by_picard(coefficients, can_prove_pairs=True)
    roots, is_proven = find_certified_roots(coefficients)
    status = torch.zeros(len(roots), dtype=torch.uint8, device=roots.device)
    unproven = (~is_proven).nonzero().squeeze(1)
    if len(unproven):
        roots[unproven], status[unproven] = _find_root_by_picard(coefficients.select(unproven))
    return roots, status


def _find_root_by_picard(coefficients, can_prove_pairs=False):
    """Find the roots by damped Picard from zero, and by bisection if it does not converge.

    Args:
        coefficients: Equations of n tokens.
        can_prove_pairs: Whether to call `find_certified_pairs` after DECIDE_AFTER steps, for two
            unknowns.

    Returns:
        As `find_root`.
    """
    alpha = coefficients.alpha
    roots = torch.zeros_like(alpha)
    status = alpha.new_full((len(alpha),), FAILED, dtype=torch.uint8)
    unsolved = torch.arange(len(alpha), device=alpha.device)  # indices of tokens without a root
    s = torch.zeros_like(alpha)
    damping = Damping(Rule(), alpha[:, 0])
    previous_residual = torch.full_like(alpha[:, 0], torch.inf)
    for iteration in range(MAX_PICARD_STEPS):
        # 1. Evaluate φ: is s a root?
        value, parts = coefficients.phi(s)
        change = value - s
        residual = change.abs().amax(-1)
        is_root = residual <= ROUNDING * coefficients.rounding(s, parts)
        is_done = is_root & torch.isfinite(residual)
        # 2. Run Newton if the root is near.
        candidates, is_newton_root = _try_newton(
            coefficients, s, parts, residual, previous_residual, ~is_done
        )
        is_done = is_done | is_newton_root
        new_status = torch.zeros_like(is_done, dtype=torch.uint8)
        if can_prove_pairs and alpha.shape[1] == 2 and iteration == DECIDE_AFTER:
            candidates, is_done, new_status = _add_proven_pairs(coefficients, candidates, is_done)
        # 3. Store the roots. Equations with NaN or infinity have none, and stay FAILED.
        is_nonfinite = ~torch.isfinite(residual)
        roots[unsolved[is_done]] = candidates[is_done]
        status[unsolved[is_done]] = new_status[is_done]
        roots[unsolved[is_nonfinite]] = torch.nan
        # 4. Take a damped step with the other tokens.
        damping.update(residual)
        s = s + damping.stepsize.unsqueeze(-1) * change
        previous_residual = residual
        remaining = (~(is_done | is_nonfinite)).nonzero().squeeze(1)
        if len(remaining) == len(unsolved):
            continue
        if not len(remaining):
            return roots, status
        coefficients, unsolved = coefficients.select(remaining), unsolved[remaining]
        s, previous_residual = s[remaining], previous_residual[remaining]
        damping.select(remaining)
    # 5. Bisect the equations for which Picard has not converged.
    roots[unsolved], is_root = _bisect(coefficients)
    status[unsolved[is_root]] = BISECTED
    return roots, status


def _add_proven_pairs(coefficients, candidates, is_done):
    """Replace candidates (n,2) that are not done (n,) by the roots that a proof finds.

    Returns:
        The candidates (n,2), whether each is a root now (n,), and the status of the new roots (n,):
        BISECTED if Picard does not converge to it, otherwise 0.
    """
    pairs, attracts, is_proven = find_certified_pairs(coefficients)
    is_new = is_proven & ~is_done
    status = torch.where(is_new & ~attracts, BISECTED, 0).to(torch.uint8)
    return torch.where(is_new.unsqueeze(-1), pairs, candidates), is_done | is_new, status


def _try_newton(coefficients, s, parts, residual, previous_residual, is_unfinished):
    """Return s (n,r), or Newton's root if Picard is near it, and whether it is the root (n,)."""
    # Picard's residual shrinks by `ratio` per step, so the remaining steps sum to `distance`.
    ratio = residual / previous_residual  # 0 in the first iteration, which has no previous residual
    distance = residual / (1 - ratio)
    is_near = distance <= MAX_NEWTON_DISTANCE * coefficients.size(s, parts)
    is_tried = is_unfinished & (ratio > 0) & (ratio < MAX_PICARD_RATIO) & is_near
    indices = is_tried.nonzero().squeeze(1)
    is_newton_root = torch.zeros_like(is_unfinished)
    if not len(indices):
        return s, is_newton_root
    max_distance = 2 * distance[indices]  # the ratio is an estimate
    root, is_root = _newton(
        coefficients.select(indices), s[indices], residual[indices], max_distance
    )
    root = torch.where(is_root.unsqueeze(-1), root, s[indices])
    return s.index_copy(0, indices, root), is_newton_root.index_copy(0, indices, is_root)


class _Implicit(torch.autograd.Function):
    """The root s with the gradient of s = φ(s); forward(φ(s), s, I − φ′, status).

    The backward passes (I − φ′)⁻ᵀ grad to φ(s), shortened to MAX_GAIN times the length of grad. If
    s is no root, or this product is not finite, it passes grad unchanged.
    """

    @staticmethod
    def forward(ctx, value, s, matrix, status):
        ctx.save_for_backward(matrix, status)
        return s.clone()

    @staticmethod
    def backward(ctx, grad):
        matrix, status = ctx.saved_tensors
        is_solved = (status & FAILED) == 0
        with torch.autocast(grad.device.type, enabled=False):
            product = torch.linalg.solve_ex(matrix.transpose(-1, -2), grad.unsqueeze(-1))[0]
            product = product.squeeze(-1)
            product_norm, grad_norm = (
                torch.linalg.vector_norm(t, dim=-1, keepdim=True) for t in (product, grad)
            )
            factor = (MAX_GAIN * grad_norm / product_norm.clamp_min(1e-30)).clamp_max(1.0)
            limited = product * factor
            is_valid = is_solved.unsqueeze(-1) & torch.isfinite(limited)
            return torch.where(is_valid, limited, grad), None, None, None


def solve_low_rank(
    terms: EquationTerms, low_rank: LowRank
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Solve the equations of tokens whose I − Q has low rank, with the gradient of the solution.

    Args:
        terms: Terms of the equations.
        low_rank: I − Q of the same tokens.

    Returns:
        y (b,l,d), the mixed input x̃ = Q x + M y (b,l,d), and the status of each token (b,l).
    """
    U, T = low_rank
    norm, gate = terms.norm, terms.gate
    # 1. Write y = norm(c + Σ_j m_j s_j).
    reflected = terms.x - low_rank.combine(low_rank.project(terms.x))  # Q x
    c = terms.history + terms.gain * reflected
    m = (T.transpose(-1, -2) @ U) * terms.gain.unsqueeze(-2)  # (b,l,r,d), a row for every s_j
    if gate is not None:
        c, m = c * gate, m * gate.unsqueeze(-2)
    # 2. Solve for s (b,l,r).
    if norm.kind == "none":
        s, status = _solve_linear(c, m, U)
    else:
        s, status = _solve_normalized(c, m, U, norm)
    # 3. Compute y and x̃ from s.
    y = norm(c + (s.unsqueeze(-2) @ m).squeeze(-2))
    return y, reflected + low_rank.combine(s), status


def _solve_linear(c, m, U):
    """Solve s = U (c + Σ_j m_j s_j) by the formula of Sherman, Morrison & Woodbury."""
    alpha, beta = _times(U, c), U @ m.transpose(-1, -2)
    matrix = _identity_minus(beta.detach())
    s = torch.linalg.solve_ex(matrix, alpha.detach().unsqueeze(-1))[0].squeeze(-1)
    status = torch.where(torch.isfinite(s).all(-1), 0, FAILED).to(torch.uint8)
    return _attach_gradient(alpha + _times(beta, s), s, matrix, status)


def _solve_normalized(c, m, U, norm):
    """Solve s = U norm(c + Σ_j m_j s_j)."""
    d, weight = c.shape[-1], norm.weight.to(c.dtype)
    c, m = norm.center(c).unsqueeze(-1), norm.center(m)
    weighted_U = U * weight
    # γ₀ + 2 γ₁·s + sᵀ Γ₂ s is the mean square of c + Σ_j m_j s_j over the channels, plus eps.
    gamma1, gamma2 = (m @ c).squeeze(-1) / d, m @ m.transpose(-1, -2) / d
    gamma0 = c.square().mean((-2, -1)) + norm.eps
    delta = torch.zeros_like(gamma1) if norm.bias is None else U @ norm.bias.to(c.dtype)
    alpha, beta = (weighted_U @ c).squeeze(-1), weighted_U @ m.transpose(-1, -2)
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
    s, status = find_root(coefficients.detach())
    value, parts = coefficients.phi(s)
    with torch.no_grad():
        matrix = _identity_minus(coefficients.jacobian(parts))
    s, status = _attach_gradient(value, s, matrix, status)
    return s.unflatten(0, shape), status.unflatten(0, shape)


def _identity_minus(slope):
    """Return I − φ′ for φ′ (…,r,r)."""
    return torch.eye(slope.shape[-1], dtype=slope.dtype, device=slope.device) - slope


def _attach_gradient(value, s, matrix, status):
    """Attach the gradient of s = φ(s) to the solution s (…,r).

    Args:
        value: φ(s), with its graph.
        s: The solution, (…,r).
        matrix: I − φ′.
        status: Status of each token.

    Returns:
        s with its gradient, and the status with GRAD_LIMITED if the gradient may be shortened.
    """
    is_bounded = torch.linalg.matrix_norm(torch.linalg.inv_ex(matrix)[0]) <= MAX_GAIN
    is_limited = ~is_bounded & (status & FAILED == 0)  # NaN is limited, too
    if value.requires_grad:
        s = _Implicit.apply(value, s, matrix, status)
    return s, torch.where(is_limited, status | GRAD_LIMITED, status)
