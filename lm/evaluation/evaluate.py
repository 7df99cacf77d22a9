"""lm-eval on an exported checkpoint: our offline tasks and the standard ones, to a results file.

`import lm` registers our model classes with transformers' Auto classes, so our own code is run and
not the copy in the checkpoint; lm-eval itself is heavy and imported only when it is used.
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
from lm.runs.exported import load_model, load_tokenizer
from lm.runs.metrics import failures, fixed_point_metrics

if TYPE_CHECKING:
    from rich.table import Table

# lm-eval's warnings about what is as it should be.
_NOISE = (
    "Custom kwargs can be passed",
    "Overwriting default num_fewshot",
    "`pretrained` model kwarg is not of type `str`",
)
AUTO = "auto"  # the batch size that lm-eval finds


OF_TEXT = ("perplexity", "bits_per_byte")  # shown beside a suite task's accuracy


class EvaluationError(UserError, RuntimeError):
    """An evaluation that cannot be run; the message says why, and what would do."""


def evaluate(
    checkpoint: Path,
    tasks: list[str],
    *,
    suite: str | None = None,
    data: Path | None = None,
    limit: int | None = None,
    batch_size: int | Literal["auto"] = 8,
    device: str | None = None,
    include_path: Path | None = None,
    num_fewshot: int | None = None,
    out: Path | None = None,
    trust: bool = False,
) -> dict:
    """Run lm-eval's `tasks` (names of tasks, groups, tags) on a run directory or an export.

    Of a run directory the newest complete checkpoint is evaluated, in fp32.
    `suite` is "paper" (lm/evaluation/tasks/paper.py) or None; of a suite `tasks` chooses (none:
    all), and `data` is a folder of local files that take the place of the hub. `limit` takes only
    that many documents of each task; `batch_size` "auto" is the largest that memory holds, which
    lm-eval finds by trying; `include_path` is a folder with further task files. Weights
    are float32 on the CPU, elsewhere as saved; `trust` runs the code of a checkpoint that is not
    ours. The results go to `out`, by default checkpoint/eval/results.json, and are returned:
    {"tasks": {name: {"metrics": {metric: {"value", "stderr", …}}, …}}, "solver", "fixed_point",
    "versions": …, …}, of a suite also "suite", see `lm.evaluation.tasks.paper.scores`; a number
    that is not finite is None there. Tasks that give a perplexity
    to each document's continuation, such as LAMBADA, also have "bits_per_byte". `solver` is what
    the model says it solves by ("none" without a solver), `fixed_point` what that cost and left,
    see `lm.runs.metrics.fixed_point_metrics`.

    Raises:
        PlaceError: no run and no export there.
        EvaluationError: lm-eval is not installed, an unknown task, a task whose data cannot be had,
            or that has fewer examples than `num_fewshot`. SuiteError: the same, of a suite.
        LoadError, CheckpointError: a damaged checkpoint. OutputError: `out` cannot be written.
    """
    # 1. Everything that can be refused is refused before the model is loaded.
    checkpoint = Path(checkpoint)
    kind = places.find_model(checkpoint, on_hub=False)
    _check_numbers(limit, batch_size, num_fewshot)
    sources = _check_tasks(tasks, suite, data, include_path, num_fewshot)
    if sources is not None:
        num_fewshot = 0
    _check_lm_eval()
    path = Path(out) if out else checkpoint / "eval" / "results.json"
    check_file(path)
    with _quiet():
        if sources is None:
            manager, selected = _load_tasks(tasks, include_path)
        else:
            manager, selected = paper.load(sources)
        _check_examples(selected, num_fewshot)
        device = device or _default_device()
        solver, model_args = _model_for_lm_eval(checkpoint, kind, device, trust)
        # 2. The tasks.
        with _solves() as solves:
            raw = _run_lm_eval(
                model_args,
                device,
                tasks=selected,
                task_manager=manager,
                num_fewshot=num_fewshot,
                batch_size=batch_size,
                limit=limit,
            )
    # 3. What came out.
    of_tasks = {name: _task_results(raw, name) for name in sorted(raw["results"], key=natural)}
    results = {
        "checkpoint": checkpoint.resolve().name,
        "limit": limit,
        "num_fewshot": num_fewshot,
        "batch_size": batch_size,
        "device": str(device),
        "solver": solver,
        "fixed_point": fixed_point_metrics(solves),
        "versions": _versions(),
        "tasks": of_tasks,
    }
    if sources is not None:
        results["suite"] = paper.scores(sources, of_tasks, limit)
    write_json(path, results)
    if out is None:
        add_measured(checkpoint)
    return results


def natural(name: str) -> list:
    """A key of sorting that puts traces_s3_4 before traces_s3_16."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _model_for_lm_eval(
    checkpoint: Path, kind: str, device: str, trust: bool
) -> tuple[dict | str, dict]:
    """Load a checkpoint, and return how its model is solved and what lm-eval is given of it.

    lm-eval reads an export itself, so that `accelerate launch` can do so on every GPU. It cannot
    read a run directory, so it gets the model.

    Args:
        kind: "run" or "export".

    Returns:
        (the solver as the model describes it, "none" without one; lm-eval's `model_args`).

    Raises:
        LoadError, CheckpointError: The tokenizer or the weights are damaged or missing. lm-eval
            would continue with random weights in place of missing ones.
    """
    args: dict[str, Any]
    if kind == "run":
        loaded = facade.load(checkpoint, trust)
        model = loaded.model.to(device)
        args = {"pretrained": model, "tokenizer": loaded.tokenizer}
    else:
        load_tokenizer(checkpoint, trust)
        model = load_model(checkpoint, trust).eval()
        dtype = "float32" if device == "cpu" else "auto"
        args = {"pretrained": str(checkpoint), "trust_remote_code": trust, "dtype": dtype}
    return model.solver() if hasattr(model, "solver") else "none", args


