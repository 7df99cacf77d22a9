"""Gradients of an engine under `train.precision: bf16` next to those of plain autograd.

`python -m tests.oracle_bf16`, on one rank or two. Prints for several ZeRO stages, with DeepSpeed's
settings as we make them and with the gradients of linear layers rounded on purpose:
"norm", of the gradient, "expected", the same by autograd, "error", the largest difference of a
gradient relative to the largest number in it, and "bf16", the share of parameters whose gradients
are all numbers of bf16.
"""

import copy
import json

import torch

from lm.config.load import load
from lm.training import engine as ds
from lm.training.build import build_model
from tests.oracle_updates import micro_batches

# Without momentum and clipping AdamW's first moment is the gradient.
SETTINGS = [
    "train.precision=bf16",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    "train.grad_accum_steps=null",
    "optim.grad_clip=0",
    "optim.betas=[0.0, 0.95]",
]
ROUNDED = "engine.deepspeed={torch_autocast: {lower_precision_safe_modules: [torch.nn.Linear]}}"
CASES = [(0,), (1,), (2,), (3,), (1, ROUNDED)]


def by_hand(model, ids, labels):
    """The gradient of the mean over all targets, {parameter name: tensor}."""
    model.train()
    for row, targets in zip(ids, labels):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=row[None], labels=targets[None], shift_labels=targets[None]).loss
        (loss * (targets != -100).sum() / (labels != -100).sum()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def gradients(engine):
    """The parts of each gradient that this rank's optimizer has stepped with."""
    for flat, parts in engine._optimizer_parts():
        moment = engine.base_optimizer.state[flat]["exp_avg"].view(-1)
        for name, target, source in parts:
            yield name, moment[target], source


def case(ranks, stage, *more):
    cfg = load("configs/tiny/lm.yaml", [*SETTINGS, f"engine.zero_stage={stage}", *more])
    torch.manual_seed(0)
    plain = build_model(cfg, 64)
    engine = ds.Engine(cfg, copy.deepcopy(plain), ranks)
    ids, labels, own = micro_batches(ranks)
    norm = engine.step(own).norm
    expected = by_hand(plain, ids, labels)
    error, rounded, count = 0.0, 0, 0
    for name, moment, source in gradients(engine):
        wanted = expected[name].flatten()[source]
        if not len(wanted):
            continue
        moment = moment[: len(wanted)]
        error = max(error, ((moment - wanted).abs().max() / expected[name].abs().max()).item())
        rounded += torch.equal(moment, moment.bfloat16().float())
        count += 1
    return {
        "norm": norm,
        "expected": torch.stack([g.norm() for g in expected.values()]).norm().item(),
        "error": error,
        "bf16": rounded / count,
    }


def main():
    ranks = ds.start(load("configs/tiny/lm.yaml", SETTINGS))
    found = {" ".join(map(str, asked)): case(ranks, *asked) for asked in CASES}
    if ranks.is_main:
        print(json.dumps(found))
    ranks.barrier()


if __name__ == "__main__":
    main()
