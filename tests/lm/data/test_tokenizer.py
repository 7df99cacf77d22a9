"""Tests of tokenizers: exact round trips, supported formats, saving, error messages."""

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
def test_bpe_reproduces_edge_cases(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text
    *body, eos = encode_documents(bpe, [text]).tolist()
    assert bpe.decode(body) == text and eos == bpe.eos_token_id


@pytest.fixture(scope="module")
def round_trip(bpe):
    return lambda text: bpe.decode(bpe.encode(text))


@given(st.text())
def test_bpe_reproduces_any_text(round_trip, text):
    assert round_trip(text) == text


def test_document_cannot_contain_special_tokens(bpe):
    ids = encode_documents(bpe, [f"a{EOS}b{PAD}"]).tolist()
    assert ids.count(bpe.eos_token_id) == 1 and bpe.pad_token_id not in ids
    assert bpe.encode(EOS) == [bpe.eos_token_id]  # only `encode_documents` treats it as text


def test_leading_eos_is_added_to_each_document(bpe):
    eos = bpe.eos_token_id
    a, b = bpe.encode("a"), bpe.encode("b")
    assert encode_documents(bpe, ["a", "b"]).tolist() == [*a, eos, *b, eos]
    ids = encode_documents(bpe, ["a", "b"], leading_eos=True).tolist()
    assert ids == [eos, *a, eos, eos, *b, eos]
    assert encode_documents(bpe, []).shape == (0,)


def test_bpe_is_trained_once_then_loaded(cfg, bpe, capsys):
    first = load_tokenizer(cfg, cfg.run_dir)  # trains the tokenizer and saves it
    assert capsys.readouterr().out == ""
    saved = cfg.run_dir / "tokenizer"
    mtime = (saved / "tokenizer.json").stat().st_mtime_ns
    second = load_tokenizer(cfg, cfg.run_dir)  # loads it: the file is not written again
    assert first.get_vocab() == second.get_vocab() == bpe.get_vocab()
    assert (second.eos_token, second.pad_token, len(second)) == (EOS, PAD, cfg.tokenizer.vocab_size)
    assert (saved / "tokenizer.json").stat().st_mtime_ns == mtime
    settings = json.loads((saved / "tokenizer_config.json").read_text())
    assert settings["clean_up_tokenization_spaces"] is False
    assert [p.name for p in cfg.run_dir.iterdir()] == ["tokenizer"]  # no temporary folder
    assert second.decode(second.encode("a , b .\n")) == "a , b .\n"


def test_bpe_training_reads_limited_training_documents(cfg):
    texts = list(training_texts(cfg))
    assert texts and not any(is_validation(t, cfg.data.val_fraction) for t in texts)
    cfg.tokenizer.train_bytes = 500
    assert sum(map(len, list(training_texts(cfg))[:-1])) < 500


def test_small_corpus_prints_its_smaller_vocabulary(cfg, capsys):
    cfg.tokenizer.vocab_size = 50_000
    size = len(load_tokenizer(cfg, cfg.run_dir))
    output = " ".join(capsys.readouterr().out.split())
    assert output.count(f"only {size} tokens, fewer than tokenizer.vocab_size 50000") == 1


def test_run_refuses_another_tokenizer(cfg):
    load_tokenizer(cfg, cfg.run_dir)
    first_size = cfg.tokenizer.vocab_size
    cfg.tokenizer.vocab_size = 300
    with pytest.raises(DataError, match=rf"was made from .*{first_size}.*config has .*300"):
        load_tokenizer(cfg, cfg.run_dir)


@pytest.mark.parametrize("header", [b"", b"#version: 0.2\n"])
def test_gpt2_files_are_loaded(cfg, shared, tmp_path, header):
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


def test_padding_token_defaults_to_eos(cfg, tmp_path):
    save_tokenizer(tmp_path / "t", eos_token="<e>")
    cfg.tokenizer.name = str(tmp_path / "t")
    tokenizer = load_tokenizer(cfg, cfg.run_dir)
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 1


def fails(cfg, name, match):
    cfg.tokenizer.name = str(name)
    with pytest.raises(DataError, match=match) as caught:
        load_tokenizer(cfg, cfg.run_dir)
    assert "\n" not in str(caught.value) and not (cfg.run_dir / "tokenizer").exists()


def test_errors_name_the_fault(cfg, tmp_path, monkeypatch):
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


def test_tokenizer_with_its_own_code_is_refused(cfg, tmp_path, monkeypatch):
    """transformers would ask on the terminal, and run the code if the answer is `y`."""
    config = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    cfg.tokenizer.name = str(tmp_path)
    with pytest.raises(DataError, match=r"has its own code \(`auto_map` in .* training never runs"):
        load_tokenizer(cfg, cfg.run_dir)


def test_corpus_without_training_documents_is_refused(cfg):
    cfg.data.val_fraction = 0.9999999  # every document
    fails(cfg, "bpe", "no training document")
