"""Accuracy and ℓ* of a trained model over lengths and seeds."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from lm.common.console import Progress, say
from lm.common.files import check_file, write_json, writing
from lm.model.baseline_layers import AttentionState
from lm.model.state import FPRNNState
from lm.runs.metrics import fixed_point_metrics, probe
from lm.runs.run_dir import RunDir
from synthetic.build import load_run
from synthetic.config import Config
from synthetic.config import load as load_config
from synthetic.lengths import parse_ranges
from synthetic.results import AT_ONCE, IN_SEGMENTS, TOKEN_BY_TOKEN, judge_thresholds
from synthetic.tasks import Batch, Task, TaskError, splits

# A probe measures ℓ*, the iterations to the fixed point. It costs ℓ* evaluations of f per layer,
# and in state tracking ℓ* grows with the length. Therefore it reads at most this many sequences and
# tokens of a length.
MAX_PROBED_SEQUENCES = 32
MAX_PROBED_TOKENS = 2048


def parse_lengths(text: str, task: Task) -> list[int]:
    """Parse lengths to evaluate: "16,32,48", "2:50:1" (from, to, step) or "2:512" (from, to, ×√2).

    In a range, lengths that the task lacks are replaced by the next shorter ones. A length that is
    listed by itself must be valid.

    Raises:
        TaskError: If the text is not a list of lengths, or the task lacks a listed length.
    """
    try:
        ranges = parse_ranges(text)
    except ValueError as e:
        raise TaskError(f"lengths: {e}") from None
    lengths: set[int] = set()
    for candidates in ranges:
        is_range = len(candidates) > 1
        if is_range:
            valid = [
                length - (length - task.min_length) % task.length_step
                for length in candidates
                if length >= task.min_length
            ]
            candidates = valid or candidates  # if none is valid, check_length refuses them
        for length in candidates:
            task.check_length(length)
        lengths.update(candidates)
    return sorted(lengths)


class BatchTensors(NamedTuple):
    """A batch on the device of the model; all tensors have shape (b,l)."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor | None  # None if there is no padding


def move_to_device(batch: Batch, device: torch.device | str) -> BatchTensors:
    """Copy a batch of a task into tensors on a device."""

    def to_tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    mask = None if batch.mask is None else to_tensor(batch.mask)
    return BatchTensors(to_tensor(batch.input_ids), to_tensor(batch.labels), mask)


class Answers(NamedTuple):
    """Output of a model for a batch."""

    logits: torch.Tensor  # (b,l,vocab)
    statistics: list  # solver statistics of each call of the model; an entry is None without solver
    state: Any  # recurrent state after the last token; None if the model carries no state


def compute_answers(
    model: nn.Module,
    input_ids: torch.Tensor,
    mask: torch.Tensor | None,
    state: Any,
    carries_state: bool,
    token_by_token: bool,
) -> Answers:
    """Run the model on a batch.

    Args:
        model: The model.
        input_ids: Tokens, shape (b,l).
        mask: False at padding, shape (b,l), or None.
        state: State to start from; None: an empty one.
        carries_state: Whether to pass `state` to the model and to return the next state.
        token_by_token: Call the model once for each token, with the state after the previous token.
    """
    if not carries_state:
        output = model(input_ids=input_ids, attention_mask=mask)
        return Answers(output.logits, [getattr(output, "fixed_point", None)], None)
    length = input_ids.shape[1]
    tokens_per_call = 1 if token_by_token else length
    logits = []
    statistics = []
    for start in range(0, length, tokens_per_call):
        columns = slice(start, start + tokens_per_call)
        output = model(
            input_ids=input_ids[:, columns],
            attention_mask=None if mask is None else mask[:, columns],
            state=state,
            return_state=True,
        )
        state = output.state
        logits.append(output.logits)
        statistics.append(getattr(output, "fixed_point", None))
    return Answers(torch.cat(logits, 1), statistics, state)


