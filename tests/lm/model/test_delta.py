"""Gated DeltaNet and DeltaProduct as layers: against their equations, written out."""

import pytest
import torch
import torch.nn.functional as F

from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.delta import DeltaProduct, GatedDeltaNet, GatedDeltaProduct, delta_rule
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.model.state import Sequences

# Four heads with keys of 8 and, because `expand` is 2, values of 16 channels.
SIZES = dict(vocab_size=24, d_model=32, headdim=8, reset_at_eos=False, n_layer=1)


def inputs(length, n, seed=0):
    """Return q, k, v, β, log α and S with b = 2, h = 3, k = 4, v = 5 (see lm/model/delta.py)."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q = F.normalize(randn(2, length, 3, 4), dim=-1)
    k = F.normalize(randn(2, length, n, 3, 4), dim=-1)
    v = randn(2, length, n, 3, 5)
    beta = 2 * randn(2, length, n, 3).sigmoid()
    log_alpha = -F.softplus(randn(2, length, 3))
    return q, k, v, beta, log_alpha, randn(2, 3, 5, 4)


def by_token(q, k, v, beta, log_alpha, S, starts=None):
    """Compute the recurrence with explicit matrices, token by token, from its definition."""
    eye = torch.eye(q.shape[-1], dtype=q.dtype)
    outputs = []
    for t in range(q.shape[1]):
        alpha = log_alpha[:, t].exp()
        if starts is not None:
            alpha = alpha * ~starts[:, t, None]
        S = alpha[..., None, None] * S
        for j in range(k.shape[2]):
            key, b = k[:, t, j, :, :, None], beta[:, t, j, :, None, None]
            S = S @ (eye - b * key @ key.mT) + b * v[:, t, j, :, :, None] @ key.mT
        outputs.append((S @ q[:, t, :, :, None]).squeeze(-1))
    return torch.stack(outputs, 1), S


def documents(length):
    """Return starts of documents, (2,length): some have one token, some begin or cross a chunk."""
    starts = torch.zeros(2, length, dtype=torch.bool)
    starts[0, [0, 3, 4]] = True
    starts[1, [7, 8, length - 1]] = True
    return starts


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("length, chunk", [(9, 1), (21, 8), (21, 64), (9, 64)])
def test_chunks_equal_the_recurrence(n, length, chunk, packed):
    args = [t.requires_grad_() for t in inputs(length, n)]
    starts = documents(length) if packed else None
    actual, expected = delta_rule(*args, starts, chunk), by_token(*args, starts)
    output_grads = [torch.randn_like(t) for t in expected]
    actual_grads = torch.autograd.grad(actual, args, output_grads)
    expected_grads = torch.autograd.grad(expected, args, output_grads)
    for one, other in zip((*actual, *actual_grads), (*expected, *expected_grads)):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_half_precision_inputs_are_computed_in_fp32():
    args = [t.to(torch.bfloat16) for t in inputs(length=6, n=2)]
    with torch.autocast("cpu", torch.bfloat16):
        o, S = delta_rule(*args)
    assert o.dtype == S.dtype == torch.float32
    expected, _ = delta_rule(*(t.double() for t in args))
    torch.testing.assert_close(o.double(), expected, rtol=1e-5, atol=1e-5)


def test_strong_gates_and_long_chunks_stay_finite():
    q, k, v, beta, log_alpha, S = (t.float().requires_grad_() for t in inputs(200, n=1))
    strong = 100 * log_alpha  # exp(−100) and its products over a chunk of 64 steps are 0 in fp32
    o, end = delta_rule(q, k, v, beta, strong, S, documents(200))
    (o.sum() + end.sum()).backward()
    assert all(t.isfinite().all() for t in (o, end, q.grad, k.grad, log_alpha.grad, S.grad))


def convolved(u, proj, conv1d):
    """Return silu of the causal convolution of u W over a row u (l,d), from its weights."""
    x, taps = u @ proj.weight.T, conv1d.weight[:, 0]
    y = torch.zeros_like(x)
    for t in range(len(x)):
        for lag in range(min(t + 1, taps.shape[1])):
            y[t] += taps[:, taps.shape[1] - 1 - lag] * x[t - lag]
    return F.silu(y)


def run_by_token(block, u, n, has_negative_eigenvalues):
    """Compute a layer of four heads with n steps per token on a row u (l,d), from its weights."""
    length, width = u.shape
    q = convolved(u, block.q_proj, block.q_conv1d).view(length, 4, -1)
    k = convolved(u, block.k_proj, block.k_conv1d).view(length, n, 4, -1)
    v = convolved(u, block.v_proj, block.v_conv1d).view(length, n, 4, -1)
    beta_factor = 2 if has_negative_eigenvalues else 1
    beta = beta_factor * torch.sigmoid(u @ block.b_proj.weight.T).view(length, n, 4)
    alpha = torch.ones(length, 4, dtype=u.dtype)
    if block.has_gate:
        dt = F.softplus(u @ block.a_proj.weight.T + block.dt_bias)
        alpha = torch.exp(-torch.exp(block.A_log) * dt)
    z = (u @ block.g_proj.weight.T).view(length, 4, -1)
    o = torch.zeros_like(z)
    for h in range(4):
        S = torch.zeros(z.shape[-1], width // 4, dtype=u.dtype)
        for t in range(length):
            S = alpha[t, h] * S
            for j in range(n):
                key = k[t, j, h] / torch.sqrt(k[t, j, h].square().sum() + 1e-6)
                S = S + beta[t, j, h] * torch.outer(v[t, j, h] - S @ key, key)
            query = q[t, h] / torch.sqrt(q[t, h].square().sum() + 1e-6)
            o[t, h] = S @ query / (width // 4) ** 0.5
    o = o / torch.sqrt(o.square().mean(-1, keepdim=True) + 1e-5) * block.o_norm.weight
    return (o * F.silu(z)).flatten(1) @ block.out_proj.weight.T


@pytest.mark.parametrize(
    "layer, settings",
    [
        (GatedDeltaNet, {"allow_neg_eigval": "auto"}),
        (GatedDeltaNet, {"allow_neg_eigval": True, "expand": 1}),
        (GatedDeltaProduct, {"allow_neg_eigval": "auto", "n_householder": 3}),
        (GatedDeltaProduct, {"allow_neg_eigval": False}),
        (DeltaProduct, {"allow_neg_eigval": "auto"}),
    ],
    ids=["gated_deltanet", "negative, narrow", "three steps", "positive", "no gate"],
)
@torch.no_grad()
def test_layer_equals_its_equations(layer, settings):
    model = FPRNNForCausalLM(FPRNNConfig(**SIZES, layers=layer.kind, **settings)).double()
    block = model.backbone.layers[0].block
    assert type(block) is layer and hasattr(block, "A_log") == (layer is not DeltaProduct)
    n = 1 if layer is GatedDeltaNet else settings.get("n_householder", 2)
    is_negative_allowed = settings["allow_neg_eigval"]
    if is_negative_allowed == "auto":
        is_negative_allowed = layer is not GatedDeltaNet
    u = torch.randn(70, 32, dtype=torch.float64)  # more than one chunk
    expected = run_by_token(block, u, n, is_negative_allowed)
    torch.testing.assert_close(block(u[None])[0][0], expected, rtol=0, atol=1e-10)


def test_padding_keeps_the_state():
    torch.manual_seed(0)
    block = GatedDeltaNet(FPRNNConfig(**SIZES, layers="gated_deltanet"))
    for p in block.parameters():
        torch.nn.init.normal_(p, std=0.3)
    u = torch.randn(1, 12, 32)
    mask = torch.arange(12)[None] < 7  # the last five tokens are padding
    padded = block(u, Sequences(mask=mask, return_state=True))[2]
    plain = block(u[:, :7], Sequences(return_state=True))[2]
    torch.testing.assert_close(padded, plain)


@pytest.mark.parametrize("kind", ["gated_deltanet", "gated_deltaproduct", "deltaproduct"])
def test_flops_count_weights_and_recurrence(kind):
    """Two per multiply-add: every weight except the norm's, and the recurrence's own operations."""
    model = FPRNNForCausalLM(FPRNNConfig(**SIZES, layers=kind, n_householder=3))
    block = model.backbone.layers[0].block
    weights = sum(p.numel() for name, p in block.named_parameters() if p.ndim > 1)
    n = 1 if kind == "gated_deltanet" else 3
    gate_flops = 0 if kind == "deltaproduct" else 1
    recurrence = (4 * n + 2 + gate_flops) * 64 * 8  # S has d_inner × headdim entries
    assert block.flops_per_token(length=100) == 2 * weights + recurrence


def test_rates_and_step_sizes_start_in_mambas_ranges():
    torch.manual_seed(0)
    config = FPRNNConfig(**{**SIZES, "d_model": 512}, layers="gated_deltanet")
    block = FPRNNForCausalLM(config).backbone.layers[0].block
    rates, dt = block.A_log.exp(), F.softplus(block.dt_bias)
    # Mamba draws rates up to 16 and step sizes from [1e-3, 0.1]; 64 heads come near the ends.
    assert 1e-3 <= rates.min() < 3 and 13 < rates.max() <= 16
    assert 1e-3 <= dt.min() < 5e-3 and 0.02 < dt.max() <= 0.1
    assert block.o_norm.weight.eq(1).all()
