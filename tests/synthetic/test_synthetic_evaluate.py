"""Lengths, pooled metrics, solved length, bars."""

import contextlib
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from synthetic import tasks
from synthetic.config import Config, Task, Threshold
from synthetic.evaluate import (
    PROBED,
    evaluate_all,
    measure,
    parse_lengths,
    standard_error,
)
from synthetic.results import error_of_mean, in_training, passes, summary
from synthetic.tasks import TaskError

S3 = tasks.build(Task(name="word_problem", group="S3"))


@pytest.mark.parametrize(
    "text, lengths",
    [
        ("16", [16]),
        ("32,16,16", [16, 32]),
        ("2:6:1", [2, 3, 4, 5, 6]),
        ("2:20:6", [2, 8, 14, 20]),
        ("2:16", [2, 3, 4, 6, 8, 11, 16]),
        ("5:5", [5]),
        ("2:4:1,48", [2, 3, 4, 48]),
    ],
)
def test_lengths_are_read(text, lengths):
    assert parse_lengths(text, S3) == lengths


def test_a_wide_range_has_few_lengths_and_both_ends():
    lengths = parse_lengths("2:512", S3)
    assert lengths[0] == 2 and lengths[-1] == 512 and len(lengths) < 20
    assert all(b / a <= 1.51 for a, b in itertools.pairwise(lengths))


def test_a_range_keeps_the_lengths_a_task_can_have():
    odd = tasks.build(Task(name="mod_arithmetic"))
    lengths = parse_lengths("3:32", odd)
    assert lengths[0] == 3 and all(n % 2 for n in lengths)
    with pytest.raises(TaskError):
        parse_lengths("4", odd)


@pytest.mark.parametrize("text", ["", "a", "0", "5:2", "1:2:3:4", "2:8:0", "4,,5", "-3"])
def test_what_is_no_list_of_lengths_is_refused(text):
    with pytest.raises(TaskError, match="must be a length, START:STOP"):
        parse_lengths(text, S3)


class Oracle(nn.Module):
    """Answers the word problem of S3 rightly up to a length, and with the identity after it."""

    def __init__(self, upto):
        super().__init__()
        self.upto = upto
        self.config = SimpleNamespace(vocab_size=6, hidden_size=8)
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, attention_mask=None):
        y = torch.from_numpy(S3.group.products(input_ids.numpy()))
        y[:, self.upto :] = S3.group.identity
        return SimpleNamespace(logits=nn.functional.one_hot(y, 6).float())


def config(**values):
    return Config.model_validate({"eval": {"examples": 600, "batch_size": 250, **values}})


def test_the_metrics_of_a_model_that_is_right_up_to_a_length():
    tried = measure(Oracle(8), S3, config(), 8, "test", 0, "fp32")
    assert tried["metrics"] == {"token_accuracy": 1.0, "sequence_accuracy": 1.0}
    assert tried["sequences"] == 750
    tried = measure(Oracle(8), S3, config(), 16, "test", 0, "fp32")
    # Half of the tokens are right, and a sixth of the rest by chance.
    assert tried["metrics"]["token_accuracy"] == pytest.approx(0.5 + 0.5 / 6, abs=0.01)
    assert tried["metrics"]["sequence_accuracy"] < 0.01
    assert 0 < tried["stderr"]["token_accuracy"] < 0.01


def test_seeds_are_other_data():
    cfg = config(examples=50, seeds=[0, 1])
    results = evaluate_all(Oracle(8), S3, cfg, [5, 8, 16], "fp32")
    assert [(r["length"], r["seed"]) for r in results] == [
        (5, 0),
        (5, 1),
        (8, 0),
        (8, 1),
        (16, 0),
        (16, 1),
    ]
    assert results[4]["metrics"] != results[5]["metrics"]
    mean = np.mean([r["metrics"]["token_accuracy"] for r in results[4:]])
    bars = [
        Threshold(metric="token_accuracy", length=n, min=b)
        for n, b in ((16, 0.1), (16, 0.95), (99, 0.1))
    ]
    judged = passes(bars, results)
    assert [bar["value"] for bar in judged] == [pytest.approx(mean)] * 2 + [None]
    assert [bar["passed"] for bar in judged] == [True, False, False]
    table = summary({"eval": results}, "x")
    assert table.caption == "read at once; solver: none"
    assert list(next(c for c in table.columns if c.header == "in training").cells) == ["0"] * 3


def test_the_error_of_a_token_metric_takes_a_sequence_as_one():
    """The tokens of a sequence after a mistake are all wrong: they are no samples of their own."""
    right = np.repeat(np.random.default_rng(0).random(400) < 0.5, 32).astype(float)
    sequences = np.repeat(np.arange(400), 32)
    mistaken = right.std() / len(right) ** 0.5
    assert standard_error(right, np.arange(len(right))) == pytest.approx(mistaken)
    assert standard_error(right, sequences) == pytest.approx(0.5 / 400**0.5, rel=0.01)


