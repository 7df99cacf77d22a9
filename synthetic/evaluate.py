"""How far a trained model goes: accuracy and ℓ* over lengths and seeds, with JSON out."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from pathlib import Path

import numpy as np
import torch

from lm.console import Progress, say
from lm.metrics import fixed_point_metrics, probe
from lm.outputs import check_file, write_json, writing
from lm.run_dir import RunDir
from synthetic.build import load_run, trained_on
from synthetic.lengths import parse_ranges
from synthetic.results import AT_ONCE, IN_SEGMENTS, TOKEN_BY_TOKEN, passes
from synthetic.tasks import Batch, Task, TaskError, splits

LADDER = 2**0.5  # START:STOP without a step: each length about so many times the one before
# Sequences of a length, and tokens of them, that ℓ* is measured on at most: a probe costs as many
# solves as ℓ*, and on state tracking that grows with the length.
PROBED, PROBED_TOKENS = 32, 2048


def parse_lengths(text: str, task: Task) -> list[int]:
    """Lengths to evaluate: "16,32,48"; "2:50:1" (from, to, step); "2:512" (from, to, ×√2 each).

    A range keeps the lengths that the task can have; one named by itself must be possible.

    Raises:
        TaskError: not a list of lengths, or a length the task cannot have.
    """
    lengths: list[int] = []
    try:
        ranges = parse_ranges(text)
    except ValueError as e:
        raise TaskError(f"lengths: {e}") from None
    for numbers in ranges:
        first = numbers[0]
        if len(numbers) == 1:
            task.check_length(first)
            lengths.append(first)
            continue
        last = numbers[1]
        if len(numbers) == 3:
            wanted = range(first, last + 1, numbers[2])
        else:
            count = math.floor(math.log(last / first, LADDER) + 1e-9)
            wanted = [*dict.fromkeys(round(first * LADDER**i) for i in range(count + 1)), last]
        possible = []
        for n in wanted:  # the nearest length below that the task can have
            for near in (n, n - 1):
                try:
                    task.check_length(near)
                except TaskError:
                    continue
                possible.append(near)
                break
        if not possible:
            task.check_length(last)
        lengths += possible
    return sorted(set(lengths))


def as_tensors(batch: Batch, device):
    """(input_ids, labels, attention_mask or None) on the device."""

    def tensor(a):
        return None if a is None else torch.from_numpy(np.ascontiguousarray(a)).to(device)

    return tensor(batch.input_ids), tensor(batch.labels), tensor(batch.mask)


def _free_bytes(device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:  # with what the kernel would give up of its file cache, which is most of the memory
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def sequences_that_fit(model, length: int, wanted: int, device) -> int:
    """How many sequences of this length an evaluation pass can hold (a rough lower bound of what
    it needs: a dozen activations of the inner width, and the logits twice).

    Raises:
        TaskError: not even one.
    """
    c = model.config
    width = 12 * 2 * getattr(c, "hidden_size", 64) + 2 * c.vocab_size
    heads = getattr(c, "num_attention_heads", 0)  # a Transformer's scores
    each = 4 * length * (width + heads * length)
    free = int(0.8 * _free_bytes(device))
    if each > free:
        raise TaskError(
            f"length {length} does not fit: one sequence needs about {each / 2**30:.1f} GiB,"
            f" {free / 2**30:.1f} GiB are free; evaluate shorter lengths"
        )
    return max(1, min(wanted, free // each))


def answer(model, ids, mask, state, carries: bool, sequential: bool):
    """Logits (b,l,vocab), solver statistics (a list) and the state after these tokens.

    `sequential` solves token by token, each from the state that the one before has left.
    """
    if not carries:
        output = model(input_ids=ids, attention_mask=mask)
        return output.logits, [getattr(output, "fixed_point", None)], None
    width = 1 if sequential else ids.shape[1]
    logits, stats = [], []
    for t in range(0, ids.shape[1], width):
        part = None if mask is None else mask[:, t : t + width]
        output = model(
            input_ids=ids[:, t : t + width], attention_mask=part, state=state, return_state=True
        )
        logits.append(output.logits)
        stats.append(getattr(output, "fixed_point", None))
        state = output.state
    return torch.cat(logits, 1), stats, state


def solver_of(model, length: int | None = None) -> dict | str:
    """How the model, in the mode it is in, solves sequences of this length: {"token", "schedule",
    "stopping", "tol", "max_iters", "gradient"}, tol and max_iters None where they mean nothing;
    "none" for a model without a solver."""
    return model.solver(length) if hasattr(model, "solver") else "none"


def solving(model, **fields):
    """The context in which the model is solved with these solver fields, None being those of its
    config; nothing changes for a model without a solver."""
    fields = {name: value for name, value in fields.items() if value is not None}
    if fields and hasattr(model, "solving"):
        return model.solving(**fields)
    return contextlib.nullcontext()


def probe_first(model, ids, mask):
    """ℓ* of the first sequences of a batch (see `lm.metrics.probe`): of one at least, else within
    PROBED and PROBED_TOKENS. ids, mask: (b,l)."""
    ids = ids[: min(PROBED, max(1, PROBED_TOKENS // ids.shape[1]))]
    return probe(model, ids, None if mask is None else mask[: len(ids)])


def check_seeds(seeds, task: Task) -> None:
    """Test data are counted once: no seed twice, and of a file, which has one test set, only one.

    Raises:
        TaskError: a seed is negative or there twice, or several are given for a file.
    """
    seeds = list(seeds)
    if any(seed < 0 for seed in seeds):
        raise TaskError(f"seeds {seeds}: a seed is 0 or more")
    if twice := [seed for seed in dict.fromkeys(seeds) if seeds.count(seed) > 1]:
        raise TaskError(
            f"seeds {seeds}: seed {twice[0]} is there twice; its test samples are the same ones, so"
            " name the seeds once each"
        )
    if len(seeds) > 1 and (path := getattr(task, "csv", None)):
        raise TaskError(
            f"seeds {seeds}: {path} has one set of test rows, whatever the seed; give one seed"
        )


def standard_error(values: np.ndarray, groups: np.ndarray) -> float:
    """Of the mean of values (n,) that are independent between groups (n,) but not within them, as
    the tokens of a sequence, or a sequence that was drawn several times."""
    _, group = np.unique(groups, return_inverse=True)
    sums = np.bincount(group, values - values.mean())
    return float(np.sqrt(np.square(sums).sum()) / len(values))


def _in_training(task: Task, length: int, split: str, shared, samples: int, seen) -> dict:
    if getattr(task, "streams", False):
        count, of = task.seen[split]
        return {"count": count, "of": of}
    if seen is None:  # a run of before the splits were held apart, at whatever length
        return {"count": None, "of": samples}
    if task.held_apart(length):
        return {"count": 0, "of": samples}
    return {"count": sum(key in seen for key in shared), "of": samples}


class _Scores:
    """The items of each metric, and which of them are not independent, over the batches of a
    length."""

    def __init__(self, task: Task, streams: bool):
        self.task, self.streams = task, streams
        self.values: dict[str, list] = {}
        self.groups: dict[str, list] = {}
        self.samples: list[np.ndarray] = []  # of each batch, its sequences' hashes; not of a stream
        self.shared: list[int] = []

    def add(self, number: int, batch: Batch, predicted: np.ndarray) -> None:
        """Args: number: of the batch. predicted: (b,l)."""
        self.shared += [] if batch.shared is None else batch.shared.tolist()
        if not self.streams:
            valid = None if batch.mask is None else batch.mask.sum(1)
            self.samples.append(splits.keys(batch.input_ids, valid))
        sequences = self.task.sequences(batch)
        for name, items in self.task.score(predicted, batch).items():
            row = sequences.get(name, np.arange(len(items)))
            group = row + number * batch.labels.size if self.streams else self.samples[-1][row]
            self.values.setdefault(name, []).append(items)
            self.groups.setdefault(name, []).append(group)

    @property
    def distinct(self) -> int | None:
        return None if self.streams else len(np.unique(np.concatenate(self.samples)))

    def record(self) -> dict:
        """{"metrics", "stderr"}: of each metric the mean over all items, and that mean's error."""
        pooled = {name: np.concatenate(items) for name, items in self.values.items()}
        pooled = {name: items for name, items in pooled.items() if len(items)}
        errors = {
            name: standard_error(items, np.concatenate(self.groups[name]))
            for name, items in pooled.items()
        }
        return {"metrics": {k: float(v.mean()) for k, v in pooled.items()}, "stderr": errors}


