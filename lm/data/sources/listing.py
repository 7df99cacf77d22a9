"""Files behind `data.path`: a file, a folder or a glob; and the files that a source skips."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

from fsspec.utils import glob_translate

from lm.common.console import say
from lm.config.data import Data
from lm.data.sources.errors import DataError

# Endings of the files that a source reads in a folder. A glob reads files with any ending.
ENDINGS = {
    "text": (".txt", ".text", ".md", ".markdown", ".rst"),
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}  # ending → pyarrow's name
COMPRESSED_SOURCES = ("text", "jsonl")  # parquet compresses its own columns
MAX_NAMED = 6  # endings in a message; longer lists are hard to read


@dataclass
class Listing:
    """The files behind `data.path`.

    Fields:
        files: Sorted paths of the files that the source reads.
        skipped: Number of other files in the folder, by ending.
    """

    files: list[Path]
    skipped: Counter[str] = field(default_factory=Counter)


def source_files(data: Data) -> list[Path]:
    """Return the files behind `data.path` (a file, folder or glob), sorted.

    Raises:
        DataError: If there is no such file, a folder cannot be read, or data.path is not set.
    """
    return list_files(data).files


def list_files(data: Data) -> Listing:
    """List the files behind `data.path`, and count the other files in the folder.

    Links to folders are followed, except links to a folder above, which form a circle.

    Raises:
        DataError: As `source_files`.
    """
    if data.path is None:
        raise DataError(f"data.source {data.source} needs data.path, a file, folder or glob")
    path = Path(data.path).expanduser()
    try:
        if path.is_file():
            return Listing([path])
        is_folder = path.is_dir()
    except (OSError, ValueError) as e:  # ValueError: a null byte
        raise DataError(f"data.path {data.path} cannot be read: {_reason(e)}") from None
    if is_folder:
        return _list_folder(path, data.source)
    listing = _list_matches(path)
    if not listing.files:
        raise DataError(f"data.path {data.path}: no such file or folder, and no file matches it")
    return listing


def report_files(data: Data, listing: Listing) -> None:
    """Print the numbers of files that the source reads and skips, by ending.

    Nothing is printed if `data.path` is a single file.
    """
    place = Path(data.path or "").expanduser()
    if listing.files == [place]:
        return
    endings = Counter(_ending(path.name) for path in listing.files)
    text = f"data     {data.path}: {_files(endings.total())} read ({_counts(endings)})"
    if listing.skipped:
        text += (
            f", {_files(listing.skipped.total())} skipped ({_counts(listing.skipped)};"
            " data.path='FOLDER/**' reads every file)"
        )
    _say_once(text)


@lru_cache(maxsize=64)  # the tokenizer and the corpus list the same folder
def _say_once(text: str) -> None:
    say(text)


def _list_folder(folder: Path, source: str) -> Listing:
    endings = list(ENDINGS[source])
    if source in COMPRESSED_SOURCES:
        endings += [ending + packed for ending in ENDINGS[source] for packed in COMPRESSIONS]
    listing = _sorted_files(_walk(folder))
    skipped = listing.skipped
    skipped.update(end for path in listing.files if (end := _ending(path.name)) not in endings)
    files = [path for path in listing.files if _ending(path.name) in endings]
    if files:
        return Listing(files, skipped)
    expected = ", ".join(f"*{ending}" for ending in ENDINGS[source])
    if source in COMPRESSED_SOURCES:
        expected += f" (or compressed with {', '.join(COMPRESSIONS)})"
    content = "it is empty"
    if skipped:
        content = f"it contains {_counts(skipped)}; data.path='{folder}/**' reads every file"
    raise DataError(f"data.path {folder} is a folder without any {expected} file: {content}")


def _list_matches(pattern: Path) -> Listing:
    """List the files that match a glob; `**` matches any number of folders.

    The leading folders that exist are not part of the pattern: `part[1]/*.txt` reads a folder
    named `part[1]` if there is one, and not `part1`.

    Raises:
        DataError: If a folder cannot be read, or `**` is only a part of a name.
    """
    base = next(folder for folder in pattern.parents if folder.is_dir())
    parts = pattern.parts[len(base.parts) :]
    if not glob.has_magic(parts[0]):
        return Listing([])
    try:
        expression = re.compile(glob_translate("/".join(parts)))
    except ValueError as e:
        raise DataError(f"data.path {pattern}: {e}") from None

    dots = sum(part.startswith(".") for part in parts)

    def is_match(path: Path) -> bool:
        relative = path.relative_to(base)
        # As in a shell, only a part of the pattern with a leading dot matches a hidden name.
        has_all_dots = sum(name.startswith(".") for name in relative.parts) == dots
        return has_all_dots and expression.match(relative.as_posix()) is not None

    paths = _walk(base, None if "**" in parts else len(parts))
    return _sorted_files(filter(is_match, paths))


def _sorted_files(paths: Iterable[Path]) -> Listing:
    """Sort files; count broken links and special files as skipped."""
    listing = Listing([])
    for path in sorted(paths):
        if path.is_file():
            listing.files.append(path)
        else:
            listing.skipped["broken link" if path.is_symlink() else "special file"] += 1
    return listing


def _walk(base: Path, max_depth: int | None = None) -> Iterator[Path]:
    """Yield the files below a folder; follow links to folders, unless they form a circle.

    Args:
        max_depth: Maximum number of parts of a path below `base`; None: no limit.

    Raises:
        DataError: If a folder cannot be read.
    """
    for folder, subfolders, names in os.walk(base, followlinks=True, onerror=_raise_unreadable):
        path = Path(folder)
        ancestors = [p for p in (path, *path.parents) if p.is_relative_to(base)]
        real_paths = {os.path.realpath(p) for p in ancestors}
        if len(ancestors) == max_depth:
            subfolders.clear()  # os.walk does not enter them
        subfolders[:] = [s for s in subfolders if os.path.realpath(path / s) not in real_paths]
        yield from (path / name for name in names)


def _raise_unreadable(error: OSError) -> NoReturn:
    raise DataError(
        f"{error.filename}, a folder of data.path, cannot be read: {error.strerror}; make it"
        " readable, or exclude it by a glob in data.path"
    ) from None


def _ending(name: str) -> str:
    """Return the ending of a file name, such as `.txt`, or `.txt.gz` if it is compressed."""
    path = Path(name.lower())
    if path.suffix in COMPRESSIONS:
        return path.with_suffix("").suffix + path.suffix
    return path.suffix or "no ending"


def _files(count: int) -> str:
    return f"{count:,} file{'s' * (count != 1)}"


def _counts(endings: Counter[str]) -> str:
    """Format the number of files per ending, the most frequent first: `95 .py, 2 .json`."""
    most_common = endings.most_common(MAX_NAMED)
    texts = [f"{count:,} {ending}" for ending, count in most_common]
    if unnamed := endings.total() - sum(count for _, count in most_common):
        texts.append(f"{unnamed:,} others")
    return ", ".join(texts)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
