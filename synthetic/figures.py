"""The kinds of figures of the reports: curves over length, scatter, bars, time, heat maps."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from statistics import mean
from textwrap import wrap

from lm.errors import UserError
from synthetic.results import TOKEN_BY_TOKEN, plus_minus, solved_length
from synthetic.trained import (
    Spread,
    Trained,
    at_once,
    by_seed,
    counted,
    errors,
    notes,
    number,
    over_lengths,
    spread,
    spreads,
    tidy,
    ways,
)

SOLVED = 0.9  # of the headline metric: a length counts as solved

# Okabe & Ito's palette (without its yellow, too pale for lines), safe for colour-blind readers.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX*"
DASHES = {TOKEN_BY_TOKEN: "--"}
WORDS = {"num_iters": "ℓ* (iterations)"}
ERRORS = (
    "n: training seeds. Of several: their mean, dots each of them, shade or bar ± their standard"
    " deviation; of one: bar ± standard error over test samples"
)


class ReportError(UserError, RuntimeError):
    """A report that cannot be made; the message says what is missing."""


@dataclass
class Drawing:
    """A figure, all its numbers (one row a run, length and metric), and the few worth printing."""

    figure: object
    rows: list[dict]
    summary: list[dict]


def words(metric: str) -> str:
    return WORDS.get(metric, metric.replace("_", " "))


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
        ax.set_title(name if len(titles) > 1 else "")
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left")
    return figure, axes[0]


def _legend(figure, axes) -> None:
    """One entry a label, beside the axes: the curves may lie anywhere inside."""
    entries = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels()):
            entries.setdefault(label, handle)
    figure.legend(
        entries.values(),
        entries.keys(),
        loc="outside right center",
        fontsize="small",
        handlelength=2.8,
    )


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
            "color": color,
            "marker": MARKERS[i % len(MARKERS)],
            "ms": 4,
            "lw": 1.5,
            "ls": "-." if color in colors[:i] else "-",  # a colour comes again
        }
        for i, (label, color) in enumerate(zip(labels, colors))
    }


def _limits(ax, metric: str, values: list[float]) -> None:
    if metric.endswith("accuracy"):
        lowest = min([0.0, *values])  # scaled accuracy may be below that of guessing
        ax.set_ylim(1.05 * lowest, 1.02)
    else:
        ax.set_ylim(bottom=0)


def _footer(figure, shown, any_limit: bool = False, *more: str) -> None:
    """Below all: what solved the models, which samples training has too, and what errors are."""
    width = int(17 * figure.get_figwidth())
    lines = [line for note in (*notes(shown, any_limit), *more) for line in wrap(note, width)]
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize="x-small")


def _draw_curve(ax, values: dict[int, Spread], style: dict, label: str) -> None:
    """The mean over lengths: where there are several seeds a band and each of them, else error
    bars."""
    lengths = list(values)
    middle = [v.mean for v in values.values()]
    error = [v.error for v in values.values()]
    ax.plot(lengths, middle, label=label, **style)
    several = {length: each for length, each in values.items() if len(each.values) > 1}
    alone = [(n, v.mean, v.error) for n, v in values.items() if n not in several]
    if alone:
        ax.errorbar(*zip(*alone), fmt="none", ecolor=style["color"], capsize=2, lw=1)
    if several:
        low, high = ([m + sign * e for m, e in zip(middle, error)] for sign in (-1, 1))
        where = [length in several for length in lengths]
        ax.fill_between(lengths, low, high, where=where, color=style["color"], alpha=0.15, lw=0)
    for length, each in several.items():
        places = [length] * len(each.values)
        ax.plot(places, each.values, ".", color=style["color"], ms=3, alpha=0.6, zorder=1)


def curves(runs: list[Trained], title: str, metric: str | None = None) -> Drawing:
    """A metric (default: the task's headline; `num_iters` is ℓ*) against the test length: a panel a
    task, a colour a model, dashed where the model read token by token."""
    metric = metric or runs[0].headline
    runs = [r for r in runs if over_lengths(r.result["eval"], metric)]
    if not runs:
        raise ReportError(f"none of the runs found has {words(metric)}: nothing to draw")
    panels = list(dict.fromkeys(run.panel for run in runs))
    figure, axes = _panels(panels, title, sharey=True)
    styles, rows, summary, shown = _styles(runs), [], [], []
    for panel, ax in zip(panels, axes):
        drawn = []
        for label, seeds in by_seed([r for r in runs if r.panel == panel]).items():
            found = [ways(run) for run in seeds]
            several = len({read for each in found for read in each}) > 1
            for read in dict.fromkeys(read for each in found for read in each):
                measured = [each[read] for each in found if read in each]
                for run, each in zip(seeds, found):
                    rows += tidy(run, each[read]) if read in each else []
                name = f"{seeds[0].model}, {read}" if several else seeds[0].model
                shown += [(name, each) for each in measured]
                values = spreads(measured, metric)
                style = {**styles[seeds[0].model], "markevery": max(1, len(values) // 12)}
                style["ls"] = DASHES.get(read, style["ls"])
                _draw_curve(ax, values, style, counted(name, values.values()))
                drawn += [value for each in values.values() for value in each.values]
                trained = seeds[0].cfg.train.lengths[1]
                at, last = nearest(values, trained), max(values)
                line = {
                    "run": label,
                    "n": number(values.values()),
                    **({"read": read} if several else {}),
                }
                line |= {f"at {length}": str(values[length]) for length in (at, last)}
                if metric != "num_iters":
                    means = {n: v.mean for n, v in values.items()}
                    line[f"solved (≥ {SOLVED})"] = solved(means)
                line["training s"] = mean(run.result["training_seconds"] for run in seeds)
                summary.append(line)
        for n in {r.cfg.train.lengths[1] for r in runs if r.panel == panel}:
            ax.axvline(n, color="gray", ls=":", lw=1.3, label="training length")
        ax.set_xlabel("test length (tokens)")
        ax.grid(alpha=0.3)
        _limits(ax, metric, drawn)
    axes[0].set_ylabel(words(metric))
    _legend(figure, axes)
    _footer(figure, shown, False, ERRORS)
    return Drawing(figure, rows, summary)


def scatter(runs: list[Trained], title: str, x: tuple[str, str], y: tuple[str, str]) -> Drawing:
    """One point a model: a metric of one task against that of another, both at twice the training
    length.

    Args:
        x, y: (task.name, metric).
    """
    models: dict[str, dict[str, list[Trained]]] = {}
    for run in runs:
        models.setdefault(run.model, {}).setdefault(run.cfg.task.name, []).append(run)
    wanted = dict((x, y))
    figure, (ax,) = _panels([""], title)
    styles, rows, summary, families = _styles(runs), [], [], {}
    at, shown = {}, []
    for model, tasks in models.items():
        place: list[Spread | None] = []
        of_seeds: list[dict[int, float]] = []  # of each task
        for task, metric in wanted.items():
            if task not in tasks:
                place.append(None)
                continue
            measured = [at_once(run.result) for run in tasks[task]]
            values = spreads(measured, metric)
            at[task] = nearest(values, 2 * tasks[task][0].cfg.train.lengths[1])
            for run, each in zip(tasks[task], measured):
                rows += tidy(run, each)
                shown.append((run.model, [row for row in each if row["length"] == at[task]]))
            place.append(values[at[task]])
            each_seed = {
                run.seed: over_lengths(rows, metric) for run, rows in zip(tasks[task], measured)
            }
            of_seeds.append({seed: v[at[task]] for seed, v in each_seed.items() if at[task] in v})
        line = {"run": model, "n": number(filter(None, place))}
        for task, value in zip(wanted, place):
            name = f"{task} at {at.get(task, '2×')}".replace("_", " ")
            line[name] = value and str(value)
        summary.append(line)
        if None not in place:
            first, second = of_seeds
            pairs = [(first[seed], second[seed]) for seed in first if seed in second]
            _draw_point(ax, model, place, pairs, styles[model])
            kind = next(iter(tasks.values()))[0].cfg.model.name
            families.setdefault(kind, []).append([value.mean for value in place])
    if not families:
        raise ReportError(
            f"no model has finished both {' and '.join(wanted)} yet: a point needs both of its runs"
        )
    for places in families.values():  # which points are the same model at another size
        ax.plot(*zip(*places), color="gray", lw=1, alpha=0.5, zorder=1)
    for axis, (task, metric) in zip("xy", (x, y)):
        text = f"{task.replace('_', ' ')}:\n{words(metric)} at length {at[task]}"
        ax.set(**{f"{axis}lim": (0, 1.02), f"{axis}label": text})
    ax.grid(alpha=0.3)
    _legend(figure, [ax])
    _footer(figure, shown, False, ERRORS)
    return Drawing(figure, rows, summary)


def _draw_point(
    ax, model: str, place: list[Spread], pairs: list[tuple[float, float]], style: dict
) -> None:
    """A model's mean on both axes with its errors, and each seed that has finished both tasks."""
    style = {**style, "ms": 8, "lw": 0, "zorder": 3}
    ax.plot(*(value.mean for value in place), label=counted(model, place), **style)
    ax.errorbar(
        *(value.mean for value in place),
        xerr=place[0].error,
        yerr=place[1].error,
        fmt="none",
        ecolor=style["color"],
        capsize=2,
        lw=1,
    )
    if pairs and max(len(value.values) for value in place) > 1:
        ax.plot(*zip(*pairs), ".", color=style["color"], ms=4, alpha=0.6, zorder=2)


def _at(run: Trained, metric: str, at: str) -> tuple[list[int], str]:
    """The lengths that a bar of a run is of, and how to say so; see `bars`."""
    values = over_lengths(at_once(run.result), metric)
    if not values:
        raise ReportError(f"{run.run_dir} has no {words(metric)} in its result: nothing to draw")
    trained = run.cfg.train.lengths[1]
    if at == "double":
        near = nearest(values, 2 * trained)
        return [near], f"at length {near}"
    if at == "beyond":
        beyond = [n for n in values if n >= trained] or list(values)
        return beyond, f"mean of lengths {min(beyond)} to {max(beyond)}"
    return list(values), "on the test set"


def bars(runs: list[Trained], title: str, metric: str | None = None, at: str = "double") -> Drawing:
    """One bar a model.

    Args:
        at: "double", the metric at twice the training length; "beyond", its mean over all lengths
            from the training length on; "whole", over the whole test set.
    """
    metric = metric or runs[0].headline
    rows, summary, shown, values, where = [], [], [], [], ""
    groups = by_seed(runs)
    for label, seeds in groups.items():
        found = []
        for run in seeds:
            measured = at_once(run.result)
            rows += tidy(run, measured)
            lengths, where = _at(run, metric, at)
            each, stderr = over_lengths(measured, metric), errors(measured, metric)
            together = sum(stderr[n] ** 2 for n in lengths) ** 0.5 / len(lengths)
            found.append((mean(each[n] for n in lengths), together))
            shown.append((run.model, [row for row in measured if row["length"] in lengths]))
        values.append(spread(found))
        seconds = mean(run.result["training_seconds"] for run in seeds)
        summary.append(
            {
                "run": label,
                "n": len(seeds),
                f"{words(metric)}, {where}": str(values[-1]),
                "training s": seconds,
            }
        )
    figure, (ax,) = _panels([""], title, width=5.2, height=1.9 + 0.34 * len(groups))
    places = range(len(groups))
    firsts = [seeds[0].cfg.model for seeds in groups.values()]
    kinds = list(dict.fromkeys((m.name, m.mixer) for m in firsts))
    colors = [PALETTE[kinds.index((m.name, m.mixer)) % len(PALETTE)] for m in firsts]
    ax.barh(places, [v.mean for v in values], color=colors, height=0.7)
    ax.errorbar(
        [v.mean for v in values],
        places,
        xerr=[v.error for v in values],
        fmt="none",
        ecolor="k",
        capsize=2,
        lw=1,
    )
    for place, value in zip(places, values):
        if len(value.values) > 1:
            dots = [place] * len(value.values)
            ax.plot(value.values, dots, "o", mfc="w", mec="k", ms=3, mew=0.7)
        edge = max(0, value.mean + (value.error if value.error == value.error else 0))
        edge = max(edge, *value.values)
        ax.annotate(
            f"{value.mean:.3f}",
            (edge, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize="small",
        )
    ax.set_yticks(places, [counted(label, [value]) for label, value in zip(groups, values)])
    ax.invert_yaxis()
    lowest = min(0, *(v.mean for v in values)) * 1.05
    ax.set(xlim=(lowest, 1.15), xlabel=f"{words(metric)}, {where}")
    ax.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    ax.grid(axis="x", alpha=0.3)
    ax.set_axisbelow(True)
    if not metric.startswith("scaled"):
        ax.axvline(runs[0].result["chance"], color="gray", ls=":", lw=1.3, label="chance")
        _legend(figure, [ax])
    _footer(figure, shown, False, ERRORS)
    return Drawing(figure, rows, summary)


def progress(run: Trained) -> list[tuple[int, float, list[dict]]]:
    """(update, seconds of training, rows of the headline metric over lengths) of every evaluation;
    the last one is that of the finished model, where it has all these lengths."""
    points = []
    for record in run.records:
        if "over_lengths" in record:
            found = [
                {"length": int(n), "metrics": m, **(m if "metrics" in m else {})}
                for n, m in record["over_lengths"].items()
            ]
            points.append((record["step"], record["seconds"], found))
    if points:
        lengths = {row["length"] for row in points[-1][2]}
        last = [row for row in at_once(run.result) if row["length"] in lengths]
        if {row["length"] for row in last} == lengths:
            points.append((run.result["updates"], run.result["training_seconds"], last))
    return points


def _mean_steps(each: list[tuple[list[float], list[int]]]) -> tuple[list[float], list[float]]:
    """The mean of several step functions (times, values), as far as all of them go."""
    end = min(xs[-1] for xs, _ in each)
    grid = sorted({x for xs, _ in each for x in xs if x <= end})

    def at(time, xs, ys):
        return [y for x, y in zip(xs, ys) if x <= time][-1]

    return grid, [mean(at(time, *line) for line in each) for time in grid]


def times(runs: list[Trained], title: str) -> Drawing:
    """The longest solved length against the seconds spent in training."""
    figure, (ax,) = _panels([""], title)
    styles, rows, summary, shown = _styles(runs), [], [], []
    for label, seeds in by_seed([run for run in runs if progress(run)]).items():
        lines = []
        for run in seeds:
            xs, ys = [0.0], [0]
            for step, seconds, found in progress(run):
                xs.append(seconds)
                ys.append(solved(over_lengths(found, run.headline)))
                line = [
                    {**row, "metrics": {run.headline: row["metrics"][run.headline]}}
                    for row in found
                ]
                line = tidy(run, line, step=step, seconds=seconds)
                line = [row for row in line if row["metric"] == run.headline]
                last = {**line[0], "length": None, "metric": "solved_length", "value": ys[-1]}
                rows += [*line, {**last, "stderr": None, "in_training": None}]
                shown.append((run.model, found))
            lines.append((xs, ys))
        run = seeds[0]
        style = {**styles[run.model], "markevery": [-1], "ms": 6}  # many lines share their steps
        name = f"{run.model} (n = {len(seeds)})"
        if len(seeds) > 1:
            for xs, ys in lines:
                ax.plot(xs, ys, drawstyle="steps-post", color=style["color"], lw=0.7, alpha=0.5)
        ax.plot(*_mean_steps(lines), drawstyle="steps-post", label=name, **style)
        trained = run.cfg.train.lengths[1]
        until = [next((x for x, y in zip(*line) if y >= trained), None) for line in lines]
        summary.append(
            {
                "run": label,
                "n": len(seeds),
                f"s until {trained} was solved": None if None in until else mean(until),
                "longest solved": mean(max(ys) for _, ys in lines),
                "at the end": mean(ys[-1] for _, ys in lines),
                "training s": mean(run.result["training_seconds"] for run in seeds),
            }
        )
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
    _footer(
        figure, shown, False, "n: training seeds; thin lines: each of several, thick: their mean"
    )
    return Drawing(figure, rows, summary)


def heatmap(runs: list[Trained], title: str) -> Drawing:
    """ℓmax in training × ℓmax in evaluation, a panel a length: the training length, its double, and
    the longest."""
    metric, rows, shown = runs[0].headline, [], []
    evaluated: list[dict[int, dict[int, Spread]]] = []  # a model: {ℓmax: {length: …}}
    groups = by_seed(runs)
    for seeds in groups.values():
        by_limit: dict[int, list[list[dict]]] = {}
        for run in seeds:
            own = run.cfg.eval.max_iters or run.cfg.solver.eval_max_iters
            found = {**{n: other["eval"] for n, other in run.others.items()}}
            found[own] = at_once(run.result)
            for limit in sorted(found):
                rows += tidy(run, found[limit], **{"eval.max_iters": limit})
                by_limit.setdefault(limit, []).append(found[limit])
        evaluated.append({n: spreads(by_limit[n], metric) for n in sorted(by_limit)})
        shown += [(seeds[0].label, row) for several in by_limit.values() for row in chain(*several)]
    limits = sorted({n for found in evaluated for n in found})
    known = sorted({n for found in evaluated for values in found.values() for n in values})
    trained = runs[0].cfg.train.lengths[1]
    double = nearest(known, 2 * trained)
    lengths = sorted({nearest(known, trained), double, known[-1]})
    figure, axes = _panels(
        [f"test length {n} tokens" for n in lengths],
        title,
        sharey=True,
        width=max(2.4, 0.9 + 0.62 * len(limits)),
        height=2.1 + 0.5 * len(groups),
    )
    summary, drawn = [], []  # the number of seeds of each line
    for label, found in zip(groups, evaluated):
        drawn.append(number(v[n] for v in found.values() for n in lengths if n in v))
        line = {"run": f"{label}, at {double}", "n": drawn[-1]}
        for n in limits:
            value = found.get(n, {}).get(double)
            line[f"tested with {n}"] = value and str(value)
        summary.append(line)
    for length, ax in zip(lengths, axes):
        cells = [[found.get(n, {}).get(length) for n in limits] for found in evaluated]
        means = [[float("nan") if cell is None else cell.mean for cell in line] for line in cells]
        image = ax.imshow(means, cmap="cividis", vmin=0, vmax=1, aspect="auto")
        ax.set_facecolor("0.85")  # what was not evaluated
        for i, line in enumerate(cells):
            for j, cell in enumerate(line):
                known = "" if cell is None else plus_minus(cell.error, 2).strip()
                text = "–" if cell is None else f"{cell.mean:.2f}\n{known}".strip()
                color = "w" if cell and cell.mean < 0.5 else "k"
                ax.text(j, i, text, ha="center", va="center", color=color, fontsize=7)
        ax.set_xticks(range(len(limits)), limits)
        ax.set_xlabel("ℓmax in evaluation (iterations)")
    names = [
        f"{seeds[0].cfg.train.max_iters} (n = {n})" for seeds, n in zip(groups.values(), drawn)
    ]
    axes[0].set_yticks(range(len(groups)), names)
    axes[0].set_ylabel("ℓmax in training (iterations)")
    figure.colorbar(image, ax=list(axes), label=words(metric), fraction=0.06, aspect=16)
    shown = [(label, [row]) for label, row in shown if row["length"] in lengths]
    _footer(figure, shown, True, ERRORS)
    return Drawing(figure, rows, summary)
