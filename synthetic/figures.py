"""The kinds of figures of the reports: curves over length, scatter, bars, time, heat maps."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from lm.errors import UserError
from synthetic.config import Config
from synthetic.evaluate import solved_length

SOLVED = 0.9  # of the headline metric: a length counts as solved

# Okabe & Ito's palette (without its yellow, too pale for lines), safe for colour-blind readers.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX*"
DASHES = {"sequential": "--"}
WORDS = {"num_iters": "ℓ* (iterations)"}


class ReportError(UserError, RuntimeError):
    """A report that cannot be made; the message says what is missing."""


@dataclass
class Trained:
    """A finished run of a sweep."""

    run_dir: Path
    cfg: Config
    point: dict  # dotted key → value, mappings flattened
    model: str  # what the sweep says about it, readably, without the task
    panel: str  # the task, where the sweep goes over several
    result: dict
    records: list[dict]  # of metrics.jsonl
    others: dict[int, dict] = field(default_factory=dict)  # ℓmax in evaluation → eval JSON

    @property
    def headline(self) -> str:
        return self.result["headline"]

    @property
    def label(self) -> str:
        return ", ".join(filter(None, (self.panel, self.model)))


@dataclass
class Drawing:
    """A figure, all its numbers (one row a run, length and metric), and the few worth printing."""

    figure: object
    rows: list[dict]
    summary: list[dict]


def words(metric: str) -> str:
    return WORDS.get(metric, metric.replace("_", " "))


def over_lengths(rows: list[dict], metric: str) -> dict[int, float]:
    """Rows of a result's `eval` → per length the mean over seeds (of ℓ*, over layers as well)."""
    values: dict[int, list[float]] = {}
    for row in rows:
        if metric == "num_iters":
            value = mean(row["num_iters"]["mean"]) if "num_iters" in row else None
        else:
            value = row["metrics"].get(metric)
        if value is not None:
            values.setdefault(row["length"], []).append(value)
    return {length: mean(v) for length, v in sorted(values.items())}


def tidy(run: Trained, rows: list[dict], **columns) -> list[dict]:
    """Rows of an evaluation → lines of the CSV."""
    metrics = dict.fromkeys(m for row in rows for m in row["metrics"])
    metrics |= {"num_iters": None} if any("num_iters" in row for row in rows) else {}
    who = {"run": str(run.run_dir), "label": run.label, **run.point, **columns}
    return [
        {**who, "length": length, "metric": metric, "value": value}
        for metric in metrics
        for length, value in over_lengths(rows, metric).items()
    ]


def schedules(run: Trained) -> dict[str, list[dict]]:
    """The rows of a result by how the model was evaluated; those that do not say: in parallel."""
    found: dict[str, list[dict]] = {}
    for row in run.result["eval"]:
        found.setdefault(row.get("schedule", "parallel"), []).append(row)
    return found


def parallel(result: dict) -> list[dict]:
    return [row for row in result["eval"] if row.get("schedule", "parallel") == "parallel"]


def solved(values: dict[int, float]) -> int:
    """Of one metric over lengths: the longest up to which it never falls below SOLVED."""
    rows = [{"length": n, "metrics": {"": v}} for n, v in values.items()]
    return solved_length(rows, "", SOLVED)


def nearest(lengths, wanted: int) -> int:
    """The evaluated length nearest to the one wanted, the shorter one of two."""
    return min(lengths, key=lambda n: (abs(n - wanted), n))


def _panels(titles: list[str], title: str, width: float = 4.6, height: float = 3.8, **kwargs):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (width * len(titles) + 2.4, height)  # the legend stands beside the panels
    figure, axes = plt.subplots(
        1, len(titles), figsize=size, squeeze=False, layout="constrained", **kwargs
    )
    for ax, name in zip(axes[0], titles):
        ax.set_title(name if len(titles) > 1 else title)
        ax.spines[["top", "right"]].set_visible(False)
    if len(titles) > 1:
        figure.suptitle(title)
    return figure, axes[0]


def _legend(figure, axes) -> None:
    """One entry a label, beside the axes: the curves may lie anywhere inside."""
    entries = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels()):
            entries.setdefault(label, handle)
    figure.legend(
        entries.values(), entries.keys(), loc="outside right upper", fontsize="small",
        handlelength=2.8,
    )  # fmt: skip


