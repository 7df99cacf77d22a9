"""Tokenisation of a source into the files of a prepared corpus."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from lm.common.files import sync, write_json, writing
from lm.config.data import Data
from lm.data.corpus import integrity
from lm.data.corpus.corpus import SPLITS, Meta
from lm.data.corpus.documents import encode_documents
from lm.data.sources.errors import DataError
from lm.data.sources.open import is_validation, iter_documents

DOCUMENTS_AT_A_TIME = 256  # tokenised in one call, in which `tokenizers` uses all cores
STREAM_VAL_TOKENS = 262_144  # validation tokens of a stream if data.val_tokens is not set


def tokenise(
    data: Data,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    fingerprint: str,
    progress: Callable[[int], None] | None = None,
    check_source: Callable[[], None] = lambda: None,
) -> Meta:
    """Tokenise a source into train.bin and val.bin; write meta.json last, to mark completion.

    Args:
        folder: Folder of the files, which is made if it is missing.
        fingerprint: Address of the corpus, for meta.json.
        progress: Called with the number of tokenised documents.
        check_source: Called after the last document; raises DataError if the text has changed.

    Raises:
        DataError: If the source cannot be read or used.
        OutputError: If the disk is full or not writable.
    """
    dtype = np.dtype(np.uint16 if len(tokenizer) < 65_536 else np.uint32)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "meta.json").unlink(missing_ok=True)  # without it the corpus is incomplete
    writers: dict[str, integrity.TokenWriter] = {}
    counts = dict.fromkeys(SPLITS, 0)
    try:
        for split in SPLITS:
            writers[split] = integrity.TokenWriter(folder / f"{split}.tmp", dtype)
        for texts in _batches(data, writers):
            _write_documents(texts, data, tokenizer, writers, counts)
            if progress:
                progress(sum(counts.values()))
        check_source()
        sums = {f"{split}.bin": writers[split].finish(folder / f"{split}.bin") for split in SPLITS}
        with writing(folder):
            sync(folder)
    except BaseException:
        for split, writer in writers.items():
            writer.discard()
            # One of the two files may have its final name already; it is useless without the other.
            (folder / f"{split}.bin").unlink(missing_ok=True)
        raise
    meta = Meta(
        fingerprint=fingerprint,
        dtype=dtype.name,
        complete=data.source != "fineweb",
        train_tokens=writers["train"].tokens,
        train_documents=counts["train"],
        val_tokens=writers["val"].tokens,
        val_documents=counts["val"],
        sha256=sums,
    )
    write_json(folder / "meta.json", asdict(meta))  # from now on the corpus is complete
    return meta


def _batches(data: Data, writers: dict[str, integrity.TokenWriter]) -> Iterator[list[str]]:
    """Yield batches of documents; stop a stream when enough validation tokens are written."""
    texts = iter(iter_documents(data))
    required_tokens = (data.val_tokens or STREAM_VAL_TOKENS) + 1  # the first token is no target
    while batch := list(itertools.islice(texts, DOCUMENTS_AT_A_TIME)):
        yield batch
        if data.source == "fineweb" and writers["val"].tokens >= required_tokens:
            return


def _write_documents(
    texts: list[str],
    data: Data,
    tokenizer: PreTrainedTokenizerFast,
    writers: dict[str, integrity.TokenWriter],
    counts: dict[str, int],
) -> None:
    """Write the tokens of each document to the file of its split, and count the documents."""
    documents_by_split: dict[str, list[str]] = {split: [] for split in SPLITS}
    for text in texts:
        split = "val" if is_validation(text, data.val_fraction) else "train"
        documents_by_split[split].append(text)
    for split, split_texts in documents_by_split.items():
        ids = encode_documents(tokenizer, split_texts, data.leading_eos)
        largest = int(ids.max(initial=-1))  # -1 without documents
        if largest >= len(tokenizer):
            raise DataError(
                f"the tokenizer returned the id {largest}, but its vocabulary has "
                f"{len(tokenizer)} entries: its files do not belong together"
            )
        writers[split].add(ids)
        counts[split] += len(split_texts)
