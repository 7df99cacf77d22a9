"""The paper's solver on problems whose fixed point is known, and on the reference's traces."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lm.model.solver import (
    NonFiniteError,
    Rule,
    relative_residual,
    solve,
    solve_parallel_paper,
)

SHARED = Path(__file__).parents[4] / "shared/golden"


def linear(a):
    a = torch.tensor(a, dtype=torch.float64)[:, None, None]
    c = torch.linspace(0.5, 1.5, 12, dtype=torch.float64).reshape(1, 3, 4)
    return (lambda y: a * y + c), c / (1 - a)


def test_finds_the_fixed_point_of_contractions():
    f, exact = linear([0.5, -0.6, 0.0])
    y, stats = solve(f, torch.zeros_like(exact), Rule(tol=1e-12, max_iters=500))
    torch.testing.assert_close(y, exact, rtol=1e-11, atol=0)
    assert stats.converged.all() and not stats.hit_max.any()
    assert stats.num_iters[2] <= 10 < stats.num_iters[0]


def test_damping_tames_an_expansive_alternating_map():
    f, exact = linear([-1.15])
    y, stats = solve(f, torch.zeros_like(exact), Rule(tol=1e-8, max_iters=500))
    torch.testing.assert_close(y, exact, rtol=1e-6, atol=0)
    _, undamped = solve(
        f, torch.zeros_like(exact), Rule(tol=1e-8, max_iters=500, stepsize=1, stepsize_decay=1)
    )
    assert stats.converged.all() and not undamped.converged.any() and undamped.hit_max.all()


def test_quantile_lets_the_slowest_sequence_go():
    f, exact = linear([0.1, 0.1, 0.1, 0.1, 0.99])
    y0 = torch.zeros_like(exact)
    _, strict = solve(f, y0, Rule(tol=1e-3, max_iters=5000, quantile=1.0))
    _, loose = solve(f, y0, Rule(tol=1e-3, max_iters=5000, quantile=0.75))
    assert strict.converged.all()
    assert loose.converged.tolist() == [True] * 4 + [False]
    assert not loose.hit_max.any()  # it was let go, it did not run out
    assert strict.num_iters[4] > 10 * loose.num_iters[4]


def test_running_out_of_iterations_is_counted():
    f, exact = linear([0.5, 0.99])
    _, stats = solve(f, torch.zeros_like(exact), Rule(tol=1e-6, max_iters=30))
    assert stats.converged.tolist() == [True, False]
    assert stats.hit_max.tolist() == [False, True]
    assert stats.num_iters[1] == 30


def test_gives_up_when_the_step_has_shrunk_away():
    y0 = torch.ones(1, 2, 2)
    _, stats = solve(lambda y: -3 * y.sign(), y0, Rule(tol=1e-6, max_iters=10**6, patience=1))
    assert stats.hit_max.all() and stats.num_iters < 200


def test_nan_is_an_error_that_names_iteration_and_sequence():
    def f(y):
        out = y / 2 + 1
        out[1, 0, 0] = float("nan")
        return out

    with pytest.raises(NonFiniteError, match=r"iteration 1 in sequence\(s\) \[1\]"):
        solve(f, torch.zeros(3, 2, 2), Rule())


def test_no_gradient_is_recorded():
    w = torch.tensor(0.5, requires_grad=True)
    y, _ = solve(lambda y: w * y + 1, torch.zeros(1, 1, 1), Rule())
    assert not y.requires_grad


def test_relative_residual_is_the_worst_token():
    y = torch.zeros(1, 2, 2)
    g = torch.tensor([[[4.0, 2.0], [1.0, -1.0]]])
    y[0, 0, 1] = 1.0
    y[0, 1] = torch.tensor([0.9, -1.0])
    torch.testing.assert_close(relative_residual(y, g), torch.tensor([1.0]))


@pytest.mark.skipif(not SHARED.exists(), reason="../shared is not here")
@pytest.mark.parametrize("name", json.loads((SHARED / "opt_linear.json").read_text())
                         if SHARED.exists() else [])  # fmt: skip
def test_traces_equal_the_papers_code(name):
    case = json.loads((SHARED / "opt_linear.json").read_text())[name]
    data = load_file(SHARED / "opt_linear.safetensors")
    mode, setting, tol, limit = name.replace("th0.1", "th0;1").split(".")
    training = mode == "train"
    _, quantile, *damping = setting.split("_")
    rule = Rule(
        tol=float(tol[2:].replace(";", ".")),
        max_iters=int(limit[2:]) if training else 1000,
        quantile=1 - int(quantile[1:]) / 100 if training else 1.0,
        stepsize=1.0 if damping else 0.99,
        stepsize_decay=1.0 if damping else 0.9,
    )
    a, c = data["a"][:, None, None], data["c"]
    trace = []
    y, _ = solve_parallel_paper(lambda y: a * y + c, torch.zeros_like(c), rule, trace)
    assert len(trace) == case["iter_idx"]
    torch.testing.assert_close(y, data[f"{name}/y"], rtol=1e-9, atol=1e-12)
    for i, key in enumerate(["residual", "min_residual", "stepsize"]):
        if f"{name}/{key}" in data:
            ours = torch.stack([row[i] for row in trace])
            torch.testing.assert_close(ours, data[f"{name}/{key}"], rtol=1e-7, atol=1e-12)
