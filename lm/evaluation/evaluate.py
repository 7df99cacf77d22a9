"""lm-eval on a run or an exported checkpoint: our offline tasks and the standard ones, as a file.

lm-eval itself is heavy and imported only when it is used.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import importlib.util
import logging
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lm
from lm.common.errors import UserError, missing_package
from lm.common.files import check_file, write_json
from lm.evaluation import facade
from lm.evaluation.tasks import TASKS_DIR
from lm.runs import places
from lm.runs.metrics import find_failures, fixed_point_metrics

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from rich.table import Table

# The suite `paper`: lm-eval's own tasks, and the metric that stands for each (docs/evaluation.md).
PAPER = {
    "lambada_openai": "acc",
    "hellaswag": "acc_norm",
    "piqa": "acc",
    "arc_easy": "acc",
    "arc_challenge": "acc_norm",
    "winogrande": "acc",
}


class EvaluationError(UserError, RuntimeError):
    """An evaluation that cannot be run; the message gives the reason and a cure."""


def evaluate(
    checkpoint: Path,
    tasks: list[str],
    *,
    suite: Literal["paper"] | None = None,
    limit: int | None = None,
    batch_size: int | Literal["auto"] = 8,
    out: Path | None = None,
    trust: bool = False,
) -> dict:
    """Run lm-eval on a run directory (its newest checkpoint, in fp32) or an export.

    Args:
        checkpoint: A run directory or an exported folder; weights are float32 on the CPU, on a GPU
            as saved.
        tasks: Names of tasks, groups and tags; none with a suite.
        suite: "paper", the tasks of PAPER, or None.
        limit: Number of documents of each task, at least 1; None: all.
        batch_size: Documents at once, at least 1; "auto": the most that memory holds.
        out: Results file; default: checkpoint/eval/results.json.
        trust: Run the code that a checkpoint brings along.

    Returns:
        The content of the file: {"tasks": {name: {"metrics": {metric: {"value", "stderr", …}}, …}},
        "solver", "fixed_point", "versions", …}, of a suite also "suite": {"metrics": the one of
        each task, "mean": of these, "complete": all documents were scored}. Numbers
        that are not finite are None. "solver" describes the solver ("none" without one),
        "fixed_point" its cost (`lm.runs.metrics.fixed_point_metrics`).

    Raises:
        PlaceError: Neither a run nor an export is there.
        MissingPackageError: lm-eval is not installed.
        EvaluationError: A task is unknown, its data are missing, or options do not fit.
        LoadError, CheckpointError: The checkpoint is damaged.
        OutputError: `out` cannot be written.
    """
    # 1. Refuse what can be refused before the model is loaded.
    checkpoint = Path(checkpoint)
    places.find_model(checkpoint, on_hub=False)
    _check_options(tasks, suite)
    for package in ("lm_eval", "accelerate"):  # lm-eval needs accelerate for any HF model
        if importlib.util.find_spec(package) is None:
            raise missing_package(package, "evaluation")
    path = Path(out) if out else checkpoint / "eval" / "results.json"
    check_file(path)
    with _stdout_to_stderr():
        manager, selected = load_tasks(list(PAPER) if suite else tasks)
        # 2. Run the tasks.
        loaded = facade.load(checkpoint, trust)
        raw, solves = _run(loaded, manager, selected, batch_size, limit)
    # 3. Write the results.
    scored = {name: _task_results(raw, name) for name in raw["results"]}
    results = {
        "checkpoint": checkpoint.resolve().name,
        "limit": limit,
        "batch_size": batch_size,
        "device": loaded.model.device.type,
        "solver": loaded.model.solver() if hasattr(loaded.model, "solver") else "none",
        "fixed_point": fixed_point_metrics(solves),
        "versions": {"fprnn": lm.__version__}
        | {name: importlib.metadata.version(name) for name in ("lm_eval", "transformers", "torch")},
        "tasks": scored,
    }
    if suite:
        values = [scored[name]["metrics"][metric]["value"] for name, metric in PAPER.items()]
        mean = None if None in values else sum(values) / len(values)
        results["suite"] = {"metrics": PAPER, "mean": mean, "complete": limit is None}
    write_json(path, results)
    return results


def _check_options(tasks: list[str], suite: str | None) -> None:
    if suite and tasks:
        raise EvaluationError(f"--suite {suite} has its own tasks: give it without --tasks")
    if not suite and not tasks:
        raise EvaluationError(
            "no tasks given: --tasks catbabi_mini needs no network, --suite paper are the six that"
            " language models are compared by"
        )


def _make_manager(names: list[str]) -> TaskManager:
    """Return lm-eval's TaskManager, which knows our tasks, and its own where these are asked for.

    Raises:
        EvaluationError: Unknown tasks; the message suggests names.
    """
    from lm_eval.tasks import TaskManager

    # lm-eval needs seconds to read its own thousands of task files.
    manager = TaskManager(include_path=[str(TASKS_DIR)], include_defaults=False)
    if not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=[str(TASKS_DIR)])
    problems = []
    for name in sorted(set(names) - set(manager.all_tasks)):
        close = difflib.get_close_matches(name, manager.all_tasks, 3, 0.6)
        hint = f"; the nearest are {', '.join(f'`{c}`' for c in close)}" if close else ""
        problems.append(f"unknown task `{name}`{hint}")
    if problems:
        raise EvaluationError("; ".join(problems) + " (`lm_eval ls tasks` lists lm-eval's own)")
    return manager


def load_tasks(names: list[str]) -> tuple[TaskManager, list[Any]]:
    """Return lm-eval's manager, and its tasks and groups with their documents.

    Args:
        names: Names of tasks, groups and tags.

    Raises:
        EvaluationError: A task is unknown, or its documents cannot be had.
    """
    manager = _make_manager(names)
    selected = []
    for name in names:
        try:
            loaded = manager.load([name])
        except (OSError, ValueError, ImportError) as error:
            raise EvaluationError(f"task `{name}` could not be loaded: {error}") from error
        nested = {child for group in loaded["groups"] for child in loaded["group_map"][group]}
        items = loaded["groups"] | loaded["tasks"]
        selected += [item for key, item in items.items() if key not in nested]
    return manager, selected


def _run(
    loaded: facade.LanguageModel,
    manager: TaskManager,
    tasks: list[Any],
    batch_size: int | str,
    limit: int | None,
) -> tuple[dict, list]:
    """Return lm-eval's raw results and the statistics of every solve."""
    import lm_eval

    model = loaded.model.float() if loaded.model.device.type == "cpu" else loaded.model
    solves = []

    def keep(module, args, output):
        if getattr(output, "fixed_point", None) is not None:
            solves.append(output.fixed_point)

    with contextlib.ExitStack() as hooks:
        hooks.callback(model.register_forward_hook(keep).remove)
        raw = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": model, "tokenizer": loaded.tokenizer},
            device=model.device.type,
            tasks=tasks,
            task_manager=manager,
            batch_size=batch_size,
            limit=limit,
            bootstrap_iters=1000,
            log_samples=False,
        )
    return raw, solves


