"""Files of the hub downloaded whole, once for a machine, and checked against the hub's sha256."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from lm.common.console import say
from lm.common.files import writing
from lm.data.sources.errors import DataError

PIECE = 2**24  # bytes of one request


def local_copy(
    path: str, size: int, sha256: str | None, folder: Path, fetch: Callable[[int, int], bytes]
) -> Path:
    """Where a file of the hub lies below `folder`; it is downloaded first where it does not. A file
    has its name there only when its checksum was right.

    Args:
        path: hf://datasets/OWNER/NAME@COMMIT/…
        sha256: what the hub says it is; None: it says nothing, and only the size is checked.
        fetch: (start, stop) → those bytes of the file.

    Raises:
        DataError: what came is not what the hub says, twice. OutputError: it cannot be written.
    """
    target = Path(folder).expanduser() / path.removeprefix("hf://")
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target.with_name(target.name + ".lock")):
        if target.is_file() and target.stat().st_size == size:
            return target
        say(f"data     downloading {path} ({size / 1e6:.0f} MB) to {folder}")
        if sha256 is None:
            say(
                f"data     the hub has no sha256 of {path}: what comes is checked by its size alone"
            )
        draft = target.with_name(target.name + ".part")
        for _ in range(2):
            found = _download(draft, size, fetch)
            if sha256 in (None, found):
                with writing(target):
                    os.replace(draft, target)
                return target
        with writing(draft):
            draft.unlink()
        raise DataError(
            f"{path} was downloaded twice and is damaged: its sha256 is {found}, that on the hub "
            f"{sha256}; report it to the dataset's owner, or use another data.name"
        )


def _download(draft: Path, size: int, fetch: Callable[[int, int], bytes]) -> str:
    """Writes the file and returns the sha256 of what came."""
    sha256 = hashlib.sha256()
    with writing(draft):
        file = open(draft, "wb")  # noqa: SIM115 (closed below)
    with file:
        for start in range(0, size, PIECE):
            piece = fetch(start, min(size, start + PIECE))
            sha256.update(piece)
            with writing(draft):
                file.write(piece)
        with writing(draft):
            file.flush()
            os.fsync(file.fileno())
    return sha256.hexdigest()


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time; the system opens the lock of a process that dies."""
    with writing(lock):
        file = open(lock, "wb")  # noqa: SIM115 (closed below)
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
