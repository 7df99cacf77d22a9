"""The corpus cache: tokenised text and tokenizers by their content, outside run directories.

A folder of it is `corpus-ADDRESS` or `tokenizer-ADDRESS`. The address is a hash of all that decides
what is in it, the text itself among it, wherever its files lie and whatever they are called.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from lm.common.console import say
from lm.common.files import OutputError, check_folder, read_mapping, write_json, writing
from lm.config.data import Data
from lm.config.schema import Config
from lm.data.corpus import integrity
from lm.data.sources import mixture, traces
from lm.data.sources.errors import DataError
from lm.data.sources.listing import ENDINGS, list_files, report_files, source_files
from lm.model.checksums import sha256
from lm.runs.lease import Lease, LeaseError

FORMAT = 1  # of an entry; goes up when the same text and settings make other tokens
VARIABLE = "FPRNN_CACHE"
LEASE = "lease.json"  # in an entry while it is made
HASHES = "files.json"  # in the cache: checksums of source files, by path, with size and times
SAY_EVERY_S = 30.0  # that a finished entry is waited for
LOOK_EVERY_S = 0.5
LARGE = 2**30  # bytes of text whose reading is said


def root(data: Data) -> Path | None:
    """The cache's folder (absolute); None where corpora go into run directories."""
    if data.cache is None:
        return None
    place = Path(data.cache) if data.cache != "auto" else default_root()
    return Path(os.path.abspath(place.expanduser()))


def default_root() -> Path:
    """What `data.cache: auto` is."""
    return Path(os.environ.get(VARIABLE) or "~/.cache/fprnn/corpora").expanduser()


def is_usable(folder: Path) -> bool:
    """Whether something new can be made in the cache."""
    try:
        check_folder(folder)
    except OutputError:
        return False
    return True


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
        return [data.dataset, data.name, data.val_tokens]
    if data.source == "builtin":
        return sys.version
    if data.source == "traces":
        return traces.described(data.traces)
    listing = list_files(data)
    report_files(data, listing)
    known = read_mapping(folder / HASHES) or {}
    found = {}
    unread = []
    files = [path.resolve() for path in listing.files]
    for path in set(files):
        key = str(path)
        state = file_state(path)
        recorded = known.get(key)
        if isinstance(recorded, list) and recorded[:1] == [state]:
            found[key] = recorded
        else:
            found[key] = [state, None]
            unread.append(key)
    size = sum(found[key][0][0] for key in unread)
    if size > LARGE:
        say(f"data     reading {size / 1e9:.1f} GB of text, to know which it is")
    for key in sorted(unread):
        found[key][1] = _sha256(Path(key))
    if unread:
        with contextlib.suppress(OutputError):  # read again then
            write_json(folder / HASHES, known | found)
    return [found[str(path)][1] for path in files]


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
    file_sources = [data for data in sources if data.source in ENDINGS]
    newest = max(
        (path for data in file_sources for path in source_files(data)),
        key=lambda path: file_state(path)[1],
    )
    raise DataError(
        f"data.path {', '.join(str(data.path) for data in file_sources)} changed while it was read"
        f" ({newest} last), so that nothing of it is kept: start again once nobody writes to it"
    )


def make_once(
    folder: Path,
    is_there: Callable[[], bool],
    make: Callable[[Callable[[], None]], None],
    how_far: Callable[[], str] = lambda: "",
) -> bool:
    """Has an entry made by one process; others that want it meanwhile wait, and say so.

    Args:
        is_there: whether it is whole.
        make: makes it, and calls what it is given now and then, which raises LeaseError when
            another process has taken the entry over.
        how_far: what whoever makes it has done so far.

    Returns:
        Whether it was made here.

    Raises:
        OutputError: it cannot be written. Whatever `make` raises.
    """
    if is_there():
        return False
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    lease = Lease(folder / LEASE, _once(say))
    if not _acquired(lease, folder, is_there, how_far):
        return False
    try:
        if is_there():
            return False
        make(lease.check)
        return True
    finally:
        lease.release()


def _acquired(
    lease: Lease, folder: Path, is_there: Callable[[], bool], how_far: Callable[[], str]
) -> bool:
    """Whether the lease is ours; False: the entry is there, another has made it."""
    last_said = -SAY_EVERY_S  # seconds of the monotonic clock
    while True:
        try:
            lease.acquire()
            return True
        except LeaseError:
            holder = read_mapping(folder / LEASE) or {}
        if is_there():
            return False
        if time.monotonic() - last_said >= SAY_EVERY_S:
            last_said = time.monotonic()
            who = f"process {holder.get('pid')} on {holder.get('host')}"
            say(f"data     waiting for {who}, which makes {folder}{how_far()}")
        time.sleep(LOOK_EVERY_S)


def _once(tell: Callable[[str], None]) -> Callable[[str], None]:
    """Says each sentence once."""
    told = set()

    def tell_once(text: str) -> None:
        if text not in told:
            told.add(text)
            tell(text)

    return tell_once


def _split(data: Data) -> dict:
    """How a source becomes the documents of the two splits."""
    keys = ("source", "text_field", "val_fraction")
    return {"format": FORMAT} | {key: getattr(data, key) for key in keys}


def file_state(path: Path) -> list[int]:
    """Return the size, times and inode of a source file, which change when its content does.

    Raises:
        DataError: If the system refuses.
    """
    try:
        return integrity.state(path)
    except OSError as e:
        raise DataError(f"{path} cannot be read: {e.strerror}") from None


def _sha256(path: Path) -> str:
    try:
        return sha256(path)
    except OSError as e:
        raise DataError(f"{path} cannot be read: {e.strerror}") from None
