"""Base class for tasks whose batches have one length; it keeps the splits disjoint."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from synthetic.tasks import Batch, Task, draw_lengths, splits


class Rows(NamedTuple):
    """Sequences that a subclass draws. b sequences, l tokens, w numbers of content."""

    content: np.ndarray  # (b,w): rows with different content are different samples
    input_ids: np.ndarray  # (b,l)
    labels: np.ndarray  # (b,l)
    mask: np.ndarray | None = None  # (b,l), as in Batch


def key_value_names(count: int) -> list[str]:
    """Return k0, k1, … for `count` keys, then v0, v1, … for as many values."""
    return [f"{kind}{number}" for kind in "kv" for number in range(count)]


class UniformLengthTask(Task):
    """Task whose sequences have the same length within a batch.

    A subclass defines how rows are drawn (`draw`) and how many different ones there are
    (`count_contents`).
    """

    def draw(self, rng: np.random.Generator, count: int, length: int, split: str) -> Rows:
        """Draw `count` sequences of this length, whatever split they turn out to belong to.

        `split` is for tasks with another distribution in training; most tasks ignore it.
        """
        raise NotImplementedError

    def sample(
        self, rng: np.random.Generator, batch_size: int, lengths: tuple[int, int], split: str
    ) -> Batch:
        length = int(draw_lengths(rng, 1, lengths, self.length_step, self.min_length)[0])
        rows = self.draw(rng, batch_size, length, split)
        if self.is_held_out(length):
            prefix_length = self.prefix_length

            def list_arrays(rows: Rows) -> tuple[np.ndarray, ...]:
                """Return the hashed prefix, then all arrays of the rows (mask may be None)."""
                arrays = (array for array in rows if array is not None)
                return rows.content[:, :prefix_length].copy(), *arrays

            splits.redraw_samples(
                split,
                list_arrays(rows),
                np.ones(batch_size, bool),  # every row has the same length and can be redrawn
                lambda row_numbers: list_arrays(self.draw(rng, len(row_numbers), length, split)),
            )
        mask = None if rows.mask is None or rows.mask.all() else rows.mask
        return Batch(rows.input_ids, rows.labels, mask)
