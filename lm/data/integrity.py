"""Files that are whole or known to be damaged: written with checksums, synced, checked later."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lm.data.sources import DataError
from lm.outputs import writing

CHUNK = 2**24  # bytes read at a time
ALWAYS_BYTES = 2**30  # a file up to this size is read whole at every start
RECORD = "verified.json"  # beside the files: how the larger ones were when they were last read


class Writer:
    """Writes token ids to a file and takes their checksum on the way.

    Raises:
        OutputError: in each method, where the system refuses (no space, no right).
    """

    def __init__(self, path: Path, dtype: np.dtype):
        self._path, self._dtype = path, dtype
        self._sha256 = hashlib.sha256()
        self.tokens = 0
        with writing(path):
            self._file = open(path, "wb")  # noqa: SIM115 (finish or discard closes it)

    def add(self, ids: np.ndarray) -> None:
        raw = ids.astype(self._dtype).tobytes()
        with writing(self._path):
            self._file.write(raw)
        self._sha256.update(raw)
        self.tokens += len(ids)

    def finish(self, path: Path) -> str:
        """Moves the file to its place once the disk has it; returns its checksum."""
        with writing(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._path, path)
        return self._sha256.hexdigest()

    def discard(self) -> None:
        """Frees the space of a file that was not finished."""
        with contextlib.suppress(OSError):  # what could not be written is not wanted
            self._file.close()
        self._path.unlink(missing_ok=True)


def write_json(path: Path, value: dict) -> None:
    """The file is there whole, after a power cut too, or is what it was.

    Raises:
        OutputError: it cannot be written.
    """
    draft = path.with_suffix(".tmp")
    with writing(path):
        with open(draft, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """The names in a folder are on the disk, as well as the files."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remember(folder: Path, names: list[str]) -> None:
    """Notes that these files are what their checksums say, until they change."""
    record = _recorded(folder) | {name: _state(folder / name) for name in names}
    write_json(folder / RECORD, record)


def is_remembered(path: Path) -> bool:
    """Whether a large file was found whole before and has not changed since, by its size, times
    and inode. A file of up to ALWAYS_BYTES is never taken on trust."""
    if path.stat().st_size <= ALWAYS_BYTES:
        return False
    return _recorded(path.parent).get(path.name) == _state(path)


def read_through(
    path: Path, dtype: np.dtype, progress: Callable[[int], None] | None = None
) -> tuple[str, int]:
    """(sha256, largest id or -1) of a file of token ids, read in pieces.

    Args:
        progress: called with the bytes read so far.

    Raises:
        DataError: it cannot be read.
    """
    sha256, largest, done = hashlib.sha256(), -1, 0
    try:
        with open(path, "rb") as file:
            while raw := file.read(CHUNK):
                sha256.update(raw)
                ids = np.frombuffer(raw[: len(raw) // dtype.itemsize * dtype.itemsize], dtype)
                largest = max(largest, int(ids.max(initial=0)))
                done += len(raw)
                if progress:
                    progress(done)
    except OSError as e:
        raise DataError(f"{path} cannot be read: {e.strerror}") from None
    return sha256.hexdigest(), largest


def _recorded(folder: Path) -> dict:
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # then the files are read
    return found if isinstance(found, dict) else {}


def _state(path: Path) -> list[int]:
    """The times cannot be set back by a copy or `touch`: the change time is the system's own."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
