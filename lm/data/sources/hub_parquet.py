"""Documents of parquet files on the hub: sharded, shuffled, resumable, verified."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lm.common.console import say
from lm.config.data import Data
from lm.data.sources.errors import DataError, first_line
from lm.data.sources.hub import HubFiles, open_hub, retry
from lm.data.sources.parquet import check_text_column, read_text_column
from lm.model.checksums import sha256

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

ORDER_KEY = 0x66696C65  # next to seed and epoch: separates these generators from all others


class HubDocuments:
    """Iterator over the texts of a shard of a hub dataset.

    The row groups of all files are distributed in turn: row group u goes to shard u % count. If
    there are fewer row groups than shards, k shards share a row group, and each of them reads every
    k-th row. An order (seed, epoch) shuffles the files, the row groups of each file, and the rows
    of each row group, so a shuffled pass fetches no more than a plain one. All shards have the same
    order.

    The iterator fetches only the text column. After resuming, it fetches no earlier row group than
    the one at the position. The position includes the commit: a run continues with the old commit
    if the dataset changes.

    Args:
        shard: (index of the shard, number of shards).
        state: State dict of an earlier iterator, whose order replaces `order`. A state with only
            the `revision` is the beginning of that commit.
        order: (seed, epoch); None: the order of the dataset.
    """

    def __init__(
        self,
        data: Data,
        shard: tuple[int, int] = (0, 1),
        state: dict | None = None,
        order: tuple[int, int] | None = None,
    ):
        self._groups = open_row_groups(data, state["revision"] if state else None)
        self._position = {
            "revision": self._groups.files.revision,
            "file": 0,  # index in the shuffled order
            "groups_before": 0,  # number of row groups in the files before it
            "row_group": 0,  # index in the shuffled order of the file
            "row": 0,  # index in the shuffled order of the row group
            "order": None if order is None else list(order),
        } | (state or {})
        self._file_order = self._permutation(len(self._groups.files.paths), ORDER_KEY)
        # This shard reads the row groups u with u % group_stride == first_group, and in each of
        # them the rows r with r % row_stride == first_row.
        shard_index, shard_count = shard
        group_count = self._groups.count_up_to(shard_count)  # exact if there are fewer than shards
        self._group_stride = min(shard_count, group_count)
        self._first_group = shard_index % self._group_stride
        self._first_row = shard_index // self._group_stride
        # Shards with the same index modulo group_stride read the same row groups.
        sharing_shards = math.ceil((shard_count - self._first_group) / self._group_stride)
        self._row_stride = sharing_shards
        self._texts = self._iterate()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._texts)

    def state_dict(self) -> dict:
        """Return the position of the next document as plain data."""
        return dict(self._position)

    def _permutation(self, count: int, *key: int) -> np.ndarray:
        """Return a permutation of 0 to count - 1, which depends on the order and the key."""
        order = self._position["order"]
        if order is None:
            return np.arange(count)
        return np.random.default_rng([*order, *key]).permutation(count)

    def _iterate(self) -> Iterator[str]:
        """Yield this shard's texts from the position on, and advance the position."""
        position = self._position
        while position["file"] < len(self._file_order):
            file = int(self._file_order[position["file"]])
            count = self._groups.count_row_groups(file)
            row_groups = self._permutation(count, ORDER_KEY, file)
            while position["row_group"] < count:
                group_number = position["groups_before"] + position["row_group"]
                if group_number % self._group_stride == self._first_group:
                    yield from self._read_row_group(file, int(row_groups[position["row_group"]]))
                position["row_group"] += 1
                position["row"] = 0
            position["file"] += 1
            position["groups_before"] += count
            position["row_group"] = 0

    def _read_row_group(self, file: int, row_group: int) -> Iterator[str]:
        """Yield this shard's texts from the position's row on; fetch nothing if it has none."""
        position = self._position
        # The first index from the position on that belongs to this shard.
        start = position["row"] + (self._first_row - position["row"]) % self._row_stride
        count = self._groups.row_counts(file)[row_group]
        indices = range(start, count, self._row_stride)  # in the shuffled order of the row group
        if not indices:
            return
        column = self._groups.texts(file, row_group)
        rows = self._permutation(count, ORDER_KEY, file, row_group)
        for index in indices:
            position["row"] = index + 1
            text = column[int(rows[index])].as_py()
            if text and text.strip():
                yield text


