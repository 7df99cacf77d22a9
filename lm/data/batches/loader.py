"""Rank-sharded, shuffled, exactly resumable micro-batches over a prepared corpus."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from lm.config.data import Data
from lm.config.schema import Config
from lm.data.batches.mixture_loader import MixtureLoader
from lm.data.batches.packing import MicroBatch, block_count, block_rows, micro_batch
from lm.data.batches.shuffled import ShuffledBlocks
from lm.data.batches.stream import StreamLoader, merge_states
from lm.data.corpus.corpora import open_sources
from lm.data.corpus.integrity import Tokens
from lm.data.sources.errors import DataError
from lm.data.sources.mixture import shares

__all__ = ["MapLoader", "StreamLoader", "build", "merge_states", "validation_blocks"]


def build(
    cfg: Config,
    tokenizer: PreTrainedTokenizerFast,
    run_dir: Path,
    rank: int = 0,
    world_size: int = 1,
) -> tuple[MapLoader | StreamLoader | MixtureLoader, dict[str, list[MicroBatch]]]:
    """(endless training loader, validation micro-batches by source) of this rank, once
    `prepare_sources` has run. A run on a single source has that of the name "".

    Raises:
        DataError: the corpus is not prepared.
    """
    corpora = open_sources(cfg, run_dir)
    size = cfg.train.micro_batch_size
    train: MapLoader | StreamLoader | MixtureLoader
    place = (rank, world_size)
    if cfg.data.mixture is not None:
        sources = {
            name: ShuffledBlocks(corpus.train, cfg.data.seq_len, cfg.seed, number)
            for number, (name, corpus) in enumerate(sorted(corpora.items()))
        }
        of_update = cfg.train.sequences(world_size)
        stages = [(stage.until * of_update, stage.weights) for stage in cfg.data.curriculum]
        train = MixtureLoader(sources, shares(cfg.data), size, cfg.seed, *place, stages)
    elif cfg.data.source == "fineweb":
        train = StreamLoader(cfg.data, tokenizer, size, cfg.seed, *place)
    else:
        train = MapLoader(corpora[""].train, cfg.data.seq_len, size, cfg.seed, *place)
    eval_size = cfg.eval.micro_batch_size or size
    held_out = {
        name: validation_blocks(corpus.val, cfg.data, eval_size, *place)
        for name, corpus in corpora.items()
    }
    return train, held_out


def validation_blocks(
    tokens: Tokens, data: Data, micro_batch_size: int, rank: int = 0, world_size: int = 1
) -> list[MicroBatch]:
    """This rank's share of the validation stream (n,): over all ranks each token but the first is a
    target once, up to `data.val_tokens` targets. Every rank gets equally many micro-batches of
    equal shape (collectives need that), padded with labels -100.

    Raises:
        DataError: no target in the stream.
    """
    if data.val_tokens:
        tokens = tokens[: data.val_tokens + 1]
    blocks = block_count(len(tokens), data.seq_len)
    if not blocks:
        raise DataError("the validation split is empty: raise data.val_fraction or add documents")
    per_rank = -(-blocks // (micro_batch_size * world_size))
    batches = []
    for number in range(rank, per_rank * world_size, world_size):
        first = number * micro_batch_size
        indices = np.arange(first, first + micro_batch_size)
        batches.append(micro_batch(block_rows(tokens, data.seq_len, indices)))
    return batches


class MapLoader:
    """Endless shuffled micro-batches over a token array.

    Epoch e visits every block once, in a permutation drawn from (seed, e); a micro-batch may cross
    into the next epoch. The global sequence of micro-batches does not depend on the number of
    ranks: number g goes to rank g % world_size. The last block is padded with labels -100, so no
    token is dropped.

    Args:
        tokens: (n,) ids, at least 2.
    """

    def __init__(
        self,
        tokens: Tokens,
        seq_len: int,
        micro_batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ):
        self._size = micro_batch_size
        self._rank = rank
        self._world_size = world_size
        self._blocks = ShuffledBlocks(tokens, seq_len, seed)
        if not len(self._blocks):
            raise DataError(f"{len(tokens)} training tokens make no block: there is no target")
        self._seed = seed
        self._next = 0  # the first block, counted over epochs, that no rank has seen

    @property
    def shares(self) -> dict[str, float]:
        """Sampling share per source."""
        return {"": 1.0}

    @property
    def epoch(self) -> int:
        """Completed passes over the corpus."""
        return self._next // len(self._blocks)

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        first = self._next + self._rank * self._size
        self._next += self._world_size * self._size
        return micro_batch(self._blocks.rows(np.arange(first, first + self._size)))

    def drawn(self) -> dict:
        """What came from each source of a mixture; nothing of a single one."""
        return {}

    def state_dict(self) -> dict:
        """Independent of the rank and of the number of ranks."""
        return {
            "next_global_micro_batch": self._next // self._size,
            "micro_batch_size": self._size,
            "blocks": len(self._blocks),
            "seed": self._seed,
        }

    def load_state_dict(self, state: dict) -> None:
        """Continues at the state's block, also with another world or micro-batch size.

        Raises:
            DataError: the state is of another corpus, sequence length or seed.
        """
        if "blocks" not in state:
            raise DataError(
                "the checkpoint's data position is of another kind of data (a stream, or several"
                " sources of data.mixture): the data must not change on resuming"
            )
        for key, ours in (("blocks", len(self._blocks)), ("seed", self._seed)):
            if state[key] != ours:
                raise DataError(
                    f"the checkpoint's data position is of {key} {state[key]}, this run has {ours}:"
                    " the corpus, data.seq_len and seed must not change on resuming"
                )
        self._next = state["next_global_micro_batch"] * state["micro_batch_size"]
