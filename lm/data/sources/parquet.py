"""Parquet files: the column of texts that they must have, and reading it from a local file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lm.data.sources.errors import DataError, first_line

if TYPE_CHECKING:
    import pyarrow as pa


def read_parquet(path: Path, field: str) -> Iterator[str]:
    """The texts of a local file's column `field`, row group by row group; rows that are null are
    left out. Checksums of pages are verified where there are any.

    Raises:
        DataError: while iterating; the file is not whole, damaged, or has no such column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    row_group = None
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            check_text_column(path, file.schema_arrow, field)
            for row_group in range(file.num_row_groups):
                column = file.read_row_group(row_group, columns=[field]).column(0)
                column.validate(full=True)  # that every text is UTF-8, too
                yield from (text for text in column.to_pylist() if text is not None)
    except (pa.ArrowException, OSError) as error:
        if row_group is None:
            raise DataError(f"{path} is not a whole parquet file: {first_line(error)}") from None
        raise DataError(
            f"{path} is damaged in row group {row_group}, column `{field}`: {first_line(error)}; "
            "fetch or write it again"
        ) from None


def check_text_column(where: object, schema: pa.Schema, field: str) -> None:
    """Raises DataError unless the Arrow schema has the column `field`, and it holds strings.

    Args:
        where: the file or dataset that the schema is of, for the message.
    """
    import pyarrow as pa

    if field not in schema.names:
        raise DataError(
            f"{where} has no column `{field}` (its columns: {', '.join(schema.names)}); "
            "set data.text_field"
        )
    kind = schema.field(field).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(f"{where}: column `{field}` holds {kind}, not strings")
