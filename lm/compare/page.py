"""What a comparison leaves behind to be read: tables, three curves, one HTML page."""

from __future__ import annotations

from pathlib import Path

import yaml

from lm import page as html
from lm.compare.results import summary
from lm.outputs import write_json, write_text, writing

AXES = {
    "tokens": "training tokens",
    "flops": "training FLOPs",
    "processor_seconds": "processor seconds of training",
    "seconds": "seconds of training",
}
BUDGETS = {
    "tokens": "equal tokens",
    "flops": "equal FLOPs",
    "processor": "equal processor time",
    "time": "equal time",
}


def write(found: dict, folder: Path) -> dict[str, Path]:
    """compare.json, tables.markdown, curves.svg and page.html in a folder → their paths."""
    paths = {
        "results": folder / "compare.json",
        "tables": folder / "tables.markdown",
        "curves": folder / "curves.svg",
        "page": folder / "page.html",
    }
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    curves = draw(found)
    write_json(paths["results"], found)
    write_text(paths["tables"], markdown(found))
    write_text(paths["curves"], curves)
    write_text(paths["page"], page(found, curves))
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
    if mean is None:
        return "–"
    text = f"{mean:{sign}.4f}"
    return text if deviation is None else f"{text} ± {deviation:.4f}"


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
        head, *body = rows
        parts += [_line(head), _line(["---", *["---:"] * (len(head) - 1)]), *map(_line, body), ""]
    return "\n".join([*parts, *(f"- {line}" for line in notes(found))]) + "\n"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def draw(found: dict) -> str:
    """The score over training against tokens, FLOPs and time, as SVG: of the trainings
    at equal tokens, the mean over seeds, with a bar from the least to the most."""
    with html.ink():
        return html.svg(_drawn(found))


def _drawn(found: dict):
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    figure, axes = plt.subplots(1, 3, figsize=(13, 4.4), layout="constrained", sharey=True)
    time = "seconds" if "time" in found["comparison"]["equal"] else "processor_seconds"
    for axis, name in zip(axes, ("tokens", "flops", time), strict=True):
        for model, entry in found["models"].items():
            done = [r for r in entry["budgets"].get("tokens", []) if r["state"] == "done"]
            if done:
                _curve(axis, name, model, [row["curve"] for row in done], found["unit"])
        axis.set(xlabel=AXES[name], xscale="log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3, which="both")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(f"validation {found['unit']}")
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right upper", fontsize="small")
    return figure


def _curve(axis, name: str, model: str, curves: list[list[dict]], unit: str) -> None:
    key = "bits_per_byte" if unit == "bits per byte" else "loss"
    steps = sorted(set.intersection(*({at["step"] for at in curve} for curve in curves)))
    by_step = [{at["step"]: at for at in curve} for curve in curves]
    across = [sum(curve[s][name] for curve in by_step) / len(by_step) for s in steps]
    scores = [[curve[s][key] for curve in by_step] for s in steps]
    mean = [sum(values) / len(values) for values in scores]
    below = [m - min(values) for m, values in zip(mean, scores, strict=True)]
    above = [max(values) - m for m, values in zip(mean, scores, strict=True)]
    axis.errorbar(across, mean, [below, above], marker="o", ms=3, lw=1.3, capsize=2, label=model)


def page(found: dict, curves: str) -> str:
    """One page without anything outside it."""
    parts = []
    for budget, rows in tables(found).items():
        parts += [html.heading(f"At {BUDGETS[budget]}"), html.table(rows)]
    parts += [html.heading("Over training, at equal tokens"), html.figure(curves)]
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
