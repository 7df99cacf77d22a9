"""Profiles: what is planned for a config, tables and page, and several processes at once."""

import json
import math
import os
import signal
import threading
import time

import pytest

from lm.common.errors import ConfigError, Stopped, TrainingError
from lm.common.signals import STOP
from lm.config import load as base
from lm.runs.checkpoint import list_checkpoints
from synthetic import config, profile, tasks, validate
from synthetic.cli import main
from synthetic.evaluate import parse_lengths
from synthetic.numbers import headlines
from synthetic.plots import curves
from synthetic.runs import is_finished, run_all
from tests.fabricated import numbers

TINY = {
    "train": {"steps": 2, "batch_size": 4, "length": 3},
    "eval": {"lengths": "3,5", "examples": 8, "every": 10, "batch_size": 8},
    "thresholds": [{"metric": "token_accuracy", "length": 5, "min": 0.0}],
}


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """Four abilities, two of them quick, as runs of two updates."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    groups = {"s3": "S3", "copy": "Z5", "mod_arithmetic": "Z2", "recall": "Z4"}
    few = {}
    for number, (name, group) in enumerate(groups.items()):
        recipe = {"name": name, "task": {"group": group}, **TINY}
        (folder / f"{name}.yaml").write_text(json.dumps(recipe))
        few[name[:4]] = validate.Ability(name, number < 2)
    monkeypatch.setattr(validate, "ABILITIES", few)
    monkeypatch.setattr(validate, "RECIPES", folder)
    return few


def write(tmp_path, text, name="models.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


@pytest.fixture
def two(tmp_path):
    size = "d_model: 16, d_state: 4, headdim: 8"
    fp = f"name: fp\nmodel: {{name: fprnn, {size}}}\nsolver: {{n_backwards: 1, state_noise: 0.2}}\n"
    return [write(tmp_path, fp), write(tmp_path, f"model: {{name: lstm, {size}}}\n", "l.yaml")]


def test_the_recipes_are_complete_and_their_bars_measured():
    for recipe, _ in validate.ABILITIES.values():
        cfg = config.load(validate.RECIPES / f"{recipe}.yaml")
        assert len(cfg.thresholds) == 2 and cfg.name == recipe
        lengths = parse_lengths(cfg.eval.lengths, tasks.build(cfg.task))
        assert {bar.length for bar in cfg.thresholds} <= set(lengths)
        assert cfg.thresholds[0].length == cfg.train.lengths[1]


def test_a_config_of_one_model_is_planned_with_its_own_optimizer(tmp_path):
    path = write(
        tmp_path,
        "name: one\nmodel: {name: lstm, d_model: 24}\noptim: {lr: 5e-4}\ntrain: {steps: 9}\n",
    )
    runs = validate.plan([path], ["model.n_layer=2"], str(tmp_path))
    assert list(dict.fromkeys(point.ability for point in runs)) == list(validate.ABILITIES)
    for point, cfg in runs.items():
        assert (cfg.model.name, cfg.model.d_model, cfg.model.n_layer) == ("lstm", 24, 2)
        assert cfg.optim.lr == 5e-4 and cfg.train.steps > 9
        assert cfg.train.adversarial_noise == 0  # which an LSTM cannot have
        assert cfg.optim.warmup == 0.05  # the recipe's, which the config does not set
        assert cfg.seed == point.seed and str(point.seed) in cfg.name
    assert {point.seed for point in runs} == {0, 1, 2}
    assert len({cfg.run_dir for cfg in runs.values()}) == len(runs)


def test_a_quick_profile_has_fewer_abilities_one_seed_and_fewer_sequences(tmp_path):
    path = write(tmp_path, "model: {name: lstm, d_model: 24}\n")
    runs = validate.plan([path], [], str(tmp_path), quick=True)
    quick = [name for name, ability in validate.ABILITIES.items() if ability.is_quick]
    assert [point.ability for point in runs] == quick and 3 < len(quick) < 8
    assert {point.seed for point in runs} == {0}
    assert {cfg.eval.examples for cfg in runs.values()} == {validate.QUICK_EXAMPLES}
    runs = validate.plan([path], [], str(tmp_path), quick=True, seeds=[4, 7])
    assert {point.seed for point in runs} == {4, 7}
    with pytest.raises(ConfigError, match=r"seeds \[1, 1\]: one of them is there twice"):
        validate.plan([path], [], str(tmp_path), seeds=[1, 1])


def test_lengths_are_multiples_of_the_trained_one_as_far_as_sequences_are_short(tmp_path):
    path = write(tmp_path, "model: {name: lstm, d_model: 24}\n")
    for point, cfg in validate.plan([path], [], str(tmp_path), seeds=[0]).items():
        task = tasks.build(cfg.task)
        lengths = parse_lengths(cfg.eval.lengths, task)
        assert lengths[0] == cfg.train.lengths[1]
        assert {bar.length for bar in cfg.thresholds} <= set(lengths)
        longest = task.batch(0, "test", 0, 1, (lengths[-1],) * 2).input_ids.shape[1]
        assert 400 < longest <= validate.MOST_TOKENS
        if point.ability in ("state", "arithmetic"):
            multiples = [1, 2, 4, 8, 16, 32, 64]
            expected = [m * lengths[0] - (lengths[0] % 2 and m > 1) for m in multiples]
            assert lengths == expected


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
        ("model: {}\noptim: 3", [], "`optim` is 3: it must be a section"),
        ("modle: {d_model: 8}\n", [], "unknown section modle"),
        ("model: {d_model: 8}\n", ["train.steps=3"], "keys of model, solver and optim only"),
        ("model: {d_modle: 8}\n", [], "did you mean `model.d_model`"),
    ],
)
def test_what_cannot_be_validated_is_refused(tmp_path, text, overrides, message):
    with pytest.raises(ConfigError, match=message):
        validate.plan([write(tmp_path, text)], overrides, "runs")


def test_two_configs_of_one_name_are_refused(two):
    with pytest.raises(ConfigError, match="another config is named `fp` too"):
        validate.plan([two[0], two[0]], [], "runs")


def test_the_command_prints_one_table_and_goes_on_where_it_stopped(two, tmp_path, recipes, capsys):
    out = str(tmp_path / "out")
    command = ["validate", *two, "optim.lr=1e-3", "--out-dir", out, "--seeds", "0", "1"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    for text in (*recipes, "✓", "fp", "l", "16 runs, 0 of them finished already"):
        assert text in shown
    rows = numbers(tmp_path / "out/validate.csv")
    assert {r["panel"] for r in rows} == recipes.keys()
    solvers = {r["model"]: r["solver"] for r in rows}
    assert solvers["fp"].startswith("token exact, ") and solvers["l"] == "none"
    assert {r["read"] for r in rows} == {"at once"}
    words = " ".join(shown.split())
    assert f"Solver in evaluation: {solvers['fp']} (fp)" in words
    assert "Solver in evaluation: none (l)" in words
    assert "fp: trained with noise of 0.2" in words and "l: trained with" not in words
    assert config.load(tmp_path / "out/fp/s3/seed0/config.yaml").optim.lr == 1e-3
    assert main(command) == 0
    assert "16 runs, 16 of them finished already" in capsys.readouterr().out
    # Figures of another model are not passed off as this one's.
    command[3] = "optim.lr=2e-3"
    assert main(command) == 1
    assert "of another config (optim.lr was 0.001, is 0.002)" in capsys.readouterr().err
    # A baseline has no solver, so a default of the solver may change.
    command[3] = "optim.lr=1e-3"
    for name, code in (("l", 0), ("fp", 1)):
        saved = tmp_path / "out" / name / "s3/seed0/config.yaml"
        saved.write_text(saved.read_text().replace("n_backwards: 1", "n_backwards: 3"))
        assert main(command) == code
    assert "of another config (solver.n_backwards was 3, is 1)" in capsys.readouterr().err


def test_a_profile_has_the_numbers_of_its_runs(two, tmp_path, recipes):
    out = tmp_path / "out"
    runs = validate.validate(two, [], str(out), seeds=[0, 1])
    results = {}
    for path in out.glob("*/*/*/result.json"):
        results[path.relative_to(out).parts[:3]] = json.loads(path.read_text())
    assert len(results) == 2 * 4 * 2
    judged = profile.judge(runs)
    assert len(judged) == 8 and set(judged["bar"]) == {0.0} and judged["passed"].all()
    for row in judged.to_dict("records"):
        recipe = recipes[row["ability"]].recipe
        values = [
            line["metrics"]["token_accuracy"]
            for seed in (0, 1)
            for line in results[row["model"], recipe, f"seed{seed}"]["eval"]
            if line["length"] == 5
        ]
        assert row["metric"] == "token accuracy at 5, trained to 3"
        assert row["value"] == pytest.approx(sum(values) / 2)
        assert row["error"] == pytest.approx(abs(values[0] - values[1]) / math.sqrt(2))
    drawing = curves(runs, "")
    lengths = set(headlines(runs)["length"])
    assert lengths == {3 * times for times in validate.TIMES} | {5}
    *rows, parameters, seconds = profile.summarize(runs)
    assert parameters["fp"] == results["fp", "s3", "seed0"]["parameters"]
    assert seconds["fp"] == pytest.approx(
        sum(r["training_seconds"] for key, r in results.items() if key[0] == "fp")
    )

    for value in judged["value"]:
        assert any(f"{value:.3f}" in str(cell) for row in rows for cell in row.values())
    assert profile.write(drawing, out)[1].read_bytes().startswith(b"\x89PNG")
    assert [ax.get_title() for ax in drawing.figure.axes] == list(recipes)


@pytest.mark.slow
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

    before = {number: signal.getsignal(number) for number in STOP}
    threading.Thread(target=signal_once_started, daemon=True).start()
    try:
        with pytest.raises(Stopped, match="stopped by a signal"):
            run_all(runs, jobs=2)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for cfg in runs:
        assert list_checkpoints(cfg.run_dir / "checkpoints") and not is_finished(cfg)


def test_a_run_that_diverges_does_not_stop_the_others(two, tmp_path, recipes):
    runs = list(validate.plan(two, [], str(tmp_path / "one")).values())[:2]
    runs[0].optim.min_lr, runs[0].optim.lr, runs[0].optim.grad_clip = 0, 1e30, 0
    runs[0].train.steps = 6
    with pytest.raises(TrainingError, match="1 of 2 runs failed"):
        run_all(runs)
    assert [is_finished(cfg) for cfg in runs] == [False, True]
