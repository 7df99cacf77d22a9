"""A stand-in for the Hugging Face hub on the loopback device, with faults to order."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

from tests.forked import ForkServer
from tests.running import ENV, ROOT

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
SLOW_TO_IMPORT = (
    "datasets",
    "lm.data.batches.loader",
    "lm.data.corpus.prepare",
    "lm.data.corpus.tokenizer",
    "lm.data.sources.hub_parquet",
)
IMPORTS = """
from lm.config.data import Data
from lm.config.schema import Config
from lm.data.sources.errors import DataError
from lm.data.sources.hub_parquet import HubDocuments
from lm.data.sources.open import documents
"""


def run(code: str, home: Path, **env: str) -> tuple[str, float]:
    """Run code in a process of its own → (output, seconds).

    The process is forked from one that has the address of the stand-in hub, which libraries read
    once; with another environment it is a fresh interpreter.
    """
    start = time.perf_counter()
    code = IMPORTS + code
    if env == environment():
        done = forks().run("-c", [code], timeout=120)
    else:
        env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | env
        env |= {"HF_HOME": str(home), "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip(), time.perf_counter() - start


@functools.cache
def environment() -> dict[str, str]:
    """Start the stand-in hub, once; return the environment of processes that ask it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}


@functools.cache
def forks() -> ForkServer:
    home = tempfile.mkdtemp(prefix="fprnn-hub-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    env = {"HF_HOME": home, "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "0", **environment()}
    return ForkServer(ROOT, ENV | env, SLOW_TO_IMPORT, f"hub-{os.getpid()}")


def corpus_bytes_served() -> int:
    """Bytes of parquet files that the hub has sent."""
    return sum(size for path, size in Hub.served if path.endswith(".parquet"))


def digest(texts: list[str]) -> str:
    return hashlib.sha1("\0".join(texts).encode()).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """What `datasets` asks of the hub for one streamed dataset."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes] = {}  # noqa: RUF012
    faults: list[tuple[str, int]] = []  # noqa: RUF012 (pattern, status) each answered once
    served: list[tuple[str, int]] = []  # noqa: RUF012 (path, bytes) of every answer with a body
    sha256: dict[str, str] = {}  # noqa: RUF012 (of the files that are in LFS)
    breaks: list[int] = []  # noqa: RUF012 (place in a file, sent with a bit flipped once)
    sha = "a" * 40
    is_silent = False  # requests for parquet files get no answer

    def do_GET(self):
        self.answer(body=True)

    def do_HEAD(self):
        self.answer(body=False)

    def answer(self, body: bool):
        path = unquote(self.path.partition("?")[0])
        while Hub.is_silent and path.endswith(".parquet"):
            time.sleep(0.05)
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
                if name in self.sha256:
                    pointer = {"oid": self.sha256[name], "size": len(data), "pointerSize": 134}
                    entry["lfs"] = pointer
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
        first, last = 0, len(data) - 1
        if wanted:
            first, last = int(wanted[1]), min(int(wanted[2] or last), last)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        piece = bytearray(data[first : last + 1])
        for place in [place for place in self.breaks if body and first <= place <= last]:
            self.breaks.remove(place)
            piece[place - first] ^= 4
        self.reply(206 if wanted else 200, bytes(piece), body, headers)

    def json(self, value, body: bool):
        self.reply(200, json.dumps(value).encode(), body, {"Content-Type": "application/json"})

    def reply(self, status: int, data: bytes, body: bool, headers: dict | None = None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in ({"X-Repo-Commit": self.sha} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.served.append((unquote(self.path), len(data)))
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextmanager
def serving(files: dict[str, bytes]):
    """The environment of processes for which the hub has these files."""
    Hub.files = {"README.md": README.encode()} | files
    Hub.faults = []
    Hub.served = []
    Hub.breaks = []
    Hub.sha256 = {}
    Hub.sha = "a" * 40
    Hub.is_silent = False
    yield environment()
    Hub.is_silent = False
