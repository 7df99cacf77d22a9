"""Reports: their configs, figures from fabricated runs, and commands of missing runs."""

import json
import shlex

import pytest
import torch

from lm.cli.arguments import parse
from lm.common.errors import ConfigError
from lm.common.files import OutputError
from lm.training.build import build_section
from synthetic import cli, report, tasks
from synthetic.config import load as load_config
from synthetic.evaluate import parse_lengths
from synthetic.labels import label_model, label_task
from synthetic.plots import ReportError
from tests.fabricated import DATA, fabricate, fabricate_all, read_csv, sweep
from tests.running import ROOT

PNG = b"\x89PNG\r\n\x1a\n"
NAMES = list(report.REPORTS)
SCALES = ("small", "paper")
BOTH_SCALES = pytest.mark.parametrize("scale", SCALES)


@pytest.fixture
def unsaved(monkeypatch):
    """Write empty files instead of figures, which would take most of the time."""
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: path.write_bytes(b""))


@BOTH_SCALES
@pytest.mark.parametrize("name", NAMES)
def test_all_points_of_all_configs_are_valid(name, scale):
    expanded = sweep(name, scale)
    directories = [cfg.run_dir for cfg in expanded.configs]
    assert len(set(directories)) == len(directories) == len(expanded.points) > 1
    for cfg in expanded.configs:
        assert cfg.name.startswith(f"{scale}/")
        if cfg.task.name == "catbabi":
            continue  # its data is not in the repository
        task = tasks.build_task(cfg.task)
        lengths = parse_lengths(cfg.eval.lengths, task)
        task.check_length(cfg.train.lengths[1])
        if cfg.eval.during:
            assert set(parse_lengths(cfg.eval.during, task)) <= set(lengths)
        if name not in ("tab2", "fig11"):  # which evaluate multiples of a step
            assert cfg.train.lengths[1] in lengths
        if name in ("tab1", "fig2"):  # they show accuracies at twice the training length
            assert 2 * cfg.train.lengths[1] in lengths


@BOTH_SCALES
def test_all_models_can_be_built(scale):
    """Models have an eighth of their width, which keeps incompatible sizes incompatible."""
    models = {}
    for name in NAMES:
        for cfg in sweep(name, scale).configs:
            cfg.model.d_model = max(64, cfg.model.d_model // 8)
            key = cfg.model.model_dump_json()
            if key not in models:
                with torch.device("meta"):
                    models[key] = build_section(cfg.model, cfg.solver, vocab_size=12, seq_len=16)
    assert all(isinstance(model, torch.nn.Module) for model in models.values())


@BOTH_SCALES
def test_reports_with_shared_runs_agree_on_configs(scale):
    runs = {}
    for name in NAMES:
        for cfg in sweep(name, scale).configs:
            runs.setdefault(cfg.run_dir, {})[name] = cfg.model_dump(exclude={"sweep"})
    shared = {frozenset(names) for names in runs.values() if len(names) > 1}
    assert shared == {
        frozenset(("fig1", "fig5", "fig6")),
        frozenset(("fig3b", "fig3c")),
        frozenset(("tab2", "fig11")),
    }
    for directory, configs in runs.items():
        first, *others = configs.values()
        assert all(other == first for other in others), directory


@pytest.mark.parametrize("name", NAMES)
def test_report_writes_figure_table_and_measurements(name, tmp_path):
    configs = fabricate_all(name, tmp_path)
    paths = report.report(name, overrides=(f"out_dir={tmp_path}", *DATA))
    assert paths["figure"] == tmp_path / "reports/small" / f"{name}.png"
    content = paths["figure"].read_bytes()
    assert content.startswith(PNG) and len(content) > 5000
    assert paths["PDF"].read_bytes().startswith(b"%PDF")
    lines = paths["LaTeX"].read_text().splitlines()
    assert lines[0].startswith(r"\begin{tabular}{l") and lines[-1] == r"\end{tabular}"
    assert [lines.index(rule) for rule in (r"\toprule", r"\midrule")] == [1, 3]  # around the head
    assert sum(line.endswith(r" \\") for line in lines) > 1
    rows = read_csv(paths["numbers"])
    assert {row["run"] for row in rows} == {str(cfg.run_dir) for cfg in configs}
    assert all(row["metric"] and row["value"] for row in rows)
    for key in sweep(name, "small", *DATA).points[0]:
        assert key in rows[0]


@pytest.mark.parametrize("kind", ["png", "tex", "csv"])
def test_report_does_not_replace_unrelated_files(tmp_path, kind, unsaved):
    fabricate_all("tab2", tmp_path)
    other_file = tmp_path / "reports/small" / f"tab2.{kind}"
    other_file.parent.mkdir(parents=True)
    other_file.write_text("mine")
    overrides = (f"out_dir={tmp_path}",)
    with pytest.raises(OutputError, match="this command did not write it"):
        report.report("tab2", overrides=overrides)
    assert other_file.read_text() == "mine"
    other_file.unlink()
    for _ in range(2):  # the report replaces its own files
        report.report("tab2", overrides=overrides)


def test_the_papers_values_are_printed_with_their_scale(tmp_path, capsys, unsaved):
    fabricate_all("tab2", tmp_path)
    report.report("tab2", "small", (f"out_dir={tmp_path}",))
    output = " ".join(capsys.readouterr().out.split())
    assert "Values of the paper (a larger scale than here): trained to 40" in output
    assert "Mamba 0.136, sLSTM 0.173" in output and "FP-Mamba of 4 reflections 0.384." in output
    text = report.describe_paper(report.REPORTS["catbabi"], "paper")
    assert text.startswith(
        "Values of the paper (the scale used here): 10k questions a task, 1 and 2 layers: Mamba"
    )
    assert "Fig. 4 is a figure without numbers" in report.describe_paper(report.REPORTS["fig4"], "")


def test_csv_of_curves_matches_results(tmp_path, unsaved):
    configs = fabricate_all("fig10", tmp_path)
    paths = report.report("fig10", overrides=(f"out_dir={tmp_path}",))
    values = {
        (r["run"], r["read"], int(r["length"]), r["metric"]): float(r["value"])
        for r in read_csv(paths["numbers"])
    }
    for cfg in configs:
        for row in json.loads((cfg.run_dir / "result.json").read_text())["eval"]:
            key = (str(cfg.run_dir), row["read"], row["length"])
            for metric, value in row["metrics"].items():
                assert values.pop((*key, metric)) == pytest.approx(value)
            iters = sum(row["num_iters"]["mean"]) / len(row["num_iters"]["mean"])
            assert values.pop((*key, "num_iters")) == pytest.approx(iters)
    assert not values


def test_unfinished_curricula_are_noted(tmp_path, capsys, unsaved):
    cfg, *_ = fabricate_all("demo", tmp_path)
    path = cfg.run_dir / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "trained_length": 8}))
    report.report("demo", overrides=(f"out_dir={tmp_path}",))
    output = " ".join(capsys.readouterr().out.split())
    assert "its curriculum ended at length 8: it was never trained at 16" in output


