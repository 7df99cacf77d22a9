"""Roots of a token's equation, and the proof that damped Picard converges to no other root.

The equation is s = φ(s), with as many unknowns s as the token's mixer has reflections, r = 1 or 2.
A root is a solution. Picard iterates s ← s + stepsize · (φ(s) − s) from s = 0. All computation is
in fp64, because near a fold, where two roots meet, rounding decides which root Picard reaches.

With r = 1, φ(s) = (α + β s) / √D(s) + δ with D = γ₀ + 2γ₁s + γ₂s². Its slope is φ′ = (n₀ + n₁s) /
D^(3/2) with n₀ = βγ₀ − αγ₁ and n₁ = βγ₁ − αγ₂, so φ has at most one extremum. Newton finds a root;
docs/proofs.md ("Newton's root and its proof") has the proof that it is Picard's.

With r = 2, φ(s) = (α + B s) / √D(s) + δ with D = γ₀ + 2 γ₁·s + sᵀ Γ₂ s. Given g = 1/√D, the
equation is linear: s(g) = (I − g B)⁻¹ (g α + δ). So its roots are the zeros of a function of g,

    F(g) = det − g N with det(g) = det(I − g B), v(g) = adj(I − g B) (g α + δ), s = v / det,
    N² = det² D = γ₀ det² + 2 det γ₁·v + vᵀ Γ₂ v,

and of the polynomial P = g² N² − det² of degree 6. Let λ > 0 be the largest eigenvalue of B, and w
its eigenvector of Bᵀ. If w·α and w·δ have the same sign, Picard stays in the half-plane where w·s
has this sign, and the roots in it have g < 1/λ. notes/2026-11-two-reflections.md has the proof.

Shape suffixes: n tokens; p pieces, into which the interval of g is divided.
"""

from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

