"""How far each point of a sweep is: done, running, stopped, failed or missing.

All of it is read from the run directories, which a killed run may have left in any state: a file
that is damaged or half written is an answer here, never an error.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from lm.common.errors import PREEMPTED, ConfigError
from lm.common.files import read_mapping
from lm.config import load as config
from lm.runs.lease import is_alive
from lm.runs.metrics import marked, read_metrics
from lm.runs.run_dir import RunDir

if TYPE_CHECKING:
    from rich.table import Table

FRESH_S = 60.0  # a lease is touched every 10 s: one that is older was left by a killed run
STATES = ("done", "running", "stopped", "failed", "missing")


@dataclass(frozen=True)
class Point:
    """One point of a sweep."""

    index: int
    run_dir: str
    state: str  # of STATES
    step: int | None = None  # the last update that was recorded
    steps: int | None = None  # of the whole run
    num_iters: dict | None = None  # ℓ* of the layers, as the record of the last probe has it
    seen_s: float | None = None  # seconds since its last sign of life
    text: str = ""  # its result, or what happened


def sweep_status(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> list[Point]:
    """The state of every point of a YAML's sweep, in its order.

    Args:
        overrides: `key=value`, as they were given to the training (`name` and `out_dir` matter).
    Raises:
        ConfigError: the YAML or an override is wrong, or there is no sweep.
    """
    points = config.sweep_points(config.load_tree(path), str(path))
    base = config.load(path, [*overrides, "sweep={}"])
    now = time.time()
    found = []
    for i, point in enumerate(points):
        run_dir = Path(base.out_dir) / config.point_name(base.name, i, point)
        found.append(point_status(i, RunDir(run_dir), now))
    return found


def point_status(index: int, run: RunDir, now: float) -> Point:
    """What the files of a run directory say.

    Args:
        now: Unix seconds.
    """
    records = read_metrics(run.path)
    result = read_mapping(run.result)
    steps = planned_updates(run.config)
    seen = _last_sign_of_life(run, now)
    state, text = state_of(run, steps, now)
    probes = [num_iters for r in records if (num_iters := num_iters_of(r)) is not None]
    return Point(
        index=index,
        run_dir=str(run),
        state=state,
        step=max((r["step"] for r in records), default=None),
        steps=steps,
        num_iters=num_iters_of(result or {}) or (probes[-1] if probes else None),
        seen_s=seen,
        text=text,
    )


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
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def num_iters_of(record: dict) -> dict | None:
    """ℓ* of the layers, of a record (or a result) with a probe."""
    try:
        found = record["probe"]["num_iters"]
        lists = [found["mean"], found.get("elsewhere", [0.0])]
    except (LookupError, TypeError, AttributeError):
        return None
    whole = all(isinstance(some, list) and some and all(map(is_number, some)) for some in lists)
    return found if whole else None


def validation_of(result: dict) -> dict | None:
    """Loss and perplexity of a result, if they are numbers."""
    reached = result.get("validation")
    keys = ("loss", "perplexity")
    whole = isinstance(reached, dict) and all(is_number(reached.get(key)) for key in keys)
    return reached if whole else None


def reached_by(result: dict) -> str:
    """What a result says: the validation of a language model, else the updates."""
    reached = validation_of(result)
    if reached is None:
        text = f"{result['updates']} updates"
    else:
        text = f"validation loss {reached['loss']:.4f}, perplexity {reached['perplexity']:.2f}"
        if is_number(bits := reached.get("bits_per_byte")):
            text += f", {bits:.4f} bits per byte"
    seconds = result.get("training_seconds")
    return f"{text}, trained {duration(seconds)}" if is_number(seconds) else text


def is_held(run: RunDir, lease: dict, now: float) -> bool:
    """Whether the process that a run's lease names is at work.

    Args:
        lease: what lease.json holds. now: Unix seconds.
    """
    return is_alive(lease) is not False and is_fresh(run.lease, now)


def is_fresh(path: Path, now: float) -> bool:
    """Whether the holder of a lease lives: it touches the file."""
    beat = _written(path)
    return beat is not None and abs(now - beat) <= FRESH_S


def _written(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _last_sign_of_life(run: RunDir, now: float) -> float | None:
    """Seconds since the lease was touched, or a record or result written."""
    paths = run.lease, run.metrics, run.result, run.config
    known = [t for path in paths if (t := _written(path)) is not None]
    return round(max(0.0, now - max(known)), 1) if known else None


def holder_name(lease: dict) -> str:
    """Who holds a lease: "job 12 on n0, process 4711"."""
    job, host, pid = (lease.get(key) for key in ("job", "host", "pid"))
    where = f"{host or 'an unknown host'}, process {pid or 'unknown'}"
    return f"job {job} on {where}" if job else where


def duration(seconds: float) -> str:
    """12 s, 5 min, 3.2 h or 4.0 d."""
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} d"


def table(points: list[Point]) -> Table:
    """The points as a rich table; what happened to those not done stands below, in full
    (`remarks`)."""
    from rich.table import Table

    out = Table(title_justify="left", caption=summary(points), caption_justify="left")
    for name in ("point", "state", "updates", "ℓ*", "last sign"):
        out.add_column(name, justify="right" if name in ("updates", "last sign") else "left")
    for p in points:
        updates = "" if p.step is None else f"{p.step}/{p.steps or '?'}"
        layers = " ".join(marked(p.num_iters)) if p.num_iters else ""
        seen = "" if p.seen_s is None else f"{duration(p.seen_s)} ago"
        out.add_row(Path(p.run_dir).name, p.state, updates, layers, seen)
    return out


def summary(points: list[Point]) -> str:
    """Such as "4 done, 1 running, 1 missing"."""
    counts = {state: sum(p.state == state for p in points) for state in STATES}
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)


def remarks(points: list[Point]) -> list[str]:
    """A line for each point about which there is something to say, then how to train what is
    left."""
    lines = [f"{p.index:03d} {p.state}: {p.text}" for p in points if p.text]
    left = [p.index for p in points if p.state in ("stopped", "failed", "missing")]
    if left:
        lines.append(f"not done and not running: --array={ranges(left)} (unless queued already)")
    return lines


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] → "0-2,5", as sbatch takes it."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def as_json(points: list[Point]) -> str:
    """A list of mappings, one a point, with the fields of Point."""
    return json.dumps([asdict(p) for p in points], indent=2, ensure_ascii=False)
