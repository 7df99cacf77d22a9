"""What a person sees: messages and progress, live on a terminal, plain lines on a pipe."""

from __future__ import annotations

import time

PLAIN_EVERY_S = 5.0  # seconds between lines of a progress report that is not a terminal


class _Say:
    """`say(text)` prints on the main rank only; `say.console` is the rich console behind it."""

    def __init__(self):
        self.enabled, self._console = True, None

    @property
    def console(self):
        if self._console is None:
            from rich.console import Console

            self._console = Console(highlight=False, soft_wrap=True)
        return self._console

    def __call__(self, text) -> None:
        if self.enabled:
            self.console.print(text, markup=False) if isinstance(text, str) else self.console.print(
                text
            )


say = _Say()


class Progress:
    """A bar on a terminal; otherwise a line now and then. `update(done, total, text)`."""

    def __init__(self, name: str, total: int | None = None, start: int = 0, unit: str = ""):
        self.name, self.total, self.start, self.unit = name, total, start, unit
        self.bar = None
        self.began = self.last_line = time.monotonic()

    def __enter__(self):
        if say.enabled and say.console.is_terminal:
            from rich import progress

            self.bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(bar_width=24),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                progress.TimeRemainingColumn(),
                progress.TextColumn("{task.fields[text]}"),
                console=say.console,
                transient=self.total is None,
            )
            self.bar.start()
            self.task = self.bar.add_task(
                self.name, total=self.total, completed=self.start, text=""
            )
        return self

    def __exit__(self, *exc):
        if self.bar:
            self.bar.stop()

    def update(self, done: int, total: int | None = None, text: str | None = None) -> None:
        """Show progress. On a pipe a line is printed for every `text`, else every few seconds."""
        total = total or self.total
        if self.bar:
            fields = {} if text is None else {"text": text}
            self.bar.update(self.task, completed=done, total=total, **fields)
            return
        now = time.monotonic()
        if text is None and now - self.last_line < PLAIN_EVERY_S:
            return
        self.last_line = now
        of = f"/{total}" if total else ""
        left = ""
        if total and self.start < done < total:
            seconds = (now - self.began) / (done - self.start) * (total - done)
            left = f"  {seconds / 60:.1f} min left" if seconds > 90 else f"  {seconds:.0f} s left"
        say(f"{self.name} {done}{of} {self.unit}  {text or ''}{left}".rstrip())
