"""Content of summary.json, and the tables of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from lm.common.console import format_duration
from lm.report.read import Files, finite_or_none, format_config_value, get_nested
from lm.runs.metrics import OTHER_SOLUTION_MARK, OTHER_SOLUTION_NOTE, OTHER_SOLUTION_SHARE

NO_VALUE = "–"
MAX_EVENTS = 100
SOURCE = (
    "result.json of a finished run, otherwise the last record of metrics.jsonl with the value:"
    " `step`, `tokens`, `validation`, `tokens_per_s`, `mfu`, `probe.num_iters.mean`, `evaluations`,"
    " `failed`"
)
OTHER_SOLUTION = f"{OTHER_SOLUTION_MARK} share"
# Columns of the table of layers, by their title.
LAYERS = {
    "ℓ* mean": ("probe", "num_iters", "mean"),
    "ℓ* median": ("probe", "num_iters", "median"),
    "ℓ* max": ("probe", "num_iters", "max"),
    OTHER_SOLUTION: ("probe", "num_iters", "elsewhere"),
    "evaluations (training)": ("evaluations",),
    "not solved (training)": ("failed",),
    "evaluations (evaluation)": ("probe", "evaluations"),
    "not solved (evaluation)": ("probe", "failed"),
}


@dataclass(frozen=True)
class Table:
    """Table of text.

    Attributes:
        rows: Cells; the first row is the head.
        source: File and keys of the numbers.
        title: Heading; "" for none.
        has_words: True if most cells contain words, which are then left-aligned.
    """

    rows: list[list[str]]
    source: str
    title: str = ""
    has_words: bool = False


def format_value(value: object) -> str:
    """Return a value as text: numbers with six significant digits, NO_VALUE for missing values."""
    if isinstance(value, str):
        return value
    finite = finite_or_none(value)
    if finite is None:
        return NO_VALUE
    if isinstance(finite, int) or abs(finite) >= 1e6:
        return f"{finite:,.0f}"
    return f"{finite:,.6g}"


def summarize(files: Files) -> dict[str, Any]:
    """Return the numbers of a run, which may still train.

    Numbers in result.json replace the last numbers in metrics.jsonl.
    """
    scores = ("loss", "perplexity", "bits_per_byte")
    summary = {
        "run": files.label,
        "state": files.status.state,
        "updates": files.status.step,
        "tokens": files.last("tokens"),
        "training_seconds": files.last("spent", "seconds"),
        "tokens_per_s": files.last("tokens_per_s"),
        "training_loss": files.last("loss"),
        "mfu": files.last("mfu"),
        "validation": {name: files.last("validation", name) for name in scores},
        **files.result,
    }
    summary.pop("probe", None)
    if files.baselines:
        summary["baselines"] = files.baselines
    layers = _layers(files)
    if not layers.empty:
        summary["layers"] = layers.astype(object).where(layers.notna(), None).to_dict("index")
    if files.tasks:
        summary["evaluation"] = files.tasks
    return summary


def _layers(files: Files) -> pd.DataFrame:
    """Return the last numbers of each layer, with one row per layer and the columns of LAYERS."""
    columns = {}
    for title, keys in LAYERS.items():
        layers = files.layers(*keys)
        columns[title] = {name: values.ffill().iloc[-1] for name, values in layers.items()}
    return pd.DataFrame({title: values for title, values in columns.items() if values})


def describe_state(files: Files) -> str:
    """Return a sentence such as "demo is running: process 9 on n0; update 40 of 450"."""
    status = files.status
    line = f"{files.label} is {status.state}"
    if status.text:
        line += f": {status.text}"
    if status.state != "done":
        total = "" if status.steps is None else f" of {status.steps:,}"
        step = "no update recorded yet" if status.step is None else f"update {status.step:,}{total}"
        line += f"; {step}"
        if status.idle_s is not None:
            line += f", last record {format_duration(status.idle_s)} ago"
    return line


def result_table(runs: Sequence[Files], summaries: Sequence[dict]) -> Table:
    """Return a table with one row per run, or, for a single run, one row per value.

    Values that no run has are left out.
    """
    rows = [_row(files, summary) for files, summary in zip(runs, summaries, strict=True)]
    names = list(dict.fromkeys(name for row in rows for name in row if row[name] is not None))
    body = [[format_value(row.get(name)) for name in names] for row in rows]
    if len(rows) == 1:
        return Table([list(pair) for pair in zip(names, body[0], strict=True)], SOURCE)
    return Table([names, *body], SOURCE)


def _row(files: Files, summary: dict) -> dict[str, Any]:
    """Return the cells of a run by column."""
    validation = summary["validation"] or {}
    layers = _layers(files)
    tokens = summary["tokens"]
    row = {
        "run": summary["run"],
        "state": summary["state"],
        "updates": summary["updates"],
        "tokens": None if tokens is None else int(tokens),
        "parameters": summary.get("parameters"),
        "validation loss": validation.get("loss"),
        "perplexity": finite_or_none(validation.get("perplexity")),
        "bits per byte": validation.get("bits_per_byte"),
    }
    for name, scores in (validation.get("sources") or {}).items():
        row[f"perplexity of {name}"] = get_nested(scores, "perplexity")
    row |= {f"{name} baseline": value for name, value in files.baselines.items()}
    if files.baselines and row["perplexity"]:
        ratio = row["perplexity"] / min(files.baselines.values())
        side = "below" if ratio < 1 else "NOT below"
        row["against the better baseline"] = f"{side}: ×{ratio:.2f}"
    row |= {
        "training loss": summary["training_loss"],
        "tokens/s": summary["tokens_per_s"],
        "MFU": summary["mfu"],
        "training s": summary["training_seconds"],
    }
    for name, title in (("ℓ*", "ℓ* mean"), ("evaluations", "evaluations (training)")):
        row[name] = layers[title].mean() if title in layers else None
    title = "not solved (training)"
    row["failed"] = layers[title].max() if title in layers else None
    return row


def layer_tables(runs: Sequence[Files]) -> tuple[list[Table], list[str]]:
    """Return a table of ℓ* and solver work for each run with fixed-point layers, and notes."""
    tables, lines = [], []
    for files in runs:
        layers = _layers(files)
        if layers.empty:
            continue
        rows = [[name, *map(format_value, row)] for name, row in zip(layers.index, layers.values)]
        title = "Layers" if len(runs) == 1 else f"Layers of {files.label}"
        source = "metrics.jsonl: the last `probe`, `evaluations` and `failed`"
        tables.append(Table([["layer", *layers], *rows], source, title))
        if OTHER_SOLUTION in layers and (layers[OTHER_SOLUTION] > OTHER_SOLUTION_SHARE).any():
            lines.append(f"{files.label}: {OTHER_SOLUTION_NOTE}")
    return tables, lines


def score_tables(runs: Sequence[Files]) -> list[Table]:
    """Return a table of the scores of `fprnn eval`, with one row per task and metric."""
    cells = {files.label: _scores(files) for files in runs}
    rows = list(dict.fromkeys(row for scores in cells.values() for row in scores))
    body = [[*row, *(scores.get(row, NO_VALUE) for scores in cells.values())] for row in rows]
    source = "eval/results.json of the run, or of its export: value ± standard error"
    return [Table([["task", "metric", *cells], *body], source, "Scores")] if rows else []


def _scores(files: Files) -> dict[tuple[str, str], str]:
    """Return the scores of a run by task and metric, with an arrow in the better direction."""
    cells = {}
    for task, metrics in files.tasks.items():
        for metric, score in metrics.items():
            is_higher_better = score.get("higher_is_better")
            arrow = ""
            if isinstance(is_higher_better, bool):
                arrow = " ↑" if is_higher_better else " ↓"
            value, error = finite_or_none(score["value"]), finite_or_none(score.get("stderr"))
            text = format_value(value)
            if value is not None and error:
                text = f"{value:.4f} ± {error:.4f}"
            limit = "" if files.limit is None else f" ({files.limit} documents)"
            cells[task, metric + arrow] = text + limit
    return cells


def event_tables(runs: Sequence[Files]) -> list[Table]:
    """Return a table of the last MAX_EVENTS rollbacks and ended curriculum stages."""
    rows = []
    for files in runs:
        for record in files.records:
            start = [files.label, format_value(record["step"])]
            if reason := get_nested(record, "rollback", "why"):
                rows.append([*start, "rollback", str(reason)])
            if get_nested(record, "curriculum", "ended"):
                stage, answers = (get_nested(record, "curriculum", k) for k in ("stage", "answers"))
                text = f"stage {stage} is learned, answers {format_value(answers)}"
                rows.append([*start, "curriculum", text])
    head = ["run", "update", "event", "reason"]
    source = "metrics.jsonl: `rollback`, `curriculum`"
    return [Table([head, *rows[-MAX_EVENTS:]], source, "Events", has_words=True)] if rows else []


def config_tables(runs: Sequence[Files]) -> list[Table]:
    """Return a table of the keys that differ between runs, or, for a single run, from defaults."""
    columns = {files.label: files.config for files in runs}
    if len(runs) == 1:
        columns = {"value": runs[0].config, "default": runs[0].defaults}
    keys = sorted({key for column in columns.values() for key in column} - {"name", "out_dir"})
    rows = [
        [key, *(format_config_value(c[key]) if key in c else NO_VALUE for c in columns.values())]
        for key in keys
    ]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    source = "config.yaml; keys with equal values are left out"
    return [Table([["key", *columns], *rows], source, has_words=True)] if rows else []
