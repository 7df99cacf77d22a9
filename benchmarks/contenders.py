"""Models that the benchmarks compare: FP-Mamba, the paper's procedure, and Mamba."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import MambaConfig, MambaForCausalLM
from transformers.utils import logging

from benchmarks import paper
from benchmarks.harness import Shape
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.model.scan import selective_scan_plain

logging.set_verbosity_error()  # hides its note on missing Mamba kernels


def use_kernels(name: str) -> contextlib.ContextDecorator:
    """Return a context manager (and decorator) that sets FPRNN_KERNELS."""
    return mock.patch.dict(os.environ, FPRNN_KERNELS=name)


# Solver options: the paper's procedure in our implementation (paper.py is independent), and the
# exact solve.
PAPER_FIELDS = {
    "token": "iterate",
    "stopping": "paper",
    "schedule": "parallel",
    "gradient": "one_step",
}
EXACT_FIELDS = {"token": "exact", "schedule": "auto", "gradient": "exact"}


@contextlib.contextmanager
def solve_with(
    model: FPRNNForCausalLM, kernel: str = "auto", **fields: Any
) -> Iterator[FPRNNForCausalLM]:
    """Set the solver fields of a model and FPRNN_KERNELS in a `with` block or a function."""
    with model.solving(**fields), use_kernels(kernel):
        yield model


def scan_in_chunks(*inputs: Tensor) -> Tensor:
    """Compute our scan in plain PyTorch, with the signature of `paper.Scan`."""
    return selective_scan_plain(*inputs)[0]


def make_paper_model(
    model: FPRNNForCausalLM, scan: paper.Scan = scan_in_chunks
) -> paper.LanguageModel:
    """Return a model with the same weights that uses the paper's procedure."""
    return paper.LanguageModel(model, scan).train(model.training)


def make_fpmamba(shape: Shape, **options: Any) -> FPRNNForCausalLM:
    """Return a seeded model, FP-Mamba by default; `options` are fields of FPRNNConfig."""
    torch.manual_seed(0)
    config = FPRNNConfig(
        vocab_size=shape.vocab,
        d_model=shape.d_model,
        n_layer=shape.layers,
        d_state=shape.d_state,
        mixer="householder",
        mixer_rank=shape.rank,
        tol=0.1,  # as in the paper
        **options,
    )
    return FPRNNForCausalLM(config)


def make_transformers_mamba(shape: Shape) -> MambaForCausalLM:
    config = MambaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.d_model,
        num_hidden_layers=shape.layers,
        state_size=shape.d_state,
        eos_token_id=None,
        pad_token_id=None,
        bos_token_id=None,
    )
    return MambaForCausalLM(config)


class StepResult(NamedTuple):
    """Measurements of a training step."""

    evaluations: Tensor | None  # per token; None without a solver
    failed: Tensor | None  # share of unsolved tokens; None without a solver
    loss: Tensor
    grad_norm: Tensor


class Trainer:
    """Model with its optimizer and a batch; `step()` makes a full training step.

    The learning rate is 0, so that all steps solve the same problem. `options` are further
    arguments of the model's forward pass.
    """

    def __init__(self, model: nn.Module, shape: Shape, device: torch.device, **options: Any):
        self.model, self.options = model.to(device).train(), options
        self.autocast = functools.partial(
            torch.autocast, device.type, torch.bfloat16, enabled=shape.dtype == "bf16"
        )
        fused = True if device.type == "cuda" else None  # as in lm/training/engine.py
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, fused=fused)
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(shape.vocab, (shape.batch, shape.length), generator=generator)
        self.ids = self.ids.to(device)

    def step(self) -> StepResult:
        """Make a training step."""
        with self.autocast():
            out = self.model(input_ids=self.ids, labels=self.ids, **self.options)
        out.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        stats = getattr(out, "fixed_point", None)
        if stats is None:
            return StepResult(None, None, out.loss.detach(), norm)
        evaluations, failed = (t.double().mean() for t in (stats.evaluations, stats.failed))
        return StepResult(evaluations, failed, out.loss.detach(), norm)
