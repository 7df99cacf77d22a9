"""Newton's root of a token's equation, and the proof that damped Picard from zero converges to it.

Picard iterates s ← s + stepsize · (φ(s) − s). With r = 1 the equation is s = φ(s) =
(α + β s) / √D(s) + δ with D = γ₀ + 2γ₁s + γ₂s², and φ′ = (n₀ + n₁s) / D^(3/2), so φ has at most
one extremum. docs/proofs.md ("Newton's root and its proof") has the proof. All computation is in
fp64, because near a fold, where two roots meet, rounding decides which root Picard reaches.

With r = 2 the equation is s = φ(s) = (α + B s) / √D(s) + δ with D = γ₀ + 2 γ₁·s + sᵀ Γ₂ s. Given
g = 1/√D it is linear, s(g) = (I − g B)⁻¹ (g α + δ), so its roots are the zeros of a function of g,

    F(g) = det − g N with det(g) = det(I − g B), v(g) = adj(I − g B) (g α + δ), s = v / det,
    N² = det² D = γ₀ det² + 2 det γ₁·v + vᵀ Γ₂ v,

and of the polynomial P = g² N² − det² of degree 6. Picard cannot leave a half-plane whose normal is
an eigenvector of Bᵀ. The roots in this half-plane have g below one over the eigenvalue.
notes/2026-11-two-reflections.md has the proof.

Shape suffixes: n tokens; p pieces of the interval of g (PIECES). With r = 1 every tensor is (n,).
"""

from typing import Any, NamedTuple

import torch

MAX_DIRECT_STEPS = 12  # Newton steps from each of two starts
# Limits of the residual |φ(s) − s|, in machine epsilons of the size of its terms: below ROUNDING it
# is rounding; a search that ends below SOLVED has found a solution.
ROUNDING = 8
SOLVED = 256
# Largest factor by which the gradient of s is multiplied on its way back to the coefficients. The
# true factor is infinite where two solutions meet (φ′ = 1).
MAX_GAIN = 20.0


class ScalarEquation(NamedTuple):
    """Coefficients of φ for n tokens with one reflection, (n,) each."""

    alpha: torch.Tensor
    beta: torch.Tensor
    delta: torch.Tensor
    gamma0: torch.Tensor
    gamma1: torch.Tensor
    gamma2: torch.Tensor
    floor: float  # lower bound of D

    def square(self, s: torch.Tensor) -> torch.Tensor:
        """Return D(s)."""
        return self.gamma0 + s * (2 * self.gamma1 + self.gamma2 * s)

    def phi(self, s: torch.Tensor) -> torch.Tensor:
        """Return φ(s)."""
        return (self.alpha + self.beta * s) / self.square(s).clamp_min(
            self.floor
        ).sqrt() + self.delta

    def slope_signs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return n₀ and n₁; n₀ + n₁ s has the sign of φ′(s)."""
        n0 = self.beta * self.gamma0 - self.alpha * self.gamma1
        return n0, self.beta * self.gamma1 - self.alpha * self.gamma2

    def mirror(self, side: torch.Tensor) -> "ScalarEquation":
        """Return the equations whose unknown is side · s, where side is 1 or −1 per token."""
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
        The roots (n,1) in the dtype of the coefficients, and whether (n,) it is proven that damped
        Picard from zero converges to the root. Unproven roots are zero.
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
    # 2. Run Newton from zero; then from φ's extremum if it lies between zero and φ's limit on the
    #    root's side, otherwise from this limit.
    side = torch.where(at_zero < 0, -1.0, 1.0)
    n0, n1 = e.slope_signs()
    extremum, limit = -n0 / n1, e.delta + side * e.beta / e.gamma2.sqrt()
    is_between = (extremum * side > 0) & ~(extremum * side >= limit.abs())
    second_start = torch.where((n0 > 0) & is_between, extremum, limit)
    for start in (zero, second_start):
        is_unproven = ~is_proven
        if not is_unproven.any():
            break
        candidates, is_root = _newton(e, start, is_unproven, eps)
        is_new = is_unproven & is_root & is_picards_root(e, at_zero, candidates)
        roots = torch.where(is_new, candidates, roots)
        is_proven = is_proven | is_new
    return roots.to(dtype).unsqueeze(1), is_proven


def _evaluate(e, s):
    """Return ψ = φ(s) − s, 1 − φ′, and the size of ψ's terms, each (n,)."""
    half_slope = e.gamma1 + e.gamma2 * s  # D′ / 2
    inverse_root = (e.gamma0 + s * (e.gamma1 + half_slope)).clamp_min(e.floor).rsqrt()
    beta_s = e.beta * s
    numerator = e.alpha + beta_s
    psi = numerator * inverse_root + e.delta - s
    slope = e.beta * inverse_root - numerator * half_slope * inverse_root**3
    size = (e.alpha.abs() + beta_s.abs()) * inverse_root + e.delta.abs() + s.abs()
    return psi, 1 - slope, size


