"""The abilities of a profile, and its runs: every ability of a model over lengths and seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm.common.console import say
from lm.common.errors import ConfigError
from lm.common.files import check_together, find_shipped
from lm.config import load as base
from lm.config.schema import Config as LMConfig
from lm.runs.run_dir import RunDirError
from synthetic import config
from synthetic.numbers import LAST_COLUMNS, Trained
from synthetic.runs import differences, is_finished, result_of, run_all

RECIPES = find_shipped("configs/synthetic/small")
FILES = ("validate.csv", "lengths.png")

TAKEN = ("model", "solver", "optim")  # sections of a config that is validated
# A model is tried at the longest length of its training times these, as far as a sequence has no
# more tokens than this.
TIMES = (1, 2, 4, 8, 16, 32, 64)
MOST_TOKENS = 1200
SEEDS = (0, 1, 2)  # of training, unless the profile is a quick one
QUICK_EXAMPLES = 200  # sequences a length, in a quick profile


class Ability(NamedTuple):
    """An axis of a profile. The bars of its recipe are its thresholds."""

    recipe: str  # of RECIPES
    is_quick: bool = False  # in the quick profile, too


ABILITIES = {
    "state": Ability("s3", True),  # running products of S3
    "automaton": Ability("automaton"),  # an automaton with unsolvable groups
    "session": Ability("repl"),  # swaps of variables in a Python session
    "parity": Ability("parity"),  # is the number of ones odd?
    "brackets": Ability("dyck", True),  # which bracket is open?
    "arithmetic": Ability("mod_arithmetic", True),  # expressions modulo 3
    "copying": Ability("copy", True),  # a string, letter by letter
    "selective copying": Ability("selective_copying"),  # letters among blanks
    "look-up": Ability("recall", True),  # what followed this letter?
    "recall": Ability("mqar", True),  # values by their keys (MQAR)
    "noisy recall": Ability("noisy_recall"),  # the same in noise
    "fuzzy recall": Ability("fuzzy_recall"),  # keys and values of several tokens
    "memorization": Ability("memorization"),  # a dictionary by heart
}


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
    return str(tree.get("name", Path(path).stem)), kept


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
        for ability, (recipe, is_quick) in ABILITIES.items():
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
        "train": {**tree["train"], "adversarial_noise": 0.0},
    }


def _lengths(tree: dict, path: str) -> str:
    """`eval.lengths` of a run: TIMES its longest training length, and where its bars are."""
    from synthetic.evaluate import parse_lengths
    from synthetic.tasks import build

    cfg = base.build(tree, path, config.Config)
    task = build(cfg.task)
    longest = cfg.train.lengths[1]
    lengths = {longest, *(bar.length for bar in cfg.thresholds if bar.length)}
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
) -> list[Trained]:
    """Train and test every ability of the model of every config; finished runs are not repeated.

    Returns:
        The runs, whose `panel` is the ability.

    Raises:
        ConfigError: If a config cannot be validated.
        RunDirError: If OUT holds a finished run of another config.
        OutputError: If nothing can be written there.
        TrainingError: If some runs failed.
    """
    runs = plan(paths, overrides, out_dir, quick, seeds)
    files = [Path(out_dir) / name for name in FILES]
    check_together(files[0], ",".join(LAST_COLUMNS), *files)
    for cfg in filter(is_finished, runs.values()):  # its figures would be those of another model
        if different := differences(cfg):
            raise RunDirError(
                f"{cfg.run_dir} holds a finished run of another config"
                f" ({'; '.join(different[:4])}): choose another --out-dir, or delete it"
            )
    say(f"{len(runs)} runs, {sum(map(is_finished, runs.values()))} of them finished already")
    run_all(list(runs.values()), jobs)
    return [
        Trained(cfg.run_dir, cfg, cfg.seed, {}, point.model, point.ability, result_of(cfg), [])
        for point, cfg in runs.items()
    ]
