"""Checks before a training reads or writes anything, and a record of its environment."""

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
from lm.config.schema import Config, check_state_noise, check_updates
from lm.data.sources.mixture import configs_by_source
from lm.kernels import OPERATIONS, choose_backends, describe_backends, requested_backend
from lm.training import init_from
from lm.training.build import check_section
from lm.training.deepspeed_json import check_device, deepspeed_config
from lm.training.inputs import check_inputs
from lm.training.optim import group_parameters

MAX_PARAMETERS_ON_CPU = 20e6  # without the embedding
SSD_LAYERS = {"mamba2", "mamba3", "fp_mamba2"}  # kinds of layers with the scan of Mamba-2
SSD_OPERATIONS = {"ssd_scan", "mamba2_scan"}


def kernel_operations(model: torch.nn.Module) -> tuple[str, ...]:
    """List the operations of `lm.kernels` that a model's layers may use.

    Only models with Mamba-2 layers load mamba-ssm's scan, because it tries about 200 variants of
    its kernels at every start.
    """
    kinds = {layer.kind for layer in model.config.layer_list()}
    unused = set() if kinds & SSD_LAYERS else SSD_OPERATIONS
    return tuple(operation for operation in OPERATIONS if operation not in unused)


def environment(ranks: Ranks, model: torch.nn.Module) -> dict:
    """Return the content of environment.json: versions, device, kernels."""
    from importlib.metadata import version

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "fprnn": lm.__version__,
        "commit": find_git_commit() if ranks.is_main else None,
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
    """Refuse ranks whose kernels differ from the first rank's.

    All ranks would wait for the slower kernels, and a rank's results would depend on its host.

    Raises:
        ConfigError: On every rank, if one differs.
    """
    device, operations = _device(), kernel_operations(model)
    # On all ranks at once, because the first call may take minutes, and may fail on any rank.
    ranks.run_on_all(choose_backends, device, operations)
    main_backends = ranks.run_on_main(choose_backends, device, operations)

    def compare_backends() -> None:
        if choose_backends(device, operations) != main_backends:
            raise ConfigError(
                f"rank {ranks.rank} on {platform.node()} has other kernels than rank 0:"
                f" {describe_backends(device, operations)}. Install the same packages on all hosts"
                " (`fprnn doctor` lists what is missing), or set the same FPRNN_KERNELS on all,"
                " such as plain"
            )

    ranks.run_on_all(compare_backends)


def find_git_commit() -> str | None:
    """Return the git commit of this package's checkout, with a + if tracked files have changed.

    Returns:
        The commit; None if the package is not a checkout, or git is not installed.
    """
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--exclude=*", "--abbrev=40"]
    try:
        process = subprocess.run(
            [*command, "--dirty=+"], capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip()


class Checked(NamedTuple):
    """Model and DeepSpeed settings of a checked configuration."""

    model: torch.nn.Module  # on the meta device, for a vocabulary of 8
    deepspeed: dict  # DeepSpeed's JSON


def check_config(cfg: Config, world_size: int) -> Checked:
    """Check a configuration, but not whether this machine can train it (dry run).

    Args:
        cfg: Configuration of the run.
        world_size: Number of ranks.

    Raises:
        ConfigError: If the warm-up, the state noise, the sizes, DeepSpeed's JSON or
            `optim.lr_factors` are wrong.
        PathError, SourceError, DataError: As `check_inputs`.
        LoadError: If the source of `init_from` is damaged.
        BackendError: If FPRNN_KERNELS names unknown kernels.
    """
    requested_backend()  # raises BackendError
    check_updates(cfg)
    check_state_noise(cfg)
    config = deepspeed_config(cfg, world_size)
    model = check_section(cfg.model, cfg.solver, cfg.data.seq_len)
    group_parameters(model, cfg.optim)
    init_from.check(cfg, model)
    check_inputs(cfg)
    return Checked(model, config)


def check_gpu(model: torch.nn.Module) -> None:
    """Refuse to train a large model where PyTorch finds no GPU.

    With an empty CUDA_VISIBLE_DEVICES, which hides GPUs on purpose, a CPU may train any model.
    `model` is the model of `check_config`, which has a vocabulary of 8 and so hardly an embedding.

    Raises:
        ConfigError: If no GPU is found and the model is larger than MAX_PARAMETERS_ON_CPU.
    """
    if torch.cuda.is_available() or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return
    size = sum(p.numel() for p in model.parameters())
    if size > MAX_PARAMETERS_ON_CPU:
        raise ConfigError(
            f"PyTorch finds no GPU, and the model has {size / 1e6:.0f} M parameters without its"
            f" embedding (more than {MAX_PARAMETERS_ON_CPU / 1e6:.0f} M): start it on a GPU"
            " (`fprnn doctor` lists the devices), or set CUDA_VISIBLE_DEVICES='' to train on the"
            " CPU"
        )


def check(cfg: Config, world_size: int) -> Checked:
    """Check a configuration and this machine, before anything is read or written.

    Raises:
        The errors of `check_config` and `check_gpu`.
        MissingPackageError: If a package that the config needs is not installed.
    """
    checked = check_config(cfg, world_size)
    check_gpu(checked.model)
    check_device(checked.deepspeed)
    sources = {part.data.source for part in configs_by_source(cfg).values()}
    for package, key, is_needed in [
        ("wandb", "log.wandb", cfg.log.wandb),
        ("tensorboard", "log.tensorboard", cfg.log.tensorboard),
        ("pyarrow", "data.source: parquet", "parquet" in sources),
        ("datasets", "data.source: fineweb", "fineweb" in sources),
    ]:
        if is_needed:
            require(package, key)
    return checked
