"""How far a run's losses drift when only the micro-batches or the number of ranks change.

    python -m benchmarks.drift            # the tiny configuration, three seeds: 10 minutes

Every run has the same global batch, so that only the order of summation differs: rounding, which
training then amplifies or not. A row is the largest difference of a loss up to an update, over all
seeds, from the run on one rank with whole micro-batches.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lm.training.engine import _free_port

UPDATES = (1, 10, 20, 40, 80, 120)
SETTINGS = (
    "train.global_batch_size=4",
    "train.grad_accum_steps=null",
    f"train.steps={UPDATES[-1]}",
    "checkpoint.every=1000",
    "eval.every=1000",
)
MODELS = {
    "FP-Mamba": (),
    "FP-Mamba, lr 1e-3": ("optim.lr=1e-3",),
    "FP-Mamba, contractive 0.9": ("model.contractive=0.9",),
    "Mamba": ("model.name=mamba",),
    "gated DeltaNet": ("model.layers=gated_deltanet",),
}
WHOLE = (1, 4)  # ranks, sequences of a micro-batch
OTHERS = {"micro-batches of 1": (1, 1), "2 ranks": (2, 2)}


def main() -> None:
    """Print a row per model, precision and change."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--config", default="configs/tiny/lm.yaml", metavar="YAML")
    p.add_argument("--seeds", type=int, default=3, help="default: 3")
    args = p.parse_args()
    print("update", *UPDATES, sep="\t")
    for model, overrides in MODELS.items():
        for precision in ("fp32", "bf16"):
            settings = (*SETTINGS, *overrides, f"train.precision={precision}")
            rows: dict[str, list[list[float]]] = {name: [] for name in OTHERS}
            for seed in range(args.seeds):
                reference = losses(args.config, WHOLE, *settings, f"seed={seed}")
                for name, layout in OTHERS.items():
                    other = losses(args.config, layout, *settings, f"seed={seed}")
                    rows[name].append([abs(a - b) for a, b in zip(reference, other)])
            for name, drifts in rows.items():
                largest = (max(max(drift[:update]) for drift in drifts) for update in UPDATES)
                shown = "\t".join(f"{drift:.0e}" for drift in largest)
                print(f"{model}, {precision}, {name}\t{shown}", flush=True)


def losses(config: str, layout: tuple[int, int], *overrides: str) -> list[float]:
    """Train in processes of their own, and return the loss of every update."""
    ranks, sequences = layout
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lm", "train", "--config", config, f"out_dir={folder}"]
        command += [*overrides, f"train.micro_batch_size={sequences}", "name=run"]
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        started = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            env = os.environ | place | own
            started.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL))
        if any([process.wait() for process in started]):
            raise SystemExit(f"failed: {' '.join(command)}")
        lines = (Path(folder) / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [record["loss"] for record in map(json.loads, lines) if "grad_norm" in record]


if __name__ == "__main__":
    main()
