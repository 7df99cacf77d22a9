"""The plainest versions of the mathematics, one time step and one matrix at a time."""

import torch

from lm.model.mixers import ACTIVATIONS, largest_divisor, nrm


def sequential_scan(x, dt, A, B, C, h0=None, keep=None):
    """Mamba-1's recurrence, step by step; shapes as in `selective_scan`."""
    h = x.new_zeros(x.shape[0], x.shape[2], A.shape[1]) if h0 is None else h0
    ys = []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t, :, None] * A)
        if keep is not None:
            decay = decay * keep[:, t, None, None]
        h = decay * h + (dt[:, t] * x[:, t])[..., None] * B[:, t, None, :]
        ys.append((h * C[:, t, None, :]).sum(-1))
    return torch.stack(ys, 1), h


def mixer_matrix(mixer, P, config):
    """M(P; ·) of one token as a (d,d) matrix, from the definition in docs/model.md. P: (p,)."""
    act, eps, d = ACTIVATIONS[config.mixer_act], config.eps, config.d_inner
    k = 2 if config.eigen_range == "signed" else 1
    eye = torch.eye(d, dtype=P.dtype)
    if config.mixer in ("householder", "dplr"):
        p = P if mixer.u_down is None else mixer.u_down.matrix() @ P
        U = nrm(act((mixer.u_proj.matrix() @ p).reshape(config.mixer_rank, d)), eps)
        a = torch.sigmoid(mixer.alpha_proj.matrix() @ P + mixer.alpha_proj.bias)
        terms = [k * a[i] * torch.outer(U[i], U[i]) for i in range(config.mixer_rank)]
        if config.mixer == "dplr":
            return eye - sum(terms)
        M = eye
        for term in terms:  # the first reflection acts first
            M = (eye - term) @ M
        return M
    m1 = largest_divisor(d)
    raw = act(mixer.uv_proj.matrix() @ P)
    gates = torch.sigmoid(mixer.gate_proj.matrix() @ P + mixer.gate_proj.bias)
    factors, start, gate = [], 0, 0
    for m in (m1, d // m1):
        T = torch.zeros(m, m, dtype=P.dtype)
        for row in range(m):
            for col in range(row, m):
                T[row, col] = raw[start]
                start += 1
        factors.append(torch.diag(gates[gate : gate + m]) @ nrm(T @ T.T, eps))
        gate += m
    # X ↦ K₁ᵀ X K₂ᵀ on row-major vec(X) is K₁ᵀ ⊗ K₂.
    return eye - k * torch.kron(factors[0].T.contiguous(), factors[1])


def sequential_ssd(x, dt, A, B, C, h0=None, keep=None):
    """Mamba-2's recurrence, step by step; shapes as in `ssd_scan`."""
    b, length, heads, p = x.shape
    per_group = heads // B.shape[2]
    S = x.new_zeros(b, heads, p, B.shape[3]) if h0 is None else h0
    ys = []
    for t in range(length):
        decay = torch.exp(dt[:, t] * A)
        if keep is not None:
            decay = decay * keep[:, t, None]
        B_t, C_t = (m[:, t].repeat_interleave(per_group, 1) for m in (B, C))
        u = dt[:, t, :, None] * x[:, t]
        S = decay[..., None, None] * S + u.unsqueeze(-1) * B_t.unsqueeze(-2)
        ys.append((S * C_t.unsqueeze(-2)).sum(-1))
    return torch.stack(ys, 1), S


def exact_fp_rnn_state(block, u):
    """The fixed point of FP-RNN with one Householder reflection, token by token, by an exact solve.

    Given h_{t−1}, u_t and a_t are known and the equation is linear in h_t:
    h_t = λ h_{t−1} + (1 − λ) (Q b⊙x + (I − Q) h_t), I − Q = k a u uᵀ: a rank-one system, solved
    with Sherman–Morrison.
    """
    s = block.prepare(u)
    decay, fresh, _ = s.time
    mixer, d = block.mixer, s.x.shape[-1]
    h, before = [], torch.zeros_like(s.x[:, 0])
    for t in range(s.x.shape[1]):
        raw = s.raw[:, t] + before @ s.weight_y.T
        a = mixer.scale * torch.sigmoid(raw[:, d : d + 1])
        v = nrm(mixer.act(raw[:, :d]), mixer.eps)
        lam, new, bx = decay[:, t], fresh[:, t], s.x[:, t]
        right = lam * before + new * (bx - a * (v * bx).sum(-1, keepdim=True) * v)
        # (I − w vᵀ) h = right with w = (1 − λ) a v
        w = new * a * v
        gain = (v * right).sum(-1, keepdim=True) / (1 - (v * w).sum(-1, keepdim=True))
        before = right + w * gain
        h.append(before)
    return torch.stack(h, 1)


def scan_inputs(b, length, d, n, dtype=torch.float64):
    """{"x", "dt", "A", "B", "C", "h0"} of a selective scan, the same at every call."""
    g = torch.Generator().manual_seed(0)

    def r(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    tensors = {
        "x": r(b, length, d),
        "dt": torch.nn.functional.softplus(r(b, length, d)),
        "A": -torch.exp(r(d, n)),
        "B": r(b, length, n),
        "C": r(b, length, n),
        "h0": r(b, d, n),
    }
    return {k: v.to(dtype) for k, v in tensors.items()}