def _styles(runs: list[Trained]) -> dict[str, dict]:
    """A colour, a marker and dashes for each label; a ramp where it is ℓmax that changes."""
    labels = list(dict.fromkeys(run.model for run in runs))
    colors = [PALETTE[i % len(PALETTE)] for i in range(len(labels))]
    if all("train.max_iters" in run.point for run in runs):
        from matplotlib import colormaps

        ramp = colormaps["viridis"]
        colors = [ramp(0.88 * i / max(1, len(labels) - 1)) for i in range(len(labels))]
        random = {run.model for run in runs if run.cfg.train.max_iters == "gamma"}
        colors = [PALETTE[1] if label in random else c for label, c in zip(labels, colors)]
    return {
        label: {
            "color": color, "marker": MARKERS[i % len(MARKERS)], "ms": 4, "lw": 1.5,
            "ls": "-." if color in colors[:i] else "-",  # a colour comes again
        }
        for i, (label, color) in enumerate(zip(labels, colors))
    }  # fmt: skip


def _limits(ax, metric: str, values: list[float]) -> None:
    if metric.endswith("accuracy"):
        lowest = min([0.0, *values])  # scaled accuracy may be below that of guessing
        ax.set_ylim(1.05 * lowest, 1.02)
    else:
        ax.set_ylim(bottom=0)


