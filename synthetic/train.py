"""The trainer of all tasks and models, in one process."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch

from lm.common.console import Progress, say
from lm.common.errors import Diverged, require
from lm.common.files import write_json
from lm.common.heap import keep_freed_memory
from lm.common.ranks import Ranks
from lm.common.signals import StopSignals
from lm.kernels import describe_backends
from lm.model.state import Adversary
from lm.runs.checkpoint import CheckpointError, Checkpoints, describe_nonfinite, rollback_checkpoint
from lm.runs.log import MetricsWriter, describe_record, probe_iterations
from lm.runs.metrics import FailureWatch, fixed_point_metrics, is_due
from lm.runs.profile import Profile
from lm.runs.run_dir import RunDir
from lm.training.loop import Loop
from lm.training.optim import describe_optimizer, lr_factor, optimizer
from lm.training.preflight import kernel_operations
from lm.training.restore import random_state, set_random_state
from lm.training.upcycle import WeightMatch
from synthetic import tasks
from synthetic.build import STATE, LoadedRun, build_model, collect_tensors, find_newest_state
from synthetic.centroids import MIN_SCORE, check_task, find_and_attach
from synthetic.config import Config
from synthetic.deferred_centroids import DeferredCentroids
from synthetic.evaluate import (
    Answers,
    BatchTensors,
    describe_solver,
    evaluate_all,
    limit_attention,
    measure,
    move_to_device,
    override_solver,
    parse_lengths,
    probe_first_sequences,
)
from synthetic.init_from import match_initial_weights, needs_initial_weights
from synthetic.messages import describe_solvers, describe_task, format_scores
from synthetic.preflight import check_lengths_and_thresholds
from synthetic.results import describe_unfinished_curriculum, judge_thresholds
from synthetic.update import BackwardResult, choose_max_iters, compute_loss, run_passes


def train(cfg: Config, overwrite: bool = False) -> dict:
    """Train or continue the run that `cfg` describes, evaluate it, and return its result.

    Args:
        cfg: Config of the run.
        overwrite: Start from scratch, whatever the run directory contains.

    Raises:
        ConfigError, TaskError, SourceError: If the config is impossible.
        RunDirError, LeaseError, CheckpointError: If the run directory or its checkpoints cannot be
            used.
        OutputError: If a file cannot be written.
        Diverged: If the loss became NaN or infinite more often than `train.max_rollbacks`.
        Stopped: If a signal asked for a stop.
    """
    training = Training(cfg, overwrite)
    run = RunDir(cfg.run_dir)
    run.claim(cfg, overwrite)  # only after the checks: refused configs leave no trace
    try:
        training.start(run)
        training.fit()
        return training.conclude()
    except Exception as e:
        run.record_failure(e)
        raise
    finally:
        training.close()
        run.release()


class Training(Loop):
    """A training run: `start`, `fit`, `conclude` and `close`, in this order.

    The constructor checks everything that it can and writes nothing.

    Args:
        cfg: Config of the run.
        overwrite: Start from scratch, whatever the run directory contains.

    Raises:
        ConfigError, TaskError, SourceError: If the config is impossible.
    """

    continue_advice = "the same command continues"

    def __init__(self, cfg: Config, overwrite: bool = False):
        super().__init__(cfg)
        self.writer = None  # opened by `start`
        if cfg.train.threads:
            torch.set_num_threads(cfg.train.threads)
        if not torch.cuda.is_available():
            keep_freed_memory()  # page faults cost up to a quarter of an update on a CPU
        self.task = tasks.build_task(cfg.task)
        self.eval_lengths = parse_lengths(cfg.eval.lengths, self.task)
        self.lengths_during = parse_lengths(cfg.eval.during, self.task) if cfg.eval.during else []
        check_lengths_and_thresholds(cfg, self.task, self.eval_lengths)
        for package, is_used in (("wandb", cfg.log.wandb), ("tensorboard", cfg.log.tensorboard)):
            if is_used:
                require(package, f"log.{package}")
        self._build_model()
        self.initial_weights: WeightMatch | None = None
        if needs_initial_weights(cfg, overwrite):
            self.initial_weights = match_initial_weights(cfg, self.model)
        # Progress of the run; a checkpoint contains all of it.
        self.batch_number = 0  # number of the next batch: above the updates after a rollback
        self.solved_at: int | None = None  # the update at which train.stop_at was reached
        self.next_search = 0  # the first update after which centroids may be searched again
        self.state: Any = None  # recurrent state that a stream carries from segment to segment
        self.shortest, self.full_length = cfg.train.lengths
        curriculum = cfg.train.curriculum
        start = curriculum.start if curriculum else self.full_length
        self.longest = min(self.full_length, start)  # current longest training length
        self._restrict_elements(curriculum.num_elements if curriculum else None)
        self.update_hooks = (
            self._log_if_due,
            self._probe_if_due,
            self._validate_if_due,
            self.save_if_due,
        )

    def _restrict_elements(self, count: int | None) -> None:
        """Draw later batches from the `count` simplest elements only; None: from all."""
        self.task.restrict_elements(count)
        self.num_elements = None if count == self.task.vocab_size else count  # None: all

    @property
    def _is_curriculum_over(self) -> bool:
        return self.longest == self.full_length and self.num_elements is None

    def _build_model(self) -> None:
        """Build the model, the optimizer and the adversary."""
        cfg, task = self.cfg, self.task
        max_length = max(cfg.train.lengths[1], *self.eval_lengths)
        self.model, self.device, self.precision = build_model(cfg, task, max_length)
        self.carries_state = task.streams
        self.optimizer = optimizer(self.model, cfg.optim, on_gpu=False)
        self.optimizer_lines = describe_optimizer(self.model, cfg.optim)  # with all parameters
        # Remember the peak learning rates: loading a checkpoint overwrites the groups' rates.
        self.peak_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.parameter_count = sum(p.numel() for p in self.model.parameters())
        self.centroids = DeferredCentroids(self.model) if cfg.defers_centroids else None
        if self.centroids is not None and self.centroids.are_missing:
            check_task(cfg, task)
        noise_size = cfg.train.adversarial_noise
        self.adversary = Adversary(self.model, noise_size) if noise_size else None

    def start(self, run: RunDir) -> None:
        """Print the configuration, load a checkpoint or the initial weights, and open the log.

        Args:
            run: The run directory, which this process must have claimed.

        Raises:
            CheckpointError: If the checkpoint cannot be used.
        """
        self.run = run
        self.profile = Profile(self.cfg.log.profile, run.profile)
        manifest = {"config": self.cfg.model_dump(mode="json")}
        self.checkpoints = Checkpoints(run.checkpoints, Ranks(), self.cfg.checkpoint, manifest)
        self._print_setup()
        saved = find_newest_state(run, self.device)
        if saved is not None:
            self._resume(saved)
        elif self.initial_weights is not None:
            self._apply_initial_weights(self.initial_weights)
        self.initial_weights = None  # free their memory
        if not self.is_finished:
            run.result.unlink(missing_ok=True)  # a result of fewer updates is outdated
        run.save_config(self.cfg)
        self.writer = MetricsWriter(self.cfg, run, resumed_at=self.step)

    def _resume(self, saved: dict) -> None:
        """Continue from the state of a checkpoint.

        Raises:
            CheckpointError: If it has more updates than `train.steps`.
        """
        if saved["step"] > self.cfg.train.steps:
            raise CheckpointError(
                f"{self.run} has made {saved['step']} updates, and train.steps is only"
                f" {self.cfg.train.steps}: raise it, or train from scratch with --overwrite"
            )
        self.load_state_dict(saved)
        self.checkpoints.last_complete_step = self.step
        say(f"resumed  at update {self.step}")

    def _apply_initial_weights(self, match: WeightMatch) -> None:
        """Load the weights of `init_from`, and print where each was used."""
        match.apply()
        for line in match.describe():
            say(f"init     {line}")
        write_json(self.run.init_from, match.record())

    def _print_setup(self) -> None:
        """Print the run's task, model, kernels, solvers and optimizer."""
        cfg = self.cfg
        say(f"run      {self.run}")
        say(f"task     {describe_task(cfg, self.task)}")
        size = f"{self.parameter_count / 1e6:.3f} M parameters"
        say(f"model    {cfg.model.name}, {size}, on {self.device} in {self.precision}")
        say(f"kernels  {describe_backends(self.device.type, kernel_operations(self.model))}")
        say(f"solver   {describe_solvers(self.model, cfg)}")
        for line in self.optimizer_lines:
            say(f"optim    {line}")

    def state_dict(self) -> dict:
        """Return everything that a resumed run needs."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "batch_number": self.batch_number,
            "seconds": self._training_seconds(),
            "longest": self.longest,
            "letters": self.num_elements,  # key of earlier versions, for their checkpoints
            "solved_at": self.solved_at,
            "next_search": self.next_search,
            "state": self.state,
            "rollbacks": self.rollbacks,
            **random_state(),
        }

    def load_state_dict(self, saved: dict) -> None:
        """Continue from a `state_dict`."""
        if self.centroids is not None:
            self.centroids.match(saved["model"])
        self.model.load_state_dict(saved["model"])
        try:
            self.optimizer.load_state_dict(saved["optimizer"])
        except ValueError as e:
            raise CheckpointError(
                f"{self.run} was trained by a version with other parameters ({e}): train it from"
                " scratch with --overwrite"
            ) from None
        self.step = saved["step"]
        self.batch_number = saved["batch_number"]
        self.seconds = saved["seconds"]
        self.longest = saved["longest"]
        self._restrict_elements(saved.get("letters"))  # checkpoints of version 0.1 lack this key
        self.solved_at = saved["solved_at"]
        self.next_search = saved.get("next_search", 0)  # earlier checkpoints lack this key
        self.state = saved["state"]
        self.rollbacks = saved["rollbacks"]
        set_random_state(saved)

    def fit(self) -> None:
        """Make the remaining updates, with records, probes, evaluations and checkpoints when due.

        Raises:
            Diverged, Stopped, LeaseError, CheckpointError, OutputError: As `train`.
        """
        steps = self.cfg.train.steps
        self.solver = describe_solver(self.model.train())  # "none" without a solver
        self.failure_watch = FailureWatch(self.solver)
        self.fit_start = time.perf_counter()
        self._start_window()
        self.batches = self._batches()
        self.progress = Progress("training", total=steps, unit="updates")
        with StopSignals() as self.signals:
            self.run_updates()
        self.seconds = self._training_seconds()

    @property
    def is_finished(self) -> bool:
        """True if no update remains, because all are made or the task is solved."""
        return super().is_finished or self.solved_at is not None

    def _training_seconds(self) -> float:
        """Return the seconds of training in all processes of the run, including this one."""
        return self.seconds + (time.perf_counter() - self.fit_start)

    def _batches(self) -> Iterator[tasks.Batch]:
        """Yield training batches from the next one on, with the current lengths and size."""
        lengths = min(self.shortest, self.longest), self.longest
        seed, size, curriculum = self.cfg.seed, self.cfg.train.batch_size, self.cfg.train.curriculum
        if curriculum and curriculum.constant_tokens:
            size = size * self.full_length // self.longest
        for number in itertools.count(self.batch_number):
            yield self.task.batch(seed, "train", number, size, lengths)

    def _start_window(self) -> None:
        """Reset the sums over the updates since the last record."""
        self.window_start = time.perf_counter()
        self.token_count = 0
        self.scored_count: int | torch.Tensor = 0  # labels that are not IGNORE
        self.correct_count: int | torch.Tensor = 0  # correct answers at these labels
        self.statistics: list = []  # of the solver, one entry per call of the model

    def update(self) -> None:
        """Make one update, and store the values to log in `last_record`."""
        # 1. Set the learning rates and read the batch.
        number = self.step + 1  # number of this update, from 1 on
        factor = lr_factor(self.cfg.optim, self.cfg.train.steps, number)
        for group, peak_lr in zip(self.optimizer.param_groups, self.peak_lrs, strict=True):
            group["lr"] = peak_lr * factor
        batch = next(self.batches)
        self.batch_number += 1
        tensors = move_to_device(batch, self.device)

        # 2. Compute the gradient.
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss, answers, adversarial_loss = self._compute_gradient(
            number, tensors, batch.is_continuation
        )
        clip = self.cfg.optim.grad_clip or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        if not torch.isfinite(norm + loss.detach()):
            raise Diverged(f"the loss is {loss.item()}, the gradient norm {norm.item()}")

        # 3. Change the weights, and collect the values to log.
        self.optimizer.step()
        self.step = number
        if self.carries_state:
            self.state = limit_attention(answers.state, tensors.input_ids.shape[1])
        self._add_to_window(tensors, answers)
        self.last_input = tensors.input_ids, tensors.mask
        lr = self.cfg.optim.lr * factor
        record = {"loss": loss, "lr": lr, "grad_norm": norm, "longest": self.longest}
        if adversarial_loss is not None:
            record["adversarial_loss"] = adversarial_loss
        self.last_record = record
        self.is_stop_requested = self.signals.is_stop_requested

    def _compute_gradient(
        self, number: int, tensors: BatchTensors, is_continuation: bool
    ) -> BackwardResult:
        """Run forward and backward of an update.

        Args:
            number: Number of the update.
            tensors: The batch, all of shape (b,l).
            is_continuation: Whether the batch continues the previous one.

        Raises:
            Diverged: If a block computes NaN or infinity, in forward or backward.
        """
        initial_state = self.state if is_continuation else None
        uses_solver_limit = self.cfg.train.max_iters == "config"
        max_iters = None if uses_solver_limit else choose_max_iters(self.cfg, number)

        def forward() -> tuple[torch.Tensor, Answers]:
            return compute_loss(
                self.model, tensors, initial_state, self.carries_state, self._autocast
            )

        try:
            with override_solver(self.model, max_iters=max_iters):
                # Adversarial noise before the task is learned would prevent learning it.
                adversary = self.adversary if self._is_curriculum_over else None
                return run_passes(forward, adversary)
        except FloatingPointError as e:
            raise Diverged(str(e)) from None

    def _add_to_window(self, tensors: BatchTensors, answers: Answers) -> None:
        """Add an update's answers and solver statistics to the window."""
        is_scored = tensors.labels != tasks.IGNORE
        self.correct_count += ((answers.logits.argmax(-1) == tensors.labels) & is_scored).sum()
        self.scored_count += is_scored.sum()
        self.token_count += tensors.input_ids.numel()
        if answers.statistics[0] is not None:
            self.statistics += answers.statistics

    def _autocast(self) -> torch.autocast:
        enabled = self.precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    def roll_back(self) -> bool:
        """Load a checkpoint, except for the position in the data; see `Loop.roll_back`."""
        next_batch = self.batch_number
        saved = None
        if rollback_checkpoint(self.run.checkpoints, self.rollback_step):
            with contextlib.suppress(CheckpointError):  # raised if no checkpoint can be used
                saved = find_newest_state(self.run, self.device)
        if saved is None:
            return False
        seconds = self.seconds  # not the checkpoint's: `fit_start` counts the time of this process
        self.load_state_dict(saved)
        self.seconds, self.batch_number = seconds, next_batch
        self.state = None  # the next batch continues other sequences than the checkpoint's state
        self.batches = self._batches()
        self._start_window()
        return True

    def _log_if_due(self) -> None:
        """Write a record of the window every `log.every` updates, and after `train.steps`."""
        steps = self.cfg.train.steps
        if self.step % self.cfg.log.every and self.step != steps:
            self.progress.update(self.step, steps)
            return
        now = time.perf_counter()
        values = {k: v.item() if torch.is_tensor(v) else v for k, v in self.last_record.items()}
        record = {
            **values,
            "accuracy": float(self.correct_count / max(1, self.scored_count)),
            "tokens_per_s": round(self.token_count / (now - self.window_start), 1),
            "seconds": round(self.seconds + now - self.fit_start, 1),
            **fixed_point_metrics(self.statistics),
        }
        self.write(record)
        self.log_saves()
        self.failure_watch.check(record, f"update {self.step}")
        self.progress.update(self.step, steps, describe_record(record, self.num_iters))
        self._start_window()

    @contextlib.contextmanager
    def _exclude_from_timing(self) -> Iterator[None]:
        """Exclude the time inside this context from the training time."""
        pause_start = time.perf_counter()
        yield
        pause = time.perf_counter() - pause_start
        self.fit_start += pause
        self.window_start += pause

    @property
    def _is_validation_due(self) -> bool:
        return self.step % self.cfg.eval.every == 0 and self.step < self.cfg.train.steps

    def _probe_if_due(self) -> None:
        """Measure ℓ* on the last batch; a validation that is due measures it instead."""
        is_probe_due = is_due(self.step, self.cfg.log.probe_every) and not self._is_validation_due
        if self.solver == "none" or not is_probe_due:
            return
        with self._exclude_from_timing(), self._autocast():
            probe = probe_first_sequences(self.model, *self.last_input)
        record = {"step": self.step, "probe": fixed_point_metrics([probe])}
        self.num_iters = probe_iterations(record)
        self.write(record)

    def _validate_if_due(self) -> None:
        """Validate at the current longest length, then advance the curriculum or end the training.

        Training ends early only after the curriculum, at a score of at least `train.stop_at`.
        """
        if not self._is_validation_due:
            return
        seconds = self._training_seconds()
        with self._exclude_from_timing():
            scores = self._measure_validation(self.longest)
            record = {"step": self.step, "valid": scores, "seconds": round(seconds, 1)}
            elements_text = ""
            if self.num_elements:
                record["letters"] = self.num_elements  # key of earlier versions
                elements_text = f", {self.num_elements} of {self.task.vocab_size} elements"
            if self.lengths_during:
                record["over_lengths"] = {
                    length: self._measure_validation(length) for length in self.lengths_during
                }
            self.write(record)
            position = f"update {self.step:>6}  length {self.longest}{elements_text}"
            say(f"{position}: {format_scores(scores)}")
        self._advance_or_stop(scores["metrics"][self.task.headline])

    def _measure_validation(self, length: int) -> dict:
        """Measure the model on validation data of a length."""
        return measure(
            self.model,
            self.task,
            self.cfg,
            length,
            "valid",
            self.cfg.seed,
            self.precision,
            # Few elements give too few sequences for disjoint splits.
            is_overlap_known=self.num_elements is None,
        )

    def _advance_or_stop(self, score: float) -> None:
        """Advance the curriculum, or end the training, if the score is high enough.

        Args:
            score: Headline metric at the current longest length.
        """
        curriculum = self.cfg.train.curriculum
        if curriculum and not self._is_curriculum_over:
            if score < curriculum.min_accuracy:
                return
            if self.longest < self.full_length:
                self.longest = min(self.full_length, self.longest + curriculum.grow)
            elif self.num_elements is not None:
                self._restrict_elements(min(2 * self.num_elements, self.task.vocab_size))
            self.batches = self._batches()
            self.state = None
        elif self.centroids is not None and self.centroids.are_missing:
            if score >= MIN_SCORE and self.step >= self.next_search:
                self._attach_centroids(self.centroids, score)
                self.next_search = self.step + self.step // 10  # a search can take seconds
        elif score >= (self.cfg.train.stop_at or float("inf")):
            self.solved_at = self.step

    def _attach_centroids(self, centroids: DeferredCentroids, score: float) -> None:
        """Find the centroids of the model and attach them; detach them if the score is halved.

        Args:
            centroids: The detached centroids.
            score: Headline metric without them.
        """
        with self._autocast():
            run = LoadedRun(self.cfg, self.task, self.model.eval(), self.precision)
            description = find_and_attach(centroids, run)
        if centroids.is_attached:
            with self._exclude_from_timing():
                new_scores = self._measure_validation(self.longest)
            new_score = new_scores["metrics"][self.task.headline]
            description += f"; {self.task.headline} {score:.3f} before, {new_score:.3f} with them"
            if new_score < score / 2:
                centroids.set_attached(False)
                description = f"none yet, because the score would fall: {description}"
        say(f"centroids: {description}")

    def check_finite(self) -> None:
        """Check the weights and the optimizer's moments.

        Raises:
            Diverged: If one of them is not finite.
        """
        tensors = collect_tensors(self.state_dict())
        # `collect_tensors` selects only weights with NaN; a checkpoint also needs finite ones.
        tensors["the weights"] = list(self.model.parameters())
        if message := describe_nonfinite(tensors):
            raise Diverged(message)

    def state_files(self) -> dict:
        """Return the files of a checkpoint with their contents."""
        return {STATE: self.state_dict()}

    def conclude(self) -> dict:
        """Evaluate the trained model, write result.json, and return its content."""
        cfg, task = self.cfg, self.task
        task.restrict_elements(None)  # even if the curriculum has not reached all elements
        results = evaluate_all(self.model, task, cfg, self.eval_lengths, self.precision)
        result = {
            "task": cfg.task.name,
            "model": cfg.model.name,
            "parameters": self.parameter_count,
            "updates": self.step,
            "solved_at": self.solved_at,
            "trained_length": self.longest,
            "trained_elements": self.num_elements,  # None: all
            "training_seconds": round(self.seconds, 1),
            "headline": task.headline,
            "chance": task.chance,
            "eval": results,
            "bars": judge_thresholds(cfg.thresholds, results),  # key of earlier versions
        }
        write_json(self.run.result, result)
        if self.centroids is not None and self.centroids.are_missing:
            if not self._is_curriculum_over:
                reason = "its curriculum has not ended"
            elif self.next_search:
                reason = "every search failed"
            else:
                reason = f"its score was below {MIN_SCORE}"
            say(f"note: the model has none of its centroids: {reason}")
        if note := describe_unfinished_curriculum(result, cfg):
            say(f"note: {note}")
        return result

    def close(self) -> None:
        """Close the profile, the pending save and the log, even if `start` failed midway."""
        if hasattr(self, "profile"):
            self.profile.close()
        if hasattr(self, "checkpoints"):
            self.checkpoints.close()
        if self.writer is not None:
            self.writer.close()
