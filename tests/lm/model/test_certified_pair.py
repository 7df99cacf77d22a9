"""Tests of the certified roots of two reflections and of each condition of the proof."""

import numpy as np
import pytest
import torch

from benchmarks.root_search import FLOOR, draw_pair_equations
from lm.kernels.cpu import roots as cpu_roots
from lm.model import certified_root
from lm.model.cell import Coefficients, _find_root_by_picard, _find_root_plain
from lm.model.solver import BISECTED, FAILED
from tests.kernels import skip_if_missing
from tests.marks import slow

# Shapes of alpha, beta, delta, gamma0, gamma1 and gamma2 for one token with r = 2.
SHAPES = [(1, 2), (1, 2, 2), (1, 2), (1,), (1, 2), (1, 2, 2)]


def equation(alpha, beta, delta=(0, 0), gamma0=1.0, gamma1=(0, 0), gamma2=(1, 0, 0, 1)):
    """Return the Coefficients of a token in fp64."""
    numbers = alpha, beta, delta, gamma0, gamma1, gamma2
    tensors = [torch.tensor(x, dtype=torch.float64) for x in numbers]
    return Coefficients(*(t.reshape(shape) for t, shape in zip(tensors, SHAPES)), FLOOR)


def scaled_distances(coefficients, s, other):
    """Return distances between roots in units of the equations' terms, (n,)."""
    return (s - other).abs().amax(1) / coefficients.size(s, coefficients.phi(s)[1])


@pytest.mark.parametrize("n", [20_000, slow(300_000)])
def test_random_equations_have_the_root_that_picard_finds(n):
    skip_if_missing(cpu_roots)
    equations = draw_pair_equations(n, 3)
    coefficients = Coefficients(*equations, FLOOR)
    picard, _ = cpu_roots.count_evaluations(equations, FLOOR, without_certified_search=True)
    s, attracts, is_proven = certified_root.find_certified_pairs(coefficients)
    has_both = is_proven & (picard.outcome == 0)
    assert (scaled_distances(coefficients, picard.s, s)[has_both] < 1e-3).all()
    assert attracts[has_both].all()
    # Most roots are proven, and some of them repel.
    assert is_proven.double().mean() > 0.8 and (is_proven & ~attracts).double().mean() > 0.03


def test_plain_pytorch_and_cpu_kernel_decide_alike():
    skip_if_missing(cpu_roots)
    equations = draw_pair_equations(20_000, 4)
    coefficients = Coefficients(*equations, FLOOR)
    s, attracts, is_proven = certified_root.find_certified_pairs(coefficients)
    expected_outcome = torch.where(attracts, 0, BISECTED)
    # 1. The kernel has the proven roots, after few evaluations, and the roots that Picard finds.
    compiled, evaluations = cpu_roots.count_evaluations(
        equations, FLOOR, without_certified_search=False
    )
    assert (scaled_distances(coefficients, s, compiled.s)[is_proven] < 1e-4).all()
    assert (expected_outcome == compiled.outcome)[is_proven].all()
    assert not (compiled.outcome & FAILED).any()
    assert evaluations[is_proven].max() < 100
    picard, _ = cpu_roots.count_evaluations(equations, FLOOR, without_certified_search=True)
    has_converged = picard.outcome == 0
    assert not compiled.outcome[has_converged].any()
    distances = scaled_distances(coefficients, picard.s, compiled.s)
    assert (distances[has_converged] < 1e-3).all()
    # 2. The whole search in plain PyTorch has the same roots.
    plain_s, plain_outcome = _find_root_plain(coefficients)
    distances = scaled_distances(coefficients, plain_s, compiled.s)
    assert (plain_outcome == expected_outcome)[is_proven].all()
    assert (distances[is_proven] < 1e-4).all()
    assert (distances[(plain_outcome | compiled.outcome) == 0] < 1e-3).all()
    # Plain PyTorch runs Picard in fp32: near a fold one of the two may find no root.
    assert (plain_outcome != compiled.outcome).double().mean() < 0.004


def test_root_is_on_the_side_of_alpha():
    """With B = diag(3, 1/2) two roots attract, on different sides of the line s₁ = 0."""
    for side in (1.0, -1.0):
        c = equation(alpha=(side * 0.1, 0.0), beta=(3.0, 0.0, 0.0, 0.5))
        s, attracts, is_proven = certified_root.find_certified_pairs(c)
        assert is_proven and attracts and s[0, 0] * side > 2.5
        expected, outcome = _find_root_by_picard(c)
        assert outcome == 0
        torch.testing.assert_close(s, expected, rtol=1e-9, atol=1e-12)


def test_rotation_without_attracting_root_is_decided():
    """B rotates and expands, so the only root repels, and Picard circles around it."""
    c = equation(alpha=(0.1, 0.0), beta=(4.0, -5.0, 5.0, 4.0))
    s, attracts, is_proven = certified_root.find_certified_pairs(c)
    assert is_proven and not attracts
    assert _find_root_by_picard(c)[1] == BISECTED
    torch.testing.assert_close(c.phi(s)[0], s, rtol=1e-9, atol=1e-12)
    assert _find_root_plain(c)[1] == BISECTED


