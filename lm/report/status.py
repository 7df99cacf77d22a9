"""What `fprnn status` shows: how far runs are, live or once, and what a sweep has reached."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lm.common.console import duration, say
from lm.common.files import printable, read_mapping
from lm.runs.log import iterations_of_layers
from lm.runs.metrics import ELSEWHERE_NOTE, is_elsewhere, read_metrics
from lm.runs.places import check_runs_to_watch
from lm.runs.run_dir import RunDir
from lm.runs.status import STATES, Status, is_number, run_status, sweep_status, validation_of

if TYPE_CHECKING:
    from rich.table import Table

EVERY_S = 2.0  # seconds between two looks
COLOURS = {
    "running": "green",
    "done": "blue",
    "stopped": "yellow",
    "failed": "red",
    "missing": "dim",
}
RIGHT = ("update", "loss", "tokens/s", "time left", "last record")
RESULTS = ("parameters", "tokens", "validation", "training s", "ℓ*")

Look = Callable[[], list[Status]]


def look_at(places: list[str], overrides: list[str], follow: bool) -> Look:
    """What is seen of all places, whenever it is called.

    Args:
        places: run directories, of language models or synthetic tasks; or the YAML of a sweep,
            whose points are trained with these overrides.
        follow: runs that are not there yet are waited for.
    Raises:
        ConfigError: a YAML is wrong. PlaceError: a directory holds no run.
    """
    parts: list[Look] = []
    for place in dict.fromkeys(map(os.path.normpath, places)):
        if place.endswith((".yaml", ".yml")):
            parts.append(partial(sweep_status, place, overrides))
        else:
            check_runs_to_watch(place, follow)
            run = RunDir(place)
            parts.append(partial(_status_of, run))
    return lambda: [status for part in parts for status in part()]


def _status_of(run: RunDir) -> list[Status]:
    return [run_status(run, time.time())]


def show(look: Look) -> None:
    """One table, what became of the runs, and of a sweep what it has reached."""
    seen = look()
    say(table(seen))
    for line in remarks(seen):
        say(line)
    if any(status.label and status.state == "done" for status in seen):
        say(results(seen))


def follow(look: Look) -> bool:
    """Show the runs until all have ended, then what became of each; whether all are done."""
    looks = _until_ended(look)
    seen = _live(looks) if say.console.is_terminal else _lines(looks)
    for line in remarks(seen):
        say(line)
    return all(status.state == "done" for status in seen)


def _until_ended(look: Look) -> Iterator[list[Status]]:
    while True:
        seen = look()
        yield seen
        if all(status.state not in ("running", "missing") for status in seen):
            return
        time.sleep(EVERY_S)


def _live(looks: Iterable[list[Status]]) -> list[Status]:
    """A table that is drawn anew with every look → the last one."""
    from rich.live import Live

    seen = []
    with Live(console=say.console, auto_refresh=False) as live:
        for seen in looks:
            live.update(table(seen), refresh=True)
    return seen


def _lines(looks: Iterable[list[Status]]) -> list[Status]:
    """A line for every new record and every change of state → the last look."""
    said: dict[str, tuple] = {}
    seen = []
    for seen in looks:
        for status in seen:
            news = status.state, status.step, status.validation
            if said.get(status.run_dir) != news:
                said[status.run_dir] = news
                say(line(status))
    return seen


def cells(status: Status) -> dict[str, str]:
    """What the table shows of a run, by column; "" what is not known."""
    record = status.record or {}
    updates = "" if status.step is None else f"{status.step:,}"
    if status.steps is not None:
        updates = f"{updates or 0} / {status.steps:,}"
    return {
        "run": status.run_dir,
        "state": status.state,
        "update": updates,
        "loss": f"{record['loss']:.3f}" if record else "",
        "validation": status.validation,
        "tokens/s": _thousands(record.get("tokens_per_s")),
        "ℓ*": iterations_of_layers(status.num_iters) if status.num_iters else "",
        "time left": "" if status.left_s is None else duration(status.left_s),
        "last record": "" if status.seen_s is None else f"{duration(status.seen_s)} ago",
    }


def _thousands(value: object) -> str:
    return f"{value:,.0f}" if is_number(value) else ""


def line(status: Status) -> str:
    """The cells of a run as a line of labelled figures."""
    shown = cells(status)
    parts = [f"{shown.pop('run')}  {shown.pop('state')}  {shown.pop('update')}".rstrip()]
    shown.pop("last record")
    return "  ".join(parts + [f"{name} {text}" for name, text in shown.items() if text])


def short_names(names: list[str]) -> dict[str, str]:
    """Of each path what it is below the folder that all are in; of a single one its last part."""
    common = os.path.commonpath([os.path.dirname(os.path.abspath(name)) for name in names])
    return {name: os.path.relpath(os.path.abspath(name), common) for name in names}


def table(seen: list[Status]) -> Table:
    """The runs as a rich table, with a count of their states below."""
    from rich.table import Table
    from rich.text import Text

    counts = {state: sum(status.state == state for status in seen) for state in STATES}
    summary = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    out = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), caption_justify="left")
    out.caption = summary if len(seen) > 1 else None
    short = short_names([status.run_dir for status in seen])
    for name in cells(seen[0]):
        # Narrow terminals break what is long; nothing is cut.
        out.add_column(name, justify="right" if name in RIGHT else "left", overflow="fold")
    for status in seen:
        shown = cells(status) | {"run": short[status.run_dir]}
        styles = {"state": COLOURS[status.state]}
        out.add_row(*(Text(printable(text), styles.get(name, "")) for name, text in shown.items()))
    return out


def remarks(seen: list[Status]) -> list[str]:
    """A line for each run about which there is something to say, then how to train what is left of
    a sweep."""
    lines = []
    for status in seen:
        name = status.run_dir if status.index is None else f"{status.index:03d}"
        if status.text:
            lines.append(f"{name} {status.state}: {status.text}")
    left = [status.index for status in seen if status.is_left and status.index is not None]
    if any(status.num_iters and any(is_elsewhere(status.num_iters)) for status in seen):
        lines.append(ELSEWHERE_NOTE)
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


def results(seen: list[Status]) -> Table:
    """What the finished points of a sweep have reached: a row for all seeds of a point."""
    from rich.table import Table

    out = Table(title_justify="left", title="Finished points, mean ± standard deviation over seeds")
    out.add_column("point")
    for name in ("seeds", *RESULTS):
        out.add_column(name, justify="right")
    points: dict[tuple[Path, str], list[Status]] = {}
    for status in seen:
        if status.label:
            points.setdefault((Path(status.run_dir).parent, status.label), []).append(status)
    for (_, label), of_point in points.items():
        done = [reached(status) for status in of_point if status.state == "done"]
        if done:
            count = str(len(done)) if len(done) == len(of_point) else f"{len(done)}/{len(of_point)}"
            out.add_row(label, count, *(_over_seeds(done, name) for name in RESULTS))
    return out


def reached(status: Status) -> dict[str, float | None]:
    """The numbers of a finished run by RESULTS; None what its files do not say. The validation is
    in bits per byte, in nats a token where the text's bytes are not known; the seconds are those
    of the updates; ℓ* is the mean over layers."""
    result = read_mapping(RunDir(status.run_dir).result) or {}
    validation = validation_of(result) or {}
    spent = [
        r["spent"] for r in read_metrics(Path(status.run_dir)) if isinstance(r.get("spent"), dict)
    ]
    layers = status.num_iters["mean"] if status.num_iters else []
    numbers = {
        "parameters": result.get("parameters"),
        "tokens": result.get("tokens"),
        "validation": validation.get("bits_per_byte") or validation.get("loss"),
        "training s": spent[-1].get("seconds") if spent else result.get("training_seconds"),
        "ℓ*": statistics.mean(layers) if layers else None,
    }
    return {name: value if is_number(value) else None for name, value in numbers.items()}


def _over_seeds(done: list[dict[str, float | None]], name: str) -> str:
    values = [value for row in done if (value := row[name]) is not None]
    if not values:
        return "–"
    mean = statistics.mean(values)
    if name == "validation":
        return f"{mean:.4f}" + (f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else "")
    return f"{mean:.1f}" if name == "ℓ*" else f"{mean:,.0f}"


def as_json(seen: list[Status]) -> str:
    """A list of mappings, one a run, with the fields of Status; of those that are done the numbers
    of `reached` as well."""
    rows = []
    for status in seen:
        numbers = reached(status) if status.state == "done" else None
        rows.append(asdict(status) | {"reached": numbers})
    return json.dumps(rows, indent=2, ensure_ascii=False)
