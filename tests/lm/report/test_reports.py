"""The page of runs: every number on it is one of their files, whatever state these are in."""

import html.parser
import json
import math
import os
import re
import shutil
import subprocess
import time

import pytest

from lm.cli.main import main
from lm.common import page as shell
from lm.common.errors import BAD_CONFIG
from lm.common.files import OutputError
from lm.report.report import report
from lm.report.sections.blocks import in_bytes, with_error
from lm.report.sections.read import labels
from tests.running import ROOT

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
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


@pytest.mark.parametrize("kind", ["html", "markdown", "tex"])
def test_a_report_replaces_no_file_of_somebody_else(tiny_run, tmp_path, kind):
    mine = tmp_path / f"paper.{kind}"
    mine.write_text("\\documentclass{article}")
    with pytest.raises(OutputError, match=rf"paper\.{kind} is there already"):
        report([tiny_run], tmp_path / "paper.html")
    assert mine.read_text() == "\\documentclass{article}"
    assert sorted(tmp_path.iterdir()) == [mine]
    mine.unlink()
    for _ in range(2):  # its own files it replaces
        report([tiny_run], tmp_path / "paper.html")


def number(text: str) -> float:
    return float(text.replace(",", ""))


def near(value):
    """What six digits keep of a number."""
    return pytest.approx(value, rel=1e-5)


def check_curve(row: dict[str, str], pairs: list[tuple[int, float]]) -> None:
    """A row "in numbers" is that of these (update, value)."""
    values = [value for _, value in pairs]
    assert row["points"] == str(len(pairs))
    assert row["updates"] == f"{pairs[0][0]:,} to {pairs[-1][0]:,}"
    expected = {"first": values[0], "least": min(values), "most": max(values), "last": values[-1]}
    assert {name: number(row[name]) for name in expected} == near(expected)


def check_chart(page: Page, title: str, curves: list[list[tuple[int, float]]]) -> None:
    """A picture's numbers are those of these curves; where all of them are the same, a sentence
    stands in its place."""
    values = {value for pairs in curves for _, value in pairs}
    if len(values) > 1:
        for row, pairs in zip(page.rows(title).values(), curves, strict=True):
            check_curve(row, pairs)
        return
    assert title not in page.headings
    said = re.search(rf"{re.escape(title)} \([^)]*\): (\S+) throughout\.", page.text)
    assert number(said[1]) == near(values.pop())


def lines_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def undrawn(monkeypatch):
    """Pages without their pictures, which take most of the time."""
    monkeypatch.setattr(
        "lm.report.sections.as_html.drawings",
        lambda block: ["<svg></svg>"] * len(getattr(block, "axes", "1")),
    )


@pytest.fixture(scope="module")
def solved(tmp_path_factory):
    """The directory of a run with two solved layers."""
    return run_in(tmp_path_factory.mktemp("solved") / "solved", records([0, 1]))


# One run.

