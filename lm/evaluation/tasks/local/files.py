"""Documents of text_local: the text files of a folder.

lm-eval loads this file by its path, and it imports nothing from fprnn.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import DatasetDict


def load(**_: object) -> DatasetDict:
    """Return lm-eval's `custom_dataset`, in which each .txt file of the folder is a document.

    The environment variable FPRNN_EVAL_DATA names the folder.

    Raises:
        FileNotFoundError: If the variable is not set, or the folder has no .txt file with text.
        ValueError: If a file is not UTF-8.
    """
    folder = os.environ.get("FPRNN_EVAL_DATA")
    if not folder:
        raise FileNotFoundError(
            "this task reads the .txt files of the folder that the environment variable"
            " FPRNN_EVAL_DATA names, which is not set"
        )
    paths = sorted(Path(folder).expanduser().glob("*.txt"))
    rows = [{"text": text} for path in paths if (text := _read(path))]
    if not rows:
        raise FileNotFoundError(f"{folder} (FPRNN_EVAL_DATA) has no .txt file with text in it")
    from datasets import Dataset, DatasetDict

    return DatasetDict({"test": Dataset.from_list(rows)})


def _read(path: Path) -> str:
    """Return the text of a file, without a byte order mark."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not UTF-8: {e}") from None
