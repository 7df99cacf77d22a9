"""Files that are whole or known to be damaged: written with checksums, synced, checked later."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from lm.common.console import say
from lm.common.files import OutputError, read_mapping, write_json, writing
from lm.data.sources.errors import DataError
from lm.model.checksums import sha256

LARGE = 2**30  # bytes whose reading is said


class Writer:
    """Writes token ids to a file and takes their checksum on the way.

    Raises:
        OutputError: In each method, if the system refuses (no space, no right).
    """

    def __init__(self, path: Path, dtype: np.dtype):
        self._path = path
        self._dtype = dtype
        self._sha256 = hashlib.sha256()
        self.tokens = 0
        with writing(path):
            self._file = open(path, "wb")  # noqa: SIM115 (closed by finish and discard)

    def add(self, ids: np.ndarray) -> None:
        raw = ids.astype(self._dtype).tobytes()
        with writing(self._path):
            self._file.write(raw)
        self._sha256.update(raw)
        self.tokens += len(ids)

    def finish(self, path: Path) -> str:
        """Move the file to its place once the disk has it; return its checksum."""
        with writing(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._path, path)
        return self._sha256.hexdigest()

    def discard(self) -> None:
        """Free the space of a file that was not finished."""
        with contextlib.suppress(OSError):  # what could not be written is not wanted
            self._file.close()
        self._path.unlink(missing_ok=True)


class TokenFile:
    """The ids in a file, read piece by piece, sliced as an array is.

    A memory map of a file that is cut short meanwhile would end the process, by SIGBUS and without
    a word.

    Args:
        count: Ids in it.

    Raises:
        DataError: If it cannot be opened; in each slice, if it ends too early.
    """

    def __init__(self, path: Path, dtype: str, count: int):
        self.dtype = np.dtype(dtype)
        self._path = path
        self._count = count
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (as long as this object)
        except OSError as e:
            raise DataError(f"{path} cannot be read: {e.strerror}") from None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, piece: slice) -> np.ndarray:
        first, stop, step = piece.indices(self._count)
        count = max(0, stop - first)
        self._file.seek(first * self.dtype.itemsize)
        ids = np.fromfile(self._file, self.dtype, count)
        if len(ids) < count:
            raise DataError(
                f"{self._path} is damaged: it was cut short while it was read, to"
                f" {self._path.stat().st_size} bytes of {self._count * self.dtype.itemsize}; bring"
                f" it back, or delete {self._path.parent}, and the next start prepares it again"
            )
        return ids[::step]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self[:] if dtype is None else self[:].astype(dtype)


Tokens = np.ndarray | TokenFile  # ids (n,)


def checksums(paths: Iterable[Path], record: Path, trusted_from: int = 0) -> dict[Path, str]:
    """Return the sha256 of each file.

    Args:
        record: File with earlier checksums, which receives the new ones. A file that it has with
            the same size, times and inode is not read again.
        trusted_from: Bytes; smaller files are always read.

    Raises:
        DataError: If a file cannot be read.
    """
    known = read_mapping(record) or {}
    found = {}
    unread = {}
    for path in sorted(set(paths)):
        state = file_state(path)
        recorded = known.get(str(path))
        is_large = state[0] >= trusted_from
        if is_large and isinstance(recorded, list) and recorded[:1] == [state]:
            found[path] = recorded[1]
        else:
            unread[path] = state
    size = sum(state[0] for state in unread.values())
    if size > LARGE:
        say(f"data     reading {size / 1e9:.1f} GB for their checksums")
    for path in unread:
        try:
            found[path] = sha256(path)
        except OSError as e:
            raise DataError(f"{path} cannot be read: {e.strerror}") from None
    if unread:
        with contextlib.suppress(OutputError):  # in a folder that is only read: read again then
            new = {str(path): [state, found[path]] for path, state in unread.items()}
            write_json(record, known | new)
    return found


def file_state(path: Path) -> list[int]:
    """Return the size, times and inode of a file, which change when its content does.

    A copy or `touch` cannot set the change time back: it is the system's own.

    Raises:
        DataError: If the system refuses.
    """
    try:
        stat = path.stat()
    except OSError as e:
        raise DataError(f"{path} cannot be read: {e.strerror}") from None
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
