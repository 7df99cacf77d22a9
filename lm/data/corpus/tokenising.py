"""Tokenise a source into the files of a prepared corpus."""

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
from lm.data.sources.open import documents, is_validation

BATCH = 256  # documents tokenised at a time, on all cores: `tokenizers` has threads of its own
STREAM_VAL_TOKENS = 262_144  # held out of a stream when data.val_tokens does not say


def tokenise(
    data: Data,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    fingerprint: str,
    progress: Callable[[int, int], None] | None = None,
    check_source: Callable[[], None] = lambda: None,
) -> Meta:
    """Write train.bin, val.bin and, last, meta.json. After a kill the next start begins again.

    Args:
        progress: Called with (documents, tokens) done so far.
        check_source: Called after the last document. Raises DataError if the text is no longer the
            text of the fingerprint.

    Raises:
        DataError: If the source cannot be read or used.
        OutputError: If there is no space or no right to write.
    """
    dtype = np.dtype(np.uint16 if len(tokenizer) < 65_536 else np.uint32)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "meta.json").unlink(missing_ok=True)  # from here on it is not prepared
    writers: dict[str, integrity.Writer] = {}
    counts = dict.fromkeys(SPLITS, 0)
    try:
        for split in SPLITS:
            writers[split] = integrity.Writer(folder / f"{split}.tmp", dtype)
        for texts in _batches(data, writers):
            _add(texts, data, tokenizer, writers, counts)
            if progress:
                total = sum(writer.tokens for writer in writers.values())
                progress(sum(counts.values()), total)
        check_source()
        sums = {f"{split}.bin": writers[split].finish(folder / f"{split}.bin") for split in SPLITS}
        with writing(folder):
            sync(folder)
    except BaseException:
        for split, writer in writers.items():
            writer.discard()
            # One of the two may have its name already: without the other it is of no use.
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
    write_json(folder / "meta.json", asdict(meta))  # last: now they are whole
    return meta


def _batches(data: Data, writers: dict[str, integrity.Writer]) -> Iterator[list[str]]:
    """Yield the documents of a source; of a stream until enough held-out tokens are written.

    Raises:
        DataError: If the source cannot be read.
    """
    texts = iter(documents(data))
    needed = (data.val_tokens or STREAM_VAL_TOKENS) + 1
    while batch := list(itertools.islice(texts, BATCH)):
        yield batch
        if data.source == "fineweb" and writers["val"].tokens >= needed:
            return


def _add(
    texts: list[str],
    data: Data,
    tokenizer: PreTrainedTokenizerFast,
    writers: dict[str, integrity.Writer],
    counts: dict[str, int],
) -> None:
    """Write the tokens of documents, each to the file of its split, and count the documents.

    Raises:
        DataError: If the tokenizer makes an id that it does not have.
        OutputError: If the system refuses.
    """
    held_out = [is_validation(text, data.val_fraction) for text in texts]
    for split in SPLITS:
        wants_held_out = split == "val"
        own = [text for text, is_val in zip(texts, held_out) if is_val == wants_held_out]
        ids = encode_documents(tokenizer, own, data.leading_eos)
        if (largest := int(ids.max(initial=-1))) >= len(tokenizer):
            raise DataError(
                f"the tokenizer made the id {largest}, but its vocabulary has "
                f"{len(tokenizer)}: its files do not belong together"
            )
        writers[split].add(ids)
        counts[split] += len(own)
