"""Command validate: planned runs, tables, figures, and several processes at once."""

import json
import math
import os
import signal
import threading
import time

import pytest

from lm.common.errors import ConfigError, Stopped, TrainingError
from lm.common.signals import STOP_SIGNALS
from lm.config.load import load as load_lm_config
from lm.runs.checkpoint import list_checkpoints
from synthetic import ability_table, config, tasks, validate
from synthetic.cli import main
from synthetic.evaluate import parse_lengths
from synthetic.plots import draw_curves
from synthetic.result_tables import build_headline_table
from synthetic.runs import is_finished, run_all
from tests.fabricated import read_csv

TINY = {
    "train": {"steps": 2, "batch_size": 4, "length": 3},
    "eval": {"lengths": "3,5", "examples": 8, "every": 10, "batch_size": 8},
    "thresholds": [{"metric": "token_accuracy", "length": 5, "min": 0.0}],
}


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """Replace the abilities by four, two of them quick, with runs of two updates."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    groups = {"s3": "S3", "copy": "Z5", "mod_arithmetic": "Z2", "recall": "Z4"}
    abilities = {}
    for number, (name, group) in enumerate(groups.items()):
        recipe = {"name": name, "task": {"group": group}, **TINY}
        (folder / f"{name}.yaml").write_text(json.dumps(recipe))
        # The first four letters: an ability and its recipe may have different names.
        abilities[name[:4]] = validate.Ability(name, is_quick=number < 2)
    monkeypatch.setattr(validate, "ABILITIES", abilities)
    monkeypatch.setattr(validate, "RECIPE_DIR", folder)
    return abilities


def write(tmp_path, text, name="models.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


@pytest.fixture
def two_configs(tmp_path):
    size = "d_model: 16, d_state: 4, headdim: 8"
    fp = f"name: fp\nmodel: {{name: fprnn, {size}}}\nsolver: {{n_backwards: 1, state_noise: 0.2}}\n"
    return [write(tmp_path, fp), write(tmp_path, f"model: {{name: lstm, {size}}}\n", "l.yaml")]


def test_recipes_have_two_measured_thresholds():
    for recipe, _ in validate.ABILITIES.values():
        cfg = config.load(validate.RECIPE_DIR / f"{recipe}.yaml")
        assert len(cfg.thresholds) == 2 and cfg.name == recipe
        lengths = parse_lengths(cfg.eval.lengths, tasks.build_task(cfg.task))
        assert {entry.length for entry in cfg.thresholds} <= set(lengths)
        assert cfg.thresholds[0].length == cfg.train.lengths[1]


def test_plan_uses_the_configs_optimizer(tmp_path):
    path = write(
        tmp_path,
        "name: one\nmodel: {name: lstm, d_model: 24}\noptim: {lr: 5e-4}\ntrain: {steps: 9}\n",
    )
    runs = validate.plan_runs([path], ["model.n_layer=2"], str(tmp_path))
    assert list(dict.fromkeys(key.ability for key in runs)) == list(validate.ABILITIES)
    for key, cfg in runs.items():
        assert (cfg.model.name, cfg.model.d_model, cfg.model.n_layer) == ("lstm", 24, 2)
        assert cfg.optim.lr == 5e-4 and cfg.train.steps > 9
        assert cfg.train.adversarial_noise == 0  # an LSTM does not support it
        assert cfg.optim.warmup == 0.05  # from the recipe: the config does not set it
        assert cfg.seed == key.seed and str(key.seed) in cfg.name
    assert {key.seed for key in runs} == {0, 1, 2}
    assert len({cfg.run_dir for cfg in runs.values()}) == len(runs)


def test_quick_profile_is_smaller(tmp_path):
    path = write(tmp_path, "model: {name: lstm, d_model: 24}\n")
    runs = validate.plan_runs([path], [], str(tmp_path), quick=True)
    quick = [name for name, ability in validate.ABILITIES.items() if ability.is_quick]
    assert [key.ability for key in runs] == quick and 3 < len(quick) < 8
    assert {key.seed for key in runs} == {0}
    assert {cfg.eval.examples for cfg in runs.values()} == {validate.QUICK_EXAMPLES}
    runs = validate.plan_runs([path], [], str(tmp_path), quick=True, seeds=[4, 7])
    assert {key.seed for key in runs} == {4, 7}
    with pytest.raises(ConfigError, match=r"seeds \[1, 1\]: one of them occurs twice"):
        validate.plan_runs([path], [], str(tmp_path), seeds=[1, 1])


def test_lengths_are_multiples_of_the_training_length(tmp_path):
    path = write(tmp_path, "model: {name: lstm, d_model: 24}\n")
    for key, cfg in validate.plan_runs([path], [], str(tmp_path), seeds=[0]).items():
        task = tasks.build_task(cfg.task)
        lengths = parse_lengths(cfg.eval.lengths, task)
        assert lengths[0] == cfg.train.lengths[1]
        assert {entry.length for entry in cfg.thresholds} <= set(lengths)
        interval = (lengths[-1], lengths[-1])
        batch = task.batch(0, "test", index=0, batch_size=1, lengths=interval)
        assert 400 < batch.input_ids.shape[1] <= validate.MAX_TOKENS
        multiples = [factor * lengths[0] for factor in (1, 2, 4, 8, 16, 32, 64)]
        if key.ability == "state":
            assert lengths == multiples
        if key.ability == "arithmetic":  # all lengths are odd: the next shorter ones
            assert lengths == [length if length % 2 else length - 1 for length in multiples]


def test_config_of_a_language_model_can_be_validated():
    path = validate.RECIPE_DIR.parents[1] / "lm" / "fpmamba_160m_fineweb2b.yaml"
    runs = validate.plan_runs([str(path)], [], "runs")
    cfg = load_lm_config(path)
    assert {run.model.d_model for run in runs.values()} == {cfg.model.d_model}
    assert all(run.solver == cfg.solver for run in runs.values())


@pytest.mark.parametrize(
    "text, overrides",
    [
        ("model: {d_model: 8}\nsolver: {tol: 0.2}\n", []),
        ("model: {d_model: 8}\n", ["solver.tol=0.2"]),
    ],
)
def test_plan_uses_the_configs_solver(tmp_path, text, overrides):
    runs = validate.plan_runs([write(tmp_path, text)], overrides, str(tmp_path))
    assert {run.solver.tol for run in runs.values()} == {0.2}


@pytest.mark.parametrize(
    "text, overrides, message",
    [
        ("name: x\noptim: {lr: 1e-3}\n", [], "has no `model:` section"),
        ("model: {}\noptim: 3", [], "`optim` is 3: it must be a section"),
        ("modle: {d_model: 8}\n", [], "unknown section modle"),
        ("model: {d_model: 8}\n", ["train.steps=3"], "accepts only keys of model, solver"),
        ("model: {d_modle: 8}\n", [], "did you mean `model.d_model`"),
    ],
)
def test_invalid_configs_are_refused(tmp_path, text, overrides, message):
    with pytest.raises(ConfigError, match=message):
        validate.plan_runs([write(tmp_path, text)], overrides, "runs")


def test_two_configs_with_the_same_name_are_refused(two_configs):
    with pytest.raises(ConfigError, match="another config is named `fp` too"):
        validate.plan_runs([two_configs[0], two_configs[0]], [], "runs")


def test_command_prints_table_and_reuses_finished_runs(two_configs, tmp_path, recipes, capsys):
    out = str(tmp_path / "out")
    options = ["--out-dir", out, "--seeds", "0"]
    command = ["validate", *two_configs, "optim.lr=1e-3", *options]
    assert main(command) == 0
    output = capsys.readouterr().out
    # 8 runs: two models and four abilities.
    for text in (*recipes, "✓", "fp", "l", "8 runs, 0 of them already finished"):
        assert text in output
    rows = read_csv(tmp_path / "out/validate.csv")
    assert {r["panel"] for r in rows} == recipes.keys()
    solvers = {r["model"]: r["solver"] for r in rows}
    assert solvers["fp"].startswith("token exact, ") and solvers["l"] == "none"
    assert {r["read"] for r in rows} == {"at once"}
    output = " ".join(output.split())
    assert f"Solver in evaluation: {solvers['fp']} (fp)" in output
    assert "Solver in evaluation: none (l)" in output
    assert "fp: trained with noise of 0.2" in output and "l: trained with" not in output
    assert config.load(tmp_path / "out/fp/s3/seed0/config.yaml").optim.lr == 1e-3
    assert main(command) == 0
    assert "8 runs, 8 of them already finished" in capsys.readouterr().out
    # Finished runs with another config are refused.
    assert main(["validate", *two_configs, "optim.lr=2e-3", *options]) == 1
    assert "with another config (optim.lr was 0.001, is 0.002)" in capsys.readouterr().err
    # The solver section does not matter for a baseline, which has no solver.
    for model, status in (("l", 0), ("fp", 1)):
        saved = tmp_path / "out" / model / "s3/seed0/config.yaml"
        saved.write_text(saved.read_text().replace("n_backwards: 1", "n_backwards: 3"))
        assert main(command) == status
    assert "with another config (solver.n_backwards was 3, is 1)" in capsys.readouterr().err


def test_tables_match_the_results(two_configs, tmp_path, recipes):
    out = tmp_path / "out"
    runs = validate.validate(two_configs, [], str(out), seeds=[0, 1])
    results = {}
    for path in out.glob("*/*/*/result.json"):
        results[path.relative_to(out).parts[:3]] = json.loads(path.read_text())
    assert len(results) == 2 * 4 * 2  # models, abilities, seeds
    judged = ability_table.judge_abilities(runs)
    assert len(judged) == 8 and set(judged["threshold"]) == {0.0} and judged["passed"].all()
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
    drawing = draw_curves(runs, "")
    lengths = set(build_headline_table(runs)["length"])
    assert lengths == {3 * factor for factor in validate.LENGTH_FACTORS} | {5}
    *rows, parameters, seconds = ability_table.summarize_abilities(runs)
    assert parameters["fp"] == results["fp", "s3", "seed0"]["parameters"]
    assert seconds["fp"] == pytest.approx(
        sum(r["training_seconds"] for key, r in results.items() if key[0] == "fp")
    )

    for value in judged["value"]:
        assert any(f"{value:.3f}" in str(cell) for row in rows for cell in row.values())
    assert ability_table.write_files(drawing, out)[1].read_bytes().startswith(b"\x89PNG")
    assert [ax.get_title() for ax in drawing.figure.axes] == list(recipes)


@pytest.mark.slow
def test_parallel_runs_match_sequential_runs(two_configs, tmp_path, recipes):
    sequential = list(validate.plan_runs(two_configs, [], str(tmp_path / "one")).values())[:2]
    parallel = list(validate.plan_runs(two_configs, [], str(tmp_path / "two")).values())[:2]
    run_all(sequential)
    run_all(parallel, jobs=2)
    for a, b in zip(sequential, parallel):
        left, right = (
            [r["metrics"] for r in json.loads((c.run_dir / "result.json").read_text())["eval"]]
            for c in (a, b)
        )
        assert left == right
    bad = parallel[0].model_copy(update={"name": "bad"})
    bad.task.group = "Q8"
    with pytest.raises(TrainingError, match=r"1 of 1 runs failed; the first: see .*bad\.log"):
        run_all([bad], jobs=2)
    assert not is_finished(bad)


def test_signal_stops_parallel_runs_after_saving(two_configs, tmp_path, recipes):
    """The processes of --jobs do not outlive the command, and each saves a checkpoint."""
    path = tmp_path / "long.yaml"
    path.write_text(json.dumps({"model": {"d_model": 16, "d_state": 4}, "task": {"group": "Z2"}}))
    endless = [f"out_dir={tmp_path}", "train.steps=100000", "log.every=1"]
    runs = [config.load(path, [f"name={name}", *endless]) for name in "ab"]

    def signal_once_started():
        files = [cfg.run_dir / "metrics.jsonl" for cfg in runs]
        while not all(f.exists() and f.stat().st_size for f in files):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    threading.Thread(target=signal_once_started, daemon=True).start()
    try:
        with pytest.raises(Stopped, match="stopped by a signal"):
            run_all(runs, jobs=2)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for cfg in runs:
        assert list_checkpoints(cfg.run_dir / "checkpoints") and not is_finished(cfg)


def test_diverged_run_does_not_stop_the_others(two_configs, tmp_path, recipes):
    runs = list(validate.plan_runs(two_configs, [], str(tmp_path / "one")).values())[:2]
    diverging = runs[0]
    diverging.optim.lr, diverging.optim.min_lr, diverging.optim.grad_clip = 1e30, 0, 0
    diverging.train.steps = 6
    with pytest.raises(TrainingError, match="1 of 2 runs failed"):
        run_all(runs)
    assert [is_finished(cfg) for cfg in runs] == [False, True]
