"""Pretokenises a corpus once: in the cache, for every run that wants it, or in a run directory."""

from __future__ import annotations

import contextlib
import os
import sys
import time
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
from lm.data.corpus.tokenising import documents_done, tokenise
from lm.data.sources import traces
from lm.data.sources.errors import DataError
from lm.data.sources.listing import ENDINGS, list_files, report_files, source_files

__all__ = ["Corpus", "Meta", "fingerprint", "open_corpus", "prepare", "prepare_ahead"]

RECORD = "corpus.json"  # in RUN/data: which corpus of the cache the run uses
Progress = Callable[[int, int], None]  # is called with (documents, tokens) done so far


@dataclass(frozen=True)
class Record:
    """What RUN/data/corpus.json holds.

    Fields:
        corpus: the folder in the cache; relative to RUN/data where `data.cache` is a relative path.
        settings: a digest of what made it, but for the text.
        fingerprint: of `fingerprint`, when the run began.
        sha256: of each file.
    """

    corpus: str
    settings: str
    fingerprint: str
    sha256: dict[str, str]


@dataclass(frozen=True)
class Prepared:
    """What `prepare_ahead` has made, or found."""

    folder: Path
    meta: Meta
    made: bool
    seconds: float


def prepare(
    cfg: Config,
    tokenizer: PreTrainedTokenizerFast,
    run_dir: Path,
    progress: Progress | None = None,
    name: str = "",
) -> Corpus:
    """Tokenises the source into the cache of `data.cache`, or without one into `run_dir/data`,
    unless that is done already for the same text and tokenizer. Of a run on several nodes one
    process calls this; the others then call `ensure_here`.

    A run goes on with the corpus that it began with, also when the source has changed since or is
    gone. What is prepared already is verified: its files are read and their checksums compared. A
    file above integrity.ALWAYS_BYTES is read only if it has changed since it was last verified.

    Of a stream (`fineweb`) it reads only until `data.val_tokens` held-out tokens are there.

    Args:
        name: of a source of a mixture, whose config `cfg` is; "": the run has a single source.

    Raises:
        DataError: unreadable or empty source, no validation document, fewer tokens than a block;
            prepared files that are damaged; a corpus that is gone and cannot be made again.
        OutputError: no space or no right to write them.
    """
    folder = place_in_run(run_dir, name)
    wanted = cache.digest(cache.settings(cfg.data, tokenizer))
    record = _read_record(folder)
    if record is not None and record.settings != wanted:
        say(f"data     {folder} is of another split or tokenizer: prepared anew")
        record = None
    entry = None
    if read_meta(folder) is None:
        entry = _entry(cfg, tokenizer, folder, record, progress)
    if entry is None:
        meta = _in_run(cfg.data, tokenizer, folder, progress)
        entry = folder
    else:
        meta = _meta_of(entry)
        verify(entry, meta, len(tokenizer))
    if record is not None and record.sha256 != meta.sha256:
        raise DataError(
            f"{run_dir} was trained on another corpus than the one that {entry} holds now"
            f" (the sha256 of its files differ from those in {folder / RECORD}): train anew under"
            " another `name`"
        )
    check_enough(meta, cfg.data)
    if entry != folder:
        _write_record(folder, entry, wanted, cfg.data, tokenizer, meta, record)
    return open_folder(entry)


def _meta_of(entry: Path) -> Meta:
    """What an entry of the cache says of itself, once it has been found or made.

    Raises:
        DataError: it is damaged, or has gone since.
    """
    meta = read_meta(entry)
    if meta is None:
        raise DataError(f"{entry}, the prepared corpus, is gone: start again, and it is made anew")
    return meta


def place_in_run(run_dir: Path, name: str = "") -> Path:
    """Where a run keeps its corpus, or the note of which one of the cache it is; of the source
    `name` of a mixture."""
    return Path(run_dir) / "data" / name


def open_corpus(run_dir: Path, name: str = "") -> Corpus:
    """The corpus that a run uses; that it is what was written, `prepare` has verified.

    Raises:
        DataError: it is not there, or its files are not of the recorded length.
    """
    folder = place_in_run(run_dir, name)
    record = _read_record(folder)
    if (folder / "meta.json").exists() or record is None:
        return open_folder(folder)
    if (entry := _find(folder, record)) is None:
        raise DataError(
            f"{run_dir} uses the corpus {_place(folder, record)}, which is not there:"
            f" continue the run with resume=auto, or `fprnn prepare {run_dir}/config.yaml`,"
            " and it is made again"
        )
    return open_folder(entry)


def checksums(run_dir: Path, name: str = "") -> dict[str, str]:
    """The sha256 of each file of the corpus that a run uses, as the run says; {} where it does not.

    Args:
        name: of a source of a mixture.
    """
    folder = place_in_run(run_dir, name)
    found = read_mapping(folder / "meta.json") or read_mapping(folder / RECORD) or {}
    return found.get("sha256") or {}


