"""State of a run, or of each point of a sweep: done, running, stopped, failed or missing.

The state is read from the run directory, which a killed run may have left in any state: a damaged
or incomplete file never raises an error here.
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

FRESH_S = 60.0  # a process touches its lease every 10 s: an older lease is of a killed run
STATES = ("done", "running", "stopped", "failed", "missing")


@dataclass(frozen=True)
class Status:
    """State of a run by its files. Fields that the files do not determine are None or ""."""

    run_dir: str
    state: str  # one of STATES
    text: str = ""  # progress, or reason of the state
    index: int | None = None  # of the point of a sweep
    label: str = ""  # settings of the point of a sweep, without the seed
    step: int | None = None  # last recorded update
    steps: int | None = None  # updates of the whole run
    record: dict | None = None  # last record of training
    validation: str = ""  # last validation
    num_iters: dict | None = None  # ℓ* of each layer in the last probe
    left_s: float | None = None  # seconds until a running run ends
    seen_s: float | None = None  # seconds since its last record

    @property
    def is_left(self) -> bool:
        """True if the run is neither done nor running."""
        return self.state in ("stopped", "failed", "missing")


def sweep_status(path: str | Path, overrides: Sequence[str] = ()) -> list[Status]:
    """Return the state of every point of a YAML's sweep, in its order.

    Args:
        path: The YAML.
        overrides: `key=value` as given to the training; only `name` and `out_dir` matter.

    Raises:
        ConfigError: If the YAML or an override is wrong, or there is no sweep.
    """
    points = config.sweep_points(config.load_tree(path), str(path))
    base = config.load(path, [*overrides, "sweep={}"])
    current_time = time.time()
    statuses = []
    for i, point in enumerate(points):
        run = RunDir(Path(base.out_dir) / config.point_name(base.name, i, point))
        label = config.point_label({k: v for k, v in point.items() if k != "seed"})
        statuses.append(replace(run_status(run, current_time), index=i, label=label))
    return statuses


def run_status(run: RunDir, now: float) -> Status:
    """Return the state of the run in a directory, of a language model or a synthetic task.

    Args:
        run: The run directory.
        now: Unix seconds.
    """
    records = read_metrics(run.path)
    steps = planned_updates(run.config)
    state, text = determine_state(run, steps, now)
    training_records = [r for r in records if is_number(r.get("loss"))]
    probes = [*records, read_mapping(run.result) or {}]
    num_iters = [counts for r in probes if (counts := get_num_iters(r)) is not None]
    is_running = state == "running" and steps is not None
    return Status(
        run_dir=str(run),
        state=state,
        text=text,
        step=max((r["step"] for r in records), default=None),
        steps=steps,
        record=training_records[-1] if training_records else None,
        validation=next((text for r in reversed(records) if (text := _validation(r))), ""),
        num_iters=num_iters[-1] if num_iters else None,
        left_s=_seconds_left(training_records, steps) if is_running and steps is not None else None,
        seen_s=_seconds_since_record(run, now),
    )


def _seconds_left(records: list[dict], steps: int) -> float | None:
    """Estimate the seconds until `steps` updates are made, from the last records of training."""
    points = []
    for record in records[-50:]:
        times = record.get("spent")
        seconds = times.get("seconds") if isinstance(times, dict) else record.get("seconds")
        if is_number(seconds):
            points.append((seconds, record["step"]))
    rates = [
        (seconds - last_seconds) / (step - last_step)
        for (last_seconds, last_step), (seconds, step) in itertools.pairwise(points)
        if step > last_step
    ]
    return statistics.median(rates) * max(0, steps - points[-1][1]) if rates else None


def _validation(record: dict) -> str:
    """Format a validation: "4.065 (2.344 bits/byte)", or the first score of a synthetic task."""
    validation = record.get("validation")
    if isinstance(validation, dict) and is_number(validation.get("loss")):
        bits = validation.get("bits_per_byte")
        return f"{validation['loss']:.3f}" + (f" ({bits:.3f} bits/byte)" if is_number(bits) else "")
    synthetic = record.get("valid")
    scores = synthetic.get("metrics") if isinstance(synthetic, dict) else None
    for name, value in scores.items() if isinstance(scores, dict) else ():
        if is_number(value):
            return f"{name} {value:.3f}"
    return ""


def determine_state(run: RunDir, steps: int | None, now: float) -> tuple[str, str]:
    """Return one of STATES and a sentence that explains it.

    The lease is read first, because a finished or failed run may have been started again.

    Args:
        run: The run directory.
        steps: Updates of the whole run, or None if unknown.
        now: Unix seconds.
    """
    lease, failure, result = (read_mapping(path) for path in (run.lease, run.failure, run.result))
    if lease is not None and is_held(run, lease, now):
        return "running", holder_name(lease)
    if result is not None:
        updates = result.get("updates")
        # The result of a synthetic run has no validation, and may be of fewer updates.
        is_synthetic = "solved_at" in result
        is_damaged = not is_synthetic and get_validation(result) is None
        if is_damaged or not is_count(updates):
            return "failed", f"{run.result} is damaged: delete it and continue with resume=auto"
        if steps is None or updates >= steps or is_count(result.get("solved_at")):
            return "done", describe_result(result)
    if failure is not None:
        sentence = failure.get("sentence") or "failure.json is damaged: see the run's output"
        state = "stopped" if failure.get("exit_code") == PREEMPTED else "failed"
        return state, str(sentence)
    if lease is not None:
        return (
            "stopped",
            f"killed: {holder_name(lease)} does not respond; continue with resume=auto",
        )
    if run.holds_run:
        return "stopped", "not finished, and no process is running: continue with resume=auto"
    return "missing", ""


def planned_updates(path: Path) -> int | None:
    """Return `train.steps` of a run's config.yaml, or None."""
    try:
        steps = config.load_tree(path)["train"]["steps"]
    except (ConfigError, OSError, LookupError, TypeError, RecursionError):
        return None
    return steps if is_count(steps) else None


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number that a float holds: not NaN, infinity or 10**400."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def get_num_iters(record: dict) -> dict | None:
    """Return ℓ* of the layers in a record or result, or None."""
    try:
        counts = record["probe"]["num_iters"]
        lists = [counts["mean"], counts.get("elsewhere", [0.0])]
    except (LookupError, TypeError, AttributeError):
        return None
    is_valid = all(isinstance(v, list) and v and all(map(is_number, v)) for v in lists)
    return counts if is_valid else None


