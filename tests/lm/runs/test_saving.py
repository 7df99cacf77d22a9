"""Saves that are killed, cannot be written, or find damage: the last good checkpoint stands."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from lm.common.ranks import Ranks
from lm.config.schema import Checkpoint
from lm.runs import checkpoint as checkpoints
from lm.runs.checkpoint import (
    CheckpointError,
    Checkpoints,
    delete_later_checkpoints,
    describe_nonfinite,
    find_newest_checkpoint,
    list_checkpoints,
    snapshot,
    verify,
)

fork = multiprocessing.get_context("fork")


def state(step):
    return {"model.pt": {"w": torch.full((100,), float(step))}, "rank.pt": {"step": step}}


def saver(folder, **settings):
    return Checkpoints(folder, Ranks(), Checkpoint(**settings), {"zero_stage": 0})


def save(folder, *steps, **settings):
    made = saver(folder, **settings)
    for step in steps:
        made.save(step, lambda step=step: state(step))
    made.finish()
    return made


def steps_of(folder):
    return [checkpoints.checkpoint_step(path) for path in list_checkpoints(folder)]


def silent(_): ...


def test_what_is_saved_is_what_was_there_at_the_time(tmp_path):
    """Training goes on while the thread writes."""
    weights = {"w": torch.zeros(3)}
    made = saver(tmp_path)
    made.save(1, lambda: {"model.pt": weights})
    weights["w"] += 1
    made.finish()
    assert torch.load(tmp_path / "step-000001/model.pt")["w"].tolist() == [0, 0, 0]
    manifest = verify(tmp_path / "step-000001")
    assert manifest["step"] == 1 and manifest["zero_stage"] == 0 and manifest["world_size"] == 1
    (saved,) = made.pop_saves()
    size = (tmp_path / "step-000001/model.pt").stat().st_size
    assert saved["step"] == 1 and saved["bytes"] == size
    assert 0 <= saved["blocked_s"] <= saved["seconds"] and made.pop_saves() == []


def test_a_snapshot_copies_each_tensor_once():
    w = torch.arange(6.0)
    taken = snapshot({"a": w, "b": [w, (w[:2], 7)], "c": None})
    assert taken["a"] is taken["b"][0] and taken["a"].data_ptr() != w.data_ptr()
    assert taken["b"][1][0].untyped_storage().nbytes() == 8  # not all that it was a view of
    assert taken["b"][1][1] == 7 and taken["c"] is None


def test_numbers_that_are_not_finite_are_found_and_named():
    large = torch.full((4,), 3e38)  # whose sum is infinite
    held = {"the weights": [torch.ones(3), torch.ones(0), large], "step": [torch.tensor(7)]}
    assert describe_nonfinite(held) == ""
    for value in (float("nan"), float("inf"), -float("inf")):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            spoilt = {"exp_avg": [torch.ones(5), torch.tensor([1.0, value], dtype=dtype)]}
            assert describe_nonfinite(held | spoilt) == "NaN or infinity in exp_avg"
    opposite = [torch.tensor([float("inf")]), torch.tensor([-float("inf")])]
    assert describe_nonfinite({"a": opposite, "b": opposite}) == "NaN or infinity in a and b"


class Killed:
    """SIGKILL at the k-th thing that a save does to the disk."""

    NAMES = ("os.fsync", "os.replace", "shutil.rmtree", "torch.save", "Path.rename", "Path.mkdir",
             "Path.unlink")  # fmt: skip

    def __init__(self, number):
        self.left = number

    def install(self):
        places = {"os": os, "shutil": shutil, "torch": torch, "Path": Path}
        for name in self.NAMES:
            owner, attribute = name.split(".")
            real = getattr(places[owner], attribute)
            setattr(places[owner], attribute, self.counted(real))

    def counted(self, real):
        def wrapper(*args, **kwargs):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return wrapper


def test_a_kill_at_any_moment_of_a_save_leaves_a_good_checkpoint(tmp_path):
    """Before each file operation in turn; then the run goes on and saves again."""

    def child(folder, number):
        Killed(number).install()
        save(folder, 3, keep=2)
        os._exit(0)

    found, number = set(), 0
    while True:
        number += 1
        folder = tmp_path / str(number)
        save(folder, 1, 2)
        process = fork.Process(target=child, args=(folder, number))
        process.start()
        process.join(30)
        step = checkpoints.checkpoint_step(find_newest_checkpoint(folder, silent))
        found.add(step)
        assert step in (2, 3)
        save(folder, 4)
        assert steps_of(folder) == [step, 4] and not list(folder.glob("*.partial"))
        if process.exitcode == 0:
            break
    assert found == {2, 3} and number > 12


def test_multiples_of_keep_every_stay(tmp_path):
    save(tmp_path, *range(1, 11), keep=2, keep_every=4)
    assert steps_of(tmp_path) == [4, 8, 9, 10]
    save(tmp_path, 11, 12, keep=2, keep_every=4)
    assert steps_of(tmp_path) == [4, 8, 10, 11, 12]  # two tiers


def test_the_order_is_that_of_the_numbers(tmp_path):
    save(tmp_path, 999_999, 1_000_000, keep=2)
    assert find_newest_checkpoint(tmp_path).name == "step-1000000"
    save(tmp_path, 1_000_001, keep=2)
    assert steps_of(tmp_path) == [1_000_000, 1_000_001]


def test_other_folders_are_not_looked_at(tmp_path):
    save(tmp_path, 1)
    for name in ("step-best", "step-000001 (copy)", "step-000009-old"):
        shutil.copytree(tmp_path / "step-000001", tmp_path / name)
    (tmp_path / "step-000007").write_text("a file")
    assert find_newest_checkpoint(tmp_path).name == "step-000001"
    save(tmp_path, 2, keep=1)
    delete_later_checkpoints(tmp_path, 1)
    assert (tmp_path / "step-best").is_dir() and (tmp_path / "step-000009-old").is_dir()


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def manifest(text):
    return lambda path: (path / "manifest.json").write_text(text)


FILES = '{"step": 3, "world_size": 1, "files": %s}'
DAMAGED = "manifest.json is damaged"
# Damage → (what is done, what is said).
DAMAGES = {
    "another update": (
        manifest(FILES.replace("3", "13") % '{"a": [1, "b"]}'),
        DAMAGED,
    ),
    "no files": (manifest(FILES % "{}"), DAMAGED),
    "files of null": (manifest(FILES % "null"), DAMAGED),
    "short entries": (manifest(FILES % '{"model.pt": [1]}'), DAMAGED),
    "other entries": (manifest(FILES % '{"model.pt": 3}'), DAMAGED),
    "empty manifest": (manifest(""), DAMAGED),
    "half a manifest": (manifest('{"step": 3, "fi'), DAMAGED),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "it has no manifest.json"),
    "zeroed file": (
        lambda path: (path / "model.pt").write_bytes(bytes((path / "model.pt").stat().st_size)),
        "model.pt is damaged, or was changed",
    ),
    "bit flipped": (lambda path: flipped(path / "model.pt"), "model.pt is damaged, or was changed"),
    "torn file": (lambda path: os.truncate(path / "model.pt", 10), "model.pt has 10 bytes, not"),
    "empty file": (lambda path: os.truncate(path / "model.pt", 0), "model.pt has 0 bytes, not"),
    "file missing": (lambda path: (path / "rank.pt").unlink(), "rank.pt is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_passed_over_with_a_sentence(tmp_path, damage):
    save(tmp_path, 2, 3)
    spoil, words = DAMAGES[damage]
    spoil(tmp_path / "step-000003")
    said = []
    assert find_newest_checkpoint(tmp_path, said.append).name == "step-000002"
    assert len(said) == 1 and said[0].startswith("skipped: checkpoint") and words in said[0]
    spoil(tmp_path / "step-000002")
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints .*--overwrite"):
        find_newest_checkpoint(tmp_path, silent)


@pytest.mark.parametrize("damage", ["no manifest", "bit flipped", "torn file"])
def test_a_damaged_one_does_not_count_for_those_to_keep(tmp_path, damage):
    """`keep: 2` leaves two that can be loaded, and nothing is deleted for a damaged one's sake."""
    made = save(tmp_path, 1, 2, 3, keep=2)
    DAMAGES[damage][0](tmp_path / "step-000003")
    made.save(4, lambda: state(4))
    made.finish()
    assert steps_of(tmp_path) == [2, 3, 4]
    assert find_newest_checkpoint(tmp_path, silent).name == "step-000004"
    verify(tmp_path / "step-000002")


