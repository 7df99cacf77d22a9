"""Files of a run directory, read for a report. The run may be running, finished or failed."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lm.common.errors import ConfigError
from lm.common.files import DamagedError, check_types, printable, read_mapping
from lm.config import load as config
from lm.config.yaml_text import load_tree
from lm.report.status import short_names
from lm.runs.metrics import read_log
from lm.runs.run_dir import RunDir, RunDirError, flatten_config
from lm.runs.status import Status, is_number, run_status

MAX_STEP = 2**53  # a record with a larger update number is damaged
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
        defaults: Defaults by dotted keys; empty if the configuration does not fit the schema.
        solves: True if the model has a fixed-point layer; None if the configuration is damaged.
        result: Numbers of a finished run, otherwise empty.
        tasks: Scores of `fprnn eval` by task.
        limit: Documents per task of `fprnn eval`; None for all.
        texts: File name → text of the other files.
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
        pairs = ((record["step"], get_nested(record, *keys)) for record in self.records)
        return {step: value for step, value in pairs if value is not None}

    def column(self, *keys: str) -> pd.Series:
        """Return the numbers under nested keys by update, with NaN for other values."""
        values = {step: finite_or_none(value) for step, value in self.find(*keys).items()}
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
        return {name: value for name, value in items if (finite_or_none(value) or 0) > 0}

    def layers(self, *keys: str) -> dict[str, pd.Series]:
        """Return the numbers of each layer by update.

        Records of a hybrid name their layers under `layers`; in other records they are counted
        from 0. A record with a wrong number of values has NaN.
        """
        values = self.find(*keys)
        names_by_step = self.find(*keys[:-1][:1], "layers")
        rows = {}
        for step, row in values.items():
            row = row if isinstance(row, list) else []
            names = names_by_step.get(step, list(range(len(row))))
            fits = isinstance(names, list) and len(names) == len(row)
            rows[step] = dict(zip(map(str, names), map(finite_or_none, row))) if fits else {}
        frame = pd.DataFrame(list(rows.values()), list(rows), dtype=float).rename_axis("update")
        names = sorted((name for name in frame if name.isdigit()), key=int)
        return {f"layer {name}": frame[name] for name in names}

    def names(self, keys: Sequence[str], leaf: Sequence[str]) -> dict[str, pd.Series]:
        """Return the numbers of each name in a mapping by update, except names with only zeros."""
        mappings = [value for value in self.find(*keys).values() if isinstance(value, dict)]
        names = dict.fromkeys(name for mapping in mappings for name in mapping)
        columns = {name: self.column(*keys, name, *leaf) for name in names}
        return {name: values for name, values in columns.items() if values.fillna(0).any()}


def finite_or_none(value: object) -> float | int | None:
    """Return a finite number unchanged, and None for anything else."""
    return value if is_number(value) else None


def get_nested(record: object, *keys: str) -> Any:
    """Return the value under nested keys of a record, or None."""
    for key in keys:
        record = record.get(key) if isinstance(record, dict) else None
    return record


def read_all(folders: Sequence[Path | str]) -> list[Files]:
    """Read run directories.

    Raises:
        RunDirError: If one of them is no run or a run of the synthetic suite, or is given twice.
    """
    paths = [Path(folder) for folder in folders]
    resolved = [path.resolve() for path in paths]
    for i, path in enumerate(paths):
        if resolved[i] in resolved[:i]:
            raise RunDirError(f"{path} is given twice: name each run once")
    names = short_names([str(path) for path in paths])
    now = time.time()
    return [read_run(path, encodable(names[str(path)]), now) for path in paths]


def read_run(path: Path, label: str, now: float) -> Files:
    """Read a run directory.

    Args:
        path: The directory.
        label: Name of the run in the report.
        now: Current time in Unix seconds.

    Raises:
        RunDirError: As in `read_all`.
    """
    run = RunDir(path)
    if not run.holds_run:
        raise RunDirError(f"{run} holds no run (it has no config.yaml)")
    remarks: list[str] = []
    records = _records(run, remarks)
    settings, defaults, solves = _config(run, remarks)
    tasks, limit = _scores(run, remarks)
    sources = [*run.data.glob("corpus.json"), *run.data.glob("*/corpus.json")]
    text_files = [run.config, run.environment, run.init_from, run.deepspeed, *sorted(sources)]
    texts = {str(p.relative_to(run.path)): _text(p) for p in text_files if p.is_file()}
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
    """Return result.json of a finished run; add a remark if it is damaged."""
    if not run.is_finished:
        return {}
    try:
        result = run.read_result(RESULT)
        check_types(run.result, result, KINDS)
    except (DamagedError, RunDirError) as e:
        remarks.append(str(e))
        return {}
    return result


def _scores(run: RunDir, remarks: list[str]) -> tuple[dict[str, dict], int | None]:
    """Return the metrics of each task in eval/results.json, and the limit of documents."""
    results = read_mapping(run.scores)
    if results is None:
        return {}, None
    try:
        scores = {name: dict(task["metrics"]) for name, task in results["tasks"].items()}
        for metrics in scores.values():
            for metric in metrics.values():
                metric["value"]
    except (AttributeError, LookupError, TypeError, ValueError):
        remarks.append(
            f"{run.scores} is damaged: each task must have metrics, and each metric a value"
        )
        return {}, None
    limit = results.get("limit")
    return scores, limit if isinstance(limit, int) else None


def _records(run: RunDir, remarks: list[str]) -> list[dict]:
    """Return the records of a run in the order of their updates."""
    log = read_log(run.path)
    records = sorted((r for r in log.records if r["step"] <= MAX_STEP), key=lambda r: r["step"])
    if unread_count := log.unread + len(log.records) - len(records):
        remarks.append(
            f"{run.metrics.name}: {unread_count} lines are skipped (damaged, cut short when the"
            " process was killed, or just being written)"
        )
    return records


def encodable(text: str) -> str:
    """Return a text without characters that UTF-8 cannot encode, such as bytes of file names."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _config(run: RunDir, remarks: list[str]) -> tuple[dict, dict, bool | None]:
    """Return configuration and defaults by dotted keys, and whether there are fixed-point layers.

    Keys that were added after the run have their defaults. If the configuration does not fit the
    schema, a remark is added, and the report only contains its text.

    Raises:
        RunDirError: If it is a run of the synthetic suite.
    """
    try:
        tree = load_tree(run.config)
        if "task" in tree:
            raise RunDirError(
                f"{run} is a run of the synthetic suite: use `fprnn synthetic report`"
            )
        cfg = config.build(tree, str(run.config))
    except ConfigError as e:
        remarks.append(f"config.yaml is damaged, or does not fit the schema of this version: {e}")
        return {}, {}, None
    defaults = flatten_config(config.build({}))
    return flatten_config(cfg), defaults, cfg.model.has_fixed_point


def format_config_value(value: object) -> str:
    """Return a value of a configuration as text on one line, as JSON or a string without quotes."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _text(path: Path) -> str:
    """Return the text of a file, without control characters."""
    return printable(path.read_bytes().decode("utf-8", errors="replace"))
