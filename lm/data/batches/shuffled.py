"""The blocks of a corpus in an endless shuffled order: each epoch has its own permutation."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from lm.data.batches.packing import block_count, block_rows
from lm.data.corpus.integrity import Tokens
from lm.data.sources.errors import DataError


class Rows(Protocol):
    """A corpus as rows of seq_len + 1 ids: the first `seq_len` are inputs, those after the first
    are targets, but for IGNORE and what `micro_batch` takes for context alone."""

    kind: str  # of `data.packing`

    def __len__(self) -> int: ...
    def rows(self, indices: np.ndarray) -> np.ndarray: ...
    def targets(self, indices: np.ndarray) -> int: ...


class PlainRows:
    """A token stream cut every `seq_len` tokens, wherever that is in a document; the last block is
    padded with IGNORE, so no token is dropped.

    Args:
        tokens: (n,) ids.
    """

    kind = "plain"

    def __init__(self, tokens: Tokens, seq_len: int):
        self._tokens = tokens
        self._seq_len = seq_len

    def __len__(self) -> int:
        return block_count(len(self._tokens), self._seq_len)

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """The blocks `indices` (k,) as (k, seq_len + 1) int64."""
        return block_rows(self._tokens, self._seq_len, indices)

    def targets(self, indices: np.ndarray) -> int:
        """How many targets these blocks have."""
        padding = len(self) * self._seq_len - (len(self._tokens) - 1)
        return len(indices) * self._seq_len - padding * int((indices == len(self) - 1).sum())


class ShuffledBlocks:
    """Block p of the endless order is block `permutation(seed, p // blocks)[p % blocks]`.

    Args:
        seed: what the permutations are drawn from, beside the epoch.
        source: its number in a mixture, so that no two are drawn alike; None: it is alone.
    """

    def __init__(self, blocks: Rows, seed: int, source: int | None = None):
        self._blocks = blocks
        self._seed = seed
        self._source = [] if source is None else [source]
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        """Blocks in an epoch."""
        return len(self._blocks)

    @property
    def packing(self) -> str:
        """How they were made, as `data.packing` says it."""
        return self._blocks.kind

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """The blocks at positions (k,), counted over epochs, as (k, seq_len + 1) int64."""
        return self._blocks.rows(np.array([self._index(p) for p in positions], dtype=np.int64))

    def targets(self, count: int) -> int:
        """How many targets the first `count` blocks of the order have."""
        epochs, begun = divmod(count, len(self))  # whole epochs, and blocks of the next one
        targets = 0
        if epochs:
            targets += epochs * self._blocks.targets(np.arange(len(self)))
        if begun:
            targets += self._blocks.targets(self._order(epochs)[:begun])
        return targets

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


def check_packing(state: dict, packing: str) -> None:
    """Raises DataError where a loader's state is of blocks that were packed in another way than
    this run's."""
    then = state.get("packing", "plain")
    if then != packing:
        raise DataError(
            f"the checkpoint's data position is of data.packing {then}, this run has {packing}: it"
            " must not change on resuming"
        )
