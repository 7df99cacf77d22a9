"""The paper's figures and tables from the runs of a sweep: NAME.png, NAME.csv, what is missing."""

from __future__ import annotations

import csv
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lm import config as base
from lm.config import ConfigError
from lm.console import say
from lm.errors import TrainingError
from lm.metrics import read_metrics
from lm.outputs import check_folder, read_json, writing
from lm.run_dir import RunDir
from synthetic.config import Config, load
from synthetic.figures import Drawing, ReportError, bars, curves, heatmap, scatter, times
from synthetic.runs import differences, is_finished, result, seed_of
from synthetic.trained import Trained, notes

CONFIGS = Path(__file__).parent.parent / "configs" / "synthetic"
SCALES = ("small", "paper")
SHOWN = 5  # command lines of missing runs that are printed


@dataclass(frozen=True)
class Report:
    """A figure or table of the paper and how it is drawn from runs."""

    where: str  # in the paper
    title: str
    what: str
    draw: Callable[[list[Trained], str], Drawing]
    test_limits: bool = False  # also evaluated under each ℓmax that the sweep trains with


REPORTS = {
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
    ),
    "fig3c": Report(
        "Fig. 3c",
        "Iterations to the fixed point by mixer",
        "ℓ* against the test length",
        partial(curves, metric="num_iters"),
    ),
    "fig4": Report(
        "Fig. 4",
        "Word problem",
        "fixed-point models against deeper baselines",
        curves,
    ),
    "tab1": Report(
        "Table 1",
        "Copying by what depends on y",
        "which of λ, b, c, Q must read y to copy",
        partial(bars, metric="character_accuracy"),
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
    ),
    "ablation": Report(
        "Ablation",
        "ℓmax in training and in evaluation",
        "the runs of fig1 under each ℓmax",
        heatmap,
        test_limits=True,
    ),
}


@dataclass
class Sweep:
    """The points of a report's config: what they are called and where their runs lie."""

    path: Path
    overrides: tuple[str, ...]
    points: list[dict]  # dotted key → value, mappings flattened
    configs: list[Config]

    def found(self) -> list[int]:
        return [i for i, cfg in enumerate(self.configs) if is_finished(cfg)]

    def missing(self) -> list[int]:
        found = set(self.found())
        return [i for i in range(len(self.configs)) if i not in found]

    def command(self, index: int | str) -> str:
        """The line that trains a point (of a number, or of what a shell puts there)."""
        parts = ["python", "-m", "synthetic", "train", "--config", _shown(self.path), "--job-index"]
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


def _flat(point: dict) -> dict:
    """{"model": {"name": "mamba"}} → {"model.name": "mamba"}."""
    flat = {}
    for key, value in point.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{below}": v for below, v in value.items()}
        else:
            flat["model.name" if key == "model" else key] = value
    return flat


_NAMES = {
    "mamba": "Mamba",
    "mamba2": "Mamba-2",
    "transformer": "Transformer",
    "lstm": "LSTM",
    "gated_deltanet": "Gated DeltaNet",
    "deltaproduct": "DeltaProduct",
    "gated_deltaproduct": "Gated DeltaProduct",
}
_BLOCKS = {"fp_mamba1": "FP-Mamba", "fp_mamba2": "FP-Mamba-2", "fp_rnn": "FP-RNN"}
_RANKED = ("householder", "dplr", "mixture")
_READS_Y = {"dt_h_dep": "λ", "b_h_dep": "b", "c_h_dep": "c", "mixer_h_dep": "Q"}
# Said by the name itself, or no more than a consequence of it.
_SILENT = {
    "name",
    "block",
    "layers",
    "mixer",
    "mixer_rank",
    "n_layer",
    "n_householder",
    "headdim",
    "n_heads",
    "allow_neg_eigval",
    *_READS_Y,
}


