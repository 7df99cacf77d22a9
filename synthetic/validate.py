"""The suite's face: four small tasks on one or several models, one table."""

from __future__ import annotations

import json
import math
from pathlib import Path

from lm import config as base
from lm.checkpoint import write_json
from lm.config import ConfigError
from lm.console import say
from synthetic import config
from synthetic.evaluate import passes
from synthetic.runs import is_finished, run_all

RECIPES = Path(__file__).parent.parent / "configs" / "synthetic" / "small"
# ability → recipe; the recipe's bars are the rows of the table.
QUICK = {
    "state tracking": "s3",
    "copying": "copy",
    "arithmetic": "mod_arithmetic",
    "memory": "recall",
}


def models(path: str, overrides: list[str]) -> dict[str, tuple[str, dict]]:
    """Label → (folder, {"model": …, "optim": …}): a config's only point, or each of its sweep.

    Any YAML with a `model:` section will do, a language model's too; other sections are left out.
    """
    tree = base.load_tree(path)
    unknown = tree.keys() - config.Config.model_fields.keys() - base.Config.model_fields.keys()
    if unknown:
        raise ConfigError(f"{path}: unknown section {', '.join(sorted(unknown))}")
    kept = {k: tree[k] for k in ("model", "optim", "sweep") if k in tree}
    if "model" not in kept and "sweep" not in kept:
        raise ConfigError(f"{path} has no `model:` section: validate needs a model to build")
    for text in overrides:
        key, value = base.parse_override(text, config.Config)
        if key.partition(".")[0] not in ("model", "optim"):
            raise ConfigError(f"override `{key}`: validate takes keys of model and optim only")
        base.set_key(kept, key, value)
    if "sweep" not in kept:
        return {str(tree.get("name", Path(path).stem)): ("", kept)}
    found = {}
    for i, point in enumerate(base.sweep_points(kept, path, config.Config)):
        one = json.loads(json.dumps({k: v for k, v in kept.items() if k != "sweep"}))
        base.set_point(one, point)
        found[_label(point)] = (base.point_name("", i, point), one)
    return found


def _label(point: dict) -> str:
    """A sweep point in a column's head: `mamba, n_layer 2`."""
    flat = {}
    for key, value in point.items():
        flat.update(value if isinstance(value, dict) else {key.rpartition(".")[2]: value})
    return ", ".join(f"{v}" if k == "name" else f"{k} {v}" for k, v in flat.items())


def _over(tree: dict, top: dict) -> dict:
    """`top` merged over `tree`, section by section."""
    merged = dict(tree)
    for key, value in top.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = {**merged[key], **value} if both else value
    return merged


def plan(path: str, overrides: list[str], out_dir: str) -> dict[tuple[str, str], config.Config]:
    """(ability, model's label) → the run that answers for it."""
    runs = {}
    stem = base.load_tree(path).get("name", Path(path).stem)
    for label, (folder, top) in models(path, overrides).items():
        for ability, recipe in QUICK.items():
            source = RECIPES / f"{recipe}.yaml"
            tree = base.load_tree(source)
            tree.pop("model", None)  # the recipe's own model gives way wholly
            tree = _over(tree, top)
            tree.update(name=f"{stem}{folder}/{recipe}", out_dir=out_dir)
            runs[ability, label] = base.build(tree, str(source), config.Config)
    return runs


def validate(
    path: str, overrides: list[str] = (), out_dir: str = "runs/validate", jobs: int = 1
) -> list[dict]:
    """Train and test the quick set on every model of a config (finished runs are not repeated).

    Returns:
        rows {"ability", "model", "metric", "length", "trained_to", "value", "least", "passed",
        "updates", "seconds", "parameters"}; also written to OUT/NAME/validate.json.
    """
    runs = plan(path, overrides, out_dir)
    say(f"{len(runs)} runs, {sum(map(is_finished, runs.values()))} of them finished already")
    run_all(list(runs.values()), jobs)
    rows = []
    for (ability, label), cfg in runs.items():
        result = json.loads((cfg.run_dir / "result.json").read_text())
        for bar in passes(cfg.bars, result["eval"]):
            rows.append({
                "ability": ability, "task": cfg.task.name, "model": label,
                "trained_to": cfg.train.lengths[1], **bar, "updates": result["updates"],
                "seconds": result["training_seconds"], "parameters": result["parameters"],
            })  # fmt: skip
    first = next(iter(runs.values()))
    write_json(Path(out_dir) / first.name.partition("/")[0] / "validate.json", rows)
    return rows


def table(rows: list[dict]):
    """A rich table: a row for each bar, a column for each model."""
    from rich.table import Table

    labels = list(dict.fromkeys(r["model"] for r in rows))
    t = Table(title="Validation: what the models can do (✓ reaches the bar)")
    for name in ("ability", "task", "metric", "bar"):
        t.add_column(name)
    for label in labels:
        t.add_column(label, justify="right")
    for key in dict.fromkeys((r["ability"], r["metric"], r["length"]) for r in rows):
        same = {r["model"]: r for r in rows if (r["ability"], r["metric"], r["length"]) == key}
        any_row = next(iter(same.values()))
        beyond = f", trained to {any_row['trained_to']}" * (key[2] != any_row["trained_to"])
        t.add_row(
            key[0], any_row["task"], f"{key[1].replace('_', ' ')} at {key[2]}{beyond}",
            f"{any_row['least']:g}", *(_cell(same[label]) for label in labels),
        )  # fmt: skip
    t.add_section()
    for name, unit in (("parameters", ""), ("seconds", " s")):
        cells = [_total(rows, label, name) for label in labels]
        t.add_row(name, "", "in all" if unit else "", "", *(f"{c:,.0f}{unit}" for c in cells))
    return t


def _cell(row: dict) -> str:
    value = math.nan if row["value"] is None else row["value"]
    return f"{value:.3f} {'✓' if row['passed'] else '·'}"


def _total(rows: list[dict], label: str, name: str) -> float:
    """Seconds add up over tasks; of the parameters, which differ in the embeddings, the most."""
    per_task = {r["ability"]: r[name] for r in rows if r["model"] == label}.values()
    return sum(per_task) if name == "seconds" else max(per_task)
