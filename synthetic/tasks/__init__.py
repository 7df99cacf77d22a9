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
    kinds: np.ndarray | None = None  # (b,l) int64: the sub-task of a label, of a task that has them
    carry: bool = False  # the sequences go on where those of the batch before ended
    shared: np.ndarray | None = None  # (n,) uint64: hashes of its samples that are not held apart


class Task:
    """One dataset: an endless, seeded source of batches, and its metrics.

    Training, validation and test have no sample in common wherever `held_apart` says so
    (synthetic/tasks/splits.py). The hashes of all other samples are in `Batch.shared`. A training
    batch also lists there the short samples that its own begin with, if labels are due inside it:
    training has seen their answers, too.

    Attributes:
        vocab_size: ids run from 0 to vocab_size − 1, in inputs and in labels.
        chance: accuracy of guessing (1 / number of possible answers).
        headline: the metric that says whether the task is solved (1.0 = perfect).
        source: where the task comes from, for tables.
        streams: batches continue each other, and evaluation goes over one epoch of them in order;
            such a task has `segments` and `seen`.
        seen: of a stream, each split's questions that are in training, and all of them.
    """

    vocab_size: int
    chance: float
    headline: str = "sequence_accuracy"
    source: str = ""
    streams: bool = False
    seen: dict[str, tuple[int, int]]

    def check_length(self, length: int) -> None:
        """Raises TaskError when no sequence of the task has this length."""

    def held_apart(self, length: int) -> bool:
        """Whether no test or validation sample of this length is in training, whatever the seeds.
        It is False where there are too few different ones."""
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

    def segments(self, split: str, batch_size: int, length: int) -> int:
        """Of a stream: the number of batches in an epoch, with segments of `length`.

        Raises:
            TaskError: batch_size × length tokens are more than the split has.
        """
        raise NotImplementedError

    def score(self, predicted: np.ndarray, batch: Batch) -> dict[str, np.ndarray]:
        """predicted (b,l): the likeliest id at each position → per metric, one value an item
        (token or sequence); their mean over all batches is the metric."""
        due = batch.labels != IGNORE
        right = predicted == batch.labels
        return {
            "token_accuracy": right[due].astype(float),
            "sequence_accuracy": (right | ~due).all(1).astype(float)[due.any(1)],
        }

    def sequences(self, batch: Batch) -> dict[str, np.ndarray]:
        """For each metric with several items a sequence: the row of the batch that each item is of,
        since items of one row are not independent. Other metrics are left out."""
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
    rng: np.random.Generator, count: int, lengths: tuple[int, int], apart: int = 1, first: int = 1
) -> np.ndarray:
    """`count` lengths uniform over {first, first + apart, …} ∩ [lo, hi] → (count,) int64.

    Raises:
        TaskError: there is none.
    """
    lo, hi = lengths
    shortest = max(lo, first)
    shortest += (first - shortest) % apart
    if shortest > hi:
        possible = f"{first}, {first + apart}, {first + 2 * apart}, …"
        raise TaskError(f"no length between {lo} and {hi}: this task has lengths {possible}")
    return shortest + apart * rng.integers(0, (hi - shortest) // apart + 1, count)
