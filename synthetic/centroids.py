"""The centroids of a model that starts from a run without: zero, and means of that run's states."""

from __future__ import annotations

import math
from dataclasses import dataclass
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
# A smaller share of the states' variance between the means of answers is warned of: it was 0.57
# where the automaton was right at once, 0.002 where it had to learn anew (docs/fixed-point.md).
LEAST_BETWEEN = 0.05
LEAST_STATES = 30  # of every pair of answer and last token: fewer make no mean


class NewCentroids(NamedTuple):
    """What the centroids of a layer start as."""

    layer: int
    vectors: torch.Tensor | None  # (k,d); None: as those of any new layer
    said: tuple[str, ...]  # what they are, in words; a warning, if there is one


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
            NewCentroids(index, None, (f"layer {index}: random centroids: {other_task}",))
            for index in partners
        ]
    ends = _ends(source)
    found = []
    for index, partner in partners.items():
        k, width = model.backbone.layers[index].block.centroids.vectors.shape
        states = ends.states.get(partner)
        if states is None or states.shape[1] != width:
            why = f"its partner, layer {partner}, has no states of {width} channels"
            found.append(NewCentroids(index, None, (f"layer {index}: random centroids: {why}",)))
            continue
        means, said, warning = _chosen_means(k, states, ends, source.cfg.run_dir)
        vectors = torch.cat([torch.zeros_like(means[:1]), means])
        sentences = [f"layer {index}: {said}"]
        if warning:
            sentences.append(f"warning: layer {index}: {warning}")
        found.append(NewCentroids(index, vectors, tuple(sentences)))
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
    return [sentence for new in found for sentence in new.said]


def _chosen_means(
    k: int, states: torch.Tensor, ends: _Ends, run_dir: Path
) -> tuple[torch.Tensor, str, str]:
    """The means of states (n,d) that k centroids start as, beside zero; what they are; a warning
    where they do not tell answers apart, else ""."""
    by_answer, by_pair = _Means.of(states, ends.answers), _Means.of(states, ends.pairs)
    by_token = len(torch.unique(ends.pairs[:, 1]))
    # 8,192 states show all pairs of a small group, and often; of A5 they have two or three a pair.
    has_pairs = len(by_pair) == len(by_answer) * by_token > len(by_answer)
    has_pairs = has_pairs and by_pair.fewest >= LEAST_STATES
    if k == 1 + len(by_answer):
        means, names = by_answer, "answers"
    elif has_pairs and k == 1 + len(by_pair):
        means, names = by_pair, "pairs of answer and last token"
    else:
        or_pairs = f"; or for each answer and last token: set {1 + len(by_pair)}"
        raise ConfigError(
            f"model.state_centroids is {k}: where a run starts from one without, they are zero and"
            f" the mean of its states for each answer, and {run_dir} has"
            f" {len(by_answer)} answers: set {1 + len(by_answer)}{or_pairs if has_pairs else ''}"
        )
    said = (
        f"{k} centroids, zero and the means of {len(states):,} states by their {len(means)} {names}"
        f" ({means.between:.1%} of the variance is between them)"
    )
    warning = ""
    if means is by_answer and len(by_answer) > 1 and means.between < LEAST_BETWEEN:
        warning = "the states hardly tell the answers apart, and the layer learns anew"
        if has_pairs and by_pair.between >= LEAST_BETWEEN:
            warning += (
                f"; they do beside the last token: {by_pair.between:.1%} is between its pairs with"
                f" the answer, model.state_centroids={1 + len(by_pair)}"
            )
    return means.vectors, said, warning


@dataclass(frozen=True)
class _Means:
    """Means of states by a name each, and the share of the states' variance between them."""

    vectors: torch.Tensor  # (k,d), names in order
    between: float  # less what means of so few states have between them by chance
    fewest: int  # states of one name

    def __len__(self) -> int:
        return len(self.vectors)

    @classmethod
    def of(cls, states: torch.Tensor, names: torch.Tensor) -> _Means:
        """Of states (n,d) by names (n,), or (n,m) where m numbers name a state."""
        _, number = torch.unique(names, dim=0, return_inverse=True)
        counts, exact = number.bincount(), states.double()
        sums = exact.new_zeros(len(counts), exact.shape[1]).index_add(0, number, exact)
        vectors = sums / counts.unsqueeze(1)
        n, k = len(states), len(counts)
        deviations = (exact - exact.mean(0)).square().sum()
        within = (exact - vectors[number]).square().sum()
        between = 0.0
        # States that are alike but for rounding have nothing between them.
        if deviations > torch.finfo(states.dtype).eps ** 2 * exact.square().sum() and n > k:
            between = max(0.0, 1 - float(within / deviations) * (n - 1) / (n - k))
        return cls(vectors.to(states), between, int(counts.min()))


class _Ends(NamedTuple):
    """What n training sequences of a run end in."""

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
