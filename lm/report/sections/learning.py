"""What training lowers, and by which steps: losses, bits per byte, learning rate, norms."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lm.report.sections.blocks import Block, Chart, Curve, Notes, Section, Table, shown
from lm.report.sections.curves import BOTH, curve, of_values, per_run, traced_to, unknown
from lm.report.sections.read import Files
from lm.report.sections.series import column, having, number, running_mean, smoothing_span, within

EVENTS = 100  # rollbacks and skipped updates that are listed, the last ones


def loss(runs: Sequence[Files]) -> Section:
    """Training and validation, in nats a token and bits per byte."""
    blocks = _training(runs) + _validation(runs)
    blocks += per_run(runs, "Bits per byte", "bits", ("validation", "bits_per_byte"), axes=BOTH)
    blocks += _sources(runs)
    if any(having(files.records, "z_loss") for files in runs):
        blocks += per_run(runs, "z-loss", "added to the loss", ("z_loss",))
    return Section("Loss", blocks)


def _training(runs: Sequence[Files]) -> list[Block]:
    """Each record's loss; of more than a few records faint, with a running mean of it."""
    drawn, means = [], []
    for i, files in enumerate(runs):
        steps, values = column(files.records, "loss")
        if not steps:
            continue
        span = smoothing_span(len(steps))
        name = files.label if len(runs) > 1 else "training"
        style = "faint" if span > 1 else "line"
        drawn.append(of_values(i, files, name, steps, values, style))
        if span > 1:
            mean = running_mean(values, span)
            label = f"{name}, mean of the last {span + 1} records"
            means.append(of_values(i, files, label, steps, mean))
    if not drawn:
        return [Notes(["No training step is recorded yet."])]
    traced = traced_to("loss", BOTH) + unknown(drawn)
    return [Chart("Training loss", "nats per token", traced, drawn + means, BOTH)]


def _validation(runs: Sequence[Files]) -> list[Block]:
    """With the average of the weights beside it where there is one, and the n-gram baselines where
    all runs have the same."""
    drawn, averages = [], []
    for i, files in enumerate(runs):
        name = files.label if len(runs) > 1 else "validation"
        of = curve(i, files, ("validation", "loss"), name, "points")
        average = curve(i, files, ("ema", "loss"), f"{name}, average of weights", "dashed")
        drawn += [of] if of.steps else []
        averages += [average] if average.steps else []
    if not drawn:
        return [Notes(["No validation is recorded yet."])]
    levels = _baselines(runs)
    keys = ["validation.loss"] + ["ema.loss"] * bool(averages) + ["baselines"] * bool(levels)
    traced = traced_to("`, `".join(keys), BOTH) + unknown(drawn + averages)
    if levels:
        traced += "; the level of an n-gram model is the logarithm of its perplexity"
    title, unit = "Validation loss", "nats per token"
    return [Chart(title, unit, traced, drawn + averages, BOTH, levels)]


def _baselines(runs: Sequence[Files]) -> dict[str, float]:
    """The losses of the n-gram models; {} where two runs have different ones: of other text, or of
    another tokenizer."""
    found = []
    for files in runs:
        records = having(files.records, "baselines")
        of = records[-1]["baselines"] if records else {}
        known = {}
        for name, perplexity in of.items() if isinstance(of, dict) else ():
            if (number(perplexity) or 0) > 0:
                known[name] = math.log(perplexity)
        if known:
            found.append(known)
    return found[0] if found and all(of == found[0] for of in found) else {}


def _sources(runs: Sequence[Files]) -> list[Block]:
    """Of each run on a mixture: its validation loss and the epochs of each source."""
    blocks: list[Block] = []
    for files in runs:
        of = f"{files.label}: " if len(runs) > 1 else ""
        for title, unit, keys in (
            ("Validation loss of each source", "nats per token", ("validation", "sources")),
            ("Epochs of each source", "epochs", ("data_epochs",)),
            ("Share of each source", "of the targets", ("data_share",)),
        ):
            drawn = _by_name(files, keys, "loss" if keys[-1] == "sources" else None)
            if drawn:
                leaf = ".SOURCE.loss" if keys[-1] == "sources" else ".SOURCE"
                traced = traced_to(".".join(keys) + leaf) + unknown(drawn)
                blocks.append(Chart(of + title, unit, traced, drawn))
    return blocks


def _by_name(files: Files, keys: Sequence[str], leaf: str | None) -> list[Curve]:
    """A curve for each name of a mapping in the records."""
    mappings = [within(r, *keys) for r in having(files.records, *keys)]
    names = dict.fromkeys(name for of in mappings if isinstance(of, dict) for name in of)
    paths = {name: (*keys, name, *([leaf] if leaf else [])) for name in names}
    return [curve(i, files, path, name) for i, (name, path) in enumerate(paths.items())]


def optimisation(runs: Sequence[Files]) -> Section:
    """Learning rate, gradient norm; rollbacks and skipped updates."""
    blocks = per_run(runs, "Learning rate", "learning rate", ("lr",))
    blocks += per_run(runs, "Gradient norm", "before clipping", ("grad_norm",), logarithmic=True)
    return Section("Optimisation", [*blocks, *_events(runs)])


def _events(runs: Sequence[Files]) -> list[Block]:
    """Updates that were undone or left out, and ends of stages that waited."""
    rows = []
    for files in runs:
        for record in files.records:
            for kind in ("rollback", "skip"):
                of = record.get(kind)
                if isinstance(of, dict):
                    why = str(of.get("why", ""))
                    rows.append([files.label, shown(record["step"]), kind, why])
            look = record.get("curriculum")
            if isinstance(look, dict) and look.get("ended"):
                likely = shown(look.get("answers"))
                what = f"stage {look.get('stage')} is learned, answers {likely}"
                rows.append([files.label, shown(record["step"]), "curriculum", what])
    if not rows:
        return [Notes(["No update was undone (rollback) or left out (skip)."])]
    traced = "metrics.jsonl: `rollback`, `skip`, `curriculum`"
    if len(rows) > EVENTS:
        traced += f"; the last {EVENTS} of {len(rows):,}"
    return [
        Table([["run", "update", "what", "why"], *rows[-EVENTS:]], traced, "Events", words=True)
    ]
