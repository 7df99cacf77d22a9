"""What a model says it solves by is what its blocks do."""

import pytest
import torch

from lm.model import fixed_point
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.model.solver import AUTO_START

LENGTH = 32


def model(**values):
    sizes = {"vocab_size": 11, "d_model": 16, "n_layer": 2, "d_state": 4}
    torch.manual_seed(0)
    return FPRNNForCausalLM(FPRNNConfig(**sizes, **values))


@pytest.fixture
def called(monkeypatch):
    """Every solve of a block as (which solver, width, adapt, tolerance, ℓmax)."""
    found = []

    def spy(name):
        solve = getattr(fixed_point, name)

        def solver(f, *args, **kwargs):
            rule = args[1] if name == "solve_paper" else args[0]
            width = None if name == "solve_paper" else args[1]
            found.append((name, width, kwargs.get("adapt", False), rule.tol, rule.max_iters))
            return solve(f, *args, **kwargs)

        monkeypatch.setattr(fixed_point, name, solver)

    spy("solve_causal")
    spy("solve_paper")
    return found


@pytest.mark.parametrize(
    "schedule, stopping, training, said, solver, widths, adapt",
    [
        ("mixed", "causal", True, "mixed", "solve_causal", {32, 8, 2}, False),
        ("mixed", "causal", False, "auto", "solve_causal", {AUTO_START}, True),
        ("mixed:4,L", "causal", False, "auto", "solve_causal", {AUTO_START}, True),
        ("auto", "causal", True, "auto", "solve_causal", {AUTO_START}, True),
        ("window:8", "causal", False, "window:8", "solve_causal", {8}, False),
        ("sequential", "causal", False, "sequential", "solve_causal", {1}, False),
        ("parallel", "causal", False, "parallel", "solve_causal", {LENGTH}, False),
        ("parallel", "paper", False, "parallel", "solve_paper", {None}, False),
        ("parallel", "paper", True, "parallel", "solve_paper", {None}, False),
    ],
)
def test_the_name_is_of_what_is_solved(
    called, schedule, stopping, training, said, solver, widths, adapt
):
    made = model(schedule=schedule, stopping=stopping, max_iters=7, eval_max_iters=9)
    made.train(training)
    name = made.solver(LENGTH)
    tol = 0.1 if training or stopping == "paper" else 0.01
    max_iters = 7 if training else 9
    assert name == {"schedule": said, "stopping": stopping, "tol": tol, "max_iters": max_iters}
    with torch.no_grad():
        for _ in range(12):
            made(input_ids=torch.randint(0, 11, (2, LENGTH)))
    assert {call[0] for call in called} == {solver}
    assert {call[1] for call in called} == widths
    assert {call[2:] for call in called} == {(adapt, tol, max_iters)}


def test_one_token_is_solved_alone_under_every_causal_schedule():
    ids, results = torch.tensor([[3]]), []
    for schedule in ("mixed", "auto", "window:8", "sequential", "parallel"):
        made = model(schedule=schedule).eval()
        assert made.solver(1)["schedule"] == "sequential"
        assert made.solver()["schedule"] == {"mixed": "auto"}.get(schedule, schedule)
        with torch.no_grad():
            results.append(made(input_ids=ids).logits)
    assert all(torch.equal(result, results[0]) for result in results)
    paper = model(schedule="parallel", stopping="paper").eval()
    assert paper.solver(1)["schedule"] == "parallel"
    exact = model(block="fp_rnn", schedule="exact").eval()
    assert exact.solver(1)["schedule"] == "exact"
