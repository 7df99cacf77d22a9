"""One full training step (forward, backward, clip, AdamW): ours, the paper's procedure, Mamba.

python -m benchmarks.training_step [--shape small,words --threads 1,2 --json FILE]
python -m benchmarks.training_step --lengths 256,512,1024 --plot FILE   # time against the length

All fixed-point rows have the same weights (seeded, never trained: that decides ℓ*) and the same
batch. `bound` is the least time that the machine needs, from bytes, FLOPs and exponentials by
formula (harness.py) for as many evaluations; `of bound` the share of it reached. With --lengths,
`saved` is what the forward of the layers keeps for the backward (not the head's logits).
"""

import functools

import torch

from benchmarks import contenders, paper
from benchmarks.harness import (
    iteration_seconds,
    ms,
    parse,
    parser,
    ratio,
    share,
    shortest,
    show,
    title,
    wanted,
    with_each_thread_count,
)
from benchmarks.harness import numbers as number_list

OURS, ONE_STEP = "exact gradient", "exact token, one-step gradient"
PAPER_ROW = "paper's procedure"
OUR_MAMBA, MAMBA = "Mamba on our scan", "transformers' Mamba"


def trainers(a):
    """{name: function that makes one step}, and the Trainer of each."""
    s, device = a.shape, a.device
    of_ours = contenders.Trainer(contenders.ours(s), s, device, loss_only=True)
    options = {
        OURS: contenders.EXACT_FIELDS,
        ONE_STEP: contenders.EXACT_FIELDS | {"gradient": "one_step"},
        f"{PAPER_ROW}, our kernels": contenders.PAPER_FIELDS,
    }
    scans = {PAPER_ROW: contenders.chunked_scan}
    if device.type == "cuda":
        scans[f"{PAPER_ROW}, our scan"] = contenders.fastest_scan
    else:
        scans[f"{PAPER_ROW}, loop over time"] = paper.scan_over_time

    def one_step(option):
        with contenders.running(of_ours.model, **option):
            return of_ours.step()

    functions = {name: functools.partial(one_step, option) for name, option in options.items()}
    owners = dict.fromkeys(functions, of_ours)
    for name, scan in scans.items():
        owners[name] = contenders.Trainer(contenders.paper_model(of_ours.model, scan), s, device)
        functions[name] = owners[name].step
    others = {OUR_MAMBA: (contenders.our_mamba, dict(loss_only=True))}
    if device.type == "cpu" or contenders.present("mamba_ssm") or s.length <= 256:
        others[MAMBA] = contenders.their_mamba, {}
    else:
        print(f"without {MAMBA}: its slow path takes minutes a step without mamba-ssm")
    made = {name: (make(s), extra) for name, (make, extra) in wanted(a, others).items()}
    made |= {name: (model, {}) for name, model in wanted(a, contenders.peers(s, device)).items()}
    for name, (model, extra) in made.items():
        owners[name] = contenders.Trainer(model, s, device, **extra)
        functions[name] = owners[name].step
    return wanted(a, functions), owners


def peak_memory(fn, trainer):
    """Bytes at the worst moment of a step, other models that lie in memory left out."""
    torch.cuda.synchronize()
    at_rest = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fn()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - at_rest + trainer.resident()


def bound(a, name, trainer, evaluations, limits):
    """The least time of a step: `evaluations`, three for the one that is differentiated, and three
    times what is computed once; None for a model that does not say."""
    model = getattr(trainer.model, "weights", trainer.model)  # the paper's procedure borrows ours
    tokens = a.shape.tokens
    if evaluations is None or name == OUR_MAMBA:
        return None
    once = sum(block.flops_per_token()[0] for block in contenders.blocks(model))
    head = 2 * model.lm_head.weight.numel()
    iteration = iteration_seconds(a.shape, tokens, limits) * a.shape.layers
    solve = evaluations - 1 if name == OURS else evaluations
    return (solve + 3) * iteration + 3 * tokens * (once + head) / limits.gemm


def measure(a, limits):
    """Rows for the shape as it is, in the order of printing."""
    functions, owners = trainers(a)
    seconds, results = shortest(functions, a)
    rows = []
    for name, taken in seconds.items():
        row = dict(name=name, seconds=taken)
        if taken is not None:
            row |= {
                key: None if value is None else float(value)
                for key, value in zip(("evaluations", "failed", "loss"), results[name])
            }
            row["bound"] = bound(a, name, owners[name], row["evaluations"], limits)
            if a.device.type == "cuda":
                row["peak_bytes"] = peak_memory(functions[name], owners[name])
        row["tokens_per_second"] = taken and a.shape.tokens / taken
        rows.append(row)
    return rows


