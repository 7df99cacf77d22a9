"""Stop signals: interrupted waits, finished updates, and children of a killed parent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lm.common.signals import STOP_SIGNALS, StopRequested, StopSignals


@pytest.fixture
def signals():
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with StopSignals() as stop_signals:
        yield stop_signals
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("wait", ["sleep", "socket"])
def test_stop_signal_interrupts_a_wait(signals, wait):
    silent, other = socket.socketpair()  # nothing is ever sent
    began = time.monotonic()
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(StopRequested), signals.interruptible():
        try:
            time.sleep(30) if wait == "sleep" else silent.recv(1)
        except Exception:  # code that tries again must not catch the signal
            time.sleep(30)
    assert time.monotonic() - began < 5 and signals.is_stop_requested
    silent.close()
    other.close()
    with pytest.raises(StopRequested), signals.interruptible():  # the signal came before
        raise AssertionError("the block must not run")


def test_stop_signal_outside_a_wait_sets_a_flag(signals):
    with signals.interruptible():
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)
    assert signals.is_stop_requested


PARENT = """
import subprocess, sys, time
from lm.common.signals import stop_with_parent
child = subprocess.Popen(["sleep", "60"], preexec_fn=stop_with_parent())
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_child_gets_sigterm_when_its_parent_is_killed():
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)  # the child runs
        parent.kill()
    until = time.monotonic() + 10
    while time.monotonic() < until and is_running(pid):
        time.sleep(0.05)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:  # the line is `pid (name) state …`
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # a zombie has ended
