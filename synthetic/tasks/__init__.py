"""The datasets of the suite, one file a family, behind one interface: `build(cfg.task)`."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import numpy as np

from lm.common.errors import UserError
from lm.config.plugin import is_place, load_class
from synthetic.tasks import splits

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


class Task:
    """One dataset: an endless, seeded source of batches, and its metrics.

    A subclass is made with the `task` section of a YAML; it must set `vocab_size` and `chance`, and
    define `sample` (whose labels are its oracle) and `count_contents` (or `held_apart`).
    docs/extending.md has one.

    Training, validation and test have no sample in common wherever `held_apart` says so
    (synthetic/tasks/splits.py): samples of different splits differ within the first `opening`
    numbers of their content. So no test sample is the beginning of a training sample either.

    Attributes:
        name: as in a config.
        vocab_size: ids run from 0 to vocab_size − 1, in inputs and in labels.
        chance: accuracy of guessing (1 / number of possible answers).
        names: of the ids, as sequences are shown and typed; empty: the ids themselves.
        shortest: the task has lengths shortest, shortest + apart, …
        apart: see `shortest`.
        headline: the metric that says whether the task is solved (1.0 = perfect).
        streams: batches continue each other, and evaluation goes over one epoch of them in order;
            such a task has `segments`.
    """

    name: str = "this task"
    vocab_size: int
    chance: float
    headline: str = "sequence_accuracy"
    names: Sequence[str] = ()
    shortest: int = 1
    apart: int = 1
    streams: bool = False

    def __init__(self, section: Any = None):
        """Nothing is read from the section."""

    def check_length(self, length: int) -> None:
        """Raises TaskError when no sequence of the task has this length."""
        if length < self.shortest or (length - self.shortest) % self.apart:
            lengths = ", ".join(str(self.shortest + self.apart * i) for i in range(3))
            raise TaskError(
                f"{self.name} has no sequences of length {length}: it has lengths {lengths}, …"
            )

    def count_contents(self, width: int) -> float:
        """Count the different contents of so many numbers."""
        raise self._lacks("count_contents(self, width)")

    def content_width(self, length: int) -> int:
        """Return how many numbers the content of a sequence of this length has, at least."""
        return length

    @cached_property
    def opening(self) -> int | None:
        """Numbers of the content that decide the split; None: there are too few contents."""
        return splits.opening_length(self.count_contents)

    def held_apart(self, length: int) -> bool:
        """Whether no test or validation sample of this length is in training, whatever the seeds.
        It is False where there are too few different ones."""
        return self.opening is not None and self.content_width(length) >= self.opening

    def draw_from(self, letters: int | None) -> None:
        """From now on draw sequences of so many letters alone, the simplest ones; None: of all.

        Raises:
            TaskError: the task has no letters that could be left out, or not so many.
        """
        if letters is not None:
            raise TaskError(
                "train.curriculum.num_elements: of word_problem alone some letters can come later"
            )

    def sample(
        self, rng: np.random.Generator, batch_size: int, lengths: tuple[int, int], split: str
    ) -> Batch:
        """Draw a batch; each sequence's length is uniform over the valid ones in [lo, hi]."""
        raise self._lacks("sample(self, rng, batch_size, lengths, split)")

    def _lacks(self, call: str) -> TaskError:
        place = f"{type(self).__module__}:{type(self).__qualname__}"
        return TaskError(f"{place} has no method {call}: a task must define it (docs/extending.md)")

    def batch(
        self, seed: int, split: str, index: int, batch_size: int, lengths: tuple[int, int]
    ) -> Batch:
        """Batch `index` of a split: the same for the same arguments, in whatever order."""
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

    def token_name(self, number: int) -> str:
        """An input's id as it is shown, and typed."""
        return self.names[number] if self.names else str(number)

    def answer_name(self, number: int) -> str:
        """An answer's id as it is shown."""
        return self.token_name(number)

    def label_typed(self, ids: np.ndarray) -> Batch:
        """Label the ids (1,l) of a typed sequence by the task's oracle.

        Raises:
            TaskError: The task has no such sequence.
        """
        raise NotImplementedError

    def typed(self, words: list[str]) -> Batch:
        """Return the sequence that somebody typed by the names of its tokens, with its answers: a
        batch of one, without padding. Names of one character need no spaces between them.

        Raises:
            TaskError: The task cannot label them, or has no such token or sequence.
        """
        if type(self).label_typed is Task.label_typed:
            raise TaskError("sequences of this task cannot be typed: --length N draws one of them")
        numbers = {name: number for number, name in enumerate(self.names)}
        ids = []
        for word in " ".join(words).split():
            for name in [word] if word in numbers else word:
                if name not in numbers:
                    known = ", ".join(list(numbers)[:6]) + ", …" * (len(numbers) > 6)
                    raise TaskError(f"`{word}` is no token of the task: these are {known}")
                ids.append(numbers[name])
        self.check_length(len(ids))
        return self.label_typed(np.array([ids]))

    def sequences(self, batch: Batch) -> dict[str, np.ndarray]:
        """For each metric with several items a sequence: the row of the batch that each item is of,
        since items of one row are not independent. Other metrics are left out."""
        return {"token_accuracy": np.nonzero(batch.labels != IGNORE)[0]}


