"""Fabricated results of synthetic runs without models, for the tests of reports and figures."""

import csv
import itertools
import json
import math

from synthetic import report, tasks
from synthetic.config import Config
from synthetic.evaluate import parse_lengths
from synthetic.results import AT_ONCE, IN_SEGMENTS, TOKEN_BY_TOKEN

DATA = ("task.data=nowhere",)  # overrides: catbabi needs a folder
TINY = {  # config that trains in a second
    "name": "t",
    "model": {"d_model": 16, "d_state": 4},
    "task": {"name": "word_problem", "group": "Z3"},
    "optim": {"lr": 1e-2, "warmup": 1},
    "train": {"steps": 3, "batch_size": 8, "length": 4},
    "eval": {"lengths": "4", "examples": 8, "batch_size": 8},
}
ROW = {  # a row of the `eval` of a result
    "length": 2,
    "metrics": {"a": 1},
    "stderr": {"a": 0.1},
    "read": "at once",
    "solver": "none",
    "in_training": {"count": 0, "of": 4},
}


def sweep(name, scale="small", *overrides):
    """Return the expanded sweep of a report."""
    return report.expand_sweep(report.find_config(name, scale), overrides)


def draw_report(name, out_dir):
    """Draw a report from its runs in `out_dir`."""
    runs = report.collect_runs(sweep(name, "small", f"out_dir={out_dir}", *DATA))
    return report.REPORTS[name].draw(runs, name)


def compute_accuracy(length: int, solved_length: float) -> float:
    """Return a plausible accuracy, which is 1/2 at `solved_length` and falls with the length."""
    return 1 / (1 + math.exp((length - solved_length) / (0.15 * solved_length)))


SOLVER = {
    "token": "iterate",
    "schedule": "parallel",
    "stopping": "causal",
    "tol": 0.01,
    "max_iters": 1000,
    "gradient": "one_step",
}


def make_row_fields(cfg: Config) -> dict:
    """Return the fields of a row that describe how it was measured."""
    solver = SOLVER if cfg.model.name == "fprnn" else "none"
    return {"read": AT_ONCE, "solver": solver, "in_training": {"count": 0, "of": 400}}


def make_rows(cfg: Config, solved_length: float, seeds=(0,)) -> list[dict]:
    """Make a plausible `eval` of a model that solves lengths up to about `solved_length`."""
    fields = make_row_fields(cfg)
    if cfg.task.name == "catbabi":
        metrics = {"accuracy": 0.8, **{f"qa{n}": 0.7 + n / 100 for n in cfg.task.stories}}
        fields |= {"read": IN_SEGMENTS, "stderr": dict.fromkeys(metrics, 0.01)}
        return [{"length": cfg.train.lengths[1], "seed": 0, "metrics": metrics, **fields}]
    names = {
        "word_problem": ("token_accuracy", "sequence_accuracy"),
        "copy": ("character_accuracy", "string_accuracy"),
        "mod_arithmetic_brackets": ("scaled_accuracy", "accuracy"),
    }[cfg.task.name]
    result_rows = []
    readings = (AT_ONCE, TOKEN_BY_TOKEN) if cfg.eval.sequential else (AT_ONCE,)
    lengths = parse_lengths(cfg.eval.lengths, tasks.build_task(cfg.task))
    for reading, n, seed in itertools.product(readings, lengths, seeds):
        accuracy = compute_accuracy(n, solved_length) * (1 - 0.01 * seed)
        if reading == TOKEN_BY_TOKEN:
            accuracy *= 0.97
        values = (0.2 + 0.8 * accuracy, accuracy)
        row = {"length": n, "seed": seed, "metrics": dict(zip(names, values)), **fields}
        row["read"] = reading
        row["stderr"] = {k: (v * (1 - v) / 400) ** 0.5 for k, v in zip(names, values)}
        row["in_training"] = {"count": 400 if n < 4 else 0, "of": 400}
        if cfg.model.name == "fprnn":
            mean = [min(n, 16) * 0.8 + solved_length / 10] * cfg.model.n_layer
            row |= {"num_iters": {"mean": mean}, "probed": 32}
            row["stderr"]["num_iters"] = 0.5
            row |= {"evaluations": [v + 2 for v in mean], "failed": [0.0] * cfg.model.n_layer}
        result_rows.append(row)
    return result_rows


def fabricate(cfg: Config, solved_length: float, seconds: float = 200.0) -> None:
    """Write a finished run without its model."""
    cfg.run_dir.mkdir(parents=True)
    headlines = {
        "word_problem": "sequence_accuracy",
        "copy": "string_accuracy",
        "mod_arithmetic_brackets": "scaled_accuracy",
        "catbabi": "accuracy",
    }
    result = {
        "task": cfg.task.name,
        "model": cfg.model.name,
        "parameters": cfg.model.n_layer * cfg.model.d_model**2,
        "updates": 1000,
        "solved_at": None,
        "training_seconds": seconds,
        "headline": headlines[cfg.task.name],
        "chance": 1 / 6,
        "eval": make_rows(cfg, solved_length),
        "bars": [],
    }
    (cfg.run_dir / "result.json").write_text(json.dumps(result))
    (cfg.run_dir / "config.yaml").write_text(cfg.to_yaml())
    lines = [{"step": 50, "loss": 1.0, "accuracy": 0.5}]
    for i in range(1, 10):
        current_solved_length = max(1.0, solved_length * i / 9)
        record = {"step": 100 * i, "valid": {}, "seconds": seconds * i / 10}
        if cfg.eval.during:
            lengths = parse_lengths(cfg.eval.during, tasks.build_task(cfg.task))
            record["over_lengths"] = {
                str(n): {
                    "metrics": {
                        "token_accuracy": 1,
                        "sequence_accuracy": compute_accuracy(n, current_solved_length),
                    },
                    "stderr": {"sequence_accuracy": 0.01},
                    **make_row_fields(cfg),
                }
                for n in lengths
            }
        lines.append(record)
    (cfg.run_dir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))


def fabricate_all(name: str, out_dir, scale: str = "small") -> list[Config]:
    """Write all runs of a report; later ones solve longer sequences."""
    configs = sweep(name, scale, f"out_dir={out_dir}", *DATA).configs
    for i, cfg in enumerate(configs):
        solved_length = cfg.train.lengths[1] * (0.6 + 0.5 * i)
        fabricate(cfg, solved_length, 100.0 + 40 * i)
    return configs


def read_csv(path) -> list[dict]:
    with path.open(encoding="utf-8") as f:
        return list(csv.DictReader(f))