@pytest.mark.parametrize(
    "numbers",
    [
        # With B = diag(·, 1/2) the line is s₁ = 0. α and δ are on different sides of it.
        dict(alpha=(0.1, 0.0), delta=(-0.3, 0.0), beta=(3.0, 0.0, 0.0, 0.5)),
        # α is on the line, up to 5e-5 of its length.
        dict(alpha=(5e-5, 1.0), beta=(1.5, 0.0, 0.0, 0.5)),
        # Nothing moves Picard away from zero.
        dict(alpha=(0.0, 0.0), beta=(3.0, 0.0, 0.0, 0.5)),
        # Two roots on the same side attract.
        dict(
            alpha=(0.033539, 0.016228),
            beta=(4.3104, -0.67844, 3.8122, 2.0041),
            delta=(-2.7335, -7.7156),
            gamma0=1.7206e-05,
            gamma1=(0.00056271, -0.00016405),
            gamma2=(0.077357, 0.013034, 0.013034, 0.068826),
        ),
        # One over an eigenvalue is in the interval, and neither side is known.
        dict(
            alpha=(-31.257, 36.038),
            beta=(23.187, -5.3453, 4.299, -13.296),
            delta=(2.2524, 1.5293),
            gamma0=232.47,
            gamma1=(-15.064, -15.964),
            gamma2=(20.58, -0.98438, -0.98438, 10.18),
        ),
        dict(alpha=(float("nan"), 1.0), beta=(3.0, 0.0, 0.0, 0.5)),
        dict(alpha=(1.0, 1.0), beta=(float("inf"), 0.0, 0.0, 0.5)),
    ],
    ids=["sides", "line", "zero", "several", "pole", "nan", "infinity"],
)
def test_unproven_pairs_are_rejected(numbers):
    s, _, is_proven = certified_root.find_certified_pairs(equation(**numbers))
    assert not is_proven and (s == 0).all()


def test_polynomials_satisfy_their_definitions():
    """Random equations satisfy s = v / det and N² = det² D at some g."""
    fields = [t.double() for t in draw_pair_equations(50, 5)]
    e = certified_root.PairEquation(*fields, FLOOR)
    for g in (1e-3, 0.3):
        powers = g ** torch.arange(5, dtype=torch.float64)
        matrix = torch.eye(2, dtype=torch.float64) - g * e.beta
        det = e.expand_determinant() @ powers[:3]
        torch.testing.assert_close(det, torch.linalg.det(matrix), rtol=1e-8, atol=1e-9)
        s = torch.einsum("k,nki->ni", powers[:3], e.expand_numerator()) / det.unsqueeze(-1)
        expected = torch.linalg.solve(matrix, g * e.alpha + e.delta)
        torch.testing.assert_close(s, expected, rtol=1e-6, atol=1e-9)
        quadratic_term = torch.einsum("ni,nij,nj->n", s, e.gamma2, s)
        radicand = e.gamma0 + 2 * (e.gamma1 * s).sum(1) + quadratic_term  # D
        n_squared = e.expand_n_squared() @ powers
        torch.testing.assert_close(n_squared, det**2 * radicand, rtol=1e-5, atol=1e-9)


def test_bernstein_coefficients_count_zeros():
    rng = np.random.default_rng(0)
    ends = torch.tensor([[0.0, 0.3, 0.5, 2.0]], dtype=torch.float64)
    for _ in range(20):
        zeros = rng.uniform(0, 2, 3)
        # Degree 6: three zeros in the pieces, and i, −i and −2.
        descending = np.poly([*zeros, 1j, -1j, -2.0]).real
        coefficients = torch.from_numpy(descending[::-1].copy()).unsqueeze(0)
        bernstein = certified_root.to_bernstein(coefficients, ends)[0]
        value_at_ends = np.polyval(descending, ends[0].numpy())
        np.testing.assert_allclose(bernstein[:, 0], value_at_ends[:-1], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(bernstein[:, -1], value_at_ends[1:], rtol=1e-9, atol=1e-12)
        changes, at_upper_end = certified_root.count_sign_changes(coefficients, ends)
        zero_counts = np.histogram(zeros, ends[0].numpy())[0]
        surplus = changes[0].numpy() - zero_counts  # Descartes' rule: even, and not negative
        assert (surplus >= 0).all() and (surplus % 2 == 0).all()
        torch.testing.assert_close(at_upper_end[0], bernstein[:, -1])
    zero_polynomial = torch.zeros(1, 7, dtype=torch.float64)
    changes, _ = certified_root.count_sign_changes(zero_polynomial, ends)
    assert (changes == certified_root.UNKNOWN).all()
