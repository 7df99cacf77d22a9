"""The C library's memory, kept by the process that trains."""

from __future__ import annotations

import ctypes
import sys

# glibc's malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST_KEPT = 2**25  # bytes, glibc's own limit: larger tensors would leave holes as large


def keep_freed_memory() -> bool:
    """Have glibc keep what is freed for what is asked for next, from now on, in this process. By
    default it gives the temporaries of an update back to the system, and the same ones of the next
    update cost page faults: up to a quarter of the time on a CPU (benchmarks/README.md).

    Returns:
        whether the process has a C library that can.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:  # musl, macOS
        return False
    asked = ((M_MMAP_THRESHOLD, LARGEST_KEPT), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, 2**26))
    return all(mallopt(key, value) for key, value in asked)
