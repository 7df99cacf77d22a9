"""Documents of catbabi_mini: stories of people, places and things, with questions.

As in CatbAbI, a context concatenates stories (one per line), and questions are followed by their
answers. The model answers the last question. Stories are independent: only the facts in the last
line matter for this question. documents.jsonl contains the documents. Kinds of questions alternate,
as do the answers yes and no, so that the first documents (lm-eval's --limit) are balanced.

lm-eval loads this file by its path, and it imports nothing from fprnn.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import DatasetDict

FILE = Path(__file__).with_name("documents.jsonl")


def load(**_: object) -> DatasetDict:
    """Return lm-eval's `custom_dataset`: `test` is scored, `train` has few-shot examples."""
    from datasets import Dataset, DatasetDict

    splits: dict[str, list[dict]] = {"test": [], "train": []}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        document = json.loads(line)
        splits[document.pop("split")].append(document)
    return DatasetDict({name: Dataset.from_list(rows) for name, rows in splits.items()})
