"""What AdamW steps, and how fast: parameter groups, and the schedule of the learning rate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lm.config import Optim

if TYPE_CHECKING:
    import torch


def lr_factor(optim: Optim, steps: int, update: int) -> float:
    """Learning rate of an update as a fraction of the peak.

    Linear warm-up to the peak at update W, then cosine (or linear) to min_lr at update `steps`.

    Args:
        update: 1 for the first.
    """
    warmup = optim.warmup * steps if optim.warmup < 1 else optim.warmup
    warmup = min(max(1, round(warmup)), steps)
    if update <= warmup:
        return update / warmup
    floor = optim.min_lr / optim.lr
    done = min(1.0, (update - warmup) / max(1, steps - warmup))
    if optim.schedule == "constant":
        return 1.0
    shape = 0.5 * (1 + math.cos(math.pi * done)) if optim.schedule == "cosine" else 1 - done
    return floor + (1 - floor) * shape


def decays(name: str) -> bool:
    """Whether weight decay acts on a parameter: not on A_log, D, biases, norms and the gains of
    weight normalisation."""
    *path, leaf = name.split(".")
    owner = path[-1] if path else ""
    kept = leaf in ("A_log", "D", "gain", "dt_bias") or leaf.startswith("bias")
    return not (kept or "norm" in owner)


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """AdamW groups: with and without decay."""
    with_decay, without = _by_group(model)
    return [
        {"params": [p for _, p in with_decay], "weight_decay": weight_decay},
        {"params": [p for _, p in without], "weight_decay": 0.0},
    ]


def optimizer_order(model: torch.nn.Module) -> list[str]:
    """The names of the parameters in the order in which the optimizer has them."""
    return [name for group in _by_group(model) for name, _ in group]


def _by_group(model: torch.nn.Module) -> tuple[list, list]:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [np for np in named if decays(np[0])], [np for np in named if not decays(np[0])]
