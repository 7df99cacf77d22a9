"""`python -m tests.groups`, a rank of two: how long an engine's process groups wait, as JSON."""

import json

import torch.distributed as dist

from lm.config.load import load
from lm.training import engine as ds
from lm.training.build import build_model


def main():
    cfg = load("configs/tiny/lm.yaml", ["engine.timeout_s=77", "train.grad_accum_steps=1"])
    ranks = ds.start(cfg)
    engine = ds.Engine(cfg, build_model(cfg, 304), ranks)
    waits = [
        group._get_backend(ranks.device).options._timeout.total_seconds()
        for group in dist.distributed_c10d._world.pg_map
    ]
    if ranks.is_main:
        print(json.dumps(sorted(waits)))
    ranks.barrier()
    engine.close()


if __name__ == "__main__":
    main()
