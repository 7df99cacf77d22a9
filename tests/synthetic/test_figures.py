"""Figures: means and errors over seeds, marks, and the notes below them."""

import json

import pandas as pd
import pytest

from synthetic import plots, report
from synthetic.result_tables import (
    FinishedRun,
    average_seeds,
    build_final_table,
    build_metric_lines,
    describe_figure,
)
from synthetic.results import TOKEN_BY_TOKEN, build_summary_table
from tests.fabricated import ROW, draw_report, fabricate, fabricate_all, sweep

SEEDS = """
name: seeds
model: {d_model: 16, n_layer: 1}
task: {name: word_problem, group: S3}
train: {length: 16}
eval: {lengths: "2:48", during: "2:32", seeds: [0, 1]}
sweep:
  model: [{name: fprnn}, {name: lstm}]
  seed: [0, 1, 2]
"""
PAIRS = """
name: pairs
model: {name: lstm, d_model: 16, n_layer: 1}
train: {length: 16}
eval: {lengths: "8,16,32"}
sweep:
  task: [{name: copy}, {name: word_problem, group: S3}]
  seed: [0, 1, 2]
"""

SIZES = """
name: sizes
model: {d_model: 16, n_layer: 1}
task: {name: copy}
train: {length: 16}
eval: {lengths: "16"}
sweep:
  model: [{name: mamba, n_layer: 1}, {name: mamba, n_layer: 2}, {name: lstm}]
  model.d_model: [64, 32]
  seed: [0, 1]
"""


def make_finished_runs(text, tmp_path, choose_solved_length) -> list[FinishedRun]:
    """Return the finished runs of a sweep; a run whose solved length is None is missing."""
    (tmp_path / "sweep.yaml").write_text(text)
    expanded = report.expand_sweep(tmp_path / "sweep.yaml", (f"out_dir={tmp_path}",))
    for cfg in expanded.configs:
        if length := choose_solved_length(cfg):
            fabricate(cfg, length)
    return report.collect_runs(expanded)


@pytest.fixture
def seeds(tmp_path):
    solved_lengths = {"fprnn": 14, "lstm": 26}  # of seed 0
    return make_finished_runs(
        SEEDS, tmp_path, lambda cfg: solved_lengths[cfg.model.name] + 3 * cfg.seed
    )


def read_legend(drawing) -> set[str]:
    return {text.get_text() for box in drawing.figure.legends for text in box.get_texts()}


@pytest.mark.parametrize("name", ["fig1", "fig3c", "tab1", "fig5"])
def test_seeds_are_drawn_together_with_their_count(name, seeds):
    entry = report.REPORTS[name]
    options = {"metric": "token_accuracy"} if name == "tab1" else entry.options
    drawing = plots.DRAW_FUNCTIONS[entry.kind](seeds, name, **options)
    models = 2 if name != "fig3c" else 1  # fig3c draws ℓ*, which an LSTM does not have
    ticks = {text.get_text() for text in drawing.figure.axes[0].get_yticklabels()}
    assert len({t for t in ticks | read_legend(drawing) if "(n = 3)" in t}) == models
    footer = " ".join(drawing.figure._supxlabel.get_text().split())
    solver = "token iterate, parallel, causal, tol 0.01, at most 1000 iterations"
    assert f"Solver in evaluation: {solver}" in footer
    if models == 2:
        assert "Solver in evaluation: none (LSTM)" in footer
    assert {str(line["n"]) for line in drawing.summary} == {"3"}
    assert set(drawing.table["seed"]) == {0, 1, 2}


