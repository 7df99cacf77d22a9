"""One pass of a model over one sequence: predictions, ℓ* of each token, what goes on in its layers.

Shapes: t tokens, n solved layers, v vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from lm.common.errors import UserError
from lm.data.batches.text_bytes import token_bytes
from lm.evaluation.inspection.page import Inspection
from lm.evaluation.inspection.result import Guess, Layers
from lm.evaluation.inspection.tokens import make_tokens, show_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOP = 5  # likeliest predictions that are kept
PREDICTED_AT_ONCE = 512  # tokens: a large vocabulary's logits are gone through in parts
LONGEST = 2048  # tokens, where the checkpoint does not say what it can take


class InspectionError(UserError, ValueError):
    """A text that cannot be looked at; the message says why, and what would do."""


class Predictions(NamedTuple):
    """Of each of t positions."""

    loss: torch.Tensor  # (t,) nats; NaN where the target is None
    entropy: torch.Tensor  # (t,) nats
    guesses: list[list[tuple[int, float]]]  # (t,) ids and probabilities, likeliest first


@torch.no_grad()
def run_with_probe(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, Layers | None]:
    """One pass, in the mode that the model is in → logits (t,v) and Layers, or None of a model
    without a layer that is solved. ids, mask: (1,t)."""
    blocks = model.fixed_point_blocks() if hasattr(model, "fixed_point_blocks") else []
    if not blocks:
        return model(input_ids=ids, attention_mask=mask).logits[0].float(), None
    inputs = {}

    def keep(block, given):
        inputs[block] = given[:2]  # the vectors that it reads, and facts about the tokens

    with contextlib.ExitStack() as hooks:
        for block in blocks:
            hooks.callback(block.register_forward_pre_hook(keep).remove)
        output = model(input_ids=ids, attention_mask=mask, count_iterations=True, use_cache=False)
    report = output.fixed_point
    observed = [block.trace_tokens(*inputs[block]) for block in blocks]
    numbers = report.layers if report.layers is not None else list(range(len(blocks)))
    missing = torch.full(ids.shape, torch.nan)
    layers = Layers(
        numbers=list(numbers),
        iterations=report.token_iters[:, 0].cpu(),
        converged=report.converged[:, 0].cpu(),
        other_solution=report.other_solution[:, 0].cpu(),
        bisected=report.bisected[:, 0].cpu(),
        grad_limited=report.grad_limited[:, 0].cpu(),
        state_norm=_rows(layer.state_norm for layer in observed),
        gate=_rows(missing if layer.gate is None else layer.gate for layer in observed),
        decay=_rows(layer.decay for layer in observed),
    )
    return output.logits[0].float(), layers


def _rows(values) -> torch.Tensor:
    """(1,t) each → (n,t) on the CPU."""
    return torch.cat([value.float().cpu() for value in values])


def score_predictions(logits: torch.Tensor, targets: list[int | None]) -> Predictions:
    """logits: (t,v). targets: (t,) the ids that were to be predicted; None: there was none.

    Raises:
        InspectionError: a logit is NaN or infinite.
    """
    if not torch.isfinite(logits).all():
        raise InspectionError("the model's logits are NaN or infinite: there is nothing to show")
    losses, entropies, guesses = [], [], []
    for start in range(0, len(targets), PREDICTED_AT_ONCE):
        log_p = torch.log_softmax(logits[start : start + PREDICTED_AT_ONCE], -1)
        of_part = targets[start : start + PREDICTED_AT_ONCE]
        wanted = torch.tensor([0 if x is None else x for x in of_part], device=log_p.device)
        none = torch.tensor([x is None for x in of_part], device=log_p.device)
        loss = -log_p.gather(-1, wanted[:, None])[:, 0]
        losses.append(loss.masked_fill(none, torch.nan).cpu())
        entropies.append(-torch.xlogy(log_p.exp(), log_p.exp()).sum(-1).cpu())
        top = log_p.topk(min(TOP, log_p.shape[-1]), -1)
        for numbers, values in zip(top.indices.tolist(), top.values.exp().tolist(), strict=True):
            guesses.append(list(zip(numbers, values, strict=True)))
    return Predictions(torch.cat(losses), torch.cat(entropies), guesses)


def name_guesses(
    guesses: list[list[tuple[int, float]]], names: Callable[[list[int]], list[str]]
) -> list[list[Guess]]:
    """Guesses with what their ids are shown as. names: of a list of ids."""
    ids = sorted({number for row in guesses for number, _ in row})
    shown = dict(zip(ids, names(ids), strict=True))
    return [[Guess(number, shown[number], p) for number, p in row] for row in guesses]


def start_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """What is put before a text, as lm-eval does: BOS where the tokenizer has one, else EOS."""
    bos = tokenizer.bos_token_id
    return tokenizer.eos_token_id if bos is None else bos


def encode(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str
) -> tuple[list[int], list[int]]:
    """(the start token or nothing, the text's tokens). Text that spells a special token stays text,
    as in training.

    Raises:
        InspectionError: nothing to read, text that is no Unicode, or too much of it.
    """
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InspectionError("the text is not Unicode: it holds half of a character") from None
    if not size:
        raise InspectionError("the text is empty: give at least one character")
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)[
        "input_ids"
    ]
    longest = getattr(model.config, "max_position_embeddings", None) or LONGEST
    if len(ids) > longest:
        raise InspectionError(
            f"the text has {len(ids):,} tokens, and evaluation reads {longest:,} at once"
            " (max_position_embeddings): give a part of it"
        )
    if not ids:
        raise InspectionError("the tokenizer makes no token of this text: give another one")
    first = start_token(tokenizer)
    return ([] if first is None else [first]), list(ids)


def inspect_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, name: str
) -> Inspection:
    """What a causal language model, in evaluation mode, makes of a text.

    Raises:
        InspectionError: see `encode` and `score_predictions`.
    """
    start, of_text = encode(model, tokenizer, text)
    ids = start + of_text
    logits, layers = run_with_probe(model, torch.tensor([ids], device=model.device))
    found = score_predictions(logits, [*ids[1:], None])

    def names(numbers: list[int]) -> list[str]:
        return list(map(show_bytes, token_bytes(tokenizer, numbers)))

    guesses = name_guesses(found.guesses, names)
    none = torch.full((1,), torch.nan)
    return Inspection(
        name=name,
        model=describe_model(model),
        tokens=make_tokens(ids, token_bytes(tokenizer, ids)),
        loss=torch.cat([none, found.loss[:-1]]),
        entropy=torch.cat([none, found.entropy[:-1]]),
        guesses=[[], *guesses[:-1]],
        following=guesses[-1],
        layers=layers,
        text_bytes=len(text.encode()) if start else None,
        has_start=bool(start),
        solver=model.solver(len(ids)) if hasattr(model, "solver") else "none",
    )


def describe_model(model: PreTrainedModel) -> str:
    """Return a model in a few words: its layers, mixers, width and parameters."""
    config = model.config
    blocks = model.fixed_point_blocks() if hasattr(model, "fixed_point_blocks") else []
    kind = getattr(config, "layers", None) or (config.block if blocks else config.model_type)
    words = [str(kind), *sorted({f"mixer {block.config.mixer}" for block in blocks})]
    for label, name in (("layers", "num_hidden_layers"), ("d_model", "hidden_size")):
        words.append(f"{label} {getattr(config, name, 'unknown')}")
    count = sum(p.numel() for p in model.parameters())
    return ", ".join([*words, f"{count:,} parameters"])
