"""Configuration of a run, for `fprnn train` and `fprnn plan`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lm.config.schema import Config


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
    from lm.config import load as config
    from lm.training.inputs import check_inputs

    cfg = config.load(path, overrides, job_index)
    config.refuse_sweep(cfg, path)
    check_inputs(cfg)
    return cfg
