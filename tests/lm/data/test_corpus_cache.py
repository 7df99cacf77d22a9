"""Tests of the corpus cache: addresses, sharing, locking, resuming, damage."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from lm.common.errors import BAD_CONFIG
from lm.common.files import OutputError
from lm.data.batches.loader import build
from lm.data.corpus import cache, tokenising
from lm.data.corpus import tokenizer as tokenizers
from lm.data.corpus.prepare import ensure_on_node, open_corpus, prepare, prepare_ahead
from lm.data.sources.errors import DataError
from lm.runs.owned_files import describe_foreign_files, make_run_file_test
from lm.training.inputs import check_inputs
from tests.forked import ForkedProcess
from tests.running import FORKS, ROOT, fprnn


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path / "default"))
    return tmp_path / "cache"


@pytest.fixture
def cfg(cfg, jsonl, tmp_path, cache_dir):
    """Config of a run with its own copy of the text and its own cache."""
    cfg.data.path = str(tmp_path / "mine.jsonl")
    shutil.copy(jsonl, cfg.data.path)
    cfg.data.cache_dir = str(cache_dir)
    return cfg


def other_run(cfg, name: str, **data):
    return cfg.model_copy(update={"name": name, "data": cfg.data.model_copy(update=data)})


def prepare_and_count(cfg, bpe) -> tuple:
    """Prepare a corpus; return it and the number of progress calls, 0 if it existed."""
    calls = []
    corpus = prepare(cfg, bpe, cfg.run_dir, calls.append)
    return corpus, len(calls)


def list_entries(cache_dir, kind: str = "corpus") -> list:
    return sorted(cache_dir.glob(f"{kind}-*"))


def read_record(cfg) -> dict:
    return json.loads((cfg.run_dir / "data" / "corpus.json").read_text())


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(tokenising, "DOCUMENTS_AT_A_TIME", 10)


def start_process(cfg, kill_at: int = 0, pause: float = 0.0) -> tuple[ForkedProcess, Path]:
    """Start a process that prepares; return it and the file that it waits for."""
    go_file = Path(tempfile.mkdtemp()) / "go"
    arguments = [json.dumps(cfg.model_dump(mode="json")), kill_at, pause, go_file]
    environment = {cache.ENVIRONMENT_VARIABLE: os.environ[cache.ENVIRONMENT_VARIABLE]}
    return FORKS.start("tests.lm.data.preparing", arguments, environment), go_file


def release(*started: tuple[ForkedProcess, Path]) -> None:
    """Let processes begin together, when all of them are ready."""
    for process, _ in started:
        while "ready\n" not in process.read_output()[0] and process.poll() is None:
            time.sleep(0.005)
    for _, go_file in started:
        go_file.touch()


def finish(started: tuple[ForkedProcess, Path]) -> tuple[str, dict]:
    """Wait for a process to succeed; return its output and its last line, which is JSON."""
    out, err = started[0].communicate(timeout=60)
    assert started[0].returncode == 0, out + err
    *lines, last = out.splitlines()
    return " ".join(" ".join(lines).split()), json.loads(last)


def test_runs_share_a_corpus(cfg, bpe, cache_dir):
    corpus, calls = prepare_and_count(cfg, bpe)
    assert calls and len(list_entries(cache_dir)) == 1
    assert [p.name for p in (cfg.run_dir / "data").iterdir()] == ["corpus.json"]
    second = other_run(cfg, "second")
    second_corpus, calls = prepare_and_count(second, bpe)
    assert not calls and second_corpus.meta == corpus.meta
    assert second_corpus.train[:].tolist() == corpus.train[:].tolist()
    assert read_record(cfg) == read_record(second)
    assert read_record(second)["corpus"] == str(list_entries(cache_dir)[0])
    train, validation = build(second, bpe, second.run_dir)
    assert next(train)["input_ids"].shape == (3, 16) and validation


def test_cache_and_run_directory_have_the_same_corpus(cfg, bpe):
    corpus, _ = prepare_and_count(cfg, bpe)
    uncached = other_run(cfg, "uncached", cache_dir=None)
    run_corpus, _ = prepare_and_count(uncached, bpe)
    assert run_corpus.meta.sha256 == corpus.meta.sha256
    record = read_record(uncached)
    assert (uncached.run_dir / "data" / record["corpus"] / "train.bin").exists()
    uncached.data.cache_dir = cfg.data.cache_dir  # does not move the corpus of a run
    _, calls = prepare_and_count(uncached, bpe)
    assert not calls and read_record(uncached) == record


def test_address_depends_only_on_content(cfg, bpe, cache_dir, tmp_path):
    entry = cache.corpus_folder(cache_dir, cfg.data, bpe)
    moved = tmp_path / "folder" / "other_name.jsonl"
    moved.parent.mkdir()
    shutil.copy(cfg.data.path, moved)
    os.utime(cfg.data.path, (1, 1))
    for path in (cfg.data.path, str(moved), str(moved.parent)):
        data = cfg.data.model_copy(update={"path": path, "seq_len": 8})
        assert cache.corpus_folder(cache_dir, data, bpe) == entry


@pytest.mark.parametrize("change", ["a file", "one byte", "split", "leading_eos", "tokenizer"])
def test_other_content_has_another_entry(cfg, bpe, cache_dir, change, byte_tokenizer):
    old_corpus, _ = prepare_and_count(cfg, bpe)
    second, tokenizer = other_run(cfg, "second"), bpe
    if change == "a file":
        with open(cfg.data.path, "a") as file:
            file.write('{"text": "one more"}\n')
    elif change == "one byte":
        with open(cfg.data.path, "r+b") as file:
            stat = os.fstat(file.fileno())
            file.seek(12)
            file.write(b"X")
        os.utime(cfg.data.path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif change == "split":
        second.data.val_fraction = 0.3
    elif change == "leading_eos":
        second.data.leading_eos = True
    else:
        second.tokenizer.name = str(byte_tokenizer)
        tokenizer = tokenizers.load_tokenizer(second, second.run_dir)
    new_corpus, calls = prepare_and_count(second, tokenizer)
    assert calls and new_corpus.meta != old_corpus.meta and len(list_entries(cache_dir)) == 2
    assert open_corpus(cfg.run_dir).meta == old_corpus.meta


@pytest.mark.usefixtures("small_batches")
def test_file_that_grows_while_it_is_read_is_refused(cfg, bpe, cache_dir):
    """Otherwise the entry would not match its address."""
    calls = []

    def grow(documents):
        calls.append(documents)
        if len(calls) == 3:
            with open(cfg.data.path, "a") as file:
                file.write('{"text": "one more document"}\n')

    with pytest.raises(DataError, match=r"mine\.jsonl changed while it was read"):
        prepare(cfg, bpe, cfg.run_dir, grow)
    assert len(calls) == 21  # 201 documents in batches of ten
    assert not list(cache_dir.rglob("*.bin"))
    corpus, calls = prepare_and_count(cfg, bpe)
    assert calls and corpus.meta.documents == 201


def test_tokenizer_of_a_changing_text_is_refused(cfg, cache_dir, monkeypatch):
    def train(cfg):
        tokenizer = train_bpe(cfg)
        os.truncate(cfg.data.path, 4000)
        return tokenizer

    train_bpe = tokenizers.train_bpe
    monkeypatch.setattr(tokenizers, "train_bpe", train)
    with pytest.raises(DataError, match="changed while it was read"):
        tokenizers.new_tokenizer(cfg)
    assert not list(cache_dir.rglob("tokenizer.json"))


def test_relative_cache_moves_with_its_runs(cfg, bpe, tmp_path, monkeypatch):
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    cfg.out_dir, cfg.data.cache_dir = "runs", "cache_dir"
    meta = prepare_and_count(cfg, bpe)[0].meta
    assert read_record(cfg)["corpus"].startswith("../../../cache_dir/corpus-")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project").rename("moved")
    assert open_corpus(tmp_path / "moved" / cfg.run_dir).meta == meta


def test_bpe_is_trained_once_and_saved_in_each_run(cfg, cache_dir, monkeypatch):
    calls, train = [], tokenizers.train_bpe
    monkeypatch.setattr(tokenizers, "train_bpe", lambda cfg: calls.append(cfg) or train(cfg))
    runs = [other_run(cfg, name) for name in ("a", "b")]
    for run_cfg in runs:
        tokenizer = tokenizers.load_tokenizer(run_cfg, run_cfg.run_dir)
        prepare_and_count(run_cfg, tokenizer)
    assert len(calls) == len(list_entries(cache_dir, "tokenizer")) == 1
    assert len(list_entries(cache_dir)) == 1
    shutil.rmtree(cache_dir)
    paths = [run_cfg.run_dir / "tokenizer" / "tokenizer.json" for run_cfg in runs]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    cfg.tokenizer.vocab_size = 300
    assert len(tokenizers.new_tokenizer(cfg)) == 300


@pytest.mark.parametrize("name", ["", "web"])
def test_corpus_in_a_run_directory_is_no_foreign_file(cfg, bpe, name):
    """So --overwrite may delete it."""
    cfg.data.cache_dir = None
    prepare(cfg, bpe, cfg.run_dir, name=name)
    assert list(cfg.run_dir.rglob("train.bin"))
    assert describe_foreign_files(cfg.run_dir, make_run_file_test(cfg.run_dir)) == ""


def test_one_process_makes_the_corpus_and_others_wait(cfg, cache_dir):
    runs = [other_run(cfg, name) for name in ("a", "b", "c")]
    started = [start_process(cfg, pause=0.2) for cfg in runs]
    release(*started)
    results = [finish(process) for process in started]
    assert sorted(len(last["document_counts"]) for _, last in results) == [0, 0, 20]
    assert len({json.dumps(last["sha256"]) for _, last in results}) == 1
    for output, last in results:
        if not last["document_counts"]:
            assert "waiting for another process, which makes" in output
    assert len(list_entries(cache_dir)) == 1


def test_waiting_process_replaces_a_killed_one(cfg, bpe, cache_dir):
    runs = [other_run(cfg, name) for name in ("a", "b")]
    maker, other = start_process(runs[0], kill_at=100, pause=0.2), start_process(runs[1])
    release(maker)
    while not list(cache_dir.glob("corpus-*/train.tmp")):
        assert maker[0].poll() is None
    with pytest.raises(DataError, match="no prepared corpus"):
        open_corpus(runs[0].run_dir)
    release(other)
    output, last = finish(other)
    assert "waiting for another process" in output and len(last["document_counts"]) == 20
    maker[0].communicate(timeout=10)
    assert maker[0].returncode == -signal.SIGKILL
    uncached, _ = prepare_and_count(other_run(cfg, "uncached", cache_dir=None), bpe)
    assert last["sha256"] == uncached.meta.sha256
    names = "train.bin val.bin meta.json verified.json about.json lock"
    assert {path.name for path in list_entries(cache_dir)[0].iterdir()} == set(names.split())


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "meta.json"])
@pytest.mark.parametrize("change", ["one bit", "cut", "missing"])
def test_damage_is_detected_and_its_remedy_works(cfg, bpe, cache_dir, name, change):
    meta = prepare_and_count(cfg, bpe)[0].meta
    (entry,) = list_entries(cache_dir)
    raw = bytearray((entry / name).read_bytes())
    raw[0] ^= 128
    (entry / name).write_bytes(raw[: -2 if change == "cut" else None])
    if change == "missing":
        (entry / name).unlink()
    if (name, change) != ("meta.json", "missing"):  # without it the corpus counts as incomplete
        for run in (cfg, other_run(cfg, "second")):
            with pytest.raises(DataError, match=rf"{name} is damaged: .*; delete {entry}, and"):
                prepare_and_count(run, bpe)
        shutil.rmtree(entry)
    corpus, calls = prepare_and_count(cfg, bpe)
    assert calls and corpus.meta == meta


def test_run_keeps_its_corpus_without_the_source(cfg, bpe):
    meta = prepare_and_count(cfg, bpe)[0].meta
    with open(cfg.data.path, "a") as file:
        file.write('{"text": "one more"}\n')
    assert prepare_and_count(cfg, bpe)[0].meta == meta
    os.unlink(cfg.data.path)
    assert prepare_and_count(cfg, bpe)[0].meta == meta


def test_continued_run_needs_no_source_or_tokenizer_folder(cfg, bpe, tmp_path):
    cfg.tokenizer.name = str(tmp_path / "deleted")
    prepare_and_count(cfg, bpe)
    os.unlink(cfg.data.path)
    with pytest.raises(DataError, match="deleted: no such folder"):
        check_inputs(cfg)
    (cfg.run_dir / "tokenizer").mkdir()
    (cfg.run_dir / "checkpoints").mkdir()
    check_inputs(cfg)
    with pytest.raises(DataError, match="deleted: no such folder"):
        check_inputs(cfg, is_new=True)
    cfg.tokenizer.name = "bpe"
    with pytest.raises(DataError, match="no such file or folder"):
        check_inputs(cfg, is_new=True)


def test_linked_run_folder_finds_a_relative_cache(cfg, bpe, tmp_path, monkeypatch):
    (tmp_path / "scratch" / "runs").mkdir(parents=True)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "runs").symlink_to(tmp_path / "scratch" / "runs")
    monkeypatch.chdir(tmp_path / "project")
    cfg.out_dir, cfg.data.cache_dir = "runs", "cache"
    meta = prepare_and_count(cfg, bpe)[0].meta
    assert open_corpus(cfg.run_dir).meta == meta


@pytest.mark.parametrize("source", ["unchanged", "changed", "deleted"])
def test_missing_corpus_is_made_only_from_the_same_text(cfg, bpe, cache_dir, source, capsys):
    meta = prepare_and_count(cfg, bpe)[0].meta
    shutil.rmtree(cache_dir)
    with pytest.raises(DataError, match="missing: continue the run with resume=auto to make it"):
        open_corpus(cfg.run_dir)
    if source == "unchanged":
        assert prepare_and_count(cfg, bpe)[0].meta == meta
        output = " ".join(capsys.readouterr().out.split())
        assert "is missing: looking for it, or making it again" in output
        return
    if source == "changed":
        with open(cfg.data.path, "a") as file:
            file.write('{"text": "one more"}\n')
    else:
        os.unlink(cfg.data.path)
    with pytest.raises(DataError, match=r"is missing, and .*[:;] restore .*scratch") as error:
        prepare_and_count(cfg, bpe)
    assert "\n" not in str(error.value) and not list_entries(cache_dir)


def test_corpus_with_another_checksum_is_refused(cfg, bpe):
    prepare_and_count(cfg, bpe)
    path = cfg.run_dir / "data" / "corpus.json"
    path.write_text(path.read_text().replace(read_record(cfg)["sha256"]["val.bin"], "0" * 64))
    with pytest.raises(DataError, match="was trained on another corpus"):
        prepare_and_count(cfg, bpe)
    path.write_text("{")
    with pytest.raises(DataError, match=r"corpus.json is damaged: .*delete it"):
        prepare_and_count(cfg, bpe)


def test_node_with_its_own_cache_makes_the_corpus(cfg, bpe, cache_dir, tmp_path):
    meta = prepare_and_count(cfg, bpe)[0].meta
    ensure_on_node(cfg, bpe, cfg.run_dir)
    cache_dir.rename(tmp_path / "cache of the first node")
    ensure_on_node(cfg, bpe, cfg.run_dir)
    assert open_corpus(cfg.run_dir).meta == meta
    (entry,) = list_entries(cache_dir)
    tokens = (entry / "train.bin").read_bytes()
    (entry / "train.bin").write_bytes(bytes([tokens[0] ^ 1]) + tokens[1:])
    with pytest.raises(DataError, match=r"train.bin is damaged"):
        ensure_on_node(cfg, bpe, cfg.run_dir)
    shutil.rmtree(cache_dir)
    os.unlink(cfg.data.path)
    with pytest.raises(DataError, match="which is missing, and it cannot be made again"):
        ensure_on_node(cfg, bpe, cfg.run_dir)


@pytest.fixture
def mounted(tmp_path):
    """Folder on a disk of 1 MiB, and a function that remounts the disk with other options."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(options: str) -> subprocess.CompletedProcess:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
        return subprocess.run(command, capture_output=True)

    if mount("size=1m").returncode:
        pytest.skip("only root can mount a small disk")
    yield disk, lambda options: mount(f"remount,{options}")
    subprocess.run(["umount", "-l", disk], check=True)


