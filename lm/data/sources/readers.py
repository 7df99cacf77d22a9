"""Threads that read in advance while the main thread trains."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

AHEAD = 2  # results per key that are read in advance
MAX_JOIN_S = 2.0  # wait for the threads at the end of the process


class Readers:
    """Threads that read results for keys; `take` returns the next result of a key.

    Each thread has some of the keys. The results of a key come in order, whatever the order in
    which threads finish. After the first `take` of a key, up to AHEAD of its results are read in
    advance.

    Args:
        functions: Function of each thread, which maps a key to its next result.
        keys: Keys of each thread.
    """

    def __init__(self, functions: Sequence[Callable[[int], Any]], keys: Sequence[Sequence[int]]):
        threads = [_Reader(*pair) for pair in zip(functions, keys, strict=True)]
        self._thread = {key: thread for thread in threads for key in thread.results}
        self._pending = dict.fromkeys(self._thread, 0)  # results requested and not taken, per key
        self.close = weakref.finalize(self, _end, threads)
        for thread in threads:
            thread.start()

    def take(self, key: int) -> Any:
        """Return the next result of a key, or raise the exception of the thread's function."""
        thread = self._thread[key]
        while self._pending[key] <= AHEAD:
            thread.requests.put(key)
            self._pending[key] += 1
        result, error = thread.results[key].get()
        self._pending[key] -= 1
        if error is not None:
            raise error
        return result


class _Reader(threading.Thread):
    """Thread that processes requests in their order.

    It is a daemon, so that a thread that waits for the network does not keep the process alive.
    """

    def __init__(self, function: Callable[[int], Any], keys: Sequence[int]):
        super().__init__(name="reader", daemon=True)
        self._function = function
        self._is_ended = False
        self.requests: SimpleQueue[int | None] = SimpleQueue()  # None wakes a thread that ends
        self.results: dict[int, SimpleQueue] = {key: SimpleQueue() for key in keys}
        _running.add(self)

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


_running: weakref.WeakSet[_Reader] = weakref.WeakSet()


def _end(threads: list[_Reader]) -> None:
    for thread in threads:
        thread.end()


@atexit.register
def _join() -> None:
    """Wait for threads: they must not run Rust or C++ code while the interpreter shuts down."""
    deadline = time.monotonic() + MAX_JOIN_S
    threads = [thread for thread in _running if thread.is_alive()]
    _end(threads)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
