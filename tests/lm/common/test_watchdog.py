"""A hanging training ends and writes the stacks of its threads."""

import signal
import subprocess
import sys
import time

from lm.common.errors import HANG
from tests.running import ENV, ROOT

# Arguments: limit in seconds, folder, rank, number of `alive` calls, and "hang" or "finish".
PROGRAM = """
import sys, threading, time
from lm.common.watchdog import Watchdog

def stuck_in_a_collective():
    time.sleep(60)

with Watchdog(float(sys.argv[1]), sys.argv[2], rank=int(sys.argv[3])) as watchdog:
    for _ in range(int(sys.argv[4])):
        time.sleep(0.1)
        watchdog.alive()
    if sys.argv[5] == "hang":
        stuck_in_a_collective()
"""


def start(folder, rank, limit_s, alive_calls, end):
    arguments = limit_s, folder, rank, alive_calls, end
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, env=ENV, stderr=subprocess.PIPE, text=True)


def test_hang_writes_the_stacks_of_all_ranks(tmp_path):
    folder = tmp_path / "stacks"
    ranks = [start(folder, rank, limit_s=1.0, alive_calls=3, end="hang") for rank in (0, 1)]
    for rank, process in enumerate(ranks):
        error = process.communicate(timeout=30)[1]
        assert process.returncode == HANG
        assert f"error: rank {rank} has stood still for 1 s (engine.timeout_s)" in error
        stacks = (folder / f"rank000{rank}.txt").read_text()
        assert "in stuck_in_a_collective" in stacks and "in _watch" in stacks


def test_active_training_is_not_ended(tmp_path):
    """It runs for 1.5 s, longer than the limit."""
    process = start(tmp_path / "stacks", 0, limit_s=0.6, alive_calls=15, end="finish")
    assert process.wait(timeout=30) == 0
    assert not (tmp_path / "stacks").exists()


def test_suspended_process_is_not_a_hang(tmp_path):
    process = start(tmp_path / "stacks", 0, limit_s=1.0, alive_calls=20, end="finish")
    time.sleep(1.5)  # during the calls of `alive`, which last 2 s
    process.send_signal(signal.SIGSTOP)
    time.sleep(3)  # longer than the limit
    process.send_signal(signal.SIGCONT)
    assert process.wait(timeout=30) == 0
