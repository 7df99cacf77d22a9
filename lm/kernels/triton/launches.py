"""Schedules of kernel launches that are built once and repeated, on a GPU as a CUDA graph.

A token of the exact solve is two small kernels. Launching them one by one from Python would take
ten times as long as they run. The arguments of a schedule are fixed; what changes between runs
(addresses, the position in time) is in a table in the GPU's memory, which the kernels read.
"""

import collections
import threading
import warnings
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from lm.kernels.triton.build import launch

# Schedules in the cache. A model needs one per chunk length, batch size and direction.
MAX_SCHEDULES = 32


class Launch(NamedTuple):
    """One launch of a kernel."""

    kernel: Any
    programs: tuple[int, ...]  # the grid
    args: dict[str, Any]  # all arguments except the table


class Schedule:
    """List of launches that is run repeatedly.

    The first run launches the kernels one by one, which compiles them. The second run records them
    as a CUDA graph if that is possible, and later runs replay it. On a CPU every run launches them
    one by one.

    Args:
        table: int64 tensor that the kernels read and `point` writes.
        launches: The launches; their arguments are the table and constants.
    """

    def __init__(self, table: torch.Tensor, launches: list[Launch]) -> None:
        self.table, self.launches = table, launches
        self.lock = threading.Lock()  # held from `point` to the last run
        self.graph: torch.cuda.CUDAGraph | None = None
        self.runs = 0
        self.recordable = table.is_cuda

    def point(self, values: list[int]) -> None:
        """Write the table without waiting for the GPU."""
        # The device is explicit because the caller may have changed torch's default device.
        numbers = torch.tensor(values, dtype=torch.int64, device="cpu")
        if self.table.is_cuda:
            numbers = numbers.pin_memory()  # pinned memory is not reused before it has been read
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
        recording = torch.cuda.Stream()
        recording.wait_stream(current)
        try:
            with torch.cuda.stream(recording):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._launch()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self.recordable = False
            warnings.warn(
                f"the exact token is launched kernel by kernel, which is slower: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        current.wait_stream(recording)
        self.graph = graph


_schedules: collections.OrderedDict[Hashable, Schedule] = collections.OrderedDict()
_lock = threading.Lock()


def get_schedule(key: Hashable, make: Callable[[], Schedule]) -> Schedule:
    """Return the schedule of a key on this device and stream; make it if it is missing.

    Above MAX_SCHEDULES the least recently used schedule is dropped.
    """
    if torch.cuda.is_available():
        stream = torch.cuda.current_stream()
        key = key, stream.device, stream.cuda_stream
    with _lock:
        if key not in _schedules:
            _schedules[key] = make()
        _schedules.move_to_end(key)
        if len(_schedules) > MAX_SCHEDULES:
            _schedules.popitem(last=False)
        return _schedules[key]
