"""Tests of the paper's solver and the implicit gradient on problems with a known fixed point."""

import pytest
import torch

from lm.model import solver
from lm.model.solver import (
    NonFiniteError,
    Rule,
    _share_other_solution,
    implicit_gradient,
    relative_residual,
    solve_paper,
)
from tests import oracle_solvers


def make_linear_map(a):
    """Return f(y) = a y + c with a rate a per sequence, and its fixed point (len(a),3,4)."""
    a = torch.tensor(a, dtype=torch.float64)[:, None, None]
    c = torch.linspace(0.5, 1.5, 12, dtype=torch.float64).reshape(1, 3, 4)
    return (lambda y: a * y + c), c / (1 - a)


RULES = {
    "evaluation": Rule(tol=3e-6, max_iters=400),
    "training": Rule(tol=3e-3, max_iters=100, quantile=0.6),
    "short": Rule(tol=1e-9, max_iters=23),
    "impatient": Rule(tol=3e-6, max_iters=400, patience=3, stepsize=0.8, stepsize_decay=0.7),
    "gives_up": Rule(tol=1e-12, max_iters=10**6, patience=2, stepsize_decay=0.5, quantile=0.9),
    "undamped": Rule(tol=3e-6, max_iters=60, stepsize=1.0, stepsize_decay=1.0),
}


@pytest.mark.parametrize("name", RULES)
def test_every_iteration_equals_the_papers_rule(name):
    # −1.1 and −1.6 converge only with damping.
    rates, rule, trace = [0.5, -1.1, 0.0, 0.97, -1.6], RULES[name], []
    f, exact = make_linear_map(rates)
    solution = solve_paper(f, torch.zeros_like(exact), rule, trace)
    start = [list(torch.zeros_like(rows)) for rows in exact]
    maps = [lambda y, i=i: list(f(torch.stack(y))[i]) for i in range(len(rates))]
    expected, steps = oracle_solvers.solve_batch(maps, start, rule)
    assert len(trace) == len(steps) and (solution.stats.evaluations == len(steps)).all()
    for ours, theirs in zip(trace, steps):
        theirs = [torch.tensor(row, dtype=torch.float64) for row in theirs]
        is_known = theirs[1] > 1e-11  # below this, rounding decides which residual is the lowest
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a[is_known], b[is_known], rtol=1e-6, atol=1e-12)
    expected = torch.stack([torch.stack(y) for y in expected])
    torch.testing.assert_close(solution.y, expected, rtol=1e-9, atol=1e-12)
    lowest = torch.tensor([row[1] for row in steps])  # (iterations,b)
    before = torch.cat([torch.full_like(lowest[:1], torch.inf), lowest[:-1]])
    assert solution.stats.num_iters.tolist() == (before >= rule.tol).sum(0).tolist()
    assert solution.stats.converged.tolist() == (lowest[-1] < rule.tol).tolist()
    assert solution.stats.failed.tolist() == (lowest[-1] >= rule.tol).tolist()


def test_nan_error_names_iteration_and_sequence():
    def f(y):
        out = y / 2 + 1
        out[1, 0, 0] = float("nan")
        return out

    with pytest.raises(NonFiniteError, match=r"iteration 1 in sequence\(s\) \[1\]"):
        solve_paper(f, torch.zeros(3, 2, 2), Rule())


def test_token_iters_counts_until_all_tokens_before_converge():
    """The test repeats the iterates of damped maps whose residuals rise and fall again."""
    torch.manual_seed(0)
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        W = torch.randn(24, 24, generator=g, dtype=torch.float64)
        W = 0.9 * W / torch.linalg.matrix_norm(W, 2) + 0.4 * torch.randn(1, generator=g).double()
        c = torch.randn(2, 24, generator=g, dtype=torch.float64)

        def f(y, W=W, c=c):
            return (torch.tanh(y.flatten(1) @ W.T) + c).unflatten(1, (8, 3))

        rule, y, trace = Rule(tol=0.05, max_iters=200), torch.zeros(2, 8, 3).double(), []
        stats = solve_paper(f, y, rule, trace).stats
        residuals = []  # (b,l) of every iteration
        stepsize = torch.full((2,), rule.stepsize).double()
        for _, _, next_stepsize, _ in trace:
            value = f(y)
            residuals.append((y - value).abs().amax(-1) / (value.abs().amax(-1) + 1e-8))
            y = torch.lerp(y, value, stepsize[:, None, None])
            stepsize = next_stepsize
        count = len(residuals)
        for row in range(2):
            lowest = [min(r[row].max().item() for r in residuals[: i + 1]) for i in range(count)]
            num_iters = next((i for i, r in enumerate(lowest) if r < rule.tol), count - 1) + 1
            assert stats.num_iters[row] == num_iters
            assert stats.converged[row] == (lowest[-1] < rule.tol)
            for t in range(8):
                above = [
                    i for i in range(num_iters) if residuals[i][row, : t + 1].max() >= rule.tol
                ]
                expected = min(above[-1] + 2, num_iters) if above else 1
                assert stats.token_iters[row, t] == expected, (seed, row, t)


