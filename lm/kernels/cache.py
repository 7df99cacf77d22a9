"""Where kernels keep what they need from one run to the next: built libraries, measured times."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder, which may not be there yet: `fprnn/kernels` in the user's cache.

    Raises:
        RuntimeError: there is no home directory.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fprnn" / "kernels"
