"""Layers without a fixed point: their base class, gated MLP, softmax attention, LSTM and sLSTM.

Attention has rotary positions and supports packed documents. The LSTM has the width d_model.

Shape suffixes: b batch, l length, d channels (d_model), h heads, e channels of a head; t keys,
including the keys of the state.

Source: LSTM, Hochreiter & Schmidhuber 1997; sLSTM, Beck et al. 2024 ("xLSTM: Extended Long
Short-Term Memory", arXiv 2405.04517).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .fields import resolve_d_ff, resolve_n_heads
from .layers import GroupNorm, ShortConv, build_centroids, convolve, without_autocast
from .state import Sequences, gather_tokens, last_valid_tokens


class NoState(NamedTuple):
    """Empty state of a layer whose output depends only on the token itself."""


class PlainLayer(nn.Module):
    """Base class of the layers without a solver.

    A subclass implements `run`, `flops_per_token` and, if it has a state, `state_shapes`. Its last
    module is called `out_proj`. `forward` has the signature of FixedPointBlock.forward, ignores
    `count_iterations`, and returns None instead of FixedPointStats.
    """

    noise_width = 0  # width of a token's state noise; 0: no state noise

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def state_shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the state's tensors without b; −1 stands for any number."""
        return []

    def run(self, u: torch.Tensor, seqs: Sequences) -> tuple[torch.Tensor, Any]:
        """Compute the layer.

        Args:
            u: Input, (b,l,d_model).
            seqs: Padding, document starts and the state before the first token.

        Returns:
            The output (b,l,d_model), and the state after the last token, or None unless
            `seqs.return_state`.
        """
        raise NotImplementedError

    def flops_per_token(self, length: int) -> int:
        """Return the forward FLOPs per token of sequences of `length` tokens.

        A multiply-add counts two.
        """
        raise NotImplementedError

    def forward(
        self,
        u: torch.Tensor,
        seqs: Sequences = Sequences(),  # noqa: B008
        checkpoint: Callable[..., Any] | None = None,
        count_iterations: bool = False,
    ) -> tuple[Any, ...]:
        if self.noise_width:
            seqs = seqs.with_noise(self, u)
        out, end = self.run(u, seqs) if checkpoint is None else checkpoint(self.run, u, seqs)
        return (out, None, end) if seqs.return_state else (out, None)


class GatedMLP(PlainLayer):
    """Gated MLP: out_proj(silu(gate) ⊙ up), where in_proj computes gate and up.

    Source: SwiGLU, Shazeer 2020.
    """

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
NO_POSITION = -1  # position of a key that no query may read (padding, or an earlier document)


class AttentionState(NamedTuple):
    """Keys and values that later tokens may read. It grows with the text."""

    keys: torch.Tensor  # (b,t,h,e), rotated
    values: torch.Tensor  # (b,t,h,e)
    positions: torch.Tensor  # (b,t), position of each key, or NO_POSITION
    next_position: torch.Tensor  # (b,), position of the next token

    def keep_last(self, num_keys: int) -> "AttentionState":
        """Return a state with the last keys and values only."""
        keys, values, positions = (
            t[:, -num_keys:].clone() for t in (self.keys, self.values, self.positions)
        )
        return AttentionState(keys, values, positions, self.next_position)


