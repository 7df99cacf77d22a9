"""Pretokenises a corpus once, to memory-mapped train.bin and val.bin in the run directory."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from lm.config import Config, Data
from lm.data.packing import encode_documents
from lm.data.sources import DataError, documents, is_validation, source_files

BATCH = 256  # documents tokenised at a time
STREAM_VAL_TOKENS = 262_144  # held out of a stream when data.val_tokens does not say


@dataclass(frozen=True)
class Meta:
    """What meta.json holds. `complete`: train.bin is the whole training corpus; for a stream it is
    only what went by until enough validation tokens were found (good for n-gram baselines)."""

    fingerprint: str
    dtype: str
    complete: bool
    train_tokens: int
    train_documents: int
    val_tokens: int
    val_documents: int


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

    Of a stream (`fineweb`) it reads only until `data.val_tokens` held-out tokens are there.

    Args:
        progress: called with (documents, tokens) done so far.

    Raises:
        DataError: unreadable or empty source, no validation document, fewer tokens than a block.
    """
    folder = Path(run_dir) / "data"
    wanted = fingerprint(cfg.data, tokenizer)
    meta = _read_meta(folder)
    if meta is None or meta.fingerprint != wanted or not _whole(folder, meta):
        meta = _tokenise(cfg.data, tokenizer, folder, wanted, progress)
    _check(meta, cfg.data)
    return open_corpus(run_dir)


def open_corpus(run_dir: Path) -> Corpus:
    """The corpus prepared in `run_dir/data`.

    Raises:
        DataError: it is not there, or its files are not of the recorded length.
    """
    folder = Path(run_dir) / "data"
    meta = _read_meta(folder)
    if meta is None or not _whole(folder, meta):
        raise DataError(f"{folder} holds no prepared corpus, or an incomplete one: run `prepare`")
    return Corpus(_map(folder / "train.bin", meta), _map(folder / "val.bin", meta), meta)


def _tokenise(
    data: Data,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    fingerprint: str,
    progress: Callable[[int, int], None] | None,
) -> Meta:
    stream = data.source == "fineweb"
    enough = ((data.val_tokens or STREAM_VAL_TOKENS) + 1) if stream else None
    dtype = np.dtype(np.uint16 if len(tokenizer) < 65_536 else np.uint32)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.json").unlink(missing_ok=True)  # from here on it is not prepared
    tokens, counts = {"train": 0, "val": 0}, {"train": 0, "val": 0}
    source = documents(data)
    with open(folder / "train.tmp", "wb") as train, open(folder / "val.tmp", "wb") as val:
        files = {"train": train, "val": val}
        while batch := list(itertools.islice(source, BATCH)):
            held_out = [is_validation(text, data.val_fraction) for text in batch]
            for split, side in (("train", False), ("val", True)):
                texts = [text for text, is_val in zip(batch, held_out) if is_val == side]
                ids = encode_documents(tokenizer, texts, data.leading_eos)
                ids.astype(dtype).tofile(files[split])
                tokens[split] += len(ids)
                counts[split] += len(texts)
            if progress:
                progress(sum(counts.values()), sum(tokens.values()))
            if enough and tokens["val"] >= enough:
                break
    for split in files:
        os.replace(folder / f"{split}.tmp", folder / f"{split}.bin")
    meta = Meta(
        fingerprint, dtype.name, not stream,
        tokens["train"], counts["train"], tokens["val"], counts["val"],
    )  # fmt: skip
    (folder / "meta.tmp").write_text(json.dumps(asdict(meta), indent=2))
    os.replace(folder / "meta.tmp", folder / "meta.json")
    return meta


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
    try:
        return Meta(**json.loads((folder / "meta.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _whole(folder: Path, meta: Meta) -> bool:
    expected = {"train.bin": meta.train_tokens, "val.bin": meta.val_tokens}
    width = np.dtype(meta.dtype).itemsize
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == count * width
        for name, count in expected.items()
    )


def _map(path: Path, meta: Meta) -> np.ndarray:
    if path.stat().st_size == 0:  # mmap refuses an empty file
        return np.empty(0, dtype=meta.dtype)
    return np.memmap(path, dtype=meta.dtype, mode="r")