def test_full_disk_is_an_error_until_there_is_space(cfg, bpe, mounted):
    disk, remount = mounted
    cfg.data.cache_dir = str(disk / "cache")
    with open(cfg.data.path, "a") as file:
        for i in range(4000):
            file.write(json.dumps({"text": f"document {i} " + "of many words " * 30}) + "\n")
    match = r"cannot be written: No space left on device \(a prepared corpus; data.cache_dir, or"
    with pytest.raises(OutputError, match=match) as error:
        prepare(cfg, bpe, cfg.run_dir)
    assert "\n" not in str(error.value) and not list(disk.rglob("*.tmp"))
    assert remount("size=64m").returncode == 0
    corpus = prepare(cfg, bpe, cfg.run_dir)
    uncached = other_run(cfg, "uncached", cache_dir=None)
    assert prepare_and_count(uncached, bpe)[0].meta.sha256 == corpus.meta.sha256


def test_read_only_cache_can_be_read(cfg, bpe, mounted):
    disk, remount = mounted
    cfg.data.cache_dir = str(disk)
    meta = prepare_and_count(cfg, bpe)[0].meta
    assert remount("ro").returncode == 0
    second = other_run(cfg, "second")
    assert prepare_and_count(second, bpe)[0].meta == meta  # it exists
    other = other_run(cfg, "other", leading_eos=True)
    with pytest.raises(OutputError, match=r"be written: Read-only .*data.cache_dir=null is the"):
        prepare_and_count(other, bpe)
    remount("rw")


