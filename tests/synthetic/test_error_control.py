"""Error control: an automaton that is known exactly, contraction, thresholds, horizons, command."""

import json
import math
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from lm.model.state import FPRNNState
from synthetic import config, error_control, tasks
from synthetic.cli import main
from synthetic.error_control import (
    choose_lengths,
    find_subspace,
    find_threshold,
    measure_error_control,
    predict_horizon,
)
from synthetic.error_figure import FILES
from synthetic.tasks import TaskError
from synthetic.train import train
from tests.fabricated import TINY

LENGTH = 8  # training length of the fabricated models


class Counter(torch.nn.Module):
    """Model of Z3 whose state is the angle of the running sum, with a drift and a pull.

    A token i turns the state by i thirds of a circle. Then a random error with standard deviation
    `drift` is added, and the error from the nearest exact state is multiplied by `pull`.
    """

    def __init__(self, drift: float = 0.0, pull: float = 1.0):
        super().__init__()
        self.drift, self.pull = drift, pull
        self.unused = torch.nn.Parameter(torch.zeros(1))  # gives the model a device
        angles = torch.arange(3) * 2 * math.pi / 3
        self.exact = torch.stack([angles.cos(), angles.sin()], 1)  # (3,2)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, input_ids, attention_mask=None, state=None, return_state=True):
        if state is None:
            y = self.exact[:1].expand(len(input_ids), 2)
            state = FPRNNState(((y, (torch.full((len(y), 5), 7.0),)),), None)
        (y, (constant,)) = state.layers[0]
        logits = []
        for token in input_ids.T:
            cos, sin = self.exact[token].T
            y = torch.stack([cos * y[:, 0] - sin * y[:, 1], sin * y[:, 0] + cos * y[:, 1]], 1)
            y = y + self.drift * torch.randn(y.shape, generator=self.generator)
            nearest = self.exact[torch.cdist(y, self.exact).argmin(1)]
            y = nearest + self.pull * (y - nearest)
            logits.append(y @ self.exact.T)
        return SimpleNamespace(
            logits=torch.stack(logits, 1), state=FPRNNState(((y, (constant,)),), None)
        )


def measure(monkeypatch, model, max_length=256):
    """Measure a fabricated model of Z3 with training length LENGTH."""
    cfg = config.Config(
        name="z", task={"name": "word_problem", "group": "Z3"}, train={"length": LENGTH}
    )
    loaded = cfg, tasks.build_task(cfg.task), model, "fp32"
    monkeypatch.setattr(error_control, "load_run", lambda run_dir, trust: loaded)
    return measure_error_control("runs/z", max_length)


def test_subspace_of_known_states_is_exact():
    task = tasks.build_task(config.Task(name="word_problem", group="Z3"))
    model = Counter()
    subspace = find_subspace(model, task, LENGTH, seed=0, name="z")
    # The constant numbers do not separate the states.
    assert subspace.basis.shape == (7, 2) and subspace.basis[2:].abs().max() < 1e-6
    # The RMS of cos and of sin over the circle is 1/√2; the triangle's side is √3.
    assert subspace.separation == pytest.approx(math.sqrt(6), rel=0.02)
    _, state = error_control._read(model, torch.tensor([[1, 1], [2, 0]]), None)
    offsets = torch.tensor([[0.3, -0.2], [1.0, 2.0]])
    moved = subspace.move(state, offsets)
    torch.testing.assert_close(subspace.project(moved) - subspace.project(state), offsets)
    torch.testing.assert_close(moved.layers[0][1][0], state.layers[0][1][0])


def test_model_without_errors_has_no_spread_and_keeps_perturbations(monkeypatch):
    result = measure(monkeypatch, Counter())
    assert set(result.by_length["accuracy"].values()) == {1.0}
    assert set(result.by_length["nearest_accuracy"].values()) == {1.0}
    assert max(result.by_length["spread"].values()) < 1e-3
    # A rotation changes no distances.
    assert list(result.contraction.values()) == pytest.approx([1.0] * 4, abs=0.05)
    assert math.isinf(result.measured_horizon)


def test_pull_contracts_exponentially(monkeypatch):
    result = measure(monkeypatch, Counter(pull=0.5))
    expected = [0.5**delay for delay in error_control.DELAYS]
    assert list(result.contraction.values())[:3] == pytest.approx(expected[:3], rel=0.05)


