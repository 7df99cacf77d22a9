"""HTML page of an inspection: the coloured text, and the numbers of each token and layer."""

from __future__ import annotations

import html
import math
from pathlib import Path

import torch
from markupsafe import Markup

from lm.common.files import write_text
from lm.common.page import render
from lm.evaluation.inspection.result import LayerMeasurements, Measurements
from lm.evaluation.inspection.tokens import Token
from lm.runs.metrics import OTHER_SOLUTION_MARK, OTHER_SOLUTION_NOTE, find_other_solutions

MADE_BY = "<!-- made by fprnn inspect -->"  # by which the command recognizes its own pages
LN2 = math.log(2)


class Inspection(Measurements):
    """Measurements of a model on one sequence, with their HTML page."""

    def to_html(self, path: Path | str) -> Path:
        """Write the page, a single file, and return its path.

        Raises:
            OutputError: If it cannot be written.
        """
        write_text(path, render_page(self))
        return Path(path)

    def _repr_html_(self) -> str:
        """Return the page for a notebook, in a frame that separates their styles."""
        source = html.escape(render_page(self), quote=True)
        return f"<iframe srcdoc='{source}' style='width:100%;height:720px;border:0'></iframe>"


def render_page(inspection: Measurements) -> str:
    """Return the HTML of the page."""
    rows = []
    if inspection.layers is not None:
        rows = make_layer_rows(inspection.layers, inspection.tokens)
    return render(
        Path(__file__).with_name("inspection.html"),
        title=f"Inside {inspection.name}",
        made_by=Markup(MADE_BY),
        inspection=inspection,
        facts=list_facts(inspection),
        data=_make_script_data(inspection),
        layer_rows=rows,
        note=explain_mark(rows),
    )


def list_colourings(inspection: Measurements) -> list[dict]:
    """Return the measurements by which the page can colour the tokens.

    Returns:
        For each measurement its "name"; its "values", a number or None per token; "low" and "high",
        the numbers that have no colour and full colour (the same for all ℓ*); and "digits", the
        number of decimals that the page shows.
    """
    colourings = []
    if inspection.layers is not None:
        iterations = inspection.layers.iterations
        scale = {"low": 1, "high": max(float(iterations.max()), 2.0)}  # ℓ* is at least 1
        if len(iterations) > 1:
            mean = iterations.double().mean(0).tolist()
            name = "ℓ*, mean over layers"
            colourings.append({"name": name, "values": mean, **scale, "digits": 1})
        for index, row in zip(inspection.layers.indices, iterations.tolist(), strict=True):
            colourings.append({"name": f"ℓ*, layer {index}", "values": row, **scale, "digits": 0})
    subject = "answer" if inspection.answers else "token"
    for name, values in (("loss", inspection.loss), ("entropy", inspection.entropy)):
        scale = {"low": 0, "high": max(float(values.nan_to_num().max()), 0.1)}
        name = f"{name} of the {subject}, nats"
        colourings.append({"name": name, "values": _round_numbers(values), **scale, "digits": 2})
    return colourings


def list_facts(inspection: Measurements) -> list[tuple[str, str]]:
    """Return facts about the model, the sequence and its scores, as pairs of name and value."""
    start_count = 1 if inspection.has_start else 0
    tokens = f"{len(inspection.tokens) - start_count:,}"
    if inspection.text_bytes is not None:
        tokens += f", for {inspection.text_bytes:,} bytes of text"
    facts = [("model", inspection.model), ("tokens", tokens)]
    if inspection.answers is not None:
        gradings = [a.is_right for a in inspection.answers if a.is_right is not None]
        value = "no token needs an answer"
        if gradings:
            value = f"{sum(gradings)} of {len(gradings)}"
        facts.append(("right answers", value))
    if inspection.scored_count:
        loss = inspection.mean_loss
        subject = "answer" if inspection.answers else "token"
        facts.append((f"mean loss per {subject}", f"{loss:.4f} nats, {loss / LN2:.4f} bits"))
        if inspection.answers is None:
            facts.append(("perplexity", f"{inspection.perplexity:.2f}"))
    if inspection.bits_per_byte is not None:
        facts.append(("bits per byte", f"{inspection.bits_per_byte:.4f}"))
    if isinstance(inspection.solver, dict):
        names = ("schedule", "token", "stopping")
        facts.append(("solver", ", ".join(f"{name}: {inspection.solver[name]}" for name in names)))
    return facts


def make_layer_rows(layers: LayerMeasurements, tokens: list[Token]) -> list[list[str]]:
    """Return a table of the fixed-point layers; the first row contains the titles of the columns.

    Gates and decays are means over tokens; "at token" is the token with the maximum of ℓ*.
    """
    titles = ["layer", "mean ℓ*", "max ℓ*", "at token", "state norm", "gate a", "decay λ"]
    rows = [[*titles, "bisected", "grad_limited"]]
    # In records of a run, the share of other solutions has the key "elsewhere".
    has_other_solution = find_other_solutions({"elsewhere": layers.other_solution.tolist()})
    for i, index in enumerate(layers.indices):
        iterations = layers.iterations[i]
        mark = OTHER_SOLUTION_MARK if has_other_solution[i] else ""
        position = int(iterations.argmax())
        note = "" if layers.converged[i] else ", not converged"
        gate = float(layers.gate[i].mean())
        rows.append(
            [
                str(index),
                f"{float(iterations.double().mean()):.1f}{mark}",
                f"{int(iterations.max())}{note}",
                f"{position}: {tokens[position].label}",
                f"{float(layers.state_norm[i].mean()):.3g}",
                "–" if math.isnan(gate) else f"{gate:.2f}",
                f"{float(layers.decay[i].mean()):.3f}",
                f"{float(layers.bisected[i]):.1%}",
                f"{float(layers.grad_limited[i]):.1%}",
            ]
        )
    return rows


def explain_mark(rows: list[list[str]]) -> str | None:
    """Return the sentence that explains the mark after a mean ℓ*, None if no row has the mark."""
    has_mark = any(OTHER_SOLUTION_MARK in mean_iterations for _, mean_iterations, *_ in rows)
    return OTHER_SOLUTION_NOTE if has_mark else None


def _round_numbers(values: torch.Tensor) -> list[float | None]:
    """Return numbers rounded to 6 significant digits, with None for NaN."""
    return [None if math.isnan(value) else float(f"{value:.6g}") for value in values.tolist()]


def _make_script_data(inspection: Measurements) -> dict:
    """Return the data that the page's script reads as JSON."""
    layers = []
    if inspection.layers is not None:
        for i, index in enumerate(inspection.layers.indices):
            layer = {"index": index, "iterations": inspection.layers.iterations[i].tolist()}
            for name in ("state_norm", "gate", "decay"):
                layer[name] = _round_numbers(getattr(inspection.layers, name)[i])
            layers.append(layer)
    return {
        "colourings": list_colourings(inspection),
        "tokens": [token._asdict() for token in inspection.tokens],
        "loss": _round_numbers(inspection.loss),
        "entropy": _round_numbers(inspection.entropy),
        "guesses": [*inspection.guesses, inspection.next_guesses],
        "has_answers": inspection.answers is not None,
        "layers": layers,
    }
