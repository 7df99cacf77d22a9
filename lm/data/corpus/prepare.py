"""Preparation of a corpus: in the cache, which all runs share, or in a run directory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from lm.common.console import say
from lm.common.files import OutputError, read_mapping, write_json, writing
from lm.config.data import Data
from lm.config.schema import Config
from lm.data.corpus import cache
from lm.data.corpus.corpus import Corpus, check_enough, open_folder, read_meta, read_record, verify
from lm.data.corpus.tokenising import tokenise
from lm.data.sources.errors import DataError

RECORD = "corpus.json"  # file in RUN/data: names the corpus that the run uses
ProgressCallback = Callable[[int], None]  # called with the number of tokenised documents


@dataclass(frozen=True)
class Record:
    """Content of RUN/data/corpus.json.

    Fields:
        corpus: Folder of the corpus; relative to RUN/data if the folder is in the run directory or
            `data.cache_dir` is a relative path.
        settings: Hash of the settings of the split and the tokenizer.
        sha256: Checksum of each file.
    """

    corpus: str
    settings: str
    sha256: dict[str, str]


def prepare(
    cfg: Config,
    tokenizer: PreTrainedTokenizerFast,
    run_dir: Path,
    progress: ProgressCallback | None = None,
    name: str = "",
) -> Corpus:
    """Find or make the corpus of a run, verify it, and record it in the run directory.

    The text is tokenised only if the cache has no corpus of the same text and tokenizer. Without a
    cache (`data.cache_dir: null`) the corpus is in the run directory. A run that continues uses its
    recorded corpus, even if the source has changed or is gone. One process of a run calls this;
    then every process calls `ensure_on_node`.

    Args:
        name: Name of the source of a mixture that `cfg` configures; "" for a single source.

    Raises:
        DataError: If the source cannot be read, a split has too little text, the corpus is damaged
            or is not the recorded one, or a recorded corpus is gone and cannot be made again.
        OutputError: If the disk is full or not writable.
    """
    folder = corpus_record_folder(run_dir, name)
    settings = cache.hash_settings(cache.corpus_settings(cfg.data, tokenizer))
    record = _read_record(folder)
    if record is not None and record.settings != settings:
        say(f"data     {folder} has another split or tokenizer: prepared again")
        record = None
    entry = _find_or_make(cfg.data, tokenizer, folder, record, progress)
    corpus = open_folder(entry)
    meta = corpus.meta
    verify(entry, meta)
    if record is not None and record.sha256 != meta.sha256:
        raise DataError(
            f"{run_dir} was trained on another corpus than the one in {entry} (the sha256 of its"
            f" files differ from {folder / RECORD}): train from scratch under another `name`"
        )
    check_enough(meta, cfg.data)
    new_record = Record(_format_entry(entry, folder, cfg.data), settings, meta.sha256)
    if new_record != record:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        counts = {"documents": meta.documents, "tokens": meta.tokens}
        write_json(folder / RECORD, asdict(new_record) | counts)
    return corpus


def ensure_on_node(
    cfg: Config, tokenizer: PreTrainedTokenizerFast, run_dir: Path, name: str = ""
) -> None:
    """Make the recorded corpus of a run on this node, unless the node can read it already.

    Any number of processes may call it at the same time.

    Raises:
        DataError, OutputError: As `prepare`.
    """
    folder = corpus_record_folder(run_dir, name)
    record = _read_record(folder)
    if record is None:
        return
    entry = _find_corpus(folder, record)
    if entry is None:
        entry = _find_or_make(cfg.data, tokenizer, folder, record)
    else:
        verify(entry, open_folder(entry).meta)
    if open_folder(entry).meta.sha256 != record.sha256:
        raise DataError(
            f"{_recorded_entry(folder, record)}, the corpus of {run_dir}, is not on this node: set"
            " data.cache_dir to a folder that all nodes share"
        )


def prepare_ahead(
    cfg: Config, tokenizer: PreTrainedTokenizerFast, progress: ProgressCallback | None = None
) -> tuple[Path, bool]:
    """Make the corpus of a config in the cache, or verify the existing corpus.

    Returns:
        Its folder, and True if it was made by this call.

    Raises:
        DataError, OutputError: As `prepare`.
    """
    root = cache.root(cfg.data)
    if root is None:
        raise DataError(
            "data.cache_dir is null, so each run directory has its own corpus, which cannot be"
            " prepared ahead of a run; set data.cache_dir to a folder, or auto"
        )
    entry = cache.corpus_folder(root, cfg.data, tokenizer)
    is_new = _make_entry(entry, cfg.data, tokenizer, progress)
    meta = open_folder(entry).meta
    if not is_new:
        verify(entry, meta)
    check_enough(meta, cfg.data)
    return entry, is_new


def corpus_record_folder(run_dir: Path, name: str = "") -> Path:
    """Return the folder with the record of a run's corpus, or of source `name` of a mixture."""
    return Path(run_dir) / "data" / name


