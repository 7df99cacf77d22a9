"""Tests of the bytes that a stream fetches, of resuming, and of damaged files and responses."""

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
from lm.data.sources.hub_parquet import _make_row_groups
data = Data(source="fineweb")
forget = _make_row_groups.cache_clear  # each reader starts without cached footers
"""


SLOW = pytest.mark.slow


def make_corpus(files: int = 4, groups: int = 16, rows: int = 1000, **options) -> dict[str, bytes]:
    """Make files of groups × rows documents, whose text begins with file and row."""
    rng = random.Random(0)
    contents = {}
    for number in range(files):
        texts = [f"{number} {row} {rng.randbytes(120).hex()}" for row in range(groups * rows)]
        table = pa.table({"id": range(len(texts)), "text": texts})
        sink = io.BytesIO()
        pq.write_table(table, sink, row_group_size=rows, use_dictionary=False, **options)
        contents[f"sample/10BT/{number:03d}.parquet"] = sink.getvalue()
    first = contents["sample/10BT/000.parquet"]
    return contents | {"data/CC-MAIN-2013-20/000_00000.parquet": first}


@pytest.fixture(scope="module")
def large() -> dict[str, bytes]:
    return make_corpus()


def corpus_bytes() -> int:
    return sum(len(data) for name, data in Hub.files.items() if name.startswith("sample/"))


@pytest.mark.parametrize("readers", [8, *(pytest.param(n, marks=SLOW) for n in range(1, 8))])
def test_readers_together_fetch_the_corpus_once(hub, tmp_path, readers):
    code = f"""
count = 0
for index in range({readers}):
    forget()
    count += sum(1 for text in HubDocuments(data, (index, {readers})))
print(count)
"""
    output, _ = run(SHARDS + code, tmp_path, **hub)
    assert output == "2400"
    assert 0.9 < corpus_bytes_served() / corpus_bytes() < 1.1


RESUME = """
source = HubDocuments(data)
head = list(itertools.islice(source, 50_000))
print(json.dumps(source.state_dict()))
"""


@pytest.mark.slow
def test_resume_after_50000_documents_fetches_one_row_group(large, tmp_path):
    with serving(large) as hub:
        position, _ = run(SHARDS + RESUME, tmp_path, **hub)
        Hub.served.clear()
        code = f"""
state = json.loads({position!r})
start = time.process_time()
print(next(HubDocuments(data, state=state))[:8])
print(time.process_time() - start)
"""
        output, _ = run(SHARDS + code, tmp_path, **hub)
        fetched = corpus_bytes_served()
    text, cpu_seconds = output.splitlines()
    assert text == "3 2000 " + text[-1]  # document 50,000, in files of 16,000
    assert float(cpu_seconds) < 3 and fetched < 2 * corpus_bytes() / 64  # of 64 row groups


def test_position_keeps_its_commit(large, tmp_path):
    """The dataset gets a new commit while a run is stopped."""
    with serving(large) as hub:
        position, _ = run(SHARDS + RESUME, tmp_path, **hub)
        old, Hub.commit = Hub.commit, "b" * 40
        code = f"""
state = json.loads({position!r})
source = HubDocuments(data, state=state)
next(source)
for position in (state, source.state_dict(), HubDocuments(data).state_dict()):
    print(position["revision"])
"""
        output, _ = run(SHARDS + code, tmp_path, **hub)
    assert output.split() == [old, old, "b" * 40]


READ = """
import hashlib
try:
    texts = list(iter_documents(data))
    print(hashlib.sha1("\\0".join(texts).encode()).hexdigest())
except DataError as e:
    print(e)
"""


def flip_bit(data: bytes, position: int, bit: int = 4) -> bytes:
    return data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :]


def text_column_offset(data: bytes, group: int) -> int:
    """Return the offset of the middle of a row group's text column."""
    metadata = pq.read_metadata(io.BytesIO(data)).row_group(group)
    column = metadata.column(metadata.num_columns - 1)
    return column.data_page_offset + column.total_compressed_size // 2


@pytest.mark.parametrize(
    "options, bit",
    [
        pytest.param({"write_page_checksum": True}, 4, marks=SLOW),
        ({}, 128),  # no page checksums: invalid UTF-8
    ],
)
def test_error_names_a_damaged_row_group(tmp_path, options, bit):
    files = make_corpus(files=1, groups=3, compression="none", **options)
    name = next(iter(files))
    files[name] = flip_bit(files[name], text_column_offset(files[name], 1), bit)
    with serving(files) as hub:
        output, _ = run(SHARDS + READ, tmp_path, **hub)
    assert "000.parquet is damaged in row group 1, column `text`: " in output and "\n" not in output
    assert ("CRC" in output) == bool(options) and "report it to the dataset's owner" in output


