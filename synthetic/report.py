"""The paper's figures and tables from the runs of a sweep: NAME.png, NAME.csv, what is missing."""

from __future__ import annotations

import csv
import math
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.common.console import say
from lm.common.errors import ConfigError, TrainingError
from lm.common.files import (
    DamagedError,
    check_folder,
    check_together,
    find_shipped,
    read_json,
    writing,
)
from lm.common.page import save_pdf
from lm.config import load as base
from lm.report.sections.latex import tabular
from lm.runs.metrics import read_metrics
from lm.runs.run_dir import RunDir
from synthetic.config import Config, load
from synthetic.drawing import Drawing, ReportError
from synthetic.figures import bars, curves, heatmap, scatter, times
from synthetic.labels import model_label, task_label
from synthetic.runs import differences, is_finished, result_of, seed_of
from synthetic.trained import Trained, curriculum_notes, notes

if TYPE_CHECKING:
    from rich.table import Table

CONFIGS = find_shipped("configs/synthetic")
SCALES = ("small", "paper")
SHOWN = 5  # command lines of missing runs that are printed


@dataclass(frozen=True)
class Report:
    """A figure or table of the paper and how it is drawn from runs."""

    where: str  # in the paper
    title: str
    what: str  # it shows, for the list of reports
    draw: Callable[[list[Trained], str], Drawing]
    minutes: int | None = None  # its small runs train, on one core; None: not measured
    all_limits: bool = False  # also evaluated under each ℓmax that the sweep trains with
    paper: str = ""  # its values, where the paper gives them as numbers; "": it only draws them


REPORTS = {
    "demo": Report(
        "State tracking",
        "Words of S3, trained on up to 16 letters",
        "FP-Mamba follows a state that Mamba cannot",
        curves,
        minutes=3,
    ),
    "fig1": Report(
        "Fig. 1",
        "Length generalisation by ℓmax in training",
        "the more iterations in training, the further a model goes",
        curves,
    ),
    "fig2": Report(
        "Fig. 2",
        "State tracking and copying",
        "which depth and which reflections track state and copy",
        partial(scatter, x=("copy", "character_accuracy"), y=("word_problem", "token_accuracy")),
    ),
    "fig3b": Report(
        "Fig. 3b",
        "Length generalisation by mixer",
        "how far each mixer goes",
        curves,
        minutes=4,
    ),
    "fig3c": Report(
        "Fig. 3c",
        "Iterations to the fixed point by mixer",
        "ℓ* against the test length",
        partial(curves, metric="num_iters"),
        minutes=4,
    ),
    "fig4": Report(
        "Fig. 4",
        "Word problem",
        "fixed-point models against deeper baselines",
        curves,
        minutes=17,
    ),
    "tab1": Report(
        "Table 1",
        "Copying by what depends on y",
        "which of λ, b, c, Q must read y to copy",
        partial(bars, metric="character_accuracy"),
        paper="at twice the trained length, character accuracy: 0.11 with λ alone, 0.94 with all",
    ),
    "fig5": Report(
        "Fig. 5",
        "Training time by ℓmax",
        "what a fixed ℓmax costs and gains",
        times,
    ),
    "fig6": Report(
        "Fig. 6",
        "Training time with a random ℓmax",
        "ℓmax drawn anew each update, ⌈Γ(4, 1)⌉",
        times,
    ),
    "fig9": Report(
        "Fig. 9",
        "Word problem, trained on long words",
        "tested to four times that length",
        curves,
        paper="trained to 128, at four times that. A5: FP-Mamba-1 kronecker 0.9955, householder 4"
        " 0.8768; FP-Mamba-2 0.9821, 0.8819; Gated DeltaProduct 4 0.2390. S5: 0.9075, 0.8637;"
        " 0.9282, 0.9220; 0.4542",
    ),
    "fig10": Report(
        "Fig. 10",
        "Read at once and token by token",
        "the same models, in the paper parallel and sequential evaluation",
        curves,
    ),
    "tab2": Report(
        "Table 2",
        "Modular arithmetic with brackets",
        "scaled accuracy beyond the trained lengths",
        partial(bars, at="beyond"),
        paper="trained to 40, tested to 256: Transformer 0.025, mLSTM 0.034, Mamba 0.136, sLSTM"
        " 0.173, DeltaNet 0.200, Gated DeltaProduct 0.342, FP-Mamba of 4 reflections 0.384",
    ),
    "fig11": Report(
        "Fig. 11",
        "Modular arithmetic with brackets",
        "the runs of tab2 over lengths",
        curves,
    ),
    "catbabi": Report(
        "CatbAbI",
        "CatbAbI, answers",
        "accuracy by model and layers; the tasks' are in the CSV",
        partial(bars, at="whole"),
        minutes=23,
        paper="10k questions a task, 1 and 2 layers: Mamba 0.7828, 0.8708; FP-Mamba kronecker"
        " 0.7993, 0.8416; householder 1 0.8132, 0.8908; 2 0.8160, 0.8747; 3 0.8079, 0.8955",
    ),
    "ablation": Report(
        "Ablation",
        "ℓmax in training and in evaluation",
        "the runs of fig1 under each ℓmax",
        heatmap,
        all_limits=True,
    ),
}


