"""The quick set: what it plans for a config, its table, and several processes at once."""

import json
import math
import os
import signal
import threading
import time

import pytest

from lm.common.errors import BAD_CONFIG, ConfigError, Stopped, TrainingError
from lm.config import load as base
from lm.runs.checkpoint import listed
from synthetic import config, tasks, validate
from synthetic.cli import main
from synthetic.evaluate import parse_lengths
from synthetic.runs import is_finished, run_all

TINY = {
    "train": {"steps": 2, "batch_size": 4, "length": 3},
    "eval": {"lengths": "3,5", "examples": 8, "every": 10, "batch_size": 8},
    "bars": [{"metric": "token_accuracy", "length": 5, "least": 0.0}],
}


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """The quick set as four runs of two updates."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    names = {
        "s3": {"group": "S3"},
        "copy": {"group": "Z5"},
        "mod_arithmetic": {"group": "Z2"},
        "recall": {"group": "Z4"},
    }
    for name, task in names.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"name": name, "task": task, **TINY}))
    monkeypatch.setattr(validate, "RECIPES", folder)
    return folder


def write(tmp_path, text, name="models.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


@pytest.fixture
def two(tmp_path):
    size = "d_model: 16, d_state: 4, headdim: 8"
    fp = f"name: fp\nmodel: {{name: fprnn, {size}}}\nsolver: {{patience: 15}}\n"
    return [write(tmp_path, fp), write(tmp_path, f"model: {{name: lstm, {size}}}\n", "l.yaml")]


def test_the_recipes_are_complete_and_their_bars_measured():
    for recipe in validate.QUICK.values():
        cfg = config.load(validate.RECIPES / f"{recipe}.yaml")
        assert cfg.bars and cfg.name == recipe
        lengths = parse_lengths(cfg.eval.lengths, tasks.build(cfg.task))
        assert {bar.length for bar in cfg.bars} <= set(lengths)


def test_a_config_of_one_model_is_planned_with_its_own_optimizer(tmp_path):
    path = write(
        tmp_path,
        "name: one\nmodel: {name: lstm, d_model: 24}\noptim: {lr: 5e-4}\ntrain: {steps: 9}\n",
    )
    runs = validate.plan([path], ["model.n_layer=2"], str(tmp_path))
    assert [ability for ability, _ in runs] == list(validate.QUICK)
    for cfg in runs.values():
        assert (cfg.model.name, cfg.model.d_model, cfg.model.n_layer) == ("lstm", 24, 2)
        assert cfg.optim.lr == 5e-4 and cfg.train.steps > 9
        assert cfg.train.adversary == 0  # which an LSTM cannot have
        assert cfg.optim.warmup == 0.05  # the recipe's, which the config does not set


def test_every_shipped_config_of_a_language_model_can_be_validated():
    path = validate.RECIPES.parents[1] / "lm" / "fpmamba_160m_fineweb2b.yaml"
    runs = validate.plan([str(path)], [], "runs")
    cfg = base.load(path)
    assert {run.model.d_model for run in runs.values()} == {cfg.model.d_model}
    assert all(run.solver == cfg.solver for run in runs.values())


@pytest.mark.parametrize(
    "text, overrides",
    [
        ("model: {d_model: 8}\nsolver: {tol: 0.2}\n", []),
        ("model: {d_model: 8}\n", ["solver.tol=0.2"]),
    ],
)
def test_a_model_is_planned_with_its_own_solver(tmp_path, text, overrides):
    runs = validate.plan([write(tmp_path, text)], overrides, str(tmp_path))
    assert {run.solver.tol for run in runs.values()} == {0.2}


@pytest.mark.parametrize(
    "text, overrides, message",
    [
        ("name: x\noptim: {lr: 1e-3}\n", [], "has no `model:` section"),
        ("modle: {d_model: 8}\n", [], "unknown section modle"),
        ("model: {d_model: 8}\n", ["train.steps=3"], "keys of model, solver and optim only"),
        ("model: {d_modle: 8}\n", [], "did you mean `model.d_model`"),
    ],
)
def test_what_cannot_be_validated_is_refused(tmp_path, text, overrides, message):
    with pytest.raises(ConfigError, match=message):
        validate.plan([write(tmp_path, text)], overrides, "runs")


def test_overrides_alone_are_refused(capsys):
    assert main(["validate", "model.d_model=32"]) == BAD_CONFIG
    assert "needs a config with a `model:` section" in capsys.readouterr().err


def test_two_configs_of_one_name_are_refused(two):
    with pytest.raises(ConfigError, match="another config is named `fp` too"):
        validate.plan([two[0], two[0]], [], "runs")


def test_the_command_prints_one_table_and_goes_on_where_it_stopped(two, tmp_path, recipes, capsys):
    out = str(tmp_path / "out")
    assert main(["validate", *two, "optim.lr=1e-3", "--out-dir", out]) == 0
    shown = capsys.readouterr().out
    for text in ("tracking", "copying", "arithmetic", "memory", "✓", "fp", "l"):
        assert text in shown
    rows = json.loads((tmp_path / "out/validate.json").read_text())
    assert len(rows) == 8 and {r["ability"] for r in rows} == validate.QUICK.keys()
    solvers = {r["model"]: r["solver"] for r in rows}
    assert solvers["fp"].startswith("token exact, ") and solvers["l"] == "none"
    assert all(r["read"] == "at once" and r["stderr"] >= 0 for r in rows)
    assert {r["in_training"] for r in rows} == {"0"}
    words = " ".join(shown.split())
    assert f"fp: read at once; solver: {solvers['fp']}" in words
    assert "l: read at once; solver: none" in words
    assert config.load(tmp_path / "out/fp/s3/config.yaml").optim.lr == 1e-3
    assert main(["validate", *two, "optim.lr=1e-3", "--out-dir", out]) == 0
    assert "8 runs, 8 of them finished already" in capsys.readouterr().out
    # Figures of another model are not passed off as this one's.
    assert main(["validate", *two, "optim.lr=2e-3", "--out-dir", out]) == 1
    assert "of another config (optim.lr was 0.001, is 0.002)" in capsys.readouterr().err
    # A baseline has no solver, so a default of the solver may change.
    for name, code in (("l", 0), ("fp", 1)):
        saved = tmp_path / "out" / name / "s3/config.yaml"
        saved.write_text(saved.read_text().replace("patience: 15", "patience: 3"))
        assert main(["validate", *two, "optim.lr=1e-3", "--out-dir", out]) == code
    assert "of another config (solver.patience was 3, is 15)" in capsys.readouterr().err


def test_test_samples_that_training_has_too_are_named_below_the_table():
    row = {
        "ability": "a",
        "task": "parity",
        "model": "m",
        "metric": "accuracy",
        "length": 4,
        "trained_to": 9,
        "value": 0.5,
        "least": 0.9,
        "passed": False,
        "updates": 1,
        "seconds": 1,
        "parameters": 1,
        "stderr": 0.01,
        "read": "at once",
        "solver": "none",
        "in_training": "9 of 36",
    }
    caption = validate.table([row, {**row, "length": 9, "in_training": "0"}]).caption
    assert caption.splitlines() == [
        "m: read at once; solver: none",
        "m, parity at 4: 9 of 36 test samples are in training too",
    ]


def test_what_an_old_result_does_not_say_is_called_unknown_in_words():
    row = {
        "ability": "a",
        "task": "copy",
        "model": "m",
        "metric": "accuracy",
        "length": 8,
        "trained_to": 8,
        "value": 0.5,
        "least": 0.9,
        "passed": False,
        "updates": 1,
        "seconds": 1,
        "parameters": 1,
        "stderr": math.nan,
        "read": "unknown",
        "solver": "unknown",
        "in_training": "unknown",
    }
    table = validate.table([row])
    assert table.caption.splitlines()[1:] == [
        "m, copy at 8: whether training has the test samples too is unknown",
    ]
    assert next(iter(table.columns[4].cells)) == "0.500 ·"


def test_runs_at_once_give_what_runs_in_turn_give(two, tmp_path, recipes):
    in_turn = list(validate.plan(two, [], str(tmp_path / "one")).values())[:2]
    at_once = list(validate.plan(two, [], str(tmp_path / "two")).values())[:2]
    run_all(in_turn)
    run_all(at_once, jobs=2)
    for a, b in zip(in_turn, at_once):
        left, right = (
            [r["metrics"] for r in json.loads((c.run_dir / "result.json").read_text())["eval"]]
            for c in (a, b)
        )
        assert left == right
    bad = at_once[0].model_copy(update={"name": "bad"})
    bad.task.group = "Q8"
    with pytest.raises(TrainingError, match=r"1 of 1 runs failed; the first: see .*bad\.log"):
        run_all([bad], jobs=2)
    assert not is_finished(bad)


def test_a_signal_stops_the_runs_at_once_and_they_go_on(two, tmp_path, recipes):
    """The processes of --jobs do not outlive the command; each has saved."""
    path = tmp_path / "long.yaml"
    path.write_text(json.dumps({"model": {"d_model": 16, "d_state": 4}, "task": {"group": "Z2"}}))
    endless = [f"out_dir={tmp_path}", "train.steps=100000", "log.every=1"]
    runs = [config.load(path, [f"name={name}", *endless]) for name in "ab"]

    def signal_once_started():
        files = [cfg.run_dir / "metrics.jsonl" for cfg in runs]
        while not all(f.exists() and f.stat().st_size for f in files):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=signal_once_started, daemon=True).start()
    with pytest.raises(Stopped, match="stopped by a signal"):
        run_all(runs, jobs=2)
    for cfg in runs:
        assert listed(cfg.run_dir / "checkpoints") and not is_finished(cfg)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_run_that_diverges_does_not_stop_the_others(two, tmp_path, recipes):
    runs = list(validate.plan(two, [], str(tmp_path / "one")).values())[:2]
    runs[0].optim.min_lr, runs[0].optim.lr, runs[0].optim.grad_clip = 0, 1e30, 0
    runs[0].train.steps = 6
    with pytest.raises(TrainingError, match="1 of 2 runs failed"):
        run_all(runs)
    assert [is_finished(cfg) for cfg in runs] == [False, True]
