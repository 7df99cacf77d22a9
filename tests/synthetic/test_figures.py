"""Figures of several seeds: means, spreads and numbers of seeds; what solved stands below them."""

import dataclasses
import json
import re
from functools import partial

import pytest
import torch

from synthetic import cli, figures, report
from synthetic.results import AT_ONCE, TOKEN_BY_TOKEN, summary, way_of
from synthetic.trained import csv_lines, notes, over_lengths, spreads_over_lengths
from tests.fabricated import fabricate, fabricate_all, numbers

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


def seeds_of(tmp_path) -> tuple[str, ...]:
    """A sweep over seeds, its runs fabricated: arguments of a report that draws it."""
    (tmp_path / "seeds.yaml").write_text(SEEDS)
    found = report.expand(tmp_path / "seeds.yaml", (f"out_dir={tmp_path}",))
    for i, cfg in enumerate(found.configs):
        fabricate(cfg, 14 + 12 * (i // 3) + 3 * cfg.seed)
    return ("--config", str(tmp_path / "seeds.yaml"), "--out-dir", str(tmp_path))


@pytest.mark.parametrize("name", ["fig1", "fig3c", "tab1", "fig5", "ablation"])
def test_seeds_are_drawn_together_with_their_number(name, tmp_path, monkeypatch):
    drawn = {}

    def keep(entry, runs, title):
        drawn["it"] = made = entry(runs, title)
        return made

    entry = report.REPORTS[name]
    metric = {} if name != "tab1" else {"metric": "token_accuracy"}
    monkeypatch.setitem(
        report.REPORTS,
        name,
        dataclasses.replace(entry, draw=lambda r, t: keep(partial(entry.draw, **metric), r, t)),
    )
    monkeypatch.setattr("matplotlib.pyplot.close", lambda figure: None)
    args = seeds_of(tmp_path)
    assert cli.main(["report", name, *args]) == 0
    figure = drawn["it"].figure
    texts = [t.get_text() for t in figure.findobj(lambda a: hasattr(a, "get_text"))]
    runs = 2 if name != "fig3c" else 1  # a baseline has no ℓ*
    assert len({t for t in texts if "(n = 3)" in t}) == (runs if name != "ablation" else 1)
    footer = " ".join(figure._supxlabel.get_text().split())
    solver = "token iterate, parallel, causal, tol 0.01" + ", at most 1000 iterations" * (
        name != "ablation"
    )
    assert f"Solver in evaluation: {solver}" in footer
    if runs == 2 and name != "ablation":
        assert "Solver in evaluation: none (LSTM)" in footer
    assert [line["n"] for line in drawn["it"].summary] == [3] * runs
    assert {row["seed"] for row in drawn["it"].rows} == {0, 1, 2}


def test_iterations_of_a_model_that_learned_nothing_are_marked(tmp_path, monkeypatch, capsys):
    """ℓ* of a map that does not solve the task is not what the task takes."""
    configs = report.expand(report.config_path("fig3c", "small"), (f"out_dir={tmp_path}",)).configs
    for cfg, reach in zip(configs, (60, 60, 5), strict=True):
        fabricate(cfg, reach)
    drawn = []
    monkeypatch.setattr("matplotlib.pyplot.close", drawn.append)
    report.report("fig3c", overrides=(f"out_dir={tmp_path}",))
    lines = {line.get_label(): line for line in drawn[0].axes[0].lines}
    marked = [label for label in lines if "not learned" in label]
    assert marked == ["FP-Mamba nonselective, not learned (n = 1)"]
    assert lines[marked[0]].get_markerfacecolor() == "none"
    assert lines["FP-Mamba householder 1 (n = 1)"].get_markerfacecolor() != "none"
    assert "Not learned (dots, hollow markers)" in drawn[0]._supxlabel.get_text()
    shown = capsys.readouterr().out
    assert re.search(r"nonselective .* no │", shown) and shown.count(" yes │") == 2


def test_iterations_of_another_solution_are_marked(tmp_path, monkeypatch):
    configs = report.expand(report.config_path("fig3c", "small"), (f"out_dir={tmp_path}",)).configs
    for cfg in configs:
        fabricate(cfg, 60)
    written = configs[1].run_dir / "result.json"
    result = json.loads(written.read_text())
    for row in result["eval"]:
        row["num_iters"]["elsewhere"] = [0.8 for _ in row["num_iters"]["mean"]]
    written.write_text(json.dumps(result))
    drawn = []
    monkeypatch.setattr("matplotlib.pyplot.close", drawn.append)
    report.report("fig3c", overrides=(f"out_dir={tmp_path}",))
    labels = [line.get_label() for line in drawn[0].axes[0].lines]
    assert len([label for label in labels if "†" in label]) == 1
    footer = " ".join(drawn[0]._supxlabel.get_text().split())
    assert "† the paper's procedure" in footer and "Not learned" not in footer


def test_the_spread_of_seeds_and_the_error_of_one(tmp_path):
    seeds_of(tmp_path)
    files = sorted(tmp_path.glob("seeds/00[012]-*/result.json"))
    several = [json.loads(path.read_text())["eval"] for path in files]
    found = spreads_over_lengths(several, "sequence_accuracy")[16]
    values = [over_lengths(each, "sequence_accuracy")[16] for each in several]
    assert found.values == tuple(values) and found.mean == pytest.approx(sum(values) / 3)
    assert found.error == pytest.approx(torch.tensor(values).double().std().item())
    twice = [{**row, "seed": seed} for row in several[0] for seed in (0, 1)]
    one, two = (
        spreads_over_lengths([each], "sequence_accuracy")[16] for each in (several[0], twice)
    )
    assert (
        one.error == next(r for r in several[0] if r["length"] == 16)["stderr"]["sequence_accuracy"]
    )
    assert two.error == pytest.approx(one.error / 2**0.5)


def test_results_of_before_the_solver_was_recorded_are_called_unknown(tmp_path, capsys):
    for cfg in fabricate_all("fig10", tmp_path):
        path = cfg.run_dir / "result.json"
        result = json.loads(path.read_text())
        for row in result["eval"]:
            row["schedule"] = "sequential" if row["read"] == TOKEN_BY_TOKEN else "parallel"
            for key in ("read", "solver", "stderr", "in_training", "probed", "failed"):
                row.pop(key, None)
        path.write_text(json.dumps(result))
    paths = report.report("fig10", overrides=(f"out_dir={tmp_path}",))
    found = numbers(paths["numbers"])
    assert {r["solver"] for r in found} == {r["in_training"] for r in found} == {"unknown"}
    assert {r["read"] for r in found} == {"unknown", TOKEN_BY_TOKEN}
    assert {r["stderr"] for r in found} == {"nan"}
    assert "num_iters" not in {r["metric"] for r in found}  # it was not yet what ℓ* is
    old = [{"length": 2, "metrics": {"accuracy": 0.5}, "schedule": "parallel"}] * 2
    cells = [cell for column in summary({"eval": old}, "old").columns for cell in column.cells]
    assert "0.5000" in cells and not any("nan" in str(cell) for cell in cells)
    assert "parallel" not in paths["numbers"].read_text()
    shown = " ".join(capsys.readouterr().out.split())
    assert "nan" not in shown
    assert "Solver in evaluation: unknown" in shown
    assert "Whether training has the test samples too is unknown of some" in shown


def test_tokens_that_were_not_solved_are_noted_below_a_figure():
    solver = {"token": "exact", "schedule": "sequential", "tol": None, "max_iters": None}
    row = {"length": 2, "metrics": {}, "solver": solver, "in_training": {"count": 0, "of": 4}}
    rows = [{**row, "failed": [0.0, 0.02]}, {**row, "failed": [0.0, 0.04]}]
    assert notes([("a", rows), ("b", [{**row, "failed": [0.001]}])]) == [
        "Solver in evaluation: token exact, sequential",
        "Tokens whose equation was not solved, more than 0.1%: a: 3.00%",
    ]
    caption = summary({"eval": rows}, "x").caption
    assert "warning: at length 2 the token's equation was not solved for 4.00% of" in caption
    assert "model.contractive: 0.9" in caption


def test_what_training_has_too_is_noted():
    row = {"length": 2, "metrics": {}, "solver": "none", "in_training": {"count": 3, "of": 4}}
    held = {**row, "length": 9, "in_training": {"count": 0, "of": 4}}
    assert notes([("a", [row, held])]) == [
        "Solver in evaluation: none",
        "Test samples that training has too, at length (at most): 2 (3 of 4)",
    ]


def test_the_seed_in_the_numbers_is_the_one_the_run_was_made_with(tmp_path):
    fabricate_all("fig3c", tmp_path)
    today = report.expand(report.config_path("fig3c", "small"), (f"out_dir={tmp_path}", "seed=7"))
    runs = report.collect(today, [])
    lines = [line for run in runs for line in csv_lines(run, run.result["eval"])]
    assert {cfg.seed for cfg in today.configs} == {7}
    assert {line["seed"] for line in lines} == {0}


def labels_of(figure) -> set[str]:
    """The entries of a figure's legend."""
    return {text.get_text() for legend in figure.legends for text in legend.get_texts()}


def test_a_curve_says_of_how_many_seeds_each_length_is(tmp_path):
    """Seed 0 was evaluated from length 2 on, the others from 16 on."""
    seeds_of(tmp_path)
    sweep = report.expand(tmp_path / "seeds.yaml", (f"out_dir={tmp_path}",))
    runs = report.collect(sweep, [])
    runs = [run for run in runs if run.cfg.model.name == "lstm"]
    for run in runs[1:]:
        run.result["eval"] = [row for row in run.result["eval"] if row["length"] >= 16]
    drawing = figures.curves(runs, "uneven")
    assert "LSTM (n = 1–3)" in labels_of(drawing.figure)
    assert drawing.summary[0]["n"] == "1–3"
    ax = drawing.figure.axes[0]
    dots = [line for line in ax.get_lines() if line.get_marker() == "."]
    lengths = {row["length"] for row in runs[1].result["eval"]}
    assert {line.get_xdata()[0] for line in dots} == lengths
    assert {len(line.get_xdata()) for line in dots} == {3}
    assert len(ax.collections) == 2  # a band where there are several, bars where there is one
    assert max(segment[0][0] for segment in ax.collections[0].get_segments()) < 16


def test_a_point_is_paired_by_seed_and_says_of_how_many(tmp_path):
    """Of copying only seed 2 is finished, of the word problem all three."""
    (tmp_path / "pairs.yaml").write_text(PAIRS)
    found = report.expand(tmp_path / "pairs.yaml", (f"out_dir={tmp_path}",))
    for cfg in found.configs:
        if cfg.task.name != "copy" or cfg.seed == 2:
            fabricate(cfg, 20 + 6 * cfg.seed)
    runs = report.collect(found, [])
    drawing = report.REPORTS["fig2"].draw(runs, "uneven")
    (label,) = labels_of(drawing.figure)
    assert label.endswith("(n = 1–3)") and drawing.summary[0]["n"] == "1–3"
    (dots,) = [line for line in drawing.figure.axes[0].get_lines() if line.get_marker() == "."]
    word = next(r for r in runs if r.seed == 2 and r.cfg.task.name == "word_problem")
    copy = next(r for r in runs if r.cfg.task.name == "copy")
    at = {
        run.panel: over_lengths(run.result["eval"], metric)[32]
        for run, metric in ((word, "token_accuracy"), (copy, "character_accuracy"))
    }
    assert list(dots.get_xydata()[0]) == [at[copy.panel], at[word.panel]]
    assert len(dots.get_xydata()) == 1


def test_how_an_old_result_was_read_is_unknown_where_it_was_not_recorded():
    """What was not read token by token was read at once, or, of CatbAbI, in segments."""
    solver, words = {"metrics": {"token_accuracy": 0.5}}, {"schedule": "parallel", "length": 16}
    assert way_of({**solver, **words}) == ("unknown", "unknown")
    assert way_of({**solver, **words, "schedule": "sequential"}) == (TOKEN_BY_TOKEN, "unknown")
    assert way_of({**solver, "read": AT_ONCE, "solver": "none"}) == (AT_ONCE, "none")


def test_the_footer_of_the_heat_map_names_only_the_lengths_drawn(tmp_path):
    fabricate_all("ablation", tmp_path)  # where training has all test samples below length 4
    sweep = report.expand(report.config_path("ablation", "small"), (f"out_dir={tmp_path}",))
    runs = report.collect(sweep, report.limits_in_training(sweep))
    assert 2 in {row["length"] for run in runs for row in run.result["eval"]}
    figure = figures.heatmap(runs, "ablation").figure
    assert "Test samples that training has too" not in figure._supxlabel.get_text()


def test_the_labels_of_the_scatter_stay_beside_its_axes(tmp_path):
    fabricate_all("fig2", tmp_path)
    sweep = report.expand(report.config_path("fig2", "small"), (f"out_dir={tmp_path}",))
    figure = report.REPORTS["fig2"].draw(report.collect(sweep, []), "State tracking (small)").figure
    figure.canvas.draw()
    ax = figure.axes[0]
    label = ax.yaxis.label.get_window_extent()
    assert label.y1 < figure._suptitle.get_window_extent().y0
    assert label.height <= ax.get_window_extent().height
