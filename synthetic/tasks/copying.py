"""Copying random strings and looking up n-grams in them: datasets and metrics."""

from __future__ import annotations

from collections.abc import Iterable
from string import ascii_letters, digits
from typing import Any

import numpy as np

from synthetic import config
from synthetic.tasks import IGNORE, Batch, Task, TaskError, draw_lengths, splits, task

CHARACTERS = ascii_letters + digits  # names of the first characters of the alphabet


@task("copy", "suffix_ngram")
class Copying(Task):
    """String tasks of Jelassi et al. 2024.

    Tokens are the characters of the alphabet, then `$` (start), `|` (separator), `.` (end) and `*`
    (padding). The length counts the characters of the string s, which is copied or searched; the
    characters are uniform. The model answers the tokens in square brackets, one token ahead, and
    reads the correct tokens before each answer (teacher forcing):

        copy             $ s | [s .]
        suffix_ngram     $ s | key [value .]   value: the n characters of s right after the key

    The key is an n-gram that occurs exactly once in s. With two characters and n ≤ 2 a unique key
    would leave almost no freedom for the string. In this case the key may occur again, and its
    first occurrence counts.

    The splits are disjoint in their strings, whatever the key, at lengths with enough different
    strings.

    In training, each row is a context of `task.context` tokens, filled with examples until the next
    one no longer fits. In evaluation, each row is one example.

    Source: "Repeat After Me: Transformers are Better than State Space Models at Copying",
    arXiv 2402.01032.
    """

    headline = "string_accuracy"

    def __init__(self, section: config.Task):
        self.name = section.name
        self.alphabet_size = section.alphabet
        self.n = section.ngram
        self.context = section.context
        special_ids = range(self.alphabet_size, self.alphabet_size + 4)
        self.start, self.separator, self.end, self.pad = special_ids
        self.vocab_size = self.alphabet_size + 4
        more_characters = (chr(256 + i) for i in range(len(CHARACTERS), self.alphabet_size))
        self.token_names = [*CHARACTERS[: self.alphabet_size], *more_characters, *"$|.*"]
        self.chance = 1 / self.alphabet_size
        self.min_length = 1 if self.name == "copy" else 2 * self.n  # two n-grams fit

    def count_contents(self, width: int) -> float:
        return self.alphabet_size**width

    def count_tokens(self, length: Any) -> Any:
        """Return the tokens of an example with a string of this length (an int or an array)."""
        return 2 * length + 3 if self.name == "copy" else length + 2 * self.n + 3

    def text(self, ids: Iterable[int]) -> str:
        """Return ids as text, one character each."""
        return "".join(self.token_names[i] for i in map(int, ids))

    def sample(
        self, rng: np.random.Generator, batch_size: int, lengths: tuple[int, int], split: str
    ) -> Batch:
        self.check_length(lengths[1])
        if split != "train":  # one example per row
            string_lengths = draw_lengths(rng, batch_size, lengths, min_length=self.min_length)
            tokens, is_answer = self._draw_examples(rng, string_lengths, split)
            sizes = self.count_tokens(string_lengths)
            return self._build_batch(tokens, is_answer, sizes, int(sizes.max()))
        if self.count_tokens(lengths[1]) > self.context:
            raise TaskError(
                f"{self.name} with strings of length {lengths[1]} needs a context of "
                f"{self.count_tokens(lengths[1])} tokens, and task.context is {self.context}: raise"
                " it or train on shorter strings"
            )
        # Draw the largest possible number of examples for each row, then keep those that fit.
        max_examples = self.context // self.count_tokens(max(lengths[0], self.min_length))
        string_lengths = draw_lengths(
            rng, batch_size * max_examples, lengths, min_length=self.min_length
        ).reshape(batch_size, max_examples)
        fits = self.count_tokens(string_lengths).cumsum(1) <= self.context
        sizes = (self.count_tokens(string_lengths) * fits).sum(1)
        tokens, is_answer = self._draw_examples(rng, string_lengths[fits], split)
        return self._build_batch(tokens, is_answer, sizes, self.context)

    def score(self, predicted: np.ndarray, batch: Batch) -> dict[str, np.ndarray]:
        """Score predictions (b,l).

        `character_accuracy` has an item per character. `string_accuracy` has an item per example,
        which is correct if every character and the end token are.
        """
        is_scored = batch.labels != IGNORE
        is_correct = predicted == batch.labels
        # Every example begins with `$`, which appears nowhere else.
        example_index = (batch.input_ids == self.start).cumsum().reshape(is_scored.shape) - 1
        mistakes = np.bincount(example_index[is_scored], ~is_correct[is_scored])
        is_character = is_scored & (batch.labels < self.alphabet_size)
        return {
            "character_accuracy": is_correct[is_character].astype(float),
            "string_accuracy": (mistakes == 0).astype(float),
        }

    def item_rows(self, batch: Batch) -> dict[str, np.ndarray]:
        is_character = (batch.labels != IGNORE) & (batch.labels < self.alphabet_size)
        return {"character_accuracy": np.nonzero(is_character)[0]}

    def _build_batch(
        self, tokens: np.ndarray, is_answer: np.ndarray, sizes: np.ndarray, width: int
    ) -> Batch:
        """Split joined examples into rows of `sizes` tokens, padded to `width`, and add labels."""
        # A token's label is the next token. The token after an example's end is never an answer.
        labels = np.where(np.roll(is_answer, -1), np.roll(tokens, -1), IGNORE)
        mask = np.arange(width) < sizes[:, None]
        batch = Batch(
            np.full(mask.shape, self.pad), np.full(mask.shape, IGNORE), None if mask.all() else mask
        )
        batch.input_ids[mask] = tokens
        batch.labels[mask] = labels
        return batch

    def _draw_examples(
        self, rng: np.random.Generator, lengths: np.ndarray, split: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw examples with strings of these lengths (b,), one after another.

        Returns:
            The tokens, shape (n,), and whether each is part of an answer, shape (n,).
        """
        # 1. Draw the strings, from disjoint sets for the splits.
        width = int(lengths.max())
        can_redraw = lengths >= (self.prefix_length or np.inf)
        arrays = self._draw_strings(rng, lengths, width)
        splits.redraw_samples(
            split,
            arrays,
            can_redraw,
            lambda rows: self._draw_strings(rng, lengths[rows], width),
            lengths,
        )
        strings = arrays[0]

        # 2. Put prompt and answer of each example side by side: (b, all columns), padded inside.
        tokens = (self.start, self.separator, self.end)
        start, separator, end = (np.full((len(strings), 1), token) for token in tokens)
        if self.name == "copy":
            prompt, answer = [start, strings, separator], [strings, end]
        else:
            _, key, value = arrays
            prompt, answer = [start, strings, separator, key], [value, end]
        padded = np.hstack(prompt + answer)
        is_answer = np.zeros(padded.shape, bool)
        is_answer[:, -sum(part.shape[1] for part in answer) :] = True

        # 3. Join the examples and drop the padding.
        is_token = padded != self.pad
        return padded[is_token], is_answer[is_token]

    def _draw_strings(
        self, rng: np.random.Generator, lengths: np.ndarray, width: int
    ) -> tuple[np.ndarray, ...]:
        """Draw strings of these lengths (b,), padded to `width`; for look-ups also keys and values.

        Returns:
            The strings, shape (b,width); for suffix_ngram also keys and values, shape (b,n) each.
        """
        strings = rng.integers(self.alphabet_size, size=(len(lengths), width))
        strings[np.arange(width) >= lengths[:, None]] = self.pad
        if self.name == "copy":
            return (strings,)
        return strings, *self._choose_keys(rng, strings, lengths)

    def _choose_keys(
        self, rng: np.random.Generator, strings: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Choose keys, and change the strings in place so that each key is unique.

        Returns:
            Keys and values, shape (b,n) each.
        """
        key_position = rng.integers(0, lengths - 2 * self.n + 1)
        key = self._extract_ngrams(strings, key_position)
        can_be_unique = max(self.alphabet_size, self.n) > 2  # see the docstring of the class
        unchecked = np.arange(len(strings) if can_be_unique else 0)
        while len(unchecked):
            row, position = np.nonzero(self._find_matches(strings[unchecked], key[unchecked]))
            row = unchecked[row]
            is_other = position != key_position[row]
            row = row[is_other]
            position = position[is_other]
            # In every other occurrence, redraw the character farthest from the key; it is never
            # part of the key. Occurrences then move away from the key, so the loop ends.
            farthest = np.where(position > key_position[row], position + self.n - 1, position)
            strings[row, farthest] = rng.integers(self.alphabet_size, size=len(row))
            unchecked = np.unique(row)
        first_match = self._find_matches(strings, key).argmax(1)
        return key, self._extract_ngrams(strings, first_match + self.n)

    def _find_matches(self, strings: np.ndarray, key: np.ndarray) -> np.ndarray:
        """Return True at each position where the key (b,n) begins, shape (b, l − n + 1)."""
        windows = np.lib.stride_tricks.sliding_window_view(strings, self.n, axis=1)
        return (windows == key[:, None]).all(-1)

    def _extract_ngrams(self, strings: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Return the n-gram of each string (b,l) that begins at `position` (b,), (b,n)."""
        return np.take_along_axis(strings, position[:, None] + np.arange(self.n), 1)
