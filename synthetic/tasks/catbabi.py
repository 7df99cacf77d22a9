"""CatbAbI: the bAbI stories as one long stream; an answer is due at each question's `?`.

Schlag, Munkhdalai, Schmidhuber 2021, arXiv 2011.07831. As in its authors' code, stories of all
tasks are shuffled and joined with an `<eos>` before each; this is their question answering (QM)
mode.
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
    """The stories of a split behind one another, each with its `<eos>` in front. t tokens."""

    tokens: np.ndarray  # (t,) int32
    kinds: np.ndarray  # (t,) int8: the bAbI task where the token is an answer, else 0
    starts: np.ndarray  # (stories + 1,) int64: of each story, and the end


class _Epoch(NamedTuple):
    """A corpus in the order of an epoch, cut into b parallel streams, a row each. n columns."""

    tokens: np.ndarray  # (b,n) int32
    labels: np.ndarray  # (b,n) int32
    kinds: np.ndarray  # (b,n) int8
    lengths: np.ndarray  # (b,) int64: tokens of each row; behind them is padding


@task("catbabi")
class CatBabi(Task):
    """bAbI's stories (lm/evaluation/tasks/babi.py) in segments in a row.

    `batch` cuts an epoch's stream in batch_size parallel streams; segment i is their columns
    [i·S, (i + 1)·S) with S = lengths[1], the last one what is left of them (so it may be shorter).
    Segment 0 starts afresh, the others carry on, so batch_size and S must stay what they are within
    an epoch. In training each epoch has an order of its own, and a stream may begin within a story
    (the < batch_size tokens left over are dropped). In valid and test the order never changes,
    every stream begins with a story (else its first questions would lack their facts) and is padded
    on the right to the longest one, and each question is due exactly once.

    The splits are those of the files; bAbI's own have questions in common.

    task.stories restricts the bAbI tasks used; ids and vocab_size do not depend on it.
    """

    headline = "accuracy"
    streams = True  # batches continue each other; evaluation goes over a whole epoch in order

    def __init__(self, task: config.Task):
        self.name = task.name
        if task.data is None:
            raise TaskError(
                f"catbabi reads bAbI from a folder: set task.data to it, for example to"
                f" {babi.FOLDER} after `{babi.DOWNLOAD}`"
            )
        self.stories = sorted(set(task.stories))
        if not self.stories or not set(self.stories) <= set(babi.TASKS):
            raise TaskError(f"task.stories is {task.stories}: a list of bAbI's tasks, 1 to 20")
        try:
            babi.check(task.data)
            stories = {split: babi.read(task.data, split) for split in SPLITS}
        except babi.BabiError as e:
            raise TaskError(f"task.data: {e}") from e
        self.vocabulary = babi.words(story for split in SPLITS for story in stories[split])
        self.token_names = self.vocabulary
        self.vocab_size = len(self.vocabulary)
        self.eos = self.vocabulary.index(babi.EOS)
        self.pad = self.vocabulary.index(babi.PAD)
        used = {
            split: [story for story in stories[split] if story.task in self.stories]
            for split in SPLITS
        }
        answers = {
            story.tokens[answer]
            for split in SPLITS
            for story in used[split]
            for answer in story.answers
        }
        self.chance = 1 / len(answers)
        self._corpora = {split: self._corpus(used[split]) for split in SPLITS}
        self._streams = lru_cache(maxsize=len(SPLITS))(self._cut)

    def _corpus(self, stories: list[babi.Story]) -> _Corpus:
        """Stories as one sequence of ids, an `<eos>` in front of each."""
        index = {token: i for i, token in enumerate(self.vocabulary)}
        starts = np.cumsum([0, *(len(story.tokens) + 1 for story in stories)])
        tokens = np.full(starts[-1], self.eos, np.int32)
        kinds = np.zeros(starts[-1], np.int8)
        for start, story in zip(starts + 1, stories):
            tokens[start : start + len(story.tokens)] = [index[token] for token in story.tokens]
            kinds[start + np.array(story.answers, np.int64)] = story.task
        return _Corpus(tokens, kinds, starts)

    def check_length(self, length: int) -> None:
        super().check_length(length)
        for split in SPLITS:
            self._check(split, 1, length)

    def is_held_out(self, length: int) -> bool:
        return False

    def _check(self, split: str, batch_size: int, length: int) -> None:
        size = len(self._corpora[split].tokens)
        if batch_size * length > size:
            raise TaskError(
                f"{batch_size} streams in segments of {length} tokens are "
                f"{batch_size * length:,} tokens, and {split} has only {size:,}: take a smaller "
                "batch size or length"
            )

    def segments(self, split: str, batch_size: int, length: int) -> int:
        """The number of batches in an epoch, with segments of `length`.

        Raises:
            TaskError: batch_size × length tokens are more than the split has.
        """
        self._check(split, batch_size, length)
        return math.ceil(self._bounds(split, batch_size)[1] / length)

    def batch(
        self, seed: int, split: str, index: int, batch_size: int, lengths: tuple[int, int]
    ) -> Batch:
        """Segment `index` modulo `segments` of epoch `index` div `segments`."""
        length = lengths[1]
        epoch, segment = divmod(index, self.segments(split, batch_size, length))
        if split != "train":  # one order for ever
            seed = epoch = 0
        streams = self._streams(seed, split, epoch, batch_size)
        columns = slice(segment * length, (segment + 1) * length)
        tokens = streams.tokens[:, columns].astype(np.int64)
        place = np.arange(streams.tokens.shape[1])[columns]
        mask = place < streams.lengths[:, None]
        return Batch(
            tokens,
            streams.labels[:, columns].astype(np.int64),
            None if mask.all() else mask,
            streams.kinds[:, columns].astype(np.int64),
            carry=segment > 0,
        )

    def _order(self, seed: int, split: str, epoch: int) -> np.ndarray:
        """The order of the stories."""
        rng = np.random.default_rng([seed, SPLITS.index(split), epoch])
        return rng.permutation(len(self._corpora[split].starts) - 1)

    def _bounds(self, split: str, batch_size: int) -> tuple[np.ndarray, int]:
        """Where in an epoch's order the parallel streams begin, batch_size + 1 places of which the
        last is the end; and the length of the longest stream."""
        starts = self._corpora[split].starts
        total = int(starts[-1])
        if split == "train":
            length = total // batch_size
            return np.arange(batch_size + 1) * length, length
        sizes = np.diff(starts)[self._order(0, split, 0)]
        ordered = np.cumsum([0, *sizes])
        # The story boundary at or after each even cut.
        even = np.arange(batch_size + 1) * total // batch_size
        bounds = ordered[np.searchsorted(ordered, even)]
        return bounds, int(np.diff(bounds).max())

    def _cut(self, seed: int, split: str, epoch: int, batch_size: int) -> _Epoch:
        """An epoch's stories, one after another, cut into parallel streams."""
        # 1. All tokens in the order of the epoch, and the answers that are due at them.
        corpus = self._corpora[split]
        order = self._order(seed, split, epoch)
        sizes = np.diff(corpus.starts)[order]
        ends = np.cumsum(sizes)
        # Token t of the stream lies at t − (start of its story in the stream) + (… in the corpus).
        source = np.arange(ends[-1]) + np.repeat(corpus.starts[order] - (ends - sizes), sizes)
        # What follows the last story is an `<eos>`, as after all the others.
        tokens = np.append(corpus.tokens[source], np.int32(self.eos))
        kinds = np.append(corpus.kinds[source], np.int8(0))[1:]  # at the `?`, not at the answer
        labels = np.where(kinds > 0, tokens[1:], IGNORE)

        # 2. Cut into rows.
        bounds, longest = self._bounds(split, batch_size)
        streams = _Epoch(
            tokens=np.full((batch_size, longest), self.pad, np.int32),
            labels=np.full((batch_size, longest), IGNORE, np.int32),
            kinds=np.zeros((batch_size, longest), np.int8),
            lengths=np.diff(bounds),
        )
        for row, size in enumerate(streams.lengths):
            place = slice(bounds[row], bounds[row] + size)
            streams.tokens[row, :size] = tokens[place]
            streams.labels[row, :size] = labels[place]
            streams.kinds[row, :size] = kinds[place]
        return streams

    def score(self, predicted: np.ndarray, batch: Batch) -> dict[str, np.ndarray]:
        """`accuracy` of the answers, and `qa1` … that of each bAbI task used (empty where a batch
        has none of it)."""
        right = (predicted == batch.labels).astype(float)
        assert batch.kinds is not None  # of a batch of this class
        metrics = {"accuracy": right[batch.kinds > 0]}
        for story in self.stories:
            metrics[f"qa{story}"] = right[batch.kinds == story]
        return metrics

    def item_rows(self, batch: Batch) -> dict[str, np.ndarray]:
        return {}  # of stories one after another; each question counts as one of its own
