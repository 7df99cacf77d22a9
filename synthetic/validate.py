"""Comparison of models by their abilities: recipes, runs over lengths and seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm.common.console import say
from lm.common.errors import ConfigError
from lm.common.files import check_replaceable_with_record, find_shipped
from lm.config.load import build as build_config
from lm.config.load import load_tree, parse_override, set_overrides
from lm.config.schema import Config as LMConfig
from lm.runs.run_dir import RunDirError
from synthetic import config
from synthetic.result_tables import LAST_COLUMNS, FinishedRun
from synthetic.runs import find_differences, is_finished, read_result, run_all

RECIPE_DIR = find_shipped("configs/synthetic/small")
OUTPUT_FILES = ("validate.csv", "lengths.png")
MODEL_SECTIONS = ("model", "solver", "optim")  # sections of a recipe that a model replaces
# Evaluated lengths, as multiples of the longest training length, if the sequences have at most
# MAX_TOKENS tokens.
LENGTH_FACTORS = (1, 2, 4, 8, 16, 32, 64)
MAX_TOKENS = 1200
SEEDS = (0, 1, 2)  # training seeds; --quick uses only the first
QUICK_EXAMPLES = 200  # test sequences per length with --quick


class Ability(NamedTuple):
    """An ability that models are compared by.

    Its recipe is the YAML of a task with training options and thresholds.
    """

    recipe: str  # file name in RECIPE_DIR, without .yaml
    is_quick: bool = False  # whether --quick includes it


ABILITIES = {
    "state": Ability("s3", is_quick=True),  # running products of S3
    "automaton": Ability("automaton"),  # an automaton with a group that is not solvable
    "session": Ability("repl"),  # swaps of variables in a Python session
    "parity": Ability("parity"),  # whether the number of ones is odd
    "brackets": Ability("dyck", is_quick=True),  # the innermost open bracket
    "arithmetic": Ability("mod_arithmetic", is_quick=True),  # expressions modulo 3
    "copying": Ability("copy", is_quick=True),  # a string, character by character
    "selective copying": Ability("selective_copying"),  # tokens among blanks
    "look-up": Ability("recall", is_quick=True),  # the character after a given one
    "recall": Ability("mqar", is_quick=True),  # values by their keys (MQAR)
    "noisy recall": Ability("noisy_recall"),  # the same with noise
    "fuzzy recall": Ability("fuzzy_recall"),  # keys and values of several tokens
    "memorization": Ability("memorization"),  # a fixed dictionary
}


class RunKey(NamedTuple):
    """Ability, model and training seed of a run."""

    ability: str
    model: str
    seed: int


def _read_model_sections(path: str, overrides: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Read the name and the MODEL_SECTIONS of a config.

    Any YAML with a `model:` section works, also the YAML of a language model; other sections are
    ignored.

    Raises:
        ConfigError: If the file has an unknown section or no model, or an override has another
            section.
    """
    tree = load_tree(path)
    unknown = tree.keys() - config.Config.model_fields.keys() - LMConfig.model_fields.keys()
    if unknown:
        raise ConfigError(f"{path}: unknown section {', '.join(sorted(map(str, unknown)))}")
    if "model" not in tree:
        raise ConfigError(f"{path} has no `model:` section: validate needs a model to build")
    sections = {name: tree[name] for name in MODEL_SECTIONS if name in tree}
    if not isinstance(sections.get("optim") or {}, dict):
        raise ConfigError(f"{path}: `optim` is {sections['optim']!r}: it must be a section")
    for text in overrides:
        key, _ = parse_override(text, config.Config)
        if key.partition(".")[0] not in MODEL_SECTIONS:
            raise ConfigError(
                f"override `{key}`: validate accepts only keys of model, solver and optim"
            )
    set_overrides(sections, overrides, config.Config)
    return str(tree.get("name", Path(path).stem)), sections