def table(results: dict) -> Table:
    """Return results of `evaluate` as a table: a row for each metric, value ± standard error.

    A suite shows the metric that stands for each task, and their mean. A warning stands below where
    too many tokens were not solved.
    """
    from rich.table import Table

    title = results["checkpoint"]
    if results["limit"]:
        title += f" (first {results['limit']} documents)"
    of = results["fixed_point"]
    found = find_failures(of, results["solver"])
    warnings = [f"warning: {text}" for text in found.values()]
    out = Table("task", "n", "metric", "value", title=title, caption="\n".join(warnings) or None)
    for column in (1, 3):
        out.columns[column].justify = "right"
    suite = results.get("suite")
    for name, task in results["tasks"].items():
        shown = [suite["metrics"][name]] if suite else task["metrics"]
        label, count = name, "" if task["samples"] is None else str(task["samples"])
        for metric in shown:
            entry = task["metrics"][metric]
            arrow = {True: " ↑", False: " ↓"}.get(entry["higher_is_better"], "")
            value = "not finite" if entry["value"] is None else f"{entry['value']:.4g}"
            if entry["stderr"] is not None:
                value += f" ± {entry['stderr']:.2g}"
            out.add_row(label, count, metric + arrow, value)
            label = count = ""
    if suite:
        out.add_section()
        mean = "not finite" if suite["mean"] is None else f"{suite['mean']:.4g}"
        out.add_row(f"mean of the suite's {len(suite['metrics'])}", "", "accuracies", mean)
    return out


def _task_results(raw: dict, name: str) -> dict:
    """lm-eval's flat {"acc,none": …, "acc_stderr,none": …} of one task, unfolded."""
    flat = raw["results"][name]
    better = raw.get("higher_is_better", {}).get(name, {})
    metrics = {}
    for key, value in flat.items():
        metric, comma, chain = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        metrics[metric if chain == "none" else f"{metric}/{chain}"] = {
            "value": _finite(value),
            "stderr": _finite(flat.get(f"{metric}_stderr,{chain}")),
            "higher_is_better": better.get(metric),
        }
    return {
        "version": raw.get("versions", {}).get(name),
        "samples": raw.get("n-samples", {}).get(name, {}).get("effective"),
        "num_fewshot": raw.get("n-shot", {}).get(name),
        "metrics": metrics,
    }


def _finite(value: Any) -> float | None:
    """A number JSON can hold, or None (lm-eval writes "N/A" where it has no standard error)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Keep lm-eval's progress and warnings, on stderr, and hide its notes."""
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    logging.getLogger("lm_eval.api.task").setLevel(logging.ERROR)  # it explains --metadata
    # lm-eval would fork a bootstrapping process per core from a process that runs torch.
    os.environ["DISABLE_MULTIPROC"] = "1"
    with contextlib.redirect_stdout(sys.stderr):
        yield
