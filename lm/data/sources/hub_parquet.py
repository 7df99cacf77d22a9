"""Documents of parquet files on the hub, row group by row group: dealing, seeking, damage."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lm.common.console import say
from lm.config.data import Data
from lm.data.sources.errors import DataError, first_line
from lm.data.sources.hub import HubFiles, open_hub, patiently
from lm.data.sources.parquet import check_text_column
from lm.model.checksums import sha256

if TYPE_CHECKING:
    import pyarrow as pa

FILES = 0x66696C65  # beside seed and epoch: the generator of the files' order


class HubDocuments:
    """Iterator over the texts of one shard (index, count) of a hub dataset.

    The row groups of all files, in an order, are dealt out like cards: number u of it goes to the
    shard u % count. An order (seed, epoch) is that of a shuffle: of the files, in each file of its
    row groups, and in each of these of its rows, so that no more is read at once than without it.
    It is the same for all shards. Where there are fewer row groups than shards, several shards
    share a row group: with k of them each reads every k-th row. Only the text column is fetched,
    and after resuming only from the position's row group on. The commit is part of the position: a
    dataset that has changed in between is read as it was.

    Args:
        state: of an earlier iterator; its order counts, and `order` is not read. A state with
            nothing but the `revision` is the beginning in that commit.
        order: (seed, epoch); None: as the files and their row groups stand.
    """

    def __init__(
        self,
        data: Data,
        shard: tuple[int, int] = (0, 1),
        state: dict | None = None,
        order: tuple[int, int] | None = None,
    ):
        self._groups = open_groups(data, state["revision"] if state else None)
        self._position = self._start(order) | (state or {})
        self._file_order = self._permutation(len(self._groups.files.paths), FILES)
        # This shard has the row groups u with u % count == index, and of their rows those r with
        # r % parts == part.
        index, shards = shard
        row_groups = self._groups.count_up_to(shards)
        if row_groups >= shards:
            self._index = index
            self._count = shards
            self._part = 0
            self._parts = 1
        else:
            self._index = index % row_groups
            self._count = row_groups
            self._part = index // row_groups
            self._parts = -(-(shards - self._index) // row_groups)
        self._texts = self._iterate()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._texts)

    def state_dict(self) -> dict:
        """Where the next document is: commit, order, and in this order file, row group and row.

        Plain data."""
        return dict(self._position)

    def _start(self, order: tuple[int, int] | None) -> dict:
        revision = self._groups.files.revision
        start = {"revision": revision, "file": 0, "groups_before": 0, "row_group": 0, "row": 0}
        return start | {"order": None if order is None else list(order)}

    def _permutation(self, count: int, *of: int) -> np.ndarray:
        """The numbers below `count` in this order, another one for each `of`."""
        order = self._position["order"]
        if order is None:
            return np.arange(count)
        return np.random.default_rng([*order, *of]).permutation(count)

    def _iterate(self) -> Iterator[str]:
        at = self._position
        while at["file"] < len(self._file_order):
            file = int(self._file_order[at["file"]])
            count = self._groups.count(file)
            row_groups = self._permutation(count, FILES, file)
            while at["row_group"] < count:
                number = at["groups_before"] + at["row_group"]
                if number % self._count == self._index:
                    yield from self._row_group_texts(file, int(row_groups[at["row_group"]]))
                at["row_group"] += 1
                at["row"] = 0
            at["file"] += 1
            at["groups_before"] += count
            at["row_group"] = 0

    def _row_group_texts(self, file: int, row_group: int) -> Iterator[str]:
        """From the position's row on; nothing is fetched where none of this shard is left."""
        at = self._position
        first = at["row"] + (self._part - at["row"]) % self._parts
        count = self._groups.rows(file)[row_group]
        places = range(first, count, self._parts)
        if not places:
            return
        column = self._groups.texts(file, row_group)
        rows = self._permutation(count, FILES, file, row_group)
        for place in places:
            at["row"] = place + 1
            text = column[int(rows[place])].as_py()
            if text and text.strip():
                yield text


def open_groups(data: Data, revision: str | None = None) -> RowGroups:
    """The row groups of the configured dataset, with `data.text_field` as the column; shared by
    the streams of a process."""
    return _row_groups(open_hub(data, revision), data.text_field, data.download_dir)


@functools.lru_cache(maxsize=4)
def _row_groups(files: HubFiles, field: str, folder: str | None) -> RowGroups:
    return RowGroups(files, field, folder)


def download_all(data: Data, progress: Callable[[int, int], None] | None = None) -> int:
    """Downloads every file of the dataset to `data.download_dir`, where it does not lie there.

    Args:
        progress: called with (files there, all files).

    Raises:
        DataError: a copy is damaged, there is no space, or the hub does not answer.
    """
    groups = open_groups(data)
    count = len(groups.files.paths)
    for file in range(count):
        groups.count(file)  # its footer is read from a whole copy
        if progress:
            progress(file + 1, count)
    return count


