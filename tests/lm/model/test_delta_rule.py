"""The delta rule against its dense-matrix definition and its gradients."""

import pytest
import torch
import torch.nn.functional as F

from lm.model import delta as rule


def inputs(n=1, length=6, batch=2, heads=3, d_k=4, d_v=5, gate=True, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=dtype)

    q = F.normalize(randn(batch, length, heads, d_k), dim=-1)
    k = F.normalize(randn(batch, length, n, heads, d_k), dim=-1)
    v = randn(batch, length, n, heads, d_v)
    beta = 2 * randn(batch, length, n, heads).sigmoid()
    log_alpha = -F.softplus(randn(batch, length, heads)) if gate else None
    return q, k, v, beta, log_alpha


def dense(q, k, v, beta, log_alpha, S=None):
    """Token by token and head by head, S_t with explicit matrices, straight from the papers."""
    batch, length, n, heads, d_k = k.shape
    o = torch.empty(batch, length, heads, v.shape[-1], dtype=q.dtype)
    final = torch.empty(batch, heads, v.shape[-1], d_k, dtype=q.dtype)
    eye = torch.eye(d_k, dtype=q.dtype)
    for b in range(batch):
        for h in range(heads):
            state = torch.zeros_like(final[b, h]) if S is None else S[b, h]
            for t in range(length):
                if log_alpha is not None:
                    state = torch.exp(log_alpha[b, t, h]) * state
                for j in range(n):
                    kk, vv, bb = k[b, t, j, h], v[b, t, j, h], beta[b, t, j, h]
                    state = state @ (eye - bb * torch.outer(kk, kk)) + bb * torch.outer(vv, kk)
                o[b, t, h] = state @ q[b, t, h]
            final[b, h] = state
    return o, final


@pytest.mark.parametrize("gate", [True, False], ids=["gate", "no-gate"])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 7])
def test_the_loop_is_the_definition(n, length, gate):
    args = inputs(n, length, gate=gate)
    o, S = rule.delta_rule(*args)
    o_dense, S_dense = dense(*args)
    torch.testing.assert_close(o, o_dense, rtol=0, atol=1e-12)
    torch.testing.assert_close(S, S_dense, rtol=0, atol=1e-12)


def test_the_state_carries_on():
    args = inputs(2, 9)
    o, S = rule.delta_rule(*args)
    o1, middle = rule.delta_rule(*(t[:, :4] for t in args))
    o2, end = rule.delta_rule(*(t[:, 4:] for t in args), S=middle)
    torch.testing.assert_close(torch.cat([o1, o2], 1), o, rtol=0, atol=1e-12)
    torch.testing.assert_close(end, S, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        dense(*(t[:, 4:] for t in args), S=middle)[0], o2, rtol=0, atol=1e-12
    )


def test_one_step_a_token_is_gated_deltanets_formula():
    """S_t = α S (I − β k kᵀ) + β v kᵀ, the gate inside: the order of the two factors is free."""
    q, k, v, beta, log_alpha = inputs(1, 5, batch=1, heads=1)
    S = torch.zeros(5, 4, dtype=torch.float64)
    for t in range(5):
        kk, vv, b = k[0, t, 0, 0], v[0, t, 0, 0], beta[0, t, 0, 0]
        S = log_alpha[0, t, 0].exp() * S @ (torch.eye(4) - b * torch.outer(kk, kk))
        S = S + b * torch.outer(vv, kk)
        o = rule.delta_rule(q, k, v, beta, log_alpha)[0][0, t, 0]
        torch.testing.assert_close(o, S @ q[0, t, 0], rtol=0, atol=1e-12)


def test_reflections_permute_and_idle_steps_change_nothing():
    """β = 2 with v = 0 reflects the state; two reflections along the same key are the identity."""
    q, k, v, beta, _ = inputs(2, 1)
    S = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    k[:, :, 1] = k[:, :, 0]
    _, after = rule.delta_rule(q, k, 0 * v, torch.full_like(beta, 2.0), S=S)
    torch.testing.assert_close(after, S, rtol=0, atol=1e-12)
    _, after = rule.delta_rule(q, k, v, 0 * beta, S=S)
    assert torch.equal(after, S)


@pytest.mark.parametrize("n, gate", [(1, True), (2, True), (2, False)])
def test_gradients(n, gate):
    args = inputs(n, 4, batch=1, heads=2, d_k=3, d_v=2, gate=gate)
    args = [t.requires_grad_() for t in args if t is not None]
    S = torch.randn(1, 2, 2, 3, dtype=torch.float64, requires_grad=True)

    def f(S, *args):
        return rule.delta_rule(*args, S=S)

    if gate:
        assert torch.autograd.gradcheck(f, (S, *args))
    else:
        assert torch.autograd.gradcheck(lambda S, *a: rule.delta_rule(*a, None, S), (S, *args))


def test_half_precision_inputs_are_computed_in_fp32():
    args = [t.to(torch.bfloat16) for t in inputs(2)]
    with torch.autocast("cpu", torch.bfloat16):
        o, S = rule.delta_rule(*args)
    assert o.dtype == S.dtype == torch.float32
    o_double, _ = rule.delta_rule(*(t.double() for t in args))
    torch.testing.assert_close(o.double(), o_double, rtol=1e-5, atol=1e-5)
