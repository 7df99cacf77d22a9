"""Fixtures of the data tests: a small corpus, its tokenizer, the shared real data, a hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lm.config.load import build as build_config
from lm.config.schema import Config
from lm.data.corpus.tokenizer import train_bpe
from tests.lm.data.loopback import serving

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"


@pytest.fixture(scope="session")
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip("needs the real data in ../shared")
    return SHARED


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """200 different short documents."""
    words = ["state", "space", "models", "track", "what", "transformers", "cannot", "of", "a"]
    return [
        " ".join(words[(i * j) % 9] for j in range(3 + i % 40)) + f" number {i}.\n"
        for i in range(200)
    ]


@pytest.fixture(scope="session")
def jsonl(texts, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    return path


@pytest.fixture
def cfg(jsonl, tmp_path) -> Config:
    return build_config(
        {
            "out_dir": str(tmp_path),
            "data": {
                "source": "jsonl",
                "path": str(jsonl),
                "seq_len": 16,
                "val_fraction": 0.2,
                "cache_dir": None,
            },
            "tokenizer": {"vocab_size": 320},
            "train": {"micro_batch_size": 3},
        }
    )


@pytest.fixture(scope="session")
def bpe(jsonl):
    tree = {
        "data": {"source": "jsonl", "path": str(jsonl), "val_fraction": 0.2},
        "tokenizer": {"vocab_size": 320},
    }
    return train_bpe(build_config(tree))


@pytest.fixture
def hub(shared):
    """Environment in which the local hub has FineWeb's four shared files as `sample-10BT`."""
    shards = sorted((shared / "fineweb").glob("*.parquet"))
    files = {"data/CC-MAIN-2013-20/000_00000.parquet": shards[0].read_bytes()}
    files |= {f"sample/10BT/{path.name}": path.read_bytes() for path in shards}
    with serving(files) as environment:
        yield environment