def test_iterations_of_unlearned_models_are_marked(tmp_path):
    """ℓ* of a map that does not solve the task may differ from ℓ* of one that does."""
    configs = sweep("fig3c", "small", f"out_dir={tmp_path}").configs
    for cfg, solved_length in zip(configs, (60, 60, 5), strict=True):
        fabricate(cfg, solved_length)
    drawing = draw_report("fig3c", tmp_path)
    lines = {line.get_label(): line for line in drawing.figure.axes[0].lines}
    marked_labels = [label for label in lines if "not learned" in label]
    assert marked_labels == ["FP-Mamba nonselective, not learned (n = 1)"]
    assert lines[marked_labels[0]].get_markerfacecolor() == "none"
    assert lines["FP-Mamba householder 1 (n = 1)"].get_markerfacecolor() != "none"
    assert "Not learned (dots, hollow markers)" in drawing.figure._supxlabel.get_text()


def test_iterations_of_another_solution_are_marked(tmp_path):
    configs = sweep("fig3c", "small", f"out_dir={tmp_path}").configs
    for cfg in configs:
        fabricate(cfg, 60)
    path = configs[1].run_dir / "result.json"
    result = json.loads(path.read_text())
    for row in result["eval"]:
        row["num_iters"]["elsewhere"] = [0.8 for _ in row["num_iters"]["mean"]]
    path.write_text(json.dumps(result))
    drawing = draw_report("fig3c", tmp_path)
    assert len([label for label in read_legend(drawing) if "†" in label]) == 1
    footer = " ".join(drawing.figure._supxlabel.get_text().split())
    assert "† marks an ℓ*" in footer and "Not learned" not in footer


def make_run(model="m", **result) -> FinishedRun:
    cfg = sweep("fig1").configs[0]
    labels = {"model": model, "panel": ""}
    return FinishedRun(cfg.run_dir, cfg, seed=0, point={}, **labels, result=result, records=[])


def test_table_averages_over_test_seeds_and_layers():
    rows = [
        {"length": 8, "metrics": {"a": 0.5}, "num_iters": {"mean": [2.0, 4.0]}},
        {"length": 8, "metrics": {"a": 1.0}, "num_iters": {"mean": [5.0, 5.0]}},
        {"length": 4, "metrics": {"a": 1.0}},
    ]
    rows = [{**ROW, **row} for row in rows]
    table = build_final_table([make_run(eval=rows)])
    a = average_seeds(table[table["metric"] == "a"])
    assert a["value"].to_dict() == {4: 1.0, 8: 0.75}
    assert a["error"].to_dict() == pytest.approx({4: 0.1, 8: 0.1 / 2**0.5})
    iterations = average_seeds(table[table["metric"] == "num_iters"])
    assert iterations["value"].to_dict() == {8: 4.0}


def make_table(**rows_by_model) -> pd.DataFrame:
    models = [(make_run(model), rows) for model, rows in rows_by_model.items()]
    return pd.DataFrame([line for run, rows in models for line in build_metric_lines(run, rows)])


def test_unsolved_tokens_are_noted():
    solver = {"token": "exact", "schedule": "sequential", "tol": None, "max_iters": None}
    row = {**ROW, "solver": solver}
    rows = [{**row, "failed": [0.0, 0.02]}, {**row, "failed": [0.0, 0.04]}]
    assert describe_figure(make_table(a=rows, b=[{**row, "failed": [0.001]}]), []) == [
        "Solver in evaluation: token exact, sequential",
        "Tokens whose equation was not solved, more than 0.1%: a: 3.00%",
    ]
    iterated = {"num_iters": {"mean": [1.0, 1.0]}, "evaluations": [1.0, 1.0]}
    caption = build_summary_table({"eval": [row | iterated for row in rows]}, "x").caption
    assert "warning: at length 2 the token's equation was not solved for 4.00% of" in caption
    assert "model.contractive: 0.9" in caption


def test_overlap_with_training_is_noted():
    row = {**ROW, "in_training": {"count": 3, "of": 4}}
    held_out = {**row, "length": 9, "in_training": {"count": 0, "of": 4}}
    assert describe_figure(make_table(a=[row, held_out]), []) == [
        "Solver in evaluation: none",
        "Training may contain the test samples of length: 2",
    ]


