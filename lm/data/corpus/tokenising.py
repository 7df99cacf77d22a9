"""Makes a prepared corpus in a folder: shard by shard, over processes, resumable after a kill."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from lm.common.cards import usable_cores
from lm.common.console import say
from lm.common.files import OutputError, parse_json, sync, write_json, write_text, writing
from lm.common.signals import StopRequested
from lm.config.data import Data
from lm.data.corpus import integrity
from lm.data.corpus.corpus import SPLITS, Meta
from lm.data.corpus.documents import encode_documents
from lm.data.sources import readers
from lm.data.sources.errors import DataError
from lm.data.sources.open import documents, is_validation
from lm.runs.lease import LeaseError

BATCH = 256  # documents tokenised at a time
SHARD_DOCUMENTS = 4096  # a shard ends when it has so many documents
SHARD_CHARACTERS = 8_000_000  # or so many characters
SMALL = 2  # a corpus of up to so many shards is not worth the start of processes
MOST_WORKERS = 16  # by `auto`: one process reads the text for all, and feeds no more than some 20
STREAM_VAL_TOKENS = 262_144  # held out of a stream when data.val_tokens does not say
CHECK_SOURCE_S = 60.0  # between two looks at the source's files: one asks the size of each file
# None of them casts doubt on the shards that are finished.
KEEPING_ERRORS = (OutputError, readers.ReaderError, KeyboardInterrupt, SystemExit, StopRequested)
JOURNAL = "shards.jsonl"  # of what is tokenised and on the disk; gone when the corpus is whole


@dataclass(frozen=True)
class Tokens:
    """A tokenised shard: its tokens as bytes and the number of its documents, each by split, and
    the largest id in it, -1 where it has no token."""

    raw: dict[str, bytes]
    documents: dict[str, int]
    largest: int


@dataclass(frozen=True)
class JournalLine:
    """What the files held after some shard, and their checksums then; by split."""

    documents: dict[str, int]
    tokens: dict[str, int]
    sha256: dict[str, str]


def tokenise(
    data: Data,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    fingerprint: str,
    progress: Callable[[int, int], None] | None = None,
    check: Callable[[], None] = lambda: None,
    check_source: Callable[[], None] = lambda: None,
) -> Meta:
    """Writes train.bin, val.bin and, last, meta.json. They do not depend on the number of
    processes.

    After a kill the next start with the same corpus goes on behind the last whole shard. A stream
    is always read from its beginning, because its text may have changed in between.

    Args:
        progress: called with (documents, tokens) done so far.
        check: called after each shard. What it raises ends the work; a later call goes on there.
        check_source: Called now and then, and after the last shard. Raises DataError if the text is
            no longer the text of the fingerprint.

    Raises:
        DataError: the source cannot be read or used, or a process died. OutputError: no space.
    """
    stream = data.source == "fineweb"
    dtype = np.dtype(np.uint16 if len(tokenizer) < 65_536 else np.uint32)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "meta.json").unlink(missing_ok=True)  # from here on it is not prepared
    header = {"fingerprint": fingerprint, "dtype": dtype.name}
    files = _Files(folder, dtype, None if stream else header)
    try:
        files.open()
        _fill(data, tokenizer, dtype, files, progress, check, check_source)
        check_source()
        sums = files.finish()
    except KEEPING_ERRORS as e:
        files.stop()
        if isinstance(e, readers.ReaderError):
            raise readers.ReaderError(
                f"{e} while tokenising; the next start goes on from there"
            ) from None
        raise
    except LeaseError:
        files.close()  # they are another's now
        raise
    except BaseException:
        files.discard()
        raise
    meta = Meta(
        fingerprint=fingerprint,
        dtype=dtype.name,
        complete=not stream,
        train_tokens=files.writers["train"].tokens,
        train_documents=files.documents["train"],
        val_tokens=files.writers["val"].tokens,
        val_documents=files.documents["val"],
        sha256=sums,
    )
    integrity.remember(folder, list(sums))
    write_json(folder / "meta.json", asdict(meta))  # last: now they are whole
    files.forget()
    return meta


def documents_done(folder: Path) -> int:
    """How many documents whoever is at work in a folder has finished."""
    with contextlib.suppress(OSError, IndexError):  # no journal, no line in it yet
        return sum(_lines(folder / JOURNAL, None)[-1].documents.values())
    return 0


def worker_count(data: Data) -> int:
    """Processes that tokenise a large corpus."""
    if data.prepare_workers != "auto":
        return data.prepare_workers
    return min(MOST_WORKERS, usable_cores())


class _Files:
    """train.tmp and val.tmp, and the journal of what they hold.

    Args:
        header: the journal's first line, that of the same work; None: without a journal.
    """

    def __init__(self, folder: Path, dtype: np.dtype, header: dict | None):
        self._folder = folder
        self._dtype = dtype
        self._header = header
        self._journal = folder / JOURNAL
        self.writers: dict[str, integrity.Writer] = {}
        self.documents = dict.fromkeys(SPLITS, 0)

    def open(self) -> None:
        """Go on where the journal says, else anew.

        Raises:
            OutputError: the system refuses.
        """
        if (last := self._reopened()) is not None:
            self.documents = dict(last.documents)
            say(
                f"data     {self._folder} was left unfinished: its first"
                f" {sum(self.documents.values())} documents are tokenised already, on from there"
            )
            return
        for split in SPLITS:
            self.writers[split] = integrity.Writer(self._folder / f"{split}.tmp", self._dtype)
        if self._header is not None:
            write_text(self._journal, json.dumps(self._header) + "\n")

    def _reopened(self) -> JournalLine | None:
        """The journal's last line, with the files open where it says that they ended; None where
        they are not what it says."""
        try:
            lines = _lines(self._journal, self._header)
        except OSError:
            return None
        if not lines:
            return None
        last = lines[-1]
        for split in SPLITS:
            path = self._folder / f"{split}.tmp"
            try:
                writer = integrity.Writer(path, self._dtype, last.tokens[split])
            except (OutputError, DataError):  # not there, shorter
                return None
            self.writers[split] = writer
            if writer.sha256 != last.sha256[split]:
                say(f"data     {path} is not what was written: prepared anew")
                return None
        # A line that was cut off is cut off here, too.
        text = [json.dumps(self._header), *(json.dumps(asdict(line)) for line in lines)]
        write_text(self._journal, "\n".join(text) + "\n")
        return last

    def add(self, tokens: Tokens) -> None:
        """Write a shard; then it is on the disk, and in the journal.

        Raises:
            OutputError: the system refuses.
        """
        for split in SPLITS:
            self.writers[split].add(np.frombuffer(tokens.raw[split], self._dtype))
            self.documents[split] += tokens.documents[split]
        if self._header is None:
            return
        for writer in self.writers.values():
            writer.sync()
        line = JournalLine(
            dict(self.documents),
            {split: self.writers[split].tokens for split in SPLITS},
            {split: self.writers[split].sha256 for split in SPLITS},
        )
        with writing(self._journal), open(self._journal, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(line)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> dict[str, str]:
        """Give the files their names; returns their checksums."""
        sums = {}
        for split in SPLITS:
            name = f"{split}.bin"
            sums[name] = self.writers[split].finish(self._folder / name)
        with writing(self._folder):
            sync(self._folder)
        return sums

    def stop(self) -> None:
        """Keep the files for the next start; delete them if no document is finished."""
        kept = documents_done(self._folder) if self._header is not None else 0
        if not kept:
            self.discard()
            return
        say(f"data     {kept} documents are kept in {self._folder}: the next start goes on there")
        self.close()

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()

    def discard(self) -> None:
        for writer in self.writers.values():
            writer.discard()
        for split in SPLITS:
            # One of the two may have its name already: alone it is of no use.
            (self._folder / f"{split}.bin").unlink(missing_ok=True)
        self.forget()

    def forget(self) -> None:
        self._journal.unlink(missing_ok=True)


def _lines(journal: Path, header: dict | None) -> list[JournalLine]:
    """The lines of a journal, up to one that was cut off; none of a journal of other work.

    Args:
        header: that it must have; None: any.

    Raises:
        OSError: it cannot be read.
    """
    lines: list[JournalLine] = []
    first, *rest = journal.read_text(encoding="utf-8", errors="replace").split("\n")
    with contextlib.suppress(ValueError, TypeError):
        if header is None or parse_json(first) == header:
            for text in rest:
                lines.append(JournalLine(**parse_json(text)))
    return lines


def _fill(
    data: Data,
    tokenizer: PreTrainedTokenizerFast,
    dtype: np.dtype,
    files: _Files,
    progress: Callable[[int, int], None] | None,
    check: Callable[[], None],
    check_source: Callable[[], None],
) -> None:
    """Tokenises what is left of the source into the files.

    Raises:
        DataError: the source cannot be read, or the tokenizer makes an id that it does not have.
    """
    enough = None  # validation tokens, after which a stream has been read far enough
    if data.source == "fineweb":
        enough = (data.val_tokens or STREAM_VAL_TOKENS) + 1
    last_check = time.monotonic()
    left = itertools.islice(documents(data), sum(files.documents.values()), None)
    shards = _shards(left, BATCH if enough else SHARD_DOCUMENTS)
    with contextlib.closing(_tokenised(shards, data, tokenizer, dtype)) as results:
        for tokens in results:
            if tokens.largest >= len(tokenizer):
                raise DataError(
                    f"the tokenizer made the id {tokens.largest}, but its vocabulary has "
                    f"{len(tokenizer)}: its files do not belong together"
                )
            files.add(tokens)
            check()
            if time.monotonic() - last_check > CHECK_SOURCE_S:
                check_source()
                last_check = time.monotonic()
            if progress:
                total = sum(writer.tokens for writer in files.writers.values())
                progress(sum(files.documents.values()), total)
            if enough and files.writers["val"].tokens >= enough:
                break


def _tokenised(
    shards: Iterator[list[str]], data: Data, tokenizer: PreTrainedTokenizerFast, dtype: np.dtype
) -> Generator[Tokens]:
    """The shards tokenised, in their order: of a large local corpus by several processes, else
    here. To be closed, which ends the processes."""
    payload = (data, tokenizer, dtype)
    first = list(itertools.islice(shards, SMALL + 1))
    shards = itertools.chain(first, shards)
    is_stream = data.source == "fineweb"
    workers = 1 if is_stream or len(first) <= SMALL else worker_count(data)
    if workers > 1:
        yield from _in_order(shards, payload, workers)
    else:
        yield from map(encoder(payload), shards)


def _shards(texts: Iterator[str], most: int) -> Iterator[list[str]]:
    """The documents in lists, each of which ends with `most` documents or SHARD_CHARACTERS."""
    shard: list[str] = []
    characters = 0
    for text in texts:
        shard.append(text)
        characters += len(text)
        if len(shard) >= most or characters >= SHARD_CHARACTERS:
            yield shard
            shard = []
            characters = 0
    if shard:
        yield shard


def encoder(payload: tuple[Data, PreTrainedTokenizerFast, np.dtype]) -> Callable:
    """The function that tokenises a shard (its texts → Tokens), here or in a process."""
    data, tokenizer, dtype = payload

    def encode(texts: list[str]) -> Tokens:
        raw: dict[str, list[bytes]] = {split: [] for split in SPLITS}
        counts = dict.fromkeys(SPLITS, 0)
        largest = -1
        for start in range(0, len(texts), BATCH):
            batch = texts[start : start + BATCH]
            held_out = [is_validation(text, data.val_fraction) for text in batch]
            for split in SPLITS:
                wants_held_out = split == "val"
                own = [text for text, is_val in zip(batch, held_out) if is_val == wants_held_out]
                ids = encode_documents(tokenizer, own, data.leading_eos)
                largest = max(largest, int(ids.max(initial=-1)))
                raw[split].append(ids.astype(dtype).tobytes())
                counts[split] += len(own)
        return Tokens({split: b"".join(raw[split]) for split in SPLITS}, counts, largest)

    return encode


def shard_encoder(payload: tuple) -> Callable:
    """`encoder` as a reader process calls it: with the shard's number, which names the answer."""
    encode = encoder(payload)
    return lambda _number, texts: encode(texts)


