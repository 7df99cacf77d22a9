"""An inspection as one HTML page: the text coloured, each token's numbers, figures over time."""

from __future__ import annotations

import base64
import html
import importlib.util
import io
import math
from pathlib import Path
from typing import NamedTuple

import torch
from markupsafe import Markup

from lm.common.files import write_text
from lm.common.page import render
from lm.evaluation.inspection.result import Layers, Measured
from lm.evaluation.inspection.tokens import Token
from lm.runs.metrics import ELSEWHERE, ELSEWHERE_NOTE, is_elsewhere

MADE_BY = "<!-- made by fprnn inspect -->"  # marks a page that this command may replace
MAX_NAMED_TICKS = 40  # up to so many tokens the axis of a figure names them
LN2 = math.log(2)


class Colouring(NamedTuple):
    """One number for each token, which gives it a colour."""

    name: str
    values: list[float | None]  # None: there is none for this token
    low: float  # the number without colour
    high: float  # the number with the full colour
    digits: int


class Inspection(Measured):
    """Results of reading a text or word, with the page that shows them."""

    def to_html(self, path: Path | str) -> Path:
        """Write a page that needs no other file.

        Raises:
            OutputError: It cannot be written.
        """
        write_text(path, page(self))
        return Path(path)

    def _repr_html_(self) -> str:
        """Return the page for a notebook, in a frame that keeps their styles apart."""
        source = html.escape(page(self), quote=True)
        return f"<iframe srcdoc='{source}' style='width:100%;height:720px;border:0'></iframe>"


def page(found: Measured) -> str:
    """Return the whole page."""
    layers = found.layers
    figure = None
    if layers is not None and importlib.util.find_spec("matplotlib") is not None:
        figure = _figure(layers, found.tokens)
    return render(
        Path(__file__).with_name("inspection.html"),
        title=f"Inside {found.name}",
        made_by=Markup(MADE_BY),
        found=found,
        facts=list_facts(found),
        data=_data(found),
        layers=None if layers is None else layer_rows(layers, found.tokens),
        figure=figure,
        note=None if layers is None else explain_mark(layers),
    )


def colourings(found: Measured) -> list[Colouring]:
    """Return all colourings, the first one shown; those of ℓ* have one scale."""
    out = []
    if found.layers is not None:
        high = max(float(found.layers.iterations.max()), 2.0)
        rows = found.layers.iterations.tolist()
        mean = found.layers.mean_iterations.tolist()
        if len(rows) > 1:
            out.append(Colouring("ℓ*, mean over layers", mean, 1, high, 1))
        for number, row in zip(found.layers.numbers, rows, strict=True):
            out.append(Colouring(f"ℓ*, layer {number}", row, 1, high, 0))
    subject = "answer" if found.answers else "token"
    for name, values in (("loss", found.loss), ("entropy", found.entropy)):
        high = max(float(values.nan_to_num().max()), 0.1)
        out.append(Colouring(f"{name} of the {subject}, nats", _plain(values), 0, high, 2))
    return out


def list_facts(found: Measured) -> list[tuple[str, str]]:
    """Return (name, value) of the model, the text and their sums."""
    count = f"{len(found.tokens) - found.has_start:,}"
    if found.text_bytes is not None:
        count += f", for {found.text_bytes:,} bytes of text"
    out = [("model", found.model), ("tokens", count)]
    if found.answers is not None:
        due = [answer for answer in found.answers if answer.right is not None]
        right = sum(answer.is_right is True for answer in due)
        out.append(("answers that are right", f"{right} of {len(due)}" if due else "none due"))
    if found.scored:
        nats = found.mean_loss
        subject = "an answer" if found.answers else "a token"
        out.append((f"mean loss of {subject}", f"{nats:.4f} nats, {nats / LN2:.4f} bits"))
        if found.answers is None:
            out.append(("perplexity", f"{found.perplexity:.2f}"))
    if found.bits_per_byte is not None:
        out.append(("bits per byte", f"{found.bits_per_byte:.4f}"))
    if isinstance(found.solver, dict):
        names = ("schedule", "token", "stopping")
        out.append(("solved", ", ".join(f"{name}: {found.solver[name]}" for name in names)))
    return out