PLAIN = {
    "Learning rate": ("lr", 1),
    "Gradient norm": ("grad_norm", 1),
    "Throughput": ("tokens_per_s", 1),
    "Memory": ("peak_memory_bytes", 2**20),
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
    check_curve(page.rows("Training loss")["training"], [(r["step"], r["loss"]) for r in training])
    for title, (key, size) in PLAIN.items():
        check_chart(page, title, [[(r["step"], r[key] / size) for r in training]])
    layers = range(len(training[0]["evaluations"]))
    for title, key in OF_LAYERS.items():
        check_chart(page, title, [[(r["step"], r[key][i]) for r in training] for i in layers])
    probes = [(r["step"], r["probe"]["num_iters"]["mean"]) for r in found if "probe" in r]
    check_chart(page, "ℓ* of each layer", [[(s, mean[i]) for s, mean in probes] for i in layers])
    scores = [(r["step"], r["validation"]) for r in found if "validation" in r]
    rows = page.rows("Validation loss")
    last = list(rows["validation"])[-1]  # a column: of one validation alone there is one
    assert number(rows["validation"][last]) == near(scores[-1][1]["loss"])
    for name, perplexity in found[-1].get("baselines", found[-2].get("baselines")).items():
        assert number(rows[name][last]) == near(math.log(perplexity))
    check_chart(page, "Bits per byte", [[(step, of["bits_per_byte"]) for step, of in scores]])


def check_result(page: Page, folder) -> None:
    result = json.loads((folder / "result.json").read_text())
    shown = {row[0]: row[1] for row in page.tables["Results"][0]}
    assert shown["run"] == folder.name and shown["state"] == "done"
    for name in ("updates", "tokens", "parameters"):
        assert shown[name] == f"{result[name]:,}"
    for name, key in (("validation loss", "loss"), ("bits per byte", "bits_per_byte")):
        assert number(shown[name]) == near(result["validation"][key])
    assert number(shown["tokens/s"]) == near(result["tokens_per_s"])


def test_every_number_is_that_of_the_file(solved, tmp_path, undrawn):
    page = reported(solved, tmp_path)
    check_numbers(page, solved)
    check_result(page, solved)
    assert not (solved / "report.html").exists() and not (solved / "summary.json").exists()


def test_the_page_of_a_real_run(tiny_run, tmp_path):
    """With figures and summary, as ever, and with what it ran on."""
    copied = shutil.copytree(tiny_run, tmp_path / "tiny", ignore=shutil.ignore_patterns("hf"))
    page = reported(copied)
    check_numbers(page, copied)
    check_result(page, copied)
    environment = json.loads((copied / "environment.json").read_text())
    corpus = json.loads((copied / "data/corpus.json").read_text())
    known = {(row[0], row[1]): row[2] for row in page.tables["Provenance"][0]}
    assert known["environment.json", "torch"] == environment["torch"]
    assert known["environment.json", "commit"] == (environment["commit"] or "null")
    if (ROOT / ".git").exists():
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
        )
        assert environment["commit"].rstrip("+") == head.stdout.strip()
    assert known["data/corpus.json", "settings"] == corpus["settings"]
    figures = {f"{name}.{kind}" for name in ("loss", "iterations") for kind in ("png", "pdf")}
    assert {p.name for p in (copied / "figures").iterdir()} == figures
    assert (copied / "summary.json").is_file()


def test_figures_are_drawn_from_the_records(solved, tmp_path, monkeypatch):
    """Over updates, and over the tokens of the same records."""
    seen = {}
    draw = shell.svg

    def svg(drawn):
        axes = drawn.axes[0]
        key = axes.get_ylabel(), axes.get_xlabel()
        seen.setdefault(key, []).append([line.get_xydata().tolist() for line in axes.lines])
        return draw(drawn)

    monkeypatch.setattr(shell, "svg", svg)
    reported(solved, tmp_path)
    found = lines_of(solved)
    tokens = {r["step"]: r["tokens"] for r in found if "loss" in r}
    expected = [[float(r["tokens"]), r["loss"]] for r in found if "loss" in r]
    assert seen["nats per token", "training tokens"][0][0] == expected
    expected = [[float(r["step"]), r["grad_norm"]] for r in found if "loss" in r]
    assert seen["before clipping", "update"] == [[expected]]
    ((drawn,),) = seen["bits", "training tokens"]
    scores = {r["step"]: r["validation"]["bits_per_byte"] for r in found if "validation" in r}
    assert [y for _, y in drawn] == list(scores.values())
    between = {10: (tokens[8] + tokens[12]) / 2, 30: (tokens[28] + tokens[32]) / 2}
    assert [x for x, _ in drawn] == [between.get(step, tokens.get(step)) for step in scores]


def test_nothing_of_the_page_is_outside_it(solved, tmp_path):
    page = reported(solved, tmp_path)
    targets = [v for _, name, v in page.attributes if name in ("src", "href", "xlink:href")]
    assert targets and all(v.startswith(("#", "data:")) for v in targets)
    assert {tag for tag, _, _ in page.attributes} & {"link", "iframe", "object", "base"} == set()
    text = (tmp_path / "report.html").read_text()
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    ids = {value for _, name, value in page.attributes if name == "id"}
    assert {v[1:] for _, name, v in page.attributes if name == "href"} <= ids
    headings = [value for tag, name, value in page.attributes if tag == "h2" and name == "id"]
    assert len(headings) == len(set(headings)) >= 9


def test_every_figure_says_what_it_is_drawn_from(solved, tmp_path, undrawn):
    text = reported(solved, tmp_path).text
    html_text = (tmp_path / "report.html").read_text()
    assert html_text.count("<figure") == html_text.count("<figcaption>metrics.jsonl: <code>") > 8
    for key in ("grad_norm", "probe.num_iters.mean", "validation.bits_per_byte", "failed"):
        assert f"metrics.jsonl: {key} over step" in text


