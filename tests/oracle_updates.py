"""Updates of an engine beside plain autograd: `python -m tests.oracle_updates`, on one rank or two.

Prints the loss and the gradient norm of an update for several models and ZeRO stages.
"""

import copy
import json

import torch

from lm.config.load import load
from lm.training import engine as ds
from lm.training.build import build_model

SETTINGS = ["train.global_batch_size=4", "train.micro_batch_size=1", "train.grad_accum_steps=null",
            "optim.grad_clip=0.3", "model.headdim=8"]  # fmt: skip
DELTA = "model.layers=gated_deltanet gated_deltaproduct"
CASES = [("fprnn", 0), ("fprnn", 1), ("fprnn", 2), ("fprnn", 3), ("transformer", 1),
         ("fprnn", 3, DELTA)]  # fmt: skip


def micro_batches(ranks):
    """All four sequences, with 9, 5, 12 and 1 targets, and those of this rank."""
    ids = torch.randint(64, (4, 12))
    labels = ids.roll(-1, 1)
    for row, targets in enumerate((9, 5, 12, 1)):
        labels[row, targets:] = -100
    each = [{"input_ids": i[None], "labels": j[None]} for i, j in zip(ids, labels)]
    return ids, labels, each[ranks.rank :: ranks.world_size]


def expected(model, ids, labels):
    """Return the cross-entropy of all targets and the norm of its gradient."""
    model.train()
    logits = model(input_ids=ids).logits[labels != -100]
    cross_entropy = torch.nn.functional.cross_entropy(logits, labels[labels != -100])
    gradient = torch.autograd.grad(cross_entropy, list(model.parameters()))
    norm = torch.stack([g.norm() for g in gradient]).norm()
    return [cross_entropy.item(), norm.item()]


def case(ranks, name, stage, *more):
    settings = [*SETTINGS, f"model.name={name}", f"engine.zero_stage={stage}", *more]
    cfg = load("configs/tiny/lm.yaml", settings)
    torch.manual_seed(0)
    plain = build_model(cfg, 64)
    engine = ds.Engine(cfg, copy.deepcopy(plain), ranks)
    ids, labels, own = micro_batches(ranks)
    first = engine.step(own)
    return {
        "expected": expected(plain, ids, labels),
        "found": [first.loss, first.norm],
    }


def main():
    ranks = ds.start(load("configs/tiny/lm.yaml", SETTINGS))
    found = {" ".join(map(str, asked)): case(ranks, *asked) for asked in CASES}
    if ranks.is_main:
        print(json.dumps(found))
    ranks.barrier()


if __name__ == "__main__":
    main()
