"""Layers without a fixed point: what they share, the gated MLP, softmax attention, the LSTM, sLSTM.

Attention has rotary positions and packed documents; the LSTM (Hochreiter &
Schmidhuber 1997) is torch.nn.LSTM, d_model wide; sLSTM is of Beck et al. 2024 ("xLSTM: Extended
Long Short-Term Memory", arXiv 2405.04517).

Shape suffixes: b batch, l length, d channels (d_model), h heads, e channels of a head; t keys,
those of a state included.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .fields import resolve_d_ff, resolve_n_heads
from .layers import GroupNorm, ShortConv, without_autocast
from .state import Sequences, last_valid_tokens


class NoState(NamedTuple):
    """What a layer that looks at one token alone leaves behind."""


class PlainLayer(nn.Module):
    """A layer that is computed, not solved. A subclass defines the methods that raise
    NotImplementedError here, `state_shapes` where it has a state, and ends in `out_proj`.

    forward: as FixedPointBlock's, with None in the place of its FixedPointStats.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def state_shapes(self) -> list[tuple[int, ...]]:
        """Of the tensors of its state, without b; −1: any number."""
        return []

    def run(self, u: torch.Tensor, seqs: Sequences) -> tuple[torch.Tensor, Any]:
        """u (b,l,d_model) → output (b,l,d_model), and the state after the last token, None unless
        `seqs.return_state`."""
        raise NotImplementedError

    def flops_per_token(self, length: int) -> int:
        """Forward FLOPs per token of sequences of `length` tokens (a multiply-add counts two)."""
        raise NotImplementedError

    def forward(
        self,
        u: torch.Tensor,
        seqs: Sequences = Sequences(),  # noqa: B008
        checkpoint: Callable[..., Any] | None = None,
        count_iterations: bool = False,
    ) -> tuple[Any, ...]:
        out, end = self.run(u, seqs) if checkpoint is None else checkpoint(self.run, u, seqs)
        return (out, None, end) if seqs.return_state else (out, None)


