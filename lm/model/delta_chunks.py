"""The gated delta rule of delta_rule.py by chunks of steps, as layers of a pattern compute it.

Shape suffixes: b batch, l length, n steps a token, h heads, k key and v value dimension; i chunks,
c steps of a chunk, t tokens of a chunk.

(Yang et al. 2024.) Of a chunk's c steps, whatever their tokens, each adds u_i k_iᵀ to what the
gates leave of the state. With S the state before the chunk, g_ij the product of the gates after
step j up to and with step i, and g_i of those from the chunk's start,

    u_i = β_i (v_i − g_i S k_i − Σ_{j<i} g_ij (k_iᵀ k_j) u_j),

a triangular system for all u of a chunk, which is linear in S: those of all chunks are solved at
once, and a loop over chunks carries S alone.
"""

import torch

from .delta_rule import delta_rule
from .scan import _chunked, ssd_decays

CHUNK = 64  # steps
FEW = 4  # steps up to which the loop over time is as fast


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    log_alpha: torch.Tensor,
    S: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`delta_rule` of packed documents, in the faster of its two forms.

    Args:
        q, k, v, beta, log_alpha, S: see `delta_rule`; a token with β = 0 and log α = 0 leaves the
            state as it is.
        starts: (b,l) bool, True at tokens that start from an empty state; None: there are none.
    Returns:
        as `delta_rule`.
    """
    if k.shape[1] * k.shape[2] <= FEW:
        if starts is not None:
            log_alpha = log_alpha.masked_fill(starts.unsqueeze(-1), -torch.inf)
        return delta_rule(q, k, v, beta, log_alpha, S)
    return chunked_delta_rule(q, k, v, beta, log_alpha, S, starts)


def chunked_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    log_alpha: torch.Tensor,
    S: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gated_delta_rule` by chunks of `chunk` steps, or of fewer that make whole tokens."""
    dtype = torch.float32
    for t in (q, k, v, beta):
        dtype = torch.promote_types(dtype, t.dtype)
    with torch.autocast(q.device.type, enabled=False):
        length, n = k.shape[1:3]
        tokens = max(1, min(chunk // n, length))  # of a chunk
        # 1. Chunks of steps. K (b,i,h,c,k), V (b,i,h,c,v), B (b,i,h,c,1); Q (b,i,h,t,k).
        K, V, B = (
            _chunked(t.to(dtype).flatten(1, 2), tokens * n).transpose(2, 3)
            for t in (k, v, beta.unsqueeze(-1))
        )
        Q = _chunked(q.to(dtype), tokens).transpose(2, 3)
        # 2. Gates, each at its token's first step: between two steps (b,i,h,c,c), from a step to
        #    the chunk's end, from its start to a step (b,i,h,c,1).
        between, to_end, from_start = _gates(log_alpha.to(dtype), starts, n, tokens * n)
        # 3. What each step adds: u = fresh − W Sᵀ.
        scores = (K @ K.transpose(-1, -2)) * between * B  # only what lies below the diagonal counts
        right = torch.cat([B * V, B * from_start * K], -1)
        solved = torch.linalg.solve_triangular(scores, right, upper=False, unitriangular=True)
        fresh, W = solved.split([V.shape[-1], K.shape[-1]], -1)
        # 4. From chunk to chunk. S (b,h,v,k)
        over, kept = from_start[:, :, :, -1:], K * to_end
        S = V.new_zeros(*V[:, 0, :, 0].shape, K.shape[-1]) if S is None else S.to(dtype)
        entering, added = [], []
        for i in range(K.shape[1]):
            entering.append(S)
            u = fresh[:, i] - W[:, i] @ S.transpose(-1, -2)
            added.append(u)
            S = over[:, i] * S + u.transpose(-1, -2) @ kept[:, i]
        # 5. What is read after each token's last step.
        last = slice(n - 1, None, n)
        scores = (Q @ K.transpose(-1, -2)) * between[..., last, :]
        o = scores @ torch.stack(added, 1)
        o = o + (Q * from_start[..., last, :]) @ torch.stack(entering, 1).transpose(-1, -2)
        return o.transpose(2, 3).flatten(1, 2)[:, :length], S


def _gates(log_alpha, starts, n, chunk):
    """`ssd_decays` of steps, n a token. log_alpha: (b,l,h). starts: (b,l) or None."""
    batch, length, heads = log_alpha.shape
    steps = log_alpha.new_zeros(batch, length, n, heads)
    steps[:, :, 0] = log_alpha
    keep = None
    if starts is not None:
        keep = log_alpha.new_ones(batch, length, n)
        keep[:, :, 0] = ~starts
        keep = keep.flatten(1, 2)
    one = log_alpha.new_ones(heads)
    between, to_end, from_start = ssd_decays(steps.flatten(1, 2), one, keep, chunk)
    return between, *(t.transpose(2, 3).unsqueeze(-1) for t in (to_end, from_start))
