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
from lm.training import deepspeed_json
from lm.training.deepspeed_api import FileCollector, import_deepspeed, set_leaf_modules
from lm.training.optim import lr_factor, optimizer
from lm.training.process_group import set_collective_timeouts

if TYPE_CHECKING:
    from transformers.utils import ModelOutput


NO_TARGET = f"every label of its sequences is {IGNORED}, which is no target"
Batch = dict[str, torch.Tensor]  # a micro-batch: input_ids and labels, shape (batch, length)
MAX_EXPONENT = 700.0  # e^x of a larger number overflows fp64


class Update(NamedTuple):
    """Result of an update.

    Attributes:
        loss: Mean over all ranks and micro-batches, of the pass without adversarial noise.
        grad_norm: Norm of the gradient before clipping.
        reports: FixedPointReport of each micro-batch of this rank, of the same pass; empty for a
            model without fixed-point layers.
        is_stop_requested: True if a rank has received a stop signal.
    """

    loss: float
    grad_norm: float
    reports: list
    is_stop_requested: bool


class Fragment(NamedTuple):
    """Part of a parameter in a flat tensor that the optimizer of a rank steps.

    Attributes:
        name: Name of the parameter.
        optimizer_slice: Position of the part in the flat tensor.
        parameter_slice: Position of the part in the flattened parameter.
    """

    name: str
    optimizer_slice: slice
    parameter_slice: slice


def _to_slice(address) -> slice:
    """Convert DeepSpeed's fragment_address to a slice."""
    return slice(address.start, address.start + address.numel)


