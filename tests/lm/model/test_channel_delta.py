"""KDA and RWKV-7: the recurrence with explicit matrices, and the layers written out."""

import math

import pytest
import torch
import torch.nn.functional as F

from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.delta import KDA, RWKV7, channel_delta_rule
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.model.state import Sequences
from lm.training.optim import has_weight_decay
from tests.lm.model.test_delta import SIZES, convolved


def make_layer(kind, **settings):
    """Return a layer with random parameters, in fp64; initial zeros and ones could hide errors."""
    torch.manual_seed(0)
    model = FPRNNForCausalLM(FPRNNConfig(**SIZES, layers=kind, **settings)).double()
    block = model.backbone.layers[0].block
    for p in block.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return block


def inputs(length):
    """Return q, w, a, b, k, v and S with b = 2, h = 3, k = 4, v = 5 (see lm/model/delta.py)."""
    options = dict(generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, a, b, k = (torch.randn(2, length, 3, 4, **options) for _ in range(4))
    w = torch.rand(2, length, 3, 4, **options)
    v = torch.randn(2, length, 3, 5, **options)
    S = torch.randn(2, 3, 5, 4, **options)
    return q, w, 0.3 * a, b, k, v, S


def by_matrices(q, w, a, b, k, v, S, starts=None):
    """Compute S (diag(w) + a bᵀ) + v kᵀ and S q with explicit matrices."""
    outputs = []
    for t in range(q.shape[1]):
        if starts is not None:
            S = S * ~starts[:, t, None, None, None]
        transition = torch.diag_embed(w[:, t]) + a[:, t, :, :, None] @ b[:, t, :, None, :]
        S = S @ transition + v[:, t, :, :, None] @ k[:, t, :, None, :]
        outputs.append((S @ q[:, t, :, :, None]).squeeze(-1))
    return torch.stack(outputs, 1), S


@pytest.mark.parametrize("packed", [False, True])
def test_rule_equals_explicit_matrices(packed):
    args = [t.requires_grad_() for t in inputs(9)]
    starts = None
    if packed:
        starts = torch.zeros(2, 9, dtype=torch.bool)
        starts[0, [0, 4]] = True
        starts[1, [3, 8]] = True
    actual, expected = channel_delta_rule(*args, starts), by_matrices(*args, starts)
    for one, other in zip(actual, expected):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    grads = [torch.autograd.grad(sum(t.sin().sum() for t in r), args) for r in (actual, expected)]
    for one, other in zip(*grads):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def unit(x):
    return x / torch.sqrt(x.square().sum() + 1e-6)


@pytest.mark.parametrize("beta_factor", [1, 2])
@torch.no_grad()
def test_kda_equals_its_equations(beta_factor):
    block = make_layer("kda", allow_neg_eigval=beta_factor == 2)
    assert type(block) is KDA
    u = torch.randn(20, 32, dtype=torch.float64)
    q = convolved(u, block.q_proj, block.q_conv1d).view(20, 4, 8)
    k = convolved(u, block.k_proj, block.k_conv1d).view(20, 4, 8)
    v = convolved(u, block.v_proj, block.v_conv1d).view(20, 4, 16)
    beta = beta_factor * torch.sigmoid(u @ block.b_proj.weight.T)
    mapped = u @ block.f_proj[0].weight.T @ block.f_proj[1].weight.T
    dt = F.softplus(mapped + block.dt_bias).view(20, 4, 8)
    alpha = torch.exp(-torch.exp(block.A_log)[:, None] * dt)
    z = u @ block.g_proj[0].weight.T @ block.g_proj[1].weight.T + block.g_proj[1].bias
    z = z.view(20, 4, 16)
    o = torch.zeros_like(z)
    eye = torch.eye(8, dtype=u.dtype)
    for h in range(4):
        S = torch.zeros(8, 16, dtype=u.dtype)  # (k,v) as in the paper, transposed in our code
        for t in range(20):
            key = unit(k[t, h])
            S = (eye - beta[t, h] * torch.outer(key, key)) @ torch.diag(alpha[t, h]) @ S
            S = S + beta[t, h] * torch.outer(key, v[t, h])
            o[t, h] = S.T @ unit(q[t, h]) / 8**0.5
    o = o / torch.sqrt(o.square().mean(-1, keepdim=True) + 1e-5) * block.o_norm.weight
    expected = (o * torch.sigmoid(z)).flatten(1) @ block.out_proj.weight.T
    torch.testing.assert_close(block(u[None])[0][0], expected, rtol=0, atol=1e-10)


@torch.no_grad()
def test_rwkv7_equals_its_equations():
    block = make_layer("rwkv7")
    assert type(block) is RWKV7
    u = torch.randn(20, 32, dtype=torch.float64)
    before = torch.cat([torch.zeros(1, 32, dtype=u.dtype), u[:-1]])
    x = {name: u + (before - u) * getattr(block, f"x_{name}") for name in "rwkvag"}
    r, k, v = (x[name] @ getattr(block, f"{name}_proj").weight.T for name in "rkv")

    def low_rank(layer, x, act):
        output = act(x @ layer.down.weight.T) @ layer.up.weight.T
        return output if layer.up.bias is None else output + layer.up.bias

    w = torch.exp(-math.exp(-0.5) * torch.sigmoid(low_rank(block.w_lora, x["w"], torch.tanh)))
    a = torch.sigmoid(low_rank(block.a_lora, x["a"], lambda t: t))
    g = low_rank(block.g_lora, x["g"], torch.sigmoid)
    o = torch.zeros(20, 32, dtype=u.dtype)
    for h in range(4):
        channels = slice(8 * h, 8 * h + 8)  # of the head
        S = torch.zeros(8, 8, dtype=u.dtype)
        for t in range(20):
            erased_key = unit(k[t, channels] * block.k_k[channels])
            written_key = k[t, channels] * (1 + (a[t, channels] - 1) * block.k_a[channels])
            erased = torch.outer(erased_key, a[t, channels] * erased_key)
            S = S @ (torch.diag(w[t, channels]) - erased) + torch.outer(v[t, channels], written_key)
            y = S @ r[t, channels]
            y = (y - y.mean()) / torch.sqrt(y.var(unbiased=False) + 1e-5 * 8)  # GroupNorm
            y = y * block.g_norm.weight[channels] + block.g_norm.bias[channels]
            bonus = (r[t, channels] * block.r_k[h] * written_key).sum()
            o[t, channels] = (y + bonus * v[t, channels]) * g[t, channels]
    expected = o @ block.out_proj.weight.T
    torch.testing.assert_close(block(u[None])[0][0], expected, rtol=0, atol=1e-10)


KINDS = ["kda", "rwkv7", "slstm", "mamba3", "m2rnn"]  # layers whose state these tests check


@pytest.mark.parametrize("kind", KINDS)
def test_padding_keeps_the_state_and_a_state_continues(kind):
    block = make_layer(kind)
    u = torch.randn(1, 12, 32, dtype=torch.float64)
    mask = torch.arange(12)[None] < 7  # the last five tokens are padding
    padded, _, end = block(u, Sequences(mask=mask, return_state=True))
    plain, _, expected = block(u[:, :7], Sequences(return_state=True))
    torch.testing.assert_close(padded[:, :7], plain)
    torch.testing.assert_close(end, expected)
    whole, _, whole_end = block(u, Sequences(return_state=True))
    rest, _, rest_end = block(u[:, 7:], Sequences(state=expected, return_state=True))
    torch.testing.assert_close(rest, whole[:, 7:])
    torch.testing.assert_close(rest_end, whole_end)


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_starts_without_the_state_and_the_last_one_leaves_its_own(kind):
    block = make_layer(kind)
    u = torch.randn(3, 11, 32, dtype=torch.float64)
    starts = torch.zeros(3, 11, dtype=torch.bool)
    starts[:, [0, 4]] = True
    _, _, state = block(u, Sequences(return_state=True))
    packed, _, end = block(u, Sequences(starts=starts, state=state, return_state=True))
    alone, _, expected = block(u[:, 4:], Sequences(return_state=True))
    torch.testing.assert_close(packed[:, 4:], alone)
    torch.testing.assert_close(packed[:, :4], block(u[:, :4])[0])
    later = torch.randn(3, 3, 32, dtype=torch.float64)
    # The states may differ: Mamba-3's angles of earlier documents turn keys and queries alike.
    after_packed, after_alone = (block(later, Sequences(state=s))[0] for s in (end, expected))
    torch.testing.assert_close(after_packed, after_alone)


@pytest.mark.parametrize("kind", ["kda", "rwkv7"])
def test_flops_count_maps_and_recurrence(kind):
    """Two per multiply-add of every map's weight, and 9 per entry of the state."""
    block = FPRNNForCausalLM(FPRNNConfig(**SIZES, layers=kind)).backbone.layers[0].block
    maps = (p.numel() for name, p in block.named_parameters() if p.ndim > 1 and name != "r_k")
    value_width = block.config.d_inner if kind == "kda" else 32
    assert block.flops_per_token(length=100) == 2 * sum(maps) + 9 * value_width * 8


def test_rwkv7_has_its_authors_initial_values():
    torch.manual_seed(0)
    config = FPRNNConfig(**{**SIZES, "d_model": 64, "headdim": 16}, layers="rwkv7")
    block = FPRNNForCausalLM(config).backbone.layers[0].block
    # x_r is 1 − (i / d)^0.2 in channel i, with i from 0 to d − 1.
    assert block.x_r[0] == 1 and 0.9 < 1 - block.x_r[-1] < 1
    assert block.k_a.eq(1.02).all() and block.r_k.eq(-0.04).all()
    u = torch.randn(1, 5, 64)
    w = torch.exp(-math.exp(-0.5) * block.w_lora(u).sigmoid())
    assert w.min() > math.exp(-math.exp(-0.5)) and w.max() > 0.99
    assert (block.w_lora(u) == block.w_lora.up.bias).all()  # the decay does not depend on u yet


def test_weight_decay_acts_on_maps_only():
    for kind in KINDS:
        parameters = dict(make_layer(kind).named_parameters())
        decayed = {name for name in parameters if has_weight_decay(name)}
        maps = {
            name
            for name, p in parameters.items()
            if p.ndim > 1 and not name.endswith(("bias", "r_k")) and "norm" not in name
        }
        assert decayed == maps, kind
