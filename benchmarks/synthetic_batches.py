"""Making synthetic batches against training on them: `python -m benchmarks.synthetic_batches`.

Both in one run, so that their ratio means something on a busy machine.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

from synthetic import tasks
from synthetic.build import build
from synthetic.config import Config

A5 = ("A5, length 16", {"name": "word_problem", "group": "A5"}, 512, (16, 16))
CASES = [  # name, task, batch, lengths: the paper's sizes
    A5,
    ("S5, length 128", {"name": "word_problem", "group": "S5"}, 512, (128, 128)),
    ("copy, context 256", {"name": "copy"}, 128, (5, 50)),
    ("suffix n-gram, context 256", {"name": "suffix_ngram"}, 128, (5, 50)),
    ("mod arithmetic, brackets", {"name": "mod_arithmetic_brackets"}, 256, (3, 40)),
    ("parity, length 40", {"name": "parity"}, 256, (3, 40)),
]


def seconds(fn, repeats: int) -> float:
    """Median over repeats, after one call that is not counted."""
    fn(0)
    times = []
    for i in range(repeats):
        began = time.perf_counter()
        fn(i + 1)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def making(section, batch_size, lengths) -> tuple[float, int]:
    """Seconds a batch takes, and its tokens."""
    task = tasks.build(Config.model_validate({"task": section}).task)
    time_each = seconds(lambda i: task.batch(0, "train", i, batch_size, lengths), 50)
    return time_each, task.batch(0, "train", 0, batch_size, lengths).input_ids.size


def training(section, batch_size, lengths, d_model: int, repeats: int) -> float:
    """Seconds a training step of FP-Mamba takes on such a batch."""
    cfg = Config.model_validate({"task": section, "model": {"d_model": d_model}})
    task = tasks.build(cfg.task)
    model, device, _ = build(cfg, task, lengths[1])
    model.train()

    def step(i):
        batch = task.batch(0, "train", i, batch_size, lengths)
        ids, labels = (torch.from_numpy(a).to(device) for a in (batch.input_ids, batch.labels))
        loss = F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        model.zero_grad()
        loss.item()  # waits for the GPU

    return seconds(step, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--d-model", type=int, default=64, help="of the FP-Mamba that trains")
    parser.add_argument("--repeats", type=int, default=3, help="training steps measured")
    args = parser.parse_args()
    print(f"{'task':<28} {'batch':>5} {'a batch':>10} {'tokens/s':>10}")
    for label, section, batch_size, lengths in CASES:
        each, tokens = making(section, batch_size, lengths)
        print(f"{label:<28} {batch_size:>5} {each * 1e3:>7.2f} ms {tokens / each / 1e6:>8.1f} M")
    made, _ = making(*A5[1:])
    trained = training(*A5[1:], args.d_model, args.repeats)
    print(
        f"training FP-Mamba (d_model {args.d_model}) on the first: {trained * 1e3:.0f} ms a step;"
        f" making the batch is {made / trained:.3%} of it"
    )


if __name__ == "__main__":
    main()