def test_longest_solved_length_over_training_time(tmp_path, unsaved):
    fabricate_all("fig5", tmp_path)
    paths = report.report("fig5", overrides=(f"out_dir={tmp_path}",))
    rows = [r for r in read_csv(paths["numbers"]) if r["label"] == "ℓmax unlimited"]
    solved = [
        (float(r["seconds"]), float(r["value"])) for r in rows if r["metric"] == "solved_length"
    ]
    assert len(solved) == 10 and solved[-1][0] == 260.0  # nine evaluations, and the end
    for (seconds, value), step in zip(solved, range(100, 1001, 100)):
        evaluation = [
            r for r in rows if r["step"] == str(step) and r["metric"] == "sequence_accuracy"
        ]
        assert {float(r["seconds"]) for r in evaluation} == {seconds}
        solved_lengths = [int(r["length"]) for r in evaluation if float(r["value"]) >= 0.9]
        assert value == max(solved_lengths, default=0)


def make_labels(name, scale="small"):
    expanded = sweep(name, scale)
    points = zip(expanded.configs, expanded.points)
    return [
        (label_task(cfg, point), label_model(cfg, point))
        for cfg, point in points
        if not point.get("seed")  # seeds have the same label
    ]


def test_labels_are_short_and_unique():
    limits = make_labels("fig6", "paper")
    assert limits[0] == ("", "ℓmax 1")
    assert limits[-2:] == [("", "ℓmax unlimited"), ("", "ℓmax ~ ⌈Γ(4, 1)⌉")]
    models = make_labels("fig4", "paper")
    assert {task for task, _ in models} == {"A5", "S5"}
    assert {
        "FP-Mamba kronecker",
        "FP-Mamba-2 householder 4",
        "Mamba, 2 layers",
        "Gated DeltaProduct 4, 2 layers",
    } <= {model for _, model in models}
    assert make_labels("fig2", "paper")[0] == ("word problem A5", "Mamba, 1 layer")
    assert make_labels("fig2", "paper")[-1] == ("copy", "FP-Mamba householder 4")
    for scale in SCALES:
        for name in NAMES:
            all_labels = make_labels(name, scale)
            assert len(set(all_labels)) == len(all_labels), name


def test_labels_name_the_parameters_that_depend_on_y():
    assert [label for _, label in make_labels("tab1")] == [
        "y in λ",
        "y in Q",
        "y in b, c",
        "y in b, c, Q",
        "y in λ, b, c, Q",
    ]