def test_preparing_ahead_makes_the_corpus_once(cfg, bpe, cache_dir, monkeypatch):
    results = [prepare_ahead(cfg, bpe) for _ in range(2)]
    (entry,) = list_entries(cache_dir)
    assert results == [(entry, True), (entry, False)]
    assert prepare_and_count(cfg, bpe)[1] == 0
    with pytest.raises(DataError, match="cache_dir is null"):
        prepare_ahead(other_run(cfg, "x", cache_dir=None), bpe)


def test_command_prepares_each_corpus_of_a_sweep_once(tmp_path):
    sweep = tmp_path / "sweep.yaml"
    text = (ROOT / "configs/tiny/lm.yaml").read_text()
    sweep.write_text(text + "sweep:\n  optim.lr: [1e-3, 2e-3]\n  data.leading_eos: [true, false]\n")
    process = fprnn("prepare", sweep, **{cache.ENVIRONMENT_VARIABLE: str(tmp_path / "cache")})
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("bytes, made") == 2 and len(list_entries(tmp_path / "cache")) == 2
    assert len(list_entries(tmp_path / "cache", "tokenizer")) == 1
    refused = fprnn("prepare", sweep, "optim.warmup=1.5")
    assert refused.returncode == BAD_CONFIG and "optim.warmup is 1.5" in refused.stderr
