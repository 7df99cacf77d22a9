"""What perplexity a budget of iterations buys, where a solve iterates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lm import agree
from lm.agree import TOL, AgreementError, Report, compare, text_blocks, way
from lm.errors import require
from lm.generate import PAPER
from lm.outputs import check_folder, write_json, writing

if TYPE_CHECKING:
    from rich.table import Table

SCHEDULES = (PAPER, "window:16", "parallel")
ITERATIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def budget(
    checkpoint: Path | str,
    text: Path | str | None = None,
    *,
    iterations: Sequence[int] = ITERATIONS,
    schedules: Sequence[str] = SCHEDULES,
    tol: float = TOL,
    sequences: int = 8,
    length: int = 256,
    batch_size: int = 4,
    seed: int = 0,
    out: Path | None = None,
    trust: bool = False,
    progress: Report | None = None,
) -> dict:
    """Perplexity against the iterations ℓmax that a token may have (eval_max_iters).

    Writes DIR/eval/budget.json and DIR/figures/budget.png, DIR = `out`, by default the checkpoint.

    Args:
        iterations: the values of ℓmax; solved in ascending order. The rest as of `agree`.
    Returns:
        {"tight": {…}, "schedules": {name: [a row of `agree` for each ℓmax, with "max_iters"]}, …}.
    Raises:
        AgreementError, GenerationError, DataError, OutputError: as `agree`; an ℓmax below 1, or
            `sequential`, which iterates nothing.
    """
    agree.check(schedules, sequences, length, batch_size, seed, tol)
    if not iterations or min(iterations) < 1:
        shown = ",".join(map(str, iterations)) or "empty"
        raise AgreementError(f"iterations is {shown}: numbers of iterations, each at least 1")
    agree.check_checkpoint(checkpoint)
    require("matplotlib", "fprnn budget")
    folder = Path(out) if out else Path(checkpoint)
    for below in ("eval", "figures"):
        check_folder(folder / below)
    model, tokenizer = agree.load(checkpoint, trust)
    ways = {name: way(model, name, tol) for name in schedules}
    for name, fields in ways.items():
        with model.solving(**fields):
            solver = model.solver()
            assert isinstance(solver, dict)  # agree.load has refused what solves nothing
            if solver["max_iters"] is None:
                raise AgreementError(f"{name} iterates nothing: there is no budget to give it")
    blocks = text_blocks(model, tokenizer, text, sequences, length, seed, progress)
    counts = sorted(set(iterations))
    each = {
        f"{name}, ℓmax {count}": fields | {"eval_max_iters": count}
        for name, fields in ways.items()
        for count in counts
    }
    rows = compare(model, blocks, each, batch_size, progress)
    results = agree.header(checkpoint, text, model, blocks, batch_size, seed)
    results |= agree.add_bits_per_byte(rows, blocks, tokenizer)
    results |= {"tight": rows["tight"], "schedules": {}}
    for name in ways:
        found = [{"max_iters": count} | rows[f"{name}, ℓmax {count}"] for count in counts]
        results["schedules"][name] = found
    write_json(folder / "eval" / "budget.json", results)
    draw(results, folder / "figures" / "budget.png")
    return results


def table(results: dict) -> Table:
    """What `budget` returned, as a table: perplexity and evaluations, a row for each ℓmax."""
    from rich.table import Table

    caption = "ppl: perplexity; eval.: evaluations a token, mean over layers."
    caption += f"\ntight (token exact, sequential): ppl {results['tight']['perplexity']:.2f}"
    caption += agree.bits_of_tight(results)
    out = Table("ℓmax", title=agree.title(results), caption=caption, caption_justify="left")
    for name in results["schedules"]:
        out.add_column(f"{name}\nppl", justify="right")
        out.add_column("\neval.", justify="right")
    for rows in zip(*results["schedules"].values()):
        cells = (c for r in rows for c in (f"{r['perplexity']:.2f}", f"{r['evaluations']:.1f}"))
        out.add_row(str(rows[0]["max_iters"]), *cells)
    return out


def draw(results: dict, path: Path) -> Path:
    """Draw what `budget` returned to the PNG `path`: perplexity against ℓmax, and against the
    evaluations that it took."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.4), sharey=True, layout="constrained")
    curves = results["schedules"]
    panels = {
        "max_iters": "ℓmax: iterations a token may have",
        "evaluations": "evaluations a token, mean over layers",
    }
    for axis, (key, label) in zip(axes, panels.items()):
        # Each thinner than the one before, so that curves on top of each other are all seen.
        for i, ((name, rows), marker) in enumerate(zip(curves.items(), "osD^vPX" * 9)):
            x, y = [r[key] for r in rows], [r["perplexity"] for r in rows]
            share = i / max(1, len(curves) - 1)
            axis.plot(x, y, marker=marker, ms=8 - 5 * share, lw=3.4 - 2.4 * share, label=name)
        axis.axhline(results["tight"]["perplexity"], color="gray", ls="--", lw=1.2, label="tight")
        axis.set(xlabel=label, xscale="log", yscale="log")
        for one in (axis.xaxis, axis.yaxis):
            one.set_major_locator(LogLocator(subs=(1, 2, 5)))
            one.set_major_formatter(StrMethodFormatter("{x:g}"))
            one.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    values = [r["perplexity"] for rows in curves.values() for r in rows]
    if max(values) < 3 * min(values):  # a logarithmic axis would have one label, or none
        axes[0].set_yscale("linear")
    axes[0].set_ylabel("perplexity per token")
    axes[0].legend(fontsize="small")
    figure.suptitle(f"What iterations buy: {agree.title(results)}", fontsize="medium")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=140)
    plt.close(figure)
    return path
