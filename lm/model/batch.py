"""Inputs and outputs of the models around the layers: checks, padding, documents, the loss.

The loss of next-token prediction is a sum over targets, divided by a count that a caller may give.

Shape suffixes: b batch, l length.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput, logging

from .solver import FixedPointStats
from .state import FPRNNCache, FPRNNState

logger = logging.get_logger(__name__)

# Arguments that transformers may pass to any model, and that have no meaning for this one. (The
# tokenizers are arguments of `generate`, for stop strings.)
ARGUMENTS_WITHOUT_EFFECT = (
    "num_items_in_batch",
    "output_router_logits",
    "tokenizer",
    "assistant_tokenizer",
)
PACKED_ATTENTION_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def check_arguments(name: str, arguments: dict[str, Any], has_documents: bool) -> None:
    """Check the keyword arguments that a model's forward does not name.

    Args:
        name: Name of the model.
        arguments: The keyword arguments.
        has_documents: Whether position_ids or seq_idx are given, which mark packed documents.

    Raises:
        TypeError: If an argument has no meaning here.
        ValueError: If documents are marked by other arguments only, or if the model would have to
            be non-causal (is_causal is False).
    """
    arguments = {key: value for key, value in arguments.items() if value is not None}
    packing_keys = [key for key in arguments if key in PACKED_ATTENTION_ARGUMENTS]
    if packing_keys and not has_documents:
        raise ValueError(
            f"{name} does not read {', '.join(packing_keys)}: mark the starts of packed documents"
            " by position_ids that restart at 0, or by seq_idx"
        )
    if arguments.get("is_causal") is False:
        raise ValueError(f"{name} is causal: is_causal cannot be False")
    if arguments.get("output_attentions"):
        logger.warning_once(f"{name} returns no attention weights: output_attentions has no effect")
    known_names = {
        *ARGUMENTS_WITHOUT_EFFECT,
        *PACKED_ATTENTION_ARGUMENTS,
        "is_causal",
        "output_attentions",
    }
    unknown = sorted(arguments.keys() - known_names)
    if unknown:
        raise TypeError(f"{name}.forward does not know the argument {', '.join(unknown)}")


def embed(
    embeddings: torch.nn.Module, input_ids: Any, inputs_embeds: torch.Tensor | None
) -> torch.Tensor:
    """Return the embedded tokens, (b,l,d_model).

    Args:
        embeddings: Embedding layer.
        input_ids: Token ids, (b,l), or None.
        inputs_embeds: Embedded tokens, (b,l,d_model), or None.

    Raises:
        ValueError: If both or neither are given, if there is no token, or if an id is outside the
            vocabulary.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give exactly one of input_ids and inputs_embeds")
    if inputs_embeds is None:
        name, tokens, axes = "input_ids", input_ids, ["batch", "length"]
    else:
        name, tokens, axes = "inputs_embeds", inputs_embeds, ["batch", "length", "d_model"]
    shape = tuple(tokens.shape)
    if len(shape) != len(axes):
        raise ValueError(f"{name} has shape {shape}: it must be ({', '.join(axes)})")
    if 0 in shape[:2]:
        raise ValueError(f"{name} has shape {shape}: it must have at least one sequence and token")
    if inputs_embeds is not None:
        return inputs_embeds
    try:
        return embeddings(input_ids)
    except IndexError:
        raise ValueError(
            f"input_ids are between {input_ids.min()} and {input_ids.max()}: the vocabulary has the"
            f" ids 0 to {embeddings.num_embeddings - 1}"
        ) from None


def read_attention_mask(
    attention_mask: torch.Tensor | None, batch: int, length: int, has_cache: bool = False
) -> torch.Tensor | None:
    """Convert an attention mask to bool.

    Args:
        attention_mask: 0 at padding, (b,l), or None.
        batch: b.
        length: l.
        has_cache: Whether the mask may cover all tokens of the cache as well as the new ones.

    Returns:
        False at padding, (b,l), for the last `length` columns; None if nothing is masked.

    Raises:
        ValueError: If the mask has another shape.
    """
    if attention_mask is None:
        return None
    shape = tuple(attention_mask.shape)
    covers_cache = has_cache and len(shape) == 2 and shape[0] == batch and shape[1] > length
    if shape != (batch, length) and not covers_cache:
        raise ValueError(
            f"attention_mask has shape {shape}: it must be ({batch}, {length}), 0 at padding and 1"
            " elsewhere. Other masks are not possible: a recurrence reads all earlier tokens of its"
            " document"
        )
    mask = attention_mask[:, -length:] != 0
    return None if mask.all() else mask