def _newton(e, s, is_searched, eps):
    """Run Newton from s; return the last s, and whether it is a root, (n,) each."""
    is_active, is_root = is_searched, torch.zeros_like(is_searched)
    previous_residual = torch.full_like(s, torch.inf)
    for _ in range(MAX_DIRECT_STEPS):
        psi, one_minus_slope, size = _evaluate(e, s)
        residual = psi.abs()
        is_active = is_active & (one_minus_slope > 0) & (residual < torch.inf)
        is_halved = residual <= previous_residual / 2
        is_stuck = ~is_halved & (residual <= SOLVED * eps * size)
        is_done = is_active & ((residual <= ROUNDING * eps * size) | is_stuck)
        is_root = is_root | is_done
        # A finished token takes one more step, unless φ′ is near 1: the step may then lead away.
        is_moving = is_active & (~is_done | (one_minus_slope * MAX_GAIN >= 1))
        s = torch.where(is_moving, s + psi / one_minus_slope, s)
        is_active = is_active & ~is_done
        if not is_active.any():
            break
        previous_residual = residual
    return s, is_root


def is_picards_root(e: ScalarEquation, phi_0: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
    """Return whether damped Picard from zero converges to a root with any step sizes in (0, 1].

    Args:
        e: The equations.
        phi_0: φ(0), (n,).
        root: A root of φ(s) − s, (n,).
    """
    side = torch.where(root < 0, -1.0, 1.0)
    e, r, phi_0 = e.mirror(side), side * root, side * phi_0  # now r ≥ 0
    n0, n1 = e.slope_signs()
    # 1. The largest value of φ on [0, r]: no step leads beyond it.
    is_rising = (n0 >= 0) & (n0 + n1 * r >= 0)  # on all of [0, r]
    is_falling = ~is_rising & (n0 <= 0)
    at_extremum = e.phi(-n0 / n1)
    max_phi = torch.where(is_rising, r, torch.where(is_falling, phi_0, at_extremum))
    # 2. Beyond the root φ falls, and not below zero: no step leads below zero.
    is_falling_beyond = (n0 + n1 * max_phi <= 0) & (r <= max_phi)
    stays_positive = is_rising | (is_falling_beyond & (e.phi(max_phi) >= 0))
    # 3. D stays above its floor on [0, max_phi].
    vertex = -e.gamma1 / e.gamma2
    min_square = torch.minimum(e.gamma0, e.square(max_phi))
    at_vertex = e.gamma0 + e.gamma1 * vertex
    min_square = torch.where((vertex > 0) & (vertex < max_phi), at_vertex, min_square)
    is_smooth = min_square >= e.floor
    # 4. There is no other root below.
    is_lowest = is_falling | (phi_0 >= r) | _is_lowest(e, phi_0, r)
    return (phi_0 > 0) & stays_positive & is_smooth & is_lowest


def _is_lowest(e, phi_0, r):
    """Return whether φ(s) = s has no other root than r in [φ(0), r].

    Roots are zeros of the quartic (s − δ)² D − (α + β s)². With s = r + t it is
    t (q0 + q1 t + q2 t² + q3 t³). At a root, s − δ and α + β s have the same sign: if either alone
    changes its sign in the interval, only the part between this change and r is tested.
    """
    sign_change, above_delta, numerator = -e.alpha / e.beta, r - e.delta, e.alpha + e.beta * r
    has_delta = (e.delta > phi_0) & (e.delta < r)
    has_sign_change = (sign_change > phi_0) & (sign_change < r)  # of α + β s
    cut = torch.where(has_delta, e.delta, sign_change)
    w = torch.where(has_delta == has_sign_change, phi_0, cut) - r  # lower end of t
    half_slope, at_root = e.gamma1 + e.gamma2 * r, e.square(r)  # D′(r) / 2, D(r)
    q0 = 2 * (above_delta * (above_delta * half_slope + at_root) - numerator * e.beta)
    q1 = above_delta * (above_delta * e.gamma2 + 4 * half_slope) + at_root - e.beta.square()
    q2 = 2 * (above_delta * e.gamma2 + half_slope)
    return has_no_zero(q0, q1 * w, q2 * w * w, e.gamma2 * w * w * w)  # q3 = γ₂


def has_no_zero(
    c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor
) -> torch.Tensor:
    """Return whether the signs of Bernstein coefficients prove that a cubic has no zero in [0, 1].

    The cubic is c0 + c1 x + c2 x² + c3 x³.
    """
    b1 = 3 * c0 + c1  # the two middle coefficients are multiplied by 3
    bernstein = torch.stack([c0, b1, b1 + c1 + c2, c0 + c1 + c2 + c3])
    return (bernstein > 0).all(0) | (bernstein < 0).all(0)


# Two reflections.

# Picard steps before this search. On a CPU they cost a third of the search, and most equations need
# fewer. On a GPU this search comes first, because a launch waits for its slowest sequence.
DECIDE_AFTER = 12
# Upper ends of the pieces into which the interval of g is cut: if Picard stays in a half-plane, as
# shares of its interval; otherwise in units of 1/√|det B|.
PIECES = (0.25, 0.5, 0.75, 0.9, 0.97, 0.99, 0.999, 1.0)
WIDE_PIECES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 4.0)
# Newton within a piece ends after MAX_PAIR_STEPS; in C++ and Triton also after a step below
# STILL · g.
MAX_PAIR_STEPS, STILL = 20, 1e-12
MAX_POLISH_STEPS = 2  # Newton steps in s
# Distance of α and δ from the edge of the half-plane, relative to their lengths, above which their
# side is certain. Rounding may carry Picard across a nearer edge.
MIN_SIDE = 1e-4
# A Bernstein coefficient has a sign if it exceeds this share of its terms' sizes.
CERTAIN = 1e-13
DEGREE = 6  # of P
UNKNOWN = 9  # as a number of sign changes: more than DEGREE


