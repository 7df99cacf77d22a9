"""Plain text of the folder that FPRNN_EVAL_DATA names.

lm-eval loads this file by its path: it imports nothing of the package.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import DatasetDict


def text(**_: object) -> DatasetDict:
    """lm-eval's `custom_dataset` for plain text: each .txt file of the folder is a document.

    Raises:
        FileNotFoundError: the variable is not set, or there is no such file. UnicodeDecodeError.
    """
    folder = os.environ.get("FPRNN_EVAL_DATA")
    if not folder:
        raise FileNotFoundError(
            "this task reads the .txt files of the folder that the environment variable "
            "FPRNN_EVAL_DATA names, and FPRNN_EVAL_DATA is not set"
        )
    paths = sorted(Path(folder).expanduser().glob("*.txt"))
    rows = [{"text": path.read_bytes().decode("utf-8")} for path in paths]
    rows = [row for row in rows if row["text"]]
    if not rows:
        raise FileNotFoundError(f"{folder} (FPRNN_EVAL_DATA) has no .txt file with text in it")
    from datasets import Dataset, DatasetDict

    return DatasetDict({"test": Dataset.from_list(rows)})
