"""The certified root of two reflections on the CPU: it is Picard's, and proven in fewer steps."""

import pytest
import torch

from benchmarks.root_search import FLOOR, random_pairs
from lm.kernels.cpu import roots as cpu_roots
from lm.model.cell import Coefficients, _find_root_by_picard
from lm.model.solver import BISECTED, FAILED
from tests.kernels import skip_where_missing
from tests.marks import slow

SHAPES = {"alpha": (1, 2), "beta": (1, 2, 2), "delta": (1, 2), "gamma0": (1,), "gamma1": (1, 2)}
SHAPES |= {"gamma2": (1, 2, 2)}


@pytest.fixture(autouse=True)
def skip_without_compiler():
    skip_where_missing(cpu_roots)


def equation(alpha, beta, delta=(0, 0), gamma0=1.0, gamma1=(0, 0), gamma2=(1, 0, 0, 1)):
    """One token's Coefficients in fp64."""
    numbers = zip(SHAPES.values(), (alpha, beta, delta, gamma0, gamma1, gamma2))
    fields = [torch.tensor(x, dtype=torch.float64).reshape(shape) for shape, x in numbers]
    return Coefficients(*fields, FLOOR)


@pytest.mark.parametrize("n", [20_000, slow(300_000)])
def test_random_equations_have_the_root_that_picard_finds(n):
    equations = random_pairs(n, 3)
    coefficients = Coefficients(*equations, FLOOR)
    picard, evaluations_before = cpu_roots.count_evaluations(equations, FLOOR, True)
    found, evaluations = cpu_roots.count_evaluations(equations, FLOOR, False)
    converged = picard.outcome == 0
    size = coefficients.size(picard.s, coefficients.phi(picard.s)[1])
    distance = (found.s - picard.s).abs().amax(1) / size
    assert (distance[converged] < 1e-3).all()
    assert not found.outcome[converged].any() and not (found.outcome & FAILED).any()
    # A proof ends the search within 100 evaluations, also where no root attracts Picard.
    many = evaluations_before > 200
    assert (evaluations[many] < 100).double().mean() > 0.8
    assert ((found.outcome == BISECTED) & (evaluations < 100)).double().mean() > 0.03


@pytest.mark.parametrize(
    "numbers",
    [
        # B = diag(3, 1/2): two roots attract, one on each side of the line s₁ = 0.
        dict(alpha=(0.1, 0.0), beta=(3.0, 0.0, 0.0, 0.5)),
        dict(alpha=(-0.1, 0.0), beta=(3.0, 0.0, 0.0, 0.5)),
        # B turns and stretches: the only root repels, and Picard circles around it.
        dict(alpha=(0.1, 0.0), beta=(4.0, -5.0, 5.0, 4.0)),
        # α and δ lie on two sides of the line.
        dict(alpha=(0.1, 0.0), delta=(-0.3, 0.0), beta=(3.0, 0.0, 0.0, 0.5)),
        # α lies on the line up to 5e-5 of its length.
        dict(alpha=(5e-5, 1.0), beta=(1.5, 0.0, 0.0, 0.5)),
        # There is nothing to move away from zero.
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
    ids=["right", "left", "turn", "sides", "line", "zero", "several", "pole", "nan", "infinity"],
)
def test_the_root_is_picards(numbers):
    c = equation(**numbers)
    s, outcome = cpu_roots.find_roots(*c)
    expected, expected_outcome = _find_root_by_picard(c)
    assert outcome == expected_outcome
    torch.testing.assert_close(s, expected, rtol=1e-7, atol=1e-9, equal_nan=True)
