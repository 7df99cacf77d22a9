"""The suite's face: four small tasks on one or several models, one table."""

from __future__ import annotations

import math
from pathlib import Path

from lm import config as base
from lm.config import ConfigError
from lm.console import say
from lm.old_keys import moved_tree
from lm.outputs import check_file, write_json
from lm.run_dir import RunDirError
from synthetic import config
from synthetic.results import UNKNOWN, error, how, in_training, passes, plus_minus
from synthetic.runs import differences, is_finished, result, run_all

RECIPES = Path(__file__).parent.parent / "configs" / "synthetic" / "small"
# ability → recipe; the recipe's bars are the rows of the table.
QUICK = {
    "state tracking": "s3",
    "copying": "copy",
    "arithmetic": "mod_arithmetic",
    "memory": "recall",
}

TAKEN = ("model", "solver", "optim")  # sections of a config that is validated


def _model_of(path: str, overrides: list[str]) -> tuple[str, dict]:
    """Name and {"model": …, "solver": …, "optim": …} of a config.

    Any YAML with a `model:` section will do, a language model's too; other sections are left out.
    """
    tree = moved_tree(base.load_tree(path), path)
    unknown = tree.keys() - config.Config.model_fields.keys() - base.Config.model_fields.keys()
    if unknown:
        raise ConfigError(f"{path}: unknown section {', '.join(sorted(map(str, unknown)))}")
    if "model" not in tree:
        raise ConfigError(f"{path} has no `model:` section: validate needs a model to build")
    kept = {k: tree[k] for k in TAKEN if k in tree}
    if not isinstance(kept.get("optim") or {}, dict):
        raise ConfigError(f"{path}: `optim` is {kept['optim']!r}: it must be a section")
    for text in overrides:
        key, _ = base.parse_override(text, config.Config)
        if key.partition(".")[0] not in TAKEN:
            raise ConfigError(
                f"override `{key}`: validate takes keys of {', '.join(TAKEN[:-1])} and {TAKEN[-1]}"
                " only"
            )
    base.set_overrides(kept, overrides, config.Config)
    return str(tree.get("name", Path(path).stem)), kept


def plan(
    paths: list[str], overrides: list[str], out_dir: str
) -> dict[tuple[str, str], config.Config]:
    """(ability, model's name) → the run that answers for it."""
    if not paths:
        raise ConfigError("validate needs a config with a `model:` section, not only overrides")
    runs = {}
    for path in paths:
        name, top = _model_of(path, overrides)
        if any(name == other for _, other in runs):
            raise ConfigError(f"{path}: another config is named `{name}` too")
        for ability, recipe in QUICK.items():
            tree = base.load_tree(RECIPES / f"{recipe}.yaml")
            optim = {**tree.get("optim", {}), **(top.get("optim") or {})}
            # The recipe's own model and solver give way wholly, and an adversary, which only some
            # models can have; of its optimizer what is set.
            train = {**tree["train"], "adversary": 0.0}
            tree.update(model=top["model"], solver=top.get("solver") or {})
            tree.update(optim=optim, train=train)
            tree.update(name=f"{name}/{recipe}", out_dir=out_dir)
            runs[ability, name] = base.build(tree, str(path), config.Config)
    return runs


