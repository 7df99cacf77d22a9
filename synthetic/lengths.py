"""How lengths are written: 16,32,48 or 2:50:1 (from, to, step) or 2:512 (from, to, ×√2 each)."""

from __future__ import annotations

import math
import re

# A thousand times the longest length of a shipped configuration; a batch of 64 takes 0.5 GB.
MAX_LENGTH = 2**20
MAX_LENGTHS = 10_000  # every length is an evaluation of its own
LADDER = 2**0.5  # START:STOP without a step: each length about so many times the one before
PART = re.compile(r"\s*([1-9]\d*)(?::([1-9]\d*))?(?::([1-9]\d*))?\s*")


def parse_ranges(text: str) -> list[list[int]]:
    """Return the lengths of each part of the list.

    Raises:
        ValueError: If it is no list of lengths, or has more than MAX_LENGTHS of them.
    """
    parts = [_expand(part) for part in str(text).split(",")]
    count = sum(map(len, parts))
    if count > MAX_LENGTHS:
        raise ValueError(
            f"`{text}` stands for {count:,} lengths, each of which is evaluated: at most"
            f" {MAX_LENGTHS:,}; a larger step, or START:STOP (×√2 from one to the next), has fewer"
        )
    return parts


def _expand(part: str) -> list[int]:
    """Return the lengths of one part of a list."""
    match = PART.fullmatch(part)
    start, stop, step = (int(number or 0) for number in match.groups()) if match else (0, 0, 0)
    stop = stop or start
    if not 1 <= start <= stop <= MAX_LENGTH:
        raise ValueError(
            f"`{part}` must be a length, START:STOP (×√2 from one to the next) or START:STOP:STEP,"
            f" of whole numbers from 1 to {MAX_LENGTH:,}, the smaller one first"
        )
    if step:
        return list(range(start, stop + 1, step))
    rungs = math.floor(math.log(stop / start, LADDER) + 1e-9)
    ladder = [round(start * LADDER**rung) for rung in range(rungs + 1)]
    return list(dict.fromkeys([*ladder, stop]))
