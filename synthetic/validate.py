"""The profile of a model: every ability over lengths and seeds; what is planned, trained, found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from lm.common.console import say
from lm.common.errors import ConfigError
from lm.common.files import check_together, write_json
from lm.config import load as base
from lm.config.schema import Config as LMConfig
from lm.runs.run_dir import RunDirError
from synthetic import config
from synthetic.abilities import ABILITIES, RECIPES
from synthetic.results import (
    curriculum_note,
    error_of_mean,
    error_over_seeds,
    in_training,
    iterations_of_layers,
    mean_of,
    way_of,
)
from synthetic.runs import differences, is_finished, result_of, run_all

PAGES = ("README.md", "profile.png", "lengths.png")  # next to validate.json

TAKEN = ("model", "solver", "optim")  # sections of a config that is validated
# A model is tried at the longest length of its training times these, as far as a sequence has no
# more tokens than this.
TIMES = (1, 2, 4, 8, 16, 32, 64)
MOST_TOKENS = 1200
SEEDS = (0, 1, 2)  # of training, unless the profile is a quick one
QUICK_EXAMPLES = 200  # sequences a length, in a quick profile


class Point(NamedTuple):
    """A run of a profile."""

    ability: str
    model: str
    seed: int


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
    name = tree.get("name", Path(path).stem)
    if not isinstance(name, str):
        raise ConfigError(f"{path}: `name` is {name!r}: it must be a text")
    return name, kept


def plan(
    paths: Sequence[str],
    overrides: Sequence[str],
    out_dir: str,
    quick: bool = False,
    seeds: Sequence[int] | None = None,
) -> dict[Point, config.Config]:
    """The runs of a profile, model by model.

    Args:
        paths: YAMLs with a `model:` section. quick: the quick abilities alone, on fewer sequences.
        seeds: of training; None: SEEDS, of a quick profile the first of them.
    Raises:
        ConfigError: no config, one that cannot be validated, or two of one name; a seed twice.
    """
    if not paths:
        raise ConfigError("validate needs a config with a `model:` section, not only overrides")
    seeds = (SEEDS[:1] if quick else SEEDS) if seeds is None else seeds
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds {list(seeds)}: one of them is there twice")
    runs: dict[Point, config.Config] = {}
    for path in paths:
        name, sections = _model_of(path, overrides)
        if any(name == point.model for point in runs):
            raise ConfigError(f"{path}: another config is named `{name}` too")
        for ability, (recipe, _, is_quick) in ABILITIES.items():
            if quick and not is_quick:
                continue
            tree = _with_model(base.load_tree(RECIPES / f"{recipe}.yaml"), sections)
            tree |= {"out_dir": out_dir}
            if quick:
                tree["eval"] = {**tree["eval"], "examples": QUICK_EXAMPLES}
            tree["eval"] = {**tree["eval"], "lengths": _lengths(tree, path)}
            for seed in seeds:
                tree |= {"name": f"{name}/{recipe}/seed{seed}", "seed": seed}
                runs[Point(ability, name, seed)] = base.build(tree, str(path), config.Config)
    return runs


def _with_model(tree: dict, sections: dict) -> dict:
    """A recipe's tree with another model: the whole of its model and solver is replaced, of its
    optimizer only the keys that the config sets. An adversary goes: only some models can have one.
    """
    return {
        **tree,
        "model": sections["model"],
        "solver": sections.get("solver") or {},
        "optim": {**tree.get("optim", {}), **(sections.get("optim") or {})},
        "train": {**tree["train"], "adversary": 0.0},
    }


def _lengths(tree: dict, path: str) -> str:
    """`eval.lengths` of a run: TIMES its longest training length, and where its bars are."""
    from synthetic.evaluate import parse_lengths
    from synthetic.tasks import build

    cfg = base.build(tree, path, config.Config)
    task = build(cfg.task)
    longest = cfg.train.lengths[1]
    lengths = {longest, *(bar.length for bar in cfg.bars if bar.length)}
    for times in TIMES:
        wanted = longest * times
        # A range stands in for a length that the task has not, by the one below.
        length = parse_lengths(f"{wanted - 1}:{wanted}:1", task)[-1]
        if task.batch(0, "test", 0, 1, (length, length)).input_ids.shape[1] <= MOST_TOKENS:
            lengths.add(length)
    return ",".join(map(str, sorted(lengths)))


def validate(
    paths: Sequence[str],
    overrides: Sequence[str] = (),
    out_dir: str = "runs/validate",
    jobs: int = 1,
    quick: bool = False,
    seeds: Sequence[int] | None = None,
) -> dict[str, list[dict]]:
    """Train and test every ability of the model of every config; finished runs are not repeated.

    Returns:
        what `profile` gives; also written to OUT/validate.json.
    Raises:
        ConfigError: a config that cannot be validated.
        RunDirError: OUT holds a finished run of another config. OutputError: nothing can be
            written there.
        TrainingError: some runs failed.
    """
    runs = plan(paths, overrides, out_dir, quick, seeds)
    record = Path(out_dir) / "validate.json"
    check_together(record, '"lengths"', record, *(Path(out_dir) / name for name in PAGES))
    for cfg in filter(is_finished, runs.values()):  # its figures would be those of another model
        if different := differences(cfg):
            raise RunDirError(
                f"{cfg.run_dir} holds a finished run of another config"
                f" ({'; '.join(different[:4])}): choose another --out-dir, or delete it"
            )
    say(f"{len(runs)} runs, {sum(map(is_finished, runs.values()))} of them finished already")
    run_all(list(runs.values()), jobs)
    made = profile(runs)
    write_json(Path(out_dir) / "validate.json", made)
    return made


def profile(runs: dict[Point, config.Config]) -> dict[str, list[dict]]:
    """What finished runs have found, the seeds of a model together.

    Returns:
        "lengths": a row for each ability, model and length with the headline metric of every seed;
        "bars": a row for each bar and model; "work": a row for each ability and model.
    """
    made: dict[str, list[dict]] = {"lengths": [], "bars": [], "work": []}
    pairs = dict.fromkeys((point.ability, point.model) for point in runs)
    for ability, model in pairs:
        configs = [cfg for point, cfg in runs.items() if point[:2] == (ability, model)]
        results = [result_of(cfg) for cfg in configs]
        about = {"ability": ability, "task": configs[0].task.name, "model": model}
        trained_to = configs[0].train.lengths[1]
        headline = results[0]["headline"]
        for length in sorted({row["length"] for row in results[0]["eval"]}):
            row = _measured(results, headline, length)
            made["lengths"].append({**about, "trained_to": trained_to, **row})
        for bar in configs[0].bars:
            row = _measured(results, bar.metric, bar.length)
            passed = row["value"] >= bar.least
            judged = {"least": bar.least, "passed": passed}
            made["bars"].append({**about, "trained_to": trained_to, **row, **judged})
        about["state_noise"] = configs[0].solver.state_noise
        ends = [curriculum_note(result, cfg) for result, cfg in zip(results, configs, strict=True)]
        early = [f"seed {cfg.seed}: {note}" for cfg, note in zip(configs, ends) if note]
        made["work"].append({**about, "curriculum_notes": early, **_work(results, trained_to)})
    return made


def _measured(results: list[dict], metric: str, length: int | None) -> dict:
    """A metric at a length, of all seeds: its mean and error, and how it was
    measured."""
    rows_of_seeds = [
        [row for row in result["eval"] if length in (None, row["length"])] for result in results
    ]
    values = [mean_of(rows, metric) for rows in rows_of_seeds]
    errors = [error_of_mean(rows, metric) for rows in rows_of_seeds]
    rows = [row for rows in rows_of_seeds for row in rows]
    way = way_of(rows[0])
    return {
        "metric": metric,
        "length": length or rows[0]["length"],
        "value": mean(values),
        "error": error_over_seeds(values, errors),
        "seeds": values,
        "chance": results[0]["chance"],
        "read": way.read,
        "solver": way.solver,
        "in_training": in_training(rows),
    }


def _work(results: list[dict], trained_to: int) -> dict:
    """What the seeds of a model took on average; ℓ* and evaluations at the training length."""
    rows = [row for result in results for row in result["eval"] if row["length"] == trained_to]
    iterations = [layers for row in rows if (layers := iterations_of_layers(row)) is not None]
    return {
        "parameters": results[0]["parameters"],
        "updates": _mean(result["updates"] for result in results),
        "seconds": _mean(result["training_seconds"] for result in results),
        "evaluations": _mean(mean(row["evaluations"]) for row in rows if "evaluations" in row),
        "num_iters": _mean(mean(layers) for layers in iterations),
        "n": len(results),
    }


def _mean(values: Iterable[float]) -> float | None:
    """None of nothing."""
    known = list(values)
    return sum(known) / len(known) if known else None
