"""Save in the background, verify, find the newest good one, keep some and drop the others.

A checkpoint is a folder `RUN/checkpoints/step-NNNNNN`. It is written as `step-NNNNNN.partial`:
files, each synced to the disk; `manifest.json`, which lists every file with its size and SHA-256;
and only then renamed. So a folder of that name is whole, or was damaged afterwards: its files
differ from the manifest, and it is never loaded. Older ones are deleted after that.
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

from lm.common.errors import UserError
from lm.common.files import DamagedError, read_json, sync, write_json, writing
from lm.common.ranks import Ranks
from lm.config.schema import Checkpoint
from lm.model import checksums

MANIFEST = "manifest.json"
PARTIAL = ".partial"
LAST_WAIT_S = 20.0  # for the files of other ranks, when this one ends by an error
NAME = re.compile(r"step-(\d+)")


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be written or used; the message says which file and why."""


@dataclass
class _Job:
    """One save under way on this rank."""

    step: int
    partial: Path
    files: dict[str, object]
    began: float
    blocked_s: float = 0.0
    error: Exception | None = None
    written: threading.Event = field(default_factory=threading.Event)  # or failed
    cancelled: threading.Event = field(default_factory=threading.Event)


class Checkpoints:
    """The checkpoints of a run that trains. All ranks make one and call it alike.

    Args:
        folder: of all checkpoints.
        settings: how many to keep.
        about: what each manifest says besides its files: {"zero_stage": …}.
    """

    def __init__(self, folder: Path, ranks: Ranks, settings: Checkpoint, about: dict | None = None):
        self.folder, self.ranks, self.settings = Path(folder), ranks, settings
        self.about = {"world_size": ranks.world_size, **(about or {})}
        self.published: int | None = None  # the step of the newest that this process has written
        self._job: _Job | None = None
        self._thread: threading.Thread | None = None
        self._news: queue.SimpleQueue[dict] = queue.SimpleQueue()

    def save(self, step: int, collect: Callable[[], dict[str, object]]) -> None:
        """Take a copy of the state, and write it from a thread while training goes on.

        Args:
            collect: () → {file name: what `torch.save` takes} of this rank; names differ between
                ranks.
        Raises:
            CheckpointError: this save cannot begin, or the one before could not be written.
        """
        began = time.monotonic()
        self.finish()
        partial = self.folder / (_name(step) + PARTIAL)
        self.ranks.run_on_main(self._begin, partial)
        self._job = _Job(step, partial, snapshot(collect()), began)
        self._thread = threading.Thread(target=self._write, args=(self._job,), name="checkpoint")
        self._job.blocked_s = time.monotonic() - began
        self._thread.start()

    def finish(self) -> None:
        """Wait until the save under way is published.

        Raises:
            CheckpointError: on every rank, where one could not write its files.
        """
        job, self._job = self._job, None
        if job is None:
            return
        assert self._thread is not None  # it writes the job
        job.written.wait()
        try:
            self.ranks.raise_first_error(job.error)
            self._thread.join()
            self.ranks.raise_first_error(job.error)  # of rank 0's publication
        except Exception:
            job.cancelled.set()
            self._thread.join()
            self.ranks.barrier()
            if self.ranks.is_main:
                shutil.rmtree(job.partial, ignore_errors=True)
            raise
        self.published = job.step

    def close(self) -> None:
        """Before the directory is given up, whatever has happened: the save under way is published,
        or given up where another rank does not write its files any more."""
        job, self._job = self._job, None
        if job is None:
            return
        assert self._thread is not None  # it writes the job
        self._thread.join(None if self.ranks.world_size == 1 else LAST_WAIT_S)
        job.cancelled.set()
        self._thread.join()

    def news(self) -> list[dict]:
        """Return what was published since the last call (on rank 0): step, seconds that training
        waited, seconds from the beginning to the publication, bytes of all files."""
        return [self._news.get() for _ in range(self._news.qsize())]

    def _begin(self, partial: Path) -> None:
        drop_partial(self.folder)
        with writing(partial):
            partial.mkdir(parents=True)

    def _write(self, job: _Job) -> None:
        try:
            own = {}
            for name, state in job.files.items():
                if job.cancelled.is_set():
                    return
                own[name] = _write_file(job.partial / name, state)
            job.files = {}  # the copy's memory
            write_json(_part(job.partial, self.ranks.rank), {"files": own})
            job.written.set()
            if self.ranks.is_main:
                self._publish(job)
        except Exception as e:
            job.error = e
        finally:
            job.written.set()

    def _publish(self, job: _Job) -> None:
        """Wait for the files of the other ranks, then list them all, rename, drop old ones."""
        parts = [_part(job.partial, rank) for rank in range(self.ranks.world_size)]
        while not all(part.exists() for part in parts):
            if job.cancelled.wait(0.05):
                return
        files: dict[str, tuple[int, str]] = {}  # name → bytes, SHA-256
        for part in parts:
            files |= read_json(part, ("files",))["files"]
            part.unlink()
        total = sum(size for size, _ in files.values())
        manifest = {"step": job.step, **self.about, "files": files}
        write_json(job.partial / MANIFEST, manifest)
        path = job.partial.with_name(_name(job.step))
        with writing(path):
            if path.exists():  # damaged, or of a branch that was left
                _set_aside(path)
            job.partial.rename(path)
            sync(self.folder)
        checksums.trust(path, {name: digest for name, (_, digest) in files.items()})
        self._prune()
        saved = {
            "step": job.step,
            "blocked_s": round(job.blocked_s, 3),
            "seconds": round(time.monotonic() - job.began, 3),
            "bytes": total,
        }
        self._news.put(saved)

    def _prune(self) -> None:
        """Delete whole checkpoints beyond the newest `keep`, except multiples of `keep_every`.

        Damaged checkpoints stay, because somebody may want to rescue them.
        """
        every = self.settings.keep_every
        candidates = [p for p in listed(self.folder) if not every or step_of(p) % every]
        whole = [path for path in candidates if self._is_intact(path)]
        for path in whole[: -self.settings.keep]:
            _set_aside(path)
        drop_partial(self.folder)

    def _is_intact(self, path: Path) -> bool:
        """`verify`, but files that look as they did are not read again."""
        try:
            verify(path, once=True)
        except Exception:  # whatever damage does: the new checkpoint is there already
            return False
        return True


