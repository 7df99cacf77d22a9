"""One summary of a run: what it reached, against what, how fast, and where everything lies."""

from __future__ import annotations

from pathlib import Path

from lm import plots
from lm.checkpoint import CheckpointError, newest, read_json, write_json
from lm.errors import require
from lm.metrics import read_metrics
from lm.outputs import check_folder
from lm.train import result


def summarise(run_dir: Path) -> dict:
    """Draw the figures, gather the numbers of a finished run and write `summary.json`.

    Raises:
        CheckpointError: there is no such run, it has not finished, or a file of it is damaged.
        PlotError: its metrics are gone. OutputError: nothing can be written there.
    """
    run_dir = Path(run_dir)
    if not (run_dir / "config.yaml").is_file():
        raise CheckpointError(f"{run_dir} holds no run (it has no config.yaml)")
    require("matplotlib", "fprnn report")
    check_folder(run_dir / "figures")
    summary = result(run_dir)
    solved = [r for r in read_metrics(run_dir) if "num_iters" in r]
    if solved:
        keys = ("num_iters", "work", "hit_max", "not_converged", "tokens_not_converged", "residual")
        if absent := [k for k in keys if k not in solved[-1]]:
            raise CheckpointError(
                f"{run_dir / 'metrics.jsonl'} is damaged: its last record of the solver has no"
                f" {', '.join(absent)}"
            )
        summary["fixed_point"] = {k: solved[-1][k] for k in keys}
    scores = run_dir / "hf" / "eval" / "results.json"
    if scores.exists():
        summary["evaluation"] = _evaluation(scores)
    paths = {
        "metrics": run_dir / "metrics.jsonl",
        "checkpoint": newest(run_dir),
        "HuggingFace export": run_dir / "hf",
        "evaluation": scores,
        "sample": run_dir / "sample.txt",
        "summary": run_dir / "summary.json",
    }
    for figure in plots.draw(run_dir):
        paths[f"figure: {figure.stem}"] = figure
    write_json(run_dir / "summary.json", summary)
    summary["paths"] = {k: str(p) for k, p in paths.items() if p is not None and p.exists()}
    return summary


def _evaluation(path: Path) -> dict:
    """What `fprnn eval` found: {task: {"metrics": {name: {"value", …}}, …}}.

    Raises:
        CheckpointError: the file holds something else.
    """
    tasks = read_json(path, ("tasks",))["tasks"]
    try:
        for task in tasks.values():
            for metric in task["metrics"].values():
                metric["value"]
    except (AttributeError, LookupError, TypeError):
        raise CheckpointError(
            f"{path} is damaged: its tasks must hold metrics, and each metric its value"
        ) from None
    return tasks


def table(summary: dict, title: str):
    """The summary as a rich table."""
    from rich.table import Table

    table = Table(title=title, show_header=False, title_justify="left")
    v, base = summary["validation"], summary.get("baselines", {})
    table.add_row("validation perplexity", f"{v['perplexity']:.2f} on {v['tokens']:,} tokens")
    for name, perplexity in base.items():
        table.add_row(f"  {name} baseline, same tokens", f"{perplexity:.2f}")
    if base:
        best = min(base.values())
        verdict = "below" if v["perplexity"] < best else "NOT below"
        table.add_row("  against the better baseline", f"{verdict}: ×{v['perplexity'] / best:.2f}")
    fixed = summary.get("fixed_point")
    if fixed:
        rows = zip(*(fixed["num_iters"][k] for k in ("mean", "median", "max")), fixed["work"],
                   fixed["tokens_not_converged"])  # fmt: skip
        for i, (mean, median, most, work, missed) in enumerate(rows):
            table.add_row(
                f"ℓ* layer {i}",
                f"mean {mean:.1f}, median {median:.0f}, max {most:.0f}; {work:.1f} evaluations a"
                f" token; tokens not converged {missed:.2%}",
            )
    table.add_row(
        "training",
        f"{summary['updates']:,} updates, {summary['tokens']:,} tokens in"
        f" {summary['training_seconds']:.0f} s: {summary['tokens_per_s']:,.0f} tokens/s",
    )
    for task, scores in summary.get("evaluation", {}).items():
        values = {k: m["value"] for k, m in scores["metrics"].items() if m["value"] is not None}
        shown = ", ".join(f"{k} {value:.3f}" for k, value in values.items())
        table.add_row(f"lm-eval {task}", shown)
    for name, path in summary["paths"].items():
        table.add_row(name, path)
    return table
