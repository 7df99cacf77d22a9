"""Count the flipped bits in parquet files that reading detects: `-m benchmarks.flipped_bits`."""

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

DOCUMENTS, CHARACTERS = 200, 1500  # of the file; of a document


def make_texts() -> list[str]:
    """Return parts of the built-in corpus, each after its number, so that all are different."""
    corpus = "\n".join(builtin_documents())
    starts = random.Random(0).choices(range(len(corpus) - CHARACTERS), k=DOCUMENTS)
    return [f"{i}\n{corpus[start : start + CHARACTERS]}" for i, start in enumerate(starts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=300, help="bits to flip, one at a time")
    trials = parser.parse_args().trials
    texts = make_texts()
    rng = random.Random(0)
    path = Path(tempfile.mkdtemp()) / "a.parquet"
    for compression, checksums in itertools.product(("none", "snappy", "zstd"), (False, True)):
        pq.write_table(
            pa.table({"text": texts}),
            path,
            row_group_size=DOCUMENTS,  # a single group
            use_dictionary=False,
            compression=compression,
            write_page_checksum=checksums,
        )
        content = path.read_bytes()
        column = pq.read_metadata(io.BytesIO(content)).row_group(0).column(0)
        detected_count = changed_count = 0
        for _ in range(trials):
            data = bytearray(content)
            position = column.data_page_offset + rng.randrange(column.total_compressed_size)
            data[position] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
            try:
                if list(iter_documents(Data(source="parquet", path=str(path)))) != texts:
                    changed_count += 1
            except DataError:
                detected_count += 1
        print(
            f"{compression}, page checksums {'yes' if checksums else 'no'}: "
            f"{detected_count} of {trials} detected, {changed_count} read as changed text"
        )


if __name__ == "__main__":
    main()
