"""One full training step (forward, backward, clip, AdamW): ours, the paper's procedure, Mamba.

python -m benchmarks.training_step [--shape small,words --threads 1,2 --json FILE]
python -m benchmarks.training_step --patterns "mamba*4|mamba*3 fp_mamba1"   # stacks of other layers

All fixed-point rows have the same weights (seeded, never trained: that decides ℓ*) and the same
batch. With --patterns the rows are models of these layers, compared with the first.
"""

import functools

import torch

from benchmarks import contenders, paper
from benchmarks.harness import ms, parse, parser, ratio, run, shortest
from lm.model.fields import parse_pattern

OURS, ONE_STEP = "exact gradient", "exact token, one-step gradient"
PAPER_ROW = "paper's procedure"
OUR_MAMBA, MAMBA = "Mamba on our scan", "transformers' Mamba"


def stacks(a):
    """{pattern: Trainer} of models with these layers, of the shape's width and batch."""
    found = {}
    for pattern in a.patterns.split("|"):
        shape = a.shape._replace(layers=len(parse_pattern(pattern)))
        model = contenders.ours(shape, layers=pattern, use_short_conv=True)
        found[pattern] = contenders.Trainer(model, shape, a.device, loss_only=True)
    return {name: trainer.step for name, trainer in found.items()}, found


def contestants(a):
    """{name: function that makes one step}, and the Trainer of each."""
    s, device = a.shape, a.device
    trainer = contenders.Trainer(contenders.ours(s), s, device, loss_only=True)
    options = {
        OURS: contenders.EXACT_FIELDS,
        ONE_STEP: contenders.EXACT_FIELDS | {"gradient": "one_step"},
        f"{PAPER_ROW}, our kernels": contenders.PAPER_FIELDS,
    }

    def one_step(option):
        with contenders.running(trainer.model, **option):
            return trainer.step()

    functions = {name: functools.partial(one_step, option) for name, option in options.items()}
    trainers = dict.fromkeys(functions, trainer)
    scans = {PAPER_ROW: contenders.chunked_scan}
    if device.type == "cuda":
        scans[f"{PAPER_ROW}, our scan"] = contenders.fastest_scan
    else:
        scans[f"{PAPER_ROW}, loop over time"] = paper.scan_over_time
    models = {name: contenders.paper_model(trainer.model, scan) for name, scan in scans.items()}
    for name, model in models.items():
        trainers[name] = contenders.Trainer(model, s, device)
    trainers[OUR_MAMBA] = contenders.Trainer(contenders.our_mamba(s), s, device, loss_only=True)
    if device.type == "cpu" or contenders.present("mamba_ssm") or s.length <= 256:
        trainers[MAMBA] = contenders.Trainer(contenders.their_mamba(s), s, device)
    else:
        print(f"without {MAMBA}: its slow path takes minutes a step without mamba-ssm")
    for name, model in contenders.peers(s, device).items():
        trainers[name] = contenders.Trainer(model, s, device)
    functions |= {name: t.step for name, t in trainers.items() if name not in functions}
    return functions, trainers


def peak_memory(fn, trainer):
    """Bytes at the worst moment of a step, other models that lie in memory left out."""
    torch.cuda.synchronize()
    at_rest = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fn()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - at_rest + trainer.resident()


def measure(a):
    """Return a row for each contestant."""
    functions, trainers = stacks(a) if a.patterns else contestants(a)
    seconds, results = shortest(functions, a)
    rows = []
    for name, taken in seconds.items():
        row = dict(name=name, seconds=taken)
        if taken is not None:
            row |= {
                key: None if value is None else float(value)
                for key, value in zip(("evaluations", "failed", "loss"), results[name])
            }
            row["parameters"] = sum(p.numel() for p in trainers[name].parameters)
            if a.device.type == "cuda":
                row["peak_bytes"] = peak_memory(functions[name], trainers[name])
        row["tokens_per_second"] = taken and a.shape.tokens / taken
        rows.append(row)
    return rows


def table(rows):
    """Format rows for `show`. Ratios above 1 are faster than the row that the column names."""
    base = {row["name"]: row["seconds"] for row in rows}
    first = rows[0]["name"]
    printed = []
    for row in rows:
        evaluations, taken, peak = row.get("evaluations"), row["seconds"], row.get("peak_bytes")
        printed.append(
            {
                "": row["name"],
                "ms": ms(taken),
                "tokens/s": f"{row['tokens_per_second'] or 0:,.0f}",
                "parameters": f"{row.get('parameters', 0) / 1e3:,.0f} k",
                "evaluations": "–" if evaluations is None else f"{evaluations:.1f}",
                f"vs {first}": ratio(base[first], taken),
                "vs paper's": ratio(base.get(PAPER_ROW), taken),
                "in Mambas": ratio(taken, base.get(OUR_MAMBA)),
                "vs transformers'": ratio(base.get(MAMBA), taken),
                "peak GiB": "–" if peak is None else f"{peak / 2**30:.2f}",
            }
        )
    return printed


if __name__ == "__main__":
    options = parser(__doc__, repeats=8, shape="small,words")
    options.add_argument("--patterns", default="", help="P|P|…: the layers of each model")
    run(parse(options), measure, table)
