"""Save, verify, find the newest good one, resume.

A checkpoint is a folder `RUN/checkpoints/step-NNNNNN` that DeepSpeed and each rank's loader have
written into; `manifest.json` lists every file with size and SHA-256 and is written last, so a
folder without it, or whose files differ from it, is incomplete and never loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import torch

from lm.config import Run, build, load_tree
from lm.engine import Engine, consolidate_zero
from lm.errors import UserError
from lm.outputs import check_folder, writing
from lm.resuming import Resume, resume_rule

MANIFEST = "manifest.json"


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be used; the message says which file and why."""


def write_json(path: Path, value) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of it."""
    tmp = path.with_name(path.name + ".tmp")
    with writing(path):
        tmp.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(tmp, path)


def _digest(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def verify(path: Path) -> dict:
    """The manifest of a complete checkpoint.

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
    manifest = read_json(path / MANIFEST, ("step", "world_size", "zero_stage", "files"))
    for name, (size, digest) in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path} is incomplete: {name} is missing")
        if file.stat().st_size != size:
            raise CheckpointError(
                f"checkpoint {path}: {name} has {file.stat().st_size} bytes, not {size}"
            )
        if _digest(file) != digest:
            raise CheckpointError(f"checkpoint {path}: {name} is damaged (its SHA-256 differs)")
    return manifest


def read_json(path: Path, keys: tuple[str, ...]) -> dict:
    """What `write_json` has written: a mapping with (at least) these keys.

    Raises:
        CheckpointError: it is something else now.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as e:  # JSONDecodeError and UnicodeDecodeError
        raise CheckpointError(f"{path} is damaged: it is not JSON ({e})") from None
    if not isinstance(value, dict) or not set(keys) <= value.keys():
        raise CheckpointError(f"{path} is damaged: it must hold {', '.join(keys)}")
    return value


def newest(run_dir: Path, warn=print) -> Path | None:
    """The newest complete checkpoint of a run, or None; says which ones it passed over."""
    for path in sorted((Path(run_dir) / "checkpoints").glob("step-*"), reverse=True):
        try:
            verify(path)
            return path
        except CheckpointError as e:
            warn(f"passed over: {e}")
    return None


def save(engine: Engine, run_dir: Path, step: int, loader_state: dict, keep: int) -> Path:
    """Write checkpoint `step`, then drop all but the newest `keep` (called on every rank)."""
    ranks, folder = engine.ranks, Path(run_dir) / "checkpoints"
    path = folder / f"step-{step:06d}"
    if ranks.is_main and path.exists():
        shutil.rmtree(path)
    ranks.barrier()
    engine.deepspeed.save_checkpoint(str(folder), tag=path.name, client_state={"step": step})
    state = {**loader_state, "rng": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda_rng"] = torch.cuda.get_rng_state()
    torch.save(state, path / f"loader-rank{ranks.rank:04d}.pt")
    ranks.barrier()

    def finish():
        files = sorted(f for f in path.rglob("*") if f.is_file() and f.name != MANIFEST)
        write_json(
            path / MANIFEST,
            {
                "step": step,
                "world_size": ranks.world_size,
                "zero_stage": engine.zero_stage,
                "files": {str(f.relative_to(path)): [f.stat().st_size, _digest(f)] for f in files},
            },
        )
        complete = [p for p in sorted(folder.glob("step-*")) if (p / MANIFEST).is_file()]
        for old in complete[:-keep]:
            shutil.rmtree(old)

    ranks.first(finish)
    return path


def load(engine: Engine, path: Path, verified: dict) -> tuple[int, dict]:
    """Put weights, optimizer and schedule of a verified checkpoint into the engine.

    Returns:
        the step it was written at and this rank's loader state.
    Raises:
        CheckpointError: it was written by another number of ranks or another ZeRO stage.
    """
    path, ranks = Path(path), engine.ranks
    for what, now in [("world_size", ranks.world_size), ("zero_stage", engine.zero_stage)]:
        if verified[what] != now:
            raise CheckpointError(
                f"checkpoint {path} was written with {what} {verified[what]}, this run has {now}:"
                f" resume it with {what} {verified[what]}"
            )
    loaded, _ = engine.deepspeed.load_checkpoint(str(path.parent), tag=path.name)
    if loaded is None:
        raise CheckpointError(f"DeepSpeed could not load {path}")
    state = torch.load(path / f"loader-rank{ranks.rank:04d}.pt", weights_only=False)
    torch.set_rng_state(state["rng"])
    if "cuda_rng" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda_rng"])
    return verified["step"], state


def consolidated(path: Path) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint in fp32 under the model's own names, whatever the ZeRO stage.

    Raises:
        CheckpointError: the checkpoint is incomplete.
    """
    manifest = verify(path)
    path = Path(path)
    if manifest["zero_stage"] == 0:
        file = path / "mp_rank_00_model_states.pt"
        return torch.load(file, map_location="cpu", weights_only=False)["module"]
    return consolidate_zero(path.parent, path.name)


