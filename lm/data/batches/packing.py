"""Fixed-size blocks of a token stream, and micro-batches of blocks.

A block has seq_len + 1 tokens: inputs `block[:-1]` and labels `block[1:]`. Block k of a stream is
`stream[k*L : k*L + L + 1]` with L = seq_len, so every token except the first is a target once.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from lm.data.corpus.integrity import Tokens

IGNORE = -100  # label of a position without a target
# {"input_ids", "labels"}, int64, shape (batch, seq_len); the labels are already shifted.
MicroBatch = dict[str, torch.Tensor]


class Packer:
    """Cutter of a growing token stream into blocks; its state holds the incomplete last block."""

    def __init__(self, seq_len: int):
        self.seq_len = seq_len
        self._rest = np.empty(0, dtype=np.int64)

    def add(self, tokens: np.ndarray) -> np.ndarray:
        """Add tokens (n,) to the stream; return the blocks that are now complete.

        Returns:
            Blocks, shape (k, seq_len + 1), int64; k may be 0.
        """
        stream = np.concatenate([self._rest, np.asarray(tokens, dtype=np.int64)])
        num_blocks = max(0, (len(stream) - 1) // self.seq_len)
        self._rest = stream[num_blocks * self.seq_len :].copy()
        return block_rows(stream, self.seq_len, np.arange(num_blocks))

    def state_dict(self) -> dict:
        """Return the tokens of the incomplete block."""
        return {"seq_len": self.seq_len, "rest": self._rest.tolist()}

    def load_state_dict(self, state: dict) -> None:
        """Continue from a state dict.

        Raises:
            ValueError: If the state has another seq_len.
        """
        if state["seq_len"] != self.seq_len:
            raise ValueError(f"packed with seq_len {state['seq_len']}, not {self.seq_len}")
        self._rest = np.array(state["rest"], dtype=np.int64)


def block_count(num_tokens: int, seq_len: int) -> int:
    """Return the number of blocks of a stream, whose last block may be padded."""
    return max(0, math.ceil((num_tokens - 1) / seq_len))


def block_rows(stream: Tokens, seq_len: int, indices: np.ndarray) -> np.ndarray:
    """Return blocks of a token stream, padded with IGNORE after its end.

    Args:
        stream: Token ids, shape (n,).
        indices: Indices of the blocks, shape (k,).

    Returns:
        Blocks, shape (k, seq_len + 1), int64.
    """
    rows = np.full((len(indices), seq_len + 1), IGNORE, dtype=np.int64)
    for row, index in zip(rows, indices):
        tokens = stream[index * seq_len : index * seq_len + seq_len + 1]
        row[: len(tokens)] = tokens
    return rows


def micro_batch(blocks: np.ndarray) -> MicroBatch:
    """Split blocks (batch, seq_len + 1) into inputs and labels; padding has id 0 in the inputs."""
    ids = torch.from_numpy(np.ascontiguousarray(blocks, dtype=np.int64))
    inputs = ids[:, :-1].clone()
    labels = ids[:, 1:].clone()
    inputs[inputs == IGNORE] = 0
    return {"input_ids": inputs, "labels": labels}
