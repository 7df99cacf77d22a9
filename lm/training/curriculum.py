"""Stages of `data.curriculum`: the current stage, and the test that ends a stage once learned."""

from __future__ import annotations

from collections.abc import Iterator

from lm.common.console import say
from lm.config.data import Data, Stage
from lm.data.batches.mixture_loader import MixtureLoader
from lm.data.batches.packing import MicroBatch

CHECK_INTERVAL = 50  # updates between checks whether a stage is learned


class Curriculum:
    """Stages of the training data of a run.

    Args:
        data: Configuration of the data.
        batches: Training micro-batches. A MixtureLoader knows the current stage.
    """

    def __init__(self, data: Data, batches: Iterator[MicroBatch]):
        self._stages = data.curriculum
        self._mixture = data.mixture or {}
        self._batches = batches

    @property
    def stage_index(self) -> int:
        """Index of the next update's stage; the number of stages once all have ended."""
        return self._batches.stage if isinstance(self._batches, MixtureLoader) else 0

    @property
    def stage(self) -> Stage | None:
        """Stage of the next update; None if there are no stages or all have ended."""
        index = self.stage_index
        return self._stages[index] if index < len(self._stages) else None

    def sources_to_check(self, step: int) -> list[str]:
        """Return the names of the sources whose answers must be measured after update `step`."""
        if step % CHECK_INTERVAL or self.stage is None or self.stage.min_answer_prob is None:
            return []
        return self.stage.trace_sources(self._mixture)

    def end_if_learned(self, step: int, probability: float) -> dict:
        """End the current stage if its answers are learned.

        Args:
            step: Number of the last update.
            probability: Result of `Validation.answer_probability`.

        Returns:
            Record for metrics.jsonl.
        """
        index, stage = self.stage_index, self.stage
        assert stage is not None and stage.min_answer_prob is not None
        assert isinstance(self._batches, MixtureLoader)
        has_ended = probability >= stage.min_answer_prob
        answers = f"answers {probability:.2f}"
        if has_ended:
            self._batches.end_stage()
            say(f"update {step:>6}  stage {index} of the curriculum ends ({answers})")
        elif step + CHECK_INTERVAL >= stage.until:  # this was the stage's last check
            say(
                f"update {step:>6}  stage {index} of the curriculum ends unlearned after update"
                f" {stage.until} ({answers}, min_answer_prob: {stage.min_answer_prob:g})"
            )
        return {"curriculum": {"stage": index, "answers": probability, "ended": has_ended}}
