"""Figures and tables of the paper from the finished runs of a sweep."""

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
from synthetic.result_tables import LAST_COLUMNS, FinishedRun, write_csv
from synthetic.results import build_table, to_text_rows
from synthetic.runs import find_differences, is_finished, read_result, read_seed, run_all

CONFIGS = find_shipped("configs/synthetic")
SCALES = ("small", "paper")


@dataclass(frozen=True)
class Report:
    """Specification of a figure or table of the paper, drawn by `synthetic.plots`."""

    paper_label: str  # of the figure or table in the paper
    title: str
    kind: str  # key of synthetic.plots.KINDS
    options: dict[str, Any] = field(default_factory=dict)  # arguments of that kind
    paper: str = ""  # values in the paper; "" if the paper only draws them

    def draw(self, runs: list[FinishedRun], title: str) -> Drawing:
        """Draw the figure from finished runs."""
        return KINDS[self.kind](runs, title, **self.options)


REPORTS = {
    "demo": Report("State tracking", "Sequences of S3, trained on up to 16 elements", "curves"),
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
        "Copying, by the parameters that depend on y",
        "bars",
        {"metric": "character_accuracy"},
        paper="at twice the trained length, character accuracy: 0.11 with λ only, 0.94 with all",
    ),
    "fig5": Report("Fig. 5", "Longest solved length over training time, by ℓmax", "times"),
    "fig6": Report(
        "Fig. 6", "Longest solved length over training time, with a random ℓmax", "times"
    ),
    "fig9": Report(
        "Fig. 9",
        "Word problem, trained on long sequences",
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
        {"lengths": "beyond"},
        paper="trained to 40, tested to 256: Transformer 0.025, mLSTM 0.034, Mamba 0.136, sLSTM"
        " 0.173, DeltaNet 0.200, Gated DeltaProduct 0.342, FP-Mamba of 4 reflections 0.384",
    ),
    "fig11": Report("Fig. 11", "Modular arithmetic with brackets", "curves"),
    "catbabi": Report(
        "CatbAbI",
        "CatbAbI, answers",
        "bars",
        {"lengths": "all"},
        paper="10k questions a task, 1 and 2 layers: Mamba 0.7828, 0.8708; FP-Mamba kronecker"
        " 0.7993, 0.8416; householder 1 0.8132, 0.8908; 2 0.8160, 0.8747; 3 0.8079, 0.8955",
    ),
}


@dataclass
class Sweep:
    """Points of a report's config, with their runs."""

    path: Path
    overrides: tuple[str, ...]
    points: list[dict[str, Any]]  # dotted key → value, mappings flattened
    configs: list[Config]

    def missing_points(self) -> list[int]:
        """Return the indices of the points that have not been trained."""
        return [i for i, cfg in enumerate(self.configs) if not is_finished(cfg)]