@pytest.mark.slow
def test_truncated_file_is_refused(tmp_path):
    files = make_corpus(files=1, groups=3)
    name = next(iter(files))
    files[name] = files[name][:-100]
    with serving(files) as hub:
        output, _ = run(SHARDS + READ, tmp_path, **hub)
    assert "000.parquet is not a whole parquet file" in output and "\n" not in output


def test_damaged_response_is_fetched_again(tmp_path):
    """A proxy damages the first response; the second is whole."""
    files = make_corpus(files=1, groups=3, write_page_checksum=True)
    name = next(iter(files))
    texts = pq.read_table(io.BytesIO(files[name]))["text"].to_pylist()
    with serving(files) as hub:
        Hub.flips = [text_column_offset(files[name], 1)]
        output, _ = run(SHARDS + READ, tmp_path, **hub)
    assert output == digest(texts) and not Hub.flips


def test_download_is_compared_with_the_hubs_sha256(tmp_path):
    """Neither pages nor text show the damage, on the hub or in one response."""
    files = make_corpus(files=1, groups=3, compression="zstd")
    name = next(iter(files))
    texts = pq.read_table(io.BytesIO(files[name]))["text"].to_pylist()
    offset = text_column_offset(files[name], 1)
    sha256 = hashlib.sha256(files[name]).hexdigest()
    code = SHARDS + f"data.download_dir = {str(tmp_path / 'copies')!r}" + READ
    for is_on_hub in (True, False):
        with serving(files | {name: flip_bit(files[name], offset)} if is_on_hub else files) as hub:
            Hub.sha256 = {name: sha256}
            Hub.flips = [] if is_on_hub else [offset]
            output, _ = run(code, tmp_path, **hub)
        last_line = output.splitlines()[-1]
        if is_on_hub:
            assert "000.parquet was downloaded twice and is damaged: its sha256 is" in last_line
            assert not list(tmp_path.rglob("000.parquet"))
        else:
            assert last_line == digest(texts)
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
def test_seeds_and_epochs_have_different_orders(tmp_path, bpe):
    """Files, row groups and rows are shuffled: a buffer would mix only neighbouring documents."""
    bpe.save_pretrained(tmp_path / "bpe")
    code = """
texts = lambda *order: list(HubDocuments(data, order=order or None))
print(json.dumps([texts(), texts(0, 0), texts(0, 0), texts(1, 0), texts(0, 1)]))
blocks = {}
for seed in (0, 1):
    loader, = ranks(1, seed)
    blocks[seed] = {tuple(row) for batch in take([loader], 100) for row in batch}
    blocks[seed] = {row[i : i + 8] for row in blocks[seed] for i in range(57)}
print(len(blocks[0] & blocks[1]) / len(blocks[0]))
"""
    with serving(make_corpus(files=3, groups=4, rows=100)) as hub:
        output, _ = run(SHARDS + STREAM.format(bpe=str(tmp_path / "bpe")) + code, tmp_path, **hub)
    first, shared = output.splitlines()
    orders = json.loads(first)
    assert orders[1] == orders[2] and len({tuple(texts) for texts in orders}) == 4
    assert all(sorted(texts) == sorted(orders[0]) for texts in orders)
    # A true shuffle shares about a fifth: 200 of some 1,100 blocks.
    assert float(shared) < 0.3, shared


def test_shuffled_stream_resumes_on_any_number_of_ranks(tmp_path, bpe):
    bpe.save_pretrained(tmp_path / "bpe")
    code = """
single = ranks(1)
reference = take(single, 700)
print(max(stream.position['epoch'] for stream in single[0]._streams.values()))
for old_size, new_size, count in ((2, 3, 30), (3, 1, 606)):
    loaders = ranks(old_size)
    assert take(loaders, count) == reference[:count], (old_size, count)
    state = merge_states([loader.state_dict() for loader in loaders])
    loaders = ranks(new_size)
    for loader in loaders:
        loader.load_state_dict(state)
    assert take(loaders, 60) == reference[count : count + 60], (old_size, new_size, count)
"""
    with serving(make_corpus(files=3, groups=4, rows=30)) as hub:
        output, _ = run(SHARDS + STREAM.format(bpe=str(tmp_path / "bpe")) + code, tmp_path, **hub)
    assert int(output) >= 1  # into the second epoch, which has another order
