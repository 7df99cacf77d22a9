"""Checkpoints: save in the background, verify, find the newest complete one, delete old ones.

A checkpoint is a folder `RUN/checkpoints/step-NNNNNN`. A save first writes `step-NNNNNN.partial`:
the files, each synced to the disk, and then `manifest.json`, which lists every file with its size
and SHA-256. Then it renames the folder, and deletes old checkpoints. So a folder with the final
name is complete, unless it was damaged later: then its files differ from the manifest, and it is
never loaded.
"""

from __future__ import annotations

import copy
import math
import pickle
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lm.common.console import say
from lm.common.errors import UserError
from lm.common.files import DamagedError, read_json, sync, write_json, writing
from lm.common.ranks import Ranks
from lm.config.schema import Checkpoint
from lm.model import checksums

MANIFEST = "manifest.json"
PARTIAL = ".partial"
CLOSE_TIMEOUT_S = 20.0  # of a rank that ends with an error, for the files of the other ranks
FOLDER_NAME = re.compile(r"step-(\d+)")


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be written or used. The message names the file and the reason."""


@dataclass
class _Job:
    """A checkpoint whose files this rank is writing."""

    step: int
    partial: Path  # the folder while it is written
    files: dict[str, object]  # {file name: object for `torch.save`}
    start_time: float  # by `time.monotonic`
    blocked_s: float = 0.0  # seconds that training waited for this save to begin
    error: Exception | None = None
    is_written: threading.Event = field(default_factory=threading.Event)  # also set on failure
    is_cancelled: threading.Event = field(default_factory=threading.Event)


class Checkpoints:
    """Checkpoints of a training run. Every rank makes one such object, and makes the same calls.

    Args:
        folder: Folder of all checkpoints.
        ranks: Ranks of the run.
        settings: Section `checkpoint`: how many checkpoints to keep.
        manifest: Entries of every manifest in addition to its files, such as {"zero_stage": 1}.

    Attributes:
        last_complete_step: Step of the last checkpoint that this process completed or resumed from.
    """

    def __init__(
        self, folder: Path, ranks: Ranks, settings: Checkpoint, manifest: dict | None = None
    ):
        self.folder, self.ranks, self.settings = Path(folder), ranks, settings
        self.manifest = {"world_size": ranks.world_size, **(manifest or {})}
        self.last_complete_step: int | None = None
        self._job: _Job | None = None
        self._thread: threading.Thread | None = None
        self._saves: queue.SimpleQueue[dict] = queue.SimpleQueue()  # completed, for `pop_saves`

    def save(self, step: int, collect: Callable[[], dict[str, object]]) -> None:
        """Copy the state, and write it from a background thread.

        Args:
            step: Number of updates made.
            collect: Function that returns {file name: object for `torch.save`} of this rank. File
                names must differ between ranks.

        Raises:
            CheckpointError: If this save cannot begin, or the previous save failed.
        """
        start_time = time.monotonic()
        self.finish()
        partial = self.folder / (_checkpoint_name(step) + PARTIAL)
        self.ranks.run_on_main(self._make_partial_folder, partial)
        self._job = _Job(step, partial, copy_to_host(collect()), start_time)
        self._thread = threading.Thread(target=self._write, args=(self._job,), name="checkpoint")
        self._job.blocked_s = time.monotonic() - start_time
        self._thread.start()

    def finish(self) -> None:
        """Wait until the current save is complete.

        Raises:
            CheckpointError: On every rank, if a rank could not write its files.
        """
        job, self._job = self._job, None
        if job is None:
            return
        assert self._thread is not None  # the thread that writes the job
        job.is_written.wait()
        try:
            self.ranks.raise_first_error(job.error)  # of any rank, while it wrote its files
            self._thread.join()
            self.ranks.raise_first_error(job.error)  # of rank 0, in `_publish`
        except Exception:
            job.is_cancelled.set()
            self._thread.join()
            self.ranks.barrier()
            if self.ranks.is_main:
                shutil.rmtree(job.partial, ignore_errors=True)
            raise
        self.last_complete_step = job.step

    def close(self) -> None:
        """Complete the current save, or cancel it if another rank no longer writes its files.

        Call it before the run directory is released, also after an error.
        """
        job, self._job = self._job, None
        if job is None:
            return
        assert self._thread is not None  # the thread that writes the job
        # A single rank waits for no other rank's files, so its save always ends.
        self._thread.join(None if self.ranks.world_size == 1 else CLOSE_TIMEOUT_S)
        job.is_cancelled.set()
        self._thread.join()

    def pop_saves(self) -> list[dict]:
        """Return the saves completed since the last call, on rank 0.

        Returns:
            For each save: "step"; "blocked_s", seconds that training waited; "seconds" until it was
            complete; "bytes" of all files.
        """
        return [self._saves.get() for _ in range(self._saves.qsize())]

    def _make_partial_folder(self, partial: Path) -> None:
        delete_partial_checkpoints(self.folder)
        with writing(partial):
            partial.mkdir(parents=True)

    def _write(self, job: _Job) -> None:
        """Write this rank's files and their list; on rank 0, complete the checkpoint."""
        try:
            entries = {}  # {file name: [bytes, SHA-256]}
            for name, state in job.files.items():
                if job.is_cancelled.is_set():
                    return
                entries[name] = _write_file(job.partial / name, state)
            job.files = {}  # free the memory of the copy
            write_json(_rank_manifest(job.partial, self.ranks.rank), {"files": entries})
            job.is_written.set()
            if self.ranks.is_main:
                self._publish(job)
        except Exception as e:
            job.error = e
        finally:
            job.is_written.set()

    def _publish(self, job: _Job) -> None:
        """Wait for the other ranks' files, write the manifest, rename, delete old checkpoints."""
        rank_manifests = [_rank_manifest(job.partial, r) for r in range(self.ranks.world_size)]
        while not all(path.exists() for path in rank_manifests):
            if job.is_cancelled.wait(0.05):
                return
        files: dict[str, tuple[int, str]] = {}  # {file name: (bytes, SHA-256)}
        for path in rank_manifests:
            files |= read_json(path, ("files",))["files"]
            path.unlink()
        total_bytes = sum(size for size, _ in files.values())
        manifest = {"step": job.step, **self.manifest, "files": files}
        write_json(job.partial / MANIFEST, manifest)
        path = job.partial.with_name(_checkpoint_name(job.step))
        with writing(path):
            if path.exists():  # it is damaged, or from before a rollback
                _mark_for_deletion(path)
            job.partial.rename(path)
            sync(self.folder)
        checksums.cache_sums(path, {name: digest for name, (_, digest) in files.items()})
        self._prune()
        save = {
            "step": job.step,
            "blocked_s": round(job.blocked_s, 3),
            "seconds": round(time.monotonic() - job.start_time, 3),
            "bytes": total_bytes,
        }
        self._saves.put(save)

    def _prune(self) -> None:
        """Delete intact checkpoints except multiples of `keep_every` and the newest `keep` others.

        Damaged checkpoints stay, because the user may want to rescue them.
        """
        keep_every = self.settings.keep_every
        candidates = [
            path
            for path in list_checkpoints(self.folder)
            if not keep_every or checkpoint_step(path) % keep_every
        ]
        intact = [path for path in candidates if self._is_intact(path)]
        for path in intact[: -self.settings.keep]:
            _mark_for_deletion(path)
        delete_partial_checkpoints(self.folder)

    def _is_intact(self, path: Path) -> bool:
        """Return whether a checkpoint is complete, without reading unchanged files again."""
        try:
            verify(path, cached=True)
        except Exception:  # whatever the damage is, the new checkpoint is complete already
            return False
        return True


