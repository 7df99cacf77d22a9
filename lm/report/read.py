"""Files of a run directory that a report reads; the run may still train, or may have failed."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lm.common.errors import ConfigError
from lm.common.files import DamagedError, check_kinds, printable, read_mapping
from lm.config import load as config
from lm.config.yaml_text import load_tree
from lm.report.status import short_names
from lm.runs.metrics import read_log
from lm.runs.run_dir import RunDir, RunDirError, flatten_config
from lm.runs.status import Status, is_number, run_status

LAST_STEP = 2**53  # a record of a later update is damaged
RESULT = ("updates", "tokens", "training_seconds", "tokens_per_s", "validation")
KINDS: dict = dict.fromkeys(("updates", "tokens", "parameters", "validation.tokens"), int)
KINDS |= dict.fromkeys(("training_seconds", "tokens_per_s", "validation.loss"), float)
KINDS |= {"validation": dict, "validation.perplexity": float, "validation.bits_per_byte": float}
KINDS |= {"validation.sources": dict, "validation.sources.*": dict}


@dataclass(frozen=True)
class Files:
    """Contents of a run directory.

    Attributes:
        label: Name of the run in the report.
        run: The directory.
        status: State of the run (`lm.runs.status`).
        records: Records of metrics.jsonl in the order of their updates.
        config: Configuration by dotted keys.
        defaults: Defaults of the schema by dotted keys; empty if the configuration is of another.
        solves: Whether the model has a fixed-point layer; None if the configuration is damaged.
        result: Numbers of a finished run, else empty.
        tasks: Scores of `fprnn eval` by task.
        limit: Documents per task, if `fprnn eval` was limited.
        texts: Texts of the other files by their names.
        remarks: Sentences on damaged files.
    """

    label: str
    run: RunDir
    status: Status
    records: list[dict]
    config: dict[str, Any]
    defaults: dict[str, Any]
    solves: bool | None
    result: dict
    tasks: dict[str, dict]
    limit: int | None
    texts: dict[str, str]
    remarks: list[str]

    def find(self, *keys: str) -> dict[int, Any]:
        """Return the values under nested keys by update."""
        found = ((record["step"], nested(record, *keys)) for record in self.records)
        return {step: value for step, value in found if value is not None}

    def column(self, *keys: str) -> pd.Series:
        """Return the numbers under nested keys by update, NaN for what is no finite number."""
        values = {step: number(value) for step, value in self.find(*keys).items()}
        return pd.Series(values, dtype=float).rename_axis("update")

    def last(self, *keys: str) -> float | None:
        """Return the last finite number under nested keys, or None."""
        values = self.column(*keys).dropna()
        return None if values.empty else float(values.iloc[-1])

    @property
    def baselines(self) -> dict[str, float]:
        """Perplexities of the n-gram models by name."""
        last = next(reversed(self.find("baselines").values()), None)
        items = last.items() if isinstance(last, dict) else ()
        return {name: value for name, value in items if (number(value) or 0) > 0}

    def layers(self, *keys: str) -> dict[str, pd.Series]:
        """Return the numbers of each layer by update.

        The records of a hybrid name their layers under `layers`; others count them from 0. A record
        without one number for each layer has NaN.
        """
        values = self.find(*keys)
        names_by_step = self.find(*keys[:-1][:1], "layers")
        rows = {}
        for step, row in values.items():
            row = row if isinstance(row, list) else []
            names = names_by_step.get(step, list(range(len(row))))
            fits = isinstance(names, list) and len(names) == len(row)
            rows[step] = dict(zip(map(str, names), map(number, row))) if fits else {}
        frame = pd.DataFrame(list(rows.values()), list(rows), dtype=float).rename_axis("update")
        names = sorted((name for name in frame if name.isdigit()), key=int)
        return {f"layer {name}": frame[name] for name in names}

    def names(self, keys: Sequence[str], leaf: Sequence[str]) -> dict[str, pd.Series]:
        """Return the numbers of each name of a mapping by update, without names of only zeros."""
        mappings = [value for value in self.find(*keys).values() if isinstance(value, dict)]
        names = dict.fromkeys(name for mapping in mappings for name in mapping)
        columns = {name: self.column(*keys, name, *leaf) for name in names}
        return {name: values for name, values in columns.items() if values.fillna(0).any()}


def number(value: object) -> float | int | None:
    """Return a finite number as it is, and None for anything else."""
    return value if is_number(value) else None


def nested(record: object, *keys: str) -> Any:
    """Return the value under nested keys of a record, or None."""
    for key in keys:
        record = record.get(key) if isinstance(record, dict) else None
    return record


def read_all(folders: Sequence[Path | str]) -> list[Files]:
    """Read run directories.

    Raises:
        RunDirError: If one holds no run, or a run of the synthetic suite, or is given twice.
    """
    paths = [Path(folder) for folder in folders]
    resolved = [path.resolve() for path in paths]
    for i, path in enumerate(paths):
        if resolved[i] in resolved[:i]:
            raise RunDirError(f"{path} is given twice: name each run once")
    names = short_names([str(path) for path in paths])
    now = time.time()
    return [read(path, encodable(names[str(path)]), now) for path in paths]


def read(path: Path, label: str, now: float) -> Files:
    """Read one run directory.

    Args:
        path: The directory.
        label: Name of the run in the report.
        now: Unix seconds.

    Raises:
        RunDirError: As `read_all`.
    """
    run = RunDir(path)
    if not run.holds_run:
        raise RunDirError(f"{run} holds no run (it has no config.yaml)")
    remarks: list[str] = []
    records = _records(run, remarks)
    settings, defaults, solves = _config(run, remarks)
    tasks, limit = _scores(run, remarks)
    sources = [*run.data.glob("corpus.json"), *run.data.glob("*/corpus.json")]
    others = [run.config, run.environment, run.init_from, run.deepspeed, *sorted(sources)]
    texts = {str(p.relative_to(run.path)): _text(p) for p in others if p.is_file()}
    return Files(
        label=label,
        run=run,
        status=run_status(run, now),
        records=records,
        config=settings,
        defaults=defaults,
        solves=solves,
        result=_result(run, remarks),
        tasks=tasks,
        limit=limit,
        texts=texts,
        remarks=remarks,
    )


def _result(run: RunDir, remarks: list[str]) -> dict:
    """Return result.json of a finished run; a damaged one becomes a remark."""
    if not run.is_finished:
        return {}
    try:
        result = run.read_result(RESULT)
        check_kinds(run.result, result, KINDS)
    except (DamagedError, RunDirError) as e:
        remarks.append(str(e))
        return {}
    return result


def _scores(run: RunDir, remarks: list[str]) -> tuple[dict[str, dict], int | None]:
    """Return the metrics of each task of eval/results.json, and the limit of documents."""
    found = read_mapping(run.scores)
    if found is None:
        return {}, None
    try:
        scores = {name: dict(task["metrics"]) for name, task in found["tasks"].items()}
        for metrics in scores.values():
            for metric in metrics.values():
                metric["value"]
    except (AttributeError, LookupError, TypeError, ValueError):
        remarks.append(
            f"{run.scores} is damaged: its tasks must hold metrics, and each metric its value"
        )
        return {}, None
    limit = found.get("limit")
    return scores, limit if isinstance(limit, int) else None


def _records(run: RunDir, remarks: list[str]) -> list[dict]:
    """Return the records of a run in the order of their updates."""
    log = read_log(run.path)
    records = sorted((r for r in log.records if r["step"] <= LAST_STEP), key=lambda r: r["step"])
    if unread := log.unread + len(log.records) - len(records):
        remarks.append(
            f"{run.metrics.name}: lines without a record: {unread} (cut short by a kill, damaged,"
            " or just being written); they are passed over"
        )
    return records


def encodable(text: str) -> str:
    """Return a text without the characters that UTF-8 cannot hold, such as bytes of a file name."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _config(run: RunDir, remarks: list[str]) -> tuple[dict, dict, bool | None]:
    """Return the configuration, the defaults of the schema, and whether a layer is solved.

    A key that is newer than the run has its default. A configuration that the schema does not
    accept is shown only as its text.

    Raises:
        RunDirError: If it is a run of the synthetic suite.
    """
    try:
        tree = load_tree(run.config)
        if "task" in tree:
            raise RunDirError(
                f"{run} holds a run of the synthetic suite: `fprnn synthetic report` draws those"
            )
        cfg = config.build(tree, str(run.config))
    except ConfigError as e:
        remarks.append(f"config.yaml is damaged, or not of this version's schema: {e}")
        return {}, {}, None
    defaults = flatten_config(config.build({}))
    return flatten_config(cfg), defaults, cfg.model.has_fixed_point


def as_written(value: object) -> str:
    """Return a value of a configuration on one line: null, true, text without quotes."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _text(path: Path) -> str:
    """Return the text of a file, without control characters."""
    return printable(path.read_bytes().decode("utf-8", errors="replace"))
