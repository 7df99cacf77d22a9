"""The training run of a language model: data, model, engine, resuming, updates, validation."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lm.common.console import Progress, say
from lm.common.errors import ConfigError, Diverged, Stopped, UserError
from lm.common.files import DamagedError, write_json
from lm.common.ranks import Ranks, as_lost_peer_error
from lm.common.signals import StopRequested, StopSignals
from lm.common.watchdog import Watchdog
from lm.config.schema import Config
from lm.runs.checkpoint import (
    CheckpointError,
    Checkpoints,
    delete_later_checkpoints,
    describe_nonfinite,
    read_state,
    resume_checkpoint,
    rollback_checkpoint,
)
from lm.runs.log import MetricsWriter, describe_record, iterations_suffix, probe_iterations
from lm.runs.metrics import is_due, iter_metrics
from lm.runs.profile import Profile
from lm.runs.run_dir import RunDir
from lm.training import init_from
from lm.training.build import build_model, model_vocab_size
from lm.training.curriculum import Curriculum
from lm.training.engine import Engine, Update
from lm.training.loop import Loop
from lm.training.optim import describe_optimizer, optimizer_order, optimizer_signature
from lm.training.preflight import check, check_same_kernels, environment
from lm.training.process_group import join_process_group, leave_process_group
from lm.training.recorder import Recorder
from lm.training.reshard import gather_checkpoint
from lm.training.resume import (
    check_batch,
    check_fingerprint,
    check_optimizer,
    check_tokenizer,
    identity,
    run_fingerprint,
)
from lm.training.validation import Validation

RANK_FILE = "loader-rank{:04d}.pt"  # state of a rank in a checkpoint, next to DeepSpeed's files
QUIET_S = 60.0  # seconds between progress lines on a pipe while no record is due


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
    """
    ranks = join_process_group(cfg)
    say.enabled = ranks.is_main
    run = RunDir(cfg.run_dir)
    with contextlib.ExitStack() as on_exit:  # closes logs and checkpoints also after an error
        on_exit.callback(leave_process_group)
        on_exit.callback(run.release)
        model, settings = check(cfg, ranks.world_size)
        check_same_kernels(ranks, model)
        ranks.run_on_main(run.claim, cfg, overwrite, say)
        try:
            training = Training(cfg, ranks, run, on_exit, settings)
            training.resume()
            training.introduce()
            training.fit()
            training.conclude()
        except Exception as e:
            is_too_large = isinstance(e, torch.OutOfMemoryError)
            error = (
                _make_out_of_memory_error(cfg, run) if is_too_large else as_lost_peer_error(e) or e
            )
            run.record_failure(error, ranks.is_main)
            if error is e:
                raise
            raise error from e
    say(f"next     fprnn report {run}, or fprnn export {run} {run}/hf")
    return run.path


def _make_out_of_memory_error(cfg: Config, run: RunDir) -> ConfigError:
    """Return the error for a micro-batch that does not fit in the GPU's memory."""
    memory = ""
    if torch.cuda.is_available():
        memory = f" {torch.cuda.get_device_properties(0).total_memory / 2**30:.1f} GiB"
    return ConfigError(
        f"train.micro_batch_size={cfg.train.micro_batch_size} does not fit in this GPU's{memory}:"
        f" `fprnn plan {run.config}` lists sizes that fit; model.gradient_checkpointing=true needs"
        " less memory, too"
    )


