"""Newton's root of a token's equation, and the proof that damped Picard from zero converges to it.

With r = 1 the equation is s = φ(s) = (α + β s) / √D(s) + δ with D = γ₀ + 2γ₁s + γ₂s², and
φ′ = (n₀ + n₁s) / D^(3/2): φ turns at most once. docs/fixed-point.md ("Newton's root and its proof")
has the proof. All is computed in fp64: near a fold a rounding decides which root is taken.

With r = 2 only the compiled kernels have such a proof (docs/fixed-point.md, "Two reflections").

Shape suffixes: n tokens. With r = 1 every tensor is (n,).
"""

from typing import Any, NamedTuple

import torch

MAX_DIRECT_STEPS = 12  # of Newton from each of two starts
ROUNDING = 8  # machine epsilons of the terms at which a residual is rounding
SOLVED = 256  # and at which a search that gets no further has found a solution
# A token passes at most so many times the norm of the cotangent of s back to what it is made of:
# where two solutions meet (φ′ = 1), the true gradient is infinite.
MOST_GAIN = 20.0


class ScalarEquation(NamedTuple):
    """φ of n tokens with one reflection."""

    alpha: torch.Tensor
    beta: torch.Tensor
    delta: torch.Tensor
    gamma0: torch.Tensor
    gamma1: torch.Tensor
    gamma2: torch.Tensor
    floor: float  # of the square under the root

    def square(self, s: torch.Tensor) -> torch.Tensor:
        """Return D(s)."""
        return self.gamma0 + s * (2 * self.gamma1 + self.gamma2 * s)

    def phi(self, s: torch.Tensor) -> torch.Tensor:
        """Return φ(s)."""
        return (self.alpha + self.beta * s) / self.square(s).clamp_min(
            self.floor
        ).sqrt() + self.delta

    def slope_signs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return n₀ and n₁: n₀ + n₁ s has the sign of φ′(s)."""
        n0 = self.beta * self.gamma0 - self.alpha * self.gamma1
        return n0, self.beta * self.gamma1 - self.alpha * self.gamma2

    def mirror(self, side: torch.Tensor) -> "ScalarEquation":
        """Return the equations of side · s; side is 1 or −1 per token."""
        alpha, beta, delta, gamma0, gamma1, gamma2, floor = self
        return ScalarEquation(
            side * alpha, beta, side * delta, gamma0, side * gamma1, gamma2, floor
        )


@torch.no_grad()
def find_certified_roots(coefficients: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Find roots by Newton, from zero and then from a second start further out.

    Args:
        coefficients: The `cell.Coefficients` of n tokens with r = 1.

    Returns:
        The roots (n,1) in the dtype of the coefficients, and whether (n,) each is proven to be the
        one that damped Picard from zero comes to. The other roots are zero.
    """
    dtype = coefficients.alpha.dtype
    fields = [t.double().flatten() for t in coefficients[:-1]]
    e = ScalarEquation(*fields, coefficients.floor)  # type: ignore[call-arg]
    eps = torch.finfo(dtype).eps
    zero = torch.zeros_like(e.alpha)
    at_zero, _, size = _evaluate(e, zero)
    # 1. Accept zero if it is a root to rounding.
    is_proven = torch.isfinite(at_zero) & (at_zero.abs() <= ROUNDING * eps * size)
    roots = zero
    # 2. Run Newton from zero; then from φ's largest point on the root's side, or from its limit.
    side = torch.where(at_zero < 0, -1.0, 1.0)
    n0, n1 = e.slope_signs()
    turn, limit = -n0 / n1, e.delta + side * e.beta / e.gamma2.sqrt()
    turns = (n0 > 0) & (turn * side > 0) & ~(turn * side >= limit.abs())
    for start in (zero, torch.where(turns, turn, limit)):
        unproven = ~is_proven
        if not unproven.any():
            break
        found, is_root = _newton(e, start, unproven, eps)
        is_new = unproven & is_root & is_picards_root(e, at_zero, found)
        roots = torch.where(is_new, found, roots)
        is_proven = is_proven | is_new
    return roots.to(dtype).unsqueeze(1), is_proven


def _evaluate(e, s):
    """Return ψ = φ(s) − s, 1 − φ′, and the size of φ's terms, each (n,)."""
    slant = e.gamma1 + e.gamma2 * s
    inverse = (e.gamma0 + s * (e.gamma1 + slant)).clamp_min(e.floor).rsqrt()
    linear = e.beta * s
    numerator = e.alpha + linear
    psi = numerator * inverse + e.delta - s
    rest = 1 - (e.beta * inverse - numerator * slant * inverse**3)
    return psi, rest, (e.alpha.abs() + linear.abs()) * inverse + e.delta.abs() + s.abs()


