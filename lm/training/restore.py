"""Restore the state of a checkpoint: weights, optimizer, position in the data, random numbers.

`path` and `manifest` are the folder and the manifest of the checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import torch

from lm.common.console import say
from lm.common.ranks import Ranks
from lm.config.schema import Config
from lm.runs.checkpoint import read_state
from lm.training.engine import Engine
from lm.training.optim import optimizer_order, optimizer_signature
from lm.training.reshard import gather_checkpoint
from lm.training.resume import check_optimizer


def restore_engine(
    path: Path,
    manifest: dict,
    cfg: Config,
    model: torch.nn.Module,
    ranks: Ranks,
    deepspeed_config: dict,
) -> Engine:
    """Build an engine with the weights and the optimizer of a checkpoint.

    Raises:
        CheckpointError: If the checkpoint does not fit the optimizer, or cannot be read.
    """
    check_optimizer(path, manifest, optimizer_signature(cfg.optim))
    saved_ranks, saved_stage = manifest["world_size"], manifest["zero_stage"]
    stage = deepspeed_config["zero_optimization"]["stage"]
    if (saved_ranks, saved_stage) == (ranks.world_size, stage):
        engine = Engine(cfg, model, ranks, deepspeed_config)
        engine.load(path)
        return engine
    layout = f"{saved_ranks} rank{'s' * (saved_ranks > 1)} under ZeRO-{saved_stage}"
    say(f"note: {path} was written by {layout}: weights and optimizer are distributed again")
    state = gather_checkpoint(path, manifest, optimizer_order(model, cfg.optim))
    model.load_state_dict(state.weights)
    engine = Engine(cfg, model, ranks, deepspeed_config)
    engine.restore_optimizer(state.moments, manifest["step"], state.adamw_steps)
    return engine


def rank_file(rank: int) -> str:
    """Return the name of the file with a rank's own state, next to DeepSpeed's files."""
    return f"loader-rank{rank:04d}.pt"


def random_state() -> dict[str, torch.Tensor]:
    """Return the states of torch's random generators, as a rank's file has them."""
    state = {"rng": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda_rng"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    """Set torch's random generators to a `random_state`, whose tensors may be on any device."""
    torch.set_rng_state(state["rng"].cpu())
    if "cuda_rng" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda_rng"].cpu())


def restore_rank_state(path: Path, manifest: dict, ranks: Ranks, seed: int) -> dict:
    """Return a rank's own state from a checkpoint, and set torch's random generators from it.

    If the number of ranks has changed, the ranks' positions in the data are merged, and the
    generators are seeded by (seed of the run, update, rank).
    """
    from lm.data.batches.loader import merge_states

    if manifest["world_size"] == ranks.world_size:
        state = read_state(path / rank_file(ranks.rank))
        set_random_state(state)
        return state
    states = [read_state(path / rank_file(rank)) for rank in range(manifest["world_size"])]
    # The factor is larger than any number of ranks, so no two pairs (update, rank) are equal.
    torch.manual_seed((seed + manifest["step"] * 1_000_003 + ranks.rank) % 2**64)
    return states[0] | {"loader": merge_states([state["loader"] for state in states])}
