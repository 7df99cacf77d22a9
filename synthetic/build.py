"""Model of a synthetic run, freshly initialised or trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lm.common.console import say
from lm.common.files import read_json
from lm.config.plugin import guard_imports
from lm.model.baseline_layers import AttentionState, LSTMState, NoState, SLSTMState
from lm.model.delta import DeltaState, RWKV7State
from lm.model.diagonal import ScanState, TrapezoidState
from lm.model.state import BlockState, FPRNNState
from lm.runs.checkpoint import (
    MANIFEST,
    CheckpointError,
    checkpoint_step,
    describe_nonfinite,
    find_newest_checkpoint,
    read_state,
)
from lm.runs.run_dir import RunDir, check_checkpoint_config
from lm.training.build import build_section
from lm.training.trained import first_mismatch
from synthetic import tasks
from synthetic.config import Config
from synthetic.config import load as load_config
from synthetic.deferred_centroids import DeferredCentroids

STATE = "state.pt"  # the only file of a checkpoint besides its manifest
# Classes that a checkpoint may contain besides tensors: the recurrent state of every kind of layer,
# which a task with streams carries from one batch to the next.
STATE_CLASSES = [FPRNNState, BlockState, ScanState, TrapezoidState, DeltaState, RWKV7State]
STATE_CLASSES += [AttentionState, LSTMState, SLSTMState, NoState]


class BuiltModel(NamedTuple):
    """A model with its device and its precision."""

    model: Any  # nn.Module with the interface of lm/model
    device: torch.device
    precision: str  # "fp32" or "bf16"


def build_model(cfg: Config, task: tasks.Task, max_length: int) -> BuiltModel:
    """Build the freshly initialised model of a run.

    Args:
        cfg: Config of the run.
        task: Task of the run.
        max_length: Longest sequence that the model will read, in tokens.

    Raises:
        ConfigError: If the model options contradict each other.
        TaskError: If the model's vocabulary is smaller than the task's.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = cfg.train.precision
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    torch.manual_seed(cfg.seed)
    vocab_size = cfg.model.vocab_size
    if vocab_size == "auto":
        vocab_size = task.vocab_size
    elif vocab_size < task.vocab_size:
        raise tasks.TaskError(
            f"model.vocab_size is {vocab_size}, task `{cfg.task.name}` has {task.vocab_size} ids"
        )
    model = build_section(cfg.model, cfg.solver, vocab_size, max_length)
    return BuiltModel(model.to(device), device, precision)


def find_newest_state(run: RunDir, device: torch.device | str = "cpu") -> dict | None:
    """Read the newest complete checkpoint without NaN; return None if there is no checkpoint.

    Args:
        run: The run directory.
        device: Device to load the tensors on.

    Raises:
        CheckpointError: If there are checkpoints, but none can be used.
        RunDirError: If the checkpoints were trained with another config.
    """
    path = find_newest_checkpoint(run.checkpoints)
    if path is None:
        return None
    check_checkpoint_config(path, read_json(path / MANIFEST), run, load_config(run.config))
    while path is not None:
        state = read_state(path / STATE, STATE_CLASSES, device)
        problem = describe_nonfinite(collect_tensors(state))
        if not problem:
            return state
        say(f"skipped checkpoint {path}: {problem}")
        path = find_newest_checkpoint(run.checkpoints, before=checkpoint_step(path))
    raise CheckpointError(
        f"every complete checkpoint in {run.checkpoints} contains NaN or infinity: train from"
        " scratch with --overwrite"
    )


def collect_tensors(state: dict) -> dict[str, list[torch.Tensor]]:
    """Collect the tensors of a training state that must be finite, by name.

    These are the optimizer's moments and, of the weights, only those with NaN: a buffer of the
    model may contain infinity.
    """
    weights_with_nan = [tensor for tensor in state["model"].values() if tensor.isnan().any()]
    tensors = {"the weights": weights_with_nan}
    for moments in state["optimizer"]["state"].values():
        for name, moment in moments.items():
            tensors.setdefault(name, []).append(moment)
    return tensors


def _read_trained_state(run: RunDir) -> dict:
    """Read the newest checkpoint of a run.

    Raises:
        CheckpointError: If the run has no checkpoint.
    """
    saved = find_newest_state(run)
    if saved is None:
        raise CheckpointError(
            f"{run} holds no trained model ({run.checkpoints} has no checkpoint): train it"
        )
    return saved


class LoadedRun(NamedTuple):
    """A trained run: its config, its task and its model in evaluation mode."""

    cfg: Config
    task: tasks.Task
    model: nn.Module
    precision: str  # "fp32" or "bf16"


def load_run(run_dir: str | Path, overrides: Sequence[str] = (), trust: bool = False) -> LoadedRun:
    """Load a trained run.

    Args:
        run_dir: The run directory.
        overrides: key=value, applied to the run's config.
        trust: Run the code of a `module:Class` that the run's config.yaml names.

    Raises:
        ConfigError: If the config names a `module:Class` and `trust` is False.
        CheckpointError: If the run has no checkpoint, or the weights belong to another model or to
            a task with other ids.
    """
    run = RunDir(run_dir)
    saved = _read_trained_state(run)
    cfg = load_config(run.config, overrides)
    # Overrides may change only the vocabulary of the model; load_state_dict checks its size.
    vocab_size = f"model.vocab_size={cfg.model.vocab_size}"
    if cfg.model != load_config(run.config, [vocab_size]).model:
        raise CheckpointError(
            f"the overrides change the model of {run}: leave the `model` section as it was trained"
        )
    with guard_imports(run.config, trust):
        task = tasks.build_task(cfg.task)
        model, _, precision = build_model(cfg, task, cfg.train.lengths[1])
    if cfg.defers_centroids:
        DeferredCentroids(model).match(saved["model"])
    try:
        model.load_state_dict(saved["model"])
    except RuntimeError as e:
        raise CheckpointError(
            f"the weights of {run} are not for task `{cfg.task.name}`, which has"
            f" {task.vocab_size} ids, or the task's class was changed ({first_mismatch(e)})"
        ) from None
    return LoadedRun(cfg, task, model.eval(), precision)
