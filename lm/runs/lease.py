"""Lease of a directory: a file that names the only process allowed to write there."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

from lm.common.console import say
from lm.common.errors import UserError
from lm.common.files import lock_folder, read_mapping, writing

TOUCH_INTERVAL_S = 10.0  # seconds between two touches of the file by its holder
PATIENCE_S = 30.0  # a holder on another host that does not touch it for this time is dead
# `fprnn status` does not wait: it compares the last touch with the clock. A network file system may
# show the touch up to a minute late.
MAX_TOUCH_AGE_S = 60.0
LOCK_TIMEOUT_S = 5.0  # the lock is held for milliseconds, unless its process is suspended


class LeaseError(UserError, RuntimeError):
    """Another process holds the directory. The message names it."""


class Lease:
    """A file that a process holds while it writes in the directory of the file.

    The file names the holder: {"host", "namespace" (of process ids), "pid", "started" (ticks from
    the boot to the start of the process), "job" (of Slurm), "since" (Unix seconds)}. A holder in
    the PID namespace of this process is dead if its process is gone; a suspended process still
    holds the lease. A holder elsewhere (another host or container) is dead if it does not touch the
    file for PATIENCE_S. Only a change of the modification time counts, so clocks may differ, and
    the disk may be full.

    Args:
        path: The file.

    Attributes:
        record: Content of the file while this process holds the lease.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.record = _describe_process()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._new_holder: dict | None = None  # a process that has taken this lease over

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
            self._require_dead(holder)
            self._remove(holder)
        self._thread = threading.Thread(target=self._keep_touching, name="lease", daemon=True)
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
            LeaseError: If another process has taken it.
        """
        if self._new_holder is not None:
            raise LeaseError(
                f"{self.path.parent} was taken over by {describe_holder(self._new_holder)}, because"
                f" this process did not respond for {PATIENCE_S:.0f} s: this process ends"
            )

    def _create(self) -> bool:
        """Create the file; return False if it exists."""
        with writing(self.path):
            try:
                fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                return False
            try:
                with os.fdopen(fd, "w", encoding="utf-8") as f:
                    f.write(json.dumps(self.record) + "\n")
            except OSError:  # the disk is full; an empty lease would block later processes
                self.path.unlink(missing_ok=True)
                raise
        return True

    def _require_dead(self, holder: dict) -> None:
        """Raise LeaseError if the holder is running, after waiting for a touch if necessary."""
        folder = self.path.parent
        is_running = is_alive(holder)
        if is_running is None:
            say(
                f"note: {folder} is held by {describe_holder(holder)}: waiting"
                f" {PATIENCE_S:.0f} s to see whether it responds"
            )
            is_running = self._wait_for_touch()
        if is_running:
            holder = read_mapping(self.path) or holder  # it may have been incomplete before
            raise LeaseError(
                f"{folder} is in use by {describe_holder(holder)}: stop that process, or choose"
                " another `name` (two processes would damage the run directory)"
            )
        say(f"note: {folder} was left by {describe_holder(holder)}, which is gone: taken over")

    def _wait_for_touch(self) -> bool:
        """Wait up to PATIENCE_S; return True if the file is touched, False if not or if deleted."""
        first_time = _modification_time_ns(self.path)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            time.sleep(min(0.5, PATIENCE_S / 10))
            current_time = _modification_time_ns(self.path)
            if current_time is None:
                return False
            if current_time != first_time:
                return True
        return False

    def _remove(self, holder: dict) -> None:
        """Delete the holder's file, unless another process has replaced it in the meantime."""
        renamed_path = self.path.with_name(f"{self.path.name}.{self.record['pid']}")
        # Several processes may try at once. Without the lock, a process could rename the new lease
        # of another, and a third could create its own before the renamed lease is restored.
        with contextlib.suppress(FileNotFoundError), lock_folder(self.path.parent, LOCK_TIMEOUT_S):
            if read_mapping(self.path) != holder:
                return
            # On file systems without locks, only one process succeeds in renaming the file.
            os.rename(self.path, renamed_path)
            if read_mapping(renamed_path) != holder and not self.path.exists():
                os.rename(renamed_path, self.path)  # the new lease of another process: restore it
            else:
                renamed_path.unlink()

    def _keep_touching(self) -> None:
        """Touch the file until `release`, or until another process takes the lease."""
        while not self._stop.wait(TOUCH_INTERVAL_S):
            holder = read_mapping(self.path)
            if holder == {}:
                continue  # being written, or the disk does not respond: try again
            if holder != self.record:
                self._new_holder = holder or {}
                return
            with contextlib.suppress(OSError):  # the next touch may succeed
                os.utime(self.path)


