"""Bytes of text by token id, against the UTF-8 length of whole documents; bits per byte."""

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
from lm.data.batches.text_bytes import TextBytes, UncountableError, bits_per_byte, in_bits
from lm.data.corpus.documents import encode_documents
from lm.data.corpus.tokenizer import _from_folder
from lm.training.validation import count_text_bytes
from tests.lm.data.test_tokenizer import EDGE_CASES

TEXTS = [
    "Hello, world.  Two spaces.",
    "naïve 東京 \U0001f469\u200d\U0001f467 \U0001d518",
    "<s> </s> <unk> <0x0A> <|endoftext|>",
    *EDGE_CASES,
]


def sentencepiece_like(decoder="strip", prepend="▁") -> PreTrainedTokenizerFast:
    """A small BPE with bytes to fall back on, written as Llama's or as Metaspace."""
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
    bytes_back = [decoders.ByteFallback(), decoders.Fuse()]
    if decoder == "strip":
        space = normalizers.Replace(" ", "▁")
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend(prepend), space] if prepend else [space]
        )
        parts = [decoders.Replace("▁", " "), *bytes_back]
        parts += [decoders.Strip(" ", 1, 0)] if prepend else []
    else:
        scheme = "always" if prepend else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        parts = [decoders.Metaspace(prepend_scheme=scheme), *bytes_back]
    backend.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def counted(tokenizer, texts, leading_eos=True) -> int:
    ids = encode_documents(tokenizer, texts, leading_eos)
    return TextBytes(tokenizer).count(ids[:-1], ids[1:])


def length(texts) -> int:
    return sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize("prepend", ["▁", ""])
@pytest.mark.parametrize("decoder", ["strip", "metaspace"])
def test_the_space_before_a_document_is_no_text(decoder, prepend):
    tokenizer = sentencepiece_like(decoder, prepend)
    # Metaspace writes "a" and " a" alike: what it then gives back is counted.
    texts = [t for t in TEXTS if decoder == "strip" or not (prepend and t.startswith(" "))]
    for text in texts:
        assert counted(tokenizer, [text]) == length([text]), text
    assert counted(tokenizer, texts) == length(texts)
    # Of the first document the first token is no target: "▁a" stands for one byte, "▁" for none.
    assert counted(tokenizer, ["a th", "a"], leading_eos=False) == 4


def test_a_real_tokenizer_counts_whole_documents(shared):
    tokenizer = _from_folder(shared / "tokenizers/gpt2")
    table = pq.read_table(shared / "fineweb/000_00000.parquet", columns=["text"])
    texts = table["text"].to_pylist()[:60] + TEXTS
    text_bytes = TextBytes(tokenizer)
    for text in texts:
        ids = encode_documents(tokenizer, [text], leading_eos=True)
        assert text_bytes.count(ids[:-1], ids[1:]) == len(text.encode()), text[:40]
    assert counted(tokenizer, texts) == length(texts)


def test_any_cut_of_a_stream_counts_what_its_targets_decode_to(bpe):
    """Blocks may cut a character; `val_tokens` may end anywhere; ranks add up."""
    texts = ["naïve 東京 \U0001f469\u200d\U0001f467.", "", "ß", "plain words, plain words"]
    ids = encode_documents(bpe, texts)
    text_bytes, checked = TextBytes(bpe), 0
    for targets in range(1, len(ids)):
        spelled = bpe.decode(ids[1 : targets + 1].tolist(), skip_special_tokens=True)
        if "\ufffd" in spelled:
            continue  # the cut is inside a character
        checked += 1
        for world in (1, 2, 3):
            data = Data(seq_len=4, val_tokens=targets)
            shares = [validation_blocks(ids, data, 2, rank, world) for rank in range(world)]
            found = [text_bytes.count(b["input_ids"], b["labels"]) for s in shares for b in s]
            assert sum(found) == len(spelled.encode()), (targets, world)
    assert checked > 20 and len(ids) - checked > 3


