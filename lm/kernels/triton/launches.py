"""Schedules of kernel launches that are built once and repeated, on a GPU as a CUDA graph.

The exact solve launches two small kernels per token. On an H100 a launch from Python takes 44 µs,
and such a kernel runs for 11 to 46 µs (benchmarks/results/gpu_h100.json). The arguments of a
schedule are fixed. Addresses of tensors and the position in time change between runs: the kernels
read them from a table in the GPU's memory.
"""

import collections
import threading
import warnings
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from lm.kernels.triton.build import launch

# Schedules in the cache. A model needs one per layer shape, chunk length, batch size and pass.
MAX_SCHEDULES = 32


class Launch(NamedTuple):
    """One launch of a kernel."""

    kernel: Any
    grid: tuple[int, ...]  # number of programs along each axis
    args: dict[str, Any]  # all arguments except the table


class Schedule:
    """List of launches that is run repeatedly.

    The first run launches the kernels one by one, which compiles them. The second run records a
    CUDA graph if that is possible, and replays it, as later runs do. On a CPU every run launches
    the kernels one by one.

    Args:
        table: int64 tensor that the kernels read. `run` writes the chunk's first token into entry
            0, and `write_table` writes all entries.
        launches: The launches. The arguments of a kernel are the table and constants.
    """

    def __init__(self, table: torch.Tensor, launches: list[Launch]) -> None:
        self.table, self.launches = table, launches
        self.lock = threading.Lock()  # callers hold it from `write_table` to the last `run`
        self.graph: torch.cuda.CUDAGraph | None = None
        self.run_count = 0
        self.can_record = table.is_cuda

    def write_table(self, values: list[int]) -> None:
        """Write the table without waiting for the GPU."""
        # The device is explicit because the caller may have changed torch's default device.
        host_table = torch.tensor(values, dtype=torch.int64, device="cpu")
        if self.table.is_cuda:
            # PyTorch does not reuse pinned memory before the copy has ended.
            host_table = host_table.pin_memory()
        self.table.copy_(host_table, non_blocking=True)

    def run(self, first_token: int) -> None:
        """Run all launches for the chunk that begins at `first_token`."""
        self.table[0].fill_(first_token)
        if self.run_count and self.can_record and self.graph is None:
            self._record()
        if self.graph is None:
            self._launch_all()
        else:
            self.graph.replay()
        self.run_count += 1

    def _launch_all(self):
        for kernel, grid, args in self.launches:
            launch(kernel, grid, self.table, **args)

    def _record(self):
        """Record the launches into `graph`; if that fails, warn and do not try again."""
        graph = torch.cuda.CUDAGraph()
        caller_stream, record_stream = torch.cuda.current_stream(), torch.cuda.Stream()
        record_stream.wait_stream(caller_stream)
        try:
            with torch.cuda.stream(record_stream):
                # thread_local: other threads may use CUDA during the recording.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._launch_all()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self.can_record = False
            warnings.warn(
                f"no CUDA graph: the exact solve launches every kernel, which is slower: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        caller_stream.wait_stream(record_stream)
        self.graph = graph


_schedules: collections.OrderedDict[Hashable, Schedule] = collections.OrderedDict()
_lock = threading.Lock()


def get_schedule(key: Hashable, make_schedule: Callable[[], Schedule]) -> Schedule:
    """Return the cached schedule of a key on this device and stream; make it if it is missing.

    The cache drops the least recently used schedule if there are more than MAX_SCHEDULES.
    """
    if torch.cuda.is_available():
        stream = torch.cuda.current_stream()
        key = key, stream.device, stream.cuda_stream
    with _lock:
        if key not in _schedules:
            _schedules[key] = make_schedule()
        _schedules.move_to_end(key)
        if len(_schedules) > MAX_SCHEDULES:
            _schedules.popitem(last=False)
        return _schedules[key]
