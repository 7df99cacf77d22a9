"""The paper's figures and tables from the runs of a sweep: NAME.png, NAME.csv, what is missing."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd

from lm.common.console import say
from lm.common.errors import TrainingError
from lm.common.files import check_folder, check_together, find_shipped, writing
from lm.config import load as base
from lm.runs.metrics import read_metrics
from synthetic.config import Config, load
from synthetic.labels import model_label, task_label
from synthetic.plots import KINDS, Drawing, ReportError
from synthetic.result_tables import LAST_COLUMNS, Trained, write_csv
from synthetic.results import in_words, table
from synthetic.runs import differences, is_finished, result_of, run_all, seed_of

CONFIGS = find_shipped("configs/synthetic")
SCALES = ("small", "paper")


@dataclass(frozen=True)
class Report:
    """A figure or table of the paper: a specification for `synthetic.plots`."""

    where: str  # in the paper
    title: str
    kind: str  # of synthetic.plots.KINDS
    options: dict[str, Any] = field(default_factory=dict)  # of that kind
    paper: str = ""  # the paper's values; "": the paper only draws them

    def draw(self, runs: list[Trained], title: str) -> Drawing:
        """Draw the figure from finished runs."""
        return KINDS[self.kind](runs, title, **self.options)


REPORTS = {
    "demo": Report("State tracking", "Words of S3, trained on up to 16 letters", "curves"),
    "fig1": Report("Fig. 1", "Length generalisation by ℓmax in training", "curves"),
    "fig2": Report(
        "Fig. 2",
        "State tracking and copying",
        "scatter",
        {"metric": {"copy": "character_accuracy", "word_problem": "token_accuracy"}},
    ),
    "fig3b": Report("Fig. 3b", "Length generalisation by mixer", "curves"),
    "fig3c": Report(
        "Fig. 3c",
        "Iterations to the fixed point by mixer",
        "curves",
        {"metric": "num_iters"},
    ),
    "fig4": Report("Fig. 4", "Word problem: fixed-point models and deeper baselines", "curves"),
    "tab1": Report(
        "Table 1",
        "Copying by what depends on y",
        "bars",
        {"metric": "character_accuracy"},
        paper="at twice the trained length, character accuracy: 0.11 with λ alone, 0.94 with all",
    ),
    "fig5": Report("Fig. 5", "Longest solved length over training time, by ℓmax", "times"),
    "fig6": Report(
        "Fig. 6", "Longest solved length over training time, with a random ℓmax", "times"
    ),
    "fig9": Report(
        "Fig. 9",
        "Word problem, trained on long words",
        "curves",
        paper="trained to 128, at four times that. A5: FP-Mamba-1 kronecker 0.9955, householder 4"
        " 0.8768; FP-Mamba-2 0.9821, 0.8819; Gated DeltaProduct 4 0.2390. S5: 0.9075, 0.8637;"
        " 0.9282, 0.9220; 0.4542",
    ),
    "fig10": Report("Fig. 10", "Read at once and token by token", "curves"),
    "tab2": Report(
        "Table 2",
        "Modular arithmetic with brackets",
        "bars",
        {"at": "beyond"},
        paper="trained to 40, tested to 256: Transformer 0.025, mLSTM 0.034, Mamba 0.136, sLSTM"
        " 0.173, DeltaNet 0.200, Gated DeltaProduct 0.342, FP-Mamba of 4 reflections 0.384",
    ),
    "fig11": Report("Fig. 11", "Modular arithmetic with brackets", "curves"),
    "catbabi": Report(
        "CatbAbI",
        "CatbAbI, answers",
        "bars",
        {"at": "whole"},
        paper="10k questions a task, 1 and 2 layers: Mamba 0.7828, 0.8708; FP-Mamba kronecker"
        " 0.7993, 0.8416; householder 1 0.8132, 0.8908; 2 0.8160, 0.8747; 3 0.8079, 0.8955",
    ),
}


@dataclass
class Sweep:
    """The points of a report's config, and their runs."""

    path: Path
    overrides: tuple[str, ...]
    points: list[dict[str, Any]]  # dotted key → value, mappings flattened
    configs: list[Config]

    def missing(self) -> list[int]:
        """Return the indices of the points that have not been trained."""
        return [i for i, cfg in enumerate(self.configs) if not is_finished(cfg)]


