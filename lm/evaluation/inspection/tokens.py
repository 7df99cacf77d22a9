"""Readable form of tokens: visible spaces and line ends, and bytes of incomplete characters."""

from __future__ import annotations

from typing import NamedTuple

MARKS = {" ": "·", "\t": "→", "\n": "↵", "\r": "␍"}


class Token(NamedTuple):
    """Token of the input."""

    id: int
    label: str  # readable text
    ends_line: bool = False  # True if its text ends with a line break


def make_tokens(ids: list[int], texts: list[bytes]) -> list[Token]:
    """Return the tokens of these ids, given the bytes of each token's text."""
    return [
        Token(token_id, show_bytes(token_text), token_text.endswith(b"\n"))
        for token_id, token_text in zip(ids, texts, strict=True)
    ]


def show_bytes(raw: bytes) -> str:
    """Return UTF-8 bytes as readable text, with incomplete characters as bytes such as ⟨E2⟩."""
    # surrogateescape decodes an invalid byte to the character U+DC00 plus the byte.
    return "".join(map(_show_character, raw.decode("utf-8", errors="surrogateescape")))


def _show_character(character: str) -> str:
    if 0xDC80 <= ord(character) <= 0xDCFF:
        return f"⟨{ord(character) - 0xDC00:02X}⟩"
    if character.isprintable() and character != " ":
        return character
    return MARKS.get(character, f"⟨U+{ord(character):04X}⟩")
