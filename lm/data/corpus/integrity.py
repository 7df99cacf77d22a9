"""Token files with checksums: written durably, read in pieces, verified later."""

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

LARGE = 2**30  # bytes; before more are read, a line is printed


class TokenWriter:
    """File of token ids that is being written, with its checksum.

    Raises:
        OutputError: In each method, if the disk is full or not writable.
    """

    def __init__(self, path: Path, dtype: np.dtype):
        self._path = path
        self._dtype = dtype
        self._sha256 = hashlib.sha256()
        self.tokens = 0
        with writing(path):
            self._file = open(path, "wb")  # noqa: SIM115 (closed by finish and discard)

    def add(self, ids: np.ndarray) -> None:
        """Append token ids."""
        raw = ids.astype(self._dtype).tobytes()
        with writing(self._path):
            self._file.write(raw)
        self._sha256.update(raw)
        self.tokens += len(ids)

    def finish(self, path: Path) -> str:
        """Flush the file to the disk, then rename it to `path`; return its sha256."""
        with writing(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._path, path)
        return self._sha256.hexdigest()

    def discard(self) -> None:
        """Delete an unfinished file."""
        with contextlib.suppress(OSError):  # closing flushes, and the disk may be full
            self._file.close()
        self._path.unlink(missing_ok=True)


class TokenFile:
    """Token ids in a file, which are sliced like an array and read in pieces.

    It is not a memory map: if the file were truncated while a map is read, SIGBUS would kill the
    process without a message.

    Args:
        count: Number of ids in the file.

    Raises:
        DataError: If the file cannot be opened; in each slice, if the file ends too early.
    """

    def __init__(self, path: Path, dtype: str, count: int):
        self.dtype = np.dtype(dtype)
        self._path = path
        self._count = count
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (open as long as this object)
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
                f"{self._path} is damaged: it was truncated while it was read, to"
                f" {self._path.stat().st_size} bytes of {self._count * self.dtype.itemsize};"
                f" restore it, or delete {self._path.parent}, and the next start prepares it again"
            )
        return ids[::step]


Tokens = np.ndarray | TokenFile  # token ids, shape (n,)


def checksums(paths: Iterable[Path], record: Path, trusted_from: int = 0) -> dict[Path, str]:
    """Return the sha256 of each file.

    Args:
        record: JSON file with earlier checksums, to which new ones are added. A file with the
            recorded size, times and inode is not read again.
        trusted_from: Size in bytes; smaller files are always read.

    Raises:
        DataError: If a file cannot be read.
    """
    records = read_mapping(record) or {}
    sums = {}
    unread = {}
    for path in sorted(set(paths)):
        state = file_state(path)
        entry = records.get(str(path))
        is_large = state[0] >= trusted_from
        if is_large and isinstance(entry, list) and entry[:1] == [state]:
            sums[path] = entry[1]
        else:
            unread[path] = state
    size = sum(state[0] for state in unread.values())
    if size > LARGE:
        say(f"data     reading {size / 1e9:.1f} GB to compute checksums")
    for path in unread:
        try:
            sums[path] = sha256(path)
        except OSError as e:
            raise DataError(f"{path} cannot be read: {e.strerror}") from None
    if unread:
        with contextlib.suppress(OutputError):  # not writable: the next start reads them again
            new = {str(path): [state, sums[path]] for path, state in unread.items()}
            write_json(record, records | new)
    return sums


def file_state(path: Path) -> list[int]:
    """Return the size, times and inode of a file, which change when its content does.

    Programs cannot set the change time (ctime), unlike the modification time.

    Raises:
        DataError: If the file is missing or not accessible.
    """
    try:
        stat = path.stat()
    except OSError as e:
        raise DataError(f"{path} cannot be read: {e.strerror}") from None
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
