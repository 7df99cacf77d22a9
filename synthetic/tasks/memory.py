"""Memory that is no recall in context: selective copying, and a dictionary learned by heart."""

from __future__ import annotations

import numpy as np

from synthetic import config
from synthetic.tasks import IGNORE, task
from synthetic.tasks.uniform_length import Drawn, UniformLengthTask, pair_names


@task("selective_copying")
class SelectiveCopying(UniformLengthTask):
    """Letters scattered among blanks, to be said in order at the end: `selective copying` of Poli
    et al. 2024 (MAD, arXiv 2403.17844), after Gu & Dao 2023 (Mamba, arXiv 2312.00752).

        input      _ c _ _ a b _ | _ _ _
        answers                    c a b

    `task.content` letters of `task.alphabet`, at places of which each choice is as likely. The
    length counts all tokens; longer sequences have more blanks. The answers are not in the input,
    so a model must know by itself which is next. MAD's sizes are `alphabet: 14`, `content: 16` and
    256 tokens.
    """

    headline = "token_accuracy"

    def __init__(self, task: config.Task):
        self.name = task.name
        self.letters = task.alphabet
        self.content = task.content
        self.blank, self.copy = self.letters, self.letters + 1
        self.vocab_size = self.letters + 2
        self.chance = 1 / self.letters
        self.min_length = 2 * self.content + 1
        self.token_names = [*map(str, range(self.letters)), "_", "|"]

    def count_contents(self, width: int) -> float:
        return float(self.letters) ** width if width <= self.content else 0.0

    def content_width(self, length: int) -> int:
        return self.content

    def draw(self, rng: np.random.Generator, count: int, length: int, split: str) -> Drawn:
        letters = rng.integers(self.letters, size=(count, self.content))
        ids = np.full((count, length), self.blank)
        room = length - self.content - 1  # before the sign to copy
        places = np.sort(rng.random((count, room)).argsort(1)[:, : self.content], 1)
        np.put_along_axis(ids, places, letters, 1)
        ids[:, room] = self.copy
        labels = np.full((count, length), IGNORE)
        labels[:, room + 1 :] = letters
        return Drawn(letters, ids, labels)


@task("memorization")
class Memorization(UniformLengthTask):
    """A dictionary that is the same in all sequences and stands in none: `memorization` of Poli et
    al. 2024 (MAD, arXiv 2403.17844).

        input      k3 ? k9 ? k3 ?
        answers       v3   v9   v3

    Ids are `task.alphabet` keys, as many values, and `?`; which value is whose is drawn once, and
    for ever. MAD's size is `alphabet: 127` and 32 tokens. Test sequences are other sequences of
    the same keys: what is held apart are the sequences, not the facts.
    """

    headline = "token_accuracy"
    min_length = 2
    length_step = 2

    def __init__(self, task: config.Task):
        self.name = task.name
        self.keys = task.alphabet
        self.asked = 2 * self.keys
        self.vocab_size = 2 * self.keys + 1
        self.chance = 1 / self.keys
        self.token_names = [*pair_names(self.keys), "?"]
        self.value_of = self.keys + np.random.default_rng(0).permutation(self.keys)

    def count_contents(self, width: int) -> float:
        return float(self.keys) ** width

    def content_width(self, length: int) -> int:
        return length // 2

    def draw(self, rng: np.random.Generator, count: int, length: int, split: str) -> Drawn:
        keys = rng.integers(self.keys, size=(count, length // 2))
        ids = np.full((count, length), self.asked)
        ids[:, ::2] = keys
        labels = np.full((count, length), IGNORE)
        labels[:, 1::2] = self.value_of[keys]
        return Drawn(keys, ids, labels)
