"""Evaluation: lengths, metrics and their errors, thresholds, ℓ*."""

import contextlib
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from synthetic import tasks
from synthetic.config import Config, Task, Threshold
from synthetic.evaluate import (
    MAX_PROBED_SEQUENCES,
    compute_answers,
    compute_standard_error,
    evaluate_all,
    limit_attention,
    measure,
    parse_lengths,
)
from synthetic.results import build_summary_table, combine_stderrs, format_overlap, judge_thresholds
from synthetic.tasks import TaskError

S3 = tasks.build_task(Task(name="word_problem", group="S3"))


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
def test_lengths_are_parsed(text, lengths):
    assert parse_lengths(text, S3) == lengths


def test_range_without_step_is_geometric_with_both_ends():
    lengths = parse_lengths("2:512", S3)
    assert lengths[0] == 2 and lengths[-1] == 512 and len(lengths) < 20
    # The ratio is √2 before rounding; the largest is 3 / 2.
    assert all(b / a <= 1.51 for a, b in itertools.pairwise(lengths))


def test_range_keeps_only_valid_lengths():
    arithmetic = tasks.build_task(Task(name="mod_arithmetic"))
    lengths = parse_lengths("3:32", arithmetic)
    assert lengths[0] == 3 and all(n % 2 for n in lengths)
    with pytest.raises(TaskError):
        parse_lengths("4", arithmetic)


@pytest.mark.parametrize("text", ["", "a", "0", "5:2", "1:2:3:4", "2:8:0", "4,,5", "-3"])
def test_invalid_lengths_are_refused(text):
    with pytest.raises(TaskError, match="must be a length, START:STOP"):
        parse_lengths(text, S3)


class Oracle(nn.Module):
    """Model of S3 that answers correctly up to a length, and with the identity after it."""

    def __init__(self, max_correct_length):
        super().__init__()
        self.max_correct_length = max_correct_length
        self.config = SimpleNamespace(vocab_size=6, hidden_size=8)
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, attention_mask=None):
        y = torch.from_numpy(S3.group.products(input_ids.numpy()))
        y[:, self.max_correct_length :] = S3.group.identity
        return SimpleNamespace(logits=nn.functional.one_hot(y, 6).float())


def make_config(**values):
    return Config.model_validate({"eval": {"examples": 600, "batch_size": 250, **values}})


def measure_s3(model, length, cfg=None, **options):
    """Measure a model of S3 on test data of a length."""
    cfg = cfg or make_config()
    return measure(model, S3, cfg, length, "test", seed=0, precision="fp32", **options)


def test_metrics_below_and_above_the_solved_length():
    row = measure_s3(Oracle(8), 8)
    assert row["metrics"] == {"token_accuracy": 1.0, "sequence_accuracy": 1.0}
    assert row["sequences"] == 750  # 600 examples, rounded up to batches of 250
    row = measure_s3(Oracle(8), 16)
    # Half of the tokens are correct, and a sixth of the others by chance.
    assert row["metrics"]["token_accuracy"] == pytest.approx(0.5 + 0.5 / 6, abs=0.01)
    assert row["metrics"]["sequence_accuracy"] < 0.01
    assert 0 < row["stderr"]["token_accuracy"] < 0.01


def test_seeds_give_different_data_and_thresholds_use_their_mean():
    cfg = make_config(examples=50, seeds=[0, 1])
    results = evaluate_all(Oracle(8), S3, cfg, [5, 8, 16], "fp32")
    pairs = [(r["length"], r["seed"]) for r in results]
    assert pairs == list(itertools.product((5, 8, 16), (0, 1)))
    *_, seed_0, seed_1 = results  # at length 16
    assert seed_0["metrics"] != seed_1["metrics"]
    mean = np.mean([r["metrics"]["token_accuracy"] for r in (seed_0, seed_1)])
    # The mean at 16 is about 0.58; length 99 was not evaluated.
    thresholds = [
        Threshold(metric="token_accuracy", length=length, min=minimum)
        for length, minimum in ((16, 0.1), (16, 0.95), (99, 0.1))
    ]
    judged = judge_thresholds(thresholds, results)
    assert [entry["value"] for entry in judged] == [pytest.approx(mean)] * 2 + [None]
    assert [entry["passed"] for entry in judged] == [True, False, False]
    table = build_summary_table({"eval": results}, "x")
    assert table.caption == "read at once; solver: none"
    assert list(next(c for c in table.columns if c.header == "in training").cells) == ["0"] * 3


def test_token_errors_treat_a_sequence_as_one_sample():
    """After a mistake all tokens of a sequence are wrong, so they are not independent."""
    is_correct = np.repeat(np.random.default_rng(0).random(400) < 0.5, 32).astype(float)
    sequences = np.repeat(np.arange(400), 32)
    naive_error = is_correct.std() / len(is_correct) ** 0.5
    tokens = np.arange(len(is_correct))
    assert compute_standard_error(is_correct, tokens) == pytest.approx(naive_error)
    assert compute_standard_error(is_correct, sequences) == pytest.approx(0.5 / 400**0.5, rel=0.01)


@pytest.mark.parametrize(
    ("length", "is_overlap_known", "count", "text"),
    [(5, True, 0, "0"), (2, True, 36, "36 of 36"), (5, False, None, "unknown")],
)
def test_overlap_with_training_is_counted(length, is_overlap_known, count, text):
    """At length 2 there are only 36 sequences, too few for disjoint splits: all of them count."""
    cfg = make_config(examples=36, batch_size=36)
    row = measure_s3(Oracle(8), length, cfg, is_overlap_known=is_overlap_known)
    assert row["in_training"] == {"count": count, "of": 36} and format_overlap([row]) == text
    rows = [{"in_training": {"count": n, "of": 10_000}} for n in (1, 0)]
    assert format_overlap(rows) == "1 of 20000"


