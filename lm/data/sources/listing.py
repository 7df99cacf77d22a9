"""Find the files behind `data.path`, and name the files of a folder that the source skips."""

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
    listing = _list_matches(path)
    if not listing.files:
        raise DataError(f"data.path {data.path}: no such file or folder, and no file matches it")
    return listing


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
    endings = list(ENDINGS[source])
    if source in COMPRESSED_SOURCES:
        endings += [ending + packed for ending in ENDINGS[source] for packed in COMPRESSIONS]
    found = _sorted_files(_walk(folder))
    is_read = {path: _ending(path.name) in endings for path in found.files}
    skipped = found.skipped
    skipped.update(_ending(path.name) for path in found.files if not is_read[path])
    files = [path for path in found.files if is_read[path]]
    if files:
        return Listing(files, skipped)
    expected = ", ".join(f"*{ending}" for ending in ENDINGS[source])
    if source in COMPRESSED_SOURCES:
        expected += f" (or one of them with {', '.join(COMPRESSIONS)})"
    holds = "it is empty"
    if skipped:
        holds = f"it holds {_counts(skipped)}; data.path='{folder}/**' reads every file"
    raise DataError(f"data.path {folder} is a folder without any {expected} file in it: {holds}")


def _list_matches(pattern: Path) -> Listing:
    """List the files that match a glob; `**` matches any number of folders.

    The pattern begins after the folders that exist: `part[1]/*.txt` reads the folder `part[1]`, not
    `part1`.

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
        below = path.relative_to(base)
        # As in a shell, a name that starts with a dot is only matched by a part that does.
        is_wanted = sum(name.startswith(".") for name in below.parts) == dots
        return is_wanted and expression.match(below.as_posix()) is not None

    found = _walk(base, None if "**" in parts else len(parts))
    return _sorted_files(filter(is_match, found))


def _sorted_files(paths: Iterable[Path]) -> Listing:
    """Sort files; count broken links and special files as skipped."""
    paths = sorted(paths)
    files = [path for path in paths if path.is_file()]
    others = [path for path in paths if not path.is_file()]
    kinds = ("broken link" if path.is_symlink() else "special file" for path in others)
    return Listing(files, Counter(kinds))


def _walk(base: Path, max_depth: int | None = None) -> Iterator[Path]:
    """Yield the files below a folder; links to folders are followed, unless they form a circle.

    Args:
        max_depth: Parts of the longest path below `base`; None: any number.

    Raises:
        DataError: If a folder cannot be read.
    """
    reals = {str(base): [os.path.realpath(base)]}  # of a folder, with the folders above it
    for folder, subfolders, names in os.walk(base, followlinks=True, onerror=_refuse_folder):
        above = reals[folder]
        paths = {name: os.path.join(folder, name) for name in subfolders}
        reals |= {path: [*above, os.path.realpath(path)] for path in paths.values()}
        is_deepest = len(above) == max_depth
        subfolders[:] = [
            name for name, path in paths.items() if not is_deepest and reals[path][-1] not in above
        ]
        yield from (Path(folder, name) for name in names)


def _refuse_folder(error: OSError) -> NoReturn:
    raise DataError(
        f"{error.filename}, a folder of data.path, cannot be read: {error.strerror}; make it"
        " readable, or leave it out by a glob in data.path"
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
    """Describe endings and their numbers, the most frequent first: `95 .py, 2 .json`."""
    descriptions = [f"{count:,} {ending}" for ending, count in endings.most_common(MAX_NAMED)]
    if other_count := endings.total() - sum(count for _, count in endings.most_common(MAX_NAMED)):
        descriptions.append(f"{other_count:,} others")
    return ", ".join(descriptions)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
