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
from lm.common.files import check_folder, check_replaceable_with_record, find_shipped, writing
from lm.config.load import Variant, load_sweep
from lm.runs.metrics import read_metrics
from synthetic.config import Config
from synthetic.labels import label_model, label_task
from synthetic.plots import DRAW_FUNCTIONS, Drawing, ReportError
from synthetic.result_tables import LAST_COLUMNS, FinishedRun, write_csv
from synthetic.results import build_table, format_rows
from synthetic.runs import find_differences, is_finished, read_result, read_seed, run_all

CONFIG_DIR = find_shipped("configs/synthetic")


@dataclass(frozen=True)
class Report:
    """Specification of a figure or table of the paper, drawn by `synthetic.plots`."""

    paper_label: str  # name in the paper, such as "Fig. 1"; "" if it is not in the paper
    title: str
    kind: str  # key of synthetic.plots.DRAW_FUNCTIONS
    options: dict[str, Any] = field(default_factory=dict)  # arguments of the draw function
    paper_values: str = ""  # as text; "" if the paper only draws them

    def draw(self, runs: list[FinishedRun], title: str) -> Drawing:
        """Draw the figure from finished runs."""
        return DRAW_FUNCTIONS[self.kind](runs, title, **self.options)


REPORTS = {
    "demo": Report("", "State tracking: sequences of S3, trained on up to 16 elements", "curves"),
    "fig1": Report("Fig. 1", "Length generalisation by ℓmax in training", "curves"),
    "fig2": Report(
        "Fig. 2",
        "State tracking and copying",
        "scatter",
        {"metric_by_task": {"copy": "character_accuracy", "word_problem": "token_accuracy"}},
    ),
    "fig3b": Report("Fig. 3b", "Length generalisation by mixer", "curves"),
    "fig3c": Report(
        "Fig. 3c", "Iterations to the fixed point by mixer", "curves", {"metric": "num_iters"}
    ),
    "fig4": Report("Fig. 4", "Word problem: fixed-point models and deeper baselines", "curves"),
    "tab1": Report(
        "Table 1",
        "Copying, by the parameters that depend on y",
        "bars",
        {"metric": "character_accuracy"},
        paper_values="at twice the trained length, character accuracy: 0.11 with λ only, 0.94 with"
        " all",
    ),
    "fig5": Report("Fig. 5", "Longest solved length over training time, by ℓmax", "times"),
    "fig6": Report(
        "Fig. 6", "Longest solved length over training time, with a random ℓmax", "times"
    ),
    "fig9": Report(
        "Fig. 9",
        "Word problem, trained on long sequences",
        "curves",
        paper_values="trained to 128, at four times that. A5: FP-Mamba-1 kronecker 0.9955,"
        " householder 4 0.8768; FP-Mamba-2 0.9821, 0.8819; Gated DeltaProduct 4 0.2390. S5: 0.9075,"
        " 0.8637; 0.9282, 0.9220; 0.4542",
    ),
    "fig10": Report("Fig. 10", "Read at once and token by token", "curves"),
    "tab2": Report(
        "Table 2",
        "Modular arithmetic with brackets",
        "bars",
        {"lengths": "beyond"},
        paper_values="trained to 40, tested to 256: Transformer 0.025, mLSTM 0.034, Mamba 0.136,"
        " sLSTM 0.173, DeltaNet 0.200, Gated DeltaProduct 0.342, FP-Mamba of 4 reflections 0.384",
    ),
    "fig11": Report("Fig. 11", "Modular arithmetic with brackets", "curves"),
    "catbabi": Report(
        "CatbAbI",
        "CatbAbI, answers",
        "sizes",
        paper_values="10k questions a task, 1 and 2 layers: Mamba 0.7828, 0.8708; FP-Mamba"
        " kronecker 0.7993, 0.8416; householder 1 0.8132, 0.8908; 2 0.8160, 0.8747; 3 0.8079,"
        " 0.8955",
    ),
}


