"""The stages of `data.curriculum` that a run goes through, and when one that waits is learned."""

from __future__ import annotations

from collections.abc import Iterator

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
    def number(self) -> int:
        """That of the next update's stage, from 0; of them all once they are over."""
        return self._batches.stage if isinstance(self._batches, MixtureLoader) else 0

    @property
    def stage(self) -> Stage | None:
        """That of the next update; None where there are none, or all are over."""
        return self._stages[self.number] if self.number < len(self._stages) else None

    def waiting(self, step: int) -> list[str]:
        """The sources whose answers are to be looked at after update `step`."""
        if step % EVERY or self.stage is None or self.stage.min_answer_prob is None:
            return []
        return self.stage.traces(self._mixture)

    def look(self, step: int, likely: float) -> dict:
        """Ends the stage if its answers are as likely as it waits for → a record of them."""
        number, stage = self.number, self.stage
        assert stage is not None and stage.min_answer_prob is not None
        assert isinstance(self._batches, MixtureLoader)
        ended = likely >= stage.min_answer_prob
        if ended:
            self._batches.end_stage()
            say(f"update {step:>6}  stage {number} of the curriculum ends (answers {likely:.2f})")
        elif step + EVERY > stage.until:
            say(
                f"update {step:>6}  stage {number} of the curriculum ends unlearned after update"
                f" {stage.until} (answers {likely:.2f}, min_answer_prob: {stage.min_answer_prob:g})"
            )
        return {"curriculum": {"stage": number, "answers": likely, "ended": ended}}