def find_document_starts(
    position_ids: torch.Tensor | None, seq_idx: torch.Tensor | None, batch: int, length: int
) -> torch.Tensor | None:
    """Mark the first token of every packed document.

    Args:
        position_ids: Positions, (b,l) or (1,l), which increase within a document. The first token
            of a row starts a document if its position is 0.
        seq_idx: Index of each token's document, (b,l) or (1,l).
        batch: b.
        length: l.

    Returns:
        True at the first token of every document, (b,l); None if neither argument is given.

    Raises:
        ValueError: If an argument has another shape.
    """
    starts = None
    for name, values in (("position_ids", position_ids), ("seq_idx", seq_idx)):
        if values is None:
            continue
        shape = tuple(values.shape)
        if shape not in ((batch, length), (1, length)):
            raise ValueError(f"{name} has shape {shape}: it must be ({batch}, {length})")
        previous, current = values[:, :-1], values[:, 1:]
        if name == "position_ids":
            is_start = torch.cat([values[:, :1] == 0, current <= previous], 1)
        else:
            is_start = F.pad(current != previous, (1, 0))
        starts = is_start if starts is None else starts | is_start
    return None if starts is None else starts.repeat(batch // starts.shape[0], 1)


def mark_after_eos(
    input_ids: torch.Tensor, eos_token_id: int | list[int], last_token: torch.Tensor | None = None
) -> torch.Tensor:
    """Return True at every token that follows an end-of-sequence token, (b,l).

    Args:
        input_ids: Token ids, (b,l).
        eos_token_id: One id, or several.
        last_token: Token before the first one of each row, (b,), or None.
    """
    follows_eos = F.pad(_is_eos(input_ids[:, :-1], eos_token_id), (1, 0))
    if last_token is not None:
        follows_eos[:, 0] = _is_eos(last_token, eos_token_id)
    return follows_eos


def _is_eos(input_ids, eos_token_id):
    """Return whether each token is an end-of-sequence token."""
    is_eos = torch.zeros_like(input_ids, dtype=torch.bool)
    # Comparing with numbers copies no list of ids to the device.
    for eos in [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id:
        is_eos = is_eos | (input_ids == eos)
    return is_eos


@torch.no_grad()
def find_eos_ids(
    hidden: torch.Tensor, embeddings: torch.nn.Module, eos_token_id: int | list[int]
) -> torch.Tensor:
    """Return the ids of embedded end-of-sequence tokens, and −1 at all other tokens, (b,l).

    Args:
        hidden: Embedded tokens, (b,l,d_model). An EOS token equals its embedding exactly.
        embeddings: Embedding layer.
        eos_token_id: One id, or several.
    """
    ids = torch.full(hidden.shape[:2], -1, dtype=torch.long, device=hidden.device)
    eos_ids = torch.as_tensor(eos_token_id, device=hidden.device).flatten()
    for eos in eos_ids[eos_ids < embeddings.num_embeddings]:
        is_eos = (hidden == embeddings(eos).to(hidden.dtype)).all(-1)
        ids = torch.where(is_eos, eos, ids)
    return ids


IGNORED = -100  # label of a token without a target


def shift_left(labels: torch.Tensor) -> torch.Tensor:
    """Return the label after each token (b,l); IGNORED after the last one."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def choose_targets(
    labels: torch.Tensor | None, shift_labels: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the target of each token, (b,l): shift_labels if given, otherwise shifted labels."""
    if shift_labels is None and labels is not None:
        return shift_left(labels)
    return shift_labels


def select_positions(x: torch.Tensor, logits_to_keep: Any) -> torch.Tensor:
    """Select the positions whose logits are needed.

    Args:
        x: Vectors of the tokens, (b,l,…).
        logits_to_keep: Number of last positions (0: all), or a tensor: positions (k,), positions of
            each row (b,k), or bool (b,l).

    Returns:
        (b,k,…); with bool (k,…) for the k selected tokens of all rows.
    """
    if not torch.is_tensor(logits_to_keep):
        return x[:, -logits_to_keep:] if logits_to_keep else x
    if logits_to_keep.dim() < 2:
        return x[:, logits_to_keep]
    if logits_to_keep.dtype == torch.bool:
        return x[logits_to_keep]
    index = logits_to_keep.reshape(*logits_to_keep.shape, *[1] * (x.dim() - 2))
    return x.take_along_dim(index, 1)


def to_fp32(logits: torch.Tensor) -> torch.Tensor:
    """Convert logits to fp32; fp64 stays."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def nll_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum of the cross-entropy over all targets that are not IGNORED."""
    return F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def chunked_nll_sum(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    chunk_tokens: int,
) -> torch.Tensor:
    """Return `nll_sum` of head(hidden) without storing all logits.

    The backward computes the logits of each chunk of tokens again.

    Args:
        head: Map from hidden (…,d_model) to logits.
        hidden: Hidden states, (b,l,d_model).
        targets: Targets, (b,l).
        chunk_tokens: Tokens per chunk.
    """

    def chunk_sum(hidden, targets):
        return nll_sum(to_fp32(head(hidden)), targets)

    chunks = zip(hidden.flatten(0, 1).split(chunk_tokens), targets.flatten().split(chunk_tokens))
    sums = [checkpoint(chunk_sum, h, t, use_reentrant=False) for h, t in chunks]
    return sum(sums)


def count_targets(
    targets: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Return the number of targets (,), at least 1, which a summed loss is divided by.

    Args:
        targets: Targets of this micro-batch, (b,l).
        num_items_in_batch: Number of targets in all micro-batches of an update. None: count the
            targets of this micro-batch.
    """
    if num_items_in_batch is None:
        return (targets != IGNORED).sum().clamp_min(1)
    if not isinstance(num_items_in_batch, torch.Tensor):  # new_full does not wait for the GPU
        return targets.new_full((), max(num_items_in_batch, 1))
    return num_items_in_batch.to(targets.device).clamp_min(1)


class FixedPointReport:
    """FixedPointStats of all fixed-point layers, stacked to (n_layer,b).

    `token_iters` is (n_layer,b,l). `adjoint_norm` is a list of the layers' own tensors, because the
    backward writes into them. Fields that were not asked for are None. In a hybrid, n_layer counts
    the fixed-point layers only, and `layers` has their indices.

    It is not a tuple, because transformers would concatenate the elements of a tuple in an output
    over batches.
    """

    token_iters: torch.Tensor | None

    def __init__(self, fields: Iterable[Any], layers: list[int] | None = None) -> None:
        """Create a report.

        Args:
            fields: Values of the fields of FixedPointStats, in their order.
            layers: Indices of the fixed-point layers. None: all layers are.
        """
        self.layers = layers
        for name, value in zip(FixedPointStats._fields, fields, strict=True):
            setattr(self, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({vars(self)})"


# Name of a cache in outputs and arguments of transformers: `cache` from 5.24 on, where
# `past_key_values` of an output is a property.
CACHE = "cache" if hasattr(ModelOutput, "past_key_values") else "past_key_values"


def _output_class(cls: type) -> type:
    """Return a dataclass whose field `cache` is renamed to CACHE."""
    if CACHE != "cache":
        cls.__annotations__ = {
            CACHE if name == "cache" else name: kind for name, kind in cls.__annotations__.items()
        }
        delattr(cls, "cache")
        setattr(cls, CACHE, None)
    return dataclass(cls)


def choose_cache(past_key_values: Any, cache: Any) -> Any:
    """Return the cache that is given under either name.

    Raises:
        ValueError: If both are given.
    """
    if past_key_values is not None and cache is not None:
        raise ValueError("give one of cache and past_key_values: they are two names of the same")
    return past_key_values if cache is None else cache


@_output_class
class FPRNNOutput(ModelOutput):
    """Output of FPRNNModel.

    Attributes:
        last_hidden_state: (b,l,d_model).
        hidden_states: Input of each layer and the last hidden state, if asked for.
        fixed_point: Statistics of the solves, or None without fixed-point layers.
        state: FPRNNState after the last token, if asked for.
        cache: FPRNNCache, if asked for; the attribute's name is CACHE.
        attentions: Always None; `generate` reads it if output_attentions is asked for.
        is_finite: (n_layer + 2,) flags that the caller reads under `defer_check`.
    """

    last_hidden_state: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    fixed_point: FixedPointReport | None = None
    state: FPRNNState | None = None
    cache: FPRNNCache | None = None
    attentions: None = None
    is_finite: torch.BoolTensor | None = None


@_output_class
class FPRNNCausalLMOutput(ModelOutput):
    """Output of FPRNNForCausalLM.

    Attributes:
        loss: Scalar, if there are labels.
        logits: (b,l,vocab_size) in fp32; None under `loss_only`.
        hidden_states, fixed_point, state, cache, attentions: As in FPRNNOutput.
    """

    loss: torch.FloatTensor | None = None
    logits: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    fixed_point: FixedPointReport | None = None
    state: FPRNNState | None = None
    cache: FPRNNCache | None = None
    attentions: None = None
