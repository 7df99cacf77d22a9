"""The training run, top to bottom: data, model, engine, resume, steps, validation, checkpoints."""

from __future__ import annotations

import contextlib
import math
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
    drop_after,
    not_finite,
    read_state,
    to_go_back_to,
    to_resume,
)
from lm.runs.log import Writer, describe, iterations, probed
from lm.runs.metrics import (
    FailureWatch,
    Throughput,
    affine,
    fixed_point_metrics,
    imbalance,
    is_due,
    iter_metrics,
    mean,
    peak_memory,
)
from lm.runs.profile import Profile
from lm.runs.run_dir import RunDir
from lm.training import engine as ds
from lm.training import init_from
from lm.training.build import build_model, vocabulary
from lm.training.curriculum import Curriculum
from lm.training.loop import Loop
from lm.training.optim import described, optimizer_order, signature
from lm.training.preflight import check, check_same_kernels, environment
from lm.training.reshard import gathered
from lm.training.resume import (
    check_batch,
    check_made_of,
    check_optimizer,
    check_tokenizer,
    identity,
    made_of,
)
from lm.training.validation import Validation

RANK_FILE = "loader-rank{:04d}.pt"  # what a rank keeps in a checkpoint besides DeepSpeed's files
QUIET_S = 60.0  # seconds between lines on a pipe while no record is due


def train(cfg: Config, overwrite: bool = False) -> Path:
    """Train (or continue) the run that `cfg` describes, and return its run directory.

    Raises:
        ConfigError, DataError, RunDirError, LeaseError, CheckpointError, SourceError: something
            asked for cannot be had. OutputError, CheckpointError: something cannot be written.
        Diverged: the loss or gradient became NaN or infinite, more often than
            `train.max_rollbacks`; the last checkpoint stands. Stopped: a signal asked for a stop.
    """
    ranks = ds.start(cfg)
    say.enabled = ranks.is_main
    run = RunDir(cfg.run_dir)
    with contextlib.ExitStack() as on_exit:  # also on an error: what was logged is written out
        on_exit.callback(ds.stop)
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
            error = _too_large(cfg, run) if is_too_large else as_lost_peer_error(e) or e
            run.write_failure(error, ranks.is_main)
            if error is e:
                raise
            raise error from e
    say(f"next     fprnn report {run}, or fprnn export {run} {run}/hf")
    return run.path


def _too_large(cfg: Config, run: RunDir) -> ConfigError:
    """What to say where the GPU's memory does not hold a micro-batch."""
    size = cfg.train.micro_batch_size
    held = ""
    if torch.cuda.is_available():
        held = f" {torch.cuda.get_device_properties(0).total_memory / 2**30:.1f} GiB"
    return ConfigError(
        f"train.micro_batch_size={size} does not fit in this GPU's{held}: `fprnn plan"
        f" {run.config}` names what fits; model.gradient_checkpointing=true needs less, too"
    )