def test_drift_spreads_like_a_random_walk_and_its_horizon_is_predicted(monkeypatch):
    drift = 0.1
    result = measure(monkeypatch, Counter(drift=drift), max_length=1024)
    for length in (8, 16, 32):  # σ √(2 dimensions · length · RMS scale²), before it wraps around
        assert result.by_length["spread"][length] == pytest.approx(
            drift * math.sqrt(4 * length), rel=0.15
        )
    assert 32 <= result.measured_horizon <= 256
    assert result.measured_horizon / 3 < result.predicted_horizon < result.measured_horizon * 3
    corrected = measure(monkeypatch, Counter(drift=drift, pull=0.5), max_length=1024)
    assert math.isinf(corrected.measured_horizon) and math.isinf(corrected.predicted_horizon)
    assert corrected.by_length["ratio"][1024] < 0.2


def test_measured_lengths():
    assert choose_lengths(16, 64) == [1, 2, 4, 8, 16, 32, 64]
    assert choose_lengths(20, 100) == [1, 2, 4, 8, 10, 16, 20, 32, 40, 64, 80, 100]
    assert choose_lengths(1, 4) == [1, 2, 4]


def test_threshold_adds_squares_between_two_levels():
    accuracy = {1.0: 0.9, 3.0: 0.5}
    assert find_threshold(1.5, accuracy, readable=0.7) == pytest.approx(math.hypot(1.5, 2.0))
    assert math.isnan(find_threshold(1.5, accuracy, readable=0.95))
    assert math.isinf(find_threshold(1.5, accuracy, readable=0.4))


def test_horizon_continues_the_power_law_of_lengths_near_the_training_length():
    ratio = {n: 0.1 * math.sqrt(n) for n in (1, 2, 4, 8, 16)}
    assert predict_horizon({**ratio, 2: 9.0, 32: 9.0}, 8, 1.0) == pytest.approx(100)
    assert math.isinf(predict_horizon(dict.fromkeys(ratio, 0.1), 8, 1.0))
    assert math.isinf(predict_horizon(ratio, 8, math.inf))
    assert math.isnan(predict_horizon(ratio, 8, math.nan))
    unknown = {8: math.nan}  # the task never gives some answers at this length
    assert predict_horizon(ratio | unknown, 8, 1.0) == pytest.approx(100)
    assert math.isnan(predict_horizon(dict.fromkeys(ratio, math.nan) | {8: 0.1}, 8, 1.0))


def build_run(folder, name, **sections):
    """Train a tiny run, and return its path."""
    path = folder / f"{name}.yaml"
    tree = {**TINY, "name": name, "out_dir": str(folder / "runs"), **sections}
    path.write_text(json.dumps(tree))
    train(config.load(path))
    return str(folder / "runs" / name)


@pytest.mark.parametrize(
    "sections, message",
    [
        ({"task": {"name": "parity"}}, "task `parity` do not name a state at every token"),
        ({"model": {"name": "transformer", "d_model": 16, "n_heads": 2}}, "attention has none"),
    ],
)
def test_other_tasks_and_attention_are_refused(tmp_path, sections, message):
    run = build_run(tmp_path, "t", **sections)
    with pytest.raises(TaskError, match=message):
        measure_error_control(run)


def test_command_compares_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(error_control, "NUM_REFERENCE", 256)
    parity = {"name": "parity", "supervision": "every"}
    runs = [
        build_run(tmp_path, "fp"),
        build_run(tmp_path, "mamba", model={"name": "mamba", "d_model": 16, "d_state": 4}),
        build_run(tmp_path, "parity", model={"name": "lstm", "d_model": 16}, task=parity),
    ]
    capsys.readouterr()
    assert main(["inspect", *runs, "--errors", "--length", "20", "--out", "out"]) == 0
    output = capsys.readouterr().out
    assert all(f"│ {name} " in output for name in ("fp", "mamba", "parity"))
    table = pd.read_csv("out/" + FILES[0])
    assert set(table["run"]) == {"fp", "mamba", "parity"}
    ratio = table[table["quantity"] == "ratio"].set_index(["run", "tokens"])["value"]
    assert (ratio > 0).all() and sorted(ratio["fp"].index) == [1, 2, 4, 8, 16, 20]
    assert (tmp_path / "out" / FILES[1]).stat().st_size > 10_000
    # The measurement depends only on the seed.
    result = measure_error_control(runs[1], 20)
    assert result.by_length["ratio"] == pytest.approx(ratio["mamba"].to_dict(), rel=1e-4)
    assert main(["inspect", runs[0], "nowhere", "--errors"]) != 0
    assert "nowhere: no such folder" in capsys.readouterr().err
