"""Standard evaluation sets read from jsonl files in the folder that FPRNN_EVAL_DATA names.

lm-eval loads this file by its path: it imports nothing of the package.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import DatasetDict


def read(name: str, keys: tuple[str, ...]) -> list[dict]:
    """The rows of FPRNN_EVAL_DATA/name, only `keys` of each.

    Raises:
        FileNotFoundError: the variable is not set, or the file is not there.
        ValueError: a line is not a JSON object with these keys; says which.
    """
    folder = os.environ.get("FPRNN_EVAL_DATA")
    if not folder:
        raise FileNotFoundError(
            f"this task reads `{name}` from the folder that the environment variable "
            "FPRNN_EVAL_DATA names, and FPRNN_EVAL_DATA is not set"
        )
    path = Path(folder).expanduser() / name
    if not path.is_file():
        raise FileNotFoundError(
            f"this task needs {path}, which is not there; set FPRNN_EVAL_DATA to the folder that "
            f"holds `{name}`"
        )
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                rows.append({key: row[key] for key in keys})
            except (json.JSONDecodeError, KeyError, TypeError):
                wanted = ", ".join(f"`{key}`" for key in keys)
                raise ValueError(
                    f"{path}, line {number}: must be a JSON object with {wanted}"
                ) from None
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


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
    return _dataset("test", rows)


def _dataset(split: str, rows: list[dict]):
    from datasets import Dataset, DatasetDict

    return DatasetDict({split: Dataset.from_list(rows)})


def lambada(**_: object) -> DatasetDict:
    """lm-eval's `custom_dataset` for LAMBADA: lambada_openai.jsonl, rows of {"text"}."""
    return _dataset("test", read("lambada_openai.jsonl", ("text",)))


def arc_easy(**_: object) -> DatasetDict:
    """lm-eval's `custom_dataset` for ARC-Easy: arc_easy_val.jsonl, the validation split with the
    hub's columns."""
    return _dataset("validation", read("arc_easy_val.jsonl", ("question", "choices", "answerKey")))
