"""What all figures of the reports share: panels, colours, legends, curves with errors, notes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from lm.common.errors import UserError
from synthetic.trained import Spread, Trained, curriculum_notes, notes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito's palette (without its yellow, too pale for lines), safe for colour-blind readers.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX*"
WORDS = {"num_iters": "ℓ* (iterations)"}
ERRORS = (
    "n: training seeds. Of several: their mean, dots each of them, shade or bar ± their standard"
    " deviation; of one: bar ± standard error over test samples"
)


class ReportError(UserError, RuntimeError):
    """A report that cannot be made; the message says what is missing."""


BESIDE = 2.4  # inches of the legend next to the panels


@dataclass
class Drawing:
    """A figure under way, and what is written and printed beside it."""

    figure: Figure
    rows: list[dict] = field(default_factory=list)  # all its numbers: of the CSV
    summary: list[dict] = field(default_factory=list)  # the few worth printing
    shown: list[tuple[str, list[dict]]] = field(default_factory=list)  # (label, rows drawn)
    footer: list[str] = field(default_factory=list)  # its paragraphs

    def add_footer(self, runs: Sequence[Trained], *more: str, any_limit: bool = False) -> None:
        """Write the notes below the figure: solvers, curricula that ended early, test samples that
        training has too, and `more`.

        Args:
            runs: All runs of the figure.
            more: Further notes.
            any_limit: As in `synthetic.trained.notes`.
        """
        self.footer = [*notes(self.shown, any_limit), *curriculum_notes(runs), *more]
        self._write_footer()

    def _write_footer(self) -> None:
        letters = int(17 * self.figure.get_figwidth())
        lines = [line for paragraph in self.footer for line in wrap(paragraph, letters)]
        self.figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize="x-small")

    def fit_to_phone(self) -> None:
        """Put the legend above the panels: next to them a narrow screen would hide it."""
        (legend,) = self.figure.legends
        labels = [text.get_text() for text in legend.get_texts()]
        handles = [handle for handle in legend.legend_handles if handle is not None]
        legend.remove()
        self.figure.set_size_inches(
            self.figure.get_figwidth() - BESIDE, self.figure.get_figheight()
        )
        self.figure.axes[0].legend(
            handles, labels, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False
        )
        self._write_footer()

    def add_legend(self, axes: Iterable[Axes]) -> None:
        """One entry a label, beside the axes: the curves may lie anywhere inside."""
        handles: dict[str, Any] = {}
        for ax in axes:
            for handle, label in zip(*ax.get_legend_handles_labels()):
                handles.setdefault(label, handle)
        self.figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside right center",
            fontsize="small",
            handlelength=2.8,
        )


def words(metric: str) -> str:
    """A metric's name as an axis says it."""
    return WORDS.get(metric, metric.replace("_", " "))


def nearest(lengths: Iterable[int], wanted: int) -> int:
    """The evaluated length nearest to the one wanted, the shorter one of two."""
    return min(lengths, key=lambda length: (abs(length - wanted), length))


def new_figure(
    panels: Sequence[str], title: str, width: float = 4.6, height: float = 3.8, **options: Any
) -> tuple[Figure, Sequence[Axes]]:
    """A figure with a row of panels.

    Args:
        panels: their titles; that of a single one is not shown. width, height: of one, in inches.
        options: of matplotlib's `subplots`.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (width * len(panels) + BESIDE, height)
    figure, axes = plt.subplots(
        1, len(panels), figsize=size, squeeze=False, layout="constrained", **options
    )
    for ax, name in zip(axes[0], panels):
        ax.set_title(name if len(panels) > 1 else "")
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left")
    return figure, axes[0]


def styles_of(runs: list[Trained]) -> dict[str, dict]:
    """A colour, a marker and dashes for each label; a ramp where it is ℓmax that changes."""
    labels = list(dict.fromkeys(run.model for run in runs))
    colors: list[Any] = [PALETTE[i % len(PALETTE)] for i in range(len(labels))]
    if all("train.max_iters" in run.point for run in runs):
        from matplotlib import colormaps

        ramp = colormaps["viridis"]
        random = {run.model for run in runs if run.cfg.train.max_iters == "gamma"}
        last = max(1, len(labels) - 1)
        colors = [
            PALETTE[1] if label in random else ramp(0.88 * i / last)
            for i, label in enumerate(labels)
        ]
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


def limit_height(ax: Axes, metric: str, values: Iterable[float]) -> None:
    """The vertical scale of a metric: of an accuracy all of it, up to 1."""
    if metric.endswith("accuracy"):
        lowest = min([0.0, *values])  # scaled accuracy may be below that of guessing
        ax.set_ylim(1.05 * lowest, 1.02)
    else:
        ax.set_ylim(bottom=0)


def draw_curve(ax: Axes, values: dict[int, Spread], style: dict, label: str) -> None:
    """The mean over lengths: where there are several seeds a band and each of them, else error
    bars."""
    lengths = list(values)
    means = [spread.mean for spread in values.values()]
    ax.plot(lengths, means, label=label, **style)
    of_several = {length: spread for length, spread in values.items() if len(spread.values) > 1}
    of_one = [
        (length, spread.mean, spread.error)
        for length, spread in values.items()
        if length not in of_several
    ]
    if of_one:
        places, middles, errors = zip(*of_one)
        ax.errorbar(places, middles, errors, fmt="none", ecolor=style["color"], capsize=2, lw=1)
    if of_several:
        low = [spread.mean - spread.error for spread in values.values()]
        high = [spread.mean + spread.error for spread in values.values()]
        where = [length in of_several for length in lengths]
        ax.fill_between(lengths, low, high, where=where, color=style["color"], alpha=0.15, lw=0)
    for length, spread in of_several.items():
        same_place = [length] * len(spread.values)
        ax.plot(same_place, spread.values, ".", color=style["color"], ms=3, alpha=0.6, zorder=1)
