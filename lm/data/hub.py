"""FineWeb, or another dataset of the Hugging Face hub, streamed: opening, retrying, positions."""

from __future__ import annotations

import time
from collections.abc import Iterator

from lm.config import Data
from lm.data.sources import DataError, first_line

ATTEMPTS = 4  # at opening, and at reading on from one place
OFFLINE_HINT = "`data.source: builtin`, `parquet`, `jsonl` and `text` work offline"


class HubDocuments:
    """Iterator over a streamed hub dataset; faults are retried from the last good position.

    Shards are whole files when there are enough of them, else every count-th example.
    """

    def __init__(self, data: Data, shard: tuple[int, int] = (0, 1), state: dict | None = None):
        self._data = data
        self._dataset = _shard(_open_hub(data), *shard)
        self._resume_from = state
        if state:
            self._dataset.load_state_dict(state)
        self._texts = self._iterate()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._texts)

    def state_dict(self) -> dict | None:
        """The dataset's own position, plain data; None before the first document."""
        return self._resume_from if self._resume_from else self._dataset.state_dict()

    def _iterate(self) -> Iterator[str]:
        failures, started = 0, False
        while True:
            try:
                # `iter`, not `__iter__`: the latter would split once more over torch's workers.
                for batch in self._dataset.iter(batch_size=1):
                    failures, started, self._resume_from = 0, True, None
                    (text,) = batch[self._data.text_field]
                    if text and text.strip():
                        yield text
                return
            except Exception as error:
                _raise_if_hopeless(self._data, error)
                failures += 1
                if failures == ATTEMPTS:
                    raise DataError(
                        f"reading {_hub_name(self._data)} failed {failures} times in a row at the "
                        f"same place: {first_line(error)}"
                    ) from None
                time.sleep(2 ** (failures - 1))
                if started or self._resume_from:
                    self._dataset.load_state_dict(self.state_dict())


def _hub_name(data: Data) -> str:
    return f"dataset {data.dataset} ({data.name})"


def check_hub(what: str) -> None:
    """Raises DataError, within seconds, when the Hugging Face hub cannot be reached for `what`."""
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise DataError(
            f"{what} is on the Hugging Face hub, but HF_HUB_OFFLINE forbids going there"
        )
    for last in (False, True):
        try:
            httpx.get(constants.ENDPOINT, timeout=8)  # any answer will do
            return
        except httpx.HTTPError as error:
            if last:
                raise DataError(
                    f"{what} is on the Hugging Face hub, but {constants.ENDPOINT} cannot be "
                    f"reached ({first_line(error)}; 2 attempts)"
                ) from None
            time.sleep(1)


def _open_hub(data: Data):
    """The streaming dataset, its text column only. One 503 while opening is fatal to `datasets`,
    so opening is tried ATTEMPTS times."""
    import datasets

    name = _hub_name(data)
    try:
        check_hub(name)
    except DataError as e:
        raise DataError(f"{e}; {OFFLINE_HINT}") from None
    for attempt in range(ATTEMPTS):
        try:
            return datasets.load_dataset(
                data.dataset,
                name=data.name,
                split="train",
                streaming=True,
                columns=[data.text_field],
            )
        except Exception as e:
            error = e
            _raise_if_hopeless(data, error)
        if attempt + 1 < ATTEMPTS:
            time.sleep(2**attempt)
    raise DataError(
        f"{name} could not be opened in {ATTEMPTS} attempts: {first_line(error)}; {OFFLINE_HINT}"
    )


def _raise_if_hopeless(data: Data, error: Exception) -> None:
    """DataError for a fault that trying again will not cure."""
    name, text = _hub_name(data), str(error)
    if "FieldRef" in text or (isinstance(error, KeyError) and data.text_field in text):
        raise DataError(
            f"{name} has no column `{data.text_field}`; set data.text_field to the text's column"
        ) from None
    if isinstance(error, ValueError) and "BuilderConfig" in text:
        raise DataError(f"{name}: {text.strip().splitlines()[0]}; set data.name") from None


def _shard(dataset, index: int, count: int):
    from datasets.distributed import split_dataset_by_node

    if count == 1:
        return dataset
    if dataset.num_shards >= count:
        return dataset.shard(num_shards=count, index=index)
    return split_dataset_by_node(dataset, index, count, strategy="examples")
