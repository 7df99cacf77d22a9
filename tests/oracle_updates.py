"""Updates of the engine next to plain autograd: `python -m tests.oracle_updates`, on 1 or 2 ranks.

For several models and ZeRO stages it prints the loss and the gradient norm of an update, by the
engine and by autograd: a plain update, one with adversarial noise, and one in bf16.
"""

import copy
import json
from unittest import mock

import torch

from lm.config.load import load
from lm.model.state import Adversary
from lm.training.build import build_model
from lm.training.engine import Engine
from lm.training.process_group import join_process_group

KAPPA = 0.3
SETTINGS = [
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    "train.grad_accum_steps=null",
    "model.headdim=8",
]
CLIPPED = ["optim.grad_clip=0.3"]
ADVERSARIAL = [*CLIPPED, f"train.adversarial_noise={KAPPA}"]
# Without momentum and clipping, AdamW's first moment is the gradient.
BF16 = ["train.precision=bf16", "optim.grad_clip=0", "optim.betas=[0.0, 0.95]"]
DELTA = "model.layers=gated_deltanet gated_deltaproduct"
LSTM = "model.layers=lstm"
STAGES = [(stage,) for stage in range(4)]
OTHER_MODELS = [(1, "model.name=transformer"), (3, DELTA)]


def prepare(ranks, stage, *settings):
    """Build a model, its engine and four sequences with 9, 5, 12 and 1 targets.

    Returns:
        The model, the engine, the ids and labels of all sequences, and the micro-batches of this
        rank.
    """
    cfg = load("configs/tiny/lm.yaml", [*SETTINGS, f"engine.zero_stage={stage}", *settings])
    torch.manual_seed(0)
    model = build_model(cfg, 64)
    engine = Engine(cfg, copy.deepcopy(model), ranks)
    ids = torch.randint(64, (4, 12))
    labels = ids.roll(-1, 1)
    for row, targets in enumerate((9, 5, 12, 1)):
        labels[row, targets:] = -100
    micro_batches = [{"input_ids": i[None], "labels": j[None]} for i, j in zip(ids, labels)]
    return model.train(), engine, ids, labels, micro_batches[ranks.rank :: ranks.world_size]


def total_norm(gradients):
    return torch.stack([g.norm() for g in gradients]).norm().item()


def cross_entropy(logits, labels):
    """Return the mean cross-entropy over the targets; labels of −100 are ignored."""
    return torch.nn.functional.cross_entropy(logits[labels != -100], labels[labels != -100])


def plain(ranks, stage, *settings):
    """Compare the cross-entropy of all targets at once and the norm of its gradient."""
    model, engine, ids, labels, micro_batches = prepare(ranks, stage, *CLIPPED, *settings)
    update = engine.step(micro_batches)
    loss = cross_entropy(model(input_ids=ids).logits, labels)
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    return {
        "expected": [loss.item(), total_norm(gradient)],
        "found": [update.loss, update.grad_norm],
    }


def against_adversary(ranks, stage, *settings):
    """Compare the cross-entropy of the first passes, and the norm of half the gradient of all."""
    # Every sequence gets the largest noise, by autograd as in the engine.
    with mock.patch("torch.rand", lambda shape, **_: torch.ones(shape)):
        model, engine, ids, labels, micro_batches = prepare(ranks, stage, *ADVERSARIAL, *settings)
        updates = [
            engine.step(micro_batches, has_adversarial_pass=has_noise)
            for has_noise in (True, True, False)
        ]
        adversary, total = Adversary(model, KAPPA), 0.0
        for row, targets in zip(ids, labels):
            share = (targets != -100).sum() / (labels != -100).sum()
            for number, enter in enumerate((adversary.first_pass, adversary.second_pass)):
                with enter():
                    logits = model(input_ids=row[None]).logits[0]
                loss = cross_entropy(logits, targets)
                (loss * share / 2).backward()
                if number == 0:
                    total += (loss * share).item()
    return {
        "expected": [total, total_norm([p.grad for p in model.parameters()])],
        "found": [updates[0].loss, updates[0].grad_norm],
        "solves": [len(update.reports) for update in updates],
    }


def under_bf16(ranks, stage, *settings):
    """Compare the norm of the gradient.

    Also return the largest difference of a gradient relative to its largest value, and the fraction
    of parameters whose gradients are exactly representable in bf16.
    """
    model, engine, ids, labels, micro_batches = prepare(ranks, stage, *BF16, *settings)
    norm = engine.step(micro_batches).grad_norm
    for row, targets in zip(ids, labels):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=row[None], labels=targets[None], shift_labels=targets[None]).loss
        (loss * (targets != -100).sum() / (labels != -100).sum()).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    error, rounded, count = 0.0, 0, 0
    for name, moment, source in gradients(engine):
        target = expected[name].flatten()[source]
        if not len(target):
            continue
        moment = moment[: len(target)]
        error = max(error, ((moment - target).abs().max() / expected[name].abs().max()).item())
        rounded += torch.equal(moment, moment.bfloat16().float())
        count += 1
    norms = {"found": [norm], "expected": [total_norm(expected.values())]}
    return {**norms, "error": error, "bf16": rounded / count}


def gradients(engine):
    """Yield the parts of each gradient that this rank's optimizer used."""
    for flat, fragments in engine._optimizer_fragments():
        moment = engine.base_optimizer.state[flat]["exp_avg"].view(-1)
        for fragment in fragments:
            yield fragment.name, moment[fragment.optimizer_slice], fragment.parameter_slice


CASES = {
    plain: [*STAGES, *OTHER_MODELS],
    against_adversary: [*STAGES, (3, LSTM)],
    under_bf16: STAGES,
}


def main():
    ranks = join_process_group(load("configs/tiny/lm.yaml", SETTINGS))
    results = {
        update.__name__: {" ".join(map(str, case)): update(ranks, *case) for case in cases}
        for update, cases in CASES.items()
    }
    if ranks.is_main:
        print(json.dumps(results))
    ranks.barrier()


if __name__ == "__main__":
    main()
