"""Measurements of a model on one sequence: predictions, ℓ* of each token, states and gates.

ℓ* is the number of iterations that the paper's solver needs for a token.
Shapes: t tokens, n fixed-point layers, v tokens in the vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from lm.common.errors import UserError
from lm.data.batches.text_bytes import token_bytes
from lm.evaluation.inspection.page import Inspection
from lm.evaluation.inspection.result import Guess, LayerMeasurements
from lm.evaluation.inspection.tokens import make_tokens, show_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

GUESS_COUNT = 5  # most likely predictions per token
CHUNK_TOKENS = 512  # tokens whose softmax is computed at once, to limit memory
DEFAULT_MAX_TOKENS = 2048  # for a model without `max_position_embeddings`


class InspectionError(UserError, ValueError):
    """Text that cannot be inspected; the message has the reason and a fix."""


class Predictions(NamedTuple):
    """Predictions at t positions."""

    loss: torch.Tensor  # (t,) nats; NaN if the target is None
    entropy: torch.Tensor  # (t,) nats
    guesses: list[list[tuple[int, float]]]  # (t,) ids and probabilities, most likely first


@torch.no_grad()
def run_with_probe(
    model: PreTrainedModel, ids: torch.Tensor
) -> tuple[torch.Tensor, LayerMeasurements | None]:
    """Run a model on a sequence, and measure its fixed-point layers.

    Args:
        model: The model, whose training mode is kept.
        ids: Token ids, (1,t).

    Returns:
        Logits (t,v) in fp32; and measurements of the layers, None if no layer is a fixed point.
    """
    blocks = _list_fixed_point_blocks(model)
    if not blocks:
        return model(input_ids=ids).logits[0].float(), None
    inputs = {}  # block → hidden states and properties of the batch (lm.model.state.Sequences)

    def record_inputs(block, arguments):
        inputs[block] = arguments[:2]

    with contextlib.ExitStack() as hooks:
        for block in blocks:
            hooks.callback(block.register_forward_pre_hook(record_inputs).remove)
        output = model(input_ids=ids, count_iterations=True, use_cache=False)
    report = output.fixed_point  # its tensors are (n,1) and (n,1,t), for one sequence
    traces = [block.trace_tokens(*inputs[block]) for block in blocks]
    indices = report.layers  # None if all layers are fixed points
    no_gate = torch.full(ids.shape, torch.nan)
    layers = LayerMeasurements(
        indices=list(range(len(blocks)) if indices is None else indices),
        iterations=report.token_iters[:, 0].cpu(),
        converged=report.converged[:, 0].cpu(),
        other_solution=report.other_solution[:, 0].cpu(),
        bisected=report.bisected[:, 0].cpu(),
        grad_limited=report.grad_limited[:, 0].cpu(),
        state_norm=_stack_rows(trace.state_norm for trace in traces),
        gate=_stack_rows(no_gate if trace.gate is None else trace.gate for trace in traces),
        decay=_stack_rows(trace.decay for trace in traces),
    )
    return output.logits[0].float(), layers


def _list_fixed_point_blocks(model: PreTrainedModel) -> list:
    """Return the blocks of all fixed-point layers; models of transformers have none."""
    return model.fixed_point_blocks() if hasattr(model, "fixed_point_blocks") else []


def _stack_rows(values) -> torch.Tensor:
    """Return n tensors (1,t) as one tensor (n,t) in fp32 on the CPU."""
    return torch.cat([value.float().cpu() for value in values])


def score_predictions(logits: torch.Tensor, targets: list[int | None]) -> Predictions:
    """Return loss, entropy and most likely predictions at each position.

    Args:
        logits: (t,v).
        targets: (t,) right ids; None at a position without a right prediction.

    Raises:
        InspectionError: If a logit is NaN or infinite.
    """
    if not torch.isfinite(logits).all():
        raise InspectionError("the model's logits are NaN or infinite")
    losses, entropies, guesses = [], [], []
    for start in range(0, len(targets), CHUNK_TOKENS):
        log_probs = torch.log_softmax(logits[start : start + CHUNK_TOKENS], -1)
        chunk = targets[start : start + CHUNK_TOKENS]
        # Without a target, use id 0 and replace the loss by NaN.
        target_ids = torch.tensor([target or 0 for target in chunk], device=logits.device)
        has_no_target = torch.tensor([target is None for target in chunk], device=logits.device)
        loss = -log_probs.gather(-1, target_ids[:, None])[:, 0]
        losses.append(loss.masked_fill(has_no_target, torch.nan).cpu())
        probs = log_probs.exp()
        entropies.append(-torch.xlogy(probs, probs).sum(-1).cpu())
        top = log_probs.topk(min(GUESS_COUNT, log_probs.shape[-1]), -1)
        for ids, probabilities in zip(top.indices.tolist(), top.values.exp().tolist(), strict=True):
            guesses.append(list(zip(ids, probabilities, strict=True)))
    return Predictions(torch.cat(losses), torch.cat(entropies), guesses)


def name_guesses(
    guesses: list[list[tuple[int, float]]], make_labels: Callable[[list[int]], list[str]]
) -> list[list[Guess]]:
    """Return predictions with readable labels.

    Args:
        guesses: Ids and probabilities at each position.
        make_labels: Function that returns the labels of a list of ids.
    """
    ids = sorted({token_id for row in guesses for token_id, _ in row})
    labels = dict(zip(ids, make_labels(ids), strict=True))
    return [[Guess(token_id, labels[token_id], p) for token_id, p in row] for row in guesses]


def find_start_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the token before a text, as in lm-eval: BOS, or EOS if there is no BOS.

    Return None for a tokenizer with neither.
    """
    bos = tokenizer.bos_token_id
    return tokenizer.eos_token_id if bos is None else bos


