"""Names of schedules; damping and the width of `auto` on an iteration that is known."""

import pytest
import torch

from lm.model.configuration_fprnn import SCHEDULES, FPRNNConfig, parse_schedule
from lm.model.solver import NonFiniteError, Rule, _turn, solve_causal, token_residual
from tests import oracle_solvers

# Names.


@pytest.mark.parametrize(
    "text, kind, widths, at_20",
    [
        ("parallel", "parallel", (0,), [20]),
        ("sequential", "sequential", (1,), [1]),
        ("window:1", "window", (1,), [1]),
        ("window:32", "window", (32,), [20]),
        ("auto", "auto", None, None),
        ("mixed", "mixed", None, [20, 5, 1]),
        ("mixed:1,2,4,8,L", "mixed", (1, 2, 4, 8, 0), [1, 2, 4, 8, 20]),
        ("mixed: 4, 4, L", "mixed", (4, 4, 0), [4, 4, 20]),
        ("exact", "exact", (1,), [1]),
    ],
)
def test_every_schedule_has_a_name(text, kind, widths, at_20):
    schedule = parse_schedule(text)
    assert schedule == (kind, widths)
    if at_20 is not None:
        assert schedule.of(20) == at_20
        assert all(1 <= width <= 3 for width in schedule.of(3))
    if text != "exact":
        assert FPRNNConfig(schedule=text).schedule_kind == schedule


@pytest.mark.parametrize(
    "text",
    ["window", "window:", "window:0", "window:-1", "window:1.5", "window:1,2", "windows:4",
     "mixed:", "mixed:0,L", "mixed:1,,L", "mixed:l", "parallel:3", "sequential:", "auto:2",
     "exact:1", "Parallel", "", None],
)  # fmt: skip
def test_another_name_is_refused_in_one_sentence_that_lists_what_is_possible(text):
    for refuse in (parse_schedule, lambda text: FPRNNConfig(schedule=text)):
        with pytest.raises(ValueError) as error:
            refuse(text)
        message = str(error.value)
        assert f"schedule is `{text}`" in message and "at least 1" in message
        assert all(name in message for name in SCHEDULES) and "\n" not in message


@pytest.mark.parametrize("schedule", ["window:4", "sequential", "auto", "mixed", "exact"])
def test_the_papers_stopping_is_of_the_parallel_schedule_alone(schedule):
    with pytest.raises(ValueError, match=f"its schedule must be parallel, not `{schedule}`"):
        FPRNNConfig(block="fp_rnn", schedule=schedule, stopping="paper")
    FPRNNConfig(schedule="parallel", stopping="paper")
    with pytest.raises(ValueError, match="stopping is `soon`: it must be causal or paper"):
        FPRNNConfig(stopping="soon")


def test_exact_is_for_fp_rnn_with_one_reflection_alone():
    FPRNNConfig(block="fp_rnn", schedule="exact", mixer="dplr")
    for other in [
        dict(block="fp_mamba1"), dict(block="fp_mamba2"), dict(mixer="kronecker"),
        dict(mixer_rank=2), dict(contractive=0.5),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match="`exact` is for fp_rnn with one reflection"):
            FPRNNConfig(**{"block": "fp_rnn", "schedule": "exact", **other})


# An iteration that is known.


class Linear:
    """f(y)_t = a y_t + k y_{t−1} + c_t with one a per sequence; an `Iteration`."""

    h_before, wants_state, dtype, device = None, False, torch.float64, torch.device("cpu")
    spare = 0

    def __init__(self, a, length, k=0.3):
        self.a, self.k = torch.tensor(a, dtype=self.dtype)[:, None, None], k
        self.shape = (len(a), length, 3)
        generator = torch.Generator().manual_seed(0)
        self.c = 0.5 + torch.rand(self.shape, generator=generator, dtype=self.dtype)
        self.y_before = torch.zeros(len(a), 3, dtype=self.dtype)
        self.spans = []  # tokens of each window placed, a few more than its width

    def place(self, rows, position, valid, y_before, h):
        self.spans.append(position.shape[1])
        return rows, position, y_before

    def step(self, window, y):
        rows, position, y_before = window
        before = torch.cat([y_before.unsqueeze(1), y[:, :-1]], 1)
        g = self.a[rows] * y + self.k * before + self.c[rows[:, None], position]
        return g, token_residual(y, g), None

    def advance(self, window, carry, counts):
        return torch.zeros(len(counts), 1)

    def exact(self):
        y, before = [], self.y_before
        for t in range(self.shape[1]):
            before = (self.k * before + self.c[:, t]) / (1 - self.a[:, 0])
            y.append(before)
        return torch.stack(y, 1)


