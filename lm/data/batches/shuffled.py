"""The blocks of a corpus in an endless shuffled order: each epoch has its own permutation."""

from __future__ import annotations

import numpy as np

from lm.data.batches.packing import block_count, block_rows
from lm.data.corpus.integrity import Tokens


class ShuffledBlocks:
    """A token stream cut every `seq_len` tokens, wherever that is in a document; the last block is
    padded with IGNORE, so no token is dropped. Block p of the endless order is block
    `permutation(seed, p // blocks)[p % blocks]`.

    Args:
        tokens: (n,) ids.
        seed: what the permutations are drawn from, beside the epoch.
        source: its number in a mixture, so that no two are drawn alike; None: it is alone.
    """

    def __init__(self, tokens: Tokens, seq_len: int, seed: int, source: int | None = None):
        self._tokens = tokens
        self._seq_len = seq_len
        self._seed = seed
        self._source = [] if source is None else [source]
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        """Blocks in an epoch."""
        return block_count(len(self._tokens), self._seq_len)

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """The blocks at positions (k,), counted over epochs, as (k, seq_len + 1) int64."""
        indices = np.array([self._index(p) for p in positions], dtype=np.int64)
        return block_rows(self._tokens, self._seq_len, indices)

    def _index(self, position: int) -> int:
        epoch, place = divmod(int(position), len(self))
        return int(self._order(epoch)[place])

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            # Of the orders before only the last is kept: a micro-batch may begin in it.
            self._orders = {
                known: order for known, order in self._orders.items() if known == epoch - 1
            }
            rng = np.random.default_rng([self._seed, epoch, *self._source])
            self._orders[epoch] = rng.permutation(len(self))
        return self._orders[epoch]
