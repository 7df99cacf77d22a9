"""Time of the parts of an update: data, forward, solve, backward, optimizer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

PARTS = ("data", "forward", "solve", "backward", "optimizer")


class UpdateTimes:
    """Seconds that updates spend in each of PARTS.

    On a CPU the clock is read when a part begins and ends. A GPU works asynchronously, so there
    events are recorded in its stream when the host begins and ends a part. Only `read` waits for
    events.
    """

    def __init__(self, device: torch.device | str):
        self.on_gpu = torch.device(device).type == "cuda"
        self.updates = 0
        self._part: str | None = None
        self._spans: list[tuple] = []  # (part, start, end)

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Measure the time within the block as a part."""
        outer, self._part = self._part, name
        start = self._mark()
        try:
            with torch.profiler.record_function(name):  # its name in `log.profile`
                yield
        finally:
            self._spans.append((name, start, self._mark()))
            self._part = outer

    def measure_solve(self) -> AbstractContextManager[None]:
        """Return a context that measures a solve within the forward pass.

        A solve in the backward pass (gradient checkpointing) counts as backward, and a solve in a
        validation does not count.
        """
        return self.measure("solve") if self._part == "forward" else contextlib.nullcontext()

    def end_update(self) -> None:
        """Count an update."""
        self.updates += 1

    def read(self) -> dict[str, float]:
        """Return seconds per update in each part, mean over the updates since the last reading.

        "forward" excludes "solve", which is absent for a model without a solver.
        """
        if self.on_gpu and self._spans:
            self._spans[-1][2].synchronize()
        seconds = dict.fromkeys(PARTS, 0.0)
        for name, start, end in self._spans:
            seconds[name] += start.elapsed_time(end) / 1000 if self.on_gpu else end - start
        seconds["forward"] -= seconds["solve"]
        if not seconds["solve"]:
            del seconds["solve"]
        updates = max(1, self.updates)
        self.updates, self._spans = 0, []
        return {name: float(f"{value / updates:.6g}") for name, value in seconds.items()}

    def _mark(self) -> float | torch.cuda.Event:
        """Return the time now, or on a GPU a recorded event."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
