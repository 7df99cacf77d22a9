"""Paths of a configuration, refused before PyTorch and DeepSpeed are imported."""

from __future__ import annotations

from pathlib import Path

from lm.common.errors import ConfigError
from lm.config.schema import Config
from lm.data.sources import traces
from lm.data.sources.errors import DataError
from lm.data.sources.listing import ENDINGS, source_files
from lm.data.sources.mixture import name_source_in_errors, parts
from lm.runs.places import check_resume, looks_local
from lm.training.upcycle import SourceError


def check_inputs(cfg: Config) -> None:
    """Refuse a configuration that names a file or a folder which is not there.

    Raises:
        PlaceError: No folder at `resume`.
        SourceError: No folder at `init_from`.
        ConfigError: No file at `engine.deepspeed`.
        DataError: As `check_tokenizer` and `check_data`.
    """
    check_resume(cfg.resume)
    # A run that continues reads nothing of init_from.
    if cfg.init_from is not None and not Path(cfg.run_dir, "checkpoints").exists():
        check_source_folder(Path(cfg.init_from.path).expanduser())
    own = cfg.engine.deepspeed
    if isinstance(own, str) and not Path(own).is_file():
        raise ConfigError(f"engine.deepspeed: cannot read {own} as JSON: it is no file")
    check_tokenizer(cfg)
    check_data(cfg)


def check_source_folder(path: Path) -> None:
    """Refuse a path of `init_from` that is no folder.

    Raises:
        SourceError: If it is none.
    """
    if not path.is_dir():
        raise SourceError(
            f"{path} is no folder: init_from must name a run, a checkpoint, an export, or a Mamba"
            " in transformers' format (`hf download NAME --local-dir FOLDER` copies one)"
        )


def check_tokenizer(cfg: Config) -> None:
    """Refuse a `tokenizer.name` that is a path, and leads to no folder.

    Raises:
        DataError: There is no such folder.
    """
    name = cfg.tokenizer.name
    if "/" in name and not Path(name).expanduser().is_dir() and looks_local(name):
        raise DataError(f"tokenizer.name {name}: no such folder")


def check_data(cfg: Config) -> None:
    """Refuse sources whose text is not there.

    Raises:
        DataError: No file at `data.path`, or no task of `data.traces`.
    """
    for source, part in parts(cfg).items():
        with name_source_in_errors(source):
            if part.data.path is not None and part.data.source in ENDINGS:
                source_files(part.data)
            if part.data.source == "traces":
                traces.check(part.data.traces)