MAX_DIRECT_STEPS = 12  # Newton steps from a start with r = 1 ("direct": without Picard before)
# Limits of the residual |φ(s) − s|, in machine epsilons of the size of its terms: below ROUNDING it
# is rounding; a search that ends below SOLVED has found a root.
ROUNDING, SOLVED = 8, 256
# Largest factor by which the gradient of s is multiplied on its way back to the coefficients. The
# true factor is infinite where two roots meet (φ′ = 1).
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

    def radicand(self, s: torch.Tensor) -> torch.Tensor:
        """Return D(s)."""
        return self.gamma0 + s * (2 * self.gamma1 + self.gamma2 * s)

    def phi(self, s: torch.Tensor) -> torch.Tensor:
        """Return φ(s)."""
        norm = self.radicand(s).clamp_min(self.floor).sqrt()
        return (self.alpha + self.beta * s) / norm + self.delta

    def slope_numerator(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return n₀ and n₁, the coefficients of the numerator of φ′."""
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
    """Find the roots of equations with r = 1 by Newton, from zero and then from a second start.

    Args:
        coefficients: The `cell.Coefficients` of n tokens with r = 1.

    Returns:
        The roots (n,1) in the dtype of the coefficients, and a bool (n,): True if it is proven that
        damped Picard from zero can converge to no other root. Other tokens have the root zero.
    """
    dtype = coefficients.alpha.dtype
    fields = [t.double().flatten() for t in coefficients[:-1]]
    e = ScalarEquation(*fields, coefficients.floor)  # type: ignore[call-arg]
    eps = torch.finfo(dtype).eps
    zero = torch.zeros_like(e.alpha)
    phi_0, _, size = _evaluate(e, zero)  # ψ(0) = φ(0)
    # 1. Accept zero if it is a root to rounding.
    is_proven = torch.isfinite(phi_0) & (phi_0.abs() <= ROUNDING * eps * size)
    roots = zero
    # 2. Run Newton from zero; then from a second start: the limit of φ for s → ±∞ on the side of
    #    φ(0), or φ's extremum if it is nearer on this side and φ rises at zero.
    side = torch.where(phi_0 < 0, -1.0, 1.0)
    n0, n1 = e.slope_numerator()
    extremum, limit = -n0 / n1, e.delta + side * e.beta / e.gamma2.sqrt()
    is_nearer = (extremum * side > 0) & ~(extremum * side >= limit.abs())
    second_start = torch.where((n0 > 0) & is_nearer, extremum, limit)
    for start in (zero, second_start):
        is_unproven = ~is_proven
        if not is_unproven.any():
            break
        candidates, is_root = _newton(e, start, is_unproven, eps)
        is_new = is_unproven & is_root & is_picards_root(e, phi_0, candidates)
        roots = torch.where(is_new, candidates, roots)
        is_proven = is_proven | is_new
    return roots.to(dtype).unsqueeze(1), is_proven


def _evaluate(e, s):
    """Return ψ = φ(s) − s, 1 − φ′, and the size of ψ's terms, each (n,)."""
    half_slope = e.gamma1 + e.gamma2 * s  # D′ / 2
    g = (e.gamma0 + s * (e.gamma1 + half_slope)).clamp_min(e.floor).rsqrt()  # 1/√D
    beta_s = e.beta * s
    numerator = e.alpha + beta_s
    psi = numerator * g + e.delta - s
    slope = e.beta * g - numerator * half_slope * g**3
    size = (e.alpha.abs() + beta_s.abs()) * g + e.delta.abs() + s.abs()
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
    """Return whether damped Picard from zero can converge only to this root, for steps in (0, 1].

    Args:
        e: The equations.
        phi_0: φ(0), (n,).
        root: A root of each equation, (n,).
    """
    side = torch.where(root < 0, -1.0, 1.0)
    e, root, phi_0 = e.mirror(side), side * root, side * phi_0  # now root ≥ 0
    n0, n1 = e.slope_numerator()
    # 1. The largest value of φ on [0, root]: no step leads beyond it.
    is_rising = (n0 >= 0) & (n0 + n1 * root >= 0)  # on all of [0, root]
    falls_at_zero = ~is_rising & (n0 <= 0)
    at_extremum = e.phi(-n0 / n1)
    max_phi = torch.where(is_rising, root, torch.where(falls_at_zero, phi_0, at_extremum))
    # 2. No step leads below zero: φ rises up to the root, or it falls on [root, max_phi] but not
    #    below zero.
    is_falling_beyond = (n0 + n1 * max_phi <= 0) & (root <= max_phi)
    stays_inside = is_rising | (is_falling_beyond & (e.phi(max_phi) >= 0))
    # 3. D stays above its floor on [0, max_phi].
    vertex = -e.gamma1 / e.gamma2  # where D is smallest
    min_radicand = torch.minimum(e.gamma0, e.radicand(max_phi))
    at_vertex = e.gamma0 + e.gamma1 * vertex
    min_radicand = torch.where((vertex > 0) & (vertex < max_phi), at_vertex, min_radicand)
    is_smooth = min_radicand >= e.floor
    # 4. There is no other root in [0, root]. If φ falls both at zero and at max_phi ≥ root (2.), it
    #    falls between them, and has no other root.
    is_lowest = falls_at_zero | (phi_0 >= root) | _is_lowest(e, phi_0, root)
    return (phi_0 > 0) & stays_inside & is_smooth & is_lowest


def _is_lowest(e, phi_0, root):
    """Return whether φ(s) = s has no other root in [φ(0), root].

    Roots are zeros of the quartic (s − δ)² D − (α + β s)². With s = root + t it is
    t (q0 + q1 t + q2 t² + q3 t³). At a root, s − δ and α + β s have the same sign: if only one of
    them changes its sign in the interval, only the part between this change and `root` is tested.
    """
    above_delta, numerator = root - e.delta, e.alpha + e.beta * root  # s − δ and α + β s at root
    numerator_zero = -e.alpha / e.beta  # at which α + β s changes its sign; s − δ does at δ
    delta_is_inside = (e.delta > phi_0) & (e.delta < root)
    numerator_zero_is_inside = (numerator_zero > phi_0) & (numerator_zero < root)
    sign_change = torch.where(delta_is_inside, e.delta, numerator_zero)
    has_one_change = delta_is_inside != numerator_zero_is_inside
    w = torch.where(has_one_change, sign_change, phi_0) - root  # lower end of t
    half_slope, at_root = e.gamma1 + e.gamma2 * root, e.radicand(root)  # D′ / 2 and D at root
    q0 = 2 * (above_delta * (above_delta * half_slope + at_root) - numerator * e.beta)
    q1 = above_delta * (above_delta * e.gamma2 + 4 * half_slope) + at_root - e.beta.square()
    q2 = 2 * (above_delta * e.gamma2 + half_slope)
    q3 = e.gamma2
    return has_no_zero(q0, q1 * w, q2 * w * w, q3 * w * w * w)  # a cubic in x = t / w


def has_no_zero(
    c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor
) -> torch.Tensor:
    """Return whether Bernstein signs prove that c0 + c1 x + c2 x² + c3 x³ ≠ 0 on [0, 1]."""
    b1 = 3 * c0 + c1  # the two middle coefficients are multiplied by 3
    bernstein = torch.stack([c0, b1, b1 + c1 + c2, c0 + c1 + c2 + c3])
    return (bernstein > 0).all(0) | (bernstein < 0).all(0)


# Two reflections: r = 2.

# Picard steps before `cell.find_root` calls this search. On a CPU they cost a third of the search,
# and most equations need fewer.
DECIDE_AFTER = 12
# Upper ends of the pieces of the interval of g, in units of 1/λ, if Picard stays in a half-plane.
PIECES = (0.25, 0.5, 0.75, 0.9, 0.97, 0.99, 0.999, 1.0)
# The same in units of 1/√|det B|, if Picard may reach the whole plane. A last piece ends at the
# largest g, 1/√floor.
WIDE_PIECES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 4.0)
MAX_PAIR_STEPS = 20  # Newton steps within a piece
STILL = 1e-12  # only in C++: Newton also ends after a step below STILL · g
MAX_POLISH_STEPS = 2  # Newton steps in s
# Distance of α and δ from the edge of the half-plane, relative to their lengths, above which their
# side is certain. Rounding may carry Picard across a nearer edge.
MIN_SIDE = 1e-4
# The sign of a Bernstein coefficient is certain if it exceeds this share of its terms' sizes.
CERTAIN = 1e-13
DEGREE = 6  # of P
UNKNOWN = 9  # count of sign changes if a sign is uncertain; larger than DEGREE


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
        """Return the coefficients of det(g), (n,3)."""
        b = self.beta
        trace = b[:, 0, 0] + b[:, 1, 1]
        return torch.stack([torch.ones_like(trace), -trace, _det(b)], -1)

    def expand_numerator(self) -> torch.Tensor:
        """Return the coefficients of v(g), (n,3,2)."""
        linear = self.alpha + _times_minus_adjugate(self.beta, self.delta)
        quadratic = _times_minus_adjugate(self.beta, self.alpha)
        return torch.stack([self.delta, linear, quadratic], 1)

    def expand_n_squared(self) -> torch.Tensor:
        """Return the coefficients of N², (n,5)."""
        det, v = self.expand_determinant(), self.expand_numerator()
        # The coefficient of g^k is the sum of products[:, i, j] with i + j = k.
        two_gamma1_v = 2 * (v @ self.gamma1.unsqueeze(-1)).squeeze(-1)
        products = v @ self.gamma2 @ v.transpose(1, 2)
        products = products + self.gamma0[:, None, None] * det.unsqueeze(2) * det.unsqueeze(1)
        products = products + two_gamma1_v.unsqueeze(2) * det.unsqueeze(1)
        row0, row1, row2 = (pad(products[:, i], (i, 2 - i)) for i in range(3))
        return row0 + row1 + row2


