"""The bAbI stories as CatbAbI has them: a reader, a vocabulary, counts and a download.

bAbI v1.2 (Weston et al. 2015, arXiv 1502.05698) is twenty tasks of short stories with questions.
CatbAbI (Schlag, Munkhdalai, Schmidhuber 2021, arXiv 2011.07831) makes each story one sequence of
lower-cased words in which every question's answer follows directly after its question mark; an
answer with commas (`milk,football`) is one token. How stories are joined is left to who reads them.

Two layouts of a folder are read:
    qa1_train.txt, qa1_valid.txt, qa1_test.txt, …   (en-valid, en-valid-10k)
    qa1_single-supporting-fact_train.txt, …         (en, en-10k), without valid: the last 10 % of
        each task's training stories are `valid`, and `train` is what comes before them.

It imports nothing of lm. On the command line: `python -m lm.evaluation.tasks.babi --help`.
"""

from __future__ import annotations

import argparse
import http.client
import re
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from lm.common.errors import UserError

URL = "http://www.thespermwhale.com/jaseweston/babi/tasks_1-20_v1-2.tar.gz"
VARIANTS = ("en-valid", "en-valid-10k")  # 1,000 or 10,000 training questions a task
SPLITS = ("train", "valid", "test")
TASKS = tuple(range(1, 21))
PAD, EOS = "<pad>", "<eos>"  # ids 0 and 1

_WORD = re.compile(r"[.?]|[^\s.?]+")


class BabiError(UserError, ValueError):
    """bAbI data that cannot be had; the message says which file, and what would do."""


class Line(NamedTuple):
    """A statement (answer None) or a question and its answer, as the file has them."""

    text: str
    answer: str | None = None


class Story(NamedTuple):
    """One story as a token sequence; tokens[i] for i in `answers` is the answer to a question,
    and tokens[i − 1] that question's `?`."""

    task: int
    tokens: list[str]
    answers: list[int]


class Count(NamedTuple):
    stories: int
    questions: int
    tokens: int


def read(folder: Path | str, split: str, tasks: Iterable[int] = TASKS) -> list[Story]:
    """The stories of a split, task after task, in the order of the files.

    Raises:
        BabiError: no such folder or split, missing files (each is named), a malformed line, text
            that is not UTF-8.
    """
    return [_story(task, lines) for task, lines in read_lines(folder, split, tasks)]


