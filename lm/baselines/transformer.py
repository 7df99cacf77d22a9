"""Llama without rotary embeddings: no position at all (NoPE), or linear biases (ALiBi).

This file travels with an exported checkpoint; `position: rope` is transformers' Llama itself.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

from .inputs import document_starts, refuse_unknown
from .names import let_be_known

# What LlamaModel.forward and the loss take besides what PositionModel.forward names.
OF_LLAMA = ("output_attentions", "output_hidden_states", "return_dict", "shift_labels")


class PositionConfig(LlamaConfig):
    """LlamaConfig and `position`: "nope" (Kazemnejad et al. 2023), "alibi" (Press et al. 2022)."""

    model_type = "fprnn_transformer"
    position: str = "nope"


class NoRotation(nn.Module):
    """In the place of Llama's rotary embedding: cos 1, sin 0 leave queries and keys as they are."""

    def __init__(self, head_dim: int):
        super().__init__()
        self.head_dim = head_dim

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        one = x.new_ones(1, position_ids.shape[-1], self.head_dim)
        return one, torch.zeros_like(one)


def alibi_slopes(n_heads: int) -> Tensor:
    """The slopes of ALiBi's heads: 2^(−8/n), 2^(−16/n), … for n a power of two; else those of the
    power of two below, and every other one of the power of two above.

    Returns: (n_heads,) in fp64
    """
    below = 1 << (n_heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / below) for i in range(below)]
    slopes += [2 ** (-4 * (2 * i + 1) / below) for i in range(n_heads - below)]
    return torch.tensor(slopes, dtype=torch.float64)


def alibi_bias(
    n_heads: int,
    queries: int,
    keys: int,
    dtype: torch.dtype,
    device: torch.device,
    attention_mask: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """What ALiBi adds to the scores: −slope · (i − j) for a key j at or before the query i, −∞
    after it and at padding. The queries are the last of the keys.

    Args:
        n_heads: 0 for no position at all, and one head. attention_mask: (b,keys), 0 at padding; a
        query sees itself in any case. documents: (b,keys), the number of each token's document: a
        query sees its own alone.
    Returns: (1 or b,n_heads,queries,keys)
    """
    j = torch.arange(keys, device=device)
    distance = j[keys - queries :, None] - j
    seen = distance >= 0
    if attention_mask is not None and not attention_mask.all():
        seen = seen & (attention_mask.bool()[:, None, None, :] | (distance == 0))
    if documents is not None:
        seen = seen & (documents[:, None, keys - queries :, None] == documents[:, None, None, :])
    slopes = alibi_slopes(n_heads) if n_heads else torch.zeros(1)
    bias = (-slopes.to(device, torch.float32)[:, None, None] * distance).to(dtype)
    return torch.where(seen, bias, -torch.inf).reshape(-1, len(slopes), queries, keys)


class PositionModel(LlamaModel):
    """LlamaModel whose only knowledge of position is the causal mask, and ALiBi's biases."""

    config_class = PositionConfig

    def __init__(self, config: PositionConfig):
        if config.position not in ("nope", "alibi"):
            raise ValueError(f"position is `{config.position}`: it must be nope or alibi")
        super().__init__(config)
        self.rotary_emb = NoRotation(config.hidden_size // config.num_attention_heads)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """As LlamaModel's; attention_mask is (b,l), or (b,past + l) with a cache. A document starts
        where position_ids do not go up, or seq_idx changes.

        Raises:
            ValueError: no input; or documents that start within a row, and a cache: the tokens to
                come could not tell them apart.
            TypeError: an unknown keyword argument.
        """
        others = {name: value for name, value in kwargs.items() if name not in OF_LLAMA}
        refuse_unknown(type(self).__name__, others, not (position_ids is None and seq_idx is None))
        x = inputs_embeds if input_ids is None else input_ids
        if x is None:
            raise ValueError(f"{type(self).__name__} needs input_ids or inputs_embeds")
        batch, length = x.shape[:2]
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        documents = _documents(position_ids, seq_idx, attention_mask, batch, length)
        if documents is not None and (use_cache or past_key_values is not None):
            raise ValueError(
                f"{type(self).__name__} keeps no cache of packed documents: set use_cache=False"
            )
        alibi = self.config.position == "alibi"
        if alibi or documents is not None:
            attention_mask = alibi_bias(
                self.config.num_attention_heads if alibi else 0,
                length,
                past + length,
                self.embed_tokens.weight.dtype,
                x.device,
                attention_mask,
                documents,
            )
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )


def _documents(position_ids, seq_idx, attention_mask, batch, length):
    """The number of each token's document, (b,l); None where every row is one document. See
    document_starts; padding starts none."""
    starts = document_starts(position_ids, seq_idx, batch, length)
    if starts is None:
        return None
    if attention_mask is not None:
        tokens = attention_mask[:, -length:] != 0
        starts = starts & tokens & (tokens.cumsum(1) > 1)
    return starts.cumsum(1) if starts[:, 1:].any() else None


class PositionForCausalLM(LlamaForCausalLM):
    """LlamaForCausalLM of a PositionModel."""

    config_class = PositionConfig

    def __init__(self, config: PositionConfig):
        LlamaPreTrainedModel.__init__(self, config)
        self.model = PositionModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        let_be_known(self)


__all__ = ["PositionConfig", "PositionForCausalLM", "PositionModel"]
