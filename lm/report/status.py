"""Tables of `fprnn status`: progress of runs, and results of sweeps."""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from lm.common.console import format_duration, say
from lm.common.files import read_mapping
from lm.runs.log import format_iterations
from lm.runs.metrics import OTHER_SOLUTION_NOTE, find_other_solutions, read_metrics
from lm.runs.run_dir import RunDir
from lm.runs.status import STATES, Status, get_validation, is_number, run_status, sweep_status

if TYPE_CHECKING:
    from rich.table import Table

RIGHT = ("update", "loss", "tokens/s", "time left", "last record")
RESULTS = ("parameters", "tokens", "validation", "training s", "ℓ*")


def read_statuses(places: list[str], overrides: list[str]) -> list[Status]:
    """Return the status of all runs.

    Args:
        places: Run directories of language models or synthetic tasks, and YAMLs of sweeps.
        overrides: `key=value` for the points of the sweeps.

    Raises:
        ConfigError: If a YAML is invalid.
    """
    statuses = []
    for place in dict.fromkeys(map(os.path.normpath, places)):
        if place.endswith((".yaml", ".yml")):
            statuses += sweep_status(place, overrides)
        else:
            statuses.append(run_status(RunDir(place)))
    return statuses


def show(statuses: list[Status]) -> None:
    """Print a table of the runs, remarks, and the results of finished points of a sweep."""
    say(make_table(statuses))
    for line in list_remarks(statuses):
        say(line)
    if any(status.label and status.state == "done" for status in statuses):
        say(format_results(statuses))


def make_cells(status: Status) -> dict[str, str]:
    """Return the cells of a run by column, "" for an unknown value."""
    record = status.record or {}
    speed = record.get("tokens_per_s")
    updates = "" if status.step is None else f"{status.step:,}"
    if status.steps is not None:
        updates = f"{updates or 0} / {status.steps:,}"
    return {
        "run": status.run_dir,
        "state": status.state,
        "update": updates,
        "loss": f"{record['loss']:.3f}" if record else "",
        "validation": status.validation,
        "tokens/s": f"{speed:,.0f}" if is_number(speed) else "",
        "ℓ*": format_iterations(status.num_iters) if status.num_iters else "",
        "time left": "" if status.remaining_s is None else format_duration(status.remaining_s),
        "last record": "" if status.idle_s is None else f"{format_duration(status.idle_s)} ago",
    }


def short_names(names: list[str]) -> dict[str, str]:
    """Return each path relative to the folder that contains all of them."""
    common = os.path.commonpath([os.path.dirname(os.path.abspath(name)) for name in names])
    return {name: os.path.relpath(os.path.abspath(name), common) for name in names}


def make_table(statuses: list[Status]) -> Table:
    """Return a table of the runs, with the number of runs in each state as its caption."""
    from rich.table import Table

    counts = {state: sum(status.state == state for status in statuses) for state in STATES}
    summary = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), caption_justify="left")
    table.caption = summary if len(statuses) > 1 else None
    short = short_names([status.run_dir for status in statuses])
    for name in make_cells(statuses[0]):
        # Fold long cells on narrow terminals instead of truncating them.
        table.add_column(name, justify="right" if name in RIGHT else "left", overflow="fold")
    for status in statuses:
        row = make_cells(status) | {"run": short[status.run_dir]}
        table.add_row(*row.values())
    return table


def list_remarks(statuses: list[Status]) -> list[str]:
    """Return the messages of runs, and the unfinished points of a sweep for `--array`."""
    lines = []
    for status in statuses:
        name = status.run_dir if status.index is None else f"{status.index:03d}"
        if status.text:
            lines.append(f"{name} {status.state}: {status.text}")
    unfinished = [
        status.index for status in statuses if status.is_unfinished and status.index is not None
    ]
    if any(status.num_iters and any(find_other_solutions(status.num_iters)) for status in statuses):
        lines.append(OTHER_SOLUTION_NOTE)
    if unfinished:
        points = format_ranges(unfinished)
        lines.append(f"not finished and not running: --array={points} (some may be queued)")
    return lines


def format_ranges(numbers: list[int]) -> str:
    """Return numbers in the form of sbatch's --array: "0-2,5" for [0, 1, 2, 5]."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def format_results(statuses: list[Status]) -> str:
    """Return a table of the finished points of sweeps, with means over the seeds of a point."""
    import pandas as pd

    rows = []
    for status in statuses:
        if status.label:
            is_done = status.state == "done"
            names = {"sweep": Path(status.run_dir).parent.name, "point": status.label}
            rows.append({**names, "done": is_done, **(read_results(status) if is_done else {})})
    frame = pd.DataFrame(rows).astype(dict.fromkeys(RESULTS, float))
    points = frame.groupby(["sweep", "point"], sort=False)
    table = points[list(RESULTS)].mean()
    table.insert(3, "± over seeds", points["validation"].std())
    table.insert(0, "seeds", points.size())
    table.insert(0, "done", points["done"].sum())
    finished = table[table["done"] > 0].reset_index()
    return finished.to_string(float_format="{:,.6g}".format, na_rep="–", index=False)


def read_results(status: Status) -> dict[str, float | None]:
    """Return the numbers of a finished run under the names of RESULTS, None if unknown.

    "validation" is in bits per byte, or in nats per token if the bytes are unknown; "training s"
    counts the seconds of the updates; "ℓ*" is the mean over layers.
    """
    result = read_mapping(RunDir(status.run_dir).result) or {}
    validation = get_validation(result) or {}
    records = read_metrics(Path(status.run_dir))
    times = [r["spent"] for r in records if isinstance(r.get("spent"), dict)]
    layers = status.num_iters["mean"] if status.num_iters else []
    numbers = {
        "parameters": result.get("parameters"),
        "tokens": result.get("tokens"),
        "validation": validation.get("bits_per_byte") or validation.get("loss"),
        "training s": times[-1].get("seconds") if times else result.get("training_seconds"),
        "ℓ*": statistics.mean(layers) if layers else None,
    }
    return {name: value if is_number(value) else None for name, value in numbers.items()}


def to_json(statuses: list[Status]) -> str:
    """Return the runs as JSON: the fields of Status, and the results of finished runs."""
    rows = []
    for status in statuses:
        numbers = read_results(status) if status.state == "done" else None
        rows.append(status.to_dict() | {"reached": numbers})
    return json.dumps(rows, indent=2, ensure_ascii=False)
