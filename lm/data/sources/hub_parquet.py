"""Documents of parquet files on the hub: sharded, shuffled, resumable, verified."""

from __future__ import annotations

import functools
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

FILES = 0x66696C65  # added to seed and epoch: separates this generator from all others


class HubDocuments:
    """Iterator over the texts of a shard of a hub dataset.

    The row groups of all files are distributed in turn: row group u goes to the shard u % count.
    If there are fewer row groups than shards, k shards share a row group, and each of them reads
    every k-th row. An order (seed, epoch) shuffles the files, the row groups of each file, and the
    rows of each row group, so a shuffled pass fetches no more than a plain one. The order is the
    same for all shards.

    Only the text column is fetched, and after resuming only from the position's row group on. The
    commit is part of the position: a run continues with the old commit of a dataset that has
    changed.

    Args:
        shard: (index, count).
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
            "groups_before": 0,  # row groups of the files before
            "row_group": 0,  # index in the shuffled order of the file
            "row": 0,  # index in the shuffled order of the row group
            "order": None if order is None else list(order),
        } | (state or {})
        self._file_order = self._permutation(len(self._groups.files.paths), FILES)
        # This shard has the row groups u with u % count == index, and in each of them the rows r
        # with r % parts == part.
        index, shards = shard
        self._count = min(shards, self._groups.count_up_to(shards))
        self._index = index % self._count
        self._part = index // self._count
        self._parts = -(-(shards - self._index) // self._count)
        self._texts = self._iterate()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._texts)

    def state_dict(self) -> dict:
        """Return the position of the next document as plain data."""
        return dict(self._position)

    def _permutation(self, count: int, *key: int) -> np.ndarray:
        """Return the numbers below `count` in this order; every key has another permutation."""
        order = self._position["order"]
        if order is None:
            return np.arange(count)
        return np.random.default_rng([*order, *key]).permutation(count)

    def _iterate(self) -> Iterator[str]:
        position = self._position
        while position["file"] < len(self._file_order):
            file = int(self._file_order[position["file"]])
            count = self._groups.count(file)
            row_groups = self._permutation(count, FILES, file)
            while position["row_group"] < count:
                number = position["groups_before"] + position["row_group"]
                if number % self._count == self._index:
                    yield from self._read_row_group(file, int(row_groups[position["row_group"]]))
                position["row_group"] += 1
                position["row"] = 0
            position["file"] += 1
            position["groups_before"] += count
            position["row_group"] = 0

    def _read_row_group(self, file: int, row_group: int) -> Iterator[str]:
        """Yield this shard's texts from the position's row on; fetch nothing if none is left."""
        position = self._position
        first = position["row"] + (self._part - position["row"]) % self._parts
        count = self._groups.rows(file)[row_group]
        places = range(first, count, self._parts)
        if not places:
            return
        column = self._groups.texts(file, row_group)
        rows = self._permutation(count, FILES, file, row_group)
        for place in places:
            position["row"] = place + 1
            text = column[int(rows[place])].as_py()
            if text and text.strip():
                yield text


def open_row_groups(data: Data, revision: str | None = None) -> RowGroups:
    """Open the row groups of the configured dataset, which the streams of a process share.

    Args:
        revision: Commit; None: the newest.
    """
    return _row_groups(
        open_hub(data.dataset, data.dataset_config, revision), data.text_field, data.download_dir
    )


def download_all(data: Data, progress: Callable[[int, int], None]) -> int:
    """Download every file of the dataset that is not in `data.download_dir` yet.

    Args:
        progress: Called with (files there, all files).

    Returns:
        Number of files.

    Raises:
        DataError: If a copy is damaged, the disk is full, or the hub does not answer.
    """
    groups = open_row_groups(data)
    count = len(groups.files.paths)
    for file in range(count):
        groups.count(file)  # reads the footer, which needs the whole copy
        progress(file + 1, count)
    return count


class RowGroups:
    """Row groups of a hub dataset's parquet files; a file's footer is read when it is needed.

    Args:
        field: Name of the text column.
        folder: Folder to which files are downloaded whole and checked; None: read in pieces.
    """

    def __init__(self, files: HubFiles, field: str, folder: str | None = None):
        from huggingface_hub import HfFileSystem

        self.files = files
        self._field = field
        self._folder = folder
        self._hub = HfFileSystem()
        self.rows = functools.cache(self._read_rows)
        # Several streams of a rank may share a row group, which may be large.
        self.texts = functools.lru_cache(maxsize=1)(self._read_texts)
        self._copy = functools.cache(self._download)
        self._footer = functools.lru_cache(maxsize=4)(self._read_footer)

    def count(self, file: int) -> int:
        """Return the number of row groups of a file, which is given by its index."""
        return len(self.rows(file))

    def _read_rows(self, file: int) -> list[int]:
        """Return the number of rows of each row group of a file."""
        footer = self._footer(file)
        return [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]

    def count_up_to(self, limit: int) -> int:
        """Count the row groups of all files; stop reading footers once there are `limit`.

        Raises:
            DataError: If the dataset has no row groups.
        """
        count = 0
        for file in range(len(self.files.paths)):
            if count >= limit:
                break
            count += self.count(file)
        if not count:
            raise DataError(f"{self.files.name} is empty: its files have no rows")
        return count

    def _read_texts(self, file: int, row_group: int) -> pa.Array:
        """Return the texts (rows,) of a row group; fetch them again if they are damaged.

        Raises:
            DataError: If the second copy is damaged too, so that the hub's own file must be.
        """
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
        """Return a buffer with the text column's bytes at their offset in the file.

        pyarrow looks for them there. The memory before them is never touched, so none is used.
        A Python file object that fetches the ranges which pyarrow requests would be simpler, but
        aborts the process in one exit of 80: an Arrow thread may release it while the interpreter
        shuts down.
        """
        import pyarrow as pa

        group = metadata.row_group(row_group)
        names = [group.column(i).path_in_schema for i in range(group.num_columns)]
        column = group.column(names.index(self._field))
        start = column.dictionary_page_offset or column.data_page_offset
        stop = start + column.total_compressed_size
        buffer = pa.allocate_buffer(stop)
        content = self._fetch(file, start, stop)
        np.frombuffer(buffer, np.uint8)[start:] = np.frombuffer(content, np.uint8)
        return pa.BufferReader(buffer)

    def _read_footer(self, file: int) -> pq.FileMetaData:
        """Read the metadata of a file in two requests of the smallest size."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        size = self._info(file)["size"]
        try:
            tail = self._fetch(file, max(0, size - 8), size)
            length = int.from_bytes(tail[:4], "little")
            if len(tail) < 8 or tail[4:] != b"PAR1" or length + 12 > size:
                raise pa.ArrowInvalid("no parquet footer at its end")
            footer = self._fetch(file, size - 8 - length, size)
            metadata = pq.read_metadata(pa.BufferReader(b"PAR1" + footer))
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
        """Return bytes of a file: from its local copy if files are downloaded, else the hub."""
        path = self.files.paths[file]
        if self._folder is not None:
            copy = self._copy(file)
            try:
                with open(copy, "rb") as local:
                    local.seek(start)
                    return local.read(stop - start)
            except OSError as e:
                raise DataError(f"{copy} cannot be read: {e.strerror}") from None

        def attempt() -> bytes:
            content = self._hub.cat_file(path, start=start, end=stop, cache_type="none")
            if len(content) != stop - start:
                raise ConnectionError(f"{len(content)} bytes arrived of {stop - start}")
            return content

        return retry(f"reading bytes {start} to {stop} of {path}", attempt)

    def _download(self, file: int) -> Path:
        """Return the local copy of a file, downloaded if it is missing, and compare its sha256.

        Raises:
            DataError: If two downloads differ from the hub's sha256, or the download fails.
        """
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import disable_progress_bars

        path = self.files.paths[file]
        repository, _, versioned_name = path.removeprefix("hf://datasets/").partition("@")
        commit, _, name = versioned_name.partition("/")
        folder = Path(self._folder or "").expanduser() / f"datasets/{repository}@{commit}"
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
        expected = (info.get("lfs") or {}).get("sha256")
        for _ in range(2):
            copy = Path(retry(f"downloading {path}", download))
            actual = sha256(copy)
            if expected in (None, actual):
                return copy
            copy.unlink()
        raise DataError(
            f"{path} was downloaded twice and is damaged: its sha256 is {actual}, the hub's is "
            f"{expected}; report it to the dataset's owner, or use another data.dataset_config"
        )


_row_groups = functools.lru_cache(maxsize=4)(RowGroups)
