"""`fprnn tokenizer train`: what it trains on, that it does so again alike, and what it says."""

from __future__ import annotations

import json
import re

from lm.cli.main import main
from lm.config.load import build
from lm.data.corpus import tokenizer_training
from lm.data.corpus.corpora import prepare_sources
from lm.data.corpus.documents import encode_documents
from lm.data.corpus.tokenizer import load_tokenizer, train_bpe, training_texts
from lm.data.corpus.tokenizer_training import train_tokenizer
from lm.data.sources.open import is_validation

NASTY = [
    "tab\there\n\n  two  spaces \r\n",
    "ünïcödé 漢字 🙂 123 4,567",
    "</s> <unk> <|endoftext|>",
    "\n",
]


def options(path, *more) -> list[str]:
    return ["tokenizer", "train", "data.source=jsonl", f"data.path={path}", *map(str, more)]


def test_trained_twice_it_is_the_same_and_text_comes_back(cfg, tmp_path):
    for name in ("one", "two"):
        said = train_tokenizer(cfg, tmp_path / name)
    files = {p.name: p.read_bytes() for p in (tmp_path / "one").iterdir()}
    assert files == {p.name: p.read_bytes() for p in (tmp_path / "two").iterdir()}
    assert said.startswith("tokenizer bpe, ") and "each comes back exactly" in said
    cfg.tokenizer.name = str(tmp_path / "one")
    tokenizer = load_tokenizer(cfg, cfg.run_dir)
    assert tokenizer.eos_token_id is not None and f" {len(tokenizer)} of 320 tokens" in said
    for text in NASTY:
        *ids, last = encode_documents(tokenizer, [text]).tolist()
        assert tokenizer.decode(ids) == text
        # No text can forge a boundary.
        assert last == tokenizer.eos_token_id and tokenizer.eos_token_id not in ids
    corpus = prepare_sources(cfg, tokenizer, cfg.run_dir)[""]
    assert corpus.meta.documents == 200
    assert int((corpus.train[:] == tokenizer.eos_token_id).sum()) == corpus.meta.train_documents


def test_the_bpe_is_the_one_that_a_run_would_train(cfg, tmp_path):
    train_tokenizer(cfg, tmp_path / "out")
    ours = json.loads((tmp_path / "out/tokenizer.json").read_text("utf-8"))
    assert ours == json.loads(train_bpe(cfg).backend_tokenizer.to_str())


def test_it_reads_training_documents_and_is_measured_on_the_others(
    cfg, texts, tmp_path, monkeypatch
):
    read = []

    def bpe_of(documents, size):
        read.extend(documents)
        return real(read, size)

    real = tokenizer_training.bpe_of
    monkeypatch.setattr(tokenizer_training, "bpe_of", bpe_of)
    said = train_tokenizer(cfg, tmp_path / "out")
    held_out = [text for text in texts if is_validation(text, cfg.data.val_fraction)]
    assert sorted(read + held_out) == sorted(texts) and held_out
    cfg.tokenizer.name = str(tmp_path / "out")
    tokenizer = load_tokenizer(cfg, cfg.run_dir)
    tokens = sum(len(tokenizer.encode(text)) for text in held_out)
    size = sum(map(len, held_out))
    assert f" {size / tokens:.3f} bytes per token on {size:,} bytes of validation" in said
    read.clear()
    cfg.tokenizer.train_bytes = 500
    train_tokenizer(cfg, tmp_path / "less")
    assert 500 <= sum(map(len, read)) < 800


def test_the_command_trains_and_says_how_well_it_does(jsonl, tmp_path, capsys):
    out = tmp_path / "out"
    more = ("--out", out, "data.val_fraction=0.2", "tokenizer.vocab_size=300")
    assert main(options(jsonl, *more)) == 0
    said = capsys.readouterr().out
    assert "data     jsonl; 300 tokens of bpe" in said and "tokenizer bpe, 300 of 300" in said
    assert re.search(r"held out  \d\.\d{3} bytes per token on [\d,]+ bytes", said), said
    assert f"tokenizer.name={out}" in said
    assert main(options(jsonl, "--out", out)) != 0
    assert "is not empty: name a new folder" in capsys.readouterr().err


def test_a_mixture_is_read_by_weight(cfg, tmp_path):
    own = {"source": "jsonl", "path": cfg.data.path}
    tree = {"data": {"mixture": {"a": own | {"weight": 3}, "b": own | {"weight": 1}}}}
    both = build(tree | {"tokenizer": {"vocab_size": 320, "train_bytes": 2000}})
    assert 2000 <= sum(len(text) for text in training_texts(both)) < 2800
    assert "tokenizer bpe, " in train_tokenizer(both, tmp_path / "out")


def test_what_cannot_be_trained_is_a_sentence(jsonl, tmp_path, capsys):
    out = ("--out", tmp_path / "out")

    def sentence(*args) -> str:
        assert main([str(a) for a in args]) in {1, 65, 78}
        return capsys.readouterr().err.removeprefix("error: ")

    said = sentence(*options(jsonl, *out, "data.text_field=body"))
    assert "has no key `body`" in said
    assert "no such file" in sentence(*options("none.jsonl", *out))
    said = sentence("tokenizer", "train", *out, "data.source=text")
    assert "source `text` needs `path`" in said
    said = sentence("tokenizer", "train", *out, "data.val_frac=0.1")
    assert "did you mean `data.val_fraction`?" in said
    assert not (tmp_path / "out").exists()
