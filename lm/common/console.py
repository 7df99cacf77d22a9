"""Output on the terminal: messages, and the progress of long work."""

from __future__ import annotations

import os
import time
from datetime import datetime

from lm.common.files import printable
from lm.common.secrets import mask_credentials

PIPE_WIDTH = 1000  # characters per line without a terminal, so that no table is cut
PROGRESS_INTERVAL_S = 5.0  # seconds between two lines of progress
MIN_TIMED_S = 2.0  # seconds of work after which the remaining time can be estimated


class _Printer:
    """Callable that prints a text. `enabled` is set to False on all ranks except rank 0."""

    def __init__(self):
        self.enabled = True
        self._console = None

    @property
    def console(self):
        """The rich console on which texts and tables are printed."""
        if self._console is None:
            from rich.console import Console

            class PlainConsole(Console):
                """Console that prints texts verbatim, in tables too: no markup, no emoji codes.

                It escapes control characters, so that a folder's name cannot move the cursor, and
                masks credentials in URLs.
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


say = _Printer()


def format_duration(seconds: float) -> str:
    """Format a duration: 45 s, 12 min, 3 h 05 min or 2 d 4 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24} h"


class Progress:
    """Progress of long work, printed at intervals, and whenever there is a text to print.

    Args:
        name: Name of the work.
        total: Units of the whole work, or None if unknown.
        unit: Name of the units.
        every_s: Lines without a text are printed at most once in this many seconds.
    """

    def __init__(
        self,
        name: str,
        total: int | None = None,
        unit: str = "",
        every_s: float = PROGRESS_INTERVAL_S,
    ):
        self.name, self.total, self.unit, self.every_s = name, total, unit, every_s
        self.last_line_time = time.monotonic()
        # Time in seconds and finished units at the first update.
        self.first_update: tuple[float, int] | None = None

    def update(self, done: int, total: int | None = None, text: str | None = None) -> None:
        """Print a line if there is a text or if the last line is old enough.

        Args:
            done: Units that are finished.
            total: Units of the whole work, if not given before.
            text: Text to print at once.
        """
        total = total or self.total
        now = time.monotonic()
        self.first_update = self.first_update or (now, done)
        if text is None and now - self.last_line_time < self.every_s:
            return
        self.last_line_time = now
        count = f"{done}/{total}" if total else f"{done}"
        progress = f"{self.name} {count} {self.unit}".rstrip()
        columns = [f"{datetime.now():%H:%M:%S}", progress, text]
        columns.append(self._format_time_left(now, done, total))
        say("  ".join(column for column in columns if column))

    def _format_time_left(self, now: float, done: int, total: int | None) -> str:
        """Return a text such as "12 min left", or "" if unknown or if the work is finished."""
        if self.first_update is None or not total or done >= total:
            return ""
        # Time before the first update does not count, because it may include compilation.
        first_time, first_done = self.first_update
        seconds, units = now - first_time, done - first_done
        if units <= 0 or seconds < MIN_TIMED_S:
            return ""
        return f"{format_duration(seconds / units * (total - done))} left"
