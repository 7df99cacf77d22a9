"""An update against the adversary beside both passes by hand: `python -m tests.oracle_against`.

On one rank or two; prints loss and norm of the gradient for several ZeRO stages.
"""

import copy
import json

import torch

from lm.config.load import load
from lm.model.state import Adversary
from lm.training import engine as ds
from lm.training.build import build_model
from tests.oracle_updates import micro_batches

KAPPA = 0.3
SETTINGS = ["train.global_batch_size=4", "train.micro_batch_size=1", "train.grad_accum_steps=null",
            "optim.grad_clip=0.3", f"train.adversary={KAPPA}"]  # fmt: skip
STAGES = (0, 1, 2, 3)


def by_hand(model, ids, labels):
    """(cross-entropy of the first passes, norm of the gradient of half of all passes)."""
    model.train()
    adversary = Adversary(model, KAPPA)
    total = 0.0
    for row, targets in zip(ids, labels):
        share = (targets != -100).sum() / (labels != -100).sum()
        for number, enter in enumerate((adversary.first_pass, adversary.second_pass)):
            with enter():
                logits = model(input_ids=row[None]).logits[0, targets != -100]
            entropy = torch.nn.functional.cross_entropy(logits, targets[targets != -100])
            (entropy * share / 2).backward()
            if number == 0:
                total += (entropy * share).item()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    return [total, norm.item()]


def case(ranks, stage):
    cfg = load("configs/tiny/lm.yaml", [*SETTINGS, f"engine.zero_stage={stage}"])
    torch.manual_seed(0)
    plain = build_model(cfg, 64)
    engine = ds.Engine(cfg, copy.deepcopy(plain), ranks)
    ids, labels, own = micro_batches(ranks)
    made = [engine.step(own, against=against) for against in (True, True, False)]
    return {
        "expected": by_hand(plain, ids, labels),
        "found": [made[0].loss, made[0].norm],
        "solves": [len(update.stats) for update in made],
    }


def main():
    ranks = ds.start(load("configs/tiny/lm.yaml", SETTINGS))
    # Every sequence meets the largest adversary, by hand as in the engine.
    torch.rand = lambda shape, **_: torch.ones(shape)
    found = {stage: case(ranks, stage) for stage in STAGES}
    if ranks.is_main:
        print(json.dumps(found))
    ranks.barrier()


if __name__ == "__main__":
    main()
