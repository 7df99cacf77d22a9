"""Tests of the n-gram baselines against their definitions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from lm.config.data import Data
from lm.data.batches.loader import validation_blocks
from lm.data.batches.ngram import ngram_baselines


def brute_force(train: list[int], val: list[int], vocab: int) -> dict[str, float]:
    def unigram(w):
        return (train.count(w) + 1) / (len(train) + vocab)

    def bigram(v, w):
        successors = [b for a, b in itertools.pairwise(train) if a == v]
        if not successors:
            return unigram(w)
        different = len(set(successors))  # T(v)
        return (successors.count(w) + different * unigram(w)) / (len(successors) + different)

    pairs = list(itertools.pairwise(val))
    logs = {
        "unigram": [math.log(unigram(w)) for _, w in pairs],
        "bigram": [math.log(bigram(v, w)) for v, w in pairs],
    }
    for v in range(vocab):  # p(·|v) is a distribution
        assert math.isclose(sum(bigram(v, w) for w in range(vocab)), 1)
    return {name: math.exp(-sum(x) / len(x)) for name, x in logs.items()}


@pytest.mark.parametrize("seed", range(5))
def test_perplexities_match_brute_force(seed):
    rng = np.random.default_rng(seed)
    vocab_size = 12
    train = rng.integers(0, 9, size=60)  # 9, 10 and 11 do not occur in training
    val = rng.integers(0, vocab_size, size=41)
    blocks = validation_blocks(val, Data(seq_len=7), micro_batch_size=2)
    perplexities = ngram_baselines(train.astype(np.uint16), blocks, vocab_size)
    expected = brute_force(train.tolist(), val.tolist(), vocab_size)
    assert perplexities == pytest.approx(expected, rel=1e-12)


def test_one_training_token_works_and_no_target_is_refused():
    blocks = validation_blocks(np.arange(5), Data(seq_len=2), micro_batch_size=2)
    assert ngram_baselines(np.array([1]), blocks, vocab_size=5)["bigram"] > 0
    with pytest.raises(ValueError, match="no validation target"):
        ngram_baselines(np.arange(5), [], vocab_size=5)