class PairEquation(NamedTuple):
    """Coefficients of φ for n tokens with two reflections, and its polynomials in g."""

    alpha: torch.Tensor  # (n,2)
    beta: torch.Tensor  # (n,2,2)
    delta: torch.Tensor  # (n,2)
    gamma0: torch.Tensor  # (n,)
    gamma1: torch.Tensor  # (n,2)
    gamma2: torch.Tensor  # (n,2,2)
    floor: float  # lower bound of D

    def expand_determinant(self) -> torch.Tensor:
        """Return the coefficients of det(I − g B), (n,3)."""
        b = self.beta
        trace = b[:, 0, 0] + b[:, 1, 1]
        return torch.stack([torch.ones_like(trace), -trace, _det(b)], -1)

    def expand_numerator(self) -> torch.Tensor:
        """Return the coefficients of adj(I − g B) (g α + δ), (n,3,2)."""
        g1_delta, g1_alpha = (_apply_adjugate(self.beta, v) for v in (self.delta, self.alpha))
        return torch.stack([self.delta, self.alpha + g1_delta, g1_alpha], 1)

    def expand_square(self) -> torch.Tensor:
        """Return the coefficients of N², (n,5)."""
        det, v = self.expand_determinant(), self.expand_numerator()
        # products[:, i, j] is a coefficient of g^(i+j).
        two_gamma1_v = 2 * (v @ self.gamma1.unsqueeze(-1)).squeeze(-1)
        products = v @ self.gamma2 @ v.transpose(1, 2)
        products = products + self.gamma0[:, None, None] * det.unsqueeze(2) * det.unsqueeze(1)
        products = products + two_gamma1_v.unsqueeze(2) * det.unsqueeze(1)
        zero = torch.zeros_like(det[:, 0])
        rows = [
            torch.stack([zero] * i + [products[:, i, j] for j in range(3)] + [zero] * (2 - i), -1)
            for i in range(3)
        ]
        return rows[0] + rows[1] + rows[2]


