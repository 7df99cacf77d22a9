"""The certified root of a token with two reflections, in Triton.

lm/model/certified_root.py defines F, P, N² and det, and is the same in plain PyTorch;
docs/fixed-point.md ("Two reflections") has the proof. All is computed in fp64.

Shape suffixes: T tokens of a program, p = 8 pieces of the interval of g. A piece is a lane of the
second dimension, so that all pieces are computed at once. A polynomial is a tuple of its
coefficients, (T,1) or (T,p), the constant first.
"""

import triton
import triton.language as tl

# The constants of lm/model/certified_root.py, under its names: see test_constants.py.
# Triton 3.7's interpreter cannot multiply a constexpr by a tensor: the tensor stands first.
PIECES = tl.constexpr((0.25, 0.5, 0.75, 0.9, 0.97, 0.99, 0.999, 1.0))
WIDE_PIECES = tl.constexpr((0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 4.0))
MAX_PAIR_STEPS, MAX_POLISH_STEPS, DEGREE = tl.constexpr(20), tl.constexpr(2), tl.constexpr(6)
MIN_SIDE, CERTAIN, STILL = tl.constexpr(1e-4), tl.constexpr(1e-13), tl.constexpr(1e-12)
PIECE_COUNT = tl.constexpr(8)


@triton.jit
def _any_piece(mask):
    """Return whether any piece (T,p) of any token has a property."""
    return tl.max(tl.max(mask.to(tl.int32), 1), 0) > 0


@triton.jit
def _count_pieces(mask):
    """Return how many pieces (T,p) of each token have a property, (T,)."""
    return tl.sum(mask.to(tl.int32), 1)


@triton.jit
def _entry(vector, i: tl.constexpr):
    """Return entry i of a vector (T,2), as (T,1)."""
    return tl.sum(tl.where(tl.arange(0, 2)[None, :] == i, vector, 0.0), 1)[:, None]


@triton.jit
def _row(matrix, i: tl.constexpr):
    """Return row i of a matrix (T,2,2), as two tensors (T,1)."""
    row = tl.sum(tl.where(tl.arange(0, 2)[None, :, None] == i, matrix, 0.0), 1)
    return _entry(row, 0), _entry(row, 1)


@triton.jit
def _multiply(a, b):
    """Return the product of two polynomials of degree 2."""
    a0, a1, a2 = a
    b0, b1, b2 = b
    return a0 * b0, a0 * b1 + a1 * b0, a0 * b2 + a1 * b1 + a2 * b0, a1 * b2 + a2 * b1, a2 * b2


@triton.jit
def _combine(a, x, b, y):
    """Return a x + b y of two polynomials a and b of degree 2."""
    a0, a1, a2 = a
    b0, b1, b2 = b
    return a0 * x + b0 * y, a1 * x + b1 * y, a2 * x + b2 * y


@triton.jit
def _evaluate_quadratic(c, g):
    """Return the value at g of a polynomial of degree 2."""
    c0, c1, c2 = c
    return c0 + g * (c1 + g * c2)


@triton.jit
def _divide(c, low, J: tl.constexpr):
    """Return the polynomial c after one synthetic division by x − low, from coefficient J on."""
    c0, c1, c2, c3, c4, c5, c6 = c
    c5 += c6 * low
    if J <= 4:
        c4 += c5 * low
    if J <= 3:
        c3 += c4 * low
    if J <= 2:
        c2 += c3 * low
    if J <= 1:
        c1 += c2 * low
    if J <= 0:
        c0 += c1 * low
    return c0, c1, c2, c3, c4, c5, c6


@triton.jit
def _add_neighbours(c, J: tl.constexpr):
    """Return the coefficients c, each with the one before it added, from coefficient J + 1 on."""
    c0, c1, c2, c3, c4, c5, c6 = c
    c6 += c5
    if J <= 4:
        c5 += c4
    if J <= 3:
        c4 += c3
    if J <= 2:
        c3 += c2
    if J <= 1:
        c2 += c1
    if J <= 0:
        c1 += c0
    return c0, c1, c2, c3, c4, c5, c6


