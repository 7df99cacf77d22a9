"""M²RNN against its equations, written out."""

import pytest
import torch
import torch.nn.functional as F

from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.diagonal import M2RNN
from lm.model.modeling_fprnn import FPRNNForCausalLM
from tests.lm.model.test_channel_delta import layer
from tests.lm.model.test_delta import SIZES
from tests.lm.model.test_slstm import convolved


def written_out(block, u, groups):
    """A row u (l,32) of eight heads of 8, d_state 16."""
    n, heads, p = 16, 8, 8
    z, vkq, gate = (u @ block.in_proj.weight.T).split([64, 64 + 2 * groups * n, heads], dim=-1)
    v, k, q = convolved(vkq, block.conv1d).split([64, groups * n, groups * n], dim=-1)
    f = torch.exp(-torch.exp(block.A_log) * F.softplus(gate + block.dt_bias))
    out = torch.zeros_like(v)
    for head in range(heads):
        group = slice(n * (head // (heads // groups)), n * (head // (heads // groups)) + n)
        of_head = slice(p * head, p * head + p)
        H = torch.zeros(n, p, dtype=u.dtype)
        for t in range(len(u)):
            new = torch.tanh(H @ block.state_proj[head] + torch.outer(k[t, group], v[t, of_head]))
            H = f[t, head] * H + (1 - f[t, head]) * new
            out[t, of_head] = H.T @ q[t, group]
    o = (out + block.D * v) * F.silu(z)
    o = o / torch.sqrt(o.square().mean(-1, keepdim=True) + 1e-5) * block.norm.weight
    return o @ block.out_proj.weight.T


@pytest.mark.parametrize("groups", [1, 2])
@torch.no_grad()
def test_the_layer_is_the_papers(groups):
    block = layer("m2rnn", ngroups=groups, d_state=16)
    assert type(block) is M2RNN
    u = torch.randn(25, 32, dtype=torch.float64)
    torch.testing.assert_close(
        block(u[None])[0][0], written_out(block, u, groups), rtol=0, atol=1e-9
    )


def test_a_state_starts_unmoved_and_gates_as_gated_deltanets():
    model = FPRNNForCausalLM(FPRNNConfig(**SIZES, layers="m2rnn"))
    block = model.backbone.layers[0].block
    assert (block.state_proj == torch.eye(8)).all() and block.D.eq(1).all()
    assert block.A_log.exp().max() <= 16
    steps = F.softplus(block.dt_bias)
    assert steps.min() >= 9.9e-4 and steps.max() <= 0.101


def test_flops_are_those_of_its_operations():
    """Two a multiply-add of every weight; of the recurrence H W, and nine a number of H."""
    block = FPRNNForCausalLM(FPRNNConfig(**SIZES, layers="m2rnn")).backbone.layers[0].block
    maps = sum(getattr(block, n).weight.numel() for n in ("in_proj", "out_proj", "conv1d"))
    numbers = 64 * 16
    assert block.flops_per_token(9) == 2 * maps + numbers * (2 * 8 + 9)
