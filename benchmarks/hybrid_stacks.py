"""One full training step of stacks with other layers (`model.layers`), against all Mamba.

python -m benchmarks.hybrid_stacks [--patterns "mamba*4|mamba*3 fp_mamba1" --json FILE]

Same width, depth and batch; the gradient of fixed-point layers is exact; the first pattern is what
the others are compared with.
"""

import torch

from benchmarks import contenders
from benchmarks.harness import ms, parse, parser, shortest, show, wanted, write_json
from lm.model.patterns import pattern_of

PATTERNS = (
    "mamba*4",
    "mamba*3 fp_mamba1",
    "fp_mamba1*4",
    "mamba2*4",
    "mamba2*3 fp_mamba2",
    "mamba*2 attention fp_mamba1",
    "gated_deltanet*4",
)


def trainer(pattern, a):
    """A Trainer of a model with these layers, of the shape's width and batch."""
    shape = a.shape._replace(layers=len(pattern_of(pattern)))
    model = contenders.ours(shape, layers=pattern, use_short_conv=True)
    return contenders.Trainer(model, shape, a.device, loss_only=True)


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--patterns", default="|".join(PATTERNS), help="P|P|…: the layers")
    a = parse(p)
    torch.set_num_threads(a.threads[0] or 1)
    trainers = {pattern: trainer(pattern, a) for pattern in a.patterns.split("|")}
    seconds, _ = shortest(wanted(a, {name: t.step for name, t in trainers.items()}), a)
    first = next(iter(seconds.values()))
    rows = [
        {
            "name": name,
            "seconds": taken,
            "parameters": sum(p.numel() for p in trainers[name].parameters),
            "tokens_per_second": taken and a.shape.tokens / taken,
            "speed": taken and first / taken,
        }
        for name, taken in seconds.items()
    ]
    m = a.machine
    heading = f"d_model {a.shape.d_model}, {a.shape.batch} × {a.shape.length} tokens; {m['device']}"
    show(
        f"{heading}, load {m['load']}, torch {m['torch']}, commit {m['commit']}",
        [
            {
                "layers": row["name"],
                "ms": ms(row["seconds"]),
                "tokens/s": f"{row['tokens_per_second'] or 0:,.0f}",
                "parameters": f"{row['parameters'] / 1e3:,.0f} k",
                f"speed of {next(iter(seconds))}": f"{row['speed'] or 0:.2f}",
            }
            for row in rows
        ],
    )
    write_json(a, rows)


if __name__ == "__main__":
    main()