class GatedMLP(PlainLayer):
    """out_proj(silu(gate) ⊙ up), gate and up from one in_proj (SwiGLU: Shazeer 2020)."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width = resolve_d_ff(config)
        self.in_proj = nn.Linear(config.d_model, 2 * width, bias=False)
        self.out_proj = nn.Linear(width, config.d_model, bias=False)

    def run(self, u: torch.Tensor, seqs: Sequences) -> tuple[torch.Tensor, NoState | None]:
        gate, up = self.in_proj(u).chunk(2, dim=-1)
        return self.out_proj(F.silu(gate) * up), NoState() if seqs.return_state else None

    def flops_per_token(self, length: int) -> int:
        return 6 * self.config.d_model * resolve_d_ff(self.config)


ROPE_BASE = 10_000.0
UNSEEN = -1  # the position of a key that no query may look at any more, or never could


class AttentionState(NamedTuple):
    """The keys and values that later tokens may look at; grows with the text."""

    keys: torch.Tensor  # (b,t,h,e), rotated
    values: torch.Tensor  # (b,t,h,e)
    positions: torch.Tensor  # (b,t) of each key; UNSEEN: padding, or of a document that is over
    next_position: torch.Tensor  # (b,) of the token to come


class Attention(PlainLayer):
    """softmax(q kᵀ / √e) v over the tokens up to the query in its document."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        d = config.d_model
        self.heads = resolve_n_heads(config)
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, d, bias=False)
        self.v_proj = nn.Linear(d, d, bias=False)
        self.out_proj = nn.Linear(d, d, bias=False)

    def state_shapes(self) -> list[tuple[int, ...]]:
        head = self.heads, self.config.d_model // self.heads
        return [(-1, *head), (-1, *head), (-1,), ()]

    def run(self, u: torch.Tensor, seqs: Any) -> tuple[torch.Tensor, AttentionState | None]:
        # 1. Queries, keys, values (b,l,h,e), and the position of each token (b,l) in its row.
        q, k, v = (
            proj(u).unflatten(-1, (self.heads, -1))
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        before = seqs.state
        first = None if before is None else before.next_position
        positions = torch.arange(u.shape[1], device=u.device).expand(len(u), -1)
        positions = positions if first is None else positions + first.unsqueeze(1)
        q, k = rotated(q, positions), rotated(k, positions)
        # 2. What lies before these tokens. No document that has ended is looked into again.
        keys, values, key_positions = k, v, positions_of_keys(positions, seqs)
        if before is not None:
            keys = torch.cat([before.keys.to(k.dtype), k], 1)
            values = torch.cat([before.values.to(v.dtype), v], 1)
            key_positions = torch.cat([before.positions, key_positions], 1)
        # 3. Attend.
        whole = before is None and seqs.mask is None and seqs.starts is None
        seen = None if whole else self._seen(positions, key_positions, seqs)
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            None if seen is None else seen.unsqueeze(1),
            is_causal=whole,
        )
        end = None
        if seqs.return_state:
            end = self._end(keys, values, key_positions, positions, seqs)
        return self.out_proj(o.transpose(1, 2).flatten(-2)), end

    def _seen(self, positions, key_positions, seqs):
        """Which keys each query looks at, (b,l,t) bool; at padding the token itself, so that no
        softmax is over nothing. positions: (b,l) of the queries. key_positions: (b,t)."""
        length, older = positions.shape[1], key_positions.shape[1] - positions.shape[1]
        before = positions.unsqueeze(2) >= key_positions.unsqueeze(1)
        seen = before & (key_positions != UNSEEN).unsqueeze(1)
        if seqs.starts is not None:
            document = seqs.starts.cumsum(1)
            of_key = F.pad(document, (older, 0))  # what is kept is of the document before the first
            seen &= document.unsqueeze(2) == of_key.unsqueeze(1)
        itself = torch.eye(length, dtype=torch.bool, device=positions.device)
        return seen | F.pad(itself, (older, 0))

    def _end(self, keys, values, key_positions, positions, seqs):
        """The AttentionState after the last token that is no padding. keys, values: (b,t,h,e).
        key_positions: (b,t). positions: (b,l)."""
        length = positions.shape[1]
        if seqs.mask is None:
            next_position = positions[:, -1] + 1
        else:
            next_position = positions[:, 0] + seqs.mask.sum(1)
        if seqs.starts is not None:
            older = key_positions.shape[1] - length
            document = F.pad(seqs.starts.cumsum(1), (older, 0))
            over = document != document[:, -1:]
            key_positions = key_positions.masked_fill(over, UNSEEN)
        drop = 0
        if seqs.starts is not None:
            # What no row needs any more, of the oldest. (To ask waits for the device.)
            needed = (key_positions != UNSEEN).any(0).cumsum(0)
            drop = int((needed == 0).sum())
        keys, values = (t[:, drop:].detach().clone() for t in (keys, values))
        return AttentionState(keys, values, key_positions[:, drop:].clone(), next_position)

    def flops_per_token(self, length: int) -> int:
        """A query looks at half of the sequence on average."""
        d = self.config.d_model
        return 8 * d**2 + 2 * d * length


def positions_of_keys(positions: torch.Tensor, seqs: Any) -> torch.Tensor:
    """The tokens' positions (b,l) as those of keys: UNSEEN at padding."""
    return positions if seqs.mask is None else positions.masked_fill(~seqs.mask, UNSEEN)


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al. 2021): channels i and i + e/2 of a head turn by
    position · ROPE_BASE^(−2i/e).

    Args: x: (b,l,h,e), e even. positions: (b,l).
    Returns: (b,l,h,e) in x's dtype; computed in fp32 or wider.
    """
    half = x.shape[-1] // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    exponents = torch.arange(half, device=x.device, dtype=wide) / half
    angles = positions.to(wide)[..., None, None] * ROPE_BASE**-exponents  # (b,l,1,e/2)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.to(wide).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class LSTMState(NamedTuple):
    """What the layer leaves behind after a row's last token that is no padding."""

    h: torch.Tensor  # (b,d) output
    c: torch.Tensor  # (b,d) cell