@triton.jit
def _convert_to_bernstein(c, low, width):
    """Return the Bernstein coefficients of P on every piece, seven tensors (T,p).

    Args:
        c: Coefficients of P, seven tensors (T,1).
        low: Lower ends of the pieces, (T,p).
        width: Widths of the pieces, (T,p).
    """
    for j in tl.static_range(DEGREE):
        c = _divide(c, low, j)
    c0, c1, c2, c3, c4, c5, c6 = c
    square = width * width
    c1 *= width * (1 / 6)
    c2 *= square * (1 / 15)
    c3 *= square * width * (1 / 20)
    c4 *= square * square * (1 / 15)
    c5 *= square * square * width * (1 / 6)
    c6 *= square * square * square
    c = (c0, c1, c2, c3, c4, c5, c6)
    for j in tl.static_range(DEGREE):
        c = _add_neighbours(c, j)
    return c


@triton.jit
def _count_sign_changes(p, low, width):
    """Bound the number of zeros of P in every piece by its Bernstein coefficients' sign changes.

    Returns:
        The sign changes (T,p); at least 9 where a coefficient is too small to have a sign; and
        whether (T,p) P is positive at the upper end.
    """
    p0, p1, p2, p3, p4, p5, p6 = p
    sizes = (tl.abs(p0), tl.abs(p1), tl.abs(p2), tl.abs(p3), tl.abs(p4), tl.abs(p5), tl.abs(p6))
    b0, b1, b2, b3, b4, b5, b6 = _convert_to_bernstein(p, low, width)
    z0, z1, z2, z3, z4, z5, z6 = _convert_to_bernstein(sizes, low, width)
    is_certain = (tl.abs(b0) > z0 * CERTAIN) & (tl.abs(b1) > z1 * CERTAIN)
    is_certain = is_certain & (tl.abs(b2) > z2 * CERTAIN) & (tl.abs(b3) > z3 * CERTAIN)
    is_certain = is_certain & (tl.abs(b4) > z4 * CERTAIN) & (tl.abs(b5) > z5 * CERTAIN)
    is_certain = is_certain & (tl.abs(b6) > z6 * CERTAIN)
    changes = ((b0 > 0.0) ^ (b1 > 0.0)).to(tl.int32) + ((b1 > 0.0) ^ (b2 > 0.0)).to(tl.int32)
    changes += ((b2 > 0.0) ^ (b3 > 0.0)).to(tl.int32) + ((b3 > 0.0) ^ (b4 > 0.0)).to(tl.int32)
    changes += ((b4 > 0.0) ^ (b5 > 0.0)).to(tl.int32) + ((b5 > 0.0) ^ (b6 > 0.0)).to(tl.int32)
    return tl.where(is_certain, changes, 9), b6 > 0.0


@triton.jit
def _find_end(index, is_half, inverse, unit, most):
    """Return the upper end of piece `index` − 1, (T,p); zero for index 0.

    Args:
        index: One of 0 to p, (1,p).
        is_half: Whether Picard stays in a half-plane, (T,1).
        inverse: One over the largest eigenvalue of B, (T,1).
        unit: Unit of WIDE_PIECES, (T,1).
        most: The largest possible g, (T,1).
    """
    half = (is_half & (index < 0)).to(tl.float64)
    wide = half
    for i in tl.static_range(PIECE_COUNT):
        half = tl.where(index == i + 1, PIECES[i], half)
        if i < PIECE_COUNT - 1:
            wide = tl.where(index == i + 1, WIDE_PIECES[i], wide)
    wide = tl.where(index == PIECE_COUNT, most, wide * unit)
    return tl.where(is_half, half * inverse, wide)


@triton.jit
def _find_pieces(numbers, lane):
    """Divide the interval of g in which Picard's root lies.

    Args:
        numbers: The entries of α, B and δ, each (T,1), and the largest possible g, (T,1).
        lane: Index of the piece, (1,p).

    Returns:
        The lower and upper ends of the pieces (T,p), and whether (T,1) they are known.
    """
    a0, a1, b00, b01, b10, b11, d0, d1, most = numbers
    half_trace = (b00 + b11) * 0.5
    det = b00 * b11 - b01 * b10
    half_difference = (b00 - b11) * 0.5
    square = half_difference * half_difference + b01 * b10
    largest = half_trace + tl.sqrt(tl.where(square > 0.0, square, 0.0))
    # 1. A normal w with wᵀ B = largest · wᵀ. Both rows are multiples of w; the longer one is used.
    x0 = b10
    x1 = largest - b00
    y0 = largest - b11
    y1 = b01
    is_second = y0 * y0 + y1 * y1 > x0 * x0 + x1 * x1
    w0 = tl.where(is_second, y0, x0)
    w1 = tl.where(is_second, y1, x1)
    length = tl.sqrt(w0 * w0 + w1 * w1)
    length_alpha = length * tl.sqrt(a0 * a0 + a1 * a1)
    length_delta = length * tl.sqrt(d0 * d0 + d1 * d1)
    side_alpha = w0 * a0 + w1 * a1
    side_delta = w0 * d0 + w1 * d1
    is_clear_alpha = tl.abs(side_alpha) > length_alpha * MIN_SIDE
    is_clear_delta = tl.abs(side_delta) > length_delta * MIN_SIDE
    agree = (side_alpha * side_delta > 0.0) & is_clear_alpha & is_clear_delta
    agree = agree | ((length_alpha == 0.0) & is_clear_delta)
    agree = agree | ((length_delta == 0.0) & is_clear_alpha)
    is_half = (square > 0.0) & (largest * most > 1.0) & agree
    # 2. Otherwise all roots: det must have no zero.
    is_whole = (square < 0.0) | (largest <= 0.0)
    unit = 1.0 / tl.sqrt(tl.abs(det))
    unit = tl.where(unit < most * 0.125, unit, most * 0.125)
    inverse = 1.0 / largest
    low = _find_end(lane, is_half, inverse, unit, most)
    high = _find_end(lane + 1, is_half, inverse, unit, most)
    return low, high, is_half | is_whole


