"""Tasks whose rows are drawn whole: a subclass says how, the splits are held apart here."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from synthetic.tasks import Batch, Task, draw_lengths, splits


class Drawn(NamedTuple):
    """Sequences as a subclass draws them. b rows, l tokens, w numbers of content."""

    content: np.ndarray  # (b,w) what a sequence is about: two with other content are two samples
    input_ids: np.ndarray  # (b,l)
    labels: np.ndarray  # (b,l)
    mask: np.ndarray | None = None  # (b,l), as of Batch


def pair_names(keys: int) -> list[str]:
    """Return k0, k1, … for so many keys, and v0, v1, … for as many values."""
    return [f"{kind}{number}" for kind in "kv" for number in range(keys)]


class UniformLengthTask(Task):
    """A subclass says what a row is (`draw`) and how many different ones there are
    (`count_contents`). All rows of a batch have one length."""

    def draw(self, rng: np.random.Generator, count: int, length: int, split: str) -> Drawn:
        """`count` sequences of this length, of whatever split; most tasks draw alike for all."""
        raise NotImplementedError

    def sample(
        self, rng: np.random.Generator, batch_size: int, lengths: tuple[int, int], split: str
    ) -> Batch:
        length = int(draw_lengths(rng, 1, lengths, self.length_step, self.min_length)[0])
        drawn = self.draw(rng, batch_size, length, split)
        if self.is_held_out(length):
            opening = self.prefix_length

            def arrays_of(new: Drawn) -> tuple[np.ndarray, ...]:
                whole = (array for array in new if array is not None)
                return new.content[:, :opening].copy(), *whole

            splits.redraw_samples(
                split,
                arrays_of(drawn),
                np.ones(batch_size, bool),
                lambda rows: arrays_of(self.draw(rng, len(rows), length, split)),
            )
        mask = None if drawn.mask is None or drawn.mask.all() else drawn.mask
        return Batch(drawn.input_ids, drawn.labels, mask)
