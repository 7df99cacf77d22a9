"""Report of runs: its numbers equal those in the files, which may be damaged or incomplete."""

import html
import json
import math
import re
import shutil
import statistics

import pytest

from lm.cli.main import main
from lm.common.errors import BAD_CONFIG
from lm.common.files import OutputError
from lm.report import figures
from lm.report.read import read_all
from lm.report.report import report
from lm.report.summary import make_config_tables, make_result_table, summarize
from lm.runs.owned_files import FIGURES

STEPS, LOG_EVERY = 40, 4


def make_record(step: int, layers: list[int] | None, **more) -> dict:
    """Return a training record; `layers` are the indices of fixed-point layers, None for none."""
    record = {
        "step": step,
        "loss": 7 - math.log(step) / 2 + math.sin(step) / 7,
        "lr": 1e-3 * min(1, step / 8),
        "grad_norm": 0.3 + 1 / step,
        "tokens": 4096 * step + step * step,  # a batch that grows
        "tokens_per_s": 1000.5 + step,
        "spent": {"seconds": step / 3, "processor_seconds": step / 4},
        "peak_memory_bytes": 500_000_000 + 1000 * step,
    }
    if layers is not None:
        record |= {"evaluations": [1.5 + n / 7 + step / 90 for n in layers]}
        record |= {"failed": [0.0 if n else step / 1e4 for n in layers]}
        record |= {"residual": [1e-3 / (n + step) for n in layers]}
        record |= {"adjoint": [1 + (n + 1) / step for n in layers], "layers": layers}
    return record | more


def make_records(layers: list[int] | None, **more) -> list[dict]:
    """Return the records of a training, with some validations and checkpoints."""
    records = []
    for step in range(LOG_EVERY, STEPS + 1, LOG_EVERY):
        records.append(make_record(step, layers, **more))
        if step % 10 == 0:
            loss = 7.1 - math.log(step) / 2
            scores = {"loss": loss, "perplexity": math.exp(loss), "tokens": 900}
            records.append({"step": step, "validation": scores | {"bits_per_byte": loss / 2.5}})
            if layers:
                mean = [3 + n + step / 7 for n in layers]
                num_iters = {"mean": mean, "median": mean, "max": [v + 2 for v in mean]}
                records[-1]["probe"] = {"num_iters": num_iters, "layers": layers}
            saved = {"step": step, "blocked_s": 0.25, "seconds": 1.5, "bytes": 123_456 + step}
            records.append({"step": step, "checkpoint": saved})
    records[-2]["baselines"] = {"unigram": 400.0, "bigram": 200.0}
    return records


def write_run(folder, records: list[dict], is_finished=True, **config):
    """Write a run directory without weights; `config` are sections of the YAML."""
    folder.mkdir(parents=True)
    sections = {"train": {"steps": STEPS}, **config}
    (folder / "config.yaml").write_text(json.dumps(sections))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    environment = {"python": "3.11.7", "device": "CPU, 1 threads", "commit": "0123abc"}
    (folder / "environment.json").write_text(json.dumps(environment))
    if is_finished:
        scores = next(r["validation"] for r in reversed(records) if "validation" in r)
        result = {"updates": STEPS, "tokens": 165_440, "training_seconds": 13.5}
        result |= {"tokens_per_s": 12_254.8, "parameters": 227_556, "validation": scores}
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def write_report(runs, out=None) -> str:
    """Run the command, and return the text of its page without markup."""
    runs = runs if isinstance(runs, list) else [runs]
    assert main(["report", *map(str, runs), *(["--out", str(out)] if out else [])]) == 0
    page = ((out or runs[0]) / "report.html").read_text(encoding="utf-8")
    text = re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.S)
    return " ".join(html.unescape(text).split())


def read_panels(*folders) -> dict[str, dict[str, dict]]:
    """Return the panels of every figure by the figure's title."""
    runs = read_all(folders)
    all_figures = [f for section in figures.SPECS for f in figures.make_figures(runs, section)[0]]
    return {figure.spec.title: figure.panels for figure in all_figures}


def read_results(folder) -> dict[str, str]:
    runs = read_all([folder])
    return dict(make_result_table(runs, [summarize(runs[0])]).rows)