def limit_attention(state: FPRNNState, max_keys: int) -> FPRNNState:
    """Return a state in which attention layers have only the last `max_keys` keys of each row.

    The state of a stream would otherwise need more memory and time with every segment.
    """
    layers = (
        layer.keep_last(max_keys) if isinstance(layer, AttentionState) else layer
        for layer in state.layers
    )
    return state._replace(layers=tuple(layers))


def describe_solver(model: nn.Module, length: int | None = None) -> dict | str:
    """Describe how the model, in its current mode, solves sequences of this length.

    Returns:
        {"token", "schedule", "stopping", "tol", "max_iters", "gradient"}, in which tol and
        max_iters are None if they do not apply; "none" for a model without a solver.
    """
    solver: Any = getattr(model, "solver", None)
    return "none" if solver is None else solver(length)


def override_solver(model: nn.Module, **fields: Any) -> contextlib.AbstractContextManager:
    """Return a context in which these solver fields override the model's config.

    Fields that are None keep the config's value. Without a solver, the context does nothing.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    make_context: Any = getattr(model, "solving", None)
    if fields and make_context is not None:
        return make_context(**fields)
    return contextlib.nullcontext()


def probe_first_sequences(
    model: nn.Module, input_ids: torch.Tensor, mask: torch.Tensor | None
) -> Any:
    """Measure ℓ* of the first sequences of a batch, at least one; see `metrics.probe`.

    Args:
        model: The model.
        input_ids: Tokens, shape (b,l).
        mask: False at padding, shape (b,l), or None.
    """
    count = min(
        MAX_PROBED_SEQUENCES, max(1, MAX_PROBED_TOKENS // input_ids.shape[1]), len(input_ids)
    )
    return probe(model, input_ids[:count], None if mask is None else mask[:count])


def compute_standard_error(values: np.ndarray, groups: np.ndarray) -> float:
    """Compute the standard error of a mean of items that are not all independent.

    Args:
        values: The items, shape (n,).
        groups: Group of each item, shape (n,), any integer. Items of a group depend on each other:
            they are tokens of one sequence, or repetitions of the same sequence.
    """
    _, group_index = np.unique(groups, return_inverse=True)
    sums = np.bincount(group_index, values - values.mean())
    return float(np.sqrt(np.square(sums).sum()) / len(values))


class _Scores:
    """Items (scored tokens or sequences) of each metric, over all batches of a length."""

    def __init__(self, task: Task):
        self.task = task
        self.values: dict[str, list[np.ndarray]] = {}  # metric → items of each batch
        self.groups: dict[str, list[np.ndarray]] = {}  # metric → groups of these items
        self.sample_hashes: list[np.ndarray] = []  # of each batch; empty for streams
        self.label_count = 0  # number of labels in the added batches

    def add(self, batch: Batch, predicted: np.ndarray) -> None:
        """Score the predictions (b,l) for a batch; equal sequences share a group."""
        if not self.task.streams:
            lengths = None if batch.mask is None else batch.mask.sum(1)
            self.sample_hashes.append(splits.hash_samples(batch.input_ids, lengths))
        item_rows = self.task.item_rows(batch)
        for name, items in self.task.score(predicted, batch).items():
            row = item_rows.get(name, np.arange(len(items)))
            if self.task.streams:
                group = row + self.label_count  # no two batches share a group
            else:
                group = self.sample_hashes[-1][row]
            self.values.setdefault(name, []).append(items)
            self.groups.setdefault(name, []).append(group)
        self.label_count += batch.labels.size

    def summarize(self) -> dict[str, dict[str, float]]:
        """Return {"metrics", "stderr"}: for each metric the mean of all items and its error."""
        pooled = {name: np.concatenate(items) for name, items in self.values.items()}
        pooled = {name: items for name, items in pooled.items() if len(items)}  # drop empty metrics
        errors = {
            name: compute_standard_error(items, np.concatenate(self.groups[name]))
            for name, items in pooled.items()
        }
        means = {name: float(items.mean()) for name, items in pooled.items()}
        return {"metrics": means, "stderr": errors}


def _count_training_overlap(
    task: Task, length: int, sequence_count: int, is_overlap_known: bool
) -> dict:
    """Count the test sequences that training may contain as well: {"count", "of"}.

    The count is None if it is unknown, as for streams, whose splits are files. If a length has too
    few samples for disjoint splits, training may contain all sequences.
    """
    if task.streams or not is_overlap_known:
        return {"count": None, "of": sequence_count}
    return {"count": 0 if task.is_held_out(length) else sequence_count, "of": sequence_count}


def _plan_batches(task: Task, cfg: Config, length: int, split: str) -> tuple[int, int]:
    """Return the number of batches and the sequences per batch; the data depend on both."""
    if task.streams:
        return task.segments(split, cfg.eval.batch_size, length), cfg.eval.batch_size
    batch_size = min(cfg.eval.batch_size, cfg.eval.examples)
    return math.ceil(cfg.eval.examples / batch_size), batch_size


def _score_batches(
    model: nn.Module, scores: _Scores, batches: Iterable[Batch], token_by_token: bool
) -> tuple[list, BatchTensors | None]:
    """Score the model's answers to all batches.

    Returns:
        The solver statistics of all calls, and the first batch.
    """
    device = next(model.parameters()).device
    carries_state = token_by_token or scores.task.streams
    statistics: list = []
    first_batch: BatchTensors | None = None
    state = None
    for batch in batches:
        tensors = move_to_device(batch, device)
        initial_state: Any = state if batch.is_continuation else None
        answers = compute_answers(
            model, tensors.input_ids, tensors.mask, initial_state, carries_state, token_by_token
        )
        if scores.task.streams:
            state = limit_attention(answers.state, tensors.input_ids.shape[1])
        statistics += [entry for entry in answers.statistics if entry is not None]
        scores.add(batch, answers.logits.argmax(-1).cpu().numpy())
        first_batch = first_batch or tensors
    return statistics, first_batch


@torch.no_grad()
def measure(
    model: nn.Module,
    task: Task,
    cfg: Config,
    length: int,
    split: str,
    seed: int,
    precision: str,
    token_by_token: bool = False,
    is_overlap_known: bool = True,
) -> dict:
    """Measure the model at one length, and leave it in evaluation mode.

    A task that is one long stream (CatbAbI) is read once with its state carried along; ℓ* is
    measured on its first segments.

    Args:
        model: The model.
        task: The task.
        cfg: Config of the run, whose `eval` section applies.
        length: Sequence length in tokens.
        split: "valid" or "test".
        seed: Seed of the data.
        precision: "fp32" or "bf16".
        token_by_token: Solve token by token; the model must carry its state. ℓ* is still measured
            on whole sequences.
        is_overlap_known: Whether the model was trained on the train split of this very task, so
            that `task.is_held_out` applies.

    Returns:
        "metrics" and "stderr" (repetitions of a sequence count as one sample), "sequences",
        "seconds", "read", "solver" (see `describe_solver`) and "in_training". With a solver also
        "evaluations", "failed" and "residual" over all tokens, per layer, and "num_iters" (ℓ*) of
        the first "probed" sequences. docs/synthetic.md explains each.

    Raises:
        TaskError: If the task has no such length.
    """
    # 1. Read everything, then measure ℓ* on the first sequences.
    task.check_length(length)
    batch_count, batch_size = _plan_batches(task, cfg, length, split)
    batches = (task.batch(seed, split, i, batch_size, (length, length)) for i in range(batch_count))
    sequence_count = batch_count * batch_size
    scores = _Scores(task)
    device = next(model.parameters()).device
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
    solver_override = override_solver(model, eval_max_iters=cfg.eval.max_iters)
    model.eval()
    with solver_override, autocast:
        start = time.perf_counter()
        solver = describe_solver(model, 1 if token_by_token else length)
        statistics, first_batch = _score_batches(model, scores, batches, token_by_token)
        seconds = time.perf_counter() - start
        probe_result = None
        if first_batch is not None and statistics:
            probe_result = probe_first_sequences(model, first_batch.input_ids, first_batch.mask)

    # 2. Collect the results.
    whole_reading = IN_SEGMENTS if task.streams else AT_ONCE
    record = {
        **scores.summarize(),
        "sequences": sequence_count,
        "read": TOKEN_BY_TOKEN if token_by_token else whole_reading,
        "solver": solver,
        "in_training": _count_training_overlap(task, length, sequence_count, is_overlap_known),
        "seconds": round(seconds, 3),
        **fixed_point_metrics(statistics),
    }
    if probe_result is not None:
        _add_probe(record, probe_result, scores)
    return record


def _add_probe(record: dict, probe_result: Any, scores: _Scores) -> None:
    """Add ℓ*, its standard error and the number of probed sequences to a record, in place."""
    iterations = probe_result.num_iters.double().mean(0).cpu().numpy()  # (b,), mean over layers
    count = len(iterations)
    group = np.arange(count) if scores.task.streams else scores.sample_hashes[0][:count]
    record["stderr"]["num_iters"] = compute_standard_error(iterations, group)
    record["num_iters"] = fixed_point_metrics([probe_result])["num_iters"]
    record["probed"] = count


def evaluate_all(
    model: nn.Module,
    task: Task,
    cfg: Config,
    lengths: Sequence[int],
    precision: str,
    is_overlap_known: bool = True,
) -> list[dict]:
    """Measure every length with every seed of `eval`; with eval.sequential also token by token.

    The arguments are those of `measure`, with `lengths` in tokens.

    Returns:
        A row for each measurement: {"length", "seed"} and the result of `measure`.
    """
    seeds = cfg.eval.seeds
    if task.streams:  # there is a single test set, which is read in segments as in training
        lengths, seeds = [cfg.train.lengths[1]], (0,)
    ways_of_reading = [False, True] if cfg.eval.sequential else [False]
    results: list[dict] = []
    # The time for a length is about proportional to its tokens.
    total = sum(lengths) * len(seeds) * len(ways_of_reading)
    tokens_done = 0
    progress = Progress("evaluating", total=total, unit="tokens per sequence")
    for length, seed, token_by_token in itertools.product(lengths, seeds, ways_of_reading):
        row = measure(
            model, task, cfg, length, "test", seed, precision, token_by_token, is_overlap_known
        )
        results.append({"length": length, "seed": seed, **row})
        tokens_done += length
        progress.update(tokens_done)
    return results


def evaluate_run(
    run_dir: str | Path,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    trust: bool = False,
) -> dict:
    """Evaluate a trained run again, with other keys of its `eval` section.

    Args:
        run_dir: The run directory.
        overrides: key=value, applied to its config.
        out: JSON file to write; None: RUN/eval.json.
        trust: Run the code of a `module:Class` that the run's config.yaml names.

    Returns:
        The content of the file.

    Raises:
        CheckpointError, ConfigError: As `synthetic.build.load_run`.
        TaskError: If the task lacks one of the lengths.
        OutputError: If `out` cannot be written.
    """
    run_dir = Path(run_dir)
    path = Path(out) if out else RunDir(run_dir).evaluation
    check_file(path)
    cfg, task, model, precision = load_run(run_dir, overrides, trust)
    lengths = parse_lengths(cfg.eval.lengths, task)
    trained_task = load_config(RunDir(run_dir).config).task  # an override may change cfg.task
    results = evaluate_all(
        model, task, cfg, lengths, precision, is_overlap_known=cfg.task == trained_task
    )
    evaluated_lengths = {row["length"] for row in results}
    # A threshold without a length is on the mean over all lengths.
    thresholds = [t for t in cfg.thresholds if t.length in (None, *evaluated_lengths)]
    result = {
        "run": str(run_dir),
        "task": cfg.task.name,
        "model": cfg.model.name,
        "headline": task.headline,
        "chance": task.chance,
        "eval": results,
        "bars": judge_thresholds(thresholds, results),
    }
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    say(f"wrote    {path}")
    return result
