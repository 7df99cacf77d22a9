"""The centroids of a model that starts from a run without: zero, and means of that run's states."""

from __future__ import annotations

import math
from pathlib import Path
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
# The share of the states' variance that lies between means which tell the answers apart. Of groups
# whose automaton was right it was half, of one that was lost 0.003 (docs/fixed-point.md).
LEAST_BETWEEN = 0.05


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
    A state that tells the answer only beside the last token has a mean for each pair of the two.

    Args:
        new: names of the model's parameters that the source has not. pairs: of every layer the
        number of its partner in the source, or None. other_task: in what the tasks differ; "": in
        nothing.
    Raises:
        ConfigError: another number of centroids than answers, or than pairs of answer and last
            token; no answer at a sequence's end.
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
    ends = _ends(source)
    found = []
    for index, partner in partners.items():
        k, width = model.backbone.layers[index].block.centroids.vectors.shape
        states = ends.states.get(partner)
        if states is None or states.shape[1] != width:
            why = f"its partner, layer {partner}, has no states of {width} channels"
            found.append(NewCentroids(index, None, f"layer {index}: random centroids: {why}"))
            continue
        means, said = _means(k, states, ends, source.cfg.run_dir)
        vectors = torch.cat([torch.zeros_like(means[:1]), means])
        found.append(NewCentroids(index, vectors, f"layer {index}: {said}"))
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


def _means(k: int, states: torch.Tensor, ends: _Ends, run_dir: Path) -> tuple[torch.Tensor, str]:
    """The means of states (n,d) that k centroids start as, beside zero, and what they are."""
    by_answer = _Means.of(states, ends.answers)
    by_both = _Means.of(states, ends.answers_tokens)
    if k == 1 + len(by_answer.vectors):
        means, names = by_answer, "answers"
    elif k == 1 + len(by_both.vectors):
        means, names = by_both, "answers and last tokens"
    else:
        raise ConfigError(
            f"model.state_centroids is {k}: where a run starts from one without, they are zero and"
            f" the mean of its states for each answer, and {run_dir} has"
            f" {len(by_answer.vectors)} answers: set {1 + len(by_answer.vectors)}; or for each"
            f" answer and last token: set {1 + len(by_both.vectors)}"
        )
    said = (
        f"{k} centroids, zero and the means of {len(states):,} states by their"
        f" {len(means.vectors)} {names}, between which is {means.between:.1%} of the variance"
    )
    if means is by_answer and means.between < LEAST_BETWEEN:
        said += (
            f": too little to tell answers apart; by answers and last tokens it is"
            f" {by_both.between:.1%} (model.state_centroids={1 + len(by_both.vectors)})"
        )
    return means.vectors, said


class _Means(NamedTuple):
    """Means of states by a name each, (k,d), names in order, and the share of the states' variance
    that lies between these means."""

    vectors: torch.Tensor
    between: float

    @classmethod
    def of(cls, states: torch.Tensor, names: torch.Tensor) -> _Means:
        """Of states (n,d) by names (n,), or (n,m) where m numbers name a state."""
        _, number = torch.unique(names, dim=0, return_inverse=True)
        counts = number.bincount()
        vectors = states.new_zeros(len(counts), states.shape[1])
        vectors = vectors.index_add(0, number, states) / counts.unsqueeze(1)
        of_all = (states - states.mean(0)).square().sum()
        within = (states - vectors[number]).square().sum()
        return cls(vectors, 1 - float(within / of_all))


class _Ends(NamedTuple):
    """What n training sequences of a run end in."""

    answers: torch.Tensor  # (n,)
    answers_tokens: torch.Tensor  # (n,2): with the last token
    states: dict[int, torch.Tensor]  # of every fixed-point layer, (n,d)


@torch.no_grad()
def _ends(source: Loaded) -> _Ends:
    cfg, task, model = source.cfg, source.task, source.model
    device = next(model.parameters()).device
    answers_tokens: list[torch.Tensor] = []
    states: dict[int, list[torch.Tensor]] = {}
    for number in range(BATCHES):
        batch = task.batch(cfg.seed, "train", number, SEQUENCES, cfg.train.lengths)
        ids, labels, mask = as_tensors(batch, device)
        ends = labels.new_full((len(ids),), ids.shape[1] - 1)
        if mask is not None:
            ends = mask.sum(1) - 1
        at_ends = ends.unsqueeze(1)
        last = torch.cat([labels.gather(1, at_ends), ids.gather(1, at_ends)], dim=1)
        asked = last[:, 0] != IGNORE
        answers_tokens.append(last[asked])
        end = model(input_ids=ids, attention_mask=mask, return_state=True).state
        for index, layer in enumerate(end.layers):
            if isinstance(layer, BlockState):
                states.setdefault(index, []).append(layer.y[asked])
    if not sum(map(len, answers_tokens)):
        raise ConfigError(
            f"model.state_centroids: no sequence of {cfg.task.name} ends in an answer, by which"
            " states could be told apart"
        )
    both = torch.cat(answers_tokens)
    return _Ends(both[:, 0], both, {index: torch.cat(parts) for index, parts in states.items()})
