"""The profile of models as people look at it: tables in the terminal, radars, an HTML page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lm.common import page
from lm.common.files import writing
from synthetic.abilities import ABILITIES
from synthetic.drawing import PALETTE, draw_curve, words
from synthetic.results import UNKNOWN, plus_minus
from synthetic.trained import Spread
from synthetic.validate import PAGES, spread_in

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

FURTHER = 8  # times the training length: the second line of a radar
MARKERS = "osD^vPX*"
ERRORS = "± standard deviation over seeds; of one seed the standard error over test samples"


class Drawn(NamedTuple):
    """Files of a profile."""

    page: Path
    radar: Path


def table(made: dict[str, list[dict]]) -> Table:
    """A rich table: a row for each bar, a column for each model. Below it, what solved the models,
    and which samples training had too."""
    from rich.table import Table

    bars = made["bars"]
    models = models_of(made)
    seeds = max((len(row["seeds"]) for row in bars), default=0)
    shown = Table(
        title=f"What the models can do (✓ reaches the bar; {seeds} seeds; {ERRORS})"
        if seeds > 1
        else "What the models can do (✓ reaches the bar; ± standard error)",
        caption="\n".join(notes(made)),
        caption_justify="left",
    )
    for heading in ("ability", "task", "metric", "bar"):
        shown.add_column(heading)
    for model in models:
        shown.add_column(model, justify="right")
    for cells in bar_lines(made):
        shown.add_row(*cells)
    shown.add_section()
    of_model = {model: [row for row in made["work"] if row["model"] == model] for model in models}
    parameters = [max(row["parameters"] for row in of_model[model]) for model in models]
    seconds = [sum(row["seconds"] for row in of_model[model]) for model in models]
    shown.add_row("parameters", "", "", "", *(f"{count:,.0f}" for count in parameters))
    shown.add_row("training", "", "of one seed", "", *(f"{value:,.0f} s" for value in seconds))
    return shown


def models_of(made: dict[str, list[dict]]) -> list[str]:
    """The models of a profile, in the order of their configs."""
    return list(dict.fromkeys(row["model"] for row in made["work"]))


def bar_lines(made: dict[str, list[dict]]) -> list[list[str]]:
    """A line of cells for each bar: ability, task, metric, bar, and a cell for each model."""
    by_bar: dict[tuple, dict[str, dict]] = {}  # (ability, metric, length) → model → row
    for row in made["bars"]:
        bar = row["ability"], row["metric"], row["length"]
        by_bar.setdefault(bar, {})[row["model"]] = row
    lines = []
    for (ability, metric, length), row_of in by_bar.items():
        any_row = next(iter(row_of.values()))
        name = f"{words(metric)} at {length:,}"
        if length != any_row["trained_to"]:
            name += f", trained to {any_row['trained_to']}"
        cells = [_cell(row_of[model]) for model in models_of(made)]
        lines.append([ability, any_row["task"], name, f"{any_row['least']:g}", *cells])
    return lines


def _cell(row: dict) -> str:
    return f"{row['value']:.3f}{plus_minus(row['error'])} {'✓' if row['passed'] else '·'}"


def notes(made: dict[str, list[dict]]) -> list[str]:
    """What solved each model, the noise that its states had in training, and the test samples that
    training has too."""
    models_by_way: dict[str, list[str]] = {}
    for row in made["bars"]:
        way = f"read {row['read']}; solver: {row['solver']}"
        models_by_way.setdefault(way, []).append(row["model"])
    said = [f"{', '.join(dict.fromkeys(models))}: {way}" for way, models in models_by_way.items()]
    for row in made["work"]:
        if noise := row["state_noise"]:
            said.append(f"{row['model']}: trained with noise of {noise:g} on its states")
        for note in row.get("curriculum_notes", ()):
            said.append(f"{row['model']}, {row['ability']}, {note}")
    for row in made["bars"]:
        if row["in_training"] == "0":
            continue
        share = f"{row['in_training']} test samples are in training too"
        if row["in_training"] == UNKNOWN:
            share = "whether training has the test samples too is unknown"
        said.append(f"{row['model']}, {row['task']} at {row['length']}: {share}")
    return list(dict.fromkeys(said))


def above_chance(row: dict) -> float:
    """A row's value on a scale where 0 is guessing and 1 is perfect; never below 0. Scaled accuracy
    is on it as it is, and whole sequences are guessed by nobody."""
    is_of_tokens = row["metric"] in ("token_accuracy", "character_accuracy", "accuracy")
    chance = row["chance"] if is_of_tokens else 0.0
    return max(0.0, (row["value"] - chance) / (1 - chance))


def radars(made: dict[str, list[dict]]) -> Figure:
    """A radar for each model: how much of each ability it has at the training length, and FURTHER
    times beyond it (or as far as was tried)."""
    import matplotlib.pyplot as plt

    models = models_of(made)
    abilities = list(dict.fromkeys(row["ability"] for row in made["work"]))
    angles = [2 * math.pi * i / len(abilities) for i in range(len(abilities))]
    columns = min(4, len(models))
    rows = math.ceil(len(models) / columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(3.7 * columns, 3.7 * rows + 0.4),
        subplot_kw={"projection": "polar"},
        squeeze=False,
        layout="constrained",
    )
    for ax in axes.flat[len(models) :]:
        ax.remove()
    for ax, model in zip(axes.flat, models):
        for times, color, name in (
            (1, PALETTE[5], "trained length"),
            (FURTHER, PALETTE[0], f"×{FURTHER}"),
        ):
            values = [_at(made, ability, model, times) for ability in abilities]
            closed = [*values, values[0]]
            ax.plot([*angles, angles[0]], closed, color=color, lw=1.6, label=name)
            ax.fill([*angles, angles[0]], closed, color=color, alpha=0.15)
        ax.set_title(model, pad=22)
        ax.set_ylim(0, 1)
        ax.set_yticks([0.5, 1.0], ["", ""])
        ax.set_xticks(angles, abilities, fontsize="x-small")
        ax.set_theta_offset(math.pi / 2)
        ax.set_theta_direction(-1)
        ax.grid(alpha=0.3)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def _at(made: dict[str, list[dict]], ability: str, model: str, times: int) -> float:
    """How much of an ability a model has at so many times the training length: at the longest
    length up to there that was tried."""
    rows = [
        row
        for row in made["lengths"]
        if (row["ability"], row["model"]) == (ability, model)
        and row["length"] <= times * row["trained_to"]
    ]
    return above_chance(max(rows, key=lambda row: row["length"]))


def curves(made: dict[str, list[dict]], ability: str) -> Figure:
    """The headline metric of one ability over the test length, a line a model."""
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(5.2, 3.2), layout="constrained")
    rows = [row for row in made["lengths"] if row["ability"] == ability]
    for i, model in enumerate(models_of(made)):
        values: dict[int, Spread] = {
            row["length"]: spread_in(row) for row in rows if row["model"] == model
        }
        style = {"color": PALETTE[i % len(PALETTE)], "marker": MARKERS[i % len(MARKERS)], "ms": 4}
        draw_curve(ax, values, {**style, "lw": 1.5}, model)
    ax.axvline(rows[0]["trained_to"], color="gray", ls=":", lw=1.3)
    ax.set_xscale("log", base=2)
    ax.set_ylim(min(0.0, *(row["value"] for row in rows)), 1.03)
    ax.set_xlabel("test length (dotted: longest of training)")
    ax.set_ylabel(words(rows[0]["metric"]))
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.3)
    ax.legend(fontsize="x-small")
    return figure


def write(made: dict[str, list[dict]], folder: Path, command: str) -> Drawn:
    """The page `folder`/profile.html and the picture `folder`/profile.png.

    Args: command: that made it, as it can be typed.
    Raises:
        OutputError: they cannot be written.
    """
    drawn = Drawn(*(folder / name for name in PAGES))
    abilities = list(dict.fromkeys(row["ability"] for row in made["work"]))
    with page.ink():
        import matplotlib.pyplot as plt

        figures = [(name, page.svg(curves(made, name))) for name in abilities]
        radar = page.svg(radars(made))
    picture = radars(made)
    with writing(drawn.radar):
        picture.savefig(drawn.radar, dpi=130)
    plt.close(picture)
    html = page.render(
        Path(__file__).with_name("profile.html"),
        title="Profile",
        models=models_of(made),
        bars=bar_lines(made),
        notes=notes(made),
        radar=radar,
        further=FURTHER,
        figures=[(name, ABILITIES[name].what, figure) for name, figure in figures],
        lengths=[_length_line(row) for row in made["lengths"]],
        work=[_work_line(row) for row in made["work"]],
        errors=ERRORS,
        command=command,
    )
    with writing(drawn.page):
        drawn.page.write_text(html, encoding="utf-8")
    return drawn


def _length_line(row: dict) -> Sequence[str]:
    value = f"{row['value']:.4f}{plus_minus(row['error'])}"
    times = f"{row['length'] / row['trained_to']:g}"
    seeds = " ".join(f"{each:.3f}" for each in row["seeds"])
    metric = words(row["metric"])
    return row["ability"], row["model"], metric, f"{row['length']:,}", times, value, seeds


def _work_line(row: dict) -> Sequence[str]:
    def number(value: float | None, digits: int) -> str:
        return "–" if value is None else f"{value:,.{digits}f}"

    return (
        row["ability"],
        row["model"],
        f"{row['parameters']:,}",
        number(row["updates"], 0),
        number(row["seconds"], 0),
        number(row["evaluations"], 2),
        number(row["num_iters"], 1),
    )
