"""The suite `paper`: six of lm-eval's tasks, zero-shot, from the hub or from local files.

The tasks are lm-eval's own definitions, prompts and metrics alike; local files only take the place
of what it would download. docs/evaluation.md says which files, and where the choice comes from.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lm.common.errors import UserError

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

NAME = "paper"
ENDINGS = (".jsonl", ".parquet")


class SuiteError(UserError, RuntimeError):
    """A suite that cannot be run as asked; the message says what is missing or wrong."""


class SuiteTask(NamedTuple):
    """One task of the suite.

    Fields:
        folder: Folder of lm-eval's tasks that defines it.
        metric: The metric of lm-eval that stands for the task.
        files: Name of a local file, without its ending → the split that it holds. lm-eval scores
            the first split.
        columns: Columns of a row that must have a value; the last one holds the answer.
    """

    folder: str
    metric: str
    files: dict[str, str]
    columns: tuple[str, ...]


TASKS = {
    "lambada_openai": SuiteTask("lambada", "acc", {"lambada_openai": "test"}, ("text",)),
    "hellaswag": SuiteTask(
        "hellaswag",
        "acc_norm",
        {"hellaswag_val": "validation"},
        ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
    ),
    "piqa": SuiteTask("piqa", "acc", {"piqa_val": "validation"}, ("goal", "sol1", "sol2", "label")),
    "arc_easy": SuiteTask(
        "arc",
        "acc",
        {"arc_easy_test": "test", "arc_easy_val": "validation"},
        ("question", "choices", "answerKey"),
    ),
    "arc_challenge": SuiteTask(
        "arc",
        "acc_norm",
        {"arc_challenge_test": "test", "arc_challenge_val": "validation"},
        ("question", "choices", "answerKey"),
    ),
    "winogrande": SuiteTask(
        "winogrande",
        "acc",
        {"winogrande_val": "validation"},
        ("sentence", "option1", "option2", "answer"),
    ),
}
# Answers of splits that the hub publishes without answers: lm-eval would score each as wrong.
NO_ANSWER = ("", -1, "-1")


class Source(NamedTuple):
    """Place of a task's documents: a local file, or the hub where `path` is None."""

    split: str
    path: Path | None = None


def choose(tasks: list[str], data: Path | str | None) -> dict[str, Source]:
    """Return the chosen tasks of the suite, in its order, with the place of their documents.

    Args:
        tasks: Names; empty: all.
        data: Folder of local files; None: the hub.

    Raises:
        SuiteError: A task is not of the suite, or files are missing (the message names all).
    """
    if other := [f"`{name}`" for name in tasks if name not in TASKS]:
        raise SuiteError(
            f"the suite `paper` has no {', '.join(other)}: of it --tasks chooses among"
            f" {', '.join(TASKS)}; other tasks are run without --suite"
        )
    chosen = [name for name in TASKS if not tasks or name in tasks]
    if data is None:
        return {name: Source(split_of_lm_eval(name)) for name in chosen}
    folder = Path(data).expanduser()
    found = {name: source for name in chosen if (source := _find(folder, name)) is not None}
    missing = [name for name in chosen if name not in found]
    if missing:
        wanted = "; ".join(f"{name}: {file_names(name)}" for name in missing)
        rest = f"; --tasks {','.join(found)} runs what is there" if found else ""
        raise SuiteError(f"{folder} lacks the files of {len(missing)} tasks ({wanted}){rest}")
    return found


def make_manager(names: Iterable[str]) -> TaskManager:
    """Return lm-eval's TaskManager for these tasks: reading all task files takes seconds."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    folders = {str(root / TASKS[name].folder) for name in names}
    return lm_eval.tasks.TaskManager(include_path=sorted(folders), include_defaults=False)


def task_spec(name: str, source: Source) -> str | dict:
    """Return lm-eval's own task by its name, or with its documents from a file.

    lm-eval puts what is given over its own definition only in a member of a group.

    Raises:
        SuiteError: The file cannot be read, or a row has no answer.
    """
    if source.path is None:
        return name
    kind = "parquet" if source.path.suffix == ".parquet" else "json"
    files = {source.split: str(source.path)}
    _check_rows(name, kind, source.path)
    member = dict.fromkeys(("training_split", "validation_split", "test_split", "fewshot_split"))
    member |= {"task": name, "dataset_path": kind, "dataset_name": None}
    member |= {"dataset_kwargs": {"data_files": files}, f"{source.split}_split": source.split}
    return {"group": NAME, "task": [member]}


def scores(sources: dict[str, Source], tasks: dict, limit: int | None) -> dict:
    """What stands for each task of a suite, and for the suite.

    Args:
        sources: of `choose`. tasks: name → {"metrics": {metric: {"value", "stderr"}}}.
        limit: of documents, None: all.
    Returns:
        {"name", "tasks": {name: {"metric", "value", "stderr", "split", "split_of_lm_eval",
        "file"}}, "mean": of the values, "complete": all tasks of the suite, all documents, each of
        the split that lm-eval scores}; "file" is None from the hub.
    """
    scored = {}
    for name, source in sources.items():
        metric = TASKS[name].metric
        entry = tasks[name]["metrics"][metric]
        scored[name] = {
            "metric": metric,
            "value": entry["value"],
            "stderr": entry["stderr"],
            "split": source.split,
            "split_of_lm_eval": split_of_lm_eval(name),
            "file": None if source.path is None else source.path.name,
        }
    values = [row["value"] for row in scored.values()]
    usual = all(row["split"] == row["split_of_lm_eval"] for row in scored.values())
    return {
        "name": NAME,
        "tasks": scored,
        "mean": None if None in values else sum(values) / len(values),
        "complete": usual and limit is None and set(scored) == set(TASKS),
    }


def split_of_lm_eval(name: str) -> str:
    """The split on which lm-eval's own task is scored."""
    return next(iter(TASKS[name].files.values()))


def file_names(name: str) -> str:
    """Return the files that a task can be read from, for a message."""
    return " or ".join(f"{stem}.jsonl (or .parquet)" for stem in TASKS[name].files)


def _find(folder: Path, name: str) -> Source | None:
    for stem, split in TASKS[name].files.items():
        for ending in ENDINGS:
            if (folder / f"{stem}{ending}").is_file():
                return Source(split, folder / f"{stem}{ending}")
    return None


def _check_rows(name: str, kind: str, path: Path) -> None:
    """Refuse a file with a row that lm-eval would score as wrong.

    Raises:
        SuiteError: The file cannot be read, has no rows, or a row has no answer.
    """
    from pyarrow import ArrowException, json, parquet

    read = parquet.read_table if kind == "parquet" else json.read_json
    try:
        rows = read(path).to_pylist()
    except (ArrowException, OSError, UnicodeDecodeError) as e:
        raise SuiteError(f"{path} cannot be read as {kind}: {e}") from None
    if not rows:
        raise SuiteError(f"{path} has no rows")
    columns = TASKS[name].columns
    for number, row in enumerate(rows, 1):
        has_columns = all(row.get(column) is not None for column in columns)
        if not has_columns or row[columns[-1]] in NO_ANSWER:
            raise SuiteError(
                f"{path}, row {number} cannot be scored (a split without answers?): {name} needs"
                f" values of {', '.join(columns)}"
            )
