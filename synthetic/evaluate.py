"""How far a trained model goes: accuracy and ℓ* over lengths and seeds, with JSON out."""

from __future__ import annotations

import itertools
import math
import os
import time
from pathlib import Path

import numpy as np
import torch

from lm.checkpoint import write_json
from lm.console import Progress, say
from lm.metrics import fixed_point_metrics
from lm.outputs import check_file, writing
from synthetic.build import load_run
from synthetic.lengths import parse_ranges
from synthetic.tasks import Batch, Task, TaskError

LADDER = 2**0.5  # START:STOP without a step: each length about so many times the one before


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


def _sequences_that_fit(model, length: int, wanted: int, device) -> int:
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


@torch.no_grad()
def measure(
    model, task: Task, cfg, length: int, split: str, seed: int, precision: str,
    sequential: bool = False,
) -> dict:  # fmt: skip
    """One length: {"metrics", "stderr", "sequences", "seconds"} and, with a solver, ℓ* per layer.

    A task that is one long stream (CatbAbI) is gone through once, its state carried along.

    Args:
        sequential: solve token by token (a model that carries its state); ℓ* is then per token.
    Raises:
        TaskError: the length is impossible, or beyond the memory of this machine.
    """
    task.check_length(length)
    device = next(model.parameters()).device
    streams = getattr(task, "streams", False)
    size = at_once = cfg.eval.batch_size
    if streams:
        numbers = range(task.segments(split, size, length))
    else:  # the data do not depend on how many fit
        size = min(size, cfg.eval.examples)
        at_once = _sequences_that_fit(model, length, size, device)
        numbers = range(math.ceil(cfg.eval.examples / size))
    carries = (streams or sequential) and getattr(model, "carries_state", False)
    if sequential and not carries:
        raise TaskError(f"{cfg.model.name} carries no state: it cannot go token by token")
    was_training, limit = model.training, getattr(model.config, "eval_max_iters", None)
    model.eval()
    if cfg.eval.max_iters and limit:
        model.config.eval_max_iters = cfg.eval.max_iters
    values, stats, state, began = {}, [], None, time.perf_counter()
    try:
        for i in numbers:
            batch = task.batch(seed, split, i, size, (length, length))
            ids, _, mask = as_tensors(batch, device)
            before, predicted = state if batch.carry else None, []
            for rows in (slice(first, first + at_once) for first in range(0, size, at_once)):
                part = None if mask is None else mask[rows]
                with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                    logits, solved, state = answer(
                        model, ids[rows], part, before, carries, sequential
                    )
                stats += [s for s in solved if s is not None]
                predicted.append(logits.argmax(-1).cpu().numpy())
            for name, items in task.score(np.concatenate(predicted), batch).items():
                values.setdefault(name, []).append(items)
    except (MemoryError, RuntimeError) as e:
        out_of_memory = isinstance(e, (MemoryError, torch.OutOfMemoryError))
        if not out_of_memory and "can't allocate memory" not in str(e):  # how a CPU says it
            raise
        raise TaskError(
            f"length {length} does not fit in memory, {at_once} sequences at once: make"
            " eval.batch_size smaller"
        ) from None
    finally:
        model.train(was_training)
        if limit:
            model.config.eval_max_iters = limit
    pooled = {name: np.concatenate(items) for name, items in values.items()}
    record = {
        "metrics": {k: float(v.mean()) for k, v in pooled.items() if len(v)},
        "stderr": {k: float(v.std() / len(v) ** 0.5) for k, v in pooled.items() if len(v)},
        "sequences": size * len(numbers),
        "seconds": round(time.perf_counter() - began, 3),
    }
    return {**record, **fixed_point_metrics(stats)}


def evaluate_all(model, task: Task, cfg, lengths: list[int], seeds: list[int], precision) -> list:
    """Every length with every seed of test data → [{"length", "seed", "schedule", "metrics", …}].

    The schedule is "parallel" (all tokens at once), and with eval.sequential also "sequential".
    """
    if getattr(task, "streams", False):  # one test set, read in segments as in training
        lengths, seeds = [cfg.train.lengths[1]], [0]
    schedules = ["parallel", "sequential"] if cfg.eval.sequential else ["parallel"]
    results = []
    with Progress(
        "evaluating", total=len(lengths) * len(seeds) * len(schedules), unit="lengths"
    ) as bar:
        for length, seed, schedule in itertools.product(lengths, seeds, schedules):
            found = measure(
                model, task, cfg, length, "test", seed, precision, schedule == "sequential"
            )
            results.append({"length": length, "seed": seed, "schedule": schedule, **found})
            bar.update(len(results))
    return results