def whole(f):
    """All tokens as one window, and f."""
    rows = torch.arange(f.shape[0])
    position = torch.arange(f.shape[1]).expand(f.shape[:2])
    return lambda y: f.step((rows, position, f.y_before), y)[0]


WIDTHS = [(1, False), (2, False), (5, False), (40, False), (8, True)]
every_width = pytest.mark.parametrize("width, adapt", WIDTHS)


@every_width
def test_finds_the_fixed_point(width, adapt):
    f = Linear([0.5, -0.6, 0.0, 0.9], 12)
    y, stats, f_y, _ = solve_causal(f, Rule(tol=1e-12, max_iters=900), width, adapt)
    torch.testing.assert_close(y, f.exact(), rtol=1e-9, atol=0)
    assert stats.converged.all() and not stats.hit_max.any() and (stats.unconverged == 0).all()
    assert torch.equal(f_y, whole(f)(y))
    assert torch.equal(stats.residual, token_residual(y, f_y).amax(1))
    assert stats.num_iters[2] < stats.num_iters[0] < stats.num_iters[3]


@every_width
def test_patience_tames_an_expansive_alternating_iteration(width, adapt):
    """Undamped, and at the first step sizes, y → −1.5 y + c diverges."""
    f, rule = Linear([-1.5, 0.2], 5), Rule(tol=1e-8, max_iters=900)
    y, stats, _, _ = solve_causal(f, rule, width, adapt)
    torch.testing.assert_close(y, f.exact(), rtol=1e-6, atol=1e-7)
    assert stats.converged.all() and stats.token_iters[0].max() > 3 * rule.patience
    assert stats.token_iters[1].max() < 30  # the damping is each sequence's own
    undamped = rule._replace(stepsize=1.0, stepsize_decay=1.0, max_iters=100)
    stats = solve_causal(f, undamped, width, adapt).stats
    assert stats.converged.tolist() == [False, True] and stats.unconverged.tolist() == [1, 0]


RULES = {
    "default": Rule(tol=3e-4, max_iters=300),
    "short": Rule(tol=1e-9, max_iters=9),
    "impatient": Rule(tol=3e-6, max_iters=400, patience=3, stepsize=0.8, stepsize_decay=0.7),
    "gives_up": Rule(tol=3e-12, max_iters=10**6, patience=2, stepsize_decay=0.5, min_stepsize=0.1),
}


@pytest.mark.parametrize(
    "rule, k",
    [("default", 0.3), ("default", 1.0), ("short", 1.0), ("impatient", 0.3), ("gives_up", 1.0)],
)
@pytest.mark.parametrize("width, adapt", [*WIDTHS, (32, True)])
def test_every_token_is_frozen_when_the_rule_written_out_says(width, adapt, rule, k):
    """With k = 1 tokens wait for the one before, with a = 0 they converge at once."""
    rates, length, rule = [0.5, -1.15, 0.0, 0.9], 24, RULES[rule]
    f = Linear(rates, length, k)
    y, stats, _, _ = solve_causal(f, rule, width, adapt)
    for i in range(len(rates)):

        def one(y, i=i):
            y = torch.stack(y)
            before = torch.cat([torch.zeros(1, 3, dtype=y.dtype), y[:-1]])
            return list(rates[i] * y + k * before + f.c[i])

        start = [torch.zeros(3, dtype=torch.float64)] * length
        expected, iters = oracle_solvers.causal(one, start, rule, width, adapt)
        assert stats.token_iters[i].tolist() == iters
        torch.testing.assert_close(y[i], torch.stack(expected), rtol=1e-8, atol=1e-11)


def test_a_step_that_has_shrunk_away_gives_the_token_up():
    f, rule = Linear([-1.5], 4), Rule(tol=1e-8, max_iters=10**6, patience=1, stepsize_decay=0.5)
    rule = rule._replace(min_stepsize=0.9)
    stats = solve_causal(f, rule, 1).stats
    assert stats.hit_max.all() and (stats.unconverged == 1).all() and stats.num_iters < 40


@every_width
def test_out_of_iterations_is_counted_by_token(width, adapt):
    f = Linear([0.5, 0.99], 6)
    _, stats, _, _ = solve_causal(f, Rule(tol=1e-6, max_iters=40), width, adapt)
    assert stats.converged.tolist() == [True, False] and stats.hit_max.tolist() == [False, True]
    assert stats.unconverged.tolist() == [0, 1]
    assert (stats.token_iters[1] == 40).all() and stats.token_iters[0].max() < 40