def copy_to_host(value: Any) -> Any:
    """Copy tensors and arrays in nested containers to host memory.

    A tensor that occurs twice (tied weights) is copied once. Other values are not copied and must
    not change.
    """
    copies: dict[tuple, torch.Tensor] = {}

    def copy_value(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            key = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
            # Empty tensors are copied each, because they all have the same address.
            if key not in copies or not value.numel():
                copies[key] = value.detach().to("cpu", copy=True)
            return copies[key]
        if isinstance(value, dict):
            new = copy.copy(value)  # keeps OrderedDict and defaultdict
            new.update({k: copy_value(v) for k, v in value.items()})
            return new
        if isinstance(value, np.ndarray):
            return value.copy()
        if isinstance(value, tuple) and hasattr(value, "_fields"):  # a NamedTuple
            return type(value)(*map(copy_value, value))
        if isinstance(value, list | tuple):
            return type(value)(map(copy_value, value))
        return value

    return copy_value(value)


def _write_file(path: Path, state) -> list:
    """Write a file and sync it to the disk; return [bytes, SHA-256]."""
    try:
        # Open the file here: on a full disk, torch's own writer would keep it open, and deleting it
        # would free no space.
        with path.open("wb") as file:
            torch.save(state, file)
        sync(path)
    except (OSError, RuntimeError) as e:  # torch's writer raises RuntimeError
        free = shutil.disk_usage(path.parent).free
        raise CheckpointError(
            f"checkpoint {path.parent.name.removesuffix(PARTIAL)} cannot be written to"
            f" {path.parent.parent} ({_first_line(e)}; {free / 2**20:,.0f} MiB are free there); the"
            " previous checkpoint stays"
        ) from None
    return [path.stat().st_size, checksums.sha256(path)]


def _first_line(error: BaseException) -> str:
    return (getattr(error, "strerror", None) or str(error)).strip().partition("\n")[0]


def _checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def _rank_manifest(partial: Path, rank: int) -> Path:
    """Return the path of the list of a rank's files, which rank 0 merges into the manifest."""
    return partial / f"files-rank{rank:04d}.json"


def _mark_for_deletion(path: Path) -> None:
    """Rename a checkpoint; `delete_partial_checkpoints` deletes its files."""
    path.rename(path.with_name(f"{path.name}-{time.time_ns()}{PARTIAL}"))


def delete_partial_checkpoints(folder: Path) -> None:
    """Delete folders left by interrupted saves and deletions."""
    for path in Path(folder).glob(f"step-*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def checkpoint_step(path: Path) -> int:
    """Return the number of updates, which is in the checkpoint's name."""
    match = FOLDER_NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the folders named step-NNNNNN, complete or damaged, sorted by step."""
    paths = Path(folder).iterdir() if Path(folder).is_dir() else ()
    folders = (p for p in paths if p.is_dir() and FOLDER_NAME.fullmatch(p.name))
    return sorted(folders, key=checkpoint_step)


def verify(path: Path, cached: bool = False) -> dict:
    """Compare the files of a checkpoint with its manifest, and return the manifest.

    Args:
        path: Folder of the checkpoint.
        cached: Do not read files again whose size and times are as when this process read them.

    Raises:
        CheckpointError: If the folder, the manifest or a file is missing, or a file has changed.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"no checkpoint folder at {path}")
    if not (path / MANIFEST).is_file():
        raise CheckpointError(
            f"checkpoint {path} is incomplete: it has no {MANIFEST} (was the run killed while"
            " saving?); resume=auto picks the newest complete one"
        )
    try:
        manifest = read_json(path / MANIFEST, ("step", "world_size", "files"))
        entries = manifest["files"].items()
        files = [(path / name, size, digest) for name, (size, digest) in entries]
    except (DamagedError, AttributeError, TypeError, ValueError) as e:
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} is damaged ({e})") from None
    match = FOLDER_NAME.fullmatch(path.name)  # None if the user has renamed the folder
    has_other_step = match is not None and manifest["step"] != int(match[1])
    if not files or has_other_step:
        raise CheckpointError(
            f"checkpoint {path}: {MANIFEST} is damaged (it lists {len(files)} files of update"
            f" {manifest['step']})"
        )
    for file, size, _ in files:
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path} is incomplete: {file.name} is missing")
        if file.stat().st_size != size:
            raise CheckpointError(
                f"checkpoint {path}: {file.name} has {file.stat().st_size} bytes, not {size}"
            )
    digests = {file.name: digest for file, _, digest in files}
    if mismatch := checksums.describe_mismatch(path, digests, cached):
        raise CheckpointError(f"checkpoint {path}: {mismatch}")
    return manifest