def test_markdown_has_the_same_tables(solved, tmp_path, undrawn):
    page = reported(solved, tmp_path)
    text = (tmp_path / "report.markdown").read_text()
    rows = re.findall(r"^\| (.*) \|$", text, re.M)
    cells = [re.split(r" (?<!\\)\| ", re.sub(r"\\(?!\|)(.)", r"\1", row)) for row in rows]
    found = [row for row in cells if set("".join(row)) - set("-:")]
    assert found == [row for of in page.tables.values() for table in of for row in table]


def test_markdown_keeps_the_spaces_around_code(solved, tmp_path, undrawn):
    reported(solved, tmp_path)
    text = (tmp_path / "report.markdown").read_text()
    assert "From metrics.jsonl: `loss` over `step` and `tokens`; nats per token." in text


def test_a_checkpoint_table_adds_up(solved, tmp_path, undrawn):
    row = reported(solved, tmp_path).rows("Checkpoints")["solved"]
    assert (row["saves"], row["last at update"]) == ("2", "40")
    assert (row["size of the last"], row["training waited s"]) == ("121 KiB", "0.5")


def test_each_chart_is_shown_once_with_a_switch_of_its_axis(solved, tmp_path):
    """Both drawings lie in the page; which is seen is the reader's choice, without a script."""
    reported(solved, tmp_path)
    text = (tmp_path / "report.html").read_text()
    for title in ("Training loss", "Validation loss", "Bits per byte"):
        (figure,) = re.findall(rf"<figure><h3>{title}</h3>.*?</figure>", text, re.S)
        buttons = re.findall(r"<input type='radio' name='(.*?)' value='(\w+)'( checked)?>", figure)
        assert [value for _, value, _ in buttons] == ["update", "tokens"]
        assert [bool(pressed) for _, _, pressed in buttons] == [True, False]
        assert figure.count("<svg") == 2 and len({name for name, _, _ in buttons}) == 1
    assert text.count("<svg") == text.count("<figure>") + 3


def test_what_does_not_move_is_said_and_not_drawn(tmp_path):
    """A share of failures that is 0 throughout, one validation alone."""
    lines = records([0, 1])
    for r in lines:
        if "failed" in r:
            r["failed"] = [0.0, 0.0]
            r["lr"] = 0.002
    lines = [r for r in lines if r["step"] == 40 or "validation" not in r]
    page = reported(run_in(tmp_path / "run", lines), tmp_path)
    assert "Tokens whose solve failed (share of the tokens): 0 throughout." in page.text
    assert "Learning rate (learning rate): 0.002 throughout." in page.text
    assert not {"Tokens whose solve failed", "Learning rate", "Bits per byte"} & {*page.headings}
    rows = page.rows("Validation loss")
    assert list(rows) == ["validation", "unigram", "bigram"] and len(rows["bigram"]) == 2
    assert list(page.rows("ℓ* of each layer")["layer 1"]) == ["curve", "iterations"]


def test_tables_for_a_paper(solved, tmp_path, undrawn):
    folder = shutil.copytree(solved, tmp_path / "a_run")
    reported(folder, tmp_path)
    text = (tmp_path / "report.tex").read_text()
    assert r"run & a\_run \\" in text and r"$\ell^*$ & 9.21429 \\" in text
    assert text.count(r"\begin{tabular}{lr") == text.count(r"\bottomrule") == 2


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0.25, 0.0993399, "0.25 ± 0.10"),
        (0.24, 0.061, "0.24 ± 0.06"),
        (3.15, 0.2121, "3.15 ± 0.21"),
        (1234.5, 98.0, "1,230 ± 100"),
        (52_113.0, 1234.0, "52,100 ± 1,200"),
        (1.0, 0.0, "1.0000"),
        (0.5, math.nan, "0.5000"),
        (-0.02, 0.00354, "-0.0200 ± 0.0035"),
    ],
)
def test_an_error_decides_the_digits(value, error, text):
    assert with_error(value, error) == text


def test_bytes_are_read_in_a_unit():
    counts = {0: "0 KiB", 123_496: "121 KiB", 1_268_000_000: "1.18 GiB", 2**43: "8 TiB"}
    assert {count: in_bytes(count) for count in counts} == counts


# Runs of other kinds.


