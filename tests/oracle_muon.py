"""Muon's update by the singular values, beside that of an engine: `python -m tests.oracle_muon`.

Prints, for ZeRO stages 0 to 2, by how much the engine's updates of matrices differ from Muon's, and
those of the others from AdamW's, relative to their size, on rank 0.
"""

import copy
import json
import math

import torch

from lm.config.load import load
from lm.training import engine as ds
from lm.training import optim
from lm.training.build import build_model

QUINTIC = (3.4445, -4.7750, 2.0315)
LR, MOMENTUM, DECAY = 0.01, 0.95, 0.3
UPDATES = 3
SETTINGS = [
    "model.n_layer=3",  # so that the border between two ranks' pieces goes through a matrix
    "optim.name=muon", f"optim.lr={LR}",
    f"optim.weight_decay={DECAY}", "optim.schedule=constant", "optim.warmup=1",
    "optim.grad_clip=0.5", "train.global_batch_size=4", "train.micro_batch_size=2",
    "train.grad_accum_steps=null",
]  # fmt: skip


def orthogonalised(matrix):
    """U p(S) Vᵀ of U S Vᵀ = matrix / ‖matrix‖_F, p being the quintic five times over."""
    a, b, c = QUINTIC
    u, s, vt = torch.linalg.svd(matrix.double() / matrix.double().norm(), full_matrices=False)
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vt


def clipped_gradients(model, batch):
    model.train()
    model.zero_grad()
    model(input_ids=batch, labels=batch, shift_labels=batch, loss_only=True).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def differences(cfg, ranks):
    """Relative differences of the updates: (largest of a matrix, of all others together)."""
    torch.manual_seed(0)
    plain = build_model(cfg, 64)
    engine = ds.Engine(cfg, copy.deepcopy(plain), ranks)
    by_muon = optim.matrices(plain)
    others = [p for name, p in plain.named_parameters() if name not in by_muon]
    decays = [p for n, p in plain.named_parameters() if n not in by_muon and optim.decays(n)]
    rest = [p for p in others if all(p is not q for q in decays)]
    adamw = torch.optim.AdamW(
        [{"params": decays, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}],
        lr=LR, betas=(0.9, 0.95),
    )  # fmt: skip
    momentum = dict.fromkeys(by_muon, 0.0)
    worst_matrix, worst_other = 0.0, 0.0
    for _ in range(UPDATES):
        batch = torch.randint(64, (4, 12))
        gradients = clipped_gradients(plain, batch)
        before = {name: p.detach().clone() for name, p in plain.named_parameters()}
        adamw.step()
        own = batch.chunk(2)[ranks.rank :: ranks.world_size]
        engine.step([{"input_ids": half, "labels": half} for half in own])
        after = {n: p.detach().clone() for n, p in engine.deepspeed.module.named_parameters()}
        for name, p in plain.named_parameters():
            step = after[name] - before[name]
            if name in by_muon:
                g = gradients[name]
                momentum[name] = MOMENTUM * momentum[name] + (1 - MOMENTUM) * g
                direction = (1 - MOMENTUM) * g + MOMENTUM * momentum[name]
                scale = 0.2 * math.sqrt(max(g.shape))
                expected = -LR * scale * orthogonalised(direction) - LR * DECAY * before[name]
                worst_matrix = max(worst_matrix, _relative(step, expected))
            else:
                worst_other = max(worst_other, _relative(step, p.detach() - before[name]))
        plain.load_state_dict(after, strict=False)  # the next gradient is at the same weights
    return worst_matrix, worst_other


def _relative(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def main():
    cfgs = [load("configs/tiny/lm.yaml", [*SETTINGS, f"engine.zero_stage={s}"]) for s in range(3)]
    ranks = ds.start(cfgs[0])
    found = {stage: differences(cfg, ranks) for stage, cfg in enumerate(cfgs)}
    if ranks.is_main:
        print(json.dumps(found))
    ranks.barrier()


if __name__ == "__main__":
    main()
