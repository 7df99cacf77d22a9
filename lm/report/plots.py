"""The figures a run leaves behind."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

from lm.common import page
from lm.common.errors import UserError
from lm.report.sections.series import having, running_mean, smoothing_span
from lm.runs.metrics import ELSEWHERE, is_elsewhere, read_metrics


class PlotError(UserError, RuntimeError):
    """A figure that cannot be drawn; the message says what is missing."""


def _axes(title: str, ylabel: str):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    title = title.replace("$", r"\$")  # a run's name is no mathematics
    axes.set(title=title, xlabel="update", ylabel=ylabel)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _add_bits_per_byte(axes, validation: dict) -> None:
    """A second scale on the right, in bits for each byte of the validation text: its loss times its
    tokens a byte. Nothing for a run whose bytes are not known."""
    if not validation.get("bits_per_byte"):
        return
    bits_a_nat = validation["bits_per_byte"] / validation["loss"]
    scale = axes.secondary_yaxis(
        "right", functions=(lambda nats: nats * bits_a_nat, lambda bits: bits / bits_a_nat)
    )
    scale.set_ylabel("bits per byte of the validation text")
    scale.spines["right"].set_visible(False)


def draw(run_dir: Path) -> list[Path]:
    """Draw what `metrics.jsonl` holds, each as PNG and PDF: loss always, iterations (ℓ* of the
    probes) where a solver ran.

    Raises:
        PlotError: the run has no metrics yet.
    """
    run_dir = Path(run_dir)
    records = read_metrics(run_dir)
    train = having(records, "loss")
    if not train:
        raise PlotError(f"{run_dir}/metrics.jsonl holds no training step: train first")
    figures = {"loss": _loss(run_dir.name, train, having(records, "validation"))}
    probed = having(records, "probe")
    if probed:
        figures["iterations"] = _iterations(run_dir.name, probed)
    return _saved(figures, run_dir / "figures")


def _saved(figures: dict, folder: Path) -> list[Path]:
    import matplotlib.pyplot as plt

    folder.mkdir(exist_ok=True)
    paths = []
    for name, figure in figures.items():
        # Beside the axes: the curves may lie anywhere inside.
        figure.legend(loc="outside right upper", fontsize="small")
        paths += [folder / f"{name}.png", folder / f"{name}.pdf"]
        figure.savefig(paths[-2], dpi=140)
        page.save_pdf(figure, paths[-1])
        plt.close(figure)
    return paths


def _loss(name: str, train: list[dict], validation: list[dict]):
    """Of training and validation over the updates, and the n-gram models' beside it."""
    figure, axes = _axes(f"{name}: loss", "cross-entropy (nats per token)")
    steps = [r["step"] for r in train]
    losses = [r["loss"] for r in train]
    axes.plot(steps, losses, color="tab:blue", lw=0.8, alpha=0.5, label="training")
    span = smoothing_span(len(losses))
    if span > 1:
        smooth = running_mean(losses, span)
        axes.plot(steps, smooth, color="tab:blue", lw=1.8, label=f"mean of the last {span + 1}")
    if not validation:
        return figure
    axes.plot(
        [r["step"] for r in validation],
        [r["validation"]["loss"] for r in validation],
        "o-",
        color="tab:orange",
        lw=1.2,
        ms=4,
        label="validation",
    )
    baselines = validation[-1].get("baselines", {})
    for (label, perplexity), style in zip(baselines.items(), itertools.cycle(["--", ":", "-."])):
        axes.axhline(math.log(perplexity), color="gray", ls=style, lw=1.2, label=label)
    _add_bits_per_byte(axes, validation[-1]["validation"])
    return figure


def _iterations(name: str, probed: list[dict]):
    """ℓ* of each layer over the updates."""
    title = f"{name}: iterations to the fixed point"
    figure, axes = _axes(title, "ℓ* (mean, shade: to max)")
    steps = [r["step"] for r in probed]
    counts = [r["probe"]["num_iters"] for r in probed]
    layers = len(counts[0]["mean"])
    numbers = probed[-1]["probe"].get("layers", range(layers))
    for i in range(layers):
        shade = i / max(1, layers - 1)
        color = (0.1 + 0.8 * shade, 0.3, 0.9 - 0.7 * shade)
        mean = [count["mean"][i] for count in counts]
        most = [count["max"][i] for count in counts]
        mark = ELSEWHERE * is_elsewhere(counts[-1])[i]
        axes.plot(steps, mean, "o-", color=color, lw=1.4, ms=3, label=f"layer {numbers[i]}{mark}")
        axes.fill_between(steps, mean, most, color=color, alpha=0.12, lw=0)
    axes.set_ylim(bottom=0)
    if any(is_elsewhere(counts[-1])):
        axes.set_xlabel(f"{axes.get_xlabel()}\n{ELSEWHERE}: of another solution than the model's")
    return figure