def find_newest_checkpoint(folder: Path, before: float = math.inf) -> Path | None:
    """Return the newest complete checkpoint in a folder, or None if the folder has none.

    Args:
        folder: Folder of all checkpoints.
        before: Only consider checkpoints with fewer updates.

    Raises:
        CheckpointError: If there are checkpoints, but none is complete (only without `before`).
    """
    candidates = list_checkpoints(folder)
    for path in reversed(candidates):
        if checkpoint_step(path) >= before:
            continue
        try:
            verify(path)
            return path
        except CheckpointError as e:
            say(f"skipped: {e}")
    if candidates and before == math.inf:
        raise CheckpointError(
            f"{folder} has no complete checkpoint (damaged or incomplete: {len(candidates)}):"
            " restore one from a backup, or train from scratch with --overwrite"
        )
    return None


def resume_checkpoint(
    resume: str, folder: Path, before: float = math.inf
) -> tuple[Path, dict] | None:
    """Return (folder, manifest) of the checkpoint that `resume` selects, or None.

    Args:
        resume: never, auto (the newest complete checkpoint in `folder`), or a checkpoint's folder.
        folder: Folder of the run's checkpoints.
        before: With auto, only consider checkpoints with fewer updates.

    Raises:
        CheckpointError: If the checkpoint is not complete; with auto, as `find_newest_checkpoint`.
    """
    if resume == "never":
        return None
    if resume == "auto":
        path = find_newest_checkpoint(folder, before)
        return None if path is None else (path, read_json(path / MANIFEST))
    return Path(resume), verify(Path(resume))


