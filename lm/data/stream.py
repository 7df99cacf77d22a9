"""Rank- and worker-sharded, shuffled, exactly resumable micro-batches over a document stream."""

from __future__ import annotations

import itertools
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from lm.config import Data
from lm.data.packing import MicroBatch, Packer, encode_documents, micro_batch
from lm.data.sources import DataError, documents, is_validation

BATCH = 64  # documents tokenised at a time


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
        """Of this rank: plain data and a tensor of some shuffle_buffer × seq_len ids."""
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
        for number in (signal.SIGTERM, signal.SIGUSR1):  # the training decides when to stop
            signal.signal(number, signal.SIG_IGN)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        return _read_stream(*self.arguments[torch.utils.data.get_worker_info().id])


def _unchanged(item):
    return item
