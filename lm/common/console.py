"""What a person sees: messages and progress, live on a terminal, plain lines on a pipe."""

from __future__ import annotations

import os
import time
from collections import deque
from datetime import datetime
from typing import TYPE_CHECKING, Any

from lm.common.files import printable
from lm.common.secrets import mask_credentials

if TYPE_CHECKING:
    from rich.live import Live

PIPE_WIDTH = 1000  # columns where there is no terminal: no table is cut there
PLAIN_EVERY_S = 5.0  # seconds between lines of a progress report that is not a terminal
KEPT_SHARE, KEPT_S = 0.05, 600.0  # of the work, and seconds: between lines kept on a terminal
REDRAWN_S = 0.5  # seconds between two estimates of the time left on a terminal
ENOUGH_S = 2.0  # of work that was timed, before the time left is said


class _Say:
    """`say(text)` prints on the main rank only; `say.console` is the rich console behind it."""

    def __init__(self):
        self.enabled, self._console = True, None

    @property
    def console(self):
        if self._console is None:
            from rich.console import Console

            class PlainConsole(Console):
                """Prints text as it is, also in a table: no markup, and no `:M:` as an emoji.

                Control characters are written out: a folder's name moves no cursor. Credentials in
                URLs are masked.
                """

                def render_str(self, text, **options):
                    return super().render_str(mask_credentials(printable(text)), **options)

            self._console = PlainConsole(highlight=False, soft_wrap=True, markup=False, emoji=False)
            if not self._console.is_terminal and "COLUMNS" not in os.environ:
                self._console.width = PIPE_WIDTH
        return self._console

    def __call__(self, text) -> None:
        if self.enabled:
            self.console.print(text, markup=False, emoji=False)


say = _Say()


def duration(seconds: float) -> str:
    """45 s, 12 min, 3 h 05 min or 2 d 4 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24} h"


class Pace:
    """How long what is left will take, judged by the units of work that were done last.

    What would mislead is left out: the first readings (a compilation, memory that is asked for the
    first time), and of the others the one with the slowest units (a compilation that came later, a
    machine that was suspended). So a pause that comes back, a validation say, counts from the
    second time on.

    Args:
        passed_over: readings at the beginning that are not timed.
        fewest: spans between readings before anything is said.
        enough_s: seconds that these must have taken.
        window: spans that are remembered.
    """

    def __init__(
        self, passed_over: int = 2, fewest: int = 3, enough_s: float = ENOUGH_S, window: int = 2000
    ):
        self.passed_over, self.fewest, self.enough_s = passed_over, fewest, enough_s
        self.spans: deque[tuple[float, float]] = deque(maxlen=window)  # (seconds, units)
        self.last: tuple[float, float] | None = None

    def at(self, seconds: float, done: float) -> None:
        """By this reading of a clock so many units were done."""
        if self.last is not None and done > self.last[1] and seconds >= self.last[0]:
            if self.passed_over:
                self.passed_over -= 1
            else:
                self.spans.append((seconds - self.last[0], done - self.last[1]))
        elif self.last is not None and done == self.last[1]:
            return  # the span goes on
        self.last = seconds, done  # also where work was undone, or is told by another clock

    def left(self, total: float) -> float | None:
        """Seconds until `total` units are done; None: not known yet."""
        if self.last is None or len(self.spans) < self.fewest:
            return None
        spans = list(self.spans)
        if len(spans) > 2:
            spans.remove(max(spans, key=lambda span: span[0] / span[1]))
        seconds, units = (sum(values) for values in zip(*spans))
        if seconds < self.enough_s:
            return None
        return seconds / units * max(0.0, total - self.last[1])


class Progress:
    """A bar on a terminal, with the last text below it and now and then a line; otherwise lines.

    `update(done, total, text)` reports progress. Lines on a terminal are the history of the texts:
    one whenever `KEPT_SHARE` of the work is done since the line before, or `KEPT_S` have passed.

    Args:
        every_s: seconds between two lines without a text, where there is no terminal.
    """

    def __init__(
        self,
        name: str,
        total: int | None = None,
        start: int = 0,
        unit: str = "",
        every_s: float = PLAIN_EVERY_S,
    ):
        self.name, self.total, self.start, self.unit = name, total, start, unit
        self.every_s = every_s
        self.live: Live | None = None
        self.text = ""
        self.pace = Pace()
        self.last_line = self.last_estimate = time.monotonic()
        self.done_at_line = start
        self.pace.at(self.last_line, start)

    def __enter__(self):
        if say.enabled and say.console.is_terminal:
            from rich import progress
            from rich.live import Live

            self.bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(bar_width=24),
                progress.MofNCompleteColumn(),
                progress.TextColumn(self.unit),
                progress.TimeElapsedColumn(),
                progress.TextColumn("{task.fields[left]}"),
                console=say.console,
            )
            self.task = self.bar.add_task(
                self.name, total=self.total, completed=self.start, left=""
            )
            self.live = Live(
                console=say.console, get_renderable=self._drawn, transient=self.total is None
            )
            self.live.start()
        return self

    def _drawn(self):
        from rich.console import Group
        from rich.text import Text

        return (
            Group(self.bar, Text(self.text, no_wrap=False, overflow="fold"))
            if self.text
            else self.bar
        )

    def __exit__(self, *exc):
        if self.live:
            self.live.stop()

    def update(self, done: int, total: int | None = None, text: str | None = None) -> None:
        """Show progress. On a pipe a line, with the time, is printed for every `text`,
        else now and then."""
        total = total or self.total
        now = time.monotonic()
        self.pace.at(now, done)
        if self.live:
            self._redraw(now, done, total, text)
            return
        if text is None and now - self.last_line < self.every_s:
            return
        self._print_line(now, done, total, text)

    def _print_line(self, now: float, done: int, total: int | None, text: str | None) -> None:
        self.last_line, self.done_at_line = now, done
        of = f"/{total}" if total else ""
        parts = [f"{self.name} {done}{of} {self.unit}".rstrip(), text, self._left(done, total)]
        say("  ".join([f"{datetime.now():%H:%M:%S}", *(part for part in parts if part)]))

    def _redraw(self, now: float, done: int, total: int | None, text: str | None) -> None:
        fields: dict[str, Any] = {}
        if now - self.last_estimate >= REDRAWN_S or done == total:
            self.last_estimate = now
            fields["left"] = self._left(done, total)
        self.bar.update(self.task, completed=done, total=total, **fields)
        if text is None:
            return
        self.text = printable(text)
        has_moved = total and (done - self.done_at_line >= KEPT_SHARE * total or done == total)
        if has_moved or now - self.last_line >= KEPT_S:
            self._print_line(now, done, total, self.text)

    def _left(self, done: int, total: int | None) -> str:
        """Such as "12 min left"; empty where it is not known or nothing is left."""
        seconds = self.pace.left(total) if total and done < total else None
        return "" if seconds is None else f"{duration(seconds)} left"
