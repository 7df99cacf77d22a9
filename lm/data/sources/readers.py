"""Reader threads: they make answers in advance, while the main thread trains."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

AHEAD = 2  # answers for a key that are made in advance
PATIENCE_S = 2.0  # at the end of the process, for the threads to finish their answers


class Readers:
    """Threads that answer for keys; `take` returns the next answer for a key.

    Each thread has some keys. The answers for a key come in order, however the threads overtake
    each other; after the first `take` of a key up to AHEAD of its answers are made in advance.

    Args:
        functions: Function of each thread, which maps a key to its next answer.
        keys: Keys of each thread.
    """

    def __init__(self, functions: Sequence[Callable[[int], Any]], keys: Sequence[Sequence[int]]):
        threads = [_Reader(*pair) for pair in zip(functions, keys, strict=True)]
        self._thread = {key: thread for thread in threads for key in thread.answers}
        self._pending = dict.fromkeys(self._thread, 0)  # requested and not taken
        self.close = weakref.finalize(self, _end, threads)
        for thread in threads:
            thread.start()

    def take(self, key: int) -> Any:
        """Return the next answer for a key; raise what the thread's function raised."""
        thread = self._thread[key]
        while self._pending[key] <= AHEAD:
            thread.requests.put(key)
            self._pending[key] += 1
        answer, error = thread.answers[key].get()
        self._pending[key] -= 1
        if error is not None:
            raise error
        return answer


class _Reader(threading.Thread):
    """A thread that answers requests in their order.

    It is a daemon: the process does not wait for a thread that waits for the network.
    """

    def __init__(self, function: Callable[[int], Any], keys: Sequence[int]):
        super().__init__(name="reader", daemon=True)
        self._function = function
        self._is_ended = False
        self.requests: SimpleQueue[int | None] = SimpleQueue()
        self.answers: dict[int, SimpleQueue] = {key: SimpleQueue() for key in keys}
        _running.add(self)

    def run(self) -> None:
        while (key := self.requests.get()) is not None and not self._is_ended:
            try:
                self.answers[key].put((self._function(key), None))
            except Exception as error:
                self.answers[key].put((None, error))

    def end(self) -> None:
        """Have it end after the answer that it is making."""
        self._is_ended = True
        self.requests.put(None)


_running: weakref.WeakSet[_Reader] = weakref.WeakSet()


def _end(threads: list[_Reader]) -> None:
    for thread in threads:
        thread.end()


@atexit.register
def _join() -> None:
    """Let threads finish, which must not run Rust or C++ while the interpreter ends."""
    deadline = time.monotonic() + PATIENCE_S
    threads = [thread for thread in _running if thread.is_alive()]
    _end(threads)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
