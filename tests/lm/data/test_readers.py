"""Tests of reader threads: the order of results, errors, and the end of the process."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from lm.data.sources.readers import Readers
from tests.running import ROOT

TRAINER = """
import sys, time
from lm.data.sources.readers import Readers
readers = Readers([lambda key: time.sleep(60) if key else "result"], [[0, 1]])
readers.take(0)
if sys.argv[1] == "busy":
    readers._threads[1].requests.put(1)
    time.sleep(0.2)
if sys.argv[1] == "closed":
    readers.close()
if sys.argv[1] == "error":
    raise ValueError("error of the main thread")
"""


def make_counter(first: int):
    """Make a function that returns its key, and a number per key that counts up from `first`."""
    numbers = {}

    def read(key):
        if key == 9:
            raise ZeroDivisionError("in the thread")
        numbers[key] = numbers.get(key, first - 1) + 1
        return key, numbers[key]

    return read


@pytest.fixture
def readers():
    readers = Readers([make_counter(0), make_counter(100)], [[1, 2, 9], [3]])
    yield readers
    readers.close()


def test_results_of_a_key_come_in_order(readers):
    assert [readers.take(1) for _ in range(5)] == [(1, n) for n in range(5)]
    assert [readers.take(key) for key in (3, 2, 1, 3)] == [(3, 100), (2, 0), (1, 5), (3, 101)]


def test_error_in_a_thread_keeps_its_traceback(readers):
    with pytest.raises(ZeroDivisionError, match="in the thread") as caught:
        readers.take(9)
    assert caught.traceback[-1].name == "read"
    assert readers.take(1) == (1, 0)


@pytest.mark.parametrize("mode", ["idle", "closed", "error", "busy"])
def test_ending_process_does_not_wait_for_threads(mode):
    command = [sys.executable, "-c", TRAINER, mode]
    trainer = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)
    start = time.monotonic()
    _, error = trainer.communicate(timeout=50)
    assert time.monotonic() - start < 30
    assert trainer.returncode == (mode == "error"), error
    assert (mode == "error") == (b"error of the main thread" in error)
