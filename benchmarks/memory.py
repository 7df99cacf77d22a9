"""What `fprnn plan` says of memory, beside what a real update takes.

python -m benchmarks.memory [--config YAML --json FILE key=value …]

Without --config: configs/tiny/lm.yaml and configs/lm/demo.yaml, ZeRO stages 0 to 3, with and
without gradient checkpointing, and some others. Every row is a process of its own: DeepSpeed's
engine, one update to warm up, one whose allocations torch's profiler reports, those inside
operations as well. One rank on a CPU; nothing of a GPU is measured here. DeepSpeed's gradient
buffer (2 GB, whatever the model) is set to 0.1 MB, so that it does not hide the rest.
"""

import argparse
import json
import subprocess
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUCKET = "engine.deepspeed.zero_optimization.reduce_bucket_size=25000"
CONFIGS = ("configs/tiny/lm.yaml", "configs/lm/demo.yaml")
# Of the demo: more tokens than are counted on, wider, another way to solve, other models.
OTHERS = (
    "data.seq_len=1024 train.micro_batch_size=8",
    "model.d_model=384 model.d_state=16 model.glu_in_loop=false",
    "model.block=fp_mamba2 model.mixer_rank=2",
    "solver.token=iterate solver.stopping=paper",
    "train.precision=bf16",
    "model.name=transformer",
    "model.name=lstm",
    "model.name=mamba data.seq_len=64",
)


def tensors_alive():
    """Bytes of all tensors that Python knows of, each storage once."""
    import gc

    import torch

    gc.collect()
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thing in gc.get_objects():
            if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
                storage = thing.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def optimizer_states(optimizer):
    """Bytes of AdamW's moments, those of DeepSpeed's wrapper as well."""
    import torch

    states = getattr(optimizer, "optimizer", optimizer).state.values()
    moments = (t for state in states for t in state.values() if torch.is_tensor(t) and t.dim())
    return sum(t.nbytes for t in moments)


def most_allocated(function):
    """The most bytes that a call's allocations, less what it frees of them, add up to."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    most, events = 0, list(profiler.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        if event.name == "[memory]":
            most = max(most, event.extra_fields.total_allocated)
    return most


def measure(path, overrides):
    """One row: planned and measured bytes of a run on this machine, one rank."""
    import torch

    from lm.common.cards import CPU, card
    from lm.config import load as config
    from lm.kernels import available
    from lm.report.activations import count
    from lm.report.memory import memory, sizes
    from lm.training import engine as ds
    from lm.training.build import build_model, vocabulary

    cfg = config.load(ROOT / path, [BUCKET, "train.threads=1", *overrides])
    ranks = ds.start(cfg)
    available("cpu")  # what tries the kernels out is no part of an update
    vocab_size = vocabulary(cfg)
    model = build_model(cfg, vocab_size)
    of = sizes(model, vocab_size, cfg.train.precision)
    before = tensors_alive() - sum(p.untyped_storage().nbytes() for p in model.parameters())
    engine = ds.Engine(cfg, model, ranks)
    shape = cfg.train.micro_batch_size, cfg.data.seq_len
    batches = []
    for _ in range(cfg.train.accumulation(1)):
        ids = torch.randint(0, vocab_size, shape)
        batches.append({"input_ids": ids, "labels": ids})
    engine.step(batches)  # AdamW's state, and what is made once
    still = tensors_alive() - before
    most = most_allocated(lambda: engine.step(batches))
    engine.deepspeed.backward(engine.forward(batches[0]).loss)
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    planned = memory(cfg, 1, card(CPU), of, count(cfg, on_gpu=False))
    kept_still = planned.weights + planned.master + planned.optimizer
    if engine.zero_stage == 3:  # which never gives its buffers back
        kept_still += planned.gradients + planned.buffers
    return {
        "config": path,
        "overrides": overrides,
        "parameters": of.parameters,
        "planned": planned.total,
        "measured": still + most,
        "planned_still": kept_still,
        "measured_still": still,
        "planned_optimizer": planned.optimizer,
        "measured_optimizer": optimizer_states(engine.deepspeed.optimizer),
        "measured_weights": sum(p.nbytes for p in model.parameters()),
        "measured_gradients": gradients,
        "parts": planned._asdict(),
    }


def in_a_process(path, overrides):
    command = [sys.executable, "-m", "benchmarks.memory", "--one", path, *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--config", help="this one alone")
    p.add_argument("--json", help="write the rows to this file")
    p.add_argument("--one", help=argparse.SUPPRESS)
    p.add_argument("override", nargs="*", metavar="key=value")
    a = p.parse_args()
    if a.one:
        print(json.dumps(measure(a.one, a.override)))
        return
    wanted = [(a.config, a.override)]
    if not a.config:
        checkpointed = "model.gradient_checkpointing=true"
        wanted = [
            (path, [f"engine.zero_stage={stage}", *extra, *a.override])
            for path in CONFIGS
            for stage in range(4)
            for extra in ([], [checkpointed])
        ]
        wanted += [(CONFIGS[1], [*other.split(), *a.override]) for other in OTHERS]
    rows = []
    print("| config | with | planned, MB | measured, MB | planned / measured |")
    print("| --- | --- | --- | --- | --- |")
    for path, overrides in wanted:
        row = in_a_process(path, overrides)
        rows.append(row)
        ratio = row["planned"] / row["measured"]
        print(
            f"| {Path(path).name} | {' '.join(overrides)} | {row['planned'] / 1e6:.3f} |"
            f" {row['measured'] / 1e6:.3f} | {ratio:.3f} |",
            flush=True,
        )
    if a.json:
        Path(a.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
