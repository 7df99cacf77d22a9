"""Files that are whole or known to be damaged: written with checksums, synced, checked later."""

from __future__ import annotations

import contextlib
import hashlib
import os
import weakref
from pathlib import Path

import numpy as np

from lm.common.files import read_mapping, write_json, writing
from lm.data.sources.errors import DataError

CHUNK = 2**24  # bytes read at a time
ALWAYS_BYTES = 2**30  # a file up to this size is read whole at every start
RECORD = "verified.json"  # beside the files: how the larger ones were when they were last read


class Writer:
    """Writes token ids to a file and takes their checksum on the way.

    Args:
        keep: tokens of the file as it is that stay; what comes after them is cut off.

    Raises:
        OutputError: in each method, where the system refuses (no space, no right).
        DataError: at first, where the file has fewer tokens than are to stay.
    """

    def __init__(self, path: Path, dtype: np.dtype, keep: int = 0):
        self._path = path
        self._dtype = dtype
        self._sha256 = hashlib.sha256()
        self.tokens = keep
        with writing(path):
            self._file = open(path, "r+b" if keep else "wb")  # noqa: SIM115 (closed by finish, …)
        if keep:
            self._take_up(keep * dtype.itemsize)

    def _take_up(self, size: int) -> None:
        """Goes on behind the first `size` bytes of the file: they count in the checksum, and what
        comes after them is cut off."""
        with writing(self._path):
            while size and (raw := self._file.read(min(CHUNK, size))):
                self._sha256.update(raw)
                size -= len(raw)
            if not size:
                self._file.truncate()
        if size:
            self._file.close()
            raise DataError(f"{self._path} is {size} bytes shorter than it was")

    @property
    def sha256(self) -> str:
        """Of what was added so far."""
        return self._sha256.hexdigest()

    def add(self, ids: np.ndarray) -> None:
        raw = ids.astype(self._dtype).tobytes()
        with writing(self._path):
            self._file.write(raw)
        self._sha256.update(raw)
        self.tokens += len(ids)

    def sync(self) -> None:
        """Returns when the disk has what was added."""
        with writing(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def finish(self, path: Path) -> str:
        """Moves the file to its place once the disk has it; returns its checksum."""
        self.sync()
        with writing(self._path):
            self._file.close()
            os.replace(self._path, path)
        return self.sha256

    def close(self) -> None:
        """Leaves the file as it is."""
        with contextlib.suppress(OSError):  # what could not be written is not wanted
            self._file.close()

    def discard(self) -> None:
        """Frees the space of a file that was not finished."""
        self.close()
        self._path.unlink(missing_ok=True)


class TokenFile:
    """The ids in a file, read piece by piece, sliced as an array is.

    A memory map of a file that is cut short meanwhile would end the process, by SIGBUS and without
    a word.

    Args:
        count: ids in it.
    Raises:
        DataError: it cannot be opened; in each slice, where it ends too early or cannot be read.
    """

    def __init__(self, path: Path, dtype: str, count: int):
        self.dtype = np.dtype(dtype)
        self._path = path
        self._count = count
        try:
            self._number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise DataError(f"{path} cannot be read: {e.strerror}") from None
        weakref.finalize(self, os.close, self._number)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, piece: slice) -> np.ndarray:
        first, stop, step = piece.indices(self._count)
        found = np.empty(max(0, stop - first), self.dtype)
        room = found.data.cast("B") if len(found) else memoryview(b"")
        done = 0
        try:
            while done < len(room):  # the system gives at most 2 GiB at once
                got = os.preadv(self._number, [room[done:]], first * self.dtype.itemsize + done)
                if not got:
                    size = os.fstat(self._number).st_size
                    raise DataError(
                        f"{self._path} is damaged: it was cut short while it was read, to {size}"
                        f" bytes of {self._count * self.dtype.itemsize}; bring it back, or delete"
                        f" {self._path.parent}, and the next start prepares it again"
                    )
                done += got
        except OSError as e:
            raise DataError(f"{self._path} cannot be read: {e.strerror}") from None
        return found[::step]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self[:] if dtype is None else self[:].astype(dtype)


Tokens = np.ndarray | TokenFile  # ids (n,)


def remember(folder: Path, names: list[str]) -> None:
    """Notes that these files are what their checksums say, until they change."""
    record = _recorded(folder) | {name: state(folder / name) for name in names}
    write_json(folder / RECORD, record)


def is_remembered(path: Path) -> bool:
    """Whether a large file was found whole before and has not changed since, by its size, times
    and inode. A file of up to ALWAYS_BYTES is never taken on trust."""
    if path.stat().st_size <= ALWAYS_BYTES:
        return False
    return _recorded(path.parent).get(path.name) == state(path)


def read_through(path: Path, dtype: np.dtype) -> tuple[str, int]:
    """(sha256, largest id or -1) of a file of token ids, read in pieces.

    Raises:
        DataError: it cannot be read.
    """
    sha256, largest = hashlib.sha256(), -1
    try:
        with open(path, "rb") as file:
            while raw := file.read(CHUNK):
                sha256.update(raw)
                ids = np.frombuffer(raw[: len(raw) // dtype.itemsize * dtype.itemsize], dtype)
                largest = max(largest, int(ids.max(initial=0)))
    except OSError as e:
        raise DataError(f"{path} cannot be read: {e.strerror}") from None
    return sha256.hexdigest(), largest


def _recorded(folder: Path) -> dict:
    return read_mapping(folder / RECORD) or {}  # then the files are read


def state(path: Path) -> list[int]:
    """The times cannot be set back by a copy or `touch`: the change time is the system's own."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
