"""Do all schedules give a trained synthetic model the same answers, far beyond its training too?

    python -m benchmarks.agreement RUN ... [--lengths 16,64,256,1024] [--sequences 100]

Each schedule with `token: exact` at --tol, beside `sequential`, which has no tolerance: the share
of tokens whose most likely answer is the same, and evaluations a token. `right` is the share of
sequences that `sequential` answers right throughout: agreement counts where a model knows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from synthetic import tasks
from synthetic.build import load_run
from synthetic.evaluate import as_tensors

SCHEDULES = ("window:4", "window:16", "window:64", "parallel")


@torch.no_grad()
def answers(
    model: torch.nn.Module, ids: Tensor, schedule: str, tol: float
) -> tuple[Tensor, float, float]:
    """The most likely answers (b,l), evaluations a token, the share of tokens that failed."""
    with model.solving(token="exact", schedule=schedule, eval_tol=tol):
        output = model(input_ids=ids)
    report = output.fixed_point
    most = report.failed.double().mean(-1).amax().item()
    return output.logits.argmax(-1), report.evaluations.double().mean().item(), most


def rows_of(
    run: str, lengths: Iterable[int], sequences: int, tol: float
) -> Iterator[dict[str, Any]]:
    """One row a length and schedule."""
    _, task, model, _ = load_run(run)
    for length in lengths:
        batch = task.batch(0, "test", length, sequences, (length, length))
        ids, labels, _ = as_tensors(batch, "cpu")
        scored = labels != tasks.IGNORE
        tight, _, _ = answers(model, ids, "sequential", tol)
        right = ((tight == labels) | ~scored).all(-1).double().mean().item()
        for schedule in SCHEDULES:
            other, evaluations, failed = answers(model, ids, schedule, tol)
            same = (other == tight)[scored].double().mean().item()
            yield {
                "run": Path(run).name,
                "length": length,
                "schedule": schedule,
                "right": right,
                "same": same,
                "evaluations": round(evaluations, 2),
                "failed": failed,
            }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("run", nargs="+", metavar="RUN")
    p.add_argument("--lengths", default="16,64,256,1024")
    p.add_argument("--sequences", type=int, default=100)
    p.add_argument("--tol", type=float, default=0.01)
    p.add_argument("--json", metavar="FILE")
    args = p.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"tol {args.tol:g}, {args.sequences} sequences")
    print("| run | length | right | schedule | same answers | evaluations | failed |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for run in args.run:
        lengths = map(int, args.lengths.split(","))
        for row in rows_of(run, lengths, args.sequences, args.tol):
            rows.append(row)
            print(
                f"| {row['run']} | {row['length']} | {row['right']:.3f} | {row['schedule']} |"
                f" {row['same']:.4%} | {row['evaluations']:.1f} | {row['failed']:.2%} |",
                flush=True,
            )
    if args.json:
        Path(args.json).write_text(json.dumps({**vars(args), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