def plan_runs(
    paths: Sequence[str],
    overrides: Sequence[str],
    out_dir: str,
    quick: bool = False,
    seeds: Sequence[int] | None = None,
) -> dict[RunKey, config.Config]:
    """Build the configs of all runs: every model on every ability with every seed.

    Args:
        paths: YAMLs with a `model:` section.
        overrides: key=value, applied to the MODEL_SECTIONS.
        out_dir: Folder of the runs.
        quick: Only the abilities with `is_quick`, with fewer test sequences.
        seeds: Training seeds; None: SEEDS, or with `quick` only the first of them.

    Raises:
        ConfigError: If there is no config, one is invalid, two have the same name, or a seed occurs
            twice.
    """
    if not paths:
        raise ConfigError("validate needs a config with a `model:` section, not only overrides")
    if seeds is None:
        seeds = SEEDS[:1] if quick else SEEDS
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds {list(seeds)}: one of them occurs twice")
    runs: dict[RunKey, config.Config] = {}
    for path in paths:
        name, sections = _read_model_sections(path, overrides)
        if any(name == key.model for key in runs):
            raise ConfigError(f"{path}: another config is named `{name}` too")
        for ability, (recipe, is_quick) in ABILITIES.items():
            if quick and not is_quick:
                continue
            tree = _replace_model(load_tree(RECIPE_DIR / f"{recipe}.yaml"), sections)
            tree["out_dir"] = out_dir
            if quick:
                tree["eval"] = {**tree["eval"], "examples": QUICK_EXAMPLES}
            tree["eval"] = {**tree["eval"], "lengths": _choose_lengths(tree, path)}
            for seed in seeds:
                tree |= {"name": f"{name}/{recipe}/seed{seed}", "seed": seed}
                runs[RunKey(ability, name, seed)] = build_config(tree, str(path), config.Config)
    return runs


def _replace_model(tree: dict, sections: dict) -> dict:
    """Return a recipe's tree with another model.

    The model and solver sections are replaced. In the optimizer section only the keys that the
    config sets are replaced. Adversarial noise is switched off: only some models support it.
    """
    return {
        **tree,
        "model": sections["model"],
        "solver": sections.get("solver") or {},
        "optim": {**tree.get("optim", {}), **(sections.get("optim") or {})},
        "train": {**tree["train"], "adversarial_noise": 0.0},
    }


def _choose_lengths(tree: dict, path: str) -> str:
    """Choose `eval.lengths`: LENGTH_FACTORS × training length, and the lengths of thresholds."""
    from synthetic.evaluate import parse_lengths
    from synthetic.tasks import build_task

    cfg = build_config(tree, path, config.Config)
    task = build_task(cfg.task)
    longest = cfg.train.lengths[1]
    lengths = {longest, *(entry.length for entry in cfg.thresholds if entry.length)}
    for factor in LENGTH_FACTORS:
        target = longest * factor
        # In a range, a length that the task lacks is replaced by the next shorter one.
        length = parse_lengths(f"{target - 1}:{target}:1", task)[-1]
        # A sequence may have more tokens than its length: a copied string occurs twice.
        sample = task.batch(seed=0, split="test", index=0, batch_size=1, lengths=(length, length))
        if sample.input_ids.shape[1] <= MAX_TOKENS:
            lengths.add(length)
    return ",".join(map(str, sorted(lengths)))


def validate(
    paths: Sequence[str],
    overrides: Sequence[str] = (),
    out_dir: str = "runs/validate",
    jobs: int = 1,
    quick: bool = False,
    seeds: Sequence[int] | None = None,
) -> list[FinishedRun]:
    """Train and evaluate every model on every ability; finished runs are not repeated.

    Args:
        paths, overrides, out_dir, quick, seeds: As in `plan_runs`.
        jobs: Number of processes at once.

    Returns:
        The runs; their `panel` is the ability.

    Raises:
        ConfigError: If a config is invalid; see `plan_runs`.
        RunDirError: If `out_dir` contains a finished run with another config.
        OutputError: If `out_dir` cannot be written.
        TrainingError: If some runs failed.
    """
    runs = plan_runs(paths, overrides, out_dir, quick, seeds)
    files = [Path(out_dir) / name for name in OUTPUT_FILES]
    # The heading of the CSV shows that this program wrote both files and may replace them.
    check_replaceable_with_record(files[0], ",".join(LAST_COLUMNS), *files)
    for cfg in filter(is_finished, runs.values()):
        if changes := find_differences(cfg):
            raise RunDirError(
                f"{cfg.run_dir} holds a finished run with another config"
                f" ({'; '.join(changes[:4])}): choose another --out-dir, or delete it"
            )
    say(f"{len(runs)} runs, {sum(map(is_finished, runs.values()))} of them already finished")
    run_all(list(runs.values()), jobs)
    return [
        FinishedRun(
            run_dir=cfg.run_dir,
            cfg=cfg,
            seed=cfg.seed,
            point={},
            model=key.model,
            panel=key.ability,
            result=read_result(cfg),
            records=[],
        )
        for key, cfg in runs.items()
    ]