def _det(m):
    return m[..., 0, 0] * m[..., 1, 1] - m[..., 0, 1] * m[..., 1, 0]


def _times_minus_adjugate(b, x):
    """Return −adj(B) x, (n,2), the coefficient of g in adj(I − g B) x."""
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
        The ends (n,p+1), increasing from zero, and whether (n,) the interval is known.
    """
    b = e.beta
    half_trace, det = (b[:, 0, 0] + b[:, 1, 1]) / 2, _det(b)
    discriminant = ((b[:, 0, 0] - b[:, 1, 1]) / 2).square() + b[:, 0, 1] * b[:, 1, 0]
    max_eigenvalue = half_trace + discriminant.clamp_min(0).sqrt()  # λ, if it is real
    # 1. Find a normal w with wᵀ B = λ wᵀ. Both rows are multiples of w; use the longer one. Picard
    #    stays on one side if w·α and w·δ clearly have the same sign, or α or δ is zero.
    rows = torch.stack(
        [
            torch.stack([b[:, 1, 0], max_eigenvalue - b[:, 0, 0]], -1),
            torch.stack([max_eigenvalue - b[:, 1, 1], b[:, 0, 1]], -1),
        ],
        1,
    )
    is_second_longer = rows[:, 1].square().sum(-1) > rows[:, 0].square().sum(-1)
    w = torch.where(is_second_longer.unsqueeze(-1), rows[:, 1], rows[:, 0])
    sides = [(w * x).sum(-1) for x in (e.alpha, e.delta)]
    lengths = [w.norm(dim=-1) * x.norm(dim=-1) for x in (e.alpha, e.delta)]
    is_zero = [length == 0 for length in lengths]
    is_clear = [side.abs() > MIN_SIDE * length for side, length in zip(sides, lengths)]
    is_same_side = (sides[0] * sides[1] > 0) & is_clear[0] & is_clear[1]
    is_same_side = is_same_side | (is_zero[0] & is_clear[1]) | (is_zero[1] & is_clear[0])
    max_g = e.floor**-0.5
    is_half_plane = (discriminant > 0) & (max_eigenvalue * max_g > 1) & is_same_side
    half_plane_ends = max_eigenvalue.reciprocal().unsqueeze(-1) * _tensor_like(PIECES, b)
    # 2. Otherwise search the whole plane, if B has no positive eigenvalue: det(g) then has no zero.
    is_whole_plane = ~is_half_plane & ((discriminant < 0) | (max_eigenvalue <= 0))
    # The ends must increase up to max_g: the limit keeps the last of WIDE_PIECES, 4, at max_g / 2.
    unit = det.abs().rsqrt().clamp_max(max_g / (2 * WIDE_PIECES[-1]))
    whole_plane_ends = pad(unit.unsqueeze(-1) * _tensor_like(WIDE_PIECES, b), (0, 1), value=max_g)
    ends = torch.where(is_half_plane.unsqueeze(-1), half_plane_ends, whole_plane_ends)
    return pad(ends, (1, 0)), is_half_plane | is_whole_plane


def _tensor_like(values, t):
    """Return a tensor of these values with the dtype and device of t."""
    return torch.tensor(values, dtype=t.dtype, device=t.device)


def to_bernstein(coefficients: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the Bernstein coefficients (n,p,7) of polynomials (n,7) on pieces; ends (n,p+1)."""
    low, width = ends[:, :-1], ends.diff(dim=1)
    c = [coefficients[:, i : i + 1].expand_as(low) for i in range(DEGREE + 1)]
    # 1. Compute the Taylor coefficients at `low`.
    for j in range(DEGREE):
        for i in reversed(range(j, DEGREE)):
            c[i] = c[i] + low * c[i + 1]
    # 2. Scale the piece to [0, 1], and divide by the binomial coefficients of DEGREE.
    power = torch.ones_like(width)
    for i, binomial in enumerate((1, 6, 15, 20, 15, 6, 1)):
        c[i] = c[i] * power / binomial
        power = power * width
    # 3. Convert the scaled coefficients to Bernstein coefficients by repeated sums.
    for j in range(DEGREE):
        for i in reversed(range(j, DEGREE)):
            c[i + 1] = c[i + 1] + c[i]
    return torch.stack(c, -1)