class LSTM(PlainLayer):
    """h_t, c_t = LSTM(u_t, h_{t−1}, c_{t−1}); the output is h_t. A document starts from zero."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lstm = nn.LSTM(config.d_model, config.d_model, batch_first=True)

    def state_shapes(self) -> list[tuple[int, ...]]:
        return [(self.config.d_model,), (self.config.d_model,)]

    def run(self, u: torch.Tensor, seqs: Sequences) -> tuple[torch.Tensor, LSTMState | None]:
        zero = u.new_zeros(len(u), u.shape[-1])
        h, c = (zero if t is None else t.to(u.dtype) for t in map(seqs.get_state, ("h", "c")))
        # 1. Cut the text where a document starts in some row: (b,·,d) each.
        bounds = [0, u.shape[1]]
        if seqs.starts is not None:
            bounds = sorted({*bounds, *seqs.starts.any(0).nonzero().flatten().tolist()})
        # 2. Go through the pieces one after the other.
        outputs = []
        for begin, end in itertools.pairwise(bounds):
            if seqs.starts is not None:
                goes_on = ~seqs.starts[:, begin, None]
                h, c = h * goes_on, c * goes_on
            lengths = None  # padding is on the right: only the state must not see it
            if seqs.mask is not None and seqs.return_state:
                lengths = seqs.mask[:, begin:end].sum(1)
            output, h, c = self._piece(u[:, begin:end], h, c, lengths)
            outputs.append(output)
        state = LSTMState(h.detach().clone(), c.detach().clone()) if seqs.return_state else None
        return torch.cat(outputs, 1), state

    def _piece(self, u, h, c, lengths):
        """Outputs (b,l,d), and h and c (b,d) after each row's first `lengths` (b,) tokens, None:
        all. h, c: (b,d) before."""
        start = h.unsqueeze(0), c.unsqueeze(0)
        if lengths is None:
            output, end = self.lstm(u, start)
            return output, *(t.squeeze(0).to(u.dtype) for t in end)
        # Packing wants a token in every row; a row of none keeps its state.
        packed = pack_padded_sequence(
            u, lengths.clamp_min(1).cpu(), batch_first=True, enforce_sorted=False
        )
        output, end = self.lstm(packed, start)
        output, _ = pad_packed_sequence(output, batch_first=True, total_length=u.shape[1])
        some = (lengths > 0).unsqueeze(-1)
        new_h, new_c = (t.squeeze(0).to(u.dtype) for t in end)
        return output, torch.where(some, new_h, h), torch.where(some, new_c, c)

    def flops_per_token(self, length: int) -> int:
        return 16 * self.config.d_model**2


EMPTY = -1e30  # the logarithm of a sum of nothing; finite, so that no difference is NaN


class SLSTMState(NamedTuple):
    """What the layer leaves behind after a row's last token that is no padding."""

    cell: torch.Tensor  # (b,4,d) y, c, n, m
    conv: tuple[torch.Tensor, ...]  # one, (b,d_conv−1,d): the last inputs of the convolution


