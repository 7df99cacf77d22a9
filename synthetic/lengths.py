"""How lengths are written: 16,32,48 or 2:50:1 (from, to, step) or 2:512 (from, to, ×√2 each)."""

from __future__ import annotations


def parse_ranges(text: str) -> list[tuple[int, ...]]:
    """Each part of the list as its numbers: (length,), (start, stop) or (start, stop, step).

    Raises:
        ValueError: not a list of lengths; says which part, and what would be right.
    """
    return [_numbers(part.strip(), text) for part in str(text).split(",")]


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
    if len(numbers) > 1 and numbers[0] > numbers[1]:
        upwards = ":".join(map(str, (numbers[1], numbers[0], *numbers[2:])))
        raise ValueError(
            f"`{part}`{of_list} goes down from {numbers[0]} to {numbers[1]}: it must be"
            f" START:STOP, as {upwards}"
        )
    return numbers