def test_a_baseline_has_no_solver_and_that_is_said(tmp_path, undrawn):
    folder = run_in(tmp_path / "plain", records(None), model={"name": "mamba"})
    page = reported(folder, tmp_path)
    assert "plain has no solver (model.name mamba), and so no ℓ*" in page.text
    assert "ℓ* of each layer" not in page.headings and "Residual" not in page.headings


def test_a_hybrid_names_its_layers(tmp_path, undrawn):
    folder = run_in(tmp_path / "hybrid", records([3, 7]))
    page = reported(folder, tmp_path)
    for title in ("ℓ* of each layer", *OF_LAYERS):
        if title != "Tokens whose solve failed":  # of these layers 0
            assert list(page.rows(title)) == ["layer 3", "layer 7"]


def test_many_layers_are_a_heat_map(tmp_path, monkeypatch):
    meshes = []
    draw = shell.svg

    def svg(drawn):
        meshes.extend(m.get_array().tolist() for m in drawn.axes[0].collections)
        return draw(drawn)

    monkeypatch.setattr(shell, "svg", svg)
    folder = run_in(tmp_path / "deep", records(list(range(24))))
    page = reported(folder, tmp_path)
    probes = [r["probe"]["num_iters"]["mean"] for r in lines_of(folder) if "probe" in r]
    assert meshes[0] == [list(row) for row in zip(*probes, strict=True)]
    assert list(page.rows("ℓ* of each layer")) == [f"layer {i}" for i in range(24)]


def test_a_mixture_with_z_loss_and_an_average_of_weights(tmp_path, undrawn):
    lines = records(None, z_loss=0.01, data_share={"a": 0.7, "b": 0.3})
    for r in lines:
        if "validation" in r:
            loss = r["validation"]["loss"]
            of = {"a": {"loss": loss - 0.5}, "b": {"loss": loss + 1}}
            r["validation"]["sources"] = of
            r["ema"] = {"loss": loss - 0.1}
    page = reported(run_in(tmp_path / "mixed", lines), tmp_path)
    of_sources = page.rows("Validation loss of each source")
    assert number(of_sources["a"]["last"]) + 1.5 == near(number(of_sources["b"]["last"]))
    assert number(page.rows("Share of each source")["b"]["of the targets"]) == 0.3
    rows = page.rows("Validation loss")
    gap = number(rows["validation"]["last"]) - number(
        rows["validation, average of weights"]["last"]
    )
    assert gap == pytest.approx(0.1, abs=1e-4)
    assert "z-loss (added to the loss): 0.01 throughout" in page.text


def test_the_parts_of_an_update(tmp_path, solved):
    parts = {"data": 0.1, "forward": 0.5, "solve": 0.25, "backward": 0.15, "communication": 0.0}
    folder = run_in(tmp_path / "timed", records([0], breakdown=parts))
    page = reported(folder, tmp_path)
    rows = page.rows("Time of an update")
    assert {name: row["share"] for name, row in rows.items()} == {
        "data": "10.0%", "forward": "50.0%", "solve": "25.0%", "backward": "15.0%", "all": "–",
    }  # fmt: skip
    assert number(rows["all"]["mean seconds an update"]) == 1
    without = reported(solved, tmp_path / "without")
    assert "Not recorded: the parts of an update's time ( breakdown )" in without.text


def test_scores_samples_and_events(tmp_path, undrawn):
    looks = [{"stage": 1, "answers": 0.9, "ended": ended} for ended in (False, True)]
    lines = [
        *records([0]),
        {"step": 40, "rollback": {"number": 1, "why": "the loss is <nan>"}},
        *({"step": 40, "curriculum": look} for look in looks),
    ]
    folder = run_in(tmp_path / "run", lines)
    scores = {"acc": {"value": 0.24, "stderr": 0.061, "higher_is_better": True}}
    spoilt = {"acc": {"value": 0.5, "higher_is_better": ["true"]}}
    (folder / "hf/eval").mkdir(parents=True)
    tasks = {"catbabi_mini": {"metrics": scores}, "spoilt": {"metrics": spoilt}}
    (folder / "hf/eval/results.json").write_text(json.dumps({"limit": 50, "tasks": tasks}))
    (folder / "sample.txt").write_text("Once <b>upon</b> a ``` time")
    page = reported(folder, tmp_path)
    row = page.rows("Evaluations")["catbabi_mini"]
    assert (row["metric"], row["run"]) == ("acc ↑", "0.24 ± 0.06 (50 documents)")
    assert page.rows("Evaluations")["spoilt"]["metric"] == "acc"
    assert "Once <b>upon</b> a ``` time" in page.text
    events = page.tables["Events"][0][1:]
    assert events[0][1:] == ["40", "rollback", "the loss is <nan>"]
    assert [row[1:] for row in events[1:]] == [
        ["40", "curriculum", "stage 1 is learned, answers 0.9"]
    ]


