"""Count the flipped bits that reading parquet detects: `python -m benchmarks.flipped_bits`."""

import argparse
import io
import itertools
import random
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from lm.config.data import Data
from lm.data.sources.errors import DataError
from lm.data.sources.open import builtin_documents, iter_documents


def make_texts(count: int) -> list[str]:
    """Return documents of about 1,500 characters of the built-in corpus, each with its number."""
    corpus = "\n".join(builtin_documents())
    starts = random.Random(0).choices(range(len(corpus) - 1500), k=count)
    return [f"{i}\n{corpus[start : start + 1500]}" for i, start in enumerate(starts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=300, help="bits to flip, one at a time")
    trials = parser.parse_args().trials
    texts = make_texts(200)
    rng = random.Random(0)
    path = Path(tempfile.mkdtemp()) / "a.parquet"
    for compression, checksums in itertools.product(("none", "snappy", "zstd"), (False, True)):
        pq.write_table(
            pa.table({"text": texts}),
            path,
            row_group_size=200,
            use_dictionary=False,
            compression=compression,
            write_page_checksum=checksums,
        )
        content = path.read_bytes()
        column = pq.read_metadata(io.BytesIO(content)).row_group(0).column(0)
        detected = changed = 0
        for _ in range(trials):
            data = bytearray(content)
            position = column.data_page_offset + rng.randrange(column.total_compressed_size)
            data[position] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
            try:
                changed += list(iter_documents(Data(source="parquet", path=str(path)))) != texts
            except DataError:
                detected += 1
        print(
            f"{compression}, page checksums {'yes' if checksums else 'no'}: "
            f"{detected} of {trials} detected, {changed} read as changed text"
        )


if __name__ == "__main__":
    main()
