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
from collections.abc import Callable, Hashable, Sequence
from multiprocessing import connection, resource_tracker, util
from typing import Any, NoReturn

from lm.common.errors import MachineError
from lm.common.secrets import mask_logs
from lm.common.signals import STOP

AHEAD = 2  # answers for a key that are made in advance
WATCH_S = 0.5  # seconds between two looks at whether the parent is still there


class ReaderError(MachineError):
    """A reader process is gone; the message says how."""


class Readers:
    """Processes that answer for keys; `take` returns the next answer for a key.

    Each process holds some keys. The answers for a key come in order, however the processes
    overtake each other; after the first `take` of a key up to AHEAD of its answers are made in
    advance. At the end the processes are killed, not waited for.

    Args:
        entry: "module:function"; each process calls the function with its payload, which returns
            the function that maps a key to its next answer.
        payloads: Payload of each process, anything that can be pickled.
        keys: Keys of each process.
    """

    def __init__(
        self,
        entry: str,
        payloads: Sequence[object],
        keys: Sequence[Sequence[Hashable]],
    ):
        started = [_start(entry, payload) for payload in payloads]
        self._processes = [process for process, _ in started]
        self._connections = [ours for _, ours in started]
        self._owner = {key: i for i, held in enumerate(keys) for key in held}
        self._answers: dict[Hashable, deque] = {key: deque() for key in self._owner}
        self._asked: dict[Hashable, int] = dict.fromkeys(self._owner, 0)
        self._queues: list[deque] = [deque() for _ in started]  # keys asked for, in order
        self.close = util.Finalize(
            self, _kill, (self._processes, self._connections), exitpriority=100
        )  # called at exit before multiprocessing joins its children

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

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
        """Return the next answer for a key.

        Raises:
            ReaderError: If a process has died.
            RuntimeError: If its function raised; with the traceback.
        """
        answers = self._answers[key]
        number = self._owner[key]
        while self._asked[key] + len(answers) <= AHEAD:
            try:
                self._connections[number].send(key)
            except OSError:
                self._raise_dead()
            self._queues[number].append(key)
            self._asked[key] += 1
        while not answers:
            sentinels = [process.sentinel for process in self._processes]
            ready = connection.wait([*self._connections, *sentinels])
            self.check()
            for number, ours in enumerate(self._connections):
                if ours in ready:
                    answered = self._queues[number].popleft()
                    self._answers[answered].append(self._receive(number))
                    self._asked[answered] -= 1
        return answers.popleft()

    def _receive(self, number: int) -> Any:
        """Read the next answer of a process.

        Raises:
            ReaderError: If the process has died.
            RuntimeError: If its function raised; with the traceback.
        """
        try:
            answer, failure = self._connections[number].recv()
        except (EOFError, OSError):
            self._raise_dead()
        if failure:
            raise RuntimeError(f"a loader worker failed:\n{failure}")
        return answer

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
    try:
        module, _, function = entry.partition(":")
        make: Callable = getattr(importlib.import_module(module), function)
        answer = make(pickle.loads(payload))
        while True:
            ours.send((answer(ours.recv()), None))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception:
        ours.send((None, traceback.format_exc()))


def _die_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(1)