def test_end_tokens_are_no_text_but_their_bits_count(bpe):
    ids = encode_documents(bpe, ["ab", "cd"], leading_eos=True)
    assert TextBytes(bpe).count(ids[:-1], ids[1:]) == 4
    nats = (len(ids) - 1) * math.log(2)  # a bit for each target, both ends among them
    assert bits_per_byte(nats, 4) == pytest.approx((len(ids) - 1) / 4)


def test_a_uniform_model_of_bytes_has_the_bits_of_its_alphabet():
    assert bits_per_byte(1000 * math.log(256), 1000) == pytest.approx(8)
    assert bits_per_byte(3.0, None) is None and bits_per_byte(3.0, 0) is None
    assert in_bits(1.5) == "  bits per byte 1.5000" and in_bits(None) == ""


def test_ranks_add_their_bytes(bpe, monkeypatch):
    """The other rank's share comes by the sum, which is of bytes and not of a mean."""
    batch = {
        "input_ids": torch.tensor([[bpe.eos_token_id, 9]]),
        "labels": torch.tensor([[9, -100]]),
    }
    own = TextBytes(bpe).count(batch["input_ids"], batch["labels"])
    others = types.SimpleNamespace(sum=lambda *values: [values[0] + 1000, values[1]])
    held_out = {"a": [batch, batch], "b": [batch]}
    assert count_text_bytes(held_out, bpe, others) == {"a": 2 * own + 1000, "b": own + 1000}
    assert count_text_bytes({"": [batch]}, bpe, Ranks()) == {"": own}


def test_a_target_that_may_be_any_text_makes_it_unknown(capsys):
    tokenizer = sentencepiece_like()
    unk = tokenizer.convert_tokens_to_ids("<unk>")
    assert TextBytes(tokenizer).count([3, 3], [unk, 4]) is None
    assert TextBytes(tokenizer).count([unk, 3], [4, -100]) == 1
    batch = {"input_ids": torch.tensor([[3]]), "labels": torch.tensor([[unk]])}
    assert count_text_bytes({"": [batch]}, tokenizer, Ranks()) == {"": None}
    assert "note: no bits per byte: the validation text has tokens" in capsys.readouterr().out


def changed(bpe, **parts) -> PreTrainedTokenizerFast:
    """The byte-level BPE with other parts."""
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
def test_a_tokenizer_that_changes_the_text_is_refused(bpe, parts):
    with pytest.raises(UncountableError, match="does not keep the text as it is"):
        TextBytes(changed(bpe, **parts))


def test_canonical_normalisation_is_not_a_change(bpe):
    assert counted(changed(bpe, normalizer=normalizers.NFC()), ["é x"]) == 4


def test_tokens_that_were_added_stand_for_themselves(bpe):
    tokenizer = changed(bpe)
    tokenizer.add_tokens(["<tool>", "çé"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im|>"]})
    text = "a<tool> çé<|im|> b"
    assert counted(tokenizer, [text]) == len(text.encode())


def test_an_added_token_that_takes_the_spaces_around_it_is_refused(bpe):
    tokenizer = changed(bpe)
    tokenizer.add_tokens([AddedToken("<tool>", rstrip=True)])
    with pytest.raises(UncountableError, match="'a <tool> b'"):
        TextBytes(tokenizer)


def test_other_kinds_of_tokenizer_are_refused_by_name(capsys):
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


def test_a_tokenizer_that_cannot_read_every_text_is_no_error_of_a_run(capsys):
    backend = Tokenizer(models.Unigram([("</s>", 0.0), ("▁", -1.0), ("a", -2.0)], None, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    assert count_text_bytes({"": []}, tokenizer, Ranks()) == {"": None}
    assert "note: no bits per byte: the tokenizer cannot read 'The na" in capsys.readouterr().out


def test_a_strip_of_every_token_is_refused():
    tokenizer = sentencepiece_like()
    parts = [decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0), decoders.Fuse()]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(parts)
    with pytest.raises(UncountableError, match="does not keep the text as it is"):
        TextBytes(tokenizer)
