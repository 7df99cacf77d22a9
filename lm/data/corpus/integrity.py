"""Files of token ids with checksums: writing them durably, reading slices, verifying them."""

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

ANNOUNCED_BYTES = 2**30  # before reading more for checksums, print a line


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
        """Flush the file to the disk, and rename it to `path`; return its sha256."""
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
    """Token ids in a file. A slice reads its ids from the file.

    A memory map is not used: if the file were truncated meanwhile, SIGBUS would kill the process
    without a message.

    Args:
        count: Number of ids in the file.

    Raises:
        DataError: If the file cannot be opened; in a slice, if the file ends too early.
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

    def __getitem__(self, key: slice) -> np.ndarray:
        start, stop, step = key.indices(self._count)
        count = max(0, stop - start)
        self._file.seek(start * self.dtype.itemsize)
        ids = np.fromfile(self._file, self.dtype, count)
        if len(ids) < count:
            raise DataError(
                f"{self._path} is damaged: it was truncated while it was read, to"
                f" {self._path.stat().st_size} bytes of {self._count * self.dtype.itemsize};"
                f" restore it, or delete {self._path.parent}, and the next start prepares it again"
            )
        return ids[::step]


Tokens = np.ndarray | TokenFile  # token ids, shape (n,)


def checksums(paths: Iterable[Path], record: Path, min_trusted_bytes: int = 0) -> dict[Path, str]:
    """Return the sha256 of each file.

    Args:
        record: JSON file {path: [state, sha256]}, to which new checksums are added. A file whose
            size, times and inode are as recorded is not read again.
        min_trusted_bytes: Files of fewer bytes are read again in any case.

    Raises:
        DataError: If a file cannot be read.
    """
    records = read_mapping(record) or {}
    sums = {}
    unread = {}  # {path: state} of the files to read
    for path in sorted(set(paths)):
        state = file_state(path)
        entry = records.get(str(path), [])
        size, *_ = state
        is_large_enough = size >= min_trusted_bytes
        is_unchanged = isinstance(entry, list) and len(entry) == 2 and entry[0] == state
        if is_large_enough and is_unchanged:
            sums[path] = entry[1]
        else:
            unread[path] = state
    total_bytes = sum(size for size, *_ in unread.values())
    if total_bytes > ANNOUNCED_BYTES:
        say(f"data     reading {total_bytes / 1e9:.1f} GB to compute checksums")
    for path in unread:
        try:
            sums[path] = sha256(path)
        except OSError as e:
            raise DataError(f"{path} cannot be read: {e.strerror}") from None
    if unread:
        with contextlib.suppress(OutputError):  # if not written, the next start reads them again
            new_records = {str(path): [state, sums[path]] for path, state in unread.items()}
            write_json(record, records | new_records)
    return sums


def file_state(path: Path) -> list[int]:
    """Return the size, times and inode of a file, which differ if its content has changed.

    The change time (ctime) is included, because programs can set the modification time.

    Raises:
        DataError: If the file is missing or not accessible.
    """
    try:
        stat = path.stat()
    except OSError as e:
        raise DataError(f"{path} cannot be read: {e.strerror}") from None
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
