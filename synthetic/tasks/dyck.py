"""Brackets of several kinds, nested: the one that is open."""

from __future__ import annotations

import numpy as np

from synthetic import config
from synthetic.tasks import Task, TaskError, splits, task
from synthetic.tasks.formal_language import FormalLanguage

PAIRS = ("()", "[]", "{}", "<>", "«»", "‹›", "⟦⟧", "⟨⟩")


@task("dyck")
class Dyck(FormalLanguage):
    """Dyck-(k, m): the beginnings of well-nested words with `task.brackets` kinds of brackets, at
    most `task.depth` of them open at once (Hewitt et al. 2020, "RNNs can generate bounded
    hierarchical languages with optimal memory", arXiv 2010.07515). The answer is the kind of the
    innermost bracket that is open, which is the one that may be closed next: 1 to k, or 0 where all
    are closed.

        input      (  [  ]  (  )  )
        answers    1  2  1  1  1  0

    A bracket is opened or closed with equal probability where both are possible; its kind is
    uniform. Guessing is to say what is the most frequent answer of long words: after an odd number
    of brackets one is open, so one of k kinds (with k = 1 nothing is asked there); `chance` is that
    after an even number.
    """

    def __init__(self, task: config.Task):
        super().__init__(task)
        self.kinds, self.depth = task.brackets, task.depth
        pairs = PAIRS[: self.kinds]
        self.characters = [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
        self.symbols = 2 * self.kinds
        self.vocab_size = self.symbols + 1
        # A walk on 0 … m that turns at both ends is at 0 half as often as at a place inside: of the
        # places that an even number of steps leads to, in one of m times.
        closed = 1 / self.depth
        self.chance = max(closed, (1 - closed) / self.kinds)
        if self.chance == 1:
            raise TaskError(
                "task.depth is 1: after an even number of brackets all are closed; it must be 2 or"
                " more"
            )

    def chance_at(self, lengths: np.ndarray) -> np.ndarray:
        odd = 1 / self.kinds if self.kinds > 1 else self.chance
        return np.where(lengths % 2, odd, self.chance)

    def count_contents(self, width: int) -> float:
        words = [1] + [0] * self.depth  # of so many brackets open
        for _ in range(width):
            opened = [0, *(self.kinds * count for count in words[:-1])]
            closed = [*words[1:], 0]
            words = [a + b for a, b in zip(opened, closed)]
        return sum(words)

    def draw(self, rng: np.random.Generator, count: int, width: int) -> np.ndarray:
        rows = np.arange(count)
        stack = np.zeros((count, self.depth + 1), int)
        depth = np.zeros(count, int)
        ids = np.empty((count, width), int)
        for place in range(width):
            opens = (depth == 0) | ((depth < self.depth) & (rng.random(count) < 0.5))
            kind = rng.integers(self.kinds, size=count)
            ids[:, place] = np.where(opens, kind, self.kinds + stack[rows, depth])
            depth += np.where(opens, 1, -1)
            stack[rows[opens], depth[opens]] = kind[opens]
        return ids

    def answers(self, ids: np.ndarray) -> np.ndarray:
        rows = np.arange(len(ids))
        stack = np.zeros((len(ids), self.depth + 1), int)  # kinds from 1 on; 0 below all
        depth = np.zeros(len(ids), int)
        answers = np.empty(ids.shape, int)
        for place in range(ids.shape[1]):
            opens = ids[:, place] < self.kinds
            depth += np.where(opens, 1, -1)
            stack[rows[opens], depth[opens]] = ids[opens, place] + 1
            answers[:, place] = stack[rows, depth]
        return answers

    def redraw_samples(
        self, rng: np.random.Generator, ids: np.ndarray, sizes: np.ndarray, split: str
    ) -> None:
        """Draw whole words anew, not their openings alone: what follows must fit."""
        opening = self.prefix_length
        if opening is None:
            return

        def again(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            new = self.draw(rng, len(rows), ids.shape[1])
            return new[:, :opening].copy(), new

        arrays = ids[:, :opening].copy(), ids
        splits.redraw_samples(split, arrays, self._are_apart(sizes), again)

    label_ids = Task.label_ids  # brackets that are typed may close what is not open