def _run_lm_eval(model_args: dict, device: str, **options) -> dict:
    """Return lm-eval's raw results.

    Args:
        options: Of `lm_eval.simple_evaluate`.
    """
    import lm_eval

    return lm_eval.simple_evaluate(
        model="hf",
        model_args=model_args,
        device=device,
        bootstrap_iters=1000,
        log_samples=True,  # for bits per byte
        **options,
    )


def table(results: dict) -> Table:
    """What `evaluate` returned, as a table: a row for each metric, value ± standard error; of a
    suite the metric that stands for each task, and their mean. Below it a warning where too many
    tokens were not solved."""
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


@contextlib.contextmanager
def _solves() -> Iterator[list]:
    """A list of the statistics of all solves that any model makes within the block: lm-eval builds
    the model itself, so its outputs are seen by a hook on all modules."""
    from torch.nn.modules.module import register_module_forward_hook

    solves = []

    def keep(module, args, output):
        # By name: of an export whose code is its own the class is another than ours.
        is_whole = type(output).__name__ == "FPRNNCausalLMOutput"
        if is_whole and output.fixed_point is not None:
            solves.append(output.fixed_point)

    hook = register_module_forward_hook(keep)
    try:
        yield solves
    finally:
        hook.remove()


def _check_numbers(limit: int | None, batch_size: int | str, num_fewshot: int | None) -> None:
    if limit is not None and limit < 1:
        raise EvaluationError(f"limit is {limit}: it is the number of documents, at least 1")
    if batch_size != AUTO and (isinstance(batch_size, str) or batch_size < 1):
        raise EvaluationError(f"batch_size is {batch_size}: it must be at least 1, or {AUTO}")
    if num_fewshot is not None and num_fewshot < 0:
        raise EvaluationError(f"num_fewshot is {num_fewshot}: it must be at least 0")


