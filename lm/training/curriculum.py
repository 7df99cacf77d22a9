"""Stages of `data.curriculum`: the current stage, and the test that ends a stage once learned."""

from __future__ import annotations

from collections.abc import Iterator

from lm.common.console import say
from lm.config.data import Data, Stage
from lm.data.batches.mixture_loader import MixtureLoader
from lm.data.batches.packing import MicroBatch

EVERY = 50  # updates between measurements of the answers that a stage waits for


class Curriculum:
    """Stages of the training data of a run.

    Args:
        data: Configuration of the data.
        batches: Batches of the run. Those of a mixture keep the number of the current stage.
    """

    def __init__(self, data: Data, batches: Iterator[MicroBatch]):
        self._stages = data.curriculum
        self._mixture = data.mixture or {}
        self._batches = batches

    @property
    def number(self) -> int:
        """Index of the next update's stage; the number of stages once all have ended."""
        return self._batches.stage if isinstance(self._batches, MixtureLoader) else 0

    @property
    def stage(self) -> Stage | None:
        """Stage of the next update; None if there are no stages or all have ended."""
        return self._stages[self.number] if self.number < len(self._stages) else None

    def sources_to_check(self, step: int) -> list[str]:
        """Return the sources whose answers must be measured after update `step`."""
        if step % EVERY or self.stage is None or self.stage.min_answer_prob is None:
            return []
        return self.stage.trace_sources(self._mixture)

    def end_if_learned(self, step: int, probability: float) -> dict:
        """End the stage if its answers have the probability that it waits for.

        Args:
            step: Number of the last update.
            probability: As `Validation.answer_probability`.

        Returns:
            Record for metrics.jsonl.
        """
        number, stage = self.number, self.stage
        assert stage is not None and stage.min_answer_prob is not None
        assert isinstance(self._batches, MixtureLoader)
        has_ended = probability >= stage.min_answer_prob
        answers = f"answers {probability:.2f}"
        if has_ended:
            self._batches.end_stage()
            say(f"update {step:>6}  stage {number} of the curriculum ends ({answers})")
        elif step + EVERY > stage.until:
            say(
                f"update {step:>6}  stage {number} of the curriculum ends unlearned after update"
                f" {stage.until} ({answers}, min_answer_prob: {stage.min_answer_prob:g})"
            )
        return {"curriculum": {"stage": number, "answers": probability, "ended": has_ended}}
