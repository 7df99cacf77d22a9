"""Checks before training of lengths, a batch and thresholds, which could fail hours later."""

from __future__ import annotations

from collections.abc import Sequence

from lm.config.schema import check_state_noise
from synthetic import tasks
from synthetic.config import Config


def check_lengths_and_thresholds(cfg: Config, task: tasks.Task, lengths: Sequence[int]) -> None:
    """Check that training can draw all its batches and that all thresholds can be judged.

    Args:
        cfg: Config of the run.
        task: Its task.
        lengths: Lengths of the final evaluation.

    Raises:
        ConfigError: If no layer reads `solver.state_noise`.
        TaskError: If the task lacks a training length, a batch is invalid, `constant_tokens` does
            not suit the task, or a threshold is on a metric or a length that is not evaluated.
    """
    # 1. The model reads the state noise.
    check_state_noise(cfg)

    # 2. The task has all training lengths, and a batch fits its context and its data.
    shortest, longest = cfg.train.lengths
    curriculum = cfg.train.curriculum
    if curriculum:
        for length in range(curriculum.start, longest, curriculum.grow):
            task.check_length(length)
    task.check_length(longest)
    batch = task.batch(cfg.seed, "train", 0, cfg.train.batch_size, (shortest, longest))
    tasks.check_batch(cfg.task.name, task, batch)
    if not task.streams:
        task.is_held_out(longest)  # raises TaskError if a custom task lacks a method
    if curriculum and curriculum.constant_tokens:
        _check_constant_tokens(cfg, task, curriculum.start)

    # 3. Every threshold is on a metric of the task, at a length that is evaluated.
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


def _check_constant_tokens(cfg: Config, task: tasks.Task, start: int) -> None:
    """Check that `curriculum.constant_tokens` can choose the number of sequences in a batch.

    Raises:
        TaskError: If the number must be constant, or tokens are not proportional to the length.
    """
    key = "train.curriculum.constant_tokens"
    if task.streams:
        raise tasks.TaskError(
            f"{key} changes the batch size, and {cfg.task.name} needs the same number of streams in"
            " every batch: set it to false"
        )
    full_length = cfg.train.lengths[1]
    tokens = [
        task.batch(cfg.seed, "train", 0, 1, (length, length)).input_ids.size
        for length in (start, full_length)
    ]
    if tokens[0] * full_length != tokens[1] * start:
        raise tasks.TaskError(
            f"{key} needs a task with one token per unit of length, and a sequence of"
            f" {cfg.task.name} has {tokens[0]} tokens at length {start} and {tokens[1]} at length"
            f" {full_length}: set it to false"
        )
