"""What is refused before a training reads or writes anything, and what it will run on."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import NamedTuple

import torch

import lm
from lm.common.errors import ConfigError, require
from lm.common.ranks import Ranks
from lm.config.schema import Config, check_updates
from lm.data.sources.mixture import parts
from lm.kernels import OPERATIONS, choose_backends, describe_backends, requested_backend
from lm.training import init_from
from lm.training.build import check_section
from lm.training.deepspeed_json import check_device, deepspeed_config
from lm.training.inputs import check_inputs
from lm.training.optim import groups

MOST_ON_CPU = 20e6  # parameters, beside the embedding
SSD_LAYERS = {"mamba2", "mamba3", "fp_mamba2"}  # kinds whose scan is Mamba-2's
SSD_OPERATIONS = {"ssd_scan", "mamba2_scan"}


def kernel_operations(model: torch.nn.Module) -> tuple[str, ...]:
    """List the operations of `lm.kernels` that a model's layers may use.

    mamba-ssm's scan of Mamba-2 tries about 200 variants of its kernels at every start, so that only
    models with such layers load it.
    """
    kinds = {layer.kind for layer in model.config.layer_list()}
    unused = set() if kinds & SSD_LAYERS else SSD_OPERATIONS
    return tuple(operation for operation in OPERATIONS if operation not in unused)


def environment(ranks: Ranks, model: torch.nn.Module) -> dict:
    """What the run ran on: versions and devices, and which accelerators were missing."""
    from importlib.metadata import version

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "fprnn": lm.__version__,
        "commit": commit() if ranks.is_main else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "deepspeed": version("deepspeed"),
        "device": gpu or f"CPU, {torch.get_num_threads()} threads",
        "world_size": ranks.world_size,
        "kernels": describe_backends(_device(), kernel_operations(model)),
    }


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_same_kernels(ranks: Ranks, model: torch.nn.Module) -> None:
    """Refuse ranks with other kernels than the first rank.

    All ranks would wait for the slower kernels, and a rank's results would depend on its host.

    Raises:
        ConfigError: On every rank, if one differs.
    """
    asked_for = _device(), kernel_operations(model)
    # On all ranks at once: it may take minutes, and may fail on one of them.
    ranks.run_on_all(choose_backends, *asked_for)
    first = ranks.run_on_main(choose_backends, *asked_for)

    def check():
        if choose_backends(*asked_for) != first:
            raise ConfigError(
                f"rank {ranks.rank} on {platform.node()} would compute with other kernels than rank"
                f" 0: it has {describe_backends(*asked_for)}. Make their hosts alike (`fprnn"
                " doctor` says what is missing), or give all the same FPRNN_KERNELS, such as plain"
            )

    ranks.run_on_all(check)


def commit() -> str | None:
    """Return the git commit of this package's checkout, with a + if tracked files were changed.

    It is None where the package is no checkout, or git is not there.
    """
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--exclude=*", "--abbrev=40"]
    try:
        done = subprocess.run(
            [*command, "--dirty=+"], capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


class Checked(NamedTuple):
    """What has been made of a configuration that was found good."""

    model: torch.nn.Module  # on the meta device, for a vocabulary of 8
    deepspeed: dict  # DeepSpeed's JSON


def check_config(cfg: Config, world_size: int) -> Checked:
    """Refuse what cannot be trained, whatever is installed here; for a dry run as well.

    Raises:
        ConfigError: a warm-up that cannot be, sizes that do not go together, a DeepSpeed JSON that
            cannot be used, learning rates of parameters that are not there.
        PlaceError, SourceError, DataError: as `check_inputs`. LoadError: a damaged `init_from`.
        BackendError: FPRNN_KERNELS names nothing that we have.
    """
    requested_backend()
    check_updates(cfg)
    config = deepspeed_config(cfg, world_size)
    model = check_section(cfg.model, cfg.solver, cfg.data.seq_len)
    groups(model, cfg.optim)
    init_from.check(cfg, model)
    check_inputs(cfg)
    return Checked(model, config)


def check_gpu(model: torch.nn.Module) -> None:
    """Refuse to train a large model where PyTorch finds no GPU.

    An empty CUDA_VISIBLE_DEVICES hides the GPUs on purpose: then the CPU trains any model.

    Args:
        model: as of `check_config`; its embedding, which costs no time, is hardly there.

    Raises:
        ConfigError: No GPU is found, and the model is larger than MOST_ON_CPU.
    """
    if torch.cuda.is_available() or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return
    size = sum(p.numel() for p in model.parameters())
    if size > MOST_ON_CPU:
        raise ConfigError(
            f"PyTorch finds no GPU here, and the model has {size / 1e6:.0f} M parameters beside its"
            f" embedding (more than {MOST_ON_CPU / 1e6:.0f} M): start it where there is one"
            " (`fprnn doctor` says what was found), or set CUDA_VISIBLE_DEVICES='' to train on the"
            " CPU"
        )


def check(cfg: Config, world_size: int) -> Checked:
    """Refuse what cannot be, before anything is read or written.

    Raises:
        ConfigError, CheckpointError, BackendError, DataError: as `check_config`; no GPU for a
            large model.
        MissingPackageError: something that the config asks for is not installed.
    """
    checked = check_config(cfg, world_size)
    check_gpu(checked.model)
    check_device(checked.deepspeed)
    sources = {part.data.source for part in parts(cfg).values()}
    for package, key, wanted in [
        ("wandb", "log.wandb", cfg.log.wandb),
        ("tensorboard", "log.tensorboard", cfg.log.tensorboard),
        ("pyarrow", "data.source: parquet", "parquet" in sources),
        ("datasets", "data.source: fineweb", "fineweb" in sources),
    ]:
        if wanted:
            require(package, key)
    return checked