@contextlib.contextmanager
def _enough_memory(length: int, at_once: int):
    """Raises TaskError where what is within runs out of memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as e:
        out_of_memory = isinstance(e, (MemoryError, torch.OutOfMemoryError))
        if not out_of_memory and "can't allocate memory" not in str(e):  # how a CPU says it
            raise
        raise TaskError(
            f"length {length} does not fit in memory, {at_once} sequences at once: make"
            " eval.batch_size smaller"
        ) from None


@contextlib.contextmanager
def _evaluating(model):
    """The model in evaluation mode, and then in the one that it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@torch.no_grad()
def measure(
    model,
    task: Task,
    cfg,
    length: int,
    split: str,
    seed: int,
    precision: str,
    sequential: bool = False,
    seen: set[int] | None = None,
) -> dict:
    """One length: {"metrics", "stderr", "sequences", "distinct", "seconds", "read", "solver",
    "in_training"} and, with a solver, per layer "evaluations", "failed", "residual" over all that
    was solved, and "num_iters" (ℓ*) of the first "probed" sequences.

    A task that is one long stream (CatbAbI) is gone through once, its state carried along; ℓ* is
    that of its first segments. `distinct`: how many of the sequences are different ones (of a
    stream: None). `stderr` takes a sequence that was drawn again as the same one, and has ℓ* (its
    mean over layers, over those probed) too. `solver` is what the model itself says it solves by,
    or "none". `in_training` is {"count", "of"}: how many of the samples (of a stream: of the
    questions) training has too; a count of None: not known.

    Args:
        sequential: solve token by token (a model that carries its state); ℓ* is that of the whole
        sequence all the same.
        seen: `Batch.shared` of all training batches, None where that was not kept.
    Raises:
        TaskError: the length is impossible, or beyond the memory of this machine.
    """
    # 1. How much there is to read, and how.
    task.check_length(length)
    device = next(model.parameters()).device
    streams = getattr(task, "streams", False)
    size = at_once = cfg.eval.batch_size
    if streams:
        numbers = range(task.segments(split, size, length))
    else:  # the data do not depend on how many fit
        size = min(size, cfg.eval.examples)
        at_once = sequences_that_fit(model, length, size, device)
        numbers = range(math.ceil(cfg.eval.examples / size))
    carries = (streams or sequential) and getattr(model, "carries_state", False)
    if sequential and not carries:
        raise TaskError(f"{cfg.model.name} carries no state: it cannot go token by token")

    # 2. Read it.
    scores, stats, probed = _Scores(task, streams), [], None
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
    limited = solving(model, eval_max_iters=cfg.eval.max_iters)
    with _evaluating(model), _enough_memory(length, at_once), limited, autocast:
        began, state = time.perf_counter(), None
        solver = solver_of(model, 1 if sequential else length)
        for i in numbers:
            batch = task.batch(seed, split, i, size, (length, length))
            before = state if batch.carry else None
            predicted, solved, state = _answers(
                model, batch, at_once, before, carries, sequential, device
            )
            stats += solved
            scores.add(i, batch, predicted)
        seconds = time.perf_counter() - began
        if stats:
            ids, _, mask = as_tensors(task.batch(seed, split, 0, size, (length, length)), device)
            probed = probe_first(model, ids[:at_once], mask)

    # 3. What it amounts to.
    sequences = size * len(numbers)
    record = {
        **scores.record(),
        "sequences": sequences,
        "distinct": scores.distinct,
        "read": TOKEN_BY_TOKEN if sequential else IN_SEGMENTS if streams else AT_ONCE,
        "solver": solver,
        "in_training": _in_training(task, length, split, scores.shared, sequences, seen),
        "seconds": round(seconds, 3),
        **fixed_point_metrics(stats),
    }
    if probed is not None:
        iterations = probed.num_iters.double().mean(0).cpu().numpy()
        count = len(iterations)
        group = np.arange(count) if streams else scores.samples[0][:count]
        record["stderr"]["num_iters"] = standard_error(iterations, group)
        record["num_iters"] = fixed_point_metrics([probed])["num_iters"]
        record["probed"] = count
    return record


