"""Stories of people, places and things with questions in between, several to a context.

As in CatbAbI, a context concatenates stories (one a line) and its questions stand among the facts,
each with its answer; the last question is left to the model. Every story starts from an unknown
world, so only the facts of the last line bear on that question. documents.jsonl has the documents.
Kinds of questions take turns, and so do yes and no: any prefix (lm-eval's --limit) is balanced.

lm-eval loads this file by its path: it imports nothing of the package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import DatasetDict

FILE = Path(__file__).with_name("documents.jsonl")


def load(**_: object) -> DatasetDict:
    """Return lm-eval's `custom_dataset`: `test` is scored, `train` gives few-shot examples."""
    from datasets import Dataset, DatasetDict

    splits: dict[str, list[dict]] = {"test": [], "train": []}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        document = json.loads(line)
        splits[document.pop("split")].append(document)
    return DatasetDict({name: Dataset.from_list(rows) for name, rows in splits.items()})
