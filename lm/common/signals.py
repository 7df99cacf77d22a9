"""Signals that ask a training process to save and stop."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator

STOP_SIGNALS = (
    signal.SIGTERM,  # from a launcher before it kills the process
    signal.SIGUSR1,  # from a batch system before the time limit
    signal.SIGHUP,  # from a terminal that was closed
    signal.SIGINT,  # Ctrl-C
)
PR_SET_PDEATHSIG = 1  # in prctl.h: the signal that a process gets when its parent ends


class StopRequested(BaseException):
    """A stop signal that arrived within `StopSignals.interruptible`.

    It is not an Exception (neither is KeyboardInterrupt), so that code that waits and tries again
    does not catch it.
    """


def stop_with_parent() -> Callable[[], None] | None:
    """Return a `preexec_fn` for `subprocess.Popen` that stops a child when this process ends.

    The kernel sends SIGTERM to the child when this process ends, even by SIGKILL; a training then
    saves and stops. Call this function and Popen in the main thread, because the kernel watches
    the thread that called Popen.

    Returns:
        The function, or None on systems other than Linux.
    """
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None, use_errno=True).prctl, os.getpid()

    def request_sigterm() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent ended before prctl was called
            os.kill(os.getpid(), signal.SIGTERM)

    return request_sigterm


class StopSignals:
    """Context in which each signal of STOP_SIGNALS sets `is_stop_requested`; training then stops.

    A second Ctrl-C interrupts at once. Other signals are ignored after the first one, because
    launchers repeat them, even while Python shuts down. SIGHUP and SIGINT stay ignored if they are
    ignored already (nohup, background jobs of a shell). launch/deepspeed.sh starts its ranks with
    USR1 ignored.
    """

    def __init__(self):
        self.is_stop_requested = False
        self._is_interruptible = False
        self._previous_handlers = {}

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a stop signal interrupt the main thread within the block, even in a socket wait.

        Raises:
            StopRequested: In the block, or at its beginning if a signal came before.
        """
        try:
            self._is_interruptible = True  # before the test, or a signal between them is lost
            if self.is_stop_requested:
                raise StopRequested
            yield
        finally:
            self._is_interruptible = False

    def __enter__(self):
        for signum in STOP_SIGNALS:
            is_ignored = signal.getsignal(signum) == signal.SIG_IGN
            if not is_ignored or signum in (signal.SIGTERM, signal.SIGUSR1):
                self._previous_handlers[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *exc):
        if not self.is_stop_requested:
            for signum, handler in self._previous_handlers.items():
                signal.signal(signum, handler)

    def _handle(self, signum, _frame):
        self.is_stop_requested = True
        name = signal.Signals(signum).name
        note = f"{name}: saves and stops after this update (press again to quit unsaved)\n"
        os.write(2, note.encode())  # print is not safe in a signal handler
        for other in self._previous_handlers:
            signal.signal(other, signal.SIG_IGN)
        if signal.SIGINT in self._previous_handlers:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._is_interruptible:
            raise StopRequested
