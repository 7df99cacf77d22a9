"""Nested brackets of several kinds; the answer is the innermost open bracket."""

from __future__ import annotations

import numpy as np

from synthetic import config
from synthetic.tasks import Task, TaskError, splits, task
from synthetic.tasks.formal_language import FormalLanguage

PAIRS = ("()", "[]", "{}", "<>", "«»", "‹›", "⟦⟧", "⟨⟩")


@task("dyck")
class Dyck(FormalLanguage):
    """Dyck-(k, m): prefixes of well-nested sequences with k kinds of brackets and depth at most m.

    k is `task.brackets`, m is `task.depth`, the maximum number of open brackets. The answer is the
    kind of the innermost open bracket, the only bracket that may be closed next: 1 to k, or 0 if
    all brackets are closed.

        input      (  [  ]  (  )  )
        answers    1  2  1  1  1  0

    If a bracket may be opened or closed, both have probability 1/2; the kind of an opened bracket
    is uniform. `chance` is the frequency of the most frequent answer after an even number of
    brackets. After an odd number a bracket is always open, so its kind is one of k.

    Source: Hewitt et al. 2020, "RNNs can generate bounded hierarchical languages with optimal
    memory", arXiv 2010.07515.
    """

    def __init__(self, section: config.Task):
        super().__init__(section)
        self.kind_count, self.depth = section.brackets, section.depth
        pairs = PAIRS[: self.kind_count]
        self.characters = [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
        self.symbols = 2 * self.kind_count  # ids: opening brackets by kind, then closing ones
        self.vocab_size = self.symbols + 1
        # The depth is a random walk on 0 … m that turns at both ends, where it is half as often as
        # at an inner depth. Therefore it is 0 with probability 1 / m, given an even length.
        all_closed = 1 / self.depth
        self.chance = max(all_closed, (1 - all_closed) / self.kind_count)
        if self.chance == 1:
            raise TaskError(
                "task.depth is 1: after an even number of brackets all are closed; it must be 2 or"
                " more"
            )

    def chance_at(self, lengths: np.ndarray) -> np.ndarray:
        # With one kind, the answer at odd lengths is always 1: keep `chance` to scale accuracies.
        odd_chance = 1 / self.kind_count if self.kind_count > 1 else self.chance
        return np.where(lengths % 2, odd_chance, self.chance)

    def count_contents(self, width: int) -> float:
        counts = [1] + [0] * self.depth  # number of sequences for each number of open brackets
        for _ in range(width):
            opened = [0, *(self.kind_count * count for count in counts[:-1])]
            closed = [*counts[1:], 0]
            counts = [a + b for a, b in zip(opened, closed)]
        return sum(counts)

    def draw(self, rng: np.random.Generator, count: int, width: int) -> np.ndarray:
        rows = np.arange(count)
        stack = np.zeros((count, self.depth + 1), int)  # kind of the open bracket at each depth
        depth = np.zeros(count, int)
        ids = np.empty((count, width), int)
        for position in range(width):
            opens = (depth == 0) | ((depth < self.depth) & (rng.random(count) < 0.5))
            kind = rng.integers(self.kind_count, size=count)
            ids[:, position] = np.where(opens, kind, self.kind_count + stack[rows, depth])
            depth += np.where(opens, 1, -1)
            stack[rows[opens], depth[opens]] = kind[opens]
        return ids

    def answers(self, ids: np.ndarray) -> np.ndarray:
        rows = np.arange(len(ids))
        stack = np.zeros((len(ids), self.depth + 1), int)  # kinds from 1 on; 0 at the bottom
        depth = np.zeros(len(ids), int)
        answers = np.empty(ids.shape, int)
        for position in range(ids.shape[1]):
            opens = ids[:, position] < self.kind_count
            depth += np.where(opens, 1, -1)
            stack[rows[opens], depth[opens]] = ids[opens, position] + 1
            answers[:, position] = stack[rows, depth]
        return answers

    def redraw_samples(
        self, rng: np.random.Generator, ids: np.ndarray, sizes: np.ndarray, split: str
    ) -> None:
        """Redraw whole sequences: after a new prefix the rest would no longer be well nested."""
        prefix_length = self.prefix_length
        if prefix_length is None:
            return

        def draw(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            sequences = self.draw(rng, len(rows), ids.shape[1])
            return sequences[:, :prefix_length].copy(), sequences

        arrays = ids[:, :prefix_length].copy(), ids
        splits.redraw_samples(split, arrays, self._can_redraw(sizes), draw)

    # Typing is not supported: typed brackets could close a bracket that is not open.
    label_ids = Task.label_ids
