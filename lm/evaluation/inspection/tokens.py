"""Tokens as a person can read them: spaces and line ends visible, parts of characters as bytes."""

from __future__ import annotations

from typing import NamedTuple

MARKS = {" ": "·", "\t": "→", "\n": "↵", "\r": "␍"}


class Token(NamedTuple):
    """One token of the input."""

    id: int
    shown: str
    ends_line: bool = False


def make_tokens(ids: list[int], raw: list[bytes]) -> list[Token]:
    """Return tokens from the bytes of text that each stands for."""
    return [
        Token(number, show_bytes(part), part.endswith(b"\n"))
        for number, part in zip(ids, raw, strict=True)
    ]


def show_bytes(raw: bytes) -> str:
    """Return bytes of UTF-8 as readable text: a cut character as its bytes, such as ⟨E2⟩."""
    # surrogateescape decodes a byte that is no UTF-8 to U+DC00 plus the byte.
    return "".join(map(_show, raw.decode("utf-8", errors="surrogateescape")))


def _show(character: str) -> str:
    if 0xDC80 <= ord(character) <= 0xDCFF:
        return f"⟨{ord(character) - 0xDC00:02X}⟩"
    if character.isprintable() and character != " ":
        return character
    return MARKS.get(character, f"⟨U+{ord(character):04X}⟩")
