"""Unigram and bigram perplexities: what a model without memory reaches on the same targets."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lm.data.batches.packing import IGNORE
from lm.data.corpus.integrity import Tokens

MAX_TRAIN_TOKENS = 20_000_000  # counts are taken on the first so many


def ngram_baselines(
    train_tokens: Tokens, val_blocks: Iterable[dict], vocab_size: int
) -> dict[str, float]:
    """Perplexities on exactly the targets the model is evaluated on.

    unigram: p(w) = (c(w) + 1) / (N + V). bigram, Witten-Bell, with T(v) the number of different
    tokens seen after v: p(w|v) = (c(vw) + T(v) p(w)) / (c(v) + T(v)), and p(w) after an unseen v.

    Args:
        train_tokens: (n,) ids below vocab_size.
        val_blocks: micro-batches of `input_ids` and `labels` (b, L); labels -100 do not count.

    Raises:
        ValueError: there is no target to evaluate on.
    """
    train = np.asarray(train_tokens[:MAX_TRAIN_TOKENS], dtype=np.int64)
    pairs = [
        (np.asarray(b["input_ids"]).ravel(), np.asarray(b["labels"]).ravel()) for b in val_blocks
    ]
    if not pairs or not any((labels != IGNORE).any() for _, labels in pairs):
        raise ValueError("no validation target to compute n-gram perplexities on")
    context, target = (np.concatenate(side).astype(np.int64) for side in zip(*pairs))
    context, target = context[target != IGNORE], target[target != IGNORE]

    counts = np.bincount(train, minlength=vocab_size)
    unigram = (counts[target] + 1) / (len(train) + vocab_size)

    seen, seen_counts = np.unique(train[:-1] * vocab_size + train[1:], return_counts=True)
    followed = np.bincount(train[:-1], minlength=vocab_size)  # c(v)
    different = np.bincount(seen // vocab_size, minlength=vocab_size)  # T(v)
    wanted = context * vocab_size + target
    pair_counts = np.zeros(len(wanted))
    if len(seen):
        at = np.minimum(np.searchsorted(seen, wanted), len(seen) - 1)
        pair_counts = np.where(seen[at] == wanted, seen_counts[at], 0)
    mass = followed[context] + different[context]
    smoothed = (pair_counts + different[context] * unigram) / np.maximum(mass, 1)
    bigram = np.where(mass > 0, smoothed, unigram)
    return {
        "unigram": float(np.exp(-np.log(unigram).mean())),
        "bigram": float(np.exp(-np.log(bigram).mean())),
    }
