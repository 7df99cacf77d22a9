"""sLSTM against its equations, written out without the stabiliser."""

import torch
import torch.nn.functional as F

from lm.model.baseline_layers import SLSTM
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from tests.lm.model.test_channel_delta import layer
from tests.lm.model.test_delta import SIZES


def convolved(u, conv1d):
    taps = conv1d.weight[:, 0]
    y = conv1d.bias.expand(len(u), -1).clone()
    for t in range(len(u)):
        for lag in range(min(t + 1, taps.shape[1])):
            y[t] += taps[:, taps.shape[1] - 1 - lag] * u[t - lag]
    return F.silu(y)


def written_out(block, u):
    """A row u (l,32) of four heads; exponentials as they are."""
    read = convolved(u, block.conv1d)
    out = torch.zeros_like(u)
    for h in range(4):
        of_head = slice(8 * h, 8 * h + 8)
        y, c, n = (torch.zeros(8, dtype=u.dtype) for _ in range(3))
        for t in range(len(u)):
            x = [read[t, of_head], read[t, of_head], u[t, of_head], u[t, of_head]]
            i, f, z, o = (
                block.gates[g, h] @ x[g] + block.recurrent[g, h] @ y + block.gate_bias[g, h]
                for g in range(4)
            )
            c = torch.sigmoid(f) * c + torch.exp(i) * torch.tanh(z)
            n = torch.sigmoid(f) * n + torch.exp(i)
            y = torch.sigmoid(o) * c / n
            out[t, of_head] = y
        part = out[:, of_head]
        part = (part - part.mean(1, keepdim=True)) / torch.sqrt(
            part.var(1, unbiased=False, keepdim=True) + 1e-5
        )
        norm = block.group_norm
        out[:, of_head] = part * norm.weight[of_head] + norm.bias[of_head]
    return out @ block.out_proj.weight.T


@torch.no_grad()
def test_the_layer_is_the_papers():
    block = layer("slstm")
    assert type(block) is SLSTM
    u = torch.randn(25, 32, dtype=torch.float64)
    expected = written_out(block, u)
    torch.testing.assert_close(block(u[None])[0][0], expected, rtol=0, atol=1e-9)


def test_gates_that_no_exponential_holds_stay_finite():
    block = layer("slstm").float()
    with torch.no_grad():
        block.gate_bias[0] = 300.0  # e³⁰⁰ is no fp32 number
        block.gate_bias[1] = -300.0
    u = torch.randn(2, 9, 32, requires_grad=True)
    out = block(u)[0]
    out.square().sum().backward()
    assert out.isfinite().all() and u.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in block.parameters())


def test_forget_gates_start_open_and_nothing_is_read_of_the_output_before():
    model = FPRNNForCausalLM(FPRNNConfig(**SIZES, layers="slstm"))
    block = model.backbone.layers[0].block
    assert block.recurrent.eq(0).all() and block.gate_bias[[0, 2, 3]].eq(0).all()
    assert block.gate_bias[1].min() == 3 and block.gate_bias[1].max() == 6


def test_flops_are_those_of_its_operations():
    block = FPRNNForCausalLM(FPRNNConfig(**SIZES, layers="slstm")).backbone.layers[0].block
    maps = (p.numel() for n, p in block.named_parameters() if p.ndim > 1 and n != "gate_bias")
    assert block.flops_per_token(9) == 2 * sum(maps)