# States, and what is damaged.


def test_a_run_that_trains_is_reported_as_far_as_it_is(tmp_path, undrawn):
    folder = run_in(tmp_path / "live", records([0, 1])[:-5], finished=False)
    with (folder / "metrics.jsonl").open("a") as f:
        f.write('{"step": 999, "lo')  # being written
    (folder / "lease.json").write_text(json.dumps({"host": "n7", "pid": 12, "job": "4711"}))
    page = reported(folder)
    assert "live is running: job 4711 on n7, process 12; update 28 of 40, last record" in page.text
    assert "1 line holds no record" in page.text
    assert page.rows("Training loss")["training"]["updates"] == "4 to 28"
    assert not (folder / "summary.json").exists() and not (folder / "figures").exists()
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
    lines[2]["probe"] = 7
    folder = run_in(tmp_path / "run", lines)
    (folder / "environment.json").write_text("{")
    with (folder / "metrics.jsonl").open("ab") as f:
        f.write(b'\xff\xfe\n[1]\n{"step": -1}\n')
    page = reported(folder, tmp_path)
    assert "3 lines hold no record" in page.text
    assert "environment.json is damaged: it is no JSON mapping" in page.text
    row = page.rows("Gradient norm")["run"]
    assert row["points"] == "8" and "2 of the values are no finite numbers" in page.text
    assert page.rows("Evaluations a token")["layer 1"]["points"] == "9"
    assert "evaluations over step ; 1 damaged record(s) left out" in page.text
    assert "nan" not in "".join(cell for t in page.tables.values() for r in t[0] for cell in r)


def test_names_are_text_and_nothing_else(tmp_path):
    """A label is no markup, no mathematics, and is not hidden for its underscore."""
    folders = [tmp_path / "_a$x_1$" / "r", tmp_path / "<script>alert(1)</script>|`b`" / "r"]
    for folder in folders:
        run_in(folder, records([0]))
    page = reported(folders, tmp_path / "out")
    assert list(page.rows("Results")) == ["_a$x_1$", "<script>alert(1)</script>|`b`"]
    text = (tmp_path / "out/report.html").read_text()
    assert "<script>alert" not in text and text.count("<script>") == 1
    assert text.count("_a$x_1$</text>") >= 10  # in the figures
    assert "<script>" not in (tmp_path / "out/report.markdown").read_text().replace("\\<", "")


def test_a_result_that_is_damaged_can_be_looked_at_elsewhere(tmp_path, capsys, undrawn):
    folder = run_in(tmp_path / "run", records([0]))
    (folder / "result.json").write_text("{")
    assert main(["report", str(folder)]) == 1
    assert "result.json is damaged" in capsys.readouterr().err
    assert not (folder / "report.html").exists()
    text = reported(folder, tmp_path / "out").text
    assert "run is failed" in text and "result.json is damaged" in text


# Several runs.


@pytest.fixture(scope="module")
def two(tmp_path_factory, solved):
    """Page of two runs, one without a solver."""
    folder = tmp_path_factory.mktemp("two")
    other = run_in(folder / "plain", records(None), model={"name": "mamba"}, optim={"lr": 0.002})
    return reported([solved, other], folder / "out"), folder / "out"


def test_two_runs_stand_beside_each_other(two, solved):
    page, out = two
    names = [solved.name, "plain"]
    rows = page.rows("Results")
    label = next(name for name in rows if name.endswith("/solved"))
    other = next(name for name in rows if name.endswith("/plain"))
    assert rows[label]["ℓ*"] != "–" and rows[other]["ℓ*"] == "–", names
    curves = [row["curve"] for row in page.rows("Gradient norm").values()]
    assert curves == [label, other]
    assert f"{other} has no solver" in page.text
    assert "Not recorded" in page.text
    assert {p.name for p in out.iterdir()} == {"report.html", "report.markdown", "report.tex"}


