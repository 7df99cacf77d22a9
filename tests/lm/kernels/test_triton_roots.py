"""The Triton kernel `roots`, interpreted, against the CPU kernel and the plain search."""

import pytest
import torch

from lm.kernels import Unsupported
from lm.kernels.cpu import roots as cpu_roots
from lm.kernels.triton import roots as triton_roots
from lm.kernels.triton.build import INTERPRETED
from lm.model import cell
from lm.model.solver import FAILED
from tests.kernels import assert_nothing_spills, poisoned_memory, record_launches, skip_if_missing
from tests.lm.model.test_cell import (
    coefficients_of,
    normal,
    random_coefficients,
    roots_by_bisection,
    scalar,
)
from tests.marks import slow

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter warns when a search goes through a pole.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def poison_memory():
    skip_if_missing(triton_roots)
    with poisoned_memory():
        yield


def cast_to_fp32(coefficients, device="cpu"):
    tensors = (t.to(device, torch.float32) for t in coefficients[:-1])
    return cell.Coefficients(*tensors, coefficients.floor)


def solve_on_device(coefficients):
    s, outcome = triton_roots.find_roots(*cast_to_fp32(coefficients, DEVICE))
    return s.cpu(), outcome.cpu()


@pytest.mark.parametrize("r, tokens", [(1, 11), (2, 11), slow(3, 11), (4, 11), slow(6, 3), (8, 3)])
def test_roots_equal_the_plain_search(r, tokens):
    coefficients = random_coefficients(tokens, r, 1.0, seed=r)
    s, outcome = solve_on_device(coefficients)
    expected, expected_outcome = cell._find_root_plain(cast_to_fp32(coefficients))
    assert torch.equal(outcome, expected_outcome) and not (outcome == FAILED).any()
    torch.testing.assert_close(s, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("r, scale", [(1, 1e3), (2, 3.0), slow(3, 1e3)])
def test_search_has_the_steps_of_the_cpu_kernel(r, scale):
    """Some equations need bisection.

    Two reflections are compared with the CPU's search by Picard, because Triton has no certificate.
    """
    if not cpu_roots.usable()[0]:
        pytest.skip(cpu_roots.usable()[1])
    coefficients = random_coefficients(16, r, scale, seed=20 + r)
    s, outcome = solve_on_device(coefficients)
    *equations, floor = cast_to_fp32(coefficients)
    (expected, expected_outcome), _ = cpu_roots.count_evaluations(
        equations, floor, without_certified_search=r > 1
    )
    assert torch.equal(outcome, expected_outcome)
    torch.testing.assert_close(s, expected, rtol=1e-5, atol=1e-6)


def test_root_that_picard_circles_is_bisected():
    """Β rotates s by 90 degrees, so that Picard circles around the root."""
    turn = torch.tensor([[0.0, -40.0], [40.0, 0.0]]).double().repeat(3, 1, 1)
    U = torch.eye(12).double()[:2].repeat(3, 1, 1)
    coefficients = coefficients_of(
        normal(3, 12), turn @ U, U, torch.ones(12).double(), torch.zeros(12).double(), kind="rms"
    )
    s, outcome = solve_on_device(coefficients)
    psi = cast_to_fp32(coefficients).phi(s)[0] - s
    assert not (outcome == FAILED).any() and psi.abs().max() < 1e-3


@triton.jit
def _newton_kernel(out, start, residual, TOKENS: tl.constexpr, R: tl.constexpr):
    """Run `_try_newton` on φ(s) = (1e-3 + 3 s) / √(1 + s²) from `start`, at q = 1/2."""
    zeros = tl.zeros([TOKENS, R], tl.float64)
    one = tl.zeros([TOKENS], tl.float64)
    square = tl.zeros([TOKENS, R, R], tl.float64)
    equation = (zeros + 1e-3, square + 3.0, zeros, one + 1.0, zeros, square + 1.0, one + 1e-5)
    s, has_root = triton_roots._try_newton(
        zeros + start, one == 0.0, one + residual, one + 0.5, equation, one + 1e-16, R
    )
    tl.store(out + tl.arange(0, TOKENS), tl.where(has_root, tl.sum(s, 1), float("nan")))


def test_newton_stays_within_twice_the_remaining_distance():
    """The root is 2.828…; at a residual ρ its distance is 2 ρ, and Newton may move 4 ρ."""
    root = roots_by_bisection(scalar(1e-3, 3.0))[2].item()
    for residual, is_within in [(0.026, True), (0.024, False), (0.003, False)]:
        roots = torch.empty(2, dtype=torch.float64, device=DEVICE)
        _newton_kernel[(1,)](roots, root + 0.1, residual, TOKENS=2, R=1)
        assert roots.isfinite().all() == is_within
        if is_within:
            torch.testing.assert_close(roots, torch.full_like(roots, root))


def test_elimination_exchanges_rows():
    """The first entry of I − φ′ is 0: elimination without exchanges would divide by it."""
    beta = torch.tensor([[1.0, 0.5], [0.5, 0.0]]).double().repeat(2, 1, 1)
    zeros = torch.zeros(2, 2).double()
    alpha = torch.tensor([[0.3, -0.2], [0.1, 0.4]]).double()
    coefficients = cell.Coefficients(
        alpha, beta, zeros, torch.ones(2).double(), zeros, torch.zeros(2, 2, 2).double(), 1e-5
    )
    s, outcome = solve_on_device(coefficients)
    eye = torch.eye(2).double()
    expected = torch.linalg.solve(eye - beta, alpha)  # φ is linear here
    assert not (outcome == FAILED).any()
    torch.testing.assert_close(s.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name, value",
    [("alpha", torch.nan), ("gamma0", torch.nan), ("gamma2", torch.nan), ("alpha", torch.inf)],
)
def test_nan_stays_in_its_token(name, value):
    coefficients = random_coefficients(6, 2)
    expected, _ = solve_on_device(coefficients)
    getattr(coefficients, name)[3] = value
    s, outcome = solve_on_device(coefficients)
    others = torch.arange(6) != 3
    assert torch.equal(s[others], expected[others]) and not outcome[others].any()
    assert outcome[3] == FAILED and s[3].isnan().all()


def test_unsupported_equations_are_refused():
    with pytest.raises(Unsupported, match="rank 9"):
        solve_on_device(random_coefficients(2, 9))
    with pytest.raises(Unsupported, match=r"alpha is torch\.float64"):
        triton_roots.find_roots(*random_coefficients(2, 2))


@pytest.mark.parametrize("rank", [1, 2, 4, 8])
@pytest.mark.slow
def test_no_register_spills(rank):
    with record_launches(triton_roots) as cases:
        triton_roots.find_roots(*cast_to_fp32(random_coefficients(5, rank), DEVICE))
    assert_nothing_spills(cases)
