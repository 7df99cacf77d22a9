"""Reader threads: they make answers in advance, while the main thread trains."""

from __future__ import annotations

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

    def __init__(
        self,
        functions: Sequence[Callable[[int], Any]],
        keys: Sequence[Sequence[int]],
    ):
        self._requests: dict[int, SimpleQueue] = {}
        self._answers: dict[int, SimpleQueue] = {}
        self._pending = {key: 0 for held in keys for key in held}  # requested and not taken
        is_closed = threading.Event()
        threads = []
        for function, held in zip(functions, keys, strict=True):
            requests: SimpleQueue = SimpleQueue()
            answers: dict[int, SimpleQueue] = {key: SimpleQueue() for key in held}
            self._requests |= dict.fromkeys(held, requests)
            self._answers |= answers
            arguments = (function, requests, answers, is_closed)
            # A daemon: the process does not wait for a thread that waits for the network.
            threads.append(threading.Thread(target=_serve, args=arguments, daemon=True))
        self._finalizer = weakref.finalize(
            self, _join, is_closed, list(self._requests.values()), threads
        )
        self._is_closed = is_closed
        for thread in threads:
            thread.start()

    def take(self, key: int) -> Any:
        """Return the next answer for a key; raise what the thread's function raised."""
        while self._pending[key] <= AHEAD:
            self._requests[key].put(key)
            self._pending[key] += 1
        answer, error = self._answers[key].get()
        self._pending[key] -= 1
        if error is not None:
            raise error
        return answer

    def close(self) -> None:
        """Have the threads end after the answers that they are making."""
        self._is_closed.set()
        for requests in self._requests.values():
            requests.put(None)


def _serve(
    function: Callable[[int], Any],
    requests: SimpleQueue,
    answers: dict[int, SimpleQueue],
    is_closed: threading.Event,
) -> None:
    while (key := requests.get()) is not None and not is_closed.is_set():
        try:
            answers[key].put((function(key), None))
        except Exception as error:
            answers[key].put((None, error))


def _join(
    is_closed: threading.Event, requests: list[SimpleQueue], threads: list[threading.Thread]
) -> None:
    """Let threads finish, which must not run Rust or C++ while the interpreter ends."""
    is_closed.set()
    for queue in requests:
        queue.put(None)
    deadline = time.monotonic() + PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
