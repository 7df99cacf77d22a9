"""A directory has one writer: its lease says who that is, and that it still lives."""

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

BEAT_S = 10.0  # seconds between two signs of life
PATIENCE_S = 30.0  # a holder elsewhere that gives none for so long is taken for dead


class LeaseError(UserError, RuntimeError):
    """Another process has the directory; the message says which."""


class Lease:
    """A file that one process holds while it works in the directory around it.

    It names the holder: {"host", "namespace", "pid", "started" (of the process), "job" (of Slurm),
    "since"}; its modification time is the last sign of life, so that clocks need not agree and a
    full disk does not matter. A holder in our PID namespace is dead when its process is gone; one
    elsewhere (another host, another container), when it gives no sign while we look for PATIENCE_S.

    Args:
        path: of the file.
        say: is told, in a sentence, of a lease that was left behind.
    """

    def __init__(self, path: Path, say: Callable[[str], None] = print):
        self.path, self.say = Path(path), say
        self.own = _ourselves()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._taken_by: dict | None = None

    def acquire(self) -> None:
        """Take the lease, and keep it alive from a thread until `release`.

        Raises:
            LeaseError: a living process holds it.
            OutputError: the file cannot be written.
        """
        while not self._create():
            holder = read_mapping(self.path)
            if holder is None:
                continue  # gone meanwhile
            self._outlive(holder)
            self._remove(holder)
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give it back. Does nothing where it is not held."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        if read_mapping(self.path) == self.own:
            self.path.unlink(missing_ok=True)

    def check(self) -> None:
        """Raises LeaseError when another process has taken the lease, this one having given no sign
        of life (it was suspended, say)."""
        if self._taken_by is not None:
            raise LeaseError(
                f"{self.path.parent} was taken over by {_name(self._taken_by)}, since this process"
                f" gave no sign of life for {PATIENCE_S:.0f} s: it ends and leaves it to the other"
            )

    def _create(self) -> bool:
        with writing(self.path):
            try:
                number = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                return False
            try:
                with os.fdopen(number, "w", encoding="utf-8") as f:
                    f.write(json.dumps(self.own) + "\n")
            except OSError:  # the disk is full: an empty lease would hold up whoever comes next
                self.path.unlink(missing_ok=True)
                raise
        return True

    def _outlive(self, holder: dict) -> None:
        """Returns when the holder is dead; raises LeaseError when it lives."""
        place = self.path.parent
        lives = is_alive(holder)
        if lives is None:
            self.say(
                f"note: {place} is held by {_name(holder)}: waiting {PATIENCE_S:.0f} s for a sign"
                " of life"
            )
            lives = self._gives_sign()
        if lives:
            found = read_mapping(self.path) or holder  # it may have been half written
            raise LeaseError(
                f"{place} is in use by {_name(found)}: stop that one, or choose another `name`"
                " (two processes in one run directory would spoil it)"
            )
        self.say(f"note: {place} was left by {_name(holder)}, which is gone: taken over")

    def _gives_sign(self) -> bool:
        before = _sign(self.path)
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            time.sleep(min(0.5, PATIENCE_S / 10))
            now = _sign(self.path)
            if now is None:
                return False
            if now != before:
                return True
        return False

    def _remove(self, holder: dict) -> None:
        """Delete the holder's file, not one that somebody else has put there meanwhile."""
        aside = self.path.with_name(f"{self.path.name}.{self.own['pid']}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, aside)
            if read_mapping(aside) != holder and not self.path.exists():
                os.rename(aside, self.path)
            else:
                aside.unlink()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            found = read_mapping(self.path)
            if found == {}:
                continue  # being written, or the disk does not answer: the next beat looks again
            if found != self.own:
                self._taken_by = found or {}
                return
            with contextlib.suppress(OSError):  # the next beat tries again
                os.utime(self.path)


def _ourselves() -> dict:
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "namespace": _pid_namespace(),
        "pid": pid,
        "started": _started(pid),
        "job": _job(),
        "since": round(time.time(), 3),
    }


def _pid_namespace() -> str | None:
    """Return what a process number belongs to; None if the system does not name it.

    Containers may share a host name, and hosts the number of their first namespace: the identity of
    the boot tells those apart.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{os.readlink('/proc/self/ns/pid')} {boot}"
    except OSError:
        return None


def _has_our_pids(holder: dict) -> bool:
    """Return whether a holder's process number means the same process here."""
    if holder.get("host") != socket.gethostname() or not isinstance(holder.get("pid"), int):
        return False
    namespace = _pid_namespace()
    has_namespaces = sys.platform == "linux"
    return holder.get("namespace") == namespace and (namespace is not None or not has_namespaces)


def _job() -> str | None:
    """Slurm's name of the job that this process is of: 4711, or 4711_3 of an array."""
    array, job = (os.environ.get(f"SLURM_{name}") for name in ("ARRAY_JOB_ID", "JOB_ID"))
    return f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID')}" if array else job


def _sign(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def is_alive(holder: dict) -> bool | None:
    """Whether the process of a lease runs; None where that cannot be seen from here."""
    if not _has_our_pids(holder):
        return None
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    started = _started(holder["pid"])
    if started is None or holder.get("started") is None:
        return True
    return started == holder["started"]  # else the number was given to another process since


def _started(pid: int) -> int | None:
    """When a process started, in ticks since the machine did; -1 of a zombie, None where /proc does
    not say."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return -1 if after_name[0] == "Z" else int(after_name[19])


def _name(holder: dict) -> str:
    if "pid" not in holder:
        return "an unknown process (its lease.json says nothing)"
    job = f", Slurm job {holder['job']}" if holder.get("job") else ""
    since = holder.get("since")
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since)) if since else "some time"
    return f"process {holder['pid']} on {holder.get('host')}{job} (since {when})"