def test_only_keys_that_differ_are_compared(two):
    rows = two[0].rows("Configuration")
    assert {"model.name", "optim.lr"} <= rows.keys()
    assert list(rows["optim.lr"].values())[1:] == ["0.004", "0.002"]
    assert all(len(set(list(row.values())[1:])) == 2 for row in rows.values())
    assert "train.steps" not in rows and "name" not in rows


def test_labels_are_what_differs(tmp_path):
    def of(*names):
        return labels([tmp_path / name for name in names])

    assert of("a/lr=1/run", "b/lr=1/run") == ["a", "b"]
    assert of("a/run", "b/other/run") == ["a", "b/other"]
    assert of("a", "a/b") == ["a", "a/b"]
    assert of("x/y") == ["y"]


def test_what_is_refused(tmp_path, solved, capsys):
    suite = tmp_path / "suite"
    suite.mkdir()
    (suite / "config.yaml").write_text("task: s3\n")
    folder = tmp_path / "no"
    page = tmp_path / "out"
    for args, words in (
        ([solved, solved], "say where to write it with --out"),
        ([solved, solved, "--out", page], "is given twice"),
        ([solved, folder, "--out", page], "no such folder"),
        ([suite, "--out", page], "fprnn synthetic report"),
        ([solved, "--out", tmp_path / "page.pdf"], "name a folder, or a file ending .html"),
    ):
        assert main(["report", *map(str, args)]) == (BAD_CONFIG if words == "no such folder" else 1)
        assert words in capsys.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} == {"suite"}


# As a browser shows it.

MEASURE = """
<script>
const of = document.querySelector("iframe");
of.addEventListener("load", () => {
  const page = of.contentWindow, root = of.contentDocument.documentElement;
  const all = what => [...of.contentDocument.querySelectorAll(what)];
  for (const head of all("th")) head.click();
  const shown = () => all("figure svg").filter(svg => svg.getClientRects().length);
  const clipped = () => shown().flatMap(svg => {
    const box = svg.getBoundingClientRect();
    return [...svg.querySelectorAll("text")].filter(text => {
      const at = text.getBoundingClientRect();
      return at.left < box.left - 1 || at.right > box.right + 1
        || at.top < box.top - 1 || at.bottom > box.bottom + 1;
    }).map(text => text.textContent);
  });
  const measured = {scroll: root.scrollWidth, inner: page.innerWidth, errors: page.failures,
                    height: root.scrollHeight, clipped: clipped(), drawings: shown().length,
                    figures: all("figure").length};
  const wide = all(".scroll, figure").filter(table => table.scrollWidth > table.clientWidth);
  measured.wide = wide.length;
  measured.unseen = wide.filter(
    table => !page.getComputedStyle(table).backgroundImage.includes("gradient")).length;
  const first = shown()[0];
  for (const button of all("input[value=tokens]")) button.click();
  measured.clipped.push(...clipped());
  measured.switched = [shown().length, first.getClientRects().length];
  document.title = JSON.stringify(measured);
});
</script>
"""
WATCH = "<script>failures = []; onerror = what => { failures.push(String(what)); };</script>"


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [420, 1200])
def test_a_browser_shows_it_without_scrolling_sideways(two, tmp_path, width):
    """In a frame of that width: a window of chromium has 500 at least. No label is cut, a table
    that goes on to the side has a shadow there, and every chart is seen once."""
    measured = measure((two[1] / "report.html").read_text(), tmp_path, width)
    assert measured["scroll"] <= width and measured["height"] > 3000
    assert measured["drawings"] == measured["figures"] > 8
    assert measured["switched"] == [measured["drawings"], 0]
    assert measured["wide"] > 0 and measured["unseen"] == 0


def measure(text: str, tmp_path, width: int) -> dict:
    """What a browser finds of a page; it has no error and no label that is cut."""
    text = text.replace("<head>", f"<head>{WATCH}", 1)
    srcdoc = html.escape(text.replace("<details>", "<details open>"))
    frame = f"<iframe style='border:0;width:{width}px;height:900px' srcdoc=\"{srcdoc}\"></iframe>"
    (tmp_path / "frame.html").write_text(f"<!doctype html><title></title>{frame}{MEASURE}")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=4000"]
    command += ["--window-size=1400,1000", f"file://{tmp_path / 'frame.html'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    measured = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", done.stdout)[1]))
    assert measured["errors"] == measured["clipped"] == [] and measured["inner"] == width
    return measured
