"""Ranks that die or hang: the others end in time, and saved checkpoints stay valid."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lm.common.errors import BAD_CONFIG, BAD_DATA, DIVERGED, HANG, MACHINE
from lm.runs.metrics import read_metrics
from tests.running import (
    ENV,
    FORKS,
    ROOT,
    command,
    read_losses,
    run,
    run_ranks_for_json,
    start_ranks,
)

TINY = ("train", "--config", "configs/tiny/lm.yaml")


def two_ranks(out, *settings, fault=None):
    """Start both ranks of a run without a launcher; `fault` (tests/faults.py) is for rank 1."""
    arguments = [*TINY, f"out_dir={out}", *settings]
    if fault is None:
        return start_ranks("lm", arguments, 2)
    arguments_by_rank = [arguments, [fault, *arguments]]
    return start_ranks(["lm", "tests.faults"], arguments_by_rank.__getitem__, 2)


@pytest.fixture
def start_with_suspended_rank(tmp_path):
    """Return a function that starts two ranks, of which a fault suspends rank 1."""
    processes = []

    def start(fault, *settings):
        settings = ("train.grad_accum_steps=1", *settings)
        processes.extend(two_ranks(tmp_path, *settings, fault=fault))
        return processes

    yield start
    for process in processes:
        process.kill()
        process.wait(60)


def test_suspended_rank_is_a_hang_for_the_other(tmp_path, start_with_suspended_rank):
    first, _ = start_with_suspended_rank("stop_at=6", "engine.timeout_s=4")
    error = first.communicate(timeout=120)[1]
    assert first.returncode == HANG, error
    assert "rank 0 has stood still" in error
    stacks = (tmp_path / "tiny/stacks/rank0000.txt").read_text()
    assert "all_reduce" in stacks  # rank 0 waited in it
    assert (tmp_path / "tiny/checkpoints/step-000004/manifest.json").exists()


def test_collective_timeout_is_an_error(start_with_suspended_rank):
    """It happens in the last validation, during which no watchdog runs."""
    first, _ = start_with_suspended_rank("stop_at_the_end=1", "engine.timeout_s=4")
    began = time.monotonic()
    error = first.communicate(timeout=120)[1]
    assert first.returncode == HANG and time.monotonic() - began < 90
    assert "error: another rank does not answer (" in error and "Traceback" not in error


def test_killed_rank_is_reported_by_the_other(tmp_path):
    """There is no launcher that would end the other rank."""
    first, second = two_ranks(tmp_path, "train.steps=5000", "checkpoint.every=2", "log.every=1")
    began = time.monotonic()
    while not list(tmp_path.glob("tiny/checkpoints/step-*/manifest.json")):
        assert time.monotonic() - began < 120 and first.poll() is None
        time.sleep(0.1)
    second.kill()
    error = first.communicate(timeout=60)[1]
    assert first.returncode == MACHINE, error
    assert "error: another rank is gone: it was killed" in error and "Traceback" not in error
    failure = json.loads((tmp_path / "tiny/failure.json").read_text())
    assert failure["exit_code"] == MACHINE and failure["sentence"] in error


def wait_for_all(processes):
    """Wait until all ranks have ended; return (exit status, stderr) of each."""
    errors = [process.communicate(timeout=120)[1] for process in processes]
    return [(process.returncode, error) for process, error in zip(processes, errors)]


def test_ranks_with_different_kernels_are_refused(tmp_path):
    ends = wait_for_all(two_ranks(tmp_path, fault="plain_kernels=1"))
    assert [status for status, _ in ends] == [BAD_CONFIG] * 2, ends
    assert "rank 1 on " in ends[1][1] and "rank 0: plain PyTorch" in ends[1][1]
    assert not (tmp_path / "tiny").exists()


@pytest.mark.parametrize("stage", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2))])
def test_nan_on_one_rank_rolls_back_all(tmp_path, stage):
    settings = ("train.grad_accum_steps=2", f"engine.zero_stage={stage}", "log.every=1")
    ends = wait_for_all(two_ranks(tmp_path, *settings, fault="nonfinite_at=11"))
    assert [status for status, _ in ends] == [0, 0], ends
    (rollback,) = [r["rollback"] for r in read_metrics(tmp_path / "tiny") if "rollback" in r]
    assert (rollback["from"], rollback["number"]) == (6, 1)
    assert sorted(r["step"] for r in read_losses(tmp_path / "tiny")) == list(range(1, 9))


def test_nan_in_a_moment_of_one_rank_is_never_saved(tmp_path):
    settings = ("train.grad_accum_steps=1", "checkpoint.every=2", "log.every=1")
    ends = wait_for_all(two_ranks(tmp_path, *settings, fault="moment_nan_at=4"))
    assert [status for status, _ in ends] == [0, 0], ends
    (rollback,) = [r["rollback"] for r in read_metrics(tmp_path / "tiny") if "rollback" in r]
    assert rollback == {"number": 1, "from": 4, "why": "NaN or infinity in exp_avg_sq"}


@pytest.mark.slow
def test_nan_on_one_rank_under_zero_3_ends_the_run(tmp_path):
    """The other ranks wait inside the same forward pass and cannot go back."""
    settings = ("train.grad_accum_steps=1", "engine.zero_stage=3", "engine.timeout_s=20")
    first, second = two_ranks(tmp_path, *settings, fault="nonfinite_at=6")
    error = second.communicate(timeout=120)[1]
    assert second.returncode == DIVERGED and "rank 1: block 0 has made NaN" in error
    assert first.wait(timeout=60) != 0


def test_unreadable_data_on_one_rank_is_reported_by_all(tmp_path):
    ends = wait_for_all(two_ranks(tmp_path, "train.grad_accum_steps=1", fault="no_data_at=6"))
    assert [status for status, _ in ends] == [BAD_DATA, BAD_DATA], ends
    assert all("error: the disk with the text is gone" in error for _, error in ends)
    failure = json.loads((tmp_path / "tiny/failure.json").read_text())
    assert failure == {"sentence": "the disk with the text is gone", "exit_code": BAD_DATA}


def test_timeout_applies_to_groups_of_deepspeed():
    """Only the group for work of rank 0 may wait for days."""
    *timeouts_s, last_timeout_s = run_ranks_for_json("tests.engine_sockets", 2)["timeouts"]
    assert len(timeouts_s) > 1 and set(timeouts_s) == {84.7}  # 1.1 × the engine.timeout_s of 77 s
    assert last_timeout_s == 7 * 86400


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="no Linux")
def test_single_process_listens_on_loopback_only():
    process = FORKS.run("tests.engine_sockets", [], timeout=120)
    sockets = json.loads(process.stdout.splitlines()[-1])
    assert set(sockets["addresses"]) == {"0100007F"}, process.stderr  # 127.0.0.1 in /proc/net/tcp


@pytest.mark.slow
def test_run_continues_after_a_killed_rank(tmp_path):
    """A launcher runs the training; afterwards the same run continues to its end."""
    settings = (
        "train.steps=60",
        "checkpoint.every=7",
        "train.global_batch_size=4",
        "train.grad_accum_steps=null",
        "eval.every=60",
        "log.every=1",
    )
    out = tmp_path / "runs"
    env = ENV | {
        "DS_ACCELERATOR": "cpu",
        "PATH": f"{os.path.dirname(sys.executable)}:{ENV['PATH']}",
    }
    process = subprocess.Popen(
        command(out, *settings, processes=2),
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics = out / "tiny/metrics.jsonl"
    until = time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 12:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    rank_1_processes = [child for child in children if child.environ().get("RANK") == "1"]
    min(rank_1_processes, key=lambda child: child.create_time()).kill()  # not its workers
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert not psutil.wait_procs(children, timeout=10)[1]
    resumed, _ = run(out, *settings, "resume=auto", processes=2, launcher=True)
    whole, _ = run(tmp_path / "whole", *settings)
    assert [r["step"] for r in resumed] == list(range(1, 61))
    for record, expected in zip(resumed, whole):
        assert record["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert len(read_losses(out / "tiny")) == 60
