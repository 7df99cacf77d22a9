"""Comparisons: what is trained in which order, what is read from runs, means, tables, refusals."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from lm.cli.main import main
from lm.common import page as shell
from lm.common.errors import DIVERGED, ConfigError, Stopped, TrainingError
from lm.common.signals import STOP
from lm.report.compare import compare, page, results, runs, settings
from lm.runs.run_dir import RunDirError

SHIPPED = sorted((Path(__file__).parents[3] / "configs" / "lm" / "compare").glob("*.yaml"))
SIZES = {"d_model": 16, "n_layer": 2, "d_state": 2, "layers": "mamba"}


def tree_of(tmp_path, **changes) -> dict:
    tree = {
        "name": "duel",
        "out_dir": str(tmp_path / "out"),
        "reference": "plain",
        "models": {"plain": {}, "deep": {"model.d_state": 3}},
        "tune": {"optim.lr": [1e-3, 2e-3, 4e-3]},
        "seeds": [5, 6],
        "parameters_within": 0.3,
        "equal": ["tokens", "flops", "processor"],
        "config": {
            "model": dict(SIZES),
            "tokenizer": {"name": "bpe", "vocab_size": 300},
            "data": {"seq_len": 16},
            "train": {"steps": 40, "global_batch_size": 2, "micro_batch_size": 2},
        },
    }
    return tree | changes


def comparison(tmp_path, overrides=(), **changes) -> settings.Comparison:
    path = tmp_path / "compare.yaml"
    path.write_text(yaml.dump(tree_of(tmp_path, **changes), sort_keys=False))
    return settings.load(path, overrides)


def refused(call, error: type[Exception], *words: str) -> None:
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value), str(caught.value)


def finish(training, loss: float, seconds=10.0, evaluations=None, bits=1.5) -> None:
    """What a training of this loss leaves behind; bits: of a byte for each nat of a token."""
    run, steps = training.run_dir, training.cfg.train.steps
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(training.cfg.to_yaml())

    def record(step, **more):
        return json.dumps({"step": step, **more})

    def spent(share):
        return {"seconds": 2 * seconds * share, "processor_seconds": seconds * share}

    work = {} if evaluations is None else {"evaluations": evaluations}
    lines = [
        record(steps // 4, loss=loss + 1, spent=spent(0.25), **work),
        record(steps // 2, validation={"loss": loss + 0.5, "bits_per_byte": (loss + 0.5) * bits}),
        record(steps, loss=loss, spent=spent(1.0), **work),
        record(steps, validation={"loss": loss, "bits_per_byte": loss * bits}),
    ]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    tokens = training.cfg.tokens_per_step() * steps
    validation = {"loss": loss, "bits_per_byte": loss * bits}
    result = {"updates": steps, "tokens": tokens, "validation": validation}
    (run / "result.json").write_text(json.dumps(result))


def fail(training, exit_code: int) -> None:
    training.run_dir.mkdir(parents=True)
    failure = {"sentence": "the loss is nan", "exit_code": exit_code}
    (training.run_dir / "failure.json").write_text(json.dumps(failure))


def tuned(c, losses: dict[str, list[float]], **others) -> None:
    for model, of in losses.items():
        for one, loss in zip(results.tuning(c, model), of, strict=True):
            finish(one, loss, **others)


# What a YAML means.


def test_a_training_is_the_config_the_model_the_point_and_the_seed(tmp_path):
    c = comparison(tmp_path)
    one = results.tuning(c, "deep")[1]
    cfg = one.cfg
    assert (cfg.model.d_state, cfg.optim.lr, cfg.seed, cfg.resume) == (3, 2e-3, 5, "auto")
    assert (cfg.name, cfg.out_dir) == ("duel/deep/lr=0.002-seed=5", c.out_dir)
    longer = settings.training(c, "deep", "processor", one.point, 6, 77)
    assert longer.cfg.train.steps == 77
    assert longer.cfg.name == "duel/deep/lr=0.002-equal-processor-77-seed=6"


def test_every_training_has_a_directory_of_its_own(tmp_path):
    c = comparison(tmp_path, tune={"optim.lr": [1e-3, 2e-3], "optim.warmup": [0.1, 0.2]})
    all_of_them = [one for model in c.models for one in results.tuning(c, model)]
    assert len({one.run_dir for one in all_of_them}) == len(all_of_them) == 8


def test_overrides_are_of_the_comparison_and_below_config_of_its_trainings(tmp_path):
    over = ["seeds=[9]", "config.train.steps=7", "tune.optim.lr=[3.0e-3]", "config.data.seq_len=8"]
    (one,) = results.tuning(comparison(tmp_path, over), "plain")
    cfg = one.cfg
    assert (cfg.seed, cfg.train.steps, cfg.optim.lr, cfg.data.seq_len) == (9, 7, 3e-3, 8)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"reference": "other"}, ["reference is `other`", "plain, deep"]),
        ({"seeds": [1, 1]}, ["seeds", "twice"]),
        ({"equal": ["flops"]}, ["equal must have tokens"]),
        ({"equal": ["tokens", "hours"]}, ["hours"]),
        ({"tune": {"optim.lr": []}}, ["tune.optim.lr", "non-empty"]),
        ({"tune": {"optim.learning": [1]}}, ["unknown key `optim.learning`"]),
        ({"models": {"plain": {}}}, ["models"]),
        ({"models": {"plain": {}, "a/b": {}}}, ["a/b", "folder"]),
        ({"models": {"plain": {}, "b": {"model.width": 3}}}, ["model b", "unknown key"]),
        ({"config": {"seed": 3}}, ["config.seed", "leave it out"]),
        ({"batch": 3}, ["batch"]),
        ({"models": {"plain": {}, "b": {"train.steps": 7}}}, ["models.b has other", "the same"]),
        ({"models": {"plain": {}, "b": {"data.seq_len": 8}}}, ["models.b has other", "the same"]),
        ({"models": {"plain": {}, "b": {"optim.lr": 0.5}}}, ["models.b.optim.lr", "tune"]),
        ({"models": {"plain": {}, "b": {"seed": 5}}}, ["models.b.seed", "own to set"]),
        ({"tune": {"model.d_state": [2, 3]}}, ["tune.model.d_state", "of optim.*"]),
        ({"tune": {"optim.lr": [0.004, 4e-3]}}, ["the same value twice"]),
        ({"parameters_within": 0}, ["parameters_within"]),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path, changes, words):
    refused(lambda: comparison(tmp_path, **changes), ConfigError, *words)


@pytest.mark.parametrize("override", ["seeds", "optim.lr=3", "config.train.stepz=3"])
def test_overrides_that_cannot_be_are_refused(tmp_path, override):
    named = override.partition("=")[0].removeprefix("config.")
    refused(lambda: comparison(tmp_path, [override]), ConfigError, named)


def test_models_of_different_sizes_are_refused(tmp_path):
    wide = {"plain": {}, "wide": {"model.d_model": 20}}
    c = comparison(tmp_path, models=wide, parameters_within=0.05)
    costs = {model: results.cost(c, model) for model in c.models}
    refused(lambda: results.check_parameters(c, costs), ConfigError, "within 5%", "wide", "%)")
    c.parameters_within = costs["wide"].parameters / costs["plain"].parameters - 1 + 1e-9
    results.check_parameters(c, costs)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_the_shipped_comparisons_are_of_models_of_one_size(path):
    c = settings.load(path)
    results.check_parameters(c, {model: results.cost(c, model) for model in c.models})


# What is read from runs.


def test_what_a_run_took_at_a_validation_lies_between_its_records(tmp_path):
    c = comparison(tmp_path)
    one = results.tuning(c, "plain")[0]
    finish(one, 2.0, seconds=12.0, evaluations=[1.0, 3.0])
    found = runs.measured(one)
    assert (found.seconds, found.processor_seconds, found.evaluations) == (24.0, 12.0, 2.0)
    half, end = found.curve
    # A third of the way from the record at a quarter (3 s) to the one at the end (12 s).
    assert half["step"] == 20 and half["processor_seconds"] == pytest.approx(3 + 9 / 3)
    assert half["tokens"] == found.tokens / 2 and half["loss"] == 2.5
    assert end["processor_seconds"] == 12.0 and end["bits_per_byte"] == 3.0


def test_an_unfinished_run_is_none_and_one_without_times_is_refused(tmp_path):
    c = comparison(tmp_path)
    one, other, _ = results.tuning(c, "plain")
    assert runs.measured(one) is None and runs.is_left(one)
    finish(other, 2.0)
    metrics = other.run_dir / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("spent", "spend"))
    refused(lambda: runs.measured(other), Exception, "does not say what the updates", "delete")


def test_the_best_point_is_the_lowest_loss_and_edges_are_named(tmp_path):
    c = comparison(tmp_path)
    tuned(c, {"plain": [3.0, 2.0, 2.5]})
    first, second, third = results.tuning(c, "deep")
    finish(first, 2.6)
    finish(second, 2.4)
    fail(third, DIVERGED)
    assert dict(results.best_point(c, "plain")) == {"optim.lr": 2e-3}
    assert results.edges(c, "plain") == []
    assert dict(results.best_point(c, "deep")) == {"optim.lr": 2e-3}
    assert runs.has_diverged(third) and not runs.is_left(third)


def test_a_warm_up_in_updates_cannot_be_stretched(tmp_path):
    over = ["config.optim.warmup=4"]
    refused(lambda: comparison(tmp_path, over), ConfigError, "optim.warmup", "fractions")
    comparison(tmp_path, over, equal=["tokens"])


def test_a_loss_that_is_no_number_is_not_the_best(tmp_path):
    c = comparison(tmp_path)
    tuned(c, {"plain": [math.nan, 2.0, 2.5]})
    assert dict(results.best_point(c, "plain")) == {"optim.lr": 2e-3}


def test_what_a_failed_start_left_is_no_run_of_other_settings(tmp_path):
    one = results.tuning(comparison(tmp_path), "plain")[0]
    one.run_dir.mkdir(parents=True)
    (one.run_dir / "config.yaml").write_text(one.cfg.to_yaml())
    other = results.tuning(comparison(tmp_path, ["config.data.seq_len=8"]), "plain")[0]
    assert runs.is_left(other)


def test_a_model_that_diverges_everywhere_leaves_the_others_alone(tmp_path, monkeypatch):
    c = comparison(tmp_path, equal=["tokens"], seeds=[5])
    tuned(c, {"plain": [3.0, 2.0, 2.5]})
    for one in results.tuning(c, "deep"):
        fail(one, DIVERGED)
    text = compare(tmp_path / "compare.yaml")["tables"].read_text()
    assert "| plain |" in text and "| deep |" in text
    c = comparison(tmp_path, equal=["tokens"], seeds=[5], reference="deep")
    refused(lambda: compare(tmp_path / "compare.yaml"), results.AllDiverged, "deep")


def test_a_difference_of_fewer_pairs_says_so(tmp_path):
    c, costs, _ = both_seeds(tmp_path)
    gone = results.seeded(c, "plain")[1]
    (gone.run_dir / "result.json").unlink()
    fail_at = gone.run_dir / "failure.json"
    fail_at.write_text(json.dumps({"sentence": "nan", "exit_code": DIVERGED}))
    _, deep = results.summary(results.collect(c, costs), "tokens")
    assert (deep["n"], deep["pairs"]) == (2, 1)
    rows = page.tables(results.collect(c, costs))["tokens"]
    assert rows[2][5] == "-0.3000 of 1" and rows[1][3] == "1, 1 diverged"


def test_a_grid_that_diverged_everywhere_or_is_not_trained_says_so(tmp_path):
    c = comparison(tmp_path)
    refused(lambda: results.best_point(c, "plain"), TrainingError, "not trained yet")
    for one in results.tuning(c, "plain"):
        fail(one, DIVERGED)
    refused(lambda: results.best_point(c, "plain"), TrainingError, "every point", "diverged")


def test_a_budget_is_what_the_reference_took(tmp_path):
    c = comparison(tmp_path, seeds=[5])
    costs = {model: results.cost(c, model) for model in c.models}
    tuned(c, {"plain": [3.0, 2.0, 2.5]}, seconds=12.0)
    tuned(c, {"deep": [3.0, 2.6, 2.5]}, seconds=30.0)
    (one,) = results.at_budget(c, "deep", "processor", costs)
    assert one.cfg.train.steps == 16  # of 40, at 30 s where the reference took 12
    assert one.cfg.optim.lr == 4e-3 and results.edges(c, "deep") == ["optim.lr"]
    (one,) = results.at_budget(c, "deep", "flops", costs)
    ratio = costs["plain"].flops_per_token / costs["deep"].flops_per_token
    assert one.cfg.train.steps == round(40 * ratio) < 40
    (one,) = results.at_budget(c, "deep", "time", costs)  # twice the processor's, of both
    assert one.cfg.train.steps == 16 and "equal-time-16" in one.cfg.name
    assert results.at_budget(c, "plain", "processor", costs) == results.seeded(c, "plain")


def test_flops_count_the_evaluations_beyond_the_first(tmp_path):
    c = comparison(tmp_path, models={"plain": {}, "fp": {"model.layers": "fp_mamba1"}})
    of = results.cost(c, "fp")
    assert results.cost(c, "plain").flops_per_evaluation == 0 < of.flops_per_evaluation
    (one, *_) = results.tuning(c, "fp")
    finish(one, 2.0, evaluations=[3.0, 5.0])
    each = of.flops_per_token + 3 * of.flops_per_evaluation
    assert results.flops_of(of, runs.measured(one), 10) == pytest.approx(10 * each)


def both_seeds(tmp_path):
    """A comparison whose trainings at equal tokens are all done: {model: losses of both seeds}."""
    c = comparison(tmp_path, equal=["tokens"])
    losses = {"plain": (2.0, 2.2), "deep": (1.8, 2.1)}
    for model, (first, second) in losses.items():
        tuned(c, {model: [3.0, first, 2.5]})
        finish(results.seeded(c, model)[1], second)
    costs = {model: results.cost(c, model) for model in c.models}
    return c, costs, losses


def test_means_deviations_and_paired_differences(tmp_path):
    c, costs, losses = both_seeds(tmp_path)
    plain, deep = results.summary(results.collect(c, costs), "tokens")
    bits = {model: [1.5 * loss for loss in of] for model, of in losses.items()}
    assert plain["mean"] == pytest.approx(statistics.mean(bits["plain"]))
    assert deep["deviation"] == pytest.approx(statistics.stdev(bits["deep"]))
    assert deep["difference"] == pytest.approx(1.5 * (-0.2 - 0.1) / 2)
    assert deep["difference_deviation"] == pytest.approx(1.5 * statistics.stdev([-0.2, -0.1]))
    assert plain["difference"] == 0 and plain["n"] == deep["n"] == 2


def test_scores_in_two_units_are_not_compared(tmp_path):
    c = comparison(tmp_path, equal=["tokens"], seeds=[5])
    tuned(c, {"plain": [3.0, 2.0, 2.5], "deep": [3.0, 2.0, 2.5]})
    path = results.seeded(c, "deep")[0].run_dir / "result.json"
    path.write_text(path.read_text().replace("bits_per_byte", "bits"))
    costs = {model: results.cost(c, model) for model in c.models}
    refused(lambda: results.collect(c, costs), TrainingError, "bits per byte", "nats a token")


# What is written.


def test_the_page_and_the_tables_hold_what_was_found(tmp_path):
    c, costs, _ = both_seeds(tmp_path)
    paths = page.write(results.collect(c, costs), tmp_path / "report")
    text, tables = (paths[name].read_text() for name in ("page", "tables"))
    for part in ("3.15 ± 0.21", "± 0.32", "± 0.11", "lr 0.002"):
        assert part in text and part in tables, part
    assert "<svg" in text and 'href="http' not in text and "src=" not in text
    assert json.loads(paths["results"].read_text())["unit"] == "bits per byte"


def test_a_comparison_that_is_half_done_is_reported_as_it_is(tmp_path):
    c = comparison(tmp_path)
    tuned(c, {"plain": [3.0, 2.0, 2.5]})
    fail(results.tuning(c, "deep")[0], DIVERGED)
    paths = compare(tmp_path / "compare.yaml", report=True)
    found = json.loads(paths["results"].read_text())["models"]
    assert [row["state"] for row in found["plain"]["budgets"]["tokens"]] == [
        "done",
        "not trained yet",
    ]
    assert found["deep"]["tuned"][0]["validation_loss"] == "diverged"
    assert "best" not in found["deep"] and "| deep |" in paths["tables"].read_text()


# Starting them.


def ending(status: int, before: str = "pass"):
    """In the place of a training, a process that ends so."""

    def start(training, jobs, gpus):
        text = f"import sys; {before}; sys.exit({status})"
        return subprocess.Popen([sys.executable, "-c", text])

    return start


def test_what_is_done_or_diverged_is_not_trained_again(tmp_path, monkeypatch):
    c = comparison(tmp_path)
    one, two, three = results.tuning(c, "plain")
    finish(one, 2.0)
    fail(two, DIVERGED)
    started = []

    def start(training, jobs, gpus):
        started.append(training)
        finish(training, 3.0)
        return ending(0)(training, jobs, gpus)

    monkeypatch.setattr(runs, "_start", start)
    runs.run_all([one, two, three], 2, None)
    assert started == [three]


def test_runs_of_other_settings_are_not_taken_for_these(tmp_path):
    one = results.tuning(comparison(tmp_path), "plain")[0]
    finish(one, 2.0)
    assert runs.measured(one).loss == 2.0
    changed = comparison(tmp_path, ["config.data.seq_len=8"])
    other = results.tuning(changed, "plain")[0]
    assert other.run_dir == one.run_dir
    refused(lambda: runs.is_left(other), RunDirError, "data.seq_len was 16, is 8", "delete")
    quiet = comparison(tmp_path, ["config.log.every=7"])
    assert runs.measured(results.tuning(quiet, "plain")[0]).loss == 2.0


def test_a_training_that_fails_stops_the_comparison_and_says_why(tmp_path, monkeypatch):
    c = comparison(tmp_path)
    one, *others = results.tuning(c, "plain")
    fail(one, 65)
    monkeypatch.setattr(runs, "_start", ending(65))
    run = lambda: runs.run_all([one, *others], 1, None)  # noqa: E731
    refused(run, TrainingError, "plain lr=0.001 seed=5", "the loss is nan")


LISTENS_LATE = """
import signal, time
time.sleep(0.5)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
time.sleep(60)
"""


def test_a_signal_reaches_a_training_that_is_being_started(tmp_path, monkeypatch):
    (one, *_) = results.tuning(comparison(tmp_path), "plain")
    started = []

    def start(training, jobs, gpus):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        started.append(subprocess.Popen([sys.executable, "-c", LISTENS_LATE]))
        return started[0]

    monkeypatch.setattr(runs, "_start", start)
    before = {number: signal.getsignal(number) for number in STOP}
    try:
        refused(lambda: runs.run_all([one], 1, None), Stopped, "the same command continues")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert started[0].returncode == -signal.SIGTERM


def test_one_that_diverges_is_a_result(tmp_path, monkeypatch):
    c = comparison(tmp_path)
    (one, *_) = results.tuning(c, "plain")
    monkeypatch.setattr(runs, "_start", ending(DIVERGED))
    runs.run_all([one], 1, None)


def test_options_that_do_nothing_are_refused(tmp_path, capsys):
    comparison(tmp_path)
    path = str(tmp_path / "compare.yaml")
    assert main(["compare", path, "--gpu", "a100-80g"]) == 78
    assert "--gpu is for --plan" in capsys.readouterr().err
    assert main(["compare", path, "--gpus", "4", "--jobs", "2"]) == 78
    assert "leave --jobs out" in capsys.readouterr().err
    for option in ("--plan", "--report"):
        assert main(["compare", path, option, "--jobs", "2"]) == 78
        assert f"{option} trains nothing: leave --jobs out" in capsys.readouterr().err
    assert main(["compare", path, "--gpus", "4"]) == 78
    assert "on GPUs take `time`" in capsys.readouterr().err


def test_the_plan_counts_trainings_hours_and_cost(tmp_path, capsys):
    comparison(tmp_path)
    path = str(tmp_path / "compare.yaml")
    assert (
        main(["compare", path, "--plan", "--gpus", "1", "--gpu", "a100-80g", "--price", "2"]) == 0
    )
    text = capsys.readouterr().out
    # Three points and one more seed each; two more budgets of two seeds for the one that is not
    # the reference.
    assert "12 trainings" in text and "at 2 a GPU hour" in text


@pytest.mark.slow  # six trainings, a process each
def test_a_comparison_from_beginning_to_end(tmp_path):
    comparison(
        tmp_path, ["tune.optim.lr=[4.0e-3]", "config.train.steps=4", "config.log.every=2"],
        equal=["tokens", "processor"],
    )  # fmt: skip
    path = tmp_path / "compare.yaml"
    over = ["tune.optim.lr=[4.0e-3]", "config.train.steps=4", "config.log.every=2"]
    over += ["equal=[tokens, processor]"]
    first = compare(path, over, jobs=2)["results"].read_text()
    assert '"not trained yet"' not in first and "diverged" not in first
    assert compare(path, over)["results"].read_text() == first  # nothing is trained twice


def curves_of(count: int, seconds: float) -> dict:
    """What `collect` finds of so many models, whose lines end close together."""
    models = {}
    for i in range(count):
        curve = [
            {
                "step": s,
                "tokens": 2e3 * s,
                "flops": 1e10 * s * (1 + i),
                "seconds": seconds * s / 500,
                "processor_seconds": seconds * s / 500,
                "bits_per_byte": 2 + 100 / s + i / 90,
            }
            for s in range(100, 501, 100)
        ]
        models[f"model_{i}"] = {"budgets": {"tokens": [{"state": "done", "curve": curve}]}}
    return {"models": models, "unit": "bits per byte", "comparison": {"equal": ["tokens"]}}


@pytest.mark.parametrize("seconds", [0.6, 600.0, 90_000.0])
def test_nine_lines_are_told_apart_without_colours(seconds):
    """By dashes, markers and their names behind their ends; no two names or numbers collide."""
    from matplotlib.text import Text

    with shell.ink():
        figure = page.draw(curves_of(9, seconds), ["tokens", "flops", "processor_seconds"])
        figure.draw_without_rendering()
    looks = {(line.get_linestyle(), line.get_marker()) for line in figure.axes[0].lines[::3]}
    assert len(looks) == 9
    boxes = [Text.get_window_extent(name) for name in figure.axes[2].texts]  # without their line
    assert len(boxes) == 9
    for axes in figure.axes:
        ticks = [t for t in axes.get_xticklabels() if t.get_text()]
        boxes += [tick.get_window_extent() for tick in ticks]
        assert 2 <= len(ticks) <= 7
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(figure.bbox.x1 >= box.x1 and figure.bbox.y0 <= box.y0 for box in boxes)
    times = [t.get_text() for t in figure.axes[2].get_xticklabels()]
    unit = {0.6: "s", 600.0: "min", 90_000.0: "h"}[seconds]
    assert all(re.fullmatch(r"[\d.]+ (s|min|h|d)", text) for text in times)
    assert any(text.endswith(f" {unit}") for text in times)
