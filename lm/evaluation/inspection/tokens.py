"""Tokens as a person can read them: spaces and line ends visible, parts of characters as bytes."""

from __future__ import annotations

from dataclasses import dataclass

SPACE, TAB, NEWLINE, RETURN = "·", "→", "↵", "␍"
MARKS = {" ": SPACE, "\t": TAB, "\n": NEWLINE, "\r": RETURN}


@dataclass(frozen=True)
class Piece:
    """A stretch of a token's text that is shown in one way."""

    text: str
    is_mark: bool = False  # it stands for what cannot be seen: a space, a byte, a control character


@dataclass(frozen=True)
class Token:
    """One token of the input."""

    id: int
    pieces: tuple[Piece, ...]  # its text as shown
    part_of: str = ""  # the characters that it holds only a part of
    ends_line: bool = False

    @property
    def shown(self) -> str:
        """Its text as shown, in one string."""
        return "".join(piece.text for piece in self.pieces)


def tokens_of(ids: list[int], raw: list[bytes]) -> list[Token]:
    """Tokens from the bytes of text that each stands for, one after another."""
    return [
        Token(number, visible(of_token), part_of, of_token.endswith(b"\n"))
        for number, of_token, part_of in zip(ids, raw, _cut_characters(raw), strict=True)
    ]


def named(ids: list[int], names: list[str]) -> list[Token]:
    """Tokens that have names, and are no text."""
    return [Token(number, (Piece(name),)) for number, name in zip(ids, names, strict=True)]


def visible(raw: bytes) -> tuple[Piece, ...]:
    """Bytes of UTF-8 as they are shown: what is no whole character as its bytes, such as ⟨E2⟩."""
    pieces: list[Piece] = []
    while raw:
        try:
            pieces += _of_text(raw.decode())
            break
        except UnicodeDecodeError as e:
            pieces += _of_text(raw[: e.start].decode())
            pieces += [Piece(f"⟨{byte:02X}⟩", True) for byte in raw[e.start : e.end]]
            raw = raw[e.end :]
    return tuple(pieces)


def _of_text(text: str) -> list[Piece]:
    pieces: list[Piece] = []
    plain = ""
    for character in text:
        if character.isprintable() and character != " ":
            plain += character
            continue
        if plain:
            pieces.append(Piece(plain))
            plain = ""
        pieces.append(Piece(MARKS.get(character, f"⟨U+{ord(character):04X}⟩"), True))
    return [*pieces, Piece(plain)] if plain else pieces


def _cut_characters(raw: list[bytes]) -> list[str]:
    """Of each token the characters that it holds only a part of."""
    try:
        text = b"".join(raw).decode()
    except UnicodeDecodeError:  # no text that anybody wrote: nothing to say
        return [""] * len(raw)
    # Of each byte: its character, and where that begins and ends.
    spans: list[tuple[str, int, int]] = []
    for character in text:
        size = len(character.encode())
        spans += [(character, len(spans), len(spans) + size)] * size
    found, start = [], 0
    for of_token in raw:
        end = start + len(of_token)
        cut = {span: None for span in spans[start:end] if span[1] < start or span[2] > end}
        found.append("".join(character for character, _, _ in cut))
        start = end
    return found
