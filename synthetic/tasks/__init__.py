"""The datasets of the suite, one file a family, behind one interface: `build(cfg.task)`."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

import numpy as np

from lm.errors import UserError

IGNORE = -100  # a label that is not scored
SPLITS = ("train", "valid", "test")


class TaskError(UserError, ValueError):
    """A dataset that cannot be had; the message says what was asked for and what would do."""


class Batch(NamedTuple):
    """Sequences and what a model should answer at each position. b batch, l length."""

    input_ids: np.ndarray  # (b,l) int64
    labels: np.ndarray  # (b,l) int64: the answer at this very position, IGNORE where none is due
    mask: np.ndarray | None = None  # (b,l) bool, False at padding (always on the right)
    kinds: np.ndarray | None = None  # (b,l) int64: which sub-task a label belongs to, if there are
    carry: bool = False  # the sequences go on where those of the batch before ended
    shared: np.ndarray | None = None  # (n,) uint64: hashes of its samples that are not held apart


class Task:
    """One dataset: an endless, seeded source of batches, and its metrics.

    Training, validation and test have no sample in common wherever `held_apart` says so
    (synthetic/tasks/splits.py); samples of other lengths are in `Batch.shared`, by their hashes,
    and in training also what such a sample would be the beginning of, where labels are due there.

    Attributes:
        vocab_size: ids run from 0 to vocab_size − 1, in inputs and in labels.
        chance: accuracy of guessing (1 / number of possible answers).
        headline: the metric that says whether the task is solved (1.0 = perfect).
        source: where the task comes from, for tables.
    """

    vocab_size: int
    chance: float
    headline: str = "sequence_accuracy"
    source: str = ""

    def check_length(self, length: int) -> None:
        """Raises TaskError when no sequence of the task has this length."""

    def held_apart(self, length: int) -> bool:
        """Whether no test or validation sample of this length is in training, whatever the seeds.
        If not there are too few different ones."""
        raise NotImplementedError

    def sample(
        self, rng: np.random.Generator, batch_size: int, lengths: tuple[int, int], split: str
    ) -> Batch:
        """Draw a batch; each sequence's length is uniform over the valid ones in [lo, hi]."""
        raise NotImplementedError

    def batch(
        self, seed: int, split: str, index: int, batch_size: int, lengths: tuple[int, int]
    ) -> Batch:
        """Batch `index` of a split: the same for the same arguments, whoever asks and in whatever
        order (so any number of loader processes gives the same data)."""
        rng = np.random.default_rng([seed, SPLITS.index(split), index])
        return self.sample(rng, batch_size, lengths, split)

    def score(self, predicted: np.ndarray, batch: Batch) -> dict[str, np.ndarray]:
        """predicted (b,l): the likeliest id at each position → per metric, one value an item
        (token or sequence); their mean over all batches is the metric."""
        due = batch.labels != IGNORE
        right = predicted == batch.labels
        return {
            "token_accuracy": right[due].astype(float),
            "sequence_accuracy": (right | ~due).all(1).astype(float)[due.any(1)],
        }

    def token_name(self, number: int) -> str:
        """An input's id as it is shown, and typed."""
        return str(number)

    def answer_name(self, number: int) -> str:
        """An answer's id as it is shown."""
        return self.token_name(number)

    def typed(self, words: list[str]) -> Batch:
        """A sequence that somebody typed, with the answers that the task's oracle gives: a batch of
        one, without padding.

        Raises:
            TaskError: a word that the task has not, or no sequence of it; or sequences of this task
                cannot be typed.
        """
        raise TaskError("sequences of this task cannot be typed: --length N draws one of them")

    def sequences(self, batch: Batch) -> dict[str, np.ndarray]:
        """Of a metric with several items a sequence, the row of the batch that each is of: such
        items are not independent. Other metrics are left out."""
        return {"token_accuracy": np.nonzero(batch.labels != IGNORE)[0]}


# name in a config → (file, class, arguments)
TASKS = {
    "word_problem": ("word_problem", "WordProblem"),
    "copy": ("copying", "Copying"),
    "prefix_ngram": ("copying", "Copying"),
    "suffix_ngram": ("copying", "Copying"),
    "duplicate_ngram": ("copying", "Copying"),
    "mod_arithmetic": ("formal_language", "ModularArithmetic"),
    "mod_arithmetic_brackets": ("formal_language", "ModularArithmetic"),
    "parity": ("formal_language", "Parity"),
    "even_pairs": ("formal_language", "EvenPairs"),
    "cycle_navigation": ("formal_language", "CycleNavigation"),
    "catbabi": ("catbabi", "CatBabi"),
}


def build(task) -> Task:
    """`synthetic.config.Task` → the dataset it names.

    Raises:
        TaskError: an unknown group, folders with missing files, sizes no task can have.
    """
    module, name = TASKS[task.name]
    return getattr(import_module(f"synthetic.tasks.{module}"), name)(task)


def draw_lengths(
    rng: np.random.Generator, count: int, lengths: tuple[int, int], step: int = 1, first: int = 1
) -> np.ndarray:
    """`count` lengths uniform over {first, first + step, …} ∩ [lo, hi] → (count,) int64.

    Raises:
        TaskError: there is none.
    """
    lo, hi = lengths
    lo = max(lo, first)
    lo += (first - lo) % step
    if lo > hi:
        kind = f"{first}, {first + step}, {first + 2 * step}, …"
        raise TaskError(f"no length between {lengths[0]} and {hi}: this task has lengths {kind}")
    return lo + step * rng.integers(0, (hi - lo) // step + 1, count)
