"""Shuffled micro-batches from one or several sources, resumable on any number of ranks.

A curriculum is a list of stages at the beginning of a run. Each stage has its own weights of the
sources, and the rest of the run has the weights of the mixture.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from lm.data.batches.packing import MicroBatch, block_count, block_rows, micro_batch
from lm.data.corpus.integrity import Tokens
from lm.data.sources.errors import DataError

# Sequences per stratum. Within a stratum, the number of sequences of each source differs from its
# share by at most two.
STRATUM = 256
MIXTURE_KEY = 0x6D6978  # next to the seed: separates this generator from all others


class ShuffledBlocks:
    """Blocks of a token stream in an endless shuffled order, with a new permutation every epoch.

    Position p of the order holds block `permutation(seed, p // blocks)[p % blocks]`. The stream is
    cut every `seq_len` tokens, also inside documents. The last block is padded with IGNORE, so no
    token is dropped.

    Args:
        tokens: Token ids, shape (n,).
        source_index: Index of the source in a mixture, so that sources have different permutations;
            None for a single source.
    """

    def __init__(self, tokens: Tokens, seq_len: int, seed: int, source_index: int | None = None):
        self._tokens = tokens
        self._seq_len = seq_len
        self._seed = seed
        self._source_key = [] if source_index is None else [source_index]
        self._permutations: dict[int, np.ndarray] = {}  # by epoch

    def __len__(self) -> int:
        """Return the number of blocks in an epoch."""
        return block_count(len(self._tokens), self._seq_len)

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """Return the blocks at positions (k,), counted over all epochs: (k, seq_len + 1) int64."""
        indices = np.array([self._block_index(p) for p in positions], dtype=np.int64)
        return block_rows(self._tokens, self._seq_len, indices)

    def _block_index(self, position: int) -> int:
        epoch, index = divmod(int(position), len(self))
        if epoch not in self._permutations:
            # A micro-batch may begin in the previous epoch. Forget all earlier epochs.
            previous = self._permutations.get(epoch - 1)
            self._permutations = {} if previous is None else {epoch - 1: previous}
            rng = np.random.default_rng([self._seed, epoch, *self._source_key])
            self._permutations[epoch] = rng.permutation(len(self))
        return int(self._permutations[epoch][index])


class Stage(NamedTuple):
    """A stage of a curriculum."""

    end: int  # index of the first sequence after the stage
    weights: list[float]  # one per source, in alphabetic order of the names


def draw_sources(first: int, count: int, seed: int, stages: Sequence[Stage]) -> np.ndarray:
    """Draw the source of each of `count` sequences.

    The source of a sequence depends only on the seed, the stages and the sequence's index in the
    run. In every stratum each source has its share, to within two sequences, in random order.

    Args:
        first: Index of the first sequence in the run.
        stages: Stages in their order; the last one never ends.

    Returns:
        Indices of sources, shape (count,).
    """
    strata = range(first // STRATUM, (first + count - 1) // STRATUM + 1)
    sources = np.concatenate([_draw_stratum(stratum, seed, stages) for stratum in strata])
    start = first - strata[0] * STRATUM
    return sources[start : start + count]


def _draw_stratum(stratum: int, seed: int, stages: Sequence[Stage]) -> np.ndarray:
    """Draw the sources of the sequences of a stratum, shape (STRATUM,)."""
    rng = np.random.default_rng([seed, MIXTURE_KEY, stratum])
    # One random point in each of STRATUM equal intervals of [0, 1), in random order.
    points = (rng.permutation(STRATUM) + rng.random(STRATUM)) / STRATUM
    sequences = stratum * STRATUM + np.arange(STRATUM)  # their indices in the run
    stage_indices = np.searchsorted([stage.end for stage in stages[:-1]], sequences, side="right")
    sources = np.empty(STRATUM, dtype=np.int64)
    for stage in np.unique(stage_indices):
        is_in_stage = stage_indices == stage
        sources[is_in_stage] = _map_to_sources(points[is_in_stage], stages[stage].weights)
    return sources


def _map_to_sources(points: np.ndarray, weights: list[float]) -> np.ndarray:
    """Map points of [0, 1) to sources: each source has an interval as long as its share."""
    candidates = np.flatnonzero(weights)
    ends = np.cumsum(np.array(weights)[candidates])
    bounds = ends[:-1] / ends[-1]
    return candidates[np.searchsorted(bounds, points, side="right")]


class MixtureLoader:
    """Endless micro-batches whose sequences come from one or several sources.

    `draw_sources` chooses the source of each sequence of the run. The sequence is the next block in
    the shuffled order of that source. Micro-batch g contains the sequences g·b to g·b + b - 1,
    where b is the micro-batch size, and goes to rank g % world_size. So the order does not depend
    on the number of ranks.

    Args:
        sources: Blocks of each source by name; the name of a single source is "".
        weights: Share of each source after the curriculum.
        stages: Stages of the curriculum: (first sequence after the stage, {source: weight}).
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
            Stage(end, [stage_weights.get(name, 0.0) for name in self._names])
            for end, stage_weights in stages
        ]
        # Ends of the stages; `end_stage` may replace one by an earlier end.
        self._ends = [stage.end for stage in self._stages]
        self._seed = seed
        self._size = micro_batch_size
        self._rank = rank
        self._world_size = world_size
        self._next_sequence = 0  # index in the run, over all ranks
        # Number of sequences drawn from each source, over all ranks.
        self._counts = np.zeros(len(self._names), dtype=np.int64)

    @property
    def stage(self) -> int:
        """Index of the next sequence's stage; the number of stages after the curriculum."""
        return bisect.bisect_right(self._ends, self._next_sequence)

    def end_stage(self) -> None:
        """End the current stage before the next sequence."""
        self._ends[self.stage] = self._next_sequence

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        stages = [Stage(end, stage.weights) for end, stage in zip(self._ends, self._stages)]
        stages.append(Stage(-1, self._weights))  # never ends
        count = self._world_size * self._size
        sources = draw_sources(self._next_sequence, count, self._seed, stages)  # of all ranks
        start = self._rank * self._size
        rank_sources = sources[start : start + self._size]
        # Number of blocks of each source that earlier micro-batches and lower ranks use.
        used_counts = self._counts + np.bincount(sources[:start], minlength=len(self._names))
        blocks: dict[int, np.ndarray] = {}  # by row of the micro-batch
        for source_index, source in enumerate(self._sources):
            rows = np.flatnonzero(rank_sources == source_index)
            positions = used_counts[source_index] + np.arange(len(rows))
            for row, block in zip(rows, source.rows(positions)):
                blocks[int(row)] = block
        self._counts += np.bincount(sources, minlength=len(self._names))
        self._next_sequence += count
        return micro_batch(np.stack([blocks[row] for row in range(self._size)]))

    @property
    def shares(self) -> dict[str, float]:
        """Share of the sequences per source after the curriculum; the shares sum to 1."""
        return dict(zip(self._names, self._weights))

    def source_metrics(self) -> dict[str, Any]:
        """Return each source's share of the sequences, and its epochs, since the run began.

        The counts are over all ranks. The result is empty for a run on a single source.
        """
        if self._names == [""]:
            return {}
        counts = dict(zip(self._names, self._counts.tolist()))
        total = max(1, sum(counts.values()))
        sizes = dict(zip(self._names, map(len, self._sources)))
        return {
            "data_share": {name: round(count / total, 6) for name, count in counts.items()},
            "data_epochs": {name: round(count / sizes[name], 4) for name, count in counts.items()},
        }

    def state_dict(self) -> dict:
        """Return the position, which does not depend on the rank or the number of ranks."""
        state = {
            "next_global_micro_batch": self._next_sequence // self._size,
            "micro_batch_size": self._size,
            "seed": self._seed,
        }
        if self._names == [""]:
            return state | {"blocks": len(self._sources[0])}
        rows = zip(self._names, self._weights, self._sources, self._counts.tolist())
        return state | {
            "stages": [stage._asdict() for stage in self._stages],
            "ends": list(self._ends),
            "mixture": {
                name: {"weight": weight, "blocks": len(source), "drawn": count}
                for name, weight, source, count in rows
            },
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue at the state's sequence, on any number of ranks with any micro-batch size.

        Raises:
            DataError: If the state has other sources, weights, sequence length or seed.
        """
        current_state = self.state_dict()
        kind = "mixture" if "mixture" in current_state else "blocks"
        if kind not in state:
            raise DataError(
                "the checkpoint's data position belongs to another kind of data (a stream, a single"
                " source, a data.mixture): the data must not change on resuming"
            )
        saved, current = _fixed_entries(state), _fixed_entries(current_state)
        for key in saved | current:
            if saved.get(key) != current.get(key):
                raise DataError(
                    f"the checkpoint's data position has {key} {saved.get(key)}, this run has"
                    f" {current.get(key)}: the corpus, data.seq_len, data.mixture, data.curriculum,"
                    " the sequences per update and the seed must not change on resuming"
                )
        self._next_sequence = _next_sequence(state)
        if kind == "blocks":  # all sequences come from the single source
            self._counts[:] = self._next_sequence
            return
        sources = state["mixture"].values()
        self._weights = [source["weight"] for source in sources]
        self._ends = list(state["ends"])
        self._counts[:] = [source["drawn"] for source in sources]


def skip_data(state: dict, later_state: dict) -> dict:
    """Return the state of a loader that skips the data between two of its states.

    The result has the position of `later_state` and the stages of `state`. If a stage has not ended
    in `state`, it ends later, by the number of skipped sequences, and so keeps its number of
    updates. States of a loader without stages are allowed.
    """
    if "ends" not in state:
        return later_state
    first = _next_sequence(state)
    skipped = _next_sequence(later_state) - first
    ends = [end if end <= first else end + skipped for end in state["ends"]]
    return later_state | {"ends": ends}


def _next_sequence(state: dict) -> int:
    return state["next_global_micro_batch"] * state["micro_batch_size"]


def _fixed_entries(state: dict) -> dict[str, Any]:
    """Return the entries of a state that must not change on resuming, named as in messages."""
    entries = {key: state[key] for key in ("seed", "blocks") if key in state}
    for name, source in state.get("mixture", {}).items():
        # Shares of the same mixture may differ in the last digits.
        entries[f"data.mixture.{name}: weight"] = float(f"{source['weight']:.9g}")
        entries[f"data.mixture.{name}: blocks"] = source["blocks"]
    return entries | {"data.curriculum": state.get("stages", [])}
