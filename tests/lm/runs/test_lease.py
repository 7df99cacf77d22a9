"""Leases: a running holder is named and refused, a dead holder is replaced."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lm.common.files import OutputError
from lm.runs import lease as leases
from lm.runs.lease import Lease, LeaseError

ROOT = Path(__file__).parents[3]
fork = multiprocessing.get_context("fork")


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "BEAT_S", 0.05)
    monkeypatch.setattr(leases, "PATIENCE_S", 0.4)
    return tmp_path / "lease.json"


def hold(path, held, say=lambda _: None):
    Lease(path, say).acquire()
    held.set()
    time.sleep(60)


@pytest.fixture
def holder(path):
    """Start a process that holds the lease until it is killed."""
    held = fork.Event()
    process = fork.Process(target=hold, args=(path, held))
    process.start()
    assert held.wait(10)
    yield process
    process.kill()
    process.join()


def test_second_process_is_refused_with_the_holder(path, holder):
    with pytest.raises(LeaseError, match=f"is in use by process {holder.pid} on .*since 20"):
        Lease(path).acquire()
    assert json.loads(path.read_text())["pid"] == holder.pid


def test_lease_of_a_killed_process_is_taken_over(path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    time.sleep(0.1)  # a zombie until `wait`
    messages = []
    lease = Lease(path, messages.append)
    lease.acquire()
    assert f"was left by process {holder.pid}" in messages[0] and "taken over" in messages[0]
    assert json.loads(path.read_text())["pid"] == os.getpid()
    lease.release()
    assert not path.exists()


def test_reused_process_id_is_dead(path):
    lease = Lease(path)
    other = {**lease.record, "started": lease.record["started"] - 1}
    path.write_text(json.dumps(other))
    messages = []
    Lease(path, messages.append).acquire()
    assert "taken over" in messages[0]


def test_running_holder_in_another_pid_namespace_is_refused(path):
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*unshare, "true"], check=False).returncode
    ):
        pytest.skip("needs the right to make a PID namespace")
    program = (
        "import sys, time; from pathlib import Path; from lm.runs import lease;"
        " lease.BEAT_S = 0.05; lease.Lease(Path(sys.argv[1])).acquire(); print(1, flush=True);"
        " time.sleep(60)"
    )
    command = [*unshare, sys.executable, "-c", program, path]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"1\n"
            with pytest.raises(LeaseError, match="is in use by process 1 on"):
                Lease(path).acquire()
        finally:
            process.kill()
    Lease(path).acquire()


@contextlib.contextmanager
def beating(path):
    """Touch the lease from another thread within the block."""
    stop = threading.Event()

    def beat():
        while not stop.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(
    "other",
    [
        {"host": "node17"},
        {"namespace": "pid:[4026531999] another boot"},  # a container on a host with the same name
        {"namespace": None},
    ],
    ids=str,
)
def test_remote_holder_lives_while_it_touches_the_lease(path, other):
    """Also if a local process has the holder's id."""
    path.write_text(json.dumps(Lease(path).own | {"pid": 2**22 + 1, "job": "4711"} | other))
    with beating(path), pytest.raises(LeaseError, match=r"use by process 4194305 .*job 4711"):
        Lease(path, lambda _: None).acquire()
    messages = []
    began = time.monotonic()
    Lease(path, messages.append).acquire()
    assert time.monotonic() - began >= 0.4
    assert "is held by process 4194305 on" in messages[0] and "waiting" in messages[0]
    assert "taken over" in messages[1]


def test_incomplete_lease_belongs_to_its_writer(path):
    path.write_text("")
    write = threading.Timer(0.1, lambda: path.write_text(json.dumps(Lease(path).own)))
    write.start()
    with pytest.raises(LeaseError, match=f"is in use by process {os.getpid()} on"):
        Lease(path, lambda _: None).acquire()
    write.join()


@pytest.mark.parametrize("text", ["", "{", "[]", "\0\0"])
def test_empty_lease_is_waited_for(path, text):
    path.write_text(text)
    messages = []
    lease = Lease(path, messages.append)
    lease.acquire()
    assert "an unknown process" in messages[0]
    lease.release()


def test_suspended_holder_detects_the_takeover(path):
    lease = Lease(path)
    lease.acquire()
    theirs = json.dumps({"host": "node17", "pid": 1, "job": "4711", "since": time.time()})
    path.write_text(theirs)  # another process takes it over
    time.sleep(0.3)
    with pytest.raises(LeaseError, match=r"was taken over by process 1 on node17.*did not respond"):
        lease.check()
    lease.release()
    assert path.read_text() == theirs  # the file is not changed


def test_one_of_many_processes_gets_the_lease(path):
    """All processes find the lease of a dead process at once."""
    ours = Lease(path).own
    path.write_text(json.dumps({**ours, "started": 1}))
    start, won = fork.Event(), fork.Queue()

    def rush():
        start.wait()
        try:
            Lease(path, lambda _: None).acquire()
            won.put(os.getpid())
            time.sleep(2)
        except LeaseError:
            won.put(None)

    processes = [fork.Process(target=rush) for _ in range(8)]
    for process in processes:
        process.start()
    start.set()
    results = [won.get(timeout=20) for _ in processes]
    for process in processes:
        process.join()
    assert sum(pid is not None for pid in results) == 1


def test_full_disk_leaves_no_empty_lease(path, monkeypatch):
    real = os.fdopen

    def full(number, *args, **kwargs):
        real(number, *args, **kwargs).close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(leases.os, "fdopen", full)
    with pytest.raises(OutputError, match="No space left"):
        Lease(path).acquire()
    assert not path.exists()
