"""Tasks of the validation suite: a file for each family, and their common interface `Task`."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import numpy as np

from lm.common.errors import UserError
from lm.config.plugin import is_class_path, load_class
from synthetic.tasks import splits

IGNORE = -100  # a label that is not scored
SPLITS = ("train", "valid", "test")


class TaskError(UserError, ValueError):
    """Error for a task that cannot be built; its message names the request and a valid one."""


class Batch(NamedTuple):
    """Sequences with the expected answer at each position. b sequences, l tokens."""

    input_ids: np.ndarray  # (b,l) int64
    labels: np.ndarray  # (b,l) int64: the answer at the same position, or IGNORE
    mask: np.ndarray | None = None  # (b,l) bool, False at padding, which is always on the right
    subtasks: np.ndarray | None = None  # (b,l) int64: the subtask of each label, if there are any
    is_continuation: bool = False  # True if row i continues row i of the previous batch


class Task:
    """An endless, seeded source of batches, with its metrics.

    `build_task` calls the subclass with the `task` section of a YAML. A subclass must set
    `vocab_size` and `chance`, and define `sample` (which also computes the labels) and either
    `count_contents` or `is_held_out`. docs/extending.md shows an example.

    The content of a sample is the row of numbers that were drawn for it; labels follow from it.
    Training, validation and test share no sample at the lengths for which `is_held_out` returns
    True (synthetic/tasks/splits.py): samples of different splits differ within the first
    `prefix_length` numbers of their content. Therefore no test sample is a prefix of a training
    sample either. Copying tasks and `mod_arithmetic_brackets` hash the whole content, so their
    samples differ, but not always within the first `prefix_length` numbers.

    Attributes:
        name: Name of the task in a config.
        vocab_size: Number of ids; inputs and labels run from 0 to vocab_size - 1.
        chance: Highest accuracy per answer of a guess that does not read the input.
        token_names: Name of each id, for display and for typed input; empty: the ids themselves.
        min_length: Shortest sequence length.
        length_step: Valid lengths are min_length, min_length + length_step, and so on.
        headline: Metric that decides whether the task is solved (1.0 is perfect).
        streams: True if batches continue each other and evaluation reads one epoch in order; such
            a task defines `segments`.
        answers_are_states: True if the answer at every token is the state that it leads to.
    """

    name: str = "this task"
    vocab_size: int
    chance: float
    headline: str = "sequence_accuracy"
    token_names: Sequence[str] = ()
    min_length: int = 1
    length_step: int = 1
    streams: bool = False
    answers_are_states: bool = False

    def __init__(self, section: Any = None):
        """Ignore the `task` section; subclasses read their options from it."""

    def check_length(self, length: int) -> None:
        """Check that the task has sequences of this length.

        Raises:
            TaskError: If it has no such sequences.
        """
        if length < self.min_length or (length - self.min_length) % self.length_step:
            lengths = ", ".join(str(self.min_length + self.length_step * i) for i in range(3))
            raise TaskError(
                f"{self.name} has no sequences of length {length}: it has lengths {lengths}, …"
            )

    def count_contents(self, width: int) -> float:
        """Return the number of different contents that consist of `width` numbers."""
        raise self._missing_method_error("count_contents(self, width)")

    def content_width(self, length: int) -> int:
        """Return how many content numbers a sequence of this length has at least."""
        return length

    @cached_property
    def prefix_length(self) -> int | None:
        """Number of content numbers that decide the split; None if there are too few contents."""
        return splits.find_prefix_length(self.count_contents)

    def is_held_out(self, length: int) -> bool:
        """Return True if training never sees a validation or test sample of this length.

        This holds for all seeds. It is False at lengths that have too few different samples.
        """
        return self.prefix_length is not None and self.content_width(length) >= self.prefix_length

    def restrict_elements(self, count: int | None) -> None:
        """Draw all later sequences from the `count` simplest elements only; None: from all.

        Raises:
            TaskError: If the task cannot leave out elements, or has fewer than `count`.
        """
        if count is not None:
            raise TaskError(
                "train.curriculum.num_elements: only word_problem can start with fewer elements"
            )

    def sample(
        self, rng: np.random.Generator, batch_size: int, lengths: tuple[int, int], split: str
    ) -> Batch:
        """Draw a batch.

        Args:
            rng: The only source of randomness.
            batch_size: Number of sequences.
            lengths: Shortest and longest length. The length is uniform over the valid lengths of
                this interval; a task may draw one for the whole batch. Streams use the longest.
            split: "train", "valid" or "test".
        """
        raise self._missing_method_error("sample(self, rng, batch_size, lengths, split)")

    def _missing_method_error(self, signature: str) -> TaskError:
        class_name = f"{type(self).__module__}:{type(self).__qualname__}"
        return TaskError(
            f"{class_name} has no method {signature}: a task must define it (docs/extending.md)"
        )

    def batch(
        self, seed: int, split: str, index: int, batch_size: int, lengths: tuple[int, int]
    ) -> Batch:
        """Return batch `index` of a split; equal arguments give equal batches, in any order."""
        rng = np.random.default_rng([seed, SPLITS.index(split), index])
        return self.sample(rng, batch_size, lengths, split)

    def segments(self, split: str, batch_size: int, length: int) -> int:
        """Count the batches in an epoch of a stream, with segments of `length` tokens.

        Raises:
            TaskError: If batch_size × length tokens are more than the split has.
        """
        raise NotImplementedError

    def score(self, predicted: np.ndarray, batch: Batch) -> dict[str, np.ndarray]:
        """Score predictions.

        Args:
            predicted: The most likely id at each position, shape (b,l).
            batch: The batch that was read.

        Returns:
            For each metric one value per item (token or sequence). The metric is their mean over
            all batches.
        """
        is_scored = batch.labels != IGNORE
        is_correct = predicted == batch.labels
        return {
            "token_accuracy": is_correct[is_scored].astype(float),
            "sequence_accuracy": (is_correct | ~is_scored).all(1).astype(float)[is_scored.any(1)],
        }

    def item_rows(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return the row of each item, for each metric with several items per sequence.

        Standard errors need the rows, because items of the same row are not independent. Metrics
        with one item per sequence are left out.
        """
        return {"token_accuracy": np.nonzero(batch.labels != IGNORE)[0]}

    def token_name(self, token_id: int) -> str:
        """Return the name of an input id, as it is shown and typed."""
        return self.token_names[token_id] if self.token_names else str(token_id)

    def answer_name(self, token_id: int) -> str:
        """Return the name of an answer's id, as it is shown."""
        return self.token_name(token_id)

    def label_ids(self, ids: np.ndarray) -> Batch:
        """Compute the labels of a typed sequence.

        Args:
            ids: Input ids, shape (1,l).

        Raises:
            TaskError: If the task has no such sequence.
        """
        raise NotImplementedError

    def parse_typed(self, texts: list[str]) -> Batch:
        """Return a sequence that somebody typed as a batch of one, with labels, without padding.

        Args:
            texts: Names of tokens, separated by spaces; names of one character need no spaces.

        Raises:
            TaskError: If the task cannot label typed input, or has no such token or sequence.
        """
        if type(self).label_ids is Task.label_ids:
            raise TaskError("sequences of this task cannot be typed: --length N draws one of them")
        id_by_name = {name: token_id for token_id, name in enumerate(self.token_names)}
        ids = []
        for text in " ".join(texts).split():
            # The text is one token, or several tokens of one character each.
            names = [text] if text in id_by_name else list(text)
            for name in names:
                if name not in id_by_name:
                    examples = list(id_by_name)[:6] + (["…"] if len(id_by_name) > 6 else [])
                    raise TaskError(
                        f"`{text}` is no token of the task: its tokens are {', '.join(examples)}"
                    )
                ids.append(id_by_name[name])
        self.check_length(len(ids))
        return self.label_ids(np.array([ids]))


