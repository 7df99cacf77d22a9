"""Formal languages: parity and modular arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from synthetic import config
from synthetic.tasks import IGNORE, Batch, Task, TaskError, draw_lengths, splits, task


class FormalLanguage(Task):
    """Base class of formal languages.

    Labels are at the last token or at every token (`task.supervision`); the last one is scored. A
    subclass defines its symbols and the answer after each of them.
    """

    headline = "scaled_accuracy"
    characters: str | list[str]  # names of the symbols by id; padding is the last id
    symbols: int  # number of symbols; `draw` draws ids 0 to symbols − 1 uniformly

    def __init__(self, section: config.Task):
        self.name = section.name
        self.labels_every_token = section.supervision == "every"

    def count_contents(self, width: int) -> float:
        return self.symbols**width

    @property
    def token_names(self) -> Sequence[str]:  # type: ignore[override]
        return self.characters

    @property
    def pad(self) -> int:
        """Id of padding."""
        return self.vocab_size - 1

    def answers(self, ids: np.ndarray) -> np.ndarray:
        """Return for each position the answer if the sequence (b,l) ended there, shape (b,l)."""
        raise NotImplementedError

    def sample(
        self, rng: np.random.Generator, batch_size: int, lengths: tuple[int, int], split: str
    ) -> Batch:
        sizes = draw_lengths(rng, batch_size, lengths)
        ids = self.draw(rng, batch_size, int(sizes.max()))
        self.redraw_samples(rng, ids, sizes, split)
        return self.label(ids, self.answers(ids), sizes)

    def draw(self, rng: np.random.Generator, count: int, width: int) -> np.ndarray:
        """Draw random symbols, shape (count,width)."""
        return rng.integers(self.symbols, size=(count, width))

    def redraw_samples(
        self, rng: np.random.Generator, ids: np.ndarray, sizes: np.ndarray, split: str
    ) -> None:
        """Redraw the prefixes that belong to another split, in place.

        Args:
            rng: Source of randomness.
            ids: Sequences, shape (b,w).
            sizes: Length of each sequence, shape (b,).
            split: "train", "valid" or "test".
        """
        prefix_length = self.prefix_length
        if prefix_length is not None:
            splits.redraw_prefixes(
                split,
                ids[:, :prefix_length],
                self._can_redraw(sizes),
                lambda count: self.draw(rng, count, prefix_length),
            )

    def _can_redraw(self, sizes: np.ndarray) -> np.ndarray:
        """Return `is_held_out` for each of these lengths (b,), (b,) bool."""
        return sizes >= (self.prefix_length or np.inf)

    def label(self, ids: np.ndarray, answers: np.ndarray, sizes: np.ndarray) -> Batch:
        """Build a batch from ids and answers.

        Args:
            ids: Sequences, shape (b,l).
            answers: Answer at each position, shape (b,l).
            sizes: Length of each sequence, shape (b,); the positions after it become padding.
        """
        positions = np.arange(ids.shape[1])
        last = sizes[:, None] - 1
        mask = positions <= last
        is_labelled = mask if self.labels_every_token else positions == last
        labels = np.where(is_labelled, answers, IGNORE)
        return Batch(np.where(mask, ids, self.pad), labels, None if mask.all() else mask)

    def score(self, predicted: np.ndarray, batch: Batch) -> dict[str, np.ndarray]:
        """Score the last label of each sequence; predicted (b,l).

        `scaled_accuracy` is 0 for guessing and 1 for perfect answers.
        """
        is_labelled = batch.labels != IGNORE
        last = batch.labels.shape[1] - 1 - is_labelled[:, ::-1].argmax(1)
        rows = np.arange(len(last))
        accuracy = (predicted[rows, last] == batch.labels[rows, last]).astype(float)
        chance = self.chance_at(last + 1)
        return {"scaled_accuracy": (accuracy - chance) / (1 - chance), "accuracy": accuracy}

    def chance_at(self, lengths: np.ndarray) -> Any:
        """Return the accuracy of guessing at the end of sequences of these lengths (b,)."""
        return self.chance

    def token_name(self, token_id: int) -> str:
        return self.text([token_id])

    def answer_name(self, token_id: int) -> str:
        return str(token_id)

    def label_ids(self, ids: np.ndarray) -> Batch:
        return self.label(ids, self.answers(ids), np.array([ids.shape[1]]))

    def text(self, ids: Iterable[int]) -> str:
        """Return ids as text; padding is `_`."""
        return "".join("_" if i == self.pad else self.characters[i] for i in map(int, ids))


@task("parity")
class Parity(FormalLanguage):
    """Parity of the number of ones: 1 if it is odd, 0 if it is even.

    Source: `parity_check` of Delétang et al. 2023, "Neural Networks and the Chomsky Hierarchy",
    arXiv 2207.02098.
    """

    vocab_size = 3
    symbols = 2
    characters = "01"
    chance = 1 / 2

    def __init__(self, section: config.Task):
        super().__init__(section)
        self.answers_are_states = self.labels_every_token

    def answers(self, ids: np.ndarray) -> np.ndarray:
        return ids.cumsum(1) % 2


@task("mod_arithmetic", "mod_arithmetic_brackets")
class ModularArithmetic(FormalLanguage):
    """Value, modulo `task.modulus`, of an expression that ends with `=`.

    The length n counts the tokens before the `=`. The label at the `=` is the value. Tokens are the
    digits 0 … m − 1 (one token each, also above 9), then + − * ( ) = and padding: 12 ids for m = 5.

    Without brackets, digits and + − * alternate, with the usual precedence. With brackets, an
    expression is d, -d, (d) or (-d) for n = 1, 2, 3, 4; longer ones are `(left op right)`, where
    the length of left is uniform in 1 … n − 4, and op is + or −. Delétang et al. leave out products
    by default, because products would make the value 0 too often. Grazzi et al. report scores with
    and without products (Table 5); those without agree with the published scores that we compare
    FP-Mamba with.

    Source: `modular_arithmetic` and `modular_arithmetic_brackets` of Delétang et al. 2023
    (arXiv 2207.02098), with the `=` and the vocabulary of Beck et al. 2024 (xLSTM,
    arXiv 2405.04517) and Grazzi et al. 2024 (arXiv 2411.12537).
    """

    def __init__(self, section: config.Task):
        super().__init__(section)
        self.modulus = section.modulus
        self.chance = 1 / section.modulus
        self.has_brackets = self.name == "mod_arithmetic_brackets"
        if self.has_brackets and self.labels_every_token:
            raise TaskError(
                "mod_arithmetic_brackets has no answer before its brackets are closed: set "
                'task.supervision to "last", or use mod_arithmetic'
            )
        self.characters = [*map(str, range(self.modulus)), *"+-*()="]
        self.vocab_size = len(self.characters) + 1
        special = range(self.modulus, self.modulus + 6)
        self.plus, self.minus, self.times, self.open, self.close, self.equals = special
        self.operators = [self.plus, self.minus, *([] if self.has_brackets else [self.times])]
        self.length_step = 1 if self.has_brackets else 2  # digits and operators alternate

    def count_contents(self, width: int) -> float:
        if not self.has_brackets:
            if width % 2 == 0:
                return 0  # expressions end with a digit
            digits = (width + 1) // 2
            return self.modulus**digits * len(self.operators) ** (digits - 1)
        counts = [0, *[self.modulus] * 4]  # for each length; lengths 1 to 4 are leaves
        for n in range(5, width + 1):
            pairs = sum(counts[size] * counts[n - 3 - size] for size in range(1, n - 3))
            counts.append(len(self.operators) * pairs)
        return counts[width]

    def sample(
        self, rng: np.random.Generator, batch_size: int, lengths: tuple[int, int], split: str
    ) -> Batch:
        sizes = draw_lengths(rng, batch_size, lengths, self.length_step)
        width = int(sizes.max()) + 1
        if self.has_brackets:
            ids, answers = self._draw_bracketed(rng, sizes, width)
            splits.redraw_samples(
                split,
                (ids, answers),
                self._can_redraw(sizes),
                lambda rows: self._draw_bracketed(rng, sizes[rows], width),
                sizes,
            )
        else:
            ids = self.draw(rng, batch_size, width)
            self.redraw_samples(rng, ids, sizes, split)
            answers = self._values(ids)
        rows = np.arange(batch_size)
        ids[rows, sizes] = self.equals
        answers[rows, sizes] = answers[rows, sizes - 1]
        return self.label(ids, answers, sizes + 1)

    label_ids = Task.label_ids  # `parse_typed` then refuses: expressions cannot be typed

    def draw(self, rng: np.random.Generator, count: int, width: int) -> np.ndarray:
        """Draw expressions without brackets, shape (count,width): digits at even positions."""
        ids = np.empty((count, width), int)
        ids[:, ::2] = rng.integers(self.modulus, size=(count, (width + 1) // 2))
        ids[:, 1::2] = rng.choice(self.operators, (count, width // 2))
        return ids

    def _values(self, ids: np.ndarray) -> np.ndarray:
        """Return the value of the expression (b,w) so far at every digit, shape (b,w).

        The expression must have no brackets. Other positions hold IGNORE.
        """
        count, width = ids.shape
        answers = np.full((count, width), IGNORE)
        total = np.zeros(count, int)  # sum of the complete terms
        product = ids[:, 0]  # value of the last term so far, with its sign
        answers[:, 0] = product
        for position in range(2, width, 2):
            op = ids[:, position - 1]
            digit = ids[:, position]
            total = np.where(op == self.times, total, total + product) % self.modulus
            signed = np.where(op == self.minus, -digit, digit)
            product = np.where(op == self.times, product * digit, signed) % self.modulus
            answers[:, position] = (total + product) % self.modulus
        return answers

    def _draw_bracketed(
        self, rng: np.random.Generator, lengths: np.ndarray, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw expressions with brackets.

        An expression is a leaf (d, -d, (d) or (-d), by its length) or `(left op right)`. All parts
        of the same depth, of all expressions, are written at once into one flat array, starting
        with the whole expressions. Then the values are computed from the deepest parts up.

        Args:
            rng: Source of randomness.
            lengths: Length of each expression, shape (b,).
            width: Columns of the arrays that are returned.

        Returns:
            The ids, shape (b,width), and the value of each expression in all columns, (b,width).
        """
        # 1. Write depth by depth; the two parts of each expression belong to the next depth.
        ids = np.full(len(lengths) * width, self.pad)
        start = np.arange(len(lengths)) * width  # position of each part in `ids`
        length = lengths  # length of each part
        depths = []
        while len(start):
            is_leaf = length <= 4
            values = np.empty(len(start), int)  # those of other parts follow in step 2
            values[is_leaf] = self._write_leaves(rng, ids, start[is_leaf], length[is_leaf])

            opening = start[~is_leaf]  # position of each `(`
            size = length[~is_leaf]
            left_size = rng.integers(1, size - 3)
            op = rng.choice(self.operators, len(opening))
            ids[opening] = self.open
            ids[opening + 1 + left_size] = op
            ids[opening + size - 1] = self.close
            depths.append((values, is_leaf, op))
            start = np.append(opening + 1, opening + 2 + left_size)
            length = np.append(left_size, size - 3 - left_size)

        # 2. Compute the values from the deepest parts up. `deeper_values` holds the values of all
        # left parts, then of all right parts.
        deeper_values = np.empty(0, int)
        for values, is_leaf, op in reversed(depths):
            left_values, right_values = np.split(deeper_values, 2)
            values[~is_leaf] = np.where(
                op == self.minus, left_values - right_values, left_values + right_values
            )
            deeper_values = values % self.modulus
        return ids.reshape(-1, width), np.repeat(deeper_values[:, None], width, 1)

    def _write_leaves(
        self, rng: np.random.Generator, ids: np.ndarray, start: np.ndarray, length: np.ndarray
    ) -> np.ndarray:
        """Write the leaves d, -d, (d) and (-d) into `ids`, in place.

        Args:
            rng: Source of randomness.
            ids: Flat array of tokens.
            start: Position of each leaf, shape (n,).
            length: Length of each leaf, 1 to 4, which decides its form, shape (n,).

        Returns:
            The values of the leaves, shape (n,).
        """
        is_negative = length % 2 == 0
        is_enclosed = length >= 3
        digit = rng.integers(self.modulus, size=len(start))
        ids[start[is_enclosed]] = self.open
        ids[(start + length - 1)[is_enclosed]] = self.close
        ids[(start + is_enclosed)[is_negative]] = self.minus
        ids[start + is_enclosed + is_negative] = digit
        return np.where(is_negative, -digit, digit)
