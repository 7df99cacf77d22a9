"""The suite `paper`: six of lm-eval's tasks, zero-shot, from the hub or from local files.

The tasks are lm-eval's own definitions, prompts and metrics alike; local files only take the place
of what it would download. docs/evaluation.md says which files, and where the choice comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
        is_scorable: Test of a row.
        needs: What `is_scorable` demands, for a message.
    """

    folder: str
    metric: str
    files: dict[str, str]
    is_scorable: Callable[[dict], bool]
    needs: str


def _has_last_word(row: dict) -> bool:
    before, _, last = row["text"].rpartition(" ")
    return bool(before.strip() and last.strip())


def _has_known_ending(row: dict) -> bool:
    texts = [row["activity_label"], row["ctx_a"], row["ctx_b"]]
    label = str(row["label"])  # "3" on the hub; lm-eval reads no "3.0"
    return None not in texts and label.isdigit() and int(label) < len(row["endings"])


def _has_known_solution(row: dict) -> bool:
    return None not in (row["goal"], row["sol1"], row["sol2"]) and row["label"] in (0, 1)


def _has_known_choice(row: dict) -> bool:
    labels = list(row["choices"]["label"])
    is_whole = row["question"] is not None and len(row["choices"]["text"]) == len(labels)
    return is_whole and row["answerKey"] in labels


def _has_known_option(row: dict) -> bool:
    is_whole = None not in (row["option1"], row["option2"])
    return is_whole and row["answer"] in ("1", "2") and "_" in row["sentence"]


def _arc(name: str, metric: str) -> SuiteTask:
    return SuiteTask(
        "arc",
        metric,
        {f"{name}_test": "test", f"{name}_val": "validation"},
        _has_known_choice,
        "`question`, `choices` {`text`, `label`} of equal length, and `answerKey`, one of the"
        " labels",
    )


TASKS = {
    "lambada_openai": SuiteTask(
        "lambada",
        "acc",
        {"lambada_openai": "test"},
        _has_last_word,
        "`text` of two words at least",
    ),
    "hellaswag": SuiteTask(
        "hellaswag",
        "acc_norm",
        {"hellaswag_val": "validation"},
        _has_known_ending,
        "`activity_label`, `ctx_a`, `ctx_b`, `endings`, and `label`, the number of one, from 0",
    ),
    "piqa": SuiteTask(
        "piqa",
        "acc",
        {"piqa_val": "validation"},
        _has_known_solution,
        "`goal`, `sol1`, `sol2`, and `label`, 0 or 1",
    ),
    "arc_easy": _arc("arc_easy", "acc"),
    "arc_challenge": _arc("arc_challenge", "acc_norm"),
    "winogrande": SuiteTask(
        "winogrande",
        "acc",
        {"winogrande_val": "validation"},
        _has_known_option,
        '`sentence` with a _, `option1`, `option2`, and `answer`, "1" or "2"',
    ),
}


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
    for number, row in enumerate(rows, 1):
        try:
            is_scorable = TASKS[name].is_scorable(row)
        except (TypeError, ValueError, LookupError, AttributeError):
            is_scorable = False
        if not is_scorable:
            raise SuiteError(
                f"{path}, row {number} cannot be scored (a split without answers?): {name} needs"
                f" {TASKS[name].needs}"
            )
