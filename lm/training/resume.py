"""What a checkpoint must be so that a run can go on from it, and the run so that it is its own."""

from __future__ import annotations

from pathlib import Path

from lm.config.schema import Config
from lm.data.corpus.prepare import checksums, place_in_run
from lm.data.sources.mixture import parts
from lm.model.checksums import SUMS, difference, sha256
from lm.runs.checkpoint import CheckpointError
from lm.runs.run_dir import RunDir, RunDirError, check_config
from lm.training.deepspeed_json import layout
from lm.training.optim import optimizer_signature


def identity(cfg: Config, world_size: int) -> dict:
    """What a checkpoint's manifest says of the training that it is of."""
    return {
        **layout(cfg, world_size),
        "optimizer": optimizer_signature(cfg.optim),
        "global_batch_size": cfg.train.sequences(world_size),
    }


def run_fingerprint(cfg: Config, run: RunDir) -> dict:
    """What a checkpoint's manifest says of the run that it is made in, beside its own files: the
    checksums of its tokenizer and of its corpora, and the config."""
    tokenizer = [file for file in sorted(run.tokenizer.iterdir()) if file.name != SUMS]
    return {
        "tokenizer": {file.name: sha256(file) for file in tokenizer},
        "corpora": {name: checksums(run.path, name) for name in parts(cfg)},
        "config": cfg.model_dump(mode="json"),
    }


def check_fingerprint(path: Path, manifest: dict, run: RunDir, cfg: Config) -> None:
    """Refuse a run that is no longer what one of its checkpoints is made of.

    Checkpoints of version 0.1 hold neither config nor checksums of tokenizer and corpora.

    Args:
        path: of the checkpoint. cfg: as the run has it now.
    Raises:
        RunDirError: its config, its tokenizer or one of its corpora is another.
    """
    check_config(path, manifest, run, cfg)
    check_tokenizer(path, manifest, run)
    check_corpora(path, manifest, run, cfg)


def check_tokenizer(path: Path, manifest: dict, run: RunDir) -> None:
    """Raises RunDirError where a run has another tokenizer than one of its checkpoints."""
    if how := difference(run.tokenizer, manifest.get("tokenizer", {})):
        raise RunDirError(
            f"{run.tokenizer / how}: {path} was trained with another tokenizer; bring it back"
        )


def check_corpora(path: Path, manifest: dict, run: RunDir, cfg: Config) -> None:
    """Raises RunDirError where a run has another corpus than one of its checkpoints."""
    for name, sums in manifest.get("corpora", {}).items():
        now = checksums(run.path, name) if name in parts(cfg) else {}
        if sums and now and sums != now:
            raise RunDirError(
                f"{place_in_run(run.path, name)} is of another corpus than {path} was trained on"
                " (the sha256 of its files differ): bring the text back as it was, or train anew"
                " under another `name`"
            )


def check_batch(path: Path, manifest: dict, now: dict) -> None:
    """Raises CheckpointError where an update would be of another size.

    Args:
        now: `identity` of this run.
    """
    before, sequences = manifest["global_batch_size"], now["global_batch_size"]
    if before != sequences:
        raise CheckpointError(
            f"{path} was trained with {before} sequences an update, this run has {sequences}: set"
            f" train.global_batch_size={before} (and leave out train.grad_accum_steps)"
        )


def check_optimizer(path: Path, manifest: dict, now: dict) -> None:
    """Raises CheckpointError where the optimizer's state is of another than this run's.

    Args:
        now: `optim.optimizer_signature` of this run.
    """
    before = {key: value for key, value in manifest["optimizer"].items() if value}
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