def _answers(model, batch: Batch, at_once: int, before, carries: bool, sequential: bool, device):
    """What the model predicts for a batch, (b,l); the solver's statistics; the state after it.

    Args: at_once: sequences. before: the state to start from, or None.
    """
    ids, _, mask = as_tensors(batch, device)
    predicted, stats, state = [], [], None
    for rows in (slice(first, first + at_once) for first in range(0, len(ids), at_once)):
        part = None if mask is None else mask[rows]
        logits, solved, state = answer(model, ids[rows], part, before, carries, sequential)
        stats += [s for s in solved if s is not None]
        predicted.append(logits.argmax(-1).cpu().numpy())
    return np.concatenate(predicted), stats, state


def evaluate_all(
    model, task: Task, cfg, lengths: list[int], seeds: list[int], precision, seen=None
) -> list:
    """Every length with every seed of test data → [{"length", "seed", "read", "solver", …}].

    With eval.sequential also read token by token. seen: as of `measure`.
    """
    if getattr(task, "streams", False):  # one test set, read in segments as in training
        lengths, seeds = [cfg.train.lengths[1]], [0]
    ways = [False, True] if cfg.eval.sequential else [False]
    results = []
    with Progress("evaluating", total=len(lengths) * len(seeds) * len(ways), unit="lengths") as bar:
        for length, seed, sequential in itertools.product(lengths, seeds, ways):
            found = measure(model, task, cfg, length, "test", seed, precision, sequential, seen)
            results.append({"length": length, "seed": seed, **found})
            bar.update(len(results))
    return results