def _det(m):
    return m[..., 0, 0] * m[..., 1, 1] - m[..., 0, 1] * m[..., 1, 0]


def _apply_adjugate(b, x):
    """Return −adj(B) x = (B − tr B · I) x, (n,2), the term of g¹ in adj(I − g B) x."""
    first = b[:, 0, 1] * x[:, 1] - b[:, 1, 1] * x[:, 0]
    return torch.stack([first, b[:, 1, 0] * x[:, 0] - b[:, 0, 0] * x[:, 1]], -1)


def _horner(coefficients, g):
    """Evaluate polynomials (n,k) at g (n,p), with their derivatives."""
    value = torch.zeros_like(g)
    slope = torch.zeros_like(g)
    for i in reversed(range(coefficients.shape[1])):
        slope = slope * g + value
        value = value * g + coefficients[:, i : i + 1]
    return value, slope


def find_ends(e: PairEquation) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ends of the pieces of the interval of g in which Picard's root lies.

    Returns:
        The ends (n,p+1), increasing from zero, and whether (n,) they are known.
    """
    b = e.beta
    half_trace, det = (b[:, 0, 0] + b[:, 1, 1]) / 2, _det(b)
    discriminant = ((b[:, 0, 0] - b[:, 1, 1]) / 2).square() + b[:, 0, 1] * b[:, 1, 0]
    largest = half_trace + discriminant.clamp_min(0).sqrt()  # eigenvalue of B, if it is real
    # 1. Find a normal w with wᵀ B = largest · wᵀ. Both rows are multiples of w; use the longer one.
    #    Picard stays in its half-plane if α and δ lie clearly on the same side, or one is zero.
    rows = torch.stack(
        [
            torch.stack([b[:, 1, 0], largest - b[:, 0, 0]], -1),
            torch.stack([largest - b[:, 1, 1], b[:, 0, 1]], -1),
        ],
        1,
    )
    is_second = rows[:, 1].square().sum(-1) > rows[:, 0].square().sum(-1)
    w = torch.where(is_second.unsqueeze(-1), rows[:, 1], rows[:, 0])
    sides = [(w * x).sum(-1) for x in (e.alpha, e.delta)]
    lengths = [w.norm(dim=-1) * x.norm(dim=-1) for x in (e.alpha, e.delta)]
    is_zero = [length == 0 for length in lengths]
    is_clear = [side.abs() > MIN_SIDE * length for side, length in zip(sides, lengths)]
    is_same_side = (sides[0] * sides[1] > 0) & is_clear[0] & is_clear[1]
    is_same_side = is_same_side | (is_zero[0] & is_clear[1]) | (is_zero[1] & is_clear[0])
    max_g = e.floor**-0.5
    is_half = (discriminant > 0) & (largest * max_g > 1) & is_same_side
    # 2. Otherwise search the whole plane, if det(I − g B) has no zero.
    is_whole = ~is_half & ((discriminant < 0) | (largest <= 0))
    unit = det.abs().rsqrt().clamp_max(max_g / 8)
    half_ends = largest.reciprocal().unsqueeze(-1) * _like(PIECES, largest)
    whole_ends = unit.unsqueeze(-1) * _like(WIDE_PIECES, unit)
    whole_ends = torch.nn.functional.pad(whole_ends, (0, 1), value=max_g)
    ends = torch.where(is_half.unsqueeze(-1), half_ends, whole_ends)
    return torch.nn.functional.pad(ends, (1, 0)), is_half | is_whole


def _like(values, t):
    """Return a tensor of these values with the dtype and device of t."""
    return torch.tensor(values, dtype=t.dtype, device=t.device)


def to_bernstein(coefficients: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the Bernstein coefficients of P on every piece, (n,p,7).

    Args:
        coefficients: Coefficients of P, (n,7).
        ends: Ends of the pieces, (n,p+1).
    """
    low, width = ends[:, :-1], ends.diff(dim=1)
    c = [coefficients[:, i : i + 1].expand_as(low) for i in range(DEGREE + 1)]
    # 1. Taylor coefficients at `low`.
    for j in range(DEGREE):
        for i in reversed(range(j, DEGREE)):
            c[i] = c[i] + low * c[i + 1]
    # 2. Scale the piece to [0, 1], and divide by the binomial coefficients of DEGREE.
    power = torch.ones_like(width)
    for i, binomial in enumerate((1, 6, 15, 20, 15, 6, 1)):
        c[i] = c[i] * power / binomial
        power = power * width
    # 3. Sum them to Bernstein coefficients.
    for j in range(DEGREE):
        for i in reversed(range(j, DEGREE)):
            c[i + 1] = c[i + 1] + c[i]
    return torch.stack(c, -1)


