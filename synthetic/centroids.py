"""Initial centroids (`model.state_centroids`) of a model that starts from a run without them.

In a layer with centroids, projections read a weighted mean of k learned vectors, the centroids,
instead of the recurrent state (`lm.model.layers.Centroids`). Here they start as means of the states
of the run that the model starts from.

Shapes: b sequences, l tokens, n sequences that end in an answer, d channels, k centroids.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch

from lm.common.errors import ConfigError
from lm.model.state import BlockState
from synthetic.build import LoadedRun
from synthetic.evaluate import move_to_device
from synthetic.tasks import IGNORE

# Training data from which the states come.
NUM_BATCHES = 16
SEQUENCES_PER_BATCH = 512
# Initial sharpness β of the weights: 16 mixes several centroids in A5; 64 and 1,000 are alike.
SHARPNESS = 64.0
MIN_STATES = 30  # states per pair of answer and last token: fewer give no reliable mean


class NewCentroids(NamedTuple):
    """Initial centroids of a layer."""

    layer: int  # index in the model
    vectors: torch.Tensor | None  # (k,d); None: random, as in any new layer
    description: str


def compute_centroids(
    model: torch.nn.Module,
    new_names: list[str],
    partners: list[int | None],
    source: LoadedRun,
    task_difference: str,
) -> list[NewCentroids]:
    """Compute the centroids of every layer that has them although its partner does not.

    The partner is the source's layer whose weights the layer starts from. The centroids are means
    of the partner's states, one for each answer. After two sequences with the same answer, the
    states of a layer that answers correctly may still differ, and later states inherit the
    difference. With the mean in place of both states, the sequences continue alike. If a state
    determines the answer only together with the last token, each pair of answer and last token has
    its own mean. The centroids stay random if the partner has no such states or was trained on
    another task.

    Args:
        model: The new model.
        new_names: Names of the model's parameters that the source does not have.
        partners: For every layer, the index of its partner in the source, or None.
        source: The run that the model starts from.
        task_difference: Description of how the two tasks differ; "" if they are the same.

    Raises:
        ConfigError: If the number of centroids is neither the number of answers nor the number of
            pairs of answer and last token, or if no sequence ends in an answer.
    """
    partner_by_layer = {
        layer: partner
        for layer, partner in enumerate(partners)
        if partner is not None and f"backbone.layers.{layer}.block.centroids.vectors" in new_names
    }
    if not partner_by_layer:
        return []
    ends = None if task_difference else _read_sequence_ends(source)
    centroids = []
    for layer, partner in partner_by_layer.items():
        k, width = model.backbone.layers[layer].block.centroids.vectors.shape
        states = ends.states.get(partner) if ends else None
        if ends and states is not None and states.shape[1] == width:
            means, description = _choose_means(k, states, ends, source.cfg.run_dir)
            centroids.append(NewCentroids(layer, means, f"layer {layer}: {description}"))
            continue
        reason = (
            task_difference or f"its partner, layer {partner}, has no states of {width} channels"
        )
        centroids.append(NewCentroids(layer, None, f"layer {layer}: random centroids: {reason}"))
    return centroids


@torch.no_grad()
def set_centroids(model: torch.nn.Module, centroids: list[NewCentroids]) -> list[str]:
    """Copy the centroids into the model, and return their descriptions."""
    for layer, vectors, _ in centroids:
        if vectors is None:
            continue
        layer_centroids = model.backbone.layers[layer].block.centroids
        layer_centroids.vectors.copy_(vectors)
        layer_centroids.log_sharpness.fill_(math.log(SHARPNESS))
    return [new.description for new in centroids]


def _choose_means(
    k: int, states: torch.Tensor, ends: _SequenceEnds, run_dir: Path
) -> tuple[torch.Tensor, str]:
    """Choose the k means of states (n,d) that become the centroids, and describe them.

    Raises:
        ConfigError: If k is not a possible number of means.
    """
    by_answer, by_pair = _Means.compute(states, ends.answers), _Means.compute(states, ends.pairs)
    token_count = len(torch.unique(ends.pairs[:, 1]))
    # Means by pair need every pair often enough. 8,192 states contain every pair of a small group
    # many times, but every pair of A5 only two or three times.
    has_all_pairs = len(by_pair.vectors) == len(by_answer.vectors) * token_count
    can_use_pairs = has_all_pairs and token_count > 1 and by_pair.smallest_count >= MIN_STATES
    if k == len(by_answer.vectors):
        means, labels = by_answer, "answers"
    elif can_use_pairs and k == len(by_pair.vectors):
        means, labels = by_pair, "pairs of answer and last token"
    else:
        or_pairs = f"; for each pair of answer and last token: {len(by_pair.vectors)}"
        raise ConfigError(
            f"model.state_centroids is {k}: if a run starts from one without centroids, they are"
            f" the means of its states, one for each answer, and {run_dir} has"
            f" {len(by_answer.vectors)} answers: set {len(by_answer.vectors)}"
            f"{or_pairs if can_use_pairs else ''}"
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
        _, label_index = torch.unique(labels, dim=0, return_inverse=True)
        counts = label_index.bincount()
        states64 = states.double()
        sums = states64.new_zeros(len(counts), states.shape[1]).index_add(0, label_index, states64)
        return cls((sums / counts.unsqueeze(1)).to(states), int(counts.min()))


class _SequenceEnds(NamedTuple):
    """Answers, last tokens and states at the end of n training sequences of a run."""

    answers: torch.Tensor  # (n,)
    pairs: torch.Tensor  # (n,2): answer and last token
    states: dict[int, torch.Tensor]  # fixed-point layer → its states, (n,d)


@torch.no_grad()
def _read_sequence_ends(source: LoadedRun) -> _SequenceEnds:
    """Run the source's model on training sequences, and collect answers and states at their ends.

    Raises:
        ConfigError: If no sequence ends in an answer.
    """
    cfg, task, model = source.cfg, source.task, source.model
    device = next(model.parameters()).device
    pairs: list[torch.Tensor] = []
    states: dict[int, list[torch.Tensor]] = {}
    for number in range(NUM_BATCHES):
        batch = task.batch(cfg.seed, "train", number, SEQUENCES_PER_BATCH, cfg.train.lengths)
        ids, labels, mask = move_to_device(batch, device)
        last_position = labels.new_full((len(ids), 1), ids.shape[1] - 1)
        if mask is not None:
            last_position = mask.sum(1, keepdim=True) - 1
        answer = labels.gather(1, last_position)
        token = ids.gather(1, last_position)
        has_answer = answer[:, 0] != IGNORE
        pairs.append(torch.cat([answer, token], dim=1)[has_answer].cpu())
        state = model(input_ids=ids, attention_mask=mask, return_state=True).state
        for layer, layer_state in enumerate(state.layers):
            if isinstance(layer_state, BlockState):
                states.setdefault(layer, []).append(layer_state.y[has_answer].cpu())
    if not sum(map(len, pairs)):
        raise ConfigError(
            f"model.state_centroids: no sequence of {cfg.task.name} ends in an answer, which is"
            " needed to group its states"
        )
    all_pairs = torch.cat(pairs)
    all_states = {layer: torch.cat(batches) for layer, batches in states.items()}
    return _SequenceEnds(all_pairs[:, 0], all_pairs, all_states)
