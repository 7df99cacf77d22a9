"""Saves that are killed or fail, and damaged checkpoints: the last complete one stays."""

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
    copy_to_host,
    delete_later_checkpoints,
    describe_nonfinite,
    find_newest_checkpoint,
    list_checkpoints,
    verify,
)

fork = multiprocessing.get_context("fork")


def make_state(step):
    return {"model.pt": {"w": torch.full((100,), float(step))}, "rank.pt": {"step": step}}


def make_checkpoints(folder, **settings):
    return Checkpoints(folder, Ranks(), Checkpoint(**settings), {"zero_stage": 0})


def save(folder, *steps, **settings):
    run_checkpoints = make_checkpoints(folder, **settings)
    for step in steps:
        run_checkpoints.save(step, lambda step=step: make_state(step))
    run_checkpoints.finish()
    return run_checkpoints


def list_steps(folder):
    return [checkpoints.checkpoint_step(path) for path in list_checkpoints(folder)]


def test_save_writes_the_state_at_the_call(tmp_path):
    """Training changes the state while the thread writes."""
    weights = {"w": torch.zeros(3)}
    run_checkpoints = make_checkpoints(tmp_path)
    run_checkpoints.save(1, lambda: {"model.pt": weights})
    weights["w"] += 1
    run_checkpoints.finish()
    assert torch.load(tmp_path / "step-000001/model.pt")["w"].tolist() == [0, 0, 0]
    manifest = verify(tmp_path / "step-000001")
    assert manifest["step"] == 1 and manifest["zero_stage"] == 0 and manifest["world_size"] == 1
    (saved,) = run_checkpoints.pop_saves()
    size = (tmp_path / "step-000001/model.pt").stat().st_size
    assert saved["step"] == 1 and saved["bytes"] == size
    assert 0 <= saved["blocked_s"] <= saved["seconds"] and run_checkpoints.pop_saves() == []


def test_snapshot_copies_each_tensor_once():
    w = torch.arange(6.0)
    copies = copy_to_host({"a": w, "b": [w, (w[:2], 7)], "c": None})
    assert copies["a"] is copies["b"][0] and copies["a"].data_ptr() != w.data_ptr()
    view, number = copies["b"][1]
    assert view.untyped_storage().nbytes() == 8  # two floats, not the whole storage of w
    assert number == 7 and copies["c"] is None


def test_nonfinite_tensors_are_named():
    large = torch.full((4,), 3e38)  # whose sum is infinite
    finite = {"the weights": [torch.ones(3), torch.ones(0), large], "step": [torch.tensor(7)]}
    assert describe_nonfinite(finite) == ""
    for value in (float("nan"), float("inf"), -float("inf")):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            nonfinite = {"exp_avg": [torch.ones(5), torch.tensor([1.0, value], dtype=dtype)]}
            assert describe_nonfinite(finite | nonfinite) == "NaN or infinity in exp_avg"
    infinities = [torch.tensor([float("inf")]), torch.tensor([-float("inf")])]  # whose sum is NaN
    assert describe_nonfinite({"a": infinities, "b": infinities}) == "NaN or infinity in a and b"


class Killer:
    """Kills the process before the k-th file operation of a save."""

    OPERATIONS = (
        "os.fsync",
        "os.replace",
        "shutil.rmtree",
        "torch.save",
        "Path.rename",
        "Path.mkdir",
        "Path.unlink",
    )

    def __init__(self, number):
        self.remaining_count = number

    def install(self):
        owners = {"os": os, "shutil": shutil, "torch": torch, "Path": Path}
        for name in self.OPERATIONS:
            owner, attribute = name.split(".")
            operation = getattr(owners[owner], attribute)
            setattr(owners[owner], attribute, self.count_down(operation))

    def count_down(self, operation):
        def wrapper(*args, **kwargs):
            self.remaining_count -= 1
            if self.remaining_count == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return wrapper


def test_kill_during_save_leaves_a_complete_checkpoint(tmp_path):
    """Kill before each file operation in turn; then the run continues and saves again."""

    def save_and_die(folder, number):
        Killer(number).install()
        save(folder, 3, keep=2)
        os._exit(0)

    newest_steps, number = set(), 0
    while True:
        number += 1
        folder = tmp_path / str(number)
        save(folder, 1, 2)
        process = fork.Process(target=save_and_die, args=(folder, number))
        process.start()
        process.join(30)
        step = checkpoints.checkpoint_step(find_newest_checkpoint(folder))
        newest_steps.add(step)
        assert step in (2, 3)
        save(folder, 4)
        assert list_steps(folder) == [step, 4] and not list(folder.glob("*.partial"))
        if process.exitcode == 0:
            break
    assert newest_steps == {2, 3} and number > 12


