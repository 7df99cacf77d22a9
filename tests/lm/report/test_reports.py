"""The report of runs: every number is from their files, whatever state these are in."""

import html
import json
import math
import re
import shutil

import pytest

from lm.cli.main import main
from lm.common.errors import BAD_CONFIG
from lm.common.files import OutputError
from lm.report import figures
from lm.report.read import read_all
from lm.report.report import report
from lm.report.summary import config_tables, result_table, summarize
from lm.runs.written import FIGURES

STEPS, EVERY = 40, 4


def record(step: int, layers: list[int] | None, **more) -> dict:
    """A training record; layers: the numbers of those that are solved, None of a baseline."""
    made = {
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
        made |= {"evaluations": [1.5 + n / 7 + step / 90 for n in layers]}
        made |= {"failed": [0.0 if n else step / 1e4 for n in layers]}
        made |= {"residual": [1e-3 / (n + step) for n in layers]}
        made |= {"adjoint": [1 + (n + 1) / step for n in layers], "layers": layers}
    return made | more


def records(layers: list[int] | None, **more) -> list[dict]:
    """A training with a validation and a checkpoint now and then."""
    made = []
    for step in range(EVERY, STEPS + 1, EVERY):
        made.append(record(step, layers, **more))
        if step % 10 == 0:
            loss = 7.1 - math.log(step) / 2
            scores = {"loss": loss, "perplexity": math.exp(loss), "tokens": 900}
            made.append({"step": step, "validation": scores | {"bits_per_byte": loss / 2.5}})
            if layers:
                mean = [3 + n + step / 7 for n in layers]
                num_iters = {"mean": mean, "median": mean, "max": [v + 2 for v in mean]}
                made[-1]["probe"] = {"num_iters": num_iters, "layers": layers}
            saved = {"step": step, "blocked_s": 0.25, "seconds": 1.5, "bytes": 123_456 + step}
            made.append({"step": step, "checkpoint": saved})
    made[-2]["baselines"] = {"unigram": 400.0, "bigram": 200.0}
    return made


def run_in(folder, lines: list[dict], finished=True, **config):
    """A run directory without its weights. config: sections of the YAML."""
    folder.mkdir(parents=True)
    sections = {"train": {"steps": STEPS}, **config}
    (folder / "config.yaml").write_text(json.dumps(sections))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    environment = {"python": "3.11.7", "device": "CPU, 1 threads", "commit": "0123abc"}
    (folder / "environment.json").write_text(json.dumps(environment))
    if finished:
        last = next(r for r in reversed(lines) if "validation" in r)
        scores = last["validation"]
        result = {"updates": STEPS, "tokens": 165_440, "training_seconds": 13.5}
        result |= {"tokens_per_s": 12_254.8, "parameters": 227_556, "validation": scores}
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def reported(runs, out=None) -> str:
    """The text of a page that the command writes."""
    runs = runs if isinstance(runs, list) else [runs]
    assert main(["report", *map(str, runs), *(["--out", str(out)] if out else [])]) == 0
    page = ((out or runs[0]) / "report.html").read_text(encoding="utf-8")
    shown = re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.S)
    return " ".join(html.unescape(shown).split())


def find_figures(*folders) -> dict[str, dict[str, dict]]:
    """Curves of every figure, by panel, by the figure's title."""
    runs = read_all(folders)
    found = (
        figure for section in figures.SPECS for figure in figures.make_figures(runs, section)[0]
    )
    return {figure.spec.title: figure.panels for figure in found}


def shown_of(folder) -> dict[str, str]:
    """Return the table of results of a run."""
    runs = read_all([folder])
    return dict(result_table(runs, [summarize(runs[0])]).rows)


