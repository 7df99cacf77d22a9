"""A checkpoint as other ranks or another ZeRO stage need it: whole tensors by parameter name."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from lm.runs.checkpoint import read_state, verify
from lm.training.deepspeed_api import consolidate_zero, read_zero_file

MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW
_PLAIN = "mp_rank_00_model_states.pt"  # where stage 0 keeps all


class Gathered(NamedTuple):
    """The training state of a checkpoint without its layout over ranks.

    Args:
        weights: in fp32, under the model's names.
        moments: {"exp_avg", "exp_avg_sq": {parameter name: tensor of its shape}}.
    """

    weights: dict[str, torch.Tensor]
    moments: dict[str, dict[str, torch.Tensor]]
    adamw_steps: float  # that AdamW has made: updates, without those that were skipped


def consolidate_weights(path: Path) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint in fp32 under the model's own names, whatever the ZeRO stage.

    Raises:
        CheckpointError: the checkpoint is incomplete, or holds what could run code.
    """
    path = Path(path)
    if verify(path)["zero_stage"] == 0:
        return read_state(path / _PLAIN)["module"]
    return consolidate_zero(path.parent, path.name)


def gather_checkpoint(path: Path, manifest: dict, names: list[str]) -> Gathered:
    """Weights and optimizer of a verified checkpoint, whole. All of it is read, by every rank that
    calls this.

    Args:
        names: of the parameters, in the optimizer's order.
    """
    if manifest["zero_stage"] == 0:
        return _of_one_piece(path, names)
    stage = manifest["zero_stage"]
    found = {key: _laid_out_as_weights(path, stage, key) for key in MOMENTS}
    one = read_zero_file(next(path.glob("*optim_states.pt")))["optimizer_state_dict"]
    states, _ = _states_and_weights(one, stage)
    return Gathered(consolidate_zero(path.parent, path.name), found, _adamw_steps(states))


def _of_one_piece(path: Path, names: list[str]) -> Gathered:
    saved = read_state(path / _PLAIN)
    states = saved["optimizer"]["state"]
    found = {
        key: {name: states[i][key] for i, name in enumerate(names) if key in states.get(i, {})}
        for key in MOMENTS
    }
    return Gathered(saved["module"], found, _adamw_steps(states))


def _adamw_steps(states: dict[int, dict]) -> float:
    return max(float(state["step"]) for state in states.values() if "step" in state)


def _laid_out_as_weights(path: Path, stage: int, key: str) -> dict[str, torch.Tensor]:
    """Return one moment of all parameters. Each rank's lies in its file as its weights do, so
    DeepSpeed puts it together when it is given in their place."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "moment"
        copy.mkdir()
        for file in path.glob("*model_states.pt"):
            (copy / file.name).symlink_to(file.resolve())
        for file in path.glob("*optim_states.pt"):
            saved = read_zero_file(file)
            _put_in_place_of_weights(saved["optimizer_state_dict"], stage, key)
            torch.save(saved, copy / file.name)
        return consolidate_zero(copy.parent, copy.name)


def _states_and_weights(saved: dict, stage: int) -> tuple[dict, list]:
    """Of a rank's file: {number of a group: its state}, [its weights, flat]."""
    if stage == 3:
        return saved["optimizer_state_dict"]["state"], saved["fp32_flat_groups"]
    return saved["base_optimizer_state"]["state"], saved["single_partition_of_fp32_groups"]


def _put_in_place_of_weights(saved: dict, stage: int, key: str) -> None:
    states, weights = _states_and_weights(saved, stage)
    for i, weight in enumerate(weights):
        # Without the padding at a partition's end, as the weights are saved.
        weights[i] = states[i][key].flatten()[: weight.numel()].view(weight.shape)