class RowGroups:
    """The row groups of a hub dataset's parquet files; a file's footer is read when it is needed.

    Args:
        field: the column of texts.
        folder: files are downloaded there whole and checked, instead of read in pieces.
    """

    def __init__(self, files: HubFiles, field: str, folder: str | None = None):
        from huggingface_hub import HfFileSystem

        self.files, self._field, self._folder = files, field, folder
        self._hub = HfFileSystem()
        self.rows = functools.cache(self._read_rows)
        # Several streams of a rank may share a row group, which may be large.
        self.texts = functools.lru_cache(maxsize=1)(self._read_texts)
        self._copy = functools.cache(self._download)
        self._footer = functools.lru_cache(maxsize=4)(self._read_footer)

    def count(self, file: int) -> int:
        """Row groups of a file, given by its number."""
        return len(self.rows(file))

    def _read_rows(self, file: int) -> list[int]:
        """Rows of each row group of a file."""
        footer = self._footer(file)
        return [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]

    def count_up_to(self, enough: int) -> int:
        """Row groups of all files, or at least `enough`: no more footers are read than that takes.

        Raises:
            DataError: there are none.
        """
        found = 0
        for file in range(len(self.files.paths)):
            if found >= enough:
                break
            found += self.count(file)
        if not found:
            raise DataError(f"{self.files.name} is empty: its files have no rows")
        return found

    def _read_texts(self, file: int, row_group: int) -> pa.Array:
        """The text column (rows,) of a row group, from the hub.

        Raises:
            DataError: it is damaged, on the hub itself: two reads in a row could not be decoded.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        metadata = self._footer(file)
        for last in (False, True):
            source = self._column_as_file(file, row_group, metadata)
            try:
                with pq.ParquetFile(
                    source, metadata=metadata, page_checksum_verification=True
                ) as parquet:
                    table = parquet.read_row_group(row_group, [self._field], use_threads=False)
                column = table.column(0)
                column.validate(full=True)  # that every text is UTF-8, too
                if len(column) != metadata.row_group(row_group).num_rows:
                    raise pa.ArrowInvalid(f"{len(column)} rows where the footer says otherwise")
                return column.combine_chunks()
            except (pa.ArrowException, OSError) as error:
                if last:
                    raise DataError(
                        f"{self.files.paths[file]} is damaged in row group {row_group}, column "
                        f"`{self._field}`: {first_line(error)}; report it to the dataset's owner, "
                        "or use another data.dataset_config"
                    ) from None

    def _column_as_file(self, file: int, row_group: int, metadata) -> pa.BufferReader:
        """A buffer that holds the text column's bytes where the file has them, as pyarrow looks
        for them there. The buffer before them is never touched, so it takes no memory.

        A Python file object that fetches what pyarrow asks for would be simpler, but it aborts
        the process in one exit of 80: one of Arrow's threads may release it while the interpreter
        is being shut down.
        """
        import pyarrow as pa

        group = metadata.row_group(row_group)
        names = [group.column(i).path_in_schema for i in range(group.num_columns)]
        column = group.column(names.index(self._field))
        start = column.dictionary_page_offset or column.data_page_offset
        stop = start + column.total_compressed_size
        buffer = pa.allocate_buffer(stop)
        found = self._fetch(file, start, stop)
        np.frombuffer(buffer, np.uint8)[start:] = np.frombuffer(found, np.uint8)
        return pa.BufferReader(buffer)

    def _read_footer(self, file: int):
        """The metadata of a file, in two requests, neither larger than it must be."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path, size = self.files.paths[file], self._about(file)["size"]
        try:
            tail = self._fetch(file, max(0, size - 8), size)
            length = int.from_bytes(tail[:4], "little")
            if len(tail) < 8 or tail[4:] != b"PAR1" or length + 12 > size:
                raise pa.ArrowInvalid("no parquet footer at its end")
            footer = self._fetch(file, size - 8 - length, size)
            metadata = pq.read_metadata(pa.BufferReader(b"PAR1" + footer))
            check_text_column(self.files.name, metadata.schema.to_arrow_schema(), self._field)
        except pa.ArrowException as error:
            raise DataError(f"{path} is not a whole parquet file: {first_line(error)}") from None
        return metadata

    def _about(self, file: int) -> dict:
        """What the hub says of a file: `size`, `lfs` with its sha256, …"""
        path = self.files.paths[file]
        return patiently(f"looking up {path}", lambda: self._hub.info(path))

    def _fetch(self, file: int, start: int, stop: int) -> bytes:
        """Bytes of a file, of its local copy where there is to be one."""
        if self._folder is None:
            return self._fetch_remote(file, start, stop)
        copy = self._copy(file)
        try:
            with open(copy, "rb") as local:
                local.seek(start)
                return local.read(stop - start)
        except OSError as e:
            raise DataError(f"{copy} cannot be read: {e.strerror}") from None

    def _download(self, file: int) -> Path:
        """Return the local copy of a file, downloaded if it is missing, and compare its sha256.

        Raises:
            DataError: If it is not what the hub says, twice, or cannot be downloaded.
        """
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import disable_progress_bars

        path = self.files.paths[file]
        repository, _, rest = path.removeprefix("hf://datasets/").partition("@")
        commit, _, name = rest.partition("/")
        place = Path(self._folder or "").expanduser() / f"datasets/{repository}@{commit}"
        disable_progress_bars()

        def attempt() -> str:
            return hf_hub_download(
                repository, name, repo_type="dataset", revision=commit, local_dir=place
            )

        if not (place / name).is_file():
            say(
                f"data     downloading {path} ({self._about(file)['size'] / 1e6:.0f} MB) to {place}"
            )
        expected = (self._about(file).get("lfs") or {}).get("sha256")
        for _ in range(2):
            copy = Path(patiently(f"downloading {path}", attempt))
            found = sha256(copy)
            if expected in (None, found):
                return copy
            copy.unlink()
        raise DataError(
            f"{path} was downloaded twice and is damaged: its sha256 is {found}, that on the hub "
            f"{expected}; report it to the dataset's owner, or use another data.dataset_config"
        )

    def _fetch_remote(self, file: int, start: int, stop: int) -> bytes:
        path = self.files.paths[file]

        def attempt() -> bytes:
            found = self._hub.cat_file(path, start=start, end=stop, cache_type="none")
            if len(found) != stop - start:
                raise ConnectionError(f"{len(found)} bytes came of {stop - start}")
            return found

        return patiently(f"reading bytes {start} to {stop} of {path}", attempt)
