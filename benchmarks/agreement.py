"""Agreement of all schedules on a trained model, and their costs.

    python -m benchmarks.agreement RUN ... [--lengths 16,64] [--sequences 8] [--text FILE]

RUN is a run of the synthetic suite, or a run or export of a language model, which reads --text
(default: the built-in corpus). Each schedule solves with `token: exact` at --tol and is compared
with `sequential`, which needs no tolerance; `paper` is the paper's procedure.

Columns: `right`, the share of sequences whose answers are all right with `sequential` (for a
language model: of tokens that it predicts); `same`, the share of tokens with the same most likely
answer; `difference`, the largest difference of a logit; the loss in nats; evaluations per token,
mean over layers; `failed`, the share of unsolved tokens, maximum over layers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.config.data import Data
from lm.config.yaml_text import load_tree
from lm.data.corpus.documents import encode_documents
from lm.data.sources.open import is_validation, iter_documents
from synthetic.build import load_run
from synthetic.evaluate import as_tensors
from synthetic.tasks import IGNORE

PAPER = {"token": "iterate", "schedule": "parallel", "stopping": "paper"}


def is_synthetic(run: str) -> bool:
    """Return whether a folder is a run of the synthetic suite."""
    config = Path(run) / "config.yaml"
    return config.is_file() and "task" in load_tree(config)


def load_batches(run: str, args: argparse.Namespace) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """Return the model, and ids and labels (sequences, length) for each length."""
    lengths = [int(length) for length in args.lengths.split(",")]
    if is_synthetic(run):
        _, task, model, _ = load_run(run)
        batches = [task.batch(0, "test", n, args.sequences, (n, n)) for n in lengths]
        return model, [as_tensors(batch, "cpu")[:2] for batch in batches]
    from fprnn import load

    loaded = load(run)
    data = Data(source="text", path=args.text) if args.text else Data()
    texts = [t for t in iter_documents(data) if args.text or is_validation(t, data.val_fraction)]
    row = torch.from_numpy(encode_documents(loaded.tokenizer, texts))
    batches = []
    for n in lengths:
        blocks = row[: len(row) // (n + 1) * (n + 1)].view(-1, n + 1)
        chosen = blocks[:: max(1, len(blocks) // args.sequences)][: args.sequences]
        batches.append((chosen[:, :-1], chosen[:, 1:]))
    return loaded.model.float(), batches


@torch.no_grad()
def solve(model: Any, ids: Tensor, schedule: str, tol: float) -> tuple[Tensor, float, float]:
    """Return logits (b,l,v), evaluations per token, and the share of failed tokens."""
    fields = {"token": "exact", "schedule": schedule, "stopping": "causal", "eval_tol": tol}
    with model.solving(**(PAPER if schedule == "paper" else fields)):
        output = model(input_ids=ids.to(model.device))
    report = output.fixed_point
    failed = report.failed.double().mean(-1).amax().item()
    return output.logits.float().cpu(), report.evaluations.double().mean().item(), failed


def compare(run: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row for each length and schedule."""
    model, batches = load_batches(run, args)
    for ids, labels in batches:
        scored = labels != IGNORE
        reference, _, _ = solve(model, ids, "sequential", args.tol)
        right = reference.argmax(-1) == labels
        right = (right | ~scored).all(-1) if is_synthetic(run) else right[scored]
        for schedule in args.schedules.split(","):
            logits, evaluations, failed = solve(model, ids, schedule, args.tol)
            same = (logits.argmax(-1) == reference.argmax(-1))[scored].double()
            yield {
                "run": Path(run).name,
                "length": ids.shape[1],
                "schedule": schedule,
                "right": round(right.double().mean().item(), 4),
                "same": round(same.mean().item(), 6),
                "difference": float(f"{(logits - reference)[scored].abs().max():.2e}"),
                "loss": round(F.cross_entropy(logits[scored], labels[scored]).item(), 5),
                "evaluations": round(evaluations, 2),
                "failed": round(failed, 6),
            }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("run", nargs="+", metavar="RUN")
    p.add_argument("--schedules", default="sequential,window:4,window:16,window:64,parallel,paper")
    p.add_argument("--lengths", default="16,64,256,1024")
    p.add_argument("--sequences", type=int, default=100)
    p.add_argument("--text", metavar="FILE")
    p.add_argument("--tol", type=float, default=0.01)
    p.add_argument("--json", metavar="FILE")
    args = p.parse_args()
    torch.set_num_threads(1)
    rows = []
    for row in (row for run in args.run for row in compare(run, args)):
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        rows.append(row)
    if args.json:
        Path(args.json).write_text(json.dumps({**vars(args), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
