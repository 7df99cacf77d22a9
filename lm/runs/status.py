"""State of a run, or of each point of a sweep, such as "running" (STATES).

ℓ* of a layer is the number of iterations that the paper's procedure would need on its input. A
probe is a forward pass that counts these iterations (`lm.runs.metrics.probe`).

The state is read from the run directory, which a killed run may have left in any state: a damaged
or incomplete file never raises an error here.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeGuard

from lm.common.console import format_duration
from lm.common.errors import DIVERGED, PREEMPTED, ConfigError
from lm.common.files import read_mapping
from lm.config import load as config
from lm.runs.lease import MAX_TOUCH_AGE_S, describe_holder, file_system_time, is_held
from lm.runs.metrics import read_metrics
from lm.runs.run_dir import RunDir

STATES = ("done", "running", "stopped", "failed", "diverged", "missing")
STATES_BY_EXIT_CODE = {PREEMPTED: "stopped", DIVERGED: "diverged"}  # other codes: "failed"


@dataclass(frozen=True)
class Status:
    """State of a run by its files. Unknown fields are None or ""."""

    run_dir: str
    state: str  # one of STATES
    text: str = ""  # explanation of the state
    index: int | None = None  # index of the sweep's point; None if the run is not in a sweep
    label: str = ""  # settings of the sweep's point, without the seed
    step: int | None = None  # last recorded update
    steps: int | None = None  # updates of the whole run
    record: dict | None = None  # last record of training
    validation: str = ""  # last validation, as text
    num_iters: dict | None = None  # of the last probe: {"mean": ℓ* of each layer, …}
    remaining_s: float | None = None  # estimated seconds until a running run ends
    idle_s: float | None = None  # seconds since the log, the result or the config was written

    @property
    def is_unfinished(self) -> bool:
        """True if training the run again with the same settings would continue it."""
        return self.state in ("stopped", "failed", "missing")


def sweep_status(path: str | Path, overrides: Sequence[str] = ()) -> list[Status]:
    """Return the status of every point of a YAML's sweep, in the order of the sweep.

    Args:
        path: The YAML.
        overrides: `key=value` as given to the training; only `name` and `out_dir` matter.

    Raises:
        ConfigError: If the YAML or an override is wrong, or there is no sweep.
    """
    points = config.sweep_points(config.load_tree(path), str(path))
    base = config.load(path, [*overrides, "sweep={}"])
    now = file_system_time(Path(base.out_dir))
    statuses = []
    for i, point in enumerate(points):
        run = RunDir(Path(base.out_dir) / config.point_name(base.name, i, point))
        label = config.point_label({k: v for k, v in point.items() if k != "seed"})
        statuses.append(replace(run_status(run, now), index=i, label=label))
    return statuses


def run_status(run: RunDir, now: float | None = None) -> Status:
    """Return the status of a run of a language model or a synthetic task.

    Args:
        run: The run directory.
        now: Unix seconds by the clock of the file system; None reads that clock.
    """
    now = file_system_time(run.path) if now is None else now
    records = read_metrics(run.path)
    steps = planned_updates(run.config)
    state, text = determine_state(run, steps, now)
    training_records = [r for r in records if is_number(r.get("loss"))]
    validations = [_format_validation(record) for record in records]
    # The result may also have a probe, the last one of the run.
    probes = [get_num_iters(entry) for entry in (*records, read_mapping(run.result) or {})]
    remaining_s = None
    if state == "running" and steps is not None:
        remaining_s = _estimate_remaining_s(training_records, steps)
    return Status(
        run_dir=str(run),
        state=state,
        text=text,
        step=max((r["step"] for r in records), default=None),
        steps=steps,
        record=training_records[-1] if training_records else None,
        validation=next(filter(None, reversed(validations)), ""),
        num_iters=next(filter(None, reversed(probes)), None),
        remaining_s=remaining_s,
        idle_s=_seconds_since_write(run, now),
    )


def _estimate_remaining_s(records: list[dict], steps: int) -> float | None:
    """Estimate the seconds until `steps` updates are made, from the last 50 training records."""
    times = []  # (seconds of training, update)
    for record in records[-50:]:
        spent = record.get("spent")  # of a language model; synthetic tasks record only "seconds"
        seconds = spent.get("seconds") if isinstance(spent, dict) else record.get("seconds")
        if is_number(seconds):
            times.append((seconds, record["step"]))
    seconds_per_update = [
        (seconds - last_seconds) / (step - last_step)
        for (last_seconds, last_step), (seconds, step) in itertools.pairwise(times)
        if step > last_step
    ]
    if not seconds_per_update:
        return None
    return statistics.median(seconds_per_update) * max(0, steps - times[-1][1])


def _format_validation(record: dict) -> str:
    """Format a record's validation: "4.065 (2.344 bits/byte)", or a synthetic task's first score.

    Return "" if the record has none.
    """
    validation = record.get("validation")
    if isinstance(validation, dict) and is_number(validation.get("loss")):
        bits = validation.get("bits_per_byte")
        return f"{validation['loss']:.3f}" + (f" ({bits:.3f} bits/byte)" if is_number(bits) else "")
    valid = record.get("valid")  # a validation of a synthetic task
    scores = valid.get("metrics") if isinstance(valid, dict) else None
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
        now: Unix seconds by the clock of the file system.
    """
    lease, failure, result = (read_mapping(path) for path in (run.lease, run.failure, run.result))
    if lease is not None and (touch_time := _modification_time(run.lease)) is not None:
        touch_age_s = now - touch_time
        if is_held(lease, touch_age_s):
            text = describe_holder(lease)
            # A process on this host holds its lease while it exists, also if it is suspended or
            # cannot touch the lease because the disk is full.
            if touch_age_s > MAX_TOUCH_AGE_S:
                text += f", which has not responded for {format_duration(touch_age_s)}"
            return "running", text
    if result is not None:
        updates = result.get("updates")
        # A synthetic run has no validation in its result. Its "solved_at" is the update at which
        # the run ended early because the task was solved, or None.
        is_synthetic = "solved_at" in result
        is_damaged = not is_synthetic and get_validation(result) is None
        if is_damaged or not is_count(updates):
            return "failed", f"{run.result} is damaged: delete it and continue with resume=auto"
        is_solved = is_count(result.get("solved_at"))
        if steps is None or updates >= steps or is_solved:
            return "done", describe_result(result)
    if failure is not None:
        sentence = failure.get("sentence") or "failure.json is damaged: see the run's output"
        exit_code = failure.get("exit_code")
        if not isinstance(exit_code, int):  # the file is damaged
            return "failed", str(sentence)
        return STATES_BY_EXIT_CODE.get(exit_code, "failed"), str(sentence)
    if lease is not None:
        holder = describe_holder(lease)
        return "stopped", f"killed: {holder} does not respond; continue with resume=auto"
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
    """Return "num_iters" of the probe in a record or result, as in `fixed_point_metrics`.

    Return None if there is no probe, or if it is damaged.
    """
    try:
        num_iters = record["probe"]["num_iters"]
        mean = num_iters["mean"]
        other_solution_shares = num_iters.get("elsewhere", [0.0])  # absent in version 0.1
    except (LookupError, TypeError, AttributeError):
        return None
    is_valid = _is_number_list(mean) and _is_number_list(other_solution_shares)
    return num_iters if is_valid else None


def _is_number_list(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_number, value))


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


def _modification_time(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _seconds_since_write(run: RunDir, now: float) -> float | None:
    """Return the seconds since the log, the result or the config was written; None without them."""
    paths = run.metrics, run.result, run.config
    times = [t for path in paths if (t := _modification_time(path)) is not None]
    return round(max(0.0, now - max(times)), 1) if times else None