def ensure_here(
    cfg: Config, tokenizer: PreTrainedTokenizerFast, run_dir: Path, name: str = ""
) -> None:
    """Makes the corpus that a run uses on this node too, where its cache is not that of the node
    that `prepare` ran on. Any number of processes may call it.

    Raises:
        DataError, OutputError: as `prepare`.
    """
    folder = place_in_run(run_dir, name)
    record = _read_record(folder)
    if (folder / "meta.json").exists() or record is None or _find(folder, record):
        return
    entry = _entry(cfg, tokenizer, folder, record, None)
    if entry is None or _meta_of(entry).sha256 != record.sha256:
        raise DataError(
            f"{_place(folder, record)}, the corpus of {run_dir}, is not on this node: set"
            " data.cache to a folder that all nodes share"
        )


def prepare_ahead(
    cfg: Config, tokenizer: PreTrainedTokenizerFast, progress: Progress | None = None
) -> Prepared:
    """Makes the corpus of a config in the cache, or verifies the one that is there.

    Raises:
        DataError, OutputError: as `prepare`.
    """
    began = time.monotonic()
    root = cache.root(cfg.data)
    if root is None:
        raise DataError(
            "data.cache is null, which puts the corpus into each run directory: there is no place"
            " to prepare it ahead of a run; set data.cache to a folder, or auto"
        )
    entry = cache.corpus_folder(root, cfg.data, tokenizer)
    made = _make(entry, cfg.data, tokenizer, progress)
    meta = _meta_of(entry)
    if not made:
        verify(entry, meta, len(tokenizer))
    check_enough(meta, cfg.data)
    return Prepared(entry, meta, made, time.monotonic() - began)


def training_tokens(
    cfg: Config, tokenizer: PreTrainedTokenizerFast, run_dir: Path, name: str = ""
) -> tuple[int, Path] | None:
    """(training tokens, folder) of what a run has prepared of this source with this tokenizer; None
    where it has not.

    Raises:
        DataError: what it has is damaged or gone.
    """
    folder = place_in_run(run_dir, name)
    wanted = fingerprint(cfg.data, tokenizer)
    record = _read_record(folder)
    if not (folder / "meta.json").exists() and record is not None:
        entry = _find(folder, record)
        if entry is None or record.fingerprint != wanted:
            return None
        return open_folder(entry).meta.train_tokens, entry
    meta = open_folder(folder).meta
    return (meta.train_tokens, folder) if meta.fingerprint == wanted else None


def fingerprint(data: Data, tokenizer: PreTrainedTokenizerFast) -> str:
    """Changes when the tokens would: source, files (size and time), split, tokenizer. Of what lies
    in a run directory; the cache looks at what is in the files."""
    keys = {"source", "text_field", "val_fraction", "leading_eos"}
    parts = {key: getattr(data, key) for key in keys}
    if data.source == "fineweb":
        parts |= {"hub": [data.dataset, data.name], "val_tokens": data.val_tokens}
    elif data.source == "builtin":
        parts |= {"python": sys.version}
    elif data.source == "traces":
        parts |= {"traces": traces.described(data.traces)}
    else:
        states = [(str(path.resolve()), cache.file_state(path)) for path in source_files(data)]
        parts |= {"files": [(path, size, mtime) for path, (size, mtime, *_) in states]}
    parts |= {"tokenizer": tokenizer.backend_tokenizer.to_str(), "eos": tokenizer.eos_token_id}
    return cache.digest(parts)


def _in_run(
    data: Data, tokenizer: PreTrainedTokenizerFast, folder: Path, progress: Progress | None
) -> Meta:
    """The corpus in a run directory, made or verified."""
    if data.source in ENDINGS:
        report_files(data, list_files(data))
    wanted = fingerprint(data, tokenizer)
    meta = read_meta(folder)
    if meta is not None and meta.fingerprint == wanted:
        verify(folder, meta, len(tokenizer))
        return meta
    if meta is not None:
        say(f"data     {folder} is of other text, another split or tokenizer: prepared anew")
    elif (folder / "train.bin").exists():
        say(f"data     {folder} has no meta.json, so that it was left unfinished: prepared anew")

    def check_source() -> None:
        cache.check_unchanged([data], lambda: fingerprint(data, tokenizer), wanted)

    return tokenise(data, tokenizer, folder, wanted, progress, check_source=check_source)