def test_commands_of_missing_runs_can_be_parsed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = ["report", "fig4", "out_dir=my runs", "train.steps=7"]
    assert cli.main(args) == 1
    out, err = capsys.readouterr()
    assert "report fig4 has no finished run in" in err
    lines = [line.strip() for line in out.splitlines()]
    loop = next(line for line in lines if line.startswith("for i in 0 1 2 3 4 5 6 7; do"))
    command = loop.removesuffix("; done").partition("; do ")[2]
    arguments = command.removeprefix("fprnn synthetic ")
    expanded = sweep("fig4", "small", "train.steps=7", "out_dir=my runs")
    for i, expected in enumerate(expanded.configs):
        parsed = parse(cli.make_parser(), shlex.split(arguments.replace("$i", str(i))))
        assert load_config(parsed.config, parsed.override, parsed.job_index) == expected
    submit = shlex.split(next(line for line in lines if "sbatch" in line))
    assert submit == [
        *("mkdir", "-p", "logs", "&&", "sbatch"),
        "--array=0,1,2,3,4,5,6,7",
        str(ROOT / "launch/synthetic_array.sbatch"),
        parsed.config,
        "out_dir=my runs",
        "train.steps=7",
    ]


def test_finished_runs_are_drawn_and_missing_ones_listed(tmp_path, capsys, unsaved):
    expanded = sweep("fig1", "small", f"out_dir={tmp_path}")
    for i in (1, 3):
        fabricate(expanded.configs[i], solved_length=20.0)
    assert cli.main(["report", "fig1", f"out_dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "3 of 5 runs are missing" in out and "for i in 0 2 4; do" in out
    assert "--array=0,2,4" in out
    limits = {r["train.max_iters"] for r in read_csv(tmp_path / "reports/small/fig1.csv")}
    assert limits == {"2", "8"}  # points 1 and 3 of the sweep
    assert (tmp_path / "reports/small/fig1.png").exists()


def test_run_with_another_config_is_noted(tmp_path, capsys, unsaved):
    steps = fabricate_all("fig3c", tmp_path)[0].train.steps
    report.report("fig3c", overrides=(f"out_dir={tmp_path}", "train.steps=9"))
    note = f"was trained with another config: train.steps was {steps}, is 9"
    assert note in capsys.readouterr().out


def test_scatter_needs_both_tasks(tmp_path, unsaved):
    expanded = sweep("fig2", "small", f"out_dir={tmp_path}")
    fabricate(expanded.configs[0], solved_length=20.0)
    with pytest.raises(ReportError, match="no model has finished both copy and word_problem"):
        report.report("fig2", overrides=(f"out_dir={tmp_path}",))
    fabricate(expanded.configs[4], solved_length=20.0)  # the same model on the other task
    assert report.report("fig2", overrides=(f"out_dir={tmp_path}",))["figure"].exists()


def test_report_without_name_lists_all(capsys):
    assert cli.main(["report"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, entry in report.REPORTS.items():
        line = next(line for line in lines if line.startswith(f"│ {name} "))
        assert entry.paper_label in line and entry.title in line


TINY = """
name: tiny
model: {d_model: 16, n_layer: 1, d_state: 4}
solver: {token: iterate, schedule: parallel}
task: {name: word_problem, group: S3}
train: {steps: 4, batch_size: 4, length: 4, threads: 1}
eval: {every: 2, lengths: "2,4,8", during: "2,4", examples: 8, batch_size: 8}
sweep:
  train.max_iters: [1, unlimited]
"""


def test_report_run_trains_missing_runs_once(tmp_path, capsys, unsaved):
    config = tmp_path / "tiny.yaml"
    config.write_text(TINY)
    args = ["--config", str(config), f"out_dir={tmp_path / 'runs'}"]
    assert cli.main(["report", "fig1", "--run", *args]) == 0
    out = capsys.readouterr().out
    assert "are missing" not in out
    # Another figure with the same runs trains nothing.
    results = sorted((tmp_path / "runs").rglob("result.json"))
    modified = [path.stat().st_mtime_ns for path in results]
    assert cli.main(["report", "fig6", "--run", *args]) == 0
    assert "training" not in capsys.readouterr().out.partition("Fig. 6")[0]
    assert [path.stat().st_mtime_ns for path in results] == modified
    assert {r["step"] for r in read_csv(tmp_path / "runs/reports/small/fig6.csv")} == {"2", "4"}


def test_finished_runs_are_drawn_after_a_failure(tmp_path, capsys, monkeypatch, unsaved):
    from lm.common.errors import TrainingError

    first = sweep("fig3c", "small", f"out_dir={tmp_path}").configs[0]
    fabricate(first, solved_length=20.0)

    def fail(*_):
        raise TrainingError("the loss is nan")

    monkeypatch.setattr(report, "run_all", fail)
    assert cli.main(["report", "fig3c", "--run", f"out_dir={tmp_path}"]) == 1
    assert "2 of 3 runs are missing" in capsys.readouterr().out
    assert (tmp_path / "reports/small/fig3c.png").exists()


def test_config_without_sweep_is_refused(tmp_path):
    path = tmp_path / "one.yaml"
    path.write_text("name: one\n")
    with pytest.raises(ConfigError, match="has no `sweep:` section"):
        report.report("fig1", config=str(path))
