"""Compare the answers and the costs of all schedules on a trained model.

    python -m benchmarks.agreement RUN ... [--lengths 16,64] [--sequences 8] [--text FILE]

RUN is a run of the synthetic suite, or a run or export of a language model, which reads --text
(default: the built-in corpus). Each schedule solves with `token: exact` at --tol and is compared
with `sequential`, which needs no tolerance; `paper` is the paper's procedure.

Columns:
    right        share of sequences (language model: tokens) that `sequential` answers correctly,
                 the same in all rows of a length
    same         share of tokens with the same most likely answer as `sequential`
    difference   largest difference of a logit from `sequential`
    loss         in nats
    evaluations  per token, mean over layers
    failed       share of unsolved tokens, maximum over layers
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contenders import PAPER_FIELDS
from lm.config.data import Data
from lm.config.yaml_text import load_tree
from lm.data.corpus.documents import encode_documents
from lm.data.sources.open import is_validation, iter_documents
from synthetic.build import load_run
from synthetic.evaluate import move_to_device
from synthetic.tasks import IGNORE


def is_synthetic(run: str) -> bool:
    """Return whether a folder is a run of the synthetic suite."""
    config = Path(run) / "config.yaml"
    return config.is_file() and "task" in load_tree(config)


def load_batches(run: str, args: argparse.Namespace) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """Load the model, and ids and labels of shape (sequences, length) for each of --lengths."""
    lengths = [int(length) for length in args.lengths.split(",")]
    if is_synthetic(run):
        _, task, model, _ = load_run(run)
        # The length is also the index of the batch, so that lengths have different sequences.
        batches = [task.batch(0, "test", n, args.sequences, (n, n)) for n in lengths]
        return model, [move_to_device(batch, "cpu")[:2] for batch in batches]
    from fprnn import load

    language_model = load(run)
    data = Data(source="text", path=args.text) if args.text else Data()
    texts = [t for t in iter_documents(data) if args.text or is_validation(t, data.val_fraction)]
    token_ids = torch.from_numpy(encode_documents(language_model.tokenizer, texts))
    batches = []
    for n in lengths:
        block_count = len(token_ids) // (n + 1)
        blocks = token_ids[: block_count * (n + 1)].view(-1, n + 1)
        # Spread the sequences over the text.
        sample = blocks[:: max(1, block_count // args.sequences)][: args.sequences]
        batches.append((sample[:, :-1], sample[:, 1:]))
    return language_model.model.float(), batches


class Result(NamedTuple):
    """Output of a model with a schedule."""

    logits: Tensor  # (sequences, length, vocabulary)
    evaluations: float  # per token, mean over layers
    failed: float  # share of unsolved tokens, maximum over layers


@torch.no_grad()
def run_schedule(model: Any, ids: Tensor, schedule: str, tol: float) -> Result:
    """Run the model on ids (sequences, length)."""
    exact_fields = {"token": "exact", "schedule": schedule, "stopping": "causal", "eval_tol": tol}
    with model.solving(**(PAPER_FIELDS if schedule == "paper" else exact_fields)):
        output = model(input_ids=ids.to(model.device))
    statistics = output.fixed_point
    failed = statistics.failed.double().mean(-1).amax().item()
    return Result(
        output.logits.float().cpu(), statistics.evaluations.double().mean().item(), failed
    )


def compare(run: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row for each length and schedule."""
    model, batches = load_batches(run, args)
    for ids, labels in batches:
        is_scored = labels != IGNORE
        reference = run_schedule(model, ids, "sequential", args.tol).logits
        is_right = reference.argmax(-1) == labels
        if is_synthetic(run):  # a sequence is right if all its scored tokens are
            is_right = (is_right | ~is_scored).all(-1)
        else:
            is_right = is_right[is_scored]
        for schedule in args.schedules.split(","):
            logits, evaluations, failed = run_schedule(model, ids, schedule, args.tol)
            is_same = (logits.argmax(-1) == reference.argmax(-1))[is_scored].double()
            yield {
                "run": Path(run).name,
                "length": ids.shape[1],
                "schedule": schedule,
                "right": round(is_right.double().mean().item(), 4),
                "same": round(is_same.mean().item(), 6),
                "difference": float(f"{(logits - reference)[is_scored].abs().max():.2e}"),
                "loss": round(F.cross_entropy(logits[is_scored], labels[is_scored]).item(), 5),
                "evaluations": round(evaluations, 2),
                "failed": round(failed, 6),
            }


def main() -> None:
    formatter = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("run", nargs="+", metavar="RUN")
    schedules = "sequential,window:4,window:16,window:64,parallel,paper"
    parser.add_argument("--schedules", default=schedules)
    parser.add_argument("--lengths", default="16,64,256,1024")
    parser.add_argument("--sequences", type=int, default=100)
    parser.add_argument("--text", metavar="FILE")
    parser.add_argument("--tol", type=float, default=0.01)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for run in args.run:
        for row in compare(run, args):
            print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            rows.append(row)
    if args.json:
        Path(args.json).write_text(json.dumps({**vars(args), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
