"""How far each run is, and what it has reached: one row a run."""

from __future__ import annotations

from collections.abc import Sequence

from lm.common.console import duration
from lm.report.sections.blocks import Block, Notes, Section, Table, shown
from lm.report.sections.read import Files
from lm.report.sections.series import last, number, within
from lm.runs.metrics import ELSEWHERE_NOTE, is_elsewhere
from lm.runs.status import num_iters_of

TRACED = (
    "result.json of a finished run, else the last record of metrics.jsonl with such a value:"
    " `step`, `tokens`, `validation`, `tokens_per_s`, `mfu`, `probe.num_iters.mean`, `evaluations`,"
    " `failed` (the last three over layers: mean, mean, most)"
)


def overview(runs: Sequence[Files]) -> Section:
    """The state of each run in a sentence, and a table of results."""
    lines = [state(files) for files in runs]
    lines += [f"{_named(runs, files)}{remark}" for files in runs for remark in files.remarks]
    blocks: list[Block] = [Notes(lines), results(runs), *elsewhere_notes(runs)]
    return Section("Results", blocks)


def results(runs: Sequence[Files]) -> Table:
    """A row for each run; of one run alone, a row for each of its values. What no run has is left
    out."""
    rows = [_row(files) for files in runs]
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    body = [[shown(row[name]) for name in names] for row in rows]
    if len(runs) == 1:
        return Table([list(pair) for pair in zip(names, body[0], strict=True)], TRACED)
    return Table([names, *body], TRACED)


def _named(runs: Sequence[Files], files: Files) -> str:
    return f"{files.label}: " if len(runs) > 1 else ""


def state(files: Files) -> str:
    """Such as "demo is running: job 12 on n0; update 40 of 450, last record 3 s ago"."""
    status = files.status
    line = f"{files.label} is {status.state}"
    if status.text:
        line += f": {status.text}"
    if status.state != "done":
        of = "" if status.steps is None else f" of {status.steps:,}"
        at = "no update recorded yet" if status.step is None else f"update {status.step:,}{of}"
        line += f"; {at}"
        if status.seen_s is not None:
            line += f", last record {duration(status.seen_s)} ago"
    return line


def _row(files: Files) -> dict[str, float | str | None]:
    result, records = files.result, files.records
    reached = latest_validation(files)
    probe = last_probe(files)
    return {
        "run": files.label,
        "state": files.status.state,
        "updates": number(result.get("updates")) or files.status.step,
        "tokens": number(result.get("tokens")) or last(records, "tokens"),
        "parameters": number(result.get("parameters")),
        "validation loss": number(reached.get("loss")),
        "perplexity": number(reached.get("perplexity")),
        "bits per byte": number(reached.get("bits_per_byte")),
        "training loss": last(records, "loss"),
        "tokens/s": number(result.get("tokens_per_s")) or last(records, "tokens_per_s"),
        "MFU": last(records, "mfu"),
        "training s": number(result.get("training_seconds")) or last(records, "spent", "seconds"),
        "ℓ*": _mean(within(probe, "num_iters", "mean")),
        "evaluations": _mean(_last_list(records, "evaluations")),
        "failed": _most(_last_list(records, "failed")),
    }


def elsewhere_notes(runs: Sequence[Files]) -> list[Block]:
    """A line for each run whose ℓ* is not of its answers."""
    lines = []
    for files in runs:
        counts = num_iters_of({"probe": last_probe(files)})
        if counts and any(is_elsewhere(counts)):
            share = max(counts["elsewhere"])
            lines.append(f"{files.label}: {ELSEWHERE_NOTE} (up to {share:.0%} of a layer's).")
    return [Notes(lines)] if lines else []


def latest_validation(files: Files) -> dict:
    """Of the finished run, or the last one on the way; {} before the first."""
    found = [files.result, *reversed(files.records)]
    return next((v for r in found if isinstance(v := r.get("validation"), dict)), {})


def last_probe(files: Files) -> dict:
    """Of the finished run, or the last one on the way; {} of a model without a solver."""
    found = [files.result, *reversed(files.records)]
    return next((p for r in found if isinstance(p := r.get("probe"), dict)), {})


def _last_list(records: Sequence[dict], key: str) -> list | None:
    return next((r[key] for r in reversed(records) if isinstance(r.get(key), list)), None)


def _mean(values: object) -> float | None:
    known = _numbers(values)
    return sum(known) / len(known) if known else None


def _most(values: object) -> float | None:
    return max(_numbers(values), default=None)


def _numbers(values: object) -> list[float]:
    of = values if isinstance(values, list) else []
    return [value for v in of if (value := number(v)) is not None]