def _relative(path: Path) -> str:
    """Return a path relative to the working directory, if it is inside it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def config_path(name: str, scale: str, config: str | None = None) -> Path:
    """Return the path of a report's YAML.

    Raises:
        ReportError: If the report or the file does not exist.
    """
    if name not in REPORTS:
        raise ReportError(f"no report `{name}`: the reports are {', '.join(REPORTS)}")
    path = Path(config) if config else CONFIGS / scale / f"{name}.yaml"
    if not path.is_file():
        raise ReportError(
            f"report {name} has no config at {path}: give the YAML of its sweep with --config"
        )
    return Path(_relative(path))


def expand(path: Path, overrides: tuple[str, ...] = ()) -> Sweep:
    """Expand a YAML into its sweep, as `train --job-index` runs it.

    Args:
        path: The YAML.
        overrides: key=value, applied to every point.

    Raises:
        ConfigError: If a key or a value is invalid.
    """
    points = base.sweep_points(base.load_tree(path), str(path), Config)
    configs = [load(path, overrides, i) for i in range(len(points))]
    return Sweep(path, tuple(overrides), [_flat(point) for point in points], configs)


def _flat(point: dict[str, Any]) -> dict[str, Any]:
    """Flatten {"model": {"name": "mamba"}} to {"model.name": "mamba"}, except variants."""
    flat: dict[str, Any] = {}
    for key, value in point.items():
        if isinstance(value, dict) and not isinstance(value, base.Variant):
            flat |= {f"{key}.{name}": v for name, v in value.items()}
        else:
            flat["model.name" if key == "model" else key] = value
    return flat


def collect(sweep: Sweep) -> list[FinishedRun]:
    """Return the finished runs in the order of the sweep.

    Print a note on runs that were trained with another config.
    """
    runs: list[FinishedRun] = []
    for cfg, point in zip(sweep.configs, sweep.points, strict=True):
        if not is_finished(cfg):
            continue
        if changes := find_differences(cfg):
            say(f"note: {cfg.run_dir} has another config: {'; '.join(changes[:4])}")
        runs.append(
            FinishedRun(
                run_dir=cfg.run_dir,
                cfg=cfg,
                seed=read_seed(cfg),
                point=point,
                model=model_label(cfg, point),
                panel=task_label(cfg, point),
                result=read_result(cfg),
                records=read_metrics(cfg.run_dir),
            )
        )
    labels = [(run.label, run.seed) for run in runs]
    for i, run in enumerate(runs):  # number the runs with the same label and seed
        if labels.count(labels[i]) > 1:
            run.model += f" ({labels[:i].count(labels[i]) + 1})"
    return runs


def missing_lines(sweep: Sweep) -> list[str]:
    """Return the commands that train the missing runs, here or as a Slurm array."""
    missing = sweep.missing_points()
    if not missing:
        return []
    parts = ["fprnn", "synthetic", "train", "--config", _relative(sweep.path), "--job-index"]
    command = f"{shlex.join(parts)} $i {shlex.join(sweep.overrides)}".strip()
    script = _relative(find_shipped("launch/synthetic_array.sbatch"))
    submit = shlex.join([script, _relative(sweep.path), *sweep.overrides])
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
    """Draw a report from its finished runs, and print the commands of the missing ones.

    Args:
        name: A key of REPORTS.
        scale: "small" or "paper".
        overrides: key=value, applied to every run.
        config: The YAML of the sweep; None: the report's own YAML at this scale.
        run: Train the missing runs first.
        jobs: Number of processes at once.

    Returns:
        The files written: {"figure", "PDF", "numbers", "LaTeX"}.

    Raises:
        ReportError: If the report does not exist, or has no finished run.
        OutputError: If the files cannot be written.
        ConfigError, TaskError, TrainingError: As `synthetic.train.train`.
    """
    # 1. Train the missing runs.
    path = config_path(name, scale, config)
    entry = REPORTS[name]
    sweep = expand(path, overrides)
    folder = Path(sweep.configs[0].out_dir) / "reports" / scale
    check_folder(folder)
    kinds = {"figure": "png", "PDF": "pdf", "numbers": "csv", "LaTeX": "tex"}
    paths = {label: folder / f"{name}.{kind}" for label, kind in kinds.items()}
    check_together(paths["numbers"], ",".join(LAST_COLUMNS), *paths.values())
    failure = None
    if run:
        try:
            run_all([sweep.configs[i] for i in sweep.missing_points()], jobs)
        except TrainingError as e:  # draw the finished runs first
            failure = e
            say(f"error: {e}")

    # 2. Draw and write the figure.
    runs = collect(sweep)
    missing = missing_lines(sweep)
    try:
        if not runs:
            raise ReportError(
                f"report {name} has no finished run in {sweep.configs[0].run_dir.parent} (of"
                f" {len(sweep.configs)}): start them, or give --run"
            )
        drawing = entry.draw(runs, f"{entry.title} ({scale})")
    except ReportError:
        say("\n".join(missing))
        raise
    _write(drawing, folder, paths)

    # 3. Print the summary, the notes, and the missing runs.
    count = f"{len(runs)} of {len(sweep.configs)} runs"
    say(build_table(drawing.summary, f"{entry.paper_label}: {entry.title} ({scale}, {count})"))
    lines = [*drawing.notes, describe_paper(entry, scale)]
    lines += [f"{label:<8} {path}" for label, path in paths.items()]
    say("\n".join([*lines, *missing]))
    if failure:
        raise failure
    return paths


def describe_paper(entry: Report, scale: str) -> str:
    """Return a sentence with the paper's values and the scale that they belong to."""
    if not entry.paper:
        return f"The paper's {entry.paper_label} is a figure without numbers."
    scale_text = "its scale" if scale == "paper" else "its scale, which is not the one used here"
    return f"The paper ({scale_text}), {entry.paper}."


# Characters in our tables that pdflatex lacks.
LATEX_CHARACTERS = {
    "ℓ": r"$\ell$",
    "λ": r"$\lambda$",
    "Γ": r"$\Gamma$",
    "≥": r"$\ge$",
    "±": r"$\pm$",
}
LATEX_CHARACTERS |= {"⌈": r"$\lceil$", "⌉": r"$\rceil$", "²": "$^2$"}


def _write(drawing: Drawing, folder: Path, paths: dict[str, Path]) -> None:
    """Write the figure (png, pdf), all measurements (csv) and the printed table (tex)."""
    head, *rows = to_text_rows(drawing.summary)
    with writing(folder), matplotlib.rc_context({"pdf.fonttype": 42}):  # keep text as text
        folder.mkdir(parents=True, exist_ok=True)
        drawing.figure.savefig(paths["figure"], dpi=140)
        drawing.figure.savefig(paths["PDF"], metadata={"CreationDate": None})
        write_csv(drawing.table, paths["numbers"])
        latex = pd.DataFrame(rows, columns=head).to_latex(index=False, escape=True)
        paths["LaTeX"].write_text(
            latex.translate(str.maketrans(LATEX_CHARACTERS)), encoding="utf-8"
        )