def encode(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str
) -> tuple[list[int], list[int]]:
    """Return the token before a text (a list with an id, or []), and the tokens of the text.

    Text that looks like a special token, such as "<eos>", is tokenized as text, as in training.

    Raises:
        InspectionError: If the text is empty, not Unicode, or too long for the model.
    """
    try:
        byte_count = len(text.encode())
    except UnicodeEncodeError:
        raise InspectionError(
            "the text is not Unicode: it contains half of a surrogate pair"
        ) from None
    if byte_count == 0:
        raise InspectionError("the text is empty: give at least one character")
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)[
        "input_ids"
    ]
    if not ids:
        raise InspectionError("the tokenizer returns no tokens for this text: give another text")
    start_token = find_start_token(tokenizer)
    start = [] if start_token is None else [start_token]
    max_tokens = getattr(model.config, "max_position_embeddings", None) or DEFAULT_MAX_TOKENS
    if len(start) + len(ids) > max_tokens:
        raise InspectionError(
            f"the text has {len(ids):,} tokens, but the model reads at most"
            f" {max_tokens - len(start):,} (max_position_embeddings"
            f"{', minus one for the start token' if start else ''}): give a part of the text"
        )
    return start, list(ids)


def inspect_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, name: str
) -> Inspection:
    """Run a causal language model on a text and return all measurements.

    Args:
        model: The model, in evaluation mode.
        tokenizer: Its tokenizer.
        text: The text.
        name: Name of the checkpoint.

    Raises:
        InspectionError: As in `encode` and `score_predictions`.
    """
    start, text_ids = encode(model, tokenizer, text)
    ids = start + text_ids
    logits, layers = run_with_probe(model, torch.tensor([ids], device=model.device))
    predictions = score_predictions(logits, [*ids[1:], None])

    def make_labels(token_ids: list[int]) -> list[str]:
        return list(map(show_bytes, token_bytes(tokenizer, token_ids)))

    guesses = name_guesses(predictions.guesses, make_labels)
    no_value = torch.full((1,), torch.nan)  # the first token is not predicted
    return Inspection(
        name=name,
        model=describe_model(model),
        tokens=make_tokens(ids, token_bytes(tokenizer, ids)),
        loss=torch.cat([no_value, predictions.loss[:-1]]),
        entropy=torch.cat([no_value, predictions.entropy[:-1]]),
        guesses=[[], *guesses[:-1]],
        next_guesses=guesses[-1],
        layers=layers,
        # Without a start token, the first token has no loss: the losses do not cover all bytes.
        text_bytes=len(text.encode()) if start else None,
        has_start=bool(start),
        solver=model.solver(len(ids)) if hasattr(model, "solver") else "none",
    )


def describe_model(model: PreTrainedModel) -> str:
    """Return a short description of a model: layers, mixers, width and parameters."""
    config = model.config
    blocks = _list_fixed_point_blocks(model)
    # `layers` lists different layers; without it, all layers are `block`.
    kind = getattr(config, "layers", None) or (config.block if blocks else config.model_type)
    mixers = sorted({f"mixer {block.config.mixer}" for block in blocks})
    layer_count = getattr(config, "num_hidden_layers", "unknown")
    width = getattr(config, "hidden_size", "unknown")
    parameter_count = sum(p.numel() for p in model.parameters())
    sizes = [f"layers {layer_count}", f"d_model {width}", f"{parameter_count:,} parameters"]
    return ", ".join([str(kind), *mixers, *sizes])
