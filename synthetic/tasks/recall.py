"""Recall of values by their keys: MQAR of Zoology, and the in-context recalls of MAD."""

from __future__ import annotations

import itertools
import math

import numpy as np

from synthetic import config
from synthetic.tasks import IGNORE, TaskError, task
from synthetic.tasks.uniform_length import Drawn, UniformLengthTask, pair_names

MOST_MOTIFS = 10_000


@task("mqar")
class MultiQueryRecall(UniformLengthTask):
    """Multi-query associative recall (MQAR): pairs of a key and a value, then every key once more
    at a random place, where the answer is its value. Arora et al. 2024, "Zoology: Measuring and
    Improving Recall in Efficient Language Models" (arXiv 2312.04927).

        keys and values      k3 v7 k1 v2 | … k1 … … k3 …
        answers                               v2     v7

    Ids are `task.alphabet` keys, then as many values. A sequence of `length` tokens begins with
    `task.pairs` pairs (default: a sixteenth of the length), whose keys differ, and whose values do.
    The keys come again at even places behind them, near places more often: the distance has the
    density a x^(a − 1) with a = 0.01. What is left is filled with random ids.
    """

    headline = "token_accuracy"
    length_step = 2
    power = 0.01

    def __init__(self, task: config.Task):
        self.name = task.name
        self.keys = task.alphabet
        self.pairs = task.pairs
        self.vocab_size = 2 * self.keys
        self.token_names = pair_names(self.keys)
        self.chance = 1 / self.keys
        self.min_length = 4 if self.pairs is None else 4 * self.pairs
        self.check_length(self.min_length)

    def pairs_at(self, length: int) -> int:
        """How many pairs a sequence of this length has."""
        return self.pairs or max(1, length // 16)

    def check_length(self, length: int) -> None:
        super().check_length(length)
        if (pairs := self.pairs_at(length)) > self.keys:
            raise TaskError(
                f"mqar: {pairs} pairs, at length {length}, have keys that differ, and task.alphabet"
                f" is {self.keys}: it must be as large, or task.pairs smaller"
            )

    def count_contents(self, width: int) -> float:
        """Of the first numbers of pairs whose keys differ, and whose values do."""
        keys, values = (width + 1) // 2, width // 2
        if keys > self.keys:
            return 0.0
        return float(math.perm(self.keys, keys) * math.perm(self.keys, values))

    def content_width(self, length: int) -> int:
        return 2 * self.pairs_at(length)

    def draw(self, rng: np.random.Generator, count: int, length: int, split: str) -> Drawn:
        # 1. The pairs: keys and values that differ within a row.
        pairs = self.pairs_at(length)
        ids = rng.integers(self.vocab_size, size=(count, length))
        keys = rng.random((count, self.keys)).argsort(1)[:, :pairs]
        values = self.keys + rng.random((count, self.keys)).argsort(1)[:, :pairs]
        ids[:, : 2 * pairs : 2] = keys
        ids[:, 1 : 2 * pairs : 2] = values

        # 2. A place of its own for every key, drawn without replacement by weight (Gumbel's trick).
        places = (length - 2 * pairs) // 2
        log_weight = (self.power - 1) * np.log(np.arange(1, places + 1))
        drawn = (log_weight + rng.gumbel(size=(count, places))).argsort(1)[:, ::-1][:, :pairs]
        asked_at = 2 * pairs + 2 * drawn
        labels = np.full((count, length), IGNORE)
        np.put_along_axis(ids, asked_at, keys, 1)
        np.put_along_axis(labels, asked_at, values, 1)
        return Drawn(ids[:, : 2 * pairs].copy(), ids, labels)


@task("in_context_recall", "noisy_recall", "fuzzy_recall")
class InContextRecall(UniformLengthTask):
    """In-context recall, and its noisy and fuzzy form, of Poli et al. 2024, "Mechanistic Design and
    Scaling of Hybrid Architectures" (MAD, arXiv 2403.17844), with many queries a sequence.

    A sequence is pairs of a key and a value, drawn with replacement; a key has one value in all of
    a sequence, and the last one has come before. Wherever a key comes again, its value is the
    answer, one token ahead and given the true ones before:

        in_context_recall   k1 v5 k3 v2 k1 [v5]
        noisy_recall        a pair is two tokens of noise instead, with probability `task.noise`
        fuzzy_recall        keys and values of 1 to `task.ngram` tokens, which differ within each;
                            validation and test have keys of `task.ngram` alone

    Ids are `task.alphabet` keys, as many values, 16 of noise, and padding. MAD's sizes are
    `alphabet: 8` (7 of fuzzy_recall, with `ngram: 3`), `noise: 0.2` and sequences of 128 tokens. In
    MAD's own training every token is a label; here only the answers are.
    """

    headline = "token_accuracy"
    noise_tokens = 16

    def __init__(self, task: config.Task):
        self.name = task.name
        self.letters = task.alphabet
        self.noise = task.noise if self.name == "noisy_recall" else 0.0
        longest = task.ngram if self.name == "fuzzy_recall" else 1
        self.motifs = _motifs(self.letters, longest)
        self.pad = 2 * self.letters + self.noise_tokens
        self.vocab_size = self.pad + 1
        self.token_names = [
            *pair_names(self.letters),
            *(f"n{i}" for i in range(self.noise_tokens)),
            "_",
        ]
        # The letters of a value differ: after i of them one of the others is guessed.
        tokens = range(longest)
        frequencies = [longest - i for i in tokens]
        guesses = [frequencies[i] / (self.letters - i) for i in tokens]
        self.chance = sum(guesses) / sum(frequencies)
        self.min_length = 4 * longest  # a pair twice, whatever its size
        self.length_step = 2 if longest == 1 else 1
        self.slack = 0 if longest == 1 else 4 * longest - 3  # tokens of padding at most

    def count_contents(self, width: int) -> float:
        """At least: of keys and values of one token, the first pairs with keys that differ."""
        pairs = min(width // 2, self.letters)
        different_keys = np.prod(np.arange(self.letters, self.letters - pairs, -1.0))
        return float(different_keys * float(self.letters) ** pairs)

    def content_width(self, length: int) -> int:
        return length - self.slack

    def draw(self, rng: np.random.Generator, count: int, length: int, split: str) -> Drawn:
        longest = self.motifs.shape[1]
        sizes = (self.motifs >= 0).sum(1)  # of each motif, by its number

        # 1. Keys by the numbers of their motifs, (b,pairs); noise is −1. As many as there is room
        # for, and then one that came before.
        pairs = length // 2
        keys = _drawn_motifs(rng, (count, pairs), sizes, 1 if split == "train" else longest)
        value_of = _drawn_motifs(rng, (count, len(sizes)), sizes, 1)  # of each key of a row
        keys[:, 1:][rng.random((count, pairs - 1)) < self.noise] = -1
        pair_sizes = np.where(keys < 0, 2, sizes[keys] + sizes[_values(value_of, keys)])
        before = (pair_sizes.cumsum(1) <= length - 2 * longest).sum(1)
        before = np.minimum(before, pairs - 1)
        is_before = np.arange(pairs) < before[:, None]
        again = np.where(is_before & (keys >= 0), rng.random(keys.shape), -1).argmax(1)
        rows = np.arange(count)
        keys[rows, before] = keys[rows, again]
        is_used = np.arange(pairs) <= before[:, None]

        # 2. Their tokens side by side, (b, pairs, 2 longest), −1 where a motif is shorter.
        value_tokens = self.motifs[_values(value_of, keys)]
        value_tokens = np.where(value_tokens < 0, -1, value_tokens + self.letters)
        tokens = np.concatenate([self.motifs[keys], value_tokens], 2)
        if self.noise:
            noise = 2 * self.letters + rng.integers(self.noise_tokens, size=tokens.shape)
            tokens = np.where(keys[..., None] < 0, noise, tokens)
        due = np.zeros(tokens.shape, bool)
        due[..., longest:] = _came_before(keys, len(sizes))[..., None]

        # 3. One after the other, padding behind them.
        kept = (tokens >= 0) & is_used[..., None]
        mask = np.arange(length) < kept.sum((1, 2))[:, None]
        ids = np.full((count, length), self.pad)
        ids[mask] = tokens[kept]
        is_answer = np.zeros((count, length), bool)
        is_answer[mask] = due[kept]
        labels = np.full((count, length), IGNORE)
        labels[:, :-1] = np.where(is_answer[:, 1:], ids[:, 1:], IGNORE)
        return Drawn(ids.copy(), ids, labels, mask)


def _motifs(letters: int, longest: int) -> np.ndarray:
    """All sequences of 1 to `longest` different letters, shorter ones first, −1 behind them."""
    if longest > letters or math.perm(letters, longest) > MOST_MOTIFS:
        raise TaskError(
            f"task.ngram is {longest}, and task.alphabet {letters}: keys and values of fuzzy_recall"
            f" are of letters that differ, and at most {MOST_MOTIFS:,} different ones"
        )
    rows = []
    for size in range(1, longest + 1):
        for motif in itertools.permutations(range(letters), size):
            rows.append([*motif, *[-1] * (longest - size)])
    return np.array(rows)


def _drawn_motifs(
    rng: np.random.Generator, shape: tuple[int, int], sizes: np.ndarray, least: int
) -> np.ndarray:
    """Numbers of motifs: first a size, uniform from `least` on, then a motif of it."""
    drawn_sizes = rng.integers(least, sizes.max() + 1, shape)
    first = np.searchsorted(sizes, np.arange(sizes.max() + 2))  # of a size, the first motif
    count = np.diff(first)
    return first[drawn_sizes] + (rng.random(shape) * count[drawn_sizes]).astype(int)


def _values(value_of: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The values of keys (b,pairs), by the table of each row (b,keys)."""
    return np.take_along_axis(value_of, np.maximum(keys, 0), 1)


def _came_before(keys: np.ndarray, count: int) -> np.ndarray:
    """Whether each key (b,pairs) stands earlier in its row; −1 is none."""
    pairs = keys.shape[1]
    first = np.full((len(keys), count + 1), pairs)
    rows = np.arange(len(keys))
    for place in reversed(range(pairs)):
        first[rows, keys[:, place]] = place
    found = np.take_along_axis(first, keys % (count + 1), 1) < np.arange(pairs)
    return found & (keys >= 0)
