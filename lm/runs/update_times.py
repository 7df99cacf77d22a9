"""Seconds that updates spend in their parts: data, forward, solve, backward, optimizer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

PARTS = ("data", "forward", "solve", "backward", "optimizer")


class UpdateTimes:
    """Seconds that updates spend in each of PARTS.

    On a CPU the clock is read when a part begins and ends. A GPU works asynchronously, so events
    are recorded in its stream when the host begins and ends a part. Only `read` waits for events.
    """

    def __init__(self, device: torch.device | str):
        self.is_on_gpu = torch.device(device).type == "cuda"
        self.update_count = 0  # updates since the last reading
        self._part: str | None = None  # the part that is being measured
        self._spans: list[tuple] = []  # (part, start, end); times in seconds, or GPU events

    @contextlib.contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Measure the time within the block as a part."""
        outer_part, self._part = self._part, part
        start = self._mark()
        try:
            with torch.profiler.record_function(part):  # the part's name in `log.profile`
                yield
        finally:
            self._spans.append((part, start, self._mark()))
            self._part = outer_part

    def measure_solve(self) -> AbstractContextManager[None]:
        """Return a context that measures a solve, which counts as "solve" in the forward pass.

        In the backward pass (gradient checkpointing) it counts as "backward", and in a validation
        it does not count.
        """
        return self.measure("solve") if self._part == "forward" else contextlib.nullcontext()

    def end_update(self) -> None:
        """Count an update."""
        self.update_count += 1

    def read(self) -> dict[str, float]:
        """Return seconds per update in each part, mean over the updates since the last reading.

        "forward" excludes "solve", which is absent for a model without a solver.
        """
        if self.is_on_gpu and self._spans:
            _, _, last_event = self._spans[-1]
            last_event.synchronize()
        seconds = dict.fromkeys(PARTS, 0.0)
        for part, start, end in self._spans:
            seconds[part] += start.elapsed_time(end) / 1000 if self.is_on_gpu else end - start
        seconds["forward"] -= seconds["solve"]
        if not seconds["solve"]:
            del seconds["solve"]
        update_count = max(1, self.update_count)
        self.update_count, self._spans = 0, []
        return {part: float(f"{value / update_count:.6g}") for part, value in seconds.items()}

    def _mark(self) -> float | torch.cuda.Event:
        """Return the current time in seconds, or on a GPU a recorded event."""
        if not self.is_on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
