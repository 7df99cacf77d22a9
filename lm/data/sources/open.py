"""Where text comes from: made here, read from local files, or streamed from a hub."""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import itertools
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from lm.common.files import parse_json
from lm.config.data import Data, Traces
from lm.data.sources import traces
from lm.data.sources.errors import DataError
from lm.data.sources.listing import COMPRESSIONS, source_files
from lm.data.sources.parquet import read_parquet

WHOLE_FILE_BYTES = 100_000  # a text file above this is cut into several documents
MIN_DOCUMENT = 4_096  # characters of each of them but the last
MAX_DOCUMENT = 16_384
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
BLANK_LINES = re.compile(r"\r?\n(?:[ \t]*\r?\n)+")


def is_validation(text: str, val_fraction: float) -> bool:
    """Whether a document is held out. A hash of its content alone decides, so that the splits
    never overlap, however documents are ordered, sharded or repeated."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < val_fraction * 2**64


def documents(data: Data) -> Iterator[str]:
    """Return the documents (non-blank strings) of a source, in its own order.

    Raises:
        DataError: Here or while iterating, if something is missing, unreadable or empty.
    """
    if data.source == "fineweb":
        from lm.data.sources.hub_parquet import HubDocuments

        return HubDocuments(data)
    return _local_documents(data)


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
    """Yield the lines of a file, decompressed if its ending says that it is compressed.

    Raises:
        DataError: If the file cannot be read, or is not whole.
    """
    import pyarrow as pa  # which reads all of them; Python 3.11 has no zstd

    compression = COMPRESSIONS.get(path.suffix.lower())
    try:
        with open(path, "rb") as file, pa.input_stream(file, compression) as stream:
            yield from io.BufferedReader(stream, 2**20)
    except OSError as e:
        raise DataError(f"{path} cannot be read: {e.strerror or e}") from None


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
