"""Time a full training step (forward, backward, clip, AdamW): ours, the paper's, and Mamba.

python -m benchmarks.training_step [--shape small,words --threads 1,2 --json FILE]
python -m benchmarks.training_step --patterns "mamba*4|mamba*3 fp_mamba1"   # stacks of other layers

All fixed-point rows have the same batch and the same seeded, untrained weights, so that the paper's
procedure always needs the same number of iterations. With --patterns the rows are models with these
layers, compared with the first.
"""

import functools

from benchmarks import contenders, paper
from benchmarks.harness import (
    format_ms,
    format_ratio,
    make_parser,
    parse_options,
    run,
    time_in_turns,
)
from lm.model.fields import parse_pattern

# Names of rows.
OURS, ONE_STEP = "exact gradient", "exact token, one-step gradient"
PAPER = "paper's procedure"
OUR_MAMBA, MAMBA = "Mamba on our scan", "transformers' Mamba"


def make_stacks(args):
    """Return {pattern: step function} and {pattern: Trainer} of models with these layers."""
    trainers = {}
    for pattern in args.patterns.split("|"):
        shape = args.shape._replace(layers=len(parse_pattern(pattern)))
        model = contenders.make_fpmamba(shape, layers=pattern, use_short_conv=True)
        trainers[pattern] = contenders.Trainer(model, shape, args.device, loss_only=True)
    return {name: trainer.step for name, trainer in trainers.items()}, trainers


def make_contestants(args):
    """Return {name: step function} and {name: Trainer} of the compared models."""
    shape, device = args.shape, args.device
    trainer = contenders.Trainer(contenders.make_fpmamba(shape), shape, device, loss_only=True)
    solvers = {
        OURS: contenders.EXACT_FIELDS,
        ONE_STEP: contenders.EXACT_FIELDS | {"gradient": "one_step"},
        f"{PAPER}, our kernels": contenders.PAPER_FIELDS,
    }

    def train_step(solver_fields):
        with contenders.solve_with(trainer.model, **solver_fields):
            return trainer.step()

    functions = {name: functools.partial(train_step, fields) for name, fields in solvers.items()}
    trainers = dict.fromkeys(functions, trainer)
    scans = {PAPER: contenders.scan_in_chunks}
    if device.type == "cpu":  # loops over time take minutes on a GPU
        scans[f"{PAPER}, loop over time"] = paper.scan_over_time
    models = {
        name: contenders.make_paper_model(trainer.model, scan) for name, scan in scans.items()
    }
    for name, model in models.items():
        trainers[name] = contenders.Trainer(model, shape, device)
    our_mamba = contenders.make_fpmamba(shape, layers="mamba")
    trainers[OUR_MAMBA] = contenders.Trainer(our_mamba, shape, device, loss_only=True)
    if device.type == "cpu":
        mamba = contenders.make_transformers_mamba(shape)
        trainers[MAMBA] = contenders.Trainer(mamba, shape, device)
    functions |= {name: t.step for name, t in trainers.items() if name not in functions}
    return functions, trainers


def measure(args):
    """Return a row for each model; a model that ran out of memory has only a name."""
    functions, trainers = make_stacks(args) if args.patterns else make_contestants(args)
    seconds, results = time_in_turns(functions, args)
    rows = []
    for name, step_seconds in seconds.items():
        row = dict(name=name, seconds=step_seconds)
        if step_seconds is not None:
            for key in ("evaluations", "failed", "loss"):
                value = getattr(results[name], key)
                row[key] = None if value is None else float(value)
            row["parameters"] = sum(p.numel() for p in trainers[name].parameters)
            row["tokens_per_second"] = args.shape.tokens / step_seconds
        rows.append(row)
    return rows


def format_rows(rows):
    """Format rows for `print_table`.

    In "vs" columns, a ratio above 1 is faster than the named row; "in Mambas" is a relative time.
    """
    seconds_by_name = {row["name"]: row["seconds"] for row in rows}
    first = rows[0]["name"]
    text_rows = []
    for row in rows:
        evaluations, seconds = row.get("evaluations"), row["seconds"]
        text_rows.append(
            {
                "": row["name"],
                "ms": format_ms(seconds),
                "tokens/s": f"{row.get('tokens_per_second', 0):,.0f}",
                "parameters": f"{row.get('parameters', 0) / 1e3:,.0f} k",
                "evaluations": "–" if evaluations is None else f"{evaluations:.1f}",
                f"vs {first}": format_ratio(seconds_by_name[first], seconds),
                "vs paper's": format_ratio(seconds_by_name.get(PAPER), seconds),
                "in Mambas": format_ratio(seconds, seconds_by_name.get(OUR_MAMBA)),
                "vs transformers'": format_ratio(seconds_by_name.get(MAMBA), seconds),
            }
        )
    return text_rows


if __name__ == "__main__":
    parser = make_parser(__doc__, repeats=8, shape="small,words")
    parser.add_argument("--patterns", default="", help="P|P|…: layers of each model")
    run(parse_options(parser), measure, format_rows)
