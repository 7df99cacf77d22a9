"""What was trained: the keys that differ between runs, and the whole of each configuration."""

from __future__ import annotations

from collections.abc import Sequence

from lm.report.sections.blocks import NO_VALUE, Block, Folded, Notes, Section, Table
from lm.report.sections.read import WHERE, Files, as_written


def settings(runs: Sequence[Files]) -> Section:
    """Of several runs the keys that differ; of one those that are not the schema's defaults; and
    the resolved configuration of each, folded."""
    blocks: list[Block] = [different(runs) if len(runs) > 1 else changed(runs[0])]
    for files in runs:
        of = f" of {files.label}" if len(runs) > 1 else ""
        blocks.append(Folded(f"The whole configuration{of}", files.config_text))
    return Section("Configuration", blocks)


def different(runs: Sequence[Files]) -> Block:
    """A row for each key in which the runs differ; where they lie is left out."""
    keys = sorted({key for files in runs for key in files.config} - set(WHERE))
    rows = [[key, *(_value(files.config, key) for files in runs)] for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    if not rows:
        return Notes(["The configurations do not differ (but for where the runs lie)."])
    traced = "config.yaml of each run, by the schema; keys that are equal are left out"
    return Table([["key", *(files.label for files in runs)], *rows], traced, words=True)


def changed(files: Files) -> Block:
    """A row for each key that is not the schema's default."""
    if not files.defaults:
        return Notes(["Which keys are not the defaults cannot be said of this configuration."])
    keys = sorted((files.config.keys() | files.defaults.keys()) - set(WHERE))
    rows = [[key, _value(files.config, key), _value(files.defaults, key)] for key in keys]
    rows = [row for row in rows if row[1] != row[2]]
    if not rows:
        return Notes(["Every key has its default."])
    traced = "config.yaml, by the schema; keys that have their default are left out"
    return Table([["key", "value", "default"], *rows], traced, words=True)


def _value(config: dict, key: str) -> str:
    return as_written(config[key]) if key in config else NO_VALUE