@dataclass
class Sweep:
    """The points of a report's config: what they are called and where their runs lie."""

    path: Path
    overrides: tuple[str, ...]
    points: list[dict[str, Any]]  # dotted key → value, mappings flattened
    configs: list[Config]

    def finished(self) -> list[int]:
        """The numbers of the points that have been trained."""
        return [i for i, cfg in enumerate(self.configs) if is_finished(cfg)]

    def missing(self) -> list[int]:
        """The numbers of the others."""
        finished = set(self.finished())
        return [i for i in range(len(self.configs)) if i not in finished]

    def command(self, index: int | str) -> str:
        """The line that trains a point.

        Args: index: its number, or a shell's variable that holds it.
        """
        parts = ["fprnn", "synthetic", "train", "--config", _shown(self.path), "--job-index"]
        line = [*map(shlex.quote, parts), str(index), *map(shlex.quote, self.overrides)]
        return " ".join(line)


def _shown(path: Path) -> str:
    """A path as one would type it here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def config_path(name: str, scale: str, config: str | None = None) -> Path:
    """The YAML of a report.

    Raises:
        ReportError: no such report, or no such file.
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
    """The sweep of a YAML as `train --job-index` would run it, overrides over every point.

    Raises:
        ConfigError: keys or values that cannot be.
    """
    points = base.sweep_points(base.load_tree(path), str(path), Config)
    configs = [load(path, overrides, i) for i in range(len(points))]
    return Sweep(path, tuple(overrides), [_flat(point) for point in points], configs)


def _flat(point: dict[str, Any]) -> dict[str, Any]:
    """{"model": {"name": "mamba"}} → {"model.name": "mamba"}; a variant, which has a name of its
    own, stays one."""
    flat: dict[str, Any] = {}
    for key, value in point.items():
        if isinstance(value, dict) and not isinstance(value, base.Variant):
            flat |= {f"{key}.{below}": v for below, v in value.items()}
        else:
            flat["model.name" if key == "model" else key] = value
    return flat


def limits_in_training(sweep: Sweep) -> list[int]:
    """The values of ℓmax that the sweep trains with."""
    limits = (cfg.train.max_iters for cfg in sweep.configs)
    return sorted({limit for limit in limits if isinstance(limit, int)})


def limit_file(cfg: Config, limit: int) -> Path:
    """Where a run's evaluation under another ℓmax lies."""
    return cfg.run_dir / f"eval-max_iters-{limit}.json"


def limits_missing(cfg: Config, limits: list[int]) -> list[int]:
    """Which ℓmax a finished run was not evaluated under since it finished."""
    finished_at = RunDir(cfg.run_dir).result.stat().st_mtime
    missing = []
    for limit in limits:
        file = limit_file(cfg, limit)
        if not file.exists() or file.stat().st_mtime < finished_at:
            missing.append(limit)
    return missing


def collect(sweep: Sweep, limits: list[int]) -> list[Trained]:
    """The finished runs, in the order of the sweep; a note on those of another config."""
    runs = []
    for i in sweep.finished():
        cfg = sweep.configs[i]
        point = sweep.points[i]
        if different := differences(cfg):
            say(f"note: {cfg.run_dir} is of another config: {'; '.join(different[:4])}")
        missing = limits_missing(cfg, limits)
        under_limits = {
            limit: read_json(limit_file(cfg, limit), ("eval",))
            for limit in limits
            if limit not in missing
        }
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
                under_limits=under_limits,
            )
        )
    labels = [(run.label, run.seed) for run in runs]
    for i, run in enumerate(runs):  # two curves of one name and seed would be one in the legend
        if labels.count(labels[i]) > 1:
            run.model += f" ({labels[:i].count(labels[i]) + 1})"
    return runs


