"""`python -m tests.listeners`: the addresses that a run of one process listens on, as JSON."""

import contextlib
import json
import os
from pathlib import Path

from lm.config.load import load
from lm.training import engine as ds
from lm.training.build import build_model

LISTENS = "0A"  # the state in /proc/net/tcp


def addresses():
    """Of this process, as the kernel writes them: 0100007F is 127.0.0.1."""
    found = []
    sockets = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            sockets.add(os.readlink(path))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENS and f"socket:[{rest[5]}]" in sockets:
                found.append(local.partition(":")[0])
    return found


def main():
    cfg = load("configs/tiny/lm.yaml", [])
    ranks = ds.start(cfg)
    engine = ds.Engine(cfg, build_model(cfg, 64), ranks)
    print(json.dumps(addresses()))
    engine.close()


if __name__ == "__main__":
    main()