def _check_tasks(
    tasks: list[str],
    suite: str | None,
    data: Path | None,
    include_path: Path | None,
    num_fewshot: int | None,
) -> dict[str, paper.Source] | None:
    """Where the documents of a suite's tasks come from; None without a suite.

    Raises:
        EvaluationError: options that do not go together, no folder at `include_path`. SuiteError:
            files are missing.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise EvaluationError(f"include_path {include_path} is not a folder")
    if suite is None:
        if data is not None:
            raise EvaluationError(
                "--data is the folder of a suite's files: give --suite paper with it"
                " (`text_local` reads the folder that FPRNN_EVAL_DATA names)"
            )
        if not tasks:
            raise EvaluationError(
                "no tasks given: --tasks catbabi_mini needs no network, --suite paper are the six"
                " that language models are compared by"
            )
        return None
    if suite != paper.NAME:
        raise EvaluationError(f"no suite `{suite}`: there is one, `{paper.NAME}`")
    if include_path is not None:
        raise EvaluationError(
            "--include-path adds tasks of one's own, and a suite has none of them"
        )
    if num_fewshot:
        raise EvaluationError(
            f"num_fewshot is {num_fewshot}: the suite `{suite}` is zero-shot; its tasks are run"
            " with examples by --tasks, without --suite"
        )
    return paper.choose(tasks, data)


def _check_examples(selected: list, num_fewshot: int | None) -> None:
    """Refuse more examples than a task has, which lm-eval would find out after loading the model.

    Args:
        selected: Tasks and groups as `_load_tasks` returns them.

    Raises:
        EvaluationError: A task has fewer than `num_fewshot` examples.
    """
    if not num_fewshot:
        return
    for item in selected:
        for task in item.get_all_tasks() if hasattr(item, "get_all_tasks") else [item]:
            if not hasattr(task, "sampler"):
                continue  # a task that shows no examples, such as a perplexity
            count = len(list(task.fewshot_docs()))
            if task.fewshot_cfg.split == task.config.test_split:
                count -= 1  # a document is no example of itself
            if num_fewshot > count:
                raise EvaluationError(
                    f"num_fewshot is {num_fewshot}: task `{task.config.task}` has"
                    f" {max(count, 0)} examples to show"
                )


def _check_lm_eval() -> None:
    # accelerate comes with lm_eval[hf]; without it lm-eval fails late and obscurely.
    for package in ("lm_eval", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise missing_package(package, "evaluation")


def _load_tasks(names: list[str], include_path: Path | None) -> tuple[Any, list[Any]]:
    """lm-eval's TaskManager and the named tasks and groups, loaded before the model is, so that
    errors come early."""
    from lm_eval.tasks import TaskManager

    folders = [str(TASKS_DIR)] + ([str(include_path)] if include_path else [])
    # Reading lm-eval's own thousands of task files takes seconds; ours alone take none.
    manager = TaskManager(include_path=folders, include_defaults=False)
    if not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=folders)
    known = set(manager.all_tasks)
    problems = []
    for name in sorted(set(names) - known):
        close = difflib.get_close_matches(name, sorted(known), 3, 0.6)
        problems.append(
            f"unknown task `{name}`"
            + (f"; the nearest are {', '.join(f'`{c}`' for c in close)}" if close else "")
        )
    if problems:
        raise EvaluationError("; ".join(problems) + " (`lm_eval ls tasks` lists lm-eval's own)")
    selected = []
    for name in dict.fromkeys(names):
        try:
            loaded = manager.load([name])
        except (OSError, ValueError, ImportError) as error:
            raise EvaluationError(f"task `{name}` could not be loaded: {error}") from error
        grouped = {task for group in loaded["groups"].values() for task in group.get_all_tasks()}
        nested = {child for children in loaded["group_map"].values() for child in children}
        selected += [g for n, g in loaded["groups"].items() if n not in nested]
        selected += [t for t in loaded["tasks"].values() if t not in grouped]
    return manager, selected


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


def _versions() -> dict[str, str | None]:
    """Of this package, and of those that an evaluation runs on."""
    packages = ("lm_eval", "transformers", "torch")
    return {"fprnn": lm.__version__} | {package: _version(package) for package in packages}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave the progress bars of the evaluation and real warnings, hush the rest."""
    from transformers.utils import logging as hf_logging

    def keep(record: logging.LogRecord) -> bool:
        return not any(text in record.getMessage() for text in _NOISE)

    names = ("lm_eval.api.task", "lm_eval.evaluator", "lm_eval.models.huggingface")
    logger, level = logging.getLogger("lm_eval"), logging.getLogger("lm_eval").level
    hf_level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    serial = os.environ.get("DISABLE_MULTIPROC")
    logger.setLevel(logging.WARNING)
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    # lm-eval would fork one bootstrapping process a core out of a process that runs torch.
    os.environ["DISABLE_MULTIPROC"] = "1"
    for name in names:
        logging.getLogger(name).addFilter(keep)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # it prints about its bootstrapping
            yield
    finally:
        for name in names:
            logging.getLogger(name).removeFilter(keep)
        logger.setLevel(level)
        hf_logging.set_verbosity(hf_level)
        if bars:
            hf_logging.enable_progress_bar()
        if serial is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = serial
