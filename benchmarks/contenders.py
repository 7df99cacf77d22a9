"""What is measured against each other: ours, the paper's procedure, Mamba, and peers if present."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MambaConfig, MambaForCausalLM
from transformers.utils import logging

from benchmarks import paper
from benchmarks.harness import Shape
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.model.scan import selective_scan, selective_scan_plain

logging.set_verbosity_error()  # transformers says that Mamba's kernels are missing


@contextlib.contextmanager
def kernels(name: str) -> Iterator[None]:
    """Under FPRNN_KERNELS=name."""
    before = os.environ.get("FPRNN_KERNELS", "auto")
    os.environ["FPRNN_KERNELS"] = name
    try:
        yield
    finally:
        os.environ["FPRNN_KERNELS"] = before


def blocks(model: FPRNNForCausalLM) -> list[nn.Module]:
    return [layer.block for layer in model.backbone.layers]


# The paper's procedure in our solver, with our kernels; and ours. (paper.py is independent.)
PAPER_FIELDS = {
    "token": "iterate",
    "stopping": "paper",
    "schedule": "parallel",
    "gradient": "one_step",
}
EXACT_FIELDS = {"token": "exact", "schedule": "auto", "gradient": "exact"}


@contextlib.contextmanager
def running(
    model: FPRNNForCausalLM, kernel: str = "auto", **fields: Any
) -> Iterator[FPRNNForCausalLM]:
    """Inside, the model solves with these solver fields and under FPRNN_KERNELS=kernel."""
    with model.solving(**fields), kernels(kernel):
        yield model


def chunked_scan(*inputs: Tensor) -> Tensor:
    """Our scan in plain PyTorch, as the paper's procedure calls one."""
    return selective_scan_plain(*inputs)[0]


def fastest_scan(*inputs: Tensor) -> Tensor:
    """The fastest scan that there is here, as the paper's procedure calls one."""
    return selective_scan(*inputs)[0]


def paper_model(model: FPRNNForCausalLM, scan: paper.Scan = chunked_scan) -> paper.LanguageModel:
    """The same weights, solved by the paper's procedure."""
    return paper.LanguageModel(model, scan).train(model.training)


def ours(shape: Shape, **options: Any) -> FPRNNForCausalLM:
    """FP-Mamba-1 of this shape, seeded."""
    torch.manual_seed(0)
    config = FPRNNConfig(
        vocab_size=shape.vocab,
        d_model=shape.d_model,
        n_layer=shape.layers,
        d_state=shape.d_state,
        mixer="householder",
        mixer_rank=shape.rank,
        tol=0.1,
        **options,
    )
    return FPRNNForCausalLM(config)


def our_mamba(shape: Shape) -> FPRNNForCausalLM:
    """Mamba of this shape on our scan, in our model."""
    return ours(shape, layers="mamba")


def their_mamba(shape: Shape) -> MambaForCausalLM:
    """transformers' Mamba of this shape."""
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


def present(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def peers(shape: Shape, device: torch.device) -> dict[str, nn.Module]:
    """{name: model} of the packages that are installed; they run on a GPU alone."""
    found = {}
    if device.type != "cuda":
        return found
    if present("mamba_ssm"):
        from mamba_ssm.models.config_mamba import MambaConfig as Config
        from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

        layer = {"layer": "Mamba1", "d_state": shape.d_state}
        found["mamba-ssm's Mamba"] = WithLoss(
            MambaLMHeadModel(
                Config(shape.d_model, n_layer=shape.layers, vocab_size=shape.vocab, ssm_cfg=layer)
            )
        )
    return found


class WithLoss(torch.nn.Module):
    """A model that returns logits, with the loss."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> _Output:
        logits = self.model(input_ids).logits[:, :-1].float()
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        return _Output(loss)


class _Output:
    def __init__(self, loss):
        self.loss = loss


class Trainer:
    """A model, its optimizer and a batch: `step()` is one full training step.

    The learning rate is 0: every repeat solves the same problem.
    """

    def __init__(self, model: nn.Module, shape: Shape, device: torch.device, **options: Any):
        self.model, self.device, self.options = model.to(device).train(), device, options
        self.autocast = functools.partial(
            torch.autocast, device.type, torch.bfloat16, enabled=shape.dtype == "bf16"
        )
        fused = True if device.type == "cuda" else None  # as lm/engine
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, fused=fused)
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(shape.vocab, (shape.batch, shape.length), generator=generator)
        self.ids = self.ids.to(device)

    def step(self) -> tuple:
        """Returns evaluations a token and the share of tokens that failed (None for a model without
        a solver), the loss, and the gradient norm."""
        with self.autocast():
            out = self.model(input_ids=self.ids, labels=self.ids, **self.options)
        out.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        stats = getattr(out, "fixed_point", None)
        if stats is None:
            return None, None, out.loss.detach(), norm
        evaluations, failed = (t.double().mean() for t in (stats.evaluations, stats.failed))
        return evaluations, failed, out.loss.detach(), norm

    def resident(self) -> int:
        """Bytes of weights and of the optimizer's state."""
        states = [t for s in self.optimizer.state.values() for t in s.values()]
        return sum(t.nbytes for t in self.parameters + states if torch.is_tensor(t))
