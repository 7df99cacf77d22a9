"""One update of the trainer: its batch, its limit on iterations, its loss and gradient."""

from __future__ import annotations

import signal

import numpy as np
import torch
import torch.nn.functional as F

from lm.model.noise import Adversary
from lm.signals import STOP
from synthetic import tasks
from synthetic.config import Config
from synthetic.evaluate import answer


class Batches(torch.utils.data.Dataset):
    """Training batches by number; each is made from (seed, number) alone."""

    def __init__(self, task, cfg: Config, lengths: tuple[int, int], first: int):
        self.task, self.cfg, self.lengths, self.first = task, cfg, lengths, first

    def __len__(self):
        return 2**31  # more than anybody asks for: a rollback leaves some out

    def __getitem__(self, i):
        cfg = self.cfg
        return self.task.batch(
            cfg.seed, "train", self.first + i, cfg.train.batch_size, self.lengths
        )


def batches_from(task, cfg: Config, lengths: tuple[int, int], first: int):
    """Training batches from number `first` on."""
    loader = torch.utils.data.DataLoader(
        Batches(task, cfg, lengths, first),
        batch_size=None,
        collate_fn=lambda batch: batch,
        num_workers=cfg.train.workers,
        generator=torch.Generator(),  # leaves the global one be
        worker_init_fn=_leave_signals_to_the_trainer,
    )
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP)  # workers are born with it
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _leave_signals_to_the_trainer(_worker) -> None:
    """A launcher and a terminal send theirs to every process of a group."""
    for number in STOP:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)


class MaxIters:
    """ℓmax of every training step: fixed, none, or drawn from ⌈Γ(shape, 1)⌉ (paper, Fig. 6)."""

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def at(self, step: int) -> int:
        """ℓmax of an update."""
        t = self.cfg.train
        if t.max_iters == "config":
            return self.cfg.solver.max_iters
        if t.max_iters == "unlimited":
            return 10**9  # the solver's own damping gives up long before
        if t.max_iters == "gamma":
            rng = np.random.default_rng([self.cfg.seed, len(tasks.SPLITS), step])
            return int(np.ceil(rng.gamma(t.gamma_shape)))
        return t.max_iters


def loss_of(model, ids, mask, labels, state, carries, autocast):
    """The mean loss over the labels that count, and what `answer` returns."""
    with autocast():
        logits, solved, state = answer(model, ids, mask, state, carries, False)
    count = (labels != tasks.IGNORE).sum()
    loss = F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=tasks.IGNORE, reduction="sum"
    ) / count.clamp_min(1)  # a segment of a stream may hold no answer
    if solved[0] is not None:
        loss = loss + solved[0].penalty.mean()
    return loss, logits, solved, state


def backward(one_pass, adversary: Adversary | None):
    """The gradient of one pass over a batch, or of the mean of it and one against an adversary.

    Args: one_pass: () → what `loss_of` returns.
    Returns: what the first pass returned, and the second's loss or None.
    """
    if adversary is None:
        passed = one_pass()
        passed[0].backward()
        return passed, None
    with adversary.first_pass():
        passed = one_pass()
    (passed[0] / 2).backward()
    with adversary.second_pass():
        worse = one_pass()[0]
    (worse / 2).backward()
    return passed, worse