def test_errors_of_several_seeds_are_combined():
    cfg = make_config(examples=50, seeds=[0, 1, 2, 3])
    rows = evaluate_all(Oracle(4), S3, cfg, [8], "fp32")
    errors = [r["stderr"]["token_accuracy"] for r in rows]
    assert combine_stderrs(errors) == pytest.approx(np.mean(errors) / 2, rel=0.05)


def test_repeated_sequences_count_as_one_sample():
    class CorrectByFirst(Oracle):
        """Correct on sequences that begin with one of three elements."""

        def forward(self, input_ids, attention_mask=None):
            y = torch.from_numpy(S3.group.products(input_ids.numpy()))
            y = torch.where(input_ids[:, :1] < 3, y, (y + 1) % 6)
            return SimpleNamespace(logits=nn.functional.one_hot(y, 6).float())

    row = measure_s3(CorrectByFirst(0), 2, make_config(examples=1000))
    assert row["sequences"] == 1000
    # At length 2 there are 36 different sequences, half of which are answered correctly.
    assert row["stderr"]["sequence_accuracy"] == pytest.approx(0.5 / 36**0.5, rel=0.1)


class OracleWithSolver(Oracle):
    """Oracle with a fake solver.

    It reports its limit, fails on a fraction of tokens that grows with the length, and counts as
    many iterations as the id of the first element.
    """

    def __init__(self, max_correct_length):
        super().__init__(max_correct_length)
        self.limit = 1000
        self.probes = []

    @contextlib.contextmanager
    def solving(self, eval_max_iters):
        self.limit, previous = eval_max_iters, self.limit
        yield
        self.limit = previous

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
        ones = torch.ones(2, len(input_ids))
        iterations = None
        if count_iterations:
            assert not self.training and not torch.is_grad_enabled()
            self.probes.append(len(input_ids))
            iterations = torch.stack([input_ids[:, 0], input_ids[:, 0] + 2])
        output.fixed_point = SimpleNamespace(
            adjoint_norm=None,
            evaluations=ones,
            failed=ones * input_ids.shape[1] / 1000,
            bisected=0 * ones,
            grad_limited=0 * ones,
            residual=0 * ones,
            num_iters=iterations,
            other_solution=0 * ones,
            layers=None,
        )
        return output


def test_iterations_are_probed_on_the_first_sequences():
    model = OracleWithSolver(8).train()
    row = measure_s3(model, 8, make_config(examples=500))
    assert model.probes == [row["probed"]] == [MAX_PROBED_SEQUENCES]
    batch = S3.batch(0, "test", index=0, batch_size=250, lengths=(8, 8))
    first = batch.input_ids[:MAX_PROBED_SEQUENCES, 0]
    assert row["num_iters"]["mean"] == pytest.approx([first.mean(), first.mean() + 2], abs=1e-6)
    expected_error = first.std() / MAX_PROBED_SEQUENCES**0.5
    assert row["stderr"]["num_iters"] == pytest.approx(expected_error, rel=1e-6)
    assert row["evaluations"] == [1, 1] and row["failed"] == [0.008, 0.008]
    small = measure_s3(model, 8, make_config(examples=5))
    assert small["probed"] == small["sequences"] == 5


def test_eval_max_iters_applies_only_during_evaluation():
    model = OracleWithSolver(8)
    cfg = make_config(examples=5)
    cfg.eval.max_iters = 3
    row = measure_s3(model, 8, cfg)
    assert row["solver"]["max_iters"] == 3 and model.limit == 1000
    row = measure_s3(model, 8, make_config(examples=5))
    assert row["solver"]["max_iters"] == 1000


def test_table_shows_solving_costs_and_failures():
    rows = evaluate_all(OracleWithSolver(8), S3, make_config(examples=5), [4, 16], "fp32")
    table = build_summary_table({"eval": rows}, "x")
    cells = {c.header: list(c.cells) for c in table.columns}
    assert cells["failed"] == ["0.40%", "1.60%"] and cells["evaluations"] == ["1.0 1.0"] * 2
    assert all(len(cell.split()) == 2 for cell in cells["ℓ* per layer"])
    assert "not solved for 1.60% of the tokens of layer 0" in table.caption
    assert "warning: at length 16 the token's equation was not solved" in table.caption
    assert table.caption.count("warning") == 2  # one per layer, for the worst length
    hybrid_rows = [row | {"layers": [0, 3]} for row in rows]
    caption = build_summary_table({"eval": hybrid_rows}, "x").caption
    assert "of layer 3" in caption and "of layer 1" not in caption


def test_attention_reads_the_previous_segment_of_a_stream():
    torch.manual_seed(0)
    config = FPRNNConfig(vocab_size=8, d_model=16, n_layer=2, layers="attention mlp", headdim=8)
    model = FPRNNForCausalLM(config)
    tokens = torch.randint(1, 6, (2, 12), generator=torch.Generator().manual_seed(0))
    state = None
    for start in (0, 4, 8):
        segment = tokens[:, start : start + 4]
        answers = compute_answers(model, segment, None, state, True, token_by_token=False)
        by_token = compute_answers(model, segment, None, state, True, token_by_token=True)
        torch.testing.assert_close(by_token.logits, answers.logits)
        state = limit_attention(answers.state, 4)
    # Rotary positions are relative, so two segments give the same logits by themselves.
    torch.testing.assert_close(answers.logits, model(input_ids=tokens[:, 4:]).logits[:, 4:])
    assert (model(input_ids=tokens).logits[:, 8:] - answers.logits).abs().max() > 0.01
    assert state.layers[0].positions.tolist() == [[8, 9, 10, 11]] * 2
