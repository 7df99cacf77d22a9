"""Checks of a checkpoint and its run before the run continues."""

from __future__ import annotations

from pathlib import Path

from lm.config.schema import Config
from lm.data.corpus.prepare import checksums, place_in_run
from lm.data.sources.mixture import parts
from lm.model.checksums import SUMS, describe_mismatch, sha256
from lm.runs.checkpoint import CheckpointError
from lm.runs.run_dir import RunDir, RunDirError, check_config
from lm.training.deepspeed_json import layout
from lm.training.optim import optimizer_signature


def identity(cfg: Config, world_size: int) -> dict:
    """Return the entries of a manifest that describe the training: layout, optimizer, batch."""
    return {
        **layout(cfg, world_size),
        "optimizer": optimizer_signature(cfg.optim),
        "global_batch_size": cfg.train.sequences(world_size),
    }


def run_fingerprint(cfg: Config, run: RunDir) -> dict:
    """Return the entries of a manifest that identify the run.

    Returns:
        {"tokenizer": checksums of its files, "corpora": checksums of each corpus, "config"}.
    """
    tokenizer = [file for file in sorted(run.tokenizer.iterdir()) if file.name != SUMS]
    return {
        "tokenizer": {file.name: sha256(file) for file in tokenizer},
        "corpora": {name: checksums(run.path, name) for name in parts(cfg)},
        "config": cfg.model_dump(mode="json"),
    }


def check_fingerprint(path: Path, manifest: dict, run: RunDir, cfg: Config) -> None:
    """Refuse a run whose files have changed since one of its checkpoints was written.

    Checkpoints of version 0.1 have no fingerprint and are not compared.

    Args:
        path: Folder of the checkpoint.
        manifest: Its manifest.
        run: The run.
        cfg: Config of the run now.

    Raises:
        RunDirError: If its config, its tokenizer or one of its corpora has changed.
    """
    check_config(path, manifest, run, cfg)
    check_tokenizer(path, manifest, run)
    check_corpora(path, manifest, run, cfg)


def check_tokenizer(path: Path, manifest: dict, run: RunDir) -> None:
    """Refuse a run whose tokenizer differs from its checkpoint's.

    Raises:
        RunDirError: If a file differs.
    """
    if change := describe_mismatch(run.tokenizer, manifest.get("tokenizer", {})):
        raise RunDirError(
            f"{run.tokenizer / change}: {path} was trained with another tokenizer; restore it"
        )


def check_corpora(path: Path, manifest: dict, run: RunDir, cfg: Config) -> None:
    """Refuse a run whose corpora differ from its checkpoint's.

    Raises:
        RunDirError: If the checksums of a corpus differ.
    """
    for name, saved in manifest.get("corpora", {}).items():
        current = checksums(run.path, name) if name in parts(cfg) else {}
        if saved and current and saved != current:
            raise RunDirError(
                f"{place_in_run(run.path, name)} holds another corpus than {path} was trained on"
                " (the sha256 of its files differ): restore the text, or train from scratch under"
                " another `name`"
            )


def check_batch(path: Path, manifest: dict, current: dict) -> None:
    """Refuse a checkpoint with another global batch size.

    Args:
        path: Folder of the checkpoint.
        manifest: Its manifest.
        current: `identity` of this run.

    Raises:
        CheckpointError: If the sizes differ.
    """
    saved, sequences = manifest["global_batch_size"], current["global_batch_size"]
    if saved != sequences:
        raise CheckpointError(
            f"{path} was trained with {saved} sequences per update, this run has {sequences}: set"
            f" train.global_batch_size={saved} (and remove train.grad_accum_steps)"
        )


def check_optimizer(path: Path, manifest: dict, current: dict) -> None:
    """Refuse a checkpoint whose optimizer state does not fit this run's optimizer.

    Args:
        path: Folder of the checkpoint.
        manifest: Its manifest.
        current: `optimizer_signature` of this run.

    Raises:
        CheckpointError: If the settings of the optimizers differ.
    """
    settings = [
        {key: value for key, value in signature.items() if value}
        for signature in (manifest["optimizer"], current)
    ]
    if settings[0] != settings[1]:
        texts = [
            ", ".join(f"optim.{key}={value}" for key, value in entries.items())
            or "default settings"
            for entries in settings
        ]
        raise CheckpointError(
            f"{path} was trained with another optimizer ({texts[0]}; this run: {texts[1]}): set the"
            " same, or train from scratch"
        )
