"""The gated delta rule with any number of Householder steps a token, as a loop over time.

Shape suffixes: b batch, l length, n steps a token, h heads, k key and v value dimension.

Gated DeltaNet (Yang et al. 2024) keeps a matrix S (v×k) per head,

    S_t = α_t S_{t−1} (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ,          o_t = S_t q_t,

and DeltaProduct (Siems et al. 2025) makes n such steps a token, each with its own k, v and β, of
which the first alone carries the gate α_t:

    S_{t,0} = α_t S_{t−1},
    S_{t,j} = S_{t,j−1} (I − β_tj k_tj k_tjᵀ) + β_tj v_tj k_tjᵀ,          S_t = S_{t,n}.
"""

from typing import Any

import torch


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    log_alpha: torch.Tensor | None = None,
    S: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence, one step after the other, differentiable any number of times.

    Args:
        q: (b,l,h,k). k: (b,l,n,h,k), of unit length for a contraction. v: (b,l,n,h,v).
        beta: (b,l,n,h). log_alpha: (b,l,h), ≤ 0, or None for no gate.
        S: (b,h,v,k) initial state, zero if None. Computed in fp32, or fp64 if any is.
    Returns:
        o (b,l,h,v) and the final state (b,h,v,k), in the dtype computed in.
    """
    dtype = torch.float32
    for t in (q, k, v, beta):
        dtype = torch.promote_types(dtype, t.dtype)
    with torch.autocast(q.device.type, enabled=False):
        batch, length, n, heads, d_k = k.shape
        # Matrix products over (batch · heads) small matrices; time comes first for unbind.
        q_t = q.to(dtype).permute(1, 0, 2, 3).reshape(length, batch * heads, d_k, 1).unbind(0)
        steps: Any = (
            t.to(dtype).permute(1, 2, 0, 3, 4).reshape(length * n, batch * heads, -1, 1).unbind(0)
            for t in (k, v, beta.unsqueeze(-1))
        )
        steps = list(zip(*steps))
        if log_alpha is not None:
            alpha = log_alpha.to(dtype).exp()
            alpha = alpha.transpose(0, 1).reshape(length, batch * heads, 1, 1).unbind(0)
        if S is None:
            S = q.new_zeros(batch, heads, v.shape[-1], d_k, dtype=dtype)
        S = S.to(dtype).flatten(0, 1)
        o = []
        for t in range(length):
            if log_alpha is not None:
                S = S * alpha[t]
            for k_tj, v_tj, beta_tj in steps[t * n : (t + 1) * n]:
                new = beta_tj * torch.baddbmm(v_tj, S, k_tj, alpha=-1)
                S = torch.baddbmm(S, new, k_tj.transpose(1, 2))
            o.append(torch.bmm(S, q_t[t]))
        o = torch.stack(o).view(length, batch, heads, -1).transpose(0, 1)
        return o, S.view(batch, heads, *S.shape[1:])
