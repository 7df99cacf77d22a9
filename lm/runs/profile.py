"""PyTorch profile of a few updates (`log.profile`), written as a Chrome trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from torch import profiler

from lm.common.console import say
from lm.common.files import OutputError, writing


class Profile:
    """Profile of updates `first` to `last` of this rank, written into a file.

    The trace also contains validations and saves between these updates. If the profiler fails, a
    warning is printed and training continues.

    Args:
        updates: (first, last), or None for no profile.
        folder: Folder of the file, made when the file is written.
    """

    def __init__(self, updates: tuple[int, int] | None, folder: Path):
        self.updates, self.folder = updates, Path(folder)
        self._profiler: profiler.profile | None = None
        self._first = 0  # first update in the profile

    @contextlib.contextmanager
    def update(self, number: int) -> Iterator[None]:
        """Run update `number`, counted from 1, and profile it if it is one of `updates`."""
        if self.updates is None:
            yield
            return
        first, last = self.updates
        if self._profiler is None and first <= number <= last:
            with self._errors_as_warnings():
                profile = profiler.profile()  # of the CPU, and of a GPU if the host has one
                profile.start()
                self._profiler, self._first = profile, number
        with profiler.record_function(f"update {number}"):
            yield
        if self._profiler is not None and number >= last:
            with self._errors_as_warnings():
                self._finish(self._profiler, number)

    def close(self) -> None:
        """Stop the profile if the run ends before the last update of the profile."""
        if self._profiler is not None and self.updates is not None:
            with contextlib.suppress(Exception):
                self._profiler.stop()
            self._profiler = None
            say(f"note: the run ends before update {self.updates[1]}: no profile is written")

    def _finish(self, profile: profiler.profile, number: int) -> None:
        """Stop the profile and write its file."""
        self.updates = self._profiler = None
        profile.stop()
        trace = self.folder / f"updates-{self._first}-{number}.trace.json.gz"
        with writing(trace):
            self.folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(trace))
        say(f"profile  of updates {self._first} to {number}: {trace}")

    @contextlib.contextmanager
    def _errors_as_warnings(self) -> Iterator[None]:
        """Turn an error of the profiler into a warning, and end profiling."""
        try:
            yield
        except Exception as e:
            self.updates = None
            reason = str(e) if isinstance(e, OutputError) else repr(e)
            say(f"warning: no profile (log.profile): {reason}; training continues")
