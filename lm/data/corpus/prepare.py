"""Prepare a corpus once: in the cache, where all runs find it, or in a run directory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from lm.common.console import say
from lm.common.files import DamagedError, OutputError, read_json, read_mapping, write_json, writing
from lm.config.data import Data
from lm.config.schema import Config
from lm.data.corpus import cache
from lm.data.corpus.corpus import Corpus, Meta, check_enough, open_folder, read_meta, verify
from lm.data.corpus.tokenising import tokenise
from lm.data.sources.errors import DataError

__all__ = ["Corpus", "Meta", "open_corpus", "prepare", "prepare_ahead"]

RECORD = "corpus.json"  # in RUN/data: which corpus the run uses
Progress = Callable[[int, int], None]  # is called with (documents, tokens) done so far


@dataclass(frozen=True)
class Record:
    """Content of RUN/data/corpus.json.

    Fields:
        corpus: Folder of the corpus; relative to RUN/data if it lies in the run directory, or if
            `data.cache_dir` is a relative path.
        settings: Digest of the split and the tokenizer.
        sha256: Checksum of each file.
    """

    corpus: str
    settings: str
    sha256: dict[str, str]


def prepare(
    cfg: Config,
    tokenizer: PreTrainedTokenizerFast,
    run_dir: Path,
    progress: Progress | None = None,
    name: str = "",
) -> Corpus:
    """Tokenise the source into the cache, unless the same text and tokenizer are there already.

    Without a cache (`data.cache_dir: null`) the corpus goes into the run directory. A run continues
    with the corpus that it began with, also if the source has changed since or is gone. The files
    of a corpus are verified: read, and their checksums compared. A file above
    ALWAYS_BYTES is read only if it has changed since it was last verified. A stream
    (`fineweb`) is read only until `data.val_tokens` held-out tokens are there.

    One process of a run calls this; on the other nodes `ensure_here` follows.

    Args:
        name: Name of a source of a mixture, whose config `cfg` is; "" for a single source.

    Raises:
        DataError: If the source cannot be read or is empty, no document is held out, there are
            fewer tokens than a block, prepared files are damaged, or a corpus is gone and cannot be
            made again.
        OutputError: If there is no space or no right to write.
    """
    folder = place_in_run(run_dir, name)
    settings = cache.digest(cache.settings(cfg.data, tokenizer))
    record = _read_record(folder)
    if record is not None and record.settings != settings:
        say(f"data     {folder} is of another split or tokenizer: prepared anew")
        record = None
    is_old_run = read_meta(folder) is not None  # earlier versions wrote into RUN/data itself
    entry = folder if is_old_run else _entry(cfg.data, tokenizer, folder, record, progress)
    meta = _read_entry(entry)
    verify(entry, meta)
    if record is not None and record.sha256 != meta.sha256:
        raise DataError(
            f"{run_dir} was trained on another corpus than the one that {entry} holds now"
            f" (the sha256 of its files differ from those in {folder / RECORD}): train anew under"
            " another `name`"
        )
    check_enough(meta, cfg.data)
    if not is_old_run:
        written = Record(_recorded_place(entry, folder, cfg.data), settings, meta.sha256)
        if written != record:
            _write_record(folder, written, meta)
    return open_folder(entry)


def _read_entry(entry: Path) -> Meta:
    """Read the meta.json of a corpus that was just found or made.

    Raises:
        DataError: If it is damaged, or has gone since.
    """
    meta = read_meta(entry)
    if meta is None:
        raise DataError(f"{entry}, the prepared corpus, is gone: start again, and it is made anew")
    return meta


def place_in_run(run_dir: Path, name: str = "") -> Path:
    """Return the folder with the record of a run's corpus (of the source `name` of a mixture)."""
    return Path(run_dir) / "data" / name


def open_corpus(run_dir: Path, name: str = "") -> Corpus:
    """Open the corpus of a run; `prepare` has verified it.

    Raises:
        DataError: If it is not there, or its files do not have the recorded length.
    """
    folder = place_in_run(run_dir, name)
    record = _read_record(folder)
    entry = _find(folder, record)
    if entry is not None:
        return open_folder(entry)
    if record is None:
        raise DataError(f"{folder} holds no prepared corpus: run `prepare`")
    raise DataError(
        f"{run_dir} uses the corpus {_place(folder, record)}, which is not there:"
        f" continue the run with resume=auto, or `fprnn prepare {run_dir}/config.yaml`,"
        " and it is made again"
    )


def checksums(run_dir: Path, name: str = "") -> dict[str, str]:
    """Return the sha256 of each file of a run's corpus, as the run recorded it, else {}.

    Args:
        name: Name of a source of a mixture.
    """
    folder = place_in_run(run_dir, name)
    recorded = read_mapping(folder / "meta.json") or read_mapping(folder / RECORD) or {}
    return recorded.get("sha256") or {}


