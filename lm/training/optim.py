"""What the optimizer steps, and how fast: parameter groups, the schedule of the learning rate."""

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
    """Parameters that are stepped alike."""

    decays: bool  # weight decay acts on them
    factor: float  # on the learning rate (optim.lr_factors)
    names: list[str]
    params: list[torch.nn.Parameter]


def lr_factor(optim: Optim, steps: int, update: int) -> float:
    """Learning rate of an update as a fraction of the peak.

    Linear warm-up to the peak at update W, then by `optim.schedule` to min_lr at update `steps`:
    cosine; linear; wsd, the peak up to the last D updates and then linear; constant, the peak.

    Args:
        update: 1 for the first.
    """
    warmup = min(max(1, convert_to_updates(optim.warmup, steps)), steps)
    if update <= warmup:
        return update / warmup
    floor = optim.min_lr / optim.lr
    if optim.schedule == "constant":
        return 1.0
    begin = warmup
    if optim.schedule == "wsd":
        decay = max(1, convert_to_updates(optim.wsd_decay_or_default, steps))
        begin = max(warmup, steps - decay)
    done = min(1.0, max(0, update - begin) / max(1, steps - begin))
    shape = 0.5 * (1 + math.cos(math.pi * done)) if optim.schedule == "cosine" else 1 - done
    return floor + (1 - floor) * shape


def decays(name: str) -> bool:
    """Whether weight decay acts on a parameter: not on A_log, D, biases, norms, the gains of weight
    normalisation, centroids, and the factors x_·, k_k, k_a and r_k of RWKV-7."""
    *path, leaf = name.split(".")
    owner = path[-1] if path else ""
    kept = leaf in ("A_log", "D", "gain", "k_k", "k_a", "r_k") or leaf.startswith(("bias", "x_"))
    kept = kept or leaf.endswith("bias")
    return not (kept or "norm" in owner or owner == "centroids")


def groups(model: torch.nn.Module, optim: Optim) -> list[Group]:
    """Return the trainable parameters in groups of equal decay and factor on the learning rate.

    Raises:
        ConfigError: a pattern of `optim.lr_factors` matches no parameter, or two match one.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    factors = _factors([name for name, _ in named], optim.lr_factors)
    found: dict[tuple, Group] = {}
    for name, p in named:
        key = (not decays(name), factors.get(name, 1.0))
        group = found.setdefault(key, Group(decays(name), key[1], [], []))
        group.names.append(name)
        group.params.append(p)
    return [found[key] for key in sorted(found)]


def _factors(names: list[str], patterns: dict[str, float]) -> dict[str, float]:
    """{parameter: its factor} of those that a pattern matches."""
    taken: dict[str, str] = {}
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise ConfigError(
                f"optim.lr_factors: `{pattern}` matches no parameter; there are, for example,"
                f" {', '.join(names[:: max(1, len(names) // 6)][:6])}"
            )
        for name in matched:
            if name in taken:
                raise ConfigError(
                    f"optim.lr_factors: `{taken[name]}` and `{pattern}` both match {name}: each"
                    " parameter has one factor"
                )
            taken[name] = pattern
    return {name: patterns[pattern] for name, pattern in taken.items()}


def parameter_groups(model: torch.nn.Module, optim: Optim) -> list[dict]:
    """`groups` as torch's optimizers take them, each with its peak learning rate.

    Raises:
        ConfigError: as `groups`.
    """
    return [
        {
            "params": group.params,
            "weight_decay": optim.weight_decay if group.decays else 0.0,
            "lr": optim.lr * group.factor,
        }
        for group in groups(model, optim)
    ]


def optimizer(model: torch.nn.Module, optim: Optim, on_gpu: bool) -> torch.optim.Optimizer:
    """Return AdamW over the parameters of a model, fused on a GPU.

    Raises:
        ConfigError: as `groups`.
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
    """The names of the parameters in the order in which the optimizer has them."""
    return [name for group in groups(model, optim) for name in group.names]


def signature(optim: Optim) -> dict:
    """Return the settings that a checkpoint's optimizer state is bound to."""
    return {"lr_factors": optim.lr_factors}


def described(model: torch.nn.Module, optim: Optim) -> list[str]:
    """Return a line for each group that has a learning rate of its own."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    lines = []
    for group in groups(model, optim):
        if group.factor != 1:
            names, count = group.names, sum(sizes[name] for name in group.names)
            shown = ", ".join(names[:2]) + (", …" if len(names) > 2 else "")
            tensors = f"{len(names)} tensor{'s' * (len(names) > 1)}, {count:,} numbers"
            lines.append(f"AdamW, learning rate × {group.factor:g}: {tensors} ({shown})")
    return lines
