"""Results of reading one text or word: numbers of every token and layer, and their sums."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from lm.data.batches.text_bytes import bits_per_byte
from lm.evaluation.inspection.tokens import Token


class Guess(NamedTuple):
    """One of a model's likeliest predictions."""

    id: int
    shown: str
    probability: float


class Answer(NamedTuple):
    """The answer of a synthetic task at one token: the model's and the right one."""

    predicted: str
    right: str | None  # None: no answer is due there

    @property
    def is_right(self) -> bool | None:
        """Whether the model's answer is right; None where none is due."""
        return None if self.right is None else self.predicted == self.right


@dataclass(frozen=True, eq=False)
class Layers:
    """Measurements of the layers that are solved; n layers, t tokens."""

    numbers: list[int]  # (n,) their numbers in the model, from 0
    iterations: torch.Tensor  # (n,t) ℓ* of each token, counted by the probe
    converged: torch.Tensor  # (n,) bool: the paper's procedure came to its tolerance
    other_solution: torch.Tensor  # (n,) share of the tokens where it ends in another solution
    bisected: torch.Tensor  # (n,) share of the tokens whose solution bisection found
    grad_limited: torch.Tensor  # (n,) share of the tokens whose gradient may be shortened
    state_norm: torch.Tensor  # (n,t) ‖h_t‖₂, the recurrence's state after the token
    gate: torch.Tensor  # (n,t) the mean of the mixer's gates a_t; NaN where it has none
    decay: torch.Tensor  # (n,t) the mean over the state of the factor on h_{t−1}


@dataclass(frozen=True, eq=False)
class Measurements:
    """Numbers of a model that reads t tokens.

    Before a text stands one token that the tokenizer starts with, if it has one. `loss`, `entropy`
    and `guesses` of a token are of the prediction of this token, made after those before it. Of a
    synthetic task they are of the answer at the token, made after reading it.
    """

    name: str  # of the checkpoint
    model: str  # in words
    tokens: list[Token]  # (t,)
    loss: torch.Tensor  # (t,) nats; NaN where nothing was to be predicted
    entropy: torch.Tensor  # (t,) nats, of the prediction; NaN where there was none
    guesses: list[list[Guess]]  # (t,) the likeliest five, [] where there was no prediction
    layers: Layers | None  # None: the model has no layer that is solved
    text_bytes: int | None = None  # of UTF-8 that the scored tokens stand for; None: no text
    has_start: bool = False  # the first token was put before the text
    following: list[Guess] = field(default_factory=list)  # predicted after the last token
    answers: list[Answer] | None = None  # (t,) of a synthetic task
    solver: dict | str = "none"  # the solver's description

    @property
    def scored(self) -> int:
        """Number of tokens that have a loss."""
        return int((~self.loss.isnan()).sum())

    @property
    def mean_loss(self) -> float:
        """Nats a token; NaN without a token that has a loss."""
        return float(self.loss.double().nanmean())

    @property
    def perplexity(self) -> float:
        """Perplexity a token."""
        return math.exp(min(self.mean_loss, 700.0))

    @property
    def bits_per_byte(self) -> float | None:
        """None where there is no text, or its first token was not predicted."""
        return bits_per_byte(float(self.loss.double().nansum()), self.text_bytes)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.name}: {len(self.tokens)} tokens, loss"
            f" {self.mean_loss:.4f} nats a token)"
        )
