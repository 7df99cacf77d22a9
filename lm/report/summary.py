"""Content of summary.json, and tables of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from lm.common.console import format_duration
from lm.report.read import RunFiles, finite_or_none, format_config_value, get_nested
from lm.runs.metrics import OTHER_SOLUTION_MARK, OTHER_SOLUTION_NOTE, OTHER_SOLUTION_SHARE

NO_VALUE = "–"
MAX_EVENTS = 100  # rows in the table of events
RESULTS_SOURCE = (
    "result.json of a finished run, otherwise the last record of metrics.jsonl with the value:"
    " `step`, `tokens`, `validation`, `tokens_per_s`, `mfu`, `probe.num_iters.mean`, `evaluations`,"
    " `failed`"
)
OTHER_SOLUTION_COLUMN = f"{OTHER_SOLUTION_MARK} share"
# Columns of the table of layers: title → keys in metrics.jsonl.
LAYER_COLUMNS = {
    "ℓ* mean": ("probe", "num_iters", "mean"),
    "ℓ* median": ("probe", "num_iters", "median"),
    "ℓ* max": ("probe", "num_iters", "max"),
    OTHER_SOLUTION_COLUMN: ("probe", "num_iters", "elsewhere"),
    "evaluations (training)": ("evaluations",),
    "not solved (training)": ("failed",),
    "evaluations (evaluation)": ("probe", "evaluations"),
    "not solved (evaluation)": ("probe", "failed"),
}


@dataclass(frozen=True)
class Table:
    """Table of text."""

    rows: list[list[str]]  # cells; the first row contains the titles of the columns
    source: str  # file and keys of the numbers
    title: str = ""  # heading; "" for none
    has_words: bool = False  # True: align left, for words; False: align right, for numbers


def format_value(value: object) -> str:
    """Return a value as text: numbers with six significant digits, NO_VALUE for missing values."""
    if isinstance(value, str):
        return value
    number = finite_or_none(value)
    if number is None:
        return NO_VALUE
    if isinstance(number, int) or abs(number) >= 1e6:
        return f"{number:,.0f}"
    return f"{number:,.6g}"


def summarize(run: RunFiles) -> dict[str, Any]:
    """Return the numbers of a run, which may still train, for summary.json.

    They are the last numbers in metrics.jsonl, and for a finished run those in result.json.
    "config" has the settings that differ from the defaults.
    """
    scores = ("loss", "perplexity", "bits_per_byte")
    summary = {
        "run": run.label,
        "state": run.status.state,
        "updates": run.status.step,
        "tokens": run.last_number("tokens"),
        "training_seconds": run.last_number("spent", "seconds"),
        "tokens_per_s": run.last_number("tokens_per_s"),
        "training_loss": run.last_number("loss"),
        "mfu": run.last_number("mfu"),
        "validation": {name: run.last_number("validation", name) for name in scores},
        **run.result,
    }
    summary.pop("probe", None)  # the numbers of each layer are under "layers"
    if run.baselines:
        summary["baselines"] = run.baselines
    layers = _make_layer_frame(run)
    if not layers.empty:
        layers_with_none = layers.astype(object).where(layers.notna(), None)  # None instead of NaN
        summary["layers"] = layers_with_none.to_dict("index")
    if run.tasks:
        summary["evaluation"] = run.tasks
        summary["evaluation_limit"] = run.limit
    if run.defaults:  # empty if config.yaml is damaged
        pairs = run.config.items()
        summary["config"] = {k: v for k, v in pairs if run.defaults.get(k) != v}
    return summary


def _make_layer_frame(run: RunFiles) -> pd.DataFrame:
    """Return the last numbers of each layer: one row per layer, the columns of LAYER_COLUMNS."""
    columns = {}
    for title, keys in LAYER_COLUMNS.items():
        series_by_layer = run.layer_series(*keys)
        columns[title] = {layer: s.ffill().iloc[-1] for layer, s in series_by_layer.items()}
    return pd.DataFrame({title: values for title, values in columns.items() if values})


def describe_state(run: RunFiles) -> str:
    """Return a sentence such as "demo is running: process 9 on n0; update 40 of 450"."""
    status = run.status
    verb = "has" if status.state == "diverged" else "is"
    line = f"{run.label} {verb} {status.state}"
    if status.text:
        line += f": {status.text}"
    if status.state != "done":
        total = "" if status.steps is None else f" of {status.steps:,}"
        step = "no update recorded yet" if status.step is None else f"update {status.step:,}{total}"
        line += f"; {step}"
        if status.idle_s is not None:
            line += f", last record {format_duration(status.idle_s)} ago"
    return line


def make_result_table(runs: Sequence[RunFiles], summaries: Sequence[dict]) -> Table:
    """Return a table with one row per run, or, for a single run, one row per value.

    Values that no run has are left out.
    """
    rows = [_make_result_row(run, summary) for run, summary in zip(runs, summaries, strict=True)]
    titles = list(dict.fromkeys(title for row in rows for title in row if row[title] is not None))
    cells = [[format_value(row.get(title)) for title in titles] for row in rows]
    if len(rows) == 1:
        title_and_value = [list(pair) for pair in zip(titles, cells[0], strict=True)]
        return Table(title_and_value, RESULTS_SOURCE)
    return Table([titles, *cells], RESULTS_SOURCE)


def _make_result_row(run: RunFiles, summary: dict) -> dict[str, Any]:
    validation = summary["validation"] or {}
    layers = _make_layer_frame(run)
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
    row |= {f"{name} baseline": value for name, value in run.baselines.items()}
    if run.baselines and row["perplexity"]:
        ratio = row["perplexity"] / min(run.baselines.values())
        side = "below" if ratio < 1 else "NOT below"
        row["against the better baseline"] = f"{side}: ×{ratio:.2f}"
    row |= {
        "training loss": summary["training_loss"],
        "tokens/s": summary["tokens_per_s"],
        "MFU": summary["mfu"],
        "training s": summary["training_seconds"],
    }
    # Means over layers; of the share of tokens that were not solved, the maximum over layers.
    for name, title in (("ℓ*", "ℓ* mean"), ("evaluations", "evaluations (training)")):
        row[name] = layers[title].mean() if title in layers else None
    failed = "not solved (training)"
    row["failed"] = layers[failed].max() if failed in layers else None
    return row


def make_layer_tables(runs: Sequence[RunFiles]) -> tuple[list[Table], list[str]]:
    """Return a table of ℓ* and solver work for each run with fixed-point layers, and notes."""
    tables, notes = [], []
    for run in runs:
        layers = _make_layer_frame(run)
        if layers.empty:
            continue
        rows = [[name, *map(format_value, row)] for name, row in zip(layers.index, layers.values)]
        title = "Layers" if len(runs) == 1 else f"Layers of {run.label}"
        source = "metrics.jsonl: the last `probe`, `evaluations` and `failed`"
        tables.append(Table([["layer", *layers], *rows], source, title))
        shares = layers.get(OTHER_SOLUTION_COLUMN)
        if shares is not None and (shares > OTHER_SOLUTION_SHARE).any():
            notes.append(f"{run.label}: {OTHER_SOLUTION_NOTE}")
    return tables, notes


def make_score_tables(runs: Sequence[RunFiles]) -> list[Table]:
    """Return a table of the scores of `fprnn eval`, one row per task and metric, or []."""
    scores_by_run = {run.label: _format_scores(run) for run in runs}
    metrics = list(dict.fromkeys(key for scores in scores_by_run.values() for key in scores))
    rows = [
        [task, metric, *(scores.get((task, metric), NO_VALUE) for scores in scores_by_run.values())]
        for task, metric in metrics
    ]
    head = ["task", "metric", *scores_by_run]
    source = "eval/results.json of the run, or of its export: value ± standard error"
    return [Table([head, *rows], source, "Scores")] if rows else []


def _format_scores(run: RunFiles) -> dict[tuple[str, str], str]:
    """Return the scores of a run as text, by task and metric; ↑ or ↓ marks the better direction."""
    cells = {}
    for task, metrics in run.tasks.items():
        for metric, score in metrics.items():
            is_higher_better = score.get("higher_is_better")
            arrow = ""
            if isinstance(is_higher_better, bool):
                arrow = " ↑" if is_higher_better else " ↓"
            value, stderr = finite_or_none(score["value"]), finite_or_none(score.get("stderr"))
            text = format_value(value)
            if value is not None and stderr:
                text = f"{value:.4f} ± {stderr:.4f}"
            limit = "" if run.limit is None else f" ({run.limit} documents)"
            cells[task, metric + arrow] = text + limit
    return cells


def make_event_tables(runs: Sequence[RunFiles]) -> list[Table]:
    """Return a table of the last MAX_EVENTS rollbacks and ended curriculum stages, or []."""
    rows = []
    for run in runs:
        for record in run.records:
            row_start = [run.label, format_value(record["step"])]
            if reason := get_nested(record, "rollback", "why"):
                rows.append([*row_start, "rollback", str(reason)])
            if get_nested(record, "curriculum", "ended"):
                stage = get_nested(record, "curriculum", "stage")
                probability = format_value(get_nested(record, "curriculum", "answers"))
                text = f"stage {stage} ended with probability {probability} of right answers"
                rows.append([*row_start, "curriculum", text])
    head = ["run", "update", "event", "reason"]
    source = "metrics.jsonl: `rollback`, `curriculum`"
    return [Table([head, *rows[-MAX_EVENTS:]], source, "Events", has_words=True)] if rows else []


def make_config_tables(runs: Sequence[RunFiles]) -> list[Table]:
    """Return a table of the keys that differ between runs, or for a single run from the defaults.

    Return [] if no key differs.
    """
    configs = {run.label: run.config for run in runs}
    if len(runs) == 1:
        configs = {"value": runs[0].config, "default": runs[0].defaults}
    keys = sorted({key for config in configs.values() for key in config} - {"name", "out_dir"})
    rows = []
    for key in keys:
        values = [format_config_value(c[key]) if key in c else NO_VALUE for c in configs.values()]
        if len(set(values)) > 1:
            rows.append([key, *values])
    source = "config.yaml; keys with equal values are left out"
    return [Table([["key", *configs], *rows], source, has_words=True)] if rows else []