def read_lines(
    folder: Path | str, split: str, tasks: Iterable[int] = TASKS
) -> list[tuple[int, list[Line]]]:
    """As `read`, but each story is (task, its lines in the file's own case)."""
    if split not in SPLITS:
        raise BabiError(f"no split `{split}`: there are {', '.join(SPLITS)}")
    stories = []
    for task, (path, cut) in _files(Path(folder), (split,), tasks)[split].items():
        found = _parse(path)
        if cut:
            keep = len(found) - max(1, len(found) // 10)
            found = found[:keep] if split == "train" else found[keep:]
        stories += [(task, lines) for lines in found]
    return stories


def check(folder: Path | str) -> None:
    """Raises BabiError naming every file that is missing, of all tasks and splits."""
    _files(Path(folder), SPLITS, TASKS)


def vocabulary(folder: Path | str) -> list[str]:
    """All tokens of all tasks and splits, so that ids do not depend on the tasks used: `<pad>`,
    `<eos>`, then sorted. `<eos>` is in no story: CatbAbI's own code puts one before each."""
    check(folder)
    return words(story for split in SPLITS for story in read(folder, split))


def words(stories: Iterable[Story]) -> list[str]:
    """The vocabulary of these stories; its index is the id."""
    return [PAD, EOS, *sorted({token for story in stories for token in story.tokens})]


def counts(folder: Path | str) -> dict[int, dict[str, Count]]:
    """Stories, questions and tokens (without separators) by task and split."""
    check(folder)
    return count({split: read(folder, split) for split in SPLITS})


def count(stories: dict[str, list[Story]]) -> dict[int, dict[str, Count]]:
    """`counts` of stories read before, by split."""
    out: dict[int, dict[str, Count]] = {}
    for split, some in stories.items():
        for story in some:
            so_far = out.setdefault(story.task, {}).get(split, Count(0, 0, 0))
            of_story = (1, len(story.answers), len(story.tokens))
            out[story.task][split] = Count(*(a + b for a, b in zip(so_far, of_story)))
    return out


def _files(
    folder: Path, splits: Iterable[str], tasks: Iterable[int]
) -> dict[str, dict[int, tuple[Path, bool]]]:
    """Where each split's tasks are: {split: {task: (file, whether train and valid share it)}}."""
    tasks = list(tasks)
    if wrong := [task for task in tasks if task not in TASKS]:
        raise BabiError(f"no bAbI task {', '.join(map(str, wrong))}: they are numbered 1 to 20")
    if not folder.is_dir():
        raise BabiError(
            f"no folder {folder}: it must hold bAbI's qa1_train.txt … qa20_test.txt, and "
            "`python -m lm.evaluation.tasks.babi download DIR` fetches them to DIR/en-valid"
        )
    names = sorted(path.name for path in folder.glob("qa*.txt"))
    original = bool(names) and not any(re.fullmatch(r"qa\d+_[a-z]+\.txt", n) for n in names)
    found: dict[str, dict[int, tuple[Path, bool]]] = {}
    missing: list[str] = []  # each once, though train and valid may share a file
    for split in splits:
        stem = "train" if original and split == "valid" else split
        found[split] = {}
        for task in tasks:
            pattern = f"qa{task}_{'*_' * original}{stem}.txt"
            if matching := [folder / n for n in names if Path(n).match(pattern)]:
                found[split][task] = (matching[0], original and split != "test")
            elif pattern not in missing:
                missing.append(pattern)
    if not names:
        inside = [v for v in (*VARIANTS, "en", "en-10k") if (folder / v).is_dir()]
        hint = f"; did you mean {folder / inside[0]}?" if inside else ""
        raise BabiError(f"{folder} holds no bAbI files (qa1_train.txt …){hint}")
    if missing:
        raise BabiError(f"{folder} lacks {', '.join(missing)}")
    return found


def _parse(path: Path) -> list[list[Line]]:
    """The stories of one file."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        number = path.read_bytes()[: e.start].count(b"\n") + 1
        raise BabiError(f"{path}:{number}: not UTF-8") from None
    except OSError as e:
        raise BabiError(f"{path} cannot be read: {e.strerror}") from None
    stories: list[list[Line]] = []
    last = 0
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        index, _, rest = line.strip().partition(" ")
        if not (index.isascii() and index.isdigit()):
            raise BabiError(f"{where}: a line must start with its number in the story")
        if int(index) == 1:
            stories.append([])
        elif int(index) != last + 1:
            expected = f"{last + 1}, or 1 for a new story" if last else "1"
            raise BabiError(f"{where}: line number {index} of the story, where {expected} was due")
        last = int(index)
        sentence, *more = [part.strip() for part in rest.split("\t")]
        if not more:
            if not sentence.endswith("."):
                raise BabiError(
                    f"{where}: neither a statement (ends with `.`) nor a question with its answer"
                )
            stories[-1].append(Line(sentence))
        elif len(more) > 2 or not sentence.endswith("?"):
            raise BabiError(
                f"{where}: a question must read `question?`, tab, answer, tab, supporting lines"
            )
        elif not more[0] or len(more[0].split()) > 1:
            raise BabiError(
                f"{where}: the answer must be one word or words with commas, not `{more[0]}`"
            )
        else:
            stories[-1].append(Line(sentence, more[0]))
    if not stories:
        raise BabiError(f"{path} holds no stories")
    return stories


def _story(task: int, lines: list[Line]) -> Story:
    tokens: list[str] = []
    answers = []
    for line in lines:
        tokens += _WORD.findall(line.text.lower())
        if line.answer is not None:
            answers.append(len(tokens))
            tokens.append(line.answer.lower())
    return Story(task, tokens, answers)


def download(
    folder: Path | str,
    variant: str = "en-valid",
    *,
    url: str = URL,
    progress: Callable[[int, int | None], None] | None = None,
    timeout: float = 30.0,
) -> Path:
    """Fetch bAbI v1.2 (12 MB) and unpack only `variant` of it to folder/variant; the path of that.

    `progress(done, total)` is called as bytes arrive (total None if the server does not say);
    `timeout` is in seconds, of connecting and of each wait for data. A complete folder that is
    there already is left alone, and no half-written one is ever left behind.

    Raises:
        BabiError: no network, not the archive that was expected, or an incomplete folder is there.
    """
    if variant not in VARIANTS:
        raise BabiError(f"no variant `{variant}`: there are {' and '.join(VARIANTS)}")
    folder = Path(folder)
    target = folder / variant
    if target.exists():
        check(target)
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".babi-", dir=folder) as scratch:
            archive = Path(scratch) / "archive.tar.gz"
            _fetch(url, archive, progress, timeout, target)
            unpacked = _unpack(archive, Path(scratch) / variant, url)
            check(unpacked)
            unpacked.rename(target)
    except OSError as e:
        raise BabiError(f"{target} cannot be written: {e.strerror or e}") from e
    return target


def _fetch(url: str, path: Path, progress, timeout: float, target: Path) -> None:
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response, path.open("wb") as out:
            size = response.headers.get("Content-Length", "")
            total, done = int(size) if size.isdigit() else None, 0
            while block := response.read(1 << 16):
                out.write(block)
                done += len(block)
                if progress:
                    progress(done, total)
        if total is not None and done < total:
            raise EOFError(f"the connection ended after {done} of {total} bytes")
    except (OSError, http.client.HTTPException, EOFError, ValueError) as e:
        reason = getattr(e, "reason", None) or getattr(e, "strerror", None) or e
        if isinstance(e, urllib.error.HTTPError):
            reason = f"the server answered {e.code} {e.reason}"
        raise BabiError(
            f"{url} could not be fetched ({reason}): on a machine with a network fetch that file "
            f"({URL.rpartition('/')[2]}), unpack it, and put its folder "
            f"tasks_1-20_v1-2/{target.name} at {target}"
        ) from e


def _unpack(archive: Path, folder: Path, url: str) -> Path:
    """The files of the variant that `folder` is named after, flat in it. Only regular files whose
    name is one of bAbI's are taken, so nothing can land anywhere else."""
    wanted = {f"qa{task}_{split}.txt" for task in TASKS for split in SPLITS}
    folder.mkdir()
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                parts = Path(member.name).parts
                if member.isfile() and parts[-2:-1] == (folder.name,) and parts[-1] in wanted:
                    member.name = parts[-1]
                    tar.extract(member, folder, filter="data")
    except (tarfile.TarError, EOFError, zlib.error, OSError) as e:
        raise BabiError(f"{url} did not give bAbI's archive ({e})") from e
    if not any(folder.iterdir()):
        raise BabiError(f"the archive at {url} has no files of bAbI in a folder {folder.name}")
    return folder


def table(stories: dict[str, list[Story]]) -> str:
    """The counts of stories read before as text: a row a task, three columns a split, the sum."""
    by_task = count(stories)
    rows = [["task", *(f"{split} {field}" for split in stories for field in Count._fields)]]
    total = [0] * (len(rows[0]) - 1)
    for task, by_split in sorted(by_task.items()):
        numbers = [n for split in stories for n in by_split.get(split, Count(0, 0, 0))]
        total = [a + b for a, b in zip(total, numbers)]
        rows.append([f"qa{task}", *(f"{n:,}" for n in numbers)])
    rows.append(["all", *(f"{n:,}" for n in total)])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths)) for row in rows)


