"""Questions about real bAbI stories, two or three stories to a context.

As in CatbAbI a context concatenates stories (one a line), questions stand among the facts with
their answers, and only the last story bears on the last question, whose answer is left to the
model. All stories of a context are of one bAbI task, so that they also show what an answer looks
like. The words are those of the files, in their own case.

The folder (lm/evaluation/tasks/babi.py says where it comes from) is named by the environment
variable FPRNN_BABI, or on lm-eval's own command line by --metadata '{"data": "DIR"}'.

lm-eval loads this file by its path; the package must be installed, for its reader of bAbI.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

from lm.evaluation.tasks import babi

if TYPE_CHECKING:
    from datasets import DatasetDict


def line(story: list[babi.Line]) -> str:
    """A story with its answers: "John went home. Where is John? home."."""
    return " ".join(x.text if x.answer is None else f"{x.text} {x.answer}." for x in story)


def documents(stories: list[list[babi.Line]], choices: list[str], count: int, seed: str) -> list:
    """`count` documents (at most one a question); fewer of the same seed are the first of more."""
    rng = random.Random(seed)
    questions = [(s, i) for s, story in enumerate(stories) for i, x in enumerate(story) if x.answer]
    out = []
    for s, i in rng.sample(questions, len(questions))[:count]:
        others = [n for n in range(len(stories)) if n != s]
        before = rng.sample(others, min(rng.randint(1, 2), len(others)))
        last = [line(stories[s][:i])] if i else []
        out.append(
            {
                "context": "\n".join([*(line(stories[n]) for n in before), *last]),
                "question": stories[s][i].text,
                "answer": stories[s][i].answer,
                "choices": choices,
            }
        )
    return out


def load(
    qa: int, data: str | None = None, num_docs: int = 200, seed: int = 2026, **_: object
) -> DatasetDict:
    """lm-eval's `custom_dataset` for bAbI's task `qa`: `test` is scored, `train` gives few-shot
    examples; the choices are all answers that the task has in any split.

    Raises:
        babi.BabiError: no folder was named, or it lacks files.
    """
    from datasets import Dataset, DatasetDict

    data = data or os.environ.get("FPRNN_BABI")
    if not data:
        raise babi.BabiError(
            "this task reads bAbI from the folder that the environment variable FPRNN_BABI names, "
            f"and FPRNN_BABI is not set; `{babi.DOWNLOAD}` makes {babi.FOLDER}"
        )
    folder = os.path.expanduser(data)
    splits = {s: [x for _, x in babi.read_lines(folder, s, [qa])] for s in babi.SPLITS}
    choices = sorted({x.answer for some in splits.values() for s in some for x in s if x.answer})
    made = {
        name: documents(splits[name], choices, count, f"{seed}/{qa}/{name}")
        for name, count in (("test", num_docs), ("train", 40))
    }
    return DatasetDict({name: Dataset.from_list(docs) for name, docs in made.items()})
