"""The training run of a language model: data, model, engine, resuming, updates, validation."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import torch

from lm.common.console import Progress, say
from lm.common.errors import ConfigError, Diverged, UserError
from lm.common.files import DamagedError, write_json
from lm.common.ranks import Ranks, as_lost_peer_error
from lm.common.signals import StopRequested, StopSignals
from lm.common.watchdog import Watchdog
from lm.config.schema import Config
from lm.data.batches.mixture_loader import skip_data
from lm.runs.checkpoint import (
    CheckpointError,
    Checkpoints,
    delete_later_checkpoints,
    describe_nonfinite,
    resume_checkpoint,
    rollback_checkpoint,
)
from lm.runs.log import MetricsWriter
from lm.runs.metrics import iter_metrics
from lm.runs.profile import Profile
from lm.runs.run_dir import RunDir
from lm.training import init_from
from lm.training.build import build_model, model_vocab_size
from lm.training.curriculum import Curriculum
from lm.training.engine import Engine
from lm.training.hooks import HookedLoop
from lm.training.inputs import check_inputs
from lm.training.optim import describe_optimizer
from lm.training.preflight import check, check_same_kernels, environment
from lm.training.process_group import join_process_group, leave_process_group
from lm.training.recorder import Recorder
from lm.training.restore import random_state, rank_file, restore_engine, restore_rank_state
from lm.training.resume import check_batch, training_manifest
from lm.training.run_data import RESUME_ADVICE, open_run_data
from lm.training.validation import Validation

PIPE_INTERVAL_S = 60.0  # between progress lines, if stdout is no terminal and no record is due


def train(cfg: Config, overwrite: bool = False) -> Path:
    """Train or continue the run that a configuration describes, and return its run directory.

    Args:
        cfg: Configuration of the run.
        overwrite: Delete a run that the directory already holds.

    Raises:
        ConfigError, DataError, RunDirError, LeaseError, CheckpointError, SourceError: If the run
            cannot start.
        OutputError, CheckpointError: If a file cannot be written.
        Diverged: If the loss or gradient became NaN or infinite more often than
            `train.max_rollbacks`. The last checkpoint stays.
        Stopped: If a stop signal arrived.
        MachineError: If another rank is gone or does not answer.
    """
    ranks = join_process_group(cfg)
    say.enabled = ranks.is_main
    run = RunDir(cfg.run_dir)
    with contextlib.ExitStack() as on_exit:  # closes logs and checkpoints also after an error
        on_exit.callback(leave_process_group)
        on_exit.callback(run.release)
        meta_model, deepspeed_config = check(cfg, ranks.world_size)
        check_same_kernels(ranks, meta_model)
        if overwrite:
            check_inputs(cfg, is_new=True)  # before the old run is deleted
        ranks.run_on_main(run.claim, cfg, overwrite)
        try:
            training = Training(cfg, ranks, run, on_exit, deepspeed_config)
            training.resume()
            training.log_setup()
            training.fit()
            training.conclude()
        except Exception as e:
            error = _explain_error(e, cfg, run)
            run.record_failure(error, ranks.is_main)
            if error is e:
                raise
            raise error from e
    say(f"next     fprnn report {run}, or fprnn export {run} {run}/hf")
    return run.path


def _explain_error(error: Exception, cfg: Config, run: RunDir) -> Exception:
    """Replace torch's errors for a full GPU and a lost rank by messages for the user."""
    if not isinstance(error, torch.OutOfMemoryError):
        return as_lost_peer_error(error) or error
    memory = ""
    if torch.cuda.is_available():
        memory = f" {torch.cuda.get_device_properties(0).total_memory / 2**30:.1f} GiB"
    return ConfigError(
        f"train.micro_batch_size={cfg.train.micro_batch_size} does not fit in this GPU's{memory}:"
        f" `fprnn plan {run.config}` lists sizes that fit; model.gradient_checkpointing=true needs"
        " less memory, too"
    )


