"""Best-fit packing: whole documents put into blocks so that little stays empty."""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from collections import defaultdict
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from lm.common.files import parse_json, sync, writing
from lm.config.data import Data
from lm.data.batches.packing import CONTEXT, IGNORE
from lm.data.corpus.corpus import Corpus
from lm.data.corpus.integrity import Tokens
from lm.data.sources.errors import DataError

FORMAT = 1  # goes up when the same corpus is packed in another way
FILE = "best_fit.npz"  # in RUN/data, or RUN/data/NAME
READ_AT_ONCE = 2**24  # tokens that are searched for ends of documents


@dataclass(frozen=True)
class Packing:
    """Which pieces of a token stream are in which block. Every token is in one piece.

    Fields:
        starts, lengths: (p,) where each piece lies in the stream; in the order of the blocks.
        goes_on: (p,) whether the piece is the end of a document that is longer than a block. Its
            block then also holds the token before it, as context, which is no target there.
        firsts: (k + 1,) the number of each block's first piece, then p.
    """

    starts: np.ndarray
    lengths: np.ndarray
    goes_on: np.ndarray
    firsts: np.ndarray

    @property
    def blocks(self) -> int:
        return len(self.firsts) - 1


@dataclass(frozen=True)
class Waste:
    """What packing costs, of one epoch.

    Fields:
        blocks: how many blocks there are.
        padding: the share of their positions that have no target.
        documents: how many documents there are.
        split: how many of them are longer than a block; every other one is in one block, whole.
        cut_by_plain: how many documents would fit into a block, but plain packing cuts them.
    """

    blocks: int
    padding: float
    documents: int
    split: int
    cut_by_plain: int

    def __str__(self) -> str:
        return (
            f"best_fit: {self.blocks:,} blocks, {self.padding:.3%} of their positions are padding;"
            f" of {self.documents:,} documents {self.split:,} are longer than a block and split"
            f" (plain would cut {self.cut_by_plain:,} more)"
        )


def document_ends(tokens: Tokens, eos: int, leading_eos: bool) -> np.ndarray:
    """Where each document of a prepared stream (n,) ends: (d,), each one behind its last EOS.

    Raises:
        DataError: the stream does not end with a document.
    """
    found = []
    for start in range(0, len(tokens), READ_AT_ONCE):
        part = np.asarray(tokens[start : start + READ_AT_ONCE])
        found.append(np.flatnonzero(part == eos) + start)
    ends = np.concatenate(found or [np.empty(0, dtype=np.int64)]) + 1
    if leading_eos:  # every other one begins a document
        ends = ends[1::2]
    if not len(ends) or ends[-1] != len(tokens):
        raise DataError(
            f"the prepared tokens do not end with a document (EOS is {eos}): data.packing best_fit"
            " cannot find the documents; data.packing=plain needs none"
        )
    return ends


def pack(ends: np.ndarray, seq_len: int) -> Packing:
    """Best fit, decreasing: the longest pieces first, each into the fullest block that still has
    room for it. A document of up to `seq_len` tokens is one piece; of a longer one every `seq_len`
    tokens fill a block, and the rest is a piece that takes one position more, for its context.

    Args:
        ends: (d,) as `document_ends` gives them.
    """
    begins = np.concatenate([[0], ends[:-1]])
    sizes = ends - begins
    full, rest = np.divmod(sizes, seq_len)
    whole = (full == 0) | ((full == 1) & (rest == 0))
    # Blocks that a piece of a long document fills.
    chunks = np.where(whole, 0, full)
    numbers = np.arange(chunks.sum()) - np.repeat(np.cumsum(chunks) - chunks, chunks)
    filled = np.repeat(begins, chunks) + numbers * seq_len
    # Pieces to be fitted.
    left = ~whole & (rest > 0)
    starts = np.concatenate([begins[whole], (begins + full * seq_len)[left]])
    lengths = np.concatenate([sizes[whole], rest[left]])
    goes_on = np.arange(len(starts)) >= whole.sum()
    blocks = _best_fit(lengths + goes_on, seq_len)
    count = int(blocks.max(initial=-1)) + 1
    starts = np.concatenate([starts, filled])
    lengths = np.concatenate([lengths, np.full(len(filled), seq_len)])
    goes_on = np.concatenate([goes_on, np.zeros(len(filled), dtype=bool)])
    blocks = np.concatenate([blocks, count + np.arange(len(filled))])
    order = np.lexsort([starts, blocks])
    count += len(filled)
    firsts = np.searchsorted(blocks[order], np.arange(count + 1))
    return Packing(starts[order], lengths[order].astype(np.int32), goes_on[order], firsts)


def _best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """(p,) the block of each piece, from 0; none holds more than `capacity`, which no piece is
    above."""
    placed = np.empty(len(sizes), dtype=np.int64)
    with_room: dict[int, list[int]] = defaultdict(list)  # positions left → blocks
    rooms = 0  # bit r: some block has r positions left
    count = 0
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        if enough := rooms >> size:
            room = size + (enough & -enough).bit_length() - 1  # the least that will do
            block = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room = capacity
            block = count
            count += 1
        placed[piece] = block
        if room > size:
            with_room[room - size].append(block)
            rooms |= 1 << (room - size)
    return placed


