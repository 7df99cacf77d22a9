"""Tests of Newton's certified root: it is Picard's, and every condition of the proof is needed."""

import pytest
import torch

from benchmarks.root_search import FLOOR, draw_equations
from lm.kernels.cpu import roots as cpu_roots
from lm.model import certified_root
from lm.model.cell import Coefficients, _find_root_by_picard, _find_root_plain
from lm.model.solver import BISECTED, FAILED
from tests.kernels import skip_if_missing
from tests.lm.model.test_cell import roots_by_bisection, scalar
from tests.marks import slow


@pytest.mark.parametrize("n", [20_000, slow(1_000_000)])
def test_random_equations_have_the_root_that_picard_finds(n):
    """Distances are relative to the equation's terms: a root near zero may be only rounding."""
    skip_if_missing(cpu_roots)
    equations = draw_equations(n, 1)
    picard, _ = cpu_roots.count_evaluations(equations, FLOOR, without_certified_search=True)
    search, _ = cpu_roots.count_evaluations(equations, FLOOR, without_certified_search=False)
    coefficients = Coefficients(*equations, FLOOR)
    size = coefficients.size(picard.s, coefficients.phi(picard.s)[1])
    distances = (picard.s - search.s).abs()[:, 0] / size
    assert (distances[picard.outcome == 0] < 1e-3).all()
    assert not (search.outcome & FAILED).any()
    is_proven = certified_root.find_certified_roots(coefficients)[1]
    assert is_proven.double().mean() > 0.7  # most roots need no Picard
    assert not search.outcome[is_proven].any()


def test_plain_pytorch_and_cpu_kernel_prove_the_same_roots():
    skip_if_missing(cpu_roots)
    equations = draw_equations(3000, 2)
    s, outcome = _find_root_plain(Coefficients(*equations, FLOOR))
    compiled = cpu_roots.find_roots(*equations, FLOOR)
    is_proven = certified_root.find_certified_roots(Coefficients(*equations, FLOOR))[1]
    torch.testing.assert_close(s[is_proven], compiled.s[is_proven], rtol=1e-6, atol=1e-9)
    assert not (outcome | compiled.outcome)[is_proven].any()


def is_root_proven(root, floor=1e-5, **numbers):
    """Return whether the root of the equation `scalar(**numbers)` is proven to be Picard's."""
    tensors = (t.flatten() for t in scalar(**numbers)[:-1])
    e = certified_root.ScalarEquation(*tensors, floor)
    zero = torch.zeros(1, dtype=torch.float64)
    root = torch.tensor([root], dtype=torch.float64)
    return certified_root.is_picards_root(e, e.phi(zero), root).item()


def test_only_the_first_of_three_roots_is_proven():
    equation = dict(alpha=1e-3, beta=3.0)
    low, middle, high = roots_by_bisection(scalar(**equation)).tolist()
    assert is_root_proven(high, **equation)
    assert not is_root_proven(low, **equation) and not is_root_proven(middle, **equation)
    # φ(0) > 0, so Picard moves away from the unstable negative root, although no root lies between.
    equation = dict(alpha=0.0, beta=3.0, delta=1e-3)
    middle = roots_by_bisection(scalar(**equation))[1].item()
    assert middle < 0 and not is_root_proven(middle, **equation)


def test_a_root_behind_two_others_is_not_proven():
    """With s − 4 for s, φ = (1e-3 + 3 s) / √(1 + s²) has three positive roots, and φ rises."""
    equation = dict(alpha=1e-3 - 12.0, beta=3.0, delta=4.0, gamma0=17.0, gamma1=-4.0)
    first, middle, last = (4 + roots_by_bisection(scalar(1e-3, 3.0))).tolist()
    assert is_root_proven(first, **equation)
    assert not is_root_proven(middle, **equation) and not is_root_proven(last, **equation)


def test_a_fall_below_zero_is_not_proven():
    """φ falls below zero beyond the root if it is steep, so Picard may cross zero."""
    steep, flat = dict(alpha=1.0, beta=-50.0), dict(alpha=1.0, beta=-0.5)
    (root,) = roots_by_bisection(scalar(**steep)).tolist()
    assert not is_root_proven(root, **steep)
    (root,) = roots_by_bisection(scalar(**flat)).tolist()
    assert is_root_proven(root, **flat)


