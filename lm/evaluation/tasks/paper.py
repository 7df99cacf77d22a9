"""The suite `paper`: six of lm-eval's tasks, zero-shot, from the hub or from local files.

The tasks are lm-eval's own definitions, prompts and metrics alike; local files only take the place
of what it would download. docs/evaluation.md says which files, and where the choice comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lm.common.errors import UserError
from lm.common.files import parse_json

NAME = "paper"
ENDINGS = (".jsonl", ".parquet")


class SuiteError(UserError, RuntimeError):
    """A suite that cannot be run as asked; the message says what is missing or wrong."""


class SuiteTask(NamedTuple):
    """One task of the suite.

    Fields:
        folder: of lm-eval's tasks, where it is defined.
        metric: of lm-eval's metrics the one that stands for the task.
        files: name of a local file, without its ending → the split that it holds. The first is the
            split that lm-eval scores.
        columns: of the hub's, those that the task reads.
        can_be_scored: whether a row with these columns has what the task needs.
        right: what `can_be_scored` asks for, in words.
    """

    folder: str
    metric: str
    files: dict[str, str]
    columns: tuple[str, ...]
    can_be_scored: Callable[[dict], bool]
    right: str


def _has_last_word(row: dict) -> bool:
    before, _, last = row["text"].rpartition(" ")
    return bool(before.strip() and last.strip())


def _ending_is_known(row: dict) -> bool:
    label = str(row["label"])  # "3" on the hub; lm-eval reads no "3.0"
    return label.isdigit() and int(label) in range(len(row["endings"]))


def _solution_is_known(row: dict) -> bool:
    return row["label"] in (0, 1)


def _choice_is_known(row: dict) -> bool:
    labels = list(row["choices"]["label"])
    return len(row["choices"]["text"]) == len(labels) and row["answerKey"] in labels


def _option_is_known(row: dict) -> bool:
    return row["answer"] in ("1", "2") and "_" in row["sentence"]


def _arc(name: str, metric: str) -> SuiteTask:
    return SuiteTask(
        "arc",
        metric,
        {f"{name}_test": "test", f"{name}_val": "validation"},
        ("question", "choices", "answerKey"),
        _choice_is_known,
        "`choices` {`text`, `label`} of equal length, and `answerKey` one of the labels",
    )


TASKS = {
    "lambada_openai": SuiteTask(
        "lambada",
        "acc",
        {"lambada_openai": "test"},
        ("text",),
        _has_last_word,
        "`text` of two words at least",
    ),
    "hellaswag": SuiteTask(
        "hellaswag",
        "acc_norm",
        {"hellaswag_val": "validation"},
        ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
        _ending_is_known,
        "`label` the number of one of the `endings`, from 0",
    ),
    "piqa": SuiteTask(
        "piqa",
        "acc",
        {"piqa_val": "validation"},
        ("goal", "sol1", "sol2", "label"),
        _solution_is_known,
        "`label` 0 or 1",
    ),
    "arc_easy": _arc("arc_easy", "acc"),
    "arc_challenge": _arc("arc_challenge", "acc_norm"),
    "winogrande": SuiteTask(
        "winogrande",
        "acc",
        {"winogrande_val": "validation"},
        ("sentence", "option1", "option2", "answer"),
        _option_is_known,
        '`answer` "1" or "2", and `sentence` with a _',
    ),
}


class Source(NamedTuple):
    """Where a task's documents come from: a local file, or the hub where `path` is None."""

    split: str
    path: Path | None = None


