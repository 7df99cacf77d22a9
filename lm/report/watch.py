"""`fprnn watch`: runs that were started elsewhere, followed from what their files say.

Nothing is asked of the runs themselves: whoever can read a run directory can watch it. A file that
is being written, was cut short or is damaged is no error here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lm.common.console import Pace, duration, say
from lm.runs.log import iterations_of_layers
from lm.runs.metrics import parse_record
from lm.runs.run_dir import RunDir, RunDirError
from lm.runs.status import is_number, num_iters_of, planned_updates, state_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

COLOURS = {
    "running": "green",
    "done": "blue",
    "stopped": "yellow",
    "failed": "red",
    "missing": "dim",
}
# On a narrow screen columns are left out, the first of these first.
LESS_NEEDED = ("lr", "tokens/s", "last record", "ℓ*", "validation")
RIGHT = ("update", "loss", "lr", "tokens/s", "time left", "last record")
UNLIMITED = 400  # columns of a table that goes to a file or another program


class Tail:
    """The records of a `metrics.jsonl` that another process is writing, each of them once."""

    def __init__(self, path: Path):
        self.path = path
        self.offset = 0  # bytes that were read: whole lines
        self.identity: tuple[int, int] | None = None  # of the file: a rewritten one is another

    def read(self) -> tuple[list[dict], bool]:
        """The records that have come since, and whether they are of a file begun anew (a run that
        was overwritten, rolled back or resumed), so that those before are void."""
        try:
            with self.path.open("rb") as f:
                about = os.fstat(f.fileno())
                identity = about.st_dev, about.st_ino
                anew = identity != self.identity or about.st_size < self.offset
                if anew:
                    self.offset, self.identity = 0, identity
                f.seek(self.offset)
                lines, newline, _ = f.read().rpartition(b"\n")  # the last may be half written
        except OSError:  # not there yet, or not any more
            anew, self.offset, self.identity = self.identity is not None, 0, None
            return [], anew
        self.offset += len(lines) + len(newline)
        found = map(parse_record, lines.splitlines())
        return [record for record in found if record is not None], anew


@dataclass(frozen=True)
class Seen:
    """What a run's files say at one moment; None and "" what they do not."""

    name: str  # the path of its directory
    state: str  # of sweep_status.STATES
    text: str  # what it has reached, or what happened
    step: int | None = None  # updates made, by the last record
    steps: int | None = None  # of the whole run
    record: dict | None = None  # of training, the last
    validation: str = ""
    num_iters: dict | None = None  # ℓ* of the layers, as the record of the last probe has it
    left_s: float | None = None
    age_s: float | None = None  # since the last record was written

    @property
    def ended(self) -> bool:
        return self.state != "running"


class Followed:
    """One run that is watched: `look` again and again."""

    def __init__(self, path: str | Path):
        self.run = RunDir(path)
        self.tail = Tail(self.run.metrics)
        self._forget()

    def _forget(self) -> None:
        self.step: int | None = None
        self.record: dict | None = None
        self.validation = ""
        self.num_iters: dict | None = None
        self.pace = Pace(passed_over=0, fewest=1, enough_s=0, window=50)

    def look(self, now: float) -> Seen:
        """now: Unix seconds."""
        records, anew = self.tail.read()
        if anew:
            self._forget()
        for record in records:
            self._take(record)
        steps = planned_updates(self.run.config)
        state, text = state_of(self.run, steps, now)
        left = None if steps is None or state != "running" else self.pace.left(steps)
        return Seen(
            name=str(self.run),
            state=state,
            text=text,
            step=self.step,
            steps=steps,
            record=self.record,
            validation=self.validation,
            num_iters=self.num_iters,
            left_s=left,
            age_s=_age(self.run.metrics, now) if self.step is not None else None,
        )

    def _take(self, record: dict) -> None:
        self.step = record["step"]
        self.num_iters = num_iters_of(record) or self.num_iters
        self.validation = _validation(record) or self.validation
        if is_number(record.get("loss")):
            self.record = record
            spent = record.get("spent")
            seconds = spent.get("seconds") if isinstance(spent, dict) else record.get("seconds")
            if is_number(seconds):
                self.pace.at(seconds, record["step"])


def _validation(record: dict) -> str:
    """The last validation in a few words: "4.065 (2.34 bits per byte)", or of a synthetic task the
    first of its scores."""
    found = record.get("validation")
    if isinstance(found, dict) and is_number(found.get("loss")):
        bits = found.get("bits_per_byte")
        return f"{found['loss']:.3f}" + (f" ({bits:.3f} bits/byte)" if is_number(bits) else "")
    tried = record.get("valid")
    scores = tried.get("metrics") if isinstance(tried, dict) else None
    for name, value in scores.items() if isinstance(scores, dict) else ():
        if is_number(value):
            return f"{name} {value:.3f}"
    return ""


def _age(path: Path, now: float) -> float | None:
    try:
        return max(0.0, now - path.stat().st_mtime)
    except OSError:
        return None


