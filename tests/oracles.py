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
    """M(P; ·) of one token as a (d,d) matrix, from the definition in math.md. P: (p,)."""
    act, eps, d = ACTIVATIONS[config.mixer_act], config.eps, config.d_inner
    eye = torch.eye(d, dtype=P.dtype)
    if config.mixer in ("householder", "dplr"):
        p = P if mixer.u_down is None else mixer.u_down.matrix() @ P
        U = nrm(act((mixer.u_proj.matrix() @ p).reshape(config.mixer_rank, d)), eps)
        a = torch.sigmoid(mixer.alpha_proj.matrix() @ P + mixer.alpha_proj.bias)
        terms = [2 * a[i] * torch.outer(U[i], U[i]) for i in range(config.mixer_rank)]
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
    return eye - 2 * torch.kron(factors[0].T.contiguous(), factors[1])
