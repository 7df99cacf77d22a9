"""What is said when a forward pass becomes NaN or infinite: where, why, and what helps.

A number that is not finite is never returned: it would be a loss of NaN, or a token sampled from
it, without a word.
"""

from typing import Any

import torch
from torch import nn


class NonFiniteError(FloatingPointError):
    """A forward pass, or the solve of a layer in it, became NaN or infinite."""


def all_finite(x: torch.Tensor) -> torch.Tensor:
    """Whether a tensor holds no NaN and no infinity: (,) bool on its device, not waited for."""
    return torch.isfinite(x.detach()).all()


def asserted(finite: torch.Tensor, where: str) -> None:
    """What a compiled model says instead, a RuntimeError: its graph cannot look for the cause. On a
    GPU nothing is said, where an assertion that fails would end the process' use of the GPU.

    Args: finite: (,) bool. where: as in `explained`.
    """
    if finite.device.type == "cpu":
        torch._assert_async(finite, f"{where}: its output is NaN or infinite")


def explained(where: str, module: nn.Module, config: Any, what: str) -> NonFiniteError:
    """The NonFiniteError to raise.

    Args:
        where: "layer 3" or the like: the first place that is not finite.
        module: the module there. config: the FPRNNConfig. what: what was seen there.
    """
    kind = getattr(module, "kind", config.block)  # of a layer
    own = module.block.config if hasattr(module, "kind") else config
    damaged = [name for name, p in module.named_parameters() if not all_finite(p)]
    if damaged:
        cause = f"its parameter {damaged[0]} is NaN or infinite ({len(damaged)} are)"
        cure = "the checkpoint is damaged, or its training had diverged: take an earlier one"
    elif isinstance(module, nn.Embedding):
        cause = "inputs_embeds holds a NaN or an infinity"
        cure = "mend what computes them"
    elif any(p.dtype == torch.float16 for p in module.parameters()):
        cause = "its parameters are finite, but what it computes with them is above what fp16 holds"
        cure = "compute in bf16 or fp32"
    elif kind == "fp_rnn" and own.contractive is None:
        cause = (
            f"fp_rnn iterates its state without a norm, and with mixer {own.mixer} and"
            " contractive null nothing keeps ‖I − Q‖ below 1, so that the state may grow without"
            " bound"
        )
        cure = "set contractive to a number below 1, such as 0.95"
        if own.mixer in ("kronecker", "mixture") and own.kronecker_norm != "spectral":
            cure += ", or kronecker_norm to spectral"
    else:
        cause = f"its parameters are finite: numbers of the {kind} grew too large on the way"
        cure = (
            "compute in fp32 or bf16 if this was under fp16 autocast; in training lower the"
            " learning rate or clip the gradient"
        )
        if kind.startswith("fp_"):
            cure += "; or bound the mixer (contractive: 0.95)"
    return NonFiniteError(f"{where}: {what}. Cause: {cause}. What helps: {cure}.")