def at_length(
    results: list, length: int | None, metric: str, schedule: str = "parallel"
) -> float | None:
    """Mean over seeds of a metric at a length (None: the only one)."""
    found = [
        r["metrics"][metric]
        for r in results
        if metric in r["metrics"]
        and length in (None, r["length"])
        and r.get("schedule", "parallel") == schedule
    ]
    return sum(found) / len(found) if found else None


def solved_length(results: list, metric: str, least: float = 0.9) -> int:
    """The longest evaluated length up to which the metric never falls below `least`; 0 if none."""
    best = 0
    for length in sorted({r["length"] for r in results}):
        value = at_length(results, length, metric)
        if value is None or value < least:
            break
        best = length
    return best


def passes(bars: list, results: list) -> list[dict]:
    """Each bar of the config with the value reached and whether it passed."""
    found = []
    for bar in bars:
        value = at_length(results, bar.length, bar.metric)
        ok = value is not None and value >= bar.least
        found.append({**bar.model_dump(), "value": value, "passed": ok})
    return found


def summary(result: dict, title: str):
    """A run's result as a rich table: per length, metrics and ℓ*."""
    from rich.table import Table

    rows = result["eval"]
    names = list(rows[0]["metrics"])
    stream = len(rows) == 1 and len(names) > 4  # CatbAbI: a row a task
    table = Table(title=title)
    if stream:
        for head in ("metric", "value"):
            table.add_column(head, justify="right")
        for name in names:
            table.add_row(name, f"{rows[0]['metrics'][name]:.4f}")
        if "num_iters" in rows[0]:
            table.add_row(
                "ℓ* per layer", " ".join(f"{v:.1f}" for v in rows[0]["num_iters"]["mean"])
            )
        return table
    table.add_column("length", justify="right")
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    solver = "num_iters" in rows[0]
    if solver:
        table.add_column("ℓ* per layer", justify="right")
        table.add_column("not converged", justify="right")
    schedules = list(dict.fromkeys(r["schedule"] for r in rows))
    for length, schedule in itertools.product(sorted({r["length"] for r in rows}), schedules):
        same = [r for r in rows if (r["length"], r["schedule"]) == (length, schedule)]
        cells = [f"{at_length(rows, length, name, schedule):.4f}" for name in names]
        if solver:
            layers = np.mean([r["num_iters"]["mean"] for r in same], 0)
            missed = np.mean([r["not_converged"] for r in same])
            cells += [" ".join(f"{v:.1f}" for v in layers), f"{missed:.0%}"]
        shown = f"{length}" if len(schedules) == 1 else f"{length} {schedule}"
        table.add_row(shown, *cells)
    return table


def verdict(result: dict) -> str:
    """The pass/fail lines of a recipe; '' for a config without bars."""
    lines = []
    for bar in result["bars"]:
        at = f" at length {bar['length']}" if bar["length"] else ""
        value = "not measured" if bar["value"] is None else f"{bar['value']:.4f}"
        word = "PASS" if bar["passed"] else "FAIL"
        lines.append(f"{word}  {bar['metric']}{at}: {value} (bar {bar['least']:g})")
    return "\n".join(lines)


def evaluate_run(run_dir, lengths=None, seeds=None, overrides=(), out=None) -> dict:
    """Evaluate a trained run again, over other lengths or seeds (or with other eval.* keys).

    Returns:
        what was written to `out` (default RUN/eval.json).
    """
    run_dir = Path(run_dir)
    if any(seed < 0 for seed in seeds or ()):
        raise TaskError(f"seeds {seeds}: a seed is 0 or more")
    path = Path(out) if out else run_dir / "eval.json"
    check_file(path)
    cfg, task, model, precision = load_run(run_dir, overrides)
    if getattr(task, "streams", False) and (lengths or seeds):
        say(f"note: {cfg.task.name} has one test set, read in segments of train.length="
            f"{cfg.train.lengths[1]}: neither lengths nor seeds apply")  # fmt: skip
    wanted = parse_lengths(lengths or cfg.eval.lengths, task)
    results = evaluate_all(model, task, cfg, wanted, seeds or cfg.eval.seeds, precision)
    tested = {None, *(r["length"] for r in results)}
    result = {
        "run": str(run_dir), "task": cfg.task.name, "model": cfg.model.name,
        "headline": task.headline, "chance": task.chance, "eval": results,
        "bars": passes([bar for bar in cfg.bars if bar.length in tested], results),
    }  # fmt: skip
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    say(f"wrote    {path}")
    return result
