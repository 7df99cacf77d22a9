"""Tests of a token's own equation: choice of the root, gradient, status."""

import pytest
import torch

from lm.kernels.cpu import roots as cpu_roots
from lm.model import cell
from lm.model.cell import (
    MAX_GAIN,
    Coefficients,
    EquationTerms,
    LowRank,
    Norm,
    find_root,
    solve_low_rank,
)
from lm.model.solver import BISECTED, FAILED, GRAD_LIMITED
from tests.kernels import skip_if_missing

D = 12


@pytest.fixture(autouse=True, params=["plain", "auto"])
def kernels(request, monkeypatch):
    """Run every test in plain PyTorch and with the compiled search."""
    if request.param == "auto":
        skip_if_missing(cpu_roots)
    monkeypatch.setenv("FPRNN_KERNELS", request.param)
    return request.param


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def coefficients_of(c, m, U, weight, bias, eps=1e-5, kind="layer"):
    """Return the coefficients of s = U norm(c + Σ_j m_j s_j). c: (n,d); m, U: (n,r,d)."""
    if kind == "layer":
        c, m = c - c.mean(-1, keepdim=True), m - m.mean(-1, keepdim=True)
    d = c.shape[-1]
    return Coefficients(
        torch.einsum("nrd,nd->nr", U * weight, c),
        torch.einsum("nrd,nsd->nrs", U * weight, m),
        U @ bias,
        c.square().mean(-1) + eps,
        torch.einsum("nrd,nd->nr", m, c) / d,
        torch.einsum("nrd,nsd->nrs", m, m) / d,
        eps,
    )


def random_coefficients(n=400, r=1, scale=1.0, seed=0, eps=1e-5):
    U = normal(n, r, D, seed=seed)
    U = U / U.norm(dim=-1, keepdim=True)
    m = scale * (U * normal(n, 1, 1, seed=seed + 1).exp() + 0.3 * normal(n, r, D, seed=seed + 2))
    weight, bias = 1 + 0.3 * normal(D, seed=seed + 4), 0.3 * normal(D, seed=seed + 5)
    return coefficients_of(normal(n, D, seed=seed + 3), m, U, weight, bias, eps)


def run_picard(coefficients, steps, tol=1e-13, patience=15):
    """Run damped Picard from zero; tokens that do not converge get NaN.

    patience: Number of steps without a new lowest residual after which a token's step shrinks.
    """
    s, roots = torch.zeros_like(coefficients.alpha), torch.full_like(coefficients.alpha, torch.nan)
    step, lowest = torch.full((len(s),), 0.99).double(), torch.full((len(s),), torch.inf).double()
    stale = torch.zeros(len(s))
    for _ in range(steps):
        psi = coefficients.phi(s)[0] - s
        residual = psi.abs().amax(-1)
        is_new = roots.isnan().any(-1) & (residual < tol * (1 + s.abs().amax(-1)))
        roots[is_new] = s[is_new]
        if not roots.isnan().any():
            break
        stale = torch.where(residual < lowest, 0, stale + 1)
        lowest = lowest.minimum(residual)
        step = torch.where(stale >= patience, 0.9 * step, step)
        stale = torch.where(stale >= patience, 0, stale)
        s = s + step.unsqueeze(-1) * psi
    return roots


def residual_of(coefficients, s):
    """Return the residual of s (n,r) in units of `Coefficients.rounding`, (n,)."""
    value, parts = coefficients.phi(s)
    return (value - s).abs().amax(-1) / coefficients.rounding(s, parts).clamp_min(1e-300)


def roots_by_bisection(one, points=4001):
    """Find all roots s of a token with r = 1 by sign changes of φ(s) − s on a grid."""
    # From −149 to 149, which is beyond |φ| here; dense near 0.
    grid = torch.sinh(torch.linspace(-8, 8, points, dtype=torch.float64)) / 10

    def psi(s):
        many = Coefficients(*(t.expand(len(s), *t.shape[1:]) for t in one[:-1]), one.floor)
        return many.phi(s.unsqueeze(1))[0][:, 0] - s

    signs = psi(grid).sign()
    crossings = (signs[1:] != signs[:-1]).nonzero().flatten()
    low, high, low_sign = grid[crossings], grid[crossings + 1], signs[crossings]
    for _ in range(80):
        middle = (low + high) / 2
        is_low = psi(middle).sign() == low_sign
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    return (low + high) / 2


