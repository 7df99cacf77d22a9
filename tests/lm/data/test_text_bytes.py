"""Tests of the bytes of text per token, against the UTF-8 length of documents; bits per byte."""

import math
import types

import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lm.common.ranks import Ranks
from lm.config.data import Data
from lm.data.batches.loader import validation_blocks
from lm.data.batches.text_bytes import (
    TextBytes,
    UncountableError,
    bits_per_byte,
    format_bits_per_byte,
)
from lm.data.corpus.documents import encode_documents
from lm.data.corpus.tokenizer import _load_folder
from lm.training.validation import count_text_bytes
from tests.lm.data.test_tokenizer import EDGE_CASES

TEXTS = [
    "Hello, world.  Two spaces.",
    "naïve 東京 \U0001f469\u200d\U0001f467 \U0001d518",
    "<s> </s> <unk> <0x0A> <|endoftext|>",
    *EDGE_CASES,
]


def sentencepiece_like(decoder="strip", prepend="▁") -> PreTrainedTokenizerFast:
    """Make a small BPE with byte fallback and a decoder like Llama's, or Metaspace."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = ["</s>", "<unk>", *bytes_, "▁", *"abcdefghijklmnopqrstuvwxyzTN.", "▁a", "▁▁", "th"]
    backend = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(vocabulary)},
            [("▁", "a"), ("▁", "▁"), ("t", "h")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    byte_decoders = [decoders.ByteFallback(), decoders.Fuse()]
    if decoder == "strip":
        space = normalizers.Replace(" ", "▁")
        prefix = [normalizers.Prepend(prepend)] if prepend else []
        backend.normalizer = normalizers.Sequence([*prefix, space])
        parts = [decoders.Replace("▁", " "), *byte_decoders]
        parts += [decoders.Strip(" ", 1, 0)] if prepend else []
    else:
        scheme = "always" if prepend else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        parts = [decoders.Metaspace(prepend_scheme=scheme), *byte_decoders]
    backend.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def count_bytes(tokenizer, texts, leading_eos=True) -> int:
    ids = encode_documents(tokenizer, texts, leading_eos)
    return TextBytes(tokenizer).count(ids[:-1], ids[1:])


def utf8_length(texts) -> int:
    return sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize("prepend", ["▁", ""])
@pytest.mark.parametrize("decoder", ["strip", "metaspace"])
def test_space_before_a_document_is_not_counted(decoder, prepend):
    tokenizer = sentencepiece_like(decoder, prepend)
    # Metaspace encodes "a" and " a" alike, so a leading space cannot be counted.
    texts = [t for t in TEXTS if decoder == "strip" or not (prepend and t.startswith(" "))]
    for text in texts:
        assert count_bytes(tokenizer, [text]) == utf8_length([text]), text
    assert count_bytes(tokenizer, texts) == utf8_length(texts)
    # The first token, "▁a", is not a target. The targets have 3 + 0 + 1 + 0 bytes.
    assert count_bytes(tokenizer, ["a th", "a"], leading_eos=False) == 4


def test_gpt2_counts_the_bytes_of_documents(shared):
    tokenizer = _load_folder(shared / "tokenizers/gpt2")
    table = pq.read_table(shared / "fineweb/000_00000.parquet", columns=["text"])
    texts = table["text"].to_pylist()[:60] + TEXTS
    text_bytes = TextBytes(tokenizer)
    for text in texts:
        ids = encode_documents(tokenizer, [text], leading_eos=True)
        assert text_bytes.count(ids[:-1], ids[1:]) == len(text.encode()), text[:40]
    assert count_bytes(tokenizer, texts) == utf8_length(texts)


def test_any_part_of_a_stream_has_the_bytes_of_its_text(bpe):
    """Blocks may cut a character, `val_tokens` may end anywhere, and ranks are added."""
    texts = ["naïve 東京 \U0001f469\u200d\U0001f467.", "", "ß", "plain words, plain words"]
    ids = encode_documents(bpe, texts)
    text_bytes, num_checked = TextBytes(bpe), 0
    for targets in range(1, len(ids)):
        text = bpe.decode(ids[1 : targets + 1].tolist(), skip_special_tokens=True)
        if "\ufffd" in text:
            continue  # the cut is inside a character
        num_checked += 1
        for world in (1, 2, 3):
            data = Data(seq_len=4, val_tokens=targets)
            shares = [
                validation_blocks(ids, data, micro_batch_size=2, rank=rank, world_size=world)
                for rank in range(world)
            ]
            counts = [text_bytes.count(b["input_ids"], b["labels"]) for s in shares for b in s]
            assert sum(counts) == len(text.encode()), (targets, world)
    assert num_checked > 20 and len(ids) - num_checked > 3


def test_eos_has_bits_but_no_bytes(bpe):
    ids = encode_documents(bpe, ["ab", "cd"], leading_eos=True)
    assert TextBytes(bpe).count(ids[:-1], ids[1:]) == 4
    nats = (len(ids) - 1) * math.log(2)  # one bit per target, including EOS
    assert bits_per_byte(nats, 4) == pytest.approx((len(ids) - 1) / 4)


def test_uniform_model_of_bytes_has_8_bits_per_byte():
    assert bits_per_byte(1000 * math.log(256), 1000) == pytest.approx(8)
    assert bits_per_byte(3.0, None) is None and bits_per_byte(3.0, 0) is None
    assert format_bits_per_byte(1.5) == "  bits per byte 1.5000"
    assert format_bits_per_byte(None) == ""


def test_bytes_are_summed_over_ranks(bpe, monkeypatch):
    """The other rank adds 1,000 bytes, and no token whose bytes are unknown."""
    batch = {
        "input_ids": torch.tensor([[bpe.eos_token_id, 9]]),
        "labels": torch.tensor([[9, -100]]),
    }
    count = TextBytes(bpe).count(batch["input_ids"], batch["labels"])
    two_ranks = types.SimpleNamespace(sum=lambda *values: [values[0] + 1000, values[1]])
    validation = {"a": [batch, batch], "b": [batch]}
    assert count_text_bytes(validation, bpe, two_ranks) == {
        "a": 2 * count + 1000,
        "b": count + 1000,
    }
    assert count_text_bytes({"": [batch]}, bpe, Ranks()) == {"": count}


def test_unknown_token_makes_the_bytes_unknown(capsys):
    tokenizer = sentencepiece_like()
    unk = tokenizer.convert_tokens_to_ids("<unk>")
    assert TextBytes(tokenizer).count([3, 3], [unk, 4]) is None
    assert TextBytes(tokenizer).count([unk, 3], [4, -100]) == 1
    batch = {"input_ids": torch.tensor([[3]]), "labels": torch.tensor([[unk]])}
    assert count_text_bytes({"": [batch]}, tokenizer, Ranks()) == {"": None}
    assert "note: no bits per byte: the validation text has tokens" in capsys.readouterr().out


def change(bpe, **parts) -> PreTrainedTokenizerFast:
    """Copy the byte-level BPE and replace parts of it."""
    backend = Tokenizer.from_str(bpe.backend_tokenizer.to_str())
    for name, part in parts.items():
        setattr(backend, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=bpe.eos_token)


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.Lowercase()},
        {"normalizer": normalizers.NFKC()},
        {"normalizer": normalizers.Replace(Regex(" +"), " ")},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
    ],
    ids=str,
)
def test_tokenizer_that_changes_the_text_is_refused(bpe, parts):
    with pytest.raises(UncountableError, match="does not preserve text"):
        TextBytes(change(bpe, **parts))


def test_canonical_normalisation_is_allowed(bpe):
    assert count_bytes(change(bpe, normalizer=normalizers.NFC()), ["é x"]) == 4


def test_added_tokens_have_the_bytes_of_their_text(bpe):
    tokenizer = change(bpe)
    tokenizer.add_tokens(["<tool>", "çé"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im|>"]})
    text = "a<tool> çé<|im|> b"
    assert count_bytes(tokenizer, [text]) == len(text.encode())


def test_added_token_that_strips_spaces_is_refused(bpe):
    tokenizer = change(bpe)
    tokenizer.add_tokens([AddedToken("<tool>", rstrip=True)])
    with pytest.raises(UncountableError, match="'a <tool> b'"):
        TextBytes(tokenizer)


def test_other_types_of_tokenizer_are_refused(capsys):
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "</s>": 2}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    with pytest.raises(UncountableError, match="has no decoder"):
        TextBytes(tokenizer)
    backend.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    with pytest.raises(UncountableError, match="decoder has a part WordPiece"):
        TextBytes(tokenizer)
    assert count_text_bytes({"": []}, tokenizer, Ranks()) == {"": None}
    assert "note: no bits per byte: the tokenizer's decoder" in capsys.readouterr().out


def test_tokenizer_without_some_characters_gives_a_note(capsys):
    backend = Tokenizer(models.Unigram([("</s>", 0.0), ("▁", -1.0), ("a", -2.0)], None, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    assert count_text_bytes({"": []}, tokenizer, Ranks()) == {"": None}
    assert "note: no bits per byte: the tokenizer cannot read 'The na" in capsys.readouterr().out


def test_strip_of_every_token_is_refused():
    tokenizer = sentencepiece_like()
    parts = [decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0), decoders.Fuse()]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(parts)
    with pytest.raises(UncountableError, match="does not preserve text"):
        TextBytes(tokenizer)
