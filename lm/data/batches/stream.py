"""Shuffled micro-batches of a document stream, exactly resumable on any number of ranks."""

from __future__ import annotations

import copy
import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from lm.common.errors import UserError
from lm.config.data import Data
from lm.data.batches.packing import MicroBatch, Packer, micro_batch
from lm.data.corpus.documents import encode_documents
from lm.data.sources.errors import DataError
from lm.data.sources.hub_parquet import HubDocuments, open_row_groups
from lm.data.sources.open import is_validation
from lm.data.sources.readers import Readers

DOCUMENTS_AT_A_TIME = 64  # tokenised in one call
MAX_AUTO_STREAMS = 16  # for `data.streams: auto`, unless there are more ranks
AUTO_WORKERS = 2  # threads per rank for `data.workers: auto` and text from the hub


class BlockStream:
    """Endless packed training blocks of a shard of the documents, without validation documents.

    Args:
        shard: (index of the shard, number of shards).
        seed: The documents of each epoch have the order (seed, epoch), if the source supports it.
        state: State dict of an earlier stream.
        open_documents: HubDocuments, or a replacement with the same signature in a test.
        revision: Commit of the dataset that a new stream reads; None: the newest. Every later
            epoch reads the same commit.
    """

    def __init__(
        self,
        data: Data,
        tokenizer: PreTrainedTokenizerFast,
        shard: tuple[int, int],
        seed: int,
        state: dict | None = None,
        open_documents: Callable = HubDocuments,
        revision: str | None = None,
    ):
        self._data = data
        self._seed = seed
        self._tokenizer = tokenizer
        self._shard = shard
        self._open_documents = open_documents
        self._packer = Packer(data.seq_len)
        self._epoch = state["epoch"] if state else 0
        self._had_training_text = bool(state)  # in the current epoch
        if state:
            self._packer.load_state_dict(state["packer"])
        position = state["documents"] if state else _first_position(revision)
        self._documents = open_documents(data, shard, position, (seed, self._epoch))

    def __next__(self) -> np.ndarray:
        """Return the next blocks, shape (k, seq_len + 1) with k ≥ 1.

        Raises:
            DataError: If the shard has no training document, or reading failed permanently.
        """
        while True:
            batch = list(itertools.islice(self._documents, DOCUMENTS_AT_A_TIME))
            texts = [text for text in batch if not is_validation(text, self._data.val_fraction)]
            if not batch:  # end of the shard
                if not self._had_training_text:
                    raise DataError(
                        f"shard {self._shard[0]} of {self._shard[1]} of the stream has no training "
                        "document; use fewer ranks, or fewer data.streams"
                    )
                self._epoch += 1
                self._had_training_text = False
                order = (self._seed, self._epoch)
                start = _first_position(self._documents.state_dict().get("revision"))
                self._documents = self._open_documents(self._data, self._shard, start, order)
            elif texts:
                self._had_training_text = True
                ids = encode_documents(self._tokenizer, texts, self._data.leading_eos)
                if len(blocks := self._packer.add(ids)):
                    return blocks

    def state_dict(self) -> dict:
        """Return the position after the last block."""
        return {
            "epoch": self._epoch,
            "documents": self._documents.state_dict(),
            "packer": self._packer.state_dict(),
        }


def _first_position(revision: str | None) -> dict | None:
    """Return the position of a commit's first document; None for a source without commits."""
    return None if revision is None else {"revision": revision}