@pytest.mark.parametrize(
    "numbers, refused_root, picards_root",
    [
        # r is the refused root, Φ the largest value of φ on [0, r]; signs as for r > 0.
        # φ does not fall on all of [r, Φ]: it rises again before Φ, and Picard ends beyond r.
        ((-8.974, 1.455, 4.946, 10.667, -5.611, 4.118), 0.981, 4.616),
        # φ falls from φ(0) < r and rises again to r: there is a root below.
        ((5.386, 4.308, -5.825, 0.859, 0.859, 5.811), -7.336, -0.007),
        # φ turns on [0, r], so that φ(0) is not its largest value.
        ((9.465, 3.356, -9.689, 0.388, -0.285, 0.25), 4.594, -14.725),
        # φ rises at zero and falls at r.
        ((-4.21, 5.757, 2.665, 2.084, 4.135, 8.883), -1.489, 4.088),
        # φ(0) < r: there is a root between them.
        ((3.732, 0.41, -1.125, 9.434, -3.481, 1.398), 1.052, 0.248),
    ],
    ids=["range", "reach", "turn", "rises", "between"],
)
def test_each_condition_refuses_a_root(numbers, refused_root, picards_root):
    names = ("alpha", "beta", "delta", "gamma0", "gamma1", "gamma2")
    equation = dict(zip(names, numbers))
    s, outcome = _find_root_by_picard(scalar(**equation))
    assert outcome == 0 and abs(s.item() - picards_root) < 0.05
    roots = roots_by_bisection(scalar(**equation)).tolist()
    (candidate,) = [root for root in roots if abs(root - refused_root) < 0.05]
    assert not is_root_proven(candidate, **equation)


def test_nothing_is_proven_if_the_square_is_floored():
    """D = 1 + s² is at least 1, so a floor of 1.01 changes φ near zero."""
    equation = dict(alpha=0.5, beta=0.2)
    (root,) = roots_by_bisection(scalar(**equation)).tolist()
    assert is_root_proven(root, **equation) and not is_root_proven(root, floor=1.01, **equation)


@pytest.mark.parametrize(
    "cubic, has_none",
    [
        ((1.0, 1.0, 1.0, 1.0), True),
        ((1.0, -2.0, 0.0, 0.0), False),  # a zero at 1/2
        ((-1.0, 0.0, 0.0, 0.5), True),  # the zero is beyond 1
        ((0.2, -1.0, 1.0, 0.0), False),  # two zeros in [0, 1]
        ((float("nan"), 1.0, 1.0, 1.0), False),
    ],
)
def test_cubics_without_zero_are_recognized(cubic, has_none):
    assert certified_root.has_no_zero(*torch.tensor(cubic)).item() is has_none


@pytest.mark.parametrize(
    "case",
    [
        dict(alpha=0.0, beta=0.0, gamma2=0.0),
        dict(alpha=0.0, beta=2.0),  # zero is a root
        dict(alpha=1.0, beta=2.0, gamma0=1.0, gamma1=0.5, gamma2=0.25),  # n1 = 0
        dict(alpha=1e-6, beta=1e-6, gamma0=1e-5, gamma2=1e-8),
        dict(alpha=1e6, beta=1e6, gamma0=1e8, gamma2=1e6),
        dict(alpha=1e-8, beta=1.0),  # nearly a triple root
        dict(alpha=torch.nan, beta=1.0),
        dict(alpha=torch.inf, beta=1.0),
    ],
    ids=str,
)
def test_special_equations_have_picards_status(case):
    """If Picard does not converge (BISECTED), the status may differ."""
    s, outcome = _find_root_plain(scalar(**case))
    expected, picard_outcome = _find_root_by_picard(scalar(**case))
    assert (outcome == picard_outcome) | (picard_outcome == BISECTED)
    if picard_outcome == 0:
        torch.testing.assert_close(s, expected, rtol=1e-6, atol=1e-9)