TaskClass = TypeVar("TaskClass", bound=type[Task])
TASKS: dict[str, type[Task]] = {}  # name in a config → class


def task(*names: str) -> Callable[[TaskClass], TaskClass]:
    """Return a decorator that registers a class under these values of `task.name`.

    Only classes in this folder need it. A config names a class elsewhere as `module:Class`.
    """

    def register(cls: TaskClass) -> TaskClass:
        TASKS.update(dict.fromkeys(names, cls))
        return cls

    return register


def registered_tasks() -> list[str]:
    """Import all files of this folder, and return the names that they register with `@task`."""
    for module in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    return list(TASKS)


def build_task(section: Any) -> Task:
    """Build the task that a `synthetic.config.Task` names.

    Raises:
        TaskError: If the group is unknown, files are missing, a size is impossible, or a class
            named as `module:Class` is not a complete task.
        ConfigError: If there is no such module or class.
    """
    if is_class_path(section.name):
        cls = load_class(section.name, "task.name")
        if not issubclass(cls, Task):
            raise TaskError(
                f"{section.name} is no task: it must be derived from synthetic.tasks.Task"
            )
    else:
        registered_tasks()  # fills TASKS
        cls = TASKS[section.name]
    built_task = cls(section)
    missing = [name for name in ("vocab_size", "chance") if not hasattr(built_task, name)]
    if missing:
        raise TaskError(
            f"task `{section.name}` has no {' and no '.join(missing)}: its class, or its __init__,"
            " must set vocab_size (the number of ids) and chance (the accuracy of guessing)"
        )
    return built_task


