"""Pretokenises a corpus once, to memory-mapped train.bin and val.bin in the run directory."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from lm.config import Config, Data
from lm.console import say
from lm.data import integrity
from lm.data.packing import encode_documents
from lm.data.sources import DataError, documents, first_line, is_validation, source_files
from lm.outputs import writing

SPLITS = ("train", "val")
COUNTS = ("train_tokens", "train_documents", "val_tokens", "val_documents")
BATCH = 256  # documents tokenised at a time
STREAM_VAL_TOKENS = 262_144  # held out of a stream when data.val_tokens does not say


@dataclass(frozen=True)
class Meta:
    """What meta.json holds. `complete`: train.bin is the whole training corpus; for a stream it is
    only what went by until enough validation tokens were found (good for n-gram baselines).
    `sha256`: of each file, by name; None where version 0.1 wrote it."""

    fingerprint: str
    dtype: str
    complete: bool
    train_tokens: int
    train_documents: int
    val_tokens: int
    val_documents: int
    sha256: dict[str, str] | None = None


@dataclass(frozen=True)
class Corpus:
    """The token streams `train` (n,) and `val` (m,), memory-mapped read-only, and their counts."""

    train: np.ndarray
    val: np.ndarray
    meta: Meta


def prepare(
    cfg: Config,
    tokenizer: PreTrainedTokenizerFast,
    run_dir: Path,
    progress: Callable[[int, int], None] | None = None,
) -> Corpus:
    """Tokenises the source into `run_dir/data`, unless that is done already for the same source and
    tokenizer. In a distributed run one process calls this; the others then call `open_corpus`.

    What is prepared already is verified: the files are read and their checksums compared, those
    above integrity.ALWAYS_BYTES only if they changed since they were last found whole.

    Of a stream (`fineweb`) it reads only until `data.val_tokens` held-out tokens are there.

    Args:
        progress: called with (documents, tokens) done so far.

    Raises:
        DataError: unreadable or empty source, no validation document, fewer tokens than a block;
            prepared files that are damaged. OutputError: no space or no right to write them.
    """
    folder = Path(run_dir) / "data"
    wanted = fingerprint(cfg.data, tokenizer)
    meta = _read_meta(folder)
    if meta is not None and meta.fingerprint == wanted:
        _verify(folder, meta, len(tokenizer))
    else:
        if meta is not None:
            say(f"data     {folder} is of other text, another split or tokenizer: prepared anew")
        elif (folder / "train.bin").exists():
            say(
                f"data     {folder} has no meta.json, so that it was left unfinished: prepared anew"
            )
        meta = _tokenise(cfg.data, tokenizer, folder, wanted, progress)
    _check(meta, cfg.data)
    return open_corpus(run_dir)


def open_corpus(run_dir: Path) -> Corpus:
    """The corpus prepared in `run_dir/data`; that it is what was written, `prepare` has verified.

    Raises:
        DataError: it is not there, or its files are not of the recorded length.
    """
    folder = Path(run_dir) / "data"
    meta = _read_meta(folder)
    if meta is None:
        raise DataError(f"{folder} holds no prepared corpus, or an incomplete one: run `prepare`")
    _check_sizes(folder, meta)
    return Corpus(_map(folder / "train.bin", meta), _map(folder / "val.bin", meta), meta)


def _tokenise(
    data: Data,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    fingerprint: str,
    progress: Callable[[int, int], None] | None,
) -> Meta:
    stream = data.source == "fineweb"
    dtype = np.dtype(np.uint16 if len(tokenizer) < 65_536 else np.uint32)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "meta.json").unlink(missing_ok=True)  # from here on it is not prepared
    files = {}
    try:
        for split in SPLITS:
            files[split] = integrity.Writer(folder / f"{split}.tmp", dtype)
        counts = _write_splits(data, tokenizer, files, progress)
        sums = {f"{split}.bin": files[split].finish(folder / f"{split}.bin") for split in SPLITS}
    except BaseException:
        for file in files.values():
            file.discard()
        for split in SPLITS:
            (folder / f"{split}.bin").unlink(missing_ok=True)  # one without the other is no use
        raise
    with writing(folder):
        integrity.sync_folder(folder)
    meta = Meta(
        fingerprint=fingerprint,
        dtype=dtype.name,
        complete=not stream,
        train_tokens=files["train"].tokens,
        train_documents=counts["train"],
        val_tokens=files["val"].tokens,
        val_documents=counts["val"],
        sha256=sums,
    )
    integrity.remember(folder, list(sums))
    integrity.write_json(folder / "meta.json", asdict(meta))  # last: now they are whole
    return meta


def _write_splits(
    data: Data,
    tokenizer: PreTrainedTokenizerFast,
    files: dict[str, integrity.Writer],
    progress: Callable[[int, int], None] | None,
) -> dict[str, int]:
    """Writes the tokens of both splits; returns how many documents each has."""
    enough = (data.val_tokens or STREAM_VAL_TOKENS) + 1 if data.source == "fineweb" else None
    counts = dict.fromkeys(SPLITS, 0)
    source = documents(data)
    while batch := list(itertools.islice(source, BATCH)):
        held_out = [is_validation(text, data.val_fraction) for text in batch]
        for split in SPLITS:
            texts = [text for text, is_val in zip(batch, held_out) if is_val == (split == "val")]
            ids = encode_documents(tokenizer, texts, data.leading_eos)
            if len(ids) and ids.max() >= len(tokenizer):
                raise DataError(
                    f"the tokenizer made the id {ids.max()}, but its vocabulary has "
                    f"{len(tokenizer)}: its files do not belong together"
                )
            files[split].add(ids)
            counts[split] += len(texts)
        if progress:
            progress(sum(counts.values()), sum(file.tokens for file in files.values()))
        if enough and files["val"].tokens >= enough:
            break
    return counts


def _verify(folder: Path, meta: Meta, vocab_size: int) -> None:
    """Raises DataError where a file is not what was written, or holds ids of no token. The files of
    version 0.1, which have no checksums, are given them."""
    _check_sizes(folder, meta)
    sums = dict(meta.sha256 or {})
    for name in (f"{split}.bin" for split in SPLITS):
        path = folder / name
        known = sums.get(name)
        if known and integrity.is_remembered(path):
            continue
        if path.stat().st_size > integrity.ALWAYS_BYTES:
            say(f"data     verifying {path} ({path.stat().st_size / 1e9:.1f} GB)")
        found, largest = integrity.read_through(path, np.dtype(meta.dtype))
        if known and found != known:
            raise _damaged(path, f"its sha256 is {found}, in meta.json {known}")
        if largest >= vocab_size:
            raise _damaged(path, f"it holds the id {largest}, the vocabulary has {vocab_size}")
        sums[name] = found
        integrity.remember(folder, [name])
    if sums != meta.sha256:
        say(f"data     {folder} had no checksums (version 0.1 wrote none): they are added")
        integrity.write_json(folder / "meta.json", asdict(replace(meta, sha256=sums)))


def _check_sizes(folder: Path, meta: Meta) -> None:
    width = np.dtype(meta.dtype).itemsize
    for split, tokens in (("train", meta.train_tokens), ("val", meta.val_tokens)):
        path = folder / f"{split}.bin"
        if not path.is_file():
            raise _damaged(path, "it is missing")
        if (size := path.stat().st_size) != tokens * width:
            raise _damaged(path, f"it has {size} bytes, in meta.json {tokens * width}")


def _damaged(path: Path, how: str) -> DataError:
    return DataError(
        f"{path} is damaged: {how}; delete {path.parent}, and the next start prepares it again from"
        " the source"
    )


def _check(meta: Meta, data: Data) -> None:
    found = meta.train_documents + meta.val_documents
    if not meta.val_documents:
        raise DataError(
            f"none of the {found} documents fell to validation (data.val_fraction "
            f"{data.val_fraction:g}); raise data.val_fraction or add documents"
        )
    if not meta.train_documents:
        raise DataError(
            f"all {found} documents fell to validation (data.val_fraction "
            f"{data.val_fraction:g}); lower data.val_fraction or add documents"
        )
    if meta.complete and meta.train_tokens < data.seq_len + 1:
        raise DataError(
            f"data.seq_len {data.seq_len} is longer than the corpus, which has "
            f"{meta.train_tokens} training tokens; lower data.seq_len or add text"
        )


def fingerprint(data: Data, tokenizer: PreTrainedTokenizerFast) -> str:
    """Changes when the tokens would: source, files (size and time), split, tokenizer."""
    keys = {"source", "text_field", "val_fraction", "leading_eos"}
    parts = {key: getattr(data, key) for key in keys}
    if data.source == "fineweb":
        parts |= {"hub": [data.dataset, data.name], "val_tokens": data.val_tokens}
    elif data.source == "builtin":
        parts |= {"python": sys.version}
    else:
        stats = [(str(path.resolve()), path.stat()) for path in source_files(data)]
        parts |= {"files": [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]}
    parts |= {"tokenizer": tokenizer.backend_tokenizer.to_str(), "eos": tokenizer.eos_token_id}
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _read_meta(folder: Path) -> Meta | None:
    """What meta.json holds; None where there is none.

    Raises:
        DataError: it is damaged.
    """
    path = folder / "meta.json"
    try:
        meta = Meta(**json.loads(path.read_text(encoding="utf-8")))
        if meta.dtype not in ("uint16", "uint32"):
            raise ValueError(f"dtype is {meta.dtype!r}")
        for key in COUNTS:
            if type(getattr(meta, key)) is not int:
                raise ValueError(f"{key} is {getattr(meta, key)!r}")
        return meta
    except FileNotFoundError:
        return None
    except OSError as e:
        raise DataError(f"{path} cannot be read: {e.strerror}") from None
    except (ValueError, TypeError) as e:
        raise _damaged(path, f"it does not hold what it should ({first_line(e)})") from None


def _map(path: Path, meta: Meta) -> np.ndarray:
    if path.stat().st_size == 0:  # mmap refuses an empty file
        return np.empty(0, dtype=meta.dtype)
    return np.memmap(path, dtype=meta.dtype, mode="r")
