"""The CPU kernel `roots` against the plain search.

tests/lm/model/test_cell.py runs the tests of the plain search with this kernel as well.
"""

import pytest
import torch

from lm.kernels import Unsupported
from lm.kernels.cpu import roots as cpu_roots
from lm.model import cell
from lm.model.solver import FAILED
from tests.kernels import poisoned_memory, skip_if_missing
from tests.lm.model.test_causal import gradients_of, ids, model_of
from tests.lm.model.test_cell import random_coefficients

DTYPES = [torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def poison_memory():
    skip_if_missing(cpu_roots)
    with poisoned_memory():
        yield


def cast_coefficients(coefficients, dtype):
    return type(coefficients)(*(t.to(dtype) for t in coefficients[:-1]), coefficients.floor)


@pytest.mark.parametrize("dtype, tol", [(torch.float64, 1e-9), (torch.float32, 1e-3)], ids=str)
@pytest.mark.parametrize("r", [1, 2, 3, 4, 5, 8])
def test_roots_equal_the_plain_search(r, dtype, tol):
    """Only equations that both solve are compared: near a fold, rounding selects the root."""
    coefficients = cast_coefficients(random_coefficients(200, r, 1.0, seed=r), dtype)
    s, outcome = cpu_roots.find_roots(*coefficients)
    expected, expected_outcome = cell._find_root_plain(coefficients)
    assert not ((outcome | expected_outcome) & FAILED).any()
    assert (outcome == expected_outcome).double().mean() > 0.98
    error = (s - expected).abs().amax(-1) / (1 + expected.abs().amax(-1))
    assert (error < tol).double().mean() > 0.98 and s.dtype is dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_tokens_and_threads_change_nothing(dtype, monkeypatch):
    coefficients = cast_coefficients(random_coefficients(150, 3, 3.0), dtype)
    s, outcome = cpu_roots.find_roots(*coefficients)
    for token in (0, 77, 149):
        alone = cpu_roots.find_roots(*coefficients.select(slice(token, token + 1)))
        assert torch.equal(alone.s[0], s[token]) and alone.outcome[0] == outcome[token]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(cpu_roots.find_roots(*coefficients).s, s)


def test_default_device_of_torch_changes_nothing():
    coefficients = random_coefficients(6, 2)
    expected, evaluations = cpu_roots.count_evaluations(
        coefficients[:-1], coefficients.floor, False
    )
    with torch.device("meta"):
        actual = cpu_roots.count_evaluations(coefficients[:-1], coefficients.floor, False)
    assert torch.equal(actual[0].s, expected.s) and torch.equal(actual[1], evaluations)


@pytest.mark.parametrize("name", ["alpha", "beta", "gamma0", "gamma2"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_stays_in_its_token(name, value):
    coefficients = random_coefficients(6, 2)
    expected = cpu_roots.find_roots(*coefficients)
    getattr(coefficients, name)[3] = value
    s, outcome = cpu_roots.find_roots(*coefficients)
    others = torch.arange(6) != 3
    assert torch.equal(s[others], expected.s[others]) and not outcome[others].any()
    if name != "gamma0" or value != value:  # 1/√∞ is 0, and s = δ
        assert outcome[3] == FAILED and s[3].isnan().all()


def test_nothing_to_solve():
    s, outcome = cpu_roots.find_roots(*random_coefficients(4, 2).select(slice(0, 0)))
    assert s.shape == (0, 2) and outcome.shape == (0,)


def test_unsupported_equations_are_refused():
    with pytest.raises(Unsupported, match="rank 9"):
        cpu_roots.find_roots(*random_coefficients(2, 9))
    with pytest.raises(Unsupported, match="float16"):
        cpu_roots.find_roots(*cast_coefficients(random_coefficients(2, 2), torch.float16))
    wrong = random_coefficients(2, 2)._replace(beta=torch.zeros(2, 2, 3).double())
    with pytest.raises(ValueError, match="beta is"):
        cpu_roots.find_roots(*wrong)


@pytest.mark.parametrize("schedule", ["parallel", pytest.param("window:4", marks=pytest.mark.slow)])
def test_model_with_the_kernel_equals_the_plain_model(schedule, monkeypatch):
    solutions = {}
    for kernels in ("plain", "auto"):
        monkeypatch.setenv("FPRNN_KERNELS", kernels)
        model = model_of("fp_mamba1-householder4", schedule)
        solutions[kernels] = gradients_of(model, ids(length=8), schedule=schedule)
    for name, grad in solutions["plain"].items():
        torch.testing.assert_close(solutions["auto"][name], grad, rtol=1e-6, atol=1e-9)