def _describe_process() -> dict:
    """Return the record of this process for a lease."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "namespace": _pid_namespace(),
        "pid": pid,
        "started": _start_ticks(pid),
        "job": _slurm_job(),
        "since": round(time.time(), 3),
    }


def _pid_namespace() -> str | None:
    """Return an id of the namespace of process ids, or None if the system has no such id.

    Two containers may have the same host name, and two hosts the same namespace number. The id of
    the boot distinguishes hosts.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{os.readlink('/proc/self/ns/pid')} {boot}"
    except OSError:
        return None


def _shares_pid_namespace(holder: dict) -> bool:
    """Return whether this process sees the holder's process under the same id."""
    if holder.get("host") != socket.gethostname() or not isinstance(holder.get("pid"), int):
        return False
    namespace = _pid_namespace()
    is_known = namespace is not None or sys.platform != "linux"  # only Linux has namespaces
    return is_known and holder.get("namespace") == namespace


def _slurm_job() -> str | None:
    """Return the id of this process's Slurm job: 4711, or 4711_3 in an array; None without one."""
    array_id, job_id = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_JOB_ID")
    return f"{array_id}_{os.environ.get('SLURM_ARRAY_TASK_ID')}" if array_id else job_id


def _modification_time_ns(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def is_held(holder: dict, touch_age_s: float) -> bool:
    """Return whether the holder of a lease is running, without waiting for a touch.

    Args:
        holder: Content of the lease.
        touch_age_s: Seconds since the lease was touched, by the clock of its file system.
    """
    is_running = is_alive(holder)
    return abs(touch_age_s) <= MAX_TOUCH_AGE_S if is_running is None else is_running


def file_system_time(folder: Path) -> float:
    """Return the Unix seconds on the clock that dates the files in a folder.

    It may be the clock of a server, which differs from this host's clock.
    """
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime
    return time.time()  # the folder is missing or read-only, or the disk is full


def is_alive(holder: dict) -> bool | None:
    """Return whether the holder's process exists; None if it is on another host or container."""
    if not _shares_pid_namespace(holder):
        return None
    try:
        os.kill(holder["pid"], 0)
    except (ProcessLookupError, OverflowError):  # OverflowError: the lease is damaged
        return False
    except PermissionError:
        pass  # a process of another user
    start_ticks = _start_ticks(holder["pid"])
    if start_ticks is None or holder.get("started") is None:
        return True
    return start_ticks == holder["started"]  # otherwise another process has the id now


def _start_ticks(pid: int) -> int | None:
    """Return the start time of a process in ticks since the boot.

    It is -1 for a zombie, and None if /proc does not have it.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # proc(5): fields 3 (state), 4, … after the name in parentheses; field 22 is the start time.
    fields_from_3 = stat.rpartition(")")[2].split()
    return -1 if fields_from_3[0] == "Z" else int(fields_from_3[22 - 3])


def describe_holder(holder: dict) -> str:
    """Return a text such as "process 4711 on n0, Slurm job 12 (since 2026-05-01 12:30:00)"."""
    if "pid" not in holder:
        return "an unknown process (its lease.json is incomplete)"
    job = f", Slurm job {holder['job']}" if holder.get("job") else ""
    since = holder.get("since")
    since_text = ""
    if isinstance(since, int | float):
        with contextlib.suppress(ValueError, OverflowError, OSError):  # no time, in a damaged file
            since_text = time.strftime(" (since %Y-%m-%d %H:%M:%S)", time.localtime(since))
    return f"process {holder['pid']} on {holder.get('host')}{job}{since_text}"
