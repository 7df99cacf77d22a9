"""Print timeouts and sockets of a tiny engine as JSON: `python -m tests.engine_sockets`."""

import contextlib
import json
import os
from pathlib import Path

import torch.distributed as dist

from lm.config.load import load
from lm.training.build import build_model
from lm.training.engine import Engine
from lm.training.process_group import join_process_group

LISTEN_STATE = "0A"  # of a listening socket in /proc/net/tcp


def read_group_timeouts(device):
    """Return the timeouts of all process groups, in seconds."""
    groups = [group._get_backend(device) for group in dist.distributed_c10d._world.pg_map]
    return sorted(group.options._timeout.total_seconds() for group in groups)


def find_listening_addresses():
    """Return the addresses that this process listens on; 0100007F is 127.0.0.1."""
    sockets = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            sockets.add(os.readlink(path))
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTEN_STATE and f"socket:[{rest[5]}]" in sockets:
                addresses.append(local.partition(":")[0])
    return addresses


def main():
    cfg = load("configs/tiny/lm.yaml", ["engine.timeout_s=77", "train.grad_accum_steps=1"])
    ranks = join_process_group(cfg)
    engine = Engine(cfg, build_model(cfg, 64), ranks)
    if ranks.is_main:
        timeouts = read_group_timeouts(ranks.device)
        print(json.dumps({"timeouts": timeouts, "addresses": find_listening_addresses()}))
    ranks.barrier()
    engine.close()


if __name__ == "__main__":
    main()
