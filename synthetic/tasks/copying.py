"""Copying random strings and looking n-grams up in them: datasets and metrics."""

from __future__ import annotations

from collections.abc import Iterable
from string import ascii_letters, digits
from typing import Any

import numpy as np

from synthetic import config
from synthetic.tasks import IGNORE, Batch, Task, TaskError, draw_lengths, splits, task

CHARACTERS = ascii_letters + digits  # of the first letters


@task("copy", "suffix_ngram")
class Copying(Task):
    """The string tasks of Jelassi et al. 2024, "Repeat After Me: Transformers are Better than State
    Space Models at Copying" (arXiv 2402.01032).

    Tokens are the letters, then `$` (start), `|` (separator), `.` (end) and `*` (padding). The
    length is that of s, the string that is copied or looked up in; its letters are uniform. The
    model answers what stands in brackets, one token ahead and given the true ones before:

        copy             $ s | [s .]
        suffix_ngram     $ s | key [value .]   value: the n letters of s right after the key

    The key is an n-gram that occurs exactly once in s. Only with two letters and n ≤ 2, where that
    would leave almost nothing of the string to chance, it may occur again, and the first
    occurrence counts.

    Strings of training, validation and test are different ones, whatever the key, where there are
    enough of the length.

    In training every row is a context of `task.context` tokens with as many examples, one after
    another, as come before the first that no longer fits; evaluation has one example a row.
    """

    headline = "string_accuracy"

    def __init__(self, task: config.Task):
        self.name = task.name
        self.letters = task.alphabet
        self.n = task.ngram
        self.context = task.context
        self.start, self.bar, self.end, self.pad = range(self.letters, self.letters + 4)
        self.vocab_size = self.letters + 4
        further = (chr(256 + i) for i in range(len(CHARACTERS), self.letters))
        self.token_names = [*CHARACTERS[: self.letters], *further, *"$|.*"]
        self.chance = 1 / self.letters
        self.min_length = 1 if self.name == "copy" else 2 * self.n  # two n-grams fit

    def count_contents(self, width: int) -> float:
        return self.letters**width

    def tokens(self, length: Any) -> Any:
        """Tokens of an example with a string of this length (an int or an array)."""
        return 2 * length + 3 if self.name == "copy" else length + 2 * self.n + 3

    def text(self, ids: Iterable[int]) -> str:
        """Ids as characters, one each."""
        return "".join(self.token_names[i] for i in map(int, ids))

    def sample(
        self, rng: np.random.Generator, batch_size: int, lengths: tuple[int, int], split: str
    ) -> Batch:
        self.check_length(lengths[1])
        if split != "train":  # one example a row
            drawn = draw_lengths(rng, batch_size, lengths, first=self.min_length)
            tokens, due = self._examples(rng, drawn, split)
            sizes = self.tokens(drawn)
            return self._batch(tokens, due, sizes, int(sizes.max()))
        if self.tokens(lengths[1]) > self.context:
            raise TaskError(
                f"{self.name} with strings of length {lengths[1]} needs a context of "
                f"{self.tokens(lengths[1])} tokens, and task.context is {self.context}: raise it "
                f"or train on shorter strings"
            )
        # Rows of `slots` examples; a row keeps those before the first that no longer fits.
        slots = self.context // self.tokens(max(lengths[0], self.min_length))
        drawn = draw_lengths(rng, batch_size * slots, lengths, first=self.min_length)
        drawn = drawn.reshape(batch_size, slots)
        fits = self.tokens(drawn).cumsum(1) <= self.context
        sizes = (self.tokens(drawn) * fits).sum(1)
        tokens, due = self._examples(rng, drawn[fits], split)
        return self._batch(tokens, due, sizes, self.context)

    def score(self, predicted: np.ndarray, batch: Batch) -> dict[str, np.ndarray]:
        """character_accuracy: of the letters; string_accuracy: of the examples, where every letter
        and the end are right."""
        due = batch.labels != IGNORE
        right = predicted == batch.labels
        # `$` stands at the beginning of every example and nowhere else.
        example = (batch.input_ids == self.start).cumsum().reshape(due.shape) - 1
        mistakes = np.bincount(example[due], ~right[due])
        return {
            "character_accuracy": right[due & (batch.labels < self.letters)].astype(float),
            "string_accuracy": (mistakes == 0).astype(float),
        }

    def item_rows(self, batch: Batch) -> dict[str, np.ndarray]:
        letters = (batch.labels != IGNORE) & (batch.labels < self.letters)
        return {"character_accuracy": np.nonzero(letters)[0]}

    def _batch(self, tokens: np.ndarray, due: np.ndarray, sizes: np.ndarray, width: int) -> Batch:
        """Tokens one after another → rows of `sizes` tokens each, padded to `width`."""
        # The answer to a token is the next one; what follows an example's end is never due.
        labels = np.where(np.roll(due, -1), np.roll(tokens, -1), IGNORE)
        mask = np.arange(width) < sizes[:, None]
        batch = Batch(
            np.full(mask.shape, self.pad), np.full(mask.shape, IGNORE), None if mask.all() else mask
        )
        batch.input_ids[mask] = tokens
        batch.labels[mask] = labels
        return batch

    def _examples(
        self, rng: np.random.Generator, lengths: np.ndarray, split: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Examples with strings of these lengths (b,), all one after another → tokens, and whether
        each belongs to an answer."""
        # 1. The strings, held apart by split.
        width = int(lengths.max())
        apart = lengths >= (self.prefix_length or np.inf)
        drawn = self._strings(rng, lengths, width)
        splits.redraw_samples(
            split, drawn, apart, lambda rows: self._strings(rng, lengths[rows], width), lengths
        )
        strings = drawn[0]

        # 2. Prompt and answer of each, side by side: (b, all columns), padded within.
        start, bar, end = (np.full((len(strings), 1), i) for i in (self.start, self.bar, self.end))
        if self.name == "copy":
            prompt, answer = [start, strings, bar], [strings, end]
        else:
            _, key, value = drawn
            prompt, answer = [start, strings, bar, key], [value, end]
        wide = np.hstack(prompt + answer)
        due = np.zeros(wide.shape, bool)
        due[:, -sum(part.shape[1] for part in answer) :] = True

        # 3. One after another, without the strings' own padding.
        kept = wide != self.pad
        return wide[kept], due[kept]

    def _strings(
        self, rng: np.random.Generator, lengths: np.ndarray, width: int
    ) -> tuple[np.ndarray, ...]:
        """Strings of these lengths (b,), padded to `width`, and for the look-ups keys and values
        (b,n)."""
        s = rng.integers(self.letters, size=(len(lengths), width))
        s[np.arange(width) >= lengths[:, None]] = self.pad
        if self.name == "copy":
            return (s,)
        return s, *self._look_up(rng, s, lengths)

    def _look_up(
        self, rng: np.random.Generator, s: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Choose keys, and change s in place so that they are unique → keys and values (b,n)."""
        key_at = rng.integers(0, lengths - 2 * self.n + 1)
        key = self._ngram(s, key_at)
        can_be_unique = max(self.letters, self.n) > 2  # see the class
        unchecked = np.arange(len(s) if can_be_unique else 0)
        while len(unchecked):
            row, place = np.nonzero(self._equal(s[unchecked], key[unchecked]))
            row = unchecked[row]
            is_other = place != key_at[row]
            row = row[is_other]
            place = place[is_other]
            # Of every other occurrence redraw the letter farthest from the key, which lies outside
            # it. The occurrences nearest to the key move away from it, so this comes to an end.
            farthest = np.where(place > key_at[row], place + self.n - 1, place)
            s[row, farthest] = rng.integers(self.letters, size=len(row))
            unchecked = np.unique(row)
        first = self._equal(s, key).argmax(1)
        return key, self._ngram(s, first + self.n)

    def _equal(self, s: np.ndarray, key: np.ndarray) -> np.ndarray:
        """(b,l), (b,n) → (b, l − n + 1): whether the key stands at this place."""
        windows = np.lib.stride_tricks.sliding_window_view(s, self.n, axis=1)
        return (windows == key[:, None]).all(-1)

    def _ngram(self, s: np.ndarray, at: np.ndarray) -> np.ndarray:
        """The n-grams of strings (b,l) that begin at (b,), (b,n)."""
        return np.take_along_axis(s, at[:, None] + np.arange(self.n), 1)