def snapshot(value: Any) -> Any:
    """A copy in host memory of tensors in nested containers; one that occurs twice (tied weights)
    is copied once. What is neither is not copied: it must not change."""
    copies: dict[tuple, torch.Tensor] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            key = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
            if key not in copies or not value.numel():
                copies[key] = value.detach().to("cpu", copy=True)
            return copies[key]
        if isinstance(value, dict):
            new = copy.copy(value)  # also of an OrderedDict, a defaultdict
            new.update({k: copied(v) for k, v in value.items()})
            return new
        if isinstance(value, np.ndarray):
            return value.copy()
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(copied, value))
        if isinstance(value, list | tuple):
            return type(value)(map(copied, value))
        return value

    return copied(value)


def _write_file(path: Path, state) -> list:
    """[bytes, SHA-256] of the file, which is on the disk."""
    try:
        with path.open("wb") as file:  # torch's own writer keeps a full disk's space after an error
            torch.save(state, file)
        sync(path)
    except (OSError, RuntimeError) as e:  # RuntimeError: how torch's writer says it
        free = shutil.disk_usage(path.parent).free
        raise CheckpointError(
            f"checkpoint {path.parent.name.removesuffix(PARTIAL)} cannot be written to"
            f" {path.parent.parent} ({_first_line(e)}; {free / 2**20:,.0f} MiB are free there): the"
            " one before stands"
        ) from None
    return [path.stat().st_size, checksums.sha256(path)]


def _first_line(error: BaseException) -> str:
    return (getattr(error, "strerror", None) or str(error)).strip().partition("\n")[0]


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _part(partial: Path, rank: int) -> Path:
    return partial / f"files-rank{rank:04d}.json"


def _set_aside(path: Path) -> None:
    """Take a checkpoint's name from it at once; `drop_partial` deletes the files."""
    path.rename(path.with_name(f"{path.name}-{time.time_ns()}{PARTIAL}"))


