"""sLSTM against its equations without m, which keeps the exponentials finite."""

import torch
import torch.nn.functional as F

from lm.model.baseline_layers import SLSTM
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from tests.lm.model.test_channel_delta import make_layer
from tests.lm.model.test_delta import SIZES


def convolved(u, conv1d):
    """Return silu of the causal convolution over a row u (l,d), from its weights."""
    taps = conv1d.weight[:, 0]
    y = conv1d.bias.expand(len(u), -1).clone()
    for t in range(len(u)):
        for lag in range(min(t + 1, taps.shape[1])):
            y[t] += taps[:, taps.shape[1] - 1 - lag] * u[t - lag]
    return F.silu(y)


def run_by_token(block, u, read=None):
    """Compute a layer with four heads on a row u (l,32), with exponentials that may overflow.

    read: Function of the y of the token before, (32), or None.
    """
    inputs = torch.stack([*[convolved(u, block.conv1d)] * 2, u, u])  # of the gates i, f, z, o
    y, c, n = (torch.zeros(32, dtype=u.dtype) for _ in range(3))
    outputs = []
    for t in range(len(u)):
        if read is not None:
            y = read(y)
        heads = inputs[:, t].view(4, 4, 8), y.view(4, 8)  # (gate,h,e), (h,e)
        i, f, z, o = (
            torch.einsum("ghoe,ghe->gho", block.gates, heads[0])
            + torch.einsum("ghoe,he->gho", block.recurrent, heads[1])
            + block.gate_bias
        ).flatten(1)
        c = torch.sigmoid(f) * c + torch.exp(i) * torch.tanh(z)
        n = torch.sigmoid(f) * n + torch.exp(i)
        y = torch.sigmoid(o) * c / n
        outputs.append(y)
    heads = torch.stack(outputs).view(-1, 4, 8)
    std = torch.sqrt(heads.var(2, unbiased=False, keepdim=True) + 1e-5)
    normed = ((heads - heads.mean(2, keepdim=True)) / std).flatten(1)
    return (normed * block.group_norm.weight + block.group_norm.bias) @ block.out_proj.weight.T


@torch.no_grad()
def test_layer_equals_its_equations():
    block = make_layer("slstm")
    assert type(block) is SLSTM
    u = torch.randn(25, 32, dtype=torch.float64)
    expected = run_by_token(block, u)
    torch.testing.assert_close(block(u[None])[0][0], expected, rtol=0, atol=1e-9)


def test_gates_beyond_the_range_of_exp_stay_finite():
    block = make_layer("slstm").float()
    with torch.no_grad():
        block.gate_bias[0] = 300.0  # i: e³⁰⁰ is infinite in fp32
        block.gate_bias[1] = -300.0  # f: e⁻³⁰⁰ is zero in fp32
    u = torch.randn(2, 9, 32, requires_grad=True)
    out = block(u)[0]
    out.square().sum().backward()
    assert out.isfinite().all() and u.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in block.parameters())


def test_forget_gates_start_open_and_recurrent_weights_at_zero():
    model = FPRNNForCausalLM(FPRNNConfig(**SIZES, layers="slstm"))
    block = model.backbone.layers[0].block
    assert block.recurrent.eq(0).all() and block.gate_bias[[0, 2, 3]].eq(0).all()
    assert block.gate_bias[1].min() == 3 and block.gate_bias[1].max() == 6  # σ(3) = 0.95


def test_flops_are_two_per_weight_of_a_map():
    block = FPRNNForCausalLM(FPRNNConfig(**SIZES, layers="slstm")).backbone.layers[0].block
    maps = {name: p for name, p in block.named_parameters() if p.ndim > 1 and name != "gate_bias"}
    assert block.flops_per_token(length=9) == 2 * sum(p.numel() for p in maps.values())
