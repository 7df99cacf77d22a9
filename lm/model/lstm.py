"""The LSTM (Hochreiter & Schmidhuber 1997) as a layer: torch.nn.LSTM, d_model wide.

Shape suffixes: b batch, l length, d channels (d_model).
"""

import itertools
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .plain import PlainLayer
from .state import Sequences


class LSTMState(NamedTuple):
    """What the layer leaves behind after a row's last token that is no padding."""

    h: torch.Tensor  # (b,d) output
    c: torch.Tensor  # (b,d) cell

    def select(self, rows: torch.Tensor) -> "LSTMState":
        """The state of these rows (k,) of the batch."""
        return LSTMState(self.h[rows], self.c[rows])


class LSTM(PlainLayer):
    """h_t, c_t = LSTM(u_t, h_{t−1}, c_{t−1}); the output is h_t. A document starts from zero."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lstm = nn.LSTM(config.d_model, config.d_model, batch_first=True)

    def state_shapes(self) -> list[tuple[int, ...]]:
        return [(self.config.d_model,), (self.config.d_model,)]

    def run(self, u: torch.Tensor, seqs: Sequences) -> tuple[torch.Tensor, LSTMState | None]:
        zero = u.new_zeros(len(u), u.shape[-1])
        h, c = (zero if t is None else t.to(u.dtype) for t in map(seqs.before, ("h", "c")))
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