def watch(paths: list[str], every_s: float = 2.0, once: bool = False, wait: bool = False) -> bool:
    """Show the runs until all have ended, and what became of each; return whether all are done.

    Args:
        paths: of run directories, of language models or synthetic tasks.
        every_s: seconds between two looks.
        once: look once, whatever they do, and return True.
        wait: also for runs that are not there yet.
    Raises:
        RunDirError: a directory holds no run, and `wait` was not asked for.
    """
    followed = [Followed(path) for path in dict.fromkeys(map(os.path.normpath, paths))]
    if not wait:
        for one in followed:
            _check(one.run)
    if once:
        seen = [one.look(time.time()) for one in followed]
        _show(seen)
        _say_how([one for one in seen if one.state in ("stopped", "failed")])
        return True
    looks = _until_ended(followed, every_s, wait)
    seen = _live(looks) if say.console.is_terminal else _lines(looks)
    _say_how(seen)
    return all(one.state == "done" for one in seen)


def _say_how(seen: list[Seen]) -> None:
    """A line each: what became of a run, and why."""
    for one in seen:
        say(f"{one.name} {one.state}" + (f": {one.text}" if one.text else ""))


def _check(run: RunDir) -> None:
    """Raises RunDirError where there is no run."""
    if run.holds_run or run.lease.exists():
        return
    below = sorted(run.path.glob("*/config.yaml"))
    hint = "give a run directory, or --wait for one that is about to be started"
    if below:
        hint = f"it has {len(below)} of them below: {run}/*/"
    raise RunDirError(f"{run} is no run directory, it has no config.yaml: {hint}")


def _until_ended(followed: list[Followed], every_s: float, wait: bool) -> Iterator[list[Seen]]:
    """What is seen of all, every so many seconds, until none is to be waited for."""
    while True:
        seen = [one.look(time.time()) for one in followed]
        yield seen
        if all(one.ended and not (wait and one.state == "missing") for one in seen):
            return
        time.sleep(every_s)


def _live(looks: Iterable[list[Seen]]) -> list[Seen]:
    """A table that is drawn anew with every look → the last one."""
    from rich.live import Live

    seen = []
    with Live(console=say.console, auto_refresh=False) as live:
        for seen in looks:
            live.update(fitting(seen, say.console), refresh=True)
    return seen


def _lines(looks: Iterable[list[Seen]]) -> list[Seen]:
    """A line for every new record and every change of state → the last look."""
    said: dict[str, tuple] = {}
    seen = []
    for seen in looks:
        for one in seen:
            news = one.state, one.step, one.validation
            if said.get(one.name) != news:
                said[one.name] = news
                say(line(one))
    return seen


def _show(seen: list[Seen]) -> None:
    if say.console.is_terminal:
        say(fitting(seen, say.console))
        return
    from rich.console import Console

    Console(width=UNLIMITED, highlight=False).print(table(seen))


def cells(one: Seen) -> dict[str, str]:
    """What the table shows of a run, by column; "" what is not known."""
    record = one.record or {}
    updates = "" if one.step is None else f"{one.step:,}"
    if one.steps is not None:
        updates = f"{updates or 0} / {one.steps:,}"
    return {
        "run": one.name,
        "state": one.state,
        "update": updates,
        "loss": _number(record.get("loss"), "{:.3f}"),
        "validation": one.validation,
        "lr": _number(record.get("lr"), "{:.1e}"),
        "tokens/s": _number(record.get("tokens_per_s"), "{:,.0f}"),
        "ℓ*": iterations_of_layers(one.num_iters) if one.num_iters else "",
        "time left": "" if one.left_s is None else duration(one.left_s),
        "last record": "" if one.age_s is None else f"{duration(one.age_s)} ago",
    }


def _number(value: object, form: str) -> str:
    return form.format(value) if is_number(value) else ""


def line(one: Seen) -> str:
    """The cells of a run as a line of labelled figures."""
    shown = cells(one)
    parts = [f"{shown.pop('run')}  {shown.pop('state')}  {shown.pop('update')}".rstrip()]
    shown.pop("last record")
    return "  ".join(parts + [f"{name} {text}" for name, text in shown.items() if text])


def short_names(names: list[str]) -> dict[str, str]:
    """Of each path what it is below the folder that all are in; of a single one its last part."""
    common = os.path.commonpath([os.path.dirname(os.path.abspath(name)) for name in names])
    return {name: os.path.relpath(os.path.abspath(name), common) for name in names}


def table(seen: list[Seen], without: tuple[str, ...] = ()) -> Table:
    """The runs as a rich table.

    Args:
        without: columns that are left out.
    """
    from rich.table import Table
    from rich.text import Text

    out = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    short = short_names([one.name for one in seen])
    names = [name for name in cells(seen[0]) if name not in without]
    for name in names:
        out.add_column(name, justify="right" if name in RIGHT else "left", no_wrap=name != "run")
    for one in seen:
        shown = cells(one) | {"run": short[one.name]}
        styles = {"state": COLOURS[one.state]}
        out.add_row(*(Text(shown[name], styles.get(name, "")) for name in names))
    return out


def fitting(seen: list[Seen], console: Console) -> Table:
    """The table with as many columns as the console is wide for."""
    unlimited = console.options.update(max_width=UNLIMITED)
    for count in range(len(LESS_NEEDED) + 1):
        made = table(seen, LESS_NEEDED[:count])
        if console.measure(made, options=unlimited).maximum <= console.width:
            break
    return made
