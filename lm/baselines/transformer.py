"""Llama without rotary embeddings: no position at all (NoPE), or linear biases (ALiBi).

This file travels with an exported checkpoint; `position: rope` is transformers' Llama itself.
"""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


class PositionConfig(LlamaConfig):
    """LlamaConfig and `position`: "nope" (Kazemnejad et al. 2023), "alibi" (Press et al. 2022)."""

    model_type = "fprnn_transformer"
    position: str = "nope"


class NoRotation(nn.Module):
    """In the place of Llama's rotary embedding: cos 1, sin 0 leave queries and keys as they are."""

    def __init__(self, head_dim):
        super().__init__()
        self.head_dim = head_dim

    def forward(self, x, position_ids):
        one = x.new_ones(1, position_ids.shape[-1], self.head_dim)
        return one, torch.zeros_like(one)


def alibi_slopes(n_heads):
    """The slopes of ALiBi's heads: 2^(−8/n), 2^(−16/n), … for n a power of two; else those of the
    power of two below, and every other one of the power of two above.

    Returns: (n_heads,) in fp64
    """
    below = 1 << (n_heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / below) for i in range(below)]
    slopes += [2 ** (-4 * (2 * i + 1) / below) for i in range(n_heads - below)]
    return torch.tensor(slopes, dtype=torch.float64)


def alibi_bias(n_heads, queries, keys, dtype, device, attention_mask=None):
    """What ALiBi adds to the scores: −slope · (i − j) for a key j at or before the query i, −∞
    after it and at padding. The queries are the last of the keys.

    Args: attention_mask: (b,keys), 0 at padding; a query sees itself in any case.
    Returns: (1 or b,n_heads,queries,keys)
    """
    j = torch.arange(keys, device=device)
    distance = j[keys - queries :, None] - j
    seen = distance >= 0
    if attention_mask is not None and not attention_mask.all():
        seen = seen & (attention_mask.bool()[:, None, None, :] | (distance == 0))
    slopes = alibi_slopes(n_heads).to(device, torch.float32)
    bias = (-slopes[:, None, None] * distance).to(dtype)
    return torch.where(seen, bias, -torch.inf).reshape(-1, n_heads, queries, keys)


class PositionForCausalLM(LlamaForCausalLM):
    """LlamaForCausalLM whose only knowledge of position is the causal mask, and ALiBi's biases."""

    config_class = PositionConfig

    def __init__(self, config):
        if config.position not in ("nope", "alibi"):
            raise ValueError(f"position is `{config.position}`: it must be nope or alibi")
        super().__init__(config)
        self.model.rotary_emb = NoRotation(config.hidden_size // config.num_attention_heads)

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        **kwargs,
    ):
        """As LlamaForCausalLM's; attention_mask is (b,l), or (b,past + l) with a cache."""
        if self.config.position == "alibi":
            x = inputs_embeds if input_ids is None else input_ids
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            attention_mask = alibi_bias(
                self.config.num_attention_heads, x.shape[1], past + x.shape[1],
                self.model.embed_tokens.weight.dtype, x.device, attention_mask,
            )  # fmt: skip
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )


__all__ = ["PositionConfig", "PositionForCausalLM"]