def curves(runs: list[Trained], title: str, metric: str | None = None) -> Drawing:
    """A metric (default: the task's headline; `num_iters` is ℓ*) against the test length: a panel a
    task, a colour a model, dashed where the model read token by token."""
    metric = metric or runs[0].headline
    runs = [r for r in runs if over_lengths(r.result["eval"], metric)]
    if not runs:
        raise ReportError(f"none of the runs found has {words(metric)}: nothing to draw")
    panels = list(dict.fromkeys(run.panel for run in runs))
    figure, axes = _panels(panels, title, sharey=True)
    styles, rows, summary, several = _styles(runs), [], [], False
    for panel, ax in zip(panels, axes):
        seen = []
        for run in (r for r in runs if r.panel == panel):
            found = schedules(run)
            several |= len(found) > 1
            for schedule, measured in found.items():
                how = {"schedule": schedule} if len(found) > 1 else {}
                rows += tidy(run, measured, **how)
                values = over_lengths(measured, metric)
                style = {**styles[run.model], "markevery": max(1, len(values) // 12)}
                if schedule != "parallel":
                    style["ls"] = DASHES.get(schedule, ":")
                name = run.model + (f", {schedule}" if schedule != "parallel" else "")
                ax.plot(*zip(*values.items()), label=name, **style)
                seen += values.values()
                trained = run.cfg.train.lengths[1]
                at, last = nearest(values, trained), max(values)
                line = {"run": run.label, **how, f"at {at}": values[at], f"at {last}": values[last]}
                if metric != "num_iters":
                    line[f"solved (≥ {SOLVED})"] = solved(values)
                line["training s"] = run.result["training_seconds"]
                summary.append(line)
        for n in {r.cfg.train.lengths[1] for r in runs if r.panel == panel}:
            ax.axvline(n, color="gray", ls=":", lw=1.3, label="training length")
        ax.set_xlabel("test length (tokens)")
        ax.grid(alpha=0.3)
        _limits(ax, metric, seen)
    axes[0].set_ylabel(words(metric))
    _legend(figure, axes)
    return Drawing(figure, rows, summary)


def scatter(runs: list[Trained], title: str, x: tuple[str, str], y: tuple[str, str]) -> Drawing:
    """One point a model: a metric of one task against that of another, both at twice the training
    length.

    Args:
        x, y: (task.name, metric).
    """
    models: dict[str, dict[str, Trained]] = {}
    for run in runs:
        models.setdefault(run.model, {})[run.cfg.task.name] = run
    wanted = dict((x, y))
    figure, (ax,) = _panels([""], title)
    styles, rows, summary, families = _styles(runs), [], [], {}
    at = {}
    for model, tasks in models.items():
        place = []
        for task, metric in wanted.items():
            if task not in tasks:
                place.append(None)
                continue
            run = tasks[task]
            values = over_lengths(parallel(run.result), metric)
            at[task] = nearest(values, 2 * run.cfg.train.lengths[1])
            rows += tidy(run, parallel(run.result))
            place.append(values[at[task]])
        names = [f"{task} at {at.get(task, '2×')}".replace("_", " ") for task in wanted]
        summary.append({"run": model, **dict(zip(names, place))})
        if None not in place:
            style = {**styles[model], "ms": 9, "lw": 0, "zorder": 3}
            ax.plot(*place, label=model, **style)
            kind = next(iter(tasks.values())).cfg.model.name
            families.setdefault(kind, []).append(place)
    if not families:
        raise ReportError(
            f"no model has finished both {' and '.join(wanted)} yet: a point needs both of its runs"
        )
    for places in families.values():  # which points are the same model at another size
        ax.plot(*zip(*places), color="gray", lw=1, alpha=0.5, zorder=1)
    for axis, (task, metric) in zip("xy", (x, y)):
        text = f"{task.replace('_', ' ')}: {words(metric)} at length {at[task]}"
        ax.set(**{f"{axis}lim": (0, 1.02), f"{axis}label": text})
    ax.grid(alpha=0.3)
    _legend(figure, [ax])
    return Drawing(figure, rows, summary)


def bars(runs: list[Trained], title: str, metric: str | None = None, at: str = "double") -> Drawing:
    """One bar a run.

    Args:
        at: "double", the metric at twice the training length; "beyond", its mean over all lengths
            from the training length on; "whole", over the whole test set.
    """
    metric = metric or runs[0].headline
    rows, summary, where = [], [], "on the test set"
    for run in runs:
        rows += tidy(run, parallel(run.result))
        values = over_lengths(parallel(run.result), metric)
        if not values:
            raise ReportError(
                f"{run.run_dir} has no {words(metric)} in its result: nothing to draw"
            )
        trained = run.cfg.train.lengths[1]
        if at == "double":
            near = nearest(values, 2 * trained)
            values, where = {near: values[near]}, f"at length {near}"
        elif at == "beyond":
            values = {n: v for n, v in values.items() if n >= trained} or values
            where = f"mean of lengths {min(values)} to {max(values)}"
        summary.append({"run": run.label, f"{words(metric)}, {where}": mean(values.values()),
                        "training s": run.result["training_seconds"]})  # fmt: skip
    figure, (ax,) = _panels([""], title, width=5.2, height=1.3 + 0.34 * len(runs))
    values = [list(line.values())[1] for line in summary]
    places = range(len(runs))
    kinds = list(dict.fromkeys((r.cfg.model.name, r.cfg.model.mixer) for r in runs))
    colors = [PALETTE[kinds.index((r.cfg.model.name, r.cfg.model.mixer)) % len(PALETTE)]
              for r in runs]  # fmt: skip
    ax.barh(places, values, color=colors, height=0.7)
    for place, value in zip(places, values):
        ax.annotate(f"{value:.3f}", (max(value, 0), place), (4, 0), textcoords="offset points",
                    va="center", fontsize="small")  # fmt: skip
    ax.set_yticks(places, [run.label for run in runs])
    ax.invert_yaxis()
    ax.set(xlim=(min(0, *values) * 1.05, 1.1), xlabel=f"{words(metric)}, {where}")
    ax.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    ax.grid(axis="x", alpha=0.3)
    ax.set_axisbelow(True)
    if not metric.startswith("scaled"):
        ax.axvline(runs[0].result["chance"], color="gray", ls=":", lw=1.3, label="chance")
        _legend(figure, [ax])
    return Drawing(figure, rows, summary)


def progress(run: Trained) -> list[tuple[int, float, dict[int, float]]]:
    """(update, seconds of training, length → headline metric) of every evaluation over lengths; the
    last one is that of the finished model, where it has all these lengths."""
    points = []
    for record in run.records:
        if "over_lengths" in record:
            found = {int(n): m[run.headline] for n, m in record["over_lengths"].items()}
            points.append((record["step"], record["seconds"], found))
    if points:
        last = over_lengths(parallel(run.result), run.headline)
        if points[-1][2].keys() <= last.keys():
            found = {n: last[n] for n in points[-1][2]}
            points.append((run.result["updates"], run.result["training_seconds"], found))
    return points


def times(runs: list[Trained], title: str) -> Drawing:
    """The longest solved length against the seconds spent in training."""
    figure, (ax,) = _panels([""], title)
    styles, rows, summary = _styles(runs), [], []
    for run in runs:
        points = progress(run)
        if not points:
            continue
        xs, ys = [0.0], [0]
        for step, seconds, found in points:
            xs.append(seconds)
            ys.append(solved(found))
            line = [{"length": n, "metrics": {run.headline: v}} for n, v in found.items()]
            line = tidy(run, line, step=step, seconds=seconds)
            rows += [*line, {**line[0], "length": None, "metric": "solved_length", "value": ys[-1]}]
        style = {**styles[run.model], "markevery": [-1], "ms": 6}  # many lines share their steps
        ax.plot(xs, ys, drawstyle="steps-post", label=run.model, **style)
        trained = run.cfg.train.lengths[1]
        first = next((x for x, y in zip(xs, ys) if y >= trained), None)
        summary.append({"run": run.label, f"s until {trained} was solved": first,
                        "longest solved": max(ys), "at the end": ys[-1],
                        "training s": run.result["training_seconds"]})  # fmt: skip
    if not rows:
        raise ReportError(
            "the runs found were never evaluated over lengths while they trained: set eval.during"
        )
    for n in {run.cfg.train.lengths[1] for run in runs}:
        ax.axhline(n, color="gray", ls=":", lw=1.3, label="training length")
    ax.set(xlabel="training time (s)", xlim=(0, None), ylim=(0, None))
    ax.set_ylabel(f"longest solved length (tokens)\n{words(runs[0].headline)} ≥ {SOLVED}")
    ax.grid(alpha=0.3)
    _legend(figure, [ax])
    return Drawing(figure, rows, summary)


def heatmap(runs: list[Trained], title: str) -> Drawing:
    """ℓmax in training × ℓmax in evaluation, a panel a length: the training length, its double, and
    the longest."""
    metric = runs[0].headline
    evaluated, rows = [], []  # per run {ℓmax in evaluation: rows}
    for run in runs:
        own = run.cfg.eval.max_iters or run.cfg.model.eval_max_iters
        found = {**{n: other["eval"] for n, other in run.others.items()}, own: parallel(run.result)}
        evaluated.append({n: over_lengths(found[n], metric) for n in sorted(found)})
        for limit in sorted(found):
            rows += tidy(run, found[limit], **{"eval.max_iters": limit})
    limits = sorted({n for found in evaluated for n in found})
    known = sorted({n for found in evaluated for values in found.values() for n in values})
    trained = runs[0].cfg.train.lengths[1]
    double = nearest(known, 2 * trained)
    lengths = sorted({nearest(known, trained), double, known[-1]})
    figure, axes = _panels([f"test length {n} tokens" for n in lengths], title, width=0.9 + 0.5 *
                           len(limits), height=1.5 + 0.42 * len(runs), sharey=True)  # fmt: skip
    summary = [
        {"run": f"{run.label}, at {double}", **{f"tested with {n}": found.get(n, {}).get(double)
                                                for n in limits}}
        for run, found in zip(runs, evaluated)
    ]  # fmt: skip
    for length, ax in zip(lengths, axes):
        cells = [[found.get(n, {}).get(length, float("nan")) for n in limits]
                 for found in evaluated]  # fmt: skip
        image = ax.imshow(cells, cmap="cividis", vmin=0, vmax=1, aspect="auto")
        ax.set_facecolor("0.85")  # what was not evaluated
        for i, line in enumerate(cells):
            for j, value in enumerate(line):
                text, color = (f"{value:.2f}", "w" if value < 0.5 else "k")
                if value != value:
                    text, color = "–", "k"
                ax.text(j, i, text, ha="center", va="center", color=color, fontsize=8)
        ax.set_xticks(range(len(limits)), limits)
        ax.set_xlabel("ℓmax in evaluation (iterations)")
    axes[0].set_yticks(range(len(runs)), [run.cfg.train.max_iters for run in runs])
    axes[0].set_ylabel("ℓmax in training (iterations)")
    figure.colorbar(image, ax=list(axes), label=words(metric), fraction=0.06, aspect=16)
    return Drawing(figure, rows, summary)
