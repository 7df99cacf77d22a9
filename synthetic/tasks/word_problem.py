"""Word problem of a finite group: tokens are elements, answers are the running products."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lm.data.sources.errors import DataError
from lm.data.sources.groups import element_names, get_group
from synthetic.tasks import Batch, Task, TaskError, splits, task

if TYPE_CHECKING:
    from synthetic import config


@task("word_problem")
class WordProblem(Task):
    """Running products of random elements of a group. Ids are the numbers of the elements.

    Source: Liu et al. 2023, arXiv 2210.10749; Merrill, Petty & Sabharwal 2024, "The Illusion of
    State in State-Space Models", arXiv 2404.08819.
    """

    answers_are_states = True

    def __init__(self, section: config.Task):
        try:
            self.group = get_group(section.group)
        except DataError as e:
            raise TaskError(str(e)) from None
        self.name = section.name
        self.vocab_size = self.group.order
        self.chance = 1 / self.group.order
        self.token_names = element_names(section.group)
        self.elements = np.arange(self.group.order)  # elements that sequences are drawn from

    def count_contents(self, width: int) -> float:
        """Return the number of sequences of `width` elements, each any element of the group."""
        return self.group.order**width

    def is_held_out(self, length: int) -> bool:
        return self._has_all_elements and super().is_held_out(length)

    def restrict_elements(self, count: int | None) -> None:
        """Draw later sequences from the `count` elements of lowest order only; None: from all.

        From few elements only about a hundred prefixes can be made, too few for disjoint splits.
        Then validation may repeat training sequences, so it only shows whether the training data
        are learned.

        Raises:
            TaskError: If the group has fewer elements.
        """
        if count is None:
            self.elements = np.arange(self.group.order)
            return
        if count > self.group.order:
            raise TaskError(
                f"train.curriculum.num_elements is {count}, and {self.group.name} has only"
                f" {self.group.order} elements"
            )
        self.elements = self.group.simplest_first()[:count]

    @property
    def _has_all_elements(self) -> bool:
        return len(self.elements) == self.group.order

    def label_ids(self, ids: np.ndarray) -> Batch:
        return Batch(ids, self.group.products(ids))

    def sample(
        self, rng: np.random.Generator, batch_size: int, lengths: tuple[int, int], split: str
    ) -> Batch:
        # Every prefix is scored too, so one length per batch is enough.
        length = int(rng.integers(lengths[0], lengths[1] + 1))
        self.check_length(length)

        def draw(*shape: int) -> np.ndarray:
            return self.elements[rng.integers(0, len(self.elements), shape)]

        ids = draw(batch_size, length)
        prefix_length = self.prefix_length
        # Training never draws a sequence of another split. With few elements, validation draws from
        # all sequences.
        needs_split = self._has_all_elements or split == "train"
        if needs_split and prefix_length is not None and length >= prefix_length:
            splits.redraw_prefixes(
                split,
                ids[:, :prefix_length],  # changed in place
                np.ones(batch_size, bool),  # every row has the same length and can be redrawn
                lambda count: draw(count, prefix_length),
            )
        return Batch(ids, self.group.products(ids))
