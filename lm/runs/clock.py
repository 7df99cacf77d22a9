"""Where the time of an update goes: waiting for data, forward and solve, backward, optimizer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

PARTS = ("data", "forward", "solve", "backward", "optimizer")


class UpdateTimes:
    """Seconds that updates spend in each of PARTS.

    On a CPU the clock is read where a part begins and ends. A GPU works behind the host that orders
    the work, so there an event in the device's stream is recorded: a part has the seconds between
    its first and last order being reached. Only `read` waits for events.
    """

    def __init__(self, device: torch.device | str):
        self.on_gpu = torch.device(device).type == "cuda"
        self.updates = 0
        self._part: str | None = None
        self._spans: list[tuple] = []  # (part, where it began, where it ended)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time within as this part's."""
        outer, self._part = self._part, name
        begun = self._mark()
        try:
            with torch.profiler.record_function(name):  # its name in a profile (`log.profile`)
                yield
        finally:
            self._spans.append((name, begun, self._mark()))
            self._part = outer

    def solving(self) -> AbstractContextManager[None]:
        """Return the context of a solve. One in a backward pass, of a layer that is computed again,
        is part of that; one in a validation is no update's."""
        return self.part("solve") if self._part == "forward" else contextlib.nullcontext()

    def end_update(self) -> None:
        """Count an update."""
        self.updates += 1

    def read(self) -> dict[str, float]:
        """Return seconds per update in each part, mean over the updates since the last reading.

        "forward" is without "solve", which is absent where nothing is solved.
        """
        if self.on_gpu and self._spans:
            self._spans[-1][2].synchronize()
        seconds = dict.fromkeys(PARTS, 0.0)
        for name, begun, ended in self._spans:
            seconds[name] += begun.elapsed_time(ended) / 1000 if self.on_gpu else ended - begun
        seconds["forward"] -= seconds["solve"]
        if not seconds["solve"]:
            del seconds["solve"]
        updates = max(1, self.updates)
        self.updates, self._spans = 0, []
        return {name: float(f"{value / updates:.6g}") for name, value in seconds.items()}

    def _mark(self) -> float | torch.cuda.Event:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
