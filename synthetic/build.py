"""The model of a synthetic run: freshly initialised, or as it was trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lm.common.files import read_json
from lm.config.plugin import reading_run
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
from lm.runs.run_dir import RunDir, check_config
from lm.training.build import build_section
from synthetic import tasks
from synthetic.config import Config, load

STATE = "state.pt"  # the one file of a checkpoint
# What it may hold of a stream that is under way.
STATES = [FPRNNState, BlockState, ScanState, TrapezoidState, DeltaState, RWKV7State]
STATES += [AttentionState, LSTMState, SLSTMState, NoState]


def device_of(cfg: Config) -> tuple[torch.device, str]:
    """Where to run, and "fp32" or "bf16"."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = cfg.train.precision
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    return device, precision


class Built(NamedTuple):
    """A model, and where and in what it runs."""

    model: Any  # nn.Module with the interface of lm/model
    device: torch.device
    precision: str  # "fp32" or "bf16"


def build(cfg: Config, task: tasks.Task, seq_len: int) -> Built:
    """The model of a run, freshly initialised.

    Args: seq_len: the longest sequence that it will read.
    Raises:
        ConfigError: a model that cannot be. TaskError: its vocabulary is smaller than the task's.
    """
    device, precision = device_of(cfg)
    torch.manual_seed(cfg.seed)
    vocab_size = cfg.model.vocab_size
    if vocab_size == "auto":
        vocab_size = task.vocab_size
    elif vocab_size < task.vocab_size:
        raise tasks.TaskError(
            f"model.vocab_size is {vocab_size}, task `{cfg.task.name}` has {task.vocab_size} ids"
        )
    model = build_section(cfg.model, cfg.solver, vocab_size, seq_len)
    return Built(model.to(device), device, precision)


def newest_state(
    run: RunDir, device: torch.device | str = "cpu", say: Callable[[str], None] = print
) -> dict | None:
    """The training state of a run's newest complete checkpoint without NaN; None where there is
    none.

    Raises:
        CheckpointError: there are checkpoints, and none can be used. RunDirError: the run's config
            is another than they were trained with.
    """
    path = find_newest_checkpoint(run.checkpoints, say)
    if path is None:
        return None
    check_config(path, read_json(path / MANIFEST), run, load(run.config))
    while path is not None:
        state = read_state(path / STATE, STATES, device)
        what = describe_nonfinite(held(state))
        if not what:
            return state
        say(f"passed over: checkpoint {path}: {what}")
        path = find_newest_checkpoint(run.checkpoints, say, before=checkpoint_step(path))
    raise CheckpointError(
        f"every whole checkpoint in {run.checkpoints} holds NaN or infinity: train anew with"
        " --overwrite"
    )


def held(state: dict) -> dict[str, list[torch.Tensor]]:
    """Of a training state the weights that hold NaN (a buffer may hold infinity), and all of the
    optimizer's moments by name."""
    held = {"the weights": [tensor for tensor in state["model"].values() if tensor.isnan().any()]}
    for moments in state["optimizer"]["state"].values():
        for name, moment in moments.items():
            held.setdefault(name, []).append(moment)
    return held


def _trained_state(run: RunDir) -> dict:
    saved = newest_state(run)
    if saved is None:
        raise CheckpointError(
            f"{run} holds no trained model ({run.checkpoints} has no checkpoint): train it"
        )
    return saved


class Loaded(NamedTuple):
    """A trained run: its config, its task and its model, in evaluation mode."""

    cfg: Config
    task: tasks.Task
    model: nn.Module
    precision: str  # "fp32" or "bf16"


def load_run(run_dir: str | Path, overrides: Sequence[str] = (), trust: bool = False) -> Loaded:
    """Read a trained run, with overrides of its config.

    Args:
        trust: Run the code of a `module:Class` in the run's config.yaml.

    Raises:
        ConfigError: Its config names code of its own, which is not trusted.
        CheckpointError: nothing was trained there, or another model, or on other ids.
    """
    run = RunDir(run_dir)
    saved = _trained_state(run)
    cfg = load(run.config, overrides)
    vocab_size = cfg.model.vocab_size  # the shapes of the weights tell it
    if cfg.model != load(run.config, [f"model.vocab_size={vocab_size}"]).model:
        raise CheckpointError(
            f"the overrides describe another model than that of {run}: leave the `model` section as"
            " it was trained"
        )
    with reading_run(run.config, trust):
        task = tasks.build(cfg.task)
        model, _, precision = build(cfg, task, cfg.train.lengths[1])
    try:
        model.load_state_dict(saved["model"])
    except RuntimeError as e:
        # torch's message: a heading, then a line for each thing that does not fit.
        first = str(e).partition("\n")[2].partition("\n")[0].strip().rstrip(".")
        raise CheckpointError(
            f"the weights of {run} are not for task `{cfg.task.name}`, which has"
            f" {task.vocab_size} ids, or its class was changed ({first})"
        ) from None
    return Loaded(cfg, task, model.eval(), precision)