@triton.jit
def _middle(low, high):
    """Return the geometric mean; half of `high` where `low` is zero."""
    return tl.where(low > 0.0, tl.sqrt(low * high), high * 0.5)


@triton.jit
def _find_zeros(det, square, low, high, rises, going):
    """Return the zero of F in every piece, (T,p), by Newton within bounds.

    Args:
        det: Coefficients of det(I − g B).
        square: Coefficients of N².
        low, high: Ends of the pieces, (T,p).
        rises: Whether P rises there, so that F falls, (T,p).
        going: Which pieces have a zero, (T,p).
    """
    det0, det1, det2 = det
    n0, n1, n2, n3, n4 = square
    g = _middle(low, high)
    step = 0
    while (step < MAX_PAIR_STEPS) & _any_piece(going):
        n_square = n0 + g * (n1 + g * (n2 + g * (n3 + g * n4)))
        n_slope = n1 + g * (n2 * 2.0 + g * (n3 * 3.0 + g * (n4 * 4.0)))
        n = tl.sqrt(n_square)
        value = det0 + g * (det1 + g * det2) - g * n
        slope = det1 + g * det2 * 2.0 - n - g * n_slope / (n * 2.0)
        is_below = (value > 0.0) ^ (rises == 0)
        low = tl.where(is_below, g, low)
        high = tl.where(is_below, high, g)
        ahead = g - value / slope
        is_inside = (ahead > low) & (ahead < high)
        ahead = tl.where(is_inside, ahead, _middle(low, high))
        is_still = tl.abs(ahead - g) <= g * STILL
        g = tl.where(going, ahead, g)
        going = going & (is_still == 0)
        step += 1
    return g


