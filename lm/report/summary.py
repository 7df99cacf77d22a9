"""Numbers of a run: its summary.json, and the tables of results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lm.common.console import duration
from lm.report.blocks import NO_VALUE, Block, Notes, Table, format_value
from lm.report.curves import baselines, last, number
from lm.report.read import Files
from lm.runs.metrics import ELSEWHERE_NOTE, is_elsewhere, marked
from lm.runs.status import num_iters_of

WORK = ("evaluations", "failed", "bisected", "limited", "residual", "adjoint")  # lists per layer
SOURCE = (
    "result.json of a finished run, else the last record of metrics.jsonl with such a value:"
    " `step`, `tokens`, `validation`, `tokens_per_s`, `mfu`, `probe.num_iters.mean`, `evaluations`,"
    " `failed`"
)


def summarize(files: Files) -> dict[str, Any]:
    """Return the numbers of a run, also while it trains.

    Those of result.json replace the last ones of metrics.jsonl.
    """
    recorded = {
        "updates": files.status.step,
        "tokens": last(files, "tokens"),
        "training_seconds": last(files, "spent", "seconds"),
        "tokens_per_s": last(files, "tokens_per_s"),
        "training_loss": last(files, "loss"),
        "mfu": last(files, "mfu"),
        "validation": _last_value(files, "validation", dict) or {},
    }
    summary = {"run": files.label, "state": files.status.state, **recorded, **files.result}
    if losses := baselines(files):
        summary["baselines"] = {name: math.exp(loss) for name, loss in losses.items()}
    summary.pop("probe", None)
    if fixed_point := _fixed_point(files):
        summary["fixed_point"] = fixed_point
    if files.tasks:
        summary["evaluation"] = files.tasks
    return summary


def _last_value(files: Files, key: str, kind: type) -> Any:
    """Return the last value of a key in the result or the records, if it has this type."""
    found = [files.result, *reversed(files.records)]
    return next((value for r in found if isinstance(value := r.get(key), kind)), None)


def _fixed_point(files: Files) -> dict[str, Any]:
    """Return the last probe, and the last training record's numbers per layer as `training`."""
    probe = _last_value(files, "probe", dict) or {}
    if num_iters_of({"probe": probe}) is None:
        probe = {}
    training = {key: value for key in WORK if (value := _last_value(files, key, list))}
    return {**probe, "training": training} if probe or training else {}


def describe_state(files: Files) -> str:
    """Return a sentence such as "demo is running: job 12 on n0; update 40 of 450"."""
    status = files.status
    line = f"{files.label} is {status.state}"
    if status.text:
        line += f": {status.text}"
    if status.state != "done":
        total = "" if status.steps is None else f" of {status.steps:,}"
        step = "no update recorded yet" if status.step is None else f"update {status.step:,}{total}"
        line += f"; {step}"
        if status.seen_s is not None:
            line += f", last record {duration(status.seen_s)} ago"
    return line


def result_table(summaries: Sequence[dict]) -> Table:
    """Return a row for each run; of a single run a row for each of its values.

    Values that no run has are left out.
    """
    rows = [_row(summary) for summary in summaries]
    names = list(dict.fromkeys(name for row in rows for name in row))
    names = [name for name in names if any(row.get(name) is not None for row in rows)]
    body = [[format_value(row.get(name)) for name in names] for row in rows]
    if len(rows) == 1:
        return Table([list(pair) for pair in zip(names, body[0], strict=True)], SOURCE)
    return Table([names, *body], SOURCE)


def _row(summary: dict) -> dict[str, Any]:
    """Return the cells of a run by column."""
    validation = summary["validation"] or {}
    fixed_point = summary.get("fixed_point", {})
    training = fixed_point.get("training", {})
    row = {
        "run": summary["run"],
        "state": summary["state"],
        "updates": number(summary["updates"]),
        "tokens": _whole(summary["tokens"]),
        "parameters": number(summary.get("parameters")),
        "validation loss": number(validation.get("loss")),
        "perplexity": number(validation.get("perplexity")),
        "bits per byte": number(validation.get("bits_per_byte")),
    }
    sources = validation.get("sources")
    for name, scores in sources.items() if isinstance(sources, dict) else ():
        if isinstance(scores, dict):
            row[f"perplexity of {name}"] = number(scores.get("perplexity"))
    baseline = summary.get("baselines") or {}
    known = {name: value for name, value in baseline.items() if (number(value) or 0) > 0}
    row |= {f"{name} baseline": value for name, value in known.items()}
    if known and row["perplexity"]:
        ratio = row["perplexity"] / min(known.values())
        side = "below" if ratio < 1 else "NOT below"
        row["against the better baseline"] = f"{side}: ×{ratio:.2f}"
    return row | {
        "training loss": number(summary["training_loss"]),
        "tokens/s": number(summary["tokens_per_s"]),
        "MFU": number(summary["mfu"]),
        "training s": number(summary["training_seconds"]),
        "ℓ*": _mean(fixed_point.get("num_iters", {}).get("mean")),
        "evaluations": _mean(training.get("evaluations")),
        "failed": max(_numbers(training.get("failed")), default=None),
    }


