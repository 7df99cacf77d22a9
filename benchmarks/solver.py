"""Synthetic runs trained under one schedule, solved under each: accuracy, agreement, work, time.

python benchmarks/solver.py runs/small/schedules/* [--lengths 16,32,64,128 --sequences 500]

`agree` is the share of tokens whose answer is that of the tight solution (token by token at 1e-6).
Work is evaluations of the iteration per token. The `paper` row is the paper's solver as it is; time
is against it, all in one run. (Of a language model: `fprnn agree`.)
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from rich.console import Console
from rich.table import Table

from synthetic.build import load_run
from synthetic.evaluate import as_tensors

# name → (schedule, stopping)
SCHEDULES = {
    "paper": ("parallel", "paper"),
    "parallel": ("parallel", "causal"),
    "window:8": ("window:8", "causal"),
    "window:4": ("window:4", "causal"),
    "sequential": ("sequential", "causal"),
    "auto": ("auto", "causal"),
}
TIGHT = ("sequential", "causal", 1e-6)


@torch.no_grad()
def solve(model, ids, schedule, stopping, tol, size):
    """Answers (b,l), work and iterations a sequence, share of tokens not converged, seconds."""
    c = model.config
    c.schedule, c.stopping, c.eval_tol = schedule, stopping, tol
    began = time.perf_counter()
    parts = [model(part) for part in ids.split(size)]
    seconds = time.perf_counter() - began
    stats = [part.fixed_point for part in parts]

    def mean(name):
        return torch.cat([getattr(s, name) for s in stats], 1).double().mean().item()

    answers = torch.cat([part.logits.argmax(-1) for part in parts])
    return answers, mean("work"), mean("num_iters"), mean("unconverged"), seconds


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("runs", nargs="+", metavar="RUN")
    p.add_argument("--lengths", default="16,32,64,128")
    p.add_argument("--sequences", type=int, default=500)
    p.add_argument("--batch-size", type=int, default=500)
    p.add_argument("--tol", default="auto", help="of the causal schedules (default: the model's)")
    p.add_argument("--paper-tol", type=float, default=0.1, help="of the paper's solver")
    p.add_argument("--schedules", default=",".join(SCHEDULES))
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--json", help="also write the numbers here")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    tol = a.tol if a.tol == "auto" else float(a.tol)
    lengths, names = [int(n) for n in a.lengths.split(",")], a.schedules.split(",")
    rows, total = [], len(a.runs) * len(lengths)
    for run in a.runs:
        cfg, task, model, _ = load_run(Path(run))
        trained = cfg.model.schedule if cfg.model.stopping == "causal" else "paper"
        for name in ("agreement_reg", "jacobian_reg"):
            if value := getattr(cfg.model, name):
                trained += f", {name} {value:g}"
        trained += f", ℓmax {cfg.train.max_iters}" if cfg.train.max_iters != "config" else ""
        for length in lengths:
            batch = task.batch(0, "test", 0, a.sequences, (length, length))
            ids, labels, _ = as_tensors(batch, torch.device("cpu"))
            tight = solve(model, ids, *TIGHT, a.batch_size)[0]
            for name in names:
                solver_tol = a.paper_tol if name == "paper" else tol
                answers, work, iters, missed, seconds = solve(
                    model, ids, *SCHEDULES[name], solver_tol, a.batch_size
                )
                right = answers == labels
                rows.append({
                    "trained": trained, "length": length, "schedule": name,
                    "token_accuracy": right.double().mean().item(),
                    "sequence_accuracy": right.all(1).double().mean().item(),
                    "agree": (answers == tight).double().mean().item(), "work": work,
                    "num_iters": iters, "unconverged": missed, "seconds": seconds,
                })  # fmt: skip
            print(f"{len(rows) // len(names)}/{total}", file=sys.stderr)
    table = Table(title=f"{a.sequences} sequences, {a.threads} thread(s), tol {a.tol}")
    for head in ("trained", "length", "solved", "token", "sequence", "agree", "ℓ*", "work", "less",
                 "time", "faster"):  # fmt: skip
        table.add_column(head, justify="left" if head in ("trained", "solved") else "right")
    for row in rows:
        paper = next(
            (r for r in rows if r["schedule"] == "paper"
             and (r["trained"], r["length"]) == (row["trained"], row["length"])), row,
        )  # fmt: skip
        table.add_row(
            row["trained"], f"{row['length']}", row["schedule"], f"{row['token_accuracy']:.4f}",
            f"{row['sequence_accuracy']:.3f}", f"{row['agree']:.4f}", f"{row['num_iters']:.0f}",
            f"{row['work']:.1f}", f"{paper['work'] / row['work']:.1f}×", f"{row['seconds']:.2f} s",
            f"{paper['seconds'] / row['seconds']:.1f}×",
            end_section=row["schedule"] == names[-1],
        )  # fmt: skip
    Console(width=110).print(table)
    if a.json:
        Path(a.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
