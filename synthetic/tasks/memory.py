"""Memory other than recall in context: selective copying and memorization."""

from __future__ import annotations

import numpy as np

from synthetic import config
from synthetic.tasks import IGNORE, task
from synthetic.tasks.uniform_length import Rows, UniformLengthTask, key_value_names


@task("selective_copying")
class SelectiveCopying(UniformLengthTask):
    """Content tokens scattered among blanks, repeated in order at the end.

        input      _ c _ _ a b _ | _ _ _
        answers                    c a b

    `task.content` tokens from an alphabet of `task.alphabet` have uniformly drawn positions.
    The length counts all tokens, so longer sequences have more blanks. The model does not read the
    answers, so it must itself count which answer is next. MAD uses `alphabet: 14`, `content: 16`
    and 256 tokens.

    Source: `selective copying` of Poli et al. 2024 (MAD, arXiv 2403.17844), after Gu & Dao 2023
    (Mamba, arXiv 2312.00752).
    """

    headline = "token_accuracy"

    def __init__(self, section: config.Task):
        self.name = section.name
        self.alphabet_size = section.alphabet
        self.content = section.content
        self.blank = self.alphabet_size
        self.separator = self.alphabet_size + 1  # the answers follow it
        self.vocab_size = self.alphabet_size + 2
        self.chance = 1 / self.alphabet_size
        self.min_length = 2 * self.content + 1
        self.token_names = [*map(str, range(self.alphabet_size)), "_", "|"]

    def count_contents(self, width: int) -> float:
        return float(self.alphabet_size) ** width if width <= self.content else 0.0

    def content_width(self, length: int) -> int:
        return self.content

    def draw(self, rng: np.random.Generator, count: int, length: int, split: str) -> Rows:
        content = rng.integers(self.alphabet_size, size=(count, self.content))
        ids = np.full((count, length), self.blank)
        separator_position = length - self.content - 1
        positions = np.sort(
            rng.random((count, separator_position)).argsort(1)[:, : self.content], 1
        )
        np.put_along_axis(ids, positions, content, 1)
        ids[:, separator_position] = self.separator
        labels = np.full((count, length), IGNORE)
        labels[:, separator_position + 1 :] = content
        return Rows(content, ids, labels)


@task("memorization")
class Memorization(UniformLengthTask):
    """A fixed dictionary that no sequence shows; the weights must store it.

        input      k3 ? k9 ? k3 ?
        answers       v3   v9   v3

    Ids are `task.alphabet` keys, as many values, and `?`. The dictionary is drawn once and never
    changes. MAD uses `alphabet: 127` and 32 tokens. Test sequences are different sequences of the
    same keys: the splits separate sequences, not facts.

    Source: `memorization` of Poli et al. 2024 (MAD, arXiv 2403.17844).
    """

    headline = "token_accuracy"
    min_length = 2
    length_step = 2

    def __init__(self, section: config.Task):
        self.name = section.name
        self.key_count = section.alphabet
        self.query = 2 * self.key_count
        self.vocab_size = 2 * self.key_count + 1
        self.chance = 1 / self.key_count
        self.token_names = [*key_value_names(self.key_count), "?"]
        self.dictionary = self.key_count + np.random.default_rng(0).permutation(self.key_count)

    def count_contents(self, width: int) -> float:
        return float(self.key_count) ** width

    def content_width(self, length: int) -> int:
        return length // 2

    def draw(self, rng: np.random.Generator, count: int, length: int, split: str) -> Rows:
        keys = rng.integers(self.key_count, size=(count, length // 2))
        ids = np.full((count, length), self.query)
        ids[:, ::2] = keys
        labels = np.full((count, length), IGNORE)
        labels[:, 1::2] = self.dictionary[keys]
        return Rows(keys, ids, labels)
