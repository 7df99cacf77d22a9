"""The centroids of a model that starts from a run without: zero, and the mean of each answer."""

from __future__ import annotations

import math

import torch

from lm.common.errors import ConfigError
from lm.model.state import BlockState
from synthetic.build import Loaded
from synthetic.evaluate import as_tensors
from synthetic.tasks import IGNORE

BATCHES, SEQUENCES = 16, 512  # of training data
# β: at a mean of the states the others weigh e^(−β/2) to the power of how far they lie, in the
# states' own size. On A5 16 lets states mix; 64 and 1,000 are alike.
SHARPNESS = 64.0


def start_centroids(
    model: torch.nn.Module, new: list[str], pairs: list[int | None], source: Loaded
) -> list[str]:
    """Give every layer whose centroids are new those of its partner's states: first zero, which is
    read where there is no token before, then the mean for each answer → what was done, in words.

    A layer that answers right need not be an automaton yet: its states after two sequences of the
    same answer may differ, and what differs is carried on (docs/fixed-point.md). The mean of the
    states with one answer is a state from which the layer goes on rightly.

    Args:
        new: names of the model's parameters that the source has not. pairs: of every layer the
        number of its partner in the source, or None.
    Raises:
        ConfigError: another number of centroids than answers, or no answer at the end of a
            sequence.
    """
    layers = [
        index
        for index, partner in enumerate(pairs)
        if partner is not None and f"backbone.layers.{index}.block.centroids.vectors" in new
    ]
    if not layers:
        return []
    answers, states = _states(source)
    names = torch.unique(answers)
    said = []
    for index in layers:
        partner = pairs[index]
        assert partner is not None
        centroids = model.backbone.layers[index].block.centroids
        k = len(centroids.vectors)
        if k != 1 + len(names):
            raise ConfigError(
                f"model.state_centroids is {k}: where a run starts from one without, they are zero"
                f" and the means of its states by answer, and {source.cfg.run_dir} has"
                f" {len(names)} answers: set {1 + len(names)}"
            )
        of_layer = states[partner]
        with torch.no_grad():
            centroids.vectors[0] = 0
            for row, name in enumerate(names):
                centroids.vectors[1 + row] = of_layer[answers == name].mean(0)
            centroids.log_sharpness.fill_(math.log(SHARPNESS))
        said.append(
            f"layer {index}: {k} centroids, zero and the means by answer of {len(answers):,} states"
            f" of its layer {partner}"
        )
    return said


@torch.no_grad()
def _states(source: Loaded) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """The answers at the ends of training sequences (n,), and of every fixed-point layer the states
    there, (n,d)."""
    cfg, task, model = source.cfg, source.task, source.model
    answers: list[torch.Tensor] = []
    states: dict[int, list[torch.Tensor]] = {}
    for number in range(BATCHES):
        batch = task.batch(cfg.seed, "train", number, SEQUENCES, cfg.train.lengths)
        ids, labels, mask = as_tensors(batch, "cpu")
        ends = torch.full((len(ids),), ids.shape[1] - 1) if mask is None else mask.sum(1) - 1
        last = labels.gather(1, ends.unsqueeze(1)).squeeze(1)
        answers.append(last[last != IGNORE])
        end = model(input_ids=ids, attention_mask=mask, return_state=True).state
        for index, layer in enumerate(end.layers):
            if isinstance(layer, BlockState):
                states.setdefault(index, []).append(layer.y[last != IGNORE])
    if not sum(map(len, answers)):
        raise ConfigError(
            f"model.state_centroids: no sequence of {cfg.task.name} ends in an answer, by which"
            " states could be told apart"
        )
    return torch.cat(answers), {index: torch.cat(parts) for index, parts in states.items()}
