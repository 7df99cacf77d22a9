"""The corpus cache: addresses, sharing, resuming with the same corpus, and what goes wrong."""

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

from lm.common.files import OutputError
from lm.data.batches.loader import build
from lm.data.corpus import cache, tokenising
from lm.data.corpus import tokenizer as tokenizers
from lm.data.corpus.prepare import ensure_here, open_corpus, prepare, prepare_ahead
from lm.data.sources.errors import DataError
from lm.runs.written import foreign_files, run_file_test
from tests.forked import Forked
from tests.running import FORKS, ROOT, fprnn


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "default"))
    return tmp_path / "cache"


@pytest.fixture
def cached(cfg, jsonl, tmp_path, folder):
    """The config of a run whose corpus, its own copy, goes into a cache of its own."""
    cfg.data.path = str(tmp_path / "mine.jsonl")
    shutil.copy(jsonl, cfg.data.path)
    cfg.data.cache = str(folder)
    return cfg


def other_run(cfg, name: str, **data):
    return cfg.model_copy(update={"name": name, "data": cfg.data.model_copy(update=data)})


def prepared(cfg, bpe) -> tuple:
    """(corpus, number of calls of progress)."""
    calls = []
    corpus = prepare(cfg, bpe, cfg.run_dir, lambda *done: calls.append(done))
    return corpus, len(calls)


def entries(folder, kind: str = "corpus") -> list:
    return sorted(folder.glob(f"{kind}-*"))


def record(cfg) -> dict:
    return json.loads((cfg.run_dir / "data" / "corpus.json").read_text())


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(tokenising, "BATCH", 10)


def process(cfg, kill_at: int = 0, pause: float = 0.0) -> tuple[Forked, Path]:
    """One that prepares, and the file that lets it `go`."""
    signal_to_go = Path(tempfile.mkdtemp()) / "go"
    arguments = [json.dumps(cfg.model_dump(mode="json")), kill_at, pause, signal_to_go]
    environment = {cache.VARIABLE: os.environ[cache.VARIABLE]}
    return FORKS.start("tests.lm.data.preparing", arguments, environment), signal_to_go


def go(*started: tuple[Forked, Path]) -> None:
    """Lets them begin together, when all of them are ready."""
    for one, _ in started:
        while "ready\n" not in one.read_output()[0] and one.poll() is None:
            time.sleep(0.005)
    for _, signal_to_go in started:
        signal_to_go.touch()


def finished(started: tuple[Forked, Path]) -> tuple[str, dict]:
    """(what it said, its last line) of a process that succeeds."""
    out, err = started[0].communicate(timeout=60)
    assert started[0].returncode == 0, out + err
    *said, last = out.splitlines()
    return " ".join(" ".join(said).split()), json.loads(last)


def test_runs_share_what_one_of_them_made(cached, bpe, folder):
    corpus, calls = prepared(cached, bpe)
    assert calls and len(entries(folder)) == 1
    assert [p.name for p in (cached.run_dir / "data").iterdir()] == ["corpus.json"]
    second = other_run(cached, "second")
    again, calls = prepared(second, bpe)
    assert not calls and again.meta == corpus.meta
    assert again.train[:].tolist() == corpus.train[:].tolist()
    assert record(cached) == record(second) and record(second)["corpus"] == str(entries(folder)[0])
    train, validation = build(second, bpe, second.run_dir)
    assert next(train)["input_ids"].shape == (3, 16) and validation


def test_the_corpus_of_the_cache_is_that_of_a_run_directory(cached, bpe):
    corpus, _ = prepared(cached, bpe)
    own = other_run(cached, "own", cache=None)
    inside, _ = prepared(own, bpe)
    assert inside.meta.sha256 == corpus.meta.sha256
    before = record(own)
    assert (own.run_dir / "data" / before["corpus"] / "train.bin").exists()
    own.data.cache = cached.data.cache  # a run that has its own goes on with it
    _, calls = prepared(own, bpe)
    assert not calls and record(own) == before


