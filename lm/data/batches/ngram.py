"""Unigram and bigram perplexities, baselines without memory on the model's own targets."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lm.data.batches.packing import IGNORE
from lm.data.corpus.integrity import Tokens

MAX_TRAIN_TOKENS = 20_000_000  # n-grams are counted in the first tokens only, to bound the memory


def ngram_baselines(
    train_tokens: Tokens, val_blocks: Iterable[dict], vocab_size: int
) -> dict[str, float]:
    """Compute unigram and bigram perplexities on exactly the targets of the model's validation.

    The unigram model is p(w) = (c(w) + 1) / (N + V). The bigram model has Witten-Bell smoothing:
    p(w|v) = (c(vw) + T(v) p(w)) / (c(v) + T(v)), where T(v) is the number of different tokens seen
    after v; after an unseen v it is p(w).

    Args:
        train_tokens: Token ids below vocab_size, shape (n,).
        val_blocks: Micro-batches of `input_ids` and `labels` (b, L); labels IGNORE do not count.

    Returns:
        Perplexities by the names `unigram` and `bigram`.

    Raises:
        ValueError: If there is no target.
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

    # A bigram (v, w) has the code v · V + w.
    bigrams, bigram_counts = np.unique(train[:-1] * vocab_size + train[1:], return_counts=True)
    context_counts = np.bincount(train[:-1], minlength=vocab_size)  # c(v)
    successors = np.bincount(bigrams // vocab_size, minlength=vocab_size)  # T(v)
    targets = context * vocab_size + target
    target_counts = np.zeros(len(targets))
    if len(bigrams):
        indices = np.minimum(np.searchsorted(bigrams, targets), len(bigrams) - 1)
        target_counts = np.where(bigrams[indices] == targets, bigram_counts[indices], 0)
    mass = context_counts[context] + successors[context]
    smoothed = (target_counts + successors[context] * unigram) / np.maximum(mass, 1)
    bigram = np.where(mass > 0, smoothed, unigram)
    return {
        "unigram": float(np.exp(-np.log(unigram).mean())),
        "bigram": float(np.exp(-np.log(bigram).mean())),
    }
