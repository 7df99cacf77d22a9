"""Unigram and bigram perplexities: baselines without memory, on the model's own targets."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lm.data.batches.packing import IGNORE
from lm.data.corpus.integrity import Tokens

MAX_TRAIN_TOKENS = 20_000_000  # n-grams are counted in this many tokens, to bound the memory


def ngram_baselines(
    train_tokens: Tokens, val_blocks: Iterable[dict], vocab_size: int
) -> dict[str, float]:
    """Compute unigram and bigram perplexities on exactly the targets of the model's validation.

    c counts occurrences in the N training tokens, and V is the size of the vocabulary. The unigram
    model is p(w) = (c(w) + 1) / (N + V). The bigram model has Witten-Bell smoothing:
    p(w|v) = (c(vw) + T(v) p(w)) / (c(v) + T(v)), where T(v) is the number of different tokens that
    follow v. After a v that does not occur, p(w|v) = p(w).

    Args:
        train_tokens: Token ids below vocab_size, shape (n,).
        val_blocks: Micro-batches of `input_ids` and `labels`, shape (batch, seq_len); labels IGNORE
            do not count.

    Returns:
        {"unigram": perplexity, "bigram": perplexity}.

    Raises:
        ValueError: If there is no target.
    """
    train = np.asarray(train_tokens[:MAX_TRAIN_TOKENS], dtype=np.int64)
    pairs = [
        (np.asarray(batch["input_ids"]).ravel(), np.asarray(batch["labels"]).ravel())
        for batch in val_blocks
    ]
    if not pairs or not any((labels != IGNORE).any() for _, labels in pairs):
        raise ValueError("no validation target to compute n-gram perplexities on")
    # The pairs (v, w) of all validation targets w, each of shape (targets,).
    v, w = (np.concatenate(arrays).astype(np.int64) for arrays in zip(*pairs))
    v, w = v[w != IGNORE], w[w != IGNORE]

    counts = np.bincount(train, minlength=vocab_size)  # c(w)
    unigram = (counts[w] + 1) / (len(train) + vocab_size)

    # A bigram (v, w) has the code v · V + w; `codes` has every bigram of the training text once.
    codes, code_counts = np.unique(train[:-1] * vocab_size + train[1:], return_counts=True)
    context_counts = np.bincount(train[:-1], minlength=vocab_size)  # c(v)
    successor_counts = np.bincount(codes // vocab_size, minlength=vocab_size)  # T(v)
    target_codes = v * vocab_size + w
    pair_counts = np.zeros(len(target_codes))  # c(vw)
    if len(codes):
        indices = np.minimum(np.searchsorted(codes, target_codes), len(codes) - 1)
        pair_counts = np.where(codes[indices] == target_codes, code_counts[indices], 0)
    denominator = context_counts[v] + successor_counts[v]
    smoothed = (pair_counts + successor_counts[v] * unigram) / np.maximum(denominator, 1)
    bigram = np.where(denominator > 0, smoothed, unigram)
    return {
        "unigram": float(np.exp(-np.log(unigram).mean())),
        "bigram": float(np.exp(-np.log(bigram).mean())),
    }
