"""What a batch meets around the layers: checks, padding, documents; the loss; what is returned.

The loss of next-token prediction is a sum over targets, divided by what the caller counts.

Shapes: b batch, l length.
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
    return None if mask.all() else mask


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
    after = F.pad(_is_end(input_ids[:, :-1], eos_token_id), (1, 0))
    if last_token is not None:
        after[:, 0] = _is_end(last_token, eos_token_id)
    return after


def _is_end(input_ids, eos_token_id):
    """Return whether each token is an end-of-sequence token, without a copy to the device."""
    is_end = torch.zeros_like(input_ids, dtype=torch.bool)
    for eos in [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id:
        is_end = is_end | (input_ids == eos)
    return is_end


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


IGNORED = -100  # a target that is none


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Labels that are the input's own tokens → the token after each, IGNORED after the last."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def targets_of(
    labels: torch.Tensor | None, shift_labels: torch.Tensor | None
) -> torch.Tensor | None:
    """What is to be predicted at each token, (b,l): shift_labels, which are that already, else the
    labels `shifted`; None without either."""
    if shift_labels is None and labels is not None:
        return shifted(labels)
    return shift_labels


def kept(x: torch.Tensor, logits_to_keep: Any) -> torch.Tensor:
    """The positions of x (b,l,…) whose logits are wanted.

    Args:
        logits_to_keep: how many of the last (0: all), or a tensor: positions (k,), positions of
            each row (b,k), or bool (b,l), for which rows and positions become one dimension.
    """
    if not torch.is_tensor(logits_to_keep):
        return x[:, -logits_to_keep:] if logits_to_keep else x
    if logits_to_keep.dim() < 2:
        return x[:, logits_to_keep]
    if logits_to_keep.dtype == torch.bool:
        return x[logits_to_keep]
    index = logits_to_keep.reshape(*logits_to_keep.shape, *[1] * (x.dim() - 2))
    return x.take_along_dim(index, 1)


def in_fp32(logits: torch.Tensor) -> torch.Tensor:
    """Logits in fp32, or wider where they are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def nll_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy over the targets that are not IGNORED."""
    return F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def chunked_nll_sum(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    chunk_tokens: int,
) -> torch.Tensor:
    """`nll_sum` of head(hidden) without ever holding all logits: those of a chunk of tokens are
    computed again in the backward.

    Args:
        head: hidden (…,d_model) → logits. hidden: (b,l,d_model). targets: (b,l).
    """

    def of_chunk(hidden, targets):
        return nll_sum(in_fp32(head(hidden)), targets)

    chunks = zip(hidden.flatten(0, 1).split(chunk_tokens), targets.flatten().split(chunk_tokens))
    sums = [checkpoint(of_chunk, h, t, use_reentrant=False) for h, t in chunks]
    return sum(sums)


def number_of(
    targets: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """What a summed loss is divided by: num_items_in_batch, the number of targets in all
    micro-batches of an update, where it is known, else the number in this one; 1 at least."""
    if num_items_in_batch is None:
        return (targets != IGNORED).sum().clamp_min(1)
    if not isinstance(num_items_in_batch, torch.Tensor):  # a copy to a GPU would wait for it
        return targets.new_full((), max(num_items_in_batch, 1))
    return num_items_in_batch.to(targets.device).clamp_min(1)


class FixedPointReport:
    """The FixedPointStats of all layers: the same fields, stacked to (n_layer,b), and `token_iters`
    to (n_layer,b,l); `adjoint_norm` is a list of the layers' own tensors, which the backward writes
    into; None what was not asked for. Of a hybrid n_layer is the number of its
    fixed-point layers, and `layers` says which these are.

    No tuple, since transformers takes tuples in an output apart, to concatenate over batches or to
    compare what is in them; these are not of that kind.
    """

    token_iters: torch.Tensor | None

    def __init__(self, fields: Iterable[Any], layers: list[int] | None = None) -> None:
        self.layers = layers  # their numbers, from 0 on; None: all
        for name, value in zip(FixedPointStats._fields, fields, strict=True):
            setattr(self, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({vars(self)})"


# What transformers calls a cache, in an output and as an argument: `cache` from 5.24 on, where an
# output's past_key_values is a property.
CACHE = "cache" if hasattr(ModelOutput, "past_key_values") else "past_key_values"


def _output(cls: type) -> type:
    """A dataclass whose field `cache` is called CACHE."""
    if CACHE != "cache":
        cls.__annotations__ = {
            CACHE if name == "cache" else name: kind for name, kind in cls.__annotations__.items()
        }
        delattr(cls, "cache")
        setattr(cls, CACHE, None)
    return dataclass(cls)


def one_cache(past_key_values: Any, cache: Any) -> Any:
    """The cache given under either name.

    Raises:
        ValueError: both are given.
    """
    if past_key_values is not None and cache is not None:
        raise ValueError("give one of cache and past_key_values: they are two names of the same")
    return past_key_values if cache is None else cache


@_output
class FPRNNOutput(ModelOutput):
    """last_hidden_state (b,l,d_model); hidden_states, one per layer and the last; fixed_point, what
    the solver reports; state, and the cache (an FPRNNCache; its name is CACHE), if they were asked
    for; attentions, always None, which `generate` reads where output_attentions is asked for;
    is_finite (n_layer + 2,) bool, the flags that the caller reads under `defer_check`."""

    last_hidden_state: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    fixed_point: FixedPointReport | None = None
    state: FPRNNState | None = None
    cache: FPRNNCache | None = None
    attentions: None = None
    is_finite: torch.BoolTensor | None = None


@_output
class FPRNNCausalLMOutput(ModelOutput):
    """loss (scalar); logits (b,l,vocab_size) in fp32, None under `loss_only`; the rest as in
    FPRNNOutput."""

    loss: torch.FloatTensor | None = None
    logits: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    fixed_point: FixedPointReport | None = None
    state: FPRNNState | None = None
    cache: FPRNNCache | None = None
    attentions: None = None