def layer_rows(layers: Layers, tokens: list[Token]) -> list[list[str]]:
    """Return a table of the layers that are solved, its head first."""
    heads = ["layer", "ℓ*, mean", "ℓ*, most", "at token", "state's norm", "gate a", "decay λ"]
    rows = [[*heads, "bisected", "limited"]]
    is_marked = _ends_elsewhere(layers)
    for i, number in enumerate(layers.numbers):
        counts = layers.iterations[i]
        at = int(counts.argmax())
        suffix = "" if layers.converged[i] else ", not converged"
        gate = float(layers.gate[i].mean())
        rows.append(
            [
                str(number),
                f"{float(counts.double().mean()):.1f}{ELSEWHERE * is_marked[i]}",
                f"{int(counts.max())}{suffix}",
                f"{at}: {tokens[at].shown}",
                f"{float(layers.state_norm[i].mean()):.3g}",
                "–" if math.isnan(gate) else f"{gate:.2f}",
                f"{float(layers.decay[i].mean()):.3f}",
                f"{float(layers.bisected[i]):.1%}",
                f"{float(layers.limited[i]):.1%}",
            ]
        )
    return rows


def explain_mark(layers: Layers) -> str | None:
    """Return the sentence that explains the mark of ℓ*, or None if no layer has the mark."""
    return ELSEWHERE_NOTE if any(_ends_elsewhere(layers)) else None


def _ends_elsewhere(layers: Layers) -> list[bool]:
    """Return of each layer whether the paper's procedure ends in another solution."""
    return is_elsewhere({"mean": layers.numbers, "elsewhere": layers.elsewhere.tolist()})


def _plain(values: torch.Tensor) -> list[float | None]:
    """Return numbers, None where they are NaN."""
    return [None if math.isnan(value) else float(f"{value:.6g}") for value in values.tolist()]


def _data(found: Measured) -> dict:
    """Return the numbers that the page's script reads."""
    layers = []
    if found.layers is not None:
        for i, number in enumerate(found.layers.numbers):
            layer = {"number": number, "iterations": found.layers.iterations[i].tolist()}
            for name in ("state_norm", "gate", "decay"):
                layer[name] = _plain(getattr(found.layers, name)[i])
            layers.append(layer)
    return {
        "colourings": [colouring._asdict() for colouring in colourings(found)],
        "tokens": [token._asdict() for token in found.tokens],
        "loss": _plain(found.loss),
        "entropy": _plain(found.entropy),
        "guesses": [*found.guesses, found.following],
        "answers": found.answers is not None,
        "layers": layers,
    }


def _figure(layers: Layers, tokens: list[Token]) -> str:
    """Return ℓ*, norm, gate and decay over the tokens as a PNG in base64: a line per layer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = {
        "ℓ*": layers.iterations.float(),
        "state's norm ‖h_t‖": layers.state_norm,
        "gate a_t": layers.gate,
        "decay λ_t": layers.decay,
    }
    rows = {name: values for name, values in rows.items() if not values.isnan().all()}
    drawn, panels = pyplot.subplots(len(rows), 1, figsize=(8, 2.2 * len(rows)), sharex=True)
    colours = pyplot.cm.viridis(torch.linspace(0, 0.9, len(layers.numbers)).numpy())
    for axes, (name, values) in zip(panels, rows.items(), strict=True):
        axes.set_ylabel(name)
        for number, row, colour in zip(layers.numbers, values, colours, strict=True):
            axes.plot(row.tolist(), ".-", color=colour, label=f"layer {number}")
    panels[0].legend(fontsize="small", ncols=6)
    panels[-1].set_xlabel("token")
    if len(tokens) <= MAX_NAMED_TICKS:
        names = [token.shown.replace("$", r"\$") for token in tokens]
        panels[-1].set_xticks(range(len(names)), names, rotation=90, family="monospace")
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=120, bbox_inches="tight")
    pyplot.close(drawn)
    return base64.b64encode(buffer.getvalue()).decode()
