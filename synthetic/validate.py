"""The suite's face: four small tasks on one or several models, one table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.common.console import say
from lm.common.errors import ConfigError
from lm.common.files import check_file, write_json
from lm.config import load as base
from lm.config.schema import Config as LMConfig
from lm.runs.run_dir import RunDirError
from synthetic import config
from synthetic.results import UNKNOWN, error_of_mean, in_training, passes, plus_minus, way_of
from synthetic.runs import differences, is_finished, result_of, run_all

if TYPE_CHECKING:
    from rich.table import Table

RECIPES = Path(__file__).parent.parent / "configs" / "synthetic" / "small"
# ability → recipe; the recipe's bars are the rows of the table.
QUICK = {
    "state tracking": "s3",
    "copying": "copy",
    "arithmetic": "mod_arithmetic",
    "memory": "recall",
}

TAKEN = ("model", "solver", "optim")  # sections of a config that is validated


def _model_of(path: str, overrides: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Name and {"model": …, "solver": …, "optim": …} of a config.

    Any YAML with a `model:` section will do, a language model's too; other sections are left out.
    """
    tree = base.load_tree(path)
    unknown = tree.keys() - config.Config.model_fields.keys() - LMConfig.model_fields.keys()
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
    paths: Sequence[str], overrides: Sequence[str], out_dir: str
) -> dict[tuple[str, str], config.Config]:
    """(ability, model's name) → the run that answers for it.

    Raises:
        ConfigError: no config, one that cannot be validated, or two of one name.
    """
    if not paths:
        raise ConfigError("validate needs a config with a `model:` section, not only overrides")
    runs: dict[tuple[str, str], config.Config] = {}
    for path in paths:
        name, sections = _model_of(path, overrides)
        if any(name == other for _, other in runs):
            raise ConfigError(f"{path}: another config is named `{name}` too")
        for ability, recipe in QUICK.items():
            tree = base.load_tree(RECIPES / f"{recipe}.yaml")
            # The whole of the recipe's model and solver is replaced; of its optimizer only the keys
            # that the config sets. An adversary goes: only some models can have one.
            tree["model"] = sections["model"]
            tree["solver"] = sections.get("solver") or {}
            tree["optim"] = {**tree.get("optim", {}), **(sections.get("optim") or {})}
            tree["train"] = {**tree["train"], "adversary": 0.0}
            tree["name"] = f"{name}/{recipe}"
            tree["out_dir"] = out_dir
            runs[ability, name] = base.build(tree, str(path), config.Config)
    return runs


def validate(
    paths: Sequence[str],
    overrides: Sequence[str] = (),
    out_dir: str = "runs/validate",
    jobs: int = 1,
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
        if different := differences(cfg):
            raise RunDirError(
                f"{cfg.run_dir} holds a finished run of another config"
                f" ({'; '.join(different[:4])}): choose another --out-dir, or delete it"
            )
    say(f"{len(runs)} runs, {sum(map(is_finished, runs.values()))} of them finished already")
    run_all(list(runs.values()), jobs)
    rows = []
    for (ability, name), cfg in runs.items():
        result = result_of(cfg)
        for bar in passes(cfg.bars, result["eval"]):
            rows.append(
                {
                    "ability": ability,
                    "task": cfg.task.name,
                    "model": name,
                    "trained_to": cfg.train.lengths[1],
                    **bar,
                    "updates": result["updates"],
                    "seconds": result["training_seconds"],
                    "parameters": result["parameters"],
                    **_how_measured(result["eval"], bar),
                }
            )
    write_json(Path(out_dir) / "validate.json", rows)
    return rows


def _how_measured(results: list[dict], bar: dict) -> dict:
    """The standard error of a bar's value, how it was measured, and how many of the samples
    training has too."""
    rows = [
        row for row in results if row["length"] == bar["length"] and bar["metric"] in row["metrics"]
    ]
    if not rows:
        return {"stderr": None, "read": None, "solver": None, "in_training": None}
    way = way_of(rows[0])
    return {
        "stderr": error_of_mean(rows, bar["metric"]),
        "read": way.read,
        "solver": way.solver,
        "in_training": in_training(rows),
    }


def table(rows: list[dict]) -> Table:
    """A rich table: a row for each bar, a column for each model. Below it, what solved the models,
    and which samples training had too."""
    from rich.table import Table

    models = list(dict.fromkeys(row["model"] for row in rows))
    made = Table(
        title="What the models can do (✓ reaches the bar; ± standard error)",
        caption="\n".join(_notes(rows)),
        caption_justify="left",
    )
    for heading in ("ability", "task", "metric", "bar"):
        made.add_column(heading)
    for model in models:
        made.add_column(model, justify="right")

    by_bar: dict[tuple, dict[str, dict]] = {}  # (ability, metric, length) → model → row
    for row in rows:
        bar = row["ability"], row["metric"], row["length"]
        by_bar.setdefault(bar, {})[row["model"]] = row
    for (ability, metric, length), row_of in by_bar.items():
        any_row = next(iter(row_of.values()))
        trained_to = any_row["trained_to"]
        name = f"{metric.replace('_', ' ')} at {length}"
        if length != trained_to:
            name += f", trained to {trained_to}"
        cells = [_cell(row_of[model]) for model in models]
        made.add_row(ability, any_row["task"], name, f"{any_row['least']:g}", *cells)

    made.add_section()
    parameters = [f"{_largest(rows, model, 'parameters'):,.0f}" for model in models]
    made.add_row("parameters", "", "", "", *parameters)
    seconds = [f"{_sum(rows, model, 'seconds'):,.0f} s" for model in models]
    made.add_row("seconds", "", "in all", "", *seconds)
    return made


def _notes(rows: list[dict]) -> list[str]:
    """What solved each model, and the test samples that training has too."""
    models_by_way: dict[str, list[str]] = {}
    for row in rows:
        way = f"read {row['read']}; solver: {row['solver']}"
        models_by_way.setdefault(way, []).append(row["model"])
    notes = [f"{', '.join(dict.fromkeys(models))}: {way}" for way, models in models_by_way.items()]
    for row in rows:
        if row["in_training"] not in ("0", None):
            share = f"{row['in_training']} test samples are in training too"
            if row["in_training"] == UNKNOWN:
                share = "whether training has the test samples too is unknown"
            notes.append(f"{row['model']}, {row['task']} at {row['length']}: {share}")
    return notes


def _cell(row: dict) -> str:
    value = math.nan if row["value"] is None else row["value"]
    stderr = math.nan if row["stderr"] is None else row["stderr"]
    return f"{value:.3f}{plus_minus(stderr)} {'✓' if row['passed'] else '·'}"


def _of_abilities(rows: list[dict], model: str, key: str) -> list[float]:
    """A model's number for each ability, which all its bars share."""
    return list({row["ability"]: row[key] for row in rows if row["model"] == model}.values())


def _sum(rows: list[dict], model: str, key: str) -> float:
    return sum(_of_abilities(rows, model, key))


def _largest(rows: list[dict], model: str, key: str) -> float:
    """Of numbers that differ from task to task, as the parameters do by their embeddings."""
    return max(_of_abilities(rows, model, key))
