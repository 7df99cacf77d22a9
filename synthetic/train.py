"""The one trainer of all tasks and models: data, model, steps, evaluation, result; one process."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lm.common.console import Progress, say
from lm.common.errors import Diverged, require
from lm.common.files import write_json
from lm.common.heap import keep_freed_memory
from lm.common.ranks import Ranks
from lm.common.signals import StopSignals
from lm.kernels import describe_backends
from lm.model.state import Adversary
from lm.runs.checkpoint import CheckpointError, Checkpoints, describe_nonfinite, rollback_checkpoint
from lm.runs.log import Writer, describe_record, format_iterations, probe_iterations
from lm.runs.metrics import FailureWatch, fixed_point_metrics, is_due
from lm.runs.profile import Profile
from lm.runs.run_dir import RunDir
from lm.training.loop import Loop
from lm.training.optim import describe_optimizer, lr_factor, optimizer
from lm.training.preflight import kernel_operations
from synthetic import init_from, tasks
from synthetic.build import STATE, build, held, newest_state
from synthetic.config import Config
from synthetic.evaluate import (
    Answers,
    Tensors,
    as_tensors,
    evaluate_all,
    measure,
    parse_lengths,
    probe_first,
    solver_of,
    solving,
)
from synthetic.init_from import Start
from synthetic.results import curriculum_note, passes, solver_text
from synthetic.update import backward, loss_of, max_iters_at


def train(cfg: Config, overwrite: bool = False) -> dict:
    """Train (or continue) the run that `cfg` describes, evaluate it, and return its result.

    Raises:
        ConfigError, TaskError, SourceError, RunDirError, LeaseError, CheckpointError, OutputError:
            something asked for cannot be had, or something cannot be written.
        Diverged: the loss became NaN or infinite, more often than `train.max_rollbacks`.
        Stopped: a signal asked for a stop.
    """
    training = Training(cfg, overwrite)
    run = RunDir(cfg.run_dir)
    run.claim(cfg, overwrite, say)  # now that nothing is left to refuse
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
    """A run under way: `start`, `fit`, `conclude`, `close`, in this order. Making one refuses what
    cannot be, and writes nothing.

    Args: overwrite: it begins anew, whatever its directory holds.
    Raises:
        ConfigError, TaskError, SourceError: as `train`.
    """

    continue_advice = "the same command continues"

    def __init__(self, cfg: Config, overwrite: bool = False):
        super().__init__(cfg)
        self.writer = None  # opened by `start`
        if cfg.train.threads:
            torch.set_num_threads(cfg.train.threads)
        if not torch.cuda.is_available():
            keep_freed_memory()
        self.task = tasks.build(cfg.task)
        self.lengths = parse_lengths(cfg.eval.lengths, self.task)
        self.lengths_during = parse_lengths(cfg.eval.during, self.task) if cfg.eval.during else []
        _check_lengths_and_bars(cfg, self.task, self.lengths)
        for package, wanted in (("wandb", cfg.log.wandb), ("tensorboard", cfg.log.tensorboard)):
            if wanted:
                require(package, f"log.{package}")
        self._build()
        self.init_from: Start | None = None
        if init_from.is_needed(cfg, overwrite):
            self.init_from = Start(cfg, self.model)
        # Where it stands; all of it is in a checkpoint.
        self.batch_number = 0  # of the next batch: more, where a rollback has left some out
        self.solved_at: int | None = None  # the update at which train.stop_at was reached
        self.state: Any = None  # that a stream carries from segment to segment
        self.shortest, self.full_length = cfg.train.lengths
        curriculum = cfg.train.curriculum
        start = curriculum.start if curriculum else self.full_length
        self.longest = min(self.full_length, start)  # of the batches now
        self._draw_from(curriculum.num_elements if curriculum else None)
        self.update_hooks = (
            self._log_if_due,
            self._probe_if_due,
            self._validate_if_due,
            self.save_if_due,
        )

    def _draw_from(self, letters: int | None) -> None:
        """Batches are of so many letters from now on, None: of all."""
        self.task.draw_from(letters)
        self.letters = None if letters == self.task.vocab_size else letters

    @property
    def _curriculum_is_over(self) -> bool:
        return self.longest == self.full_length and self.letters is None

    def _build(self) -> None:
        cfg, task = self.cfg, self.task
        longest_read = max(cfg.train.lengths[1], *self.lengths)
        self.model, self.device, self.precision = build(cfg, task, longest_read)
        self.carries_state = task.streams
        self.optimizer = optimizer(self.model, cfg.optim, on_gpu=False)
        # Asked of the config, not of a group: a checkpoint that is loaded puts its own there.
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.parameters = sum(p.numel() for p in self.model.parameters())
        kappa = cfg.train.adversarial_noise
        self.adversary = Adversary(self.model, kappa) if kappa else None

    def start(self, run: RunDir) -> None:
        """In a directory that is ours: say what trains, go on where it was left, open the log.

        Raises:
            CheckpointError: the checkpoint cannot be used.
        """
        self.run = run
        self.profile = Profile(self.cfg.log.profile, run.profile, say)
        about = {"config": self.cfg.model_dump(mode="json")}
        self.checkpoints = Checkpoints(run.checkpoints, Ranks(), self.cfg.checkpoint, about)
        self._introduce()
        saved = newest_state(run, self.device, say)
        if saved is not None:
            if saved["step"] > self.cfg.train.steps:
                raise CheckpointError(
                    f"{run} has made {saved['step']} updates, and train.steps is only"
                    f" {self.cfg.train.steps}: raise it, or train anew with --overwrite"
                )
            self.load_state_dict(saved)
            self.checkpoints.published = self.step
            say(f"resumed  at update {self.step}")
        elif self.init_from is not None:
            for line in self.init_from.apply():
                say(f"init     {line}")
            self.init_from.write(run)
            if any(new.vectors is not None for new in self.init_from.centroids):
                score = self._measure_validation(self.longest)["metrics"][self.task.headline]
                say(
                    f"init     {score:.3f} of the sequences of {self.longest} right before training"
                )
        self.init_from = None  # its weights need not be kept
        if not self.is_last:
            run.result.unlink(missing_ok=True)  # what is there is of fewer updates
        run.save_config(self.cfg)
        self.writer = Writer(self.cfg, run, resumed_at=self.step)

    def _introduce(self) -> None:
        """Say what trains, on what, and how it is solved."""
        cfg = self.cfg
        say(f"run      {self.run}")
        say(f"task     {_task_line(cfg, self.task)}")
        size = f"{self.parameters / 1e6:.3f} M parameters"
        say(f"model    {cfg.model.name}, {size}, on {self.device} in {self.precision}")
        say(f"kernels  {describe_backends(self.device.type, kernel_operations(self.model))}")
        say(f"solver   {_solver_line(self.model, cfg)}")
        for line in describe_optimizer(self.model, cfg.optim):
            say(f"optim    {line}")

    def state_dict(self) -> dict:
        """All that a run goes on from."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "batch_number": self.batch_number,
            "seconds": self._seconds_so_far(),
            "longest": self.longest,
            "letters": self.letters,
            "solved_at": self.solved_at,
            "state": self.state,
            "rollbacks": self.rollbacks,
            "rng": torch.get_rng_state(),
        }

    def load_state_dict(self, saved: dict) -> None:
        """Continue from `state_dict`; a run of version 0.1 has no letters."""
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step = saved["step"]
        self.batch_number = saved["batch_number"]
        self.seconds = saved["seconds"]
        self.longest = saved["longest"]
        self._draw_from(saved.get("letters"))
        self.solved_at = saved["solved_at"]
        self.state = saved["state"]
        self.rollbacks = saved["rollbacks"]
        torch.set_rng_state(saved["rng"].cpu())

    def fit(self) -> None:
        """The updates that are left, with records, probes, evaluations and checkpoints when due.

        Raises:
            Diverged, Stopped, LeaseError, CheckpointError, OutputError: as `train`.
        """
        steps = self.cfg.train.steps
        self.solver = solver_of(self.model.train())
        self.failure_watch = FailureWatch(say, self.solver)
        self.fit_began = time.perf_counter()
        self._begin_window()
        self.batches = self._batches()
        self.bar = Progress("training", total=steps, unit="updates")
        with StopSignals() as self.signals:
            self.run_updates()
        self.seconds = self._seconds_so_far()

    @property
    def is_last(self) -> bool:
        """Whether no update is left: all are made, or the task is solved."""
        return super().is_last or self.solved_at is not None

    def _seconds_so_far(self) -> float:
        """Seconds of training, of this process and of those before it."""
        return self.seconds + (time.perf_counter() - self.fit_began)

    def _batches(self) -> Iterator[tasks.Batch]:
        """From the next one on, as long as they are now."""
        lengths = min(self.shortest, self.longest), self.longest
        cfg = self.cfg
        for number in itertools.count(self.batch_number):
            yield self.task.batch(cfg.seed, "train", number, cfg.train.batch_size, lengths)

    def _begin_window(self) -> None:
        """What the next record sums up begins here."""
        self.window_began = time.perf_counter()
        self.tokens = 0
        self.scored: int | torch.Tensor = 0  # labels that count
        self.correct: int | torch.Tensor = 0  # of these, answered as they should be
        self.statistics: list = []

    def update(self) -> None:
        """One update; `made` is what is logged of it alone."""
        # 1. The learning rates and the batch of this update.
        number = self.step + 1
        factor = lr_factor(self.cfg.optim, self.cfg.train.steps, number)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * factor
        batch = next(self.batches)
        self.batch_number += 1
        tensors = as_tensors(batch, self.device)

        # 2. Its gradient.
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss, answers, adversarial_loss = self._gradient(number, tensors, batch.carry)
        clip = self.cfg.optim.grad_clip or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        if not torch.isfinite(norm + loss.detach()):
            raise Diverged(f"the loss is {loss.item()}, the gradient norm {norm.item()}")

        # 3. The weights move, and what is logged is counted.
        self.optimizer.step()
        self.step = number
        self.state = answers.state
        self._count(tensors, answers)
        self.last_input = tensors.input_ids, tensors.mask
        lr = self.cfg.optim.lr * factor
        record = {"loss": loss, "lr": lr, "grad_norm": norm, "longest": self.longest}
        if adversarial_loss is not None:
            record["adversarial_loss"] = adversarial_loss
        self.made, self.stopping = record, self.signals.is_stop_requested

    def _gradient(
        self, number: int, tensors: Tensors, continues: bool
    ) -> tuple[torch.Tensor, Answers, torch.Tensor | None]:
        """Forward and backward of the update of this number → as `synthetic.update.backward`.

        Args: continues: the batch goes on where the one before ended.
        Raises:
            Diverged: a block has made NaN or infinity, forward or back.
        """
        before = self.state if continues else None
        limit = None if self.cfg.train.max_iters == "config" else max_iters_at(self.cfg, number)

        def one_pass() -> tuple[torch.Tensor, Answers]:
            return loss_of(self.model, tensors, before, self.carries_state, self._autocast)

        try:
            with solving(self.model, max_iters=limit):
                return backward(one_pass, self.adversary if self._curriculum_is_over else None)
        except FloatingPointError as e:
            raise Diverged(str(e)) from None

    def _count(self, tensors: Tensors, answers: Answers) -> None:
        scored = tensors.labels != tasks.IGNORE
        self.correct += ((answers.logits.argmax(-1) == tensors.labels) & scored).sum()
        self.scored += scored.sum()
        self.tokens += tensors.input_ids.numel()
        if answers.statistics[0] is not None:
            self.statistics += answers.statistics

    def _autocast(self) -> torch.autocast:
        enabled = self.precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    def roll_back(self) -> bool:
        """All but the place in the data from the newest checkpoint; see `Loop`."""
        next_batch = self.batch_number
        saved = None
        if rollback_checkpoint(self.run.checkpoints, self.rollback_step, say):
            with contextlib.suppress(CheckpointError):  # none can be used
                saved = newest_state(self.run, self.device, say)
        if saved is None:
            return False
        self.load_state_dict(saved)
        self.batch_number = next_batch
        self.state = None  # what comes next does not continue what the checkpoint had read
        self.batches = self._batches()
        self._begin_window()
        return True

    def _log_if_due(self) -> None:
        """Every `log.every` updates, and after the last, a record of this update and of what the
        window sums up."""
        steps = self.cfg.train.steps
        if self.step % self.cfg.log.every and self.step != steps:
            self.bar.update(self.step, steps)
            return
        now = time.perf_counter()
        numbers = {k: v.item() if torch.is_tensor(v) else v for k, v in self.made.items()}
        record = {
            **numbers,
            "accuracy": float(self.correct / max(1, self.scored)),
            "tokens_per_s": round(self.tokens / (now - self.window_began), 1),
            "seconds": round(self.seconds + now - self.fit_began, 1),
            **fixed_point_metrics(self.statistics),
        }
        self.write(record)
        self.log_saves()
        self.failure_watch.check(record, f"update {self.step}")
        self.bar.update(self.step, steps, describe_record(record, self.num_iters))
        self._begin_window()

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """What happens within does not count as training."""
        pause_began = time.perf_counter()
        yield
        pause = time.perf_counter() - pause_began
        self.fit_began += pause
        self.window_began += pause

    @property
    def _validation_is_due(self) -> bool:
        return self.step % self.cfg.eval.every == 0 and self.step < self.cfg.train.steps

    def _probe_if_due(self) -> None:
        """ℓ* of the last batch; where a validation is due, that probes as well."""
        due = is_due(self.step, self.cfg.log.probe_every) and not self._validation_is_due
        if self.solver == "none" or not due:
            return
        with self._paused(), self._autocast():
            measured = fixed_point_metrics([probe_first(self.model, *self.last_input)])
        record = {"step": self.step, "probe": measured}
        self.num_iters = probe_iterations(record)
        self.write(record)

    def _validate_if_due(self) -> None:
        """Measure on held-out sequences as long as training's: where they are solved the curriculum
        goes on, or the training ends."""
        if not self._validation_is_due:
            return
        seconds = self._seconds_so_far()
        with self._paused():
            measured = self._measure_validation(self.longest)
            record = {"step": self.step, "valid": measured, "seconds": round(seconds, 1)}
            if self.letters:
                record["letters"] = self.letters
            if self.lengths_during:
                record["over_lengths"] = {
                    length: self._measure_validation(length) for length in self.lengths_during
                }
            self.write(record)
            of = f", {self.letters} of {self.task.vocab_size} letters" if self.letters else ""
            say(f"update {self.step:>6}  length {self.longest}{of}: {_scores(measured)}")
            self._grow_or_stop(measured["metrics"][self.task.headline])

    def _measure_validation(self, length: int) -> dict:
        cfg = self.cfg
        held_apart = not self.letters  # words of few letters are not
        return measure(
            self.model,
            self.task,
            cfg,
            length,
            "valid",
            cfg.seed,
            self.precision,
            held_apart=held_apart,
        )

    def _grow_or_stop(self, score: float) -> None:
        """What a score of the headline metric, at the longest length so far, brings about."""
        curriculum = self.cfg.train.curriculum
        if curriculum and not self._curriculum_is_over:
            if score < curriculum.min_accuracy:
                return
            if self.longest < self.full_length:
                self.longest = min(self.full_length, self.longest + curriculum.grow)
            elif self.letters is not None:
                self._draw_from(min(2 * self.letters, self.task.vocab_size))
            self.batches = self._batches()
            self.state = None
        elif score >= (self.cfg.train.stop_at or float("inf")):
            self.solved_at = self.step

    def check_finite(self) -> None:
        """Raises Diverged where the weights or moments are not finite."""
        weights = {"the weights": list(self.model.parameters())}
        if what := describe_nonfinite(held(self.state_dict()) | weights):
            raise Diverged(what)

    def state_files(self) -> dict:
        """What a checkpoint holds."""
        return {STATE: self.state_dict()}

    def conclude(self) -> dict:
        """Evaluate the trained model, and write result.json."""
        cfg, task = self.cfg, self.task
        task.draw_from(None)
        results = evaluate_all(self.model, task, cfg, self.lengths, self.precision)
        result = {
            "task": cfg.task.name,
            "model": cfg.model.name,
            "parameters": self.parameters,
            "updates": self.step,
            "solved_at": self.solved_at,
            "trained_length": self.longest,
            "training_seconds": round(self.seconds, 1),
            "headline": task.headline,
            "chance": task.chance,
            "eval": results,
            "bars": passes(cfg.thresholds, results),
        }
        write_json(self.run.result, result)
        if note := curriculum_note(result, cfg):
            say(f"note: {note}")
        return result

    def close(self) -> None:
        """End the profile, the save under way and the log, however far `start` came."""
        if hasattr(self, "profile"):
            self.profile.close()
        if hasattr(self, "checkpoints"):
            self.checkpoints.close()
        if self.writer is not None:
            self.writer.close()