def validate(
    paths: list[str], overrides: list[str] = (), out_dir: str = "runs/validate", jobs: int = 1
) -> list[dict]:
    """Train and test the quick set on the model of every config; finished runs are not repeated.

    Returns:
        rows {"ability", "model", "metric", "length", "trained_to", "value", "least", "passed",
        "updates", "seconds", "parameters"}; also written to OUT/validate.json.
    Raises:
        ConfigError: a config that cannot be validated.
        RunDirError: OUT holds a finished run of another config. OutputError: nothing can be
            written there.
        TrainingError: some runs failed.
    """
    runs = plan(paths, overrides, out_dir)
    check_file(Path(out_dir) / "validate.json")
    for cfg in filter(is_finished, runs.values()):  # its figures would be those of another model
        if other := differences(cfg):
            raise RunDirError(
                f"{cfg.run_dir} holds a finished run of another config ({'; '.join(other[:4])}):"
                " choose another --out-dir, or delete it"
            )
    say(f"{len(runs)} runs, {sum(map(is_finished, runs.values()))} of them finished already")
    run_all(list(runs.values()), jobs)
    rows = []
    for (ability, name), cfg in runs.items():
        found = result(cfg)
        for bar in passes(cfg.bars, found["eval"]):
            rows.append(
                {
                    "ability": ability,
                    "task": cfg.task.name,
                    "model": name,
                    "trained_to": cfg.train.lengths[1],
                    **bar,
                    "updates": found["updates"],
                    "seconds": found["training_seconds"],
                    "parameters": found["parameters"],
                    **_how_measured(found["eval"], bar),
                }
            )
    write_json(Path(out_dir) / "validate.json", rows)
    return rows


def _how_measured(results: list[dict], bar: dict) -> dict:
    """The standard error of a bar's value, how it was measured, and how many of the samples
    training has too."""
    rows = [r for r in results if r["length"] == bar["length"] and bar["metric"] in r["metrics"]]
    if not rows:
        return {"stderr": None, "read": None, "solver": None, "in_training": None}
    read, solver = how(rows[0])
    return {
        "stderr": error(rows, bar["metric"]),
        "read": read,
        "solver": solver,
        "in_training": in_training(rows),
    }


def table(rows: list[dict]):
    """A rich table: a row for each bar, a column for each model. Below it, what solved the models,
    and which samples training had too."""
    from rich.table import Table

    labels = list(dict.fromkeys(r["model"] for r in rows))
    t = Table(
        title="What the models can do (✓ reaches the bar; ± standard error)",
        caption="\n".join(_notes(rows)),
        caption_justify="left",
    )
    for name in ("ability", "task", "metric", "bar"):
        t.add_column(name)
    for label in labels:
        t.add_column(label, justify="right")
    for key in dict.fromkeys((r["ability"], r["metric"], r["length"]) for r in rows):
        same = {r["model"]: r for r in rows if (r["ability"], r["metric"], r["length"]) == key}
        any_row = next(iter(same.values()))
        beyond = f", trained to {any_row['trained_to']}" * (key[2] != any_row["trained_to"])
        t.add_row(
            key[0],
            any_row["task"],
            f"{key[1].replace('_', ' ')} at {key[2]}{beyond}",
            f"{any_row['least']:g}",
            *(_cell(same[label]) for label in labels),
        )
    t.add_section()
    for name, unit in (("parameters", ""), ("seconds", " s")):
        cells = [_total(rows, label, name) for label in labels]
        t.add_row(name, "", "in all" if unit else "", "", *(f"{c:,.0f}{unit}" for c in cells))
    return t


def _notes(rows: list[dict]) -> list[str]:
    """What solved each model, and the test samples that training has too."""
    ways: dict[str, list[str]] = {}
    for row in rows:
        way = f"read {row['read']}; solver: {row['solver']}"
        ways.setdefault(way, []).append(row["model"])
    notes = [f"{', '.join(dict.fromkeys(models))}: {way}" for way, models in ways.items()]
    for row in rows:
        if row["in_training"] not in ("0", None):
            share = f"{row['in_training']} test samples are in training too"
            if row["in_training"] == UNKNOWN:
                share = "whether training has the test samples too is unknown"
            notes.append(f"{row['model']}, {row['task']} at {row['length']}: {share}")
    return notes


def _cell(row: dict) -> str:
    value, stderr = (math.nan if row[k] is None else row[k] for k in ("value", "stderr"))
    return f"{value:.3f}{plus_minus(stderr)} {'✓' if row['passed'] else '·'}"


def _total(rows: list[dict], label: str, name: str) -> float:
    """Seconds add up over tasks; of the parameters, which differ in the embeddings, the most."""
    per_task = {r["ability"]: r[name] for r in rows if r["model"] == label}.values()
    return sum(per_task) if name == "seconds" else max(per_task)
