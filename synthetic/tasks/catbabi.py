"""CatbAbI: the bAbI stories as one long stream; each `?` is labelled with the question's answer.

As in the authors' code, the stories of all 20 bAbI tasks are shuffled and joined, with an `<eos>`
before each story. Only answers are scored, as in the authors' question answering (QM) mode.

Source: Schlag, Munkhdalai, Schmidhuber 2021, arXiv 2011.07831.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lm.evaluation.tasks import babi
from synthetic.tasks import IGNORE, SPLITS, Batch, Task, TaskError, task

if TYPE_CHECKING:
    from synthetic import config


class _Corpus(NamedTuple):
    """Stories of a split, joined, with an `<eos>` before each story. t tokens."""

    tokens: np.ndarray  # (t,) int32
    subtasks: np.ndarray  # (t,) int8: the bAbI task if the token is an answer, else 0
    starts: np.ndarray  # (stories + 1,) int64: start of each story, then the end of the last


class _Epoch(NamedTuple):
    """A corpus in the order of an epoch, cut into b parallel streams, one per row.

    n is the length of the longest stream.
    """

    tokens: np.ndarray  # (b,n) int32
    labels: np.ndarray  # (b,n) int32
    subtasks: np.ndarray  # (b,n) int8: the bAbI task at the `?` of a question, else 0
    lengths: np.ndarray  # (b,) int64: tokens of each row; padding follows


@task("catbabi")
class CatBabi(Task):
    """Stories of bAbI (lm/evaluation/tasks/babi.py), read in consecutive segments.

    The joined stories of an epoch are cut into batch_size parallel streams, one per row. A batch is
    a segment of S tokens of all streams, where S is the longest length of the interval `lengths`;
    the last segment of an epoch may be shorter. Segment 0 starts from an empty state and later
    segments continue, so batch_size and S must not change within an epoch.

    In training, each epoch has its own order of stories, a stream may begin within a story, and the
    last tokens (fewer than batch_size) are dropped. In validation and test the order never changes,
    and every stream begins with a story, because otherwise its first questions would lack their
    facts. The streams are padded on the right to the longest one, and each question is scored
    exactly once.

    The splits are bAbI's files, which have questions in common. The option `task.stories` lists the
    numbers of the bAbI tasks to use; ids and vocab_size do not depend on it.
    """

    headline = "accuracy"
    streams = True

    def __init__(self, section: config.Task):
        self.name = section.name
        if section.data is None:
            raise TaskError(
                f"catbabi reads bAbI from a folder: set task.data to it, for example to"
                f" {babi.FOLDER} after `{babi.DOWNLOAD}`"
            )
        self.babi_tasks = sorted(set(section.stories))
        if not self.babi_tasks or not set(self.babi_tasks) <= set(babi.TASKS):
            raise TaskError(
                f"task.stories is {section.stories}: it must be a list of bAbI tasks, 1 to 20"
            )
        try:
            babi.check(section.data)
            stories = {split: babi.read(section.data, split) for split in SPLITS}
        except babi.BabiError as e:
            raise TaskError(f"task.data: {e}") from e
        self.vocabulary = babi.make_vocabulary(
            story for split in SPLITS for story in stories[split]
        )
        self.token_names = self.vocabulary
        self.vocab_size = len(self.vocabulary)
        self.eos = self.vocabulary.index(babi.EOS)
        self.pad = self.vocabulary.index(babi.PAD)
        selected = {
            split: [story for story in stories[split] if story.task in self.babi_tasks]
            for split in SPLITS
        }
        answers = {
            story.tokens[position]
            for split in SPLITS
            for story in selected[split]
            for position in story.answers
        }
        self.chance = 1 / len(answers)
        self._corpora = {split: self._join(selected[split]) for split in SPLITS}
        self._cut_cached = lru_cache(maxsize=len(SPLITS))(self._cut)  # the last epochs in use

    def _join(self, stories: list[babi.Story]) -> _Corpus:
        """Join stories into one sequence of ids, with an `<eos>` before each."""
        id_by_token = {token: i for i, token in enumerate(self.vocabulary)}
        starts = np.cumsum([0, *(len(story.tokens) + 1 for story in stories)])
        tokens = np.full(starts[-1], self.eos, np.int32)
        subtasks = np.zeros(starts[-1], np.int8)
        for start, story in zip(starts + 1, stories):  # + 1: after the `<eos>`
            ids = [id_by_token[token] for token in story.tokens]
            tokens[start : start + len(ids)] = ids
            subtasks[start + np.array(story.answers, np.int64)] = story.task
        return _Corpus(tokens, subtasks, starts)

    def check_length(self, length: int) -> None:
        super().check_length(length)
        for split in SPLITS:
            self._check_size(split, batch_size=1, length=length)

    def is_held_out(self, length: int) -> bool:
        return False  # bAbI's files have questions in common

    def _check_size(self, split: str, batch_size: int, length: int) -> None:
        size = len(self._corpora[split].tokens)
        if batch_size * length > size:
            raise TaskError(
                f"{batch_size} streams in segments of {length} tokens are "
                f"{batch_size * length:,} tokens, and {split} has only {size:,}: lower the"
                " batch size or the length"
            )

    def segments(self, split: str, batch_size: int, length: int) -> int:
        self._check_size(split, batch_size, length)
        _, longest = self._find_bounds(split, batch_size)
        return math.ceil(longest / length)

    def batch(
        self, seed: int, split: str, index: int, batch_size: int, lengths: tuple[int, int]
    ) -> Batch:
        """Return segment `index % s` of epoch `index // s`, where s is the segments per epoch."""
        length = lengths[1]
        epoch, segment = divmod(index, self.segments(split, batch_size, length))
        if split != "train":  # the order of stories never changes; see also `_find_bounds`
            seed = epoch = 0
        streams = self._cut_cached(seed, split, epoch, batch_size)
        columns = slice(segment * length, (segment + 1) * length)
        tokens = streams.tokens[:, columns].astype(np.int64)
        positions = np.arange(streams.tokens.shape[1])[columns]
        mask = positions < streams.lengths[:, None]
        return Batch(
            tokens,
            streams.labels[:, columns].astype(np.int64),
            None if mask.all() else mask,
            streams.subtasks[:, columns].astype(np.int64),
            is_continuation=segment > 0,
        )

    def _draw_order(self, seed: int, split: str, epoch: int) -> np.ndarray:
        """Draw the order of the stories in an epoch."""
        rng = np.random.default_rng([seed, SPLITS.index(split), epoch])
        return rng.permutation(len(self._corpora[split].starts) - 1)

    def _find_bounds(self, split: str, batch_size: int) -> tuple[np.ndarray, int]:
        """Find where to cut the joined stories of an epoch into parallel streams.

        In training the streams have equal lengths; otherwise each begins with a story.

        Returns:
            The start of each stream followed by the end of the last, shape (batch_size + 1,), and
            the length of the longest stream.
        """
        starts = self._corpora[split].starts
        total = int(starts[-1])
        if split == "train":
            length = total // batch_size
            return np.arange(batch_size + 1) * length, length
        # `batch` fixes the seed and the epoch of validation and test to 0.
        sizes = np.diff(starts)[self._draw_order(seed=0, split=split, epoch=0)]
        story_starts = np.cumsum([0, *sizes])  # in the order of the epoch
        # Move each even cut to the story boundary at or after it.
        even_cuts = np.arange(batch_size + 1) * total // batch_size
        bounds = story_starts[np.searchsorted(story_starts, even_cuts)]
        return bounds, int(np.diff(bounds).max())

    def _cut(self, seed: int, split: str, epoch: int, batch_size: int) -> _Epoch:
        """Join an epoch's stories and cut them into parallel streams."""
        # 1. All tokens in the order of the epoch, and their labels.
        corpus = self._corpora[split]
        order = self._draw_order(seed, split, epoch)
        sizes = np.diff(corpus.starts)[order]
        ends = np.cumsum(sizes)
        # Position in the corpus = position in the epoch − start of the story in the epoch
        # + start of the story in the corpus.
        source = np.arange(ends[-1]) + np.repeat(corpus.starts[order] - (ends - sizes), sizes)
        # An `<eos>` follows the last story, as it follows all others.
        tokens = np.append(corpus.tokens[source], np.int32(self.eos))
        # Shifted by one token: the label is at the `?`, not at the answer.
        subtasks = np.append(corpus.subtasks[source], np.int8(0))[1:]
        labels = np.where(subtasks > 0, tokens[1:], IGNORE)

        # 2. Cut into rows.
        bounds, longest = self._find_bounds(split, batch_size)
        streams = _Epoch(
            tokens=np.full((batch_size, longest), self.pad, np.int32),
            labels=np.full((batch_size, longest), IGNORE, np.int32),
            subtasks=np.zeros((batch_size, longest), np.int8),
            lengths=np.diff(bounds),
        )
        for row, size in enumerate(streams.lengths):
            positions = slice(bounds[row], bounds[row] + size)
            streams.tokens[row, :size] = tokens[positions]
            streams.labels[row, :size] = labels[positions]
            streams.subtasks[row, :size] = subtasks[positions]
        return streams

    def score(self, predicted: np.ndarray, batch: Batch) -> dict[str, np.ndarray]:
        """Score predictions (b,l): `accuracy` over all answers, and `qaN` for each bAbI task used.

        The values of a bAbI task are empty if the batch has none of its questions.
        """
        is_correct = (predicted == batch.labels).astype(float)
        assert batch.subtasks is not None  # every batch of this class has them
        metrics = {"accuracy": is_correct[batch.subtasks > 0]}
        for babi_task in self.babi_tasks:
            metrics[f"qa{babi_task}"] = is_correct[batch.subtasks == babi_task]
        return metrics

    def item_rows(self, batch: Batch) -> dict[str, np.ndarray]:
        # A row is a piece of a stream and may hold many stories, so its questions are not grouped:
        # standard errors treat every question as independent.
        return {}
