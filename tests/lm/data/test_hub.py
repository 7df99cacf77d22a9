"""FineWeb streaming without a network: a stand-in hub on the loopback device, and its faults."""

from __future__ import annotations

import re

import pyarrow.parquet as pq
import pytest

from lm.data.sources.errors import HubUnreachable
from lm.data.sources.hub import check_hub
from tests.lm.data.loopback import REPO, Hub, digest, run, serving

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
for count in (3, 5, 12, 17):  # fewer than the twelve row groups, as many, and more
    print(digest(sorted(t for i in range(count) for t in HubDocuments(data, (i, count)))))
""",
        tmp_path,
        **hub,
    )
    waiting, *digests = said.splitlines()
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
def test_a_wrong_key_is_a_sentence_at_once(hub, tmp_path, data, sentence):
    said, seconds = run(SENTENCE.format(data), tmp_path, **hub)
    assert re.search(sentence, said) and "\n" not in said and seconds < 20


PATIENCE = """
import time
waited = []
time.sleep = waited.append  # of `datasets` and huggingface_hub as well
try:
    print(digest(list(documents(data))))
except DataError as e:
    print(e)
print(sum(waited))
"""


@pytest.mark.parametrize(
    "place, times", [pytest.param("/revision/", 8, marks=pytest.mark.slow), (r"001_.*parquet", 20)]
)
def test_a_hub_in_trouble_for_minutes_is_waited_for(hub, all_texts, tmp_path, place, times):
    """503 to every request, for longer than what the libraries bear of themselves."""
    Hub.faults += [(place, 503)] * times
    said, _ = run(READ + PATIENCE, tmp_path, **hub)
    *waiting, found, waited = [line for line in said.splitlines() if " thrown " not in line]
    assert found == digest(all_texts) and float(waited) > 25 and not Hub.faults
    assert all(re.match(r"waiting  .*, then attempt \d at .*503 Service", line) for line in waiting)
    assert waiting


@pytest.mark.parametrize(
    "place, what",
    [
        ("/revision/", "opening dataset"),
        pytest.param(r"001_.*parquet", "reading bytes", marks=pytest.mark.slow),
    ],
)
def test_a_hub_in_trouble_for_longer_is_a_sentence(hub, tmp_path, place, what):
    Hub.faults += [(place, 503)] * 1000
    said, _ = run(READ + PATIENCE, tmp_path, **hub)
    *_, sentence, waited = said.splitlines()
    assert re.match(
        rf"{what} .* failed \d+ times in a row, waiting \d+ s in all: .*503.*resume=auto$", sentence
    )
    assert float(waited) > 240


@pytest.mark.parametrize(
    "status", [404, *(pytest.param(status, marks=pytest.mark.slow) for status in (401, 403))]
)
def test_a_hopeless_answer_is_a_sentence_at_once(hub, tmp_path, status):
    Hub.faults += [("/revision/", status)] * 1000
    said, _ = run(READ + PATIENCE, tmp_path, **hub)
    sentence, waited = said.splitlines()
    assert re.match(rf"opening dataset {REPO} \(sample-10BT\) failed: .*{status}", sentence)
    assert ("HF_TOKEN" in sentence) == (status != 404) and float(waited) == 0


@pytest.mark.slow
def test_a_dataset_of_other_files_is_a_sentence(tmp_path):
    files = {f"{folder}/a.jsonl": b'{"text": "x"}\n' for folder in ("sample/10BT", "data/CC")}
    with serving(files) as hub:
        said, _ = run(SENTENCE.format("{}"), tmp_path, **hub)
    assert re.search(r"is not of parquet files \(a\.jsonl is one of 1 files\)", said)


def test_run_on_a_stream_prepares_validation_and_resumes_the_loader(hub, tmp_path):
    said, _ = run(
        """
import itertools, tempfile, torch
from lm.config.load import build as make
from lm.data.batches.loader import build
from lm.data.corpus.prepare import prepare
from lm.data.corpus.tokenizer import load_tokenizer
cfg = make({"out_dir": tempfile.mkdtemp(), "tokenizer": {"vocab_size": 300,
    "train_bytes": 100000}, "data": {"source": "fineweb", "seq_len": 128,
    "val_tokens": 5000, "shuffle_buffer": 300, "workers": 2}})
tok = load_tokenizer(cfg, cfg.run_dir)
corpus = prepare(cfg, tok, cfg.run_dir)
train, held_out = build(cfg, tok, cfg.run_dir)
print(corpus.meta.complete, sum(int((b["labels"] != -100).sum()) for b in held_out[""]))
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
    assert said.split() == ["False", "5000", "True"]


def test_no_network_has_a_status_of_its_own(monkeypatch):
    """69: the launchers try again; damaged data (65) they leave."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(HubUnreachable) as refused:
        check_hub("a dataset")
    assert refused.value.exit_status == 69