class Training(Loop):
    """A run under way: `resume`, `fit`, `conclude`, on every rank alike.

    Args:
        on_exit: of what is open while it trains. settings: DeepSpeed's JSON.
    """

    how_to_go_on = "continue with resume=auto"

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
        self.began = time.perf_counter()
        self.writer = None  # opened on rank 0
        self.signals = on_exit.enter_context(StopSignals())
        self.stats: list = []  # reports of the solver since the last record
        self.tokens_per_step = cfg.tokens_per_step(ranks.world_size)
        profiled = cfg.log.profile if ranks.is_main else None
        self.profile = Profile(profiled, run.profile, say)
        on_exit.callback(self.profile.close)
        say(f"run      {run} ({ranks.world_size} process{'es' * (ranks.world_size > 1)})")
        about = identity(cfg, ranks.world_size)
        self.checkpoints = Checkpoints(run.checkpoints, ranks, cfg.checkpoint, about)
        on_exit.callback(self.checkpoints.close)
        self.after_update = (
            self._record_if_due,
            self._probe_if_due,
            self._end_stage_if_learned,
            self._save_if_due,
            self._validate_if_due,
        )
        self.checkpoint = ranks.run_on_main(to_resume, cfg.resume, run.checkpoints, say)
        self._open_data()
        self._build_model()

    def _open_data(self) -> None:
        """Rank 0 tokenises, the others open what it wrote; on a node that does not see it, in a
        cache of its own, one of them does so again."""
        from lm.data.batches import loader
        from lm.data.corpus import corpora
        from lm.data.corpus.tokenizer import load_tokenizer
        from lm.data.sources import mixture

        cfg, ranks, folder = self.cfg, self.ranks, self.run.path
        say(f"data     {mixture.describe_data(cfg.data)}; tokenizer {cfg.tokenizer.name}")
        ranks.run_on_main(self._stoppable, load_tokenizer, cfg, folder)
        ranks.run_on_main(self._check_made_of)
        self.tokenizer = load_tokenizer(cfg, folder)
        bar = Progress("tokenised", unit="documents")
        progress = lambda documents, _: bar.update(documents)  # noqa: E731
        prepare = corpora.prepare_sources
        ranks.run_on_main(self._stoppable, prepare, cfg, self.tokenizer, folder, progress)
        ranks.run_on_main(self._check_made_of)  # the corpora may be new
        self.checkpoints.about |= ranks.run_on_main(made_of, cfg, self.run)
        ranks.run_on_all(corpora.ensure_sources_on_node, cfg, self.tokenizer, folder)
        built = loader.build(cfg, self.tokenizer, folder, ranks.rank, ranks.world_size)
        self.batches, self.held_out = built
        self.curriculum = Curriculum(cfg.data, self.batches)

    def _stoppable(self, prepare: Callable, *args) -> None:
        """Call a function that may read, or wait for a hub, for hours.

        Raises:
            Stopped: If a stop signal ended it.
        """
        try:
            with self.signals.interruptible():
                prepare(*args)
        except StopRequested:
            raise Stopped(
                f"stopped by a signal before the first update: {self.how_to_go_on}"
            ) from None

    def _check_made_of(self) -> None:
        """Raises RunDirError where the run is no longer what the checkpoint to go on from is made
        of; one of another run need only have this one's tokenizer."""
        if self.checkpoint is None:
            return
        path, manifest = self.checkpoint
        if path.resolve().parent == self.run.checkpoints.resolve():
            check_made_of(path, manifest, self.run, self.cfg)
        else:
            check_tokenizer(path, manifest, self.run)

    def check_finite(self) -> None:
        """Raises Diverged, on every rank, where the weights or moments of one are not finite."""
        what = not_finite(self.engine.held())
        self.ranks.raise_first_error(Diverged(what) if what else None)

    def _build_model(self) -> None:
        cfg, tokenizer = self.cfg, self.tokenizer
        self.vocab_size = vocabulary(cfg, len(tokenizer))
        self.model = build_model(
            cfg, self.vocab_size, tokenizer.eos_token_id, tokenizer.pad_token_id
        )
        # ZeRO-3 leaves none to count.
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.solves = cfg.model.has_fixed_point
        flops = affine(getattr(self.model, "flops_per_token", None), cfg.data.seq_len)
        self.engine = self._engine()
        self.speed = Throughput(flops, self.ranks.world_size)
        self.watch = FailureWatch(say, self.model.solver() if self.solves else "none")
        watch = self.watch if self.solves else None
        self.validation = Validation(
            cfg, self.ranks, self.held_out, self.batches.shares, watch, tokenizer
        )

    def _engine(self) -> ds.Engine:
        """With the weights and the optimizer of the checkpoint that is resumed, where there is
        one."""
        cfg, ranks = self.cfg, self.ranks
        if self.checkpoint is None:
            init_from.initialize(cfg, self.model, self.tokenizer, ranks, self.run)
            return ds.Engine(cfg, self.model, ranks, self.settings)
        path, manifest = self.checkpoint
        check_optimizer(path, manifest, signature(cfg.optim))
        if self._fits(manifest):
            engine = ds.Engine(cfg, self.model, ranks, self.settings)
            engine.load(path)
            return engine
        was = f"{manifest['world_size']} ranks under ZeRO-{manifest['zero_stage']}"
        say(f"note: {path} was written by {was}: weights and optimizer are laid out anew")
        whole = gathered(path, manifest, optimizer_order(self.model, cfg.optim))
        self.model.load_state_dict(whole.weights)
        engine = ds.Engine(cfg, self.model, ranks, self.settings)
        engine.go_on(whole.moments, manifest["step"], whole.adamw_steps)
        return engine

    def _fits(self, manifest: dict) -> bool:
        """Whether a checkpoint is laid out over ranks as this run is."""
        about = self.checkpoints.about
        return all(manifest[key] == about[key] for key in ("world_size", "zero_stage"))

    def resume(self) -> None:
        """Go on where `resume:` says, and open the log there.

        Raises:
            CheckpointError, DataError: the checkpoint cannot be used.
        """
        folder = self.run.checkpoints
        if self.checkpoint is not None:
            path, manifest = self.checkpoint
            check_batch(path, manifest, self.checkpoints.about)
            self._restore(path, manifest)
            if self.step > self.cfg.train.steps:
                raise CheckpointError(
                    f"{path} has {self.step} updates, and train.steps is only"
                    f" {self.cfg.train.steps}: raise it, or train anew with --overwrite"
                )
            if self.cfg.resume != "auto":
                self.ranks.run_on_main(drop_after, folder, self.step)
            say(f"resumed  {path} at update {self.step}")
        self.ranks.run_on_main(self.run.confirm, self.cfg)
        if self.ranks.is_main:
            if self.step < self.cfg.train.steps:
                self.run.result.unlink(missing_ok=True)  # what is there is of fewer updates
            self.writer = Writer(self.cfg, self.run, resumed_at=self.step)
            self.on_exit.callback(self.writer.close)

    def _restore(self, path: Path, manifest: dict) -> None:
        """Where a checkpoint stands, beside weights and optimizer."""
        from lm.data.batches.loader import merge_states

        self.step = manifest["step"]
        if manifest["world_size"] == self.ranks.world_size:
            state = read_state(path / self._own_file)
            torch.set_rng_state(state["rng"])
            if "cuda_rng" in state and torch.cuda.is_available():
                torch.cuda.set_rng_state(state["cuda_rng"])
        else:  # the ranks of then are not those of now
            of_all = range(manifest["world_size"])
            states = [read_state(path / RANK_FILE.format(rank)) for rank in of_all]
            state = states[0] | {"loader": merge_states([s["loader"] for s in states])}
            seed = self.cfg.seed + self.step * 1_000_003 + self.ranks.rank
            torch.manual_seed(seed % 2**64)
        self.batches.load_state_dict(state["loader"])
        self.seconds = state["seconds"]
        self.speed.spent = state["spent"]
        self.rollbacks = state["rollbacks"]
        self.checkpoints.published = self.step

    @property
    def _own_file(self) -> str:
        return RANK_FILE.format(self.ranks.rank)

    def state_files(self) -> dict:
        """What a checkpoint holds of this rank."""
        state = {
            "loader": self.batches.state_dict(),
            "seconds": self.seconds + time.perf_counter() - self.began,
            "spent": dict(self.speed.spent),
            "rollbacks": self.rollbacks,
            "rng": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            state["cuda_rng"] = torch.cuda.get_rng_state()
        files = self.engine.state_files(self.run.checkpoints, self.step)
        return {**files, self._own_file: state}

    def introduce(self) -> None:
        """Say, and write down, what trains on what."""
        cfg, env = self.cfg, environment(self.ranks, self.model)
        if self.ranks.is_main:
            write_json(self.run.deepspeed, self.engine.config)
            write_json(self.run.environment, env)
        say(f"device   {env['device']}; kernels: {env['kernels']}")
        size = f"{self.parameters / 1e6:.2f} M parameters"
        say(f"model    {cfg.model.name}, {size}, {self.vocab_size} tokens")
        for line in described(self.model, cfg.optim):
            say(f"optim    {line}")
        stage = self.engine.zero_stage
        tokens = self.tokens_per_step
        say(f"training {cfg.train.steps} updates of {tokens} tokens, ZeRO-{stage}")

    def fit(self) -> None:
        """The updates that are left, with records, probes, validations and checkpoints when due.

        Raises:
            Diverged, Stopped, LeaseError, CheckpointError, OutputError: as `train`.
        """
        steps = self.cfg.train.steps
        if self.is_last:
            say(f"complete already: {self.step} of {steps} updates; --overwrite trains anew")
            return
        watchdog = Watchdog(self.cfg.engine.timeout_s, self.run.stacks, self.ranks.rank)
        self.alive = watchdog.alive
        self.began = time.perf_counter()
        self.speed.skip()
        self.bar = Progress("training", steps, "updates", QUIET_S)
        with watchdog:
            self._catch_up()
            self.make_updates()
        self.seconds += time.perf_counter() - self.began

    def _catch_up(self) -> None:
        """What a stop or a kill has left undone.

        Raises:
            Stopped: a signal came before the first update.
        """
        (asked,) = self.ranks.sum(self.signals.is_stop_requested)
        if asked:
            self.stop()
        if (
            self.step
            and self.step % self.cfg.eval.every == 0
            and not self.ranks.run_on_main(
                lambda: any(
                    r is not None and r["step"] == self.step and "validation" in r
                    for r in iter_metrics(self.run.path)
                )
            )
        ):
            self._validate()

    def _micro_batches(self) -> list:
        """Return the next update's micro-batches.

        A stream may wait for its hub for minutes. A stop signal ends the wait on every rank, and
        what was drawn for this update is drawn again when the run continues.

        Raises:
            DataError: On every rank, if one cannot read. Stopped: If a signal ended the wait.
        """
        from lm.data.batches.stream import StreamLoader

        stream = self.batches if isinstance(self.batches, StreamLoader) else None
        mark = stream.mark() if stream else None
        micro, error, is_stopped = [], None, False
        try:
            with (
                self.engine.times.part("data"),
                self.signals.interruptible() if stream else contextlib.nullcontext(),
            ):
                for _ in range(self.cfg.train.accumulation(self.ranks.world_size)):
                    micro.append(next(self.batches))
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
        return micro

    def update(self) -> None:
        """One update of all ranks, from as many micro-batches as it takes."""
        self.lr = self.engine.lr
        cfg = self.cfg
        # An adversary of what is not yet learned would keep it from being learned.
        against = cfg.train.adversarial_noise > 0 and self.curriculum.stage is None
        micro = self._micro_batches()
        made = self.engine.step(micro, self.signals.is_stop_requested, self.alive, against=against)
        self.step += 1
        self.stats += made.stats
        self.speed.count(self.tokens_per_step, passes=1 + against)
        self.engine.times.end_update()
        self.made, self.stopping = made, made.stopping

    def go_back(self) -> bool:
        """Weights and optimizer from the newest checkpoint that can be used; see `Loop`."""
        checkpoint = self.ranks.run_on_main(
            to_go_back_to, self.run.checkpoints, self.went_back_to, say
        )
        if checkpoint is None:
            return False
        after, seconds = self.batches.state_dict(), self.seconds
        self.engine.release()  # with the gradients that are spoilt
        self.checkpoint = checkpoint
        self._build_model()
        self._restore(*self.checkpoint)
        restored = self.batches.state_dict()
        if "ends" in restored:  # of the stages that these weights have learned
            after["ends"] = restored["ends"]
        self.batches.load_state_dict(after)
        self.seconds, self.stats = seconds, []
        self.speed.skip()
        return True

    def _record_if_due(self) -> None:
        """Every `log.every` updates a record of what they cost and reached."""
        cfg, steps, made = self.cfg, self.cfg.train.steps, self.made
        if self.step % cfg.log.every and not self.is_last:
            self.bar.update(self.step, steps)
            return
        solver = fixed_point_metrics(self.stats, self.ranks.gather)
        breakdown = self.engine.times.read()
        record = {
            "step": self.step,
            "loss": made.loss,
            "perplexity": math.exp(min(made.loss, 700.0)),
            "lr": self.lr,
            "grad_norm": made.norm,
            "tokens": self.step * self.tokens_per_step,
            **self.speed.read(mean(solver.get("evaluations", []))),
            **solver,
            **imbalance(breakdown["forward"] + breakdown.get("solve", 0.0), self._gather_host),
            "breakdown": breakdown,
            **self.batches.source_metrics(),
            "peak_memory_bytes": self._peak_memory(),
        }
        self.stats = []
        self.write(record)
        self.log_saves()
        self.bar.update(self.step, steps, describe(record, self.num_iters))
        self.watch.look(record, f"update {self.step}")
        self.speed.skip()  # a record is no update

    def _peak_memory(self) -> int:
        """Of the rank that has held the most."""
        own = torch.tensor([peak_memory(self.ranks.device)], dtype=torch.float64)
        return int(self._gather_host(own).max())

    def _gather_host(self, t: torch.Tensor) -> torch.Tensor:
        return self.ranks.gather(t.to(self.ranks.device)).cpu()

    def _probe_if_due(self) -> None:
        """Between validations, which probe as well."""
        validates = self.step % self.cfg.eval.every == 0 or self.is_last
        if not self.solves or validates or not is_due(self.step, self.cfg.log.probe_every):
            return
        record = {"step": self.step, **self.validation.probed(self.engine)}
        self.write(record)
        say(f"update {self.step:>6}{iterations(record)}")
        self.num_iters = probed(record)
        self.speed.skip()

    def _end_stage_if_learned(self) -> None:
        """Before a checkpoint, which then knows of it."""
        sources = self.curriculum.waiting(self.step)
        if not sources:
            return
        self.check_finite()
        likely = self.validation.likely(self.engine, sources, self.alive)
        self.write(self.curriculum.look(self.step, likely))
        self.speed.skip()

    def _save_if_due(self) -> None:
        if self.save_if_due():
            self.speed.skip()

    def _validate_if_due(self) -> None:
        if self.step % self.cfg.eval.every == 0 and not self.is_last:
            self._validate()

    def _validate(self) -> None:
        measured = self.validation.measure(self.engine, self.step, self.alive)
        self.num_iters = probed(measured)
        self.write(measured)
        self.speed.skip()

    def conclude(self) -> None:
        """The last validation, and result.json, where they are not there yet."""
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
        """Whether result.json is there, whole, and of so many updates."""
        try:
            return (
                self.run.is_finished
                and self.run.read_result(("updates", "validation"))["updates"] == steps
            )
        except DamagedError as e:
            say(f"note: {e}: it is written anew")
            return False
