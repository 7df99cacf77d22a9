"""What is checked and worked out of a batch before the first layer: sizes, padding, documents.

Shapes: b batch, l length. This file travels with an exported checkpoint: it imports from its own
folder only.
"""

from typing import Any

import torch
import torch.nn.functional as F
from transformers.utils import logging

logger = logging.get_logger(__name__)

# What transformers itself may pass to any model, and what has no meaning for one without attention
# and experts. `generate` hands on the tokenizers that it reads stop strings by.
WITHOUT_EFFECT = (
    "num_items_in_batch",
    "output_router_logits",
    "tokenizer",
    "assistant_tokenizer",
)
OF_PACKED_ATTENTION = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def refuse_unknown(name: str, arguments: dict[str, Any], documents_known: bool) -> None:
    """Whether a model may ignore the keyword arguments that its forward does not name.

    Args:
        name: of the model. documents_known: position_ids or seq_idx say where documents start.
    Raises:
        TypeError: an argument that has no meaning here.
        ValueError: one that says what only position_ids or seq_idx may say, or asks for a model
            that is not causal.
    """
    given = {key: value for key, value in arguments.items() if value is not None}
    packed = [key for key in given if key in OF_PACKED_ATTENTION]
    if packed and not documents_known:
        raise ValueError(
            f"{name} does not read {', '.join(packed)}: where packed documents start is said by"
            " position_ids that restart at 0, or by seq_idx"
        )
    if given.get("is_causal") is False:
        raise ValueError(f"{name} is causal: is_causal cannot be False")
    if given.get("output_attentions"):
        logger.warning_once(f"{name} returns no attention weights: output_attentions has no effect")
    known = {*WITHOUT_EFFECT, *OF_PACKED_ATTENTION, "is_causal", "output_attentions"}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise TypeError(f"{name}.forward does not know the argument {', '.join(unknown)}")


def embed(
    embeddings: torch.nn.Module, input_ids: Any, inputs_embeds: torch.Tensor | None
) -> torch.Tensor:
    """The embedded tokens (b,l,d_model), of exactly one of input_ids and inputs_embeds.

    Raises:
        ValueError: both or neither; no tokens at all; ids that the vocabulary does not have.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give exactly one of input_ids and inputs_embeds")
    if inputs_embeds is None:
        name, given, kind = "input_ids", input_ids, "(batch, length)"
    else:
        name, given, kind = "inputs_embeds", inputs_embeds, "(batch, length, d_model)"
    shape = tuple(given.shape)
    if len(shape) != kind.count(",") + 1:
        raise ValueError(f"{name} has shape {shape}: it must be {kind}")
    if 0 in shape[:2]:
        raise ValueError(f"{name} has shape {shape}: there must be a sequence and a token in it")
    if inputs_embeds is not None:
        return inputs_embeds
    try:
        return embeddings(input_ids)
    except IndexError:
        raise ValueError(
            f"input_ids go from {input_ids.min()} to {input_ids.max()}: the vocabulary's go from 0"
            f" to {embeddings.num_embeddings - 1}"
        ) from None


def checked_mask(
    attention_mask: torch.Tensor | None, batch: int, length: int, cached: bool = False
) -> torch.Tensor | None:
    """The last `length` columns of an attention mask as bool (b,l), None where nothing is masked.

    Args:
        cached: the mask may be of all tokens so far, not of the new ones only.
    Raises:
        ValueError: another shape.
    """
    if attention_mask is None:
        return None
    shape = tuple(attention_mask.shape)
    right = len(shape) == 2 and shape[0] == batch
    if not right or (shape[1] < length if cached else shape[1] != length):
        raise ValueError(
            f"attention_mask has shape {shape}: it must be ({batch}, {length}), 0 at padding and 1"
            " elsewhere. What a token may look at cannot be said otherwise: a recurrence looks at"
            " all that is before it in its document"
        )
    mask = attention_mask[:, -length:] != 0
    return None if not torch.compiler.is_compiling() and mask.all() else mask


def document_starts(
    position_ids: torch.Tensor | None, seq_idx: torch.Tensor | None, batch: int, length: int
) -> torch.Tensor | None:
    """True at the first token of every packed document, (b,l); None where nothing is said of them.

    Args:
        position_ids: (b,l) or (1,l), going up within a document; the first token of a row starts
            one where it is 0. seq_idx: (b,l) or (1,l), another number for another document.
    Raises:
        ValueError: another shape.
    """
    starts = None
    for name, given in (("position_ids", position_ids), ("seq_idx", seq_idx)):
        if given is None:
            continue
        shape = tuple(given.shape)
        if shape not in ((batch, length), (1, length)):
            raise ValueError(f"{name} has shape {shape}: it must be ({batch}, {length})")
        before, after = given[:, :-1], given[:, 1:]
        if name == "position_ids":
            here = torch.cat([given[:, :1] == 0, after <= before], 1)
        else:
            here = F.pad(after != before, (1, 0))
        starts = here if starts is None else starts | here
    return None if starts is None else starts.repeat(batch // starts.shape[0], 1)


def after_end(
    input_ids: torch.Tensor, eos_token_id: int | list[int], last_token: torch.Tensor | None = None
) -> torch.Tensor:
    """True at every token that comes after an end-of-sequence token, (b,l).

    Args:
        eos_token_id: one id, or several. last_token: (b,) the tokens before the first ones.
    """
    ends = torch.as_tensor(eos_token_id, device=input_ids.device)
    after = F.pad(torch.isin(input_ids[:, :-1], ends), (1, 0))
    if last_token is not None:
        after[:, 0] = torch.isin(last_token, ends)
    return after


@torch.no_grad()
def ends_among(
    hidden: torch.Tensor, embeddings: torch.nn.Module, eos_token_id: int | list[int]
) -> torch.Tensor:
    """The ids of embedded tokens that are end-of-sequence tokens, −1 at all others, (b,l): those
    whose embedding is an EOS token's, exactly.

    Args: hidden: (b,l,d_model). embeddings: the module. eos_token_id: one id, or several.
    """
    found = torch.full(hidden.shape[:2], -1, dtype=torch.long, device=hidden.device)
    ids = torch.as_tensor(eos_token_id, device=hidden.device).flatten()
    for eos in ids[ids < embeddings.num_embeddings]:
        same = (hidden == embeddings(eos).to(hidden.dtype)).all(-1)
        found = torch.where(same, eos, found)
    return found
