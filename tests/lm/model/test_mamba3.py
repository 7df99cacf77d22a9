"""Mamba-3 against its equations, written out token by token with rotation matrices."""

import math

import pytest
import torch
import torch.nn.functional as F

from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.diagonal import Mamba3
from lm.model.modeling_fprnn import FPRNNForCausalLM
from tests.lm.model.test_channel_delta import make_layer
from tests.lm.model.test_delta import SIZES


def rotation(angles, n):
    """Return the n×n matrix that rotates channels 2i and 2i + 1 by angles[i]."""
    R = torch.eye(n, dtype=angles.dtype)
    for i, (cos, sin) in enumerate(zip(angles.cos(), angles.sin())):
        R[2 * i, 2 * i] = R[2 * i + 1, 2 * i + 1] = cos
        R[2 * i, 2 * i + 1], R[2 * i + 1, 2 * i] = -sin, sin
    return R


def rms(x, norm):
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * norm.weight


def run_by_token(block, u, groups):
    """Compute a layer with 8 heads of 8 channels and d_state 16 on a row u (l,32)."""
    n, heads, p = 16, 8, 8
    projected = u @ block.in_proj.weight.T
    z, x, B, C, dt, A, trapezoid, theta = projected.split(
        [64, 64, groups * n, groups * n, 8, 8, 8, 4], dim=-1
    )
    dt = F.softplus(dt + block.dt_bias)
    A = -F.softplus(A).clamp_min(1e-4)
    lam = torch.sigmoid(trapezoid)
    out = torch.zeros_like(x)
    for head in range(heads):
        first = n * (head // (heads // groups))
        group = slice(first, first + n)  # channels of B and C that the head reads
        channels = slice(p * head, p * head + p)
        b = rms(B[:, group], block.B_norm) + block.B_bias[head]
        c = rms(C[:, group], block.C_norm) + block.C_bias[head]
        state = previous_outer = torch.zeros(p, n, dtype=u.dtype)
        angle = torch.zeros(4, dtype=u.dtype)
        for t in range(len(u)):
            angle = angle + dt[t, head] * math.pi * torch.tanh(theta[t])
            R = rotation(angle, n)
            alpha = torch.exp(dt[t, head] * A[t, head])
            outer = torch.outer(x[t, channels], R @ b[t])
            state = (
                alpha * state
                + (1 - lam[t, head]) * dt[t, head] * alpha * previous_outer
                + lam[t, head] * dt[t, head] * outer
            )
            previous_outer = outer
            out[t, channels] = state @ (R @ c[t]) + block.D[head] * x[t, channels]
    return (out * F.silu(z)) @ block.out_proj.weight.T


@pytest.mark.parametrize("groups", [1, 2])
@torch.no_grad()
def test_layer_equals_its_equations(groups):
    block = make_layer("mamba3", ngroups=groups, d_state=16)
    assert type(block) is Mamba3
    u = torch.randn(75, 32, dtype=torch.float64)  # more than one chunk of the scan
    expected = run_by_token(block, u, groups)
    torch.testing.assert_close(block(u[None])[0][0], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("log_dt", [-200.0, -60.0, -45.0, -35.0])
def test_tiny_step_sizes_are_computed_in_fp32(log_dt):
    """Step sizes near e^−200 (0 in fp32) to e^−35, in two of three tokens: fp32 equals fp64."""
    block = make_layer("mamba3")
    first = sum(block.widths[:4])  # rows of z, x, B and C come before those of Δ
    with torch.no_grad():  # Δ = softplus(channel 0 of u + dt_bias)
        block.in_proj.weight[first : first + block.heads] = 0
        block.in_proj.weight[first : first + block.heads, 0] = 1
    u = torch.randn(2, 9, 32, dtype=torch.float64)
    u[:, :, 0] = log_dt
    u[:, ::3, 0] = 1.0
    results = []
    for dtype in (torch.float64, torch.float32):
        block, x = block.to(dtype), u.to(dtype, copy=True).requires_grad_()
        out = block(x)[0]
        out.square().sum().backward()
        results.append((out.detach().double(), x.grad.double()))
    for wide, narrow in zip(*results):
        torch.testing.assert_close(narrow, wide, rtol=1e-3, atol=1e-3 * wide.abs().max().item())


def test_biases_start_at_one_and_step_sizes_in_mambas_range():
    model = FPRNNForCausalLM(FPRNNConfig(**{**SIZES, "d_model": 64}, layers="mamba3"))
    block = model.backbone.layers[0].block
    assert block.B_bias.eq(1).all() and block.C_bias.eq(1).all() and block.D.eq(1).all()
    steps = F.softplus(block.dt_bias)
    assert steps.min() >= 9.9e-4 and steps.max() <= 0.101  # drawn from [1e-3, 0.1], then rounded


def test_d_state_without_a_rotated_pair_is_refused():
    with pytest.raises(ValueError, match="d_state is 3: mamba3 rotates pairs in half"):
        FPRNNConfig(**SIZES, layers="mamba3", d_state=3)
