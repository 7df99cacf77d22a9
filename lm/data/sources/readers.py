"""Threads that read in advance while the main thread trains."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

RESULTS_AHEAD = 2  # results per key that are read in advance
MAX_JOIN_S = 2.0  # wait for the threads at the end of the process


class Readers:
    """Threads that read results for keys; `take` returns the next result of a key.

    Each thread serves some of the keys, so the results of a key come in order. After the first
    `take` of a key, up to RESULTS_AHEAD of its results are read in advance.

    Args:
        functions: One function per thread, which maps a key to the next result of the key.
        keys: Keys of each thread.
    """

    def __init__(self, functions: Sequence[Callable[[int], Any]], keys: Sequence[Sequence[int]]):
        threads = [_Reader(*pair) for pair in zip(functions, keys, strict=True)]
        self._threads = {key: thread for thread in threads for key in thread.results}
        self._pending = dict.fromkeys(self._threads, 0)  # {key: requested results not taken yet}
        self.close = weakref.finalize(self, _end_threads, threads)  # also at the deletion of self
        for thread in threads:
            thread.start()

    def take(self, key: int) -> Any:
        """Return the next result of a key, or raise the exception of the thread's function."""
        thread = self._threads[key]
        while self._pending[key] <= RESULTS_AHEAD:  # one result to return, and those in advance
            thread.requests.put(key)
            self._pending[key] += 1
        result, error = thread.results[key].get()
        self._pending[key] -= 1
        if error is not None:
            raise error
        return result


class _Reader(threading.Thread):
    """Thread that serves requests in their order.

    It is a daemon: while it waits for the network, it must not keep the process alive.
    """

    def __init__(self, function: Callable[[int], Any], keys: Sequence[int]):
        super().__init__(name="reader", daemon=True)
        self._function = function
        self._is_ended = False
        self.requests: SimpleQueue[int | None] = SimpleQueue()  # keys; None wakes the thread to end
        self.results: dict[int, SimpleQueue] = {key: SimpleQueue() for key in keys}
        _readers.add(self)

    def run(self) -> None:
        while (key := self.requests.get()) is not None and not self._is_ended:
            try:
                self.results[key].put((self._function(key), None))
            except Exception as error:
                self.results[key].put((None, error))

    def end(self) -> None:
        """Make the thread end after its current request."""
        self._is_ended = True
        self.requests.put(None)


_readers: weakref.WeakSet[_Reader] = weakref.WeakSet()


def _end_threads(threads: list[_Reader]) -> None:
    for thread in threads:
        thread.end()


@atexit.register
def _join_threads() -> None:
    """Wait for threads: they must not run Rust or C++ code while the interpreter shuts down."""
    deadline = time.monotonic() + MAX_JOIN_S
    threads = [thread for thread in _readers if thread.is_alive()]
    _end_threads(threads)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