@contextlib.contextmanager
def _explain_deepspeed_keys(cfg: Config) -> Iterator[None]:
    """Raise ConfigError if DeepSpeed refuses the keys of `engine.deepspeed` within the block."""
    try:
        yield
    except (RuntimeError, UserError):  # not about keys, or a message for the user already
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
        deepspeed_config: DeepSpeed's JSON; None: derive it from `cfg`.
    """

    def __init__(
        self,
        cfg: Config,
        model: torch.nn.Module,
        ranks: Ranks,
        deepspeed_config: dict | None = None,
    ):
        self.cfg, self.ranks = cfg, ranks
        if deepspeed_config is None:
            deepspeed_config = deepspeed_json.deepspeed_config(cfg, ranks.world_size)
        # Copied, so that an engine built after a rollback starts from the checked config again.
        self.deepspeed_config = copy.deepcopy(deepspeed_config)
        self.zero_stage = self.deepspeed_config["zero_optimization"]["stage"]
        self._prepare_model(model)
        optim = cfg.optim
        self.base_optimizer = optimizer(model, optim, ranks.device.type == "cuda")
        # Peak learning rates, read now because loading a checkpoint overwrites group["lr"].
        self.peak_rates = [group["lr"] for group in self.base_optimizer.param_groups]
        with _explain_deepspeed_keys(cfg):
            self.deepspeed, _, _, self.lr_scheduler = import_deepspeed().initialize(
                model=model.to(ranks.device),
                optimizer=self.base_optimizer,
                lr_scheduler=lambda opt: torch.optim.lr_scheduler.LambdaLR(
                    opt, lambda update: lr_factor(optim, cfg.train.steps, update + 1)
                ),
                config=self.deepspeed_config,
            )
        noise_size = cfg.train.adversarial_noise
        self._adversary = Adversary(self.deepspeed.module, noise_size) if noise_size else None
        self._supports_noise = any(layer.block.noise_width for layer in model.backbone.layers)
        # One per sequence of the current micro-batch (`_make_noise_generators`).
        self._noise_generators: list[torch.Generator] | None = None
        self.times = UpdateTimes(ranks.device)
        set_collective_timeouts(cfg, ranks)

    def _prepare_model(self, model: torch.nn.Module) -> None:
        """Set the size of DeepSpeed's gradient buffer, and options of the model."""
        sizes = [p.numel() for p in model.parameters()]
        self.deepspeed_config["zero_optimization"].setdefault(
            "reduce_bucket_size", deepspeed_json.bucket_size(sum(sizes), max(sizes))
        )
        if self.cfg.model.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if self.zero_stage == 3:
            # Ranks may make different numbers of iterations, and a collective in an iteration would
            # wait for ever: all ranks gather the parameters of a whole block once.
            from lm.model.stack import FPRNNLayer

            blocks = (m.block for m in model.modules() if isinstance(m, FPRNNLayer))
            set_leaf_modules(model, map(type, blocks))

    @property
    def lr(self) -> float:
        """Learning rate of the next update, without the factors of `optim.lr_factors`."""
        peak = self.cfg.optim.lr
        groups = list(zip(self.peak_rates, self.deepspeed.optimizer.param_groups))
        for group_peak, group in groups:
            if group_peak == peak:  # the group has no factor, so nothing is divided and rounded
                return group["lr"]
        group_peak, group = groups[0]
        return group["lr"] * (peak / group_peak)

    def forward(self, batch: Batch) -> ModelOutput:
        """Return the model's output, with its loss, for a micro-batch with shifted labels."""
        batch = {k: v.to(self.ranks.device, non_blocking=True) for k, v in batch.items()}
        with self.deepspeed.module.override_solve_options(
            solve_context=self.times.measure_solve, generators=self._noise_generators
        ):
            return self.deepspeed(
                input_ids=batch["input_ids"],
                labels=batch["labels"],
                shift_labels=batch["labels"],
                loss_only=True,
            )

    def step(
        self,
        batches: list[Batch],
        is_stop_requested: bool = False,
        keep_alive: Callable[[], None] = lambda: None,
        has_adversarial_pass: bool = False,
    ) -> Update:
        """Make one update.

        Args:
            batches: Micro-batches of this rank; every rank has `train.accumulation` of them.
            is_stop_requested: True if this rank has received a stop signal.
            keep_alive: Called after each micro-batch, so that the watchdog sees progress.
            has_adversarial_pass: Pass each micro-batch a second time, with the noise of
                `train.adversarial_noise`; each pass contributes half of the gradient.

        Raises:
            Diverged: If the loss or gradient of a rank is NaN or infinite. The engine must not be
                used afterwards.
            DivergedOnOneRank: If this rank diverged and could not inform the other ranks.
        """
        # 1. Accumulate the gradient of each micro-batch.
        self.deepspeed.train()
        mean_loss, reports = torch.zeros((), device=self.ranks.device), []
        adversary = self._adversary if has_adversarial_pass else None
        for i, (batch, loss_weight) in enumerate(zip(batches, self._loss_weights(batches))):
            is_last = i == len(batches) - 1
            self._noise_generators = self._make_noise_generators(i, len(batch["input_ids"]))
            with adversary.first_pass() if adversary else contextlib.nullcontext():
                loss, output = self._forward_pass(batch, loss_weight)
            report = getattr(output, "fixed_point", None)
            if report is not None:
                reports.append(report)
            mean_loss += loss.detach().float() / len(batches)
            if adversary is None:
                self._backward(loss, is_last)
            else:
                self._backward(loss / 2, is_last=False)
                has_failed = output is None
                half_loss = self._second_pass(adversary, batch, loss_weight, has_failed)
                self._backward(half_loss, is_last)
            keep_alive()
            if not is_last:
                with self.times.measure("optimizer"):
                    self.deepspeed.step()  # only counts the micro-batch

        # 2. Check the loss on all ranks before any weight changes.
        loss, stop_count = self.ranks.sum(mean_loss.item(), is_stop_requested)
        loss = loss / self.ranks.world_size
        if not math.isfinite(loss):
            raise Diverged(f"the loss is {loss}")

        # 3. Step the optimizer. DeepSpeed computes the norm only with ZeRO.
        with self.times.measure("optimizer"):
            grad_norm = self._gradient_norm() if self.zero_stage == 0 else None
            self.deepspeed.step()
            if grad_norm is None:
                grad_norm = float(self.deepspeed.get_global_grad_norm())
        if not math.isfinite(grad_norm):
            raise Diverged(f"the gradient norm is {grad_norm} (the loss was {loss:.4f})")
        return Update(loss, grad_norm, reports, stop_count > 0)

    def _make_noise_generators(self, micro_batch: int, size: int) -> list[torch.Generator] | None:
        """Make the generators of the state noise, one for each sequence of a micro-batch.

        They are seeded by (seed, update, index of the sequence in the global batch), so that a
        sequence gets the same noise on any number of ranks and in micro-batches of any size.
        `micro_batch` is an index on this rank, `size` its number of sequences. A model whose layers
        cannot have state noise has no generators.
        """
        if not self._supports_noise:
            return None
        start = (micro_batch * self.ranks.world_size + self.ranks.rank) * size
        update = self.deepspeed.global_steps
        generators = []
        for index in range(start, start + size):
            (seed,) = np.random.SeedSequence([self.cfg.seed, update, index]).generate_state(1, "u8")
            # Torch's seeds are signed: 63 bits.
            generators.append(torch.Generator(self.ranks.device).manual_seed(int(seed >> 1)))
        return generators

    def _forward_pass(
        self, batch: Batch, loss_weight: float
    ) -> tuple[torch.Tensor, ModelOutput | None]:
        """Return the weighted loss of a micro-batch and the output; None if the pass has failed."""
        try:
            with self.times.measure("forward"):
                output = self.forward(batch)
                loss = output.loss * loss_weight
        except FloatingPointError as e:
            return self._nan_loss(e), None
        return loss, output

    def _second_pass(
        self, adversary: Adversary, batch: Batch, loss_weight: float, has_failed: bool
    ) -> torch.Tensor:
        """Return half of the weighted loss with adversarial noise."""
        if has_failed:  # the first pass has left no gradient for the adversary
            return self._nan_loss(FloatingPointError("the first pass was not finite"))
        with adversary.second_pass():
            loss, _ = self._forward_pass(batch, loss_weight)
        return loss / 2

    def _nan_loss(self, error: FloatingPointError) -> torch.Tensor:
        """Return a loss of NaN for a forward pass that has failed on this rank.

        The rank can then take part in the collectives of the backward pass, and every rank sees
        that the sum of the losses is NaN.
        """
        if self.ranks.world_size == 1:
            raise Diverged(str(error)) from None
        if self.zero_stage == 3:  # the other ranks already wait in the forward pass
            raise DivergedOnOneRank(f"rank {self.ranks.rank}: {error}") from None
        parameters = (p for p in self.deepspeed.module.parameters() if p.requires_grad)
        return sum(p.float().sum() for p in parameters) * float("nan")

    def _backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Add the gradient of a pass to the update's; after the last, reduce it over the ranks."""
        self.deepspeed.set_gradient_accumulation_boundary(is_last)
        try:
            with self.times.measure("backward"):
                self.deepspeed.backward(loss)
        except FloatingPointError as e:
            kind = Diverged if self.ranks.world_size == 1 else DivergedOnOneRank
            raise kind(f"rank {self.ranks.rank}: {e}") from None

    def _loss_weights(self, batches: list[Batch]) -> list[float]:
        """Return the weight of each micro-batch's mean loss in the mean over all micro-batches.

        A micro-batch with fewer targets than the others, such as the last block of a corpus, has a
        weight below 1, so that the loss does not depend on the size of the micro-batches.
        """
        counts = [float((batch["labels"] != IGNORED).sum()) for batch in batches]
        (targets,) = self.ranks.sum(sum(counts))
        if not targets:
            raise TrainingError(f"an update has nothing to learn from: {NO_TARGET}")
        mean_count = targets / (len(batches) * self.ranks.world_size)
        return [count / mean_count for count in counts]

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
            {"the weights": […], and for each moment of the optimizer its name: […]}.
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
            )  # the collector keeps only the names of the files, not folder and tag
        return collector.files

    def load(self, path: Path) -> None:
        """Load weights, optimizer and schedule of a verified checkpoint of the same layout.

        Raises:
            CheckpointError: If one of its files holds objects that `read_zero_file` refuses.
            TrainingError: If DeepSpeed cannot load it.
        """
        with self._collect_files(), without_wildcards(path) as link:
            loaded, _ = self.deepspeed.load_checkpoint(str(link.parent), tag=link.name)
        if loaded is None:
            raise TrainingError(f"DeepSpeed could not load {path}")

    def restore_optimizer(
        self, moments: dict[str, dict[str, torch.Tensor]], updates: int, adamw_steps: float
    ) -> None:
        """Restore moments and schedule from a checkpoint of another number of ranks or ZeRO stage.

        The model must already have had the checkpoint's weights when this engine was built.

        Args:
            moments: {"exp_avg", "exp_avg_sq": {parameter name: tensor of its shape}}.
            updates: Number of updates made.
            adamw_steps: Steps of AdamW: `updates` without the updates that DeepSpeed skipped.
        """
        on_gpu = self.ranks.device.type == "cuda"  # AdamW is fused there, and keeps `step` there
        for flat, fragments in self._optimizer_fragments():
            steps = torch.tensor(adamw_steps, device=flat.device if on_gpu else "cpu")
            state = {"step": steps}
            for key, tensors in moments.items():
                state[key] = torch.zeros_like(flat)
                for fragment in fragments:
                    values = tensors[fragment.name].flatten()[fragment.parameter_slice].to(flat)
                    # A partition may be padded past the end of the tensor.
                    state[key].view(-1)[fragment.optimizer_slice][: len(values)] = values
            self.base_optimizer.state[flat] = state
        self.deepspeed.global_steps = updates
        self.deepspeed.micro_steps = updates * self.deepspeed_config["gradient_accumulation_steps"]
        self.deepspeed.global_samples = updates * self.deepspeed_config["train_batch_size"]
        # scheduler.step() would warn, because the optimizer of this process has not stepped yet.
        scheduler = self.lr_scheduler
        rates = [
            peak * factor(updates) for peak, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas)
        ]
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler.load_state_dict(
            scheduler.state_dict()
            | {"last_epoch": updates, "_step_count": updates + 1, "_last_lr": rates}
        )

    def _optimizer_fragments(self) -> Iterator[tuple[torch.Tensor, list[Fragment]]]:
        """Yield each tensor that the optimizer of this rank steps, and the parameters in it."""
        names = {p: n for n, p in self.deepspeed.module.named_parameters()}
        optimizer = self.deepspeed.optimizer
        if self.zero_stage == 0:
            for p, name in names.items():
                yield p, [Fragment(name, slice(None), slice(None))]
        elif self.zero_stage < 3:
            groups = zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups)
            for flat, params in groups:
                mappings = [(names[p], p._hp_mapping) for p in params if p._hp_mapping is not None]
                fragments = [
                    Fragment(
                        name,
                        _to_slice(mapping.hp_fragment_address),
                        _to_slice(mapping.lp_fragment_address),
                    )
                    for name, mapping in mappings
                ]
                yield flat, fragments
        else:
            flats = optimizer.fp32_partitioned_groups_flat
            by_group: list[list[Fragment]] = [[] for _ in flats]
            for p, name in names.items():
                group, start, count = optimizer.grad_position[optimizer.get_param_id(p)]
                first = self.ranks.rank * count  # every rank has the same number of elements
                flattened = slice(first, first + count)
                by_group[group].append(Fragment(name, slice(start, start + count), flattened))
            yield from zip(flats, by_group)

    def release(self) -> None:
        """Free weights, gradients and optimizer before another engine is built."""
        self.deepspeed.destroy()
        self.deepspeed = self.base_optimizer = self.lr_scheduler = None
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

        Args:
            batches: Micro-batches of this rank.
            progress: Called after each micro-batch with its number, from 1, and their count.

        Returns:
            {"loss" (nats per token), "perplexity", "tokens" (targets)}.

        Raises:
            TrainingError: If there is no target.
        """
        self.deepspeed.eval()
        loss_sum = token_count = 0.0
        for i, batch in enumerate(batches):
            output = self.forward(batch)
            targets = (batch["labels"] != IGNORED).sum().item()
            if targets:
                loss_sum += output.loss.item() * targets
                token_count += targets
            if progress:
                progress(i + 1, len(batches))
        loss_sum, token_count = self.ranks.sum(loss_sum, token_count)
        if not token_count:
            raise TrainingError(f"a validation has nothing to measure: {NO_TARGET}")
        loss = loss_sum / token_count
        perplexity = math.exp(min(loss, MAX_EXPONENT))
        return {"loss": loss, "perplexity": perplexity, "tokens": int(token_count)}
