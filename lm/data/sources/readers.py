"""Reader processes: they answer requests, outlive a launcher's signals, and die with their parent.

Little is imported here: a new process must be watching its parent before it imports anything heavy.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from multiprocessing import connection, resource_tracker, util
from typing import Any, NoReturn

from lm.common.errors import MachineError
from lm.common.secrets import mask_logs
from lm.common.signals import STOP

WATCH_S = 0.5  # seconds between two looks at whether the parent is still there


class ReaderError(MachineError):
    """A reader process is gone; the message says how."""


class Readers:
    """Processes that each hold some keys; `take(key)` is the next answer for a key.

    The answers for a key come in order, however the processes overtake each other. After the first
    `take` of a key up to `ahead` of its answers are made in advance. At the end the processes are
    killed, not waited for.

    Processes without keys only do what they are sent: `send`, `wait` and `receive` are for them.

    Args:
        entry: "module:function"; the function is called in each process with `payload`, and returns
            the function that maps a key to its next answer.
        payloads: of each process, anything that can be pickled.
        keys: of each process, those that it answers for.
    """

    def __init__(
        self,
        entry: str,
        payloads: Sequence[object],
        keys: Sequence[Sequence[Hashable]],
        ahead: int = 2,
    ):
        started = [_start(entry, payload) for payload in payloads]
        self._processes = [process for process, _ in started]
        self._connections = [ours for _, ours in started]
        self._owner = {key: i for i, held in enumerate(keys) for key in held}
        self._answers: dict[Hashable, deque] = {key: deque() for key in self._owner}
        self._asked = dict.fromkeys(self._owner, 0)
        self._ahead = ahead
        self.close = util.Finalize(
            self, _kill, (self._processes, self._connections), exitpriority=100
        )  # called at exit before multiprocessing joins its children

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    @property
    def connections(self) -> list[connection.Connection]:
        """One a process."""
        return list(self._connections)

    def check(self) -> None:
        """Costs microseconds.

        Raises:
            ReaderError: a process has died.
        """
        sentinels = [process.sentinel for process in self._processes]
        if dead := connection.wait(sentinels, timeout=0):
            number = sentinels.index(dead[0])
            process = self._processes[number]
            process.join()
            code = process.exitcode
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited ({code})"
            raise ReaderError(f"loader worker {number} (pid {process.pid}) {how}")

    def take(self, key: Hashable) -> Any:
        """The next answer for a key.

        Raises:
            ReaderError: a process has died. RuntimeError: its function raised; with the traceback.
        """
        waiting = self._answers[key]
        self._ask(key)
        while not waiting:
            self.check()
            sentinels = [process.sentinel for process in self._processes]
            ready = connection.wait([*self._connections, *sentinels])
            for answering in self._connections:
                if answering in ready:
                    self._receive(answering)
        return waiting.popleft()

    def _ask(self, key: Hashable) -> None:
        """Asks for the answer that is about to be taken, and for those ahead of it."""
        while self._asked[key] + len(self._answers[key]) <= self._ahead:
            try:
                self._connections[self._owner[key]].send((key,))
            except OSError:
                self._raise_dead()
            self._asked[key] += 1

    def _receive(self, answering: connection.Connection) -> None:
        key, answer = self.receive(answering)
        self._answers[key].append(answer)
        self._asked[key] -= 1

    def send(self, to: connection.Connection, key: Hashable, what: object) -> None:
        """Asks an idle process for its function's answer to (key, what).

        Raises:
            ReaderError: a process has died.
        """
        try:
            to.send((key, what))
        except OSError:
            self._raise_dead()

    def wait(self, busy: Iterable[connection.Connection]) -> list[connection.Connection]:
        """Those that have an answer, once there is one.

        Raises:
            ReaderError: a process has died.
        """
        sentinels = [process.sentinel for process in self._processes]
        candidates = list(busy)
        ready = connection.wait([*candidates, *sentinels])
        self.check()
        return [answering for answering in candidates if answering in ready]

    def receive(self, ready: connection.Connection) -> tuple[Any, Any]:
        """(key, answer) of a process.

        Raises:
            ReaderError: a process has died. RuntimeError: its function raised; with the traceback.
        """
        try:
            key, answer, failure = ready.recv()
        except (EOFError, OSError):
            self._raise_dead()
        if failure:
            raise RuntimeError(f"a loader worker failed:\n{failure}")
        return key, answer

    def _raise_dead(self) -> NoReturn:
        """The other end of a connection is closed: its process is dead or about to be."""
        connection.wait([process.sentinel for process in self._processes], timeout=5)
        self.check()
        raise ReaderError("a loader worker closed its connection")


def _start(entry: str, payload: object):
    """(process, our end of its connection). The process is born with STOP blocked, and ignores
    them as soon as it runs: there is no moment at which one of them would end it."""
    context = multiprocessing.get_context("spawn")  # threads of tokenizers do not survive a fork
    ours, theirs = context.Pipe()
    arguments = (theirs, os.getpid(), entry, pickle.dumps(payload))
    process = context.Process(target=work, args=arguments, daemon=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
    try:
        # Its start would unblock some of the signals, so it comes before that of the process.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return process, ours


def _kill(processes: list, connections: list) -> None:
    for process in processes:
        process.kill()
    for ours in connections:
        ours.close()
    for process in processes:
        process.join(timeout=5)


def work(ours: connection.Connection, parent: int, entry: str, payload: bytes) -> None:
    """What a reader process runs, until its parent is gone or hangs up."""
    for number in STOP:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()
    mask_logs()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["OMP_NUM_THREADS"] = "1"
    key = None
    try:
        module, _, function = entry.partition(":")
        make: Callable = getattr(importlib.import_module(module), function)
        answer = make(pickle.loads(payload))
        while True:
            key, *what = ours.recv()
            ours.send((key, answer(key, *what), None))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception:
        ours.send((key, None, traceback.format_exc()))


def _die_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(1)
