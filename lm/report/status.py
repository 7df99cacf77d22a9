"""Tables of `fprnn status`: progress of runs, and results of sweeps."""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import asdict
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

RIGHT_ALIGNED = ("update", "loss", "tokens/s", "time left", "last record")
RESULT_COLUMNS = ("parameters", "tokens", "validation", "training s", "ℓ*")


def read_statuses(places: list[str], overrides: list[str]) -> list[Status]:
    """Return the status of each run, and of each point of a sweep.

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
    """Print a table of the runs, remarks on them, and the results of the finished sweep points."""
    say(make_table(statuses))
    for line in list_remarks(statuses):
        say(line)
    if any(status.index is not None and status.state == "done" for status in statuses):
        say(format_results(statuses))


def make_cells(status: Status) -> dict[str, str]:
    """Return the cells of a run by column, "" for an unknown value."""
    record = status.record or {}
    tokens_per_s = record.get("tokens_per_s")
    updates = "" if status.step is None else f"{status.step:,}"
    if status.steps is not None:
        updates = f"{updates or 0} / {status.steps:,}"
    return {
        "run": status.run_dir,
        "state": status.state,
        "update": updates,
        "loss": f"{record['loss']:.3f}" if record else "",
        "validation": status.validation,
        "tokens/s": f"{tokens_per_s:,.0f}" if is_number(tokens_per_s) else "",
        "ℓ*": format_iterations(status.num_iters) if status.num_iters else "",
        "time left": "" if status.remaining_s is None else format_duration(status.remaining_s),
        "last record": "" if status.idle_s is None else f"{format_duration(status.idle_s)} ago",
    }


def shorten_paths(paths: list[str]) -> dict[str, str]:
    """Return for each path its name relative to the deepest folder that contains all of them."""
    common = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    return {path: os.path.relpath(os.path.abspath(path), common) for path in paths}


def make_table(statuses: list[Status]) -> Table:
    """Return a table of the runs, with the number of runs in each state as its caption."""
    from rich.table import Table

    counts = {state: sum(status.state == state for status in statuses) for state in STATES}
    summary = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), caption_justify="left")
    table.caption = summary if len(statuses) > 1 else None
    short_paths = shorten_paths([status.run_dir for status in statuses])
    for name in make_cells(statuses[0]):
        # Fold long cells on narrow terminals instead of truncating them.
        is_right_aligned = name in RIGHT_ALIGNED
        table.add_column(name, justify="right" if is_right_aligned else "left", overflow="fold")
    for status in statuses:
        row = make_cells(status) | {"run": short_paths[status.run_dir]}
        table.add_row(*row.values())
    return table


def list_remarks(statuses: list[Status]) -> list[str]:
    """Return the texts of runs, and the unfinished points of a sweep for sbatch's `--array`."""
    lines = []
    for status in statuses:
        is_point = status.index is not None
        name = f"{_sweep_folder(status)} {status.index:03d}" if is_point else status.run_dir
        if status.text:
            lines.append(f"{name} {status.state}: {status.text}")
    unfinished: dict[str, list[int]] = {}  # folder of a sweep → indices of points
    for status in statuses:
        if status.is_unfinished and status.index is not None:
            unfinished.setdefault(_sweep_folder(status), []).append(status.index)
    if any(status.num_iters and any(find_other_solutions(status.num_iters)) for status in statuses):
        lines.append(OTHER_SOLUTION_NOTE)
    for sweep, points in unfinished.items():
        array = f"--array={format_ranges(points)} (some may be queued)"
        lines.append(f"{sweep}: not finished and not running: {array}")
    return lines


def _sweep_folder(status: Status) -> str:
    """Return the folder of the sweep that a run belongs to."""
    return str(Path(status.run_dir).parent)


def format_ranges(numbers: list[int]) -> str:
    """Return numbers in the form of sbatch's --array: "0-2,5" for [0, 1, 2, 5]."""
    groups: list[list[int]] = []  # of consecutive numbers
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ",".join(f"{g[0]}-{g[-1]}" if len(g) > 1 else str(g[0]) for g in groups)


def format_results(statuses: list[Status]) -> str:
    """Return a table of the finished points of sweeps, with means over the seeds of a point."""
    import pandas as pd

    rows = []
    for status in statuses:
        if status.index is not None:
            is_done = status.state == "done"
            names = {"sweep": _sweep_folder(status), "point": status.label or "all seeds"}
            rows.append({**names, "done": is_done, **(read_results(status) if is_done else {})})
    frame = pd.DataFrame(rows).astype(dict.fromkeys(RESULT_COLUMNS, float))
    points = frame.groupby(["sweep", "point"], sort=False)  # the runs of a point differ in the seed
    table = points[list(RESULT_COLUMNS)].mean()
    after_validation = RESULT_COLUMNS.index("validation") + 1
    table.insert(after_validation, "± over seeds", points["validation"].std())
    table.insert(0, "seeds", points.size())
    table.insert(0, "done", points["done"].sum())
    finished_points = table[table["done"] > 0].reset_index()
    return finished_points.to_string(float_format="{:,.6g}".format, na_rep="–", index=False)


def read_results(status: Status) -> dict[str, float | None]:
    """Return the numbers of a finished run by the names in RESULT_COLUMNS, None if unknown.

    "validation" is in bits per byte, or in nats per token if the bytes are unknown. "training s" is
    the time of the updates in seconds. "ℓ*" is the mean over layers.
    """
    result = read_mapping(RunDir(status.run_dir).result) or {}
    validation = get_validation(result) or {}
    records = read_metrics(Path(status.run_dir))
    times = [r["spent"] for r in records if isinstance(r.get("spent"), dict)]
    mean_iters = status.num_iters["mean"] if status.num_iters else []  # of each layer
    numbers = {
        "parameters": result.get("parameters"),
        "tokens": result.get("tokens"),
        "validation": validation.get("bits_per_byte") or validation.get("loss"),
        "training s": times[-1].get("seconds") if times else result.get("training_seconds"),
        "ℓ*": statistics.mean(mean_iters) if mean_iters else None,
    }
    return {name: value if is_number(value) else None for name, value in numbers.items()}


def to_json(statuses: list[Status]) -> str:
    """Return the runs as JSON: the fields of Status, and the results of finished runs."""
    rows = []
    for status in statuses:
        results = read_results(status) if status.state == "done" else None
        rows.append(asdict(status) | {"reached": results})
    return json.dumps(rows, indent=2, ensure_ascii=False)
