"""Questions about state that a text contains: lm/data/sources/traces.py, at one gap a task.

lm-eval loads this file by its path; the package must be installed, for its maker of traces. It
defines no dataclass (which would look for its module in sys.modules).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm.config.data import Traces
from lm.data.sources import traces

if TYPE_CHECKING:
    from datasets import DatasetDict


def load(form: str, group: str, gap: int, num_docs: int = 500, **_: object) -> DatasetDict:
    """lm-eval's `custom_dataset`. `num_docs` can be set on its command line:
    --metadata '{"num_docs": 2000}'."""
    from datasets import Dataset, DatasetDict

    turns = traces.questions(Traces(form=form, group=group), gap, num_docs)
    return DatasetDict({"test": Dataset.from_list([turn._asdict() for turn in turns])})
