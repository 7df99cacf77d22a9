"""The corpus cache: tokenised text and tokenizers by their content, outside run directories.

A folder of it is `corpus-ADDRESS` or `tokenizer-ADDRESS`. The address is a hash of all that decides
what is in it, the text itself among it, wherever its files lie and whatever they are called.
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

FORMAT = 1  # of an entry; goes up when the same text and settings make other tokens
VARIABLE = "FPRNN_CACHE"
LOCK = "lock"  # in an entry, held by the process that makes it
HASHES = "files.json"  # in the cache: checksums of source files, by path, with size and times


def root(data: Data) -> Path | None:
    """The cache's folder (absolute); None where corpora go into run directories."""
    if data.cache_dir is None:
        return None
    place = Path(data.cache_dir) if data.cache_dir != "auto" else default_root()
    return Path(os.path.abspath(place.expanduser()))


def default_root() -> Path:
    """What `data.cache_dir: auto` is."""
    return Path(os.environ.get(VARIABLE) or "~/.cache/fprnn/corpora").expanduser()


def settings(data: Data, tokenizer: PreTrainedTokenizerFast) -> dict:
    """What decides a corpus, but for the text itself."""
    return {
        **_split(data),
        "leading_eos": data.leading_eos,
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "eos": tokenizer.eos_token_id,
    }


def corpus_folder(folder: Path, data: Data, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Where in a cache the corpus lies or will lie.

    Raises:
        DataError: the source cannot be read.
    """
    parts = settings(data, tokenizer) | {"text": content(folder, data)}
    return folder / f"corpus-{digest(parts)}"


def tokenizer_folder(folder: Path, cfg: Config) -> Path:
    """Where in a cache the BPE that is trained on the corpus lies or will lie.

    Raises:
        DataError: the source cannot be read.
    """
    import tokenizers

    if cfg.data.mixture is None:
        read = _split(cfg.data) | {"text": content(folder, cfg.data)}
    else:
        budgets = mixture.tokenizer_bytes(cfg)
        read = {"mixture": []}
        for name, part in mixture.parts(cfg).items():
            with mixture.naming(name):
                text = content(folder, part.data)
            read["mixture"].append(_split(part.data) | {"text": text, "bytes": budgets[name]})
    wanted = read | {
        "vocab_size": cfg.tokenizer.vocab_size,
        "train_bytes": cfg.tokenizer.train_bytes,
        "trained by": tokenizers.__version__,
    }
    return folder / f"tokenizer-{digest(wanted)}"


def digest(parts: dict) -> str:
    """32 hexadecimal digits that stand for all the parts."""
    text = json.dumps(parts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def content(folder: Path, data: Data) -> list | dict | str:
    """What stands for the text of a source: the sha256 of each file, in order. Of a stream its name
    alone, so that it can be looked up without a network; of the built-in text the Python; of traces
    what makes them.

    Raises:
        DataError: a file cannot be read, or there is none.
    """
    if data.source == "fineweb":
        return [data.dataset, data.dataset_config, data.val_tokens]
    if data.source == "builtin":
        return sys.version
    if data.source == "traces":
        return traces.described(data.traces)
    listing = list_files(data)
    report_files(data, listing)
    files = [path.resolve() for path in listing.files]
    sums = integrity.checksums(files, folder / HASHES)
    return [sums[path] for path in files]


def check_unchanged(sources: Iterable[Data], read_address: Callable[[], str], address: str) -> None:
    """Refuse sources whose text is no longer the text of an address.

    Args:
        read_address: Returns the address (or fingerprint) of the text as it is now.
        address: The address from before the text was read.

    Raises:
        DataError: If they differ, or the text can no longer be read.
    """
    if read_address() == address:
        return
    paths = ", ".join(str(data.path) for data in sources if data.path)
    raise DataError(
        f"data.path {paths} changed while it was read, so that nothing of it is kept: start again"
        " once nobody writes to it"
    )


def make_once(folder: Path, is_there: Callable[[], bool], make: Callable[[], None]) -> bool:
    """Make an entry in one process; others that need it meanwhile wait, and say so.

    Args:
        is_there: Returns True if the entry is whole.
        make: Makes it.

    Returns:
        True if it was made here.

    Raises:
        OutputError: If it cannot be written. Whatever `make` raises.
    """
    if is_there():
        return False
    lock = FileLock(folder / LOCK)  # the system opens the lock of a process that dies
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"data     waiting for another process, which makes {folder}")
            lock.acquire()
    try:
        if is_there():
            return False
        make()
        return True
    finally:
        lock.release()


def _split(data: Data) -> dict:
    """How a source becomes the documents of the two splits."""
    keys = ("source", "text_field", "val_fraction")
    return {"format": FORMAT} | {key: getattr(data, key) for key in keys}
