"""Rank- and worker-sharded, shuffled, exactly resumable micro-batches."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from lm.config import Config, Data
from lm.data.packing import IGNORE, Packer, block_count, block_rows, encode_documents
from lm.data.prepare import open_corpus
from lm.data.sources import DataError, documents, is_validation

MicroBatch = dict[str, torch.Tensor]  # input_ids, labels: (b, L) int64; labels already shifted
BATCH = 64  # documents a stream tokenises at a time


def build(
    cfg: Config,
    tokenizer: PreTrainedTokenizerFast,
    run_dir: Path,
    rank: int = 0,
    world_size: int = 1,
) -> tuple[MapLoader | StreamLoader, list[MicroBatch]]:
    """(endless training loader, validation micro-batches) of this rank, once `prepare` has run.

    Raises:
        DataError: the corpus is not prepared.
    """
    corpus, size = open_corpus(run_dir), cfg.train.micro_batch_size
    if cfg.data.source == "fineweb":
        train = StreamLoader(cfg.data, tokenizer, size, cfg.seed, rank, world_size)
    else:
        train = MapLoader(corpus.train, cfg.data.seq_len, size, cfg.seed, rank, world_size)
    eval_size = cfg.eval.micro_batch_size or size
    return train, validation_blocks(corpus.val, cfg.data, eval_size, rank, world_size)


def micro_batch(blocks: np.ndarray) -> MicroBatch:
    """Blocks (b, L + 1) → inputs and labels (b, L); padding is id 0 in the inputs."""
    blocks = torch.from_numpy(np.ascontiguousarray(blocks, dtype=np.int64))
    inputs = blocks[:, :-1].clone()
    inputs[inputs == IGNORE] = 0
    return {"input_ids": inputs, "labels": blocks[:, 1:].clone()}


def validation_blocks(
    tokens: np.ndarray, data: Data, micro_batch_size: int, rank: int = 0, world_size: int = 1
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
        tokens: (n,) ids, e.g. a memory map; at least 2.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        seq_len: int,
        micro_batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ):
        self._tokens, self._seq_len, self._seed = tokens, seq_len, seed
        self._size, self._rank, self._world_size = micro_batch_size, rank, world_size
        self._blocks = block_count(len(tokens), seq_len)
        if not self._blocks:
            raise DataError(f"{len(tokens)} training tokens make no block: there is no target")
        self._next = 0  # the first block, counted over epochs, that no rank has seen
        self._orders: dict[int, np.ndarray] = {}

    @property
    def epoch(self) -> int:
        """Completed passes over the corpus."""
        return self._next // self._blocks

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        first = self._next + self._rank * self._size
        self._next += self._world_size * self._size
        indices = np.array([self._block_at(p) for p in range(first, first + self._size)])
        return micro_batch(block_rows(self._tokens, self._seq_len, indices))

    def state_dict(self) -> dict:
        """Independent of the rank and of the number of ranks."""
        return {
            "next_global_micro_batch": self._next // self._size,
            "micro_batch_size": self._size,
            "blocks": self._blocks,
            "seed": self._seed,
        }

    def load_state_dict(self, state: dict) -> None:
        """Continues at the state's block, also with another world or micro-batch size.

        Raises:
            DataError: the state is of another corpus, sequence length or seed.
        """
        for key, here in (("blocks", self._blocks), ("seed", self._seed)):
            if state[key] != here:
                raise DataError(
                    f"the checkpoint's data position is of {key} {state[key]}, this run has {here}:"
                    " the corpus, data.seq_len and seed must not change on resuming"
                )
        self._next = state["next_global_micro_batch"] * state["micro_batch_size"]

    def _block_at(self, position: int) -> int:
        epoch, index = divmod(position, self._blocks)
        if epoch not in self._orders:
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1}
            rng = np.random.default_rng([self._seed, epoch])
            self._orders[epoch] = rng.permutation(self._blocks)
        return int(self._orders[epoch][index])


class BlockStream:
    """Endless packed training blocks of one shard of the documents; validation ones are skipped.

    Args:
        open_documents: `sources.documents`, or a stand-in with its signature.
    """

    def __init__(
        self,
        data: Data,
        tokenizer: PreTrainedTokenizerFast,
        shard: tuple[int, int],
        state: dict | None = None,
        open_documents: Callable = documents,
    ):
        self._data, self._tokenizer, self._shard = data, tokenizer, shard
        self._open, self._packer = open_documents, Packer(data.seq_len)
        self._epoch = state["epoch"] if state else 0
        self._fruitful = bool(state)  # this epoch has had a training document
        if state:
            self._packer.load_state_dict(state["packer"])
        self._documents = self._open(data, shard, state["documents"] if state else None)

    def __next__(self) -> np.ndarray:
        """The next blocks (k, seq_len + 1), k ≥ 1.

        Raises:
            DataError: the shard has no training document, or reading failed for good.
        """
        while True:
            batch = list(itertools.islice(self._documents, BATCH))
            texts = [t for t in batch if not is_validation(t, self._data.val_fraction)]
            if not batch:
                if not self._fruitful:
                    raise DataError(
                        f"shard {self._shard[0]} of {self._shard[1]} of the stream has no training "
                        "document; use fewer ranks or data.workers"
                    )
                self._epoch, self._fruitful = self._epoch + 1, False
                self._documents = self._open(self._data, self._shard, None)
            elif texts:
                self._fruitful = True
                ids = encode_documents(self._tokenizer, texts, self._data.leading_eos)
                if len(blocks := self._packer.add(ids)):
                    return blocks

    def state_dict(self) -> dict:
        return {
            "epoch": self._epoch,
            "documents": self._documents.state_dict(),
            "packer": self._packer.state_dict(),
        }


class StreamLoader:
    """Endless micro-batches from a document stream, for sources too large to prepare.

    The documents are split over ranks and, with `data.workers` > 0, over worker processes, which
    tokenise and pack; their blocks are taken in turn and shuffled here, in a buffer whose contents
    and generator are in the state. Resuming is exact, with workers as without.
    """

    def __init__(
        self,
        data: Data,
        tokenizer: PreTrainedTokenizerFast,
        micro_batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        open_documents: Callable = documents,
    ):
        self._args = (data, tokenizer, rank, world_size, open_documents)
        self._size, self._buffer_size = micro_batch_size, data.shuffle_buffer
        self._layout = {"rank": rank, "world_size": world_size, "workers": data.workers}
        self._rng = np.random.default_rng([seed, rank])
        self._streams: list[dict | None] = [None] * max(1, data.workers)
        self._turn = 0  # the stream that is read next
        self._buffer: list[np.ndarray] = []  # blocks to draw from
        self._pending: deque[np.ndarray] = deque()  # blocks read that wait to enter it
        self._reader: Iterator | None = None

    @property
    def epoch(self) -> int:
        """Completed passes of the stream that is furthest."""
        return max((s["epoch"] for s in self._streams if s), default=0)

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        return micro_batch(np.stack([self._draw() for _ in range(self._size)]))

    def state_dict(self) -> dict:
        """Of this rank; tensors and plain data. The buffer makes it shuffle_buffer × seq_len ids."""
        blocks = [*self._buffer, *self._pending]
        return self._layout | {
            "streams": list(self._streams),
            "turn": self._turn,
            "blocks": torch.from_numpy(np.array(blocks, dtype=np.int32)),
            "in_buffer": len(self._buffer),
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: dict) -> None:
        """Raises DataError when the state is of another rank, world size or number of workers."""
        for key, here in self._layout.items():
            if state[key] != here:
                raise DataError(
                    f"the checkpoint's stream position is of {key} {state[key]}, this run has "
                    f"{here}: a streamed source resumes with the same number of ranks and workers"
                )
        blocks = list(state["blocks"].numpy().astype(np.int64))
        self._buffer = blocks[: state["in_buffer"]]
        self._pending = deque(blocks[state["in_buffer"] :])
        self._streams, self._turn = list(state["streams"]), state["turn"]
        self._rng.bit_generator.state = state["rng"]
        self._reader = None

    def _draw(self) -> np.ndarray:
        while len(self._buffer) < self._buffer_size:
            if not self._pending:
                self._pending.extend(self._read())
            self._buffer.append(self._pending.popleft())
        index = self._rng.integers(len(self._buffer))
        self._buffer[index], self._buffer[-1] = self._buffer[-1], self._buffer[index]
        return self._buffer.pop()

    def _read(self) -> np.ndarray:
        if self._reader is None:
            self._reader = _open_reader(*self._args, list(self._streams), self._turn)
        blocks, state = next(self._reader)
        if blocks is None:
            raise DataError(state)
        self._streams[self._turn] = state
        self._turn = (self._turn + 1) % len(self._streams)
        return blocks


def _open_reader(data, tokenizer, rank, world_size, open_documents, states, turn) -> Iterator:
    """(blocks, state of their stream) or (None, error sentence), from the streams in turn."""
    count = len(states)

    def arguments(index: int) -> tuple:
        shard = (rank * count + index, world_size * count)
        return data, tokenizer, shard, states[index], open_documents

    if data.workers == 0:
        return _read_stream(*arguments(0))
    return iter(
        torch.utils.data.DataLoader(
            # Worker 0 is asked first, so it takes the stream whose turn it is.
            _StreamDataset([arguments((turn + i) % count) for i in range(count)]),
            batch_size=None,
            num_workers=count,
            collate_fn=_unchanged,
            multiprocessing_context="spawn",  # threads of tokenizers and fsspec do not survive fork
        )
    )


def _read_stream(*arguments) -> Iterator[tuple]:
    try:
        stream = BlockStream(*arguments)
        while True:
            yield next(stream), stream.state_dict()
    except DataError as e:  # as data: torch would wrap it in a traceback
        yield None, str(e)


class _StreamDataset(torch.utils.data.IterableDataset):
    """One document stream per worker."""

    def __init__(self, arguments: list[tuple]):
        self.arguments = arguments

    def __iter__(self) -> Iterator[tuple]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        return _read_stream(*self.arguments[torch.utils.data.get_worker_info().id])


def _unchanged(item):
    return item