@pytest.mark.parametrize(
    ("length", "held_apart", "count", "shown"),
    [(5, True, 0, "0"), (2, True, 36, "36 of 36"), (5, False, None, "unknown")],
)
def test_samples_that_training_may_have_are_counted(length, held_apart, count, shown):
    """All of them where there are too few; it is unknown of a run trained on another task."""
    cfg = config(examples=36, batch_size=36)
    row = measure(Oracle(8), S3, cfg, length, "test", 0, "fp32", held_apart=held_apart)
    assert row["in_training"] == {"count": count, "of": 36} and in_training([row]) == shown
    few = [{"in_training": {"count": n, "of": 10_000}} for n in (1, 0)]
    assert in_training(few) == "1 of 20000"


def test_the_error_of_several_seeds_is_smaller():
    cfg = config(examples=50, seeds=[0, 1, 2, 3])
    rows = evaluate_all(Oracle(4), S3, cfg, [8], "fp32")
    each = [r["stderr"]["token_accuracy"] for r in rows]
    assert error_of_mean(each) == pytest.approx(np.mean(each) / 2, rel=0.05)


def test_a_sample_drawn_again_and_again_is_one_sample_in_the_error():
    class ByFirst(Oracle):
        """Right on the words that begin with one of three elements."""

        def forward(self, input_ids, attention_mask=None):
            y = torch.from_numpy(S3.group.products(input_ids.numpy()))
            y = torch.where(input_ids[:, :1] < 3, y, (y + 1) % 6)
            return SimpleNamespace(logits=nn.functional.one_hot(y, 6).float())

    row = measure(ByFirst(0), S3, config(examples=1000), 2, "test", 0, "fp32")
    assert row["sequences"] == 1000
    assert row["stderr"]["sequence_accuracy"] == pytest.approx(0.5 / 36**0.5, rel=0.1)


class Solved(Oracle):
    """Has a solver: it says by which limit it solves, fails on a share of the tokens that grows
    with the length, and when asked counts as many iterations as the first element of a word is."""

    def __init__(self, upto):
        super().__init__(upto)
        self.limit = 1000
        self.probes = []

    @contextlib.contextmanager
    def solving(self, eval_max_iters):
        self.limit, before = eval_max_iters, self.limit
        yield
        self.limit = before

    def solver(self, length=None):
        return {
            "token": "exact",
            "schedule": "parallel",
            "stopping": "causal",
            "tol": 0.01,
            "max_iters": self.limit,
            "gradient": "exact",
        }

    def forward(self, input_ids, attention_mask=None, count_iterations=False, **_):
        output = super().forward(input_ids)
        each = torch.ones(2, len(input_ids))
        iterations = None
        if count_iterations:
            assert not self.training and not torch.is_grad_enabled()
            self.probes.append(len(input_ids))
            iterations = torch.stack([input_ids[:, 0], input_ids[:, 0] + 2])
        output.fixed_point = SimpleNamespace(
            adjoint_norm=None,
            evaluations=each,
            failed=each * input_ids.shape[1] / 1000,
            bisected=0 * each,
            grad_limited=0 * each,
            residual=0 * each,
            num_iters=iterations,
            other_solution=0 * each,
            layers=None,
        )
        return output


def test_iterations_are_probed_on_the_first_sequences_of_a_length():
    model = Solved(8).train()
    row = measure(model, S3, config(examples=500), 8, "test", 0, "fp32")
    assert model.probes == [row["probed"]] == [PROBED]
    first = S3.batch(0, "test", 0, 250, (8, 8)).input_ids[:PROBED, 0]
    assert row["num_iters"]["mean"] == pytest.approx([first.mean(), first.mean() + 2], abs=1e-6)
    assert row["stderr"]["num_iters"] == pytest.approx(first.std() / PROBED**0.5, rel=1e-6)
    assert row["evaluations"] == [1, 1] and row["failed"] == [0.008, 0.008]
    few = measure(model, S3, config(examples=5), 8, "test", 0, "fp32")
    assert few["probed"] == few["sequences"] == 5


def test_a_limit_of_evaluation_is_the_solver_s_and_ends_with_it():
    model = Solved(8)
    cfg = config(examples=5)
    cfg.eval.max_iters = 3
    row = measure(model, S3, cfg, 8, "test", 0, "fp32")
    assert row["solver"]["max_iters"] == 3 and model.limit == 1000
    row = measure(model, S3, config(examples=5), 8, "test", 0, "fp32")
    assert row["solver"]["max_iters"] == 1000


def test_the_table_shows_what_solving_cost_and_left():
    rows = evaluate_all(Solved(8), S3, config(examples=5), [4, 16], "fp32")
    table = summary({"eval": rows}, "x")
    cells = {c.header: list(c.cells) for c in table.columns}
    assert cells["failed"] == ["0.40%", "1.60%"] and cells["evaluations"] == ["1.0 1.0"] * 2
    assert all(len(cell.split()) == 2 for cell in cells["ℓ* per layer"])
    assert "not solved for 1.60% of the tokens of layer 0" in table.caption
    assert "warning: at length 16 the token's equation was not solved" in table.caption
    assert table.caption.count("warning") == 2  # one a layer, of the worst length
    of_a_hybrid = [row | {"layers": [0, 3]} for row in rows]
    caption = summary({"eval": of_a_hybrid}, "x").caption
    assert "of layer 3" in caption and "of layer 1" not in caption
