"""What a run is judged by beside its loss, and where it comes from: scores, sample, provenance."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lm.report.sections.blocks import (
    NO_VALUE,
    Block,
    Folded,
    Notes,
    Preformatted,
    Section,
    Table,
    shown,
    with_error,
)
from lm.report.sections.read import Files, as_written, flat
from lm.report.sections.series import number

SAMPLE = 4000  # characters of a sample that are shown


def evaluations(runs: Sequence[Files]) -> Section:
    """Return what `fprnn eval` found of each run: a row for each task and metric."""
    place = "eval/results.json of the run, else of its export"
    cells = {files.label: _scores(files) for files in runs}
    rows = list(dict.fromkeys(row for of in cells.values() for row in of))
    blocks: list[Block] = []
    if rows:
        head = ["task", "metric", *cells]
        body = [[*row, *(of.get(row, NO_VALUE) for of in cells.values())] for row in rows]
        traced = f"{place}: `tasks`; value ± standard error; (n documents) where there was a limit"
        blocks.append(Table([head, *body], traced))
    missing = [label for label, of in cells.items() if not of]
    if missing:
        names = "" if len(runs) == 1 else f" of {', '.join(missing)}"
        command = "fprnn eval RUN --tasks catbabi_mini"
        blocks.append(Notes([f"No evaluation{names}: `{command}` makes one."]))
    return Section("Evaluations", blocks)


def _scores(files: Files) -> dict[tuple[str, str], str]:
    """{(task, metric): "0.24 ± 0.06"} of whatever part of the file is as it should be."""
    cells, tasks = {}, files.scores.get("tasks")
    limit = number(files.scores.get("limit"))
    for name, task in tasks.items() if isinstance(tasks, dict) else ():
        metrics = task.get("metrics") if isinstance(task, dict) else None
        for metric, of in metrics.items() if isinstance(metrics, dict) else ():
            if isinstance(of, dict) and "value" in of:
                cells[name, metric + _arrow(of)] = _score(of, limit)
    return cells


def _arrow(of: dict) -> str:
    better = of.get("higher_is_better")
    return (" ↑" if better else " ↓") if isinstance(better, bool) else ""


def _score(of: dict, limit) -> str:
    value, error = number(of["value"]), number(of.get("stderr"))
    text = "not finite" if value is None else shown(value)
    if value is not None and error:
        text = with_error(value, error)
    return text if limit is None else f"{text} ({limit} documents)"


def samples(runs: Sequence[Files]) -> Section:
    """sample.txt of each run."""
    blocks: list[Block] = []
    for files in runs:
        if files.sample is None:
            continue
        if len(runs) > 1:
            blocks.append(Notes([f"{files.label}:"]))
        cut = files.sample[:SAMPLE]
        blocks.append(Preformatted(cut))
        if len(cut) < len(files.sample):
            blocks.append(Notes([f"The first {SAMPLE:,} of {len(files.sample):,} characters."]))
    if not blocks:
        command = "fprnn generate RUN/hf --prompt TEXT --out RUN/sample.txt"
        blocks.append(Notes([f"No sample.txt: `{command}` makes it."]))
    return Section("Samples", blocks)


def provenance(runs: Sequence[Files]) -> Section:
    """Versions, hardware and data of each run; DeepSpeed's configuration, folded."""
    blocks: list[Block] = []
    of_all = [_known(files) for files in runs]
    rows = list(dict.fromkeys(row for known in of_all for row in known))
    body = [[*row, *(known.get(row, NO_VALUE) for known in of_all)] for row in rows]
    head = ["file", "key", *(files.label for files in runs)]
    blocks.append(Table([head, *body], "the files named in the first column", words=True))
    if not all(files.environment.get("commit") for files in runs):
        why = "the package was no git checkout, or is older than this record"
        blocks.append(Notes([f"Where environment.json has no `commit`, {why}."]))
    for files in runs:
        if files.deepspeed:
            of = f" of {files.label}" if len(runs) > 1 else ""
            text = json.dumps(files.deepspeed, indent=2, ensure_ascii=False)
            blocks.append(Folded(f"DeepSpeed's configuration{of}", text))
    return Section("Provenance", blocks)


def _known(files: Files) -> dict[tuple[str, str], str]:
    sources = {
        "environment.json": files.environment,
        **files.corpora,
        "init_from.json": files.init_from,
    }
    cells = {(NO_VALUE, "directory"): str(files.run)}
    for name, of in sources.items():
        cells |= {(name, key): as_written(value) for key, value in flat(of).items()}
    return cells
