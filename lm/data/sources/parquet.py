"""Reading of text columns of parquet files, with verification."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lm.data.sources.errors import DataError, first_line

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


def read_parquet(path: Path, field: str) -> Iterator[str]:
    """Yield the texts of a column of a local file, row group by row group, without null rows.

    Args:
        field: Name of the column.

    Raises:
        DataError: While iterating, if the file is truncated, damaged, or has no such column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(path)
        check_text_column(path, metadata, field)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a whole parquet file: {first_line(error)}") from None
    for row_group in range(metadata.num_row_groups):
        try:
            texts = read_text_column(path, metadata, row_group, field).to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{path} is damaged in row group {row_group}, column `{field}`: "
                f"{first_line(error)}; fetch or write it again"
            ) from None
        yield from (text for text in texts if text is not None)


def read_text_column(
    source: Path | pa.BufferReader, metadata: pq.FileMetaData, row_group: int, field: str
) -> pa.ChunkedArray:
    """Read the texts of a row group, shape (rows,).

    Page checksums (if the file has them), the UTF-8 encoding and the number of rows are verified.

    Raises:
        ArrowException, OSError: If the column is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(source, metadata=metadata, page_checksum_verification=True) as file:
        column = file.read_row_group(row_group, [field], use_threads=False).column(0)
    column.validate(full=True)  # also checks the UTF-8 encoding
    expected_rows = metadata.row_group(row_group).num_rows
    if len(column) != expected_rows:
        raise pa.ArrowInvalid(f"{len(column)} rows, {expected_rows} according to the footer")
    return column


def check_text_column(source: object, metadata: pq.FileMetaData, field: str) -> None:
    """Check that a file has the column `field`, and that the column holds strings.

    Args:
        source: File or dataset, for the message.

    Raises:
        DataError: If the column is missing or holds something else.
    """
    import pyarrow as pa

    schema = metadata.schema.to_arrow_schema()
    if field not in schema.names:
        raise DataError(
            f"{source} has no column `{field}` (its columns: {', '.join(schema.names)}); "
            "set data.text_field"
        )
    column_type = schema.field(field).type
    is_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    if not any(check(column_type) for check in is_text):
        raise DataError(f"{source}: column `{field}` holds {column_type}, not strings")
