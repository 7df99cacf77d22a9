"""Documents of the state-tracking tasks, made by lm/data/sources/traces.py.

lm-eval loads this file by its path, so that the module is not in sys.modules; a dataclass here
would not find it. fprnn must be installed, because the file imports from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm.config.data import Traces
from lm.data.sources import traces

if TYPE_CHECKING:
    from datasets import DatasetDict


def load(form: str, group: str, gap: int, num_docs: int = 500, **_: object) -> DatasetDict:
    """Return lm-eval's `custom_dataset`.

    Args:
        form: Form of the text, as `Traces.form`.
        group: Name of the group, as `Traces.group`.
        gap: Number of elements (`repl`: swaps) before each question.
        num_docs: Number of documents; --metadata '{"num_docs": 2000}' of lm-eval sets it.
    """
    from datasets import Dataset, DatasetDict

    questions = traces.iter_questions(Traces(form=form, group=group), gap, num_docs, "test")
    return DatasetDict({"test": Dataset.from_list([q._asdict() for q in questions])})