def missing_lines(sweep: Sweep, limits: list[int]) -> list[str]:
    """The command lines that would do what has not been done, and a loop over them."""
    return [*_lines_of_missing_runs(sweep), *_lines_of_missing_evaluations(sweep, limits)]


def _lines_of_missing_runs(sweep: Sweep) -> list[str]:
    missing = sweep.missing()
    if not missing:
        return []
    lines = [f"{len(missing)} of {len(sweep.configs)} runs are missing; these train them:"]
    lines += [f"  {sweep.command(i)}" for i in missing[:SHOWN]]
    if len(missing) > SHOWN:
        lines.append(f"  … and {len(missing) - SHOWN} more")
    if len(missing) > 1:
        numbers = " ".join(map(str, missing))
        script = find_shipped("launch/synthetic_array.sbatch")
        submit = [_shown(script), _shown(sweep.path), *sweep.overrides]
        lines.append("all of them, one after another or as a Slurm array:")
        lines.append(f"  for i in {numbers}; do {sweep.command('$i')}; done")
        lines.append(f"  mkdir -p logs && sbatch --array={_ranges(missing)} {shlex.join(submit)}")
    return lines


def _lines_of_missing_evaluations(sweep: Sweep, limits: list[int]) -> list[str]:
    missing = [
        (sweep.configs[i], limit)
        for i in sweep.finished()
        for limit in limits_missing(sweep.configs[i], limits)
    ]
    if not missing:
        return []
    lines = [f"{len(missing)} evaluations under another ℓmax are missing; --run does them, or"]
    for cfg, limit in missing[:SHOWN]:
        command = ["fprnn", "synthetic", "eval", str(cfg.run_dir)]
        command += ["--out", str(limit_file(cfg, limit)), f"eval.max_iters={limit}"]
        lines.append(f"  {shlex.join(command)}")
    if len(missing) > SHOWN:
        lines.append(f"  … and {len(missing) - SHOWN} more")
    return lines


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] → 0-2,5."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in ranges)


def run_missing(sweep: Sweep, limits: list[int], jobs: int = 1) -> None:
    """Train and evaluate what is missing.

    Raises:
        TrainingError: a run failed or a signal asked for a stop.
    """
    from synthetic.evaluate import evaluate_run
    from synthetic.runs import run_all

    run_all([sweep.configs[i] for i in sweep.missing()], jobs)
    for i in sweep.finished():
        cfg = sweep.configs[i]
        for limit in limits_missing(cfg, limits):
            evaluate_run(
                cfg.run_dir,
                cfg.eval.lengths,
                overrides=(f"eval.max_iters={limit}",),
                out=limit_file(cfg, limit),
            )


def report(
    name: str,
    scale: str = "small",
    overrides: tuple[str, ...] = (),
    config: str | None = None,
    out: str | None = None,
    run: bool = False,
    jobs: int = 1,
) -> dict[str, Path]:
    """Draw a report from the runs that are finished, and say which are not.

    Returns:
        {"figure", "PDF", "numbers", "LaTeX"}: the files written.
    Raises:
        ReportError: no such report, no run to draw it from. OutputError: it cannot be written.
        ConfigError, TaskError, TrainingError: as `synthetic.train.train`.
    """
    import matplotlib.pyplot as plt  # where it is missing, say so before anything is trained

    # 1. What it is drawn from; with --run the runs that are missing are trained.
    sweep = expand(config_path(name, scale, config), overrides)
    folder = Path(out) if out else Path(sweep.configs[0].out_dir) / "reports" / scale
    check_folder(folder)
    paths = _paths(folder, name)
    check_together(paths["numbers"], ",".join(LAST_COLUMNS), *paths.values())
    entry = REPORTS[name]
    limits = limits_in_training(sweep) if entry.all_limits else []
    failure = None
    if run:
        try:
            run_missing(sweep, limits, jobs)
        except TrainingError as e:  # what there is can be drawn all the same
            failure = e

    # 2. The figure.
    runs = collect(sweep, limits)
    what_is_missing = missing_lines(sweep, limits)
    if failure:
        say(f"error: {failure}")
    try:
        _check_there_are_runs(runs, sweep, name)
        drawing = entry.draw(runs, f"{entry.title} ({scale})")
    except ReportError:
        say("\n".join(what_is_missing))
        raise

    # 3. Written, printed, and what is missing said.
    _write(drawing, folder, paths)
    plt.close(drawing.figure)
    counts = f"{len(runs)} of {len(sweep.configs)} runs"
    say(table(drawing.summary, f"{entry.where}: {entry.title} ({scale}, {counts})"))
    for note in notes([(run.model, run.result["eval"]) for run in runs]) + curriculum_notes(runs):
        say(note)
    say(_papers_values(entry, scale))
    for what, path in paths.items():
        say(f"{what:<8} {path}")
    if what_is_missing:
        say("\n".join(what_is_missing))
    if failure:
        raise failure
    return paths


