"""Tests of the sources: documents of each, the validation split, and error messages."""

from __future__ import annotations

import argparse
import bisect
import calendar
import json
import subprocess
import sys
from pydoc_data.topics import topics

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.config.data import Data
from lm.data.sources.errors import DataError
from lm.data.sources.open import (
    MAX_DOCUMENT,
    MIN_DOCUMENT,
    cut_at_blank_lines,
    is_validation,
    iter_documents,
)


def test_builtin_text_is_large_and_ordered_and_imports_no_module():
    code = (
        "import json, sys; from lm.config.data import Data; from lm.data.sources import open;"
        "old = set(sys.modules); texts = list(open.iter_documents(Data(source='builtin')));"
        "print(json.dumps([texts, sorted(set(sys.modules) - old)]))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    texts, modules = json.loads(out.stdout)
    # Parsing a source file imports the codec that it declares.
    imported = {name for name in modules if not name.startswith("encodings.")}
    assert imported <= {"pydoc_data", "pydoc_data.topics"}

    assert len(texts) > 500 and sum(map(len, texts)) > 1_500_000
    first = [topics[key] for key in sorted(topics)]
    assert texts[: len(first)] == first
    beginnings = [text[:20] for text in texts]
    places = [beginnings.index(module.__doc__[:20]) for module in (argparse, bisect, calendar)]
    assert len(first) <= places[0] < places[1] < places[2]
    assert any("assert" in t and "AssertionError" in t for t in texts[:100])
    assert not any("pytest" in t[:200] for t in texts)


def test_file_formats_give_the_same_documents(texts, jsonl, tmp_path):
    pq.write_table(pa.table({"id": range(200), "text": texts}), tmp_path / "a.parquet", 64)
    for i, text in enumerate(texts):
        (tmp_path / f"{i:03d}.txt").write_text(text, encoding="utf-8")
    assert list(iter_documents(Data(source="jsonl", path=str(jsonl)))) == texts
    assert list(iter_documents(Data(source="parquet", path=str(tmp_path)))) == texts
    assert list(iter_documents(Data(source="text", path=str(tmp_path)))) == texts
    assert list(iter_documents(Data(source="text", path=str(tmp_path / "00?.txt")))) == texts[:10]


def test_parquet_files_of_fineweb_are_read(shared):
    texts = list(iter_documents(Data(source="parquet", path=str(shared / "fineweb"))))
    assert len(texts) == 2400 and all(isinstance(t, str) and t for t in texts)


def test_null_and_blank_documents_are_skipped(tmp_path):
    pq.write_table(pa.table({"text": ["a", None, " \n", "b"]}), tmp_path / "a.parquet")
    assert list(iter_documents(Data(source="parquet", path=str(tmp_path)))) == ["a", "b"]


def test_large_text_file_becomes_several_documents(shared):
    path = shared / "text" / "wikitext2_valid.txt"
    texts = list(iter_documents(Data(source="text", path=str(path))))
    assert "".join(texts) == path.read_bytes().decode()
    assert all(MIN_DOCUMENT <= len(t) <= MAX_DOCUMENT for t in texts[:-1]) and len(texts) > 100


@given(st.text("ab \n\r", max_size=300).map(lambda t: t * 200))
def test_cutting_keeps_every_character(text):
    pieces = list(cut_at_blank_lines(text))
    assert "".join(pieces) == text
    assert all(MIN_DOCUMENT <= len(p) <= MAX_DOCUMENT for p in pieces[:-1])


def test_text_keeps_crlf_and_drops_the_byte_order_mark(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert list(iter_documents(Data(source="text", path=str(tmp_path)))) == ["one\r\ntwo\r\n"]


def test_lone_surrogate_in_json_is_replaced(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x\\ud83d"}\n')
    assert list(iter_documents(Data(source="jsonl", path=str(path)))) == ["x\ufffd"]


@given(st.text(), st.floats(0.01, 0.99))
def test_split_depends_only_on_content(text, fraction):
    assert is_validation(text, fraction) == is_validation("".join(list(text)), fraction)
    if is_validation(text, fraction):
        assert is_validation(text, min(0.995, fraction * 1.5))  # a larger fraction holds it out too


def test_split_has_about_the_configured_fraction():
    share = sum(is_validation(f"document {i}", 0.05) for i in range(20_000)) / 20_000
    assert 0.044 < share < 0.056
    assert not any(is_validation(t, 1e-9) for t in map(str, range(1000)))


def fails(match: str, **data):
    with pytest.raises(DataError, match=match) as caught:
        list(iter_documents(Data(**data)))
    assert "\n" not in str(caught.value)


def test_missing_path_is_refused(tmp_path):
    fails("no such file or folder", source="jsonl", path=str(tmp_path / "nope.jsonl"))
    fails(r"without any \*\.parquet", source="parquet", path=str(tmp_path))
    fails("no file matches", source="text", path=str(tmp_path / "*.txt"))


def test_brackets_of_an_existing_folder_are_no_pattern(tmp_path):
    for name in ("part[1]", "part1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"in {name}")
    for pattern in ("part[1]", "part[1]/a.txt", "part[1]/*.txt", "part[1]/**/*.txt"):
        path = str(tmp_path / pattern)
        assert list(iter_documents(Data(source="text", path=path))) == ["in part[1]"], pattern
    path = str(tmp_path / "part[1-9]/*.txt")
    assert list(iter_documents(Data(source="text", path=path))) == ["in part1"]


def test_empty_corpus_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n")
    (tmp_path / "a.txt").write_text(" \n")
    fails(r"corpus is empty.*a\.jsonl \(1 file\)", source="jsonl", path=str(tmp_path / "a.jsonl"))
    fails("corpus is empty", source="text", path=str(tmp_path))


@pytest.mark.parametrize(
    "line, match",
    [
        ('{"text": "a"', r"line 3 is not JSON: "),
        ("[1, 2]", r"line 3 is not a JSON object but a list"),
        ('{"body": "a"}', r"line 3 has no key `text` \(its keys: body\); set data\.text_field"),
        ('{"text": 7}', r"line 3: `text` is not a string but 7"),
        (b"\xff\xfe", r"line 3 is not JSON"),
    ],
)
def test_error_names_the_jsonl_line(tmp_path, line, match):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n' + (line if isinstance(line, bytes) else line.encode()))
    fails(rf"a\.jsonl, {match}", source="jsonl", path=str(path))


def test_parquet_without_a_text_column_is_refused(tmp_path):
    pq.write_table(pa.table({"id": [1], "body": ["a"]}), tmp_path / "a.parquet")
    source = {"source": "parquet", "path": str(tmp_path)}
    fails(r"a\.parquet has no column `text` \(its columns: id, body\)", **source)
    fails("column `id` holds int64, not strings", **source, text_field="id")


def test_parquet_column_of_string_views_is_read(tmp_path):
    texts = pa.array(["a", "b"]).cast(pa.string_view())
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    data = Data(source="parquet", path=str(tmp_path))
    assert list(iter_documents(data)) == ["a", "b"]


def test_truncated_parquet_is_refused(tmp_path, texts):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": texts}), path)
    path.write_bytes(path.read_bytes()[:-100])
    fails(r"a\.parquet is not a whole parquet file", source="parquet", path=str(tmp_path))


def test_text_file_with_invalid_utf8_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    fails("not UTF-8 text: invalid byte at offset 3", source="text", path=str(tmp_path))


def test_error_names_a_row_group_with_a_flipped_bit(tmp_path, texts):
    path = tmp_path / "a.parquet"
    options = dict(write_page_checksum=True, use_dictionary=False, compression="none")
    pq.write_table(pa.table({"text": texts}), path, row_group_size=100, **options)
    data = bytearray(path.read_bytes())
    column = pq.read_metadata(path).row_group(1).column(0)
    data[column.data_page_offset + column.total_compressed_size // 2] ^= 4
    path.write_bytes(data)
    error = r"a\.parquet is damaged in row group 1, column `text`: .*CRC.*; fetch or write it again"
    fails(error, source="parquet", path=str(tmp_path))


def test_parquet_with_invalid_utf8_is_refused(tmp_path, texts):
    table = pa.table({"text": pa.array([b"a", b"\xff"]).cast(pa.string(), safe=False)})
    pq.write_table(table, tmp_path / "a.parquet")
    fails("is damaged in row group 0, column `text`: .*UTF8", source="parquet", path=str(tmp_path))
