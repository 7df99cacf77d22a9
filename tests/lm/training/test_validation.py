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


def labels_of(*lengths: int) -> torch.Tensor:
    """Return labels of sequences of 8 tokens with the given numbers of targets."""
    labels = torch.full((len(lengths), 8), IGNORE)
    for row, length in zip(labels, lengths):
        row[:length] = 1
    return labels


@pytest.mark.parametrize(
    "limit, expected",
    [(100, [0, 2, 4, 1, 3]), (40, [0, 2, 4, 1, 3]), (39, [0, 2, 4, 1]), (16, [0, 2]), (1, [0])],
)
def test_probe_reads_sequences_with_targets_first(limit, expected, monkeypatch):
    monkeypatch.setattr(validation, "MAX_PROBE_TOKENS", limit)
    assert probe_sequences(labels_of(8, 0, 1, 0, 8)).tolist() == expected


def test_ranks_probe_equally_many_sequences(monkeypatch):
    monkeypatch.setattr(validation, "MAX_PROBE_TOKENS", 16)
    assert len(probe_sequences(labels_of(8, 8, 8))) == len(probe_sequences(labels_of(0, 0, 0))) == 2


def test_probe_reads_part_of_a_large_micro_batch(monkeypatch):
    """The probe averages the first sequences with targets; sequences without do not count."""
    monkeypatch.setattr(validation, "MAX_PROBE_TOKENS", 16)
    torch.manual_seed(0)
    cfg = Config(model={"d_model": 16, "n_layer": 2, "d_state": 4})
    model = build_model(cfg, 16)
    inputs = []
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
    measured = [run_probe(labels_of(*lengths)) for lengths in ((8, 0, 3, 8), (8, 0, 0, 0))]
    assert [batch.tolist() for batch in inputs] == [ids[[0, 2]].tolist(), ids[[0, 1]].tolist()]
    expected = [fixed_point_metrics([probe(model, ids[rows])]) for rows in ([0, 2], [0])]
    assert measured == expected and measured[0] != measured[1]
    assert measured != [fixed_point_metrics([probe(model, ids)])] * 2
