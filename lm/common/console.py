"""What a person sees: messages and progress, as lines."""

from __future__ import annotations

import os
import time
from datetime import datetime

from lm.common.files import printable
from lm.common.secrets import mask_credentials

PIPE_WIDTH = 1000  # columns where there is no terminal: no table is cut there
PLAIN_EVERY_S = 5.0  # seconds between two lines of progress
ENOUGH_S = 2.0  # of timed work, before the time left is printed


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


def format_duration(seconds: float) -> str:
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


class Progress:
    """Progress of long work: a line for every text, and now and then a line without one.

    Args:
        name: What is done.
        total: Units of all work; None: not known.
        unit: Name of the units.
        every_s: Seconds between two lines without a text.
    """

    def __init__(
        self, name: str, total: int | None = None, unit: str = "", every_s: float = PLAIN_EVERY_S
    ):
        self.name, self.total, self.unit, self.every_s = name, total, unit, every_s
        self.last_line = time.monotonic()
        self.first: tuple[float, int] | None = None  # seconds and units at the first update

    def update(self, done: int, total: int | None = None, text: str | None = None) -> None:
        """Show that so many units are done, with a text or without."""
        total = total or self.total
        now = time.monotonic()
        self.first = self.first or (now, done)
        if text is None and now - self.last_line < self.every_s:
            return
        self.last_line = now
        of = f"/{total}" if total else ""
        parts = [f"{self.name} {done}{of} {self.unit}".rstrip(), text, self._left(now, done, total)]
        say("  ".join([f"{datetime.now():%H:%M:%S}", *(part for part in parts if part)]))

    def _left(self, now: float, done: int, total: int | None) -> str:
        """Return words such as "12 min left"; "" if it is not known or nothing is left.

        The first update is not timed, because it may compile.
        """
        if self.first is None or not total or done >= total:
            return ""
        seconds, units = now - self.first[0], done - self.first[1]
        if units <= 0 or seconds < ENOUGH_S:
            return ""
        return f"{format_duration(seconds / units * (total - done))} left"
