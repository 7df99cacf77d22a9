"""Output for people: messages and progress, line by line."""

from __future__ import annotations

import os
import time
from datetime import datetime

from lm.common.files import printable
from lm.common.secrets import mask_credentials

PIPE_WIDTH = 1000  # columns without a terminal, so that no table is cut
PROGRESS_INTERVAL_S = 5.0  # seconds between two lines of progress
MIN_TIMED_S = 2.0  # seconds of timed work before the remaining time is printed


class _Say:
    """Printer for the main rank. Calling it prints a text; `console` is its rich console."""

    def __init__(self):
        self.enabled, self._console = True, None

    @property
    def console(self):
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


say = _Say()


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
    """Progress of long work: one line per text, and at intervals a line without text.

    Args:
        name: Name of the work.
        total: Units of the whole work, or None if unknown.
        unit: Name of the units.
        every_s: Seconds between two lines without a text.
    """

    def __init__(
        self,
        name: str,
        total: int | None = None,
        unit: str = "",
        every_s: float = PROGRESS_INTERVAL_S,
    ):
        self.name, self.total, self.unit, self.every_s = name, total, unit, every_s
        self.last_line = time.monotonic()
        self.first: tuple[float, int] | None = None  # seconds and units at the first update

    def update(self, done: int, total: int | None = None, text: str | None = None) -> None:
        """Print a line if there is a text or if the last line is old enough.

        Args:
            done: Units that are finished.
            total: Units of the whole work, if not given before.
            text: Text to print at once.
        """
        total = total or self.total
        now = time.monotonic()
        self.first = self.first or (now, done)
        if text is None and now - self.last_line < self.every_s:
            return
        self.last_line = now
        suffix = f"/{total}" if total else ""
        count = f"{self.name} {done}{suffix} {self.unit}".rstrip()
        parts = [count, text, self._format_time_left(now, done, total)]
        say("  ".join([f"{datetime.now():%H:%M:%S}", *(part for part in parts if part)]))

    def _format_time_left(self, now: float, done: int, total: int | None) -> str:
        """Return a text such as "12 min left", or "" if unknown or if the work is finished.

        The first update is not timed, because it may compile.
        """
        if self.first is None or not total or done >= total:
            return ""
        seconds, units = now - self.first[0], done - self.first[1]
        if units <= 0 or seconds < MIN_TIMED_S:
            return ""
        return f"{format_duration(seconds / units * (total - done))} left"
