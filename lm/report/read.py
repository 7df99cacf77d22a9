"""Files of a run directory that a report reads; the run may still train, or may have failed."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm.common.errors import ConfigError
from lm.common.files import DamagedError, check_kinds, read_mapping
from lm.config import load as config
from lm.config.yaml_text import load_tree
from lm.report.status import short_names
from lm.runs.metrics import read_log
from lm.runs.run_dir import RunDir, RunDirError, comparable
from lm.runs.status import Status, run_status

LAST_STEP = 2**53  # a record of a later update is damaged
PLACE_KEYS = ("name", "out_dir")  # keys of the run's place
RESULT = ("updates", "tokens", "training_seconds", "tokens_per_s", "validation")
KINDS: dict = dict.fromkeys(("updates", "tokens", "validation.tokens", "validation.bytes"), int)
KINDS |= dict.fromkeys(("training_seconds", "tokens_per_s", "validation.loss"), float)
KINDS |= {"validation": dict, "validation.perplexity": float, "validation.bits_per_byte": float}
KINDS |= {"baselines": dict, "baselines.*": float, "probe": dict}


@dataclass(frozen=True)
class Files:
    """Contents of a run directory.

    Attributes:
        label: Name of the run in the report.
        run: The directory.
        status: State of the run (`lm.runs.status`).
        records: Records of metrics.jsonl in the order of their updates.
        config: Configuration by dotted keys.
        config_text: Text of config.yaml.
        solves: Whether the model has a fixed-point layer; None if the configuration is damaged.
        defaults: Defaults of the schema by dotted keys; empty if the configuration is of another.
        result: Numbers of a finished run; this and the next are empty if the file is absent.
        environment: Versions and devices.
        tasks: Scores of `fprnn eval` by task.
        limit: Documents per task, if `fprnn eval` was limited.
        init_from: Source of the initial weights.
        deepspeed: Configuration of DeepSpeed.
        corpora: Manifests of the data by file.
        sample: Text of sample.txt, or None.
        remarks: Sentences on damaged files.
    """

    label: str
    run: RunDir
    status: Status
    records: list[dict]
    config: dict[str, Any]
    config_text: str
    solves: bool | None
    defaults: dict[str, Any]
    result: dict
    environment: dict
    tasks: dict[str, dict]
    limit: int | None
    init_from: dict
    deepspeed: dict
    corpora: dict[str, dict]
    sample: str | None
    remarks: list[str] = field(default_factory=list)


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

    def mapping(place: Path) -> dict:
        value = read_mapping(place)
        if value == {}:
            remarks.append(f"{place.relative_to(run.path)} is damaged: it is no JSON mapping")
        return value or {}

    tasks, limit = _scores(run, remarks)
    return Files(
        label=label,
        run=run,
        status=run_status(run, now),
        records=records,
        config=settings,
        config_text=_text(run.config) or "",
        solves=solves,
        defaults=defaults,
        result=_result(run, remarks),
        environment=mapping(run.environment),
        tasks=tasks,
        limit=limit,
        init_from=mapping(run.init_from),
        deepspeed=mapping(run.deepspeed),
        corpora={str(p.relative_to(run.path)): mapping(p) for p in _manifests(run)},
        sample=_text(run.path / "sample.txt"),
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
    validation = result["validation"] or {}
    if not all(isinstance(validation.get(key), int | float) for key in ("perplexity", "tokens")):
        remarks.append(f"{run.result} is damaged: its validation must hold perplexity and tokens")
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
    accept is returned as it is in the file.

    Raises:
        RunDirError: If it is a run of the synthetic suite.
    """
    try:
        tree = load_tree(run.config)
    except ConfigError as e:
        remarks.append(f"config.yaml is damaged: {e}")
        return {}, {}, None
    if "task" in tree:
        raise RunDirError(
            f"{run} holds a run of the synthetic suite: `fprnn synthetic report` draws those"
        )
    try:
        cfg = config.build(tree, str(run.config))
    except ConfigError as e:
        remarks.append(f"config.yaml is not of this version's schema and is shown as it is: {e}")
        return flat(tree), {}, None
    defaults = comparable(config.build({}))
    return comparable(cfg), defaults, cfg.model.has_fixed_point


def flat(tree: dict, prefix: str = "") -> dict[str, Any]:
    """Return a nested mapping by dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def as_written(value: object) -> str:
    """Return a value of a configuration on one line: null, true, text without quotes."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _manifests(run: RunDir) -> list[Path]:
    """Return the manifest of every source."""
    return sorted([*run.data.glob("corpus.json"), *run.data.glob("*/corpus.json")])


def _text(path: Path) -> str | None:
    """Return the text of a file, or None if there is none."""
    try:
        return path.read_bytes().decode("utf-8", errors="replace")
    except OSError:
        return None
