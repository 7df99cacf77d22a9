"""CatbAbI: the bAbI stories as one long stream; an answer is due at each question's `?`.

Schlag, Munkhdalai, Schmidhuber 2021, arXiv 2011.07831. As in its authors' code, stories of all
tasks are shuffled and joined with an `<eos>` before each; mode `answers` is their question
answering (QM) mode, mode `lm` their language modelling mode.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from lm.tasks import babi
from synthetic.tasks import IGNORE, SPLITS, Batch, Task, TaskError, task


class _Corpus(NamedTuple):
    """The stories of a split behind one another, each with its `<eos>` in front. t tokens."""

    tokens: np.ndarray  # (t,) int32
    kinds: np.ndarray  # (t,) int8: the bAbI task where the token is an answer, else 0
    starts: np.ndarray  # (stories + 1,) int64: of each story, and the end


class _Epoch(NamedTuple):
    """The same in the order of an epoch, in one row a parallel stream. n columns."""

    tokens: np.ndarray  # (b,n) int32
    labels: np.ndarray  # (b,n) int32
    kinds: np.ndarray  # (b,n) int8
    lengths: np.ndarray  # (b,) int64: what lies beyond in a row is padding


def _questions(story: babi.Story) -> list[tuple[int, str]]:
    """Each question with all of the story that is before it."""
    return [(story.task, " ".join(story.tokens[:answer])) for answer in story.answers]


@task("catbabi")
class CatBabi(Task):
    """bAbI (task.data: see `python -m lm.tasks.babi --help`) in segments that continue each other.

    `batch` cuts an epoch's stream in batch_size parallel streams; segment i is their columns
    [i·S, (i + 1)·S) with S = lengths[1], the last one what is left of them (so it may be shorter).
    Segment 0 starts afresh, the others carry on, so batch_size and S must stay what they are within
    an epoch. In training each epoch has an order of its own, and a stream may begin within a story
    (the < batch_size tokens left over are dropped). In valid and test the order never changes,
    every stream begins with a story (else its first questions would lack their facts) and is padded
    on the right to the longest one, and each question is due exactly once.

    The splits are those of the files. bAbI's own have questions in common: `seen` counts, of each
    split, those whose story up to there is in training word for word, and all of them.

    task.stories restricts the bAbI tasks used; ids and vocab_size do not depend on it.
    """

    headline = "accuracy"
    source = "bAbI v1.2 (Weston et al. 2015), concatenated as in CatbAbI (Schlag et al. 2021)"
    streams = True  # batches continue each other; evaluation goes over a whole epoch in order

    def __init__(self, task):
        if task.data is None:
            raise TaskError(
                "catbabi reads bAbI from a folder: set task.data to it, for example to "
                "data/babi/en-valid after `python -m lm.tasks.babi download data/babi`"
            )
        self.mode, self.stories = task.mode, sorted(set(task.stories))
        if not self.stories or not set(self.stories) <= set(babi.TASKS):
            raise TaskError(f"task.stories is {task.stories}: a list of bAbI's tasks, 1 to 20")
        try:
            babi.check(task.data)
            stories = {split: babi.read(task.data, split) for split in SPLITS}
        except babi.BabiError as e:
            raise TaskError(f"task.data: {e}") from e
        self.vocabulary = babi.words(story for split in SPLITS for story in stories[split])
        self.vocab_size = len(self.vocabulary)
        self.eos = self.vocabulary.index(babi.EOS)
        self.pad = self.vocabulary.index(babi.PAD)
        used = {s: [x for x in stories[s] if x.task in self.stories] for s in SPLITS}
        answers = {x.tokens[i] for split in SPLITS for x in used[split] for i in x.answers}
        self.chance = 1 / len(answers)
        asked = {split: [q for story in used[split] for q in _questions(story)] for split in SPLITS}
        known = set(asked["train"])
        self.seen = {s: (sum(q in known for q in asked[s]), len(asked[s])) for s in SPLITS}
        self._corpora = {split: self._corpus(used[split]) for split in SPLITS}
        self._epochs: dict[str, tuple[tuple, _Epoch]] = {}  # of each split the one last asked for

    def _corpus(self, stories: list[babi.Story]) -> _Corpus:
        index = {token: i for i, token in enumerate(self.vocabulary)}
        starts = np.cumsum([0, *(len(story.tokens) + 1 for story in stories)])
        tokens = np.full(starts[-1], self.eos, np.int32)
        kinds = np.zeros(starts[-1], np.int8)
        for start, story in zip(starts + 1, stories):
            tokens[start : start + len(story.tokens)] = [index[token] for token in story.tokens]
            kinds[start + np.array(story.answers, np.int64)] = story.task
        return _Corpus(tokens, kinds, starts)

    def token_name(self, number: int) -> str:
        return self.vocabulary[number]

    def check_length(self, length: int) -> None:
        if length < 1:
            raise TaskError(f"length {length}: a segment has at least one token")
        for split in SPLITS:
            self._check(split, 1, length)

    def held_apart(self, length: int) -> bool:
        return self.seen["valid"][0] == self.seen["test"][0] == 0

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
        epoch, i = divmod(index, self.segments(split, batch_size, length))
        streams = self._epoch(seed, split, epoch, batch_size)
        columns = slice(i * length, (i + 1) * length)
        tokens = streams.tokens[:, columns].astype(np.int64)
        place = np.arange(streams.tokens.shape[1])[columns]
        mask = place < streams.lengths[:, None]
        return Batch(
            tokens,
            streams.labels[:, columns].astype(np.int64),
            None if mask.all() else mask,
            streams.kinds[:, columns].astype(np.int64),
            carry=i > 0,
        )

    def _order(self, seed: int, split: str, epoch: int) -> np.ndarray:
        """The order of the stories; that of valid and test is always the same."""
        if split != "train":
            seed = epoch = 0
        rng = np.random.default_rng([seed, SPLITS.index(split), epoch])
        return rng.permutation(len(self._corpora[split].starts) - 1)

    def _bounds(self, split: str, batch_size: int) -> tuple[np.ndarray, int]:
        """Where in an epoch's stream the parallel streams begin (batch_size + 1 places, the last
        one their end), and the length of the longest."""
        starts = self._corpora[split].starts
        total = int(starts[-1])
        if split == "train":
            n = total // batch_size
            return np.arange(batch_size + 1) * n, n
        sizes = np.diff(starts)[self._order(0, split, 0)]
        ordered = np.cumsum([0, *sizes])
        # The story boundary at or after each even cut.
        even = np.arange(batch_size + 1) * total // batch_size
        bounds = ordered[np.searchsorted(ordered, even)]
        return bounds, int(np.diff(bounds).max())

    def _epoch(self, seed: int, split: str, epoch: int, batch_size: int) -> _Epoch:
        key = (seed, epoch, batch_size) if split == "train" else (batch_size,)
        held = self._epochs.get(split)
        if held is None or held[0] != key:
            held = self._epochs[split] = (key, self._streams(seed, split, epoch, batch_size))
        return held[1]

    def _streams(self, seed: int, split: str, epoch: int, batch_size: int) -> _Epoch:
        corpus, order = self._corpora[split], self._order(seed, split, epoch)
        sizes = np.diff(corpus.starts)[order]
        ends = np.cumsum(sizes)
        # Token t of the stream lies at t − (start of its story in the stream) + (… in the corpus).
        source = np.arange(ends[-1]) + np.repeat(corpus.starts[order] - (ends - sizes), sizes)
        # What follows the last story is an `<eos>`, as after all the others.
        tokens = np.append(corpus.tokens[source], np.int32(self.eos))
        kinds = np.append(corpus.kinds[source], np.int8(0))[1:]  # at the `?`, not at the answer
        labels = tokens[1:] if self.mode == "lm" else np.where(kinds > 0, tokens[1:], IGNORE)
        bounds, n = self._bounds(split, batch_size)
        out = _Epoch(
            np.full((batch_size, n), self.pad, np.int32),
            np.full((batch_size, n), IGNORE, np.int32),
            np.zeros((batch_size, n), np.int8),
            np.diff(bounds),
        )
        for r, size in enumerate(out.lengths):
            row = slice(bounds[r], bounds[r] + size)
            out.tokens[r, :size] = tokens[row]
            out.labels[r, :size] = labels[row]
            out.kinds[r, :size] = kinds[row]
        return out

    def score(self, predicted: np.ndarray, batch: Batch) -> dict[str, np.ndarray]:
        """`accuracy` of the answers, `qa1` … that of each bAbI task used (empty where a batch has
        none of it), and in mode `lm` the `token_accuracy` of all tokens."""
        right = (predicted == batch.labels).astype(float)
        out = {"accuracy": right[batch.kinds > 0]}
        out |= {f"qa{task}": right[batch.kinds == task] for task in self.stories}
        if self.mode == "lm":
            out["token_accuracy"] = right[batch.labels != IGNORE]
        return out

    def sequences(self, batch: Batch) -> dict[str, np.ndarray]:
        return {}  # of stories one after another; each question counts as one of its own