def read_records(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def fp_run(tmp_path_factory):
    """Directory of a run with two fixed-point layers."""
    return write_run(tmp_path_factory.mktemp("fp") / "fp", make_records([0, 1]))


# One run.

# Title of a figure → key in the records, and divisor.
RUN_FIGURES = {
    "Training loss": ("loss", 1),
    "Learning rate": ("lr", 1),
    "Gradient norm": ("grad_norm", 1),
    "Throughput": ("tokens_per_s", 1),
    "Memory": ("peak_memory_bytes", 2**30),
}
# Title of a figure → key of a list with a number for each layer.
LAYER_FIGURES = {
    "Evaluations per token": "evaluations",
    "Tokens whose solve failed": "failed",
    "Residual": "residual",
    "Adjoint": "adjoint",
}


def check_numbers(folder) -> None:
    """Compare the numbers of all figures with metrics.jsonl; constant numbers have no figure."""
    records, panels = read_records(folder), read_panels(folder)
    training = [r for r in records if "loss" in r]
    validations = [r["validation"] for r in records if "validation" in r]
    means = [r["probe"]["num_iters"]["mean"] for r in records if "probe" in r]
    expected = {
        title: [[r[key] / divisor for r in training]]
        for title, (key, divisor) in RUN_FIGURES.items()
    }
    for title, key in {"Validation loss": "loss", "Bits per byte": "bits_per_byte"}.items():
        expected[title] = [[scores[key] for scores in validations]]
    for title, key in LAYER_FIGURES.items():
        expected[title] = list(zip(*(r[key] for r in training)))
    expected["ℓ* of each layer"] = list(zip(*means))
    for title, curves in expected.items():
        if title in panels:
            (panel,) = panels[title].values()
            for values, curve in zip(panel.values(), curves, strict=True):
                assert values.tolist() == pytest.approx(list(curve))
        else:
            assert len({value for curve in curves for value in curve}) == 1


def check_result(folder) -> None:
    """Compare the table of results with result.json."""
    result, shown = json.loads((folder / "result.json").read_text()), read_results(folder)
    assert shown["run"] == folder.name and shown["state"] == "done"
    for name in ("updates", "tokens", "parameters"):
        assert shown[name] == f"{result[name]:,}"
    numbers = {"validation loss": "loss", "bits per byte": "bits_per_byte"}
    for name, key in numbers.items():
        assert float(shown[name]) == pytest.approx(result["validation"][key], rel=1e-5)


def test_numbers_of_the_figures_equal_the_records(fp_run):
    check_numbers(fp_run)
    check_result(fp_run)
    means, shown = read_records(fp_run)[-2]["probe"]["num_iters"]["mean"], read_results(fp_run)
    assert float(shown["ℓ*"]) == pytest.approx(statistics.mean(means), rel=1e-5)
    assert shown["against the better baseline"].startswith("below: ×")
    loss_figures, _ = figures.make_figures(read_all([fp_run]), "Loss")
    loss = next(figure for figure in loss_figures if figure.spec.name == "validation_loss")
    assert loss.baselines == {"unigram": math.log(400), "bigram": math.log(200)}
    assert loss.source == "metrics.jsonl: `validation.loss`"


def test_report_of_a_real_run_has_all_files(tiny_run, tmp_path, capsys):
    run = shutil.copytree(tiny_run, tmp_path / "tiny", ignore=shutil.ignore_patterns("hf"))
    text = write_report(run)
    check_numbers(run)
    check_result(run)
    environment = json.loads((run / "environment.json").read_text())
    assert f'"torch": "{environment["torch"]}"' in text and "data/corpus.json of tiny" in text
    written = {path.name for path in (run / "figures").iterdir()}
    names = {"loss.png", "loss.pdf", "lr.png", "grad_norm.pdf", "memory.png"}
    assert names <= written <= {f"{name}.{kind}" for name in FIGURES for kind in ("png", "pdf")}
    assert (run / "figures/loss.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "figures/loss.pdf").read_bytes().startswith(b"%PDF")
    summary = json.loads((run / "summary.json").read_text())
    result = json.loads((run / "result.json").read_text())
    assert summary["validation"] == result["validation"]
    assert list(summary["layers"]) == ["layer 0", "layer 1"]
    settings = summary["config"]  # only those that differ from the defaults
    assert settings["model.d_model"] == 16 and "optim.weight_decay" not in settings
    assert f"page: {run}/report.html" in capsys.readouterr().out


def test_drawn_curves_equal_the_records(fp_run, tmp_path):
    """The x axis is the update, or for the losses of several runs the training tokens."""

    def draw_points(*runs):
        all_figures = [
            f for s in ("Loss", "Optimization") for f in figures.make_figures(runs, s)[0]
        ]
        return {
            f.spec.name: [line.get_xydata().tolist() for line in figures.draw(f).axes[0].lines]
            for f in all_figures
        }

    records = read_records(fp_run)
    training = [r for r in records if "loss" in r]
    points = draw_points(*read_all([fp_run]))
    assert points["loss"] == [[[float(r["step"]), r["loss"]] for r in training]]
    assert points["grad_norm"] == [[[float(r["step"]), r["grad_norm"]] for r in training]]
    other = shutil.copytree(fp_run, tmp_path / "other")
    points = draw_points(*read_all([fp_run, other]))
    assert points["loss"][0] == [[float(r["tokens"]), r["loss"]] for r in training]
    tokens = {r["step"]: r["tokens"] for r in training}
    tokens |= {10: (tokens[8] + tokens[12]) / 2, 30: (tokens[28] + tokens[32]) / 2}  # interpolated
    validations = [r for r in records if "validation" in r]
    expected = [[tokens[r["step"]], r["validation"]["bits_per_byte"]] for r in validations]
    assert points["bits_per_byte"] == [expected, expected]


def test_noisy_curve_has_a_running_mean(tmp_path):
    records = [make_record(step, None) for step in range(1, 61)]
    folder = write_run(tmp_path / "long", records, is_finished=False)
    figure = figures.make_figures(read_all([folder]), "Loss")[0][0]
    faint, mean = figures.draw(figure).axes[0].lines
    values = [r["loss"] for r in read_records(folder)]
    assert faint.get_ydata().tolist() == values and mean.get_label() == "long, mean of 3"
    assert mean.get_ydata()[-1] == pytest.approx(sum(values[-3:]) / 3)


def test_constant_values_become_a_sentence(tmp_path, undrawn):
    """A share of failures that is always 0 needs no figure."""
    records = make_records([0, 1])
    for r in records:
        if "failed" in r:
            r["failed"] = [0.0, 0.0]
            r["lr"] = 0.002
    folder = write_run(tmp_path / "run", records)
    text = write_report(folder)
    assert "Tokens whose solve failed (share of the tokens): 0, constant." in text
    assert "Learning rate (learning rate): 0.002, constant." in text
    assert not {"Tokens whose solve failed", "Learning rate"} & read_panels(folder).keys()


# Runs of other kinds.


def test_report_of_a_baseline_states_that_it_has_no_solver(tmp_path, undrawn):
    folder = write_run(tmp_path / "plain", make_records(None), model={"name": "mamba"})
    assert "plain has no fixed-point layer, and therefore no ℓ*." in write_report(folder)
    assert not {"ℓ* of each layer", "Residual"} & read_panels(folder).keys()


@pytest.mark.parametrize("layers", [[3, 7], list(range(24))])
def test_layers_are_numbered_as_in_the_model(tmp_path, layers):
    """If there are many layers, the legend names only some of them."""
    folder = write_run(tmp_path / "hybrid", make_records(layers))
    runs = read_all([folder])
    for figure in figures.make_figures(runs, "Fixed point")[0]:
        assert list(figure.panels[""]) == [f"layer {layer}" for layer in layers]
        legend = figures.draw(figure).axes[0].get_legend().get_texts()
        assert len(legend) == min(len(layers), figures.MAX_LEGEND_ENTRIES)
    rows = summarize(runs[0])["layers"]
    assert list(rows) == [f"layer {layer}" for layer in layers]
    last_mean = 3 + layers[1] + STEPS / 7  # as in make_records, where the maximum is 2 larger
    assert rows[f"layer {layers[1]}"]["ℓ* max"] == pytest.approx(last_mean + 2)


def test_iterations_of_another_solution_are_marked(tmp_path, undrawn):
    records = make_records([0, 1])
    records[-2]["probe"]["num_iters"]["elsewhere"] = [0.0, 0.2]
    text = write_report(write_run(tmp_path / "run", records))
    assert "run: † marks an ℓ*" in text and "† share" in text


def test_mixture_has_figures_per_source(tmp_path):
    records = make_records(None, data_share={"a": 0.7, "b": 0.3})
    for r in records:
        if "validation" in r:
            loss = r["validation"]["loss"]
            scores = {"a": {"loss": loss - 0.5, "perplexity": 2.5}, "b": {"loss": loss + 1}}
            r["validation"]["sources"] = scores
    folder = write_run(tmp_path / "mixed", records)
    panels = read_panels(folder)
    sources = panels["Validation loss of each source"][""]
    assert (sources["b"] - sources["a"]).tolist() == pytest.approx([1.5, 1.5])
    assert set(panels["Share of each source"][""]["b"]) == {0.3}
    assert read_results(folder)["perplexity of a"] == "2.5"


def test_parts_of_an_update_are_stacked(tmp_path):
    parts = {"data": 0.1, "forward": 0.5, "solve": 0.25, "backward": 0.15, "communication": 0.0}
    folder = write_run(tmp_path / "timed", make_records([0], breakdown=parts))
    panel = read_panels(folder)["Time of an update"][""]
    assert {name: values.iloc[-1] for name, values in panel.items()} == {
        name: seconds for name, seconds in parts.items() if seconds
    }
    all_figures, _ = figures.make_figures(read_all([folder]), "Speed and memory")
    (stacked,) = (figure for figure in all_figures if figure.spec.is_stacked)
    assert len(figures.draw(stacked).axes[0].collections) == 4


def test_tables_of_scores_and_events(tmp_path, undrawn):
    stages = [{"stage": 1, "answers": 0.9, "ended": ended} for ended in (False, True)]
    records = [
        *make_records([0]),
        {"step": 40, "rollback": {"number": 1, "why": "the loss is <nan>"}},
        *({"step": 40, "curriculum": stage} for stage in stages),
    ]
    folder = write_run(tmp_path / "run", records)
    scores = {"acc": {"value": 0.24, "stderr": 0.061, "higher_is_better": True}}
    plain = {"acc": {"value": 0.5, "higher_is_better": ["true"]}}
    tasks = {"catbabi_mini": {"metrics": scores}, "plain": {"metrics": plain}}
    (folder / "eval").mkdir()
    (folder / "eval/results.json").write_text(json.dumps({"limit": 50, "tasks": tasks}))
    text = write_report(folder)
    assert "catbabi_mini acc ↑ 0.2400 ± 0.0610 (50 documents)" in text
    assert "plain acc 0.5 (50 documents)" in text
    assert "run 40 rollback the loss is <nan>" in text
    assert "run 40 curriculum stage 1 ended with probability 0.9 of right answers" in text
    assert text.count("ended with probability") == 1
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["evaluation"]["plain"] == plain and summary["evaluation_limit"] == 50


# States, and damaged files.


def test_report_of_a_running_run(tmp_path, undrawn):
    folder = write_run(tmp_path / "live", make_records([0, 1])[:-5], is_finished=False)
    with (folder / "metrics.jsonl").open("a") as f:
        f.write('{"step": 999, "lo')  # being written
    (folder / "lease.json").write_text(json.dumps({"host": "n7", "pid": 12, "job": "4711"}))
    text = write_report(folder)
    assert "live is running: process 12 on n7, Slurm job 4711; update 28 of 40, last record" in text
    assert "1 line is skipped" in text
    assert json.loads((folder / "summary.json").read_text())["updates"] == 28
    (folder / "lease.json").unlink()
    failure = {"sentence": "the loss is nan", "exit_code": 76}
    (folder / "failure.json").write_text(json.dumps(failure))
    assert "live has diverged: the loss is nan; update 28 of 40" in write_report(folder)


def test_report_before_the_first_record(tmp_path, undrawn):
    folder = write_run(tmp_path / "new", [], is_finished=False)
    assert "no update recorded yet" in write_report(folder)


def test_damaged_records_are_skipped_and_counted(tmp_path, undrawn):
    records = make_records([0, 1])
    training = [r for r in records if "loss" in r]
    training[2]["grad_norm"] = "high"
    training[3]["grad_norm"] = math.nan
    training[4]["evaluations"] = [1.0]  # wrong number of layers
    training[5]["residual"] = {"no": "list"}
    training[6]["breakdown"] = {"data": "long"}
    training[7]["lr"] = 10**400
    records[2]["probe"] = 7
    folder = write_run(tmp_path / "run", records)
    with (folder / "metrics.jsonl").open("ab") as f:
        f.write(b'\xff\xfe\n[1]\n{"step": -1}\n')
    text = write_report(folder)
    assert "3 lines are skipped" in text and " nan " not in text
    for key in ("grad_norm", "evaluations", "residual"):
        assert f"metrics.jsonl: {key} ; values left out because they are not finite: 2" in text


def test_names_are_escaped(tmp_path):
    """HTML and matplotlib show labels as they are, and the page needs no other file."""
    folders = [tmp_path / "_a$x_1$" / "r", tmp_path / "<script>alert(1)</script>|`b`" / "r"]
    for folder in folders:
        write_run(folder, make_records(None)[:7])  # a few figures
    text = write_report(folders, tmp_path / "out")
    assert "_a$x_1$/r is done" in text and "<script>alert(1)</script>|`b`/r done" in text
    page = (tmp_path / "out/report.html").read_text()
    assert "<script>alert" not in page and page.count("<script>") == 1
    targets = re.findall(r"(?:src|href)=['\"]?([^'\" >]*)", page)
    assert targets and all(target.startswith(("#", "data:")) for target in targets)
    assert not re.search(r"<(link|iframe|object|base)|@import|url\(", page)


@pytest.mark.parametrize("step, is_old", [(20, True), (40, False), (None, False)])
def test_remark_names_scores_of_older_weights(tmp_path, undrawn, step, is_old):
    folder = write_run(tmp_path / "run", make_records([0]))
    for name in ("checkpoints/step-000020", "checkpoints/step-000040", "eval"):
        (folder / name).mkdir(parents=True)
    tasks = {"a": {"metrics": {"acc": {"value": 0.5}}}}
    (folder / "eval/results.json").write_text(json.dumps({"step": step, "tasks": tasks}))
    remark = "measured after update 20, and the newest checkpoint is of update 40"
    assert (remark in write_report(folder)) == is_old


def test_remark_names_a_damaged_result(tmp_path, capsys, undrawn):
    folder = write_run(tmp_path / "run", make_records([0]))
    (folder / "result.json").write_text("{")
    text = write_report(folder)
    assert "run is failed" in text and "result.json is damaged: it is not JSON" in text
    assert "note: " in capsys.readouterr().out
    validation = {"loss": 2.0, "perplexity": None, "sources": {"a": None}}
    result = {"updates": STEPS, "tokens": 1, "training_seconds": 1.0, "tokens_per_s": 1.0}
    (folder / "result.json").write_text(json.dumps(result | {"validation": validation}))
    assert "validation loss 2" in write_report(folder)


# Several runs.


def test_report_of_two_runs(tmp_path, fp_run, undrawn):
    plain = {"model": {"name": "mamba"}, "optim": {"lr": 0.002}}
    other = write_run(tmp_path / "plain", make_records(None), **plain)
    text = write_report([fp_run, other], tmp_path / "out")
    runs = read_all([fp_run, other])
    label, other_label = (run.label for run in runs)
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary.keys() == {label, other_label}
    assert label.endswith("/fp") and f"{other_label} has no fixed-point layer" in text
    (panel,) = read_panels(fp_run, other)["Gradient norm"].values()
    assert list(panel) == [label, other_label]
    head, first, second = make_result_table(runs, [summarize(run) for run in runs]).rows
    assert first[head.index("ℓ*")] != "–" and second[head.index("ℓ*")] == "–"
    (table,) = make_config_tables(runs)
    rows = {row[0]: row[1:] for row in table.rows[1:]}
    assert rows["optim.lr"] == ["0.004", "0.002"] and "model.name" in rows
    assert not {"train.steps", "name"} & rows.keys()


# Refusals.


@pytest.mark.parametrize("name", ["report.html", "summary.json", "figures/loss.png"])
def test_report_does_not_replace_other_files(tiny_run, tmp_path, name, undrawn):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    with pytest.raises(OutputError, match="is there already"):
        report([tiny_run], tmp_path)
    assert file.read_text() == "mine"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]
    file.unlink()
    for _ in range(2):  # it replaces its own files
        report([tiny_run], tmp_path)


def test_invalid_arguments_are_refused(tmp_path, fp_run, capsys):
    suite = tmp_path / "suite"
    suite.mkdir()
    (suite / "config.yaml").write_text("task: s3\n")
    folder = tmp_path / "no"
    page = tmp_path / "out"
    for args, text in (
        ([fp_run, fp_run], "name it with --out"),
        ([fp_run, fp_run, "--out", page], "is given twice"),
        ([fp_run, folder, "--out", page], "no such folder"),
        ([suite, "--out", page], "fprnn synthetic report"),
        ([fp_run, "--out", tmp_path / "page.html"], "is not a folder: a report needs a folder"),
    ):
        assert main(["report", *map(str, args)]) == (BAD_CONFIG if text == "no such folder" else 1)
        assert text in capsys.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} == {"suite"}
