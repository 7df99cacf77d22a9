"""How far a run is, or each point of a sweep: done, running, stopped, failed or missing.

All of it is read from the run directories, which a killed run may have left in any state: a file
that is damaged or half written is an answer here, never an error.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeGuard

from lm.common.console import format_duration
from lm.common.errors import PREEMPTED, ConfigError
from lm.common.files import read_mapping
from lm.config import load as config
from lm.runs.lease import is_alive
from lm.runs.metrics import read_metrics
from lm.runs.run_dir import RunDir

FRESH_S = 60.0  # a lease is touched every 10 s: one that is older was left by a killed run
STATES = ("done", "running", "stopped", "failed", "missing")


@dataclass(frozen=True)
class Status:
    """What a run's files say at one moment; None and "" what they do not."""

    run_dir: str
    state: str  # of STATES
    text: str = ""  # what it has reached, or what happened
    index: int | None = None  # of a sweep's point
    label: str = ""  # of a sweep's point: what it sets besides its seed
    step: int | None = None  # the last update that was recorded
    steps: int | None = None  # of the whole run
    record: dict | None = None  # of training, the last
    validation: str = ""  # the last one
    num_iters: dict | None = None  # ℓ* of the layers, as the record of the last probe has it
    left_s: float | None = None  # of a running one
    seen_s: float | None = None  # seconds since its last record

    @property
    def is_left(self) -> bool:
        """Whether it is to be trained: it is not done, and nobody is at work on it."""
        return self.state in ("stopped", "failed", "missing")


def sweep_status(path: str | Path, overrides: Sequence[str] = ()) -> list[Status]:
    """The state of every point of a YAML's sweep, in its order.

    Args:
        overrides: `key=value`, as they were given to the training (`name` and `out_dir` matter).
    Raises:
        ConfigError: the YAML or an override is wrong, or there is no sweep.
    """
    points = config.sweep_points(config.load_tree(path), str(path))
    base = config.load(path, [*overrides, "sweep={}"])
    now = time.time()
    statuses = []
    for i, point in enumerate(points):
        run = RunDir(Path(base.out_dir) / config.point_name(base.name, i, point))
        label = config.point_label({k: v for k, v in point.items() if k != "seed"})
        statuses.append(replace(run_status(run, now), index=i, label=label))
    return statuses


def run_status(run: RunDir, now: float) -> Status:
    """What the files of a run directory say, of a language model or of a synthetic task.

    Args:
        now: Unix seconds.
    """
    records = read_metrics(run.path)
    steps = planned_updates(run.config)
    state, text = state_of(run, steps, now)
    trained = [r for r in records if is_number(r.get("loss"))]
    probed = [*records, read_mapping(run.result) or {}]
    num_iters = [counts for r in probed if (counts := num_iters_of(r)) is not None]
    is_running = state == "running" and steps is not None
    return Status(
        run_dir=str(run),
        state=state,
        text=text,
        step=max((r["step"] for r in records), default=None),
        steps=steps,
        record=trained[-1] if trained else None,
        validation=next((text for r in reversed(records) if (text := _validation(r))), ""),
        num_iters=num_iters[-1] if num_iters else None,
        left_s=_seconds_left(trained, steps) if is_running and steps is not None else None,
        seen_s=_since_last_record(run, now),
    )


def _seconds_left(trained: list[dict], steps: int) -> float | None:
    """Return the seconds until `steps` updates are done, judged by the last records of training."""
    points = []
    for record in trained[-50:]:
        spent = record.get("spent")
        seconds = spent.get("seconds") if isinstance(spent, dict) else record.get("seconds")
        if is_number(seconds):
            points.append((seconds, record["step"]))
    rates = [
        (now - before) / (done - done_before)
        for (before, done_before), (now, done) in itertools.pairwise(points)
        if done > done_before
    ]
    return statistics.median(rates) * max(0, steps - points[-1][1]) if rates else None


