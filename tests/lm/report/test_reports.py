"""The report of runs: every number is from their files, whatever state these are in."""

import html.parser
import json
import math
import os
import re
import shutil
import time

import pytest

from lm.cli.main import main
from lm.common.console import say
from lm.common.errors import BAD_CONFIG
from lm.common.files import OutputError
from lm.report import draw
from lm.report.report import report
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


class Page(html.parser.HTMLParser):
    """What a reader finds on a page: tables by the heading that they stand under, all text, and
    what every tag asks for."""

    VOID = ("meta", "br", "img", "link", "input", "hr")

    def __init__(self, path):
        super().__init__()
        self.open, self.tables, self.headings, self.attributes = [], {}, [], []
        self.words, self.cell = [], None
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.attributes += [(tag, name, value) for name, value in attributes]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag in ("h2", "h3"):
            self.headings.append("")
        if tag == "table":
            self.tables.setdefault(self.headings[-1], []).append([])
        if tag == "tr":
            self.tables[self.headings[-1]][-1].append([])
        if tag in ("td", "th"):
            self.tables[self.headings[-1]][-1][-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.attributes += [(tag, name, value) for name, value in attributes]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "script" in self.open or "style" in self.open:
            return
        self.words.append(data)
        if self.open and self.open[-1] in ("h2", "h3"):
            self.headings[-1] += data
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[self.headings[-1]][-1][-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def rows(self, heading: str) -> dict[str, dict[str, str]]:
        """{first cell of a row: {head: cell}} of the first table under a heading."""
        head, *body = self.tables[heading][0]
        return {row[0]: dict(zip(head, row, strict=True)) for row in body}


def reported(runs, out=None) -> Page:
    runs = runs if isinstance(runs, list) else [runs]
    assert main(["report", *map(str, runs), *(["--out", str(out)] if out else [])]) == 0
    return Page((out or runs[0]) / "report.html")


def number(text: str) -> float:
    return float(text.replace(",", ""))


def check_curve(row: dict[str, str], values: list[float]) -> None:
    """A row "in numbers" is that of these values."""
    assert row["points"] == str(len(values))
    expected = {"first": values[0], "min": min(values), "max": max(values), "last": values[-1]}
    assert {name: number(row[name]) for name in expected} == pytest.approx(expected, rel=1e-5)


def check_figure(page: Page, title: str, curves: list[list[float]]) -> None:
    """A figure's numbers are those of these curves; equal values are a sentence."""
    values = {value for curve in curves for value in curve}
    if len(values) > 1:
        for row, curve in zip(page.rows(title).values(), curves, strict=True):
            check_curve(row, curve)
        return
    assert title not in page.headings
    said = re.search(rf"{re.escape(title)} \([^)]*\): (\S+) throughout\.", page.text)
    assert number(said[1]) == pytest.approx(values.pop(), rel=1e-5)


def lines_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def no_pdf(monkeypatch):
    """Reports without files of their figures."""
    monkeypatch.setattr(draw, "save", lambda drawing, png, folder, name: None)


@pytest.fixture(scope="module")
def solved(tmp_path_factory):
    """The directory of a run with two solved layers."""
    return run_in(tmp_path_factory.mktemp("solved") / "solved", records([0, 1]))


# One run.

PLAIN = {
    "Learning rate": ("lr", 1),
    "Gradient norm": ("grad_norm", 1),
    "Throughput": ("tokens_per_s", 1),
    "Memory": ("peak_memory_bytes", 2**30),
}
OF_LAYERS = {
    "Evaluations a token": "evaluations",
    "Tokens whose solve failed": "failed",
    "Residual": "residual",
    "Adjoint": "adjoint",
}


def check_numbers(page: Page, folder) -> None:
    """Every figure's numbers are those of metrics.jsonl."""
    found = lines_of(folder)
    training = [r for r in found if "loss" in r]
    losses = page.rows("Loss")
    check_curve(losses["training: training"], [r["loss"] for r in training])
    scores = [r["validation"] for r in found if "validation" in r]
    check_curve(losses["validation: validation"], [of["loss"] for of in scores])
    (baselines,) = [r["baselines"] for r in found if "baselines" in r]
    for name, perplexity in baselines.items():
        assert number(losses[name]["last"]) == pytest.approx(math.log(perplexity), rel=1e-5)
    check_figure(page, "Bits per byte", [[of["bits_per_byte"] for of in scores]])
    for title, (key, size) in PLAIN.items():
        check_figure(page, title, [[r[key] / size for r in training]])
    layers = range(len(training[0]["evaluations"]))
    for title, key in OF_LAYERS.items():
        check_figure(page, title, [[r[key][i] for r in training] for i in layers])
    means = [r["probe"]["num_iters"]["mean"] for r in found if "probe" in r]
    check_figure(page, "ℓ* of each layer", [[mean[i] for mean in means] for i in layers])


def check_result(page: Page, folder) -> None:
    result = json.loads((folder / "result.json").read_text())
    shown = {row[0]: row[1] for row in page.tables["Results"][0]}
    assert shown["run"] == folder.name and shown["state"] == "done"
    for name in ("updates", "tokens", "parameters"):
        assert shown[name] == f"{result[name]:,}"
    numbers = {
        "validation loss": result["validation"]["loss"],
        "bits per byte": result["validation"]["bits_per_byte"],
        "tokens/s": result["tokens_per_s"],
    }
    found = {name: number(shown[name]) for name in numbers}
    assert found == pytest.approx(numbers, rel=1e-5)


def test_every_number_is_that_of_the_file(solved, tmp_path, undrawn):
    page = reported(solved, tmp_path)
    check_numbers(page, solved)
    check_result(page, solved)
    assert not (solved / "report.html").exists() and not (solved / "summary.json").exists()
    for key in ("grad_norm", "probe.num_iters.mean", "validation.bits_per_byte", "failed"):
        assert f"metrics.jsonl: {key}" in page.text


def test_the_report_of_a_real_run(tiny_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # no cell of the table is wrapped
    monkeypatch.setattr(say, "_console", None)
    copied = shutil.copytree(tiny_run, tmp_path / "tiny", ignore=shutil.ignore_patterns("hf"))
    page = reported(copied)
    check_numbers(page, copied)
    check_result(page, copied)
    environment = json.loads((copied / "environment.json").read_text())
    corpus = json.loads((copied / "data/corpus.json").read_text())
    known = {(row[0], row[1]): row[2] for row in page.tables["Provenance"][0]}
    assert known["environment.json", "torch"] == environment["torch"]
    assert known["environment.json", "commit"] == (environment["commit"] or "null")
    assert known["data/corpus.json", "settings"] == corpus["settings"]
    figures = {path.name for path in (copied / "figures").iterdir()}
    names = {"loss.png", "loss.pdf", "lr.png", "grad_norm.pdf", "memory.png"}
    assert names <= figures <= {f"{name}.{kind}" for name in FIGURES for kind in ("png", "pdf")}
    assert (copied / "figures/loss.png").read_bytes().startswith(b"\x89PNG")
    assert (copied / "figures/loss.pdf").read_bytes().startswith(b"%PDF")
    summary = json.loads((copied / "summary.json").read_text())
    result = json.loads((copied / "result.json").read_text())
    assert summary["validation"] == result["validation"]
    assert len(summary["fixed_point"]["num_iters"]["mean"]) == 2
    said = capsys.readouterr().out
    assert "against the better baseline" in said and "not solved (evaluation)" in said


def test_curves_are_drawn_from_the_records(solved, tmp_path, monkeypatch):
    """Over updates; of several runs the loss over the tokens of the same records."""
    seen = {}
    make = draw.draw

    def record_lines(figure):
        drawing = make(figure)
        seen[figure.name] = [
            [line.get_xydata().tolist() for line in axes.lines] for axes in drawing.axes
        ]
        return drawing

    monkeypatch.setattr(draw, "draw", record_lines)
    monkeypatch.setattr(draw, "to_png", lambda drawing: b"PNG")
    monkeypatch.setattr(draw, "save", lambda drawing, png, folder, name: None)
    found = lines_of(solved)
    training = [r for r in found if "loss" in r]
    reported(solved, tmp_path)
    assert seen["loss"][0][0] == [[float(r["step"]), r["loss"]] for r in training]
    assert seen["grad_norm"] == [[[[float(r["step"]), r["grad_norm"]] for r in training]]]
    other = shutil.copytree(solved, tmp_path / "other")
    reported([solved, other], tmp_path / "both")
    assert seen["loss"][0][0] == [[float(r["tokens"]), r["loss"]] for r in training]
    tokens = {r["step"]: r["tokens"] for r in training}
    tokens |= {10: (tokens[8] + tokens[12]) / 2, 30: (tokens[28] + tokens[32]) / 2}
    scores = [r for r in found if "validation" in r]
    expected = [[tokens[r["step"]], r["validation"]["bits_per_byte"]] for r in scores]
    assert seen["bits_per_byte"] == [[expected, expected]]


def test_the_page_needs_no_other_file(solved, tmp_path, no_pdf):
    page = reported(solved, tmp_path)
    targets = [v for _, name, v in page.attributes if name in ("src", "href", "xlink:href")]
    assert targets and all(v.startswith(("#", "data:")) for v in targets)
    assert {tag for tag, _, _ in page.attributes} & {"link", "iframe", "object", "base"} == set()
    text = (tmp_path / "report.html").read_text()
    assert "@import" not in text and "url(" not in text
    ids = {value for _, name, value in page.attributes if name == "id"}
    assert {v[1:] for _, name, v in page.attributes if name == "href"} <= ids


def test_a_named_page_is_written_without_a_folder(solved, tmp_path, undrawn):
    assert main(["report", str(solved), "--out", str(tmp_path / "a.html")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


def test_markdown_has_the_same_tables(solved, tmp_path, undrawn):
    page = reported(solved, tmp_path)
    text = (tmp_path / "report.markdown").read_text()
    rows = re.findall(r"^\| (.*) \|$", text, re.M)
    cells = [re.split(r" (?<!\\)\| ", re.sub(r"\\(?!\|)(.)", r"\1", row)) for row in rows]
    found = [row for row in cells if set("".join(row)) - set("-: ")]
    assert found == [row for of in page.tables.values() for table in of for row in table]
    assert "From metrics.jsonl: `loss`, `validation.loss`; nats per token." in text
    assert "![Loss](figures/loss.png)" in text


def test_equal_values_are_a_sentence(tmp_path, undrawn):
    """A share of failures that is 0 throughout is no figure."""
    lines = records([0, 1])
    for r in lines:
        if "failed" in r:
            r["failed"] = [0.0, 0.0]
            r["lr"] = 0.002
    page = reported(run_in(tmp_path / "run", lines), tmp_path)
    assert "Tokens whose solve failed (share of the tokens): 0 throughout." in page.text
    assert "Learning rate (learning rate): 0.002 throughout." in page.text
    assert not {"Tokens whose solve failed", "Learning rate"} & {*page.headings}


# Runs of other kinds.


def test_a_baseline_has_no_solver_and_that_is_said(tmp_path, undrawn):
    folder = run_in(tmp_path / "plain", records(None), model={"name": "mamba"})
    page = reported(folder, tmp_path)
    assert "plain has no solver ( mamba ), and so no ℓ*" in page.text
    assert "ℓ* of each layer" not in page.headings and "Residual" not in page.headings


@pytest.mark.parametrize("layers", [[3, 7], list(range(24))])
def test_layers_have_the_numbers_of_their_model(tmp_path, layers, no_pdf):
    """Two layers have a legend; many have a color bar."""
    page = reported(run_in(tmp_path / "hybrid", records(layers)), tmp_path)
    for title in ("ℓ* of each layer", "Evaluations a token"):
        assert list(page.rows(title)) == [f"layer {layer}" for layer in layers]
    assert list(page.rows("Layers")) == [str(layer) for layer in layers]


def test_a_mixture(tmp_path, undrawn):
    lines = records(None, data_share={"a": 0.7, "b": 0.3})
    for r in lines:
        if "validation" in r:
            loss = r["validation"]["loss"]
            r["validation"]["sources"] = {"a": {"loss": loss - 0.5}, "b": {"loss": loss + 1}}
    page = reported(run_in(tmp_path / "mixed", lines), tmp_path)
    sources = page.rows("Validation loss of each source")
    gap = number(sources["b"]["last"]) - number(sources["a"]["last"])
    assert gap == pytest.approx(1.5, abs=1e-4)
    assert number(page.rows("Share of each source")["b"]["last"]) == 0.3


def test_the_parts_of_an_update(tmp_path, undrawn):
    parts = {"data": 0.1, "forward": 0.5, "solve": 0.25, "backward": 0.15, "communication": 0.0}
    page = reported(run_in(tmp_path / "timed", records([0], breakdown=parts)), tmp_path)
    rows = page.rows("Time of an update")
    assert {name: number(row["last"]) for name, row in rows.items()} == {
        name: seconds for name, seconds in parts.items() if seconds
    }


def test_scores_samples_and_events(tmp_path, undrawn):
    looks = [{"stage": 1, "answers": 0.9, "ended": ended} for ended in (False, True)]
    lines = [
        *records([0]),
        {"step": 40, "rollback": {"number": 1, "why": "the loss is <nan>"}},
        *({"step": 40, "curriculum": look} for look in looks),
    ]
    folder = run_in(tmp_path / "run", lines)
    scores = {"acc": {"value": 0.24, "stderr": 0.061, "higher_is_better": True}}
    plain = {"acc": {"value": 0.5, "higher_is_better": ["true"]}}
    (folder / "hf/eval").mkdir(parents=True)
    tasks = {"catbabi_mini": {"metrics": scores}, "plain": {"metrics": plain}}
    (folder / "hf/eval/results.json").write_text(json.dumps({"limit": 50, "tasks": tasks}))
    (folder / "sample.txt").write_text("Once <b>upon</b> a ``` time")
    page = reported(folder, tmp_path)
    row = page.rows("Scores")["catbabi_mini"]
    assert (row["metric"], row["run"]) == ("acc ↑", "0.2400 ± 0.0610 (50 documents)")
    assert page.rows("Scores")["plain"]["metric"] == "acc"
    assert "Once <b>upon</b> a ``` time" in page.text
    events = [row[1:] for row in page.tables["Events"][0][1:]]
    assert events == [
        ["40", "rollback", "the loss is <nan>"],
        ["40", "curriculum", "stage 1 is learned, answers 0.9"],
    ]


# States, and damaged files.


def test_a_run_that_trains_is_reported_as_far_as_it_is(tmp_path, undrawn):
    folder = run_in(tmp_path / "live", records([0, 1])[:-5], finished=False)
    with (folder / "metrics.jsonl").open("a") as f:
        f.write('{"step": 999, "lo')  # being written
    (folder / "lease.json").write_text(json.dumps({"host": "n7", "pid": 12, "job": "4711"}))
    page = reported(folder)
    assert "live is running: job 4711 on n7, process 12; update 28 of 40, last record" in page.text
    assert "lines without a record: 1" in page.text
    assert page.rows("Loss")["training: training"]["points"] == "7"
    assert json.loads((folder / "summary.json").read_text())["updates"] == 28
    (folder / "lease.json").unlink()
    failure = {"sentence": "the loss is nan", "exit_code": 76}
    (folder / "failure.json").write_text(json.dumps(failure))
    assert "live is failed: the loss is nan; update 28 of 40" in reported(folder).text


def test_a_run_before_its_first_record(tmp_path, capsys, undrawn):
    folder = run_in(tmp_path / "new", [], finished=False)
    os.utime(folder / "config.yaml", (time.time() - 600,) * 2)
    page = reported(folder)
    assert "no update recorded yet" in page.text and "No training step is recorded yet" in page.text
    assert "page: " in capsys.readouterr().out


def test_damaged_records_are_left_out_and_counted(tmp_path, undrawn):
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
    (folder / "environment.json").write_text("{")
    with (folder / "metrics.jsonl").open("ab") as f:
        f.write(b'\xff\xfe\n[1]\n{"step": -1}\n')
    page = reported(folder, tmp_path)
    assert "lines without a record: 3" in page.text
    assert "environment.json is damaged: it is no JSON mapping" in page.text
    row = page.rows("Gradient norm")["run"]
    assert row["points"] == "8" and "2 values are no finite numbers" in page.text
    assert page.rows("Evaluations a token")["layer 1"]["points"] == "9"
    assert "evaluations ; 1 damaged records are left out" in page.text
    assert "nan" not in "".join(cell for t in page.tables.values() for r in t[0] for cell in r)


def test_names_are_text_and_nothing_else(tmp_path, no_pdf):
    """A label is no markup and no mathematics."""
    folders = [tmp_path / "_a$x_1$" / "r", tmp_path / "<script>alert(1)</script>|`b`" / "r"]
    for folder in folders:
        run_in(folder, records([0]))
    page = reported(folders, tmp_path / "out")
    assert list(page.rows("Results")) == ["_a$x_1$/r", "<script>alert(1)</script>|`b`/r"]
    text = (tmp_path / "out/report.html").read_text()
    assert "<script>alert" not in text and text.count("<script>") == 1
    assert "<script>" not in (tmp_path / "out/report.markdown").read_text().replace("\\<", "")


def test_a_damaged_result_is_named(tmp_path, capsys, undrawn):
    folder = run_in(tmp_path / "run", records([0]))
    (folder / "result.json").write_text("{")
    text = reported(folder).text
    assert "run is failed" in text and "result.json is damaged: it is not JSON" in text
    assert "note: " in capsys.readouterr().out


# Several runs.


@pytest.fixture(scope="module")
def two(tmp_path_factory, solved):
    """Page of two runs, one without a solver."""
    folder = tmp_path_factory.mktemp("two")
    other = run_in(folder / "plain", records(None), model={"name": "mamba"}, optim={"lr": 0.002})
    return reported([solved, other], folder / "out"), folder / "out"


def test_two_runs_stand_in_one_report(two):
    page, out = two
    rows = page.rows("Results")
    label, other = rows
    assert label.endswith("/solved") and other.endswith("/plain")
    assert rows[label]["ℓ*"] != "–" and rows[other]["ℓ*"] == "–"
    assert [row["curve"] for row in page.rows("Gradient norm").values()] == [label, other]
    assert f"{other} has no solver" in page.text
    files = {"report.html", "report.markdown", "summary.json", "figures"}
    assert {path.name for path in out.iterdir()} == files
    assert json.loads((out / "summary.json").read_text()).keys() == {label, other}


def test_only_keys_that_differ_are_compared(two):
    rows = two[0].rows("Configuration")
    assert {"model.name", "optim.lr"} <= rows.keys()
    assert list(rows["optim.lr"].values())[1:] == ["0.004", "0.002"]
    assert all(len(set(list(row.values())[1:])) == 2 for row in rows.values())
    assert "train.steps" not in rows and "name" not in rows


# Refusals.


@pytest.mark.parametrize(
    "name, out", [("paper.html", "paper.html"), ("report.html", "."), ("report.markdown", "."),
                  ("summary.json", "."), ("figures/loss.png", ".")]
)  # fmt: skip
def test_a_report_replaces_no_file_of_somebody_else(tiny_run, tmp_path, name, out, undrawn):
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(OutputError, match=r"is there already|no report\.html of an earlier report"):
        report([tiny_run], tmp_path / out)
    assert mine.read_text() == "mine"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]
    mine.unlink()
    mine.parent.rmdir() if mine.parent != tmp_path else None
    for _ in range(2):  # its own files it replaces
        report([tiny_run], tmp_path / out)


def test_refusals(tmp_path, solved, capsys):
    suite = tmp_path / "suite"
    suite.mkdir()
    (suite / "config.yaml").write_text("task: s3\n")
    folder = tmp_path / "no"
    page = tmp_path / "out"
    for args, words in (
        ([solved, solved], "name it by --out"),
        ([solved, solved, "--out", page], "is given twice"),
        ([solved, folder, "--out", page], "no such folder"),
        ([suite, "--out", page], "fprnn synthetic report"),
        ([solved, "--out", tmp_path / "page.pdf"], "name a folder, or a file ending .html"),
    ):
        assert main(["report", *map(str, args)]) == (BAD_CONFIG if words == "no such folder" else 1)
        assert words in capsys.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} == {"suite"}