def _papers_values(entry: Report, scale: str) -> str:
    """What the paper has in this place, and whether it is of the scale that ran."""
    if not entry.paper:
        return f"The paper's {entry.where} is a figure without numbers."
    theirs = "its scale" if scale == "paper" else "its scale, which is not the one that ran here"
    return f"The paper ({theirs}), {entry.paper}."


def _check_there_are_runs(runs: list[Trained], sweep: Sweep, name: str) -> None:
    if not runs:
        raise ReportError(
            f"report {name} has none of its {len(sweep.configs)} runs yet (in"
            f" {sweep.configs[0].run_dir.parent}): start them, or give --run"
        )


def _paths(folder: Path, name: str) -> dict[str, Path]:
    kinds = {"figure": "png", "PDF": "pdf", "numbers": "csv", "LaTeX": "tex"}
    return {what: folder / f"{name}.{kind}" for what, kind in kinds.items()}


def _write(drawing: Drawing, folder: Path, paths: dict[str, Path]) -> None:
    """Write NAME.png and .pdf, NAME.csv, and what is printed as NAME.tex."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        drawing.figure.savefig(paths["figure"], dpi=140)
        save_pdf(drawing.figure, paths["PDF"])
        write_csv(paths["numbers"], drawing.rows)
        paths["LaTeX"].write_text(tabular(in_words(drawing.summary)) + "\n", encoding="utf-8")


LAST_COLUMNS = ("length", "metric", "value", "stderr")


def write_csv(path: Path, rows: list[dict]) -> None:
    """Rows of any keys; a key that a row lacks is left empty. The numbers come last."""
    keys = dict.fromkeys(key for row in rows for key in row)
    columns = [key for key in keys if key not in LAST_COLUMNS]
    with path.open("w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, [*columns, *LAST_COLUMNS])
        writer.writeheader()
        writer.writerows(rows)


def table(rows: list[dict], title: str) -> Table:
    """Dictionaries as a rich table; columns appear in the order they first come up."""
    from rich.table import Table

    head, *body = in_words(rows)
    made = Table(title=title, title_justify="left")
    for name in head:
        made.add_column(name, justify="left" if name == "run" else "right")
    for cells in body:
        made.add_row(*cells)
    return made


def in_words(rows: list[dict]) -> list[list[str]]:
    """Dictionaries as rows of text, the first being the head."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return [columns, *([_cell(row.get(name)) for name in columns] for row in rows)]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) >= 10 else f"{value:.4f}"
    return "–" if value is None else str(value)


def _minutes(sweep: Sweep) -> int | None:
    """How long the runs of a sweep trained, where all of them are there."""
    if sweep.missing():
        return None
    return math.ceil(sum(result_of(cfg)["training_seconds"] for cfg in sweep.configs) / 60)


def overview(scale: str, overrides: tuple[str, ...] = ()) -> tuple[Table, list[str]]:
    """All reports as a rich table, with how long each trains, how many runs it has and how many of
    them are found; and what was wrong with those whose config could not be read."""
    rows = []
    problems = []
    for name, entry in REPORTS.items():
        row: dict[str, Any] = {
            "report": name,
            "paper": entry.where,
            "shows": f"{entry.title}: {entry.what}",
        }
        try:
            sweep = expand(config_path(name, scale), overrides)
            measured = entry.minutes if scale == "small" else None
            row |= {"minutes": _minutes(sweep) or measured}
            row |= {"runs": len(sweep.configs), "found": len(sweep.finished())}
        except (ConfigError, DamagedError, ReportError) as e:
            problems.append(str(e))
        rows.append(row)
    made = table(rows, f"Reports at scale {scale}; minutes of training, one run after another")
    for column in made.columns[:3]:
        column.justify = "left"
    return made, problems
