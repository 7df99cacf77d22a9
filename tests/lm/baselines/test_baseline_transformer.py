"""The Transformer's positions: RoPE is Llama, NoPE knows the causal mask, ALiBi the paper's."""

import pytest
import torch
from transformers import LlamaForCausalLM

from lm.baselines.transformer import alibi_bias, alibi_slopes
from lm.config.schema import Config
from lm.training.build import build_model


def build(position, n_layer=1, **fields):
    sizes = {"d_model": 32, "n_layer": n_layer, "headdim": 8, "d_ff": 48, **fields}
    cfg = Config(model={"name": "transformer", "position": position, **sizes})
    torch.manual_seed(0)
    model = build_model(cfg, 16).double().eval()
    for p in model.parameters():  # large enough that attention is far from uniform
        p.data.mul_(8) if p.ndim > 1 else None
    return model


@torch.no_grad()
def logits(model, ids, **kwargs):
    return model(input_ids=ids, **kwargs).logits


IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
SHUFFLED = torch.tensor([[9, 5, 1, 2, 1, 3, 4, 6]])  # the same tokens before the same last one


@pytest.mark.parametrize("position, sees_order", [("nope", False), ("rope", True), ("alibi", True)])
def test_one_layer_sees_the_order_of_the_prefix_only_with_positions(position, sees_order):
    """What one layer knows of the last token's past is a set, unless something tells positions."""
    model = build(position)
    difference = (logits(model, IDS)[:, -1] - logits(model, SHUFFLED)[:, -1]).abs().max()
    assert (difference > 1e-3) if sees_order else (difference < 1e-10)


@pytest.mark.parametrize("n_layer", [1, 3])
def test_nope_cannot_count_a_constant_sequence(n_layer):
    """With one token repeated every attention average is of equals, at any depth."""
    out = logits(build("nope", n_layer), torch.full((1, 10), 5))
    torch.testing.assert_close(out, out[:, :1].expand_as(out), rtol=0, atol=1e-10)


def test_two_layers_of_nope_see_the_order_through_the_causal_mask():
    model = build("nope", 2)
    assert (logits(model, IDS)[:, -1] - logits(model, SHUFFLED)[:, -1]).abs().max() > 1e-3


def test_rope_is_transformers_llama_and_rotates():
    model = build("rope")
    assert type(model) is LlamaForCausalLM
    # The same weights without rotation give something else: the identity embedding is no rotation.
    other = build("nope")
    other.load_state_dict(model.state_dict())
    assert (logits(model, IDS) - logits(other, IDS)).abs().max() > 1e-3


def test_alibi_slopes_are_the_papers():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(16).tolist() == pytest.approx([2 ** (-i / 2) for i in range(1, 17)])
    # Not a power of two: those of 8, then every other one of 16 (the authors' code).
    twelve = [2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert alibi_slopes(12).tolist() == pytest.approx(twelve)
    assert alibi_slopes(1).tolist() == [2**-8]


def test_alibi_bias_is_minus_slope_times_distance():
    bias = alibi_bias(4, 5, 5, torch.float64, "cpu")
    assert bias.shape == (1, 4, 5, 5)
    for h, slope in enumerate(alibi_slopes(4).tolist()):
        for i in range(5):
            for j in range(5):
                expected = -slope * (i - j) if j <= i else -torch.inf
                assert bias[0, h, i, j].item() == pytest.approx(expected)
    assert torch.equal(alibi_bias(4, 2, 5, torch.float64, "cpu"), bias[:, :, 3:])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    padded = alibi_bias(4, 5, 5, torch.float64, "cpu", mask)
    assert torch.equal(padded[1], bias[0]) and torch.equal(padded[0, :, 2:, 2:], bias[0, :, 2:, 2:])
    assert (padded[0, :, 2:, :2] == -torch.inf).all()
    assert (padded.max(-1).values > -torch.inf).all()  # a query at padding sees itself: no NaN


def test_alibi_attention_is_the_papers_formula():
    """One layer written out: softmax(q kᵀ / √d − slope · distance) v."""
    model = build("alibi")
    layer, x = model.model.layers[0], model.model.embed_tokens(IDS)
    a = layer.self_attn
    u = layer.input_layernorm(x)
    q, k, v = (p(u).unflatten(-1, (4, 8)).transpose(1, 2) for p in (a.q_proj, a.k_proj, a.v_proj))
    scores = q @ k.transpose(2, 3) / 8**0.5
    i = torch.arange(8)
    scores = scores - alibi_slopes(4)[:, None, None] * (i[:, None] - i)
    scores = scores.masked_fill(i[:, None] < i, -torch.inf)
    y = x + a.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    y = y + layer.mlp(layer.post_attention_layernorm(y))
    expected = model.lm_head(model.model.norm(y))
    torch.testing.assert_close(logits(model, IDS), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("position", ["rope", "nope", "alibi"])
def test_generation_with_and_without_a_cache_agree(position):
    model = build(position, 2)
    ids = torch.randint(0, 16, (2, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    with_cache, without = (
        model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, use_cache=c,
                       pad_token_id=0)
        for c in (True, False)
    )  # fmt: skip
    assert torch.equal(with_cache, without)
    alone = model.generate(ids[:1, 2:], max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(with_cache[0, 2:], alone[0])
