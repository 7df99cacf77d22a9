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


def layer(kind, seed=0, **settings):
    """A layer with nothing at its initial value, in fp64."""
    torch.manual_seed(seed)
    model = FPRNNForCausalLM(FPRNNConfig(**SIZES, layers=kind, **settings)).double()
    block = model.backbone.layers[0].block
    for p in block.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return block


def inputs(length, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, a, b, k = (torch.randn(2, length, 3, 4, generator=g, dtype=torch.float64) for _ in range(4))
    w = torch.rand(2, length, 3, 4, generator=g, dtype=torch.float64)
    v = torch.randn(2, length, 3, 5, generator=g, dtype=torch.float64)
    S = torch.randn(2, 3, 5, 4, generator=g, dtype=torch.float64)
    return q, w, 0.3 * a, b, k, v, S


def by_matrices(q, w, a, b, k, v, S, starts=None):
    """S (diag(w) + a bᵀ) + v kᵀ with the matrices written down."""
    out = []
    for t in range(q.shape[1]):
        if starts is not None:
            S = S * ~starts[:, t, None, None, None]
        move = torch.diag_embed(w[:, t]) + a[:, t, :, :, None] @ b[:, t, :, None, :]
        S = S @ move + v[:, t, :, :, None] @ k[:, t, :, None, :]
        out.append((S @ q[:, t, :, :, None]).squeeze(-1))
    return torch.stack(out, 1), S


@pytest.mark.parametrize("packed", [False, True])
def test_the_rule_is_its_matrices(packed):
    args = [t.requires_grad_() for t in inputs(9)]
    starts = None
    if packed:
        starts = torch.zeros(2, 9, dtype=torch.bool)
        starts[0, [0, 4]] = True
        starts[1, [3, 8]] = True
    found, expected = channel_delta_rule(*args, starts), by_matrices(*args, starts)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    grads = [torch.autograd.grad(sum(t.sin().sum() for t in r), args) for r in (found, expected)]
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


def unit(x):
    return x / torch.sqrt(x.square().sum() + 1e-6)


@pytest.mark.parametrize("negative", [False, True])
@torch.no_grad()
def test_kda_is_the_papers(negative):
    block = layer("kda", allow_neg_eigval=negative)
    assert type(block) is KDA
    u = torch.randn(20, 32, dtype=torch.float64)
    q = convolved(u, block.q_proj, block.q_conv1d).view(20, 4, 8)
    k = convolved(u, block.k_proj, block.k_conv1d).view(20, 4, 8)
    v = convolved(u, block.v_proj, block.v_conv1d).view(20, 4, 16)
    beta = (1 + negative) * torch.sigmoid(u @ block.b_proj.weight.T)
    low = u @ block.f_proj[0].weight.T @ block.f_proj[1].weight.T
    dt = F.softplus(low + block.dt_bias).view(20, 4, 8)
    alpha = torch.exp(-torch.exp(block.A_log)[:, None] * dt)
    z = u @ block.g_proj[0].weight.T @ block.g_proj[1].weight.T + block.g_proj[1].bias
    z = z.view(20, 4, 16)
    o = torch.zeros_like(z)
    eye = torch.eye(8, dtype=u.dtype)
    for h in range(4):
        S = torch.zeros(8, 16, dtype=u.dtype)  # theirs is (k,v)
        for t in range(20):
            key = unit(k[t, h])
            S = (eye - beta[t, h] * torch.outer(key, key)) @ torch.diag(alpha[t, h]) @ S
            S = S + beta[t, h] * torch.outer(key, v[t, h])
            o[t, h] = S.T @ unit(q[t, h]) / 8**0.5
    o = o / torch.sqrt(o.square().mean(-1, keepdim=True) + 1e-5) * block.o_norm.weight
    expected = (o * torch.sigmoid(z)).flatten(1) @ block.out_proj.weight.T
    torch.testing.assert_close(block(u[None])[0][0], expected, rtol=0, atol=1e-10)


@torch.no_grad()
def test_rwkv7_is_the_papers():
    block = layer("rwkv7")
    assert type(block) is RWKV7
    u = torch.randn(20, 32, dtype=torch.float64)
    before = torch.cat([torch.zeros(1, 32, dtype=u.dtype), u[:-1]])
    x = {n: u + (before - u) * getattr(block, f"x_{n}") for n in "rwkvag"}
    r, k, v = (x[n] @ getattr(block, f"{n}_proj").weight.T for n in "rkv")

    def low_rank(made, of, act):
        found = act(of @ made.down.weight.T) @ made.up.weight.T
        return found if made.up.bias is None else found + made.up.bias

    w = torch.exp(-math.exp(-0.5) * torch.sigmoid(low_rank(block.w_lora, x["w"], torch.tanh)))
    a = torch.sigmoid(low_rank(block.a_lora, x["a"], lambda t: t))
    g = low_rank(block.g_lora, x["g"], torch.sigmoid)
    o = torch.zeros(20, 32, dtype=u.dtype)
    for h in range(4):
        of_head = slice(8 * h, 8 * h + 8)
        S = torch.zeros(8, 8, dtype=u.dtype)
        for t in range(20):
            kk = unit(k[t, of_head] * block.k_k[of_head])
            written = k[t, of_head] * (1 + (a[t, of_head] - 1) * block.k_a[of_head])
            move = torch.diag(w[t, of_head]) - torch.outer(kk, a[t, of_head] * kk)
            S = S @ move + torch.outer(v[t, of_head], written)
            y = S @ r[t, of_head]
            y = (y - y.mean()) / torch.sqrt(y.var(unbiased=False) + 1e-5 * 8)
            y = y * block.g_norm.weight[of_head] + block.g_norm.bias[of_head]
            bonus = (r[t, of_head] * block.r_k[h] * written).sum()
            o[t, of_head] = (y + bonus * v[t, of_head]) * g[t, of_head]
    expected = o @ block.out_proj.weight.T
    torch.testing.assert_close(block(u[None])[0][0], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["kda", "rwkv7", "slstm", "mamba3", "m2rnn"])
def test_padding_leaves_the_state_as_it_is_and_a_text_goes_on(kind):
    block = layer(kind)
    u = torch.randn(1, 12, 32, dtype=torch.float64)
    mask = torch.arange(12)[None] < 7
    padded, _, end = block(u, Sequences(mask=mask, return_state=True))
    plain, _, expected = block(u[:, :7], Sequences(return_state=True))
    torch.testing.assert_close(padded[:, :7], plain)
    torch.testing.assert_close(end, expected)
    whole, _, last = block(u, Sequences(return_state=True))
    rest, _, found = block(u[:, 7:], Sequences(state=expected, return_state=True))
    torch.testing.assert_close(rest, whole[:, 7:])
    torch.testing.assert_close(found, last)


@pytest.mark.parametrize("kind", ["kda", "rwkv7", "slstm", "mamba3", "m2rnn"])
def test_documents_start_from_nothing_and_leave_their_state(kind):
    block = layer(kind)
    u = torch.randn(3, 11, 32, dtype=torch.float64)
    starts = torch.zeros(3, 11, dtype=torch.bool)
    starts[:, [0, 4]] = True
    _, _, state = block(u, Sequences(return_state=True))
    packed, _, end = block(u, Sequences(starts=starts, state=state, return_state=True))
    alone, _, expected = block(u[:, 4:], Sequences(return_state=True))
    torch.testing.assert_close(packed[:, 4:], alone)
    torch.testing.assert_close(packed[:, :4], block(u[:, :4])[0])
    later = torch.randn(3, 3, 32, dtype=torch.float64)
    found, wanted = (block(later, Sequences(state=s))[0] for s in (end, expected))
    torch.testing.assert_close(found, wanted)  # the states themselves may differ: Mamba-3's angles


@pytest.mark.parametrize("kind", ["kda", "rwkv7"])
def test_flops_are_those_of_its_operations(kind):
    """Two a multiply-add of every weight, but of what is no map; and the recurrence's own."""
    block = FPRNNForCausalLM(FPRNNConfig(**SIZES, layers=kind)).backbone.layers[0].block
    maps = (p.numel() for n, p in block.named_parameters() if p.ndim > 1 and "r_k" not in n)
    wide = block.config.d_inner if kind == "kda" else 32
    assert block.flops_per_token(100) == 2 * sum(maps) + 9 * wide * 8


def test_rwkv7_starts_as_its_authors_have_it():
    torch.manual_seed(0)
    config = FPRNNConfig(**{**SIZES, "d_model": 64, "headdim": 16}, layers="rwkv7")
    block = FPRNNForCausalLM(config).backbone.layers[0].block
    assert block.x_r[0] == 1 and 0.9 < 1 - block.x_r[-1] < 1  # 1 − (d − 1 over d)^0.2
    assert block.k_a.eq(1.02).all() and block.r_k.eq(-0.04).all()
    u = torch.randn(1, 5, 64)
    w = torch.exp(-math.exp(-0.5) * block.w_lora(u).sigmoid())
    assert w.min() > math.exp(-math.exp(-0.5)) and w.max() > 0.99
    assert (block.w_lora(u) == block.w_lora.up.bias).all()  # of no token yet


def test_weight_decay_acts_on_maps_alone():
    for kind in ("kda", "rwkv7", "slstm", "mamba3", "m2rnn"):
        names = dict(layer(kind).named_parameters())
        decayed = {name for name in names if has_weight_decay(name)}
        maps = {
            name
            for name, p in names.items()
            if p.ndim > 1 and not name.endswith(("bias", "r_k")) and "norm" not in name
        }
        assert decayed == maps, kind
