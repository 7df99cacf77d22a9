"""Cache of corpora and trained tokenizers outside run directories, addressed by their content.

An entry is a folder `corpus-ADDRESS` or `tokenizer-ADDRESS`. The address is a hash of the text and
of all settings that affect the tokens. Paths and file names of the text do not affect it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerFast

from lm.common.console import say
from lm.common.files import writing
from lm.config.data import Data
from lm.config.schema import Config
from lm.data.corpus import integrity
from lm.data.sources import mixture, traces
from lm.data.sources.errors import DataError
from lm.data.sources.listing import list_files, report_files

FORMAT = 1  # version of an entry; increase it if the same text and settings give other tokens
ENVIRONMENT_VARIABLE = "FPRNN_CACHE"  # sets the folder of `data.cache_dir: auto`
LOCK = "lock"  # file in an entry; the process that makes the entry locks it
CHECKSUMS = "files.json"  # file in the cache: checksums of source files, with their size and times


def root(data: Data) -> Path | None:
    """Return the absolute path of the cache; None if corpora are kept in run directories."""
    if data.cache_dir is None:
        return None
    folder = Path(data.cache_dir) if data.cache_dir != "auto" else default_root()
    return Path(os.path.abspath(folder.expanduser()))


def default_root() -> Path:
    """Return the folder that `data.cache_dir: auto` means."""
    return Path(os.environ.get(ENVIRONMENT_VARIABLE) or "~/.cache/fprnn/corpora").expanduser()


def corpus_settings(data: Data, tokenizer: PreTrainedTokenizerFast) -> dict:
    """Return everything that determines a corpus, except the text itself."""
    return {
        **_split_settings(data),
        "leading_eos": data.leading_eos,
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "eos": tokenizer.eos_token_id,
    }


def corpus_folder(folder: Path, data: Data, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Return the folder of a corpus in a cache, whether it exists or not.

    Raises:
        DataError: If the source cannot be read.
    """
    settings = corpus_settings(data, tokenizer) | {"text": identify_text(folder, data)}
    return folder / f"corpus-{hash_settings(settings)}"


def tokenizer_folder(folder: Path, cfg: Config) -> Path:
    """Return the folder in a cache of the BPE that is trained on the corpus of a config.

    Raises:
        DataError: If the source cannot be read.
    """
    import tokenizers

    if cfg.data.mixture is None:
        settings = _split_settings(cfg.data) | {"text": identify_text(folder, cfg.data)}
    else:
        byte_counts = mixture.tokenizer_bytes(cfg)
        settings = {"mixture": []}
        for name, source_cfg in mixture.configs_by_source(cfg).items():
            with mixture.name_source_in_errors(name):
                identity = identify_text(folder, source_cfg.data)
            source_text = {"text": identity, "bytes": byte_counts[name]}
            settings["mixture"].append(_split_settings(source_cfg.data) | source_text)
    settings |= {
        "vocab_size": cfg.tokenizer.vocab_size,
        "train_bytes": cfg.tokenizer.train_bytes,
        "trained by": tokenizers.__version__,
    }
    return folder / f"tokenizer-{hash_settings(settings)}"


def hash_settings(settings: dict) -> str:
    """Return a hash of settings, 32 hexadecimal digits."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def identify_text(folder: Path, data: Data) -> list | dict | str:
    """Return a value that differs for different texts of a source.

    This is the list of sha256 for files, the version of Python for the built-in text, and the
    settings for traces. For a stream it is the name of the dataset and the number of validation
    tokens, but not the commit, to need no network.

    Args:
        folder: Cache, which stores the checksums of files.

    Raises:
        DataError: If a file cannot be read, or no file exists.
    """
    if data.source == "fineweb":
        return [data.dataset, data.dataset_config, data.val_tokens]
    if data.source == "builtin":
        return sys.version
    if data.source == "traces":
        return traces.describe_text(data.traces)
    listing = list_files(data)
    report_files(data, listing)
    files = [path.resolve() for path in listing.files]
    checksums = integrity.checksums(files, folder / CHECKSUMS)
    return [checksums[path] for path in files]


def require_unchanged(entry: Path, current_entry: Path, sources: Iterable[Data]) -> None:
    """Raise DataError if a text changed while it was read.

    Args:
        entry: Folder of the text in the cache, which depends on its content, before reading.
        current_entry: The same after reading.
        sources: Sources of the text.
    """
    if current_entry != entry:
        paths = ", ".join(str(data.path) for data in sources if data.path)
        raise DataError(
            f"data.path {paths} changed while it was read, so its tokens are not kept: start again"
            " when no program writes to it"
        )


def make_once(folder: Path, is_complete: Callable[[], bool], make: Callable[[], None]) -> bool:
    """Make an entry in one process; other processes that need it print a line and wait.

    Args:
        folder: Folder of the entry.
        is_complete: Returns whether the entry exists and is complete.
        make: Makes the entry.

    Returns:
        True if this process made it.

    Raises:
        OutputError: If the folder cannot be written. `make` may raise other errors.
    """
    if is_complete():
        return False
    lock = FileLock(folder / LOCK)  # the operating system releases it if the process dies
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"data     waiting for another process, which makes {folder}")
            lock.acquire()
    try:
        if is_complete():
            return False
        make()
        return True
    finally:
        lock.release()


def _split_settings(data: Data) -> dict:
    """Return the settings that divide a source into documents and the documents into splits."""
    keys = ("source", "text_field", "val_fraction")
    return {"format": FORMAT} | {key: getattr(data, key) for key in keys}