@triton.jit
def find_pair(equation, live, tolerance):
    """Find all roots on Picard's side, and decide which one Picard converges to.

    Args:
        equation: α (T,2), B (T,2,2), δ (T,2), γ0 (T,), γ1 (T,2), Γ2 (T,2,2) and the floor (T,) of
            the square, in fp64.
        live: Which tokens there are, (T,).
        tolerance: |φ(s) − s| at a root, relative to the terms of φ, (T,).

    Returns:
        The roots (T,2), zero if not proven; whether (T,) the root attracts Picard; and whether
        (T,) this is proven. If a proven root does not attract, Picard converges to no root.
    """
    lane = tl.arange(0, PIECE_COUNT)[None, :]
    a0, a1 = _entry(equation[0], 0), _entry(equation[0], 1)
    b00, b01 = _row(equation[1], 0)
    b10, b11 = _row(equation[1], 1)
    d0, d1 = _entry(equation[2], 0), _entry(equation[2], 1)
    gamma0 = equation[3][:, None]
    c0, c1 = _entry(equation[4], 0), _entry(equation[4], 1)  # γ1
    e00, e01 = _row(equation[5], 0)  # Γ2
    e10, e11 = _row(equation[5], 1)
    floor = equation[6][:, None]
    tolerance = tolerance[:, None]

    # 1. In powers of g: det, the numerators x = (v, w) and N² = det (γ0 det + 2 γ1·x) + x·Γ2 x.
    trace = b00 + b11
    one = tl.zeros_like(trace) + 1.0
    det = (one, -trace, b00 * b11 - b01 * b10)
    v = (d0, a0 + b01 * d1 - b11 * d0, b01 * a1 - b11 * a0)
    w = (d1, a1 + b10 * d0 - b00 * d1, b10 * a0 - b00 * a1)
    along = _combine(det, gamma0, _combine(v, c0 * 2.0, w, c1 * 2.0), one)
    x0, x1, x2, x3, x4 = _multiply(along, det)
    y0, y1, y2, y3, y4 = _multiply(v, _combine(v, e00, w, e01))
    z0, z1, z2, z3, z4 = _multiply(w, _combine(v, e10, w, e11))
    n0, n1, n2, n3, n4 = x0 + y0 + z0, x1 + y1 + z1, x2 + y2 + z2, x3 + y3 + z3, x4 + y4 + z4
    q0, q1, q2, q3, q4 = _multiply(det, det)

    # 2. The pieces, each with at most one zero of P.
    numbers = (a0, a1, b00, b01, b10, b11, d0, d1, 1.0 / tl.sqrt(floor))
    low, high, is_known = _find_pieces(numbers, lane)
    p = (-q0, -q1, n0 - q2, n1 - q3, n2 - q4, n3, n4)
    changes, rises = _count_sign_changes(p, low, high - low)
    is_doubtful = (changes > 1) | (is_known == 0) | ((lane == PIECE_COUNT - 1) & (rises == 0))
    is_proven = live & (_count_pieces(is_doubtful) == 0)
    has_zero = (changes == 1) & is_proven[:, None]

    # 3. The zeros of F, their s, and Newton in s.
    g = _find_zeros(det, (n0, n1, n2, n3, n4), low, high, rises, has_zero)
    d = _evaluate_quadratic(det, g)
    s0 = _evaluate_quadratic(v, g) / d
    s1 = _evaluate_quadratic(w, g) / d
    move0 = tl.zeros_like(g)
    move1 = move0
    is_root = has_zero
    attracts = has_zero
    for _ in range(MAX_POLISH_STEPS + 1):
        s0 += move0
        s1 += move1
        moved0 = b00 * s0 + b01 * s1
        moved1 = b10 * s0 + b11 * s1
        slant0 = c0 + e00 * s0 + e01 * s1
        slant1 = c1 + e10 * s0 + e11 * s1
        under = gamma0 + s0 * (c0 + slant0) + s1 * (c1 + slant1)
        inverse = 1.0 / tl.sqrt(tl.where(under < floor, floor, under))
        top0 = (a0 + moved0) * inverse
        top1 = (a1 + moved1) * inverse
        psi0 = top0 + d0 - s0
        psi1 = top1 + d1 - s1
        size0 = (tl.abs(a0) + tl.abs(moved0)) * inverse + tl.abs(d0) + tl.abs(s0)
        size1 = (tl.abs(a1) + tl.abs(moved1)) * inverse + tl.abs(d1) + tl.abs(s1)
        most = tl.where(size0 > size1, size0, size1) * tolerance
        is_root = (tl.abs(psi0) <= most) & (tl.abs(psi1) <= most)
        # I − φ′, and the step with (I − φ′) · move = ψ.
        slant0 *= inverse * inverse
        slant1 *= inverse * inverse
        m00 = 1.0 - b00 * inverse + top0 * slant0
        m01 = top0 * slant1 - b01 * inverse
        m10 = top1 * slant0 - b10 * inverse
        m11 = 1.0 - b11 * inverse + top1 * slant1
        determinant = m00 * m11 - m01 * m10
        attracts = has_zero & (m00 + m11 > 0.0) & (determinant > 0.0)
        move0 = (m11 * psi0 - m01 * psi1) / determinant
        move1 = (m00 * psi1 - m10 * psi0) / determinant

    # 4. The root that attracts, otherwise the first.
    is_proven = is_proven & (_count_pieces(has_zero & (is_root == 0)) == 0)
    is_proven = is_proven & (_count_pieces(attracts) <= 1)
    order = lane + tl.where(attracts, 0, tl.where(has_zero, PIECE_COUNT, 2 * PIECE_COUNT))
    first = tl.min(order, 1)
    is_proven = is_proven & (first < 2 * PIECE_COUNT)
    is_chosen = (order == first[:, None]) & is_proven[:, None]
    root0 = tl.sum(tl.where(is_chosen, s0, 0.0), 1)
    root1 = tl.sum(tl.where(is_chosen, s1, 0.0), 1)
    root = tl.where(tl.arange(0, 2)[None, :] == 0, root0[:, None], root1[:, None])
    return root, first < PIECE_COUNT, is_proven
