"""An inspection as one HTML page: the text coloured, each token's numbers, figures over time."""

from __future__ import annotations

import base64
import html
import importlib.util
import math
from pathlib import Path

import torch
from markupsafe import Markup

from lm.common.files import write_text
from lm.common.page import render
from lm.evaluation.inspection.result import Layers, Measured
from lm.evaluation.inspection.words import (
    LN2,
    Colouring,
    colourings,
    facts,
    layer_rows,
    notes,
    plain,
)

MADE_BY = "<!-- made by fprnn inspect -->"  # by which an earlier page is known
NAMED_TICKS = 40  # tokens up to which the figures' axis names them


def page(measured: Measured) -> str:
    """The whole page."""
    ways = colourings(measured)
    layers = measured.layers
    charts = None
    if layers is not None and all(map(importlib.util.find_spec, ("matplotlib", "pandas"))):
        charts = _charts(measured, layers)
    return render(
        Path(__file__).with_name("inspection.html"),
        title=f"Inside {measured.name}",
        made_by=Markup(MADE_BY),
        facts=facts(measured),
        tokens=[_shown(measured, t, ways[0]) for t in range(len(measured.tokens))],
        data=_data(measured, ways),
        layers=None if layers is None else layer_rows(layers, measured.tokens),
        charts=charts,
        notes=notes(measured),
    )


def frame(measured: Measured, height: int = 720) -> str:
    """The page within another one, apart from its style and names. height: in pixels."""
    return (
        f"<iframe srcdoc='{html.escape(page(measured), quote=True)}'"
        f" style='width:100%;height:{height}px;border:0'></iframe>"
    )


def _shown(measured: Measured, t: int, way: Colouring) -> dict:
    """A token as the text shows it, with the state that was decoded there."""
    token, value = measured.tokens[t], way.values[t]
    kinds, decoded = ["token"], None
    if t == 0 and measured.has_start:
        kinds.append("start")
    if measured.answers is not None:
        answer = measured.answers[t]
        kinds.append("answer")
        if answer.is_right is not None:
            kinds.append("right" if answer.is_right else "wrong")
        decoded = _decoded(answer)
    share = 0.0 if value is None else (value - way.low) / (way.high - way.low)
    return {
        "kinds": " ".join(kinds),
        "share": f"{share:.3f}",
        "pieces": token.pieces,
        "decoded": decoded,
        "ends_line": token.ends_line,
    }


def _decoded(answer) -> str:
    if answer.right is None:
        return f"({answer.predicted})"
    return answer.predicted if answer.is_right else f"✗ {answer.predicted} ({answer.right})"


def _data(measured: Measured, ways: list[Colouring]) -> dict:
    """The numbers that the script reads."""
    hardest = [-1 if value is None else value for value in ways[0].values]
    return {
        "colourings": [way._asdict() for way in ways],
        "tokens": [_of_token(measured, t) for t in range(len(measured.tokens))],
        "following": [[guess.shown, guess.probability] for guess in measured.following],
        "layers": [] if measured.layers is None else _of_layers(measured.layers),
        "answers": measured.answers is not None,
        "first": hardest.index(max(hardest)),
    }


def _of_token(measured: Measured, t: int) -> dict:
    token, loss = measured.tokens[t], float(measured.loss[t])
    rows = [["id", f"{token.id}, the token at {t}"]]
    if token.part_of:
        rows.append(["holds a part of", token.part_of])
    if measured.answers is not None:
        answer = measured.answers[t]
        rows.append(["decoded", answer.predicted])
        rows.append(["right", answer.right or "no answer is due here"])
    if not math.isnan(loss):
        rows.append(["probability", f"{100 * math.exp(-loss):.3g} %"])
        rows.append(["loss", f"{loss:.3f} nats, {loss / LN2:.3f} bits"])
    if not math.isnan(float(measured.entropy[t])):
        rows.append(["entropy", f"{float(measured.entropy[t]):.3f} nats"])
    if t == 0 and measured.has_start:
        rows.append(["", "put before the text, not scored"])
    return {
        "shown": token.shown,
        "facts": rows,
        "guesses": [[guess.shown, guess.probability] for guess in measured.guesses[t]],
    }


def _of_layers(layers: Layers) -> list[dict]:
    return [
        {
            "number": number,
            "iterations": layers.iterations[i].tolist(),
            "state_norm": _rounded(layers.state_norm[i]),
            "gate": _rounded(layers.gate[i]),
            "decay": _rounded(layers.decay[i]),
        }
        for i, number in enumerate(layers.numbers)
    ]


def _rounded(values: torch.Tensor) -> list[float | None]:
    return [None if value is None else float(f"{value:.5g}") for value in plain(values)]


def _charts(measured: Measured, layers: Layers) -> list[tuple[str, str]]:
    """Return figures over the tokens as PNG in base64: a curve for each layer."""
    import pandas as pd

    from lm.report.blocks import Curve, Figure
    from lm.report.draw import draw, to_png

    rows = {
        "ℓ*": layers.iterations.float(),
        "state's norm ‖h_t‖": layers.state_norm,
        "gate a_t": layers.gate,
        "decay λ_t": layers.decay,
    }
    index = pd.RangeIndex(len(measured.tokens), name="token")
    names = [token.shown for token in measured.tokens] if len(index) <= NAMED_TICKS else []
    charts = []
    for name, tensor in rows.items():
        if tensor.isnan().all():
            continue
        curves = [
            Curve(f"layer {number}", pd.Series(plain(row), index, dtype=float), i)
            for i, (number, row) in enumerate(zip(layers.numbers, tensor, strict=True))
        ]
        drawing = draw(Figure("", name, name, "", {"": curves}))
        if names:
            ticks = drawing.axes[0].set_xticks(index, names, rotation=90, family="monospace")
            for tick in ticks:
                tick.label1.set_parse_math(False)  # a $ is a $
        charts.append((name, base64.b64encode(to_png(drawing)).decode()))
    return charts


class Inspection(Measured):
    """What was measured, with the page that shows it."""

    def to_html(self, path: Path | str) -> Path:
        """Write the page, which needs nothing beside it.

        Raises:
            OutputError: it cannot be written.
        """
        write_text(path, page(self))
        return Path(path)

    def _repr_html_(self) -> str:
        """For notebooks: the page in a frame of its own, so that neither disturbs the other."""
        return frame(self)
