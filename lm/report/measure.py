"""Times and memory of the model on this machine: `plan --measure`, and a warning of `train`."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import NamedTuple

import torch

from lm.common.cards import CPU, GIB, card, here
from lm.common.errors import ConfigError
from lm.common.heap import keep_freed_memory
from lm.config.schema import Config
from lm.kernels.cell import fits_a_gpu
from lm.report.estimate import memory, on_the_meta_device, sizes
from lm.report.plan import layers_of
from lm.runs.metrics import peak_memory
from lm.training.build import build_model, vocabulary

PROBED_VOCABULARY = 64  # the layers do not depend on it


class Measured(NamedTuple):
    """One micro-batch, forward and backward, with weights and gradients but no optimizer.

    Attributes:
        device: Name of the device.
        bytes: Peak memory.
        planned_bytes: Memory by the formula.
        seconds: Time of the second pass; the first compiles and allocates.
        tokens: Tokens of the micro-batch.
    """

    device: str
    bytes: float
    planned_bytes: float
    seconds: float
    tokens: int

    def rows(self, micro_batches: int) -> list[tuple[str, str]]:
        """Return the rows of the plan's table for so many micro-batches of a rank."""
        seen = f"{self.bytes / GIB:.3f} GiB, by the formula {self.planned_bytes / GIB:.3f}"
        pace = f"{self.seconds:.3f} s, {self.tokens / self.seconds:,.0f} tokens/s"
        in_all = self.seconds * micro_batches / 3600
        return [
            (f"measured on {self.device}", f"{seen}: {self.planned_bytes / self.bytes:.2f} of it"),
            ("… one micro-batch", pace),
            ("… so the run", f"{in_all:,.2f} h, the optimizer left out"),
        ]


def measure(cfg: Config) -> Measured:
    """Train two micro-batches of random tokens, on the GPU if there is one.

    Raises:
        ConfigError: As `build_model` and `vocabulary`, or if the GPU's memory is too small.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on = card(here() if device.type == "cuda" else CPU)
    if device.type == "cpu":
        keep_freed_memory()  # as a training does
    vocab_size = vocabulary(cfg)
    shape = cfg.train.micro_batch_size, cfg.data.seq_len
    try:
        with device:
            model = build_model(cfg, vocab_size).train()
            ids = torch.randint(0, vocab_size, shape)
        if cfg.model.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        time_pass(
            model, ids[:1, :8], cfg
        )  # loads kernels and libraries, whose memory does not count
        before = _begin(device) - 2 * sum(p.nbytes for p in model.parameters())
        for _ in range(2):
            seconds = time_pass(model, ids, cfg)
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"--measure: a micro-batch of {shape[0]} × {shape[1]} tokens does not fit in this GPU:"
            " give a smaller train.micro_batch_size"
        ) from None
    needed = memory(cfg, 1, on, sizes(model), vocab_size, stage=0)
    return Measured(
        device=on.name,
        bytes=peak_memory(device) - before,
        planned_bytes=needed.total - needed.optimizer - needed.runtime,
        seconds=seconds,
        tokens=ids.numel(),
    )


def time_pass(model: torch.nn.Module, ids: torch.Tensor, cfg: Config) -> float:
    """Return the seconds of a forward and a backward pass.

    Gradients add up, as they do while a run accumulates them.
    """
    is_bf16 = cfg.train.precision == "bf16"
    began = time.perf_counter()
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=is_bf16):
        loss = model(input_ids=ids, labels=ids, loss_only=True).loss
    loss.backward()
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _begin(device: torch.device) -> int:
    """Return the bytes held now, and let the peak count from now on if the system allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with contextlib.suppress(OSError):  # no Linux, or not allowed
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return peak_memory(device)


def warn_if_slow(cfg: Config) -> str | None:
    """Return a sentence about layers that PyTorch iterates, before a run starts; None without them.

    An update of such layers (mixers of full rank; on a GPU all without a kernel) can take minutes,
    and nothing is printed before the first one is done.
    """
    meta = on_the_meta_device(cfg, PROBED_VOCABULARY)
    layers = layers_of(cfg, meta, torch.cuda.is_available())
    slow = [b for b in (*layers.paper, *layers.iterated) if not has_kernel(b)]
    if not slow:
        return None
    mixers = ", ".join(sorted({b.config.mixer for b in slow}))
    return (
        f"note: mixer {mixers} is iterated in PyTorch, so an update can take minutes: `fprnn plan`"
        " with --measure times it; model.mixer=dplr is solved token by token, in a small part of it"
    )


def has_kernel(block: torch.nn.Module) -> bool:
    """Return whether a kernel solves the equations of a layer's tokens in an iteration."""
    reflections = block.mixer.reflections()
    return reflections is not None and fits_a_gpu(reflections[0], block.config.d_inner)
