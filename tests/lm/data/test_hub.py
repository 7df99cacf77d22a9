"""FineWeb streaming without a network: a stand-in hub on the loopback device, and its faults."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pyarrow.parquet as pq
import pytest

REPO = "HuggingFaceFW/fineweb"
README = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
---
"""
OPENING = "from lm.config import Data, Config; from lm.data.sources import *\n"


def run(code: str, home: Path, **env: str) -> tuple[str, float]:
    """Output and seconds of the code in a fresh interpreter, for the hub's address is read once."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | env
    env |= {"HF_HOME": str(home), "PYTHONWARNINGS": "ignore"}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", OPENING + code], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip(), time.perf_counter() - start


SENTENCE = """
try:
    next(documents(Data(source="fineweb", **{}))); print("no error")
except DataError as e:
    print(e)
"""


@pytest.mark.parametrize(
    "env, reason",
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached"),
    ],
)
def test_offline_gives_one_sentence_quickly(env, reason, tmp_path):
    said, seconds = run(SENTENCE.format("{}"), tmp_path, **env)
    assert f"dataset {REPO} (sample-10BT) is on the Hugging Face hub" in said and reason in said
    assert said.endswith("`data.source: builtin`, `parquet`, `jsonl` and `text` work offline")
    assert "\n" not in said and seconds < 20


class Hub(BaseHTTPRequestHandler):
    """What `datasets` asks of the hub for one streamed dataset."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes] = {}  # noqa: RUF012
    faults: list[tuple[str, int]] = []  # noqa: RUF012 (pattern, status) each answered once
    sha = "a" * 40

    def do_GET(self):
        self.answer(body=True)

    def do_HEAD(self):
        self.answer(body=False)

    def answer(self, body: bool):
        path = unquote(self.path.partition("?")[0])
        for fault in self.faults:
            if re.search(fault[0], path):
                self.faults.remove(fault)
                return self.reply(fault[1], b"", body)
        if found := re.fullmatch(rf"/datasets/{REPO}/resolve/[^/]+/(.*)", path):
            if found[1] not in self.files:
                return self.reply(404, b"", body, {"X-Error-Code": "EntryNotFound"})
            return self.file(self.files[found[1]], body)
        if found := re.fullmatch(rf"/api/datasets/{REPO}/tree/[^/]+/?(.*)", path):
            listed = self.tree(found[1], recursive="recursive=true" in self.path.lower())
            if not listed:
                return self.reply(404, b"{}", body, {"X-Error-Code": "EntryNotFound"})
            return self.json(listed, body)
        if found := re.fullmatch(rf"/api/datasets/{REPO}/paths-info/.*", path):
            length = int(self.headers.get("Content-Length") or 0)
            return self.json([], body) if not length else self.reply(404, b"{}", body)
        if path.startswith(f"/api/datasets/{REPO}"):
            siblings = [{"rfilename": name} for name in self.files]
            info = {"id": REPO, "sha": self.sha, "private": False, "siblings": siblings, "tags": []}
            return self.json(info | {"downloads": 0, "likes": 0}, body)
        self.reply(200 if path == "/" else 404, b"", body)

    def tree(self, folder: str, recursive: bool) -> list[dict]:
        prefix, folders, found = folder + "/" if folder else "", set(), []
        for name in (n for n in self.files if n.startswith(prefix)):
            data, below = self.files[name], name.removeprefix(prefix).split("/")
            folders |= {prefix + "/".join(below[:i]) for i in range(1, len(below))}
            if recursive or len(below) == 1:
                entry = {"type": "file", "path": name, "size": len(data), "oid": self.etag(data)}
                found.append(entry)
        depth = prefix.count("/")
        shown = {f for f in folders if recursive or f.count("/") == depth}
        return [{"type": "directory", "path": f, "oid": "b" * 40} for f in sorted(shown)] + found

    @staticmethod
    def etag(data: bytes) -> str:
        return hashlib.sha1(data).hexdigest()

    def file(self, data: bytes, body: bool):
        headers = {"ETag": f'"{self.etag(data)}"', "Accept-Ranges": "bytes"}
        wanted = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not wanted:
            return self.reply(200, data, body, headers)
        first, last = int(wanted[1]), int(wanted[2] or len(data) - 1)
        last = min(last, len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self.reply(206, data[first : last + 1], body, headers)

    def json(self, value, body: bool):
        self.reply(200, json.dumps(value).encode(), body, {"Content-Type": "application/json"})

    def reply(self, status: int, data: bytes, body: bool, headers: dict | None = None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in ({"X-Repo-Commit": self.sha} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(shared):
    shards = sorted((shared / "fineweb").glob("*.parquet"))
    Hub.files = {"README.md": README.encode()}
    Hub.files |= {"data/CC-MAIN-2013-20/000_00000.parquet": shards[0].read_bytes()}
    Hub.files |= {f"sample/10BT/{p.name}": p.read_bytes() for p in shards}
    Hub.faults = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    server.shutdown()
    server.server_close()


@pytest.fixture
def all_texts(shared) -> list[str]:
    shards = sorted((shared / "fineweb").glob("*.parquet"))
    return [t for p in shards for t in pq.read_table(p, columns=["text"])["text"].to_pylist()]


def digest(texts: list[str]) -> str:
    return hashlib.sha1("\0".join(texts).encode()).hexdigest()


READ = """
import hashlib, itertools, json
data = Data(source="fineweb")
digest = lambda texts: hashlib.sha1("\\0".join(texts).encode()).hexdigest()
"""


def test_every_document_is_streamed_whatever_the_shards_and_faults(hub, all_texts, tmp_path):
    Hub.faults += [("/revision/", 503), (r"001_.*parquet", 503)]
    said, _ = run(
        READ
        + """
print(digest(list(documents(data))))
for count in (3, 6):  # fewer than the four files, and more
    print(digest(sorted(t for i in range(count) for t in documents(data, (i, count)))))
""",
        tmp_path,
        **hub,
    )
    assert said.split() == [digest(all_texts), *2 * [digest(sorted(all_texts))]]
    assert not Hub.faults


def test_position_resumes_exactly_in_the_middle_of_a_shard(hub, all_texts, tmp_path):
    said, _ = run(
        READ
        + """
source = documents(data)
head = list(itertools.islice(source, 777))
state = json.loads(json.dumps(source.state_dict()))
again = documents(data, state=state)
same = again.state_dict() == state
print(digest(head + list(again)), same)
""",
        tmp_path,
        **hub,
    )
    assert said == f"{digest(all_texts)} True"


def test_a_missing_column_or_configuration_is_a_sentence(hub, tmp_path):
    said, _ = run(SENTENCE.format('{"text_field": "body"}'), tmp_path, **hub)
    assert "has no column `body`; set data.text_field" in said and "\n" not in said
    said, _ = run(SENTENCE.format('{"name": "sample-7BT"}'), tmp_path, **hub)
    assert "sample-7BT" in said and "set data.name" in said and "\n" not in said


def test_reading_retries_at_the_same_place_then_says_so(tmp_path, hub, all_texts):
    """A fault that outlives the library's own retries: the iterator raises, ours starts again."""
    said, _ = run(
        READ
        + """
import datasets, lm.data.hub as hub
hub.time.sleep = lambda s: None
original, left = datasets.IterableDataset.iter, [3]
def faulty(self, batch_size):
    for n, batch in enumerate(original(self, batch_size)):
        yield batch
        if n == 250 and left[0]:
            left[0] -= 1
            raise OSError("connection reset")
datasets.IterableDataset.iter = faulty
print(digest(list(documents(data))), left[0])
def dead(self, batch_size):
    raise OSError("connection reset")
    yield
datasets.IterableDataset.iter = dead
try:
    next(documents(data))
except DataError as e:
    print(e)
""",
        tmp_path,
        **hub,
    )
    first, second = said.splitlines()
    assert first == f"{digest(all_texts)} 0"
    assert re.search(r"failed 4 times in a row .*OSError: connection reset", second)


def test_run_on_a_stream_prepares_validation_and_resumes_the_loader(hub, tmp_path):
    said, _ = run(
        """
import itertools, tempfile, torch
from lm.config import build as make
from lm.data.loader import build
from lm.data.prepare import prepare
from lm.data.tokenizer import load_tokenizer
if __name__ == "__main__":
    for workers in (0, 2):
        cfg = make({"out_dir": tempfile.mkdtemp(), "tokenizer": {"vocab_size": 300,
            "train_bytes": 100000}, "data": {"source": "fineweb", "seq_len": 128,
            "val_tokens": 5000, "shuffle_buffer": 300, "workers": workers}})
        tok = load_tokenizer(cfg, cfg.run_dir)
        corpus = prepare(cfg, tok, cfg.run_dir)
        train, val = build(cfg, tok, cfg.run_dir)
        print(corpus.meta.complete, sum(int((b["labels"] != -100).sum()) for b in val))
        list(itertools.islice(train, 25))
        state = train.state_dict()
        expected = list(itertools.islice(train, 60))
        again = build(cfg, tok, cfg.run_dir)[0]
        again.load_state_dict(state)
        print(all(torch.equal(a["labels"], b["labels"]) for a, b in zip(again, expected)))
        del train, again
""",
        tmp_path,
        **hub,
    )
    assert said.split() == ["False", "5000", "True"] * 2