def comparable(cfg: Run) -> dict:
    """A configuration by dotted keys, its model and solver sections `settled`."""
    tree = cfg.model_dump(mode="json")
    return _flat({**tree, "model": settled(tree["model"]), "solver": cfg.solver.settled()})


def settled(model: dict) -> dict:
    """A model section with each "auto" of the mixer's bounds as what it is: two that are the same
    model are equal, whether they were written before there was an `auto` or after."""
    from lm.model.configuration_fprnn import mixer_bounds

    fields = {"block": "fp_mamba1", "mixer": "householder"}
    fields |= {"kronecker_norm": "auto", "contractive": "auto"}
    norm, kappa = mixer_bounds(*(model.get(name, auto) for name, auto in fields.items()))
    return {**model, "kronecker_norm": norm, "contractive": kappa}


def _flat(tree: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in tree.items():
        nested = isinstance(value, dict)
        flat.update(_flat(value, f"{prefix}{key}.") if nested else {prefix + key: value})
    return flat


def _started(run_dir: Path) -> bool:
    """Whether anything was trained there: a checkpoint, or a logged step."""
    metrics = run_dir / "metrics.jsonl"
    logged = metrics.exists() and metrics.stat().st_size > 0
    return logged or any((run_dir / "checkpoints").glob("step-*"))


def claim(cfg: Run, overwrite: bool, say=print) -> None:
    """Make the run directory ours, new or the same run continued, and write its config.yaml. What a
    continued run may change is said by the fields of the schema (`lm.resuming`).

    A directory whose run never got to its first step (a start that failed) is made anew.

    Raises:
        CheckpointError: it already holds a run and neither resume nor --overwrite was asked for;
            it holds something else; the run to be continued is another one.
        OutputError: it cannot be written.
    """
    run_dir = cfg.run_dir
    check_folder(run_dir)
    saved = run_dir / "config.yaml"
    if not saved.exists() and run_dir.exists() and any(run_dir.iterdir()):
        raise CheckpointError(f"{run_dir} is not empty and holds no run: choose another `name`")
    if saved.exists() and not overwrite and _started(run_dir):
        if cfg.resume == "never":
            raise CheckpointError(
                f"{run_dir} already holds a run: continue it with resume=auto, choose another"
                " `name`, or delete it with --overwrite"
            )
        _continued(cfg, saved, say)
    elif saved.exists():
        shutil.rmtree(run_dir)
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    tmp = saved.with_name("config.yaml.tmp")
    tmp.write_text(cfg.to_yaml(), encoding="utf-8")
    os.replace(tmp, saved)


def _continued(cfg: Run, saved: Path, say) -> None:
    """Refuse what a continued run may not change, and say what changes its training.

    Args:
        saved: the config.yaml that it was trained with so far.
    Raises:
        CheckpointError: it is a run of another config.
    """
    # Through the schema: a key that is newer than the run has its default there.
    was = build(load_tree(saved), str(saved), type(cfg))
    old, new = (comparable(c) for c in (was, cfg))
    changed = {k: (old.get(k), new.get(k)) for k in sorted(old.keys() | new.keys())
               if old.get(k) != new.get(k)}  # fmt: skip
    said = {Resume.FIXED: [], Resume.NOTED: [], Resume.FREE: []}
    for key, (before, now) in changed.items():
        if key.startswith("solver.") and cfg.model.name != "fprnn":
            continue  # a baseline has none
        said[resume_rule(type(cfg), key)].append(f"{key} was {before!r}, is {now!r}")
    if other := said[Resume.FIXED]:
        raise CheckpointError(
            f"{saved.parent} holds a run of another config ({'; '.join(other)}): choose another"
            " `name`, or delete it with --overwrite"
        )
    if noted := said[Resume.NOTED]:
        say(f"note: {'; '.join(noted)}: training goes on with what it is now")
    if "train.steps" in changed:
        before, now = changed["train.steps"]
        say(f"note: train.steps was {before}, is {now}: the schedule now ends at {now}")


def check_resume(resume: str) -> None:
    """Raises CheckpointError unless `resume` is never, auto or the folder of a checkpoint."""
    if resume not in ("never", "auto") and not Path(resume).is_dir():
        raise CheckpointError(
            f"`resume` is {resume!r}: it must be never, auto or the folder of a checkpoint"
            " (RUN/checkpoints/step-NNNNNN), and there is no such folder"
        )


def drop_after(run_dir: Path, step: int) -> None:
    """Delete the checkpoints after `step`: a run resumed there has left that branch."""
    for path in (Path(run_dir) / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