def choose(tasks: list[str], data: Path | str | None) -> dict[str, Source]:
    """The chosen tasks of the suite, in its order, and where each one's documents come from.

    Args:
        tasks: names; empty: all.
        data: a folder of local files; None: the hub.
    Raises:
        SuiteError: a task that is not of the suite; no such folder; a file that is missing, or
            there twice.
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
    if not folder.is_dir():
        raise SuiteError(f"no folder of evaluation data at {folder}")
    found = {name: source for name in chosen if (source := _find(folder, name)) is not None}
    missing = [name for name in chosen if name not in found]
    if missing:
        wanted = "; ".join(f"{name}: {_names(name)}" for name in missing)
        there = [name for name in chosen if name not in missing]
        rest = f"; --tasks {','.join(there)} runs what is there" if there else ""
        raise SuiteError(f"{folder} lacks the files of {len(missing)} tasks ({wanted}){rest}")
    return found


def load(sources: dict[str, Source]) -> tuple[Any, list[Any]]:
    """lm-eval's TaskManager and its tasks, with their documents.

    Raises:
        SuiteError: a file that cannot be read, or holds other rows than the hub's; a task that
            this lm-eval does not have, or that cannot be downloaded.
    """
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    # All of lm-eval's thousands of task files take seconds to read.
    root = Path(lm_eval.tasks.__file__).parent
    folders = [root / folder for folder in {TASKS[name].folder for name in sources}]
    manager = TaskManager(include_path=[str(f) for f in folders], include_defaults=False)
    if absent := set(sources) - set(manager.all_tasks):
        raise SuiteError(
            f"the installed lm-eval has no task {', '.join(sorted(absent))} in {root}: the suite"
            " needs lm-eval 0.4.13 or later"
        )
    loaded = []
    for name, source in sources.items():
        spec = name if source.path is None else _from_file(name, source)
        try:
            loaded += manager.load([spec])["tasks"].values()
        except SuiteError:
            raise
        except (OSError, ValueError, ImportError) as e:
            raise SuiteError(
                f"task `{name}` could not be loaded: {e}; --data DIR reads its documents from local"
                f" files ({_names(name)})"
            ) from e
    return manager, loaded


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


def _find(folder: Path, name: str) -> Source | None:
    for stem, split in TASKS[name].files.items():
        there = [folder / f"{stem}{ending}" for ending in ENDINGS]
        there = [path for path in there if path.is_file()]
        if len(there) > 1:
            raise SuiteError(
                f"{folder} has both {there[0].name} and {there[1].name} for {name}: leave one"
            )
        if there:
            return Source(split, there[0])
    return None


def _names(name: str) -> str:
    """The files that a task can be read from, in words."""
    return " or ".join(f"{stem}.jsonl (or .parquet)" for stem in TASKS[name].files)


def _from_file(name: str, source: Source) -> dict:
    """lm-eval's definition of a task, with its documents from a file: only what says where they
    are is replaced. As the one member of a group: there lm-eval puts what is given over the task's
    own definition, by itself in its place."""
    if source.path is None:
        raise ValueError(f"the source of {name} is no file")
    rows = list(_rows(name, source.path))

    def documents(**_):
        from datasets import Dataset, DatasetDict

        return DatasetDict({source.split: Dataset.from_list(rows)})

    nowhere = dict.fromkeys(("training_split", "validation_split", "test_split", "fewshot_split"))
    own = nowhere | {f"{source.split}_split": source.split}
    member = {"task": name, "custom_dataset": documents, **own}
    return {"group": NAME, "task": [member]}


def _rows(name: str, path: Path) -> Iterator[dict]:
    """The rows of a file, with the columns that the task reads.

    Raises:
        SuiteError: the file cannot be read, has no rows, or a row is not like the hub's.
    """
    task, number = TASKS[name], 0
    for number, row in enumerate(_read(path), 1):
        where = f"{path}, row {number}"
        absent = [c for c in task.columns if not isinstance(row, dict) or row.get(c) is None]
        if absent:
            columns = ", ".join(f"`{column}`" for column in absent)
            raise SuiteError(f"{where} has no {columns}: {name} needs the hub's own columns")
        try:
            whole = task.can_be_scored(row)
        except (TypeError, ValueError, LookupError, AttributeError):
            whole = False
        if not whole:
            raise SuiteError(
                f"{where} cannot be scored (a split without answers?): {name} needs {task.right}"
            )
        yield {column: row[column] for column in task.columns}
    if not number:
        raise SuiteError(f"{path} has no rows")


def _read(path: Path) -> Iterator[Any]:
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            yield from pq.read_table(path).to_pylist()
        except (OSError, pa.ArrowException) as e:
            raise SuiteError(f"{path} cannot be read as parquet: {e}") from None
        return
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise SuiteError(f"{path} cannot be read: {e}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield parse_json(line)
            except ValueError as e:
                raise SuiteError(f"{path}, line {number}: not JSON ({e})") from None