def test_auto_widens_where_tokens_converge_at_once():
    f, rule = Linear([0.0], 600, k=0.0), Rule(tol=1e-3)
    stats = solve_causal(f, rule, 8, adapt=True).stats
    assert f.spans[0] < 12 and max(f.spans) > 100
    narrow = solve_causal(Linear([0.0], 600, k=0.0), rule, 8).stats
    assert stats.num_iters < narrow.num_iters / 4


def test_auto_narrows_where_each_token_waits_for_the_one_before():
    f, rule = Linear([0.0], 600, k=1.0), Rule(tol=1e-3, max_iters=999)
    stats = solve_causal(f, rule, 64, adapt=True).stats
    wide = solve_causal(Linear([0.0], 600, k=1.0), rule, 64).stats
    assert stats.converged.all() and wide.converged.all()
    assert f.spans[0] >= 64 and min(f.spans[:-4]) <= 20
    assert stats.work < wide.work / 2


def test_auto_follows_each_sequence_and_not_the_batch():
    """Widths are the row's own: its iterations are what they are alone."""
    a, rule = [0.0, 0.3, 0.9, -0.8], Rule(tol=1e-4)
    together = solve_causal(Linear(a, 40), rule, 8, adapt=True)
    for i in range(4):
        one = Linear(a, 40)
        one.a, one.c, one.shape = one.a[i : i + 1], one.c[i : i + 1], (1, 40, 3)
        one.y_before = one.y_before[:1]
        alone = solve_causal(one, rule, 8, adapt=True)
        assert torch.equal(alone.stats.token_iters[0], together.stats.token_iters[i])
        torch.testing.assert_close(alone.y[0], together.y[i], rtol=1e-12, atol=1e-13)


@every_width
def test_flags_read_late_change_nothing(width, adapt):
    """As on an accelerator, where the next iteration is queued before the last one's are read."""
    rule, a = Rule(tol=1e-9, max_iters=60), [0.5, -0.6, 0.0, 0.9]
    now, late = (solve_causal(Linear(a, 40), rule, width, adapt, delay=n) for n in (0, 1))
    assert torch.equal(late.y, now.y) and torch.equal(late.stats.residual, now.stats.residual)
    for name, value in now.stats._asdict().items():
        assert torch.equal(getattr(late.stats, name), value), name


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("rule", [
    Rule(tol=1e-9, max_iters=200), Rule(tol=1e-9, max_iters=7),
    Rule(tol=1e-9, max_iters=10**6, patience=1, stepsize_decay=0.5, min_stepsize=0.9),
])  # fmt: skip
def test_one_token_is_solved_as_a_window_of_one(rule, late):
    a = [0.5, -0.6, 0.0, 0.9, -1.5]
    window, alone = Linear(a, 1), Linear(a, 1)
    alone.spare = 5
    window, alone = (solve_causal(f, rule, 1, delay=n) for f, n in ((window, 0), (alone, late)))
    assert torch.equal(alone.y, window.y) and torch.equal(alone.f_y, window.f_y)
    for name, value in window.stats._asdict().items():
        if name != "work":
            assert torch.equal(getattr(alone.stats, name), value), name
    bad = Linear(a, 1)
    bad.spare, bad.c[3, 0, 1] = 5, torch.nan
    with pytest.raises(NonFiniteError, match=r"at iteration 1 in sequence\(s\) \[3\]"):
        solve_causal(bad, rule, 1, delay=late)


def test_which_sequences_are_iterated_together():
    assert _turn([4, 4, 4], 0) == ([0, 1, 2], 4)
    assert _turn([16, 4, 1, 4], 0) == ([2], 1)
    assert _turn([16, 4, 1, 4], 3) == ([1, 2, 3], 4)  # 3 more tokens for the third
    assert _turn([16, 4, 1, 4], 36) == ([0, 1, 2, 3], 16)


def test_who_is_iterated_together_changes_nothing():
    a, rule = [0.0, 0.3, 0.9, -0.8], Rule(tol=1e-4)
    apart, f = solve_causal(Linear(a, 40), rule, 8, adapt=True), Linear(a, 40)
    f.spare = 36
    together = solve_causal(f, rule, 8, adapt=True)
    assert torch.equal(together.stats.token_iters, apart.stats.token_iters)
    torch.testing.assert_close(together.y, apart.y, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("at", [0, 7])
@every_width
def test_nan_is_an_error_that_names_the_sequence(width, adapt, at):
    f = Linear([0.5, 0.5, 0.5], 9)
    f.c[1, at, 2] = torch.nan
    with pytest.raises(NonFiniteError, match=r"at iteration \d+ in sequence\(s\) \[1\]"):
        solve_causal(f, Rule(), width, adapt)


def test_no_gradient_is_recorded():
    f = Linear([0.5], 3)
    f.c.requires_grad_()
    assert not solve_causal(f, Rule(), 2).y.requires_grad