def model_label(cfg: Config, point: dict) -> str:
    """What a sweep point says about the model and its training: "Mamba, 2 layers", "ℓmax 8". Runs
    that differ in the seed alone have one label: they are drawn together."""
    m, parts = cfg.model, []
    keys = {k.removeprefix("model."): v for k, v in point.items() if k.startswith("model.")}
    if keys.keys() & {"name", "block", "layers", "mixer", "mixer_rank", "n_householder"}:
        text = _NAMES.get(m.name) or _BLOCKS[m.block]
        if m.layers is not None:
            text = str(m.layers)
        elif m.name == "fprnn" and m.block != "fp_rnn":
            text += f" {m.mixer}" + (f" {m.mixer_rank}" if m.mixer in _RANKED else "")
        if "deltaproduct" in m.name:
            text += f" {m.n_householder}"
        parts.append(text)
    if "n_layer" in keys:
        parts.append(f"{m.n_layer} layer{'s' * (m.n_layer > 1)}")
    if keys.keys() & _READS_Y.keys():
        reads = [symbol for key, symbol in _READS_Y.items() if getattr(m, key, False)]
        parts.append(f"y in {', '.join(reads)}" if reads else "y in none")
    parts += [f"{key} {value}" for key, value in keys.items() if key not in _SILENT]
    if "train.max_iters" in point:
        drawn = f"~ ⌈Γ({cfg.train.gamma_shape:g}, 1)⌉"
        parts.append(f"ℓmax {drawn if cfg.train.max_iters == 'gamma' else cfg.train.max_iters}")
    rest = {
        k: v
        for k, v in point.items()
        if k not in ("train.max_iters", "seed") and not k.startswith(("model.", "task."))
    }
    parts += [f"{key.rpartition('.')[2]} {value}" for key, value in rest.items()]
    return ", ".join(parts)


def task_label(cfg: Config, point: dict) -> str:
    """What a sweep point says about the task, "" for nothing."""
    keys = {k.removeprefix("task."): v for k, v in point.items() if k.startswith("task.")}
    if "name" in keys:
        group = f" {cfg.task.group}" if cfg.task.name == "word_problem" else ""
        return cfg.task.name.replace("_", " ") + group
    return " ".join(str(v) if k == "group" else f"{k} {v}" for k, v in keys.items())


def test_limits(sweep: Sweep) -> list[int]:
    """The values of ℓmax that the sweep trains with."""
    return sorted({c.train.max_iters for c in sweep.configs if isinstance(c.train.max_iters, int)})


def limit_file(cfg: Config, limit: int) -> Path:
    return cfg.run_dir / f"eval-max_iters-{limit}.json"


def limits_missing(cfg: Config, limits: list[int]) -> list[int]:
    """Which ℓmax a finished run was not evaluated under since it finished."""
    done = RunDir(cfg.run_dir).result.stat().st_mtime
    files = {n: limit_file(cfg, n) for n in limits}
    return [n for n, f in files.items() if not f.exists() or f.stat().st_mtime < done]


def collect(sweep: Sweep, limits: list[int]) -> list[Trained]:
    """The finished runs, in the order of the sweep; a note on those of another config."""
    runs = []
    for i in sweep.found():
        cfg, point = sweep.configs[i], sweep.points[i]
        if other := differences(cfg):
            say(f"note: {cfg.run_dir} is of another config: {'; '.join(other[:4])}")
        fresh = [n for n in limits if n not in limits_missing(cfg, limits)]
        runs.append(
            Trained(
                cfg.run_dir,
                cfg,
                seed_of(cfg),
                point,
                model_label(cfg, point),
                task_label(cfg, point),
                result(cfg),
                read_metrics(cfg.run_dir),
                {n: read_json(limit_file(cfg, n), ("eval",)) for n in fresh},
            )
        )
    labels = [(run.label, run.seed) for run in runs]
    for i, run in enumerate(runs):  # two curves of one name and seed would be one in the legend
        if labels.count(labels[i]) > 1:
            run.model += f" ({labels[:i].count(labels[i]) + 1})"
    return runs


