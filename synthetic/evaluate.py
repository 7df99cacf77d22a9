"""How far a trained model goes: accuracy and ℓ* over lengths and seeds, with JSON out."""

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
from lm.runs.metrics import fixed_point_metrics, probe
from lm.runs.run_dir import RunDir
from synthetic.build import load_run
from synthetic.config import Config, load
from synthetic.lengths import parse_ranges
from synthetic.results import AT_ONCE, IN_SEGMENTS, TOKEN_BY_TOKEN, passes
from synthetic.tasks import Batch, Task, TaskError, splits

# Sequences of a length, and tokens of them, that ℓ* is measured on at most: a probe costs as many
# solves as ℓ*, and on state tracking that grows with the length.
PROBED = 32
PROBED_TOKENS = 2048


def parse_lengths(text: str, task: Task) -> list[int]:
    """Lengths to evaluate: "16,32,48"; "2:50:1" (from, to, step); "2:512" (from, to, ×√2 each).

    A range stands for the nearest lengths that the task has; one named by itself must be possible.

    Raises:
        TaskError: not a list of lengths, or a length the task cannot have.
    """
    try:
        ranges = parse_ranges(text)
    except ValueError as e:
        raise TaskError(f"lengths: {e}") from None
    lengths: set[int] = set()
    for numbers in ranges:
        if len(numbers) > 1:  # for a length that the task has not, the one below stands in
            below = [n - (n - task.shortest) % task.apart for n in numbers if n >= task.shortest]
            numbers = below or numbers
        for length in numbers:
            task.check_length(length)
        lengths.update(numbers)
    return sorted(lengths)


class Tensors(NamedTuple):
    """A batch on the device of its model; all (b,l)."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor | None  # None: there is no padding


def as_tensors(batch: Batch, device: torch.device | str) -> Tensors:
    """A batch of a task on a device."""

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    mask = None if batch.mask is None else tensor(batch.mask)
    return Tensors(tensor(batch.input_ids), tensor(batch.labels), mask)


class Answers(NamedTuple):
    """What a model makes of some tokens."""

    logits: torch.Tensor  # (b,l,vocab)
    statistics: list  # of the solver, one each call of the model; None of a model without one
    state: Any  # after these tokens; None of a model that carries none


def answer(
    model: nn.Module,
    input_ids: torch.Tensor,
    mask: torch.Tensor | None,
    state: Any,
    carries_state: bool,
    token_by_token: bool,
) -> Answers:
    """Read tokens (b,l), and answer at each.

    Args:
        state: to start from; None: an empty one.
        carries_state: give `state` to the model, and take the one after it.
        token_by_token: one token a call, each from the state that the one before has left.
    """
    if not carries_state:
        output = model(input_ids=input_ids, attention_mask=mask)
        return Answers(output.logits, [getattr(output, "fixed_point", None)], None)
    length = input_ids.shape[1]
    tokens_a_call = 1 if token_by_token else length
    logits = []
    statistics = []
    for first in range(0, length, tokens_a_call):
        columns = slice(first, first + tokens_a_call)
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


def solver_of(model: nn.Module, length: int | None = None) -> dict | str:
    """How the model, in the mode it is in, solves sequences of this length: {"token", "schedule",
    "stopping", "tol", "max_iters", "gradient"}, tol and max_iters None where they mean nothing;
    "none" for a model without a solver."""
    solver: Any = getattr(model, "solver", None)
    return "none" if solver is None else solver(length)


def solving(model: nn.Module, **fields: Any) -> contextlib.AbstractContextManager:
    """The context in which the model is solved with these solver fields, None being those of its
    config; nothing changes for a model without a solver."""
    fields = {name: value for name, value in fields.items() if value is not None}
    context: Any = getattr(model, "solving", None)
    if fields and context is not None:
        return context(**fields)
    return contextlib.nullcontext()


def probe_first(model: nn.Module, input_ids: torch.Tensor, mask: torch.Tensor | None) -> Any:
    """ℓ* of the first sequences of a batch (see `metrics.probe`): of one at least, else within
    PROBED and PROBED_TOKENS. input_ids, mask: (b,l)."""
    count = min(PROBED, max(1, PROBED_TOKENS // input_ids.shape[1]), len(input_ids))
    return probe(model, input_ids[:count], None if mask is None else mask[:count])


def standard_error(values: np.ndarray, groups: np.ndarray) -> float:
    """The standard error of a mean whose items are not all independent.

    Args:
        values: (n,), of which the mean is taken.
        groups: (n,), equal for items that depend on each other, as the tokens of a sequence do, or
            a sequence that was drawn several times.
    """
    _, group = np.unique(groups, return_inverse=True)
    sums = np.bincount(group, values - values.mean())
    return float(np.sqrt(np.square(sums).sum()) / len(values))


class _Scores:
    """The items of each metric over the batches of a length, and which of them depend on each
    other."""

    def __init__(self, task: Task):
        self.task = task
        self.values: dict[str, list[np.ndarray]] = {}
        self.groups: dict[str, list[np.ndarray]] = {}
        self.samples: list[np.ndarray] = []  # of each batch, its sequences' hashes; not of a stream

    def add(self, number: int, batch: Batch, predicted: np.ndarray) -> None:
        """Args: number: of the batch. predicted: (b,l)."""
        if not self.task.streams:
            lengths = None if batch.mask is None else batch.mask.sum(1)
            self.samples.append(splits.keys(batch.input_ids, lengths))
        rows_of = self.task.sequences(batch)
        for name, items in self.task.score(predicted, batch).items():
            row = rows_of.get(name, np.arange(len(items)))
            if self.task.streams:
                group = row + number * batch.labels.size  # no two batches have one in common
            else:
                group = self.samples[-1][row]
            self.values.setdefault(name, []).append(items)
            self.groups.setdefault(name, []).append(group)

    def record(self) -> dict[str, dict[str, float]]:
        """{"metrics", "stderr"}: of each metric the mean over all items, and that mean's error."""
        pooled = {name: np.concatenate(items) for name, items in self.values.items()}
        pooled = {name: items for name, items in pooled.items() if len(items)}
        errors = {
            name: standard_error(items, np.concatenate(self.groups[name]))
            for name, items in pooled.items()
        }
        means = {name: float(items.mean()) for name, items in pooled.items()}
        return {"metrics": means, "stderr": errors}