def test_count_of_a_sequence_ends_when_it_converges(monkeypatch):
    residuals = [
        [[0.05, 0.5], [0.5, 0.5]],
        [[0.05, 0.05], [0.05, 0.5]],
        [[0.5, 0.05], [0.05, 0.05]],
    ]
    remaining = iter(torch.tensor(residuals))  # (b,l) of each iteration
    monkeypatch.setattr(solver, "token_residual", lambda y, f_y: next(remaining))
    stats = solve_paper(lambda y: y, torch.zeros(2, 2, 3), Rule()).stats
    assert (stats.evaluations == 3).all() and stats.converged.all()
    assert stats.num_iters.tolist() == [2, 3]
    assert stats.token_iters.tolist() == [[1, 2], [2, 3]]


def test_no_gradient_is_recorded():
    w = torch.tensor(0.5, requires_grad=True)
    y = solve_paper(lambda y: w * y + 1, torch.zeros(1, 1, 1), Rule()).y
    assert not y.requires_grad


def test_relative_residual_is_that_of_the_worst_token():
    y = torch.tensor([[[0.0, 1.0], [0.9, -1.0]]])
    f_y = torch.tensor([[[4.0, 2.0], [1.0, -1.0]]])  # residuals 4 / 4 and 0.1 / 1
    torch.testing.assert_close(relative_residual(y, f_y), torch.tensor([1.0]))


def test_implicit_gradient_is_that_of_the_fixed_point():
    torch.manual_seed(0)
    W = (torch.randn(4, 4, dtype=torch.float64) * 0.3).requires_grad_()
    c = torch.randn(1, 3, 4, dtype=torch.float64)

    def f(y):
        return torch.tanh(y @ W.T) + c

    rule = Rule(tol=1e-12, max_iters=2000)
    y_star = solve_paper(f, torch.zeros_like(c), rule).y
    y = implicit_gradient(f, y_star, f(y_star), rule)
    weights = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(1, 3, 4)
    (ours,) = torch.autograd.grad((y * weights).sum(), [W])
    unrolled = torch.zeros_like(c)
    for _ in range(300):
        unrolled = f(unrolled)
    (theirs,) = torch.autograd.grad((unrolled * weights).sum(), [W])
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    (one_step,) = torch.autograd.grad((f(y_star) * weights).sum(), [W])
    assert (one_step - theirs).abs().max() > 1e-2  # the two gradients differ


def compute_implicit_gradient(slope, rule):
    """Return the gradient of the sum of y* with respect to c, for y* = slope y* + c."""
    c = torch.ones(1, 2, 3, dtype=torch.float64, requires_grad=True)
    y_star = (c / (1 - slope)).detach()
    f_y_star = slope * y_star + c
    implicit_gradient(lambda y: slope * y + c, y_star, f_y_star, rule).sum().backward()
    return c.grad


def test_diverging_implicit_gradient_is_an_error():
    torch.testing.assert_close(
        compute_implicit_gradient(0.5, Rule(tol=1e-12)),
        torch.full((1, 2, 3), 2.0, dtype=torch.float64),
    )
    for slope in (1.5, 2.0, 1e200):  # the last one overflows
        with pytest.raises(NonFiniteError, match=r"backward of `gradient: implicit`.*contractive"):
            compute_implicit_gradient(slope, Rule(tol=0.1))


def test_unconverged_implicit_gradient_warns():
    with pytest.warns(UserWarning, match=r"not exact: relative residual .* not below 1e-08"):
        compute_implicit_gradient(0.9, Rule(tol=1e-8, max_iters=20))


def test_padding_is_not_counted_as_another_solution():
    """Token 1 has another solution. NaN counts as another solution, too, except at padding."""
    y = torch.ones(2, 4, 3)
    other = y.clone()
    other[:, 1] = -1.0
    other[0, 2:] = torch.nan
    mask = torch.tensor([[True, True, False, False], [True, True, True, True]])
    assert _share_other_solution(other, y, mask).tolist() == [0.5, 0.25]
    assert _share_other_solution(other, y, None).tolist() == [0.75, 0.25]
    assert _share_other_solution(other, y, torch.zeros_like(mask)).tolist() == [0.0, 0.0]