def _newton(e, s, is_searched, eps):
    """Run Newton from s; return its last points and whether each is a root, each (n,)."""
    is_active, is_root = is_searched, torch.zeros_like(is_searched)
    before = torch.full_like(s, torch.inf)
    for _ in range(MAX_DIRECT_STEPS):
        psi, rest, size = _evaluate(e, s)
        residual = psi.abs()
        is_active = is_active & (rest > 0) & (residual < torch.inf)
        is_halved = residual <= before / 2
        is_stuck = ~is_halved & (residual <= SOLVED * eps * size)
        is_done = is_active & ((residual <= ROUNDING * eps * size) | is_stuck)
        is_root = is_root | is_done
        # Where φ′ is near 1, a step from a root's neighbourhood may lead away from it.
        is_moving = is_active & (~is_done | (rest * MOST_GAIN >= 1))
        s = torch.where(is_moving, s + psi / rest, s)
        is_active = is_active & ~is_done
        if not is_active.any():
            break
        before = residual
    return s, is_root


def is_picards_root(e: ScalarEquation, phi_0: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
    """Return whether damped Picard from zero comes to a root with any step sizes in (0, 1].

    Args:
        e: The equations.
        phi_0: φ(0).
        root: A root of φ(s) − s.
    """
    side = torch.where(root < 0, -1.0, 1.0)
    e, r, phi_0 = e.mirror(side), side * root, side * phi_0
    n0, n1 = e.slope_signs()
    # 1. The largest value of φ on [0, root]: no step leads beyond it.
    rises = (n0 >= 0) & (n0 + n1 * r >= 0)
    falls = ~rises & (n0 <= 0)
    max_phi = torch.where(rises, r, torch.where(falls, phi_0, e.phi(-n0 / n1)))
    # 2. Beyond the root φ falls, and not below zero: no step leads below zero.
    stays = rises | ((n0 + n1 * max_phi <= 0) & (r <= max_phi) & (e.phi(max_phi) >= 0))
    # 3. D stays above its floor on [0, max_phi].
    vertex = -e.gamma1 / e.gamma2
    min_square = torch.minimum(e.gamma0, e.square(max_phi))
    at_vertex = e.gamma0 + e.gamma1 * vertex
    min_square = torch.where((vertex > 0) & (vertex < max_phi), at_vertex, min_square)
    is_smooth = min_square >= e.floor
    # 4. There is no other root below.
    is_lowest = falls | (phi_0 >= r) | _is_lowest(e, phi_0, r)
    return (phi_0 > 0) & stays & is_smooth & is_lowest


def _is_lowest(e, phi_0, r):
    """Return whether the quartic (s − δ)² D − (α + β s)² has no other root of φ in [φ(0), r].

    At a root of φ(s) = s the numbers s − δ and α + β s have one sign; other parts need no test.
    With s = r + t the quartic is t (q0 + q1 t + q2 t² + q3 t³).
    """
    zero, above_delta, numerator = -e.alpha / e.beta, r - e.delta, e.alpha + e.beta * r
    cut_at_delta = (e.delta > phi_0) & (e.delta < r)
    cut_at_zero = (zero > phi_0) & (zero < r)
    cut = torch.where(cut_at_delta, e.delta, zero)
    w = torch.where(cut_at_delta == cut_at_zero, phi_0, cut) - r
    slant, at_root = e.gamma1 + e.gamma2 * r, e.square(r)
    q0 = 2 * (above_delta * (above_delta * slant + at_root) - numerator * e.beta)
    q1 = above_delta * (above_delta * e.gamma2 + 4 * slant) + at_root - e.beta.square()
    q2 = 2 * (above_delta * e.gamma2 + slant)
    return has_no_zero(q0, q1 * w, q2 * w * w, e.gamma2 * w * w * w)


def has_no_zero(
    c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor
) -> torch.Tensor:
    """Return whether the Bernstein coefficients of a cubic on [0, 1] have one sign.

    If they have, c0 + c1 x + c2 x² + c3 x³ has no zero there. The two middle ones are scaled by 3.
    """
    b1 = 3 * c0 + c1
    bernstein = torch.stack([c0, b1, b1 + c1 + c2, c0 + c1 + c2 + c3])
    return (bernstein > 0).all(0) | (bernstein < 0).all(0)