def test_the_address_is_that_of_the_content(cached, bpe, folder, tmp_path):
    here = cache.corpus_folder(folder, cached.data, bpe)
    moved = tmp_path / "elsewhere" / "named_otherwise.jsonl"
    moved.parent.mkdir()
    shutil.copy(cached.data.path, moved)
    os.utime(cached.data.path, (1, 1))
    for path in (cached.data.path, str(moved), str(moved.parent)):
        data = cached.data.model_copy(update={"path": path, "seq_len": 8})
        assert cache.corpus_folder(folder, data, bpe) == here


@pytest.mark.parametrize("change", ["a file", "one byte", "split", "leading_eos", "tokenizer"])
def test_other_content_is_another_entry(cached, bpe, folder, change, byte_tokenizer):
    before, _ = prepared(cached, bpe)
    second, tokenizer = other_run(cached, "second"), bpe
    if change == "a file":
        with open(cached.data.path, "a") as file:
            file.write('{"text": "one more"}\n')
    elif change == "one byte":
        with open(cached.data.path, "r+b") as file:
            stat = os.fstat(file.fileno())
            file.seek(12)
            file.write(b"X")
        os.utime(cached.data.path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif change == "split":
        second.data.val_fraction = 0.3
    elif change == "leading_eos":
        second.data.leading_eos = True
    else:
        second.tokenizer.name = str(byte_tokenizer)
        tokenizer = tokenizers.load_tokenizer(second, second.run_dir)
    after, calls = prepared(second, tokenizer)
    assert calls and after.meta != before.meta and len(entries(folder)) == 2
    assert open_corpus(cached.run_dir).meta == before.meta


@pytest.mark.usefixtures("small_batches")
def test_a_file_that_grows_while_it_is_read_is_noticed(cached, bpe, folder):
    """The entry would hold other tokens than its address stands for."""
    calls = []

    def grow(*done):
        calls.append(done)
        if len(calls) == 3:
            with open(cached.data.path, "a") as file:
                file.write('{"text": "one more document"}\n')

    with pytest.raises(DataError, match=r"mine\.jsonl changed while it was read"):
        prepare(cached, bpe, cached.run_dir, grow)
    assert len(calls) == 21
    assert not list(folder.rglob("*.bin"))
    corpus, calls = prepared(cached, bpe)
    assert calls and corpus.meta.documents == 201


def test_a_tokenizer_of_text_that_changed_meanwhile_is_not_kept(cached, folder, monkeypatch):
    def train(cfg, log):
        tokenizer = train_bpe(cfg, log)
        os.truncate(cfg.data.path, 4000)
        return tokenizer

    train_bpe = tokenizers.train_bpe
    monkeypatch.setattr(tokenizers, "train_bpe", train)
    with pytest.raises(DataError, match="changed while it was read"):
        tokenizers.new_tokenizer(cached, print)
    assert not list(folder.rglob("tokenizer.json"))


def test_a_relative_cache_moves_with_its_runs(cached, bpe, tmp_path, monkeypatch):
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    cached.out_dir, cached.data.cache = "runs", "cache"
    meta = prepared(cached, bpe)[0].meta
    assert record(cached)["corpus"].startswith("../../../cache/corpus-")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project").rename("moved")
    assert open_corpus(tmp_path / "moved" / cached.run_dir).meta == meta


def test_a_bpe_is_trained_once_and_kept_with_each_run(cached, folder, monkeypatch):
    trained, original = [], tokenizers.train_bpe
    monkeypatch.setattr(
        tokenizers, "train_bpe", lambda *args: trained.append(args) or original(*args)
    )
    runs = [other_run(cached, name) for name in ("a", "b")]
    for cfg in runs:
        tokenizer = tokenizers.load_tokenizer(cfg, cfg.run_dir, print)
        prepared(cfg, tokenizer)
    assert len(trained) == len(entries(folder, "tokenizer")) == len(entries(folder)) == 1
    shutil.rmtree(folder)
    made = [cfg.run_dir / "tokenizer" / "tokenizer.json" for cfg in runs]
    assert made[0].read_bytes() == made[1].read_bytes()
    cached.tokenizer.vocab_size = 300
    assert len(tokenizers.new_tokenizer(cached, print)) == 300


@pytest.mark.parametrize("name", ["", "web"])
def test_a_corpus_in_a_run_directory_is_of_the_programs_own_files(cached, bpe, name):
    """--overwrite deletes it."""
    cached.data.cache = None
    prepare(cached, bpe, cached.run_dir, name=name)
    assert list(cached.run_dir.rglob("train.bin"))
    assert foreign_files(cached.run_dir, run_file_test(cached.run_dir)) == ""


def test_several_at_once_one_makes_it_and_the_others_wait(cached, folder):
    runs = [other_run(cached, name) for name in ("a", "b", "c")]
    started = [process(cfg, pause=0.2) for cfg in runs]
    go(*started)
    ended = [finished(one) for one in started]
    assert sorted(len(last["seen"]) for _, last in ended) == [0, 0, 20]
    assert len({json.dumps(last["sha256"]) for _, last in ended}) == 1
    for said, last in ended:
        if not last["seen"]:
            assert "waiting for another process, which makes" in said
    assert len(entries(folder)) == 1


def test_those_who_wait_go_on_for_one_that_is_killed(cached, bpe, folder):
    runs = [other_run(cached, name) for name in ("a", "b")]
    maker, other = process(runs[0], kill_at=100, pause=0.2), process(runs[1])
    go(maker)
    while not list(folder.glob("corpus-*/train.tmp")):
        assert maker[0].poll() is None
    with pytest.raises(DataError, match="no prepared corpus"):
        open_corpus(runs[0].run_dir)
    go(other)
    said, last = finished(other)
    assert "waiting for another process" in said and len(last["seen"]) == 20
    maker[0].communicate(timeout=10)
    assert maker[0].returncode == -signal.SIGKILL
    own, _ = prepared(other_run(cached, "own", cache=None), bpe)
    assert last["sha256"] == own.meta.sha256
    assert {path.name for path in entries(folder)[0].iterdir()} == {
        "train.bin", "val.bin", "meta.json", "verified.json", "about.json", "lock",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "meta.json"])
