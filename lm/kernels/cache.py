"""The user's cache of compiled kernels."""

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


def find_or_make(name: str, suffix: str, make: Callable[[Path], None]) -> Path:
    """Return a file of the cache; make it if it is missing or damaged.

    The last part of a file's name is its checksum, because loading a damaged library would end the
    process by SIGSEGV or SIGBUS.

    Args:
        name: First part of the file's name, different for different contents.
        suffix: Suffix of the file, for example ".so".
        make: Function that writes the file to the path that it gets.

    Raises:
        OSError: If the cache cannot be written, or if other users can write into it.
        RuntimeError: If there is no home directory.
    """
    folder = _open_folder()
    for path in sorted(folder.glob(f"{name}-*{suffix}")):
        if path.stem == f"{name}-{_compute_checksum(path)}":
            return path
        print_note(f"the compiled kernels {path} are damaged (wrong checksum) and are removed")
        path.unlink(missing_ok=True)
    # Other processes may make the same file: each uses a temporary folder and moves its result in
    # one step.
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        path = Path(temporary) / f"{name}{suffix}"
        make(path)
        return path.replace(folder / f"{name}-{_compute_checksum(path)}{suffix}")


def _open_folder():
    """Create the cache folder if necessary, and check that only this user can write into it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "fprnn" / "kernels"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise OSError(
            f"other users can write into {folder}, and a library from there would run with your"
            f" rights: chown and chmod go-w {folder}, or set XDG_CACHE_HOME to a folder of yours"
        )
    return folder


def _compute_checksum(path):
    """Return the first 24 hex digits of the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:24]


def print_note(text: str) -> None:
    """Print a note on rank 0, to stderr so that it is not part of a command's output."""
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {text}", file=sys.stderr, flush=True)
