"""Documents of a source: generated, read from local files, or streamed from the hub."""

from __future__ import annotations

import ast
import contextlib
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

MAX_UNCUT_BYTES = 100_000  # a larger text file is cut into several documents
MIN_DOCUMENT = 4_096  # minimum characters of a piece of a cut file, except the last piece
MAX_DOCUMENT = 16_384  # maximum characters of a piece
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
BLANK_LINES = re.compile(r"\r?\n(?:[ \t]*\r?\n)+")


def is_validation(text: str, val_fraction: float) -> bool:
    """Return whether a document is held out for validation.

    This depends only on a hash of the text, so the splits do not overlap, whatever the order of the
    documents is, and even if documents are repeated.
    """
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < val_fraction * 2**64


def iter_documents(data: Data) -> Iterator[str]:
    """Return an iterator over the documents (non-blank strings) of a source, in its order.

    Raises:
        DataError: At the call or while iterating, if the text is missing, unreadable or empty.
    """
    if data.source == "fineweb":
        from lm.data.sources.hub_parquet import HubDocuments

        return HubDocuments(data)
    return _local_documents(data)


def _local_documents(data: Data) -> Iterator[str]:
    """Yield the documents of a source that needs no network."""
    if data.source == "builtin":
        texts = iter(builtin_documents())
        origin = "the standard library (its .py files are absent)"
    elif data.source == "traces":
        texts = traces.iter_documents(data.traces or Traces())
        origin = "traces"
    else:
        files = source_files(data)
        # Text has no fields, but all readers are called with one.
        reader = {"text": _read_text, "jsonl": _read_jsonl, "parquet": read_parquet}[data.source]
        texts = itertools.chain.from_iterable(reader(path, data.text_field) for path in files)
        origin = f"data.path {data.path} ({len(files)} file{'' if len(files) == 1 else 's'})"
    is_empty = True
    for text in texts:
        if text.strip():
            is_empty = False
            yield text
    if is_empty:
        raise DataError(f"the corpus is empty: no text in {origin}")


@functools.cache
def builtin_documents() -> tuple[str, ...]:
    """Return text that every Python installation has.

    These are the topics of the language reference, then the docstrings of each file of the standard
    library, without tests and third-party packages. Files are parsed, not imported.
    """
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = []
    for folder, subfolders, names in os.walk(root):
        # The folder config-VERSION-PLATFORM differs between installations of the same version.
        subfolders[:] = [
            name for name in subfolders if name not in skipped and not name.startswith("config-")
        ]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    texts = [topics[key] for key in sorted(topics)]
    for path in sorted(files, key=lambda p: p.relative_to(root).as_posix()):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue  # a template, or a test file that is broken on purpose
        texts.append("\n\n".join(_iter_docstrings(tree)))
    return tuple(texts)


def _iter_docstrings(node: ast.AST) -> Iterator[str]:
    types = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    if isinstance(node, types) and (text := ast.get_docstring(node)):
        yield text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield from _iter_docstrings(child)


def cut_at_blank_lines(text: str) -> Iterator[str]:
    """Cut a text into pieces of MIN_DOCUMENT to MAX_DOCUMENT characters; the last may be shorter.

    A piece ends after the first possible blank line; without one, after the last possible line;
    without a line end, at the maximum.
    """
    start = 0
    while len(text) - start > MAX_DOCUMENT:
        min_end, max_end = start + MIN_DOCUMENT, start + MAX_DOCUMENT
        blank_lines = BLANK_LINES.search(text, min_end, max_end)
        last_line_end = text.rfind("\n", min_end, max_end)
        if blank_lines:
            end = blank_lines.end()
        else:
            end = max_end if last_line_end == -1 else last_line_end + 1
        yield text[start:end]
        start = end
    yield text[start:]


def _read_text(path: Path, _field: str) -> Iterator[str]:
    """Yield a file as one document, or as several if it is larger than MAX_UNCUT_BYTES."""
    with _open(path) as stream:
        raw = stream.read()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise DataError(f"{path} is not UTF-8 text: invalid byte at offset {e.start}") from None
    if len(raw) > MAX_UNCUT_BYTES:
        yield from cut_at_blank_lines(text)
    else:
        yield text


@contextlib.contextmanager
def _open(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file for reading, decompressed according to its ending."""
    import pyarrow as pa  # supports all COMPRESSIONS; Python 3.11 has no zstd

    compression = COMPRESSIONS.get(path.suffix.lower())
    try:
        with open(path, "rb") as file, pa.input_stream(file, compression) as stream:
            yield io.BufferedReader(stream, 2**20)
    except OSError as e:
        raise DataError(f"{path} cannot be read: {e.strerror or e}") from None


def _iter_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file."""
    with _open(path) as stream:
        yield from stream


def _read_jsonl(path: Path, field: str) -> Iterator[str]:
    """Yield the texts of a JSON Lines file, one per line; skip empty lines."""
    for number, line in enumerate(_iter_lines(path), 1):
        if line.strip():
            location = f"{path}, line {number}"
            try:
                row = parse_json(line)
            except ValueError as e:  # JSONDecodeError and UnicodeDecodeError
                raise DataError(f"{location} is not JSON: {e}") from None
            if not isinstance(row, dict):
                raise DataError(f"{location} is not a JSON object but a {type(row).__name__}")
            if field not in row:
                keys = ", ".join(row) or "none"
                fault = f"has no key `{field}` (its keys: {keys})"
                raise DataError(f"{location} {fault}; set data.text_field")
            if not isinstance(row[field], str):
                raise DataError(f"{location}: `{field}` is not a string but {row[field]!r:.40}")
            # JSON may contain lone surrogates, which UTF-8 cannot encode.
            yield LONE_SURROGATE.sub("\ufffd", row[field])
