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
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lm
from lm.common.errors import UserError, missing_package
from lm.common.files import check_file, write_json
from lm.evaluation import facade
from lm.evaluation.tasks import TASKS_DIR, paper
from lm.export.measured import add_measured
from lm.runs import places
from lm.runs.metrics import failures, fixed_point_metrics

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from rich.table import Table

AUTO = "auto"  # the batch size that lm-eval finds
OF_TEXT = ("perplexity", "bits_per_byte")  # shown next to a suite task's accuracy


class EvaluationError(UserError, RuntimeError):
    """An evaluation that cannot be run; the message gives the reason and a cure."""


def evaluate(
    checkpoint: Path,
    tasks: list[str],
    *,
    suite: str | None = None,
    data: Path | None = None,
    limit: int | None = None,
    batch_size: int | Literal["auto"] = 8,
    out: Path | None = None,
    trust: bool = False,
) -> dict:
    """Run lm-eval on a run directory (its newest checkpoint, in fp32) or an export.

    Args:
        checkpoint: A run directory or an exported folder; weights are float32 on the CPU, on a GPU
            as saved.
        tasks: Names of tasks, groups and tags; of a suite those to run (none: all).
        suite: "paper" (lm/evaluation/tasks/paper.py) or None.
        data: Folder of local files that a suite reads in place of the hub.
        limit: Number of documents of each task; None: all.
        batch_size: Documents at once; "auto": the most that memory holds, found by trying.
        out: Results file; default: checkpoint/eval/results.json.
        trust: Run the code that a checkpoint brings along.

    Returns:
        The content of the file: {"tasks": {name: {"metrics": {metric: {"value", "stderr", …}}, …}},
        "solver", "fixed_point", "versions", …}, of a suite also "suite" (`paper.scores`). Numbers
        that are not finite are None. Tasks that give a perplexity to each document's continuation,
        such as LAMBADA, also have "bits_per_byte". "solver" describes the solver ("none" without
        one), "fixed_point" its cost (`lm.runs.metrics.fixed_point_metrics`).

    Raises:
        PlaceError: Neither a run nor an export is there.
        EvaluationError, SuiteError: lm-eval is not installed, a task is unknown, or its data are
            missing.
        LoadError, CheckpointError: The checkpoint is damaged.
        OutputError: `out` cannot be written.
    """
    # 1. Refuse what can be refused before the model is loaded.
    checkpoint = Path(checkpoint)
    places.find_model(checkpoint, on_hub=False)
    _check_options(tasks, suite, data, limit, batch_size)
    for package in ("lm_eval", "accelerate"):  # lm-eval needs accelerate for any HF model
        if importlib.util.find_spec(package) is None:
            raise missing_package(package, "evaluation")
    path = Path(out) if out else checkpoint / "eval" / "results.json"
    check_file(path)
    sources = paper.choose(tasks, data) if suite else {}
    with _stdout_to_stderr():
        manager, selected = load_tasks(tasks, sources)
        # 2. Run the tasks.
        loaded = facade.load(checkpoint, trust)
        raw, solves = _run(loaded, manager, selected, batch_size, limit)
    # 3. Write the results.
    scored = {name: _task_results(raw, name) for name in sorted(raw["results"], key=natural)}
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
        results["suite"] = paper.scores(sources, scored, limit)
    write_json(path, results)
    if out is None:
        add_measured(checkpoint)
    return results