class Attention(PlainLayer):
    """Causal attention within documents: softmax(q kᵀ / √e) v."""

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
        # 1. Compute queries, keys, values (b,l,h,e), and each token's position in its row (b,l).
        q, k, v = (
            proj(u).unflatten(-1, (self.heads, -1))
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        before = seqs.state
        positions = torch.arange(u.shape[1], device=u.device).expand(len(u), -1)
        if before is not None:
            positions = positions + before.next_position.unsqueeze(1)
        q, k = rotate(q, positions), rotate(k, positions)
        # 2. Prepend the keys and values of the state. They belong to each row's first document.
        keys, values, key_positions = k, v, mask_key_positions(positions, seqs)
        if before is not None:
            keys = torch.cat([before.keys.to(k.dtype), k], 1)
            values = torch.cat([before.values.to(v.dtype), v], 1)
            key_positions = torch.cat([before.positions, key_positions], 1)
        # 3. Attend.
        is_plain = before is None and seqs.mask is None and seqs.starts is None
        visible = None if is_plain else self._find_visible_keys(positions, key_positions, seqs)
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            None if visible is None else visible.unsqueeze(1),
            is_causal=is_plain,
        )
        end = None
        if seqs.return_state:
            end = self._end_state(keys, values, key_positions, positions, seqs)
        return self.out_proj(o.transpose(1, 2).flatten(-2)), end

    def _find_visible_keys(self, positions, key_positions, seqs):
        """Return which keys each query reads, (b,l,t) bool.

        A query at padding reads itself, so that no softmax is empty. positions: (b,l) of the
        queries. key_positions: (b,t).
        """
        length, state_length = positions.shape[1], key_positions.shape[1] - positions.shape[1]
        is_causal = positions.unsqueeze(2) >= key_positions.unsqueeze(1)
        visible = is_causal & (key_positions != NO_POSITION).unsqueeze(1)
        if seqs.starts is not None:
            document = seqs.starts.cumsum(1)
            key_document = F.pad(document, (state_length, 0))  # the state belongs to document 0
            visible &= document.unsqueeze(2) == key_document.unsqueeze(1)
        diagonal = torch.eye(length, dtype=torch.bool, device=positions.device)
        return visible | F.pad(diagonal, (state_length, 0))

    def _end_state(self, keys, values, key_positions, positions, seqs):
        """Return the AttentionState after the last real token.

        keys, values: (b,t,h,e). key_positions: (b,t). positions: (b,l).
        """
        length = positions.shape[1]
        if seqs.mask is None:
            next_position = positions[:, -1] + 1
        else:
            next_position = positions[:, 0] + seqs.mask.sum(1)
        first = 0  # the oldest key that is kept
        if seqs.starts is not None:
            state_length = key_positions.shape[1] - length
            document = F.pad(seqs.starts.cumsum(1), (state_length, 0))
            is_finished = document != document[:, -1:]
            key_positions = key_positions.masked_fill(is_finished, NO_POSITION)
            # Drop the oldest keys that no row needs any more. `int` waits for the device.
            needed_count = (key_positions != NO_POSITION).any(0).cumsum(0)
            first = int((needed_count == 0).sum())
        keys, values = (t[:, first:].detach().clone() for t in (keys, values))
        return AttentionState(keys, values, key_positions[:, first:].clone(), next_position)

    def flops_per_token(self, length: int) -> int:
        """Return the FLOPs per token; on average a query reads half of the sequence."""
        d = self.config.d_model
        return 8 * d**2 + 2 * d * length


def mask_key_positions(positions: torch.Tensor, seqs: Any) -> torch.Tensor:
    """Return the positions (b,l) of the tokens' keys: NO_POSITION at padding."""
    return positions if seqs.mask is None else positions.masked_fill(~seqs.mask, NO_POSITION)


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Apply rotary position embeddings.

    Channels i and i + e/2 of a head rotate by the angle position · ROPE_BASE^(−2i/e), computed in
    fp32 or wider.

    Args:
        x: Queries or keys, (b,l,h,e) with even e.
        positions: Positions, (b,l).

    Returns:
        The rotated x, in its dtype.

    Source: RoPE, Su et al. 2021.
    """
    half = x.shape[-1] // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    exponents = torch.arange(half, device=x.device, dtype=wide) / half
    angles = positions.to(wide)[..., None, None] * ROPE_BASE**-exponents  # (b,l,1,e/2)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.to(wide).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class LSTMState(NamedTuple):
    """State of the layer after the last real token of each row."""

    h: torch.Tensor  # (b,d) output
    c: torch.Tensor  # (b,d) cell


class ResettableLSTM(nn.LSTM):
    """LSTM of torch with a single layer, noise on h, and steps that reset the state or keep c.

    Noise needs no loop over tokens, because W u + R (h + noise) = [W, R] [u, noise] + R h. Resets
    need no loop either: a large constant added to the input of a gate sets the gate to 0 or 1. With
    25 resets per row and noise, this is 4.7 times as fast as one call for each part in which no row
    has a reset; with one reset per row it takes a third longer (length 512, batch 8, width 102, one
    CPU core).
    """

    # Added to the input of a gate, they make the gate exactly 0 or 1, as long as the rest of the
    # input is below 9,900. fp16, which ends at 65,504, can hold both.
    CLOSED, OPEN = -1e4, 1e4

    def forward(
        self,
        u: torch.Tensor,
        state: tuple[torch.Tensor, torch.Tensor],
        noise: torch.Tensor | None = None,
        flags: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Run over all steps.

        Args:
            u: Inputs, (b,l,d).
            state: h and c before the first step, (1,b,d) each.
            noise: Noise (b,l,d) on the h that the gates of a step read.
            flags: (b,l,2), True or False. Where the first flag is True, h and c are zero after the
                step. Where the second is True, c stays as it is, and h is arbitrary.

        Returns:
            Outputs (b,l,d), and the pair of h and c after the last step, (1,b,d) each.
        """
        if noise is None and flags is None:
            return super().forward(u, state)
        w, r, *biases = self.all_weights[0]
        inputs, weights = [u], [w]
        if noise is not None:
            inputs.append(noise.to(u.dtype))
            weights.append(r)
        if flags is not None:
            inputs.append(flags.to(u.dtype))
            # The order of the gates is i, f, g, o.
            reset, keep = (self.CLOSED, self.CLOSED, 0, self.CLOSED), (self.CLOSED, self.OPEN, 0, 0)
            gate_constants = w.new_tensor([reset, keep]).T
            weights.append(gate_constants.repeat_interleave(self.hidden_size, 0))
        all_weights = [torch.cat(weights, 1), r, *biases]
        inputs = torch.cat(inputs, -1)
        output, *end = torch.lstm(
            inputs, state, all_weights, True, 1, 0.0, self.training, False, True
        )
        return output, end


