"""Stop signals: a wait that they end, and everything else that they let finish."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest

from lm.common.signals import STOP, StopRequested, StopSignals


@pytest.fixture
def signals():
    handlers = {number: signal.getsignal(number) for number in STOP}
    with StopSignals() as stop_signals:
        yield stop_signals
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("wait", ["sleep", "socket"])
def test_a_stop_signal_ends_a_wait(signals, wait):
    silent, _ = pair = socket.socketpair()
    began = time.monotonic()
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(StopRequested), signals.interruptible():
        try:
            time.sleep(30) if wait == "sleep" else silent.recv(1)
        except Exception:  # as code does that tries again
            time.sleep(30)
    assert time.monotonic() - began < 5 and signals.asked
    for end in pair:
        end.close()
    with pytest.raises(StopRequested), signals.interruptible():  # it came before
        raise AssertionError


def test_outside_of_a_wait_a_stop_signal_only_asks(signals):
    with signals.interruptible():
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)
    assert signals.asked