def ensure_here(
    cfg: Config, tokenizer: PreTrainedTokenizerFast, run_dir: Path, name: str = ""
) -> None:
    """Make the corpus of a run on this node too, if this node has a cache of its own.

    Any number of processes may call it.

    Raises:
        DataError, OutputError: As `prepare`.
    """
    folder = place_in_run(run_dir, name)
    record = _read_record(folder)
    if record is None or _find(folder, record):
        return
    entry = _entry(cfg.data, tokenizer, folder, record, None)
    if _read_entry(entry).sha256 != record.sha256:
        raise DataError(
            f"{_place(folder, record)}, the corpus of {run_dir}, is not on this node: set"
            " data.cache_dir to a folder that all nodes share"
        )


def prepare_ahead(
    cfg: Config, tokenizer: PreTrainedTokenizerFast, progress: Progress | None = None
) -> tuple[Path, bool]:
    """Make the corpus of a config in the cache, or verify the existing corpus.

    Returns:
        Its folder, and True if it was made here.

    Raises:
        DataError, OutputError: As `prepare`.
    """
    root = cache.root(cfg.data)
    if root is None:
        raise DataError(
            "data.cache_dir is null, which puts the corpus into each run directory: there is no"
            " place to prepare it ahead of a run; set data.cache_dir to a folder, or auto"
        )
    entry = cache.corpus_folder(root, cfg.data, tokenizer)
    made = _make(entry, cfg.data, tokenizer, progress)
    meta = _read_entry(entry)
    if not made:
        verify(entry, meta)
    check_enough(meta, cfg.data)
    return entry, made


def _entry(
    data: Data,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    record: Record | None,
    progress: Progress | None,
) -> Path:
    """Return the folder of a run's corpus, which is made if it is not there.

    Args:
        folder: RUN/data.
        record: Record of the run, if it began before.

    Raises:
        DataError: If the source cannot be read, or a recorded corpus is gone and the source is
            another text now.
    """
    if record is not None and (found := _find(folder, record)):
        return found
    root = cache.root(data) or folder
    try:
        entry = cache.corpus_folder(root, data, tokenizer)
        reason = "the source is another text than then"
    except DataError as e:
        if record is None:
            raise
        entry = None
        reason = f"it cannot be made again: {e}"
    if record is not None:
        began_with = _place(folder, record)
        if entry is None or entry.name != began_with.name:
            raise DataError(
                f"{folder.parent} uses the corpus {began_with}, which is not there, and {reason};"
                f" bring back {began_with}, or the text as it was, or train anew under another"
                " `name`"
            )
        say(f"data     {began_with} is not there: looked for, and made again, in {root}")
    assert entry is not None
    _make(entry, data, tokenizer, progress)
    return entry


def _make(
    entry: Path, data: Data, tokenizer: PreTrainedTokenizerFast, progress: Progress | None
) -> bool:
    """Make a corpus, unless it is there; return True if it was made here.

    Raises:
        DataError, OutputError: As `prepare`.
    """

    def check_source() -> None:
        cache.check_unchanged(
            [data], lambda: cache.corpus_folder(entry.parent, data, tokenizer).name, entry.name
        )

    def make() -> None:
        address = entry.name.partition("-")[2]
        meta = tokenise(data, tokenizer, entry, address, progress, check_source)
        text = data.path or (data.dataset if data.source == "fineweb" else data.source)
        with contextlib.suppress(OutputError):  # for people, who look into the cache
            write_json(entry / "about.json", {"text": text, "documents": meta.documents})

    try:
        return cache.make_once(entry, lambda: read_meta(entry) is not None, make)
    except OutputError as e:
        raise OutputError(
            f"{e} (a prepared corpus; data.cache_dir, or {cache.VARIABLE}, names another folder,"
            " and data.cache_dir=null is the run directory)"
        ) from None


def _place(folder: Path, record: Record) -> Path:
    """Return the folder that a record names."""
    return Path(os.path.normpath(folder / record.corpus))


def _recorded_place(entry: Path, folder: Path, data: Data) -> str:
    """Return the path of a corpus as a record keeps it."""
    if entry.parent.resolve() == folder.resolve():
        return entry.name
    if data.cache_dir not in (None, "auto") and not Path(data.cache_dir).expanduser().is_absolute():
        return os.path.relpath(entry, folder.resolve())
    return str(entry)


def _find(folder: Path, record: Record | None) -> Path | None:
    """Find the corpus of a run: where its record says, in this machine's cache, in RUN/data."""
    places = [folder]  # of an earlier version
    if record is not None:
        recorded = _place(folder, record)
        places += [recorded, cache.default_root() / recorded.name]
    return next((place for place in places if (place / "meta.json").is_file()), None)


def _read_record(folder: Path) -> Record | None:
    """Read corpus.json; None if there is none.

    Raises:
        DataError: If it is damaged.
    """
    path = folder / RECORD
    if not path.exists():
        return None
    try:
        fields = read_json(path, tuple(Record.__dataclass_fields__))
        return Record(**{key: fields[key] for key in Record.__dataclass_fields__})
    except DamagedError as e:
        raise DataError(
            f"{e}; delete it, and the next start looks up or makes the corpus that the source has"
            " now"
        ) from None


def _write_record(folder: Path, record: Record, meta: Meta) -> None:
    """Record in RUN/data which corpus the run uses."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    counts = {"documents": meta.documents, "tokens": meta.tokens}
    write_json(folder / RECORD, asdict(record) | counts)