def test_multiples_of_keep_every_stay(tmp_path):
    save(tmp_path, *range(1, 11), keep=2, keep_every=4)
    assert list_steps(tmp_path) == [4, 8, 9, 10]
    save(tmp_path, 11, 12, keep=2, keep_every=4)
    # Multiples of four, and the two newest others.
    assert list_steps(tmp_path) == [4, 8, 10, 11, 12]


def test_checkpoints_are_ordered_by_step(tmp_path):
    save(tmp_path, 999_999, 1_000_000, keep=2)
    assert find_newest_checkpoint(tmp_path).name == "step-1000000"
    save(tmp_path, 1_000_001, keep=2)
    assert list_steps(tmp_path) == [1_000_000, 1_000_001]


def test_other_folders_are_ignored(tmp_path):
    save(tmp_path, 1)
    for name in ("step-best", "step-000001 (copy)", "step-000009-old"):
        shutil.copytree(tmp_path / "step-000001", tmp_path / name)
    (tmp_path / "step-000007").write_text("a file")
    assert find_newest_checkpoint(tmp_path).name == "step-000001"
    save(tmp_path, 2, keep=1)
    delete_later_checkpoints(tmp_path, 1)
    assert (tmp_path / "step-best").is_dir() and (tmp_path / "step-000009-old").is_dir()


def flip_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replace_manifest(text):
    return lambda path: (path / "manifest.json").write_text(text)


