"""The Hugging Face hub: reaching it, opening a dataset of parquet files there, waiting for it."""

from __future__ import annotations

import errno
import functools
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from lm.common.console import say
from lm.config.data import Data
from lm.data.sources.errors import DataError, HubUnreachable, first_line

PATIENCE_S = 300.0  # in all, that one request to a hub in trouble is waited for
LONGEST_PAUSE_S = 60.0  # between two attempts; the first pauses are 1, 2, 4, … s
OFFLINE_HINT = "`data.source: builtin`, `parquet`, `jsonl` and `text` work offline"
PASSING = (408, 425, 429)  # HTTP statuses below 500 that pass, as those from 500 on do

Answer = TypeVar("Answer")
_jitter = random.Random()  # of its own: the run's seed decides nothing here


@dataclass(frozen=True)
class HubFiles:
    """The training files of a hub dataset's configuration, as they are in one commit."""

    name: str  # for messages
    revision: str  # the commit
    paths: tuple[str, ...]  # hf://datasets/OWNER/NAME@COMMIT/…


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
                raise HubUnreachable(
                    f"{what} is on the Hugging Face hub, but {constants.ENDPOINT} cannot be "
                    f"reached ({first_line(error)}; 2 attempts)"
                ) from None
            time.sleep(1)


def open_hub(data: Data, revision: str | None = None) -> HubFiles:
    """Return the files of `data.dataset` and `data.dataset_config`, of a commit or of the newest.

    Raises:
        DataError: no network; no such dataset or configuration, or no right to see it; none of its
            files are parquet; a hub in trouble for longer than PATIENCE_S.
    """
    return _open_hub(data.dataset, data.dataset_config, revision)


@functools.lru_cache(maxsize=4)  # the streams of one process share it
def _open_hub(dataset: str, config: str, revision: str | None) -> HubFiles:
    import datasets

    name = f"dataset {dataset} ({config})"
    try:
        check_hub(name)
    except DataError as e:
        raise type(e)(f"{e}; {OFFLINE_HINT}") from None

    def attempt():
        return datasets.load_dataset_builder(dataset, name=config, revision=revision)

    builder = patiently(f"opening {name}", attempt)
    files = (builder.config.data_files or {}).get("train")
    if not files:
        raise DataError(
            f"{name} has no files of a training split; set data.dataset and data.dataset_config"
        )
    if other := [path for path in files if not path.endswith(".parquet")]:
        raise DataError(
            f"{name} is not of parquet files ({other[0].rpartition('/')[2]} is one of {len(files)}"
            " files): download it and use `data.source: jsonl` or `text`"
        )
    commit = re.match(r"hf://datasets/[^@]+@([^/]+)/", files[0])
    if not commit:
        raise DataError(f"{name} was found at {files[0]}, which is not a file on the hub")
    return HubFiles(name, commit[1], tuple(files))


def patiently(what: str, attempt: Callable[[], Answer]) -> Answer:
    """The attempt's answer. After a fault of the network or of the server it is tried again, until
    the pauses between attempts are PATIENCE_S in all. Each pause is twice the one before, less a
    random part of up to a half, so that many readers do not come back at once.

    Raises:
        DataError: hopeless (not found, not allowed, no such configuration), or patience at an end.
    """
    waited = 0.0
    failures = 0
    while True:
        try:
            return attempt()
        except DataError:
            raise
        except Exception as error:
            failures += 1
            reason = first_line(error)
            if not _is_passing(error):
                raise DataError(f"{what} failed: {_advice(error) or reason}") from None
            pause = min(LONGEST_PAUSE_S, 2.0 ** (failures - 1)) * _jitter.uniform(0.5, 1)
            if waited + pause > PATIENCE_S:
                raise HubUnreachable(
                    f"{what} failed {failures} times in a row, waiting {waited:.0f} s in all: "
                    f"{reason}; start again later with resume=auto"
                ) from None
        say(
            f"waiting  {pause:.1f} s for the Hugging Face hub, then attempt {failures + 1} at "
            f"{what}: {reason}"
        )
        time.sleep(pause)
        waited += pause


def _chain(error: BaseException | None) -> list[BaseException]:
    """An error and those behind it."""
    found = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _statuses(errors: list[BaseException]) -> list[int]:
    """The HTTP statuses of those errors that are answers of a server."""
    found = [getattr(getattr(e, "response", None), "status_code", None) for e in errors]
    return [status for status in found if status]


def _is_passing(error: Exception) -> bool:
    """Whether trying again may cure it. `datasets` says "not found" of a 503 as well, so what the
    server answered counts, where it did."""
    chain = _chain(error)
    statuses = _statuses(chain)
    if statuses:
        return any(status >= 500 or status in PASSING for status in statuses)
    if isinstance(error, FileNotFoundError | PermissionError):
        return False
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return False  # a file cannot be written here
    return any(
        isinstance(e, OSError) or type(e).__module__.partition(".")[0] in ("httpx", "httpx2")
        for e in chain
    )


def _advice(error: Exception) -> str | None:
    """A sentence for a hopeless fault that a key of the config mends."""
    if isinstance(error, ValueError) and "BuilderConfig" in str(error):
        return f"{str(error).strip().splitlines()[0]}; set data.dataset_config"
    statuses = _statuses(_chain(error))
    if 401 in statuses or 403 in statuses:
        return f"{first_line(error)}; log in (`hf auth login`) or set HF_TOKEN"
    if isinstance(error, FileNotFoundError):
        return f"{first_line(error)}; set data.dataset"
    return None
