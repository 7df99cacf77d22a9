"""What page and terminal say of an inspection: its sums, its tables, its definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lm.evaluation.inspection.result import Layers, Measured
from lm.evaluation.inspection.tokens import Token
from lm.runs.metrics import ELSEWHERE, ELSEWHERE_NOTE, is_elsewhere

LN2 = math.log(2)
NO_SOLVER = (
    "This model has no layer that is solved for a fixed point, so there is no ℓ*, no state norm, no"
    " gate and no decay to show: loss and entropy alone."
)
ITERATIONS = (
    "ℓ* of a token in a layer is the iteration of the paper's procedure (all tokens at once, from"
    " zero, with its damping, tolerance 0.1) after which this token and all before it stay within"
    " the tolerance. So it never falls along the text: where it rises, a token needed more than all"
    " before it. A probe counts it on what the layer reads, however the model itself is solved."
)
STATE = (
    "The state's norm is ‖h_t‖₂ over all numbers of the recurrence's state, after the token, at the"
    " layer's solution."
)
GATE = (
    "The gate a_t is the mean of the mixer's gates, each between 0 (no mixing of channels) and 1"
    " (householder, dplr: one a reflection; kronecker: those of both factors; monarch: one a"
    " block), before model.contractive scales what they do."
)
DECAY = (
    "The decay λ_t is the factor on h_{t−1}, the mean over the state: exp(Δ_t A) of FP-Mamba, the"
    " gate λ_t of FP-RNN; 0 where a document starts."
)
CONDITION = (
    "Bisected: the share of tokens whose own equation has a solution that its iteration does not"
    " come to. Limited: where it is nearly singular, so that training may shorten the gradient."
)


class Colouring(NamedTuple):
    """One number for each token, to colour it by."""

    name: str
    values: list[float | None]  # None: there is none for this token
    low: float  # the number without colour
    high: float  # that with the full colour
    digits: int


def colourings(measured: Measured) -> list[Colouring]:
    """All that tokens can be coloured by, the one shown first in front. Those of ℓ* have one scale,
    so that layers can be compared."""
    out = []
    if measured.layers is not None:
        most = max(float(measured.layers.iterations.max()), 2.0)
        rows = measured.layers.iterations.tolist()
        mean = measured.layers.mean_iterations.tolist()
        if len(rows) > 1:
            out.append(Colouring("ℓ*, mean over layers", mean, 1, most, 1))
        for number, row in zip(measured.layers.numbers, rows, strict=True):
            out.append(Colouring(f"ℓ*, layer {number}", row, 1, most, 0))
    of_what = "answer" if measured.answers else "token"
    for name, values in (("loss", measured.loss), ("entropy", measured.entropy)):
        known = values[~values.isnan()]
        high = max(float(known.max()), 0.1) if len(known) else 1.0
        out.append(Colouring(f"{name} of the {of_what}, nats", plain(values), 0, high, 2))
    return out


def plain(values: torch.Tensor) -> list[float | None]:
    """Numbers, None where they are NaN."""
    return [None if math.isnan(value) else value for value in values.tolist()]


def facts(measured: Measured) -> list[tuple[str, str]]:
    """What an inspection amounts to, name and value."""
    count = len(measured.tokens) - measured.has_start
    size = f"{count:,}"
    if measured.text_bytes is not None:
        size += f", for {measured.text_bytes:,} bytes of text"
    out = [("model", measured.model), ("tokens", size)]
    if measured.answers is not None:
        due = [answer for answer in measured.answers if answer.right is not None]
        right = [answer for answer in due if answer.is_right]
        share = f"{len(right)} of {len(due)}" if due else "none due"
        out.append(("answers that are right", share))
    if measured.scored:
        nats = measured.mean_loss
        of_what = "of an answer" if measured.answers else "of a token"
        out.append((f"mean loss {of_what}", f"{nats:.4f} nats, {nats / LN2:.4f} bits"))
        if measured.answers is None:
            out.append(("perplexity", f"{measured.perplexity:.2f}"))
    if measured.bits_per_byte is not None:
        out.append(("bits per byte", f"{measured.bits_per_byte:.4f}"))
    if isinstance(measured.solver, dict):
        how = f"{measured.solver['schedule']}, token: {measured.solver['token']}"
        if measured.solver["stopping"] == "paper":
            how += ", the paper's stopping (what a token gets depends on those after it)"
        out.append(("solved", how))
    return out


def layer_rows(layers: Layers, tokens: Sequence[Token]) -> list[list[str]]:
    """A table of the layers that are solved, its head first."""
    heads = ["layer", "ℓ*, mean", "ℓ*, most", "at token", "state's norm", "gate a", "decay λ"]
    rows = [[*heads, "bisected", "limited"]]
    elsewhere = is_elsewhere({"mean": layers.numbers, "elsewhere": layers.elsewhere.tolist()})
    for i, number in enumerate(layers.numbers):
        counts = layers.iterations[i]
        at = int(counts.argmax())
        most = str(int(counts.max())) + ("" if layers.converged[i] else ", not converged")
        gate = float(layers.gate[i].mean())
        rows.append(
            [
                str(number),
                f"{float(counts.double().mean()):.1f}{ELSEWHERE * elsewhere[i]}",
                most,
                f"{at}: {tokens[at].shown}",
                f"{float(layers.state_norm[i].mean()):.3g}",
                "–" if math.isnan(gate) else f"{gate:.2f}",
                f"{float(layers.decay[i].mean()):.3f}",
                f"{float(layers.bisected[i]):.1%}",
                f"{float(layers.limited[i]):.1%}",
            ]
        )
    return rows


def notes(measured: Measured) -> list[str]:
    """What a reader must know of what is shown."""
    out = []
    if measured.answers is not None:
        out.append(
            "Under each token stands the state that the model decodes there; a wrong one is marked"
            " ✗, with the right answer behind it. Loss, entropy and predictions of a token are of"
            " the answer at it, given when it has been read."
        )
    elif measured.has_start:
        out.append(
            f"Before the text stands {measured.tokens[0].shown}, as lm-eval puts it there: so the"
            " text's first token has a loss too. It is not scored itself, nor is the end of the"
            " text."
        )
    else:
        out.append(
            "The tokenizer has no token to begin a text with: the first token is not predicted, has"
            " no loss, and there are no bits per byte."
        )
    if measured.answers is None:
        out.append(
            "Loss, entropy and predictions of a token are of the prediction of this very token,"
            " made when those before it had been read. ℓ*, norms and gates are of the layer while"
            " it reads the token."
        )
    out.append("Spaces are shown as ·, line ends as ↵, parts of a character as their bytes.")
    if measured.layers is None:
        return [NO_SOLVER, *out]
    out += [ITERATIONS, STATE, GATE, DECAY, CONDITION]
    if any(is_elsewhere({"mean": [], "elsewhere": measured.layers.elsewhere.tolist()})):
        out.append(f"{ELSEWHERE_NOTE}.")
    if not measured.layers.converged.all():
        out.append(
            "Where a layer has not converged the procedure never came to its tolerance: ℓ* there is"
            " the number of iterations that were made."
        )
    return out