MANIFEST = '{"step": 3, "world_size": 1, "files": %s}'
DAMAGED = "manifest.json is damaged"
CHANGED = "model.pt is damaged, or was changed"
# {damage: (function that damages the checkpoint in a folder, part of the error message)}
DAMAGES = {
    "another update": (replace_manifest(MANIFEST.replace("3", "13") % '{"a": [1, "b"]}'), DAMAGED),
    "no files": (replace_manifest(MANIFEST % "{}"), DAMAGED),
    "files of null": (replace_manifest(MANIFEST % "null"), DAMAGED),
    "short entries": (replace_manifest(MANIFEST % '{"model.pt": [1]}'), DAMAGED),
    "other entries": (replace_manifest(MANIFEST % '{"model.pt": 3}'), DAMAGED),
    "empty manifest": (replace_manifest(""), DAMAGED),
    "half a manifest": (replace_manifest('{"step": 3, "fi'), DAMAGED),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "it has no manifest.json"),
    "zeroed file": (
        lambda path: (path / "model.pt").write_bytes(bytes((path / "model.pt").stat().st_size)),
        CHANGED,
    ),
    "bit flipped": (lambda path: flip_bit(path / "model.pt"), CHANGED),
    "torn file": (lambda path: os.truncate(path / "model.pt", 10), "model.pt has 10 bytes, not"),
    "empty file": (lambda path: os.truncate(path / "model.pt", 0), "model.pt has 0 bytes, not"),
    "file missing": (lambda path: (path / "rank.pt").unlink(), "rank.pt is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_skipped_with_a_message(tmp_path, damage, messages):
    save(tmp_path, 2, 3)
    do_damage, message_part = DAMAGES[damage]
    do_damage(tmp_path / "step-000003")
    assert find_newest_checkpoint(tmp_path).name == "step-000002"
    (message,) = messages
    assert message.startswith("skipped: checkpoint") and message_part in message
    do_damage(tmp_path / "step-000002")
    with pytest.raises(CheckpointError, match=r"no complete checkpoint .*: 2\).*--overwrite"):
        find_newest_checkpoint(tmp_path)


@pytest.mark.parametrize("damage", ["no manifest", "bit flipped", "torn file"])
def test_damaged_checkpoints_do_not_count_as_kept(tmp_path, damage):
    """`keep: 2` keeps two loadable checkpoints in addition to damaged ones."""
    run_checkpoints = save(tmp_path, 1, 2, 3, keep=2)
    DAMAGES[damage][0](tmp_path / "step-000003")
    run_checkpoints.save(4, lambda: make_state(4))
    run_checkpoints.finish()
    assert list_steps(tmp_path) == [2, 3, 4]
    assert find_newest_checkpoint(tmp_path).name == "step-000004"
    verify(tmp_path / "step-000002")


def test_damaged_checkpoint_is_replaced_by_a_new_save(tmp_path):
    save(tmp_path, 2, 3)
    DAMAGES["bit flipped"][0](tmp_path / "step-000003")
    save(tmp_path, 3)
    assert verify(tmp_path / "step-000003") and list_steps(tmp_path) == [2, 3]


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_full_disk_keeps_the_previous_checkpoint(small_disk):
    run_checkpoints = save(small_disk / "checkpoints", 1)
    run_checkpoints.save(2, lambda: {"model.pt": torch.zeros(2_000_000)})
    message = r"step-000002 cannot be written .*MiB are free.*previous checkpoint stay"
    with pytest.raises(CheckpointError, match=message):
        run_checkpoints.finish()
    # The files of the failed save are deleted, so that a smaller save fits.
    assert [p.name for p in (small_disk / "checkpoints").iterdir()] == ["step-000001"]
    run_checkpoints.save(3, lambda: make_state(3))
    run_checkpoints.finish()
    assert find_newest_checkpoint(small_disk / "checkpoints").name == "step-000003"


def test_partial_saves_are_deleted_before_a_new_save(small_disk):
    folder = small_disk / "checkpoints"
    save(folder, 1)
    partial = folder / "step-000002.partial"
    partial.mkdir()
    with (partial / "model.pt").open("wb") as f, pytest.raises(OSError, match="No space"):
        f.write(bytes(2_000_000))
        f.flush()
    save(folder, 2)
    assert find_newest_checkpoint(folder).name == "step-000002"


def save_twice(rank, port, folder, results, failing_rank):
    """Save on one of two ranks; the second save fails on `failing_rank`."""
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    ranks = Ranks(rank, 2, torch.device("cpu"), dist.group.WORLD)
    run_checkpoints = Checkpoints(folder, ranks, Checkpoint())
    files = {f"rank{rank}.pt": torch.full((10,), float(rank))}
    run_checkpoints.save(1, lambda: files)
    run_checkpoints.finish()
    if rank == failing_rank:
        checkpoints._write_file = raise_disk_full
    try:
        run_checkpoints.save(2, lambda: files)
        run_checkpoints.finish()
        results.put((rank, "saved"))
    except CheckpointError as e:
        results.put((rank, str(e)))
    dist.barrier()
    dist.destroy_process_group()


def raise_disk_full(path, state):
    time.sleep(0.2)
    raise CheckpointError("the disk is full")


@pytest.mark.parametrize("failing_rank", [None, 0, 1])
def test_failed_write_is_raised_on_all_ranks(tmp_path, failing_rank):
    from lm.training.process_group import find_free_port

    results, port = fork.Queue(), find_free_port()
    ranks = [
        fork.Process(target=save_twice, args=(rank, port, tmp_path, results, failing_rank))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    messages = dict(results.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(30)
    if failing_rank is None:
        assert messages == {0: "saved", 1: "saved"}
        assert set(verify(tmp_path / "step-000002")["files"]) == {"rank0.pt", "rank1.pt"}
    else:
        assert messages == {0: "the disk is full", 1: "the disk is full"}
        assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_files_are_synced_before_renaming(tmp_path, monkeypatch):
    """Files, manifest and folder reach the disk in this order, then the final name."""
    operations = []  # names of synced files and folders, and "rename NEW_NAME"
    real_sync, real_rename = os.fsync, Path.rename

    def sync(fd):
        operations.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        real_sync(fd)

    def rename(path, new_path):
        operations.append(f"rename {Path(new_path).name}")
        return real_rename(path, new_path)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", rename)
    save(tmp_path, 1)
    renaming = operations.index("rename step-000001")
    manifest = max(i for i, name in enumerate(operations) if name.startswith(".manifest.json"))
    assert {"model.pt", "rank.pt"} <= set(operations[:manifest])
    assert "step-000001.partial" in operations[manifest:renaming]
    assert operations[renaming + 1] == tmp_path.name
    assert json.loads((tmp_path / "step-000001/manifest.json").read_text())["step"] == 1


def test_directory_is_released_after_the_last_write(tmp_path, monkeypatch):
    write_file = checkpoints._write_file

    def write_slowly(path, state):
        time.sleep(0.3)
        return write_file(path, state)

    monkeypatch.setattr(checkpoints, "_write_file", write_slowly)
    run_checkpoints = make_checkpoints(tmp_path)
    run_checkpoints.save(1, lambda: make_state(1))
    run_checkpoints.close()  # after an error elsewhere in the training
    assert verify(tmp_path / "step-000001") and not list(tmp_path.glob("*.partial"))


def test_save_with_a_dead_rank_is_cancelled(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "CLOSE_TIMEOUT_S", 0.3)
    ranks = Ranks(0, 2)  # the other rank is dead
    monkeypatch.setattr(Ranks, "run_on_main", lambda self, fn, *args: fn(*args))
    run_checkpoints = Checkpoints(tmp_path, ranks, Checkpoint())
    run_checkpoints.save(1, lambda: make_state(1))
    start_time = time.monotonic()
    run_checkpoints.close()
    assert 0.2 < time.monotonic() - start_time < 5 and find_newest_checkpoint(tmp_path) is None
