"""Sections of the report, from top to bottom."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lm.report.blocks import (
    NO_VALUE,
    Block,
    Notes,
    Section,
    Table,
    Text,
    format_value,
)
from lm.report.curves import figures, having, loss_figure
from lm.report.read import PLACE_KEYS, Files, as_written, flat
from lm.report.summary import describe_state, layer_tables, result_table, score_table

MAX_EVENTS = 100
MAX_SAMPLE = 4000  # characters


def sections(runs: Sequence[Files], summaries: Sequence[dict]) -> list[Section]:
    """Return all sections of the report."""
    return [
        Section("Results", _results(runs, summaries)),
        Section("Loss", [*loss_figure(runs), *figures(runs, "Loss")]),
        Section(
            "Fixed point",
            [*_unsolved(runs), *figures(runs, "Fixed point"), *layer_tables(summaries)],
        ),
        Section("Optimization", [*figures(runs, "Optimization"), *_event_table(runs)]),
        Section("Speed and memory", figures(runs, "Speed and memory")),
        Section("Evaluations", score_table(runs)),
        Section("Samples", _samples(runs)),
        Section("Configuration", _configuration(runs)),
        Section("Provenance", _provenance(runs)),
    ]


def _results(runs: Sequence[Files], summaries: Sequence[dict]) -> list[Block]:
    lines = [describe_state(files) for files in runs]
    lines += [f"{files.label}: {remark}" for files in runs for remark in files.remarks]
    return [Notes(lines), result_table(summaries)]


def _unsolved(runs: Sequence[Files]) -> list[Block]:
    """Return a note on the runs without ℓ*."""
    lines = []
    for files in runs:
        if files.solves is False:
            name = files.config.get("model.layers") or files.config.get("model.name")
            lines.append(f"{files.label} has no solver (`{name}`), and so no ℓ*.")
        elif not any(having(files, key) for key in ("probe", "evaluations")):
            lines.append(f"{files.label}: no record of a solver yet (`probe`, `evaluations`).")
    return [Notes(lines)] if lines else []


def _event_table(runs: Sequence[Files]) -> list[Block]:
    """Return the table of rollbacks and ended stages."""
    rows = [row for files in runs for record in files.records for row in _events(files, record)]
    if not rows:
        return [Notes(["No update was undone (rollback)."])]
    source = "metrics.jsonl: `rollback`, `curriculum`"
    if len(rows) > MAX_EVENTS:
        source += f"; the last {MAX_EVENTS} of {len(rows):,}"
    head = ["run", "update", "what", "why"]
    return [Table([head, *rows[-MAX_EVENTS:]], source, "Events", has_words=True)]


def _events(files: Files, record: dict) -> list[list[str]]:
    """Return the rows of a record: an undone update, an ended stage."""
    start = [files.label, format_value(record["step"])]
    rows = []
    if isinstance(event := record.get("rollback"), dict):
        rows.append([*start, "rollback", str(event.get("why", ""))])
    stage = record.get("curriculum")
    if isinstance(stage, dict) and stage.get("ended"):
        text = (
            f"stage {stage.get('stage')} is learned, answers {format_value(stage.get('answers'))}"
        )
        rows.append([*start, "curriculum", text])
    return rows


def _samples(runs: Sequence[Files]) -> list[Block]:
    blocks: list[Block] = []
    for files in runs:
        if files.sample is not None:
            cut = len(files.sample) > MAX_SAMPLE
            first = f" (the first {MAX_SAMPLE:,} of {len(files.sample):,} characters)" * cut
            blocks += [Notes([f"{files.label}{first}:"]), Text(files.sample[:MAX_SAMPLE])]
    command = "fprnn generate RUN --prompt TEXT > RUN/sample.txt"
    return blocks or [Notes([f"No sample.txt: `{command}` makes it."])]


def _configuration(runs: Sequence[Files]) -> list[Block]:
    """Return the keys that differ between runs, or from the defaults, and the whole of each."""
    names, columns = [files.label for files in runs], [files.config for files in runs]
    if len(runs) == 1 and runs[0].defaults:
        names, columns = ["value", "default"], [runs[0].config, runs[0].defaults]
    keys = sorted({key for column in columns for key in column} - set(PLACE_KEYS))
    rows = [[as_written(c[key]) if key in c else NO_VALUE for c in columns] for key in keys]
    rows = [[key, *row] for key, row in zip(keys, rows, strict=True) if len(set(row)) > 1]
    blocks: list[Block] = [Notes(["No key differs."])]
    if rows:
        source = "config.yaml; keys with equal values are left out"
        blocks = [Table([["key", *names], *rows], source, has_words=True)]
    texts = [Text(files.config_text, f"config.yaml of {files.label}") for files in runs]
    return [*blocks, *texts]


def _provenance(runs: Sequence[Files]) -> list[Block]:
    cells = []
    for files in runs:
        known = {(NO_VALUE, "directory"): str(files.run)}
        sources = {"environment.json": files.environment, **files.corpora}
        sources["init_from.json"] = files.init_from
        for name, mapping in sources.items():
            known |= {(name, key): as_written(value) for key, value in flat(mapping).items()}
        cells.append(known)
    rows = list(dict.fromkeys(row for known in cells for row in known))
    body = [[*row, *(known.get(row, NO_VALUE) for known in cells)] for row in rows]
    head = ["file", "key", *(files.label for files in runs)]
    source = "the files named in the first column; no `commit` if the package was no git checkout"
    blocks: list[Block] = [Table([head, *body], source, has_words=True)]
    for files in runs:
        if files.deepspeed:
            text = json.dumps(files.deepspeed, indent=2, ensure_ascii=False)
            blocks.append(Text(text, f"DeepSpeed's configuration of {files.label}"))
    return blocks
