"""Signals that ask a training to save and stop."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator

# Of a launcher before a kill, of a batch system before its time limit, of a terminal that closes,
# of Ctrl-C.
STOP = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


class StopRequested(BaseException):
    """A stop signal within `StopSignals.interruptible`.

    No Exception, as KeyboardInterrupt is none: code that waits and tries again does not catch it.
    """


def stop_with_parent() -> Callable[[], None] | None:
    """Return the `preexec_fn` of `subprocess.Popen` for a training that must not outlive us.

    The system then sends it SIGTERM when this process ends, also by SIGKILL: it saves and stops.
    None where the system has no such thing (Linux has). Call it, and Popen, from the main thread:
    the system watches the thread.
    """
    if sys.platform != "linux":
        return None
    pr_set_pdeathsig = 1
    prctl, parent = ctypes.CDLL(None, use_errno=True).prctl, os.getpid()

    def ask() -> None:
        prctl(pr_set_pdeathsig, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before we asked
            os.kill(os.getpid(), signal.SIGTERM)

    return ask


class StopSignals:
    """Within the context each of STOP asks for a stop after the current update: `asked`.

    A second Ctrl-C interrupts at once; the others are ignored from the first one on, since
    launchers repeat them, also while Python takes itself down. SIGHUP and SIGINT stay ignored where
    they are (nohup, a shell's background); launch/deepspeed.sh starts its ranks with USR1 ignored.
    """

    def __init__(self):
        self.is_stop_requested = False
        self._is_interruptible = False
        self._before = {}

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within the block a stop signal ends what the main thread does, also a wait for a socket.

        Raises:
            StopRequested: In the block, or at its beginning if a signal came before.
        """
        try:
            self._is_interruptible = True  # first: a signal between the two lines is not lost
            if self.is_stop_requested:
                raise StopRequested
            yield
        finally:
            self._is_interruptible = False

    def __enter__(self):
        for number in STOP:
            ignored = signal.getsignal(number) == signal.SIG_IGN
            if not ignored or number in (signal.SIGTERM, signal.SIGUSR1):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *exc):
        if not self.is_stop_requested:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _ask(self, number, _):
        self.is_stop_requested = True
        name = signal.Signals(number).name
        said = f"{name}: saves and stops after this update (press again to quit unsaved)\n"
        os.write(2, said.encode())
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)
        if signal.SIGINT in self._before:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._is_interruptible:
            raise StopRequested
