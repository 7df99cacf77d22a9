"""AdamW: parameter groups and the schedule of the learning rate."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from lm.common.errors import ConfigError
from lm.config.schema import Optim, number_of_updates

EPS = 1e-8  # AdamW's ε, torch's default

if TYPE_CHECKING:
    import torch


class Group(NamedTuple):
    """Parameters with the same weight decay and learning rate."""

    has_weight_decay: bool
    factor: float  # of the learning rate (optim.lr_factors)
    names: list[str]
    params: list[torch.nn.Parameter]


def lr_factor(optim: Optim, steps: int, update: int) -> float:
    """Return the learning rate of an update as a fraction of the peak.

    It rises linearly to the peak at update W, then falls to min_lr at update `steps` by
    `optim.schedule`: cosine; linear; wsd (constant until the last D updates, then linear). With
    constant it stays at the peak.

    Args:
        optim: Section `optim`.
        steps: Number of updates of the run.
        update: Number of the update, from 1.
    """
    warmup = min(max(1, number_of_updates(optim.warmup, steps)), steps)
    if update <= warmup:
        return update / warmup
    floor = optim.min_lr / optim.lr
    if optim.schedule == "constant":
        return 1.0
    begin = warmup
    if optim.schedule == "wsd":
        decay = max(1, number_of_updates(optim.decay_of_wsd, steps))
        begin = max(warmup, steps - decay)
    done = min(1.0, max(0, update - begin) / max(1, steps - begin))
    shape = 0.5 * (1 + math.cos(math.pi * done)) if optim.schedule == "cosine" else 1 - done
    return floor + (1 - floor) * shape


def has_weight_decay(name: str) -> bool:
    """Return whether weight decay applies to a parameter.

    It does not apply to A_log, D, biases, norms, gains of weight normalisation, centroids, and the
    factors x_·, k_k, k_a and r_k of RWKV-7.
    """
    *path, leaf = name.split(".")
    owner = path[-1] if path else ""
    is_factor = leaf in ("A_log", "D", "gain", "k_k", "k_a", "r_k") or leaf.startswith("x_")
    is_bias = leaf.startswith("bias") or leaf.endswith("bias")
    return not (is_factor or is_bias or "norm" in owner or owner == "centroids")


def group_parameters(model: torch.nn.Module, optim: Optim) -> list[Group]:
    """Group the trainable parameters by weight decay and factor of the learning rate.

    Raises:
        ConfigError: If a pattern of `optim.lr_factors` matches no parameter, or two match one.
    """
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    factors = _factors([name for name, _ in parameters], optim.lr_factors)
    by_key: dict[tuple, Group] = {}
    for name, p in parameters:
        key = (not has_weight_decay(name), factors.get(name, 1.0))
        group = by_key.setdefault(key, Group(has_weight_decay(name), key[1], [], []))
        group.names.append(name)
        group.params.append(p)
    return [by_key[key] for key in sorted(by_key)]


def _factors(names: list[str], patterns: dict[str, float]) -> dict[str, float]:
    """Return {parameter: factor} of the parameters that a pattern matches."""
    patterns_by_name: dict[str, str] = {}
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise ConfigError(
                f"optim.lr_factors: `{pattern}` matches no parameter; there are, for example,"
                f" {', '.join(names[:: max(1, len(names) // 6)][:6])}"
            )
        for name in matched:
            if name in patterns_by_name:
                raise ConfigError(
                    f"optim.lr_factors: `{patterns_by_name[name]}` and `{pattern}` both match"
                    f" {name}: each parameter has one factor"
                )
            patterns_by_name[name] = pattern
    return {name: patterns[pattern] for name, pattern in patterns_by_name.items()}


def parameter_groups(model: torch.nn.Module, optim: Optim) -> list[dict]:
    """Return the groups in the format of torch's optimizers, with their peak learning rates.

    Raises:
        ConfigError: As `group_parameters`.
    """
    return [
        {
            "params": group.params,
            "weight_decay": optim.weight_decay if group.has_weight_decay else 0.0,
            "lr": optim.lr * group.factor,
        }
        for group in group_parameters(model, optim)
    ]


def optimizer(model: torch.nn.Module, optim: Optim, on_gpu: bool) -> torch.optim.Optimizer:
    """Return AdamW over the parameters of a model, fused on a GPU.

    Raises:
        ConfigError: As `group_parameters`.
    """
    import torch

    return torch.optim.AdamW(
        parameter_groups(model, optim),
        lr=optim.lr,
        betas=tuple(optim.betas),
        eps=EPS,
        fused=True if on_gpu else None,
    )


def optimizer_order(model: torch.nn.Module, optim: Optim) -> list[str]:
    """Return the names of the parameters in the optimizer's order."""
    return [name for group in group_parameters(model, optim) for name in group.names]


def optimizer_signature(optim: Optim) -> dict:
    """Return the settings on which the layout of the optimizer's state depends."""
    return {"lr_factors": optim.lr_factors}


def describe_optimizer(model: torch.nn.Module, optim: Optim) -> list[str]:
    """Return a line for the log for each group with a factor of the learning rate."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    lines = []
    for group in group_parameters(model, optim):
        if group.factor != 1:
            names, count = group.names, sum(sizes[name] for name in group.names)
            examples = ", ".join(names[:2]) + (", …" if len(names) > 2 else "")
            tensors = f"{len(names)} tensor{'s' * (len(names) > 1)}, {count:,} numbers"
            lines.append(f"AdamW, learning rate × {group.factor:g}: {tensors} ({examples})")
    return lines
