"""Rank-sharded, shuffled, exactly resumable micro-batches over a prepared corpus."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from lm.config.data import Data
from lm.config.schema import Config
from lm.data.batches.mixture_loader import MixtureLoader, ShuffledBlocks
from lm.data.batches.packing import MicroBatch, block_count, block_rows, micro_batch
from lm.data.batches.stream import StreamLoader, merge_states
from lm.data.corpus.corpora import open_sources
from lm.data.corpus.integrity import Tokens
from lm.data.sources.errors import DataError
from lm.data.sources.mixture import shares

__all__ = ["StreamLoader", "build", "merge_states", "single_source_loader", "validation_blocks"]


def build(
    cfg: Config,
    tokenizer: PreTrainedTokenizerFast,
    run_dir: Path,
    rank: int = 0,
    world_size: int = 1,
) -> tuple[StreamLoader | MixtureLoader, dict[str, list[MicroBatch]]]:
    """(endless training loader, validation micro-batches by source) of this rank, once
    `prepare_sources` has run. A run on a single source has that of the name "".

    Raises:
        DataError: the corpus is not prepared.
    """
    corpora = open_sources(cfg, run_dir)
    size = cfg.train.micro_batch_size
    train: StreamLoader | MixtureLoader
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
        train = single_source_loader(corpora[""].train, cfg.data.seq_len, size, cfg.seed, *place)
    held_out = {
        name: validation_blocks(corpus.val, cfg.data, size, *place)
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


def single_source_loader(
    tokens: Tokens,
    seq_len: int,
    micro_batch_size: int,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> MixtureLoader:
    """Make the loader of a run on one corpus of tokens (n,), at least 2.

    Epoch e visits every block once, in a permutation drawn from (seed, e).
    """
    blocks = ShuffledBlocks(tokens, seq_len, seed)
    if not len(blocks):
        raise DataError(f"{len(tokens)} training tokens make no block: there is no target")
    return MixtureLoader({"": blocks}, {"": 1.0}, micro_batch_size, seed, rank, world_size)
