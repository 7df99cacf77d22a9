"""Preparation: what is written, when it is written again, and the error sentences."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lm.data.packing import encode_documents
from lm.data.prepare import open_corpus, prepare
from lm.data.sources import DataError, is_validation


def test_streams_are_the_documents_of_each_split(cfg, bpe, texts):
    seen = []
    corpus = prepare(cfg, bpe, cfg.run_dir, lambda *done: seen.append(done))
    for split, side in ((corpus.train, False), (corpus.val, True)):
        mine = [t for t in texts if is_validation(t, 0.2) == side]
        assert split.tolist() == encode_documents(bpe, mine).tolist()
        assert split.dtype == np.uint16 and isinstance(split, np.memmap)
    meta = corpus.meta
    assert meta.train_documents + meta.val_documents == 200 and meta.complete
    assert seen[-1] == (200, meta.train_tokens + meta.val_tokens)


def test_it_is_done_once(cfg, bpe):
    prepare(cfg, bpe, cfg.run_dir)
    again = []
    corpus = prepare(cfg, bpe, cfg.run_dir, lambda *done: again.append(done))
    assert not again
    assert open_corpus(cfg.run_dir).meta == corpus.meta


@pytest.mark.parametrize("change", ["killed", "cut", "setting", "file"])
def test_it_is_redone_when_needed(cfg, bpe, jsonl, tmp_path, change):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(jsonl.read_bytes())
    cfg.data.path = str(path)
    before = prepare(cfg, bpe, cfg.run_dir).meta
    folder = cfg.run_dir / "data"
    if change == "killed":
        (folder / "meta.json").unlink()
    elif change == "cut":
        (folder / "train.bin").write_bytes(b"\0")
    elif change == "setting":
        cfg.data.leading_eos = True
    else:
        with path.open("a") as file:
            file.write(json.dumps({"text": "one more"}) + "\n")
    if change in ("killed", "cut"):
        with pytest.raises(DataError, match="no prepared corpus, or an incomplete one"):
            open_corpus(cfg.run_dir)
    done = []
    after = prepare(cfg, bpe, cfg.run_dir, lambda *d: done.append(d)).meta
    assert done and (after == before) == (change in ("killed", "cut"))


def test_another_tokenizer_is_noticed(cfg, bpe, shared):
    from lm.data.tokenizer import load_tokenizer

    prepare(cfg, bpe, cfg.run_dir)
    cfg.tokenizer.name = str(shared / "tokenizers" / "gpt2")
    gpt2 = load_tokenizer(cfg, cfg.run_dir)
    assert prepare(cfg, gpt2, cfg.run_dir).train.max() > 320


def fails(cfg, bpe, match):
    with pytest.raises(DataError, match=match) as caught:
        prepare(cfg, bpe, cfg.run_dir)
    assert "\n" not in str(caught.value)


def test_error_sentences(cfg, bpe, tmp_path):
    with pytest.raises(DataError, match="no prepared corpus"):
        open_corpus(cfg.run_dir)
    tokens = prepare(cfg, bpe, cfg.run_dir).meta.train_tokens
    cfg.data.seq_len = tokens
    fails(cfg, bpe, rf"seq_len {tokens} is longer than the corpus, which has {tokens} training")
    cfg.data.seq_len = tokens - 1
    prepare(cfg, bpe, cfg.run_dir)
    cfg.data.val_fraction = 1e-9
    fails(cfg, bpe, "none of the 200 documents fell to validation.*raise data.val_fraction")
    cfg.data.val_fraction = 0.9999999
    fails(cfg, bpe, "all 200 documents fell to validation")
    (tmp_path / "e.jsonl").touch()
    cfg.data.path = str(tmp_path / "e.jsonl")
    fails(cfg, bpe, "corpus is empty")
