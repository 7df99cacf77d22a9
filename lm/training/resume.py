"""Checks of a checkpoint and its run before the run continues.

`path` and `manifest` are the folder and the manifest of the checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from lm.config.schema import Config
from lm.data.corpus.prepare import corpus_record_folder, read_recorded_checksums
from lm.data.sources.mixture import configs_by_source
from lm.model.checksums import SUMS, describe_mismatch, sha256
from lm.runs.checkpoint import CheckpointError
from lm.runs.run_dir import RunDir, RunDirError, check_checkpoint_config
from lm.training.deepspeed_json import layout
from lm.training.optim import optimizer_signature


def training_manifest(cfg: Config, world_size: int) -> dict:
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
    corpora = {name: read_recorded_checksums(run.path, name) for name in configs_by_source(cfg)}
    return {
        "tokenizer": {file.name: sha256(file) for file in tokenizer},
        "corpora": corpora,
        "config": cfg.model_dump(mode="json"),
    }


def check_fingerprint(path: Path, manifest: dict, run: RunDir, cfg: Config) -> None:
    """Refuse a run whose files have changed since a checkpoint of it was written.

    Checkpoints of version 0.1 have no fingerprint and are not compared.

    Raises:
        RunDirError: If the config, the tokenizer or a corpus has changed.
    """
    check_checkpoint_config(path, manifest, run, cfg)
    check_tokenizer(path, manifest, run)
    check_corpora(path, manifest, run, cfg)


def check_tokenizer(path: Path, manifest: dict, run: RunDir) -> None:
    """Raise RunDirError if the run's tokenizer differs from its checkpoint's."""
    if changed_file := describe_mismatch(run.tokenizer, manifest.get("tokenizer", {})):
        raise RunDirError(
            f"{run.tokenizer / changed_file}: {path} was trained with another tokenizer; restore it"
        )


def check_corpora(path: Path, manifest: dict, run: RunDir, cfg: Config) -> None:
    """Raise RunDirError if a corpus of the run differs from its checkpoint's."""
    for name, saved in manifest.get("corpora", {}).items():
        current = read_recorded_checksums(run.path, name) if name in configs_by_source(cfg) else {}
        if saved and current and saved != current:
            raise RunDirError(
                f"{corpus_record_folder(run.path, name)} holds another corpus than {path} was"
                " trained on (the sha256 of its files differ): restore the text, or train from"
                " scratch under another `name`"
            )


def check_batch(path: Path, manifest: dict, current: dict) -> None:
    """Raise CheckpointError if the global batch size differs from `current`, this run's."""
    saved_size, size = manifest["global_batch_size"], current["global_batch_size"]
    if saved_size != size:
        raise CheckpointError(
            f"{path} was trained with {saved_size} sequences per update, this run has {size}: set"
            f" train.global_batch_size={saved_size} (and remove train.grad_accum_steps)"
        )


def check_optimizer(path: Path, manifest: dict, current: dict) -> None:
    """Raise CheckpointError if the optimizer's settings differ from `current`.

    `current` is this run's `optimizer_signature`. An empty setting equals a missing one.
    """
    saved = {key: value for key, value in manifest["optimizer"].items() if value}
    settings = {key: value for key, value in current.items() if value}
    if saved != settings:
        raise CheckpointError(
            f"{path} was trained with another optimizer ({_format_settings(saved)}; this run:"
            f" {_format_settings(settings)}): set the same, or train from scratch"
        )


def _format_settings(settings: dict) -> str:
    return ", ".join(f"optim.{k}={v}" for k, v in settings.items()) or "default settings"
