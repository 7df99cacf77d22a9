"""Loaders of a run: shuffled, resumable training micro-batches, and validation micro-batches."""

from __future__ import annotations

import math
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
from lm.data.sources.mixture import source_shares

__all__ = ["StreamLoader", "build", "merge_states", "single_source_loader", "validation_blocks"]


def build(
    cfg: Config,
    tokenizer: PreTrainedTokenizerFast,
    run_dir: Path,
    rank: int = 0,
    world_size: int = 1,
) -> tuple[StreamLoader | MixtureLoader, dict[str, list[MicroBatch]]]:
    """Build the loaders of a rank, after `prepare_sources` has prepared the corpora.

    Returns:
        The endless training loader, and the validation micro-batches by source; the name of a
        single source is "".

    Raises:
        DataError: If the corpus is not prepared.
    """
    corpora = open_sources(cfg, run_dir)
    seq_len, size = cfg.data.seq_len, cfg.train.micro_batch_size
    train_loader: StreamLoader | MixtureLoader
    if cfg.data.mixture is not None:
        sources = {
            name: ShuffledBlocks(corpus.train, seq_len, cfg.seed, source_index)
            for source_index, (name, corpus) in enumerate(sorted(corpora.items()))
        }
        shares = source_shares(cfg.data)
        sequences = cfg.train.sequences(world_size)  # of an update
        stages = [(stage.until * sequences, stage.weights) for stage in cfg.data.curriculum]
        train_loader = MixtureLoader(sources, shares, size, cfg.seed, rank, world_size, stages)
    elif cfg.data.source == "fineweb":
        train_loader = StreamLoader(cfg.data, tokenizer, size, cfg.seed, rank, world_size)
    else:
        tokens = corpora[""].train
        train_loader = single_source_loader(tokens, seq_len, size, cfg.seed, rank, world_size)
    validation = {
        name: validation_blocks(corpus.val, cfg.data, size, rank, world_size)
        for name, corpus in corpora.items()
    }
    return train_loader, validation


def validation_blocks(
    tokens: Tokens, data: Data, micro_batch_size: int, rank: int = 0, world_size: int = 1
) -> list[MicroBatch]:
    """Return this rank's share of the validation micro-batches.

    Over all ranks, every token except the first is a target once, up to `data.val_tokens` targets.
    Collective operations need equally many micro-batches of equal shape on every rank, so the last
    ones are padded with labels IGNORE.

    Args:
        tokens: Validation tokens, shape (n,).

    Raises:
        DataError: If there is no target in the stream.
    """
    if data.val_tokens:
        tokens = tokens[: data.val_tokens + 1]
    num_blocks = block_count(len(tokens), data.seq_len)
    if not num_blocks:
        raise DataError("the validation split is empty: raise data.val_fraction or add documents")
    batches_per_rank = math.ceil(num_blocks / (micro_batch_size * world_size))
    batches = []
    for batch_index in range(rank, batches_per_rank * world_size, world_size):
        first_block = batch_index * micro_batch_size
        block_indices = np.arange(first_block, first_block + micro_batch_size)
        batches.append(micro_batch(block_rows(tokens, data.seq_len, block_indices)))
    return batches


def single_source_loader(
    tokens: Tokens,
    seq_len: int,
    micro_batch_size: int,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> MixtureLoader:
    """Make the training loader of a run on one corpus.

    Epoch e contains every block once, in the permutation (seed, e).

    Args:
        tokens: Training tokens, shape (n,).

    Raises:
        DataError: If there are fewer than 2 tokens, so that there is no target.
    """
    blocks = ShuffledBlocks(tokens, seq_len, seed)
    if not len(blocks):
        raise DataError(f"{len(tokens)} training tokens make no block: there is no target")
    return MixtureLoader({"": blocks}, {"": 1.0}, micro_batch_size, seed, rank, world_size)