def _shown(path: Path) -> str:
    """Return a path as one would type it here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def config_path(name: str, scale: str, config: str | None = None) -> Path:
    """Return the YAML of a report.

    Raises:
        ReportError: If there is no such report, or no such file.
    """
    if name not in REPORTS:
        raise ReportError(f"no report `{name}`: there are {', '.join(REPORTS)}")
    path = Path(config) if config else CONFIGS / scale / f"{name}.yaml"
    if not path.is_file():
        raise ReportError(
            f"no config of report {name} at {path}: name the YAML of its sweep with --config"
        )
    return Path(_shown(path))


def expand(path: Path, overrides: tuple[str, ...] = ()) -> Sweep:
    """Return the sweep of a YAML as `train --job-index` would run it.

    Args:
        path: The YAML.
        overrides: key=value, of every point.

    Raises:
        ConfigError: If keys or values are not valid.
    """
    points = base.sweep_points(base.load_tree(path), str(path), Config)
    configs = [load(path, overrides, i) for i in range(len(points))]
    return Sweep(path, tuple(overrides), [_flat(point) for point in points], configs)


def _flat(point: dict[str, Any]) -> dict[str, Any]:
    """Flatten {"model": {"name": "mamba"}} to {"model.name": "mamba"}; a variant has a name and
    stays as it is."""
    flat: dict[str, Any] = {}
    for key, value in point.items():
        if isinstance(value, dict) and not isinstance(value, base.Variant):
            flat |= {f"{key}.{below}": v for below, v in value.items()}
        else:
            flat["model.name" if key == "model" else key] = value
    return flat


def collect(sweep: Sweep) -> list[Trained]:
    """Return the finished runs in the order of the sweep, and print a note on runs of another
    config."""
    runs: list[Trained] = []
    for cfg, point in zip(sweep.configs, sweep.points, strict=True):
        if not is_finished(cfg):
            continue
        if different := differences(cfg):
            say(f"note: {cfg.run_dir} is of another config: {'; '.join(different[:4])}")
        runs.append(
            Trained(
                run_dir=cfg.run_dir,
                cfg=cfg,
                seed=seed_of(cfg),
                point=point,
                model=model_label(cfg, point),
                panel=task_label(cfg, point),
                result=result_of(cfg),
                records=read_metrics(cfg.run_dir),
            )
        )
    labels = [(run.label, run.seed) for run in runs]
    for i, run in enumerate(runs):  # two curves with the same label and seed would look like one
        if labels.count(labels[i]) > 1:
            run.model += f" ({labels[:i].count(labels[i]) + 1})"
    return runs


def missing_lines(sweep: Sweep) -> list[str]:
    """Return the command lines that train the missing runs, here or as a Slurm array."""
    missing = sweep.missing()
    if not missing:
        return []
    parts = ["fprnn", "synthetic", "train", "--config", _shown(sweep.path), "--job-index"]
    command = f"{shlex.join(parts)} $i {shlex.join(sweep.overrides)}".strip()
    script = _shown(find_shipped("launch/synthetic_array.sbatch"))
    submit = shlex.join([script, _shown(sweep.path), *sweep.overrides])
    return [
        f"{len(missing)} of {len(sweep.configs)} runs are missing; --run trains them, or a"
        " loop, or a Slurm array:",
        f"  for i in {' '.join(map(str, missing))}; do {command}; done",
        f"  mkdir -p logs && sbatch --array={','.join(map(str, missing))} {submit}",
    ]


def report(
    name: str,
    scale: str = "small",
    overrides: tuple[str, ...] = (),
    config: str | None = None,
    run: bool = False,
    jobs: int = 1,
) -> dict[str, Path]:
    """Draw a report from the runs that are finished, and print which are not.

    Args:
        name: A key of REPORTS.
        scale: "small" or "paper".
        overrides: key=value, of every run.
        config: The YAML of the sweep; None: the report's own YAML at this scale.
        run: Train the missing runs first.
        jobs: Processes at once.

    Returns:
        The files written: {"figure", "PDF", "numbers", "LaTeX"}.

    Raises:
        ReportError: If there is no such report, or no run to draw it from.
        OutputError: If the files cannot be written.
        ConfigError, TaskError, TrainingError: As `synthetic.train.train`.
    """
    # 1. Train the missing runs if asked to.
    path = config_path(name, scale, config)
    entry = REPORTS[name]
    sweep = expand(path, overrides)
    folder = Path(sweep.configs[0].out_dir) / "reports" / scale
    check_folder(folder)
    kinds = {"figure": "png", "PDF": "pdf", "numbers": "csv", "LaTeX": "tex"}
    paths = {what: folder / f"{name}.{kind}" for what, kind in kinds.items()}
    check_together(paths["numbers"], ",".join(LAST_COLUMNS), *paths.values())
    failure = None
    if run:
        try:
            run_all([sweep.configs[i] for i in sweep.missing()], jobs)
        except TrainingError as e:  # the finished runs can be drawn all the same
            failure = e
            say(f"error: {e}")

    # 2. Draw and write the figure.
    runs = collect(sweep)
    missing = missing_lines(sweep)
    try:
        if not runs:
            raise ReportError(
                f"report {name} has none of its {len(sweep.configs)} runs yet (in"
                f" {sweep.configs[0].run_dir.parent}): start them, or give --run"
            )
        drawing = entry.draw(runs, f"{entry.title} ({scale})")
    except ReportError:
        say("\n".join(missing))
        raise
    _write(drawing, folder, paths)

    # 3. Print the summary, the notes, and what is missing.
    count = f"{len(runs)} of {len(sweep.configs)} runs"
    say(table(drawing.summary, f"{entry.where}: {entry.title} ({scale}, {count})"))
    lines = [*drawing.notes, describe_paper(entry, scale)]
    lines += [f"{what:<8} {path}" for what, path in paths.items()]
    say("\n".join([*lines, *missing]))
    if failure:
        raise failure
    return paths


def describe_paper(entry: Report, scale: str) -> str:
    """Return the paper's values, and whether they are of the scale that ran."""
    if not entry.paper:
        return f"The paper's {entry.where} is a figure without numbers."
    theirs = "its scale" if scale == "paper" else "its scale, which is not the one that ran here"
    return f"The paper ({theirs}), {entry.paper}."


# Signs of our tables that pdflatex does not know.
LATEX_SIGNS = {"ℓ": r"$\ell$", "λ": r"$\lambda$", "Γ": r"$\Gamma$", "≥": r"$\ge$", "±": r"$\pm$"}
LATEX_SIGNS |= {"⌈": r"$\lceil$", "⌉": r"$\rceil$", "²": "$^2$"}


def _write(drawing: Drawing, folder: Path, paths: dict[str, Path]) -> None:
    """Write NAME.png, NAME.pdf, NAME.csv with all numbers, and NAME.tex with the printed table."""
    head, *rows = in_words(drawing.summary)
    with writing(folder), matplotlib.rc_context({"pdf.fonttype": 42}):  # letters stay letters
        folder.mkdir(parents=True, exist_ok=True)
        drawing.figure.savefig(paths["figure"], dpi=140)
        drawing.figure.savefig(paths["PDF"], metadata={"CreationDate": None})
        write_csv(drawing.numbers, paths["numbers"])
        latex = pd.DataFrame(rows, columns=head).to_latex(index=False, escape=True)
        paths["LaTeX"].write_text(latex.translate(str.maketrans(LATEX_SIGNS)), encoding="utf-8")
