"""Shuffled, exactly resumable micro-batches of a document stream, on any number of ranks."""

from __future__ import annotations

import copy
import itertools
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
from lm.data.sources.hub_parquet import HubDocuments, open_groups
from lm.data.sources.open import is_validation
from lm.data.sources.readers import Readers

BATCH = 64  # documents tokenised at a time
AUTO_STREAMS = 16  # at most so many where the ranks are not more
AUTO_WORKERS = 2  # of a rank, where text comes from the hub


class BlockStream:
    """Endless packed training blocks of one shard of the documents; validation ones are skipped.
    Each epoch has an order of its own, where the source can be read in several.

    Args:
        seed: of these orders.
        open_documents: HubDocuments, or a stand-in with its signature.
        revision: Commit of the dataset that the first pass reads without a state; None: the newest.
            Every later pass reads the commit of the pass before.
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
        self._open = open_documents
        self._packer = Packer(data.seq_len)
        self._epoch = state["epoch"] if state else 0
        self._had_training_text = bool(state)  # in this epoch
        if state:
            self._packer.load_state_dict(state["packer"])
        position = state["documents"] if state else _beginning(revision)
        self._documents = self._open(data, shard, position, (seed, self._epoch))

    def __next__(self) -> np.ndarray:
        """The next blocks (k, seq_len + 1), k ≥ 1.

        Raises:
            DataError: the shard has no training document, or reading failed for good.
        """
        while True:
            batch = list(itertools.islice(self._documents, BATCH))
            texts = [text for text in batch if not is_validation(text, self._data.val_fraction)]
            if not batch:  # the shard is at its end
                if not self._had_training_text:
                    raise DataError(
                        f"shard {self._shard[0]} of {self._shard[1]} of the stream has no training "
                        "document; use fewer ranks, or fewer data.streams"
                    )
                self._epoch += 1
                self._had_training_text = False
                order = (self._seed, self._epoch)
                start = _beginning(self._documents.state_dict().get("revision"))
                self._documents = self._open(self._data, self._shard, start, order)
            elif texts:
                self._had_training_text = True
                ids = encode_documents(self._tokenizer, texts, self._data.leading_eos)
                if len(blocks := self._packer.add(ids)):
                    return blocks

    def state_dict(self) -> dict:
        return {
            "epoch": self._epoch,
            "documents": self._documents.state_dict(),
            "packer": self._packer.state_dict(),
        }


def _beginning(revision: str | None) -> dict | None:
    """Return the position of a source's first document, in a commit or without one."""
    return None if revision is None else {"revision": revision}


