"""Measure how long saves delay training.

Print the seconds of an update, of the copy to host memory that blocks it, and of the save.

    python -m benchmarks.checkpointing        # the paper's 160M model, updates of 128 tokens
    python -m benchmarks.checkpointing --config configs/lm/demo.yaml --tokens 256

Real updates have more tokens and take longer, so they hide more of a save, which runs in a
background thread.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from lm.config.load import load
from lm.kernels import describe_backends
from lm.runs.checkpoint import Checkpoints
from lm.training.build import build_model
from lm.training.engine import Engine
from lm.training.process_group import join_process_group, leave_process_group


def main() -> None:
    formatter = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    config = "configs/lm/fpmamba_160m_fineweb2b.yaml"
    parser.add_argument("--config", default=config, metavar="YAML")
    parser.add_argument("--tokens", type=int, default=128, help="of an update (default: 128)")
    parser.add_argument("--saves", type=int, default=3, help="default: 3")
    parser.add_argument("--folder", help="folder on the disk to measure (default: temporary)")
    args = parser.parse_args()
    overrides = (
        "train.global_batch_size=null",
        "train.micro_batch_size=1",
        "train.precision=fp32",
        f"data.seq_len={args.tokens}",
        "model.gradient_checkpointing=false",
    )
    cfg = load(args.config, overrides)
    ranks = join_process_group(cfg)
    describe_backends(ranks.device.type)  # compiles the kernels before anything is timed
    # With vocab_size auto a run asks its tokenizer; here 50,264, close to GPT-2's 50,257.
    vocab_size = 50264 if cfg.model.vocab_size == "auto" else cfg.model.vocab_size
    model = build_model(cfg, vocab_size)
    parameter_count = sum(p.numel() for p in model.parameters())
    engine = Engine(cfg, model, ranks)
    ids = torch.randint(vocab_size, (1, args.tokens))
    batch = {"input_ids": ids, "labels": ids}
    print(f"{parameter_count / 1e6:.1f} M parameters, ZeRO-{engine.zero_stage}, {ranks.device}")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measure(engine, ranks, cfg, batch, Path(folder), args.saves)
    leave_process_group()


def measure(engine, ranks, cfg, batch, folder, saves) -> None:
    """Time updates without saves, and then updates during which a save is written."""
    checkpoints = Checkpoints(folder, ranks, cfg.checkpoint, {"zero_stage": engine.zero_stage})
    _warm_up, *durations = [time_call(lambda: engine.step([batch])) for _ in range(3)]
    update_seconds = min(durations)
    print(f"update   {update_seconds:.2f} s without a save")
    for step in range(1, saves + 1):
        checkpoints.save(step, lambda step=step: engine.state_files(folder, step))
        update_seconds_during_save = time_call(lambda: engine.step([batch]))
        checkpoints.finish()
        (save,) = checkpoints.pop_saves()
        blocked = save["blocked_s"]
        print(
            f"save {step}   blocked {blocked:.2f} s = {blocked / update_seconds:.2f}"
            f" updates; {save['bytes'] / 2**30:.2f} GiB on the disk after {save['seconds']:.1f} s"
            f" ({save['bytes'] / 2**20 / save['seconds']:,.0f} MiB/s); an update during the save"
            f" {update_seconds_during_save:.2f} s",
            flush=True,
        )


def time_call(function) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
