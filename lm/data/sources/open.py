"""Where text comes from: made here, read from local files, or streamed from a hub."""

from __future__ import annotations

import ast
import functools
import glob
import hashlib
import itertools
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from lm.common.files import parse_json
from lm.config.data import Data, Traces
from lm.data.sources import traces
from lm.data.sources.errors import DataError
from lm.data.sources.parquet import read_parquet

SUFFIXES = {"text": (".txt", ".text", ".md"), "jsonl": (".jsonl",), "parquet": (".parquet",)}
WHOLE_FILE_BYTES = 100_000  # a text file above this is cut into several documents
MIN_DOCUMENT = 4_096  # characters of each of them but the last
MAX_DOCUMENT = 16_384
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
BLANK_LINES = re.compile(r"\r?\n(?:[ \t]*\r?\n)+")


class Documents(Protocol):
    """An iterator of document strings whose position can be saved, as plain data."""

    def __iter__(self) -> Iterator[str]: ...
    def __next__(self) -> str: ...
    def state_dict(self) -> dict | None: ...


def is_validation(text: str, val_fraction: float) -> bool:
    """Whether a document is held out. A hash of its content alone decides, so that the splits
    never overlap, however documents are ordered, sharded or repeated."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < val_fraction * 2**64


def documents(
    data: Data,
    shard: tuple[int, int] = (0, 1),
    state: dict | None = None,
    order: tuple[int, int] | None = None,
) -> Documents:
    """The documents (non-blank strings) of shard `(index, count)` of the source, from its start or
    from the `state_dict()` of an earlier iterator over the same shard.

    Args:
        order: (seed, epoch) of a shuffle of what is streamed from the hub; None: as it stands.
    Raises:
        DataError: here or while iterating; something is missing, unreadable or empty.
    """
    if data.source == "fineweb":
        from lm.data.sources.hub_parquet import HubDocuments

        return HubDocuments(data, shard, state, order)
    return LocalDocuments(data, shard, state)


class LocalDocuments:
    """Iterator over a finite source; its position is the number of documents read."""

    def __init__(self, data: Data, shard: tuple[int, int] = (0, 1), state: dict | None = None):
        self._read = state["read"] if state else 0
        index, count = shard
        start = index + self._read * count
        self._texts = itertools.islice(_local_documents(data), start, None, count)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        text = next(self._texts)
        self._read += 1
        return text

    def state_dict(self) -> dict:
        return {"read": self._read}


def source_files(data: Data) -> list[Path]:
    """The files behind `data.path` (a file, folder or glob), sorted.

    Raises:
        DataError: there are none, or data.path is not set.
    """
    if data.path is None:
        raise DataError(f"data.source {data.source} needs data.path, a file, folder or glob")
    path = Path(data.path).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        suffixes = SUFFIXES[data.source]
        found = [p for p in path.rglob("*") if p.suffix.lower() in suffixes and p.is_file()]
        if not found:
            wanted = ", ".join(f"*{s}" for s in suffixes)
            raise DataError(f"data.path {path} is a folder without any {wanted} file in it")
        return sorted(found)
    # A folder `part[1]` in front of a pattern is that folder, not the pattern that matches `part1`.
    root = next((folder for folder in path.parents if folder.is_dir()), Path())
    matches = glob.glob(str(path.relative_to(root)), root_dir=root, recursive=True)
    found = [root / match for match in matches if (root / match).is_file()]
    if not found:
        raise DataError(f"data.path {data.path}: no such file or folder, and no file matches it")
    return sorted(found)


def _local_documents(data: Data) -> Iterator[str]:
    if data.source == "builtin":
        texts = iter(builtin_documents())
        where = "the standard library (its .py files are absent)"
    elif data.source == "traces":
        texts = traces.documents(data.traces or Traces())
        where = "traces"
    else:
        files = source_files(data)
        read = {"text": _read_text, "jsonl": _read_jsonl, "parquet": read_parquet}[data.source]
        texts = itertools.chain.from_iterable(read(path, data.text_field) for path in files)
        where = f"data.path {data.path} ({len(files)} file{'s' * (len(files) != 1)})"
    is_empty = True
    for text in texts:
        if text.strip():
            is_empty = False
            yield text
    if is_empty:
        raise DataError(f"the corpus is empty: no text in {where}")


@functools.cache
def builtin_documents() -> tuple[str, ...]:
    """The text every Python carries: the language reference's topics, then the docstrings of each
    standard-library file in source order, files in sorted order. Nothing is imported but the
    topics; tests and third-party packages are left out."""
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in skip and not s.startswith("config-")]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    texts = [topics[key] for key in sorted(topics)]
    for path in sorted(files, key=lambda p: p.relative_to(root).as_posix()):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue  # templates and deliberately broken files
        texts.append("\n\n".join(_docstrings(tree)))
    return tuple(texts)


def _docstrings(node: ast.AST) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    if isinstance(node, kinds) and (text := ast.get_docstring(node)):
        yield text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield from _docstrings(child)


def cut_at_blank_lines(text: str) -> Iterator[str]:
    """Pieces of MIN_DOCUMENT to MAX_DOCUMENT characters (the last may be shorter) whose
    concatenation is `text`, cut after blank lines, failing that after a line, failing that
    anywhere."""
    start = 0
    while len(text) - start > MAX_DOCUMENT:
        low, high = start + MIN_DOCUMENT, start + MAX_DOCUMENT
        blank = BLANK_LINES.search(text, low, high)
        end = blank.end() if blank else text.rfind("\n", low, high) + 1 or high
        yield text[start:end]
        start = end
    yield text[start:]


def _read_text(path: Path, _field: str) -> Iterator[str]:
    """One document per file; a file over WHOLE_FILE_BYTES is cut so that it has several."""
    raw = b"".join(_lines(path))
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise DataError(f"{path} is not UTF-8 text: invalid byte at offset {e.start}") from None
    if len(raw) > WHOLE_FILE_BYTES:
        yield from cut_at_blank_lines(text)
    else:
        yield text


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as lines:
            yield from lines
    except OSError as e:
        raise DataError(f"{path} cannot be read: {e.strerror}") from None


def _read_jsonl(path: Path, field: str) -> Iterator[str]:
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                row = parse_json(line)
            except ValueError as e:  # JSONDecodeError and UnicodeDecodeError
                raise DataError(f"{where} is not JSON: {e}") from None
            if not isinstance(row, dict):
                raise DataError(f"{where} is not a JSON object but a {type(row).__name__}")
            if field not in row:
                keys = ", ".join(row) or "none"
                raise DataError(
                    f"{where} has no key `{field}` (its keys: {keys}); set data.text_field"
                )
            if not isinstance(row[field], str):
                raise DataError(f"{where}: `{field}` is not a string but {row[field]!r:.40}")
            yield LONE_SURROGATE.sub("\ufffd", row[field])  # JSON can spell what UTF-8 cannot