def _counts(args) -> None:
    check(args.folder)
    stories = {split: read(args.folder, split) for split in SPLITS}
    every = [story for some in stories.values() for story in some]
    answers = {story.tokens[i] for story in every for i in story.answers}
    print(table(stories))
    print(f"vocabulary: {len(words(every))} (with {PAD} and {EOS}); {len(answers)} are answers")


def _download(args) -> None:
    def progress(done: int, total: int | None) -> None:
        if sys.stderr.isatty():
            of = f" of {total / 1e6:.1f}" if total else ""
            print(f"\r{done / 1e6:.1f}{of} MB", end="", file=sys.stderr)

    print(f"fetching {args.url}", file=sys.stderr)
    path = download(args.folder, args.variant, url=args.url, progress=progress)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(f"{path}: set task.data (or FPRNN_BABI, for lm-eval) to this folder")


def main(argv: list[str] | None = None) -> int:
    """The command line. A BabiError is printed as its sentence, with exit status 1."""
    p = argparse.ArgumentParser(
        prog="python -m lm.evaluation.tasks.babi",
        description="The bAbI stories that CatbAbI is made of.",
        epilog="First: python -m lm.evaluation.tasks.babi download data/babi\n"
        "then:  python -m lm.evaluation.tasks.babi counts data/babi/en-valid",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")
    c = commands.add_parser(
        "counts",
        help="stories, questions and tokens of each task and split",
        description="DIR holds qa1_train.txt, qa1_valid.txt, … or the original"
        " qa1_single-supporting-fact_train.txt, …, where valid is the last 10 %% of train.",
    )
    c.add_argument("folder", metavar="DIR")
    c.set_defaults(run_command=_counts)
    c = commands.add_parser(
        "download",
        help="fetch the data from its authors (12 MB)",
        description="Makes DIR/en-valid (or the variant asked for).",
    )
    c.add_argument("folder", metavar="DIR")
    c.add_argument(
        "--variant", default="en-valid", choices=VARIANTS, help="default en-valid; 10k is larger"
    )
    c.add_argument("--url", default=URL, help="a mirror of the archive")
    c.set_defaults(run_command=_download)
    args = p.parse_args(argv)
    try:
        args.run_command(args)
    except BabiError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
