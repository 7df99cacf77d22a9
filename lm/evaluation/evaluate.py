"""Evaluation of a run or an export with lm-eval, on tasks of this project or of lm-eval.

lm-eval is imported only when it is needed, because the import takes seconds.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lm
from lm.common.errors import UserError, require
from lm.common.files import check_file, write_json
from lm.evaluation.language_model import LanguageModel, load
from lm.evaluation.tasks import TASKS_DIR
from lm.runs.metrics import find_failures, fixed_point_metrics
from lm.runs.path_checks import check_model
from lm.runs.status import is_number

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from rich.table import Table
    from transformers import PreTrainedModel

# Tasks of the suite `paper`, and the metric of each in the suite's mean (docs/evaluation.md).
PAPER_METRICS = {
    "lambada_openai": "acc",
    "hellaswag": "acc_norm",
    "piqa": "acc",
    "arc_easy": "acc",
    "arc_challenge": "acc_norm",
    "winogrande": "acc",
}


class EvaluationError(UserError, RuntimeError):
    """Evaluation that cannot run; the message has the reason and a fix."""


def evaluate(
    checkpoint: Path | str,
    tasks: list[str],
    *,
    suite: Literal["paper"] | None = None,
    limit: int | None = None,
    batch_size: int | Literal["auto"] = 8,
    out: Path | str | None = None,
    trust: bool = False,
) -> dict:
    """Evaluate a run or an export with lm-eval, and write the results to a JSON file.

    Args:
        checkpoint: A run directory (its newest checkpoint, in fp32) or an exported folder. On a
            CPU, weights are converted to fp32.
        tasks: Names of tasks, groups and tags; empty with a suite.
        suite: "paper" for the tasks of PAPER_METRICS, or None.
        limit: Number of documents per task, at least 1; None: all.
        batch_size: Number of documents in a batch, at least 1, or "auto" for as many as fit in
            memory.
        out: File to write; None: CHECKPOINT/eval/results.json.
        trust: True to run code that comes with the checkpoint, such as a custom mixer.

    Returns:
        The content of the file, with these keys among others:
        "step": update of a run's checkpoint, None for an export;
        "tasks": {task: {"metrics": {metric: {"value", "stderr", "higher_is_better"}}, …}};
        "solver": description of the solver, "none" for a model without one;
        "fixed_point": cost of the solves (`lm.runs.metrics.fixed_point_metrics`);
        "suite": only with a suite: {"metrics": metric of each task, "mean": their mean,
        "complete": True without a limit}.
        Values that are not finite are None.

    Raises:
        PathError: If `checkpoint` is neither a run nor an export.
        MissingPackageError: If lm-eval is not installed.
        EvaluationError: If a task is unknown, its data are missing, or options conflict.
        LoadError, CheckpointError: If the checkpoint is damaged.
        OutputError: If `out` cannot be written.
    """
    # 1. Check everything that can be checked before the model is loaded.
    checkpoint = Path(checkpoint)
    results_file = Path(out) if out else checkpoint / "eval" / "results.json"
    check_model(checkpoint, allow_hub=False)
    _check_options(tasks, suite)
    for package in ("lm_eval", "accelerate"):  # lm-eval needs accelerate for any HF model
        require(package, "evaluation")
    check_file(results_file)
    with _stdout_to_stderr():
        manager, selected_tasks = load_tasks(list(PAPER_METRICS) if suite else tasks)
        # 2. Run the tasks.
        loaded = load(checkpoint, trust)
        raw_results, solves = _run(loaded, manager, selected_tasks, batch_size, limit)
    # 3. Write the results.
    results = {
        "checkpoint": checkpoint.resolve().name,
        "step": loaded.step,
        "limit": limit,
        "batch_size": batch_size,
        **_collect_results(loaded.model, raw_results, solves),
    }
    if suite:
        results["suite"] = _summarize_suite(results["tasks"], is_complete=limit is None)
    write_json(results_file, results)
    return results


def _check_options(tasks: list[str], suite: str | None) -> None:
    """Raise EvaluationError unless either tasks or a suite are given."""
    if suite and tasks:
        raise EvaluationError(f"--suite {suite} defines the tasks: do not give --tasks as well")
    if not suite and not tasks:
        raise EvaluationError(
            "no tasks are given: --tasks catbabi_mini needs no network, --suite paper runs the six"
            " tasks of the paper"
        )


def _make_manager(names: list[str]) -> TaskManager:
    """Return lm-eval's TaskManager for these tasks.

    Raises:
        EvaluationError: If a task is unknown; the message suggests similar names.
    """
    from lm_eval.tasks import TaskManager

    # Read lm-eval's own task files only if they are needed: reading them takes seconds.
    manager = TaskManager(include_path=[str(TASKS_DIR)], include_defaults=False)
    if not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=[str(TASKS_DIR)])
    problems = []
    for name in sorted(set(names) - set(manager.all_tasks)):
        similar = difflib.get_close_matches(name, manager.all_tasks)
        hint = f"; similar names are {', '.join(f'`{n}`' for n in similar)}" if similar else ""
        problems.append(f"unknown task `{name}`{hint}")
    if problems:
        raise EvaluationError("; ".join(problems) + " (`lm_eval ls tasks` lists lm-eval's own)")
    return manager


def load_tasks(names: list[str]) -> tuple[TaskManager, list[Any]]:
    """Return lm-eval's TaskManager, and its objects for tasks and groups, with their documents.

    Args:
        names: Names of tasks, groups and tags.

    Raises:
        EvaluationError: If a task is unknown, or its documents cannot be loaded.
    """
    manager = _make_manager(names)
    selected = []
    for name in names:
        try:
            loaded = manager.load([name])
        except (OSError, ValueError, ImportError) as error:
            raise EvaluationError(f"task `{name}` could not be loaded: {error}") from error
        # `loaded` also lists the members of each group, which the group object runs itself.
        members = {child for group in loaded["groups"] for child in loaded["group_map"][group]}
        objects = loaded["groups"] | loaded["tasks"]
        selected += [item for key, item in objects.items() if key not in members]
    return manager, selected


def _run(
    loaded: LanguageModel,
    manager: TaskManager,
    tasks: list[Any],
    batch_size: int | str,
    limit: int | None,
) -> tuple[dict, list]:
    """Return lm-eval's raw results, and the model's report on the solves of each forward pass."""
    import lm_eval

    model = loaded.model.float() if loaded.model.device.type == "cpu" else loaded.model
    solves = []

    def record_solves(module, args, output):
        if getattr(output, "fixed_point", None) is not None:
            solves.append(output.fixed_point)

    with contextlib.ExitStack() as hooks:
        hooks.callback(model.register_forward_hook(record_solves).remove)
        # As in training, text that spells a special token is text.
        loaded.tokenizer.split_special_tokens = True
        raw = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": model, "tokenizer": loaded.tokenizer},
            device=model.device.type,
            tasks=tasks,
            task_manager=manager,
            batch_size=batch_size,
            limit=limit,
            bootstrap_iters=1000,  # for standard errors; lm-eval's default of 100,000 is slow
            log_samples=False,
        )
    return raw, solves


def make_table(results: dict) -> Table:
    """Return the results of `evaluate` as a table: per metric one row, value ± standard error.

    For a suite, show one metric per task and their mean. A caption warns if the solver failed at
    too many tokens.
    """
    from rich.table import Table

    title = results["checkpoint"]
    if results["limit"]:
        title += f" (first {results['limit']} documents)"
    failures = find_failures(results["fixed_point"], results["solver"])
    caption = "\n".join(f"warning: {text}" for text in failures.values()) or None
    table = Table(title=title, caption=caption)
    table.add_column("task")
    table.add_column("n", justify="right")
    table.add_column("metric")
    table.add_column("value", justify="right")
    suite = results.get("suite")
    for name, task in results["tasks"].items():
        metrics = [suite["metrics"][name]] if suite else task["metrics"]
        label, count = name, "" if task["samples"] is None else str(task["samples"])
        for metric in metrics:  # only the first row of a task has its label and count
            entry = task["metrics"][metric]
            arrow = {True: " ↑", False: " ↓"}.get(entry["higher_is_better"], "")
            value = "not finite" if entry["value"] is None else f"{entry['value']:.4g}"
            if entry["stderr"] is not None:
                value += f" ± {entry['stderr']:.2g}"
            table.add_row(label, count, metric + arrow, value)
            label = count = ""
    if suite:
        table.add_section()
        mean = "not finite" if suite["mean"] is None else f"{suite['mean']:.4g}"
        table.add_row(f"mean of the suite's {len(suite['metrics'])}", "", "accuracies", mean)
    return table


def _summarize_suite(task_results: dict[str, dict], is_complete: bool) -> dict:
    """Return the metric of each task of the suite, and their mean, None if one is not finite."""
    values = [
        task_results[task]["metrics"][metric]["value"] for task, metric in PAPER_METRICS.items()
    ]
    mean = None if None in values else sum(values) / len(values)
    return {"metrics": PAPER_METRICS, "mean": mean, "complete": is_complete}


def _collect_results(model: PreTrainedModel, raw: dict, solves: list) -> dict:
    """Return the results that depend on the model, from the values that `_run` returns."""
    versions = {"fprnn": lm.__version__}
    for package in ("lm_eval", "transformers", "torch"):
        versions[package] = importlib.metadata.version(package)
    return {
        "device": model.device.type,
        "solver": model.solver() if hasattr(model, "solver") else "none",
        "fixed_point": fixed_point_metrics(solves),
        "versions": versions,
        "tasks": {name: _collect_task_results(raw, name) for name in raw["results"]},
    }


def _collect_task_results(raw: dict, name: str) -> dict:
    """Return the results of a task from lm-eval's raw results.

    Keys of lm-eval are "METRIC,FILTER": "acc,none" and "acc_stderr,none", for example. A filter
    processes the model's output before it is scored.
    """
    values = raw["results"][name]
    higher_is_better = raw.get("higher_is_better", {}).get(name, {})
    metrics = {}
    for key, value in values.items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr"):  # no comma: "alias" or "sample_len"
            continue
        stderr = values.get(f"{metric}_stderr,{filter_name}")  # lm-eval writes "N/A" if unknown
        metrics[metric if filter_name == "none" else f"{metric}/{filter_name}"] = {
            "value": value if is_number(value) else None,
            "stderr": stderr if is_number(stderr) else None,
            "higher_is_better": higher_is_better.get(metric),
        }
    return {
        "version": raw.get("versions", {}).get(name),
        "samples": raw.get("n-samples", {}).get(name, {}).get("effective"),
        "num_fewshot": raw.get("n-shot", {}).get(name),
        "metrics": metrics,
    }


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Print lm-eval's progress and warnings to stderr, and hide its log messages of level INFO."""
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    logging.getLogger("lm_eval.api.task").setLevel(logging.ERROR)  # hides hints on --metadata
    # Otherwise lm-eval forks a bootstrapping process per core, which is unsafe with torch threads.
    os.environ["DISABLE_MULTIPROC"] = "1"
    with contextlib.redirect_stdout(sys.stderr):
        yield
