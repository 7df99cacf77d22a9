"""Streaming from a stand-in hub on the loopback device: `python -m benchmarks.hub_stream`.

Bytes that 1 to 8 readers fetch together (a process each), what resuming costs, and which share of
single flipped bits is found with and without checksums of pages.
"""

import argparse
import io
import itertools
import random
import tempfile
import warnings
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from lm.config.data import Data
from lm.data.sources.errors import DataError
from lm.data.sources.open import builtin_documents, documents
from tests.lm.data.loopback import Hub, corpus_bytes_served, run, serving

READER = """
texts = documents(Data(source="fineweb"), ({index}, {count}))
print(sum(1 for _ in texts))
"""
HEAD = """
import itertools, json, time
source = documents(Data(source="fineweb"))
for _ in itertools.islice(source, {documents}):
    pass
print(json.dumps(source.state_dict()))
"""
RESUMED = """
import json, time
began = time.perf_counter()
next(documents(Data(source="fineweb"), state=json.loads('{state}')))
print(time.perf_counter() - began)
"""


def texts(count: int) -> list[str]:
    """So many documents of some 1,500 characters of the built-in corpus, each with its number."""
    whole = "\n".join(builtin_documents())
    starts = random.Random(0).choices(range(len(whole) - 1500), k=count)
    return [f"{i}\n{whole[start : start + 1500]}" for i, start in enumerate(starts)]


def parquet(column: list[str], rows: int, **options) -> bytes:
    sink = io.BytesIO()
    pq.write_table(
        pa.table({"text": column}), sink, row_group_size=rows, use_dictionary=False, **options
    )
    return sink.getvalue()


def corpus(files: int, groups: int, rows: int) -> dict[str, bytes]:
    made, column = {}, iter(texts(files * groups * rows))
    for number in range(files):
        own = list(itertools.islice(column, groups * rows))
        made[f"sample/10BT/{number:03d}.parquet"] = parquet(own, rows, compression="zstd")
    return made | {"data/CC/000.parquet": made["sample/10BT/000.parquet"]}


def traffic(hub: dict, home: Path, readers: int, whole: int) -> None:
    for count in range(1, readers + 1):
        Hub.served.clear()
        found = sum(
            int(run(READER.format(index=index, count=count), home, **hub)[0])
            for index in range(count)
        )
        fetched = corpus_bytes_served()
        print(
            f"{count} readers: {found} documents, {fetched / 1e6:.2f} MB, "
            f"{fetched / whole:.3f} times the corpus",
            flush=True,
        )


def resuming(hub: dict, home: Path, after: int, row_group: float) -> None:
    state, _ = run(HEAD.format(documents=after), home, **hub)
    Hub.served.clear()
    seconds, _ = run(RESUMED.format(state=state), home, **hub)
    print(
        f"resumed after {after} documents: the first in {float(seconds):.2f} s, "
        f"{corpus_bytes_served() / row_group:.2f} row groups fetched"
    )


def flips(trials: int, folder: Path) -> None:
    """Random single bits of the text column, read as a local file, which is decoded the same."""
    column, rng, path = texts(200), random.Random(0), folder / "a.parquet"
    for compression, checksums in itertools.product(("none", "snappy", "zstd"), (False, True)):
        whole = parquet(column, 200, compression=compression, write_page_checksum=checksums)
        place = pq.read_metadata(io.BytesIO(whole)).row_group(0).column(0)
        found = used = 0
        for _ in range(trials):
            data = bytearray(whole)
            at = place.data_page_offset + rng.randrange(place.total_compressed_size)
            data[at] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
            try:
                used += list(documents(Data(source="parquet", path=str(path)))) != column
            except DataError:
                found += 1
        print(
            f"one bit flipped, {compression}, page checksums {'yes' if checksums else 'no'}: "
            f"{found} of {trials} found, {used} used as text"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--groups", type=int, default=14, help="row groups of a file")
    parser.add_argument("--rows", type=int, default=1000, help="documents of a row group")
    parser.add_argument("--trials", type=int, default=300, help="bits to flip, one at a time")
    a = parser.parse_args()
    warnings.simplefilter("ignore")
    made = corpus(a.files, a.groups, a.rows)
    whole = sum(len(data) for name, data in made.items() if name.startswith("sample/"))
    print(f"{a.files} files, {a.files * a.groups} row groups, {whole / 1e6:.1f} MB")
    with tempfile.TemporaryDirectory() as home, serving(made) as hub:
        resuming(
            hub,
            Path(home),
            50_000 if a.files * a.groups * a.rows > 50_000 else a.rows + 1,
            whole / a.files / a.groups,
        )
        traffic(hub, Path(home), a.readers, whole)
        flips(a.trials, Path(home))


if __name__ == "__main__":
    main()