class Training(Loop):
    """A training run on one rank: `resume`, `introduce`, `fit`, `conclude`, on all ranks alike.

    Args:
        cfg: Configuration of the run.
        ranks: Ranks of the run.
        run: Run directory, claimed by this process.
        on_exit: Stack that closes the files that are opened here.
        settings: DeepSpeed's JSON.
    """

    continue_advice = "continue with resume=auto"

    def __init__(
        self,
        cfg: Config,
        ranks: Ranks,
        run: RunDir,
        on_exit: contextlib.ExitStack,
        settings: dict,
    ):
        super().__init__(cfg)
        self.ranks, self.run, self.on_exit, self.settings = ranks, run, on_exit, settings
        self.start_time = time.perf_counter()
        self.writer = None  # opened on rank 0 by `resume`
        self.signals = on_exit.enter_context(StopSignals())
        self.tokens_per_step = cfg.tokens_per_step(ranks.world_size)
        profiled_updates = cfg.log.profile if ranks.is_main else None
        self.profile = Profile(profiled_updates, run.profile, say)
        on_exit.callback(self.profile.close)
        say(f"run      {run} ({ranks.world_size} process{'es' * (ranks.world_size > 1)})")
        manifest = identity(cfg, ranks.world_size)
        self.checkpoints = Checkpoints(run.checkpoints, ranks, cfg.checkpoint, manifest)
        on_exit.callback(self.checkpoints.close)
        self.update_hooks = (
            self._record_if_due,
            self._probe_if_due,
            self._end_stage_if_learned,
            self._save_if_due,
            self._validate_if_due,
        )
        self.checkpoint = ranks.run_on_main(resume_checkpoint, cfg.resume, run.checkpoints, say)
        self._open_data()
        self._build_model()

    def _open_data(self) -> None:
        """Load the tokenizer, prepare the corpora, and open this rank's batches.

        Rank 0 tokenises and the other ranks open its files. On a node that does not see these files
        one rank tokenises again, into the node's own cache.
        """
        from lm.data.batches import loader
        from lm.data.corpus import corpora
        from lm.data.corpus.tokenizer import load_tokenizer
        from lm.data.sources import mixture

        cfg, ranks, folder = self.cfg, self.ranks, self.run.path
        say(f"data     {mixture.describe_data(cfg.data)}; tokenizer {cfg.tokenizer.name}")
        ranks.run_on_main(self._run_interruptibly, load_tokenizer, cfg, folder)
        ranks.run_on_main(self._check_fingerprint)
        self.tokenizer = load_tokenizer(cfg, folder)
        bar = Progress("tokenised", unit="documents")
        progress = lambda documents, _: bar.update(documents)  # noqa: E731
        prepare = corpora.prepare_sources
        ranks.run_on_main(self._run_interruptibly, prepare, cfg, self.tokenizer, folder, progress)
        ranks.run_on_main(self._check_fingerprint)  # again, because the corpora may be new
        self.checkpoints.manifest |= ranks.run_on_main(run_fingerprint, cfg, self.run)
        ranks.run_on_all(corpora.ensure_sources_on_node, cfg, self.tokenizer, folder)
        self.batches, self.held_out = loader.build(
            cfg, self.tokenizer, folder, ranks.rank, ranks.world_size
        )
        self.curriculum = Curriculum(cfg.data, self.batches)

    def _run_interruptibly(self, prepare: Callable, *args) -> None:
        """Call a function that may read, or wait for a hub, for hours.

        Raises:
            Stopped: If a stop signal ended it.
        """
        try:
            with self.signals.interruptible():
                prepare(*args)
        except StopRequested:
            raise Stopped(
                f"stopped by a signal before the first update: {self.continue_advice}"
            ) from None

    def _check_fingerprint(self) -> None:
        """Refuse a run whose tokenizer, corpora or config differ from its checkpoint's.

        A checkpoint of another run only needs to have the same tokenizer.

        Raises:
            RunDirError: If they differ.
        """
        if self.checkpoint is None:
            return
        path, manifest = self.checkpoint
        if path.resolve().parent == self.run.checkpoints.resolve():
            check_fingerprint(path, manifest, self.run, self.cfg)
        else:
            check_tokenizer(path, manifest, self.run)

    def check_finite(self) -> None:
        """Check weights and moments on every rank.

        Raises:
            Diverged: On every rank, if NaN or infinity is found on one.
        """
        problem = describe_nonfinite(self.engine.collect_tensors())
        self.ranks.raise_first_error(Diverged(problem) if problem else None)

    def _build_model(self) -> None:
        """Build model, engine and validation, with the state of `self.checkpoint`, if any."""
        cfg, tokenizer = self.cfg, self.tokenizer
        self.vocab_size = model_vocab_size(cfg, len(tokenizer))
        self.model = build_model(
            cfg, self.vocab_size, tokenizer.eos_token_id, tokenizer.pad_token_id
        )
        # Counted before ZeRO-3 partitions the parameters.
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.engine = self._build_engine()
        self.recorder = Recorder(cfg, self.ranks, self.engine, self.model)
        self.validation = Validation(
            cfg,
            self.ranks,
            self.held_out,
            self.batches.shares,
            self.recorder.watch if self.recorder.has_solver else None,
            tokenizer,
        )

    def _build_engine(self) -> Engine:
        """Build the engine, with weights and optimizer of the checkpoint to resume, if any."""
        cfg, ranks = self.cfg, self.ranks
        if self.checkpoint is None:
            init_from.initialize(cfg, self.model, self.tokenizer, ranks, self.run)
            return Engine(cfg, self.model, ranks, self.settings)
        path, manifest = self.checkpoint
        check_optimizer(path, manifest, optimizer_signature(cfg.optim))
        if self._has_same_layout(manifest):
            engine = Engine(cfg, self.model, ranks, self.settings)
            engine.load(path)
            return engine
        layout = f"{manifest['world_size']} ranks under ZeRO-{manifest['zero_stage']}"
        say(f"note: {path} was written by {layout}: weights and optimizer are distributed again")
        state = gather_checkpoint(path, manifest, optimizer_order(self.model, cfg.optim))
        self.model.load_state_dict(state.weights)
        engine = Engine(cfg, self.model, ranks, self.settings)
        engine.restore_optimizer(state.moments, manifest["step"], state.adamw_steps)
        return engine

    def _has_same_layout(self, manifest: dict) -> bool:
        """Return whether a checkpoint is distributed over ranks as this run is."""
        current = self.checkpoints.manifest
        return all(manifest[key] == current[key] for key in ("world_size", "zero_stage"))

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
        """Restore the state of a checkpoint other than weights and optimizer."""
        from lm.data.batches.loader import merge_states

        self.step = manifest["step"]
        if manifest["world_size"] == self.ranks.world_size:
            state = read_state(path / self._rank_file)
            torch.set_rng_state(state["rng"])
            if "cuda_rng" in state and torch.cuda.is_available():
                torch.cuda.set_rng_state(state["cuda_rng"])
        else:
            ranks = range(manifest["world_size"])
            states = [read_state(path / RANK_FILE.format(rank)) for rank in ranks]
            state = states[0] | {"loader": merge_states([s["loader"] for s in states])}
            seed = self.cfg.seed + self.step * 1_000_003 + self.ranks.rank
            torch.manual_seed(seed % 2**64)
        self.batches.load_state_dict(state["loader"])
        self.seconds = state["seconds"]
        self.recorder.throughput.spent = state["spent"]
        self.rollbacks = state["rollbacks"]
        self.checkpoints.last_complete_step = self.step

    @property
    def _rank_file(self) -> str:
        return RANK_FILE.format(self.ranks.rank)

    def state_files(self) -> dict:
        """Return {file name: state} of the files that this rank adds to a checkpoint."""
        state = {
            "loader": self.batches.state_dict(),
            "seconds": self.seconds + time.perf_counter() - self.start_time,
            "spent": dict(self.recorder.throughput.spent),
            "rollbacks": self.rollbacks,
            "rng": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            state["cuda_rng"] = torch.cuda.get_rng_state()
        files = self.engine.state_files(self.run.checkpoints, self.step)
        return {**files, self._rank_file: state}

    def introduce(self) -> None:
        """Print device, model and training, and write environment.json and deepspeed.json."""
        cfg, env = self.cfg, environment(self.ranks, self.model)
        if self.ranks.is_main:
            write_json(self.run.deepspeed, self.engine.config)
            write_json(self.run.environment, env)
        say(f"device   {env['device']}; kernels: {env['kernels']}")
        size = f"{self.parameters / 1e6:.2f} M parameters"
        say(f"model    {cfg.model.name}, {size}, {self.vocab_size} tokens")
        for line in describe_optimizer(self.model, cfg.optim):
            say(f"optim    {line}")
        stage = self.engine.zero_stage
        tokens = self.tokens_per_step
        say(f"training {cfg.train.steps} updates of {tokens} tokens, ZeRO-{stage}")

    def fit(self) -> None:
        """Make the remaining updates, with records, probes, validations and checkpoints when due.

        Raises:
            Diverged, Stopped, LeaseError, CheckpointError, OutputError: As `train`.
        """
        steps = self.cfg.train.steps
        if self.is_last:
            say(
                f"complete already: {self.step} of {steps} updates; --overwrite trains from scratch"
            )
            return
        watchdog = Watchdog(self.cfg.engine.timeout_s, self.run.stacks, self.ranks.rank)
        self.alive = watchdog.alive
        self.start_time = time.perf_counter()
        self.recorder.throughput.skip()
        self.bar = Progress("training", steps, "updates", QUIET_S)
        with watchdog:
            self._catch_up()
            self.run_updates()
        self.seconds += time.perf_counter() - self.start_time

    def _catch_up(self) -> None:
        """Stop if a signal has arrived; make a validation that a stop or kill has prevented.

        Raises:
            Stopped: If a signal arrived before the first update.
        """
        (stop_count,) = self.ranks.sum(self.signals.is_stop_requested)
        if stop_count:
            self.stop()
        is_validation_due = self.step and self.step % self.cfg.eval.every == 0
        if is_validation_due and not self.ranks.run_on_main(self._has_validation):
            self._validate()

    def _has_validation(self) -> bool:
        """Return whether metrics.jsonl has a validation after this update."""
        return any(
            record is not None and record["step"] == self.step and "validation" in record
            for record in iter_metrics(self.run.path)
        )

    def _next_micro_batches(self) -> list:
        """Return the next update's micro-batches.

        A stream may wait for its hub for minutes. A stop signal ends the wait on every rank, and
        the micro-batches of this update are drawn again when the run continues.

        Raises:
            DataError: On every rank, if one cannot read.
            Stopped: If a signal ended the wait.
        """
        from lm.data.batches.stream import StreamLoader

        stream = self.batches if isinstance(self.batches, StreamLoader) else None
        mark = stream.mark() if stream else None
        micro_batches, error, is_stopped = [], None, False
        try:
            with (
                self.engine.times.measure("data"),
                self.signals.interruptible() if stream else contextlib.nullcontext(),
            ):
                for _ in range(self.cfg.train.accumulation(self.ranks.world_size)):
                    micro_batches.append(next(self.batches))
                    self.alive()
        except UserError as e:
            error = e
        except StopRequested:
            is_stopped = True
        failures, stops = self.ranks.sum(error is not None, is_stopped)
        if failures:
            self.ranks.raise_first_error(error)
        if stops and stream and mark:
            stream.go_back(mark)
            self.stop()
        return micro_batches

    def update(self) -> None:
        """Make one update of all ranks."""
        self.lr = self.engine.lr
        # Adversarial noise before the curriculum is learned would prevent learning it.
        has_adversary = self.cfg.train.adversarial_noise > 0 and self.curriculum.stage is None
        micro_batches = self._next_micro_batches()
        self.last_update: Update = self.engine.step(
            micro_batches,
            self.signals.is_stop_requested,
            self.alive,
            adversarial_pass=has_adversary,
        )
        self.step += 1
        self.recorder.count(self.last_update, passes=1 + has_adversary)
        self.stopping = self.last_update.stopping

    def roll_back(self) -> bool:
        """Restore weights and optimizer from the newest usable checkpoint; see `Loop`."""
        checkpoint = self.ranks.run_on_main(
            rollback_checkpoint, self.run.checkpoints, self.rollback_step, say
        )
        if checkpoint is None:
            return False
        data_state, seconds = self.batches.state_dict(), self.seconds
        self.engine.release()  # also frees the gradients, which may be NaN
        self.checkpoint = checkpoint
        self._build_model()
        self._restore(*self.checkpoint)
        restored = self.batches.state_dict()
        if "ends" in restored:  # the stages that the restored weights have learned
            data_state["ends"] = restored["ends"]
        self.batches.load_state_dict(data_state)
        self.seconds = seconds
        self.recorder.throughput.skip()
        return True

    def _record_if_due(self) -> None:
        """Write a record every `log.every` updates and after the last."""
        if self.step % self.cfg.log.every and not self.is_last:
            self.bar.update(self.step, self.cfg.train.steps)
            return
        record = self.recorder.make_record(self.step, self.last_update, self.lr)
        record |= self.batches.source_metrics()
        record["peak_memory_bytes"] = self.recorder.peak_memory()
        self.write(record)
        self.log_saves()
        self.bar.update(self.step, self.cfg.train.steps, describe_record(record, self.num_iters))
        self.recorder.throughput.skip()

    def _probe_if_due(self) -> None:
        """Count ℓ* every `log.probe_every` updates, unless a validation counts it."""
        validates = self.step % self.cfg.eval.every == 0 or self.is_last
        is_probe_due = is_due(self.step, self.cfg.log.probe_every)
        if not self.recorder.has_solver or validates or not is_probe_due:
            return
        record = {"step": self.step, **self.validation.probe_solver(self.engine)}
        self.write(record)
        say(f"update {self.step:>6}{iterations_suffix(record)}")
        self.num_iters = probe_iterations(record)
        self.recorder.throughput.skip()

    def _end_stage_if_learned(self) -> None:
        """End a stage of the curriculum that is learned.

        Called before the checkpoint is saved, so that the checkpoint holds the new stage.
        """
        sources = self.curriculum.sources_to_check(self.step)
        if not sources:
            return
        self.check_finite()
        probability = self.validation.answer_probability(self.engine, sources, self.alive)
        self.write(self.curriculum.end_if_learned(self.step, probability))
        self.recorder.throughput.skip()

    def _save_if_due(self) -> None:
        if self.save_if_due():
            self.recorder.throughput.skip()

    def _validate_if_due(self) -> None:
        if self.step % self.cfg.eval.every == 0 and not self.is_last:
            self._validate()

    def _validate(self) -> None:
        record = self.validation.measure(self.engine, self.step, self.alive)
        self.num_iters = probe_iterations(record)
        self.write(record)
        self.recorder.throughput.skip()

    def conclude(self) -> None:
        """Make the last validation and write result.json, unless that has been done."""
        steps = self.cfg.train.steps
        if not self.ranks.run_on_main(lambda: self._has_result(steps)):
            final = self.validation.measure(self.engine, self.step, lambda: None)
            if self.ranks.is_main:
                final |= self.validation.ngrams(self.run, self.vocab_size)
            self.write(final)
            tokens = steps * self.tokens_per_step
            result = {
                "updates": steps,
                "tokens": tokens,
                "training_seconds": round(self.seconds, 1),
                "tokens_per_s": round(tokens / max(self.seconds, 1e-9), 1),
                "parameters": self.parameters,
                "vocab_size": self.vocab_size,
                **self.batches.source_metrics(),
                **{k: v for k, v in final.items() if k != "step"},
            }
            self.ranks.run_on_main(write_json, self.run.result, result)
        self.engine.close()

    def _has_result(self, steps: int) -> bool:
        """Return whether result.json is readable, and has this number of updates."""
        try:
            return (
                self.run.is_finished
                and self.run.read_result(("updates", "validation"))["updates"] == steps
            )
        except DamagedError as e:
            say(f"note: {e}: it is written again")
            return False