def rollback_checkpoint(folder: Path, rollback_step: int | None) -> tuple[Path, dict] | None:
    """Return (folder, manifest) of the checkpoint to roll back to, or None if none is complete.

    This is the newest checkpoint. If the last rollback did not help, it is the next older one, and
    the newer ones are deleted.

    Args:
        folder: Folder of the run's checkpoints.
        rollback_step: Step of the checkpoint that the last rollback restored, if nothing has been
            saved since; otherwise None.
    """
    if rollback_step is not None:
        older = resume_checkpoint("auto", folder, before=rollback_step)
        if older is not None:
            delete_later_checkpoints(folder, older[1]["step"])
            return older
    try:
        return resume_checkpoint("auto", folder)
    except CheckpointError:  # none is complete
        return None


def describe_nonfinite(tensors: Mapping[str, Sequence[torch.Tensor]]) -> str:
    """Return a message such as "NaN or infinity in exp_avg", or "" if all tensors are finite.

    Args:
        tensors: {name in the message: tensors}.
    """
    names = [name for name, group in tensors.items() if not all(map(_is_finite, group))]
    return f"NaN or infinity in {' and '.join(names)}" if names else ""


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all elements are finite.

    Minimum and maximum are NaN if an element is; this is 30 times faster than `torch.isfinite`.
    """
    if not tensor.numel():
        return True
    minimum, maximum = torch.aminmax(tensor.detach())
    return math.isfinite(minimum) and math.isfinite(maximum)


def delete_later_checkpoints(folder: Path, step: int) -> None:
    """Delete the checkpoints of later steps than `step`, from which the run continues."""
    for path in list_checkpoints(folder):
        if checkpoint_step(path) > step:
            _mark_for_deletion(path)
    delete_partial_checkpoints(folder)


def read_state(
    path: Path, classes: Sequence[type] = (), device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Read a file of a verified checkpoint, without running code that it may contain.

    The manifest proves that the file is undamaged, but not who wrote it.

    Args:
        path: The file.
        classes: Classes of objects that the file may hold, next to tensors, numbers and text.
        device: Device of the tensors.

    Raises:
        CheckpointError: If it holds objects of other classes, or cannot be read.
    """
    try:
        with torch.serialization.safe_globals(list(classes)):
            return torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as e:
        match = re.search(r"GLOBAL (\S+)", str(e))
        name = match[1] if match else "an object"
        raise CheckpointError(
            f"{path} is not read: it holds {name}, which fprnn never writes and which could run"
            " code: get a checkpoint from the person who trained it"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError) as e:
        raise CheckpointError(f"{path} cannot be read: {_first_line(e)}") from None