def get_validation(result: dict) -> dict | None:
    """Return the validation of a result if loss and perplexity are numbers."""
    scores = result.get("validation")
    keys = ("loss", "perplexity")
    is_valid = isinstance(scores, dict) and all(is_number(scores.get(key)) for key in keys)
    return scores if is_valid else None


def describe_result(result: dict) -> str:
    """Format updates and time of a finished training."""
    seconds = result.get("training_seconds")
    trained = f", trained {format_duration(seconds)}" if is_number(seconds) else ""
    return f"{result['updates']} updates{trained}"


def is_held(run: RunDir, lease: dict, now: float) -> bool:
    """Return whether the process of a lease is running: it touches the file.

    Args:
        lease: Content of lease.json.
        now: Unix seconds.
    """
    touched = _modification_time(run.lease)
    is_fresh = touched is not None and abs(now - touched) <= FRESH_S
    return is_alive(lease) is not False and is_fresh


def _modification_time(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _seconds_since_record(run: RunDir, now: float) -> float | None:
    """Return the seconds since a record or the result was written."""
    paths = run.metrics, run.result, run.config
    times = [t for path in paths if (t := _modification_time(path)) is not None]
    return round(max(0.0, now - max(times)), 1) if times else None


def holder_name(lease: dict) -> str:
    """Format the holder of a lease: "job 12 on n0, process 4711"."""
    job, host, pid = (lease.get(key) for key in ("job", "host", "pid"))
    process = f"{host or 'an unknown host'}, process {pid or 'unknown'}"
    return f"job {job} on {process}" if job else process
