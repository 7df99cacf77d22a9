"""The kinds of figures of the reports: curves over length, scatter, bars, time, heat maps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

from lm.runs.metrics import ELSEWHERE, ELSEWHERE_NOTE
from synthetic.drawing import (
    ERRORS,
    PALETTE,
    Drawing,
    ReportError,
    draw_curve,
    limit_height,
    nearest,
    new_figure,
    styles_of,
    words,
)
from synthetic.results import TOKEN_BY_TOKEN, elsewhere_of_layers, plus_minus, solved_length
from synthetic.trained import (
    Spread,
    Trained,
    by_seed,
    csv_lines,
    errors_over_lengths,
    over_lengths,
    seed_count,
    spread_of,
    spreads_over_lengths,
    with_seed_count,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

SOLVED = 0.9  # of the headline metric: a length counts as solved
NOT_LEARNED = {"ls": (0, (1, 2)), "mfc": "none", "alpha": 0.6}  # how ℓ* of such a model is drawn
DASHES = {TOKEN_BY_TOKEN: "--"}
WIDE = 100  # times the shortest length, above which lengths are drawn by their logarithm


def longest_solved(values: dict[int, float]) -> int:
    """Of one metric over lengths: the longest up to which it never falls below SOLVED."""
    rows = [{"length": length, "metrics": {"": value}} for length, value in values.items()]
    return solved_length(rows, "", SOLVED)


def _training_seconds(seeds: list[Trained]) -> float:
    return mean(run.result["training_seconds"] for run in seeds)


def has_learned(seeds: list[Trained]) -> bool:
    """Whether a model solves its task at the longest training length."""
    values = over_lengths([row for run in seeds for row in run.rows], seeds[0].headline)
    return bool(values) and values[nearest(values, seeds[0].cfg.train.lengths[1])] >= SOLVED


def curves(runs: list[Trained], title: str, metric: str | None = None) -> Drawing:
    """A metric (default: the task's headline; `num_iters` is ℓ*) against the test length: a panel a
    task, a colour a model, dashed where the model read token by token. ℓ* of a model that has not
    learned its task is marked: it says nothing about what solving the task takes; so is one that
    belongs to another solution.

    Raises:
        ReportError: no run has this metric.
    """
    metric = metric or runs[0].headline
    runs = [run for run in runs if over_lengths(run.result["eval"], metric)]
    if not runs:
        raise ReportError(f"none of the runs found has {words(metric)}: nothing to draw")
    panels = list(dict.fromkeys(run.panel for run in runs))
    figure, axes = new_figure(panels, title, sharey=True)
    drawing = Drawing(figure)
    styles = styles_of(runs)
    for panel, ax in zip(panels, axes):
        of_panel = [run for run in runs if run.panel == panel]
        values: list[float] = []
        for seeds in by_seed(of_panel).values():
            values += _draw_ways_of_reading(drawing, ax, seeds, metric, styles[seeds[0].model])
        for length in {run.cfg.train.lengths[1] for run in of_panel}:
            ax.axvline(length, color="gray", ls=":", lw=1.3, label="training length")
        ax.set_xlabel("test length (tokens)")
        ax.grid(alpha=0.3)
        lengths = [
            length for run in of_panel for length in over_lengths(run.result["eval"], metric)
        ]
        if max(lengths) > WIDE * min(lengths):
            ax.set_xscale("log", base=2)
        limit_height(ax, metric, values)
    axes[0].set_ylabel(words(metric))
    drawing.add_legend(axes)
    unlearned = metric == "num_iters" and not all(map(has_learned, by_seed(runs).values()))
    elsewhere = metric == "num_iters" and any(map(_is_elsewhere, by_seed(runs).values()))
    notes = [_about_unlearned(runs[0])] * unlearned + [ELSEWHERE_NOTE] * elsewhere
    drawing.add_footer(runs, *notes, ERRORS)
    return drawing


def _is_elsewhere(seeds: list[Trained]) -> bool:
    """Whether ℓ* of a model belongs to another solution than the model's, at a length and layer."""
    return any(elsewhere_of_layers([row for run in seeds for row in run.rows]))


def _about_unlearned(run: Trained) -> str:
    return (
        f"Not learned (dots, hollow markers): {words(run.headline)} below {SOLVED} at the training"
        " length. Such an ℓ* is of a map that does not solve the task."
    )


def _draw_ways_of_reading(
    drawing: Drawing, ax: Axes, seeds: list[Trained], metric: str, style: dict
) -> list[float]:
    """A curve for each way in which the seeds of a model have read the tokens.

    Returns: all values that were drawn.
    """
    ways = list(dict.fromkeys(read for run in seeds for read in run.rows_by_reading))
    values: list[float] = []
    is_marked = metric == "num_iters" and not has_learned(seeds)
    mark = f" {ELSEWHERE}" if metric == "num_iters" and _is_elsewhere(seeds) else ""
    for read in ways:
        name = f"{seeds[0].model}, {read}" if len(ways) > 1 else seeds[0].model
        rows_of_seeds = []
        for run in seeds:
            if read in run.rows_by_reading:
                rows = run.rows_by_reading[read]
                rows_of_seeds.append(rows)
                drawing.rows += csv_lines(run, rows)
                drawing.shown.append((name, rows))
        spreads = spreads_over_lengths(rows_of_seeds, metric)
        of_curve = {
            **style,
            "markevery": max(1, len(spreads) // 12),
            "ls": DASHES.get(read, style["ls"]),
            **(NOT_LEARNED if is_marked else {}),
        }
        label = f"{name}, not learned" if is_marked else f"{name}{mark}"
        draw_curve(ax, spreads, of_curve, with_seed_count(label, spreads.values()))
        values += [value for spread in spreads.values() for value in spread.values]
        line: dict[str, Any] = {"run": seeds[0].label, "n": seed_count(spreads.values())}
        if len(ways) > 1:
            line["read"] = read
        drawing.summary.append({**line, **_summary_of_curve(seeds, spreads, metric)})
    return values


def _summary_of_curve(seeds: list[Trained], spreads: dict[int, Spread], metric: str) -> dict:
    """The value at the training length and at the longest, how far a length counts as solved."""
    at_training = nearest(spreads, seeds[0].cfg.train.lengths[1])
    longest = max(spreads)
    line: dict[str, Any] = {
        f"at {length}": str(spreads[length]) for length in (at_training, longest)
    }
    if metric == "num_iters":
        line["learned"] = "yes" if has_learned(seeds) else "no"
    else:
        means = {length: spread.mean for length, spread in spreads.items()}
        line[f"solved (≥ {SOLVED})"] = longest_solved(means)
    line["training s"] = _training_seconds(seeds)
    return line


class _Coordinate(NamedTuple):
    """A model on one axis of a scatter."""

    length: int  # at which it is measured
    spread: Spread
    of_seeds: dict[int, float]  # training seed → value


def scatter(runs: list[Trained], title: str, x: tuple[str, str], y: tuple[str, str]) -> Drawing:
    """One point a model: a metric of one task against that of another, both at twice the training
    length.

    Args:
        x, y: (task.name, metric).
    Raises:
        ReportError: no model has finished both tasks.
    """
    models: dict[str, dict[str, list[Trained]]] = {}  # model → task → its seeds
    for run in runs:
        models.setdefault(run.model, {}).setdefault(run.cfg.task.name, []).append(run)
    metrics = dict((x, y))
    figure, (ax,) = new_figure([""], title)
    drawing = Drawing(figure)
    styles = styles_of(runs)
    length_of: dict[str, int] = {}  # task → at which its models are measured
    families: dict[str, list[list[float]]] = {}  # kind of model → the places of its points
    for model, tasks in models.items():
        coordinates = {
            task: _coordinate(drawing, tasks[task], metric)
            for task, metric in metrics.items()
            if task in tasks
        }
        length_of |= {task: coordinate.length for task, coordinate in coordinates.items()}
        spreads = [coordinate.spread for coordinate in coordinates.values()]
        line: dict[str, Any] = {"run": model, "n": seed_count(spreads)}
        for task in metrics:
            heading = f"{task} at {length_of.get(task, '2×')}".replace("_", " ")
            line[heading] = str(coordinates[task].spread) if task in coordinates else None
        drawing.summary.append(line)
        if len(coordinates) == len(metrics):
            _draw_point(ax, model, list(coordinates.values()), styles[model])
            kind = next(iter(tasks.values()))[0].cfg.model.name
            families.setdefault(kind, []).append([spread.mean for spread in spreads])
    if not families:
        raise ReportError(
            f"no model has finished both {' and '.join(metrics)} yet: a point needs both of its"
            " runs"
        )
    for places in families.values():  # which points are the same model at another size
        ax.plot(*zip(*places), color="gray", lw=1, alpha=0.5, zorder=1)
    for axis, (task, metric) in zip("xy", (x, y)):
        text = f"{task.replace('_', ' ')}:\n{words(metric)} at length {length_of[task]}"
        ax.set(**{f"{axis}lim": (0, 1.02), f"{axis}label": text})
    ax.grid(alpha=0.3)
    drawing.add_legend([ax])
    drawing.add_footer(runs, ERRORS)
    return drawing


def _coordinate(drawing: Drawing, seeds: list[Trained], metric: str) -> _Coordinate:
    """Where the seeds of a model stand in one task, at the length nearest to twice training's."""
    spreads = spreads_over_lengths([run.rows for run in seeds], metric)
    length = nearest(spreads, 2 * seeds[0].cfg.train.lengths[1])
    of_seeds = {}
    for run in seeds:
        drawing.rows += csv_lines(run, run.rows)
        drawing.shown.append((run.model, [row for row in run.rows if row["length"] == length]))
        values = over_lengths(run.rows, metric)
        if length in values:
            of_seeds[run.seed] = values[length]
    return _Coordinate(length, spreads[length], of_seeds)


def _draw_point(ax: Axes, model: str, place: list[_Coordinate], style: dict) -> None:
    """A model's mean on both axes with its errors, and each seed that has finished both tasks."""
    horizontal, vertical = place
    spreads = [horizontal.spread, vertical.spread]
    style = {**style, "ms": 8, "lw": 0, "zorder": 3}
    x, y = (spread.mean for spread in spreads)
    ax.plot(x, y, label=with_seed_count(model, spreads), **style)
    ax.errorbar(
        x,
        y,
        xerr=horizontal.spread.error,
        yerr=vertical.spread.error,
        fmt="none",
        ecolor=style["color"],
        capsize=2,
        lw=1,
    )
    pairs = [
        (value, vertical.of_seeds[seed])
        for seed, value in horizontal.of_seeds.items()
        if seed in vertical.of_seeds
    ]
    if pairs and max(len(spread.values) for spread in spreads) > 1:
        ax.plot(*zip(*pairs), ".", color=style["color"], ms=4, alpha=0.6, zorder=2)


def bars(runs: list[Trained], title: str, metric: str | None = None, at: str = "double") -> Drawing:
    """One bar a model.

    Args:
        at: "double", the metric at twice the training length; "beyond", its mean over all lengths
            from the training length on; "whole", over the whole test set.
    Raises:
        ReportError: a run has no such metric.
    """
    metric = metric or runs[0].headline
    groups = by_seed(runs)
    figure, (ax,) = new_figure([""], title, width=5.2, height=1.9 + 0.34 * len(groups))
    drawing = Drawing(figure)
    spreads = []
    place = ""
    for label, seeds in groups.items():
        of_seeds = []
        for run in seeds:
            lengths, place = _lengths_of_bar(run, metric, at)
            values = over_lengths(run.rows, metric)
            stderr = errors_over_lengths(run.rows, metric)
            error_of_mean = sum(stderr[n] ** 2 for n in lengths) ** 0.5 / len(lengths)
            of_seeds.append((mean(values[n] for n in lengths), error_of_mean))
            drawing.rows += csv_lines(run, run.rows)
            drawing.shown.append((run.model, [row for row in run.rows if row["length"] in lengths]))
        spreads.append(spread_of(of_seeds))
        drawing.summary.append(
            {
                "run": label,
                "n": len(seeds),
                f"{words(metric)}, {place}": str(spreads[-1]),
                "training s": _training_seconds(seeds),
            }
        )
    _draw_bars(ax, groups, spreads)
    ax.set(xlabel=f"{words(metric)}, {place}")
    if not metric.startswith("scaled"):
        ax.axvline(runs[0].result["chance"], color="gray", ls=":", lw=1.3, label="chance")
        drawing.add_legend([ax])
    drawing.add_footer(runs, ERRORS)
    return drawing


def _lengths_of_bar(run: Trained, metric: str, at: str) -> tuple[list[int], str]:
    """The lengths that a bar of a run is of, and how to say so; `at` as of `bars`."""
    values = over_lengths(run.rows, metric)
    if not values:
        raise ReportError(f"{run.run_dir} has no {words(metric)} in its result: nothing to draw")
    trained = run.cfg.train.lengths[1]
    if at == "double":
        length = nearest(values, 2 * trained)
        return [length], f"at length {length}"
    if at == "beyond":
        beyond = [length for length in values if length >= trained] or list(values)
        return beyond, f"mean of lengths {min(beyond)} to {max(beyond)}"
    return list(values), "on the test set"


def _draw_bars(ax: Axes, groups: dict[str, list[Trained]], spreads: list[Spread]) -> None:
    """Bars with their errors, the value behind each, and a dot a seed; a colour a kind of model."""
    places = range(len(groups))
    models = [seeds[0].cfg.model for seeds in groups.values()]
    kinds = list(dict.fromkeys((model.name, model.mixer) for model in models))
    colors = [PALETTE[kinds.index((model.name, model.mixer)) % len(PALETTE)] for model in models]
    means = [spread.mean for spread in spreads]
    errors = [spread.error for spread in spreads]
    ax.barh(places, means, color=colors, height=0.7)
    ax.errorbar(means, places, xerr=errors, fmt="none", ecolor="k", capsize=2, lw=1)
    for place, spread in zip(places, spreads):
        if len(spread.values) > 1:
            dots = [place] * len(spread.values)
            ax.plot(spread.values, dots, "o", mfc="w", mec="k", ms=3, mew=0.7)
        known_error = spread.error if spread.error == spread.error else 0  # it may be NaN
        edge = max(0, spread.mean + known_error, *spread.values)
        ax.annotate(
            f"{spread.mean:.3f}",
            (edge, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize="small",
        )
    labels = [with_seed_count(label, [spread]) for label, spread in zip(groups, spreads)]
    ax.set_yticks(places, labels)
    ax.invert_yaxis()
    ax.set(xlim=(1.05 * min(0, *means), 1.15))
    ax.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    ax.grid(axis="x", alpha=0.3)
    ax.set_axisbelow(True)


class Evaluation(NamedTuple):
    """One evaluation over lengths while a run trained."""

    update: int
    seconds: float  # of training until then
    rows: list[dict]  # of the headline metric, one a length


def evaluations(run: Trained) -> list[Evaluation]:
    """Every evaluation over lengths; the last one is that of the finished model, where it has all
    these lengths."""
    points = []
    for record in run.records:
        if "over_lengths" in record:
            rows = []
            for length, measured in record["over_lengths"].items():
                # Older logs have only the metrics there.
                more = measured if "metrics" in measured else {}
                rows.append({"length": int(length), "metrics": measured, **more})
            points.append(Evaluation(record["step"], record["seconds"], rows))
    if points:
        lengths = {row["length"] for row in points[-1].rows}
        last_rows = [row for row in run.rows if row["length"] in lengths]
        if {row["length"] for row in last_rows} == lengths:
            updates, seconds = run.result["updates"], run.result["training_seconds"]
            points.append(Evaluation(updates, seconds, last_rows))
    return points


class _Staircase(NamedTuple):
    """The longest solved length of a run over the seconds of its training."""

    seconds: list[float]
    solved: list[int]

    def at(self, second: float) -> int:
        return [solved for time, solved in zip(self.seconds, self.solved) if time <= second][-1]

    def reaches(self, length: int) -> float | None:
        """The second at which this length was first solved."""
        steps = zip(self.seconds, self.solved)
        return next((second for second, solved in steps if solved >= length), None)


def _mean_staircase(stairs: list[_Staircase]) -> tuple[list[float], list[float]]:
    """(seconds, mean solved length), as far as all of them go."""
    end = min(each.seconds[-1] for each in stairs)
    seconds = sorted({second for each in stairs for second in each.seconds if second <= end})
    return seconds, [mean(each.at(second) for each in stairs) for second in seconds]


def times(runs: list[Trained], title: str) -> Drawing:
    """The longest solved length against the seconds spent in training.

    Raises:
        ReportError: no run was evaluated over lengths while it trained.
    """
    figure, (ax,) = new_figure([""], title)
    drawing = Drawing(figure)
    styles = styles_of(runs)
    for label, seeds in by_seed(run for run in runs if evaluations(run)).items():
        stairs = [_staircase(drawing, run) for run in seeds]
        model = seeds[0].model
        style = {**styles[model], "markevery": [-1], "ms": 6}  # many lines share their steps
        if len(seeds) > 1:
            for each in stairs:
                ax.plot(*each, drawstyle="steps-post", color=style["color"], lw=0.7, alpha=0.5)
        name = f"{model} (n = {len(seeds)})"
        ax.plot(*_mean_staircase(stairs), drawstyle="steps-post", label=name, **style)
        trained = seeds[0].cfg.train.lengths[1]
        reached = [each.reaches(trained) for each in stairs]
        until = [second for second in reached if second is not None]
        drawing.summary.append(
            {
                "run": label,
                "n": len(seeds),
                f"s until {trained} was solved": mean(until) if len(until) == len(stairs) else None,
                "longest solved": mean(max(each.solved) for each in stairs),
                "at the end": mean(each.solved[-1] for each in stairs),
                "training s": _training_seconds(seeds),
            }
        )
    if not drawing.rows:
        raise ReportError(
            "the runs found were never evaluated over lengths while they trained: set eval.during"
        )
    for length in {run.cfg.train.lengths[1] for run in runs}:
        ax.axhline(length, color="gray", ls=":", lw=1.3, label="training length")
    ax.set(xlabel="training time (s)", xlim=(0, None), ylim=(0, None))
    ax.set_ylabel(f"longest solved length (tokens)\n{words(runs[0].headline)} ≥ {SOLVED}")
    ax.grid(alpha=0.3)
    drawing.add_legend([ax])
    drawing.add_footer(runs, "n: training seeds; thin lines: each of several, thick: their mean")
    return drawing


def _staircase(drawing: Drawing, run: Trained) -> _Staircase:
    """How far a run had come at each evaluation; its numbers go into the CSV."""
    metric = run.headline
    stairs = _Staircase([0.0], [0])
    for update, seconds, rows in evaluations(run):
        stairs.seconds.append(seconds)
        stairs.solved.append(longest_solved(over_lengths(rows, metric)))
        of_headline = [{**row, "metrics": {metric: row["metrics"][metric]}} for row in rows]
        lines = csv_lines(run, of_headline, step=update, seconds=seconds)
        lines = [line for line in lines if line["metric"] == metric]
        drawing.rows += lines
        drawing.rows.append(
            {
                **lines[0],
                "length": None,
                "metric": "solved_length",
                "value": stairs.solved[-1],
                "stderr": None,
                "in_training": None,
            }
        )
        drawing.shown.append((run.model, rows))
    return stairs


def heatmap(runs: list[Trained], title: str) -> Drawing:
    """ℓmax in training × ℓmax in evaluation, a panel a length: the training length, its double, and
    the longest."""
    # 1. Every model under every limit.
    groups = by_seed(runs)
    shown: list[tuple[str, list[dict]]] = []
    csv_rows: list[dict] = []
    under_limits = [  # of each model: ℓmax in evaluation → length → value
        _spreads_under_limits(seeds, runs[0].headline, csv_rows, shown) for seeds in groups.values()
    ]
    limits = sorted({limit for of_model in under_limits for limit in of_model})
    of_limits = [of_limit for of_model in under_limits for of_limit in of_model.values()]
    evaluated = sorted(set(chain(*of_limits)))  # lengths
    trained = runs[0].cfg.train.lengths[1]
    double = nearest(evaluated, 2 * trained)
    lengths = sorted({nearest(evaluated, trained), double, evaluated[-1]})

    # 2. A panel a length.
    figure, axes = new_figure(
        [f"test length {length} tokens" for length in lengths],
        title,
        sharey=True,
        width=max(2.4, 0.9 + 0.62 * len(limits)),
        height=2.1 + 0.5 * len(groups),
    )
    drawing = Drawing(figure, csv_rows)
    for length, ax in zip(lengths, axes):
        cells = [
            [of_model.get(limit, {}).get(length) for limit in limits] for of_model in under_limits
        ]
        image = _draw_cells(ax, cells)
        ax.set_xticks(range(len(limits)), [str(limit) for limit in limits])
        ax.set_xlabel("ℓmax in evaluation (iterations)")

    # 3. What each line is, and a summary of it.
    names = []
    for seeds, of_model in zip(groups.values(), under_limits):
        drawn = [of_limit[n] for of_limit in of_model.values() for n in lengths if n in of_limit]
        count = seed_count(drawn)
        names.append(f"{seeds[0].cfg.train.max_iters} (n = {count})")
        line: dict[str, Any] = {"run": f"{seeds[0].label}, at {double}", "n": count}
        for limit in limits:
            value = of_model.get(limit, {}).get(double)
            line[f"tested with {limit}"] = None if value is None else str(value)
        drawing.summary.append(line)
    axes[0].set_yticks(range(len(groups)), names)
    axes[0].set_ylabel("ℓmax in training (iterations)")
    figure.colorbar(image, ax=list(axes), label=words(runs[0].headline), fraction=0.06, aspect=16)
    drawing.shown = [
        (label, [row]) for label, rows in shown for row in rows if row["length"] in lengths
    ]
    drawing.add_footer(runs, ERRORS, any_limit=True)
    return drawing


def _spreads_under_limits(
    seeds: list[Trained],
    metric: str,
    csv_rows: list[dict],
    shown: list[tuple[str, list[dict]]],
) -> dict[int, dict[int, Spread]]:
    """ℓmax in evaluation → length → what the seeds reach; appends to `csv_rows` and `shown`."""
    rows_of: dict[int, list[list[dict]]] = {}  # ℓmax → the rows of each seed
    for run in seeds:
        rows_under = {limit: result["eval"] for limit, result in run.under_limits.items()}
        own_limit = run.cfg.eval.max_iters or run.cfg.solver.eval_max_iters
        rows_under[own_limit] = run.rows
        for limit in sorted(rows_under):
            csv_rows += csv_lines(run, rows_under[limit], **{"eval.max_iters": limit})
            rows_of.setdefault(limit, []).append(rows_under[limit])
    for of_seeds in rows_of.values():
        shown.append((seeds[0].label, list(chain(*of_seeds))))
    return {limit: spreads_over_lengths(rows_of[limit], metric) for limit in sorted(rows_of)}


def _draw_cells(ax: Axes, cells: Sequence[Sequence[Spread | None]]) -> AxesImage:
    """A coloured table of values, None where none was evaluated."""
    means = [[float("nan") if cell is None else cell.mean for cell in line] for line in cells]
    image = ax.imshow(means, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    ax.set_facecolor("0.85")  # what was not evaluated
    for i, line in enumerate(cells):
        for j, cell in enumerate(line):
            text = "–"
            color = "k"
            if cell is not None:
                text = f"{cell.mean:.2f}\n{plus_minus(cell.error, 2).strip()}".strip()
                color = "w" if cell.mean < 0.5 else "k"
            ax.text(j, i, text, ha="center", va="center", color=color, fontsize=7)
    return image
