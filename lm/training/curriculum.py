"""The stages of `data.curriculum` that a run goes through, and when one that waits is learned."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lm.common.console import say
from lm.config.data import Data, Stage
from lm.data.batches.mixture_loader import MixtureLoader
from lm.data.batches.packing import MicroBatch

EVERY = 50  # updates between looks at the answers that a stage waits for


class Curriculum:
    """
    Args:
        batches: of the run; those of a mixture know, and keep, which stage they are in.
    """

    def __init__(self, data: Data, batches: Iterator[MicroBatch]):
        self._stages = data.curriculum
        self._mixture = data.mixture or {}
        self._batches = batches

    @property
    def stage(self) -> Stage | None:
        """That of the next update; None where there are none, or all are over."""
        if not isinstance(self._batches, MixtureLoader):
            return None
        return next(iter(self._stages[self._batches.stage :]), None)

    def look(self, step: int, likely: Callable[[list[str]], float]) -> dict:
        """After update `step`: a record of the answers, where it is time to look at them; it ends
        the stage where they are as likely as it waits for.

        Args:
            likely: how likely the right answers of sources are, of the least likely one.
        """
        stage, batches = self.stage, self._batches
        if stage is None or stage.at is None or step % EVERY:
            return {}
        assert isinstance(batches, MixtureLoader)  # others have no stage
        number, found = batches.stage, likely(stage.asked(self._mixture))
        if found >= stage.at:
            batches.end_stage()
            say(f"update {step:>6}  stage {number} of the curriculum ends (answers {found:.2f})")
        return {"curriculum": {"stage": number, "answers": found}}