def check_batch(name: str, task: Task, batch: Batch) -> None:
    """Check a batch for errors that would stop a run midway or falsify its scores.

    Args:
        name: Name of the task, for messages.
        task: The task.
        batch: One of its batches.

    Raises:
        TaskError: If the arrays differ in shape, an id is not an integer from 0 to vocab_size - 1,
            no label is scored, or there is no metric with the name that `headline` gives.
    """
    shape = batch.input_ids.shape
    for field, values in (("input_ids", batch.input_ids), ("labels", batch.labels)):
        if values.ndim != 2 or values.shape != shape or values.dtype.kind not in "iu":
            raise TaskError(
                f"task `{name}`: {field} are {values.dtype} of shape {values.shape}: both input_ids"
                " and labels must be integers of shape (sequences, length)"
            )
        invalid = values[(values < 0) | (values >= task.vocab_size)]
        if field == "labels":
            invalid = invalid[invalid != IGNORE]
        if len(invalid):
            raise TaskError(
                f"task `{name}`: {field} contain {invalid[0]}, and vocab_size is"
                f" {task.vocab_size}: ids run from 0 to {task.vocab_size - 1}"
            )
    # A segment of a stream may contain no answer.
    if not task.streams and not (batch.labels != IGNORE).any():
        raise TaskError(f"task `{name}`: no label of a batch is scored: all of them are {IGNORE}")
    metrics = task.score(batch.labels, batch)
    if task.headline not in metrics:
        raise TaskError(
            f"task `{name}`: its headline is {task.headline}, and its score has"
            f" {', '.join(metrics)}: the headline must be one of these"
        )


def draw_lengths(
    rng: np.random.Generator,
    count: int,
    lengths: tuple[int, int],
    length_step: int = 1,
    min_length: int = 1,
) -> np.ndarray:
    """Draw lengths uniformly from the valid lengths of an interval.

    Args:
        rng: Source of randomness.
        count: Number of lengths to draw.
        lengths: Ends of the interval, both included.
        length_step: Valid lengths are min_length, min_length + length_step, and so on.
        min_length: Shortest valid length.

    Returns:
        The lengths, shape (count,), int64.

    Raises:
        TaskError: If the interval contains no valid length.
    """
    low, high = lengths
    shortest = max(low, min_length)
    shortest += (min_length - shortest) % length_step
    if shortest > high:
        valid = ", ".join(str(min_length + length_step * i) for i in range(3))
        raise TaskError(f"no length between {low} and {high}: this task has lengths {valid}, …")
    return shortest + length_step * rng.integers(0, (high - shortest) // length_step + 1, count)
