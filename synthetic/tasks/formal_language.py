"""Formal languages: modular arithmetic and parity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from synthetic import config
from synthetic.tasks import IGNORE, Batch, Task, TaskError, draw_lengths, splits, task


class FormalLanguage(Task):
    """What the languages share: answers at the last token or at every one, scored at the last.

    A subclass says what its symbols are and what the answer after each of them is.
    """

    headline = "scaled_accuracy"
    characters: str | list[str]  # of the symbols, by id; padding comes after all of them
    symbols: int  # ids 0 to symbols − 1 are drawn uniformly

    def __init__(self, task: config.Task):
        self.name = task.name
        self.every = task.supervision == "every"

    def count_contents(self, width: int) -> float:
        return self.symbols**width

    @property
    def token_names(self) -> Sequence[str]:  # type: ignore[override]
        return self.characters

    @property
    def pad(self) -> int:
        """The id of padding."""
        return self.vocab_size - 1

    def answers(self, ids: np.ndarray) -> np.ndarray:
        """(b,l) → (b,l): the answer if the sequence ended at this very symbol."""
        raise NotImplementedError

    def sample(
        self, rng: np.random.Generator, batch_size: int, lengths: tuple[int, int], split: str
    ) -> Batch:
        drawn = draw_lengths(rng, batch_size, lengths)
        ids = self.draw(rng, batch_size, int(drawn.max()))
        self.redraw_samples(rng, ids, drawn, split)
        return self.label(ids, self.answers(ids), drawn)

    def draw(self, rng: np.random.Generator, count: int, width: int) -> np.ndarray:
        """Random symbols (count,width)."""
        return rng.integers(self.symbols, size=(count, width))

    def redraw_samples(
        self, rng: np.random.Generator, ids: np.ndarray, sizes: np.ndarray, split: str
    ) -> None:
        """Draw the openings of ids (b,w) that are of another split anew, in place.

        Args: sizes: (b,) how many ids of a row are its own.
        """
        opening = self.prefix_length
        if opening is not None:
            apart = self._are_apart(sizes)
            splits.redraw_prefixes(
                split, ids[:, :opening], apart, lambda count: self.draw(rng, count, opening)
            )

    def _are_apart(self, sizes: np.ndarray) -> np.ndarray:
        """`is_held_out` of each of these lengths (b,)."""
        return sizes >= (self.prefix_length or np.inf)

    def label(self, ids: np.ndarray, answers: np.ndarray, sizes: np.ndarray) -> Batch:
        """The batch of ids (b,l) and the answers (b,l) at all of them.

        Args: sizes: (b,) how many ids of a row are its own; behind them is padding.
        """
        place = np.arange(ids.shape[1])
        last = sizes[:, None] - 1
        mask = place <= last
        labels = np.where(mask if self.every else place == last, answers, IGNORE)
        return Batch(np.where(mask, ids, self.pad), labels, None if mask.all() else mask)

    def score(self, predicted: np.ndarray, batch: Batch) -> dict[str, np.ndarray]:
        """Of the last label of each sequence; scaled: 0 is guessing and 1 is perfect."""
        last = batch.labels.shape[1] - 1 - (batch.labels != IGNORE)[:, ::-1].argmax(1)
        rows = np.arange(len(last))
        right = (predicted[rows, last] == batch.labels[rows, last]).astype(float)
        chance = self.chance_at(last + 1)
        return {"scaled_accuracy": (right - chance) / (1 - chance), "accuracy": right}

    def chance_at(self, lengths: np.ndarray) -> Any:
        """The accuracy of guessing at the end of sequences of these lengths (b,)."""
        return self.chance

    def token_name(self, number: int) -> str:
        return self.text([number])

    def answer_name(self, number: int) -> str:
        return str(number)

    def label_ids(self, ids: np.ndarray) -> Batch:
        return self.label(ids, self.answers(ids), np.array([ids.shape[1]]))

    def text(self, ids: Iterable[int]) -> str:
        """Ids as characters; padding is `_`."""
        return "".join("_" if i == self.pad else self.characters[i] for i in map(int, ids))


@task("parity")
class Parity(FormalLanguage):
    """Is the number of ones odd (1) or even (0)? `parity_check` of Delétang et al. 2023, "Neural
    Networks and the Chomsky Hierarchy" (arXiv 2207.02098)."""

    vocab_size = 3
    symbols = 2
    characters = "01"
    chance = 1 / 2

    def answers(self, ids: np.ndarray) -> np.ndarray:
        return ids.cumsum(1) % 2