def _in_order(shards: Iterator[list[str]], payload: tuple, workers: int) -> Iterator[Tokens]:
    """The shards tokenised by processes, in their order. Each has one shard at a time, and answers
    before it gets another; twice as many shards as processes are in memory at most.

    Raises:
        ReaderError: a process has died. RuntimeError: its function raised; with the traceback.
    """
    pool = readers.Readers(
        "lm.data.corpus.tokenising:shard_encoder", [payload] * workers, [[]] * workers
    )
    idle = list(pool.connections)
    busy = set()
    finished: dict[int, Tokens] = {}  # by the number of the shard, those not yet yielded
    sent = 0  # shards given to a process
    yielded = 0
    try:
        while True:
            # 1. Give every idle process a shard, unless too many wait for an earlier one.
            while idle and sent - yielded < 2 * workers:
                texts = next(shards, None)
                if texts is None:
                    break
                process = idle.pop()
                pool.send(process, sent, texts)
                busy.add(process)
                sent += 1
            # 2. Hand on the next shard in order, as soon as it is there.
            if yielded in finished:
                yield finished.pop(yielded)
                yielded += 1
                continue
            # 3. Else wait for an answer; without any to come all is done.
            if not busy:
                return
            for process in pool.wait(busy):
                number, finished[number] = pool.receive(process)
                busy.discard(process)
                idle.append(process)
    finally:
        pool.close()
