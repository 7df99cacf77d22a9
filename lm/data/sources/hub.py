"""Access to the Hugging Face hub: a dataset's parquet files, and retries of failed requests."""

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
from lm.data.sources.errors import DataError, HubUnreachable, first_line

MAX_WAIT_S = 300.0  # sum of the pauses between the attempts at one request
MAX_PAUSE_S = 60.0  # between two attempts; the first pauses are 1, 2, 4, … s
TRANSIENT_STATUSES = (408, 425, 429)  # HTTP statuses below 500 after which a retry may succeed

Result = TypeVar("Result")
_jitter = random.Random()  # a separate generator: it must not affect the run's random numbers


@dataclass(frozen=True)
class HubFiles:
    """Training files of a configuration of a hub dataset, at a fixed commit."""

    name: str  # "dataset OWNER/NAME (CONFIGURATION)", for messages
    revision: str  # commit hash
    paths: tuple[str, ...]  # hf://datasets/OWNER/NAME@COMMIT/…


def check_hub(subject: str, offline_hint: str = "") -> None:
    """Check within seconds that the Hugging Face hub can be reached.

    Args:
        subject: The dataset or tokenizer that is needed from the hub, for the message.
        offline_hint: End of the message: alternatives that work without a network.

    Raises:
        DataError: If HF_HUB_OFFLINE is set.
        HubUnreachable: If the hub does not answer.
    """
    import httpx
    from huggingface_hub import constants

    hint = f"; {offline_hint}" if offline_hint else ""
    if constants.HF_HUB_OFFLINE:
        raise DataError(
            f"{subject} is on the Hugging Face hub, but HF_HUB_OFFLINE forbids going there{hint}"
        )
    for is_last in (False, True):
        try:
            httpx.get(constants.ENDPOINT, timeout=8)  # an answer with any status is enough
            return
        except httpx.HTTPError as error:
            if is_last:
                raise HubUnreachable(
                    f"{subject} is on the Hugging Face hub, but {constants.ENDPOINT} cannot be "
                    f"reached ({first_line(error)}; 2 attempts){hint}"
                ) from None
            time.sleep(1)


@functools.lru_cache(maxsize=4)  # the streams of a process share it
def open_hub(dataset: str, config: str, revision: str | None = None) -> HubFiles:
    """List the training files of a configuration of a dataset.

    Args:
        dataset: Name of the dataset, OWNER/NAME.
        config: Name of the configuration.
        revision: Commit hash; None: the newest commit.

    Raises:
        DataError: If there is no such dataset or configuration, access is denied, the training
            files are not all parquet files, or the hub cannot be reached.
    """
    import datasets

    name = f"dataset {dataset} ({config})"
    check_hub(name, "`data.source: builtin`, `parquet`, `jsonl` and `text` work offline")
    builder = retry(
        f"opening {name}",
        lambda: datasets.load_dataset_builder(dataset, name=config, revision=revision),
    )
    files = (builder.config.data_files or {}).get("train")
    if not files:
        raise DataError(
            f"{name} has no files of a training split; set data.dataset and data.dataset_config"
        )
    if other_files := [path for path in files if not path.endswith(".parquet")]:
        example = other_files[0].rpartition("/")[2]
        raise DataError(
            f"{name} does not consist of parquet files ({example} is one of {len(files)} files):"
            " download it and use `data.source: jsonl` or `text`"
        )
    commit = re.match(r"hf://datasets/[^@]+@([^/]+)/", files[0])
    if not commit:
        raise DataError(f"{name} was found at {files[0]}, which is not a file on the hub")
    return HubFiles(name, commit[1], tuple(files))


def retry(action: str, attempt: Callable[[], Result]) -> Result:
    """Call a function, again after each transient fault of the network or the server.

    The pauses double, each shortened by a random part of up to a half, so that many readers do not
    repeat their requests at the same time.

    Args:
        action: Description of the function, for messages.
        attempt: The function, whose result is returned.

    Raises:
        DataError: If the fault is permanent (not found, access denied, no such configuration).
        HubUnreachable: If the pauses would exceed MAX_WAIT_S in all.
    """
    waited_s = 0.0
    failure_count = 0
    while True:
        try:
            return attempt()
        except DataError:
            raise
        except Exception as error:
            failure_count += 1
            reason = first_line(error)
            if not _is_transient(error):
                raise DataError(f"{action} failed: {_describe_permanent(error)}") from None
            pause_s = min(MAX_PAUSE_S, 2.0 ** (failure_count - 1)) * _jitter.uniform(0.5, 1)
            if waited_s + pause_s > MAX_WAIT_S:
                raise HubUnreachable(
                    f"{action} failed {failure_count} times in a row, waiting {waited_s:.0f} s in"
                    f" all: {reason}; start again later with resume=auto"
                ) from None
        say(
            f"waiting  {pause_s:.1f} s for the Hugging Face hub, then attempt {failure_count + 1}"
            f" at {action}: {reason}"
        )
        time.sleep(pause_s)
        waited_s += pause_s


def _list_causes(error: BaseException | None) -> list[BaseException]:
    """List an error and the errors that caused it."""
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
    return causes


def _http_statuses(error: Exception) -> list[int]:
    """List the HTTP statuses among the causes of an error."""
    responses = (getattr(cause, "response", None) for cause in _list_causes(error))
    return [status for r in responses if (status := getattr(r, "status_code", None))]


def _is_transient(error: Exception) -> bool:
    """Return whether another attempt may succeed.

    A status of the server decides, because `datasets` reports "not found" also after a 503.
    """
    if statuses := _http_statuses(error):
        return any(status >= 500 or status in TRANSIENT_STATUSES for status in statuses)
    if isinstance(error, FileNotFoundError | PermissionError):
        return False
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return False  # the local disk refuses the file
    return any(
        isinstance(cause, OSError) or type(cause).__module__.startswith("httpx")
        for cause in _list_causes(error)
    )


def _describe_permanent(error: Exception) -> str:
    """Describe a permanent fault, and name the setting that may mend it."""
    if isinstance(error, ValueError) and "BuilderConfig" in str(error):
        return f"{str(error).strip().splitlines()[0]}; set data.dataset_config"
    remedy = ""
    if {401, 403} & set(_http_statuses(error)):
        remedy = "; log in (`hf auth login`) or set HF_TOKEN"
    elif isinstance(error, FileNotFoundError):
        remedy = "; set data.dataset"
    return first_line(error) + remedy
