"""What a stream fetches from the hub, at its start and on resuming; damage there and on the way."""

from __future__ import annotations

import hashlib
import io
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.lm.data.loopback import Hub, corpus_bytes_served, digest, run, serving

SHARDS = """
import itertools, json, sys, time
from lm.data.sources.hub_parquet import _row_groups
data = Data(source="fineweb")
forget = _row_groups.cache_clear  # what a process has read: each reader is one of its own
"""


SLOW = pytest.mark.slow


def made_corpus(files: int = 4, groups: int = 16, rows: int = 1000, **options) -> dict[str, bytes]:
    """Files of groups × rows documents whose text says where each is."""
    rng, made = random.Random(0), {}
    for number in range(files):
        texts = [f"{number} {row} {rng.randbytes(120).hex()}" for row in range(groups * rows)]
        table = pa.table({"id": range(len(texts)), "text": texts})
        sink = io.BytesIO()
        pq.write_table(table, sink, row_group_size=rows, use_dictionary=False, **options)
        made[f"sample/10BT/{number:03d}.parquet"] = sink.getvalue()
    first = made["sample/10BT/000.parquet"]
    return made | {"data/CC-MAIN-2013-20/000_00000.parquet": first}


@pytest.fixture(scope="module")
def large() -> dict[str, bytes]:
    return made_corpus()


def corpus_bytes() -> int:
    return sum(len(data) for name, data in Hub.files.items() if name.startswith("sample/"))


@pytest.mark.parametrize("readers", [8, *(pytest.param(n, marks=SLOW) for n in range(1, 8))])
def test_readers_together_fetch_the_corpus_about_once(hub, tmp_path, readers):
    code = f"""
count = 0
for index in range({readers}):
    forget()
    count += sum(1 for text in HubDocuments(data, (index, {readers})))
print(count)
"""
    said, _ = run(SHARDS + code, tmp_path, **hub)
    assert said == "2400"
    assert 0.9 < corpus_bytes_served() / corpus_bytes() < 1.1


RESUME = """
source = HubDocuments(data)
head = list(itertools.islice(source, 50_000))
print(json.dumps(source.state_dict()))
"""


@pytest.mark.slow
def test_resuming_after_50000_documents_fetches_one_row_group_at_once(large, tmp_path):
    with serving(large) as hub:
        position, _ = run(SHARDS + RESUME, tmp_path, **hub)
        Hub.served.clear()
        code = f"""
state = json.loads({position!r})
began = time.process_time()
print(next(HubDocuments(data, state=state))[:8])
print(time.process_time() - began)
"""
        said, _ = run(SHARDS + code, tmp_path, **hub)
        fetched = corpus_bytes_served()
    text, cpu_seconds = said.splitlines()
    assert text == "3 2000 " + text[-1]  # files of 16,000: document 50,000 is this one
    assert float(cpu_seconds) < 3 and fetched < 2 * corpus_bytes() / 64  # of 64 row groups


def test_a_position_is_of_its_commit(large, tmp_path):
    """The dataset gets another commit, with other files, while a run is stopped."""
    with serving(large) as hub:
        position, _ = run(SHARDS + RESUME, tmp_path, **hub)
        old, Hub.sha = Hub.sha, "b" * 40
        code = f"""
state = json.loads({position!r})
source = HubDocuments(data, state=state)
next(source)
for position in (state, source.state_dict(), HubDocuments(data).state_dict()):
    print(position["revision"])
"""
        said, _ = run(SHARDS + code, tmp_path, **hub)
    assert said.split() == [old, old, "b" * 40]


READ = """
import hashlib
try:
    texts = list(documents(data))
    print(hashlib.sha1("\\0".join(texts).encode()).hexdigest())
except DataError as e:
    print(e)
"""


def flipped(data: bytes, position: int, bit: int = 4) -> bytes:
    return data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :]


def in_text_column(data: bytes, group: int) -> int:
    """A place in the middle of a row group's texts."""
    metadata = pq.read_metadata(io.BytesIO(data)).row_group(group)
    column = metadata.column(metadata.num_columns - 1)
    return column.data_page_offset + column.total_compressed_size // 2


@pytest.mark.parametrize(
    "options, bit",
    [
        pytest.param({"write_page_checksum": True}, 4, marks=SLOW),
        ({}, 128),  # no page checksums: text that is no UTF-8
    ],
)
def test_damage_on_the_hub_is_a_sentence(tmp_path, options, bit):
    files = made_corpus(1, 3, compression="none", **options)
    name = next(iter(files))
    files[name] = flipped(files[name], in_text_column(files[name], 1), bit)
    with serving(files) as hub:
        said, _ = run(SHARDS + READ, tmp_path, **hub)
    assert "000.parquet is damaged in row group 1, column `text`: " in said and "\n" not in said
    assert ("CRC" in said) == bool(options) and "report it to the dataset's owner" in said


