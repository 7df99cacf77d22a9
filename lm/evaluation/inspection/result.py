"""Results of an inspection: numbers of every token and layer, and their means."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from lm.data.batches.text_bytes import bits_per_byte as to_bits_per_byte
from lm.evaluation.inspection.tokens import Token


class Guess(NamedTuple):
    """One of the most likely predictions of a model: token id, readable label, probability."""

    id: int
    label: str
    probability: float


class Answer(NamedTuple):
    """Answer at a token of a synthetic task."""

    predicted: str  # answer of the model
    right: str | None  # right answer; None at tokens that need no answer

    @property
    def is_right(self) -> bool | None:
        """Correctness of the model's answer; None at tokens that need no answer."""
        return None if self.right is None else self.predicted == self.right


@dataclass(frozen=True, eq=False)
class LayerMeasurements:
    """Measurements of the n fixed-point layers over t tokens."""

    indices: list[int]  # (n,) indices of the layers in the model, from 0
    iterations: torch.Tensor  # (n,t) ℓ*: iterations of the paper's solver
    converged: torch.Tensor  # (n,) bool: the paper's solver reached its tolerance
    other_solution: torch.Tensor  # (n,) share of tokens where its solution is not the model's
    bisected: torch.Tensor  # (n,) share of tokens that were solved by bisection
    grad_limited: torch.Tensor  # (n,) share of tokens whose gradient may be shortened
    state_norm: torch.Tensor  # (n,t) ‖h_t‖₂ of the recurrent state after the token
    gate: torch.Tensor  # (n,t) mean of the mixer's gates a_t; NaN for a mixer without gates
    decay: torch.Tensor  # (n,t) mean of the factors on h_{t−1}


@dataclass(frozen=True, eq=False)
class Measurements:
    """Measurements of a model on a sequence of t tokens.

    For a text, `loss`, `entropy` and `guesses` of a token describe the prediction of this token
    from the tokens before it. For a synthetic task, they describe the answer at the token, which
    the model gives after reading it.
    """

    name: str  # name of the checkpoint
    model: str  # description of the model
    tokens: list[Token]  # (t,)
    loss: torch.Tensor  # (t,) nats; NaN at tokens without a prediction
    entropy: torch.Tensor  # (t,) nats, of the prediction; NaN at tokens without a prediction
    guesses: list[list[Guess]]  # (t,) five most likely predictions; [] without a prediction
    layers: LayerMeasurements | None  # None for a model without fixed-point layers
    text_bytes: int | None = None  # UTF-8 bytes of a text whose tokens all have a loss
    has_start: bool = False  # True if the first token is a BOS or EOS token before the text
    next_guesses: list[Guess] = field(default_factory=list)  # predictions after the last token
    answers: list[Answer] | None = None  # (t,) answers, for a synthetic task
    solver: dict | str = "none"  # settings of the solver; "none" without fixed-point layers

    @property
    def scored_count(self) -> int:
        """Number of tokens that have a loss."""
        return int((~self.loss.isnan()).sum())

    @property
    def mean_loss(self) -> float:
        """Mean loss in nats per token; NaN if no token has a loss."""
        return float(self.loss.double().nanmean())

    @property
    def perplexity(self) -> float:
        """Perplexity per token."""
        return math.exp(min(self.mean_loss, 700.0))  # exp overflows above 709

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of the text; None if `text_bytes` is None."""
        return to_bits_per_byte(float(self.loss.double().nansum()), self.text_bytes)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.name}: {len(self.tokens)} tokens, loss"
            f" {self.mean_loss:.4f} nats per token)"
        )
