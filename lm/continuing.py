"""What a checkpoint must be so that a run can go on from it."""

from __future__ import annotations

from pathlib import Path

from lm.checkpoint import CheckpointError
from lm.config import Config, load
from lm.deepspeed_json import layout
from lm.optim import signature
from lm.ranks import Ranks
from lm.run_dir import RunDir


def identity(cfg: Config, world_size: int) -> dict:
    """What a checkpoint's manifest says of the training that it is of."""
    warmup = cfg.train.batch_warmup
    return {
        **layout(cfg, world_size),
        "optimizer": signature(cfg.optim),
        "global_batch_size": cfg.train.sequences(world_size),
        "batch_warmup": warmup and warmup.model_dump(),
    }


def check_batch(path: Path, manifest: dict, now: dict, run: RunDir, ranks: Ranks) -> None:
    """Raises CheckpointError where an update would be of another size.

    Args:
        now: `identity` of this run.
    """
    grown, growing = manifest.get("batch_warmup"), now["batch_warmup"]
    if grown != growing:
        was, this = ("null" if w is None else w for w in (grown, growing))
        raise CheckpointError(
            f"{path} was trained with train.batch_warmup={was}, this run has {this}: the tokens"
            " that it has seen are counted by it, so set the same (it may be over)"
        )
    now = now["global_batch_size"]
    before = manifest.get("global_batch_size")
    if before is None:  # of a run of 0.1, whose config says it for one rank
        before = ranks.first(_batch_of_0_1, path, manifest["world_size"], run)
    if before not in (None, now):
        raise CheckpointError(
            f"{path} was trained with {before} sequences an update, this run has {now}: set"
            f" train.global_batch_size={before} (and leave out train.grad_accum_steps)"
        )


def _batch_of_0_1(path: Path, world_size: int, run: RunDir) -> int:
    own = path.resolve().parent == run.checkpoints.resolve()
    previous = run.previous if own else None
    config = load(RunDir(path.parent.parent).config) if previous is None else previous
    assert isinstance(config, Config)  # synthetic runs have no such checkpoints
    return config.train.sequences(world_size)


def check_optimizer(path: Path, manifest: dict, now: dict) -> None:
    """Raises CheckpointError where the optimizer's state is of another than this run's.

    Args:
        now: `lm.optim.signature` of this run. A manifest from before there was one is of AdamW
            with one learning rate.
    """
    before = {key: value for key, value in manifest.get("optimizer", {}).items() if value}
    now = {key: value for key, value in now.items() if value}
    if before != now:
        was, this = (
            ", ".join(f"optim.{key}={value}" for key, value in each.items()) or "none of its own"
            for each in (before, now)
        )
        raise CheckpointError(
            f"{path} was trained with another optimizer ({was}; this run: {this}), whose state"
            " cannot go on: set the same, or train anew"
        )
