"""Leases: a running holder is named and refused, a dead holder is replaced."""

import contextlib
import errno
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
    monkeypatch.setattr(leases, "TOUCH_INTERVAL_S", 0.05)
    monkeypatch.setattr(leases, "PATIENCE_S", 0.4)
    return tmp_path / "lease.json"


def hold_lease(path, is_held):
    Lease(path).acquire()
    is_held.set()
    time.sleep(60)


@pytest.fixture
def holder(path):
    """Start a process that holds the lease until it is killed."""
    is_held = fork.Event()
    process = fork.Process(target=hold_lease, args=(path, is_held))
    process.start()
    assert is_held.wait(10)
    yield process
    process.kill()
    process.join()


def test_second_process_is_refused_with_the_holder(path, holder):
    with pytest.raises(LeaseError, match=f"is in use by process {holder.pid} on .*since 20"):
        Lease(path).acquire()
    assert json.loads(path.read_text())["pid"] == holder.pid


def test_lease_of_a_killed_process_is_taken_over(path, holder, messages):
    os.kill(holder.pid, signal.SIGKILL)
    time.sleep(0.1)  # a zombie until `wait`
    lease = Lease(path)
    lease.acquire()
    assert f"was left by process {holder.pid}" in messages[0] and "taken over" in messages[0]
    assert json.loads(path.read_text())["pid"] == os.getpid()
    lease.release()
    assert not path.exists()


def test_reused_or_impossible_process_id_is_dead(path, messages):
    own_record = Lease(path).record
    assert leases.is_alive({**own_record, "pid": 10**30}) is False  # a damaged lease
    path.write_text(json.dumps({**own_record, "started": own_record["started"] - 1}))
    Lease(path).acquire()
    assert "taken over" in messages[0]


def test_running_holder_in_another_pid_namespace_is_refused(path):
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    has_unshare = shutil.which("unshare") is not None
    if not has_unshare or subprocess.run([*unshare, "true"], check=False).returncode:
        pytest.skip("needs the right to make a PID namespace")
    program = (
        "import sys, time; from pathlib import Path; from lm.runs import lease;"
        " lease.TOUCH_INTERVAL_S = 0.05; lease.Lease(Path(sys.argv[1])).acquire();"
        " print(1, flush=True); time.sleep(60)"
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
def keep_touching(path):
    """Touch the lease from another thread within the block."""
    stop = threading.Event()

    def touch():
        while not stop.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(
    "holder_fields",
    [
        {"host": "node17"},
        {"namespace": "pid:[4026531999] another boot"},  # a container on a host with the same name
        {"namespace": None},
    ],
    ids=str,
)
def test_remote_holder_lives_while_it_touches_the_lease(path, holder_fields, messages):
    # 2**22 + 1 is above the largest process id, so a look-up on this host would call it dead.
    record = Lease(path).record | {"pid": 2**22 + 1, "job": "4711"}
    path.write_text(json.dumps(record | holder_fields))
    with keep_touching(path), pytest.raises(LeaseError, match=r"use by process 4194305 .*job 4711"):
        Lease(path).acquire()
    messages.clear()
    start_time = time.monotonic()
    Lease(path).acquire()
    assert time.monotonic() - start_time >= leases.PATIENCE_S
    assert "is held by process 4194305 on" in messages[0] and "waiting" in messages[0]
    assert "taken over" in messages[1]


def test_incomplete_lease_belongs_to_its_writer(path):
    path.write_text("")
    write = threading.Timer(0.1, lambda: path.write_text(json.dumps(Lease(path).record)))
    write.start()
    with pytest.raises(LeaseError, match=f"is in use by process {os.getpid()} on"):
        Lease(path).acquire()
    write.join()


@pytest.mark.parametrize("text", ["", "{", "[]", "\0\0"])
def test_damaged_lease_is_taken_over_after_waiting(path, text, messages):
    path.write_text(text)
    lease = Lease(path)
    lease.acquire()
    assert "an unknown process" in messages[0] and "taken over" in messages[1]
    lease.release()


def test_suspended_holder_detects_the_takeover(path):
    lease = Lease(path)
    lease.acquire()
    new_lease = json.dumps({"host": "node17", "pid": 1, "job": "4711", "since": time.time()})
    path.write_text(new_lease)  # another process takes it over
    time.sleep(0.3)
    with pytest.raises(LeaseError, match=r"was taken over by process 1 on node17.*did not respond"):
        lease.check()
    lease.release()
    assert path.read_text() == new_lease  # the file is not changed


def test_one_of_many_processes_gets_the_lease(path):
    """All processes find the lease of a dead process at once."""
    own_record = Lease(path).record
    path.write_text(json.dumps({**own_record, "started": 1}))
    start, winners = fork.Event(), fork.Queue()

    def acquire_at_start():
        start.wait()
        try:
            Lease(path).acquire()
            winners.put(os.getpid())
            time.sleep(2)
        except LeaseError:
            winners.put(None)

    processes = [fork.Process(target=acquire_at_start) for _ in range(8)]
    for process in processes:
        process.start()
    start.set()
    results = [winners.get(timeout=20) for _ in processes]
    for process in processes:
        process.join()
    assert sum(pid is not None for pid in results) == 1


def test_new_lease_is_never_moved(path, monkeypatch):
    """Between a move and its reversal, a third process could create its own lease."""
    dead_holder = {**Lease(path).record, "started": 1}
    lease = Lease(path)
    lease.acquire()  # after another process has found the dead holder
    monkeypatch.setattr(os, "rename", None)
    Lease(path)._remove(dead_holder)
    assert json.loads(path.read_text()) == lease.record
    lease.release()


def test_full_disk_leaves_no_empty_lease(path, monkeypatch):
    real_fdopen = os.fdopen

    def raise_disk_full(fd, *args, **kwargs):
        real_fdopen(fd, *args, **kwargs).close()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(leases.os, "fdopen", raise_disk_full)
    with pytest.raises(OutputError, match="No space left"):
        Lease(path).acquire()
    assert not path.exists()
