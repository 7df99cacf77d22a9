"""M²RNN against its equations, written out."""

import pytest
import torch
import torch.nn.functional as F

from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.diagonal import M2RNN
from lm.model.modeling_fprnn import FPRNNForCausalLM
from tests.lm.model.test_channel_delta import make_layer
from tests.lm.model.test_delta import SIZES
from tests.lm.model.test_slstm import convolved


def run_by_token(block, u, groups, read=lambda state: state):
    """Compute a layer with 8 heads of 8 channels and d_state 16 on a row u (l,32).

    read: Function of the H of all heads after the token before, (1024).
    """
    n, heads, p = 16, 8, 8
    z, vkq, gate = (u @ block.in_proj.weight.T).split([64, 64 + 2 * groups * n, heads], dim=-1)
    v, k, q = convolved(vkq, block.conv1d).split([64, groups * n, groups * n], dim=-1)
    f = torch.exp(-torch.exp(block.A_log) * F.softplus(gate + block.dt_bias))
    H, outputs = torch.zeros(heads, n, p, dtype=u.dtype), []
    for t in range(len(u)):
        before, states = read(H.flatten()).view_as(H), []
        for head in range(heads):
            first = n * (head // (heads // groups))
            group = slice(first, first + n)  # channels of k and q that the head reads
            outer = torch.outer(k[t, group], v[t, p * head : p * head + p])
            new = torch.tanh(before[head] @ block.state_proj[head] + outer)
            states.append(f[t, head] * before[head] + (1 - f[t, head]) * new)
            outputs.append(states[-1].T @ q[t, group])
        H = torch.stack(states)
    out = torch.cat(outputs).view_as(v)
    o = (out + block.D * v) * F.silu(z)
    o = o / torch.sqrt(o.square().mean(-1, keepdim=True) + 1e-5) * block.norm.weight
    return o @ block.out_proj.weight.T


@pytest.mark.parametrize("groups", [1, 2])
@torch.no_grad()
def test_layer_equals_its_equations(groups):
    block = make_layer("m2rnn", ngroups=groups, d_state=16)
    assert type(block) is M2RNN
    u = torch.randn(25, 32, dtype=torch.float64)
    torch.testing.assert_close(
        block(u[None])[0][0], run_by_token(block, u, groups), rtol=0, atol=1e-9
    )


def test_state_proj_starts_as_identity_and_gates_as_in_gated_deltanet():
    model = FPRNNForCausalLM(FPRNNConfig(**SIZES, layers="m2rnn"))
    block = model.backbone.layers[0].block
    assert (block.state_proj == torch.eye(8)).all() and block.D.eq(1).all()
    assert block.A_log.exp().max() <= 16
    steps = F.softplus(block.dt_bias)
    assert steps.min() >= 9.9e-4 and steps.max() <= 0.101  # drawn from [1e-3, 0.1], then rounded


def test_flops_count_maps_and_recurrence():
    """Two per multiply-add of every map's weight and of H W, and 9 per entry of H."""
    block = FPRNNForCausalLM(FPRNNConfig(**SIZES, layers="m2rnn")).backbone.layers[0].block
    weights = sum(m.weight.numel() for m in (block.in_proj, block.out_proj, block.conv1d))
    state_entries = 64 * 16  # d_inner × d_state
    assert block.flops_per_token(length=9) == 2 * weights + state_entries * (2 * 8 + 9)