class StreamLoader:
    """Endless micro-batches from a document stream, for sources that are too large to prepare.

    The documents, in the order (seed, epoch), are distributed to `data.streams` streams. Each
    stream packs its documents into blocks and has a shuffle buffer with its own generator.
    Micro-batch g of the run is drawn from stream g % streams and goes to rank g % world_size. So
    the order does not depend on the number of ranks, and a run can continue with any number of
    ranks that divides the number of streams. The micro-batch size must stay the same.

    A run reads one commit of the dataset: the newest when the run began. With `data.workers` > 0,
    threads read, tokenise and pack the streams of a rank, which does not change the order.
    """

    def __init__(
        self,
        data: Data,
        tokenizer: PreTrainedTokenizerFast,
        micro_batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        open_documents: Callable = HubDocuments,
    ):
        self._data = data
        self._tokenizer = tokenizer
        self._open_documents = open_documents
        self._micro_batch_size = micro_batch_size
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._stream_count: int | None = None if data.streams == "auto" else data.streams
        self._revision: str | None = None  # commit of the dataset; None: not looked up yet
        # Index of rank 0's next micro-batch among the micro-batches of all ranks in the run.
        self._next_batch = 0
        self._streams: dict[int, ShuffledStream] = {}  # streams of this rank by number
        self._readers: Readers | SimpleNamespace | None = None
        if self._stream_count is not None:
            # Refuse a wrong number of streams now, before the model is built.
            self._rank_streams(self._stream_count)

    @property
    def shares(self) -> dict[str, float]:
        """Share of the sequences per source, as in `MixtureLoader.shares`."""
        return {"": 1.0}

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        """Return the next micro-batch of this rank.

        Raises:
            DataError: If reading failed permanently.
        """
        count = self._make_streams()
        stream = self._streams[(self._next_batch + self._rank) % count]
        try:
            if self._readers is None:
                self._readers = self._open_readers(count)
            blocks = [stream.draw(self._readers) for _ in range(self._micro_batch_size)]
        except UserError:
            self.close()
            raise
        self._next_batch += self._world_size
        return micro_batch(np.stack(blocks))

    def source_metrics(self) -> dict:
        """Return no metrics: a stream is a single source."""
        return {}

    def mark(self) -> tuple:
        """Return the current position of this rank, for `go_back`."""
        return self._next_batch, {number: stream.mark() for number, stream in self._streams.items()}

    def go_back(self, mark: tuple) -> None:
        """Return to a marked position, so that the micro-batches since then come again."""
        self.close()
        self._next_batch, stream_marks = mark
        self._streams = {number: self._streams[number] for number in stream_marks}
        for number, stream_mark in stream_marks.items():
            self._streams[number].go_back(stream_mark)

    def close(self) -> None:
        """End the threads; keep the position."""
        if self._readers is not None:
            self._readers.close()
            self._readers = None

    def state_dict(self) -> dict:
        """Return the position of this rank's streams; `merge_states` combines all ranks.

        It consists of plain data and, for each stream, a tensor of the token ids in its buffer.
        """
        count = self._make_streams()
        return {
            "next_global_micro_batch": self._next_batch,
            "micro_batch_size": self._micro_batch_size,
            "count": count,
            "revision": self._revision,
            "streams": {number: stream.state_dict() for number, stream in self._streams.items()},
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue at the state's micro-batch; the numbers of ranks and workers may differ.

        Raises:
            DataError: If the state lacks streams of this rank, has another micro-batch size, or was
                written by an early version; if the ranks do not divide the number of streams.
        """
        if "blocks" in state or "mixture" in state:
            raise DataError(
                "the checkpoint's data position belongs to prepared data, and this run streams its"
                " text: the data must not change on resuming"
            )
        if "count" not in state:
            raise DataError(
                "the checkpoint's position in the stream was written by an earlier version, which"
                " distributed whole files, and cannot be continued: train from scratch under"
                " another `name`"
            )
        if state["micro_batch_size"] != self._micro_batch_size:
            raise DataError(
                f"the checkpoint's position in the stream has train.micro_batch_size "
                f"{state['micro_batch_size']}, this run has {self._micro_batch_size}: it must not"
                " change on resuming"
            )
        self.close()
        self._stream_count = state["count"]
        self._revision = state["revision"]
        self._next_batch = state["next_global_micro_batch"]
        self._streams = {}
        numbers = self._rank_streams(state["count"])
        if missing := [number for number in numbers if number not in state["streams"]]:
            raise DataError(
                f"the checkpoint's data position lacks streams {missing} of rank {self._rank} of"
                f" {self._world_size}: another number of ranks wrote it, and the positions of all"
                " ranks must be merged first"
            )
        self._make_streams()
        for number, stream in self._streams.items():
            stream.load_state_dict(state["streams"][number])

    def _rank_streams(self, count: int) -> list[int]:
        """Return the numbers of this rank's streams, in the order in which it draws from them."""
        if count % self._world_size:
            divisors = [str(ranks) for ranks in range(1, count + 1) if count % ranks == 0]
            raise DataError(
                f"the documents are distributed to {count} streams, which can be shared evenly by"
                f" {', '.join(divisors)} ranks, not by {self._world_size}; a new run may set"
                f" data.streams to a multiple of {self._world_size}"
            )
        first_batch = self._next_batch + self._rank
        return [(first_batch + offset) % count for offset in range(0, count, self._world_size)]

    def _make_streams(self) -> int:
        """Make this rank's streams at the first call; return the run's number of streams."""
        if self._stream_count is None:
            self._stream_count = _auto_streams(self._data, self._world_size)
        count = self._stream_count
        if not self._streams:
            buffer_size = math.ceil(self._data.shuffle_buffer / count)
            for number in self._rank_streams(count):
                self._streams[number] = ShuffledStream(number, buffer_size, self._seed)
        return count

    def _open_readers(self, count: int) -> Readers | SimpleNamespace:
        """Start the threads, each of which reads some of this rank's streams.

        Without threads, return an object with the same methods, which reads in `take`.
        """
        numbers = list(self._streams)
        if self._data.source == "fineweb" and self._revision is None:
            # Look it up once for all streams: a stream that starts later could get a newer commit.
            self._revision = open_row_groups(self._data).files.revision
        workers = min(worker_count(self._data), len(numbers))
        if not workers:
            return SimpleNamespace(take=self._make_reader(count), close=lambda: None)
        # Our threads suffice; the threads of `tokenizers` on every rank would slow down training.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        functions = [self._make_reader(count) for _ in range(workers)]
        return Readers(functions, [numbers[i::workers] for i in range(workers)])

    def _make_reader(self, count: int) -> Callable[[int], tuple[np.ndarray, dict]]:
        """Make the function of a thread, which reads the next blocks of a stream.

        Returns:
            Function that maps the number of a stream to its next blocks, shape (k, seq_len + 1),
            int32, and the position after them.
        """
        positions = {number: stream.position for number, stream in self._streams.items()}
        tokenizer = copy.deepcopy(self._tokenizer)  # two threads must not share a tokenizer
        data = self._data
        seed = self._seed
        open_documents, revision = self._open_documents, self._revision
        streams: dict[int, BlockStream] = {}

        def read_blocks(number: int) -> tuple[np.ndarray, dict]:
            if number not in streams:
                shard = (number, count)
                streams[number] = BlockStream(
                    data, tokenizer, shard, seed, positions[number], open_documents, revision
                )
            blocks = next(streams[number]).astype(np.int32)
            return blocks, streams[number].state_dict()

        return read_blocks


class ShuffledStream:
    """Position and shuffle buffer of a stream.

    Args:
        number: Number of the stream, from 0.
        buffer_size: Number of blocks in the full buffer.
    """

    def __init__(self, number: int, buffer_size: int, seed: int):
        self._number = number
        self._buffer_size = buffer_size
        self._rng = np.random.default_rng([seed, number])
        self.position: dict | None = None  # state of the BlockStream; None: the beginning
        self._buffer: list[np.ndarray] = []  # blocks to draw from
        self._pending: deque[np.ndarray] = deque()  # blocks read but not in the buffer yet

    def mark(self) -> tuple:
        """Return the current position and buffer, for `go_back`."""
        rng = self._rng.bit_generator.state
        return self._buffer.copy(), self._pending.copy(), self.position, rng

    def go_back(self, mark: tuple) -> None:
        """Return to a mark, so that the blocks drawn since then are drawn again."""
        self._buffer, self._pending, self.position, self._rng.bit_generator.state = mark

    def draw(self, readers: Readers | SimpleNamespace) -> np.ndarray:
        """Draw a block, shape (seq_len + 1,), from the buffer after filling it.

        Raises:
            DataError: If reading failed.
        """
        while len(self._buffer) < self._buffer_size:
            if not self._pending:
                blocks, self.position = readers.take(self._number)
                self._pending.extend(blocks)
            self._buffer.append(self._pending.popleft())
        index = self._rng.integers(len(self._buffer))
        self._buffer[index], self._buffer[-1] = self._buffer[-1], self._buffer[index]
        return self._buffer.pop()

    def state_dict(self) -> dict:
        """Return the position, the generator's state, and the blocks as one int32 tensor."""
        blocks = np.array([*self._buffer, *self._pending], dtype=np.int32)
        return {
            "position": self.position,
            "blocks": torch.from_numpy(blocks),
            "in_buffer": len(self._buffer),
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue from a state dict."""
        blocks = list(state["blocks"].numpy())
        self.position = state["position"]
        self._buffer = blocks[: state["in_buffer"]]
        self._pending = deque(blocks[state["in_buffer"] :])
        self._rng.bit_generator.state = state["rng"]


def merge_states(states: Sequence[dict]) -> dict:
    """Merge the states of all ranks into one, which any number of ranks can load."""
    merged = dict(states[0])
    if "streams" in merged:
        merged["streams"] = {
            number: stream for state in states for number, stream in state["streams"].items()
        }
    return merged


def worker_count(data: Data) -> int:
    """Return the reader threads per rank; `auto` means AUTO_WORKERS for the hub, otherwise 0."""
    if data.workers != "auto":
        return data.workers
    return AUTO_WORKERS if data.source == "fineweb" else 0


def _auto_streams(data: Data, world_size: int) -> int:
    """Return the number of streams for `data.streams: auto`, a multiple of the number of ranks.

    For the hub it is at most MAX_AUTO_STREAMS and at most the number of row groups, so that each
    row group is fetched once, but at least one stream per rank.
    """
    if data.source != "fineweb":
        return world_size
    max_streams = min(MAX_AUTO_STREAMS, open_row_groups(data).count_up_to(MAX_AUTO_STREAMS))
    return max(1, max_streams // world_size) * world_size