# The root.


@pytest.mark.parametrize("r", [1, 2, 3, 4])
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0, 1e4])
def test_root_solves_its_equation_and_is_picards(r, scale):
    coefficients = random_coefficients(200, r, scale, seed=r)
    s, status = find_root(coefficients)
    assert not (status & FAILED).any()
    assert (residual_of(coefficients, s) <= cell.SOLVED).all()
    first = slice(0, 40)
    expected = run_picard(coefficients.select(first), cell.MAX_PICARD_STEPS)
    has_converged = expected.isfinite().all(-1)
    assert has_converged.sum() >= 30
    torch.testing.assert_close(
        s[first][has_converged], expected[has_converged], rtol=1e-6, atol=1e-8
    )


@pytest.mark.parametrize("scale", [0.3, 3.0, 30.0])
def test_root_of_one_reflection_is_among_all_roots(scale):
    coefficients = random_coefficients(60, 1, scale, seed=11)
    s, status = find_root(coefficients)
    assert not (status & FAILED).any()
    count_with_several = 0
    for i in range(len(s)):
        roots = roots_by_bisection(coefficients.select(slice(i, i + 1)))
        count_with_several += len(roots) > 1
        assert len(roots) >= 1
        distances = (roots - s[i, 0]).abs() / (1 + roots.abs())
        assert distances.min() < 1e-9, (i, roots, s[i])
    assert count_with_several > 0 or scale < 1  # a small M has one solution