def evaluate_run(run_dir, lengths=None, seeds=None, overrides=(), out=None) -> dict:
    """Evaluate a trained run again, over other lengths or seeds (or with other eval.* keys).

    Returns:
        what was written to `out` (default RUN/eval.json).
    """
    run_dir = Path(run_dir)
    path = Path(out) if out else RunDir(run_dir).evaluation
    check_file(path)
    cfg, task, model, precision = load_run(run_dir, overrides)
    check_seeds(seeds or cfg.eval.seeds, task)
    if getattr(task, "streams", False) and (lengths or seeds):
        say(
            f"note: {cfg.task.name} has one test set, read in segments of train.length="
            f"{cfg.train.lengths[1]}: neither lengths nor seeds apply"
        )
    wanted = parse_lengths(lengths or cfg.eval.lengths, task)
    trained_task, seen = trained_on(run_dir)
    results = evaluate_all(model, task, cfg, wanted, seeds or cfg.eval.seeds, precision, seen)
    if cfg.task != trained_task:  # which samples the other one had is not known
        for row in results:
            row["in_training"]["count"] = None
    tested = {None, *(r["length"] for r in results)}
    result = {
        "run": str(run_dir),
        "task": cfg.task.name,
        "model": cfg.model.name,
        "headline": task.headline,
        "chance": task.chance,
        "eval": results,
        "bars": passes([bar for bar in cfg.bars if bar.length in tested], results),
    }
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    say(f"wrote    {path}")
    return result