class SLSTM(PlainLayer):
    """The cell of sLSTM, its gates' inputs through a short convolution, its heads normalised:

        ĩ, f̃ = W silu(conv(u)) + R y_{t−1} + b;    z̃, õ = W u + R y_{t−1} + b,
        m_t = max(log σ(f̃) + m_{t−1}, ĩ);    i = exp(ĩ − m_t);    f = exp(log σ(f̃) + m_{t−1} − m_t),
        c_t = f c_{t−1} + i tanh(z̃);    n_t = f n_{t−1} + i;    y_t = σ(õ) c_t / n_t,

    out_proj(GroupNorm(y_t)). All W and R are a block for each head; the forget gate is a sigmoid,
    of the two that the paper has. m only keeps the exponentials finite.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        d = config.d_model
        self.heads = resolve_n_heads(config)
        e = d // self.heads
        self.conv1d = ShortConv(d, config.d_conv)
        self.gates = nn.Parameter(torch.empty(4, self.heads, e, e))  # W of i, f, z, o
        self.recurrent = nn.Parameter(torch.empty(4, self.heads, e, e))  # R
        self.gate_bias = nn.Parameter(torch.empty(4, self.heads, e))
        self.group_norm = GroupNorm(self.heads, d)
        self.out_proj = nn.Linear(d, d, bias=False)

    def state_shapes(self) -> list[tuple[int, ...]]:
        d = self.config.d_model
        return [(4, d), (self.config.d_conv - 1, d)]

    def run(self, u: torch.Tensor, seqs: Sequences) -> tuple[torch.Tensor, SLSTMState | None]:
        h, wide = self.heads, torch.promote_types(u.dtype, torch.float32)
        # 1. What the gates read of the tokens, (l,4,h,b,e).
        u = seqs.zero_padding(u)
        segments = None if seqs.starts is None else seqs.starts.cumsum(1)
        before = seqs.get_state("conv", 0)
        convolved = self.conv1d(u, segments, before)
        read = torch.stack([convolved, convolved, u, u]).unflatten(-1, (h, -1))  # (4,b,l,h,e)
        with without_autocast(u):
            weight, recurrent = self.gates.to(wide), self.recurrent.to(wide)
            inputs = torch.einsum("gblhe,ghoe->lghbo", read.to(wide), weight)
            inputs = inputs + self.gate_bias.to(wide)[:, :, None]
            # 2. Token by token. y, c, n, m: (h,b,e)
            cell = seqs.get_state("cell")
            if cell is None:
                cell = _empty_cell(u, wide)
            state = [t.unflatten(-1, (h, -1)).transpose(0, 1) for t in cell.to(wide).unbind(1)]
            fresh = [
                t.unflatten(-1, (h, -1)).transpose(0, 1) for t in _empty_cell(u, wide).unbind(1)
            ]
            outputs = []
            for t in range(u.shape[1]):
                if seqs.starts is not None:
                    begins = seqs.starts[:, t, None]
                    state = [torch.where(begins, new, old) for new, old in zip(fresh, state)]
                new = _slstm_step(inputs[t], recurrent, *state)
                if seqs.mask is not None:
                    real = seqs.mask[:, t, None]
                    new = [torch.where(real, a, b) for a, b in zip(new, state)]
                state = list(new)
                outputs.append(state[0])
            y = torch.stack(outputs).permute(2, 0, 1, 3).flatten(-2)  # (b,l,d)
            # 3. Each head is normalised.
            y = self.group_norm(y)
        end = None
        if seqs.return_state:
            rows = torch.stack([t.detach().transpose(0, 1).flatten(1) for t in state], 1)
            tail = last_valid_tokens(u, self.config.d_conv - 1, before, seqs)
            end = SLSTMState(rows.clone(), (tail,))
        return self.out_proj(y.to(u.dtype)), end

    def flops_per_token(self, length: int) -> int:
        c = self.config
        return 16 * c.d_model**2 // self.heads + 2 * c.d_model * (c.d_conv + c.d_model)


def _empty_cell(u, dtype):
    """The state before any token, (b,4,d)."""
    state = u.new_zeros(len(u), 4, u.shape[-1], dtype=dtype)
    state[:, 3] = EMPTY
    return state


def _slstm_step(inputs, recurrent, y, c, n, m):
    """y, c, n, m (h,b,e) after a token. inputs: (4,h,b,e). recurrent: (4,h,e,e)."""
    i, f, z, o = inputs + torch.einsum("hbe,ghoe->ghbo", y, recurrent)
    kept = F.logsigmoid(f) + m
    new_m = torch.maximum(kept, i)
    i = torch.exp(i - new_m)
    f = torch.exp(kept - new_m)
    c = f * c + i * torch.tanh(z)
    n = f * n + i
    return torch.sigmoid(o) * c / n, c, n, new_m