@pytest.mark.parametrize("change", ["one bit", "cut", "missing"])
def test_damage_is_found_and_mended_as_the_sentence_says(cached, bpe, folder, name, change):
    before = prepared(cached, bpe)[0].meta
    (entry,) = entries(folder)
    raw = bytearray((entry / name).read_bytes())
    raw[0] ^= 128
    (entry / name).write_bytes(raw[: -2 if change == "cut" else None])
    if change == "missing":
        (entry / name).unlink()
    if (name, change) != ("meta.json", "missing"):  # of which it is taken as unfinished
        for run in (cached, other_run(cached, "second")):
            with pytest.raises(DataError, match=rf"{name} is damaged: .*; delete {entry}, and"):
                prepared(run, bpe)
        shutil.rmtree(entry)
    after, calls = prepared(cached, bpe)
    assert calls and after.meta == before


def test_a_run_goes_on_with_its_corpus_when_the_source_changes_or_goes(cached, bpe):
    before = prepared(cached, bpe)[0].meta
    with open(cached.data.path, "a") as file:
        file.write('{"text": "one more"}\n')
    assert prepared(cached, bpe)[0].meta == before
    os.unlink(cached.data.path)
    assert prepared(cached, bpe)[0].meta == before


@pytest.mark.parametrize("source", ["as it was", "changed", "gone"])
def test_a_corpus_that_is_gone_is_made_again_or_missed_in_a_sentence(
    cached, bpe, folder, source, capsys
):
    before = prepared(cached, bpe)[0].meta
    shutil.rmtree(folder)
    with pytest.raises(DataError, match=r"not there: continue the run with resume=auto, or `fprnn"):
        open_corpus(cached.run_dir)
    if source == "as it was":
        assert prepared(cached, bpe)[0].meta == before
        assert "is not there: looked for, and made again" in " ".join(
            capsys.readouterr().out.split()
        )
        return
    if source == "changed":
        with open(cached.data.path, "a") as file:
            file.write('{"text": "one more"}\n')
    else:
        os.unlink(cached.data.path)
    with pytest.raises(
        DataError, match=r"is not there, and .*[:;] bring back .*train anew"
    ) as caught:
        prepared(cached, bpe)
    assert "\n" not in str(caught.value) and not entries(folder)