def drop_partial(folder: Path) -> None:
    """Delete what a save or a deletion that was cut short has left."""
    for path in Path(folder).glob(f"step-*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def step_of(path: Path) -> int:
    """The update that a checkpoint's name says."""
    named = NAME.fullmatch(path.name)
    assert named is not None, path
    return int(named[1])


def listed(folder: Path) -> list[Path]:
    """The folders named as checkpoints are, whole or damaged, by update; others are not looked at
    (`step-best`, a copy by hand)."""
    paths = Path(folder).iterdir() if Path(folder).is_dir() else ()
    return sorted((p for p in paths if p.is_dir() and NAME.fullmatch(p.name)), key=step_of)


def verify(path: Path, once: bool = False) -> dict:
    """The manifest of a complete checkpoint.

    Args:
        once: files that look as they did when this process read them are not read again.
    Raises:
        CheckpointError: no such folder, no manifest, or a file missing, cut short or changed.
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
    named = NAME.fullmatch(path.name)
    if not files or (named and manifest["step"] != int(named[1])):
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
    if how := checksums.difference(path, {file.name: digest for file, _, digest in files}, once):
        raise CheckpointError(f"checkpoint {path}: {how}")
    return manifest


def newest(
    folder: Path, say: Callable[[str], None] = print, before: float = math.inf
) -> Path | None:
    """The newest complete checkpoint in a folder of them; says which ones it passed over. None
    where nothing was ever saved.

    Args:
        before: of the checkpoints of fewer updates; None where none of them is complete.
    Raises:
        CheckpointError: something was, and none of it is complete.
    """
    found = listed(folder)
    for path in reversed(found):
        if step_of(path) >= before:
            continue
        try:
            verify(path)
            return path
        except CheckpointError as e:
            say(f"passed over: {e}")
    if found and before == math.inf:
        raise CheckpointError(
            f"none of the {len(found)} checkpoint{'s' * (len(found) > 1)} in {folder} is whole:"
            " bring a good one back, or train anew with --overwrite"
        )
    return None


def to_resume(
    resume: str, folder: Path, say: Callable[[str], None] = print, before: float = math.inf
) -> tuple[Path, dict] | None:
    """The checkpoint that `resume` means, and its manifest; None to start from the beginning.

    Args:
        resume: never, auto (the newest complete one in `folder`), or the folder of one.
        before: under auto, of those of fewer updates.
    Raises:
        CheckpointError: it is not complete; under auto, none of them is.
    """
    if resume == "never":
        return None
    if resume == "auto":
        path = newest(folder, say, before)
        return None if path is None else (path, read_json(path / MANIFEST))
    return Path(resume), verify(Path(resume))


def to_go_back_to(
    folder: Path, last: int | None, say: Callable[[str], None] = print
) -> tuple[Path, dict] | None:
    """The checkpoint that a run goes back to, and its manifest; None: there is none that is whole.
    Where going back did not help, it is the one before, if there is one: the run leaves the branch
    of the later ones, and they are deleted.

    Args:
        last: the update that it went back to, and has saved nothing since; None: it did not.
    """
    older = None if last is None else to_resume("auto", folder, say, before=last)
    if older is not None:
        drop_after(folder, older[1]["step"])
        return older
    try:
        return to_resume("auto", folder, say)
    except CheckpointError:  # none is whole
        return None


def not_finite(held: Mapping[str, Sequence[torch.Tensor]]) -> str:
    """What holds NaN or infinity, such as "NaN or infinity in exp_avg"; "" where nothing does.

    Args:
        held: by what is said of them, such as "the weights".
    """
    spoilt = [what for what, tensors in held.items() if not all(map(_is_finite, tensors))]
    return f"NaN or infinity in {' and '.join(spoilt)}" if spoilt else ""


def _is_finite(t: torch.Tensor) -> bool:
    """Look at the least and the greatest number, which is 30 times faster than `isfinite` of all:
    NaN is both."""
    return not t.numel() or all(map(math.isfinite, map(float, torch.aminmax(t.detach()))))


def drop_after(folder: Path, step: int) -> None:
    """Delete the checkpoints after `step`: a run resumed there has left that branch."""
    for path in listed(folder):
        if step_of(path) > step:
            _set_aside(path)
    drop_partial(folder)


def read_state(
    path: Path, classes: Sequence[type] = (), device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """A file of a verified checkpoint: tensors, numbers, text, and objects of `classes`. Nothing in
    it is run: that a manifest lists a file does not say who wrote it.

    Raises:
        CheckpointError: it holds something else, or cannot be read.
    """
    try:
        with torch.serialization.safe_globals(list(classes)):
            return torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as e:
        named = re.search(r"GLOBAL (\S+)", str(e))
        what = named[1] if named else "something"
        raise CheckpointError(
            f"{path} is not read: it holds {what}, which no training of ours writes, and which"
            " could run code: take a checkpoint from whoever trained it"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError) as e:
        raise CheckpointError(f"{path} cannot be read: {_first_line(e)}") from None