def test_a_damaged_one_is_replaced_by_the_save_of_its_number(tmp_path):
    save(tmp_path, 2, 3)
    DAMAGES["bit flipped"][0](tmp_path / "step-000003")
    save(tmp_path, 3)
    assert verify(tmp_path / "step-000003") and steps_of(tmp_path) == [2, 3]


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("a small disk can be mounted by root alone")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_a_sentence_and_the_one_before_stands(small_disk):
    made = save(small_disk / "checkpoints", 1)
    made.save(2, lambda: {"model.pt": torch.zeros(2_000_000)})
    with pytest.raises(
        CheckpointError,
        match=r"step-000002 cannot be written .*MiB are free.*previous checkpoint stay",
    ):
        made.finish()
    # What it has left is gone, so that the next one, a smaller one, fits.
    assert [p.name for p in (small_disk / "checkpoints").iterdir()] == ["step-000001"]
    made.save(3, lambda: state(3))
    made.finish()
    assert find_newest_checkpoint(small_disk / "checkpoints").name == "step-000003"


def test_what_a_kill_left_on_a_full_disk_goes_before_anything_is_written(small_disk):
    folder = small_disk / "checkpoints"
    save(folder, 1)
    torn = folder / "step-000002.partial"
    torn.mkdir()
    with (torn / "model.pt").open("wb") as f, pytest.raises(OSError, match="No space"):
        f.write(bytes(2_000_000))
        f.flush()
    save(folder, 2)
    assert find_newest_checkpoint(folder).name == "step-000002"