def scalar(alpha, beta, gamma0=1.0, gamma1=0.0, gamma2=1.0, delta=0.0):
    """Return the coefficients of a single equation with r = 1."""
    row = [
        torch.tensor([v], dtype=torch.float64) for v in (alpha, beta, delta, gamma0, gamma1, gamma2)
    ]
    a, b, d, g0, g1, g2 = row
    return Coefficients(
        a[:, None], b[:, None, None], d[:, None], g0, g1[:, None], g2[:, None, None], 1e-5
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_sign_at_zero_decides_among_three_roots(sign):
    """φ = (α + 3 s) / √(1 + s²) has three roots for small α; the middle one is unstable."""
    coefficients = scalar(sign * 1e-3, 3.0)
    roots = roots_by_bisection(coefficients)
    assert len(roots) == 3
    s, status = find_root(coefficients)
    assert not (status & FAILED).any()
    torch.testing.assert_close(s[0, 0], roots[2 if sign > 0 else 0], rtol=1e-12, atol=0)
    assert coefficients.jacobian(coefficients.phi(s)[1])[0, 0, 0] < 1


def test_root_that_picard_passes_near_a_fold_is_not_returned():
    """Just past a fold, Picard moves slowly past the vanished root, on to the remaining root."""
    for gap in (1e-2, 1e-4):
        # φ near s = 0 is s + gap + …: no root is near.
        coefficients = scalar(gap, 1.0, gamma2=1.0, gamma1=-0.5)
        s, status = find_root(coefficients)
        assert not (status & FAILED).any() and (residual_of(coefficients, s) <= cell.SOLVED).all()
        theirs = run_picard(coefficients, 1000, 1e-12, patience=1000)  # the residual grows at first
        torch.testing.assert_close(s, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "case",
    [
        dict(alpha=1.0, beta=-50.0),  # overshoots from side to side
        dict(alpha=0.3, beta=-4.0, gamma1=0.9),
        dict(alpha=1e-8, beta=1.0),  # a triple root at 0, nearly
        dict(alpha=1e6, beta=1e6, gamma2=1e6),
        dict(alpha=1.0, beta=0.0),
        dict(alpha=0.0, beta=0.0),
        dict(alpha=1e-300, beta=1e-300, gamma0=1e-5),
        dict(alpha=-1.0, beta=3.0, gamma0=1e-5, gamma1=1e-3, gamma2=1.0, delta=2.0),
    ],
    ids=str,
)
def test_adversarial_coefficients_are_solved_or_failed(case):
    coefficients = scalar(**case)
    s, status = find_root(coefficients)
    assert torch.isfinite(s).all()
    assert not (status & FAILED).any() and (residual_of(coefficients, s) <= cell.SOLVED).all()


def test_root_of_a_token_does_not_depend_on_others():
    coefficients = random_coefficients(50, 3, 5.0, seed=3)
    together, _ = find_root(coefficients)
    for i in range(0, 50, 7):
        alone, _ = find_root(coefficients.select(slice(i, i + 1)))
        torch.testing.assert_close(alone[0], together[i], rtol=1e-11, atol=1e-12)


def test_every_token_is_solved_in_fp32():
    for r in (1, 2, 4):
        exact = random_coefficients(300, r, 3.0, seed=21)
        low = Coefficients(*(t.float() for t in exact[:-1]), exact.floor)
        s, status = find_root(low)
        assert not (status & FAILED).any() and s.dtype == torch.float32


# Newton and bisection.


def newton_from(coefficients, start, reach):
    """Return Newton's root and whether it is accepted, at most `reach` from the start."""
    s = torch.tensor([[start]], dtype=torch.float64)
    residual = (coefficients.phi(s)[0] - s).abs().amax(-1)
    root, is_root = cell._newton(coefficients, s, residual, torch.full_like(residual, reach))
    return root.item(), is_root.item()


def test_newton_rejects_roots_that_repel_picard():
    coefficients = scalar(1e-3, 3.0)
    low, middle, high = roots_by_bisection(coefficients).tolist()
    assert newton_from(coefficients, 0.0, 1.0) == (pytest.approx(middle, abs=1e-12), False)
    assert newton_from(coefficients, high + 0.1, 1.0) == (pytest.approx(high), True)
    assert newton_from(coefficients, low - 0.1, 1.0) == (pytest.approx(low), True)


def test_newton_stays_within_reach():
    coefficients = scalar(1e-3, 3.0)
    high = roots_by_bisection(coefficients)[2].item()
    assert newton_from(coefficients, high + 0.1, 0.11)[1]
    assert not newton_from(coefficients, high + 0.1, 0.09)[1]


def test_newton_stops_if_a_step_does_not_halve_the_residual():
    """Newton's step is long if φ′ is nearly 1."""
    assert newton_from(scalar(1e-3, 3.0), 1.045, 1e9) == (1.045, False)


@pytest.mark.parametrize(
    "slope, attracts",
    [
        ([[0.9]], True),
        ([[1.1]], False),
        ([[-40.0]], True),
        ([[3.0, 0.0], [0.0, 0.1]], False),
        ([[-5.0, 0.0], [0.0, 0.5]], True),  # damping makes it converge
        ([[0.5, -9.0], [9.0, 0.5]], True),
        ([[1.2, -9.0], [9.0, 1.2]], False),
        ([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0], [0.0, 0.0, 0.5]], False),  # det (I − φ′) > 0
        ([[float("nan"), 0.0], [0.0, 0.5]], False),
    ],
    ids=str,
)
def test_slopes_with_eigenvalues_below_one_attract(slope, attracts):
    slope = torch.tensor(slope, dtype=torch.float64).unsqueeze(0)
    assert cell._attracts(slope).tolist() == [attracts]


@pytest.mark.parametrize("r", [1, 2, 4])
@pytest.mark.parametrize("scale", [0.1, 10.0, 1e4])
def test_bisection_finds_roots_that_picard_does_not(r, scale, monkeypatch):
    """Bisection is called without any step of Picard."""
    coefficients = random_coefficients(200, r, scale, seed=40 + r)
    s, solved = cell._bisect(coefficients)
    assert solved.all() and (residual_of(coefficients, s) <= cell.SOLVED).all()
    monkeypatch.setattr(cell, "MAX_PICARD_STEPS", 0)
    roots, status = cell._find_root_by_picard(coefficients)
    assert (status == BISECTED).all() and torch.equal(roots, s)


# A token.