AnyTask = TypeVar("AnyTask", bound=Task)
TASKS: dict[str, type[Task]] = {}  # name in a config → class


def task(*names: str) -> Callable[[type[AnyTask]], type[AnyTask]]:
    """Return a decorator that registers a class of this folder under these names, which `task.name`
    may then have. Classes elsewhere are named as `module:Class`."""

    def decorated(cls: type[AnyTask]) -> type[AnyTask]:
        TASKS.update(dict.fromkeys(names, cls))
        return cls

    return decorated


def registered_tasks() -> list[str]:
    """Return the names that `@task` has registered in the files of this folder."""
    for module in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    return list(TASKS)


def build(section: Any) -> Task:
    """`synthetic.config.Task` → the dataset it names.

    Raises:
        TaskError: an unknown group, folders with missing files, sizes no task can have; a class of
            one's own that lacks something.
        ConfigError: no such module or class.
    """
    if is_place(section.name):
        cls = load_class(section.name, "task.name")
        if not issubclass(cls, Task):
            raise TaskError(
                f"{section.name} is no task: it must be derived from Task, of synthetic.tasks"
            )
    else:
        registered_tasks()
        cls = TASKS[section.name]
    made = cls(section)
    missing = [name for name in ("vocab_size", "chance") if not hasattr(made, name)]
    if missing:
        raise TaskError(
            f"task `{section.name}` has no {' and no '.join(missing)}: its class, or its __init__,"
            " must set vocab_size (how many ids there are) and chance (the accuracy of guessing)"
        )
    return made


def check_batch(name: str, task: Task, batch: Batch) -> None:
    """Refuse a batch that would stop a run in its middle, or be scored wrongly.

    Args: name: of the task, for messages.
    Raises:
        TaskError: arrays of several shapes, ids that are no whole numbers from 0 to vocab_size − 1,
            no label, or no metric of the name that `headline` gives.
    """
    shape = batch.input_ids.shape
    for what, values in (("input_ids", batch.input_ids), ("labels", batch.labels)):
        if values.ndim != 2 or values.shape != shape or values.dtype.kind not in "iu":
            raise TaskError(
                f"task `{name}`: {what} are {values.dtype} of shape {values.shape}: both input_ids"
                " and labels must be whole numbers, (sequences, length) each"
            )
        wrong = values[(values < 0) | (values >= task.vocab_size)]
        wrong = wrong[wrong != IGNORE] if what == "labels" else wrong
        if len(wrong):
            raise TaskError(
                f"task `{name}`: {what} have {wrong[0]}, and vocab_size is {task.vocab_size}: ids"
                f" run from 0 to {task.vocab_size - 1}"
            )
    # A segment of a stream may hold no answer.
    if not task.streams and not (batch.labels != IGNORE).any():
        raise TaskError(f"task `{name}`: no label of a batch is due: all of them are {IGNORE}")
    metrics = task.score(batch.labels, batch)
    if task.headline not in metrics:
        raise TaskError(
            f"task `{name}`: its headline is {task.headline}, and its score has"
            f" {', '.join(metrics)}: it must be one of these"
        )


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
