"""The centroids of a model that starts from a run without: zero, and the mean of each answer."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from lm.common.errors import ConfigError
from lm.model.state import BlockState
from synthetic.build import Loaded
from synthetic.evaluate import as_tensors
from synthetic.tasks import IGNORE

BATCHES, SEQUENCES = 16, 512  # of training data
# β. Of A5's states 16 mixes some that are not one; 64 and 1,000 are alike (docs/fixed-point.md).
SHARPNESS = 64.0


class NewCentroids(NamedTuple):
    """What the centroids of a layer start as."""

    layer: int
    vectors: torch.Tensor | None  # (k,d); None: as those of any new layer
    said: str  # what they are, in words


def new_centroids(
    model: torch.nn.Module,
    new: list[str],
    pairs: list[int | None],
    source: Loaded,
    other_task: str,
) -> list[NewCentroids]:
    """Of every layer that has centroids where its partner has none: zero, which is read where there
    is no token before, then for each answer the mean of the partner's states. They stay random
    where the partner has no such states, or answers something else.

    A layer that answers right need not be an automaton yet: its states after two sequences of the
    same answer differ, and what differs is carried on. From the mean of them it goes on rightly.

    Args:
        new: names of the model's parameters that the source has not. pairs: of every layer the
        number of its partner in the source, or None. other_task: in what the tasks differ; "": in
        nothing.
    Raises:
        ConfigError: another number of centroids than answers, or no answer at a sequence's end.
    """
    partners = {
        index: partner
        for index, partner in enumerate(pairs)
        if partner is not None and f"backbone.layers.{index}.block.centroids.vectors" in new
    }
    if not partners:
        return []
    if other_task:
        return [
            NewCentroids(index, None, f"layer {index}: random centroids: {other_task}")
            for index in partners
        ]
    answers, states = _states(source)
    names = torch.unique(answers)
    found = []
    for index, partner in partners.items():
        k, width = model.backbone.layers[index].block.centroids.vectors.shape
        if partner not in states or states[partner].shape[1] != width:
            why = f"its partner, layer {partner}, has no states of {width} channels"
            found.append(NewCentroids(index, None, f"layer {index}: random centroids: {why}"))
            continue
        if k != 1 + len(names):
            raise ConfigError(
                f"model.state_centroids is {k}: where a run starts from one without, they are zero"
                f" and the mean of its states for each answer, and {source.cfg.run_dir} has"
                f" {len(names)} answers: set {1 + len(names)}"
            )
        means = torch.stack([states[partner][answers == name].mean(0) for name in names])
        vectors = torch.cat([torch.zeros_like(means[:1]), means])
        text = f"layer {index}: {k} centroids, zero and the means of {len(answers):,} states"
        found.append(NewCentroids(index, vectors, f"{text} by their {len(names)} answers"))
    return found


@torch.no_grad()
def start(model: torch.nn.Module, found: list[NewCentroids]) -> list[str]:
    """Give them to the model → what was done, in words."""
    for layer, vectors, _ in found:
        if vectors is None:
            continue
        centroids = model.backbone.layers[layer].block.centroids
        centroids.vectors.copy_(vectors)
        centroids.log_sharpness.fill_(math.log(SHARPNESS))
    return [said for *_, said in found]


@torch.no_grad()
def _states(source: Loaded) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """The answers at the ends of training sequences (n,), and of every fixed-point layer the states
    there, (n,d)."""
    cfg, task, model = source.cfg, source.task, source.model
    device = next(model.parameters()).device
    answers: list[torch.Tensor] = []
    states: dict[int, list[torch.Tensor]] = {}
    for number in range(BATCHES):
        batch = task.batch(cfg.seed, "train", number, SEQUENCES, cfg.train.lengths)
        ids, labels, mask = as_tensors(batch, device)
        ends = labels.new_full((len(ids),), ids.shape[1] - 1)
        if mask is not None:
            ends = mask.sum(1) - 1
        last = labels.gather(1, ends.unsqueeze(1)).squeeze(1)
        asked = last != IGNORE
        answers.append(last[asked])
        end = model(input_ids=ids, attention_mask=mask, return_state=True).state
        for index, layer in enumerate(end.layers):
            if isinstance(layer, BlockState):
                states.setdefault(index, []).append(layer.y[asked])
    if not sum(map(len, answers)):
        raise ConfigError(
            f"model.state_centroids: no sequence of {cfg.task.name} ends in an answer, by which"
            " states could be told apart"
        )
    return torch.cat(answers), {index: torch.cat(parts) for index, parts in states.items()}