def test_table_has_the_seed_of_the_finished_run(tmp_path):
    fabricate_all("fig3c", tmp_path)
    changed = sweep("fig3c", "small", f"out_dir={tmp_path}", "seed=7")
    assert {cfg.seed for cfg in changed.configs} == {7}
    assert set(build_final_table(report.collect_runs(changed))["seed"]) == {0}


def test_curve_label_has_the_range_of_seed_counts(seeds):
    """Seed 0 was evaluated from length 2, the others from length 16."""
    runs = [run for run in seeds if run.cfg.model.name == "lstm"]
    for run in runs[1:]:
        run.result["eval"] = [row for row in run.result["eval"] if row["length"] >= 16]
    drawing = plots.draw_curves(runs, "uneven")
    assert "LSTM (n = 1–3)" in read_legend(drawing)
    ax = drawing.figure.axes[0]
    dots = [line for line in ax.get_lines() if line.get_marker() == "."]
    lengths = {row["length"] for row in runs[1].result["eval"]}
    assert {line.get_xdata()[0] for line in dots} == lengths
    assert {len(line.get_xdata()) for line in dots} == {3}
    assert len(ax.collections) == 2  # a band for several seeds, error bars for one
    assert max(segment[0][0] for segment in ax.collections[0].get_segments()) < 16


def test_scatter_pairs_points_by_seed(tmp_path):
    """For copying only seed 2 is finished, for the word problem all three."""

    def choose_solved_length(cfg):
        is_missing = cfg.task.name == "copy" and cfg.seed != 2
        return None if is_missing else 20 + 6 * cfg.seed

    runs = make_finished_runs(PAIRS, tmp_path, choose_solved_length)
    drawing = report.REPORTS["fig2"].draw(runs, "uneven")
    (label,) = read_legend(drawing)
    assert label.endswith("(n = 1–3)") and drawing.summary[0]["n"] == "1–3"
    (dots,) = [line for line in drawing.figure.axes[0].get_lines() if line.get_marker() == "."]
    table = build_final_table(run for run in runs if run.seed == 2)
    values = table[table["length"] == 32].set_index(["task", "metric"])["value"]
    expected = values["copy", "character_accuracy"], values["word_problem", "token_accuracy"]
    assert [tuple(point) for point in dots.get_xydata()] == [expected]


def test_sizes_are_drawn_over_parameters_with_a_line_for_each_kind(tmp_path):
    solved_lengths = {32: 10, 64: 20}
    runs = make_finished_runs(SIZES, tmp_path, lambda cfg: solved_lengths[cfg.model.d_model])
    for run in runs:  # reading token by token has another line in the table, and is not drawn
        slow_row = {**run.result["eval"][0], "read": TOKEN_BY_TOKEN}
        slow_row["metrics"] = dict.fromkeys(slow_row["metrics"], 0.0)
        run.result["eval"].append(slow_row)
    drawing = plots.draw_sizes(runs, "sizes")
    (ax,) = drawing.figure.axes
    assert read_legend(drawing) == {"Mamba (n = 2)", "LSTM (n = 2)"}
    mamba, lstm = (line for line in ax.lines if line.get_label().startswith(("Mamba", "LSTM")))
    assert list(mamba.get_xdata()) == [32**2, 2 * 32**2, 64**2, 2 * 64**2]
    assert list(lstm.get_xdata()) == [32**2, 64**2]
    accuracies = {row["run"]: float(row["string accuracy"].split()[0]) for row in drawing.summary}
    small, wide = (accuracies[f"LSTM, d_model {width}"] for width in (32, 64))
    assert 0 < small < wide
    assert ax.get_ylabel() == "string accuracy (chance: 0.17)"
    assert list(mamba.get_ydata()) == pytest.approx([small, small, wide, wide], abs=1e-3)
    assert {row["parameters"] for row in drawing.summary} == {"1,024", "2,048", "4,096", "8,192"}
    assert set(drawing.table["parameters"]) == {1024, 2048, 4096, 8192}
