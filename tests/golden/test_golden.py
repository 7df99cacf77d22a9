"""The paper's code, number for number: the four cases kept here, and all of ../shared/golden."""

from pathlib import Path

import pytest
import torch

from lm.model import fixed_point
from tests.golden import HERE, NotYet, Result, relative_error, run_case
from tests.golden.__main__ import main

SHARED = Path(__file__).parents[3] / "shared/golden"
CASES = sorted(HERE.glob("*.json")) + sorted(SHARED.glob("*.json"))


@pytest.mark.parametrize("path", CASES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_case(path):
    try:
        results = run_case(path)
    except NotYet as e:
        pytest.skip(f"cannot run yet: {e}")
    assert results
    for result in results:
        assert not result.failures, f"{result.tag}: {result.failures}"
    if path.stem == "opt_linear":
        assert len(results) == 18
        return
    compared = set().union(*(r.errors for r in results))
    assert {"logits", "loss"} <= compared or {"output", "y_star"} <= compared
    if "fponly" not in path.stem:  # that one compares y only
        assert sum(name.startswith("grad ") for name in compared) > 10


def test_four_cases_are_kept_here():
    assert len(list(HERE.glob("*.json"))) == 4


def test_a_wrong_solver_is_caught(monkeypatch, capsys):
    original = fixed_point.Windows.step

    def wrong(self, window, y):
        g, residual, carry = original(self, window, y)
        return g, 1.2 * residual, carry

    monkeypatch.setattr(fixed_point.Windows, "step", wrong)
    assert main([str(HERE)]) == 1
    assert "iterations [65], not [48]" in capsys.readouterr().out


def test_wrong_values_and_nan_are_caught():
    assert Result("exact_f64_eval", errors={"output": 1e-8}, limit=1e-9).failures
    assert Result("exact_f64_eval", errors={"output": float("nan")}, limit=1e-9).failures
    assert not Result("exact_f64_eval", errors={"output": 1e-10}, limit=1e-9).failures
    assert relative_error(torch.ones(2), torch.ones(3)) == float("inf")


def test_a_folder_without_cases_is_an_error(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "no golden case" in capsys.readouterr().err


def test_cases_that_cannot_run_are_listed_not_passed(tmp_path, capsys):
    (tmp_path / "x.json").write_text('{"cls": "FPMamba9", "iters": {}}')
    assert main([str(tmp_path)]) == 1
    assert "cannot run yet: x (unknown layer `FPMamba9`" in capsys.readouterr().out
