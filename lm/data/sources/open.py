"""Documents of a source: generated, read from local files, or streamed from the hub."""

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

WHOLE_FILE_BYTES = 100_000  # a larger text file is cut into several documents
MIN_DOCUMENT = 4_096  # characters of a cut document, except the last one
MAX_DOCUMENT = 16_384
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
BLANK_LINES = re.compile(r"\r?\n(?:[ \t]*\r?\n)+")


def is_validation(text: str, val_fraction: float) -> bool:
    """Return True if a document is held out for validation.

    Only a hash of the content decides, so the splits never overlap, however documents are ordered,
    sharded or repeated.
    """
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < val_fraction * 2**64


def iter_documents(data: Data) -> Iterator[str]:
    """Return the documents (non-blank strings) of a source, in the order of the source.

    Raises:
        DataError: At the call or while iterating, if something is missing, unreadable or empty.
    """
    if data.source == "fineweb":
        from lm.data.sources.hub_parquet import HubDocuments

        return HubDocuments(data)
    return _local_documents(data)


def _local_documents(data: Data) -> Iterator[str]:
    if data.source == "builtin":
        texts = iter(builtin_documents())
        place = "the standard library (its .py files are absent)"
    elif data.source == "traces":
        texts = traces.iter_documents(data.traces or Traces())
        place = "traces"
    else:
        files = source_files(data)
        reader = {"text": _read_text, "jsonl": _read_jsonl, "parquet": read_parquet}[data.source]
        texts = itertools.chain.from_iterable(reader(path, data.text_field) for path in files)
        place = f"data.path {data.path} ({len(files)} file{'s' * (len(files) != 1)})"
    is_empty = True
    for text in texts:
        if text.strip():
            is_empty = False
            yield text
    if is_empty:
        raise DataError(f"the corpus is empty: no text in {place}")


@functools.cache
def builtin_documents() -> tuple[str, ...]:
    """Return the text that every Python installation has.

    First the topics of the language reference, then the docstrings of each file of the standard
    library, without tests and third-party packages. Files are parsed, not imported.
    """
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
            continue  # a template or a deliberately broken file
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
    """Cut a text into pieces of MIN_DOCUMENT to MAX_DOCUMENT characters; the last may be shorter.

    A cut is preferably after a blank line, otherwise after a line, otherwise anywhere.
    """
    start = 0
    while len(text) - start > MAX_DOCUMENT:
        low, high = start + MIN_DOCUMENT, start + MAX_DOCUMENT
        blank = BLANK_LINES.search(text, low, high)
        end = blank.end() if blank else text.rfind("\n", low, high) + 1 or high
        yield text[start:end]
        start = end
    yield text[start:]


def _read_text(path: Path, _field: str) -> Iterator[str]:
    """Yield a file as one document, or as several if it is larger than WHOLE_FILE_BYTES."""
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
    """Yield the lines of a file, which is decompressed according to its ending.

    Raises:
        DataError: If the file cannot be read, or is truncated.
    """
    import pyarrow as pa  # supports all COMPRESSIONS; Python 3.11 has no zstd

    compression = COMPRESSIONS.get(path.suffix.lower())
    try:
        with open(path, "rb") as file, pa.input_stream(file, compression) as stream:
            yield from io.BufferedReader(stream, 2**20)
    except OSError as e:
        raise DataError(f"{path} cannot be read: {e.strerror or e}") from None


def _read_jsonl(path: Path, field: str) -> Iterator[str]:
    """Yield the texts of a JSON Lines file, one per line; skip empty lines."""
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            place = f"{path}, line {number}"
            try:
                row = parse_json(line)
            except ValueError as e:  # JSONDecodeError and UnicodeDecodeError
                raise DataError(f"{place} is not JSON: {e}") from None
            if not isinstance(row, dict):
                raise DataError(f"{place} is not a JSON object but a {type(row).__name__}")
            if field not in row:
                keys = ", ".join(row) or "none"
                raise DataError(
                    f"{place} has no key `{field}` (its keys: {keys}); set data.text_field"
                )
            if not isinstance(row[field], str):
                raise DataError(f"{place}: `{field}` is not a string but {row[field]!r:.40}")
            # JSON may contain lone surrogates, which UTF-8 cannot encode.
            yield LONE_SURROGATE.sub("\ufffd", row[field])
