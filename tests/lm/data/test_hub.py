"""FineWeb streaming without a network: a stand-in hub on the loopback device, and its faults."""

from __future__ import annotations

import re

import pyarrow.parquet as pq
import pytest

from tests.lm.data.loopback import REPO, Hub, digest, run

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


@pytest.fixture
def all_texts(shared) -> list[str]:
    shards = sorted((shared / "fineweb").glob("*.parquet"))
    return [t for p in shards for t in pq.read_table(p, columns=["text"])["text"].to_pylist()]


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
