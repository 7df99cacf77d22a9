"""The micro-batch that a probe reads during training."""

from types import SimpleNamespace

import pytest
import torch

from lm.common.ranks import Ranks
from lm.config.schema import Config
from lm.data.batches.packing import IGNORE
from lm.runs.metrics import fixed_point_metrics, probe
from lm.training import validation
from lm.training.build import build_model
from lm.training.validation import Validation, probe_sequences


def make_labels(*target_counts: int) -> torch.Tensor:
    """Return labels of sequences of 8 tokens with the given numbers of targets."""
    labels = torch.full((len(target_counts), 8), IGNORE)
    for row, count in zip(labels, target_counts):
        row[:count] = 1
    return labels


@pytest.mark.parametrize(
    "max_tokens, expected",
    [(100, [0, 2, 4, 1, 3]), (40, [0, 2, 4, 1, 3]), (39, [0, 2, 4, 1]), (16, [0, 2]), (1, [0])],
)
def test_probe_reads_sequences_with_targets_first(max_tokens, expected, monkeypatch):
    monkeypatch.setattr(validation, "MAX_PROBE_TOKENS", max_tokens)
    assert probe_sequences(make_labels(8, 0, 1, 0, 8)).tolist() == expected


def test_ranks_probe_equally_many_sequences(monkeypatch):
    """Their number does not depend on the targets, which differ between ranks."""
    monkeypatch.setattr(validation, "MAX_PROBE_TOKENS", 16)
    for target_counts in ((8, 8, 8), (0, 0, 0)):
        assert len(probe_sequences(make_labels(*target_counts))) == 2


def test_probe_reads_part_of_a_large_micro_batch(monkeypatch):
    """It reads two of four sequences, and averages over sequences with targets only."""
    monkeypatch.setattr(validation, "MAX_PROBE_TOKENS", 16)
    torch.manual_seed(0)
    cfg = Config(model={"d_model": 16, "n_layer": 2, "d_state": 4})
    model = build_model(cfg, vocab_size=16)
    inputs = []  # of each probe
    model.register_forward_pre_hook(
        lambda _, args, kwargs: inputs.append(kwargs["input_ids"]), with_kwargs=True
    )

    def run_probe(labels):
        fake_validation = SimpleNamespace(
            failure_watch=object(),
            shares={"small": 0.25, "large": 0.75},
            held_out={"small": [], "large": [{"input_ids": ids, "labels": labels}, None]},
            ranks=Ranks(),
        )
        return Validation.probe_solver(fake_validation, SimpleNamespace(deepspeed=model))["probe"]

    ids = torch.randint(16, (4, 8))

    def measure(rows):
        return fixed_point_metrics([probe(model, ids[rows])])

    # The first micro-batch has two sequences with targets, the second only one.
    measured = [run_probe(make_labels(*counts)) for counts in ((8, 0, 3, 8), (8, 0, 0, 0))]
    assert [batch.tolist() for batch in inputs] == [ids[[0, 2]].tolist(), ids[[0, 1]].tolist()]
    assert measured == [measure([0, 2]), measure([0])] and measured[0] != measured[1]
    assert measure(slice(None)) not in measured, "all sequences have another mean"
