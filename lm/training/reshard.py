"""Checkpoints read independently of ranks and ZeRO stage: whole tensors by parameter name."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from lm.runs.checkpoint import read_state, verify
from lm.training.deepspeed_api import consolidate_zero, read_zero_file

MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names of AdamW's moments
_STAGE_0_FILE = "mp_rank_00_model_states.pt"  # DeepSpeed's file with weights and optimizer


class TrainingState(NamedTuple):
    """Weights and optimizer of a checkpoint, with whole tensors.

    Attributes:
        weights: {parameter name: fp32 tensor}.
        moments: {"exp_avg", "exp_avg_sq": {parameter name: tensor of its shape}}.
        adamw_steps: Steps of AdamW: updates without the updates that DeepSpeed skipped.
    """

    weights: dict[str, torch.Tensor]
    moments: dict[str, dict[str, torch.Tensor]]
    adamw_steps: float


def consolidate_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the fp32 weights of a checkpoint of any ZeRO stage by parameter name.

    Raises:
        CheckpointError: If the checkpoint is incomplete, or holds objects that could run code.
    """
    path = Path(path)
    if verify(path)["zero_stage"] == 0:
        return read_state(path / _STAGE_0_FILE)["module"]
    return consolidate_zero(path.parent, path.name)


def gather_checkpoint(path: Path, manifest: dict, names: list[str]) -> TrainingState:
    """Read weights and optimizer of a verified checkpoint. Every rank reads all of it.

    Args:
        path: Folder of the checkpoint.
        manifest: Its manifest.
        names: Names of the parameters in the optimizer's order.
    """
    stage = manifest["zero_stage"]
    if stage == 0:
        return _read_stage_0(path, names)
    moments = {moment: _consolidate_moment(path, stage, moment) for moment in MOMENTS}
    # The steps of AdamW are the same in the files of all ranks.
    saved = read_zero_file(next(path.glob("*optim_states.pt")))["optimizer_state_dict"]
    states, _ = _states_and_weights(saved, stage)
    return TrainingState(consolidate_zero(path.parent, path.name), moments, _adamw_steps(states))


def _read_stage_0(path: Path, names: list[str]) -> TrainingState:
    """Read the training state of a checkpoint of ZeRO stage 0."""
    saved = read_state(path / _STAGE_0_FILE)
    states = saved["optimizer"]["state"]
    state_by_name = {name: states[i] for i, name in enumerate(names) if i in states}
    moments = {
        moment: {name: state[moment] for name, state in state_by_name.items() if moment in state}
        for moment in MOMENTS
    }
    return TrainingState(saved["module"], moments, _adamw_steps(states))


def _adamw_steps(states: dict[int, dict]) -> float:
    return max(float(state["step"]) for state in states.values() if "step" in state)


def _consolidate_moment(path: Path, stage: int, moment: str) -> dict[str, torch.Tensor]:
    """Return one moment of all parameters.

    A rank's moments have the layout of its weights. So DeepSpeed can consolidate them from a copy
    of the checkpoint in which they replace the weights.
    """
    with tempfile.TemporaryDirectory() as folder:
        copied_checkpoint = Path(folder) / "moment"
        copied_checkpoint.mkdir()
        for file in path.glob("*model_states.pt"):
            (copied_checkpoint / file.name).symlink_to(file.resolve())
        for file in path.glob("*optim_states.pt"):
            saved = read_zero_file(file)
            _replace_weights_by_moment(saved["optimizer_state_dict"], stage, moment)
            torch.save(saved, copied_checkpoint / file.name)
        return consolidate_zero(copied_checkpoint.parent, copied_checkpoint.name)


def _states_and_weights(saved: dict, stage: int) -> tuple[dict, list]:
    """Return ({index of a parameter group: optimizer state}, [flat weights of each group])."""
    if stage == 3:
        return saved["optimizer_state_dict"]["state"], saved["fp32_flat_groups"]
    return saved["base_optimizer_state"]["state"], saved["single_partition_of_fp32_groups"]


def _replace_weights_by_moment(saved: dict, stage: int, moment: str) -> None:
    """Replace the weights in a rank's file by one of their moments."""
    states, weights = _states_and_weights(saved, stage)
    for i, weight in enumerate(weights):
        # The weights are saved without the padding at the end of a partition.
        weights[i] = states[i][moment].flatten()[: weight.numel()].view(weight.shape)
