"""Notation of lengths: 16,32,48 or 2:50:1 (from, to, step) or 2:512 (from, to, ×√2 each)."""

from __future__ import annotations

import math
import re

# Tokens: a thousand times the longest in a shipped configuration; 64 such rows of ids take 0.5 GB.
MAX_LENGTH = 2**20
MAX_LENGTHS = 10_000  # each length is a separate evaluation
RATIO = 2**0.5  # ratio of consecutive lengths in START:STOP
RANGE_PATTERN = re.compile(r"\s*([1-9]\d*)(?::([1-9]\d*))?(?::([1-9]\d*))?\s*")


def parse_ranges(text: str) -> list[list[int]]:
    """Return the lengths of each comma-separated part of the text.

    Raises:
        ValueError: If the text is no list of lengths, or has more than MAX_LENGTHS of them.
    """
    parts = [_expand(part) for part in str(text).split(",")]
    count = sum(map(len, parts))
    if count > MAX_LENGTHS:
        raise ValueError(
            f"`{text}` means {count:,} lengths, each of which is evaluated: the maximum is"
            f" {MAX_LENGTHS:,}. Use a larger step, or START:STOP (×√2 from one to the next)"
        )
    return parts


def _expand(part: str) -> list[int]:
    """Return the lengths of "16", "2:512" or "2:50:1"."""
    match = RANGE_PATTERN.fullmatch(part)
    start, stop, step = (int(number or 0) for number in match.groups()) if match else (0, 0, 0)
    stop = stop or start
    if not 1 <= start <= stop <= MAX_LENGTH:
        raise ValueError(
            f"`{part}` must be a length, START:STOP (×√2 from one to the next) or START:STOP:STEP,"
            f" with integers from 1 to {MAX_LENGTH:,} and START ≤ STOP"
        )
    if step:
        return list(range(start, stop + 1, step))
    count = math.floor(math.log(stop / start, RATIO) + 1e-9) + 1  # 1e-9: rounding of the log
    lengths = [round(start * RATIO**index) for index in range(count)]
    return list(dict.fromkeys([*lengths, stop]))