def _validation(record: dict) -> str:
    """A validation in a few words: "4.065 (2.344 bits/byte)", or of a synthetic task the first of
    its scores."""
    reached = record.get("validation")
    if isinstance(reached, dict) and is_number(reached.get("loss")):
        bits = reached.get("bits_per_byte")
        return f"{reached['loss']:.3f}" + (f" ({bits:.3f} bits/byte)" if is_number(bits) else "")
    tried = record.get("valid")
    scores = tried.get("metrics") if isinstance(tried, dict) else None
    for name, value in scores.items() if isinstance(scores, dict) else ():
        if is_number(value):
            return f"{name} {value:.3f}"
    return ""


def state_of(run: RunDir, steps: int | None, now: float) -> tuple[str, str]:
    """One of STATES, and a sentence, of a run of a language model or of a synthetic task. Who holds
    the directory comes first: a finished or failed run may have been taken up again.

    Args:
        steps: updates of the whole run, None where that is not known. now: Unix seconds.
    """
    lease, failure, result = (read_mapping(path) for path in (run.lease, run.failure, run.result))
    if lease is not None and is_held(run, lease, now):
        return "running", holder_name(lease)
    if result is not None:
        updates = result.get("updates")
        # That of a synthetic run has no validation, and no tokens: it may have been solved before.
        is_synthetic = "solved_at" in result
        damaged = not is_synthetic and validation_of(result) is None
        if damaged or not is_count(updates):
            return "failed", f"{run.result} is damaged: delete it and continue with resume=auto"
        if steps is None or updates >= steps or is_count(result.get("solved_at")):
            return "done", reached_by(result)
    if failure is not None:
        sentence = failure.get("sentence") or "failure.json is damaged: see the run's output"
        stopped = failure.get("exit_code") == PREEMPTED
        return ("stopped" if stopped else "failed"), str(sentence)
    if lease is not None:
        return "stopped", f"killed: {holder_name(lease)} has given no sign of life; resume=auto"
    if run.holds_run:
        return "stopped", "not finished, and nobody works on it: continue with resume=auto"
    return "missing", ""


def planned_updates(path: Path) -> int | None:
    """`train.steps` of a run's own config, which overrides may have changed."""
    try:
        steps = config.load_tree(path)["train"]["steps"]
    except (ConfigError, OSError, LookupError, TypeError, RecursionError):
        return None
    return steps if is_count(steps) else None


def is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number that a float holds: not NaN, infinity or 10**400."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def num_iters_of(record: dict) -> dict | None:
    """ℓ* of the layers, of a record (or a result) with a probe."""
    try:
        counts = record["probe"]["num_iters"]
        lists = [counts["mean"], counts.get("elsewhere", [0.0])]
    except (LookupError, TypeError, AttributeError):
        return None
    whole = all(isinstance(some, list) and some and all(map(is_number, some)) for some in lists)
    return counts if whole else None


def validation_of(result: dict) -> dict | None:
    """Loss and perplexity of a result, if they are numbers."""
    reached = result.get("validation")
    keys = ("loss", "perplexity")
    whole = isinstance(reached, dict) and all(is_number(reached.get(key)) for key in keys)
    return reached if whole else None


def reached_by(result: dict) -> str:
    """Return what a result says of the training, in words."""
    seconds = result.get("training_seconds")
    trained = f", trained {format_duration(seconds)}" if is_number(seconds) else ""
    return f"{result['updates']} updates{trained}"


def is_held(run: RunDir, lease: dict, now: float) -> bool:
    """Return whether the process that a run's lease names is at work: it touches the file.

    Args:
        lease: Content of lease.json.
        now: Unix seconds.
    """
    beat = _written(run.lease)
    return is_alive(lease) is not False and beat is not None and abs(now - beat) <= FRESH_S


def _written(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _since_last_record(run: RunDir, now: float) -> float | None:
    """Seconds since a record or the result was written."""
    paths = run.metrics, run.result, run.config
    known = [t for path in paths if (t := _written(path)) is not None]
    return round(max(0.0, now - max(known)), 1) if known else None


def holder_name(lease: dict) -> str:
    """Who holds a lease: "job 12 on n0, process 4711"."""
    job, host, pid = (lease.get(key) for key in ("job", "host", "pid"))
    where = f"{host or 'an unknown host'}, process {pid or 'unknown'}"
    return f"job {job} on {where}" if job else where
