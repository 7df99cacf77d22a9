"""Actions after an update of a language model: records, probes, saves, validations.

ℓ* of a fixed-point layer is the number of iterations that the paper's procedure makes until it
converges. Counting it is called a probe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lm.common.console import Progress, say
from lm.runs.log import describe_record, iterations_suffix, probe_iterations
from lm.runs.metrics import is_due
from lm.training.curriculum import Curriculum
from lm.training.engine import Engine, Update
from lm.training.loop import Loop
from lm.training.recorder import Recorder
from lm.training.validation import Validation


class HookedLoop(Loop):
    """Loop with `update_hooks`; train.py sets the attributes and defines the update."""

    # Set before the first update.
    batches: Any  # training micro-batches of this rank
    curriculum: Curriculum
    engine: Engine
    recorder: Recorder
    validation: Validation
    progress_bar: Progress
    keep_alive: Callable[[], None]  # reports progress to the watchdog
    # Set by every update.
    last_update: Update
    lr: float  # learning rate of the last update

    def __init__(self, cfg: Any):
        super().__init__(cfg)
        self.update_hooks = (
            self._record_if_due,
            self._probe_if_due,
            self._end_stage_if_learned,  # before a save, so that the checkpoint has the new stage
            self._save_if_due,
            self._validate_if_due,
        )

    def _record_if_due(self) -> None:
        """Write a record every `log.every` updates and after the last."""
        steps = self.cfg.train.steps
        if self.step % self.cfg.log.every and not self.is_finished:
            self.progress_bar.update(self.step, steps)
            return
        record = self.recorder.make_record(self.step, self.last_update, self.lr)
        record |= self.batches.source_metrics()
        record["peak_memory_bytes"] = self.recorder.peak_memory()
        self.write(record)
        self.log_saves()
        self.progress_bar.update(self.step, steps, describe_record(record, self.num_iters))
        self.recorder.throughput.skip()

    def _probe_if_due(self) -> None:
        """Count ℓ* every `log.probe_every` updates, unless a validation counts it."""
        has_validation = self._is_validation_due or self.is_finished
        is_probe_due = is_due(self.step, self.cfg.log.probe_every)
        if not self.recorder.has_solver or has_validation or not is_probe_due:
            return
        record = self.validation.probe_solver(self.engine)
        self.write(record)
        say(f"update {self.step:>6}{iterations_suffix(record)}")
        self.num_iters = probe_iterations(record)
        self.recorder.throughput.skip()

    def _end_stage_if_learned(self) -> None:
        """End the curriculum's stage if its answers are learned."""
        sources = self.curriculum.sources_to_check(self.step)
        if not sources:
            return
        self.check_finite()
        probability = self.validation.answer_probability(self.engine, sources, self.keep_alive)
        self.write(self.curriculum.end_if_learned(self.step, probability))
        self.recorder.throughput.skip()

    def _save_if_due(self) -> None:
        if self.save_if_due():
            self.recorder.throughput.skip()

    @property
    def _is_validation_due(self) -> bool:
        return self.step % self.cfg.eval.every == 0

    def _validate_if_due(self) -> None:
        """Validate every `eval.every` updates, but not after the last: `Training.conclude` does."""
        if self._is_validation_due and not self.is_finished:
            self._validate()

    def _validate(self) -> None:
        record = self.validation.measure(self.engine, self.step, self.keep_alive)
        self.num_iters = probe_iterations(record)
        self.write(record)
        self.recorder.throughput.skip()