def count_sign_changes(
    coefficients: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bound the number of zeros of P in every piece by its Bernstein coefficients' sign changes.

    coefficients: of P, (n,7). ends: of the pieces, (n,p+1).

    Returns:
        The number of sign changes, (n,p), or UNKNOWN if a coefficient is too small to have a sign;
        and the last coefficient, which is P at the upper end, (n,p).
    """
    bernstein = to_bernstein(coefficients, ends)
    sizes = to_bernstein(coefficients.abs(), ends)
    is_certain = (bernstein.abs() > CERTAIN * sizes).all(-1)
    changes = ((bernstein[..., 1:] > 0) != (bernstein[..., :-1] > 0)).sum(-1)
    return torch.where(is_certain, changes, UNKNOWN), bernstein[..., -1]


@torch.no_grad()
def find_certified_pairs(coefficients: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find all roots in Picard's half-plane or plane, and decide which one Picard converges to.

    Args:
        coefficients: The `cell.Coefficients` of n tokens with r = 2.

    Returns:
        The root (n,2) in the dtype of the coefficients; a bool (n,), True if the root attracts
        Picard; and a bool (n,), True if the root and its attraction are proven. If a proven root
        does not attract, no root does, and Picard does not converge. Tokens without a proof have
        the root zero.
    """
    dtype = coefficients.alpha.dtype
    fields = [t.double() for t in coefficients[:-1]]
    e = PairEquation(*fields, coefficients.floor)  # type: ignore[call-arg]
    eps = torch.finfo(dtype).eps
    # 1. Count the zeros of P in each piece. There is no proof if a piece may have two, or if P is
    #    not positive at the upper end of the interval.
    ends, is_proven = find_ends(e)
    det_coefficients, n_squared_coefficients = e.expand_determinant(), e.expand_n_squared()
    p_coefficients = pad(n_squared_coefficients, (2, 0))  # g² N²
    products = det_coefficients.unsqueeze(2) * det_coefficients.unsqueeze(1)
    for i in range(3):
        p_coefficients[:, i : i + 3] -= products[:, i]
    changes, p_at_end = count_sign_changes(p_coefficients, ends)
    is_proven = is_proven & (changes <= 1).all(1) & (p_at_end[:, -1] > 0)
    has_zero = changes == 1
    # 2. Find the roots, and check them. In pieces without a zero of P the numbers mean nothing.
    g = _find_zeros(det_coefficients, n_squared_coefficients, ends, p_at_end > 0)
    det, _ = _horner(det_coefficients, g)
    v = e.expand_numerator()
    s = torch.stack([_horner(v[..., i], g)[0] / det for i in range(2)], -1)  # (n,p,2)
    for _ in range(MAX_POLISH_STEPS):
        psi, matrix, _ = _evaluate_pairs(e, s)  # matrix: I − φ′
        s = s + _solve_2x2(matrix, psi)
    psi, matrix, size = _evaluate_pairs(e, s)
    is_root = psi.abs().amax(-1) <= SOLVED * eps * size
    is_proven = is_proven & (is_root | ~has_zero).all(1) & has_zero.any(1)
    # 3. Choose the root that attracts (both eigenvalues of I − φ′ have a positive real part),
    #    otherwise the first. There is no proof if several attract.
    trace = matrix[..., 0, 0] + matrix[..., 1, 1]
    attracts = has_zero & (trace > 0) & (_det(matrix) > 0)
    is_proven = is_proven & (attracts.sum(1) <= 1)
    chosen = torch.where(attracts.any(1), attracts.int().argmax(1), has_zero.int().argmax(1))
    root = s.gather(1, chosen[:, None, None].expand(-1, 1, 2)).squeeze(1)
    return torch.where(is_proven.unsqueeze(-1), root, 0).to(dtype), attracts.any(1), is_proven


def _find_zeros(det_coefficients, n_squared_coefficients, ends, p_rises):
    """Return the zero of F in each piece, (n,p), by Newton with bisection bounds.

    p_rises: whether P rises at its zero, (n,p). F falls there.
    """
    low, high = ends[:, :-1], ends[:, 1:]
    g = _middle(low, high)
    for _ in range(MAX_PAIR_STEPS):
        det, det_slope = _horner(det_coefficients, g)
        n_squared, n_squared_slope = _horner(n_squared_coefficients, g)
        n = n_squared.sqrt()  # N
        value, slope = det - g * n, det_slope - n - g * n_squared_slope / (2 * n)
        is_below = (value > 0) == p_rises
        low = torch.where(is_below, g, low)
        high = torch.where(is_below, high, g)
        newton_g = g - value / slope
        g = torch.where((newton_g > low) & (newton_g < high), newton_g, _middle(low, high))
    return g


def _middle(low, high):
    """Return the geometric mean of low and high, or high / 2 if low is zero."""
    return torch.where(low > 0, (low * high).sqrt(), high / 2)


def _evaluate_pairs(e, s):
    """Return ψ = φ(s) − s (n,p,2), I − φ′ (n,p,2,2), and the size of ψ's terms (n,p)."""
    half_slope = e.gamma1.unsqueeze(1) + s @ e.gamma2.transpose(1, 2)  # gradient of D / 2
    radicand = e.gamma0.unsqueeze(1) + ((e.gamma1.unsqueeze(1) + half_slope) * s).sum(-1)  # D
    g = radicand.clamp_min(e.floor).rsqrt().unsqueeze(-1)
    numerator = e.alpha.unsqueeze(1) + s @ e.beta.transpose(1, 2)
    psi = numerator * g + e.delta.unsqueeze(1) - s
    slope = e.beta.unsqueeze(1) * g.unsqueeze(-1)
    outer = numerator.unsqueeze(-1) * half_slope.unsqueeze(-2)
    slope = slope - outer * g.unsqueeze(-1) ** 3
    size = (e.alpha.abs().unsqueeze(1) + s.abs() @ e.beta.abs().transpose(1, 2)) * g
    size = (size + e.delta.abs().unsqueeze(1) + s.abs()).amax(-1)
    eye = torch.eye(2, dtype=s.dtype, device=s.device)
    return psi, eye - slope, size


def _solve_2x2(m, b):
    """Solve 2 × 2 systems: m (…,2,2), b (…,2)."""
    first = m[..., 1, 1] * b[..., 0] - m[..., 0, 1] * b[..., 1]
    second = m[..., 0, 0] * b[..., 1] - m[..., 1, 0] * b[..., 0]
    return torch.stack([first, second], -1) / _det(m).unsqueeze(-1)