def _in_training(task: Task, length: int, sequences: int, held_apart: bool) -> dict:
    """Return {"count", "of"}: how many of the samples training may have too; a count of None: not
    known, as of a stream, whose splits are files.

    Where a length has too few samples to hold splits apart, training may have all of them.
    """
    count = 0 if task.held_apart(length) else sequences
    is_known = held_apart and not task.streams
    return {"count": count if is_known else None, "of": sequences}


def _batches(task: Task, cfg: Config, length: int, split: str) -> tuple[int, int]:
    """Return the number of batches of a length, and their sequences, on which the data depend."""
    if task.streams:
        return task.segments(split, cfg.eval.batch_size, length), cfg.eval.batch_size
    batch_size = min(cfg.eval.batch_size, cfg.eval.examples)
    return math.ceil(cfg.eval.examples / batch_size), batch_size


def _read_all(
    model: nn.Module, scores: _Scores, batches: Iterable[Batch], token_by_token: bool
) -> tuple[list, Tensors | None]:
    """Score a model's answers to all batches → the solver's statistics, and the first batch."""
    device = next(model.parameters()).device
    carries_state = token_by_token or scores.task.streams
    statistics: list = []
    first: Tensors | None = None
    state = None
    for number, batch in enumerate(batches):
        tensors = as_tensors(batch, device)
        before: Any = state if batch.carry else None
        answers = answer(
            model, tensors.input_ids, tensors.mask, before, carries_state, token_by_token
        )
        state = answers.state
        statistics += [each for each in answers.statistics if each is not None]
        scores.add(number, batch, answers.logits.argmax(-1).cpu().numpy())
        first = first or tensors
    return statistics, first


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
    held_apart: bool = True,
) -> dict:
    """Measure one length, and leave the model in evaluation mode.

    A task that is one long stream (CatbAbI) is read once, its state carried along; ℓ* is counted
    on its first segments.

    Args:
        token_by_token: Solve token by token; the model must carry its state. ℓ* is still counted
            on whole sequences.
        held_apart: The model was trained on a split that is held apart from this one.

    Returns:
        "metrics" and "stderr" (a sequence that was drawn again is the same sample), "sequences",
        "seconds", "read", "solver" (as the model reports it), "in_training"; with a solver, per
        layer "evaluations", "failed" and "residual" over all tokens, and "num_iters" (ℓ*) of the
        first "probed" sequences. docs/synthetic.md explains each.

    Raises:
        TaskError: The task has no such length.
    """
    # 1. Read all of it; then count ℓ* on the first sequences.
    task.check_length(length)
    count, batch_size = _batches(task, cfg, length, split)
    batches = (task.batch(seed, split, i, batch_size, (length, length)) for i in range(count))
    scores = _Scores(task)
    device = next(model.parameters()).device
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
    limited = solving(model, eval_max_iters=cfg.eval.max_iters)
    model.eval()
    with limited, autocast:
        began = time.perf_counter()
        solver = solver_of(model, 1 if token_by_token else length)
        statistics, first = _read_all(model, scores, batches, token_by_token)
        seconds = time.perf_counter() - began
        probed = None
        if first is not None and statistics:
            probed = probe_first(model, first.input_ids, first.mask)

    # 2. What it amounts to.
    way_of_reading = IN_SEGMENTS if task.streams else AT_ONCE
    record = {
        **scores.record(),
        "sequences": count * batch_size,
        "read": TOKEN_BY_TOKEN if token_by_token else way_of_reading,
        "solver": solver,
        "in_training": _in_training(task, length, count * batch_size, held_apart),
        "seconds": round(seconds, 3),
        **fixed_point_metrics(statistics),
    }
    if probed is not None:
        _add_probe(record, probed, scores)
    return record


