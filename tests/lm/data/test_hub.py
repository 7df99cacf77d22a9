"""Tests of FineWeb streaming with a local hub and its faults."""

from __future__ import annotations

import re

import pyarrow.parquet as pq
import pytest

from lm.data.sources.errors import HubUnreachable
from lm.data.sources.hub import check_hub
from tests.lm.data.loopback import REPO, Hub, digest, run, serving

PRINT_ERROR = """
try:
    next(iter_documents(Data(source="fineweb", **{}))); print("no error")
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
def test_offline_error_comes_quickly(env, reason, tmp_path):
    output, seconds = run(PRINT_ERROR.format("{}"), tmp_path, **env)
    assert f"dataset {REPO} (sample-10BT) is on the Hugging Face hub" in output and reason in output
    assert output.endswith("`data.source: builtin`, `parquet`, `jsonl` and `text` work offline")
    assert "\n" not in output and seconds < 20


@pytest.fixture
def all_texts(shared) -> list[str]:
    shards = sorted((shared / "fineweb").glob("*.parquet"))
    return [t for p in shards for t in pq.read_table(p, columns=["text"])["text"].to_pylist()]


READ = """
import hashlib, itertools, json
data = Data(source="fineweb")
digest = lambda texts: hashlib.sha1("\\0".join(texts).encode()).hexdigest()
"""


def test_shards_stream_every_document_despite_faults(hub, all_texts, tmp_path):
    Hub.faults += [("/revision/", 503), (r"001_.*parquet", 503)]
    output, _ = run(
        READ
        + """
print(digest(list(iter_documents(data))))
for count in (3, 5, 12, 17):  # fewer than the twelve row groups, as many, and more
    print(digest(sorted(t for i in range(count) for t in HubDocuments(data, (i, count)))))
""",
        tmp_path,
        **hub,
    )
    waiting, *digests = output.splitlines()
    assert re.match(r"waiting  [\d.]+ s for the Hugging Face hub, .* attempt 2 at opening", waiting)
    assert digests == [digest(all_texts), *4 * [digest(sorted(all_texts))]]
    assert not Hub.faults


@pytest.mark.parametrize(
    "data, sentence",
    [
        ({"text_field": "body"}, r"has no column `body` \(its columns: text, id, "),
        ({"dataset_config": "sample-7BT"}, r"sample-7BT.*set data\.dataset_config"),
        ({"dataset": "no/such"}, r"^opening dataset no/such .* failed: .*; set data\.dataset$"),
    ],
)
def test_wrong_setting_is_an_error_at_once(hub, tmp_path, data, sentence):
    output, seconds = run(PRINT_ERROR.format(data), tmp_path, **hub)
    assert re.search(sentence, output) and "\n" not in output and seconds < 20


PATIENCE = """
import time
waited = []
time.sleep = waited.append  # also for `datasets` and huggingface_hub
try:
    print(digest(list(iter_documents(data))))
except DataError as e:
    print(e)
print(sum(waited))
"""


@pytest.mark.parametrize(
    "path_pattern, count",
    [pytest.param("/revision/", 8, marks=pytest.mark.slow), (r"001_.*parquet", 20)],
)
def test_requests_are_retried_for_minutes(hub, all_texts, tmp_path, path_pattern, count):
    """The hub answers 503 for longer than the libraries retry."""
    Hub.faults += [(path_pattern, 503)] * count
    output, _ = run(READ + PATIENCE, tmp_path, **hub)
    lines = [line for line in output.splitlines() if " thrown " not in line]
    *waiting, texts_digest, waited = lines
    assert texts_digest == digest(all_texts) and float(waited) > 25 and not Hub.faults
    assert all(re.match(r"waiting  .*, then attempt \d at .*503 Service", line) for line in waiting)
    assert waiting


@pytest.mark.parametrize(
    "path_pattern, action",
    [
        ("/revision/", "opening dataset"),
        pytest.param(r"001_.*parquet", "reading bytes", marks=pytest.mark.slow),
    ],
)
def test_retries_end_with_an_error(hub, tmp_path, path_pattern, action):
    Hub.faults += [(path_pattern, 503)] * 1000
    output, _ = run(READ + PATIENCE, tmp_path, **hub)
    *_, sentence, waited = output.splitlines()
    assert re.match(
        rf"{action} .* failed \d+ times in a row, waiting \d+ s in all: .*503.*resume=auto$",
        sentence,
    )
    assert float(waited) > 240


@pytest.mark.parametrize(
    "status", [404, *(pytest.param(status, marks=pytest.mark.slow) for status in (401, 403))]
)
def test_permanent_status_is_an_error_at_once(hub, tmp_path, status):
    Hub.faults += [("/revision/", status)] * 1000
    output, _ = run(READ + PATIENCE, tmp_path, **hub)
    sentence, waited = output.splitlines()
    assert re.match(rf"opening dataset {REPO} \(sample-10BT\) failed: .*{status}", sentence)
    assert ("HF_TOKEN" in sentence) == (status != 404) and float(waited) == 0


@pytest.mark.slow
def test_dataset_without_parquet_files_is_refused(tmp_path):
    files = {f"{folder}/a.jsonl": b'{"text": "x"}\n' for folder in ("sample/10BT", "data/CC")}
    with serving(files) as hub:
        output, _ = run(PRINT_ERROR.format("{}"), tmp_path, **hub)
    assert re.search(r"does not consist of parquet files \(a\.jsonl is one of 1 files\)", output)


def test_stream_prepares_validation_and_resumes(hub, tmp_path):
    output, _ = run(
        """
import itertools, tempfile, torch
from lm.config.load import build as build_config
from lm.data.batches.loader import build
from lm.data.corpus.prepare import prepare
from lm.data.corpus.tokenizer import load_tokenizer
cfg = build_config({"out_dir": tempfile.mkdtemp(), "tokenizer": {"vocab_size": 300,
    "train_bytes": 20000}, "data": {"source": "fineweb", "seq_len": 128,
    "val_tokens": 1000, "shuffle_buffer": 300, "workers": 2}})
tokenizer = load_tokenizer(cfg, cfg.run_dir)
corpus = prepare(cfg, tokenizer, cfg.run_dir)
train, validation = build(cfg, tokenizer, cfg.run_dir)
print(corpus.meta.complete, sum(int((b["labels"] != -100).sum()) for b in validation[""]))
list(itertools.islice(train, 25))
state = train.state_dict()
expected = list(itertools.islice(train, 60))
resumed, _ = build(cfg, tokenizer, cfg.run_dir)
resumed.load_state_dict(state)
print(all(torch.equal(a["labels"], b["labels"]) for a, b in zip(resumed, expected)))
del train, resumed
""",
        tmp_path,
        **hub,
    )
    assert output.split() == ["False", "1000", "True"]


def test_unreachable_hub_has_exit_status_69(monkeypatch):
    """The launchers start again after 69, but not after 65 (damaged data)."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(HubUnreachable) as error:
        check_hub("a dataset")
    assert error.value.exit_status == 69
