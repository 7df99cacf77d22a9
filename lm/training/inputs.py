"""Configuration of a run, checked before PyTorch and DeepSpeed are imported."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lm.common.errors import ConfigError
from lm.config import load as config
from lm.config.schema import Config
from lm.data.sources import traces
from lm.data.sources.errors import DataError
from lm.data.sources.listing import ENDINGS, source_files
from lm.data.sources.mixture import configs_by_source, name_source_in_errors
from lm.runs.path_checks import check_resume, looks_local
from lm.training.upcycle import SourceError


def load_run_config(
    path: Path | str, overrides: Sequence[str], job_index: int | None = None
) -> Config:
    """Return the configuration of a run, after checking that all its input paths exist.

    Args:
        path: The YAML of a run or a sweep.
        overrides: `key=value` for keys of the YAML.
        job_index: Index of the point of the sweep; None for a YAML without a sweep.

    Raises:
        ConfigError: If the configuration is invalid, or is a sweep and `job_index` is None.
        UserError: If an input file or folder does not exist.
    """
    cfg = config.load(path, overrides, job_index)
    config.refuse_sweep(cfg, path)
    check_inputs(cfg)
    return cfg


def check_inputs(cfg: Config, is_new: bool = False) -> None:
    """Refuse a configuration that names a missing file or folder.

    A run that continues does not read `init_from`. It has its own tokenizer and its own record of
    each corpus, so their sources may be gone.

    Args:
        cfg: Configuration of the run.
        is_new: True if the run starts from scratch even if its directory has checkpoints.

    Raises:
        PathError: If `resume` names no folder.
        SourceError: If `init_from` names no folder.
        ConfigError: If `engine.deepspeed` names no file.
        DataError: If `tokenizer.name`, `data.path` or `data.traces` names nothing that exists.
    """
    check_resume(cfg.resume)
    run_dir = Path(cfg.run_dir)
    # os.path.isdir, unlike Path.exists, raises no error for a path that is too long.
    continues = not is_new and os.path.isdir(run_dir / "checkpoints")
    if cfg.init_from is not None and not continues:
        check_source_folder(Path(cfg.init_from.path).expanduser())
    deepspeed = cfg.engine.deepspeed
    if isinstance(deepspeed, str) and not Path(deepspeed).is_file():
        raise ConfigError(f"engine.deepspeed: cannot read {deepspeed} as JSON: it is no file")
    if not (continues and (run_dir / "tokenizer").is_dir()):
        check_tokenizer(cfg)
    check_data(cfg, run_dir / "data" if continues else None)


def check_source_folder(path: Path) -> None:
    """Raise SourceError if `init_from` names no folder."""
    if not path.is_dir():
        raise SourceError(
            f"{path} is no folder: init_from must name a run, a checkpoint, an export, or a Mamba"
            " in transformers' format (`hf download NAME --local-dir FOLDER` copies one)"
        )


def check_tokenizer(cfg: Config) -> None:
    """Raise DataError if `tokenizer.name` is the path of a missing folder."""
    name = cfg.tokenizer.name
    if "/" in name and not Path(name).expanduser().is_dir() and looks_local(name):
        raise DataError(f"tokenizer.name {name}: no such folder")


def check_data(cfg: Config, records: Path | None = None) -> None:
    """Raise DataError if `data.path` names no file, or `data.traces` no task.

    Args:
        cfg: Configuration of the run.
        records: Folder with a record of each corpus that the run has used; None for a new run.
    """
    for source, part in configs_by_source(cfg).items():
        has_corpus = records is not None and (records / source / "corpus.json").is_file()
        with name_source_in_errors(source):
            if part.data.path is not None and part.data.source in ENDINGS and not has_corpus:
                source_files(part.data)
            if part.data.source == "traces":
                traces.check(part.data.traces)
