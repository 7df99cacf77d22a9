"""Import of DeepSpeed, and its checkpoint files. No other file of `lm` imports DeepSpeed."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import torch

from lm.common.files import without_wildcards
from lm.runs.checkpoint import read_state


def import_deepspeed() -> ModuleType:
    """Import DeepSpeed without its log lines and without compiling its CPU extension."""
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    warnings.filterwarnings("ignore", module="deepspeed")
    # DeepSpeed calls collectives that torch has given other names.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    import deepspeed
    import deepspeed.ops
    from deepspeed.utils import logger

    logger.setLevel("WARNING")
    if not torch.cuda.is_available():
        # Otherwise DeepSpeed compiles this extension at start for 90 s; one host does not need it.
        # On a GPU this dictionary must not be read, because its first use looks for every compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def deepspeed_version() -> str:
    """Return DeepSpeed's version. The import fails if DeepSpeed is broken."""
    return import_deepspeed().__version__


def set_leaf_modules(model: torch.nn.Module, classes: Iterable[type]) -> None:
    """Make ZeRO-3 gather each module of these classes once, as a whole."""
    from deepspeed.utils import set_z3_leaf_modules

    set_z3_leaf_modules(model, list(dict.fromkeys(classes)))


def read_zero_file(path: Path) -> dict:
    """Read a file of DeepSpeed in a verified checkpoint without running code in it.

    Raises:
        CheckpointError: If the file holds objects other than tensors and DeepSpeed's classes.
    """
    import_deepspeed()
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    classes = (LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address)
    return read_state(path, classes)


def consolidate_zero(folder: Path, tag: str) -> dict[str, torch.Tensor]:
    """Return the fp32 weights of a ZeRO checkpoint (stages 1 to 3) by parameter name.

    Args:
        folder: Folder of the run's checkpoints.
        tag: Name of the checkpoint in it.
    """
    import_deepspeed()
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    for file in (Path(folder) / tag).glob("*.pt"):
        read_zero_file(file)  # refuse it first, because DeepSpeed would run code in it

    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        without_wildcards(Path(folder) / tag) as path,
    ):
        return get_fp32_state_dict_from_zero_checkpoint(str(path.parent), tag=path.name)


class FileCollector:
    """Replacement of DeepSpeed's checkpoint engine that keeps files in memory.

    `save` only keeps the state, because `Checkpoints` writes it; `load` runs no code in a file.
    The other methods are part of DeepSpeed's interface.
    """

    def __init__(self):
        self.files: dict[str, object] = {}

    def load(self, path: str, map_location: object = None) -> dict:
        return read_zero_file(Path(path))

    def save(self, state_dict: object, path: str) -> None:
        self.files[Path(path).name] = state_dict

    def is_data_parallel_writer(self, rank: int) -> bool:
        return rank == 0

    def preserves_storage_sharing(self) -> bool:
        return False  # True makes DeepSpeed copy tensors that `Checkpoints` copies anyway

    def is_decoupled(self) -> bool:
        return False

    def makedirs(self, *_: object, **__: object) -> None: ...
    def create(self, _: object) -> None: ...
    def commit(self, _: object) -> None: ...
