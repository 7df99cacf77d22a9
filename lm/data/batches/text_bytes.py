"""UTF-8 bytes of the text that tokens stand for: what bits per byte are taken over."""

from __future__ import annotations

import json
import math
import re

import numpy as np
from numpy.typing import ArrayLike
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lm.common.errors import UserError
from lm.data.batches.packing import IGNORE
from lm.data.corpus.documents import encode_documents

UNKNOWN = -1  # bytes of an id that may stand for any text, such as <unk>
SPACE = "▁"  # how sentencepiece writes a space
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # sentencepiece's token of one byte
# How byte-level BPE writes bytes.
ALPHABET = {character: byte for byte, character in bytes_to_unicode().items()}
# What a tokenizer that loses nothing gives back: characters of one to four bytes, runs of spaces
# and line ends, capitals, and what compatibility normalisation would change.
PROBES = (
    "The naïve café (½ of it, x²) ﬁlled  with   spaces\tand\ttabs.\n\n  Next: 東京 мир שלום end \n",
    "a 🙂👩‍👧",
    "Ω≈ç√∫ ⁂ \u200b\u00a0x\r\n",
)


class UncountableError(UserError, ValueError):
    """A tokenizer whose tokens do not say how many bytes of text they stand for; says why."""


class TextBytes:
    """How many bytes of UTF-8 text tokens stand for, from their ids alone.

    A token of a byte-level BPE stands for as many bytes as it has characters, be they whole
    characters of the text or not; one of sentencepiece for its characters, ▁ being the one byte of
    a space, and <0x0A> for one byte. EOS is no text: 0 bytes. The space that sentencepiece puts
    before a document is no text either: after an EOS it is not counted.

    Raises:
        UncountableError: the tokenizer does not give back the text that it was given.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self._eos = tokenizer.eos_token_id
        kinds = _decoder_kinds(tokenizer)
        vocabulary = tokenizer.get_vocab()
        added = tokenizer.added_tokens_decoder
        size = max(vocabulary.values()) + 1
        self._sizes = np.full(size, UNKNOWN, dtype=np.int64)
        self._begins_with_space = np.zeros(size, dtype=bool)
        for piece, number in vocabulary.items():
            if number in added and added[number].special:
                continue
            text = _text(piece, kinds, number in added)
            self._sizes[number] = len(text)
            self._begins_with_space[number] = text.startswith(b" ")
        if self._eos is not None:
            self._sizes[self._eos] = 0
        self._prefix = 0  # spaces that the tokenizer puts before a document
        if {"Metaspace", "Strip"} & kinds and _count_in(tokenizer, self, "a") == 2:
            self._prefix = 1
        _probe(tokenizer, self, [token.content for token in added.values() if not token.special])

    def count(self, before: ArrayLike, targets: ArrayLike) -> int | None:
        """Bytes of the text that targets stand for; None where one may stand for any text.

        Args:
            before, targets: integers of one shape; `before` has the token before each target in
                the stream. Targets IGNORE do not count.
        """
        is_counted = np.asarray(targets) != IGNORE
        counted = np.asarray(targets)[is_counted]
        sizes = self._sizes[counted]
        if (sizes == UNKNOWN).any():
            return None
        begins_document = np.asarray(before)[is_counted] == self._eos
        has_prefix = begins_document & self._begins_with_space[counted]
        return int(sizes.sum()) - self._prefix * int(has_prefix.sum())


def bits_per_byte(nats: float, text_bytes: float | None) -> float | None:
    """Nats over all targets → bits for each byte of the text that they stand for; None where the
    bytes cannot be counted, or there are none."""
    return nats / (math.log(2) * text_bytes) if text_bytes else None


def in_bits(bits: float | None) -> str:
    """For a line, after a perplexity; nothing where they are not known."""
    return "" if bits is None else f"  bits per byte {bits:.4f}"


def _decoder_kinds(tokenizer: PreTrainedTokenizerFast) -> set[str]:
    """Return the kinds of the decoder's parts, which turn tokens into text.

    Raises:
        UncountableError: If the bytes of a token do not follow from its piece.
    """
    decoder = tokenizer.backend_tokenizer.decoder
    if decoder is None:
        raise UncountableError("the tokenizer has no decoder, which would say what its tokens mean")
    described = json.loads(decoder.__getstate__())
    parts = described["decoders"] if described["type"] == "Sequence" else [described]
    for part in parts:
        is_known = part["type"] in ("ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Strip")
        if not is_known and (part["type"], part.get("pattern")) != ("Replace", {"String": SPACE}):
            raise UncountableError(
                f"the tokenizer's decoder has a part {part['type']} whose tokens' bytes cannot be"
                " told; byte-level BPE and sentencepiece are known"
            )
    return {part["type"] for part in parts}


def _text(piece: str, decoder_kinds: set[str], is_added: bool) -> bytes:
    """Return the bytes of text that a token stands for inside a document."""
    if "ByteLevel" in decoder_kinds:
        is_spelled = not is_added and ALPHABET.keys() >= set(piece)
        return bytes(ALPHABET[c] for c in piece) if is_spelled else piece.encode()
    if "ByteFallback" in decoder_kinds and BYTE.fullmatch(piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(SPACE, " ").encode()


def _count_in(tokenizer: PreTrainedTokenizerFast, text_bytes: TextBytes, text: str) -> int | None:
    """Count the bytes of a text from its tokens.

    Raises:
        UncountableError: If the tokenizer cannot read the text.
    """
    try:
        ids = encode_documents(tokenizer, [text], leading_eos=True)
    except Exception as e:  # tokenizers raises no other, say of a character without a token
        raise UncountableError(f"the tokenizer cannot read {text!r}: {e}") from None
    return text_bytes.count(ids[:-1], ids[1:])


def _probe(tokenizer: PreTrainedTokenizerFast, text_bytes: TextBytes, added: list[str]) -> None:
    """Raise UncountableError if a text does not come back, or its bytes are miscounted."""
    backend = tokenizer.backend_tokenizer
    for text in (*PROBES, *(f"a {content} b" for content in added if SPACE not in content)):
        count = _count_in(tokenizer, text_bytes, text)
        ids = encode_documents(tokenizer, [text])
        back = backend.decode(ids[:-1].tolist(), skip_special_tokens=False)
        # Byte-level decoders garble added tokens such as "é", which stand for themselves.
        if count != len(text.encode()) or (text in PROBES and back != text):
            raise UncountableError(
                f"the tokenizer does not keep the text as it is (of {text!r} it gives back"
                f" {back!r}), so its tokens do not say how many bytes they stand for"
            )


def bytes_of_tokens(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[bytes]:
    """The bytes of text that each token stands for inside a document: its piece as it is written
    where it is a special token; what it decodes to by itself where the tokenizer is neither
    byte-level nor sentencepiece."""
    try:
        kinds = _decoder_kinds(tokenizer)
    except UncountableError:
        return [tokenizer.decode([number]).encode() for number in ids]
    added = tokenizer.added_tokens_decoder
    found = []
    for number, piece in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
        special = number in added and added[number].special
        if piece is None:  # the model's vocabulary is rounded up beyond the tokenizer's
            found.append(f"<{number}>".encode())
        else:
            found.append(piece.encode() if special else _text(piece, kinds, number in added))
    return found
