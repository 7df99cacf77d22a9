"""A model under DeepSpeed: updates, gradient accumulation, checkpoints of its state."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from lm.common.errors import ConfigError, Diverged, DivergedOnOneRank, TrainingError, UserError
from lm.common.files import without_wildcards
from lm.common.ranks import Ranks
from lm.config.schema import Config
from lm.model.batch import IGNORED
from lm.model.state import Adversary
from lm.runs.update_times import UpdateTimes
from lm.training.deepspeed_api import FileCollector, import_deepspeed, set_leaf_modules
from lm.training.deepspeed_json import bucket_size, deepspeed_config
from lm.training.optim import lr_factor, optimizer
from lm.training.process_group import set_collective_timeouts

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

    from lm.model.batch import FixedPointReport

NO_TARGET = f"every label of its sequences is {IGNORED}, which is no target"
Batch = dict[str, torch.Tensor]  # a micro-batch: input_ids and labels, shape (batch, length)


class Update(NamedTuple):
    """Result of an update.

    Attributes:
        loss: Mean over all ranks and micro-batches.
        norm: Norm of the gradient before clipping.
        stats: FixedPointReport of each micro-batch of this rank; empty for a baseline.
        stopping: True if a rank has received a stop signal.
    """

    loss: float
    norm: float
    stats: list
    stopping: bool


def _slice(address) -> slice:
    """Convert DeepSpeed's fragment_address to a slice."""
    return slice(address.start, address.start + address.numel)


@contextlib.contextmanager
def _explain_deepspeed_keys(cfg: Config) -> Iterator[None]:
    """Raise ConfigError if DeepSpeed refuses the keys of `engine.deepspeed` within the block."""
    try:
        yield
    except (RuntimeError, UserError):  # errors of devices and ranks, or messages already
        raise
    except Exception as e:
        if not cfg.engine.deepspeed:
            raise
        reason = " ".join(line.strip() for line in str(e).splitlines()[:3])
        raise ConfigError(
            f"DeepSpeed does not start with the keys of engine.deepspeed: {type(e).__name__}:"
            f" {reason}"
        ) from e