@dataclass
class Sweep:
    """All points of a report's YAML; each point is a run."""

    path: Path
    overrides: tuple[str, ...]
    points: list[dict[str, Any]]  # of each point: dotted key → value
    configs: list[Config]  # of each point

    def find_missing_points(self) -> list[int]:
        """Return the indices of the points that have not been trained."""
        return [i for i, cfg in enumerate(self.configs) if not is_finished(cfg)]


def _shorten_path(path: Path) -> str:
    """Return a path relative to the working directory, if it is inside it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def find_config(name: str, scale: str, config: str | None = None) -> Path:
    """Return the path of a report's YAML.

    Raises:
        ReportError: If the report or the file does not exist.
    """
    if name not in REPORTS:
        raise ReportError(f"no report `{name}`: the reports are {', '.join(REPORTS)}")
    path = Path(config) if config else CONFIG_DIR / scale / f"{name}.yaml"
    if not path.is_file():
        raise ReportError(
            f"report {name} has no config at {path}: give the YAML of its sweep with --config"
        )
    return Path(_shorten_path(path))


def expand_sweep(path: Path, overrides: tuple[str, ...] = ()) -> Sweep:
    """Expand a YAML into its sweep, whose points `train --job-index` trains.

    Args:
        path: The YAML.
        overrides: key=value, applied to every point.

    Raises:
        ConfigError: If a key or a value is invalid.
    """
    points, configs = load_sweep(path, overrides, Config)
    return Sweep(path, tuple(overrides), [_flatten(point) for point in points], configs)


def _flatten(point: dict[str, Any]) -> dict[str, Any]:
    """Flatten {"model": {"name": "mamba"}} to {"model.name": "mamba"}, but keep variants whole."""
    flat: dict[str, Any] = {}
    for key, value in point.items():
        if isinstance(value, dict) and not isinstance(value, Variant):
            flat |= {f"{key}.{name}": v for name, v in value.items()}
        else:
            # `model: mamba` is short for `model: {name: mamba}`.
            flat["model.name" if key == "model" else key] = value
    return flat


def collect_runs(sweep: Sweep) -> list[FinishedRun]:
    """Return the finished runs in the order of the sweep, and print a note on outdated runs."""
    runs: list[FinishedRun] = []
    for cfg, point in zip(sweep.configs, sweep.points, strict=True):
        if not is_finished(cfg):
            continue
        if changes := find_differences(cfg):
            say(f"note: {cfg.run_dir} was trained with another config: {'; '.join(changes[:4])}")
        runs.append(
            FinishedRun(
                run_dir=cfg.run_dir,
                cfg=cfg,
                seed=read_seed(cfg),
                point=point,
                model=label_model(cfg, point),
                panel=label_task(cfg, point),
                result=read_result(cfg),
                records=read_metrics(cfg.run_dir),
            )
        )
    # Runs with the same label and seed are numbered: "Mamba (1)", "Mamba (2)".
    labels = [(run.label, run.seed) for run in runs]
    for i, run in enumerate(runs):
        if labels.count(labels[i]) > 1:
            run.model += f" ({labels[:i].count(labels[i]) + 1})"
    return runs


def describe_missing_runs(sweep: Sweep) -> list[str]:
    """Return the commands that train the missing runs, here or as a Slurm array."""
    missing = sweep.find_missing_points()
    if not missing:
        return []
    words = ["fprnn", "synthetic", "train", "--config", _shorten_path(sweep.path), "--job-index"]
    command = f"{shlex.join(words)} $i {shlex.join(sweep.overrides)}".strip()
    script = _shorten_path(find_shipped("launch/synthetic_array.sbatch"))
    batch_job = shlex.join([script, _shorten_path(sweep.path), *sweep.overrides])
    return [
        f"{len(missing)} of {len(sweep.configs)} runs are missing. Train them with --run, with this"
        " loop, or with a Slurm array:",
        f"  for i in {' '.join(map(str, missing))}; do {command}; done",
        f"  mkdir -p logs && sbatch --array={','.join(map(str, missing))} {batch_job}",
    ]


def report(
    name: str,
    scale: str = "small",
    overrides: tuple[str, ...] = (),
    config: str | None = None,
    run_missing: bool = False,
    jobs: int = 1,
) -> dict[str, Path]:
    """Draw a report from its finished runs, and print the commands of the missing ones.

    Args:
        name: A key of REPORTS.
        scale: "small" or "paper".
        overrides: key=value, applied to every run.
        config: The YAML of the sweep; None: the report's own YAML at this scale.
        run_missing: Train the missing runs first.
        jobs: Number of processes at once.

    Returns:
        The files written: {"figure", "PDF", "numbers", "LaTeX"}.

    Raises:
        ReportError: If the report does not exist, or has no finished run.
        OutputError: If the files cannot be written.
        ConfigError, TaskError, TrainingError: As `synthetic.train.train`.
    """
    # 1. Train the missing runs.
    path = find_config(name, scale, config)
    entry = REPORTS[name]
    sweep = expand_sweep(path, overrides)
    folder = Path(sweep.configs[0].out_dir) / "reports" / scale
    check_folder(folder)
    suffixes = {"figure": "png", "PDF": "pdf", "numbers": "csv", "LaTeX": "tex"}
    paths = {label: folder / f"{name}.{suffix}" for label, suffix in suffixes.items()}
    # The heading of the CSV shows that this program wrote these files and may replace them.
    check_replaceable_with_record(paths["numbers"], ",".join(LAST_COLUMNS), *paths.values())
    failure = None
    if run_missing:
        try:
            run_all([sweep.configs[i] for i in sweep.find_missing_points()], jobs)
        except TrainingError as e:  # raised again after the finished runs are drawn
            failure = e
            say(f"error: {e}")

    # 2. Draw and write the figure.
    runs = collect_runs(sweep)
    missing = describe_missing_runs(sweep)
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
    _write_files(drawing, folder, paths)

    # 3. Print the summary, the notes, and the missing runs.
    count = f"{len(runs)} of {len(sweep.configs)} runs"
    name = f"{entry.paper_label}: {entry.title}" if entry.paper_label else entry.title
    say(build_table(drawing.summary, f"{name} ({scale}, {count})"))
    lines = [*drawing.notes, *([describe_paper(entry, scale)] if entry.paper_label else [])]
    lines += [f"{label:<8} {path}" for label, path in paths.items()]
    say("\n".join([*lines, *missing]))
    if failure:
        raise failure
    return paths


def describe_paper(entry: Report, scale: str) -> str:
    """Return a sentence with the paper's values and the scale that they belong to."""
    if not entry.paper_values:
        return f"The paper's {entry.paper_label} is a figure without numbers."
    scale_text = "the scale used here" if scale == "paper" else "a larger scale than here"
    return f"Values of the paper ({scale_text}): {entry.paper_values}."


# Characters of the tables that pdflatex cannot print.
LATEX_CHARACTERS = {
    "ℓ": r"$\ell$",
    "λ": r"$\lambda$",
    "Γ": r"$\Gamma$",
    "≥": r"$\ge$",
    "±": r"$\pm$",
}
LATEX_CHARACTERS |= {"⌈": r"$\lceil$", "⌉": r"$\rceil$", "²": "$^2$"}


def _write_files(drawing: Drawing, folder: Path, paths: dict[str, Path]) -> None:
    """Write the figure (png, pdf), all measurements (csv) and the printed table (tex)."""
    head, *text_rows = format_rows(drawing.summary)
    with writing(folder), matplotlib.rc_context({"pdf.fonttype": 42}):  # keep text as text
        folder.mkdir(parents=True, exist_ok=True)
        drawing.figure.savefig(paths["figure"], dpi=140)
        drawing.figure.savefig(paths["PDF"], metadata={"CreationDate": None})
        write_csv(drawing.table, paths["numbers"])
        latex = pd.DataFrame(text_rows, columns=head).to_latex(index=False, escape=True)
        paths["LaTeX"].write_text(
            latex.translate(str.maketrans(LATEX_CHARACTERS)), encoding="utf-8"
        )
