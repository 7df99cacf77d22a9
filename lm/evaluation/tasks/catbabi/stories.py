"""Documents of catbabi_qa: real bAbI stories, two or three in each context.

As in CatbAbI, a context concatenates stories (one per line), and questions are followed by their
answers. The model answers the last question, which is about the last story. All stories of a
context belong to the same bAbI task, and therefore also show the form of the answers. Words keep
their case.

The stories are in the folder that the environment variable FPRNN_BABI names, or lm-eval's option
--metadata '{"data": "DIR"}'; lm/evaluation/tasks/babi.py contains the command to download them.

lm-eval loads this file by its path. fprnn must be installed, because the file imports from it.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

from lm.evaluation.tasks import babi

if TYPE_CHECKING:
    from datasets import DatasetDict


FEWSHOT_COUNT = 40  # documents from which lm-eval draws few-shot examples


def format_story(story: list[babi.Line]) -> str:
    """Return a story with its answers: "John went home. Where is John? home."."""
    return " ".join(
        line.text if line.answer is None else f"{line.text} {line.answer}." for line in story
    )


def make_documents(
    stories: list[list[babi.Line]], choices: list[str], count: int, seed: str
) -> list:
    """Return up to `count` documents, at most one per question.

    With the same seed, a smaller count returns the first documents of a larger count.
    """
    rng = random.Random(seed)
    questions = [
        (story_index, line_index)
        for story_index, story in enumerate(stories)
        for line_index, line in enumerate(story)
        if line.answer
    ]
    documents = []
    for story_index, line_index in rng.sample(questions, len(questions))[:count]:
        story, question = stories[story_index], stories[story_index][line_index]
        others = [i for i in range(len(stories)) if i != story_index]
        context_indices = rng.sample(others, min(rng.randint(1, 2), len(others)))
        lines = [format_story(stories[i]) for i in context_indices]
        if line_index > 0:
            lines.append(format_story(story[:line_index]))
        documents.append(
            {
                "context": "\n".join(lines),
                "question": question.text,
                "answer": question.answer,
                "choices": choices,
            }
        )
    return documents


def load(
    qa: int, data: str | None = None, num_docs: int = 200, seed: int = 2026, **_: object
) -> DatasetDict:
    """Return lm-eval's `custom_dataset` for the bAbI task with the number `qa`.

    The split `test` is scored, and `train` has few-shot examples. The choices of a question are
    all answers of its bAbI task, from all splits. Other keywords of lm-eval are ignored.

    Args:
        data: Folder of the bAbI files; None: the environment variable FPRNN_BABI names it.
        num_docs: Maximum number of documents in `test`.
        seed: Seed of the choice and order of questions and context stories.

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
    stories = {}
    for split in babi.SPLITS:
        stories[split] = [lines for _task, lines in babi.read_lines(folder, split, tasks=[qa])]
    lines = [line for split in babi.SPLITS for story in stories[split] for line in story]
    choices = sorted({line.answer for line in lines if line.answer})
    documents = {
        split: make_documents(stories[split], choices, count, f"{seed}/{qa}/{split}")
        for split, count in (("test", num_docs), ("train", FEWSHOT_COUNT))
    }
    return DatasetDict({split: Dataset.from_list(docs) for split, docs in documents.items()})
