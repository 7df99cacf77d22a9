"""What a comparison leaves behind to be read: tables, curves over three axes, one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from lm.common import page as html
from lm.common.files import write_json, write_text, writing
from lm.report.compare.results import summary
from lm.report.sections.as_markdown import table
from lm.report.sections.blocks import with_error
from lm.report.sections.draw import DASHES, MARKERS, PALETTE
from lm.report.sections.latex import document

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AXES = {
    "tokens": "training tokens",
    "flops": "training FLOPs",
    "processor_seconds": "processor time of training",
    "seconds": "time of training",
}
BUDGETS = {
    "tokens": "equal tokens",
    "flops": "equal FLOPs",
    "processor": "equal processor time",
    "time": "equal time",
}

APART, TIME_APART = 0.1, 0.16  # of an axis' length that a number along it takes
LINE = 0.055  # of a panel's height that a name takes
# Where ticks may stand, the closest first.
ROUND = [
    [digit * 10.0**power for power in range(-3, 27) for digit in digits]
    for digits in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,))
]
TIMES = [
    [s * size for size, of in zip((1, 60, 3600, 86400), steps, strict=True) for s in of]
    for steps in (
        ((0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 15, 20, 30, 45), (1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 45),
         (1, 1.5, 2, 3, 5, 8, 12), (1, 2, 3, 5, 10, 20)),
        ((0.1, 0.2, 0.5, 1, 2, 5, 10, 20), (1, 2, 5, 10, 20), (1, 2, 5, 10), (1, 2, 5, 10, 20)),
        ((0.1, 1, 10), (1, 10), (1, 6), (1, 7)),
    )
]  # fmt: skip


def write(found: dict, folder: Path) -> dict[str, Path]:
    """compare.json; tables for Markdown and LaTeX; curves as SVG and PDF; the page → their
    paths."""
    paths = {
        "results": folder / "compare.json",
        "tables": folder / "tables.markdown",
        "LaTeX": folder / "tables.tex",
        "curves": folder / "curves.svg",
        "PDF": folder / "curves.pdf",
        "page": folder / "page.html",
    }
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with html.ink():
        panels = [html.svg(draw(found, [name])) for name in _over(found)]
        curves = draw(found, _over(found))
        html.save_pdf(curves, paths["PDF"])
    write_json(paths["results"], found)
    write_text(paths["tables"], markdown(found))
    titled = [(f"At {BUDGETS[budget]}", rows) for budget, rows in tables(found).items()]
    write_text(paths["LaTeX"], document(titled))
    write_text(paths["curves"], html.svg(curves))
    write_text(paths["page"], page(found, panels))
    return paths


def tables(found: dict) -> dict[str, list[list[str]]]:
    """By budget, rows of text; the first is the head."""
    reference, unit = found["comparison"]["reference"], found["unit"]
    head = ["model", "parameters", "best", "seeds", unit, f"− {reference}", "M tokens", "TFLOP"]
    out = {}
    for budget in found["comparison"]["equal"]:
        rows = [[*head, "processor s", "s"]]
        rows += [_row(row) for row in summary(found, budget)]
        out[budget] = rows
    return out


def _row(row: dict) -> list[str]:
    best = ", ".join(f"{k.rpartition('.')[2]} {v}" for k, v in (row["best"] or {}).items())
    seeds = str(row["n"]) + (f", {row['diverged']} diverged" if row["diverged"] else "")
    return [
        row["model"],
        f"{row['parameters']:,}",
        best or "–",
        seeds,
        _with_deviation(row["mean"], row["deviation"]),
        _with_deviation(row["difference"], row["difference_deviation"], "+")
        + (f" of {row['pairs']}" if row["pairs"] != row["n"] else ""),
        _number(row["tokens"], 1e6, ".2f"),
        _number(row["flops"], 1e12, ",.3g"),
        _number(row["processor_seconds"], 1, ",.0f"),
        _number(row["seconds"], 1, ",.0f"),
    ]


def _with_deviation(mean: float | None, deviation: float | None, sign: str = "") -> str:
    return "–" if mean is None else with_error(mean, deviation, sign)


def _number(value: float | None, unit: float, form: str) -> str:
    return "–" if value is None else format(value / unit, form)


def notes(found: dict) -> list[str]:
    """What a reader of the tables must know."""
    c = found["comparison"]
    grid = "; ".join(f"{key} in {values}" for key, values in c["tune"].items())
    lines = [
        f"Every model was tuned alike, with seed {c['seeds'][0]} at equal tokens: {grid}; `best` is"
        " the lowest validation loss.",
        "± is the standard deviation of one training over seeds; differences are of the same seed.",
    ]
    if len(c["equal"]) > 1:
        others = " and ".join(BUDGETS[b] for b in c["equal"] if b != "tokens")
        lines.append(
            f"At {others} a model has as many updates as what {c['reference']} took pays for, its"
            " learning rate's schedule stretched to them."
        )
    for model, entry in found["models"].items():
        for key in entry.get("at_the_edge", []):
            lines.append(f"{model}: the best {key} is at the edge of the grid.")
    return lines


def markdown(found: dict) -> str:
    """The tables and their notes."""
    parts = [f"# {found['comparison']['name']}", ""]
    for budget, rows in tables(found).items():
        parts += [f"## At {BUDGETS[budget]}", ""]
        parts += [table(rows), ""]
    return "\n".join([*parts, *(f"- {line}" for line in notes(found))]) + "\n"


def draw(found: dict, names: Sequence[str]) -> Figure:
    """The score over training against tokens, FLOPs or time, a panel each: of the trainings at
    equal tokens, the mean over seeds, with a bar from the least to the most."""
    import matplotlib.pyplot as plt

    size = (3.9 * len(names) + 1.6, 4.4)
    figure, axes = plt.subplots(
        1, len(names), figsize=size, layout="constrained", sharey=True, squeeze=False
    )
    for axis, name in zip(axes[0], names, strict=True):
        ends = []
        for i, (model, entry) in enumerate(found["models"].items()):
            done = [r for r in entry["budgets"].get("tokens", []) if r["state"] == "done"]
            if done:
                curves = [row["curve"] for row in done]
                ends.append((*_curve(axis, name, curves, found["unit"], i), model, i))
        axis.set(xlabel=AXES[name], xscale="log")
        _set_ticks(axis, is_time=name.endswith("seconds"))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel(f"validation {found['unit']}")
    _name_ends(axis, ends)
    return figure


def _over(found: dict) -> list[str]:
    """What the score is drawn against."""
    time = "seconds" if "time" in found["comparison"]["equal"] else "processor_seconds"
    return ["tokens", "flops", time]


def _curve(
    axis: Axes, name: str, curves: list[list[dict]], unit: str, number: int
) -> tuple[float, float]:
    """Draw the mean of a model's trainings → where its line ends."""
    key = "bits_per_byte" if unit == "bits per byte" else "loss"
    steps = sorted(set.intersection(*({at["step"] for at in curve} for curve in curves)))
    by_step = [{at["step"]: at for at in curve} for curve in curves]
    across = [sum(curve[s][name] for curve in by_step) / len(by_step) for s in steps]
    scores = [[curve[s][key] for curve in by_step] for s in steps]
    mean = [sum(values) / len(values) for values in scores]
    below = [m - min(values) for m, values in zip(mean, scores, strict=True)]
    above = [max(values) - m for m, values in zip(mean, scores, strict=True)]
    axis.errorbar(across, mean, [below, above], ms=4, lw=1.3, capsize=2, **_look(number))
    return across[-1], mean[-1]