def count_sign_changes(p: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bound the number of zeros of P in every piece by its Bernstein coefficients' sign changes.

    Args:
        p: Coefficients of P, (n,7).
        ends: Ends of the pieces, (n,p+1).

    Returns:
        The number of sign changes, (n,p), or UNKNOWN if a coefficient is too small to have a sign;
        and the last coefficient, which is P at the upper end, (n,p).
    """
    b = to_bernstein(p, ends)
    is_certain = (b.abs() > CERTAIN * to_bernstein(p.abs(), ends)).all(-1)
    changes = ((b[..., 1:] > 0) != (b[..., :-1] > 0)).sum(-1)
    return torch.where(is_certain, changes, UNKNOWN), b[..., -1]


@torch.no_grad()
def find_certified_pairs(
    coefficients: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find all roots in Picard's half-plane or plane, and decide which one Picard converges to.

    Args:
        coefficients: The `cell.Coefficients` of n tokens with r = 2.

    Returns:
        The root (n,2) in the dtype of the coefficients, zero if not proven; whether (n,) the root
        attracts Picard; and whether (n,) this is proven. If a proven root does not attract, Picard
        converges to no root.
    """
    dtype = coefficients.alpha.dtype
    fields = [t.double() for t in coefficients[:-1]]
    e = PairEquation(*fields, coefficients.floor)  # type: ignore[call-arg]
    eps = torch.finfo(dtype).eps
    # 1. The pieces, each with at most one zero of P.
    ends, is_known = find_ends(e)
    det, square, numerator = e.expand_determinant(), e.expand_square(), e.expand_numerator()
    p = torch.nn.functional.pad(square, (2, 0))
    squared = det.unsqueeze(2) * det.unsqueeze(1)
    for i in range(3):
        p[:, i : i + 3] -= squared[:, i]
    changes, at_end = count_sign_changes(p, ends)
    is_known = is_known & (changes <= 1).all(1) & (at_end[:, -1] > 0)
    # 2. The zero of F in each piece that has one, by Newton within bounds.
    low, high = ends[:, :-1], ends[:, 1:]
    p_rises = at_end > 0  # F falls there
    g = _middle(low, high)
    for _ in range(MAX_PAIR_STEPS):
        d, d_slope = _horner(det, g)
        n_square, n_slope = _horner(square, g)
        n = n_square.sqrt()
        value, slope = d - g * n, d_slope - n - g * n_slope / (2 * n)
        is_below = (value > 0) == p_rises
        low, high = torch.where(is_below, g, low), torch.where(is_below, high, g)
        newton_g = g - value / slope
        g = torch.where((newton_g > low) & (newton_g < high), newton_g, _middle(low, high))
    d, _ = _horner(det, g)
    s = torch.stack([_horner(numerator[..., i], g)[0] / d for i in range(2)], -1)  # (n,p,2)
    # 3. Polish them, and check which are roots and which attract.
    for _ in range(MAX_POLISH_STEPS):
        psi, matrix, _ = _evaluate_pairs(e, s)  # matrix: I − φ′
        s = s + _solve_2x2(matrix, psi)
    psi, matrix, size = _evaluate_pairs(e, s)
    has_zero = changes == 1
    is_root = psi.abs().amax(-1) <= SOLVED * eps * size
    trace = matrix[..., 0, 0] + matrix[..., 1, 1]
    attracts = has_zero & (trace > 0) & (_det(matrix) > 0)
    is_known = is_known & (is_root | ~has_zero).all(1) & has_zero.any(1)
    is_known = is_known & (attracts.sum(1) <= 1)
    # 4. Choose the root that attracts, otherwise the first.
    chosen = torch.where(attracts.any(1), attracts.int().argmax(1), has_zero.int().argmax(1))
    root = s.gather(1, chosen[:, None, None].expand(-1, 1, 2)).squeeze(1)
    return torch.where(is_known.unsqueeze(-1), root, 0).to(dtype), attracts.any(1), is_known


def _middle(low, high):
    """Return the geometric mean of low and high, or high / 2 if low is zero."""
    return torch.where(low > 0, (low * high).sqrt(), high / 2)


def _evaluate_pairs(e, s):
    """Return ψ = φ(s) − s (n,p,2), I − φ′ (n,p,2,2), and the size of ψ's terms (n,p)."""
    half_slope = e.gamma1.unsqueeze(1) + s @ e.gamma2.transpose(1, 2)  # gradient of D / 2
    square = e.gamma0.unsqueeze(1) + ((e.gamma1.unsqueeze(1) + half_slope) * s).sum(-1)
    inverse_root = square.clamp_min(e.floor).rsqrt().unsqueeze(-1)
    numerator = e.alpha.unsqueeze(1) + s @ e.beta.transpose(1, 2)
    psi = numerator * inverse_root + e.delta.unsqueeze(1) - s
    slope = e.beta.unsqueeze(1) * inverse_root.unsqueeze(-1)
    outer = numerator.unsqueeze(-1) * half_slope.unsqueeze(-2)
    slope = slope - outer * inverse_root.unsqueeze(-1) ** 3
    size = (e.alpha.abs().unsqueeze(1) + s.abs() @ e.beta.abs().transpose(1, 2)) * inverse_root
    size = (size + e.delta.abs().unsqueeze(1) + s.abs()).amax(-1)
    eye = torch.eye(2, dtype=s.dtype, device=s.device)
    return psi, eye - slope, size


def _solve_2x2(m, b):
    """Solve 2 × 2 systems: m (…,2,2), b (…,2)."""
    first = m[..., 1, 1] * b[..., 0] - m[..., 0, 1] * b[..., 1]
    second = m[..., 0, 0] * b[..., 1] - m[..., 1, 0] * b[..., 0]
    return torch.stack([first, second], -1) / _det(m).unsqueeze(-1)