class Training(HookedLoop):
    """A training run on one rank. Every rank calls the same methods.

    They are called in this order: `resume`, `log_setup`, `fit`, `conclude`.

    Args:
        cfg: Configuration of the run.
        ranks: Ranks of the run.
        run: Run directory, claimed by this process.
        on_exit: Stack that closes the files that are opened here.
        deepspeed_config: DeepSpeed's JSON.
    """

    continue_advice = RESUME_ADVICE

    def __init__(
        self,
        cfg: Config,
        ranks: Ranks,
        run: RunDir,
        on_exit: contextlib.ExitStack,
        deepspeed_config: dict,
    ):
        super().__init__(cfg)
        self.ranks, self.run, self.on_exit = ranks, run, on_exit
        self.deepspeed_config = deepspeed_config
        self.start_time = time.perf_counter()
        self.writer = None  # opened on rank 0 by `resume`
        self.signals = on_exit.enter_context(StopSignals())
        self.tokens_per_step = cfg.tokens_per_step(ranks.world_size)
        profiled_updates = cfg.log.profile if ranks.is_main else None
        self.profile = Profile(profiled_updates, run.profile)
        on_exit.callback(self.profile.close)
        say(f"run      {run} ({ranks.world_size} process{'es' * (ranks.world_size > 1)})")
        manifest = training_manifest(cfg, ranks.world_size)
        self.checkpoints = Checkpoints(run.checkpoints, ranks, cfg.checkpoint, manifest)
        on_exit.callback(self.checkpoints.close)
        # Folder and manifest of the checkpoint from which this run continues, or None.
        self.checkpoint = ranks.run_on_main(resume_checkpoint, cfg.resume, run.checkpoints)
        data = open_run_data(cfg, ranks, run, self.checkpoint, self.signals)
        self.checkpoints.manifest |= data.fingerprint
        self.tokenizer, self.batches, self.held_out = data.tokenizer, data.batches, data.held_out
        self.curriculum = Curriculum(cfg.data, self.batches)
        self._build_model()

    def _build_model(self) -> None:
        """Build model, engine and validation, with the weights of `self.checkpoint`, if any."""
        cfg, ranks, tokenizer = self.cfg, self.ranks, self.tokenizer
        self.vocab_size = model_vocab_size(cfg, len(tokenizer))
        self.model = build_model(
            cfg, self.vocab_size, tokenizer.eos_token_id, tokenizer.pad_token_id
        )
        # Counted before ZeRO-3 partitions the parameters.
        self.parameter_count = sum(p.numel() for p in self.model.parameters())
        if self.checkpoint is None:
            init_from.initialize(cfg, self.model, tokenizer, ranks, self.run)
            self.engine = Engine(cfg, self.model, ranks, self.deepspeed_config)
        else:
            self.engine = restore_engine(
                *self.checkpoint, cfg, self.model, ranks, self.deepspeed_config
            )
        self.recorder = Recorder(cfg, ranks, self.engine, self.model)
        self.validation = Validation(
            cfg,
            ranks,
            self.held_out,
            self.batches.shares,
            self.recorder.failure_watch if self.recorder.has_solver else None,
            tokenizer,
        )

    def resume(self) -> None:
        """Restore the checkpoint that `resume` names, if any, and open the log.

        Raises:
            CheckpointError, DataError: If the checkpoint cannot be used.
        """
        if self.checkpoint is not None:
            path, manifest = self.checkpoint
            check_batch(path, manifest, self.checkpoints.manifest)
            self._restore(path, manifest)
            if self.step > self.cfg.train.steps:
                raise CheckpointError(
                    f"{path} has {self.step} updates, and train.steps is only"
                    f" {self.cfg.train.steps}: raise it, or train from scratch with --overwrite"
                )
            if self.cfg.resume != "auto":
                self.ranks.run_on_main(delete_later_checkpoints, self.run.checkpoints, self.step)
            say(f"resumed  {path} at update {self.step}")
        self.ranks.run_on_main(self.run.save_config, self.cfg)
        if self.ranks.is_main:
            if self.step < self.cfg.train.steps:
                self.run.result.unlink(missing_ok=True)  # result of fewer updates
            self.writer = MetricsWriter(self.cfg, self.run, resumed_at=self.step)
            self.on_exit.callback(self.writer.close)

    def _restore(self, path: Path, manifest: dict) -> None:
        """Restore the state of a checkpoint except weights and optimizer."""
        state = restore_rank_state(path, manifest, self.ranks, self.cfg.seed)
        self.step = manifest["step"]
        self.batches.load_state_dict(state["loader"])
        self.seconds = state["seconds"]
        self.recorder.throughput.spent = state["spent"]
        self.rollbacks = state["rollbacks"]
        self.checkpoints.last_complete_step = self.step

    def log_setup(self) -> None:
        """Print device, model and optimizer, and write environment.json and deepspeed.json."""
        cfg, env = self.cfg, environment(self.ranks, self.model)
        if self.ranks.is_main:
            write_json(self.run.deepspeed, self.engine.deepspeed_config)
            write_json(self.run.environment, env)
        say(f"device   {env['device']}; kernels: {env['kernels']}")
        size = f"{self.parameter_count / 1e6:.2f} M parameters"
        say(f"model    {cfg.model.name}, {size}, {self.vocab_size} tokens")
        for line in describe_optimizer(self.model, cfg.optim):
            say(f"optim    {line}")
        zero_stage, tokens = self.engine.zero_stage, self.tokens_per_step
        say(f"training {cfg.train.steps} updates of {tokens} tokens, ZeRO-{zero_stage}")

    def fit(self) -> None:
        """Make the remaining updates, with records, probes, validations and checkpoints when due.

        Raises:
            Diverged, Stopped, LeaseError, CheckpointError, OutputError: As `train`.
        """
        steps = self.cfg.train.steps
        if self.is_finished:
            say(
                f"complete already: {self.step} of {steps} updates; --overwrite trains from scratch"
            )
            return
        watchdog = Watchdog(self.cfg.engine.timeout_s, self.run.stacks, self.ranks.rank)
        self.keep_alive = watchdog.alive
        self.start_time = time.perf_counter()
        self.recorder.throughput.skip()
        self.progress_bar = Progress("training", steps, "updates", PIPE_INTERVAL_S)
        with watchdog:
            self._catch_up()
            self.run_updates()
        self.seconds += time.perf_counter() - self.start_time

    def _catch_up(self) -> None:
        """Stop if a signal has arrived; make a validation that the previous process has missed."""
        (stop_count,) = self.ranks.sum(self.signals.is_stop_requested)
        if stop_count:
            self.stop()
        is_due = self.step > 0 and self._is_validation_due
        # A checkpoint is saved before the validation of the same update.
        if is_due and not self.ranks.run_on_main(self._has_validation):
            self._validate()

    def _has_validation(self) -> bool:
        """Return whether metrics.jsonl has a validation after the last update."""
        return any(
            record is not None and record["step"] == self.step and "validation" in record
            for record in iter_metrics(self.run.path)
        )

    def update(self) -> None:
        """Make one update of all ranks."""
        self.lr = self.engine.lr
        # Adversarial noise before the curriculum is learned would prevent learning it.
        is_learned = self.curriculum.stage is None
        has_adversarial_pass = self.cfg.train.adversarial_noise > 0 and is_learned
        micro_batches = self._next_micro_batches()
        self.last_update = self.engine.step(
            micro_batches,
            self.signals.is_stop_requested,
            self.keep_alive,
            has_adversarial_pass=has_adversarial_pass,
        )
        self.step += 1
        self.recorder.count(self.last_update, passes=2 if has_adversarial_pass else 1)
        self.is_stop_requested = self.last_update.is_stop_requested

    def _next_micro_batches(self) -> list:
        """Return the next update's micro-batches.

        A stream may wait for its hub for minutes. A stop signal ends the wait on every rank, and
        the micro-batches of this update are drawn again when the run continues.
        """
        from lm.data.batches.stream import StreamLoader

        stream = self.batches if isinstance(self.batches, StreamLoader) else None
        position = stream.mark() if stream else None
        micro_batches, error, is_stopped = [], None, False
        try:
            with (
                self.engine.times.measure("data"),
                self.signals.interruptible() if stream else contextlib.nullcontext(),
            ):
                for _ in range(self.cfg.train.accumulation(self.ranks.world_size)):
                    micro_batches.append(next(self.batches))
                    self.keep_alive()
        except UserError as e:
            error = e
        except StopRequested:
            is_stopped = True
        failure_count, stop_count = self.ranks.sum(error is not None, is_stopped)
        if failure_count:
            self.ranks.raise_first_error(error)
        if stop_count and stream and position:  # a signal interrupts only streams
            stream.go_back(position)
            self.stop()
        return micro_batches

    def roll_back(self) -> bool:
        """Restore weights and optimizer from the newest usable checkpoint; see `Loop`."""
        checkpoint = self.ranks.run_on_main(
            rollback_checkpoint, self.run.checkpoints, self.rollback_step
        )
        if checkpoint is None:
            return False
        data_state, seconds = self.batches.state_dict(), self.seconds
        self.engine.release()  # also frees the gradients, which may be NaN
        self.checkpoint = checkpoint
        self._build_model()
        self._restore(*self.checkpoint)
        # Restore the stages of a mixture, too. A stage that ended after the checkpoint continues,
        # because the restored weights have not learned it yet. Skipped data must not shorten it.
        data_state = skip_data(self.batches.state_dict(), data_state)
        self.batches.load_state_dict(data_state)
        self.seconds = seconds
        self.recorder.throughput.skip()
        return True

    def check_finite(self) -> None:
        """Check weights and moments on every rank.

        Raises:
            Diverged: On every rank, if NaN or infinity is found on one.
        """
        problem = describe_nonfinite(self.engine.collect_tensors())
        self.ranks.raise_first_error(Diverged(problem) if problem else None)

    def state_files(self) -> dict:
        """Return {file name: state} of the files that this rank adds to a checkpoint."""
        state = {
            "loader": self.batches.state_dict(),
            "seconds": self.seconds + time.perf_counter() - self.start_time,
            "spent": dict(self.recorder.throughput.spent),
            "rollbacks": self.rollbacks,
            **random_state(),
        }
        files = self.engine.state_files(self.run.checkpoints, self.step)
        return {**files, rank_file(self.ranks.rank): state}

    def conclude(self) -> None:
        """Make the last validation and write result.json, unless that has been done."""
        if not self.ranks.run_on_main(self._has_result):
            record = self.validation.measure(self.engine, self.step, lambda: None)
            if self.ranks.is_main:
                record |= self.validation.ngrams(self.run, self.vocab_size)
            self.write(record)
            self.ranks.run_on_main(self._write_result, record)
        self.engine.close()

    def _has_result(self) -> bool:
        """Return whether result.json is readable and has the number of updates of this run."""
        if not self.run.is_finished:
            return False
        try:
            result = self.run.read_result(("updates", "validation"))
        except DamagedError as e:
            say(f"note: {e}: it is written again")
            return False
        return result["updates"] == self.cfg.train.steps

    def _write_result(self, validation_record: dict) -> None:
        """Write result.json with a record of `Validation.measure`."""
        steps = self.cfg.train.steps
        tokens = steps * self.tokens_per_step
        result = {
            "updates": steps,
            "tokens": tokens,
            "training_seconds": round(self.seconds, 1),
            "tokens_per_s": round(tokens / max(self.seconds, 1e-9), 1),
            "parameters": self.parameter_count,
            "vocab_size": self.vocab_size,
            **self.batches.source_metrics(),
            **{key: value for key, value in validation_record.items() if key != "step"},
        }
        write_json(self.run.result, result)