def open_row_groups(data: Data, revision: str | None = None) -> RowGroups:
    """Open the row groups of the configured dataset; the streams of a process share them.

    Args:
        revision: Commit hash; None: the newest commit.
    """
    return _make_row_groups(
        open_hub(data.dataset, data.dataset_config, revision), data.text_field, data.download_dir
    )


@functools.lru_cache(maxsize=4)
def _make_row_groups(files: HubFiles, field: str, folder: str | None) -> RowGroups:
    return RowGroups(files, field, folder)


def download_all(data: Data, progress: Callable[[int, int], None]) -> int:
    """Download every file of the dataset that is not in `data.download_dir` yet.

    Args:
        progress: Called with the number of files downloaded so far, and of all files.

    Returns:
        Number of files.

    Raises:
        DataError: If a copy is damaged, the disk is full, or the hub does not answer.
    """
    groups = open_row_groups(data)
    count = len(groups.files.paths)
    for file in range(count):
        groups.count_row_groups(file)  # reads the footer, for which the file is downloaded
        progress(file + 1, count)
    return count


class RowGroups:
    """Row groups of the parquet files of a hub dataset; footers are read when they are needed.

    Methods have the index of a file as argument `file`.

    Args:
        field: Name of the text column.
        folder: Folder to which whole files are downloaded and verified; None: fetch only the bytes
            that are needed.
    """

    def __init__(self, files: HubFiles, field: str, folder: str | None = None):
        from huggingface_hub import HfFileSystem

        self.files = files
        self._field = field
        self._folder = folder
        self._hub = HfFileSystem()
        self.row_counts = functools.cache(self._read_row_counts)
        # Several streams of a rank may share a row group, which may be large.
        self.texts = functools.lru_cache(maxsize=1)(self._read_texts)
        self._copy = functools.cache(self._download)
        self._footer = functools.lru_cache(maxsize=4)(self._read_footer)

    def count_row_groups(self, file: int) -> int:
        """Return the number of row groups of a file."""
        return len(self.row_counts(file))

    def _read_row_counts(self, file: int) -> list[int]:
        """Return the number of rows of each row group of a file."""
        footer = self._footer(file)
        return [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]

    def count_up_to(self, limit: int) -> int:
        """Count the row groups of all files; stop reading footers after `limit` row groups.

        Raises:
            DataError: If the dataset has no row groups.
        """
        count = 0
        for file in range(len(self.files.paths)):
            if count >= limit:
                break
            count += self.count_row_groups(file)
        if not count:
            raise DataError(f"{self.files.name} is empty: its files have no rows")
        return count

    def _read_texts(self, file: int, row_group: int) -> pa.Array:
        """Return the texts of a row group, shape (rows,); fetch damaged texts a second time."""
        import pyarrow as pa

        metadata = self._footer(file)
        for is_last in (False, True):
            source = self._fetch_column(file, row_group, metadata)
            try:
                texts = read_text_column(source, metadata, row_group, self._field)
                return texts.combine_chunks()
            except (pa.ArrowException, OSError) as error:
                if is_last:
                    raise DataError(
                        f"{self.files.paths[file]} is damaged in row group {row_group}, column "
                        f"`{self._field}`: {first_line(error)}; report it to the dataset's owner, "
                        "or use another data.dataset_config"
                    ) from None

    def _fetch_column(
        self, file: int, row_group: int, metadata: pq.FileMetaData
    ) -> pa.BufferReader:
        """Return a buffer with the bytes of the text column at their offset in the file.

        pyarrow reads them at this offset. The memory before it is never touched, so the system does
        not allocate it. A Python file object that fetches the ranges requested by pyarrow would be
        simpler, but aborts the process in one of 80 exits: an Arrow thread may release it while the
        interpreter shuts down.
        """
        import pyarrow as pa

        group = metadata.row_group(row_group)
        names = [group.column(i).path_in_schema for i in range(group.num_columns)]
        column = group.column(names.index(self._field))
        # The dictionary, if the column has one, precedes its data.
        start = column.dictionary_page_offset or column.data_page_offset
        stop = start + column.total_compressed_size
        buffer = pa.allocate_buffer(stop)
        content = self._fetch(file, start, stop)
        np.frombuffer(buffer, np.uint8)[start:] = np.frombuffer(content, np.uint8)
        return pa.BufferReader(buffer)

    def _read_footer(self, file: int) -> pq.FileMetaData:
        """Read the metadata of a file in two small requests: its last 8 bytes, then the footer."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        size = self._info(file)["size"]
        try:
            tail = self._fetch(file, max(0, size - 8), size)
            length = int.from_bytes(tail[:4], "little")
            # A file is b"PAR1", columns, footer, 4 bytes with the footer's length, b"PAR1".
            if len(tail) < 8 or tail[4:] != b"PAR1" or length + 12 > size:
                raise pa.ArrowInvalid("no parquet footer at its end")
            footer = self._fetch(file, size - 8 - length, size)  # with the last 8 bytes
            file_without_columns = b"PAR1" + footer
            metadata = pq.read_metadata(pa.BufferReader(file_without_columns))
            check_text_column(self.files.name, metadata, self._field)
        except pa.ArrowException as error:
            raise DataError(
                f"{self.files.paths[file]} is not a whole parquet file: {first_line(error)}"
            ) from None
        return metadata

    def _info(self, file: int) -> dict:
        """Return the hub's entry for a file: `size`, `lfs` with its sha256, and so on."""
        path = self.files.paths[file]
        return retry(f"looking up {path}", lambda: self._hub.info(path))

    def _fetch(self, file: int, start: int, stop: int) -> bytes:
        """Return bytes of a file: from its local copy if files are downloaded, or from the hub."""
        path = self.files.paths[file]
        if self._folder is not None:
            copy = self._copy(file)
            try:
                with open(copy, "rb") as local_file:
                    local_file.seek(start)
                    return local_file.read(stop - start)
            except OSError as e:
                raise DataError(f"{copy} cannot be read: {e.strerror}") from None

        def attempt() -> bytes:
            content = self._hub.cat_file(path, start=start, end=stop, cache_type="none")
            if len(content) != stop - start:
                raise ConnectionError(f"{len(content)} bytes arrived of {stop - start}")
            return content

        return retry(f"reading bytes {start} to {stop} of {path}", attempt)

    def _download(self, file: int) -> Path:
        """Return the verified local copy of a file; download it if it is missing."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import disable_progress_bars

        path = self.files.paths[file]
        repository, _, versioned_name = path.removeprefix("hf://datasets/").partition("@")
        commit, _, name = versioned_name.partition("/")
        assert self._folder is not None  # otherwise nothing is downloaded
        folder = Path(self._folder).expanduser() / f"datasets/{repository}@{commit}"
        disable_progress_bars()
        download = functools.partial(
            hf_hub_download,
            repository,
            name,
            repo_type="dataset",
            revision=commit,
            local_dir=folder,
        )
        info = self._info(file)
        if not (folder / name).is_file():
            say(f"data     downloading {path} ({info['size'] / 1e6:.0f} MB) to {folder}")
        expected_sha256 = (info.get("lfs") or {}).get("sha256")
        for _ in range(2):
            copy = Path(retry(f"downloading {path}", download))
            actual_sha256 = sha256(copy)
            if expected_sha256 in (None, actual_sha256):
                return copy
            copy.unlink()
        raise DataError(
            f"{path} was downloaded twice and is damaged: its sha256 is {actual_sha256}, the hub's"
            f" is {expected_sha256}; report it to the dataset's owner, or use another"
            " data.dataset_config"
        )
