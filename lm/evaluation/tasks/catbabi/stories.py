"""Documents from real bAbI stories, with two or three stories per context.

As in CatbAbI, a context concatenates stories (one per line), and questions are followed by their
answers. The model answers the last question, which is about the last story. All stories of a
context belong to the same bAbI task, and therefore also show the form of the answers. Words keep
their case.

The environment variable FPRNN_BABI names the folder of the stories
(lm/evaluation/tasks/babi.py has its source); on lm-eval's command line, --metadata
'{"data": "DIR"}' names it.

lm-eval loads this file by its path. fprnn must be installed, because the file imports from it.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

from lm.evaluation.tasks import babi

if TYPE_CHECKING:
    from datasets import DatasetDict


def format_story(story: list[babi.Line]) -> str:
    """Return a story with its answers: "John went home. Where is John? home."."""
    return " ".join(x.text if x.answer is None else f"{x.text} {x.answer}." for x in story)


def make_documents(
    stories: list[list[babi.Line]], choices: list[str], count: int, seed: str
) -> list:
    """Return up to `count` documents, at most one per question.

    A smaller count with the same seed returns the first documents of a larger count.
    """
    rng = random.Random(seed)
    questions = [(s, i) for s, story in enumerate(stories) for i, x in enumerate(story) if x.answer]
    documents = []
    for s, i in rng.sample(questions, len(questions))[:count]:
        others = [n for n in range(len(stories)) if n != s]
        context = rng.sample(others, min(rng.randint(1, 2), len(others)))
        last = [format_story(stories[s][:i])] if i else []
        documents.append(
            {
                "context": "\n".join([*(format_story(stories[n]) for n in context), *last]),
                "question": stories[s][i].text,
                "answer": stories[s][i].answer,
                "choices": choices,
            }
        )
    return documents


def load(
    qa: int, data: str | None = None, num_docs: int = 200, seed: int = 2026, **_: object
) -> DatasetDict:
    """Return lm-eval's `custom_dataset` for bAbI task `qa`.

    The split `test` is scored, and `train` has few-shot examples. The choices of a question are
    all answers of the bAbI task in any split.

    Raises:
        babi.BabiError: If no folder is named, or files are missing in it.
    """
    from datasets import Dataset, DatasetDict

    data = data or os.environ.get("FPRNN_BABI")
    if not data:
        raise babi.BabiError(
            "this task reads bAbI from the folder that the environment variable FPRNN_BABI names,"
            f" which is not set; `{babi.DOWNLOAD}` makes {babi.FOLDER}"
        )
    folder = os.path.expanduser(data)
    splits = {s: [x for _, x in babi.read_lines(folder, s, [qa])] for s in babi.SPLITS}
    choices = sorted(
        {x.answer for stories in splits.values() for s in stories for x in s if x.answer}
    )
    documents = {
        name: make_documents(splits[name], choices, count, f"{seed}/{qa}/{name}")
        for name, count in (("test", num_docs), ("train", 40))
    }
    return DatasetDict({name: Dataset.from_list(docs) for name, docs in documents.items()})