def waste(packing: Packing, ends: np.ndarray, seq_len: int) -> Waste:
    """What a packing costs."""
    sizes = np.diff(ends, prepend=0)
    begins = ends - sizes
    fits = sizes <= seq_len
    # Target t of plain packing is in block (t - 1) // seq_len; token 0 is none.
    across = (np.maximum(begins, 1) - 1) // seq_len != (ends - 2) // seq_len
    return Waste(
        blocks=packing.blocks,
        padding=1 - int(packing.lengths.sum(dtype=np.int64)) / (packing.blocks * seq_len),
        documents=len(ends),
        split=int((~fits).sum()),
        cut_by_plain=int((fits & across & (ends > 1)).sum()),
    )


def packed(corpus: Corpus, data: Data, eos: int) -> tuple[Packing, Waste]:
    """The training part of a corpus, packed.

    Raises:
        DataError: its documents cannot be found.
    """
    ends = document_ends(corpus.train, eos, data.leading_eos)
    packing = pack(ends, data.seq_len)
    return packing, waste(packing, ends, data.seq_len)


def make(folder: Path, corpus: Corpus, data: Data, eos: int) -> Waste:
    """Packs a corpus and writes it into a folder of the run, unless it is there already.

    Raises:
        DataError: its documents cannot be found. OutputError: it cannot be written.
    """
    header = _settings(data) | {"sha256": corpus.meta.checksum("train.bin")}
    if (found := read(folder, data)) is not None and found[2] == header:
        return found[1]
    packing, cost = packed(corpus, data, eos)
    path = folder / FILE
    draft = path.with_name(f".{FILE}.{os.getpid()}.tmp")
    about = json.dumps({"header": header, "waste": asdict(cost)})
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with draft.open("wb") as file:
                np.savez(file, about=np.array(about), **vars(packing))
            sync(draft)
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    return cost


def read(folder: Path, data: Data) -> tuple[Packing, Waste, dict] | None:
    """What `make` has written, and of which corpus; None where there is none for these settings, or
    it is damaged, which the zip's own checksums find."""
    damage = (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile)
    with contextlib.suppress(*damage):
        with np.load(folder / FILE, allow_pickle=False) as file:
            about = parse_json(str(file["about"]))
            packing = Packing(**{field.name: file[field.name] for field in fields(Packing)})
        if about["header"] == about["header"] | _settings(data):
            return packing, Waste(**about["waste"]), about["header"]
    return None


def _settings(data: Data) -> dict:
    return {"format": FORMAT, "seq_len": data.seq_len, "leading_eos": data.leading_eos}


class BestFitRows:
    """A token stream as the blocks of a `Packing`; see `lm.data.batches.shuffled.Rows`.

    A block begins with EOS; where one piece of a longer document fills it, with the token before
    that piece. Then come its pieces, one after the other, then IGNORE. So every token of a block
    is a target, except the context of pieces that go on, and the token before the first one of a
    document is always EOS.

    Args:
        tokens: (n,) ids.
    """

    kind = "best_fit"

    def __init__(self, tokens: Tokens, packing: Packing, seq_len: int, eos: int):
        self._tokens = tokens
        self._packing = packing
        self._seq_len = seq_len
        self._eos = eos
        sums = np.concatenate([[0], np.cumsum(packing.lengths, dtype=np.int64)])
        self._targets = np.diff(sums[packing.firsts])

    def __len__(self) -> int:
        return self._packing.blocks

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """The blocks `indices` (k,) as (k, seq_len + 1) int64."""
        rows = np.full((len(indices), self._seq_len + 1), IGNORE, dtype=np.int64)
        for row, index in zip(rows, indices):
            self._fill(row, slice(self._packing.firsts[index], self._packing.firsts[index + 1]))
        return rows

    def targets(self, indices: np.ndarray) -> int:
        """How many targets these blocks have."""
        return int(self._targets[indices].sum())

    def _id(self, place: int) -> int:
        return int(self._tokens[place : place + 1][0])

    def _fill(self, row: np.ndarray, pieces: slice) -> None:
        """Writes the pieces of a block into its row (seq_len + 1,)."""
        starts = self._packing.starts[pieces]
        lengths = self._packing.lengths[pieces]
        continues = self._packing.goes_on[pieces]
        is_filled_by_one = lengths[0] == self._seq_len and starts[0] > 0
        row[0] = self._id(starts[0] - 1) if is_filled_by_one else self._eos
        place = 1
        for start, length, needs_context in zip(starts, lengths, continues):
            if needs_context:
                row[place] = CONTEXT - self._id(start - 1)
                place += 1
            row[place : place + length] = self._tokens[start : start + length]
            place += length
