"""Centroids of a model that starts from a run without them: the means of that run's states."""

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
# β. With 16, states of A5 mix several centroids; 64 and 1,000 are alike.
SHARPNESS = 64.0
MIN_STATES = 30  # of every pair of answer and last token: fewer give no reliable mean


class NewCentroids(NamedTuple):
    """Centroids that a layer starts with."""

    layer: int
    vectors: torch.Tensor | None  # (k,d); None: random, as in any new layer
    description: str


def new_centroids(
    model: torch.nn.Module,
    new: list[str],
    pairs: list[int | None],
    source: Loaded,
    other_task: str,
) -> list[NewCentroids]:
    """Compute the centroids of every layer that has them where its partner has none.

    They are the means of the partner's states, one mean for each answer. A layer that answers right
    need not be an automaton yet: its states after two sequences with the same answer differ, and
    the difference is carried on. Read as their mean, they continue alike. Where a state tells the
    answer only together with the last token, each pair of the two has a mean. The centroids stay
    random where the partner has no such states, or was trained on another task.

    Args:
        model: The model that starts.
        new: Names of the model's parameters that the source does not have.
        pairs: For every layer, the index of its partner in the source, or None.
        source: The run that the model starts from.
        other_task: How the two tasks differ, in words; "" if they are the same.

    Raises:
        ConfigError: If the number of centroids is neither the number of answers nor the number of
            pairs of answer and last token, or if no sequence ends in an answer.
    """
    partners = {
        index: partner
        for index, partner in enumerate(pairs)
        if partner is not None and f"backbone.layers.{index}.block.centroids.vectors" in new
    }
    if not partners:
        return []
    ends = None if other_task else _ends(source)
    found = []
    for index, partner in partners.items():
        k, width = model.backbone.layers[index].block.centroids.vectors.shape
        states = ends.states.get(partner) if ends else None
        if ends and states is not None and states.shape[1] == width:
            means, description = _choose_means(k, states, ends, source.cfg.run_dir)
            found.append(NewCentroids(index, means, f"layer {index}: {description}"))
            continue
        why = other_task or f"its partner, layer {partner}, has no states of {width} channels"
        found.append(NewCentroids(index, None, f"layer {index}: random centroids: {why}"))
    return found


@torch.no_grad()
def start(model: torch.nn.Module, found: list[NewCentroids]) -> list[str]:
    """Give the model its centroids, and return what was done, in words."""
    for layer, vectors, _ in found:
        if vectors is None:
            continue
        centroids = model.backbone.layers[layer].block.centroids
        centroids.vectors.copy_(vectors)
        centroids.log_sharpness.fill_(math.log(SHARPNESS))
    return [new.description for new in found]


def _choose_means(
    k: int, states: torch.Tensor, ends: _Ends, run_dir: Path
) -> tuple[torch.Tensor, str]:
    """Choose the k means of states (n,d) that the centroids start as, and describe them."""
    by_answer, by_pair = _Means.of(states, ends.answers), _Means.of(states, ends.pairs)
    token_count = len(torch.unique(ends.pairs[:, 1]))
    # 8,192 states show all pairs of a small group, and often; of A5 they have two or three a pair.
    has_pairs = len(by_pair.vectors) == len(by_answer.vectors) * token_count
    has_pairs = has_pairs and token_count > 1 and by_pair.smallest_count >= MIN_STATES
    if k == len(by_answer.vectors):
        means, names = by_answer, "answers"
    elif has_pairs and k == len(by_pair.vectors):
        means, names = by_pair, "pairs of answer and last token"
    else:
        or_pairs = f"; for each pair of answer and last token: {len(by_pair.vectors)}"
        raise ConfigError(
            f"model.state_centroids is {k}: where a run starts from one without centroids, they are"
            f" the means of its states, one for each answer, and {run_dir} has"
            f" {len(by_answer.vectors)} answers: set {len(by_answer.vectors)}"
            f"{or_pairs if has_pairs else ''}"
        )
    return means.vectors, f"{k} centroids, the means of {len(states):,} states by their {k} {names}"


class _Means(NamedTuple):
    """Means of states, one for each name."""

    vectors: torch.Tensor  # (k,d), names in order
    smallest_count: int  # states of the rarest name

    @classmethod
    def of(cls, states: torch.Tensor, names: torch.Tensor) -> _Means:
        """Compute the means of states (n,d) by names (n,), or (n,m) where m numbers are a name."""
        _, number = torch.unique(names, dim=0, return_inverse=True)
        counts, exact = number.bincount(), states.double()
        sums = exact.new_zeros(len(counts), exact.shape[1]).index_add(0, number, exact)
        return cls((sums / counts.unsqueeze(1)).to(states), int(counts.min()))


class _Ends(NamedTuple):
    """Answers, last tokens and states at the end of n training sequences of a run."""

    answers: torch.Tensor  # (n,)
    pairs: torch.Tensor  # (n,2): answer and last token
    states: dict[int, torch.Tensor]  # of every fixed-point layer, (n,d)


@torch.no_grad()
def _ends(source: Loaded) -> _Ends:
    cfg, task, model = source.cfg, source.task, source.model
    device = next(model.parameters()).device
    pairs: list[torch.Tensor] = []
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
        pairs.append(last[asked].cpu())
        end = model(input_ids=ids, attention_mask=mask, return_state=True).state
        for index, layer in enumerate(end.layers):
            if isinstance(layer, BlockState):
                states.setdefault(index, []).append(layer.y[asked].cpu())
    if not sum(map(len, pairs)):
        raise ConfigError(
            f"model.state_centroids: no sequence of {cfg.task.name} ends in an answer, by which"
            " states could be told apart"
        )
    both = torch.cat(pairs)
    return _Ends(both[:, 0], both, {index: torch.cat(parts) for index, parts in states.items()})