def _check_lengths_and_bars(cfg: Config, task: tasks.Task, lengths: Sequence[int]) -> None:
    """Say now what would otherwise stop the run, or fail a bar, hours later.

    Args: lengths: that are evaluated at the end.
    """
    # 1. The task has sequences of all training lengths; a batch of them fits its context, its data.
    shortest, longest = cfg.train.lengths
    curriculum = cfg.train.curriculum
    if curriculum:
        for length in range(curriculum.start, longest, curriculum.grow):
            task.check_length(length)
    task.check_length(longest)
    batch = task.batch(cfg.seed, "train", 0, cfg.train.batch_size, (shortest, longest))
    tasks.check_batch(cfg.task.name, task, batch)

    # 2. Every bar is on a metric of the task, at a length that is evaluated.
    metrics = list(task.score(batch.labels, batch))
    tested = [longest] if task.streams else lengths
    for bar in cfg.thresholds:
        if bar.metric not in metrics:
            raise tasks.TaskError(
                f"a bar is on `{bar.metric}`: {cfg.task.name} has {', '.join(metrics)}"
            )
        if bar.length not in (None, *tested):
            raise tasks.TaskError(
                f"a bar is at length {bar.length}, which eval.lengths does not try"
                f" ({', '.join(map(str, tested))})"
            )