def natural(name: str) -> list:
    """Return a sort key that puts traces_s3_4 before traces_s3_16."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _check_options(
    tasks: list[str],
    suite: str | None,
    data: Path | None,
    limit: int | None,
    batch_size: int | str,
) -> None:
    if limit is not None and limit < 1:
        raise EvaluationError(f"limit is {limit}: it is the number of documents, at least 1")
    if batch_size != AUTO and (isinstance(batch_size, str) or batch_size < 1):
        raise EvaluationError(f"batch_size is {batch_size}: it must be at least 1, or {AUTO}")
    if suite not in (None, paper.NAME):
        raise EvaluationError(f"no suite `{suite}`: there is one, `{paper.NAME}`")
    if suite is None and data is not None:
        raise EvaluationError(
            "--data is the folder of a suite's files: give --suite paper with it (`text_local`"
            " reads the folder that FPRNN_EVAL_DATA names)"
        )
    if suite is None and not tasks:
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


def load_tasks(names: list[str], sources: dict[str, paper.Source]) -> tuple[TaskManager, list[Any]]:
    """Return lm-eval's manager, and its tasks and groups with their documents.

    Args:
        names: Names of tasks, groups and tags; not read with `sources`.
        sources: Tasks of a suite, from `paper.choose`; {} without a suite.

    Raises:
        EvaluationError, SuiteError: A task is unknown, or its documents cannot be had.
    """
    specs: dict[str, str | dict] = {name: name for name in names}
    if sources:
        manager = paper.make_manager(sources)
        specs = {name: paper.task_spec(name, source) for name, source in sources.items()}
    else:
        manager = _make_manager(names)
    selected = []
    for name, spec in specs.items():
        try:
            loaded = manager.load([spec])
        except (OSError, ValueError, ImportError) as error:
            hint = ""
            if name in paper.TASKS:
                hint = f"; --suite paper --data DIR reads it from {paper.file_names(name)}"
            raise EvaluationError(f"task `{name}` could not be loaded: {error}{hint}") from error
        # A suite's local file makes its task the member of a group, which has no results.
        groups = loaded["groups"] if spec == name else {}
        nested = {child for group in groups for child in loaded["group_map"][group]}
        items = groups | loaded["tasks"]
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
            log_samples=True,  # for bits per byte
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
    found = failures(of, results["solver"])
    warnings = [f"warning: {text}" for text in found.values()]
    out = Table("task", "n", "metric", "value", title=title, caption="\n".join(warnings) or None)
    for column in (1, 3):
        out.columns[column].justify = "right"
    suite = results.get("suite")
    for name in suite["tasks"] if suite else results["tasks"]:
        task = results["tasks"][name]
        label, count = name, "" if task["samples"] is None else str(task["samples"])
        metrics = list(task["metrics"])
        if suite:
            row = suite["tasks"][name]
            label += "" if row["split"] == row["split_of_lm_eval"] else f" ({row['split']})"
            metrics = [row["metric"], *(m for m in OF_TEXT if m in metrics)]
        for metric in metrics:
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
        of = len(suite["tasks"])
        out.add_row(f"mean of {of} of the suite's {len(paper.TASKS)}", "", "accuracies", mean)
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
    if "perplexity" in metrics:
        bits = _bits_per_byte(raw.get("samples", {}).get(name, []))
        if bits is not None:
            metrics["bits_per_byte"] = {"value": bits, "stderr": None, "higher_is_better": False}
    return {
        "version": raw.get("versions", {}).get(name),
        "samples": raw.get("n-samples", {}).get(name, {}).get("effective"),
        "num_fewshot": raw.get("n-shot", {}).get(name),
        "metrics": metrics,
    }


def _bits_per_byte(samples: list[dict]) -> float | None:
    """Of a task that scores one continuation of each document: the bits of all of them for each
    byte that they have in UTF-8. None of tasks of another kind.

    Args:
        samples: as lm-eval logs them, once for each of the task's filters.
    """
    from lm.data.batches.text_bytes import bits_per_byte

    nats = total = 0
    for sample in samples:
        if sample["filter"] != samples[0]["filter"]:
            continue
        try:
            ((context, continuation),) = sample["arguments"]
            (((likelihood, _),),) = sample["resps"]
        except (TypeError, ValueError):
            return None
        # lm-eval takes the white space at the end of a context for the continuation's.
        total += len((context[len(context.rstrip()) :] + continuation).encode())
        nats -= likelihood
    return _finite(bits_per_byte(nats, total))


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
    logging.getLogger("lm_eval.models.huggingface").addFilter(_is_warning)
    # lm-eval would fork a bootstrapping process per core from a process that runs torch.
    os.environ["DISABLE_MULTIPROC"] = "1"
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _is_warning(record: logging.LogRecord) -> bool:
    """Return whether a record of lm-eval is no note on the model that it is given loaded."""
    return "`pretrained`" not in record.getMessage()
