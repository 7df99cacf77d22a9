"""Contents of a run directory, for a report. The run may still train, be finished or have failed.

Damaged files and records are left out, and a remark names them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel, ValidationError

from lm.common.errors import ConfigError
from lm.common.files import DamagedError, printable, read_mapping
from lm.config import load as config
from lm.config.yaml_text import load_tree
from lm.report.status import shorten_paths
from lm.runs.checkpoint import checkpoint_step, list_checkpoints
from lm.runs.metrics import iter_metrics
from lm.runs.run_dir import RunDir, RunDirError, flatten_config
from lm.runs.status import Status, is_number, run_status

MAX_STEP = 2**53  # a record with a larger update number is damaged


class _Scores(BaseModel, strict=True):
    """Types of the scores of a validation."""

    tokens: int | None = None
    loss: float | None = None
    perplexity: float | None = None
    bits_per_byte: float | None = None
    sources: dict[str, dict | None] | None = None


class _Result(BaseModel, strict=True):
    """Types in the result.json of a finished run. Only fields with a default may be missing."""

    updates: int | None
    tokens: int | None
    training_seconds: float | None
    tokens_per_s: float | None
    validation: _Scores | None
    parameters: int | None = None


@dataclass(frozen=True)
class RunFiles:
    """Contents of a run directory."""

    label: str  # name of the run in the report
    directory: RunDir
    status: Status  # state of the run (`lm.runs.status`)
    records: list[dict]  # records of metrics.jsonl in the order of their updates
    config: dict[str, Any]  # configuration by dotted keys
    defaults: dict[str, Any]  # defaults by dotted keys; empty if the configuration is damaged
    has_fixed_point: bool | None  # True for a model with fixed-point layers; None: unknown
    result: dict  # result.json of a finished run, otherwise empty
    tasks: dict[str, dict]  # metrics of `fprnn eval` by task
    limit: int | None  # number of documents per task of `fprnn eval`; None: all
    texts: dict[str, str]  # texts of the other files by their path in the directory
    remarks: list[str]  # sentences on damaged files

    def values_by_step(self, *keys: str) -> dict[int, Any]:
        """Return the values under nested keys of the records, by update."""
        pairs = ((record["step"], get_nested(record, *keys)) for record in self.records)
        return {step: value for step, value in pairs if value is not None}

    def number_series(self, *keys: str) -> pd.Series:
        """Return the numbers under nested keys, by update, with NaN for other values."""
        values = {step: finite_or_none(value) for step, value in self.values_by_step(*keys).items()}
        return pd.Series(values, dtype=float).rename_axis("update")

    def last_number(self, *keys: str) -> float | None:
        """Return the last finite number under nested keys, or None."""
        values = self.number_series(*keys).dropna()
        return None if values.empty else float(values.iloc[-1])

    @property
    def baselines(self) -> dict[str, float]:
        """Perplexities of the n-gram models by name, from their last record."""
        last_record = next(reversed(self.values_by_step("baselines").values()), None)
        items = last_record.items() if isinstance(last_record, dict) else ()
        # A perplexity is positive; leave out anything else as damaged.
        return {name: value for name, value in items if is_number(value) and value > 0}

    def layer_series(self, *keys: str) -> dict[str, pd.Series]:
        """Return the numbers of each fixed-point layer, by update.

        A record has a list of numbers under `keys`, one per layer. The indices of these layers are
        under ("layers",) for keys such as ("failed",), and under ("probe", "layers") for keys such
        as ("probe", "failed"); if absent, they are 0, 1, …. Damaged records become NaN.
        """
        parent_keys = keys[:1] if len(keys) > 1 else ()
        indices_by_step = self.values_by_step(*parent_keys, "layers")
        rows = {}
        for step, numbers in self.values_by_step(*keys).items():
            numbers = numbers if isinstance(numbers, list) else []
            indices = indices_by_step.get(step, list(range(len(numbers))))
            is_intact = isinstance(indices, list) and len(indices) == len(numbers)
            pairs = zip(map(str, indices), map(finite_or_none, numbers)) if is_intact else ()
            rows[step] = dict(pairs)
        frame = pd.DataFrame(list(rows.values()), list(rows), dtype=float).rename_axis("update")
        # A column whose name is not a number has a damaged index.
        columns = sorted((column for column in frame if column.isdigit()), key=int)
        return {f"layer {column}": frame[column] for column in columns}

    def named_series(self, keys: Sequence[str], inner_keys: Sequence[str]) -> dict[str, pd.Series]:
        """Return the numbers of each name, by update, without names that have only zeros.

        Args:
            keys: Nested keys of a mapping from names, such as names of the data's sources.
            inner_keys: Nested keys of the number in the value of a name; empty if the value of a
                name is the number.
        """
        values = self.values_by_step(*keys).values()
        names = dict.fromkeys(name for value in values if isinstance(value, dict) for name in value)
        curves = {name: self.number_series(*keys, name, *inner_keys) for name in names}
        return {name: curve for name, curve in curves.items() if curve.fillna(0).any()}


def finite_or_none(value: object) -> float | int | None:
    """Return a finite number unchanged, and None for anything else."""
    return value if is_number(value) else None


def get_nested(record: object, *keys: str) -> Any:
    """Return the value under nested keys of a record, or None."""
    for key in keys:
        record = record.get(key) if isinstance(record, dict) else None
    return record


def read_all(folders: Sequence[Path | str]) -> list[RunFiles]:
    """Read run directories.

    Raises:
        RunDirError: If a folder is given twice, is no run, or is a run of the synthetic suite.
    """
    paths = [Path(folder) for folder in folders]
    resolved = [path.resolve() for path in paths]
    for i, path in enumerate(paths):
        if resolved[i] in resolved[:i]:
            raise RunDirError(f"{path} is given twice: name each run once")
    names = shorten_paths([str(path) for path in paths])
    return [read_run(path, replace_surrogates(names[str(path)])) for path in paths]


def read_run(path: Path, label: str) -> RunFiles:
    """Read a run directory.

    Args:
        path: The directory.
        label: Name of the run in the report.

    Raises:
        RunDirError: As in `read_all`.
    """
    run = RunDir(path)
    if not run.holds_run:
        raise RunDirError(f"{run} holds no run (it has no config.yaml)")
    remarks: list[str] = []
    records = _read_records(run, remarks)
    settings, defaults, has_fixed_point = _read_config(run, remarks)
    tasks, limit = _read_scores(run, remarks)
    corpora = [*run.data.glob("corpus.json"), *run.data.glob("*/corpus.json")]
    text_files = [run.config, run.environment, run.init_from, run.deepspeed, *sorted(corpora)]
    texts = {str(p.relative_to(run.path)): _read_text(p) for p in text_files if p.is_file()}
    return RunFiles(
        label=label,
        directory=run,
        status=run_status(run),
        records=records,
        config=settings,
        defaults=defaults,
        has_fixed_point=has_fixed_point,
        result=_read_result(run, remarks),
        tasks=tasks,
        limit=limit,
        texts=texts,
        remarks=remarks,
    )


def _read_result(run: RunDir, remarks: list[str]) -> dict:
    """Return result.json, {} if the run is not finished; add a remark if the file is damaged."""
    if not run.is_finished:
        return {}
    try:
        result = run.read_result(())
        _Result.model_validate(result)
    except DamagedError as e:
        remarks.append(str(e))
        return {}
    except ValidationError as e:
        fault = e.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        message = fault["msg"].partition(" or instance")[0]  # without the name of a class
        remarks.append(f"{run.result} is damaged: `{key}` is {fault['input']!r:.60}: {message}")
        return {}
    return result


def _read_scores(run: RunDir, remarks: list[str]) -> tuple[dict[str, dict], int | None]:
    """Return the metrics of each task in eval/results.json, and the number of documents per task.

    Add a remark if the file is damaged, or was measured on other weights than the newest ones.
    """
    results = read_mapping(run.eval_results)
    if results is None:
        return {}, None
    try:
        scores = {name: dict(task["metrics"]) for name, task in results["tasks"].items()}
        for metrics in scores.values():
            for metric in metrics.values():
                metric["value"]  # raises an error if it is missing
    except (AttributeError, LookupError, TypeError, ValueError):
        remarks.append(
            f"{run.eval_results} is damaged: each task must have metrics, and each metric a value"
        )
        return {}, None
    step, checkpoints = results.get("step"), list_checkpoints(run.checkpoints)
    if checkpoints and step is not None and step != (newest := checkpoint_step(checkpoints[-1])):
        remarks.append(
            f"{run.eval_results} was measured after update {step}, and the newest checkpoint is of"
            f" update {newest}: evaluate the run again"
        )
    limit = results.get("limit")
    return scores, limit if isinstance(limit, int) else None


def _read_records(run: RunDir, remarks: list[str]) -> list[dict]:
    """Return the records of a run in the order of their updates; add a remark on unread lines."""
    lines = list(iter_metrics(run.path))  # None for a line without a record
    records = [line for line in lines if line is not None and line["step"] <= MAX_STEP]
    records.sort(key=lambda record: record["step"])
    if skipped_count := len(lines) - len(records):
        lines_are = "1 line is" if skipped_count == 1 else f"{skipped_count} lines are"
        remarks.append(
            f"{run.metrics.name}: {lines_are} skipped (damaged, incomplete because the process was"
            " killed, or just being written)"
        )
    return records


def replace_surrogates(text: str) -> str:
    """Replace characters that UTF-8 cannot encode, as in file names that are not UTF-8, by "?"."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _read_config(run: RunDir, remarks: list[str]) -> tuple[dict, dict, bool | None]:
    """Return configuration and defaults by dotted keys, and whether there are fixed-point layers.

    Keys that config.yaml lacks have their defaults. If the file does not fit the schema, return
    ({}, {}, None) and add a remark.

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


def _read_text(path: Path) -> str:
    """Return the text of a file without control characters."""
    return printable(path.read_bytes().decode("utf-8", errors="replace"))
