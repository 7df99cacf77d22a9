"""Tests of the files behind `data.path`: folders, globs, links, compression, errors."""

from __future__ import annotations

import bz2
import errno
import gzip
import json
import os

import pyarrow as pa
import pytest

from lm.config.data import Data
from lm.data.sources import listing
from lm.data.sources.errors import DataError
from lm.data.sources.listing import list_files, report_files, source_files
from lm.data.sources.open import iter_documents


def names(path, source: str = "text") -> list[str]:
    """Return the files behind a path, relative to the part without wildcards."""
    files = source_files(Data(source=source, path=str(path)))
    base = os.path.commonpath([str(path).partition("*")[0], *files])
    return [os.path.relpath(file, base) for file in files]


def write_files(folder, *paths: str):
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(f"text of {path}\n")


def capture_report(path, source: str, capsys) -> str:
    listing._say_once.cache_clear()
    data = Data(source=source, path=str(path))
    report_files(data, list_files(data))
    return " ".join(capsys.readouterr().out.split())


def test_report_names_files_read_and_skipped(tmp_path, capsys):
    write_files(tmp_path, *(f"{i}.txt" for i in range(3)), *(f"code/{i}.py" for i in range(7)))
    write_files(tmp_path, "a.jsonl.gz", "LICENSE")
    assert len(names(tmp_path)) == 3
    output = capture_report(tmp_path, "text", capsys)
    assert f"{tmp_path}: 3 files read (3 .txt), 9 files skipped (7 .py, 1 " in output
    assert "1 .jsonl.gz" in output and "1 no ending" in output
    assert len(names(f"{tmp_path}/**/*.py")) == 7
    assert len(names(f"{tmp_path}/**")) == 12
    assert capture_report(tmp_path / "0.txt", "text", capsys) == ""
    output = capture_report(f"{tmp_path}/*.txt", "text", capsys)
    assert output == f"data {tmp_path}/*.txt: 3 files read (3 .txt)"


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet"])
def test_folder_of_another_source_is_refused_with_its_endings(tmp_path, source):
    other = {"text": "a.parquet", "jsonl": "a.json.gz", "parquet": "a.jsonl.zst"}[source]
    write_files(tmp_path, other)
    with pytest.raises(DataError, match=rf"without any .* file: .* 1 {other[1:]}; .*/\*\*'"):
        source_files(Data(source=source, path=str(tmp_path)))


def test_compressed_files_give_the_same_documents(tmp_path, texts):
    raw = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(raw[:999]) + gzip.compress(raw[999:]))
    (tmp_path / "b.jsonl.bz2").write_bytes(bz2.compress(raw))
    with pa.CompressedOutputStream(str(tmp_path / "c.ndjson.zst"), "zstd") as file:
        file.write(raw)
    assert list(iter_documents(Data(source="jsonl", path=str(tmp_path)))) == texts * 3
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress("é\r\n".encode()))
    assert list(iter_documents(Data(source="text", path=str(tmp_path)))) == ["é\r\n"]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_truncated_compressed_file_is_refused(tmp_path, ending):
    path = tmp_path / f"a.jsonl{ending}"
    with pa.CompressedOutputStream(str(path), listing.COMPRESSIONS[ending]) as file:
        file.write(b'{"text": "x"}\n' * 9)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match=rf"a\.jsonl{ending} cannot be read: Truncated"):
        list(iter_documents(Data(source="jsonl", path=str(path))))


def test_folder_links_are_followed_unless_circular(tmp_path):
    write_files(tmp_path, "data/a.txt", "data/sub/b.txt", "elsewhere/c.txt")
    data = tmp_path / "data"
    (data / "again").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(data)
    for loop in ("loop", "sub/loop"):
        (data / loop).symlink_to(data)
    (data / "sub/to_itself").symlink_to(data / "sub/to_itself")
    expected = ["a.txt", "again/c.txt", "sub/b.txt"]
    assert names(data) == expected == names(f"{data}/**/*.txt") == names(f"{data}/**/**/*.txt")


def test_broken_links_and_special_files_are_reported(tmp_path, capsys):
    write_files(tmp_path, "a.txt")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone.txt")
    os.mkfifo(tmp_path / "c.txt")
    for path in (tmp_path, tmp_path / "*.txt"):
        output = capture_report(path, "text", capsys)
        assert "1 file read (1 .txt), 2 files skipped (1 broken link, 1 special file;" in output


@pytest.mark.parametrize("pattern", ["", "**/*.txt", "*/*.txt"])
def test_error_names_an_unreadable_folder(tmp_path, monkeypatch, pattern):
    write_files(tmp_path, "a.txt", "closed/b.txt")
    scandir = os.scandir

    def refuse(path):  # permissions do not stop the superuser
        if os.path.basename(path) == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"/closed, a folder of data\.path, cannot be read: Perm"):
        source_files(Data(source="text", path=str(tmp_path / pattern)))


def test_globs_match_as_in_python(tmp_path):
    write_files(tmp_path, "a1.txt", "b/a2.txt", "b/c/a3.txt", "x[1]/a6.txt")
    write_files(tmp_path, ".hidden/a4.txt", "b/.a5.txt")
    assert names(f"{tmp_path}/**/a?.txt") == ["a1.txt", "b/a2.txt", "b/c/a3.txt", "x[1]/a6.txt"]
    assert names(f"{tmp_path}/*/*.txt") == ["b/a2.txt", "x[1]/a6.txt"]
    assert names(f"{tmp_path}/b/**") == ["a2.txt", "c/a3.txt"]
    assert names(f"{tmp_path}/.h*/*") == [".hidden/a4.txt"]
    assert names(f"{tmp_path}/x[[]1]/*") == ["x[1]/a6.txt"]
    assert names(f"{tmp_path}/x[1]") == ["a6.txt"]


def test_error_names_a_path_that_is_too_long():
    with pytest.raises(DataError, match=r"data\.path .* cannot be read: File name too long"):
        source_files(Data(source="text", path="x" * 5000))
