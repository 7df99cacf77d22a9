"""Makes a prepared corpus in a folder: shard by shard, over processes, resumable after a kill."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from lm.common.cards import usable_cores
from lm.common.console import say
from lm.common.files import OutputError, read_mapping, sync, write_json, writing
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
# None of them casts doubt on the shards that are finished.
KEEPING_ERRORS = (OutputError, readers.ReaderError, KeyboardInterrupt, SystemExit, StopRequested)
JOURNAL = "shards.json"  # the finished shards; gone when the corpus is whole


@dataclass(frozen=True)
class Tokens:
    """A tokenised shard: its tokens as bytes and the number of its documents, each by split, and
    the largest id in it, -1 where it has no token."""

    raw: dict[str, bytes]
    documents: dict[str, int]
    largest: int


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
        check_source: Called after the last shard. Raises DataError if the text is no longer the
            text of the fingerprint.

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
        _fill(data, tokenizer, dtype, files, progress, check)
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
    """Return how many documents of an unfinished corpus are tokenised and on the disk."""
    return sum(_read_journal(folder / JOURNAL).get("documents", {}).values())


def _read_journal(path: Path) -> dict:
    """Return the content of a journal; {} if there is none, or it is damaged."""
    journal = read_mapping(path) or {}
    for key, kind in (("documents", int), ("tokens", int), ("sha256", str)):
        numbers = journal.get(key)
        kinds = [type(numbers.get(split)) for split in SPLITS] if isinstance(numbers, dict) else []
        if kinds != [kind] * len(SPLITS):
            return {}
    return journal


def worker_count(data: Data) -> int:
    """Processes that tokenise a large corpus."""
    if data.prepare_workers != "auto":
        return data.prepare_workers
    return min(MOST_WORKERS, usable_cores())


class _Files:
    """train.tmp and val.tmp, and a journal of their content, for the next start after a kill.

    Args:
        header: Description of the work; a journal with another one is not used. None: no journal.
    """

    def __init__(self, folder: Path, dtype: np.dtype, header: dict | None):
        self._folder = folder
        self._dtype = dtype
        self._header = header
        self._journal = folder / JOURNAL
        self.writers: dict[str, integrity.Writer] = {}
        self.documents = dict.fromkeys(SPLITS, 0)

    def open(self) -> None:
        """Continue behind the last shard of the journal, else begin anew.

        Raises:
            OutputError: If the system refuses.
        """
        if self._reopen():
            say(
                f"data     {self._folder} was left unfinished: its first"
                f" {sum(self.documents.values())} documents are tokenised already, on from there"
            )
            return
        self.forget()
        for split in SPLITS:
            self.writers[split] = integrity.Writer(self._folder / f"{split}.tmp", self._dtype)

    def _reopen(self) -> bool:
        """Open the files where the journal says that they end; False if they are not that long, or
        hold something else."""
        journal = _read_journal(self._journal)
        if self._header is None or journal.get("header") != self._header:
            return False
        for split in SPLITS:
            path = self._folder / f"{split}.tmp"
            try:
                writer = integrity.Writer(path, self._dtype, journal["tokens"][split])
            except (OutputError, DataError):  # not there, shorter
                return False
            self.writers[split] = writer
            if writer.sha256 != journal["sha256"][split]:
                say(f"data     {path} is not what was written: prepared anew")
                return False
        self.documents = journal["documents"]
        return True

    def add(self, tokens: Tokens) -> None:
        """Write a shard; then it is on the disk, and in the journal.

        Raises:
            OutputError: If the system refuses.
        """
        for split in SPLITS:
            self.writers[split].add(np.frombuffer(tokens.raw[split], self._dtype))
            self.documents[split] += tokens.documents[split]
        if self._header is None:
            return
        for writer in self.writers.values():
            writer.sync()
        journal = {
            "header": self._header,
            "documents": self.documents,
            "tokens": {split: writer.tokens for split, writer in self.writers.items()},
            "sha256": {split: writer.sha256 for split, writer in self.writers.items()},
        }
        write_json(self._journal, journal)

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


def _fill(
    data: Data,
    tokenizer: PreTrainedTokenizerFast,
    dtype: np.dtype,
    files: _Files,
    progress: Callable[[int, int], None] | None,
    check: Callable[[], None],
) -> None:
    """Tokenises what is left of the source into the files.

    Raises:
        DataError: the source cannot be read, or the tokenizer makes an id that it does not have.
    """
    enough = None  # validation tokens, after which a stream has been read far enough
    if data.source == "fineweb":
        enough = (data.val_tokens or STREAM_VAL_TOKENS) + 1
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
            if progress:
                total = sum(writer.tokens for writer in files.writers.values())
                progress(sum(files.documents.values()), total)
            if enough and files.writers["val"].tokens >= enough:
                break


def _tokenised(
    shards: Iterator[list[str]], data: Data, tokenizer: PreTrainedTokenizerFast, dtype: np.dtype
) -> Generator[Tokens]:
    """Tokenise shards in their order: of a large local corpus in several processes, else here.

    Close the generator to end the processes.
    """
    payload = (data, tokenizer, dtype)
    first = list(itertools.islice(shards, SMALL + 1))
    shards = itertools.chain(first, shards)
    is_stream = data.source == "fineweb"
    workers = 1 if is_stream or len(first) <= SMALL else worker_count(data)
    if workers == 1:
        yield from map(encoder(payload), shards)
        return
    # Process n has the shards n, n + workers, …: the answers are read in the order of the shards.
    # A process answers before it gets another shard, so that neither end waits with a full pipe.
    pool = readers.Readers("lm.data.corpus.tokenising:encoder", [payload] * workers)
    try:
        sent = 0
        for texts in shards:
            process = sent % workers
            finished = pool.receive(process) if sent >= workers else None
            pool.send(process, texts)
            sent += 1
            if finished is not None:
                yield finished
        for number in range(max(0, sent - workers), sent):
            yield pool.receive(number % workers)
    finally:
        pool.close()


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
    """Make the function that tokenises a shard (its texts → Tokens), here or in a process."""
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