def test_another_corpus_under_the_recorded_name_is_refused(cached, bpe):
    prepared(cached, bpe)
    path = cached.run_dir / "data" / "corpus.json"
    path.write_text(path.read_text().replace(record(cached)["sha256"]["val.bin"], "0" * 64))
    with pytest.raises(DataError, match="was trained on another corpus"):
        prepared(cached, bpe)
    path.write_text("{")
    with pytest.raises(DataError, match=r"corpus.json is damaged: .*delete it"):
        prepared(cached, bpe)


def test_a_node_with_a_cache_of_its_own_makes_it_too(cached, bpe, folder, tmp_path):
    meta = prepared(cached, bpe)[0].meta
    ensure_here(cached, bpe, cached.run_dir)
    folder.rename(tmp_path / "of the first node")
    ensure_here(cached, bpe, cached.run_dir)
    assert open_corpus(cached.run_dir).meta == meta
    shutil.rmtree(folder)
    os.unlink(cached.data.path)
    with pytest.raises(DataError, match="which is not there, and it cannot be made again"):
        ensure_here(cached, bpe, cached.run_dir)


@pytest.fixture
def mounted(tmp_path):
    """A disk of 1 MiB; a function of mount's further options changes it."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(options: str) -> subprocess.CompletedProcess:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        return subprocess.run(command, capture_output=True)

    if mount("size=1m").returncode:
        pytest.skip("a small disk can be mounted by root alone")
    yield place, lambda options: mount(f"remount,{options}")
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_is_a_sentence_and_with_space_it_is_made(cached, bpe, mounted):
    place, remount = mounted
    cached.data.cache = str(place / "cache")
    with open(cached.data.path, "a") as file:
        for i in range(4000):
            file.write(json.dumps({"text": f"document {i} " + "of many words " * 30}) + "\n")
    match = r"cannot be written: No space left on device \(a prepared corpus; data.cache, or"
    with pytest.raises(OutputError, match=match) as caught:
        prepare(cached, bpe, cached.run_dir)
    assert "\n" not in str(caught.value) and not list(place.rglob("*.tmp"))
    assert remount("size=64m").returncode == 0
    corpus = prepare(cached, bpe, cached.run_dir)
    own = other_run(cached, "own", cache=None)
    assert prepared(own, bpe)[0].meta.sha256 == corpus.meta.sha256


def test_a_cache_that_is_only_read(cached, bpe, mounted):
    place, remount = mounted
    cached.data.cache = str(place)
    before = prepared(cached, bpe)[0].meta
    assert remount("ro").returncode == 0
    second = other_run(cached, "second")
    assert prepared(second, bpe)[0].meta == before  # what is there can be used
    other = other_run(cached, "other", leading_eos=True)
    with pytest.raises(OutputError, match=r"cannot be written: Read-only .*data.cache=null is the"):
        prepared(other, bpe)
    remount("rw")


def test_preparing_ahead(cached, bpe, folder, monkeypatch):
    (first, made), (again, made_again) = (prepare_ahead(cached, bpe) for _ in range(2))
    assert made and not made_again and first == again == entries(folder)[0]
    assert prepared(cached, bpe)[1] == 0
    with pytest.raises(DataError, match="cache is null"):
        prepare_ahead(other_run(cached, "x", cache=None), bpe)


def test_the_command_prepares_what_the_points_of_a_sweep_differ_in(tmp_path):
    sweep = tmp_path / "sweep.yaml"
    text = (ROOT / "configs/tiny/lm.yaml").read_text()
    sweep.write_text(text + "sweep:\n  optim.lr: [1e-3, 2e-3]\n  data.leading_eos: [true, false]\n")
    done = fprnn("prepare", sweep, **{cache.VARIABLE: str(tmp_path / "cache")})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("bytes, made") == 2 and len(entries(tmp_path / "cache")) == 2
    assert len(entries(tmp_path / "cache", "tokenizer")) == 1
