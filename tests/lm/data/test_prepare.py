"""Tests of prepared corpora: content, verification, durability, and error messages."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from lm.common.files import OutputError
from lm.data.corpus import cache, corpus, integrity, tokenising
from lm.data.corpus.documents import encode_documents
from lm.data.corpus.prepare import open_corpus, prepare
from lm.data.sources.errors import DataError
from lm.data.sources.open import is_validation
from tests.running import FORKS


def test_streams_contain_the_documents_of_each_split(cfg, bpe, texts):
    document_counts = []
    corpus = prepare(cfg, bpe, cfg.run_dir, document_counts.append)
    for split, is_val in ((corpus.train, False), (corpus.val, True)):
        documents = [t for t in texts if is_validation(t, 0.2) == is_val]
        assert split[:].tolist() == encode_documents(bpe, documents).tolist()
        assert split.dtype == np.uint16 and len(split) == len(split[:])
    meta = corpus.meta
    assert meta.train_documents + meta.val_documents == 200 and meta.complete
    assert document_counts[-1] == 200


def find_entry(cfg) -> Path:
    """Return the folder of the corpus in a run directory."""
    (entry,) = (cfg.run_dir / "data").glob("corpus-*")
    return entry


def test_run_with_another_setting_is_prepared_again(cfg, bpe, capsys):
    old = prepare(cfg, bpe, cfg.run_dir).meta
    cfg.data.leading_eos = True
    new = prepare(cfg, bpe, cfg.run_dir).meta
    assert new.train_tokens == old.train_tokens + old.train_documents
    assert "has another split or tokenizer: prepared again" in capsys.readouterr().out
    assert open_corpus(cfg.run_dir).meta == new


def test_record_is_relative_if_the_run_path_has_two_dots(cfg, bpe, tmp_path):
    (tmp_path / "folder").mkdir()
    cfg.out_dir = str(tmp_path / "folder" / ".." / "runs")
    meta = prepare(cfg, bpe, cfg.run_dir).meta
    prepare(cfg, bpe, cfg.run_dir)  # the run is resumed
    record = json.loads((cfg.run_dir / "data" / "corpus.json").read_text())
    assert record["corpus"] == find_entry(cfg).name
    assert open_corpus(cfg.run_dir).meta == meta


def fails(cfg, bpe, match):
    with pytest.raises(DataError, match=match) as caught:
        prepare(cfg, bpe, cfg.run_dir)
    assert "\n" not in str(caught.value)


def test_errors_name_the_cure(cfg, bpe, tmp_path):
    with pytest.raises(DataError, match="no prepared corpus"):
        open_corpus(cfg.run_dir)
    tokens = prepare(cfg, bpe, cfg.run_dir).meta.train_tokens
    cfg.data.seq_len = tokens
    fails(cfg, bpe, rf"seq_len {tokens} is longer than the corpus, which has {tokens} training")
    cfg.data.seq_len = tokens - 1
    prepare(cfg, bpe, cfg.run_dir)
    cfg.data.val_fraction = 1e-9
    fails(cfg, bpe, "none of the 200 documents is in the validation split.*raise data.val_fraction")
    cfg.data.val_fraction = 0.9999999
    fails(cfg, bpe, "all 200 documents are in the validation split")
    (tmp_path / "e.jsonl").touch()
    cfg.data.path = str(tmp_path / "e.jsonl")
    fails(cfg, bpe, "corpus is empty")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_large_files_are_verified_only_after_a_change(cfg, bpe, monkeypatch):
    prepare(cfg, bpe, cfg.run_dir)
    size = (find_entry(cfg) / "train.bin").stat().st_size
    monkeypatch.setattr(corpus, "MIN_TRUSTED_BYTES", size)  # val.bin is smaller
    names, original = [], integrity.sha256
    monkeypatch.setattr(integrity, "sha256", lambda path: names.append(path.name) or original(path))
    prepare(cfg, bpe, cfg.run_dir)
    assert names == ["val.bin"]
    path = find_entry(cfg) / "train.bin"
    stat = path.stat()
    flip(path)
    # A program may keep the modification time, but not the change time (ctime).
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(DataError, match=r"train.bin is damaged: its sha256 is"):
        prepare(cfg, bpe, cfg.run_dir)
    flip(path)  # flips the same bit back
    names.clear()
    prepare(cfg, bpe, cfg.run_dir)
    prepare(cfg, bpe, cfg.run_dir)
    assert names.count("train.bin") == 1


def test_id_beyond_the_vocabulary_is_refused(cfg, bpe, monkeypatch):
    monkeypatch.setattr(tokenising, "encode_documents", lambda *_: np.array([len(bpe)]))
    fails(cfg, bpe, "tokenizer returned the id 320, but its vocabulary has 320 entries: its files")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"fingerprint": 1}', "null"])
def test_damaged_meta_json_is_refused(cfg, bpe, text):
    prepare(cfg, bpe, cfg.run_dir)
    (find_entry(cfg) / "meta.json").write_text(text)
    for action in (lambda: open_corpus(cfg.run_dir), lambda: prepare(cfg, bpe, cfg.run_dir)):
        with pytest.raises(DataError, match=r"meta\.json is damaged: .*; delete "):
            action()


@pytest.mark.parametrize("split", ["train", "val"])
def test_full_disk_leaves_no_incomplete_corpus(cfg, bpe, split):
    folder = cache.corpus_folder(cfg.run_dir / "data", cfg.data, bpe)
    folder.mkdir(parents=True)
    (folder / f"{split}.tmp").symlink_to("/dev/full")  # every write fails with ENOSPC
    with pytest.raises(OutputError, match=rf"{split}.tmp cannot be written: No space left") as e:
        prepare(cfg, bpe, cfg.run_dir)
    assert "\n" not in str(e.value) and [p.name for p in folder.iterdir()] == ["lock"]
    assert prepare(cfg, bpe, cfg.run_dir).meta.complete


def test_meta_json_is_written_after_the_other_files_are_synced(cfg, bpe, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace

    def recording_fsync(handle):
        order.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))))
        fsync(handle)

    def recording_replace(old, new):
        order.append(("name", os.path.basename(new)))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "replace", recording_replace)
    prepare(cfg, bpe, cfg.run_dir)
    last = order.index(("name", "meta.json")) - 1
    folder = find_entry(cfg).name
    assert order[last][0] == "sync" and "meta.json" in order[last][1]  # its temporary file
    for split in ("train", "val"):
        renamed = order.index(("name", f"{split}.bin"))
        assert order.index(("sync", f"{split}.tmp")) < renamed < last
        assert ("sync", folder) in order[renamed:last]
    assert order[last + 1 : last + 3] == [("name", "meta.json"), ("sync", folder)]


TRUNCATE = """
import os, sys
from pathlib import Path
from lm.data.sources.errors import DataError
from lm.data.corpus.corpus import open_folder
from lm.data.batches.loader import single_source_loader
folder = Path(sys.argv[1])
loader = single_source_loader(open_folder(folder).train, 16, 3)
next(loader)
os.truncate(folder / "train.bin", 64)
try:
    for _ in range(500):
        next(loader)
except DataError as e:
    print(e)
"""


def test_truncation_while_reading_is_an_error(cfg, bpe):
    """A subprocess reads, because SIGBUS would kill a process with a memory map."""
    prepare(cfg, bpe, cfg.run_dir)
    folder = find_entry(cfg)
    process = FORKS.run("-c", [TRUNCATE, folder], timeout=120)
    assert process.returncode == 0, (process.returncode, process.stderr)
    message = f"{folder}/train.bin is damaged: it was truncated while it was read, to 64 bytes of "
    assert process.stdout.startswith(message)
