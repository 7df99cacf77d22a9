"""`fprnn plan --measure`: one micro-batch of the real model on this machine, beside the formula."""

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
from lm.report.estimate import memory, sizes
from lm.runs.metrics import peak_memory
from lm.training.build import build_model, vocabulary


class Measured(NamedTuple):
    """Of one micro-batch, forward and backward, with weights and gradients but no optimizer."""

    device: str
    bytes: float  # at the worst moment
    planned_bytes: float  # what the formula says of the same
    seconds: float  # of the second pass: the first compiles and asks for memory
    tokens: int

    def rows(self, micro_batches: int) -> list[tuple[str, str]]:
        """Rows of the plan's table. micro_batches: that a rank trains on in the whole run."""
        seen = f"{self.bytes / GIB:.3f} GiB, by the formula {self.planned_bytes / GIB:.3f}"
        pace = f"{self.seconds:.3f} s, {self.tokens / self.seconds:,.0f} tokens/s"
        in_all = self.seconds * micro_batches / 3600
        return [
            (f"measured on {self.device}", f"{seen}: {self.planned_bytes / self.bytes:.2f} of it"),
            ("… one micro-batch", pace),
            ("… so the run", f"{in_all:,.2f} h, the optimizer left out"),
        ]


def measure(cfg: Config) -> Measured:
    """Train two micro-batches of random tokens, on the GPU where there is one.

    Raises:
        ConfigError: as `build_model` and `vocabulary`; or the GPU's memory does not hold it.
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
    """Bytes held now; the peak counts from now on, where the system allows that."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with contextlib.suppress(OSError):  # no Linux, or not allowed
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return peak_memory(device)
