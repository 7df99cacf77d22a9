"""The word problem over a finite group: tokens are elements, answers the running products."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lm.data.sources.errors import DataError
from lm.data.sources.groups import element_names, group

from . import Batch, Task, TaskError, splits, task

if TYPE_CHECKING:
    from synthetic import config


@task("word_problem")
class WordProblem(Task):
    """Running products of random elements of a group (Liu et al. 2023; Merrill, Petty & Sabharwal
    2024, "The Illusion of State in State-Space Models")."""

    def __init__(self, task: config.Task):
        try:
            self.group = group(task.group)
        except DataError as e:
            raise TaskError(str(e)) from None
        self.name = task.name
        self.vocab_size = self.group.order
        self.chance = 1 / self.group.order
        self.names = element_names(task.group)
        self.elements = np.arange(self.group.order)  # the elements that words are made of

    def count_contents(self, width: int) -> float:
        return self.group.order**width

    def held_apart(self, length: int) -> bool:
        return self._all_letters and super().held_apart(length)

    def draw_from(self, letters: int | None) -> None:
        """See `Task.draw_from`: elements of low order come first.

        Until there are all, validation draws from training's words as well: it is to say whether
        words of so few letters are known, of which there may be a hundred beginnings."""
        if letters is None:
            self.elements = np.arange(self.group.order)
            return
        if letters > self.group.order:
            raise TaskError(
                f"train.curriculum.num_elements is {letters}, and the elements of"
                f" {self.group.name} are only {self.group.order}"
            )
        self.elements = self.group.simplest_first()[:letters]

    @property
    def _all_letters(self) -> bool:
        return len(self.elements) == self.group.order

    def label_typed(self, ids: np.ndarray) -> Batch:
        return Batch(ids, self.group.products(ids))

    def sample(
        self, rng: np.random.Generator, batch_size: int, lengths: tuple[int, int], split: str
    ) -> Batch:
        # Every prefix is a word too: one length serves a batch, drawn anew for each.
        length = int(rng.integers(lengths[0], lengths[1] + 1))
        self.check_length(length)

        def draw(*shape: int) -> np.ndarray:
            return self.elements[rng.integers(0, len(self.elements), shape)]

        x = draw(batch_size, length)
        opening = self.opening
        if opening is not None and length >= opening and (self._all_letters or split == "train"):
            apart = np.ones(batch_size, bool)
            splits.hold_openings_apart(
                split, x[:, :opening], apart, lambda count: draw(count, opening)
            )
        return Batch(x, self.group.products(x))
