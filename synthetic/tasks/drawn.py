"""Tasks whose rows are drawn whole: a subclass says how, the splits are held apart here."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from synthetic.tasks import Batch, Task, TaskError, draw_lengths, splits


class Drawn(NamedTuple):
    """Sequences as a subclass of DrawnTask draws them. b rows, l tokens, w numbers of content."""

    content: np.ndarray  # (b,w) what a sequence is about: two with other content are two samples
    input_ids: np.ndarray  # (b,l)
    labels: np.ndarray  # (b,l)
    mask: np.ndarray | None = None  # (b,l), as of Batch


def name_of_pair(number: int, keys: int) -> str:
    """k0, k1, … of ids below `keys`, and v0, v1, … of those from there on."""
    return f"k{number}" if number < keys else f"v{number - keys}"


class DrawnTask(Task):
    """A subclass says what a row is (`draw`) and how many different ones there are
    (`count_contents`). All rows of a batch have one length.

    Sequences of different splits differ within the first `opening` numbers of their content. So no
    test sequence is the beginning of a training sequence either.

    Attributes:
        name: as in a config. shortest, apart: its lengths are shortest, shortest + apart, …
    """

    name: str
    shortest = 1
    apart = 1

    @cached_property
    def opening(self) -> int | None:
        """See above; None: there are too few different sequences of any length."""
        return splits.opening_length(self.count_contents)

    def count_contents(self, width: int) -> float:
        """How many different contents of so many numbers there are."""
        raise NotImplementedError

    def content_width(self, length: int) -> int:
        """How many numbers the content of a sequence of this length has, at least."""
        return length

    def draw(self, rng: np.random.Generator, count: int, length: int, split: str) -> Drawn:
        """`count` sequences of this length, of whatever split; most tasks draw alike for all."""
        raise NotImplementedError

    def check_length(self, length: int) -> None:
        if length < self.shortest or (length - self.shortest) % self.apart:
            first = [self.shortest + self.apart * i for i in range(3)]
            raise TaskError(
                f"{self.name} has no sequences of length {length}: it has lengths"
                f" {', '.join(map(str, first))}, …"
            )

    def held_apart(self, length: int) -> bool:
        return self.opening is not None and self.content_width(length) >= self.opening

    def sample(
        self, rng: np.random.Generator, batch_size: int, lengths: tuple[int, int], split: str
    ) -> Batch:
        length = int(draw_lengths(rng, 1, lengths, self.apart, self.shortest)[0])
        drawn = self.draw(rng, batch_size, length, split)
        if self.held_apart(length):
            opening = self.opening

            def arrays_of(new: Drawn) -> tuple[np.ndarray, ...]:
                whole = (array for array in new if array is not None)
                return new.content[:, :opening].copy(), *whole

            splits.hold_apart(
                split,
                arrays_of(drawn),
                np.ones(batch_size, bool),
                lambda rows: arrays_of(self.draw(rng, len(rows), length, split)),
            )
        mask = None if drawn.mask is None or drawn.mask.all() else drawn.mask
        return Batch(drawn.input_ids, drawn.labels, mask)