class Engine:
    """A model under DeepSpeed. One `step` is one update, over any number of micro-batches.

    Args:
        cfg: Configuration of the run.
        model: Model with its initial weights.
        ranks: Ranks of the run.
        config: DeepSpeed's JSON; None: derive it from `cfg`.
    """

    def __init__(
        self, cfg: Config, model: torch.nn.Module, ranks: Ranks, config: dict | None = None
    ):
        deepspeed = import_deepspeed()
        self.cfg, self.ranks = cfg, ranks
        # Copied, so that an engine built after a rollback starts from the checked config again.
        self.config = copy.deepcopy(config) if config else deepspeed_config(cfg, ranks.world_size)
        self.zero_stage = self._prepare_model(model)
        optim = cfg.optim
        self.base_optimizer = optimizer(model, optim, ranks.device.type == "cuda")
        # Read the peak of each group now, because loading a checkpoint overwrites group["lr"].
        self.peaks = [group["lr"] for group in self.base_optimizer.param_groups]
        with _explain_deepspeed_keys(cfg):
            self.deepspeed, _, _, self.scheduler = deepspeed.initialize(
                model=model.to(ranks.device),
                optimizer=self.base_optimizer,
                lr_scheduler=lambda opt: torch.optim.lr_scheduler.LambdaLR(
                    opt, lambda update: lr_factor(optim, cfg.train.steps, update + 1)
                ),
                config=self.config,
            )
        kappa = cfg.train.adversarial_noise
        self._adversary = Adversary(self.deepspeed.module, kappa) if kappa else None
        self._has_solver = hasattr(model, "passes") and bool(model.fixed_point_blocks())
        self._noise_generators: list[torch.Generator] | None = None  # one per sequence
        self.times = UpdateTimes(ranks.device)
        set_collective_timeouts(cfg, ranks)

    def _prepare_model(self, model: torch.nn.Module) -> int:
        """Set the options of a model that depend on DeepSpeed's config; return the ZeRO stage."""
        zero = self.config["zero_optimization"]
        counts = [p.numel() for p in model.parameters()]
        zero.setdefault("reduce_bucket_size", bucket_size(sum(counts), max(counts)))
        if self.cfg.model.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if zero["stage"] == 3:
            # Ranks need different numbers of iterations, so that parameters cannot be gathered in
            # each of them: all ranks gather a whole block once.
            from lm.model.stack import FPRNNLayer

            blocks = (m.block for m in model.modules() if isinstance(m, FPRNNLayer))
            set_leaf_modules(model, map(type, blocks))
        return zero["stage"]

    @property
    def lr(self) -> float:
        """Learning rate of the next update, before a parameter's own factor."""
        peak = self.cfg.optim.lr
        # Prefer a group without a factor: its rate is exact to the last bit.
        group_peak, group = max(
            zip(self.peaks, self.deepspeed.optimizer.param_groups),
            key=lambda pair: pair[0] == peak,
        )
        return group["lr"] * (peak / group_peak)

    def forward(self, batch: Batch) -> ModelOutput:
        """Return the model's output, with its loss, for a micro-batch with shifted labels."""
        batch = {k: v.to(self.ranks.device, non_blocking=True) for k, v in batch.items()}
        context: contextlib.AbstractContextManager = contextlib.nullcontext()
        if self._has_solver:
            context = self.deepspeed.module.passes(
                solve_context=self.times.measure_solve, generators=self._noise_generators
            )
        with context:
            return self.deepspeed(
                input_ids=batch["input_ids"],
                labels=batch["labels"],
                shift_labels=batch["labels"],
                loss_only=True,
            )

    def step(
        self,
        batches: list[Batch],
        stop: bool = False,
        alive: Callable[[], None] = lambda: None,
        adversarial_pass: bool = False,
    ) -> Update:
        """Make one update.

        Args:
            batches: Micro-batches of this rank; every rank has `train.accumulation` of them.
            stop: True if this rank has received a stop signal.
            alive: Called after each micro-batch.
            adversarial_pass: Pass each micro-batch a second time, with the noise of
                `train.adversarial_noise`; each pass contributes half of the gradient.

        Raises:
            Diverged: If the loss or gradient of a rank is NaN or infinite. The engine must not be
                used afterwards.
            DivergedAlone: If only this rank knows of it.
        """
        self.deepspeed.train()
        total, stats = torch.zeros((), device=self.ranks.device), []
        shares = self._shares(batches)
        adversary = self._adversary if adversarial_pass else None
        for i, (batch, share) in enumerate(zip(batches, shares)):
            is_last = i == len(batches) - 1
            self._noise_generators = self._make_noise_generators(i, len(batch["input_ids"]))
            with adversary.first_pass() if adversary else contextlib.nullcontext():
                loss, report = self._pass(batch, share)
            if report is not None:
                stats.append(report)
            total += loss.detach().float() / len(batches)
            if adversary is None:
                self._backward(loss, is_last)
            else:
                self._backward(loss / 2, False)
                self._backward(self._second_pass(adversary, batch, share, report is None), is_last)
            alive()
            if not is_last:
                with self.times.measure("optimizer"):
                    self.deepspeed.step()
        loss, stop_count = self.ranks.sum(total.item(), stop)
        loss = loss / self.ranks.world_size
        if not math.isfinite(loss):
            raise Diverged(f"the loss is {loss}")
        with self.times.measure("optimizer"):
            norm = self._gradient_norm() if self.zero_stage == 0 else None
            self.deepspeed.step()
            if norm is None:
                norm = float(self.deepspeed.get_global_grad_norm())
        if not math.isfinite(norm):
            raise Diverged(f"the gradient norm is {norm} (the loss was {loss:.4f})")
        return Update(loss, norm, stats, stop_count > 0)

    def _make_noise_generators(self, number: int, size: int) -> list[torch.Generator] | None:
        """Make the generators of the state noise, one for each sequence of a micro-batch.

        They are seeded by (seed, update, index of the sequence in the global batch), so that a
        sequence gets the same noise on any number of ranks and in micro-batches of any size.
        Torch's default generator has the same seed on every rank: all ranks would draw the same
        noise.

        Args:
            number: Index of the micro-batch on this rank in this update.
            size: Sequences of the micro-batch.

        Returns:
            The generators; None for a model without fixed-point layers.
        """
        if not self._has_solver:
            return None
        first = (number * self.ranks.world_size + self.ranks.rank) * size
        update = self.deepspeed.global_steps
        generators = []
        for index in range(first, first + size):
            state = np.random.SeedSequence([self.cfg.seed, update, index]).generate_state(1, "u8")
            generators.append(torch.Generator(self.ranks.device).manual_seed(int(state[0] >> 1)))
        return generators

    def _pass(self, batch: Batch, share: float) -> tuple[torch.Tensor, FixedPointReport | None]:
        """Return the loss of a micro-batch times its share, and the report of its solves.

        Raises:
            Diverged, DivergedOnOneRank: As `_nan_loss`.
        """
        try:
            with self.times.measure("forward"):
                output = self.forward(batch)
                loss = output.loss * share
        except FloatingPointError as e:
            return self._nan_loss(e), None
        return loss, getattr(output, "fixed_point", None)

    def _second_pass(
        self, adversary: Adversary, batch: Batch, share: float, has_failed: bool
    ) -> torch.Tensor:
        """Return half of the loss with adversarial noise.

        Args:
            adversary: Noise along the gradient of the first pass.
            batch: The micro-batch.
            share: Weight of its loss.
            has_failed: True if the first pass was not finite, and has left no gradient.
        """
        if has_failed:
            return self._nan_loss(FloatingPointError("the first pass was not finite"))
        with adversary.second_pass():
            loss, _ = self._pass(batch, share)
        return loss / 2

    def _nan_loss(self, error: FloatingPointError) -> torch.Tensor:
        """Return a loss of NaN for a forward pass that has failed on this rank.

        Its backward pass takes part in the collectives of the other ranks, and the sum of the
        losses is NaN on every rank.

        Raises:
            Diverged: If there is one rank only.
            DivergedOnOneRank: Under ZeRO-3, where the other ranks already wait in the forward pass.
        """
        if self.ranks.world_size == 1:
            raise Diverged(str(error)) from None
        if self.zero_stage == 3:
            raise DivergedOnOneRank(f"rank {self.ranks.rank}: {error}") from None
        parameters = (p for p in self.deepspeed.module.parameters() if p.requires_grad)
        return sum(p.float().sum() for p in parameters) * float("nan")

    def _backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Add the gradient of a pass to the gradient of the update.

        Args:
            loss: Loss of the pass.
            is_last: True for the last pass of the update, after which the ranks' gradients are
                reduced.

        Raises:
            Diverged: If the gradient of a solve is NaN or infinite, and there is one rank only.
            DivergedOnOneRank: Likewise, with several ranks.
        """
        self.deepspeed.set_gradient_accumulation_boundary(is_last)
        try:
            with self.times.measure("backward"):
                self.deepspeed.backward(loss)
        except FloatingPointError as e:
            kind = Diverged if self.ranks.world_size == 1 else DivergedOnOneRank
            raise kind(f"rank {self.ranks.rank}: {e}") from None

    def _shares(self, batches: list[Batch]) -> list[float]:
        """Return the weight of each micro-batch's mean loss in the mean over all of them.

        It is below 1 for a micro-batch with fewer targets than the mean (the last block of a
        corpus), so that the loss does not depend on the size of the micro-batches.

        Raises:
            TrainingError: If no micro-batch of any rank has a target.
        """
        counts = [float((batch["labels"] != IGNORED).sum()) for batch in batches]
        (targets,) = self.ranks.sum(sum(counts))
        if not targets:
            raise TrainingError(f"an update has nothing to learn from: {NO_TARGET}")
        mean = targets / (len(batches) * self.ranks.world_size)
        return [count / mean for count in counts]

    @contextlib.contextmanager
    def _collect_files(self) -> Iterator[FileCollector]:
        """Make DeepSpeed write and read through a `FileCollector` within the block."""
        collector = FileCollector()
        original, self.deepspeed.checkpoint_engine = self.deepspeed.checkpoint_engine, collector
        try:
            yield collector
        finally:
            self.deepspeed.checkpoint_engine = original

    def collect_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Return the tensors of this rank that a checkpoint holds.

        Returns:
            {"the weights": …, and for each moment of the optimizer its name: …}.
        """
        groups = self.base_optimizer.param_groups
        optimized = [p for group in groups for p in group["params"]]  # under ZeRO flat, in fp32
        tensors = {"the weights": [*self.deepspeed.module.parameters(), *optimized]}
        for state in self.base_optimizer.state.values():
            for name, moment in state.items():
                if torch.is_tensor(moment):
                    tensors.setdefault(name, []).append(moment)
        return tensors

    def state_files(self, folder: Path, step: int) -> dict[str, object]:
        """Return {file name: state} of the files that this rank adds to a checkpoint.

        Every rank calls it.
        """
        # DeepSpeed makes rank 0 write a script into the folder while the other ranks wait: a full
        # disk would raise an error on rank 0 only.
        self.deepspeed._copy_recovery_script = lambda _: None
        with self._collect_files() as collector:
            self.deepspeed.save_checkpoint(
                str(folder), tag="any", client_state={"step": step}, save_latest=False
            )
        return collector.files

    def load(self, path: Path) -> None:
        """Load weights, optimizer and schedule of a verified checkpoint of the same `layout`.

        Raises:
            CheckpointError: If a file of it holds objects that `read_zero_file` does not read.
            TrainingError: If DeepSpeed cannot load it.
        """
        with self._collect_files(), without_wildcards(path) as link:
            loaded, _ = self.deepspeed.load_checkpoint(str(link.parent), tag=link.name)
        if loaded is None:
            raise TrainingError(f"DeepSpeed could not load {path}")

    def restore_optimizer(
        self, moments: dict[str, dict[str, torch.Tensor]], updates: int, adamw_steps: float
    ) -> None:
        """Restore moments and schedule that were gathered from another layout over ranks.

        The model must have had its weights before this engine was made.

        Args:
            moments: {"exp_avg", "exp_avg_sq": {parameter name: tensor of its shape}}.
            updates: Number of updates made.
            adamw_steps: Steps of AdamW: `updates` without those that were skipped.
        """
        on_gpu = self.ranks.device.type == "cuda"  # AdamW is fused there, and keeps `step` there
        for flat, parts in self._optimizer_parts():
            steps = torch.tensor(adamw_steps, device=flat.device if on_gpu else "cpu")
            state = {"step": steps}
            for key, tensors in moments.items():
                state[key] = torch.zeros_like(flat)
                for name, target, source in parts:
                    # A partition may be padded past the end of the tensor.
                    piece = tensors[name].flatten()[source].to(flat)
                    state[key].view(-1)[target][: len(piece)] = piece
            self.base_optimizer.state[flat] = state
        self.deepspeed.global_steps = updates
        self.deepspeed.micro_steps = updates * self.config["gradient_accumulation_steps"]
        self.deepspeed.global_samples = updates * self.config["train_batch_size"]
        # scheduler.step() would warn, because the optimizer of this process has not stepped yet.
        scheduler = self.scheduler
        rates = [base * f(updates) for base, f in zip(scheduler.base_lrs, scheduler.lr_lambdas)]
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler.load_state_dict(
            scheduler.state_dict()
            | {"last_epoch": updates, "_step_count": updates + 1, "_last_lr": rates}
        )

    def _optimizer_parts(self) -> Iterator[tuple[torch.Tensor, list[tuple[str, slice, slice]]]]:
        """Yield the tensors that the optimizer of this rank steps, and the parameters in them.

        Yields:
            (tensor, [(parameter name, slice of the tensor, slice of the flattened parameter)]).
        """
        names = {p: n for n, p in self.deepspeed.module.named_parameters()}
        optimizer = self.deepspeed.optimizer
        if self.zero_stage == 0:
            for p, name in names.items():
                yield p, [(name, slice(None), slice(None))]
        elif self.zero_stage < 3:
            groups = zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups)
            for flat, params in groups:
                mapped = [(names[p], p._hp_mapping) for p in params if p._hp_mapping is not None]
                yield (
                    flat,
                    [
                        (name, _slice(part.hp_fragment_address), _slice(part.lp_fragment_address))
                        for name, part in mapped
                    ],
                )
        else:
            parts: list[list[tuple[str, slice, slice]]]
            parts = [[] for _ in optimizer.fp32_partitioned_groups_flat]
            for p, name in names.items():
                group, start, count = optimizer.grad_position[optimizer.get_param_id(p)]
                first = self.ranks.rank * count
                source = slice(first, first + count)
                parts[group].append((name, slice(start, start + count), source))
            yield from zip(optimizer.fp32_partitioned_groups_flat, parts)

    def release(self) -> None:
        """Free weights, gradients and optimizer before another engine is built."""
        self.deepspeed.destroy()
        self.deepspeed = self.base_optimizer = self.scheduler = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Finish all communication with the other ranks; the last call on every rank.

        ZeRO-3 fetches parameters ahead, and a process that ends during such a fetch may abort.
        """
        if self.zero_stage == 3:
            self.deepspeed.empty_partition_cache()
        self.ranks.barrier()

    def _gradient_norm(self) -> float:
        """Return the norm of the gradients under ZeRO stage 0."""
        grads = [p.grad for p in self.deepspeed.module.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm(grads).item()

    @torch.no_grad()
    def validate(
        self, batches: list[Batch], progress: Callable[[int, int], None] | None = None
    ) -> dict[str, float]:
        """Return mean loss and perplexity over all targets of all ranks' micro-batches.

        Raises:
            TrainingError: If there is no target.
        """
        self.deepspeed.eval()
        nll = count = 0.0
        for i, batch in enumerate(batches):
            output = self.forward(batch)
            targets = (batch["labels"] != IGNORED).sum().item()
            if targets:
                nll += output.loss.item() * targets
                count += targets
            if progress:
                progress(i + 1, len(batches))
        nll, count = self.ranks.sum(nll, count)
        if not count:
            raise TrainingError(f"a validation has nothing to measure: {NO_TARGET}")
        loss = nll / count
        return {"loss": loss, "perplexity": math.exp(min(loss, 700)), "tokens": int(count)}