@pytest.mark.slow
def test_a_truncated_file_is_a_sentence(tmp_path):
    files = made_corpus(1, 3)
    name = next(iter(files))
    files[name] = files[name][:-100]
    with serving(files) as hub:
        said, _ = run(SHARDS + READ, tmp_path, **hub)
    assert "000.parquet is not a whole parquet file" in said and "\n" not in said


def test_damage_on_the_way_is_fetched_again(tmp_path):
    """A proxy that breaks one answer: the second one is whole."""
    files = made_corpus(1, 3, write_page_checksum=True)
    name = next(iter(files))
    texts = pq.read_table(io.BytesIO(files[name]))["text"].to_pylist()
    with serving(files) as hub:
        Hub.breaks = [in_text_column(files[name], 1)]
        said, _ = run(SHARDS + READ, tmp_path, **hub)
    assert said == digest(texts) and not Hub.breaks


def test_a_download_is_checked_by_the_hubs_sha256(tmp_path):
    """Where neither pages nor text show the damage: on the hub it stays, on the way it passes."""
    files = made_corpus(1, 3, compression="zstd")
    name = next(iter(files))
    texts = pq.read_table(io.BytesIO(files[name]))["text"].to_pylist()
    at = in_text_column(files[name], 1)
    sha256 = hashlib.sha256(files[name]).hexdigest()
    code = SHARDS + f"data.download_dir = {str(tmp_path / 'copies')!r}" + READ
    for on_the_hub in (True, False):
        with serving(files | {name: flipped(files[name], at)} if on_the_hub else files) as hub:
            Hub.sha256 = {name: sha256}
            Hub.breaks = [] if on_the_hub else [at]
            said, _ = run(code, tmp_path, **hub)
        last = said.splitlines()[-1]
        if on_the_hub:
            assert "000.parquet was downloaded twice and is damaged: its sha256 is" in last
            assert not list(tmp_path.rglob("000.parquet"))
        else:
            assert last == digest(texts)
            assert corpus_bytes_served() == 2 * len(files[name])


STREAM = """
from transformers import PreTrainedTokenizerFast
from lm.data.batches.stream import StreamLoader, merge_states
tokenizer = PreTrainedTokenizerFast.from_pretrained({bpe!r})
data.seq_len, data.shuffle_buffer, data.streams, data.workers = 64, 48, 6, 0
def ranks(world_size, seed=0):
    return [StreamLoader(data, tokenizer, 2, seed, r, world_size) for r in range(world_size)]
def take(loaders, count):
    return [next(loaders[i % len(loaders)])["labels"].tolist() for i in range(count)]
"""


@pytest.mark.slow
def test_seeds_and_passes_have_orders_of_their_own(tmp_path, bpe):
    """Of files, row groups and rows; a buffer alone would draw both from the same beginning."""
    bpe.save_pretrained(tmp_path / "bpe")
    code = """
texts = lambda *order: list(HubDocuments(data, order=order or None))
print(json.dumps([texts(), texts(0, 0), texts(0, 0), texts(1, 0), texts(0, 1)]))
found = {}
for seed in (0, 1):
    loader, = ranks(1, seed)
    found[seed] = {tuple(row) for batch in take([loader], 100) for row in batch}
    found[seed] = {row[i : i + 8] for row in found[seed] for i in range(57)}
print(len(found[0] & found[1]) / len(found[0]))
"""
    with serving(made_corpus(3, 4, 100)) as hub:
        said, _ = run(SHARDS + STREAM.format(bpe=str(tmp_path / "bpe")) + code, tmp_path, **hub)
    first, shared = said.splitlines()
    plain, one, again, other, second = json.loads(first)
    assert one == again and len({tuple(texts) for texts in (plain, one, other, second)}) == 4
    assert sorted(plain) == sorted(one) == sorted(other) == sorted(second)
    # A true shuffle shares what 200 of the some 1,100 blocks are, a fifth.
    assert float(shared) < 0.3, shared


def test_a_shuffled_stream_resumes_exactly_on_any_ranks(tmp_path, bpe):
    bpe.save_pretrained(tmp_path / "bpe")
    code = """
whole = ranks(1)
reference = take(whole, 700)
print(max(stream.position['epoch'] for stream in whole[0]._streams.values()))
for before, after, at in ((2, 3, 30), (3, 1, 606)):
    loaders = ranks(before)
    assert take(loaders, at) == reference[:at], (before, at)
    state = merge_states([loader.state_dict() for loader in loaders])
    loaders = ranks(after)
    for loader in loaders:
        loader.load_state_dict(state)
    assert take(loaders, 60) == reference[at : at + 60], (before, after, at)
"""
    with serving(made_corpus(3, 4, 30)) as hub:
        said, _ = run(SHARDS + STREAM.format(bpe=str(tmp_path / "bpe")) + code, tmp_path, **hub)
    assert int(said) >= 1  # into the second pass, which has another order