def _look(number: int) -> dict:
    """Colour, marker and dashes of a model: without colours nine are still told apart."""
    return {
        "color": PALETTE[number % len(PALETTE)],
        "marker": MARKERS[number % len(MARKERS)],
        "ls": DASHES[number % len(DASHES)],
    }


def _set_ticks(axis: Axes, is_time: bool) -> None:
    """As many round numbers as have room, seconds as 10 min."""
    from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, NullLocator

    least, most = axis.get_xlim()
    apart = (most / least) ** (TIME_APART if is_time else APART)
    places: list[float] = []
    for steps in TIMES if is_time else ROUND:
        places = [value for value in steps if least <= value <= most]
        if all(right >= apart * left for left, right in pairwise(places)):
            break
    axis.xaxis.set_major_locator(FixedLocator(places))
    axis.xaxis.set_minor_locator(NullLocator())
    name = FuncFormatter(lambda v, _: _time(v)) if is_time else EngFormatter(sep="")
    axis.xaxis.set_major_formatter(name)


def _time(seconds: float) -> str:
    """0.5 s, 10 min, 2 h, 5 d."""
    sizes = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    size, unit = next(((s, u) for s, u in sizes if seconds >= s), sizes[-1])
    return f"{seconds / size:g} {unit}"


def _name_ends(axis: Axes, ends: Sequence[tuple[float, float, str, int]]) -> None:
    """The names of the lines behind their ends, in their order from top to bottom."""
    if not ends:
        return
    low, high = axis.get_ylim()
    gap = min(LINE, 1 / len(ends))
    places: list[float] = []
    for _, y, *_ in (in_order := sorted(ends, key=lambda end: end[1])):
        wanted = (y - low) / (high - low)
        places.append(max(wanted, places[-1] + gap) if places else wanted)
    middle = sum((y - low) / (high - low) for _, y, *_ in ends) / len(ends)
    too_high = min(sum(places) / len(places) - middle, places[0])
    for place, (x, y, model, number) in zip(places, in_order, strict=True):
        line = {"arrowstyle": "-", "color": PALETTE[number % len(PALETTE)], "lw": 0.8}
        axis.annotate(
            model.replace("$", r"\$"),
            (x, y),
            (1.08, place - max(0.0, too_high)),
            textcoords="axes fraction",
            fontsize="small",
            va="center",
            annotation_clip=False,
            arrowprops={**line, "shrinkA": 1, "shrinkB": 3, "relpos": (0, 0.5)},
        )


def page(found: dict, panels: Sequence[str]) -> str:
    """One page without anything outside it.

    Args:
        panels: the curves as SVG, an axis each.
    """
    parts = []
    for budget, rows in tables(found).items():
        parts += [html.heading(f"At {BUDGETS[budget]}"), html.table(rows)]
    parts += [html.heading("Over training, at equal tokens"), html.figures(panels)]
    parts.append(html.bullets(notes(found)))
    parts.append(html.heading("Tuning"))
    for model, entry in found["models"].items():
        parts += [html.heading(model, 3), html.table(_tuned(entry))]
    settings = yaml.dump(found["comparison"], sort_keys=False)
    parts += [html.heading("What was trained"), html.preformatted(settings)]
    return html.page(found["comparison"]["name"], parts)


def _tuned(entry: dict) -> list[list[str]]:
    rows = [["point", "validation loss"]]
    for tried in entry["tuned"]:
        point = ", ".join(f"{key} = {value}" for key, value in tried["point"].items())
        loss = tried["validation_loss"]
        rows.append([point, loss if isinstance(loss, str) else f"{loss:.4f}"])
    return rows
