"""One update of the trainer: its iteration limit, its loss and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from lm.model.state import Adversary
from synthetic import tasks
from synthetic.config import GAMMA_SHAPE, Config
from synthetic.evaluate import Answers, BatchTensors, compute_answers


def choose_max_iters(cfg: Config, update: int) -> int:
    """Choose ℓmax of an update: fixed, unlimited, or drawn from ⌈Γ(shape, 1)⌉ (paper, Fig. 6)."""
    settings = cfg.train
    if settings.max_iters == "config":
        return cfg.solver.max_iters
    if settings.max_iters == "unlimited":
        return 10**9  # never reached: the solver stops when its damped step size is tiny
    if settings.max_iters == "gamma":
        # Data use the seeds [seed, index of the split, batch]; no split has the index len(SPLITS).
        rng = np.random.default_rng([cfg.seed, len(tasks.SPLITS), update])
        return int(np.ceil(rng.gamma(GAMMA_SHAPE)))
    return settings.max_iters


def compute_loss(
    model: nn.Module,
    tensors: BatchTensors,
    state: Any,
    carries_state: bool,
    autocast: Callable[[], AbstractContextManager],
) -> tuple[torch.Tensor, Answers]:
    """Compute the mean loss over the scored labels.

    Args:
        model: The model.
        tensors: The batch, all of shape (b,l).
        state: Recurrent state at the start of the batch; None: an empty state.
        carries_state: Whether the model takes and returns a state.
        autocast: Function that returns the autocast context of the forward pass.

    Returns:
        The loss and the answers.
    """
    with autocast():
        answers = compute_answers(
            model, tensors.input_ids, tensors.mask, state, carries_state, token_by_token=False
        )
    scored_count = (tensors.labels != tasks.IGNORE).sum()
    total_loss = F.cross_entropy(
        answers.logits.float().flatten(0, 1),
        tensors.labels.flatten(),
        ignore_index=tasks.IGNORE,
        reduction="sum",
    )
    return total_loss / scored_count.clamp_min(1), answers  # a stream's segment may have no answer


class BackwardResult(NamedTuple):
    """Losses and answers of an update."""

    loss: torch.Tensor
    answers: Answers  # of the first pass
    adversarial_loss: torch.Tensor | None  # of the second pass; None without an adversary


def run_passes(
    forward: Callable[[], tuple[torch.Tensor, Answers]], adversary: Adversary | None
) -> BackwardResult:
    """Run forward and backward; with an adversary, run both again under its noise.

    With an adversary, the gradient is the mean over both passes.

    Args:
        forward: Runs the forward pass on the batch and returns the loss and the answers.
        adversary: Source of the noise that increases the loss, or None.

    Returns:
        The losses and the answers; the gradients are in the parameters.
    """
    if adversary is None:
        loss, answers = forward()
        loss.backward()
        return BackwardResult(loss, answers, None)
    with adversary.first_pass():
        loss, answers = forward()
    (loss / 2).backward()
    with adversary.second_pass():
        adversarial_loss, _ = forward()
    (adversarial_loss / 2).backward()
    return BackwardResult(loss, answers, adversarial_loss)