def _whole(value: object) -> int | None:
    known = number(value)
    return None if known is None else int(known)


def _mean(values: object) -> float | None:
    known = _numbers(values)
    return sum(known) / len(known) if known else None


def _numbers(values: object) -> list[float]:
    entries = values if isinstance(values, list) else []
    return [value for entry in entries if (value := number(entry)) is not None]


def layer_tables(summaries: Sequence[dict]) -> list[Block]:
    """Return a table of ℓ* and work per layer for each run with fixed-point layers."""
    blocks: list[Block] = []
    for summary in summaries:
        counts = summary.get("fixed_point", {}).get("num_iters")
        if counts is None:
            continue
        fixed_point = summary["fixed_point"]
        layers = fixed_point.get("layers")
        if not isinstance(layers, list):
            layers = list(range(len(counts["mean"])))
        columns: dict[str, Sequence[object]] = {
            "layer": [str(layer) for layer in layers],
            "ℓ* mean": marked(counts),
            "median": _numbers(counts.get("median")),
            "max": _numbers(counts.get("max")),
        }
        for name, scores in (("training", fixed_point["training"]), ("evaluation", fixed_point)):
            columns[f"evaluations ({name})"] = _numbers(scores.get("evaluations"))
            columns[f"not solved ({name})"] = _numbers(scores.get("failed"))
        columns = {name: column for name, column in columns.items() if column}
        rows = [[_cell(column, i) for column in columns.values()] for i in range(len(layers))]
        title = "Layers" if len(summaries) == 1 else f"Layers of {summary['run']}"
        source = "metrics.jsonl: the last `probe`, `evaluations` and `failed`"
        blocks.append(Table([list(columns), *rows], source, title))
        if any(is_elsewhere(counts)):
            share = max(counts["elsewhere"])
            note = (
                f"{summary['run']}: {ELSEWHERE_NOTE} (up to {share:.0%} of the tokens of a layer)."
            )
            blocks.append(Notes([note]))
    return blocks


def _cell(column: Sequence[object], index: int) -> str:
    return format_value(column[index]) if index < len(column) else NO_VALUE


def score_table(runs: Sequence[Files]) -> list[Block]:
    """Return the scores of `fprnn eval`: a row for each task and metric."""
    cells = {files.label: _scores(files) for files in runs}
    rows = list(dict.fromkeys(row for scores in cells.values() for row in scores))
    blocks: list[Block] = []
    if rows:
        head = ["task", "metric", *cells]
        body = [[*row, *(scores.get(row, NO_VALUE) for scores in cells.values())] for row in rows]
        source = "eval/results.json of the run, else of its export: value ± standard error"
        blocks.append(Table([head, *body], source, "Scores"))
    missing = [label for label, scores in cells.items() if not scores]
    if missing:
        names = "" if len(runs) == 1 else f" of {', '.join(missing)}"
        command = "fprnn eval RUN --tasks catbabi_mini"
        blocks.append(Notes([f"No evaluation{names}: `{command}` makes one."]))
    return blocks


def _scores(files: Files) -> dict[tuple[str, str], str]:
    """Return the scores of a run as text by task and metric; an arrow says which way is better."""
    cells = {}
    for task, metrics in files.tasks.items():
        for metric, score in metrics.items():
            is_higher_better = score.get("higher_is_better")
            arrow = ""
            if isinstance(is_higher_better, bool):
                arrow = " ↑" if is_higher_better else " ↓"
            value, error = number(score["value"]), number(score.get("stderr"))
            text = NO_VALUE if value is None else format_value(value)
            if value is not None and error:
                text = f"{value:.4f} ± {error:.4f}"
            limit = "" if files.limit is None else f" ({files.limit} documents)"
            cells[task, metric + arrow] = text + limit
    return cells
