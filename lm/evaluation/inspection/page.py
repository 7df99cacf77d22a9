"""An inspection as one HTML page: the text coloured, each token's numbers, figures over time."""

from __future__ import annotations

import html
import importlib.util
import json
import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from lm.common import page as shell
from lm.common.files import write_text
from lm.evaluation.inspection.result import Layers, Measured
from lm.evaluation.inspection.tokens import Token
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

STYLE = """
:root { --hot: #fbbf24; --right: #15803d; --wrong: #b91c1c; }
@media (prefers-color-scheme: dark) {
  :root { --hot: #b45309; --right: #4ade80; --wrong: #f87171; }
}
.facts { display: flex; flex-wrap: wrap; gap: .2rem 1.6rem; margin: 0; }
.facts div { display: flex; gap: .5rem; }
.facts dt { opacity: .7; }
.facts dd { margin: 0; }
.choose { display: flex; flex-wrap: wrap; gap: .6rem 1.2rem; align-items: center;
  margin: 1.2rem 0 .6rem; }
select { font: inherit; padding: .2rem .4rem; max-width: 100%; }
.scale { display: flex; gap: .5rem; align-items: center; font-variant-numeric: tabular-nums; }
.scale b { display: inline-block; width: 9rem; height: .9rem; border-radius: 3px;
  border: 1px solid var(--line); background: linear-gradient(to right, transparent, var(--hot)); }
.text { font: 15px/1.9 ui-monospace, monospace; border: 1px solid var(--line);
  border-radius: 6px; padding: .8rem; overflow-wrap: anywhere; }
.token { --v: 0; background: color-mix(in srgb, var(--hot) calc(var(--v) * 100%), transparent);
  border-radius: 3px; padding: .15em 0; margin: 0 1px; box-shadow: 0 0 0 .5px var(--line);
  cursor: pointer; white-space: pre-wrap; unicode-bidi: isolate; }
.token.start { opacity: .6; }
.token.blank { background: none; }
.token i { font-style: normal; opacity: .45; }
.token.chosen { outline: 2px solid var(--link); outline-offset: 1px; }
.token.answer { display: inline-flex; flex-direction: column; align-items: center;
  line-height: 1.35; padding: .15em .45em; margin: 0 3px 8px; vertical-align: top;
  border-bottom: 3px solid var(--line); }
.token small { font-size: 12px; }
.token.right { border-bottom-color: var(--right); }
.token.wrong { border-bottom-color: var(--wrong); }
#detail { position: sticky; bottom: 0; display: flex; flex-wrap: wrap; gap: .6rem 2.4rem;
  margin-top: .6rem; background: Canvas; border: 1px solid var(--line); border-radius: 6px;
  padding: .6rem .8rem; max-height: 48vh; overflow: auto; font-size: 14px; }
#detail h3 { margin: 0 0 .3rem; font: 600 15px/1.4 ui-monospace, monospace;
  overflow-wrap: anywhere; }
#detail td, #detail th { padding: .05rem .9rem .05rem 0; border: 0; text-align: left; }
#detail caption { text-align: left; white-space: nowrap; }
#detail .bar { display: inline-block; height: .7em; background: var(--hot);
  border-radius: 2px; }
"""

SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent);
const spans = [...document.querySelectorAll(".token")];
const choice = document.getElementById("choice"), detail = document.getElementById("detail");
function colour() {
  const by = data.colourings[choice.value];
  spans.forEach((span, t) => {
    const value = by.values[t];
    span.classList.toggle("blank", value === null);
    const share = value === null ? 0 : (value - by.low) / (by.high - by.low);
    span.style.setProperty("--v", Math.min(1, Math.max(0, share)).toFixed(3));
  });
  document.getElementById("low").textContent = by.low.toFixed(by.digits);
  document.getElementById("high").textContent = by.high.toFixed(by.digits);
}
function made(name, text, parent) {
  const element = document.createElement(name);
  element.textContent = text;
  parent.append(element);
  return element;
}
function rows(table, cells, head) {
  const row = table.insertRow();
  cells.forEach(cell => made(head ? "th" : "td", cell, row));
  return row;
}
function form(value, digits) { return value === null ? "–" : value.toFixed(digits); }
function show(t) {
  spans.forEach((span, i) => span.classList.toggle("chosen", i === t));
  const token = data.tokens[t];
  detail.replaceChildren();
  const first = made("div", "", detail);
  made("h3", token.shown, first);
  const facts = made("table", "", first);
  token.facts.forEach(cells => rows(facts, cells));
  guesses("predicted in its place", token.guesses);
  if (t === spans.length - 1) guesses("predicted to come next", data.following);
  if (!data.layers.length) return;
  const last = made("div", "", detail), table = made("table", "", last);
  rows(table, ["layer", "ℓ*", "‖h‖", "a", "λ"], true);
  for (const layer of data.layers) {
    rows(table, [layer.number, layer.iterations[t], layer.state_norm[t].toPrecision(3),
      form(layer.gate[t], 3), form(layer.decay[t], 3)]);
  }
}
function guesses(title, list) {
  if (!list.length) return;
  const table = made("table", "", made("div", "", detail));
  made("caption", data.answers ? "likeliest answers" : title, table);
  for (const [shown, probability] of list) {
    const cell = rows(table, [shown, (100 * probability).toFixed(1) + " %", ""]).cells[2];
    const bar = made("span", "", cell);
    bar.className = "bar";
    bar.style.width = (6 * probability).toFixed(2) + "rem";
  }
}
spans.forEach((span, t) => {
  for (const event of ["mouseenter", "focus", "click"]) span.addEventListener(event, () => show(t));
});
document.querySelector(".text").addEventListener("keydown", event => {
  const step = {ArrowRight: 1, ArrowLeft: -1}[event.key], t = spans.indexOf(document.activeElement);
  if (step && spans[t + step]) { spans[t + step].focus(); event.preventDefault(); }
});
choice.addEventListener("change", colour);
colour();
show(data.first);
"""


def page(found: Measured) -> str:
    """The whole page."""
    ways = colourings(found)
    parts = [MADE_BY, _facts(found), _chooser(ways), "<section>", _text(found, ways[0])]
    parts += ["<aside id='detail' aria-live='polite'></aside></section>", _data(found, ways)]
    if found.layers is not None:
        parts += [shell.heading("Layers"), shell.table(layer_rows(found.layers, found.tokens))]
        parts.append(shell.heading("Over time"))
        if importlib.util.find_spec("matplotlib") is None:
            parts.append("<p>The figures need matplotlib: pip install 'fprnn[train]'</p>")
        else:
            parts.append(shell.figure(draw(found.layers, found.tokens)))
    parts += [shell.heading("What is shown"), shell.bullets(notes(found))]
    return shell.page(f"Inside {found.name}", parts, STYLE, SCRIPT)


def frame(found: Measured, height: int = 720) -> str:
    """The page within another one, apart from its style and names. height: in pixels."""
    return (
        f"<iframe srcdoc='{html.escape(page(found), quote=True)}'"
        f" style='width:100%;height:{height}px;border:0'></iframe>"
    )


def _facts(found: Measured) -> str:
    pairs = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
        for name, value in facts(found)
    )
    return f"<dl class='facts'>{pairs}</dl>"


def _chooser(ways: list[Colouring]) -> str:
    options = "".join(
        f"<option value='{i}'>{html.escape(way.name)}</option>" for i, way in enumerate(ways)
    )
    scale = "<span class='scale'><span id='low'></span><b></b><span id='high'></span></span>"
    return (
        f"<div class='choose'><label>Coloured by <select id='choice'>{options}</select></label>"
        f"{scale}<span>Point at a token, or tap it.</span></div>"
    )


def _text(found: Measured, way: Colouring) -> str:
    spans = []
    for t, token in enumerate(found.tokens):
        kinds = ["token"]
        inside = _pieces(token)
        if t == 0 and found.has_start:
            kinds.append("start")
        if found.answers is not None:
            answer = found.answers[t]
            kinds.append("answer")
            if answer.is_right is not None:
                kinds.append("right" if answer.is_right else "wrong")
            below = html.escape(_decoded(answer))
            inside = f"<span>{inside}</span><small>{below}</small>"
        value = way.values[t]
        share = 0.0 if value is None else (value - way.low) / (way.high - way.low)
        spans.append(
            f"<span class='{' '.join(kinds)}' tabindex='0' style='--v:{share:.3f}'>{inside}</span>"
            + ("<br>" if token.ends_line else "")
        )
    return f"<div class='text'>{''.join(spans)}</div>"


def _decoded(answer) -> str:
    if answer.right is None:
        return f"({answer.predicted})"
    return answer.predicted if answer.is_right else f"✗ {answer.predicted} ({answer.right})"


def _pieces(token: Token) -> str:
    return "".join(
        f"<i>{html.escape(piece.text)}</i>" if piece.is_mark else html.escape(piece.text)
        for piece in token.pieces
    )


def _data(found: Measured, ways: list[Colouring]) -> str:
    """The numbers that the script reads."""
    hardest = [-1 if value is None else value for value in ways[0].values]
    value = {
        "colourings": [way._asdict() for way in ways],
        "tokens": [_of_token(found, t) for t in range(len(found.tokens))],
        "following": [[guess.shown, guess.probability] for guess in found.following],
        "layers": [] if found.layers is None else _of_layers(found.layers),
        "answers": found.answers is not None,
        "first": hardest.index(max(hardest)),
    }
    text = json.dumps(value, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return f"<script type='application/json' id='data'>{text}</script>"


def _of_token(found: Measured, t: int) -> dict:
    token, loss = found.tokens[t], float(found.loss[t])
    rows = [["id", f"{token.id}, the token at {t}"]]
    if token.part_of:
        rows.append(["holds a part of", token.part_of])
    if found.answers is not None:
        answer = found.answers[t]
        rows.append(["decoded", answer.predicted])
        rows.append(["right", answer.right or "no answer is due here"])
    if not math.isnan(loss):
        rows.append(["probability", f"{100 * math.exp(-loss):.3g} %"])
        rows.append(["loss", f"{loss:.3f} nats, {loss / LN2:.3f} bits"])
    if not math.isnan(float(found.entropy[t])):
        rows.append(["entropy", f"{float(found.entropy[t]):.3f} nats"])
    if t == 0 and found.has_start:
        rows.append(["", "put before the text, not scored"])
    return {
        "shown": token.shown,
        "facts": rows,
        "guesses": [[guess.shown, guess.probability] for guess in found.guesses[t]],
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


def draw(layers: Layers, tokens: Sequence[Token]) -> str:
    """ℓ*, the state's norm, the mixer's gate and the decay over time, one line a layer, as SVG."""
    rows = [
        ("ℓ*", layers.iterations.float()),
        ("state's norm ‖h_t‖", layers.state_norm),
        ("gate a_t", layers.gate),
        ("decay λ_t", layers.decay),
    ]
    rows = [(name, values) for name, values in rows if not values.isnan().all()]
    with shell.ink(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the page's fonts have what matplotlib's lack
        return shell.svg(_drawn(layers, tokens, rows))


def _drawn(layers: Layers, tokens: Sequence[Token], rows: list[tuple[str, torch.Tensor]]):
    import matplotlib.pyplot as plt

    numbers, length = layers.numbers, len(tokens)
    colours = plt.get_cmap("tab10" if len(numbers) <= 10 else "viridis")
    figure, axes = plt.subplots(
        len(rows), 1, figsize=(11, 2 * len(rows)), layout="constrained", sharex=True
    )
    style = {"marker": "o", "ms": 3} if length <= NAMED_TICKS else {}
    for axis, (name, values) in zip(axes, rows, strict=True):
        for i, number in enumerate(numbers):
            colour = colours(i if len(numbers) <= 10 else i / (len(numbers) - 1))
            axis.plot(values[i].tolist(), lw=1.3, color=colour, label=f"layer {number}", **style)
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylim(bottom=0)
    axes[-1].set_xlabel("token")
    if length <= NAMED_TICKS:
        shown = [token.shown for token in tokens]
        labels = axes[-1].set_xticks(range(length), shown, rotation=90, family="monospace")
        for label in labels:
            label.label1.set_parse_math(False)  # a $ is a $
    if len(numbers) > 1:
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
    return figure


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