def open_corpus(run_dir: Path, name: str = "") -> Corpus:
    """Open the corpus of a run, which `prepare` has verified.

    Raises:
        DataError: If the corpus is missing, or a file does not have the recorded length.
    """
    folder = corpus_record_folder(run_dir, name)
    record = _read_record(folder)
    if record is None:
        raise DataError(f"{folder} holds no prepared corpus: run `prepare`")
    entry = _find_corpus(folder, record)
    if entry is not None:
        return open_folder(entry)
    raise DataError(
        f"{run_dir} uses the corpus {_recorded_entry(folder, record)}, which is missing: continue"
        " the run with resume=auto to make it again"
    )


def read_recorded_checksums(run_dir: Path, name: str = "") -> dict[str, str]:
    """Return the recorded sha256 of each file of a run's corpus, or {} without a record."""
    folder = corpus_record_folder(run_dir, name)
    record = read_mapping(folder / RECORD) or {}
    return record.get("sha256") or {}


def _find_or_make(
    data: Data,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    record: Record | None,
    progress: ProgressCallback | None = None,
) -> Path:
    """Return the folder of a run's corpus, which is made if it is missing."""
    if record is not None and (entry := _find_corpus(folder, record)):
        return entry
    root = cache.root(data) or folder
    try:
        entry = cache.corpus_folder(root, data, tokenizer)
    except DataError as e:
        if record is None:
            raise
        raise _lost_corpus_error(folder, record, f"it cannot be made again: {e}") from None
    if record is not None:
        recorded_entry = _recorded_entry(folder, record)
        if entry.name != recorded_entry.name:
            raise _lost_corpus_error(folder, record, "the text of the source has changed")
        say(f"data     {recorded_entry} is missing: looking for it, or making it again, in {root}")
    _make_entry(entry, data, tokenizer, progress)
    return entry


def _lost_corpus_error(folder: Path, record: Record, reason: str) -> DataError:
    """Return the error for a recorded corpus that is missing and cannot be made again."""
    recorded_entry = _recorded_entry(folder, record)
    return DataError(
        f"{folder.parent} uses the corpus {recorded_entry}, which is missing, and {reason};"
        f" restore {recorded_entry} or the original text, or train from scratch under another"
        " `name`"
    )


def _make_entry(
    entry: Path, data: Data, tokenizer: PreTrainedTokenizerFast, progress: ProgressCallback | None
) -> bool:
    """Make a corpus unless it exists; return True if this call made it."""

    def check_source() -> None:
        cache.require_unchanged(entry, cache.corpus_folder(entry.parent, data, tokenizer), [data])

    def make() -> None:
        address = entry.name.partition("-")[2]
        meta = tokenise(data, tokenizer, entry, address, progress, check_source)
        text = data.path or (data.dataset if data.source == "fineweb" else data.source)
        with contextlib.suppress(OutputError):  # the file only informs people, no program reads it
            write_json(entry / "about.json", {"text": text, "documents": meta.documents})

    try:
        return cache.make_once(entry, lambda: read_meta(entry) is not None, make)
    except OutputError as e:
        raise OutputError(
            f"{e} (a prepared corpus; data.cache_dir, or {cache.ENVIRONMENT_VARIABLE}, sets another"
            " folder, and data.cache_dir=null is the run directory)"
        ) from None


def _format_entry(entry: Path, folder: Path, data: Data) -> str:
    """Return the path of a corpus as `Record.corpus` stores it."""
    if entry.parent.resolve() == folder.resolve():
        return entry.name
    if data.cache_dir not in (None, "auto") and not Path(data.cache_dir).expanduser().is_absolute():
        return os.path.relpath(entry, folder.resolve())
    return str(entry)


def _recorded_entry(folder: Path, record: Record) -> Path:
    """Return the folder of the corpus that a record names."""
    # `_format_entry` also resolves the links in `folder`.
    return Path(os.path.normpath(folder.resolve() / record.corpus))


def _find_corpus(folder: Path, record: Record) -> Path | None:
    """Find the corpus of a run: at its recorded path, or in this machine's cache."""
    recorded_entry = _recorded_entry(folder, record)
    candidates = (recorded_entry, cache.default_root() / recorded_entry.name)
    return next((path for path in candidates if (path / "meta.json").is_file()), None)


def _read_record(folder: Path) -> Record | None:
    """Read corpus.json; return None if the file does not exist."""
    remedy = "delete it, and the next start finds or makes the corpus of the current source"
    return read_record(folder / RECORD, Record, remedy)
