"""AdamW: parameter groups and the schedule of the learning rate."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from lm.common.errors import ConfigError
from lm.config.schema import Optim, convert_to_updates

EPS = 1e-8  # AdamW's ε, torch's default

if TYPE_CHECKING:
    import torch


class Group(NamedTuple):
    """Parameters with the same weight decay and learning rate."""

    has_weight_decay: bool
    factor: float  # learning rate relative to optim.lr (optim.lr_factors)
    names: list[str]
    params: list[torch.nn.Parameter]


def lr_factor(optim: Optim, steps: int, update: int) -> float:
    """Return the learning rate of an update as a fraction of the peak.

    The fraction is the same for all groups; `Group.factor` instead sets the peak of a group.

    It rises linearly during the warm-up. Then `optim.schedule` decides: `cosine` and `linear` fall
    to min_lr at update `steps`; `wsd` stays at the peak until the last `wsd_decay` updates, in
    which it falls linearly; `constant` stays at the peak.

    Args:
        optim: Section `optim`.
        steps: Number of updates of the run.
        update: Number of the update, from 1.
    """
    warmup = min(max(1, convert_to_updates(optim.warmup, steps)), steps)
    if update <= warmup:
        return update / warmup
    floor = optim.min_lr / optim.lr
    if optim.schedule == "constant":
        return 1.0
    decay_start = warmup
    if optim.schedule == "wsd":
        decay = max(1, convert_to_updates(optim.wsd_decay_or_default, steps))
        decay_start = max(warmup, steps - decay)
    progress = min(1.0, max(0, update - decay_start) / max(1, steps - decay_start))
    is_cosine = optim.schedule == "cosine"
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if is_cosine else 1 - progress
    return floor + (1 - floor) * remaining


def has_weight_decay(name: str) -> bool:
    """Return whether weight decay applies to a parameter.

    It does not apply to A_log, D, biases, norms, gains of weight normalisation, centroids, and the
    factors x_·, k_k, k_a and r_k of RWKV-7.
    """
    *modules, last_name = name.split(".")
    module = modules[-1] if modules else ""
    is_excluded = last_name in ("A_log", "D", "gain", "k_k", "k_a", "r_k")
    is_bias_or_factor = last_name.startswith(("bias", "x_")) or last_name.endswith("bias")
    is_in_excluded_module = "norm" in module or module == "centroids"
    return not (is_excluded or is_bias_or_factor or is_in_excluded_module)


def group_parameters(model: torch.nn.Module, optim: Optim) -> list[Group]:
    """Group the trainable parameters by weight decay and factor of the learning rate.

    Raises:
        ConfigError: If a pattern of `optim.lr_factors` matches no parameter, or two patterns match
            the same parameter.
    """
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    factors = _match_factors([name for name, _ in parameters], optim.lr_factors)
    groups: dict[tuple[bool, float], Group] = {}
    for name, p in parameters:
        has_decay, factor = has_weight_decay(name), factors.get(name, 1.0)
        group = groups.setdefault((has_decay, factor), Group(has_decay, factor, [], []))
        group.names.append(name)
        group.params.append(p)
    # Checkpoints depend on this order: groups with weight decay first, then by factor.
    return sorted(groups.values(), key=lambda group: (not group.has_weight_decay, group.factor))


def _match_factors(names: list[str], patterns: dict[str, float]) -> dict[str, float]:
    """Return {parameter: factor} of the parameters that a pattern matches."""
    patterns_by_name: dict[str, str] = {}
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            spacing = max(1, len(names) // 6)  # six names from all over the model
            raise ConfigError(
                f"optim.lr_factors: `{pattern}` matches no parameter; there are, for example,"
                f" {', '.join(names[::spacing][:6])}"
            )
        for name in matched:
            if name in patterns_by_name:
                raise ConfigError(
                    f"optim.lr_factors: `{patterns_by_name[name]}` and `{pattern}` both match"
                    f" {name}: each parameter has one factor"
                )
            patterns_by_name[name] = pattern
    return {name: patterns[pattern] for name, pattern in patterns_by_name.items()}


def torch_param_groups(model: torch.nn.Module, optim: Optim) -> list[dict]:
    """Return `group_parameters` in the format of torch's optimizers, with peak learning rates."""
    return [
        {
            "params": group.params,
            "weight_decay": optim.weight_decay if group.has_weight_decay else 0.0,
            "lr": optim.lr * group.factor,
        }
        for group in group_parameters(model, optim)
    ]


def optimizer(model: torch.nn.Module, optim: Optim, on_gpu: bool) -> torch.optim.Optimizer:
    """Return AdamW over `group_parameters`, fused on a GPU."""
    import torch

    return torch.optim.AdamW(
        torch_param_groups(model, optim),
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
    """Return a line for the log for each group whose learning rate has a factor."""
    lines = []
    for group in group_parameters(model, optim):
        if group.factor != 1:
            names, count = group.names, sum(p.numel() for p in group.params)
            examples = ", ".join(names[:2]) + (", …" if len(names) > 2 else "")
            tensors = f"{len(names)} tensor{'s' * (len(names) > 1)}, {count:,} numbers"
            lines.append(f"AdamW, learning rate × {group.factor:g}: {tensors} ({examples})")
    return lines
