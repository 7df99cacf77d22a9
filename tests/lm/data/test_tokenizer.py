"""The tokenizer: exact round trip, the formats that load, what is saved, the error sentences."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from lm.data.corpus.documents import encode_documents
from lm.data.corpus.tokenizer import EOS, PAD, load_tokenizer, training_texts
from lm.data.sources.errors import DataError
from lm.data.sources.open import is_validation

EDGE_CASES = [
    "",
    " ",
    "   a  b\t\tc ",
    "\n\n\n",
    "a\r\nb\r\n",
    "\x00a\x00",
    "\U0001f469\u200d\U0001f467 e\u0301 é ﷽",
    "it 's ( ok ) .",
    "<|endoftext|>",
    "<|pad|> x",
    "\u2028\u00a0\ufeff",
    "𝔘𝔫𝔦",
    "don't  n't",
]


@pytest.mark.parametrize("text", EDGE_CASES)
def test_bpe_round_trip_of_edge_cases(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text
    *body, eos = encode_documents(bpe, [text]).tolist()
    assert bpe.decode(body) == text and eos == bpe.eos_token_id


@pytest.fixture(scope="module")
def round_trip(bpe):
    return lambda text: bpe.decode(bpe.encode(text))


def test_bpe_round_trip(round_trip):
    @given(st.text())
    def check(text):
        assert round_trip(text) == text

    check()


def test_a_document_cannot_forge_its_end(bpe):
    ids = encode_documents(bpe, [f"a{EOS}b{PAD}"]).tolist()
    assert ids.count(bpe.eos_token_id) == 1 and bpe.pad_token_id not in ids
    assert bpe.encode(EOS) == [bpe.eos_token_id]  # elsewhere it is the token, as usual


def test_leading_eos(bpe):
    eos = bpe.eos_token_id
    a, b = bpe.encode("a"), bpe.encode("b")
    assert encode_documents(bpe, ["a", "b"]).tolist() == [*a, eos, *b, eos]
    assert encode_documents(bpe, ["a", "b"], True).tolist() == [eos, *a, eos, eos, *b, eos]
    assert encode_documents(bpe, []).shape == (0,)


def test_bpe_is_trained_once_saved_and_loaded(cfg, bpe):
    said = []
    first = load_tokenizer(cfg, cfg.run_dir, said.append)
    saved = cfg.run_dir / "tokenizer"
    mtime = (saved / "tokenizer.json").stat().st_mtime_ns
    second = load_tokenizer(cfg, cfg.run_dir)
    assert first.get_vocab() == second.get_vocab() == bpe.get_vocab() and not said
    assert (second.eos_token, second.pad_token, len(second)) == (EOS, PAD, 320)
    assert (saved / "tokenizer.json").stat().st_mtime_ns == mtime
    settings = json.loads((saved / "tokenizer_config.json").read_text())
    assert settings["clean_up_tokenization_spaces"] is False
    assert [p.name for p in cfg.run_dir.iterdir()] == ["tokenizer"]  # no draft left behind
    assert second.decode(second.encode("a , b .\n")) == "a , b .\n"


def test_bpe_reads_training_documents_only_and_so_many_bytes(cfg):
    seen = list(training_texts(cfg))
    assert seen and not any(is_validation(t, cfg.data.val_fraction) for t in seen)
    cfg.tokenizer.train_bytes = 500
    assert sum(map(len, list(training_texts(cfg))[:-1])) < 500


def test_small_corpus_says_that_the_vocabulary_is_smaller(cfg):
    cfg.tokenizer.vocab_size = 50_000
    said = []
    tokenizer = load_tokenizer(cfg, cfg.run_dir, said.append)
    assert (
        len(said) == 1
        and f"only {len(tokenizer)} tokens, fewer than tokenizer.vocab_size 50000" in said[0]
    )


def test_a_run_keeps_its_tokenizer(cfg):
    load_tokenizer(cfg, cfg.run_dir)
    cfg.tokenizer.vocab_size = 300
    with pytest.raises(DataError, match=r"was made from .*320.*config has .*300"):
        load_tokenizer(cfg, cfg.run_dir)


@pytest.mark.parametrize("header", [b"", b"#version: 0.2\n"])
def test_gpt2_files(cfg, shared, tmp_path, header):
    source = shared / "tokenizers" / "gpt2"
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "vocab.json").write_bytes((source / "vocab.json").read_bytes())
    merges = header + (source / "merges.txt").read_bytes()
    (tmp_path / "gpt2" / "merges.txt").write_bytes(merges)
    cfg.tokenizer.name = str(tmp_path / "gpt2")
    for _ in range(2):  # from the files, then from the run directory
        tokenizer = load_tokenizer(cfg, cfg.run_dir)
        assert tokenizer.encode("Hello world") == [15496, 995]
        assert tokenizer.encode(" t") == [256]  # the merge on line 1
        assert tokenizer.eos_token_id == 50256 and len(tokenizer) == 50257
        for text in EDGE_CASES:
            assert tokenizer.decode(tokenizer.encode(text)) == text


def save_tokenizer(folder, **special):
    backend = Tokenizer(models.WordLevel({"a": 0, "<e>": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(str(folder))


def test_huggingface_folder_and_padding_defaults_to_eos(cfg, tmp_path):
    save_tokenizer(tmp_path / "t", eos_token="<e>")
    cfg.tokenizer.name = str(tmp_path / "t")
    tokenizer = load_tokenizer(cfg, cfg.run_dir)
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 1


def fails(cfg, name, match):
    cfg.tokenizer.name = str(name)
    with pytest.raises(DataError, match=match) as caught:
        load_tokenizer(cfg, cfg.run_dir)
    assert "\n" not in str(caught.value) and not (cfg.run_dir / "tokenizer").exists()


def test_error_sentences(cfg, tmp_path, monkeypatch):
    save_tokenizer(tmp_path / "t")
    fails(cfg, tmp_path / "t", "has no EOS token")
    fails(cfg, tmp_path / "nowhere", "no such folder")
    (tmp_path / "empty").mkdir()
    fails(cfg, tmp_path / "empty", "contains no tokenizer: .*it contains nothing")
    (tmp_path / "empty" / "tokenizer.model").touch()
    fails(cfg, tmp_path / "empty", r"tokenizer\.json, .*it contains tokenizer\.model")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "tokenizer.json").write_text("{")
    fails(cfg, tmp_path / "bad", "cannot be loaded")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    fails(cfg, "some/where", "HF_HUB_OFFLINE.*works offline")


def test_code_of_a_tokenizers_own_is_neither_run_nor_asked_for(cfg, tmp_path, monkeypatch):
    """transformers would ask on the terminal, and run it on `y`."""
    config = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    cfg.tokenizer.name = str(tmp_path)
    with pytest.raises(DataError, match=r"has its own code \(`auto_map` in .* training never runs"):
        load_tokenizer(cfg, cfg.run_dir)


def test_every_document_held_out(cfg):
    cfg.data.val_fraction = 0.9999999
    fails(cfg, "bpe", "no training document")
