"""Recall of values by their keys: MQAR of Zoology, and the in-context recalls of MAD."""

from __future__ import annotations

import itertools
import math

import numpy as np

from synthetic import config
from synthetic.tasks import IGNORE, TaskError, task
from synthetic.tasks.uniform_length import Rows, UniformLengthTask, key_value_names

MAX_MOTIFS = 10_000  # different keys of fuzzy_recall


@task("mqar")
class MultiQueryRecall(UniformLengthTask):
    """Multi-query associative recall (MQAR): key-value pairs, then every key again as a query.

        keys and values      k3 v7 k1 v2 | … k1 … … k3 …
        answers                               v2     v7

    Ids are `task.alphabet` keys, then as many values. A sequence of `length` tokens begins with
    `task.pairs` pairs (default: length / 16), with no key and no value twice. Each key is repeated
    at a random even position after the pairs, where the answer is its value. Early positions are
    more frequent: the distance x from the pairs has the density a x^(a − 1) with a = 0.01. Random
    ids fill the other positions.

    Source: Arora et al. 2024, "Zoology: Measuring and Improving Recall in Efficient Language
    Models", arXiv 2312.04927.
    """

    headline = "token_accuracy"
    length_step = 2
    power = 0.01  # a in the density of x

    def __init__(self, section: config.Task):
        self.name = section.name
        self.key_count = section.alphabet
        self.pairs = section.pairs
        self.vocab_size = 2 * self.key_count
        self.token_names = key_value_names(self.key_count)
        self.chance = 1 / self.key_count
        self.min_length = 4 if self.pairs is None else 4 * self.pairs
        self.check_length(self.min_length)

    def count_pairs(self, length: int) -> int:
        """Return the number of pairs in a sequence of this length."""
        return self.pairs or max(1, length // 16)

    def check_length(self, length: int) -> None:
        super().check_length(length)
        if (pairs := self.count_pairs(length)) > self.key_count:
            raise TaskError(
                f"mqar: {pairs} pairs, at length {length}, need as many different keys, and"
                f" task.alphabet is {self.key_count}: raise it, or lower task.pairs"
            )

    def count_contents(self, width: int) -> float:
        """Count the beginnings of `width` tokens in which no key and no value occurs twice."""
        keys, values = (width + 1) // 2, width // 2
        if keys > self.key_count:
            return 0.0
        return float(math.perm(self.key_count, keys) * math.perm(self.key_count, values))

    def content_width(self, length: int) -> int:
        return 2 * self.count_pairs(length)

    def draw(self, rng: np.random.Generator, count: int, length: int, split: str) -> Rows:
        # 1. Draw the pairs; keys and values are different within a row.
        pairs = self.count_pairs(length)
        ids = rng.integers(self.vocab_size, size=(count, length))
        keys = rng.random((count, self.key_count)).argsort(1)[:, :pairs]
        values = self.key_count + rng.random((count, self.key_count)).argsort(1)[:, :pairs]
        ids[:, : 2 * pairs : 2] = keys
        ids[:, 1 : 2 * pairs : 2] = values

        # 2. Draw a position for each query: by weight, without replacement (Gumbel top-k).
        positions = (length - 2 * pairs) // 2
        log_weight = (self.power - 1) * np.log(np.arange(1, positions + 1))
        scores = log_weight + rng.gumbel(size=(count, positions))
        query_positions = 2 * pairs + 2 * scores.argsort(1)[:, ::-1][:, :pairs]
        labels = np.full((count, length), IGNORE)
        np.put_along_axis(ids, query_positions, keys, 1)
        np.put_along_axis(labels, query_positions, values, 1)
        return Rows(ids[:, : 2 * pairs].copy(), ids, labels)


@task("in_context_recall", "noisy_recall", "fuzzy_recall")
class InContextRecall(UniformLengthTask):
    """In-context recall of MAD, in its plain, noisy and fuzzy form, with many queries per sequence.

    A sequence consists of key-value pairs, drawn with replacement. Keys and values are motifs,
    which have one token, or in fuzzy_recall several. A key has the same value throughout the
    sequence, and the last key always occurred before. Whenever a key occurs again, its value is the
    answer, one token ahead. The model reads the correct tokens before each answer (teacher
    forcing):

        in_context_recall   k1 v5 k3 v2 k1 [v5]
        noisy_recall        with probability `task.noise`, two noise tokens replace a pair
        fuzzy_recall        keys and values of 1 to `task.ngram` different tokens each; in
                            validation and test all keys have `task.ngram` tokens

    Ids are `task.alphabet` keys, as many values, 16 noise tokens, and padding. MAD uses
    `alphabet: 8` (7 in fuzzy_recall, with `ngram: 3`), `noise: 0.2` and 128 tokens. MAD trains on
    every token; here only the answers are labels.

    Source: Poli et al. 2024, "Mechanistic Design and Scaling of Hybrid Architectures" (MAD,
    arXiv 2403.17844).
    """

    headline = "token_accuracy"
    noise_tokens = 16

    def __init__(self, section: config.Task):
        self.name = section.name
        self.alphabet_size = section.alphabet
        self.noise = section.noise if self.name == "noisy_recall" else 0.0
        max_size = section.ngram if self.name == "fuzzy_recall" else 1
        self.motifs = _list_motifs(self.alphabet_size, max_size)
        self.pad = 2 * self.alphabet_size + self.noise_tokens
        self.vocab_size = self.pad + 1
        self.token_names = [
            *key_value_names(self.alphabet_size),
            *(f"n{i}" for i in range(self.noise_tokens)),
            "_",
        ]
        # Token i of a value (from 0) is one of alphabet_size − i, because the tokens of a value are
        # different. max_size − i of the max_size possible value lengths have a token i.
        frequencies = [max_size - i for i in range(max_size)]
        correct_guesses = [frequencies[i] / (self.alphabet_size - i) for i in range(max_size)]
        self.chance = sum(correct_guesses) / sum(frequencies)
        self.min_length = 4 * max_size  # the same pair twice, whatever its size
        self.length_step = 2 if max_size == 1 else 1
        # Tokens at the end of a row: the pairs before the last (`_draw_keys`) have at least
        # length − 4 max_size + 1 tokens, and the last at least 2.
        self.max_padding = 0 if max_size == 1 else 4 * max_size - 3

    def count_contents(self, width: int) -> float:
        """Return a lower bound: the number of contents of different keys of one token."""
        pairs = min(width // 2, self.alphabet_size)
        different_keys = np.prod(np.arange(self.alphabet_size, self.alphabet_size - pairs, -1.0))
        return float(different_keys * float(self.alphabet_size) ** pairs)

    def content_width(self, length: int) -> int:
        return length - self.max_padding

    def draw(self, rng: np.random.Generator, count: int, length: int, split: str) -> Rows:
        max_size = self.motifs.shape[1]

        # 1. Draw keys and the dictionary of each row. A key is the index of a motif; −1 is noise.
        keys, dictionary, is_used = self._draw_keys(rng, count, length, split)

        # 2. Put the tokens side by side: (b, pairs, 2 max_size), −1 after the end of a motif.
        value_tokens = self.motifs[_look_up(dictionary, keys)]
        value_tokens = np.where(value_tokens < 0, -1, value_tokens + self.alphabet_size)
        tokens = np.concatenate([self.motifs[keys], value_tokens], 2)
        if self.noise:
            noise = 2 * self.alphabet_size + rng.integers(self.noise_tokens, size=tokens.shape)
            tokens = np.where(keys[..., None] < 0, noise, tokens)
        is_answer = np.zeros(tokens.shape, bool)
        is_answer[..., max_size:] = _is_repeated(keys, len(self.motifs))[..., None]

        # 3. Join the tokens and pad the rows.
        is_token = (tokens >= 0) & is_used[..., None]
        mask = np.arange(length) < is_token.sum((1, 2))[:, None]
        ids = np.full((count, length), self.pad)
        ids[mask] = tokens[is_token]
        is_answer_in_row = np.zeros((count, length), bool)
        is_answer_in_row[mask] = is_answer[is_token]
        labels = np.full((count, length), IGNORE)
        labels[:, :-1] = np.where(is_answer_in_row[:, 1:], ids[:, 1:], IGNORE)
        return Rows(ids.copy(), ids, labels, mask)

    def _draw_keys(
        self, rng: np.random.Generator, count: int, length: int, split: str
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw as many keys as fit, then one that occurred before.

        Returns:
            The keys (b,pairs), the dictionary with the value of every possible key in each row
            (b, number of motifs), and True for keys that are used (b,pairs). Keys and values are
            indices of motifs; a key of −1 is noise.
        """
        max_size = self.motifs.shape[1]
        sizes = (self.motifs >= 0).sum(1)
        pairs = length // 2
        keys = _draw_motifs(rng, (count, pairs), sizes, 1 if split == "train" else max_size)
        dictionary = _draw_motifs(rng, (count, len(sizes)), sizes, 1)
        keys[:, 1:][rng.random((count, pairs - 1)) < self.noise] = -1
        pair_sizes = np.where(keys < 0, 2, sizes[keys] + sizes[_look_up(dictionary, keys)])
        last = (pair_sizes.cumsum(1) <= length - 2 * max_size).sum(1)  # index of the last pair
        last = np.minimum(last, pairs - 1)
        # The last key repeats a random earlier one, which must not be noise.
        can_repeat = (np.arange(pairs) < last[:, None]) & (keys >= 0)
        earlier = np.where(can_repeat, rng.random(keys.shape), -1).argmax(1)
        rows = np.arange(count)
        keys[rows, last] = keys[rows, earlier]
        return keys, dictionary, np.arange(pairs) <= last[:, None]


def _list_motifs(alphabet_size: int, max_size: int) -> np.ndarray:
    """Return all sequences of 1 to `max_size` different tokens, shorter ones first, padded with −1.

    Raises:
        TaskError: If there are more than MAX_MOTIFS, or fewer tokens than `max_size`.
    """
    if max_size > alphabet_size or math.perm(alphabet_size, max_size) > MAX_MOTIFS:
        raise TaskError(
            f"task.ngram is {max_size}, and task.alphabet {alphabet_size}: keys and values of"
            " fuzzy_recall consist of different tokens, and there may be at most"
            f" {MAX_MOTIFS:,} of them"
        )
    rows = []
    for size in range(1, max_size + 1):
        for motif in itertools.permutations(range(alphabet_size), size):
            rows.append([*motif, *[-1] * (max_size - size)])
    return np.array(rows)


def _draw_motifs(
    rng: np.random.Generator, shape: tuple[int, int], sizes: np.ndarray, min_size: int
) -> np.ndarray:
    """Draw indices of motifs: a size, uniform from `min_size` up, then a motif of that size."""
    motif_sizes = rng.integers(min_size, sizes.max() + 1, shape)
    first_of_size = np.searchsorted(sizes, np.arange(sizes.max() + 2))  # motifs are sorted by size
    count = np.diff(first_of_size)  # motifs of each size
    return first_of_size[motif_sizes] + (rng.random(shape) * count[motif_sizes]).astype(int)


def _look_up(dictionary: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the values of keys (b,pairs) from each row's dictionary (b, number of keys)."""
    return np.take_along_axis(dictionary, np.maximum(keys, 0), 1)


def _is_repeated(keys: np.ndarray, motif_count: int) -> np.ndarray:
    """Return True for keys (b,pairs) that occur earlier in their row; noise (−1) never does."""
    pairs = keys.shape[1]
    first_position = np.full((len(keys), motif_count + 1), pairs)
    rows = np.arange(len(keys))
    for position in reversed(range(pairs)):
        first_position[rows, keys[:, position]] = position  # −1 is the last column
    is_repeated = np.take_along_axis(first_position, keys % (motif_count + 1), 1) < np.arange(pairs)
    return is_repeated & (keys >= 0)
