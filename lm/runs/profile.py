"""A PyTorch profile of a few updates (`log.profile`): a Chrome trace, and the top operators."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import profiler

from lm.common.files import OutputError, write_text, writing

TOP = 40  # operators in the table


class Profile:
    """Profile of updates `first` to `last` of this rank, written into two files.

    Validations and saves between these updates are in the trace too. A profile that cannot be
    taken or written is a warning, and training continues without it.

    Args:
        updates: (first, last), or None: nothing is profiled.
        folder: Folder of the two files; it is made when they are written.
        say: Function that prints a sentence.
        paused: Context for the profiler's own work, which is no update's time.
    """

    def __init__(
        self,
        updates: tuple[int, int] | None,
        folder: Path,
        say: Callable[[str], None] = print,
        paused: Callable = contextlib.nullcontext,
    ):
        self.updates, self.folder, self.say, self.paused = updates, Path(folder), say, paused
        self._profiler: profiler.profile | None = None
        self._begun_at = 0

    @contextlib.contextmanager
    def update(self, number: int) -> Iterator[None]:
        """Run update `number`, counted from 1, and profile it if it is one of `updates`."""
        if self.updates is None:
            yield
            return
        first, last = self.updates
        if self._profiler is None and first <= number <= last:
            with self.paused(), self._warning():
                self._start(number)
        with profiler.record_function(f"update {number}"):
            yield
        if self._profiler is not None and number >= last:
            with self.paused(), self._warning():
                self._finish(self._profiler, number)

    def close(self) -> None:
        """Stop a profile whose last update does not come: the run stops before."""
        if self._profiler is not None and self.updates is not None:
            with contextlib.suppress(Exception):
                self._profiler.stop()
            self._profiler = None
            self.say(f"note: the run ends before update {self.updates[1]}: no profile is written")

    def _start(self, number: int) -> None:
        kinds = [profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(profiler.ProfilerActivity.CUDA)
        started = profiler.profile(activities=kinds)
        started.start()
        self._profiler, self._begun_at = started, number

    def _finish(self, profile: profiler.profile, number: int) -> None:
        self.updates = self._profiler = None
        profile.stop()
        name = f"updates-{self._begun_at}-{number}"
        trace, table = (self.folder / f"{name}{end}" for end in (".trace.json.gz", ".txt"))
        _write_trace(profile, trace)
        write_text(table, _table(profile) + "\n")
        self.say(f"profile  of updates {self._begun_at} to {number}: {trace}, {table.name}")

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Turn an error of the profiler into a warning, and profile nothing any more."""
        try:
            yield
        except Exception as e:
            self.updates = None
            reason = str(e) if isinstance(e, OutputError) else repr(e)
            self.say(f"warning: no profile (log.profile): {reason}; training goes on")


def _write_trace(profile: profiler.profile, path: Path) -> None:
    """Write the trace under another name, then rename it: the file is whole or not there."""
    partial = path.with_name(f".{os.getpid()}.{path.name}")  # the ending asks for compression
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            profile.export_chrome_trace(str(partial))
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def _table(profile: profiler.profile) -> str:
    """Return a table of the operators that took the most time, on the device where there is one."""
    key = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return profile.key_averages().table(sort_by=key, row_limit=TOP, max_name_column_width=80)