def missing_lines(sweep: Sweep, limits: list[int]) -> list[str]:
    """The command lines that would do what has not been done, and a loop over them."""
    missing, lines = sweep.missing(), []
    if missing:
        lines = [f"{len(missing)} of {len(sweep.configs)} runs are missing; these train them:"]
        lines += [f"  {sweep.command(i)}" for i in missing[:SHOWN]]
        if len(missing) > SHOWN:
            lines.append(f"  … and {len(missing) - SHOWN} more")
        if len(missing) > 1:
            each = " ".join(map(str, missing))
            submit = ["launch/synthetic_array.sbatch", _shown(sweep.path), *sweep.overrides]
            lines.append("all of them, one after another or as a Slurm array:")
            lines.append(f"  for i in {each}; do {sweep.command('$i')}; done")
            lines.append(
                f"  mkdir -p logs && sbatch --array={_ranges(missing)} {shlex.join(submit)}"
            )
    todo = [
        (sweep.configs[i], n)
        for i in sweep.found()
        for n in limits_missing(sweep.configs[i], limits)
    ]
    if todo:
        lines.append(f"{len(todo)} evaluations under another ℓmax are missing; --run does them, or")
        for cfg, n in todo[:SHOWN]:
            line = [
                "python",
                "-m",
                "synthetic",
                "eval",
                str(cfg.run_dir),
                "--out",
                str(limit_file(cfg, n)),
                f"eval.max_iters={n}",
            ]
            lines.append(f"  {shlex.join(line)}")
        if len(todo) > SHOWN:
            lines.append(f"  … and {len(todo) - SHOWN} more")
    return lines


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] → 0-2,5."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][-1] == n - 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def run_missing(sweep: Sweep, limits: list[int], jobs: int = 1) -> None:
    """Train and evaluate what is missing.

    Raises:
        TrainingError: a run failed or a signal asked for a stop.
    """
    from synthetic.evaluate import evaluate_run
    from synthetic.runs import run_all

    run_all([sweep.configs[i] for i in sweep.missing()], jobs)
    for i in sweep.found():
        cfg = sweep.configs[i]
        for n in limits_missing(cfg, limits):
            out = limit_file(cfg, n)
            evaluate_run(cfg.run_dir, cfg.eval.lengths, overrides=(f"eval.max_iters={n}",), out=out)


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
        {"figure", "numbers"}: the files written.
    Raises:
        ReportError: no such report, no run to draw it from. OutputError: it cannot be written.
        ConfigError, TaskError, TrainingError: as `synthetic.train.train`.
    """
    import matplotlib.pyplot as plt

    sweep = expand(config_path(name, scale, config), overrides)
    folder = Path(out) if out else Path(sweep.configs[0].out_dir) / "reports" / scale
    check_folder(folder)
    entry = REPORTS[name]
    limits = test_limits(sweep) if entry.test_limits else []
    failure = None
    if run:
        try:
            run_missing(sweep, limits, jobs)
        except TrainingError as e:  # what there is can be drawn all the same
            failure = e
    runs, lines = collect(sweep, limits), missing_lines(sweep, limits)
    if failure:
        say(f"error: {failure}")
    try:
        if not runs:
            raise ReportError(
                f"report {name} has none of its {len(sweep.configs)} runs yet (in"
                f" {sweep.configs[0].run_dir.parent}): start them, or give --run"
            )
        drawing = entry.draw(runs, f"{entry.title} ({scale})")
    except ReportError:
        say("\n".join(lines))
        raise
    paths = {"figure": folder / f"{name}.png", "numbers": folder / f"{name}.csv"}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        drawing.figure.savefig(paths["figure"], dpi=140)
        write_csv(paths["numbers"], drawing.rows)
    plt.close(drawing.figure)
    of = f"{len(runs)} of {len(sweep.configs)} runs"
    say(table(drawing.summary, f"{entry.where}: {entry.title} ({scale}, {of})"))
    for note in notes([(run.model, run.result["eval"]) for run in runs]):
        say(note)
    for what, path in paths.items():
        say(f"{what:<8} {path}")
    if lines:
        say("\n".join(lines))
    if failure:
        raise failure
    return paths


def write_csv(path: Path, rows: list[dict]) -> None:
    """Rows of any keys; a key that a row lacks is left empty. The numbers come last."""
    last = ("length", "metric", "value", "stderr")
    columns = [k for k in dict.fromkeys(k for row in rows for k in row) if k not in last]
    with path.open("w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, [*columns, *last])
        writer.writeheader()
        writer.writerows(rows)


def table(rows: list[dict], title: str):
    """Dictionaries as a rich table; columns appear in the order they first come up."""
    from rich.table import Table

    columns = list(dict.fromkeys(k for row in rows for k in row))
    made = Table(title=title, title_justify="left")
    for name in columns:
        made.add_column(name, justify="left" if name == "run" else "right")
    for row in rows:
        made.add_row(*(_cell(row.get(name)) for name in columns))
    return made


def _cell(value) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) >= 10 else f"{value:.4f}"
    return "–" if value is None else str(value)


def overview(scale: str, overrides: tuple[str, ...] = ()):
    """All reports as a rich table, with how many runs each has and how many of them are found."""
    rows, problems = [], []
    for name, entry in REPORTS.items():
        row = {"report": name, "paper": entry.where, "shows": f"{entry.title}: {entry.what}"}
        try:
            sweep = expand(config_path(name, scale), overrides)
            row |= {"runs": len(sweep.configs), "found": len(sweep.found())}
        except (ConfigError, ReportError) as e:
            problems.append(str(e))
        rows.append(row)
    made = table(rows, f"Reports at scale {scale}")
    for column in made.columns[:3]:
        column.justify = "left"
    return made, problems
