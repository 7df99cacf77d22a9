"""Where the time of an update goes: waiting for data, forward and solve, backward, optimizer."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

PARTS = ("data", "forward", "solve", "backward", "optimizer", "other")


class Mark(NamedTuple):
    """Where one part ends and the next begins."""

    part: str | None  # that begins here; None: time that is no update's
    when: float | torch.cuda.Event


class UpdateTimes:
    """Seconds that updates spend in each of PARTS.

    There is a mark wherever one part ends and another begins, and the time between two marks
    belongs to the part that the first one names: no time is counted twice, none is lost. On a CPU
    a mark is a reading of the clock. A GPU works behind the host that orders the work, so there a
    mark is an event in the device's stream: a part has the seconds between its first and last
    order being reached, those included in which the device had nothing to do. Nothing waits for an
    event: those that the device has passed are read after an update, the rest by `read`.
    """

    def __init__(self, device: torch.device | str, solves: bool = False):
        """solves: whether there are solves to tell from the rest of a forward pass."""
        self.on_gpu = torch.device(device).type == "cuda"
        self.solves = solves
        self.updates = 0
        self._part = "other"
        self._marks: deque[Mark] = deque()
        self._seconds: dict[str | None, float] = defaultdict(float)

    def skip(self) -> None:
        """What has happened since the last update is part of none: a validation, a checkpoint."""
        if self._marks:
            self._marks[-1] = self._marks[-1]._replace(part=None)
        self._mark("other")

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What happens within is of this part; of what is around it where it ends."""
        around, self._part = self._part, name
        self._mark(name)
        try:
            with torch.profiler.record_function(name):  # its name in a profile (`log.profile`)
                yield
        finally:
            self._part = around
            self._mark(around)

    def solving(self) -> AbstractContextManager[None]:
        """The context of a solve. One in a backward pass, of a layer that is computed again, is
        part of that; one in a validation is no update's."""
        return self.part("solve") if self._part == "forward" else _unnamed

    def end_update(self) -> None:
        """An update has ended. What follows is "other", and the next one's, or nobody's after a
        `skip`."""
        self._mark("other")
        self.updates += 1
        self._settle()

    def read(self) -> dict[str, float]:
        """Seconds per update in each part, mean over the updates since the last reading; {} of
        none. Together they are what an update takes. "forward" is without "solve", which is
        absent where nothing is solved."""
        if self._marks:
            _wait_for(self._marks[-1])
        self._settle()
        updates, seconds = self.updates, self._seconds
        self.updates, self._seconds = 0, defaultdict(float)
        if not updates:
            return {}
        return {
            part: float(f"{seconds[part] / updates:.6g}")
            for part in PARTS
            if part != "solve" or self.solves
        }

    def _mark(self, part: str) -> None:
        if self.on_gpu:
            when = torch.cuda.Event(enable_timing=True)
            when.record()
        else:
            when = time.perf_counter()
        self._marks.append(Mark(part, when))

    def _settle(self) -> None:
        """Add up what lies between marks that are passed; the last one stays, where the next part
        begins."""
        marks = self._marks
        while len(marks) > 1 and _is_passed(marks[1]):
            begun = marks.popleft()
            self._seconds[begun.part] += _seconds_between(begun, marks[0])


def _wait_for(mark: Mark) -> None:
    if not isinstance(mark.when, float):
        mark.when.synchronize()


def _is_passed(mark: Mark) -> bool:
    return isinstance(mark.when, float) or mark.when.query()


def _seconds_between(begun: Mark, ended: Mark) -> float:
    if isinstance(begun.when, float):
        return ended.when - begun.when
    return begun.when.elapsed_time(ended.when) / 1000


_unnamed = contextlib.nullcontext()
