"""Local HTTP server that replaces the Hugging Face hub, with configurable faults."""

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
from lm.data.sources.open import iter_documents
"""


def run(code: str, home: Path, **env: str) -> tuple[str, float]:
    """Run code in a process; return its output and the seconds that it took.

    With the environment of the local hub the process is forked from a server that has imported the
    libraries, which read the hub's address at import. Otherwise it is a fresh interpreter.
    """
    start = time.perf_counter()
    code = IMPORTS + code
    if env == start_hub():
        process = start_fork_server().run("-c", [code], timeout=120)
    else:
        env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | env
        env |= {"HF_HOME": str(home), "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code]
        process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout.strip(), time.perf_counter() - start


@functools.cache
def start_hub() -> dict[str, str]:
    """Start the local hub once; return the environment of processes that use it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}


@functools.cache
def start_fork_server() -> ForkServer:
    """Start once the server whose forks use the local hub."""
    home = tempfile.mkdtemp(prefix="fprnn-hub-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    env = {"HF_HOME": home, "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "0", **start_hub()}
    return ForkServer(ROOT, ENV | env, SLOW_TO_IMPORT, f"hub-{os.getpid()}")


def corpus_bytes_served() -> int:
    """Return the bytes of parquet files that the hub has sent."""
    return sum(size for path, size in Hub.served if path.endswith(".parquet"))


def digest(texts: list[str]) -> str:
    return hashlib.sha1("\0".join(texts).encode()).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """Handler of the requests that `datasets` sends to stream one dataset."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes] = {}  # noqa: RUF012
    faults: list[tuple[str, int]] = []  # noqa: RUF012 (pattern of a path, status), each used once
    served: list[tuple[str, int]] = []  # noqa: RUF012 (path, bytes) of every response with a body
    sha256: dict[str, str] = {}  # noqa: RUF012 {name of a file in LFS: sha256}
    flips: list[int] = []  # noqa: RUF012 (offsets in files; a bit of each byte is flipped once)
    commit = "a" * 40
    is_silent = False  # if True, requests for parquet files get no response

    def do_GET(self):
        self.answer(has_body=True)

    def do_HEAD(self):
        self.answer(has_body=False)

    def answer(self, has_body: bool):
        path = unquote(self.path.partition("?")[0])
        while Hub.is_silent and path.endswith(".parquet"):
            time.sleep(0.05)
        for fault in self.faults:
            pattern, status = fault
            if re.search(pattern, path):
                self.faults.remove(fault)
                return self.reply(status, b"", has_body)
        if match := re.fullmatch(rf"/datasets/{REPO}/resolve/[^/]+/(.*)", path):
            if match[1] not in self.files:
                return self.reply(404, b"", has_body, {"X-Error-Code": "EntryNotFound"})
            return self.reply_file(self.files[match[1]], has_body)
        if match := re.fullmatch(rf"/api/datasets/{REPO}/tree/[^/]+/?(.*)", path):
            entries = self.list_tree(match[1], recursive="recursive=true" in self.path.lower())
            if not entries:
                return self.reply(404, b"{}", has_body, {"X-Error-Code": "EntryNotFound"})
            return self.reply_json(entries, has_body)
        if re.fullmatch(rf"/api/datasets/{REPO}/paths-info/.*", path):
            length = int(self.headers.get("Content-Length") or 0)
            return self.reply_json([], has_body) if not length else self.reply(404, b"{}", has_body)
        if path.startswith(f"/api/datasets/{REPO}"):
            siblings = [{"rfilename": name} for name in self.files]
            info = {
                "id": REPO,
                "sha": self.commit,
                "private": False,
                "siblings": siblings,
                "tags": [],
            }
            return self.reply_json(info | {"downloads": 0, "likes": 0}, has_body)
        self.reply(200 if path == "/" else 404, b"", has_body)

    def list_tree(self, folder: str, recursive: bool) -> list[dict]:
        """Return the entries of a folder in the form of the hub's API."""
        prefix = folder + "/" if folder else ""
        folders = set()
        files = []
        for name in (n for n in self.files if n.startswith(prefix)):
            data = self.files[name]
            parts = name.removeprefix(prefix).split("/")
            folders |= {prefix + "/".join(parts[:i]) for i in range(1, len(parts))}
            if recursive or len(parts) == 1:
                entry = {"type": "file", "path": name, "size": len(data), "oid": self.etag(data)}
                if name in self.sha256:
                    pointer = {"oid": self.sha256[name], "size": len(data), "pointerSize": 134}
                    entry["lfs"] = pointer
                files.append(entry)
        depth = prefix.count("/")
        paths = sorted(path for path in folders if recursive or path.count("/") == depth)
        return [{"type": "directory", "path": path, "oid": "b" * 40} for path in paths] + files

    @staticmethod
    def etag(data: bytes) -> str:
        return hashlib.sha1(data).hexdigest()

    def reply_file(self, data: bytes, has_body: bool):
        headers = {"ETag": f'"{self.etag(data)}"', "Accept-Ranges": "bytes"}
        byte_range = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        first, last = 0, len(data) - 1
        if byte_range:
            first, last = int(byte_range[1]), min(int(byte_range[2] or last), last)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        content = bytearray(data[first : last + 1])
        for offset in [flip for flip in self.flips if has_body and first <= flip <= last]:
            self.flips.remove(offset)
            content[offset - first] ^= 4
        self.reply(206 if byte_range else 200, bytes(content), has_body, headers)

    def reply_json(self, value, has_body: bool):
        self.reply(200, json.dumps(value).encode(), has_body, {"Content-Type": "application/json"})

    def reply(self, status: int, data: bytes, has_body: bool, headers: dict | None = None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in ({"X-Repo-Commit": self.commit} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.served.append((unquote(self.path), len(data)))
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextmanager
def serving(files: dict[str, bytes]):
    """Give the hub these files; yield the environment of processes that use it."""
    Hub.files = {"README.md": README.encode()} | files
    Hub.faults = []
    Hub.served = []
    Hub.flips = []
    Hub.sha256 = {}
    Hub.commit = "a" * 40
    Hub.is_silent = False
    yield start_hub()
    Hub.is_silent = False