class StreamLoader:
    """Endless micro-batches from a document stream, for sources too large to prepare.

    The documents, each epoch in an order drawn from (seed, epoch), are dealt out to `data.streams`
    streams. Each packs its own into blocks and has a
    shuffle buffer, with a generator from (seed, stream). Micro-batch g of the run is drawn from
    stream g % streams, and goes to rank g % world_size: the order is a property of the seed and the
    number of streams alone, and a run can go on with any number of ranks that divides it.

    A run reads one commit of the dataset, the newest one at its beginning.

    With `data.workers` > 0 the streams of a rank are read, tokenised and packed in threads of their
    own, which changes nothing in the order.
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
        self._open = open_documents
        self._micro_batch_size = micro_batch_size
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._stream_count: int | None = None if data.streams == "auto" else data.streams
        self._revision: str | None = None  # commit of the dataset; None: not looked up yet
        self._next = 0  # the first micro-batch that no rank has had
        self._streams: dict[int, ShuffledStream] = {}  # this rank's, by their numbers
        self._readers: Readers | SimpleNamespace | None = None
        if self._stream_count is not None:
            self._own_numbers(self._stream_count)  # refuses now, not when the model is built

    @property
    def shares(self) -> dict[str, float]:
        """Sampling share per source."""
        return {"": 1.0}

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        """Return the next micro-batch of this rank.

        Raises:
            DataError: If reading failed for good.
        """
        count = self._make_streams()
        stream = self._streams[(self._next + self._rank) % count]
        try:
            if self._readers is None:
                self._readers = self._open_readers(count)
            blocks = [stream.draw(self._readers) for _ in range(self._micro_batch_size)]
        except UserError:
            self.close()
            raise
        self._next += self._world_size
        return micro_batch(np.stack(blocks))

    def drawn(self) -> dict:
        """Of a mixture, how much came from each source; a stream is one alone."""
        return {}

    def mark(self) -> tuple:
        """Return the position of this rank, for `go_back`."""
        return self._next, {number: stream.mark() for number, stream in self._streams.items()}

    def go_back(self, mark: tuple) -> None:
        """Return to a position; the micro-batches since then are drawn again."""
        self.close()
        self._next, streams = mark
        self._streams = {number: self._streams[number] for number in streams}
        for number, stream_mark in streams.items():
            self._streams[number].go_back(stream_mark)

    def close(self) -> None:
        """End the threads; the position stays."""
        if self._readers is not None:
            self._readers.close()
            self._readers = None

    def state_dict(self) -> dict:
        """This rank's streams: plain data, and for each a tensor of the ids that wait in it. The
        states of all ranks together (`merge_states`) are the run's."""
        count = self._make_streams()
        return {
            "next_global_micro_batch": self._next,
            "micro_batch_size": self._micro_batch_size,
            "count": count,
            "revision": self._revision,
            "streams": {number: stream.state_dict() for number, stream in self._streams.items()},
        }

    def load_state_dict(self, state: dict) -> None:
        """Goes on at the state's micro-batch, also on another number of ranks or workers.

        Raises:
            DataError: the state lacks streams of this rank, is of another micro-batch size or of an
                earlier version, or the ranks do not divide the number of streams.
        """
        if "blocks" in state or "mixture" in state:
            raise DataError(
                "the checkpoint's data position is of prepared data, and this run streams its text:"
                " the data must not change on resuming"
            )
        if "count" not in state:
            raise DataError(
                "the checkpoint's position in the stream is of an earlier version, which dealt out "
                "whole files; a run that streams cannot go on from it: train anew under another "
                "run name"
            )
        if state["micro_batch_size"] != self._micro_batch_size:
            raise DataError(
                f"the checkpoint's position in the stream is of train.micro_batch_size "
                f"{state['micro_batch_size']}, this run has {self._micro_batch_size}: it must not"
                " change on resuming"
            )
        self.close()
        self._stream_count = state["count"]
        self._revision = state.get("revision") or _find_revision(state["streams"])
        self._next = state["next_global_micro_batch"]
        self._streams = {}
        wanted = self._own_numbers(state["count"])
        if missing := [number for number in wanted if number not in state["streams"]]:
            raise DataError(
                f"the checkpoint's data position of one rank lacks streams {missing} of rank "
                f"{self._rank} of {self._world_size}: it was written by another number of ranks, "
                "whose positions must be merged"
            )
        self._make_streams()
        for number, stream in self._streams.items():
            stream.load_state_dict(state["streams"][number])

    def _own_numbers(self, count: int) -> list[int]:
        """Which of `count` streams this rank draws from, in the order in which it does.

        Raises:
            DataError: the ranks do not divide the number of streams.
        """
        if count % self._world_size:
            fitting = [str(ranks) for ranks in range(1, count + 1) if count % ranks == 0]
            raise DataError(
                f"the stream of documents is dealt to {count} streams, which can be shared "
                f"evenly by {', '.join(fitting)} ranks, not by {self._world_size}; a new run may "
                f"set data.streams to a multiple of {self._world_size}"
            )
        first = self._next + self._rank
        return [(first + step) % count for step in range(0, count, self._world_size)]

    def _make_streams(self) -> int:
        """Makes this rank's streams, once; returns how many streams the run has."""
        if self._stream_count is None:
            self._stream_count = _auto_streams(self._data, self._world_size)
        count = self._stream_count
        if not self._streams:
            buffer_size = -(-self._data.shuffle_buffer // count)
            for number in self._own_numbers(count):
                self._streams[number] = ShuffledStream(number, buffer_size, self._seed)
        return count

    def _open_readers(self, count: int) -> Readers | SimpleNamespace:
        """Start the threads that read this rank's streams, which are dealt to them in turn."""
        numbers = list(self._streams)
        if self._data.source == "fineweb" and self._revision is None:
            # Once for all streams: a stream whose turn comes later may find a newer commit.
            self._revision = open_groups(self._data).files.revision
        workers = min(worker_count(self._data), len(numbers))
        if not workers:
            return SimpleNamespace(take=self._open_streams(count), close=lambda: None)
        # The threads are enough; several ranks with as many more would take the cores of training.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        functions = [self._open_streams(count) for _ in range(workers)]
        return Readers(functions, [numbers[i::workers] for i in range(workers)])

    def _open_streams(self, count: int) -> Callable[[int], tuple[np.ndarray, dict]]:
        """Make the function of a thread: it maps the number of a stream to the stream's next blocks
        (k, seq_len + 1) int32 and the position after them."""
        positions = {number: stream.position for number, stream in self._streams.items()}
        tokenizer = copy.deepcopy(self._tokenizer)  # one must not encode in two threads at once
        data = self._data
        seed = self._seed
        source = (self._open, self._revision)
        streams: dict[int, BlockStream] = {}

        def answer(number: int) -> tuple[np.ndarray, dict]:
            if number not in streams:
                position = positions[number]
                shard = (number, count)
                streams[number] = BlockStream(data, tokenizer, shard, seed, position, *source)
            blocks = next(streams[number]).astype(np.int32)
            return blocks, streams[number].state_dict()

        return answer


class ShuffledStream:
    """One of the run's streams: its place, and a buffer of blocks that are drawn at random.

    Args:
        number: of the stream, from 0.
        buffer_size: blocks in the buffer.
    """

    def __init__(self, number: int, buffer_size: int, seed: int):
        self._number = number
        self._buffer_size = buffer_size
        self._rng = np.random.default_rng([seed, number])
        self.position: dict | None = None  # where reading goes on; None: at the beginning
        self._buffer: list[np.ndarray] = []  # blocks to draw from
        self._pending: deque[np.ndarray] = deque()  # blocks read that wait to enter it

    def mark(self) -> tuple:
        """Where it stands, for `go_back`."""
        rng = self._rng.bit_generator.state
        return self._buffer.copy(), self._pending.copy(), self.position, rng

    def go_back(self, mark: tuple) -> None:
        """What was drawn since is drawn again."""
        self._buffer, self._pending, self.position, self._rng.bit_generator.state = mark

    def draw(self, readers: Readers | SimpleNamespace) -> np.ndarray:
        """A block (seq_len + 1,).

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
        blocks = np.array([*self._buffer, *self._pending], dtype=np.int32)
        return {
            "position": self.position,
            "blocks": torch.from_numpy(blocks),
            "in_buffer": len(self._buffer),
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: dict) -> None:
        blocks = list(state["blocks"].numpy())
        self.position = state["position"]
        self._buffer = blocks[: state["in_buffer"]]
        self._pending = deque(blocks[state["in_buffer"] :])
        self._rng.bit_generator.state = state["rng"]


def merge_states(states: Sequence[dict]) -> dict:
    """One state of a run from those of all its ranks, which any number of ranks can load."""
    merged = dict(states[0])
    if "streams" in merged:
        merged["streams"] = {
            number: stream for state in states for number, stream in state["streams"].items()
        }
    return merged


def _find_revision(streams: dict) -> str | None:
    """Return the commit of the states of streams; None if none of them was read from a hub."""
    positions = [stream["position"] for stream in streams.values() if stream["position"]]
    revisions = [position["documents"].get("revision") for position in positions]
    return next((revision for revision in revisions if revision), None)


def worker_count(data: Data) -> int:
    """Loader threads of a rank: `data.workers`; `auto`: AUTO_WORKERS for text from the hub."""
    if data.workers != "auto":
        return data.workers
    return AUTO_WORKERS if data.source == "fineweb" else 0


def _auto_streams(data: Data, world_size: int) -> int:
    """The largest multiple of the ranks up to AUTO_STREAMS, and up to the row groups on the hub,
    which are fetched once then; at least the ranks."""
    if data.source != "fineweb":
        return world_size
    most = min(AUTO_STREAMS, open_groups(data).count_up_to(AUTO_STREAMS))
    return max(1, most // world_size) * world_size