class LSTM(PlainLayer):
    """LSTM whose output is h_t. Each document starts from a zero state.

    With centroids, token t continues from r(h_{t−1}, c_{t−1}) (layers.Centroids). State noise is
    added to the h_{t−1} that the gates, or the centroids, read.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.noise_width = config.d_model
        self.lstm = ResettableLSTM(config.d_model, config.d_model, batch_first=True)
        self.centroids = build_centroids(config, 2 * config.d_model)

    def state_shapes(self) -> list[tuple[int, ...]]:
        return [(self.config.d_model,), (self.config.d_model,)]

    def state_vector(self, state: LSTMState) -> torch.Tensor:
        """Return the vectors (b,2d) of a state that centroids read."""
        return torch.cat([state.h, state.c], -1)

    def with_state_vector(self, state: LSTMState, vector: torch.Tensor) -> LSTMState:
        """Return a state with other vectors (b,2d)."""
        return LSTMState(*vector.chunk(2, -1))

    def run(self, u: torch.Tensor, seqs: Sequences) -> tuple[torch.Tensor, LSTMState | None]:
        zero = u.new_zeros(len(u), u.shape[-1])
        h, c = (zero if t is None else t.to(u.dtype) for t in map(seqs.get_state, ("h", "c")))
        run_tokens = self._run_in_one_call if self.centroids is None else self._run_by_token
        output, h, c = run_tokens(u, h, c, seqs)
        end = LSTMState(h.detach().clone(), c.detach().clone()) if seqs.return_state else None
        return output, end

    def _run_in_one_call(self, u, h, c, seqs):
        """Return the outputs (b,l,d), and h and c after the last token that is not padding.

        Without `seqs.return_state`, the returned h and c are arbitrary. h, c: The state before the
        first token, (b,d).
        """
        noise, positions, flags = seqs.noise, None, None
        if seqs.starts is not None or (seqs.mask is not None and seqs.return_state):
            positions, flags = _plan_resets(u, seqs)
            # Clear padding, because NaN or large values would reach c.
            is_cleared = flags.any(-1, keepdim=True)
            u = _scatter_tokens(u, positions, flags.shape[1]).masked_fill(is_cleared, 0)
            if noise is not None:
                noise = _scatter_tokens(noise, positions, flags.shape[1])
                noise = noise.masked_fill(is_cleared, 0)
        output, (_, end_c) = self.lstm(u, (h.unsqueeze(0), c.unsqueeze(0)), noise, flags)
        if positions is not None:
            output = gather_tokens(output, positions)
        if seqs.return_state:
            h = last_valid_tokens(output, 1, h.unsqueeze(1), seqs).squeeze(1)
        return output, h.to(u.dtype), end_c.squeeze(0).to(u.dtype)

    def _run_by_token(self, u, h, c, seqs):
        """Return the same for a layer with centroids, which every token reads."""
        outputs, noise = [], None
        # `unbind` and `split` are faster than slices: the gradient of a slice has the length of u.
        all_noise = None if seqs.noise is None else seqs.noise.to(u.dtype).unbind(1)
        for t, token in enumerate(u.split(1, 1)):
            if seqs.starts is not None:
                is_continued = ~seqs.starts[:, t, None]
                h, c = h * is_continued, c * is_continued
            if all_noise is not None:
                noise = all_noise[t]
            read_state = self._read_state(h, c, noise)
            output, end = self.lstm(token, tuple(x.unsqueeze(0) for x in read_state))
            end = [x.squeeze(0).to(u.dtype) for x in end]
            if seqs.mask is not None:
                is_token = seqs.mask[:, t, None]
                end = [torch.where(is_token, new, old) for new, old in zip(end, (h, c))]
            h, c = end
            outputs.append(output)
        return torch.cat(outputs, 1), h, c

    def _read_state(self, h, c, noise):
        """Return the h and c (b,d) from which a token continues. noise: (b,d) or None."""
        noise = None if noise is None else F.pad(noise, (0, c.shape[-1]))
        return self.centroids(torch.cat([h, c], -1), noise).chunk(2, -1)

    def flops_per_token(self, length: int) -> int:
        d = self.config.d_model
        gates = 8 * d**2  # W and R of four gates
        return 2 * gates + 4 * self.config.state_centroids * 2 * d  # scores, and the mean


def _plan_resets(u, seqs):
    """Return new positions of the tokens that leave one position free before each document.

    Returns:
        The positions (b,l), and the `flags` of ResettableLSTM for all positions, (b,·,2). Padding
        and the unused positions at the end of a row keep c.
    """
    shape = u.shape[:2]
    is_token = u.new_ones(shape, dtype=torch.bool) if seqs.mask is None else seqs.mask
    is_start = torch.zeros_like(is_token) if seqs.starts is None else seqs.starts & is_token
    positions = torch.arange(shape[1], device=u.device) + is_start.cumsum(1)
    length = shape[1]
    if seqs.starts is not None:
        length += int(is_start.sum(1).max())
    # A reset belongs one position before its document: scatter it to the position of the document,
    # in a row that is longer by one, and shift the row to the left by dropping the first position.
    is_reset = _scatter_tokens(is_start.unsqueeze(-1), positions, length + 1)[:, 1:]
    keeps_c = ~(is_reset | _scatter_tokens(is_token.unsqueeze(-1), positions, length))
    return positions, torch.cat([is_reset, keeps_c], -1)


def _scatter_tokens(x, positions, length):
    """Return (b,length,·) with the tokens x (b,l,·) at their positions (b,l), zero elsewhere."""
    index = positions.unsqueeze(-1).expand_as(x)
    return x.new_zeros(len(x), length, x.shape[-1]).scatter(1, index, x)


LOG_ZERO = -1e30  # the initial m, the log of zero; finite, so that differences are not NaN


class SLSTMState(NamedTuple):
    """State of the layer after the last real token of each row."""

    cell: torch.Tensor  # (b,4,d): y, c, n, m
    conv: tuple[torch.Tensor, ...]  # one tensor, (b,d_conv−1,d): last inputs of the convolution


class SLSTM(PlainLayer):
    """sLSTM with a short convolution before the input and forget gates, and normalised heads.

        ĩ, f̃ = W silu(conv(u)) + R y_{t−1} + b;    z̃, õ = W u + R y_{t−1} + b,
        m_t = max(log σ(f̃) + m_{t−1}, ĩ);    i = exp(ĩ − m_t);    f = exp(log σ(f̃) + m_{t−1} − m_t),
        c_t = f c_{t−1} + i tanh(z̃);    n_t = f n_{t−1} + i;    y_t = σ(õ) c_t / n_t,

    and the output is out_proj(GroupNorm(y_t)). All W and R have one block per head. The forget gate
    is a sigmoid, one of the paper's two variants. m keeps the exponentials finite and cancels in y.

    With centroids, the gates read r(y_{t−1}) (layers.Centroids) instead of y_{t−1}; c, n and m stay
    as they are, because c / n can hold the product before the newest one, which y holds. State
    noise is added to the y_{t−1} that the gates, or the centroids, read.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.noise_width = config.d_model
        d = config.d_model
        self.heads = resolve_n_heads(config)
        e = d // self.heads
        self.conv1d = ShortConv(d, config.d_conv)
        self.gates = nn.Parameter(torch.empty(4, self.heads, e, e))  # W of i, f, z, o
        self.recurrent = nn.Parameter(torch.empty(4, self.heads, e, e))  # R
        self.gate_bias = nn.Parameter(torch.empty(4, self.heads, e))
        self.group_norm = GroupNorm(self.heads, d)
        self.out_proj = nn.Linear(d, d, bias=False)
        self.centroids = build_centroids(config, d)

    def state_shapes(self) -> list[tuple[int, ...]]:
        d = self.config.d_model
        return [(4, d), (self.config.d_conv - 1, d)]

    def state_vector(self, state: SLSTMState) -> torch.Tensor:
        """Return the y (b,d) of a state, which centroids read."""
        return state.cell[:, 0]

    def with_state_vector(self, state: SLSTMState, vector: torch.Tensor) -> SLSTMState:
        """Return the state with another y (b,d)."""
        return state._replace(cell=torch.cat([vector.unsqueeze(1), state.cell[:, 1:]], 1))

    def run(self, u: torch.Tensor, seqs: Sequences) -> tuple[torch.Tensor, SLSTMState | None]:
        h, wide = self.heads, torch.promote_types(u.dtype, torch.float32)
        # 1. Contributions of the tokens to the gates: a tuple of l tensors (h,b,4e). One `unbind`
        # is faster than an index per token, whose gradient has the length of the sequence.
        u = seqs.zero_padding(u)
        convolved, tail = convolve(self.conv1d, u, seqs, self.config.d_conv, 0)
        gate_inputs = torch.stack([convolved, convolved, u, u]).unflatten(-1, (h, -1)).to(wide)
        with without_autocast(u):
            inputs = torch.einsum("gblhe,ghoe->lhbgo", gate_inputs, self.gates.to(wide))
            bias = self.gate_bias.to(wide).transpose(0, 1).unsqueeze(1)  # (h,1,4,e)
            inputs = (inputs + bias).flatten(-2).unbind(0)
            recurrent = self.recurrent.to(wide).permute(1, 3, 0, 2).flatten(2)  # (h,e,4e)
            noise = None
            if seqs.noise is not None:
                noise = seqs.noise.to(wide).unflatten(-1, (h, -1)).permute(1, 2, 0, 3).unbind(0)
            # 2. Run token by token. y, c, n, m: (h,b,e)
            empty = _split_cell(_empty_cell(u, wide), h)
            cell = seqs.get_state("cell")
            state = empty if cell is None else _split_cell(cell.to(wide), h)
            outputs = []
            for t in range(u.shape[1]):
                if seqs.starts is not None:
                    is_start = seqs.starts[:, t, None]
                    state = [torch.where(is_start, zero, old) for zero, old in zip(empty, state)]
                y, c, n, m = state
                read_y = self._read_state(y, None if noise is None else noise[t])
                new_state = _slstm_step(inputs[t], recurrent, read_y, c, n, m)
                if seqs.mask is not None:
                    is_token = seqs.mask[:, t, None]
                    new_state = [
                        torch.where(is_token, new, old) for new, old in zip(new_state, state)
                    ]
                state = new_state
                outputs.append(state[0])
            y = torch.stack(outputs).permute(2, 0, 1, 3).flatten(-2)  # (b,l,d)
            # 3. Normalise each head.
            y = self.group_norm(y)
        end = None
        if seqs.return_state:
            cell = torch.stack([t.detach().transpose(0, 1).flatten(1) for t in state], 1)
            end = SLSTMState(cell.clone(), (tail,))
        return self.out_proj(y.to(u.dtype)), end

    def _read_state(self, y, noise):
        """Return the y_{t−1} (h,b,e) that the gates read. noise: (h,b,e) or None."""
        if self.centroids is None:
            return y if noise is None else y + noise
        y, noise = (None if x is None else x.transpose(0, 1).flatten(1) for x in (y, noise))
        return self.centroids(y, noise).unflatten(-1, (self.heads, -1)).transpose(0, 1)

    def flops_per_token(self, length: int) -> int:
        c = self.config
        gates = 8 * c.d_model**2 // self.heads  # W and R of four gates, one block per head
        centroids = 4 * c.state_centroids * c.d_model  # scores, and the mean
        return 2 * gates + 2 * c.d_model * (c.d_conv + c.d_model) + centroids


def _empty_cell(u, dtype):
    """Return the state before the first token, (b,4,d)."""
    state = u.new_zeros(len(u), 4, u.shape[-1], dtype=dtype)
    state[:, 3] = LOG_ZERO
    return state


def _split_cell(cell, heads):
    """Return y, c, n, m (h,b,e) of a state (b,4,d)."""
    return [t.unflatten(-1, (heads, -1)).transpose(0, 1) for t in cell.unbind(1)]


def _slstm_step(inputs, recurrent, y, c, n, m):
    """Return y, c, n, m (h,b,e) after a token. inputs: (h,b,4e). recurrent: (h,e,4e)."""
    i, f, z, o = (inputs + torch.bmm(y, recurrent)).chunk(4, -1)
    log_decay = F.logsigmoid(f) + m
    new_m = torch.maximum(log_decay, i)
    i = torch.exp(i - new_m)
    f = torch.exp(log_decay - new_m)
    c = f * c + i * torch.tanh(z)
    n = f * n + i
    return torch.sigmoid(o) * c / n, c, n, new_m
