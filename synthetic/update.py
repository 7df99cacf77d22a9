"""One update of the trainer: its iteration limit, its loss and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from lm.model.state import Adversary
from synthetic import tasks
from synthetic.config import Config
from synthetic.evaluate import Answers, Tensors, compute_answers


def max_iters_at(cfg: Config, update: int) -> int:
    """Return ℓmax of an update: fixed, unlimited, or drawn from ⌈Γ(shape, 1)⌉ (paper, Fig. 6)."""
    settings = cfg.train
    if settings.max_iters == "config":
        return cfg.solver.max_iters
    if settings.max_iters == "unlimited":
        return 10**9  # the solver's damping gives up long before
    if settings.max_iters == "gamma":
        rng = np.random.default_rng([cfg.seed, len(tasks.SPLITS), update])
        return int(np.ceil(rng.gamma(settings.gamma_shape)))
    return settings.max_iters


def compute_loss(
    model: nn.Module,
    tensors: Tensors,
    state: Any,
    carries_state: bool,
    autocast: Callable[[], AbstractContextManager],
) -> tuple[torch.Tensor, Answers]:
    """Compute the mean loss over the scored labels.

    Args:
        model: The model.
        tensors: The batch, all of shape (b,l).
        state: State that the batch continues, or None.
        carries_state: Whether the model takes and returns a state.
        autocast: Returns the context of the forward pass.

    Returns:
        The loss and the answers.
    """
    with autocast():
        answers = compute_answers(
            model, tensors.input_ids, tensors.mask, state, carries_state, token_by_token=False
        )
    count = (tensors.labels != tasks.IGNORE).sum()
    total = F.cross_entropy(
        answers.logits.float().flatten(0, 1),
        tensors.labels.flatten(),
        ignore_index=tasks.IGNORE,
        reduction="sum",
    )
    return total / count.clamp_min(1), answers  # a segment of a stream may contain no answer


def backward(
    forward: Callable[[], tuple[torch.Tensor, Answers]], adversary: Adversary | None
) -> tuple[torch.Tensor, Answers, torch.Tensor | None]:
    """Run a forward and a backward pass, and with an adversary a second pair with its noise.

    With an adversary, the gradient is the mean over both passes.

    Args:
        forward: Runs the forward pass on the batch and returns the loss and the answers.
        adversary: Source of the noise that increases the loss, or None.

    Returns:
        The loss and the answers of the first pass, and the loss of the second pass or None.
    """
    if adversary is None:
        loss, answers = forward()
        loss.backward()
        return loss, answers, None
    with adversary.first_pass():
        loss, answers = forward()
    (loss / 2).backward()
    with adversary.second_pass():
        adversarial_loss, _ = forward()
    (adversarial_loss / 2).backward()
    return loss, answers, adversarial_loss
