"""Micro-batches whose sequences are drawn from several sources; exactly resumable on any ranks."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from lm.data.batches.packing import MicroBatch, block_count, block_rows, micro_batch
from lm.data.corpus.integrity import Tokens
from lm.data.sources.errors import DataError

STRATA = 256  # sequences in a row of which every source has its share, to a sequence or two
DRAWING = 0x6D6978  # beside the seed: no other generator is made of both


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


def _assign(points: np.ndarray, weights: list[float]) -> np.ndarray:
    """Map points of [0, 1) to the numbers of sources; a source's part of [0, 1) is its share."""
    possible = np.flatnonzero(weights)
    ends = np.cumsum(np.array(weights)[possible])
    bounds = ends[:-1] / ends[-1]
    return possible[np.searchsorted(bounds, points, side="right")]


class Drawing:
    """Which source each sequence of a run is from: a function of the seed and its place alone.

    Of every STRATA sequences in a row each source has its share, up to a sequence or two; which of
    them are its own is drawn at random.

    Args:
        weights: of the sources. stages: before them others, each until a sequence.
    """

    def __init__(self, weights: list[float], seed: int, stages: Sequence[Stage] = ()):
        self._ends = [stage.end for stage in stages]
        self._weights = [*(stage.weights for stage in stages), weights]
        self._seed = seed

    def sources(self, first: int, count: int) -> np.ndarray:
        """(count,) numbers of the sources of the sequences from place `first` on."""
        strata = range(first // STRATA, (first + count - 1) // STRATA + 1)
        drawn = np.concatenate([self._stratum(number) for number in strata])
        start = first - strata[0] * STRATA
        return drawn[start : start + count]

    def _stratum(self, number: int) -> np.ndarray:
        rng = np.random.default_rng([self._seed, DRAWING, number])
        points = (rng.permutation(STRATA) + rng.random(STRATA)) / STRATA
        places = number * STRATA + np.arange(STRATA)
        stages = np.searchsorted(self._ends, places, side="right")
        drawn = np.empty(STRATA, dtype=np.int64)
        for stage in np.unique(stages):
            here = stages == stage
            drawn[here] = _assign(points[here], self._weights[stage])
        return drawn


class Stage(NamedTuple):
    """Of a curriculum."""

    end: int  # the first sequence that is drawn otherwise, at the latest
    weights: list[float]  # of the sources, in alphabetic order


class MixtureLoader:
    """Endless micro-batches whose sequences are drawn from one corpus or several.

    Sequence p of the run is from the source that `Drawing` says, and is the next block in the
    shuffled order of that source, which begins its next epoch when it has none left. Micro-batch g,
    sequences g·b to g·b + b - 1, goes to rank g % world_size: nothing depends on the ranks.

    Args:
        sources: name → its blocks; "" is the name of a single one.
        weights: name → its share once the stages are over.
        stages: (sequences until its end, name → weight) of each, in their order.
    """

    def __init__(
        self,
        sources: dict[str, ShuffledBlocks],
        weights: dict[str, float],
        micro_batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        stages: Sequence[tuple[int, dict[str, float]]] = (),
    ):
        self._names = sorted(sources)
        self._sources = [sources[name] for name in self._names]
        self._weights = [weights[name] for name in self._names]
        self._stages = [
            Stage(end, [of_stage.get(name, 0.0) for name in self._names])
            for end, of_stage in stages
        ]
        self._ends = [stage.end for stage in self._stages]  # or sooner, see `end_stage`
        self._seed = seed
        self._drawing = self._draw()
        self._size = micro_batch_size
        self._rank = rank
        self._world_size = world_size
        self._next = 0  # the first sequence that no rank has had
        self._drawn = np.zeros(len(self._names), dtype=np.int64)  # before it, of each source

    def _draw(self) -> Drawing:
        stages = [Stage(end, stage.weights) for end, stage in zip(self._ends, self._stages)]
        return Drawing(self._weights, self._seed, stages)

    @property
    def stage(self) -> int:
        """The number of the stage that the next sequence is of; that of all once they are over."""
        return bisect.bisect_right(self._ends, self._next)

    def end_stage(self) -> None:
        """The next sequence is of the next stage already."""
        self._ends[self.stage] = self._next
        self._drawing = self._draw()

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        sources = self._drawing.sources(self._next, self._world_size * self._size)
        before = sources[: self._rank * self._size]
        own = sources[len(before) : len(before) + self._size]
        places = self._drawn + np.bincount(before, minlength=len(self._names))
        blocks: dict[int, np.ndarray] = {}  # by their row of the micro-batch
        for number, source in enumerate(self._sources):
            rows = np.flatnonzero(own == number)
            positions = places[number] + np.arange(len(rows))
            for row, block in zip(rows, source.rows(positions)):
                blocks[int(row)] = block
        self._drawn += np.bincount(sources, minlength=len(self._names))
        self._next += len(sources)
        return micro_batch(np.stack([blocks[row] for row in range(self._size)]))

    @property
    def shares(self) -> dict[str, float]:
        """What share of the sequences is drawn from each source once the stages are over; they sum
        to 1."""
        return dict(zip(self._names, self._weights))

    def drawn(self) -> dict[str, Any]:
        """Return the share of the sequences and the epochs of each source since the run began.

        Counted over all ranks. Empty for a run on a single source.
        """
        if self._names == [""]:
            return {}
        counts = dict(zip(self._names, self._drawn.tolist()))
        total = max(1, sum(counts.values()))
        blocks = dict(zip(self._names, map(len, self._sources)))
        return {
            "data_share": {name: round(count / total, 6) for name, count in counts.items()},
            "data_epochs": {name: round(count / blocks[name], 4) for name, count in counts.items()},
        }

    def state_dict(self) -> dict:
        """Return the position, which does not depend on the rank or the number of ranks."""
        state = {
            "next_global_micro_batch": self._next // self._size,
            "micro_batch_size": self._size,
            "seed": self._seed,
        }
        if self._names == [""]:
            return state | {"blocks": len(self._sources[0])}
        columns = zip(self._names, self._weights, self._sources, self._drawn.tolist())
        return state | {
            "stages": [stage._asdict() for stage in self._stages],
            "ends": list(self._ends),
            "mixture": {
                name: {"weight": weight, "blocks": len(source), "drawn": drawn}
                for name, weight, source, drawn in columns
            },
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue at the state's sequence, also with another world or micro-batch size.

        Raises:
            DataError: If the state is of other sources, weights, sequence length or seed.
        """
        ours = self.state_dict()
        kind = "mixture" if "mixture" in ours else "blocks"
        if kind not in state:
            raise DataError(
                "the checkpoint's data position is of another kind of data (a stream, a single"
                " source, several of data.mixture): the data must not change on resuming"
            )
        then, now = _identity(state), _identity(ours)
        for key in then | now:
            if then.get(key) != now.get(key):
                raise DataError(
                    f"the checkpoint's data position is of {key} {then.get(key)}, this run has"
                    f" {now.get(key)}: the corpus, data.seq_len, data.mixture, data.curriculum, the"
                    " sequences of an update and the seed must not change on resuming"
                )
        self._next = state["next_global_micro_batch"] * state["micro_batch_size"]
        if kind == "blocks":
            self._drawn[:] = self._next
            return
        sources = state["mixture"].values()
        self._weights = [source["weight"] for source in sources]
        configured = [stage.end for stage in self._stages]
        self._ends = list(state.get("ends", configured))  # older ones have none
        self._drawing = self._draw()
        self._drawn[:] = [source["drawn"] for source in sources]


def _identity(state: dict) -> dict[str, Any]:
    """Return the parts of a state that must not change on resuming, by their names."""
    identity = {key: state[key] for key in ("seed", "blocks") if key in state}
    for name, source in state.get("mixture", {}).items():
        identity[f"data.mixture.{name}: weight"] = float(f"{source['weight']:.9g}")
        identity[f"data.mixture.{name}: blocks"] = source["blocks"]
    return identity | {"data.curriculum": state.get("stages", [])}
