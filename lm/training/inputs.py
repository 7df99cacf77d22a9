"""Checks of a configuration's paths before PyTorch and DeepSpeed are imported."""

from __future__ import annotations

from pathlib import Path

from lm.common.errors import ConfigError
from lm.config.schema import Config
from lm.data.sources import traces
from lm.data.sources.errors import DataError
from lm.data.sources.listing import ENDINGS, source_files
from lm.data.sources.mixture import configs_by_source, name_source_in_errors
from lm.runs.path_checks import check_resume, looks_local
from lm.training.upcycle import SourceError


def check_inputs(cfg: Config) -> None:
    """Refuse a configuration that names a missing file or folder.

    Raises:
        PathError: If `resume` names no folder.
        SourceError: If `init_from` names no folder.
        ConfigError: If `engine.deepspeed` names no file.
        DataError: If `tokenizer.name`, `data.path` or `data.traces` names nothing that exists.
    """
    check_resume(cfg.resume)
    # A run that continues does not read init_from.
    if cfg.init_from is not None and not Path(cfg.run_dir, "checkpoints").exists():
        check_source_folder(Path(cfg.init_from.path).expanduser())
    deepspeed = cfg.engine.deepspeed
    if isinstance(deepspeed, str) and not Path(deepspeed).is_file():
        raise ConfigError(f"engine.deepspeed: cannot read {deepspeed} as JSON: it is no file")
    check_tokenizer(cfg)
    check_data(cfg)


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


def check_data(cfg: Config) -> None:
    """Raise DataError if `data.path` names no file, or `data.traces` no task."""
    for source, part in configs_by_source(cfg).items():
        with name_source_in_errors(source):
            if part.data.path is not None and part.data.source in ENDINGS:
                source_files(part.data)
            if part.data.source == "traces":
                traces.check(part.data.traces)
