"""Training from Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lm.common.errors import require


def train(config: Path | str, overrides: Sequence[str] = (), *, overwrite: bool = False) -> Path:
    """Train the run that a YAML describes, or continue it, as `fprnn train` does.

    Args:
        config: Path of the YAML.
        overrides: Keys of the YAML with their values, such as `optim.lr=1e-3` or `resume=auto`
            (docs/config.md).
        overwrite: Delete an earlier run of this name first.

    Returns:
        The run directory, which `load` reads.

    Raises:
        UserError: If the configuration, the data or the training fails; the subclasses are those
            of `lm.training.train.train`.
    """
    for package in ("pydantic", "yaml", "deepspeed"):
        require(package, "fprnn.train")

    from lm.training.inputs import load_run_config
    from lm.training.train import train as train_run

    return train_run(load_run_config(config, overrides), overwrite=overwrite)
