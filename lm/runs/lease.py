"""Lease of a directory: a file that names the only process allowed to write there."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from lm.common.errors import UserError
from lm.common.files import read_mapping, writing

BEAT_S = 10.0  # seconds between two touches of the file
PATIENCE_S = 30.0  # a holder on another host that does not touch it for this time is dead


class LeaseError(UserError, RuntimeError):
    """Another process holds the directory. The message names it."""


class Lease:
    """A file that a process holds while it writes in the directory of the file.

    It names the holder: {"host", "namespace" (of process ids), "pid", "started" (time of the
    process), "job" (of Slurm), "since"}. The holder touches it every BEAT_S. Only changes of the
    modification time matter, so that clocks may differ and the disk may be full. A holder in this
    PID namespace is dead if its process is gone. A holder elsewhere (another host or container) is
    dead if it does not touch the file for PATIENCE_S.

    Args:
        path: The file.
        say: Prints a note about a lease that was left by a dead process.
    """

    def __init__(self, path: Path, say: Callable[[str], None] = print):
        self.path, self.say = Path(path), say
        self.record = _describe_process()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._taken_by: dict | None = None

    def acquire(self) -> None:
        """Take the lease, and touch it from a thread until `release`.

        Raises:
            LeaseError: If a running process holds it.
            OutputError: If the file cannot be written.
        """
        while not self._create():
            holder = read_mapping(self.path)
            if holder is None:
                continue  # released in the meantime
            self._wait_for_death(holder)
            self._remove(holder)
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Release the lease, if it is held."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        if read_mapping(self.path) == self.record:
            self.path.unlink(missing_ok=True)

    def check(self) -> None:
        """Check that no other process has taken the lease while this process was suspended.

        Raises:
            LeaseError: If one has.
        """
        if self._taken_by is not None:
            raise LeaseError(
                f"{self.path.parent} was taken over by {_name(self._taken_by)}, because this"
                f" process did not respond for {PATIENCE_S:.0f} s: this process ends"
            )

    def _create(self) -> bool:
        """Create the file; return False if it exists."""
        with writing(self.path):
            try:
                number = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                return False
            try:
                with os.fdopen(number, "w", encoding="utf-8") as f:
                    f.write(json.dumps(self.record) + "\n")
            except OSError:  # the disk is full; an empty lease would block later processes
                self.path.unlink(missing_ok=True)
                raise
        return True

    def _wait_for_death(self, holder: dict) -> None:
        """Return once the holder is known to be dead.

        Raises:
            LeaseError: If the holder is running.
        """
        folder = self.path.parent
        is_running = is_alive(holder)
        if is_running is None:
            self.say(
                f"note: {folder} is held by {_name(holder)}: waiting {PATIENCE_S:.0f} s to see"
                " whether it responds"
            )
            is_running = self._is_touched()
        if is_running:
            holder = read_mapping(self.path) or holder  # it may have been incomplete before
            raise LeaseError(
                f"{folder} is in use by {_name(holder)}: stop that process, or choose another"
                " `name` (two processes would damage the run directory)"
            )
        self.say(f"note: {folder} was left by {_name(holder)}, which is gone: taken over")

    def _is_touched(self) -> bool:
        """Return whether the file is touched within PATIENCE_S."""
        first_time = _modification_time(self.path)
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            time.sleep(min(0.5, PATIENCE_S / 10))
            touched = _modification_time(self.path)
            if touched is None:
                return False
            if touched != first_time:
                return True
        return False

    def _remove(self, holder: dict) -> None:
        """Delete the holder's file, unless another process has replaced it in the meantime."""
        aside = self.path.with_name(f"{self.path.name}.{self.record['pid']}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, aside)
            if read_mapping(aside) != holder and not self.path.exists():
                os.rename(aside, self.path)
            else:
                aside.unlink()

    def _beat(self) -> None:
        """Touch the file until `release`, or until another process takes the lease."""
        while not self._stop.wait(BEAT_S):
            holder = read_mapping(self.path)
            if holder == {}:
                continue  # being written, or the disk does not respond: try again
            if holder != self.record:
                self._taken_by = holder or {}
                return
            with contextlib.suppress(OSError):  # the next round tries again
                os.utime(self.path)


def _describe_process() -> dict:
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "namespace": _pid_namespace(),
        "pid": pid,
        "started": _start_time(pid),
        "job": _job(),
        "since": round(time.time(), 3),
    }


def _pid_namespace() -> str | None:
    """Return the namespace of process ids, or None if the system does not name it.

    Containers may share a host name, and hosts the number of their first namespace. The id of the
    boot distinguishes them.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{os.readlink('/proc/self/ns/pid')} {boot}"
    except OSError:
        return None


def _shares_pid_namespace(holder: dict) -> bool:
    """Return whether a holder's process id means the same process here."""
    if holder.get("host") != socket.gethostname() or not isinstance(holder.get("pid"), int):
        return False
    namespace = _pid_namespace()
    has_namespaces = sys.platform == "linux"
    return holder.get("namespace") == namespace and (namespace is not None or not has_namespaces)


def _job() -> str | None:
    """Return the id of this process's Slurm job: 4711, or 4711_3 in an array; None without one."""
    array, job = (os.environ.get(f"SLURM_{name}") for name in ("ARRAY_JOB_ID", "JOB_ID"))
    return f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID')}" if array else job


def _modification_time(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def is_alive(holder: dict) -> bool | None:
    """Return whether the process of a lease runs; None if that cannot be seen from here."""
    if not _shares_pid_namespace(holder):
        return None
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # a process of another user
    start_time = _start_time(holder["pid"])
    if start_time is None or holder.get("started") is None:
        return True
    return start_time == holder["started"]  # otherwise the id is another process's now


def _start_time(pid: int) -> int | None:
    """Return the start time of a process in ticks since the boot.

    It is -1 for a zombie, and None if /proc does not have it.
    """
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return -1 if after_name[0] == "Z" else int(after_name[19])


def _name(holder: dict) -> str:
    """Format the holder of a lease for a message."""
    if "pid" not in holder:
        return "an unknown process (its lease.json is incomplete)"
    job = f", Slurm job {holder['job']}" if holder.get("job") else ""
    since = holder.get("since")
    time_text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since)) if since else "some time"
    return f"process {holder['pid']} on {holder.get('host')}{job} (since {time_text})"
