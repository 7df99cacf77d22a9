"""One update of the trainer: its limit on iterations, its loss and gradient."""

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
from synthetic.evaluate import Answers, Tensors, answer


def max_iters_at(cfg: Config, update: int) -> int:
    """Return ℓmax of an update: fixed, none, or drawn from ⌈Γ(shape, 1)⌉ (paper, Fig. 6)."""
    settings = cfg.train
    if settings.max_iters == "config":
        return cfg.solver.max_iters
    if settings.max_iters == "unlimited":
        return 10**9  # the solver's own damping gives up long before
    if settings.max_iters == "gamma":
        rng = np.random.default_rng([cfg.seed, len(tasks.SPLITS), update])
        return int(np.ceil(rng.gamma(settings.gamma_shape)))
    return settings.max_iters


def loss_of(
    model: nn.Module,
    tensors: Tensors,
    state: Any,
    carries_state: bool,
    autocast: Callable[[], AbstractContextManager],
) -> tuple[torch.Tensor, Answers]:
    """The mean loss over the labels that count, and what `answer` returns.

    Args: state: that the batch continues, or None.
    """
    with autocast():
        answers = answer(
            model, tensors.input_ids, tensors.mask, state, carries_state, token_by_token=False
        )
    count = (tensors.labels != tasks.IGNORE).sum()
    total = F.cross_entropy(
        answers.logits.float().flatten(0, 1),
        tensors.labels.flatten(),
        ignore_index=tasks.IGNORE,
        reduction="sum",
    )
    return total / count.clamp_min(1), answers  # a segment of a stream may hold no answer


def backward(
    one_pass: Callable[[], tuple[torch.Tensor, Answers]], adversary: Adversary | None
) -> tuple[torch.Tensor, Answers, torch.Tensor | None]:
    """The gradient of one pass over a batch, or of the mean of it and one against an adversary.

    Returns: the loss and the answers of the first pass, and the loss of the second or None.
    """
    if adversary is None:
        loss, answers = one_pass()
        loss.backward()
        return loss, answers, None
    with adversary.first_pass():
        loss, answers = one_pass()
    (loss / 2).backward()
    with adversary.second_pass():
        adversarial_loss, _ = one_pass()
    (adversarial_loss / 2).backward()
    return loss, answers, adversarial_loss
