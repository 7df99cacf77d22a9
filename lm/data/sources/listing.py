"""Files that `data.path` names: a file, the files of a folder, or the matches of a glob."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

from fsspec.utils import glob_translate

from lm.common.console import say
from lm.config.data import Data
from lm.data.sources.errors import DataError

# {source: endings of the files that it reads in a folder}. A glob reads files with any ending.
ENDINGS = {
    "text": (".txt", ".text", ".md", ".markdown", ".rst"),
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}  # {ending: pyarrow's name}
COMPRESSED_SOURCES = ("text", "jsonl")  # parquet compresses its own columns
MAX_ENDINGS = 6  # in a message; longer lists are hard to read


@dataclass
class Listing:
    """The files that `data.path` names.

    Fields:
        files: Sorted paths of the files that the source reads.
        skipped: Number of other files in the folder by their ending.
    """

    files: list[Path]
    skipped: Counter[str] = field(default_factory=Counter)


def source_files(data: Data) -> list[Path]:
    """Return the files that `data.path` names, sorted.

    Raises:
        DataError: If there is no such file, a folder cannot be read, or data.path is not set.
    """
    return list_files(data).files


def list_files(data: Data) -> Listing:
    """List the files that `data.path` names, and count the other files in the folder.

    Links to folders are followed, except links to a folder above them.

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
    is_single_file = listing.files == [Path(data.path or "").expanduser()]
    if is_single_file:
        return
    endings = Counter(_ending(path.name) for path in listing.files)
    text = f"data     {data.path}: {_format_total(endings)} read ({_format_counts(endings)})"
    if skipped := listing.skipped:
        text += (
            f", {_format_total(skipped)} skipped ({_format_counts(skipped)};"
            " data.path='FOLDER/**' reads every file that is not hidden)"
        )
    _say_once(text)


@lru_cache(maxsize=64)  # the tokenizer and the corpus list the same folder
def _say_once(text: str) -> None:
    say(text)


def _list_folder(folder: Path, source: str) -> Listing:
    """List the files of a folder by ending; raise DataError if the source reads none of them."""
    endings = list(ENDINGS[source])
    if source in COMPRESSED_SOURCES:
        endings += [first + second for first in ENDINGS[source] for second in COMPRESSIONS]
    all_files = _sort_files(_walk(folder))
    skipped = all_files.skipped
    files = []
    for path in all_files.files:
        if (ending := _ending(path.name)) in endings:
            files.append(path)
        else:
            skipped[ending] += 1
    if files:
        return Listing(files, skipped)
    expected = ", ".join(f"*{ending}" for ending in ENDINGS[source])
    if source in COMPRESSED_SOURCES:
        expected += f" (or compressed with {', '.join(COMPRESSIONS)})"
    content = "it is empty"
    if skipped:
        content = f"it contains {_format_counts(skipped)}; data.path='{folder}/**' reads every file"
        content += " that is not hidden"
    raise DataError(f"data.path {folder} is a folder without any {expected} file: {content}")


def _list_matches(pattern: Path) -> Listing:
    """List the files that match a glob; `**` matches any number of folders.

    Leading folders that exist are taken literally: if a folder `part[1]` exists, `part[1]/*.txt`
    reads it, and not `part1`.
    """
    base = next(folder for folder in pattern.parents if folder.is_dir())
    parts = pattern.parts[len(base.parts) :]  # the parts of the pattern below `base`
    if not glob.has_magic(parts[0]):
        return Listing([])
    try:
        expression = re.compile(glob_translate("/".join(parts)))
    except ValueError as e:
        raise DataError(f"data.path {pattern}: {e}") from None

    def count_hidden(names: Sequence[str]) -> int:
        return sum(name.startswith(".") for name in names)

    def is_match(path: Path) -> bool:
        relative = path.relative_to(base)
        # As in a shell, a hidden name matches only a part of the pattern with a leading dot.
        has_hidden_match = count_hidden(relative.parts) == count_hidden(parts)
        return has_hidden_match and expression.match(relative.as_posix()) is not None

    paths = _walk(base, None if "**" in parts else len(parts))
    return _sort_files(filter(is_match, paths))


def _sort_files(paths: Iterable[Path]) -> Listing:
    """Sort files; count broken links and special files as skipped."""
    listing = Listing([])
    for path in sorted(paths):
        if path.is_file():
            listing.files.append(path)
        else:
            listing.skipped["broken link" if path.is_symlink() else "special file"] += 1
    return listing


def _walk(base: Path, max_depth: int | None = None) -> Iterator[Path]:
    """Yield the files below a folder; follow links to folders, except to a folder above them.

    Args:
        max_depth: Maximum number of parts in the path of a file relative to `base`; None: no limit.
    """
    for folder, subfolders, names in os.walk(base, followlinks=True, onerror=_raise_unreadable):
        path = Path(folder)
        ancestors = [p for p in (path, *path.parents) if p.is_relative_to(base)]
        real_paths = {os.path.realpath(p) for p in ancestors}
        if len(ancestors) == max_depth:
            subfolders.clear()  # so os.walk does not enter them
        subfolders[:] = [
            name for name in subfolders if os.path.realpath(path / name) not in real_paths
        ]
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


def _format_total(endings: Counter[str]) -> str:
    """Format the number of files: `1 file`, `97 files`."""
    count = endings.total()
    return f"{count:,} file{'' if count == 1 else 's'}"


def _format_counts(endings: Counter[str]) -> str:
    """Format the number of files per ending, the most frequent first: `95 .py, 2 .json`."""
    most_common = endings.most_common(MAX_ENDINGS)
    texts = [f"{count:,} {ending}" for ending, count in most_common]
    if other_count := endings.total() - sum(count for _, count in most_common):
        texts.append(f"{other_count:,} others")
    return ", ".join(texts)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
