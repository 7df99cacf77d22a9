"""Cache folder of the kernels: libraries that were compiled at first use."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return `fprnn/kernels` in the user's cache, which may not exist yet.

    Raises:
        RuntimeError: If there is no home directory.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fprnn" / "kernels"


def open_cache_folder() -> Path:
    """Create the cache folder if necessary, and check that only this user can write into it.

    Raises:
        OSError: If the folder cannot be created, or if another user can write into it: a library
            from there would run with this user's rights.
        RuntimeError: If there is no home directory.
    """
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise OSError(
            f"other users can write into {folder}, and a library from there would run with your"
            f" rights: chown and chmod go-w {folder}, or set XDG_CACHE_HOME to a folder of yours"
        )
    return folder
