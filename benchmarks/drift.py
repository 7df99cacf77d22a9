"""Measure how far the losses of a run drift if only micro-batches or the ranks change.

    python -m benchmarks.drift            # the tiny configuration, three seeds

All runs have the same sequences in each update, so that only the order of summation differs.
Training may amplify these rounding differences. Each cell is the largest difference of a loss up to
an update, over all seeds, from the run on one rank with a single micro-batch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys

import torch

from lm.common.ranks import Ranks
from lm.config.load import load
from lm.training.build import build_model
from lm.training.engine import Engine
from lm.training.process_group import find_free_port, join_process_group, leave_process_group

UPDATES = (1, 10, 20, 40, 80, 120)
SEQUENCES = 4  # per update
LENGTH = 16  # tokens per sequence
TEXT = "tests/data/tiny.jsonl"  # its bytes are the tokens
MODELS = {
    "FP-Mamba": (),
    "FP-Mamba, lr 1e-3": ("optim.lr=1e-3",),
    "FP-Mamba, contractive 0.9": ("model.contractive=0.9",),
    "gated DeltaNet": ("model.layers=gated_deltanet",),
    "Transformer": ("model.name=transformer",),
    "Mamba": ("model.name=mamba",),
}
PRECISIONS = ("fp32", "bf16")
# Name → number of ranks, sequences per micro-batch.
LAYOUTS = {"whole": (1, 4), "micro-batches of 1": (1, 1), "2 ranks": (2, 2)}


def main() -> None:
    """Print a row per model, precision and layout; with --micro-batch, print a rank's losses."""
    formatter = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--config", default="configs/tiny/lm.yaml", metavar="YAML")
    parser.add_argument("--seeds", type=int, default=3, help="default: 3")
    # Only processes that `train_on_ranks` starts have this option.
    parser.add_argument("--micro-batch", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.micro_batch:
        train_all(args.config, args.seeds, args.micro_batch)
        return
    losses_by_layout = {name: train_on_ranks(args, *layout) for name, layout in LAYOUTS.items()}
    print("update", *UPDATES, sep="\t")
    for model, precision in itertools.product(MODELS, PRECISIONS):
        for name in list(LAYOUTS)[1:]:
            drift = [0.0] * UPDATES[-1]  # largest difference at each update, over all seeds
            for seed in range(args.seeds):
                case = f"{model}, {precision}, {seed}"
                pairs = zip(losses_by_layout["whole"][case], losses_by_layout[name][case])
                for i, (whole_loss, loss) in enumerate(pairs):
                    drift[i] = max(drift[i], abs(whole_loss - loss))
            cells = "\t".join(f"{max(drift[:update]):.0e}" for update in UPDATES)
            print(f"{model}, {precision}, {name}\t{cells}")


def train_on_ranks(
    args: argparse.Namespace, ranks: int, micro_batch: int
) -> dict[str, list[float]]:
    """Train all cases on `ranks` processes, and return the losses of each case."""
    command = [sys.executable, "-m", "benchmarks.drift", "--config", args.config]
    command += ["--seeds", str(args.seeds), "--micro-batch", str(micro_batch)]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    processes = []
    for rank in range(ranks):
        rank_variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        processes.append(
            subprocess.Popen(command, env=environment | rank_variables, stdout=subprocess.PIPE)
        )
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"failed: {' '.join(command)}")
    return json.loads(outputs[0])


def train_all(config: str, seeds: int, micro_batch: int) -> None:
    """Train all cases as one of several ranks; rank 0 prints the losses."""
    ranks = join_process_group(load(config, ()))
    losses = {}
    for (model, overrides), precision in itertools.product(MODELS.items(), PRECISIONS):
        for seed in range(seeds):
            case_overrides = (*overrides, f"train.precision={precision}", f"seed={seed}")
            case = f"{model}, {precision}, {seed}"
            losses[case] = train(config, case_overrides, micro_batch, ranks)
    if ranks.is_main:
        print(json.dumps(losses))
    ranks.barrier()
    leave_process_group()


def train(config: str, overrides: tuple, micro_batch: int, ranks: Ranks) -> list[float]:
    """Train a model on random parts of TEXT, and return the loss of each update."""
    overrides += (f"train.global_batch_size={SEQUENCES}", "train.grad_accum_steps=null")
    overrides += (f"train.micro_batch_size={micro_batch}", f"train.steps={UPDATES[-1]}")
    cfg = load(config, overrides)
    torch.manual_seed(cfg.seed)
    model = build_model(cfg, vocab_size=256)  # tokens are bytes
    engine = Engine(cfg, model, ranks)
    with open(TEXT, "rb") as file:
        text = torch.tensor(list(file.read(200_000)))
    generator = torch.Generator().manual_seed(cfg.seed)
    losses = []
    for _ in range(UPDATES[-1]):
        starts = torch.randint(len(text) - LENGTH, (SEQUENCES,), generator=generator)
        blocks = torch.stack([text[i : i + LENGTH + 1] for i in starts])
        parts = blocks.split(micro_batch)[ranks.rank :: ranks.world_size]
        batches = [{"input_ids": part[:, :-1], "labels": part[:, 1:]} for part in parts]
        losses.append(engine.step(batches).loss)
    engine.release()
    return losses


if __name__ == "__main__":
    main()
