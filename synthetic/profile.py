"""The profile of models for people: a table in the terminal, a page (Markdown) and two figures."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from rich.table import Table

from lm.common.files import writing
from synthetic.plots import MARKERS, PALETTE, add_legend, draw_curve, limit_height, words
from synthetic.results import UNKNOWN, plus_minus
from synthetic.validate import PAGES

FURTHER = 8  # times the training length: the second line of a radar
ERRORS = "± standard deviation over seeds; of one seed the standard error over test samples"
Profile = dict[str, list[dict]]  # as synthetic.validate.profile returns it


def models_of(made: Profile) -> list[str]:
    """Return the models of a profile, in the order of their configs."""
    return list(dict.fromkeys(row["model"] for row in made["work"]))


def bar_lines(made: Profile) -> list[list[str]]:
    """Return the table of a profile as rows of text, the first being the head: a line for each bar,
    a column for each model; then the size and the training time of each model."""
    models = models_of(made)
    cells: dict[tuple, dict[str, str]] = {}
    for row in made["bars"]:
        metric = f"{words(row['metric'])} at {row['length']:,}"
        if row["length"] != row["trained_to"]:
            metric += f", trained to {row['trained_to']}"
        mark = "✓" if row["passed"] else "·"
        line = cells.setdefault((row["ability"], row["task"], metric, f"{row['least']:g}"), {})
        line[row["model"]] = f"{row['value']:.3f}{plus_minus(row['error'])} {mark}"
    work = pd.DataFrame(made["work"]).groupby("model")
    cells["parameters", "", "", ""] = {m: f"{n:,.0f}" for m, n in work["parameters"].max().items()}
    seconds = work["seconds"].sum()
    cells["training", "", "of one seed", ""] = {m: f"{s:,.0f} s" for m, s in seconds.items()}
    lines = [[*about, *(line[model] for model in models)] for about, line in cells.items()]
    return [["ability", "task", "metric", "bar", *models], *lines]


def table(made: Profile) -> Table:
    """Return the table of a profile, with the notes below it."""
    shown = Table(
        title=f"What the models can do (✓ reaches the bar; {ERRORS})",
        caption="\n".join(notes(made)),
        caption_justify="left",
    )
    head, *lines = bar_lines(made)
    for heading in head:
        shown.add_column(heading)
    for line in lines:
        shown.add_row(*line)
    return shown


def notes(made: Profile) -> list[str]:
    """Return the sentences below a profile: solvers, noise on states in training, curricula that
    ended early, and test samples that training has too."""
    models_by_way: dict[str, list[str]] = {}
    for row in made["bars"]:
        way = f"read {row['read']}; solver: {row['solver']}"
        models_by_way.setdefault(way, []).append(row["model"])
    found = [f"{', '.join(dict.fromkeys(models))}: {way}" for way, models in models_by_way.items()]
    for row in made["work"]:
        if noise := row["state_noise"]:
            found.append(f"{row['model']}: trained with noise of {noise:g} on its states")
        for note in row.get("curriculum_notes", ()):
            found.append(f"{row['model']}, {row['ability']}, {note}")
    for row in made["bars"]:
        share = f"{row['in_training']} test samples may be in training too"
        if row["in_training"] == UNKNOWN:
            share = "it is unknown if training has the test samples too"
        if row["in_training"] != "0":
            found.append(f"{row['model']}, {row['task']} at {row['length']}: {share}")
    return list(dict.fromkeys(found))


def above_chance(row: dict) -> float:
    """Return a row's value on a scale from 0, guessing, to 1, perfect.

    Scaled accuracy is on it already, and nobody guesses a whole sequence.
    """
    is_of_tokens = row["metric"] in ("token_accuracy", "character_accuracy", "accuracy")
    chance = row["chance"] if is_of_tokens else 0.0
    return max(0.0, (row["value"] - chance) / (1 - chance))


def radars(made: Profile) -> Figure:
    """Draw a radar for each model: its abilities at the training length, and at FURTHER times that
    (or as far as was tried)."""
    models = models_of(made)
    abilities = list(dict.fromkeys(row["ability"] for row in made["work"]))
    angles = [2 * math.pi * i / len(abilities) for i in range(len(abilities))]
    figure, axes = _grid(models, size=3.7, polar=True)
    for ax, model in zip(axes, models):
        for times, color, name in (
            (1, PALETTE[5], "trained length"),
            (FURTHER, PALETTE[0], f"×{FURTHER}"),
        ):
            values = [ability_at(made, ability, model, times) for ability in abilities]
            closed = [*values, values[0]]
            ax.plot([*angles, angles[0]], closed, color=color, lw=1.6, label=name)
            ax.fill([*angles, angles[0]], closed, color=color, alpha=0.15)
        ax.set_title(model, pad=22)
        ax.set_ylim(0, 1)
        ax.set_yticks([0.5, 1.0], ["", ""])
        ax.set_xticks(angles, abilities, fontsize="x-small")
        ax.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def _grid(panels: list[str], size: float, **subplot: bool) -> tuple[Figure, list]:
    """Return a figure with a square panel for each name, four in a row."""
    columns = min(4, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(size * columns, size * rows + 0.4), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, i + 1, **subplot) for i in range(len(panels))]


def ability_at(made: Profile, ability: str, model: str, times: int) -> float:
    """Return how much of an ability a model has at so many times the training length: at the
    longest length up to there that was tried."""
    rows = [
        row
        for row in made["lengths"]
        if (row["ability"], row["model"]) == (ability, model)
        and row["length"] <= times * row["trained_to"]
    ]
    return above_chance(max(rows, key=lambda row: row["length"]))


def curves(made: Profile) -> Figure:
    """Draw the headline metric of each ability over the test length, a line for each model."""
    numbers = pd.DataFrame(made["lengths"])
    numbers = numbers.assign(values=numbers["seeds"], n=numbers["seeds"].map(len))
    abilities = list(numbers["ability"].unique())
    figure, axes = _grid(abilities, size=3.4)
    for ax, (ability, of_ability) in zip(axes, numbers.groupby("ability", sort=False)):
        for i, (model, rows) in enumerate(of_ability.groupby("model", sort=False)):
            style = {"color": PALETTE[i % len(PALETTE)], "marker": MARKERS[i % len(MARKERS)]}
            draw_curve(ax, rows.set_index("length"), {**style, "ms": 4, "lw": 1.5}, model)
        trained_to = of_ability["trained_to"].iloc[0]
        ax.axvline(trained_to, color="gray", ls=":", lw=1.3, label="longest of training")
        ax.set_xscale("log", base=2)
        metric = of_ability["metric"].iloc[0]
        limit_height(ax, metric, of_ability["value"].min())
        ax.set(title=ability, xlabel="test length", ylabel=words(metric))
        ax.grid(alpha=0.3)
    add_legend(figure, axes)
    return figure


def write(made: Profile, folder: Path, command: str) -> list[Path]:
    """Write the page README.md and its figures, profile.png and lengths.png.

    Args:
        made: The profile.
        folder: Of the files.
        command: The command that made it, for the page.

    Returns:
        The files.

    Raises:
        OutputError: If they cannot be written.
    """
    paths = [folder / name for name in PAGES]
    parts = [
        "# Profile",
        f"Models trained on short sequences of every task, tried on longer ones; {ERRORS}."
        f" Made by `{command}`.",
        f"![a radar for each model]({paths[1].name})",
        f"0, the middle, is guessing, and 1, the rim, perfect: at the longest length of training,"
        f" and at {FURTHER} times that (or as far as was tried).",
        markdown_table(bar_lines(made)),
        "\n".join(f"- {note}" for note in notes(made)),
        f"![accuracy over length]({paths[2].name})",
        "Every number is in validate.json.",
    ]
    with writing(folder):
        radars(made).savefig(paths[1], dpi=130)
        curves(made).savefig(paths[2], dpi=130)
        paths[0].write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return paths


def markdown_table(rows: list[list[str]]) -> str:
    """Return rows of text, the first being the head, as a table in Markdown."""
    head, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))
