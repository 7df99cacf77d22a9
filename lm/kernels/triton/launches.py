"""Launches with fixed arguments, made once and repeated: on a GPU as a CUDA graph.

A step of the exact token is two small kernels; launched one by one from Python they would cost ten
times what they compute. What changes between repetitions (addresses, the place in time) the kernels
read from a table in the GPU's memory.
"""

import collections
import threading
import warnings
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from lm.kernels.triton.build import launch

MOST_SCHEDULES = 32  # that are kept: of a model, one for each length of chunk, batch and direction


class Launch(NamedTuple):
    """One launch of a kernel."""

    kernel: Any
    programs: tuple[int, ...]
    args: dict[str, Any]  # besides the table


class Schedule:
    """A list of launches, to be run again and again.

    The first run launches one by one, which compiles; the second is recorded as a CUDA graph where
    that is possible, and replayed from then on. Elsewhere every run launches one by one.
    """

    def __init__(self, table: torch.Tensor, launches: list[Launch]) -> None:
        """table: what the kernels read and `point` writes. launches: their arguments are the table
        and numbers."""
        self.table, self.launches = table, launches
        self.lock = threading.Lock()  # from `point` to the last run
        self.graph: torch.cuda.CUDAGraph | None = None
        self.runs = 0
        self.recordable = table.is_cuda

    def point(self, values: list[int]) -> None:
        """Write the table, whatever torch's default device is. No one waits for the GPU."""
        numbers = torch.tensor(values, dtype=torch.int64, device="cpu")
        if self.table.is_cuda:
            numbers = numbers.pin_memory()  # its memory is not used again before it is read
        self.table.copy_(numbers, non_blocking=True)

    def run(self, first: int) -> None:
        """Run all launches for the chunk that begins at token `first`."""
        self.table[0].fill_(first)
        if self.runs and self.recordable and self.graph is None:
            self._record()
        if self.graph is None:
            self._launch()
        else:
            self.graph.replay()
        self.runs += 1

    def _launch(self):
        for kernel, programs, args in self.launches:
            launch(kernel, programs, self.table, **args)

    def _record(self):
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        apart = torch.cuda.Stream()
        apart.wait_stream(current)
        try:
            with torch.cuda.stream(apart):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._launch()
                finally:
                    graph.capture_end()
        except RuntimeError as wrong:
            self.recordable = False
            warnings.warn(
                f"the exact token is launched kernel by kernel, which is slower: {wrong}",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        current.wait_stream(apart)
        self.graph = graph


_schedules: collections.OrderedDict[Hashable, Schedule] = collections.OrderedDict()
_lock = threading.Lock()


def schedule(key: Hashable, make: Callable[[], Schedule]) -> Schedule:
    """The Schedule of this key, on this device and stream; what was used longest ago is dropped
    above MOST_SCHEDULES."""
    if torch.cuda.is_available():
        stream = torch.cuda.current_stream()
        key = key, stream.device, stream.cuda_stream
    with _lock:
        if key not in _schedules:
            _schedules[key] = make()
        _schedules.move_to_end(key)
        if len(_schedules) > MOST_SCHEDULES:
            _schedules.popitem(last=False)
        return _schedules[key]
