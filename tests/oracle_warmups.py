"""Updates of growing batches beside plain AdamW: `python -m tests.oracle_warmups`, on any ranks.

Prints for every ZeRO stage losses and gradient norms of updates of 2, 2, 6, 4 and 8 sequences, and
those of one backward pass over all targets of each.
"""

import copy
import json

import torch

from lm.config.load import load
from lm.training import engine as ds
from lm.training.build import build_model
from lm.training.optim import lr_factor, optimizer

SETTINGS = ["train.global_batch_size=8", "train.micro_batch_size=1", "train.grad_accum_steps=null",
            "optim.grad_clip=0.3", "model.layers=mamba"]  # fmt: skip
SIZES = (2, 2, 6, 4, 8)  # one that does not divide the micro-batches before it, and one fewer


def updates():
    """(ids, labels) of each, with unequal numbers of targets a sequence."""
    found = []
    for size in SIZES:
        ids = torch.randint(64, (size, 12))
        labels = ids.roll(-1, 1)
        for row in range(size):
            labels[row, 3 + 2 * (row % 5) :] = -100
        found.append((ids, labels))
    return found


def expected(cfg, model, batches):
    """(loss, norm) of each update, by torch alone."""
    steps = optimizer(model, cfg.optim, on_gpu=False)
    found = []
    for number, (ids, labels) in enumerate(batches, 1):
        for group in steps.param_groups:
            group["lr"] = cfg.optim.lr * lr_factor(cfg.optim, cfg.train.steps, number)
        logits = model.train()(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(logits[labels != -100], labels[labels != -100])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.grad_clip)
        steps.step()
        steps.zero_grad()
        found.append([loss.item(), norm.item()])
    return found


def found(cfg, model, batches, ranks):
    engine = ds.Engine(cfg, model, ranks)
    made = []
    for ids, labels in batches:
        each = [{"input_ids": i[None], "labels": j[None]} for i, j in zip(ids, labels)]
        update = engine.step(each[ranks.rank :: ranks.world_size])
        made.append([update.loss, update.norm])
    return made


def main():
    ranks = ds.start(load("configs/tiny/lm.yaml", SETTINGS))
    results = {}
    for stage in range(4):
        cfg = load("configs/tiny/lm.yaml", [*SETTINGS, f"engine.zero_stage={stage}"])
        torch.manual_seed(0)
        model, batches = build_model(cfg, 64), updates()
        results[stage] = [
            found(cfg, copy.deepcopy(model), batches, ranks),
            expected(cfg, model, batches),
        ]
    if ranks.is_main:
        print(json.dumps(results))
    ranks.barrier()


if __name__ == "__main__":
    main()
