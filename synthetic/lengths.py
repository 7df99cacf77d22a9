"""How lengths are written: 16,32,48 or 2:50:1 (from, to, step) or 2:512 (from, to, ×√2 each)."""

from __future__ import annotations

# A thousand times the longest length of a shipped configuration; a batch of 64 takes 0.5 GB.
MAX_LENGTH = 2**20
MAX_LENGTHS = 10_000  # every length is an evaluation of its own


def parse_ranges(text: str) -> list[tuple[int, ...]]:
    """Return each part of the list as numbers: (length,), (start, stop) or (start, stop, step).

    Raises:
        ValueError: If it is no list of lengths, a length is above MAX_LENGTH, or the list has more
            than MAX_LENGTHS of them; the message names the part and what would be right.
    """
    parts = [_numbers(part.strip(), text) for part in str(text).split(",")]
    count = sum(len(range(p[0], p[1] + 1, p[2])) if len(p) == 3 else 1 for p in parts)
    if count > MAX_LENGTHS:
        raise ValueError(
            f"`{text}` stands for {count:,} lengths, each of which is evaluated: at most"
            f" {MAX_LENGTHS:,}; a larger step, or START:STOP (×√2 from one to the next), has fewer"
        )
    return parts


def _numbers(part: str, text: str) -> tuple[int, ...]:
    """The numbers of one part of the list `text`."""
    of_list = "" if part == text else f" of `{text}`"
    try:
        numbers = tuple(int(number) for number in part.split(":"))
    except ValueError:
        numbers = ()
    if not 1 <= len(numbers) <= 3 or min(numbers) < 1:
        raise ValueError(
            f"`{part}`{of_list} must be a length, START:STOP (×√2 from one to the next) or"
            " START:STOP:STEP, of whole numbers above 0"
        )
    if max(numbers[:2]) > MAX_LENGTH:
        raise ValueError(f"`{part}`{of_list} is above {MAX_LENGTH:,}, the longest length")
    if len(numbers) > 1 and numbers[0] > numbers[1]:
        upwards = ":".join(map(str, (numbers[1], numbers[0], *numbers[2:])))
        raise ValueError(
            f"`{part}`{of_list} goes down from {numbers[0]} to {numbers[1]}: it must be"
            f" START:STOP, as {upwards}"
        )
    return numbers
