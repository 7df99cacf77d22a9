"""Loader workers as processes: killed, orphaned, signalled, and left behind at the end of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from lm.common.errors import MACHINE, exit_status
from lm.data.batches.stream import ShuffledStream, StreamLoader
from lm.data.sources.readers import ReaderError, Readers
from tests.lm.data.counter import Listed

COUNT = "tests.lm.data.counter:counter"
TRAINER = """
import os, sys, time
from lm.data.sources.readers import Readers
if __name__ == "__main__":
    readers = Readers("tests.lm.data.counter:counter", [0, 0], ["a", "b"])
    if sys.argv[1] != "starting":
        readers.take("a"), readers.take("b")
    print(*readers.pids, flush=True)
    if sys.argv[1] == "error":
        raise ValueError("as a bug would")
    if sys.argv[1] == "busy":  # the workers are in the middle of a long answer
        [ours.send("sleep") for ours in readers._connections]
    if sys.argv[1] not in ("end", "error"):
        time.sleep(60)
"""


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone_within(pids: list[int], seconds: float) -> float | None:
    """How long it took until none of them ran any more; None: longer."""
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        if not any(is_running(pid) for pid in pids):
            return time.monotonic() - start
        time.sleep(0.05)
    return None


@pytest.fixture
def readers():
    made = Readers(COUNT, [0, 100], [["a", "b", "raise"], ["c"]])
    yield made
    made.close()


def test_answers_of_a_key_come_in_order(readers):
    assert [readers.take("a") for _ in range(5)] == [("a", n) for n in range(5)]
    assert [readers.take(key) for key in "cbac"] == [("c", 100), ("b", 0), ("a", 5), ("c", 101)]


def test_a_killed_worker_is_an_error_at_once_also_of_the_others_keys(readers):
    readers.take("a"), readers.take("c")
    os.kill(readers.pids[1], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(ReaderError, match=rf"^loader worker 1 \(pid {readers.pids[1]}\) was kill"):
        while time.monotonic() - start < 10:
            readers.check()
    assert time.monotonic() - start < 1
    with pytest.raises(ReaderError, match="SIGKILL"):
        while True:
            readers.take("a")


def test_a_bug_in_a_worker_keeps_its_traceback(readers):
    with pytest.raises(RuntimeError, match=r"(?s)a loader worker failed.*ZeroDivisionError: in"):
        readers.take("raise")


def test_workers_outlive_the_signals_of_a_launcher_and_of_a_terminal(readers):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        for pid in readers.pids:  # at once: they have hardly begun to start
            os.kill(pid, number)
    assert readers.take("a") == ("a", 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        for pid in readers.pids:
            os.kill(pid, number)
    assert [readers.take("a")[1] for _ in range(9)] == list(range(1, 10))


def start_trainer(mode: str) -> tuple[subprocess.Popen, list[int]]:
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, mode], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    return trainer, [int(pid) for pid in trainer.stdout.readline().split()]


@pytest.mark.parametrize("mode", ["starting", "idle", "busy"])
def test_workers_die_with_a_trainer_that_is_killed(mode):
    trainer, workers = start_trainer(mode)
    assert len(workers) == 2
    trainer.kill()
    trainer.wait()
    assert gone_within(workers, 2) is not None


@pytest.mark.parametrize("mode", ["end", "error"])
def test_a_trainer_that_ends_does_not_wait_for_workers(mode):
    trainer, workers = start_trainer(mode)
    start = time.monotonic()
    _, error = trainer.communicate(timeout=20)
    assert time.monotonic() - start < 2
    assert (trainer.returncode != 0) == (mode == "error") == (b"as a bug would" in error)
    assert gone_within(workers, 0.5) is not None


@pytest.mark.slow
def test_a_micro_batch_that_was_half_drawn_is_drawn_again(cfg, bpe, monkeypatch):
    """The worker dies between two of its blocks."""
    cfg.data.workers, cfg.data.streams, cfg.data.shuffle_buffer = 2, 4, 8
    loader = StreamLoader(cfg.data, bpe, 3, open_documents=Listed)
    real, draws = ShuffledStream.draw, [0]

    def draw(self, readers):
        draws[0] += 1
        if draws[0] == 8:  # the second block of the third micro-batch
            raise ReaderError("loader worker 0 was killed by SIGKILL")
        return real(self, readers)

    with monkeypatch.context() as patch:
        patch.setattr(ShuffledStream, "draw", draw)
        with pytest.raises(ReaderError, match="was killed"):
            for _ in range(9):
                next(loader)
    loader.close()
    fresh = StreamLoader(cfg.data.model_copy(update={"workers": 0}), bpe, 3, open_documents=Listed)
    for _ in range(loader.state_dict()["next_global_micro_batch"]):
        next(fresh)
    for _ in range(4):
        assert next(loader)["labels"].equal(next(fresh)["labels"])
    loader.close()


def test_a_killed_worker_ends_a_stream_with_a_sentence_and_it_can_go_on(cfg, bpe):
    cfg.data.workers, cfg.data.streams, cfg.data.shuffle_buffer = 2, 4, 8
    loader = StreamLoader(cfg.data, bpe, 3, open_documents=Listed)
    plain = StreamLoader(cfg.data.model_copy(update={"workers": 0}), bpe, 3, open_documents=Listed)
    for _ in range(3):
        assert next(loader)["labels"].equal(next(plain)["labels"])
    os.kill(loader._readers.pids[0], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(
        ReaderError, match=r"was killed by SIGKILL.*resume=auto continues"
    ) as caught:
        while True:
            next(loader)
            next(plain)
    assert time.monotonic() - start < 2 and "\n" not in str(caught.value)
    assert exit_status(caught.value) == MACHINE  # which Slurm queues again
    for _ in range(3):  # nothing was lost with the worker
        assert next(loader)["labels"].equal(next(plain)["labels"])
    loader.close()
