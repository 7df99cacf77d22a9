"""Reader and vocabulary of the bAbI stories, in the form of CatbAbI.

bAbI v1.2 (Weston et al. 2015, arXiv 1502.05698) has twenty tasks: short stories with questions.
In CatbAbI (Schlag, Munkhdalai, Schmidhuber 2021, arXiv 2011.07831), each story is one sequence of
lower-cased words, and each answer follows the question mark of its question. An answer with commas
(`milk,football`) is one token. CatbAbI also joins the stories; here the caller does it.

A folder contains qa1_train.txt, qa1_valid.txt, qa1_test.txt, …: it is `en-valid` or `en-valid-10k`
of the archive at URL, which the shell command DOWNLOAD unpacks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from lm.common.errors import UserError

URL = "http://www.thespermwhale.com/jaseweston/babi/tasks_1-20_v1-2.tar.gz"
DOWNLOAD = f"curl -L {URL} | tar -xz"
FOLDER = "tasks_1-20_v1-2/en-valid"  # in the unpacked archive
SPLITS = ("train", "valid", "test")
TASKS = tuple(range(1, 21))  # numbers of the bAbI tasks
PAD, EOS = "<pad>", "<eos>"  # ids 0 and 1

_WORD = re.compile(r"[.?]|[^\s.?]+")
# Groups: number of the line, sentence, answer (None for a statement).
_LINE = re.compile(r"(\d+) +([^\t]*[^\t ]) *(?:\t *([^\t ]+) *(?:\t[^\t]*)?)?", re.ASCII)


class BabiError(UserError, ValueError):
    """bAbI data that cannot be read; the message names the file and has a fix."""


class Line(NamedTuple):
    """Line of a story as in the file: a question with its answer, or a statement (answer None)."""

    text: str
    answer: str | None = None


class Story(NamedTuple):
    """Story as a token sequence.

    Attributes:
        task: Number of the bAbI task.
        tokens: Words of the story.
        answers: Indices of the tokens that are answers; each follows the `?` of its question.
    """

    task: int
    tokens: list[str]
    answers: list[int]


def read(folder: Path | str, split: str, tasks: Sequence[int] = TASKS) -> list[Story]:
    """Return the stories of a split, task after task, in the order of the files.

    Raises:
        BabiError: If files are missing, a line is malformed, or text is not UTF-8.
    """
    return [_tokenize(task, lines) for task, lines in read_lines(folder, split, tasks)]


def read_lines(
    folder: Path | str, split: str, tasks: Sequence[int] = TASKS
) -> list[tuple[int, list[Line]]]:
    """Return the task number and the lines of each story, as in the files; errors as in `read`."""
    check(folder, [split], tasks)
    paths = [(task, Path(folder) / f"qa{task}_{split}.txt") for task in tasks]
    return [(task, story) for task, path in paths for story in _parse(path)]


def check(folder: Path | str, splits: Sequence[str] = SPLITS, tasks: Sequence[int] = TASKS) -> None:
    """Check that a folder has the files of these splits and tasks.

    Raises:
        BabiError: If files are missing; the message names all of them.
    """
    names = [f"qa{task}_{split}.txt" for split in splits for task in tasks]
    missing = [name for name in names if not (Path(folder) / name).is_file()]
    if missing and not any(Path(folder).glob("qa*.txt")):
        raise BabiError(
            f"{folder} holds no bAbI files ({names[0]}, …): `{DOWNLOAD}` makes {FOLDER} and"
            f" {FOLDER}-10k; use either of them"
        )
    if missing:
        raise BabiError(f"{folder} lacks {', '.join(missing)}")


def make_vocabulary(stories: Iterable[Story]) -> list[str]:
    """Return the vocabulary of stories: `<pad>`, `<eos>`, and the sorted words.

    The index of a word is its id. Stories contain no `<eos>`; CatbAbI's code adds one before each.
    """
    return [PAD, EOS, *sorted({token for story in stories for token in story.tokens})]


def _parse(path: Path) -> list[list[Line]]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        number = path.read_bytes()[: e.start].count(b"\n") + 1
        raise BabiError(f"{path}:{number}: not UTF-8") from None
    stories: list[list[Line]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.strip())
        index, sentence, answer = match.groups() if match else ("", "", None)
        starts_story = index == "1"
        continues_story = bool(stories) and index == str(len(stories[-1]) + 1)
        has_valid_index = starts_story or continues_story
        if not has_valid_index or not sentence.endswith("." if answer is None else "?"):
            raise BabiError(
                f"{path}:{number}: a line must be `N A statement.`, or `N A question?` followed by"
                " a tab, its answer as one word, a tab and the supporting lines; N counts the lines"
                " of a story from 1"
            )
        if starts_story:
            stories.append([])
        stories[-1].append(Line(sentence, answer))
    if not stories:
        raise BabiError(f"{path} holds no stories")
    return stories


def _tokenize(task: int, lines: list[Line]) -> Story:
    """Return a story as lower-cased words and punctuation marks."""
    tokens: list[str] = []
    answers = []
    for line in lines:
        tokens += _WORD.findall(line.text.lower())
        if line.answer is not None:
            answers.append(len(tokens))
            tokens.append(line.answer.lower())
    return Story(task, tokens, answers)
