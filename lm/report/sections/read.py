"""What a report reads of a run directory: whatever is there, also of a run that trains or died."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm.common.errors import ConfigError
from lm.common.files import read_mapping
from lm.config import load as config
from lm.config.yaml_text import load_tree
from lm.runs.metrics import Log, read_log
from lm.runs.run_dir import RunDir, RunDirError, comparable
from lm.runs.status import Status, run_status

LAST_STEP = 2**53  # of an update: no training has more
WHERE = ("name", "out_dir")  # keys that say where a run lies, not what it is


@dataclass(frozen=True)
class Files:
    """What lies in the directory of one run.

    Args:
        label: what it is called in this report. status: how far it is (`lm.runs.status`).
        records: of metrics.jsonl. unread: lines of it that hold no record.
        config: its resolved configuration by dotted keys. config_text: as it is in the file.
        solves: whether a layer of its model is solved; None where the configuration does not say.
        defaults: of the schema, by dotted keys; {} where the configuration is not of this schema.
        result, environment, …: JSON files, {} where there is none or it is damaged.
        remarks: sentences about files that are damaged.
    """

    label: str
    run: RunDir
    status: Status
    records: list[dict]
    unread: int
    config: dict[str, Any]
    config_text: str
    solves: bool | None
    defaults: dict[str, Any]
    result: dict
    environment: dict
    scores: dict
    init_from: dict
    deepspeed: dict
    corpora: dict[str, dict]
    sample: str | None
    remarks: list[str] = field(default_factory=list)


def read_all(folders: Sequence[Path | str]) -> list[Files]:
    """The runs in these directories, in their order.

    Raises:
        RunDirError: one holds no run, or a run of the synthetic suite; one is given twice.
    """
    paths = [Path(folder) for folder in folders]
    _check_different(paths)
    names = labels(paths)
    now = time.time()
    return [read(path, name, now) for path, name in zip(paths, names, strict=True)]


def read(path: Path, label: str, now: float) -> Files:
    """One run.

    Args:
        now: Unix seconds.
    Raises:
        RunDirError: as `read_all`.
    """
    run = RunDir(path)
    if not run.holds_run:
        raise RunDirError(f"{run} holds no run (it has no config.yaml)")
    remarks: list[str] = []
    records, unread = _records(run)
    if unread:
        remarks.append(
            f"{run.metrics.name}: {unread} line{'s' * (unread > 1)} hold{'s' * (unread == 1)} no"
            " record (cut short by a kill, spoilt, or just being written) and"
            f" {'are' if unread > 1 else 'is'} passed over"
        )
    settings, defaults, solves = _config(run, remarks)

    def mapping(place: Path) -> dict:
        found = read_mapping(place)
        if found == {}:
            remarks.append(f"{place.relative_to(run.path)} is damaged: it is no JSON mapping")
        return found or {}

    return Files(
        label=label,
        run=run,
        status=run_status(run, now),
        records=records,
        unread=unread,
        config=settings,
        config_text=_text(run.config) or "",
        solves=solves,
        defaults=defaults,
        result=mapping(run.result),
        environment=mapping(run.environment),
        scores=mapping(run.scores),
        init_from=mapping(run.init_from),
        deepspeed=mapping(run.deepspeed),
        corpora={str(p.relative_to(run.path)): mapping(p) for p in _manifests(run)},
        sample=_text(run.path / "sample.txt"),
        remarks=remarks,
    )


def _records(run: RunDir) -> Log:
    """Return the log of a run with its records in the order of their updates."""
    log = read_log(run.path)
    known = [r for r in log.records if r["step"] <= LAST_STEP]
    unread = log.unread + len(log.records) - len(known)
    return log._replace(records=sorted(known, key=lambda r: r["step"]), unread=unread)


def labels(paths: Sequence[Path]) -> list[str]:
    """Short names that tell directories apart: their paths without the folders that all share, at
    the beginning and at the end."""
    parts = [path.resolve().parts for path in paths]
    if len(parts) == 1:
        return [printable(parts[0][-1])]
    shortest = min(map(len, parts))
    first = 0
    while first < shortest - 1 and len({of[first] for of in parts}) == 1:
        first += 1
    end = 0
    while end < shortest - first - 1 and len({of[-1 - end] for of in parts}) == 1:
        end += 1
    return [printable("/".join(of[first : len(of) - end])) for of in parts]


def printable(text: str) -> str:
    """Without what UTF-8 cannot hold: bytes of a file's name, halves of a character in JSON."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _check_different(paths: list[Path]) -> None:
    seen = set()
    for path in paths:
        if path.resolve() in seen:
            raise RunDirError(f"{path} is given twice: name each run once")
        seen.add(path.resolve())


def _config(run: RunDir, remarks: list[str]) -> tuple[dict, dict, bool | None]:
    """(configuration, the schema's defaults, whether a layer is solved): through the schema, where
    a key that is newer than the run has its default; else as the file has it.

    Raises:
        RunDirError: it is a run of the synthetic suite.
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
    """A nested mapping by dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def as_written(value: object) -> str:
    """A value of a configuration on one line: null, true, "text" without its quotes."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _manifests(run: RunDir) -> list[Path]:
    """corpus.json of the one source, or of each source of a mixture."""
    return sorted([*run.data.glob("corpus.json"), *run.data.glob("*/corpus.json")])


def _text(path: Path) -> str | None:
    """A text file as whoever looks on finds it; None where there is none."""
    try:
        return path.read_bytes().decode("utf-8", errors="replace")
    except OSError:
        return None
