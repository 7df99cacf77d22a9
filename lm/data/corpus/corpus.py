"""Reading and verifying a prepared corpus: a folder with train.bin, val.bin and meta.json."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from lm.common.files import DamagedError, read_json
from lm.config.data import Data
from lm.data.corpus import integrity
from lm.data.sources.errors import DataError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SPLITS = ("train", "val")
VERIFIED = "verified.json"  # checksums of large files when they were last verified
# Smaller files are verified at every start; larger ones only if their size or times have changed.
MIN_TRUSTED_BYTES = 2**30
AnyRecord = TypeVar("AnyRecord", bound="DataclassInstance")


@dataclass(frozen=True)
class Meta:
    """Content of meta.json.

    Fields:
        fingerprint: Address of the corpus in the cache.
        complete: True if train.bin is the whole training corpus. For a stream, train.bin has only
            the training documents before the last validation document, for n-gram baselines.
        sha256: Checksum of each file by name.
    """

    fingerprint: str
    dtype: str
    complete: bool
    train_tokens: int
    train_documents: int
    val_tokens: int
    val_documents: int
    sha256: dict[str, str]

    @property
    def documents(self) -> int:
        return self.train_documents + self.val_documents

    @property
    def tokens(self) -> int:
        return self.train_tokens + self.val_tokens

    @property
    def bytes(self) -> int:
        return self.tokens * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Corpus:
    """Token streams `train` (n,) and `val` (m,), and their counts."""

    train: integrity.TokenFile
    val: integrity.TokenFile
    meta: Meta


def open_folder(folder: Path) -> Corpus:
    """Open the corpus in a folder; check the size of its files, but not their checksums.

    Raises:
        DataError: If it is missing, or a file does not have the recorded size.
    """
    meta = read_meta(folder)
    if meta is None:
        raise DataError(
            f"{folder} holds no prepared corpus, or an incomplete one: start the run again, or run"
            " `fprnn prepare`"
        )
    check_sizes(folder, meta)
    train = integrity.TokenFile(folder / "train.bin", meta.dtype, meta.train_tokens)
    val = integrity.TokenFile(folder / "val.bin", meta.dtype, meta.val_tokens)
    return Corpus(train, val, meta)


def read_meta(folder: Path) -> Meta | None:
    """Return the content of meta.json; None if the file does not exist.

    Raises:
        DataError: If it is damaged.
    """
    return read_record(folder / "meta.json", Meta, _format_remedy(folder))


def read_record(path: Path, record_class: type[AnyRecord], remedy: str) -> AnyRecord | None:
    """Read a dataclass from a JSON file; return None if the file does not exist.

    Raises:
        DataError: If the file is damaged; the message ends with the remedy.
    """
    if not path.exists():
        return None
    names = tuple(field.name for field in fields(record_class))
    try:
        content = read_json(path, names)
    except DamagedError as e:
        raise DataError(f"{e}; {remedy}") from None
    return record_class(**{name: content[name] for name in names})


def verify(folder: Path, meta: Meta) -> None:
    """Compare the files with the sizes and checksums in meta.json.

    Raises:
        DataError: If a size or a sha256 differs.
    """
    check_sizes(folder, meta)
    paths = [folder / f"{split}.bin" for split in SPLITS]
    sums = integrity.checksums(paths, folder / VERIFIED, MIN_TRUSTED_BYTES)
    for path in paths:
        expected = meta.sha256[path.name]
        if sums[path] != expected:
            raise damaged_file_error(path, f"its sha256 is {sums[path]}, in meta.json {expected}")


def check_sizes(folder: Path, meta: Meta) -> None:
    """Raise DataError if a file is missing or does not have the recorded size."""
    itemsize = np.dtype(meta.dtype).itemsize
    for split, tokens in (("train", meta.train_tokens), ("val", meta.val_tokens)):
        path = folder / f"{split}.bin"
        if not path.is_file():
            raise damaged_file_error(path, "it is missing")
        if (size := path.stat().st_size) != tokens * itemsize:
            raise damaged_file_error(path, f"it has {size} bytes, in meta.json {tokens * itemsize}")


def damaged_file_error(path: Path, fault: str) -> DataError:
    """Return the error for a damaged file of a corpus."""
    return DataError(f"{path} is damaged: {fault}; {_format_remedy(path.parent)}")


def _format_remedy(folder: Path) -> str:
    return f"delete {folder}, and the next start prepares it again from the source"


def check_enough(meta: Meta, data: Data) -> None:
    """Raise DataError if a split has no document, or the training split no complete block."""
    if not meta.val_documents:
        raise DataError(
            f"none of the {meta.documents} documents is in the validation split (data.val_fraction "
            f"{data.val_fraction:g}); raise data.val_fraction or add documents"
        )
    if not meta.train_documents:
        raise DataError(
            f"all {meta.documents} documents are in the validation split (data.val_fraction "
            f"{data.val_fraction:g}); lower data.val_fraction or add documents"
        )
    if meta.complete and meta.train_tokens < data.seq_len + 1:
        raise DataError(
            f"data.seq_len {data.seq_len} is longer than the corpus, which has "
            f"{meta.train_tokens} training tokens; lower data.seq_len or add text"
        )