def token_of(kind="layer", gate=True, b=2, length=5, seed=0):
    """Return random EquationTerms and their tensors."""
    tensors = {
        "x": normal(b, length, D, seed=seed),
        "history": normal(b, length, D, seed=seed + 1),
        "gain": 0.5 + 0.3 * normal(b, length, D, seed=seed + 2).abs(),
        "weight": 1 + 0.3 * normal(D, seed=seed + 3),
        "bias": 0.3 * normal(D, seed=seed + 4),
        "gate": normal(b, length, D, seed=seed + 5) if gate else None,
    }
    return make(kind, **tensors), tensors


def make(kind, x, history, gain, weight, bias, gate):
    norm = Norm(kind, weight, bias if kind == "layer" else None, 1e-2)
    return EquationTerms(x, history, gain, gate, norm if kind != "none" else Norm("none"))


def low_rank_of(r, b=2, length=5, seed=30, size=0.3):
    U = normal(b, length, r, D, seed=seed)
    U = U / U.norm(dim=-1, keepdim=True)
    return LowRank(U, size * torch.tril(normal(b, length, r, r, seed=seed + 1)))


def matrix_of(low_rank):
    return low_rank.U.transpose(-1, -2) @ low_rank.T @ low_rank.U


@pytest.mark.parametrize("r", [1, 2, 4])
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("kind", ["layer", "rms", "none"])
def test_a_solved_token_satisfies_its_own_equation(kind, gate, r):
    terms, _ = token_of(kind, gate)
    low_rank = low_rank_of(r)
    M = matrix_of(low_rank)
    y, mixed, status = solve_low_rank(terms, low_rank)
    assert not (status & FAILED).any()
    expected = terms.x - (M @ terms.x.unsqueeze(-1) - M @ y.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(mixed, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(terms.value(mixed), y, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kind", ["layer", "rms", "none"])
def test_gradient_equals_that_of_the_solution(kind):
    _, tensors = token_of(kind, b=1, length=2)
    low_rank = low_rank_of(2, 1, 2, size=0.15)
    names = ["x", "history", "gain", "gate"] + (["weight"] if kind != "none" else [])
    names += ["bias"] if kind == "layer" else []

    def solve(U, T, *values):
        terms = make(kind, **{**tensors, **dict(zip(names, values))})
        return solve_low_rank(terms, LowRank(U, T))[:2]

    inputs = [*low_rank, *(tensors[name] for name in names)]
    inputs = [t.clone().requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(
        solve, inputs, eps=1e-6, atol=1e-6, rtol=1e-5, check_undefined_grad=False
    )


def limited_gradient(matrix, status):
    """Return the gradient that s passes back for ones, and its status. matrix: I − φ′, (n,r,r)."""
    matrix = torch.tensor(matrix, dtype=torch.float64)
    value = torch.zeros(matrix.shape[:2], dtype=torch.float64, requires_grad=True)
    s, status = cell._attach_gradient(
        value, torch.ones_like(value), matrix, torch.tensor(status, dtype=torch.uint8)
    )
    (grad,) = torch.autograd.grad(s.sum(), value)
    return grad, status.tolist()


def test_gradient_near_a_fold_is_limited_and_counted():
    grad, status = limited_gradient(
        [[[0.5]], [[1e-9]], [[0.0]], [[-1.0]]], [0, 0, FAILED, BISECTED]
    )
    torch.testing.assert_close(grad.flatten(), torch.tensor([2.0, MAX_GAIN, 1.0, -1.0]).double())
    assert status == [0, GRAD_LIMITED, FAILED, BISECTED]


def test_gradient_limit_is_on_the_euclidean_norm():
    """(I − φ′)⁻ᵀ (1, 1) = (30, 1) is scaled by √2 · 20 / ‖(30, 1)‖.

    A limit on the largest entry would scale it by 20 / 30, and one on the sum by 40 / 31.
    """
    grad, status = limited_gradient([[[1 / 30, 0.0], [0.0, 1.0]]], [0])
    expected = torch.tensor([[30.0, 1.0]]).double()
    expected *= MAX_GAIN * 2**0.5 / expected.norm()
    torch.testing.assert_close(grad, expected)
    assert status == [GRAD_LIMITED]


def test_failed_token_has_the_one_step_gradient():
    grad, _ = limited_gradient([[[0.5]], [[0.5]]], [0, FAILED])
    assert grad.flatten().tolist() == [2.0, 1.0]
