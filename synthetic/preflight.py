"""Checks before training of lengths, a batch and thresholds, which could fail hours later."""

from __future__ import annotations

from collections.abc import Sequence

from synthetic import tasks
from synthetic.config import Config


def check_lengths_and_thresholds(cfg: Config, task: tasks.Task, lengths: Sequence[int]) -> None:
    """Check that training can draw all its batches and that all thresholds can be judged.

    Args:
        cfg: Config of the run.
        task: Its task.
        lengths: Lengths of the final evaluation.

    Raises:
        TaskError: If the task lacks a training length, a batch is invalid, the curriculum would
            change the number of streams, or a threshold is on a metric or a length that is not
            evaluated.
    """
    # 1. The task has all training lengths, and a batch fits its context and its data.
    shortest, longest = cfg.train.lengths
    curriculum = cfg.train.curriculum
    if curriculum and curriculum.constant_tokens and task.streams:
        raise tasks.TaskError(
            f"train.curriculum.constant_tokens changes the batch size, and {cfg.task.name} needs the"
            " same number of streams in every batch: set it to false"
        )
    if curriculum:
        for length in range(curriculum.start, longest, curriculum.grow):
            task.check_length(length)
    task.check_length(longest)
    batch = task.batch(cfg.seed, "train", 0, cfg.train.batch_size, (shortest, longest))
    tasks.check_batch(cfg.task.name, task, batch)

    # 2. Every threshold is on a metric of the task, at a length that is evaluated.
    metrics = list(task.score(batch.labels, batch))
    evaluated = [longest] if task.streams else lengths
    for threshold in cfg.thresholds:
        if threshold.metric not in metrics:
            raise tasks.TaskError(
                f"a threshold is on `{threshold.metric}`: {cfg.task.name} has {', '.join(metrics)}"
            )
        if threshold.length not in (None, *evaluated):
            raise tasks.TaskError(
                f"a threshold is at length {threshold.length}, which eval.lengths does not include"
                f" ({', '.join(map(str, evaluated))})"
            )
