"""Find the files behind `data.path`, and name the files of a folder that the source skips."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from lm.common.console import say
from lm.config.data import Data
from lm.data.sources.errors import DataError

# Endings that a source reads in a folder. A glob reads files of any ending.
ENDINGS = {
    "text": (".txt", ".text", ".md", ".markdown", ".rst"),
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}  # ending → pyarrow's name
COMPRESSED_SOURCES = ("text", "jsonl")  # parquet compresses its own columns
MAX_NAMED = 6  # endings that a message lists; a longer list is not read


@dataclass
class Listing:
    """The files behind `data.path`.

    Fields:
        files: sorted paths of the files that the source reads.
        skipped: number of other files in the folder, by ending.
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
    """List the files behind `data.path`, and count the other files of its folders.

    Links to folders are followed. Each folder is read once, whatever links lead to it.

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
    skipped: Counter[str] = Counter()
    files = sorted(_matching_files(path, skipped))
    if not files:
        raise DataError(f"data.path {data.path}: no such file or folder, and no file matches it")
    return Listing(files, skipped)


def report_files(data: Data, listing: Listing) -> None:
    """Print how many files of which ending the source reads and skips; nothing for one file."""
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


@lru_cache(maxsize=64)  # a tokenizer and its corpus list the same folder
def _say_once(text: str) -> None:
    say(text)


def _list_folder(folder: Path, source: str) -> Listing:
    skipped: Counter[str] = Counter()
    files = []
    for path in _walk(folder, ("**", "*"), skipped, with_hidden=True):
        if _is_read(path.name, source):
            files.append(path)
        else:
            skipped[_ending(path.name)] += 1
    if files:
        return Listing(sorted(files), skipped)
    expected = ", ".join(f"*{ending}" for ending in ENDINGS[source])
    if source in COMPRESSED_SOURCES:
        expected += f" (or one of them with {', '.join(COMPRESSIONS)})"
    holds = "it is empty"
    if skipped:
        holds = f"it holds {_counts(skipped)}; data.path='{folder}/**' reads every file"
    raise DataError(f"data.path {folder} is a folder without any {expected} file in it: {holds}")


def _matching_files(pattern: Path, skipped: Counter[str]) -> Iterator[Path]:
    """Yield the files that match a glob; `**` matches any number of folders.

    The pattern begins after the folders that exist: `part[1]/*.txt` reads the folder `part[1]`, not
    `part1`.
    """
    parts = pattern.parts
    depth = next((len(folder.parts) for folder in pattern.parents if folder.is_dir()), 0)
    rest = enumerate(parts[depth:], depth)
    magic = next((i for i, part in rest if glob.has_magic(part)), None)
    if magic is None:
        return
    base = Path(*parts[:magic])
    next_parts = parts[magic:] if parts[-1] != "**" else (*parts[magic:], "*")
    if base.is_dir():
        yield from _walk(base, next_parts, skipped, with_hidden=False)


def _walk(
    base: Path, parts: tuple[str, ...], skipped: Counter[str], with_hidden: bool
) -> Iterator[Path]:
    """Yield the files below a folder that match the parts of a glob.

    `glob` and `Path.rglob` skip folders that they cannot read, and `glob` follows links in circles.

    Args:
        skipped: Receives the number of broken links and special files that match.
        with_hidden: Whether `*` and `**` match names that start with a dot.

    Raises:
        DataError: If a folder cannot be read.
    """
    # Links wait until all folders are finished, so that a file keeps its path without links if it
    # has such a path. The same folder with the same parts is expanded once, which ends loops.
    folders = [(base, os.path.realpath(base), parts)]
    links: list[tuple[Path, str, tuple[str, ...]]] = []
    finished = set()
    while folders or links:
        folder, real, parts = (folders or links).pop()
        if (real, parts) in finished:
            continue
        finished.add((real, parts))
        is_recursive = parts[0] == "**"
        below = parts if is_recursive else parts[1:]
        if is_recursive:
            folders.append((folder, real, parts[1:]))
        for entry in _entries(folder):
            if not _matches(entry.name, parts[0], with_hidden):
                continue
            path = folder / entry.name
            if _follow(entry.is_dir):
                if below and entry.is_symlink():
                    links.append((path, os.path.realpath(path), below))
                elif below:
                    folders.append((path, os.path.join(real, entry.name), below))
            elif not below and _follow(entry.is_file):
                yield path
            elif not below:
                skipped["broken link" if entry.is_symlink() else "special file"] += 1


def _matches(name: str, pattern: str, with_hidden: bool) -> bool:
    """Match a name with one part of a glob; `**` matches every name that `*` does."""
    if name.startswith(".") and not with_hidden and not pattern.startswith("."):
        return False
    return fnmatch.fnmatchcase(name, pattern)


def _entries(folder: Path) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as e:
        raise DataError(
            f"{folder}, a folder of data.path, cannot be read: {e.strerror}; make it readable, or"
            " leave it out by a glob in data.path"
        ) from None


def _follow(is_kind: Callable[[], bool]) -> bool:
    """Return the answer of a directory entry's `is_dir` or `is_file`; False for an endless link."""
    try:
        return is_kind()
    except OSError:
        return False


def _is_read(name: str, source: str) -> bool:
    """Return True if a source reads a file of this name in a folder."""
    ending = _ending(name)
    if ending in ENDINGS[source]:
        return True
    inner, _, compression = ending.rpartition(".")
    return (
        source in COMPRESSED_SOURCES
        and inner in ENDINGS[source]
        and f".{compression}" in COMPRESSIONS
    )


def _ending(name: str) -> str:
    """Return the ending of a file name, such as `.txt`, or `.txt.gz` if it is compressed."""
    path = Path(name.lower())
    if path.suffix in COMPRESSIONS:
        return path.with_suffix("").suffix + path.suffix
    return path.suffix or "no ending"


def _files(count: int) -> str:
    return f"{count:,} file{'s' * (count != 1)}"


def _counts(endings: Counter[str]) -> str:
    """Describe endings and their numbers, the most frequent first: `95 .py, 2 .json`."""
    descriptions = [f"{count:,} {ending}" for ending, count in endings.most_common(MAX_NAMED)]
    if other_count := endings.total() - sum(count for _, count in endings.most_common(MAX_NAMED)):
        descriptions.append(f"{other_count:,} others")
    return ", ".join(descriptions)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
