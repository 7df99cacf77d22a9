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
    """Profiles updates `first` to `last` of this rank, and says where the two files are.

    Whatever lies between the first and the last of them is in the trace too: a validation, say. A
    profile that cannot be taken or written is a warning; training goes on without it.

    Args:
        updates: (first, last), or None: nothing is profiled.
        folder: of the two files; made when they are written.
        say: takes a sentence.
        paused: a context for what the profiler itself takes, which is no update's time.
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

    @property
    def is_on(self) -> bool:
        """Whether an update is being profiled."""
        return self._profiler is not None

    def begin_at(self, step: int) -> None:
        """Say what will become of it in a run that has made so many updates."""
        if self.updates is not None and step >= self.updates[1]:
            self.say(
                f"note: log.profile is {list(self.updates)}, and {step} updates are made: nothing"
                " is profiled"
            )
            self.updates = None

    @contextlib.contextmanager
    def update(self, number: int) -> Iterator[None]:
        """The context of update `number`, counted from 1."""
        if self.updates is None:
            yield
            return
        first, last = self.updates
        if self._profiler is None and first <= number <= last:
            with self.paused():
                self._start(number)
        named = profiler.record_function(f"update {number}") if self.is_on else _nothing
        with named:
            yield
        if self.is_on and number >= last:
            with self.paused():
                self._finish(number)

    def close(self) -> None:
        """Give up a profile whose last update does not come: the run stops before."""
        if self._profiler is not None:
            assert self.updates is not None  # there is no profiler without them
            with contextlib.suppress(Exception):
                self._profiler.stop()
            self._profiler = None
            self.say(f"note: the run ends before update {self.updates[1]}: no profile is written")

    def _start(self, number: int) -> None:
        kinds = [profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(profiler.ProfilerActivity.CUDA)
        made = profiler.profile(activities=kinds)
        try:
            made.start()
        except Exception as e:  # a profiler is already at work, or the device has none
            self._give_up(e)
            return
        self._profiler, self._begun_at = made, number

    def _finish(self, number: int) -> None:
        done, self._profiler = self._profiler, None
        assert done is not None  # it is on
        name = f"updates-{self._begun_at}-{number}"
        trace, table = (self.folder / f"{name}{end}" for end in (".trace.json.gz", ".txt"))
        try:
            done.stop()
            _write_trace(done, trace)
            write_text(table, _table(done) + "\n")
        except Exception as e:
            self._give_up(e)
            return
        self.updates = None
        self.say(f"profile  of updates {self._begun_at} to {number}: {trace}, {table.name}")

    def _give_up(self, error: Exception) -> None:
        self.updates = None
        what = str(error) if isinstance(error, OutputError) else repr(error)
        self.say(f"warning: no profile (log.profile): {what}; training goes on")


def _write_trace(done: profiler.profile, path: Path) -> None:
    """Whole or not there."""
    tmp = path.with_name(f".{os.getpid()}.{path.name}")  # whose ending says that it is compressed
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            done.export_chrome_trace(str(tmp))
            os.replace(tmp, path)
        finally:
            tmp.unlink(missing_ok=True)


def _table(done: profiler.profile) -> str:
    """The operators that took the most time themselves, of the device where there is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        averages = done.key_averages()
        on_device = torch.cuda.is_available()
        by = "self_device_time_total" if on_device else "self_cpu_time_total"
        return averages.table(sort_by=by, row_limit=TOP, max_name_column_width=80)


_nothing = contextlib.nullcontext()