@task("mod_arithmetic", "mod_arithmetic_brackets")
class ModularArithmetic(FormalLanguage):
    """The value, modulo `task.modulus`, of an expression that ends with `=`: `modular_arithmetic`
    and `modular_arithmetic_brackets` of Delétang et al. 2023 (arXiv 2207.02098), with the `=` and
    the vocabulary of Beck et al. 2024 (xLSTM, arXiv 2405.04517) and Grazzi et al. 2024 (arXiv
    2411.12537).

    The length n counts the tokens before the `=`, where the answer is due. Tokens are the digits
    0 … m − 1 (one token each also beyond 9), then + − * ( ) = and padding, 12 for m = 5.

    Without brackets digits and + − * alternate, with the usual precedence. With brackets, an
    expression is d, -d, (d) or (-d) for n = 1, 2, 3, 4, else `(left op right)` where the length of
    left is uniform in 1 … n − 4. There op is + or −: products would make 0 the answer too often, so
    Delétang et al. leave them out by default. (Grazzi et al. report both, Table 5; the scores that
    FP-Mamba's are set beside agree with those without.)
    """

    def __init__(self, task: config.Task):
        super().__init__(task)
        self.modulus = task.modulus
        self.chance = 1 / task.modulus
        self.brackets = self.name == "mod_arithmetic_brackets"
        if self.brackets and self.every:
            raise TaskError(
                "mod_arithmetic_brackets has no answer before its brackets are closed: set "
                'task.supervision to "last", or use mod_arithmetic'
            )
        self.characters = [*map(str, range(self.modulus)), *"+-*()="]
        self.vocab_size = len(self.characters) + 1
        special = range(self.modulus, self.modulus + 6)
        self.plus, self.minus, self.times, self.open, self.close, self.equals = special
        self.operators = [self.plus, self.minus, *([] if self.brackets else [self.times])]
        self.length_step = 1 if self.brackets else 2  # digits and operators alternate

    def count_contents(self, width: int) -> float:
        if not self.brackets:
            digits = (width + 1) // 2
            return self.modulus**digits * len(self.operators) ** (digits - 1) * (width % 2)
        counts = [0, *[self.modulus] * 4]
        for n in range(5, width + 1):
            pairs = sum(counts[left] * counts[n - 3 - left] for left in range(1, n - 3))
            counts.append(len(self.operators) * pairs)
        return counts[width]

    def sample(
        self, rng: np.random.Generator, batch_size: int, lengths: tuple[int, int], split: str
    ) -> Batch:
        drawn = draw_lengths(rng, batch_size, lengths, self.length_step)
        width = int(drawn.max()) + 1
        if self.brackets:
            ids, answers = self._bracketed(rng, drawn, width)
            splits.redraw_samples(
                split,
                (ids, answers),
                self._are_apart(drawn),
                lambda rows: self._bracketed(rng, drawn[rows], width),
                drawn,
            )
        else:
            ids = self.draw(rng, batch_size, width)
            self.redraw_samples(rng, ids, drawn, split)
            answers = self._values(ids)
        rows = np.arange(batch_size)
        ids[rows, drawn] = self.equals
        answers[rows, drawn] = answers[rows, drawn - 1]
        return self.label(ids, answers, drawn + 1)

    label_ids = Task.label_ids  # expressions cannot be typed

    def draw(self, rng: np.random.Generator, count: int, width: int) -> np.ndarray:
        """Digits and operators by turns (count,width): an expression without brackets."""
        ids = np.empty((count, width), int)
        ids[:, ::2] = rng.integers(self.modulus, size=(count, (width + 1) // 2))
        ids[:, 1::2] = rng.choice(self.operators, (count, width // 2))
        return ids

    def _values(self, ids: np.ndarray) -> np.ndarray:
        """Without brackets: ids (b,w) → the value so far (b,w) at every digit."""
        count, width = ids.shape
        answers = np.full((count, width), IGNORE)
        total = np.zeros(count, int)  # of the terms that are complete
        product = ids[:, 0]  # of the last term so far, with its sign
        answers[:, 0] = product
        for place in range(2, width, 2):
            op = ids[:, place - 1]
            digit = ids[:, place]
            total = np.where(op == self.times, total, total + product) % self.modulus
            signed = np.where(op == self.minus, -digit, digit)
            product = np.where(op == self.times, product * digit, signed) % self.modulus
            answers[:, place] = (total + product) % self.modulus
        return answers

    def _bracketed(
        self, rng: np.random.Generator, lengths: np.ndarray, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """With brackets: expressions of these lengths (b,) → ids (b,width), and the value of each
        all along (b,width).

        An expression is a leaf (d, -d, (d) or (-d), by its length) or `(left op right)`. All parts
        of one depth, of all expressions, are written at once into one flat array, from the whole
        expressions down; then their values are reckoned from the deepest parts up.
        """
        # 1. Write, depth by depth; the two parts of each expression are the next depth's.
        ids = np.full(len(lengths) * width, self.pad)
        start = np.arange(len(lengths)) * width  # of each part in `ids`
        length = lengths  # of each part
        depths = []
        while len(start):
            is_leaf = length <= 4
            leaf_values = self._write_leaves(rng, ids, start[is_leaf], length[is_leaf])
            values = np.empty(len(start), int)
            values[is_leaf] = leaf_values

            first = start[~is_leaf]
            size = length[~is_leaf]
            left_size = rng.integers(1, size - 3)
            op = rng.choice(self.operators, len(first))
            ids[first] = self.open
            ids[first + 1 + left_size] = op
            ids[first + size - 1] = self.close
            depths.append((values, is_leaf, op))
            start = np.append(first + 1, first + 2 + left_size)
            length = np.append(left_size, size - 3 - left_size)

        # 2. Reckon: the values of a depth's parts are those of the leaves, and of the depth below,
        # whose first half are left parts and whose second half are right ones.
        below = np.empty(0, int)
        for values, is_leaf, op in reversed(depths):
            left, right = np.split(below, 2)
            values[~is_leaf] = np.where(op == self.minus, left - right, left + right)
            below = values % self.modulus
        return ids.reshape(-1, width), np.repeat(below[:, None], width, 1)

    def _write_leaves(
        self, rng: np.random.Generator, ids: np.ndarray, start: np.ndarray, length: np.ndarray
    ) -> np.ndarray:
        """Write d, -d, (d) or (-d), as the lengths 1 to 4 (n,) say, from `start` (n,) on into ids,
        in place → their values (n,)."""
        negative = length % 2 == 0
        enclosed = length >= 3
        digit = rng.integers(self.modulus, size=len(start))
        ids[start[enclosed]] = self.open
        ids[(start + length - 1)[enclosed]] = self.close
        ids[(start + enclosed)[negative]] = self.minus
        ids[start + enclosed + negative] = digit
        return np.where(negative, -digit, digit)