def _task_line(cfg: Config, task: tasks.Task) -> str:
    name = f"{cfg.task.name} {cfg.task.group}" if cfg.task.name == "word_problem" else cfg.task.name
    shortest, longest = cfg.train.lengths
    lengths = f"{shortest} to {longest}" if shortest < longest else f"{longest}"
    return f"{name}, {task.vocab_size} ids, training length {lengths} (chance {task.chance:.3g})"


def _solver_line(model: nn.Module, cfg: Config) -> str:
    """How the model solves in training and in evaluation."""
    training, evaluation = (solver_of(model.train(mode)) for mode in (True, False))
    if isinstance(training, str) or isinstance(evaluation, str):
        return "none"
    if training["max_iters"] is not None:
        training["max_iters"] = max_iters_at(cfg, 0)
        if cfg.train.max_iters == "gamma":
            training["max_iters"] = f"⌈Γ({cfg.train.gamma_shape:g}, 1)⌉"
    if evaluation["max_iters"] is not None:
        evaluation["max_iters"] = cfg.eval.max_iters or evaluation["max_iters"]
    return (
        f"training: {solver_text(training)}, gradient {training['gradient']};"
        f" evaluation: {solver_text(evaluation)}"
    )


def _scores(measured: dict) -> str:
    """The metrics of a measurement (without those of single bAbI tasks), and ℓ* if it has any."""
    text = "  ".join(
        f"{name} {value:.3f}"
        for name, value in measured["metrics"].items()
        if not name.startswith("qa")
    )
    if iterations := measured.get("num_iters"):
        text += "  ℓ* " + format_iterations(iterations)
    return text
