"""Centroids of a model that starts from a run without them: means of that run's states."""

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
MIN_STATES = 30  # for each pair of answer and last token: fewer give no reliable mean


class NewCentroids(NamedTuple):
    """Initial centroids of a layer."""

    layer: int
    vectors: torch.Tensor | None  # (k,d); None: random, as in any new layer
    description: str


def compute_centroids(
    model: torch.nn.Module,
    new: list[str],
    pairs: list[int | None],
    source: Loaded,
    task_difference: str,
) -> list[NewCentroids]:
    """Compute the centroids of every layer that has them although its partner does not.

    The centroids are means of the partner's states, one for each answer. A layer that answers
    correctly need not be an automaton yet: its states after two sequences with the same answer
    differ, and the difference is carried on. If the layer reads their mean instead, both continue
    alike. If a state determines the answer only together with the last token, each pair of answer
    and last token gets a mean. The centroids stay random if the partner has no such states or was
    trained on another task.

    Args:
        model: The model that starts.
        new: Names of the model's parameters that the source does not have.
        pairs: For every layer, the index of its partner in the source, or None.
        source: The run that the model starts from.
        task_difference: Description of how the two tasks differ; "" if they are the same.

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
    ends = None if task_difference else _read_ends(source)
    centroids = []
    for index, partner in partners.items():
        k, width = model.backbone.layers[index].block.centroids.vectors.shape
        states = ends.states.get(partner) if ends else None
        if ends and states is not None and states.shape[1] == width:
            means, description = _choose_means(k, states, ends, source.cfg.run_dir)
            centroids.append(NewCentroids(index, means, f"layer {index}: {description}"))
            continue
        reason = (
            task_difference or f"its partner, layer {partner}, has no states of {width} channels"
        )
        centroids.append(NewCentroids(index, None, f"layer {index}: random centroids: {reason}"))
    return centroids


@torch.no_grad()
def set_centroids(model: torch.nn.Module, centroids: list[NewCentroids]) -> list[str]:
    """Copy the centroids into the model, and return their descriptions."""
    for index, vectors, _ in centroids:
        if vectors is None:
            continue
        layer_centroids = model.backbone.layers[index].block.centroids
        layer_centroids.vectors.copy_(vectors)
        layer_centroids.log_sharpness.fill_(math.log(SHARPNESS))
    return [new.description for new in centroids]


def _choose_means(
    k: int, states: torch.Tensor, ends: _Ends, run_dir: Path
) -> tuple[torch.Tensor, str]:
    """Choose the k means of states (n,d) that become the centroids, and describe them.

    Raises:
        ConfigError: If k is not a possible number of means.
    """
    by_answer, by_pair = _Means.compute(states, ends.answers), _Means.compute(states, ends.pairs)
    token_count = len(torch.unique(ends.pairs[:, 1]))
    # 8,192 states contain every pair of a small group many times, but every pair of A5 only two or
    # three times.
    has_pairs = len(by_pair.vectors) == len(by_answer.vectors) * token_count
    has_pairs = has_pairs and token_count > 1 and by_pair.smallest_count >= MIN_STATES
    if k == len(by_answer.vectors):
        means, labels = by_answer, "answers"
    elif has_pairs and k == len(by_pair.vectors):
        means, labels = by_pair, "pairs of answer and last token"
    else:
        or_pairs = f"; for each pair of answer and last token: {len(by_pair.vectors)}"
        raise ConfigError(
            f"model.state_centroids is {k}: if a run starts from one without centroids, they are"
            f" the means of its states, one for each answer, and {run_dir} has"
            f" {len(by_answer.vectors)} answers: set {len(by_answer.vectors)}"
            f"{or_pairs if has_pairs else ''}"
        )
    return (
        means.vectors,
        f"{k} centroids, the means of {len(states):,} states by their {k} {labels}",
    )


class _Means(NamedTuple):
    """Means of states, one for each label."""

    vectors: torch.Tensor  # (k,d), sorted by label
    smallest_count: int  # number of states with the rarest label

    @classmethod
    def compute(cls, states: torch.Tensor, labels: torch.Tensor) -> _Means:
        """Compute the means of states (n,d) by labels (n,), or by rows of labels (n,m)."""
        _, number = torch.unique(labels, dim=0, return_inverse=True)
        counts, exact = number.bincount(), states.double()
        sums = exact.new_zeros(len(counts), exact.shape[1]).index_add(0, number, exact)
        return cls((sums / counts.unsqueeze(1)).to(states), int(counts.min()))


class _Ends(NamedTuple):
    """Answers, last tokens and states at the end of n training sequences of a run."""

    answers: torch.Tensor  # (n,)
    pairs: torch.Tensor  # (n,2): answer and last token
    states: dict[int, torch.Tensor]  # of every fixed-point layer, (n,d)


@torch.no_grad()
def _read_ends(source: Loaded) -> _Ends:
    """Run the source's model on training sequences and collect their ends.

    Raises:
        ConfigError: If no sequence ends in an answer.
    """
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
        has_answer = last[:, 0] != IGNORE
        pairs.append(last[has_answer].cpu())
        state = model(input_ids=ids, attention_mask=mask, return_state=True).state
        for index, layer in enumerate(state.layers):
            if isinstance(layer, BlockState):
                states.setdefault(index, []).append(layer.y[has_answer].cpu())
    if not sum(map(len, pairs)):
        raise ConfigError(
            f"model.state_centroids: no sequence of {cfg.task.name} ends in an answer, which is"
            " needed to group its states"
        )
    all_pairs = torch.cat(pairs)
    all_states = {index: torch.cat(parts) for index, parts in states.items()}
    return _Ends(all_pairs[:, 0], all_pairs, all_states)