def read_records(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def solved(tmp_path_factory):
    """The directory of a run with two solved layers."""
    return run_in(tmp_path_factory.mktemp("solved") / "solved", records([0, 1]))


# One run.

PLAIN = {
    "Training loss": ("loss", 1),
    "Learning rate": ("lr", 1),
    "Gradient norm": ("grad_norm", 1),
    "Throughput": ("tokens_per_s", 1),
    "Memory": ("peak_memory_bytes", 2**30),
}
OF_LAYERS = {
    "Evaluations per token": "evaluations",
    "Tokens whose solve failed": "failed",
    "Residual": "residual",
    "Adjoint": "adjoint",
}


def check_numbers(folder) -> None:
    """Compare the numbers of all figures with metrics.jsonl; constant ones have no figure."""
    found, drawn = read_records(folder), find_figures(folder)
    training = [r for r in found if "loss" in r]
    scores = [r["validation"] for r in found if "validation" in r]
    means = [r["probe"]["num_iters"]["mean"] for r in found if "probe" in r]
    expected = {title: [[r[key] / size for r in training]] for title, (key, size) in PLAIN.items()}
    for title, key in {"Validation loss": "loss", "Bits per byte": "bits_per_byte"}.items():
        expected[title] = [[of[key] for of in scores]]
    for title, key in OF_LAYERS.items():
        expected[title] = list(zip(*(r[key] for r in training)))
    expected["ℓ* of each layer"] = list(zip(*means))
    for title, curves in expected.items():
        if title in drawn:
            (panel,) = drawn[title].values()
            for values, curve in zip(panel.values(), curves, strict=True):
                assert values.tolist() == pytest.approx(list(curve))
        else:
            assert len({value for curve in curves for value in curve}) == 1


def check_result(folder) -> None:
    result, shown = json.loads((folder / "result.json").read_text()), shown_of(folder)
    assert shown["run"] == folder.name and shown["state"] == "done"
    for name in ("updates", "tokens", "parameters"):
        assert shown[name] == f"{result[name]:,}"
    numbers = {"validation loss": "loss", "bits per byte": "bits_per_byte"}
    for name, key in numbers.items():
        assert float(shown[name]) == pytest.approx(result["validation"][key], rel=1e-5)


def test_numbers_of_the_figures_equal_the_records(solved):
    check_numbers(solved)
    check_result(solved)
    means, shown = read_records(solved)[-2]["probe"]["num_iters"]["mean"], shown_of(solved)
    assert float(shown["ℓ*"]) == pytest.approx(sum(means) / 2, rel=1e-5)
    assert shown["against the better baseline"].startswith("below: ×")
    found, _ = figures.make_figures(read_all([solved]), "Loss")
    loss = next(figure for figure in found if figure.spec.name == "validation_loss")
    assert loss.baselines == {"unigram": math.log(400), "bigram": math.log(200)}
    assert loss.source == "metrics.jsonl: `validation.loss`"


def test_report_of_a_real_run_has_all_files(tiny_run, tmp_path, capsys):
    copied = shutil.copytree(tiny_run, tmp_path / "tiny", ignore=shutil.ignore_patterns("hf"))
    text = reported(copied)
    check_numbers(copied)
    check_result(copied)
    environment = json.loads((copied / "environment.json").read_text())
    assert f'"torch": "{environment["torch"]}"' in text and "data/corpus.json of tiny" in text
    written = {path.name for path in (copied / "figures").iterdir()}
    names = {"loss.png", "loss.pdf", "lr.png", "grad_norm.pdf", "memory.png"}
    assert names <= written <= {f"{name}.{kind}" for name in FIGURES for kind in ("png", "pdf")}
    assert (copied / "figures/loss.png").read_bytes().startswith(b"\x89PNG")
    assert (copied / "figures/loss.pdf").read_bytes().startswith(b"%PDF")
    summary = json.loads((copied / "summary.json").read_text())
    result = json.loads((copied / "result.json").read_text())
    assert summary["validation"] == result["validation"]
    assert list(summary["layers"]) == ["layer 0", "layer 1"]
    assert f"page: {copied}/report.html" in capsys.readouterr().out


def test_drawn_curves_equal_the_records(solved, tmp_path):
    """Over updates; of several runs the loss over the tokens of the same records."""

    def points(*folders):
        found = [f for s in ("Loss", "Optimization") for f in figures.make_figures(folders, s)[0]]
        return {
            f.spec.name: [line.get_xydata().tolist() for line in figures.draw(f).axes[0].lines]
            for f in found
        }

    found = read_records(solved)
    training = [r for r in found if "loss" in r]
    seen = points(*read_all([solved]))
    assert seen["loss"] == [[[float(r["step"]), r["loss"]] for r in training]]
    assert seen["grad_norm"] == [[[float(r["step"]), r["grad_norm"]] for r in training]]
    other = shutil.copytree(solved, tmp_path / "other")
    seen = points(*read_all([solved, other]))
    assert seen["loss"][0] == [[float(r["tokens"]), r["loss"]] for r in training]
    tokens = {r["step"]: r["tokens"] for r in training}
    tokens |= {10: (tokens[8] + tokens[12]) / 2, 30: (tokens[28] + tokens[32]) / 2}
    scores = [r for r in found if "validation" in r]
    expected = [[tokens[r["step"]], r["validation"]["bits_per_byte"]] for r in scores]
    assert seen["bits_per_byte"] == [expected, expected]


def test_noisy_curve_has_a_running_mean(tmp_path):
    folder = run_in(
        tmp_path / "long", [record(step, None) for step in range(1, 61)], finished=False
    )
    figure = figures.make_figures(read_all([folder]), "Loss")[0][0]
    faint, mean = figures.draw(figure).axes[0].lines
    values = [r["loss"] for r in read_records(folder)]
    assert faint.get_ydata().tolist() == values and mean.get_label() == "long, mean of 3"
    assert mean.get_ydata()[-1] == pytest.approx(sum(values[-3:]) / 3)


def test_constant_values_become_a_sentence(tmp_path, undrawn):
    """A share of failures that is always 0 needs no figure."""
    lines = records([0, 1])
    for r in lines:
        if "failed" in r:
            r["failed"] = [0.0, 0.0]
            r["lr"] = 0.002
    folder = run_in(tmp_path / "run", lines)
    text = reported(folder)
    assert "Tokens whose solve failed (share of the tokens): 0, constant." in text
    assert "Learning rate (learning rate): 0.002, constant." in text
    assert not {"Tokens whose solve failed", "Learning rate"} & find_figures(folder).keys()


# Runs of other kinds.


def test_report_of_a_baseline_states_that_it_has_no_solver(tmp_path, undrawn):
    folder = run_in(tmp_path / "plain", records(None), model={"name": "mamba"})
    assert "plain has no fixed-point layer, and therefore no ℓ*." in reported(folder)
    assert not {"ℓ* of each layer", "Residual"} & find_figures(folder).keys()


@pytest.mark.parametrize("layers", [[3, 7], list(range(24))])
def test_layers_are_numbered_as_in_the_model(tmp_path, layers):
    """If there are many layers, the legend names only some of them."""
    folder = run_in(tmp_path / "hybrid", records(layers))
    runs = read_all([folder])
    for figure in figures.make_figures(runs, "Fixed point")[0]:
        assert list(figure.panels[""]) == [f"layer {layer}" for layer in layers]
        legend = figures.draw(figure).axes[0].get_legend().get_texts()
        assert len(legend) == min(len(layers), figures.MAX_LEGEND_ENTRIES)
    rows = summarize(runs[0])["layers"]
    assert list(rows) == [f"layer {layer}" for layer in layers]
    assert rows[f"layer {layers[1]}"]["ℓ* max"] == pytest.approx(3 + layers[1] + 40 / 7 + 2)


def test_iterations_of_another_solution_are_marked(tmp_path, undrawn):
    lines = records([0, 1])
    lines[-2]["probe"]["num_iters"]["elsewhere"] = [0.0, 0.2]
    text = reported(run_in(tmp_path / "run", lines))
    assert "run: † the paper's procedure" in text and "† share" in text


def test_mixture_has_figures_per_source(tmp_path):
    lines = records(None, data_share={"a": 0.7, "b": 0.3})
    for r in lines:
        if "validation" in r:
            loss = r["validation"]["loss"]
            scores = {"a": {"loss": loss - 0.5, "perplexity": 2.5}, "b": {"loss": loss + 1}}
            r["validation"]["sources"] = scores
    folder = run_in(tmp_path / "mixed", lines)
    drawn = find_figures(folder)
    sources = drawn["Validation loss of each source"][""]
    assert (sources["b"] - sources["a"]).tolist() == pytest.approx([1.5, 1.5])
    assert set(drawn["Share of each source"][""]["b"]) == {0.3}
    assert shown_of(folder)["perplexity of a"] == "2.5"


def test_parts_of_an_update_are_stacked(tmp_path):
    parts = {"data": 0.1, "forward": 0.5, "solve": 0.25, "backward": 0.15, "communication": 0.0}
    folder = run_in(tmp_path / "timed", records([0], breakdown=parts))
    panel = find_figures(folder)["Time of an update"][""]
    assert {name: values.iloc[-1] for name, values in panel.items()} == {
        name: seconds for name, seconds in parts.items() if seconds
    }
    reported(folder)


def test_tables_of_scores_and_events(tmp_path, undrawn):
    looks = [{"stage": 1, "answers": 0.9, "ended": ended} for ended in (False, True)]
    lines = [
        *records([0]),
        {"step": 40, "rollback": {"number": 1, "why": "the loss is <nan>"}},
        *({"step": 40, "curriculum": look} for look in looks),
    ]
    folder = run_in(tmp_path / "run", lines)
    scores = {"acc": {"value": 0.24, "stderr": 0.061, "higher_is_better": True}}
    plain = {"acc": {"value": 0.5, "higher_is_better": ["true"]}}
    tasks = {"catbabi_mini": {"metrics": scores}, "plain": {"metrics": plain}}
    (folder / "eval").mkdir()
    (folder / "eval/results.json").write_text(json.dumps({"limit": 50, "tasks": tasks}))
    text = reported(folder)
    assert "catbabi_mini acc ↑ 0.2400 ± 0.0610 (50 documents)" in text
    assert "plain acc 0.5 (50 documents)" in text
    assert "run 40 rollback the loss is <nan>" in text
    assert "run 40 curriculum stage 1 ended with probability 0.9 of right answers" in text
    assert text.count("ended with probability") == 1


# States, and damaged files.


def test_report_of_a_running_run(tmp_path, undrawn):
    folder = run_in(tmp_path / "live", records([0, 1])[:-5], finished=False)
    with (folder / "metrics.jsonl").open("a") as f:
        f.write('{"step": 999, "lo')  # being written
    (folder / "lease.json").write_text(json.dumps({"host": "n7", "pid": 12, "job": "4711"}))
    text = reported(folder)
    assert "live is running: job 4711 on n7, process 12; update 28 of 40, last record" in text
    assert "1 line is skipped" in text
    assert json.loads((folder / "summary.json").read_text())["updates"] == 28
    (folder / "lease.json").unlink()
    failure = {"sentence": "the loss is nan", "exit_code": 76}
    (folder / "failure.json").write_text(json.dumps(failure))
    assert "live is failed: the loss is nan; update 28 of 40" in reported(folder)


def test_report_before_the_first_record(tmp_path, undrawn):
    folder = run_in(tmp_path / "new", [], finished=False)
    assert "no update recorded yet" in reported(folder)


def test_damaged_records_are_skipped_and_counted(tmp_path, undrawn):
    lines = records([0, 1])
    training = [r for r in lines if "loss" in r]
    training[2]["grad_norm"] = "high"
    training[3]["grad_norm"] = math.nan
    training[4]["evaluations"] = [1.0]  # of another number of layers
    training[5]["residual"] = {"no": "list"}
    training[6]["breakdown"] = {"data": "long"}
    training[7]["lr"] = 10**400
    lines[2]["probe"] = 7
    folder = run_in(tmp_path / "run", lines)
    with (folder / "metrics.jsonl").open("ab") as f:
        f.write(b'\xff\xfe\n[1]\n{"step": -1}\n')
    text = reported(folder)
    assert "3 lines are skipped" in text and " nan " not in text
    for key in ("grad_norm", "evaluations", "residual"):
        assert f"metrics.jsonl: {key} ; 2 values that are not finite are left out" in text


def test_names_are_escaped(tmp_path):
    """A label is no markup and no mathematics, and the page needs no other file."""
    folders = [tmp_path / "_a$x_1$" / "r", tmp_path / "<script>alert(1)</script>|`b`" / "r"]
    for folder in folders:
        run_in(folder, records([0]))
    text = reported(folders, tmp_path / "out")
    assert "_a$x_1$/r is done" in text and "<script>alert(1)</script>|`b`/r done" in text
    page = (tmp_path / "out/report.html").read_text()
    assert "<script>alert" not in page and page.count("<script>") == 1
    targets = re.findall(r"(?:src|href)=['\"]?([^'\" >]*)", page)
    assert targets and all(target.startswith(("#", "data:")) for target in targets)
    assert not re.search(r"<(link|iframe|object|base)|@import|url\(", page)


def test_remark_names_a_damaged_result(tmp_path, capsys, undrawn):
    folder = run_in(tmp_path / "run", records([0]))
    (folder / "result.json").write_text("{")
    text = reported(folder)
    assert "run is failed" in text and "result.json is damaged: it is not JSON" in text
    assert "note: " in capsys.readouterr().out
    validation = {"loss": 2.0, "perplexity": 10**400, "sources": {"a": None}}
    result = {"updates": STEPS, "tokens": 1, "training_seconds": 1.0, "tokens_per_s": 1.0}
    (folder / "result.json").write_text(json.dumps(result | {"validation": validation}))
    assert "validation loss 2" in reported(folder)


# Several runs.


def test_report_of_two_runs(tmp_path, solved, undrawn):
    plain = {"model": {"name": "mamba"}, "optim": {"lr": 0.002}}
    other = run_in(tmp_path / "plain", records(None), **plain)
    text = reported([solved, other], tmp_path / "out")
    assert json.loads((tmp_path / "out/summary.json").read_text()).keys() == {
        label := read_all([solved, other])[0].label,
        name := read_all([solved, other])[1].label,
    }
    assert label.endswith("/solved") and f"{name} has no fixed-point layer" in text
    (panel,) = find_figures(solved, other)["Gradient norm"].values()
    assert list(panel) == [label, name]
    runs = read_all([solved, other])
    head, first, second = result_table(runs, [summarize(files) for files in runs]).rows
    assert first[head.index("ℓ*")] != "–" and second[head.index("ℓ*")] == "–"
    (differing,) = config_tables(runs)
    rows = {row[0]: row[1:] for row in differing.rows[1:]}
    assert rows["optim.lr"] == ["0.004", "0.002"] and "model.name" in rows
    assert not {"train.steps", "name"} & rows.keys()


# Refusals.


@pytest.mark.parametrize("name", ["report.html", "summary.json", "figures/loss.png"])
def test_report_does_not_replace_other_files(tiny_run, tmp_path, name, undrawn):
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(OutputError, match="is there already"):
        report([tiny_run], tmp_path)
    assert mine.read_text() == "mine"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]
    mine.unlink()
    for _ in range(2):  # its own files it replaces
        report([tiny_run], tmp_path)


def test_invalid_arguments_are_refused(tmp_path, solved, capsys):
    suite = tmp_path / "suite"
    suite.mkdir()
    (suite / "config.yaml").write_text("task: s3\n")
    folder = tmp_path / "no"
    page = tmp_path / "out"
    for args, words in (
        ([solved, solved], "name it with --out"),
        ([solved, solved, "--out", page], "is given twice"),
        ([solved, folder, "--out", page], "no such folder"),
        ([suite, "--out", page], "fprnn synthetic report"),
        ([solved, "--out", tmp_path / "page.html"], "is not a folder: a report needs a folder"),
    ):
        assert main(["report", *map(str, args)]) == (BAD_CONFIG if words == "no such folder" else 1)
        assert words in capsys.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} == {"suite"}