def two_ranks(rank, port, folder, results, fails_on):
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    made = Checkpoints(folder, Ranks(rank, 2, torch.device("cpu"), dist.group.WORLD), Checkpoint())
    files = {f"rank{rank}.pt": torch.full((10,), float(rank))}
    made.save(1, lambda: files)
    made.finish()
    if rank == fails_on:
        checkpoints._write_file = failing
    try:
        made.save(2, lambda: files)
        made.finish()
        results.put((rank, "saved"))
    except CheckpointError as e:
        results.put((rank, str(e)))
    dist.barrier()
    dist.destroy_process_group()


def failing(path, state):
    time.sleep(0.2)
    raise CheckpointError("the disk is full")


@pytest.mark.parametrize("fails_on", [None, 0, 1])
def test_all_ranks_know_of_one_that_could_not_write(tmp_path, fails_on):
    from lm.training.process_group import find_free_port

    results, port = fork.Queue(), find_free_port()
    ranks = [
        fork.Process(target=two_ranks, args=(rank, port, tmp_path, results, fails_on))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    said = dict(results.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(30)
    if fails_on is None:
        assert said == {0: "saved", 1: "saved"}
        assert set(verify(tmp_path / "step-000002")["files"]) == {"rank0.pt", "rank1.pt"}
    else:
        assert said == {0: "the disk is full", 1: "the disk is full"}
        assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_files_are_synced_before_the_name_is_given(tmp_path, monkeypatch):
    """Files, the manifest, its folder, and then the name: in this order on the disk."""
    order = []
    real_sync, real_rename = os.fsync, Path.rename
    monkeypatch.setattr(
        os, "fsync", lambda n: (order.append(os.readlink(f"/proc/self/fd/{n}")), real_sync(n))[1]
    )
    monkeypatch.setattr(
        Path,
        "rename",
        lambda p, to: (order.append(f"rename {Path(to).name}"), real_rename(p, to))[1],
    )
    save(tmp_path, 1)
    names = [entry if entry.startswith("rename") else Path(entry).name for entry in order]
    named = names.index("rename step-000001")
    manifest = max(i for i, name in enumerate(names) if name.startswith(".manifest.json"))
    assert {"model.pt", "rank.pt"} <= set(names[:manifest])
    assert "step-000001.partial" in names[manifest:named]
    assert names[named + 1] == tmp_path.name
    assert json.loads((tmp_path / "step-000001/manifest.json").read_text())["step"] == 1


def test_a_directory_is_given_up_only_when_nothing_is_written_any_more(tmp_path, monkeypatch):
    real = checkpoints._write_file

    def slow(path, state):
        time.sleep(0.3)
        return real(path, state)

    monkeypatch.setattr(checkpoints, "_write_file", slow)
    made = saver(tmp_path)
    made.save(1, lambda: state(1))
    made.close()  # the training has failed elsewhere, meanwhile
    assert verify(tmp_path / "step-000001") and not list(tmp_path.glob("*.partial"))


def test_a_save_that_waits_for_a_dead_rank_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "CLOSE_TIMEOUT_S", 0.3)
    alone = Ranks(0, 2)  # the other one is gone
    monkeypatch.setattr(Ranks, "run_on_main", lambda self, fn, *args: fn(*args))
    made = Checkpoints(tmp_path, alone, Checkpoint())
    made.save(1, lambda: state(1))
    began = time.monotonic()
    made.close()
    assert 0.2 < time.monotonic() - began < 5 and find_newest_checkpoint(tmp_path) is None