def _entry(
    cfg: Config,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    record: Record | None,
    progress: Progress | None,
) -> Path | None:
    """The folder in the cache that holds the corpus of a run, made where it is not there; None: it
    goes into the run directory.

    Args:
        folder: RUN/data.
        record: of the run, where it began before.
    """
    data = cfg.data
    if record is not None and (found := _find(folder, record)) is not None:
        _say_changed(data, tokenizer, record, found)
        return found
    root = cache.root(data)
    if root is None:
        return None
    entry = _same_entry(data, tokenizer, folder, record, root)
    if data.cache == "auto" and read_meta(entry) is None and not cache.is_usable(root):
        say(
            f"note: {root} cannot be written: the corpus goes into {folder}, for this run alone"
            f" (data.cache, or {cache.VARIABLE}, names a folder for all)"
        )
        return None
    _make(entry, data, tokenizer, progress)
    return entry


def _same_entry(
    data: Data,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    record: Record | None,
    root: Path,
) -> Path:
    """Where the corpus belongs in the cache; of a run that began before, the one it began with.

    Raises:
        DataError: the source cannot be read, or it is not what the run began with.
    """
    if record is None:
        return cache.corpus_folder(root, data, tokenizer)
    gone = _place(folder, record)
    mend = f"bring back {gone}, or the text as it was, or train anew under another `name`"
    try:
        entry = cache.corpus_folder(root, data, tokenizer)
    except DataError as e:
        raise DataError(
            f"{folder.parent} uses the corpus {gone}, which is not there, and it cannot be made"
            f" again: {e}; {mend}"
        ) from None
    if entry.name != gone.name:
        raise DataError(
            f"{folder.parent} uses the corpus {gone}, which is not there, and the source is another"
            f" text than then: {mend}"
        )
    say(f"data     {gone} is not there: looked for, and made again, in {root}")
    return entry


def _make(
    entry: Path, data: Data, tokenizer: PreTrainedTokenizerFast, progress: Progress | None
) -> bool:
    """Makes an entry of the cache, once; returns whether it was made here.

    Raises:
        DataError, OutputError: as `prepare`.
    """

    def check_source() -> None:
        cache.check_unchanged(
            [data], lambda: cache.corpus_folder(entry.parent, data, tokenizer).name, entry.name
        )

    def make(check: Callable[[], None]) -> None:
        address = entry.name.partition("-")[2]
        meta = tokenise(data, tokenizer, entry, address, progress, check, check_source)
        text = data.path or (data.dataset if data.source == "fineweb" else data.source)
        with contextlib.suppress(OutputError):  # for people, who look into the cache
            write_json(entry / "about.json", {"text": text, "documents": meta.documents})

    try:
        return cache.make_once(
            entry,
            lambda: read_meta(entry) is not None,
            make,
            lambda: f" ({documents_done(entry)} documents so far)",
        )
    except OutputError as e:
        raise OutputError(
            f"{e} (the corpus cache; data.cache, or {cache.VARIABLE}, names another folder, and"
            " data.cache=null is the run directory)"
        ) from None


def _say_changed(
    data: Data, tokenizer: PreTrainedTokenizerFast, record: Record, entry: Path
) -> None:
    try:
        changed = fingerprint(data, tokenizer) != record.fingerprint
    except (DataError, OSError):
        changed = True
    if changed:
        say(
            f"note: the source is not what it was when the run began, or elsewhere: the run goes on"
            f" with its corpus, {entry}"
        )


def _place(folder: Path, record: Record) -> Path:
    """Where a record says that the corpus is."""
    return Path(os.path.normpath(folder / record.corpus))


def _find(folder: Path, record: Record) -> Path | None:
    """The folder of a recorded corpus, where the record says or in this machine's cache."""
    recorded = _place(folder, record)
    for place in (recorded, cache.default_root() / recorded.name):
        if (place / "meta.json").is_file():
            return place
    return None


def _read_record(folder: Path) -> Record | None:
    """What corpus.json holds; None where there is none.

    Raises:
        DataError: it is damaged.
    """
    path = folder / RECORD
    if not path.exists():
        return None
    try:
        found = read_json(path, ("corpus", "settings", "fingerprint", "sha256"))
        return Record(**{key: found[key] for key in Record.__dataclass_fields__})
    except DamagedError as e:
        raise DataError(
            f"{e}; delete it, and the next start looks up or makes the corpus that the source has"
            " now"
        ) from None


def _write_record(
    folder: Path,
    entry: Path,
    settings: str,
    data: Data,
    tokenizer: PreTrainedTokenizerFast,
    meta: Meta,
    before: Record | None,
) -> None:
    """Notes in RUN/data which corpus the run uses."""
    place = str(entry)
    if data.cache not in (None, "auto") and not Path(data.cache).expanduser().is_absolute():
        place = os.path.relpath(entry, folder.resolve())
    if before is not None:
        began_with = before.fingerprint
    else:
        began_with = fingerprint(data, tokenizer)
    record = Record(place, settings, began_with, meta.sha256 or {})
    if record == before:
        return
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    counts = {"documents": meta.documents, "tokens": meta.tokens}
    write_json(folder / RECORD, asdict(record) | counts)
