"""An inspection as one HTML page: the text coloured, the numbers of each token and layer."""

from __future__ import annotations

import html
import math
from pathlib import Path

import torch
from markupsafe import Markup

from lm.common.files import write_text
from lm.common.page import render
from lm.evaluation.inspection.result import Layers, Measurements
from lm.evaluation.inspection.tokens import Token
from lm.runs.metrics import OTHER_SOLUTION_MARK, OTHER_SOLUTION_NOTE, has_other_solution

MADE_BY = "<!-- made by fprnn inspect -->"  # marks a page that this command may replace
LN2 = math.log(2)


class Inspection(Measurements):
    """Results of reading a text or word, with the page that shows them."""

    def to_html(self, path: Path | str) -> Path:
        """Write a page that needs no other file.

        Raises:
            OutputError: It cannot be written.
        """
        write_text(path, render_page(self))
        return Path(path)

    def _repr_html_(self) -> str:
        """Return the page for a notebook, in a frame that keeps their styles apart."""
        source = html.escape(render_page(self), quote=True)
        return f"<iframe srcdoc='{source}' style='width:100%;height:720px;border:0'></iframe>"


def render_page(found: Measurements) -> str:
    """Return the whole page."""
    rows = None if found.layers is None else layer_rows(found.layers, found.tokens)
    return render(
        Path(__file__).with_name("inspection.html"),
        title=f"Inside {found.name}",
        made_by=Markup(MADE_BY),
        found=found,
        facts=list_facts(found),
        data=_data(found),
        layers=rows,
        note=explain_mark(rows or []),
    )


def colourings(found: Measurements) -> list[dict]:
    """Return all colourings, the first one shown; those of ℓ* have one scale.

    Returns:
        For each its name, a number of each token (None: there is none), the numbers without and
        with the full colour ("low", "high"), and the digits to show.
    """
    out = []
    if found.layers is not None:
        scale = {"low": 1, "high": max(float(found.layers.iterations.max()), 2.0)}
        rows = found.layers.iterations
        if len(rows) > 1:
            mean = rows.double().mean(0).tolist()
            out.append({"name": "ℓ*, mean over layers", "values": mean, **scale, "digits": 1})
        for number, row in zip(found.layers.numbers, rows.tolist(), strict=True):
            out.append({"name": f"ℓ*, layer {number}", "values": row, **scale, "digits": 0})
    subject = "answer" if found.answers else "token"
    for name, values in (("loss", found.loss), ("entropy", found.entropy)):
        scale = {"low": 0, "high": max(float(values.nan_to_num().max()), 0.1)}
        name = f"{name} of the {subject}, nats"
        out.append({"name": name, "values": _plain(values), **scale, "digits": 2})
    return out


def list_facts(found: Measurements) -> list[tuple[str, str]]:
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
    rows = [[*heads, "bisected", "grad_limited"]]
    is_marked = has_other_solution(
        {"mean": layers.numbers, "elsewhere": layers.other_solution.tolist()}
    )
    for i, number in enumerate(layers.numbers):
        counts = layers.iterations[i]
        at = int(counts.argmax())
        suffix = "" if layers.converged[i] else ", not converged"
        gate = float(layers.gate[i].mean())
        rows.append(
            [
                str(number),
                f"{float(counts.double().mean()):.1f}{OTHER_SOLUTION_MARK * is_marked[i]}",
                f"{int(counts.max())}{suffix}",
                f"{at}: {tokens[at].shown}",
                f"{float(layers.state_norm[i].mean()):.3g}",
                "–" if math.isnan(gate) else f"{gate:.2f}",
                f"{float(layers.decay[i].mean()):.3f}",
                f"{float(layers.bisected[i]):.1%}",
                f"{float(layers.grad_limited[i]):.1%}",
            ]
        )
    return rows


def explain_mark(rows: list[list[str]]) -> str | None:
    """Return the sentence that explains the mark of ℓ*, or None if no row has the mark."""
    return OTHER_SOLUTION_NOTE if any(OTHER_SOLUTION_MARK in row[1] for row in rows) else None


def _plain(values: torch.Tensor) -> list[float | None]:
    """Return numbers, None where they are NaN."""
    return [None if math.isnan(value) else float(f"{value:.6g}") for value in values.tolist()]


def _data(found: Measurements) -> dict:
    """Return the numbers that the page's script reads."""
    layers = []
    if found.layers is not None:
        for i, number in enumerate(found.layers.numbers):
            layer = {"number": number, "iterations": found.layers.iterations[i].tolist()}
            for name in ("state_norm", "gate", "decay"):
                layer[name] = _plain(getattr(found.layers, name)[i])
            layers.append(layer)
    return {
        "colourings": colourings(found),
        "tokens": [token._asdict() for token in found.tokens],
        "loss": _plain(found.loss),
        "entropy": _plain(found.entropy),
        "guesses": [*found.guesses, found.following],
        "answers": found.answers is not None,
        "layers": layers,
    }
