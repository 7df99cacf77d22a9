"""Actions after an update of a language model; each decides itself whether it is due.

ℓ* of a fixed-point layer is the number of iterations that the paper's procedure makes until it
converges. Counting it is called a probe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lm.common.console import say
from lm.runs.log import describe_record, iterations_suffix, probe_iterations
from lm.runs.metrics import is_due

if TYPE_CHECKING:
    from lm.training.train import Training


def record_if_due(training: Training) -> None:
    """Write a record every `log.every` updates and after the last."""
    step, steps = training.step, training.cfg.train.steps
    if step % training.cfg.log.every and not training.is_last:
        training.progress_bar.update(step, steps)
        return
    recorder = training.recorder
    record = recorder.make_record(step, training.last_update, training.lr)
    record |= training.batches.source_metrics()
    record["peak_memory_bytes"] = recorder.peak_memory()
    training.write(record)
    training.log_saves()
    training.progress_bar.update(step, steps, describe_record(record, training.num_iters))
    recorder.throughput.skip()


def probe_if_due(training: Training) -> None:
    """Count ℓ* every `log.probe_every` updates, unless a validation does."""
    has_validation = training.is_validation_due or training.is_last
    is_probe_due = is_due(training.step, training.cfg.log.probe_every)
    if not training.recorder.has_solver or has_validation or not is_probe_due:
        return
    record = training.validation.probe_solver(training.engine)
    training.write(record)
    say(f"update {training.step:>6}{iterations_suffix(record)}")
    training.num_iters = probe_iterations(record)
    training.recorder.throughput.skip()


def end_stage_if_learned(training: Training) -> None:
    """End a stage of the curriculum that is learned."""
    sources = training.curriculum.sources_to_check(training.step)
    if not sources:
        return
    training.check_finite()
    probability = training.validation.answer_probability(
        training.engine, sources, training.keep_alive
    )
    training.write(training.curriculum.end_if_learned(training.step, probability))
    training.recorder.throughput.skip()


def save_if_due(training: Training) -> None:
    """Save a checkpoint as `Loop.save_if_due`."""
    if training.save_if_due():
        training.recorder.throughput.skip()


def validate_if_due(training: Training) -> None:
    """Validate every `eval.every` updates; `Training.conclude` validates after the last."""
    if training.is_validation_due and not training.is_last:
        validate(training)


def validate(training: Training) -> None:
    """Measure the validation text, and write a record."""
    record = training.validation.measure(training.engine, training.step, training.keep_alive)
    training.num_iters = probe_iterations(record)
    training.write(record)
    training.recorder.throughput.skip()


AFTER_UPDATE: tuple[Callable[[Training], None], ...] = (
    record_if_due,
    probe_if_due,
    end_stage_if_learned,  # before a save, so that the checkpoint holds the new stage
    save_if_due,
    validate_if_due,
)