def _add_probe(record: dict, probed: Any, scores: _Scores) -> None:
    """Put ℓ*, its standard error and the number of sequences that it is of into a record."""
    iterations = probed.num_iters.double().mean(0).cpu().numpy()  # mean over layers, (sequences,)
    count = len(iterations)
    group = np.arange(count) if scores.task.streams else scores.samples[0][:count]
    record["stderr"]["num_iters"] = standard_error(iterations, group)
    record["num_iters"] = fixed_point_metrics([probed])["num_iters"]
    record["probed"] = count


def evaluate_all(
    model: nn.Module,
    task: Task,
    cfg: Config,
    lengths: Sequence[int],
    precision: str,
    held_apart: bool = True,
) -> list[dict]:
    """Every length with every seed of `eval` → [{"length", "seed", "read", "solver", …}].

    With eval.sequential also read token by token. held_apart: as of `measure`.
    """
    seeds = cfg.eval.seeds
    if task.streams:  # one test set, read in segments as in training
        lengths, seeds = [cfg.train.lengths[1]], (0,)
    ways = [False, True] if cfg.eval.sequential else [False]
    results: list[dict] = []
    done, total = 0, sum(lengths) * len(seeds) * len(ways)  # a length takes as long as its tokens
    bar = Progress("evaluating", total=total, unit="tokens a sequence")
    for length, seed, token_by_token in itertools.product(lengths, seeds, ways):
        row = measure(model, task, cfg, length, "test", seed, precision, token_by_token, held_apart)
        results.append({"length": length, "seed": seed, **row})
        done += length
        bar.update(done)
    return results


def evaluate_run(
    run_dir: str | Path,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    trust: bool = False,
) -> dict:
    """Evaluate a trained run again, with other eval.* keys.

    Returns:
        what was written to `out` (default RUN/eval.json).
    Raises:
        CheckpointError, TaskError: as `synthetic.build.load_run`, and for lengths that the task
            cannot have. OutputError: `out` cannot be written.
    """
    run_dir = Path(run_dir)
    path = Path(out) if out else RunDir(run_dir).evaluation
    check_file(path)
    cfg, task, model, precision = load_run(run_dir, overrides, trust)
    lengths = parse_lengths(cfg.eval.lengths, task)
    held_apart = cfg.task == load(RunDir(run_dir).config).task  # the task it was trained on
    results = evaluate_all(model, task, cfg, lengths, precision, held_apart)
    tested = {None, *(row["length"] for row in results)}
    result = {
        "run": str(run_dir),
        "task": cfg.task.name,
        "model": cfg.model.name,
        "headline": task.headline,
        "chance": task.chance,
        "eval": results,
        "bars": passes([bar for bar in cfg.thresholds if bar.length in tested], results),
    }
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    say(f"wrote    {path}")
    return result
