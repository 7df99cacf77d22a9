"""Tests of WeightCache: cached weights are never older than the parameters."""

import copy

import pytest
import torch
from torch import nn

from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.layers import collect_parameters
from lm.model.mixers import Mixer
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.model.state import Sequences, WeightCache, cached, last_valid_tokens
from tests.marks import slow

BLOCKS = [
    {},
    {"block": "fp_mamba2", "headdim": 8},
    {"block": "fp_rnn", "use_short_conv": True},
    {"dt_h_dep": True, "b_h_dep": False},
    {"mixer": "mixture", "mixer_rank": 2},
    {"mixer_proj_rank": 3, "contractive": 0.5},
]
FULL_RANK = {"mixer": "nonselective", "glu_in_loop": True}
every_block = pytest.mark.parametrize("settings", [*BLOCKS, slow(FULL_RANK)], ids=str)


def model_of(n_layer=2, **settings):
    torch.manual_seed(0)
    sizes = dict(vocab_size=16, d_model=8, n_layer=n_layer, d_state=4)
    config = FPRNNConfig(**sizes, tol=1e-10, **settings)
    return FPRNNForCausalLM(config).double().eval()


def ids():
    return torch.randint(16, (2, 6), generator=torch.Generator().manual_seed(0))


def decode(model, cache):
    """Return the logits of another token, without changing the cache."""
    state, length = cache.state, cache.length
    logits = model(ids()[:, -1:], past_key_values=cache).logits
    cache.state, cache.length = state, length
    return logits


def decode_uncached(model, cache):
    """Return the same logits. A copy of a cache has no cached weights."""
    return decode(model, copy.deepcopy(cache))


@every_block
@torch.no_grad()
def test_cached_weights_change_nothing(settings):
    model = model_of(**settings)
    cache = model(ids(), use_cache=True).past_key_values
    assert cache._weight_caches[0]._values and not copy.deepcopy(cache)._weight_caches
    assert torch.equal(decode(model, cache), decode_uncached(model, cache))


@every_block
@torch.no_grad()
def test_changed_parameter_is_read_again(settings):
    model = model_of(n_layer=1, **settings)
    cache = model(ids(), use_cache=True).past_key_values
    before = decode(model, cache)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0 or "embeddings" in name:
            continue
        parameter.mul_(1.5).add_(0.1)
        assert torch.equal(decode(model, cache), decode_uncached(model, cache)), f"{name}, in place"
        parameter.data = parameter.data * 0.9
        assert torch.equal(decode(model, cache), decode_uncached(model, cache)), f"{name}, moved"
    assert not torch.equal(decode(model, cache), before)


@torch.no_grad()
def test_wrapped_layer_is_never_cached():
    model = model_of()
    block = model.backbone.layers[0].block
    cache = model(ids(), use_cache=True).past_key_values
    before = decode(model, cache)
    add_sum = lambda layer, args, out: out + args[0].sum()  # noqa: E731
    handle = block.mixer.u_proj.register_forward_hook(add_sum)
    assert block._materialized_parameters() is None
    hooked = decode(model, cache)
    assert not torch.allclose(hooked, before)
    handle.remove()
    assert torch.equal(decode(model, cache), before)


def test_nothing_is_cached_with_gradients():
    model = model_of()
    cache = model(ids(), use_cache=True).past_key_values
    assert not cache._weight_caches[0]._values
    decode(model, cache).sum().backward()
    assert model.backbone.layers[0].block.mixer.u_proj.direction.grad.abs().max() > 0


def test_nothing_is_cached_of_inference_tensors():
    with torch.inference_mode():
        layer = nn.Linear(2, 3)
        assert WeightCache().valid_for(collect_parameters([layer], ())) is None
    with torch.no_grad():
        assert WeightCache().valid_for(collect_parameters([nn.Linear(2, 3)], ())) is not None
        assert collect_parameters([nn.Sequential(layer)], (Mixer,)) is None
    assert cached(None, "x", lambda: 3) == 3


@pytest.mark.parametrize("n, length", [(1, 1), (1, 4), (3, 1), (3, 2), (3, 5), (0, 2)])
def test_last_positions_are_the_same_with_a_full_mask(n, length):
    x, before = torch.randn(2, length, 3), torch.randn(2, n, 3)
    full = Sequences(mask=torch.ones(2, length, dtype=torch.bool))
    for previous in (None, before):
        unmasked = last_valid_tokens(x, n, previous, Sequences())
        assert torch.equal(unmasked, last_valid_tokens(x, n, previous, full))