def table(rows):
    """What `show` prints: ratios above 1 are faster than the row that the column names."""
    base = {row["name"]: row["seconds"] for row in rows}
    memory = any("peak_bytes" in row for row in rows)
    printed = []
    for row in rows:
        evaluations, taken = row.get("evaluations"), row["seconds"]
        cells = {
            "": row["name"],
            "ms": ms(taken),
            "tokens/s": f"{row['tokens_per_second'] or 0:,.0f}",
            "evaluations": "–" if evaluations is None else f"{evaluations:.1f}",
            "vs paper's": ratio(base.get(PAPER_ROW), taken),
            "in Mambas": ratio(taken, base.get(OUR_MAMBA)),
            "vs transformers'": ratio(base.get(MAMBA), taken),
            "of bound": share(row["bound"], taken) if row.get("bound") else "–",
        }
        if memory:
            peak = row.get("peak_bytes")
            cells["peak GiB"] = "–" if peak is None else f"{peak / 2**30:.2f}"
        printed.append(cells)
    return printed


def saved_bytes(model, ids, **fields):
    """Bytes that the layers' forward keeps for the backward, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen = {}

    def pack(t):
        storage = t.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes(), t  # held, so that no address comes twice
        return t

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with model.solving(**fields), hooks:
        output = model.backbone(ids)
    del output
    return sum(size for at, (size, _) in seen.items() if at not in own)


def scaling(a, limits):
    """Rows for every length, each with its shape's length, and how far from a line they are."""
    rows, whole = [], a.shape
    for length in a.lengths:
        a.shape = whole._replace(length=length)
        found = [dict(row, length=length) for row in measure(a, limits)]
        model = contenders.ours(a.shape).to(a.device).train()
        ids = torch.randint(a.shape.vocab, (a.shape.batch, length)).to(a.device)
        for row in found:
            if row["name"] == OURS:
                row["saved_bytes"] = saved_bytes(model, ids, **contenders.EXACT_FIELDS)
        rows += found
    a.shape = whole
    return rows


def straight(lengths, seconds):
    """Slope and intercept of the least-squares line, and the largest distance of a point from it,
    relative."""
    import numpy as np

    slope, intercept = np.polyfit(lengths, seconds, 1, w=1 / np.asarray(seconds))
    line = slope * np.asarray(lengths) + intercept
    return float(slope), float(intercept), float(np.abs(np.asarray(seconds) / line - 1).max())


def plot(series, a, path):
    """series: {name: (lengths, seconds, (slope, intercept, worst))}."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, (lengths, seconds, (slope, intercept, worst)) in series.items():
        (points,) = axes.plot(lengths, seconds, "o", label=f"{name}: a line within {worst:.0%}")
        line = [slope * x + intercept for x in lengths]
        axes.plot(lengths, line, color=points.get_color(), lw=1)
    axes.set_xlabel("tokens in a sequence")
    axes.set_ylabel("seconds of a training step")
    axes.set_title(f"D {a.shape.d_model}, {a.shape.layers} layers, batch {a.shape.batch}")
    axes.set_ylim(0)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    p = parser(__doc__, repeats=8, shape="small,words")
    p.add_argument("--lengths", type=number_list, help="256,512,…: the scaling instead")
    p.add_argument("--plot", help="draw the scaling here")
    a = parse(p)
    if a.lengths and not a.rows:  # transformers' backward is quadratic on a CPU
        a.rows = f"{OURS}|{OUR_MAMBA}"
    with_each_thread_count(a, shown_lengths if a.lengths else shown_shapes)


def shown_shapes(a, limits, threads):
    """Measures every shape, prints a table of each, and returns the rows of all."""
    found = []
    for shape in a.shapes:
        a.shape = shape
        rows = measure(a, limits)
        show(title(a, limits, threads), table(rows))
        found += [dict(row, shape=shape._asdict()) for row in rows]
    return found


def shown_lengths(a, limits, threads):
    """Measures every length, prints a table and the lines through them, and returns the rows."""
    rows = scaling(a, limits)
    series = {}
    for name in dict.fromkeys(row["name"] for row in rows):
        points = [(r["length"], r["seconds"]) for r in rows if r["name"] == name]
        points = [point for point in points if point[1] is not None]
        if len(points) > 1:
            series[name] = (*zip(*points), straight(*zip(*points)))
    cells = []
    for row in rows:
        if not row["seconds"] or row["name"] not in series:
            continue
        saved = row.get("saved_bytes")
        cells.append(
            {
                "length": f"{row['length']:,}",
                "": row["name"],
                "ms": ms(row["seconds"]),
                "µs a token": f"{1e6 / row['tokens_per_second']:.1f}",
                "saved, MiB": "–" if saved is None else f"{saved / 2**20:.1f}",
                "bytes a token": "–"
                if saved is None
                else f"{saved / (row['length'] * a.shape.batch):,.0f}",
            }
        )
    show(title(a, limits, threads), cells)
    for name, (*_, (slope, intercept, worst)) in series.items():
        line = f"{slope * 1e3:.4f} ms a token of length + {intercept * 1e3:.1f} ms"
        print(f"{name}: {line}; no point is further than {worst:.1%} from it")
    if a.plot:
        plot(series, a, a.plot)
    return rows


if __name__ == "__main__":
    main()
