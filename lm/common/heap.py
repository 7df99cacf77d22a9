"""Settings of the C library's allocator for a training process."""

from __future__ import annotations

import ctypes
import sys

# Parameters of mallopt in glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
# Bytes, the largest value that glibc allows. Larger blocks are still returned to the system.
MAX_MMAP_THRESHOLD = 2**25


def keep_freed_memory() -> bool:
    """Make glibc reuse freed memory in this process instead of returning it to the system.

    By default glibc returns the temporaries of an update to the system, and allocating them again
    causes page faults: up to a quarter of the time on a CPU.

    Returns:
        True if the C library has these settings (glibc), False otherwise (musl, macOS).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    settings = (
        (M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD),
        (M_TRIM_THRESHOLD, -1),  # never return memory at the heap's top
        (M_TOP_PAD, 2**26),  # bytes by which the heap grows at once
    )
    return all(mallopt(key, value) for key, value in settings)
