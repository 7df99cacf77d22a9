"""Number of UTF-8 bytes of the text behind token ids, the denominator of bits per byte."""

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

UNKNOWN = -1  # size of a token that may replace any text, such as <unk>
SPACE = "▁"  # character for a space in sentencepiece
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # token for a single byte in sentencepiece
# {character for a byte in byte-level BPE: the byte}
BYTE_OF_CHARACTER = {character: byte for byte, character in bytes_to_unicode().items()}
# Texts that only a lossless tokenizer reproduces: characters of 1 to 4 bytes, runs of spaces
# and line ends, capitals, and characters that compatibility normalisation would change.
TEXTS = (
    "The naïve café (½ of it, x²) ﬁlled  with   spaces\tand\ttabs.\n\n  Next: 東京 мир שלום end \n",
    "a 🙂👩‍👧",
    "Ω≈ç√∫ ⁂ \u200b\u00a0x\r\n",
)


class UncountableError(UserError, ValueError):
    """Error for a tokenizer whose token ids do not determine the number of bytes of the text."""


class TextBytes:
    """Counter of the UTF-8 bytes of text behind token ids.

    A token of a byte-level BPE has as many bytes as characters. A token of sentencepiece has the
    UTF-8 bytes of its characters, except that ▁ is a space (1 byte) and a token such as <0x0A> is 1
    byte. EOS has 0 bytes. sentencepiece puts a space before a document, which is not text: it is
    not counted after EOS.

    Raises:
        UncountableError: If the tokenizer does not reproduce some text exactly.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self._eos = tokenizer.eos_token_id
        decoder_types = _decoder_types(tokenizer)
        vocabulary = tokenizer.get_vocab()
        added = tokenizer.added_tokens_decoder
        size = max(vocabulary.values()) + 1
        self._sizes = np.full(size, UNKNOWN, dtype=np.int64)  # bytes of each token
        self._begins_with_space = np.zeros(size, dtype=bool)
        for piece, token_id in vocabulary.items():
            if token_id in added and added[token_id].special:
                continue
            text = _decode_piece(piece, decoder_types, token_id in added)
            self._sizes[token_id] = len(text)
            self._begins_with_space[token_id] = text.startswith(b" ")
        if self._eos is not None:
            self._sizes[self._eos] = 0
        self._prefix_size = 0  # number of spaces that the tokenizer puts before each document
        # "a" is counted with 2 bytes if the tokenizer puts a space before it.
        if {"Metaspace", "Strip"} & decoder_types and _count_text(tokenizer, self, "a") == 2:
            self._prefix_size = 1
        added_tokens = [token.content for token in added.values() if not token.special]
        _check_lossless(tokenizer, self, added_tokens)

    def count(self, previous: ArrayLike, targets: ArrayLike) -> int | None:
        """Count the bytes of the targets' text.

        Args:
            previous: Token before each target in the stream, same shape as `targets`.
            targets: Token ids; IGNORE does not count.

        Returns:
            The number of bytes; None if a target may replace any text.
        """
        is_counted = np.asarray(targets) != IGNORE
        ids = np.asarray(targets)[is_counted]
        sizes = self._sizes[ids]
        if (sizes == UNKNOWN).any():
            return None
        begins_document = np.asarray(previous)[is_counted] == self._eos
        has_prefix = begins_document & self._begins_with_space[ids]
        return int(sizes.sum()) - self._prefix_size * int(has_prefix.sum())


def bits_per_byte(nats: float, text_bytes: float | None) -> float | None:
    """Convert the sum of the losses to bits per byte of text.

    Args:
        nats: Sum of the cross-entropy over all targets.
        text_bytes: Bytes of the targets' text.

    Returns:
        Bits per byte; None if the bytes are 0 or not known.
    """
    return nats / (math.log(2) * text_bytes) if text_bytes else None


def format_bits_per_byte(bits: float | None) -> str:
    """Format bits per byte for a line of output; "" if they are not known."""
    return "" if bits is None else f"  bits per byte {bits:.4f}"


def _decoder_types(tokenizer: PreTrainedTokenizerFast) -> set[str]:
    """Return the types of the parts of the decoder, which turns tokens into text."""
    decoder = tokenizer.backend_tokenizer.decoder
    if decoder is None:
        raise UncountableError("the tokenizer has no decoder, so the text of a token is not known")
    settings = json.loads(decoder.__getstate__())
    parts = settings["decoders"] if settings["type"] == "Sequence" else [settings]
    for part in parts:
        is_known = part["type"] in ("ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Strip")
        replaces_space = part["type"] == "Replace" and part.get("pattern") == {"String": SPACE}
        if not is_known and not replaces_space:
            raise UncountableError(
                f"the tokenizer's decoder has a part {part['type']}, for which the bytes of a token"
                " are not known; byte-level BPE and sentencepiece are supported"
            )
    return {part["type"] for part in parts}


def _decode_piece(piece: str, decoder_types: set[str], is_added: bool) -> bytes:
    """Return the bytes of a token inside a document; `piece` is its vocabulary entry."""
    if "ByteLevel" in decoder_types:
        has_byte_characters = not is_added and BYTE_OF_CHARACTER.keys() >= set(piece)
        return bytes(BYTE_OF_CHARACTER[c] for c in piece) if has_byte_characters else piece.encode()
    if "ByteFallback" in decoder_types and BYTE_TOKEN.fullmatch(piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(SPACE, " ").encode()


def _count_text(tokenizer: PreTrainedTokenizerFast, text_bytes: TextBytes, text: str) -> int | None:
    """Count the bytes of a text from its tokens."""
    try:
        ids = encode_documents(tokenizer, [text], leading_eos=True)
    except Exception as e:  # `tokenizers` raises no subclass, e.g. for a character without a token
        raise UncountableError(f"the tokenizer cannot read {text!r}: {e}") from None
    return text_bytes.count(ids[:-1], ids[1:])


def _check_lossless(
    tokenizer: PreTrainedTokenizerFast, text_bytes: TextBytes, added_tokens: list[str]
) -> None:
    """Raise UncountableError if a text is not reproduced, or its bytes are miscounted."""
    backend = tokenizer.backend_tokenizer
    # sentencepiece decodes ▁ as a space, so it does not reproduce a text with ▁.
    added_texts = [f"a {token} b" for token in added_tokens if SPACE not in token]
    for text in (*TEXTS, *added_texts):
        count = _count_text(tokenizer, text_bytes, text)
        ids = encode_documents(tokenizer, [text])
        decoded = backend.decode(ids[:-1].tolist(), skip_special_tokens=False)
        # Byte-level decoders decode added tokens such as "é" wrongly, because an added token is
        # stored as plain text. For texts with added tokens only the number of bytes is checked.
        if count != len(text.encode()) or (text in TEXTS and decoded != text):
            raise UncountableError(
                f"the tokenizer does not preserve text (it decodes the tokens of {text!r} to"
                f" {decoded!r}), so the bytes of a token are not known"
            )


def token_bytes(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[bytes]:
    """Return the text of each token inside a document as bytes.

    The text of a special token is its vocabulary entry. If the tokenizer is neither byte-level nor
    sentencepiece, each token is decoded separately.
    """
    try:
        decoder_types = _decoder_types(tokenizer)
    except UncountableError:
        return [tokenizer.decode([token_id]).encode() for token_id in ids]
    added = tokenizer.added_tokens_decoder
    texts = []
    for token_id, piece in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
        is_special = token_id in added and added[token_id].special
        if piece is None:  # the model's vocabulary is rounded up beyond the tokenizer's
            texts.append(f"<{token_id}>".encode())
        elif is_special:
            texts.append(piece.encode())
        else:
            texts.append(_decode_piece(piece, decoder_types, token_id in added))
    return texts
