"""`python -m synthetic COMMAND` (also `fprnn-synthetic`): thin, one function a command."""

from __future__ import annotations

import argparse
import sys

from lm.arguments import SEED, Whole, run, words_after_options
from synthetic.lengths import parse_ranges

EPILOG = """examples:
  python -m synthetic train --config configs/synthetic/small/s3.yaml
  python -m synthetic eval runs/synthetic/s3 --lengths 2:512
  python -m synthetic inspect runs/synthetic/s3 213 231 321
  python -m synthetic report fig3c --run
  python -m synthetic validate configs/synthetic/models/*.yaml --jobs 2
"""


def _train(args) -> int:
    from lm.config import refuse_sweep
    from lm.console import say
    from lm.run_dir import RunDir
    from synthetic.config import load
    from synthetic.results import summary, verdict
    from synthetic.train import train

    cfg = load(args.config, args.override, args.job_index)
    refuse_sweep(cfg, args.config)
    result = train(cfg, args.overwrite)
    say(summary(result, f"{cfg.run_dir}: {result['updates']} updates in"
                        f" {result['training_seconds']:.0f} s"))  # fmt: skip
    if text := verdict(result):
        say(text)
    say(f"result   {RunDir(cfg.run_dir).result}")
    return 0 if all(bar["passed"] for bar in result["bars"]) else 2


def _eval(args) -> int:
    from lm.console import say
    from synthetic.evaluate import evaluate_run
    from synthetic.results import summary, verdict

    result = evaluate_run(args.run, args.lengths, args.seeds, args.override, args.out)
    say(summary(result, f"{args.run}"))
    if text := verdict(result):
        say(text)
    return 0


def _inspect(args) -> int:
    from pathlib import Path

    from lm.inspection.show import check_page, default_page, show
    from synthetic.inspection import inspect_run

    out = Path(args.out) if args.out else default_page(args.run)
    check_page(out)
    show(inspect_run(args.run, args.word, args.length, args.seed), out)
    return 0


def _validate(args) -> int:
    from lm.console import say
    from synthetic.validate import table, validate

    overrides = [text for text in args.config if "=" in text]
    paths = [text for text in args.config if "=" not in text]
    rows = validate(paths, overrides, args.out_dir, args.jobs)
    say(table(rows))
    return 0 if all(row["passed"] for row in rows) else 2


def _report(args) -> int:
    from lm.console import say
    from synthetic.report import overview, report

    name, overrides = args.name, list(args.override)
    if name and "=" in name:  # no report, only overrides
        name, overrides = None, [name, *overrides]
    if args.out_dir:
        overrides.append(f"out_dir={args.out_dir}")
    if name is None:
        made, problems = overview(args.scale, tuple(overrides))
        say(made)
        for problem in problems:
            say(f"note: {problem}")
        return 0
    report(name, args.scale, tuple(overrides), args.config, args.out, args.run_missing, args.jobs)
    return 0


def _lengths(text: str) -> str:
    try:
        parse_ranges(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None
    return text


def parser() -> argparse.ArgumentParser:
    """The command line. Nothing heavy is imported to build it or to print its help."""
    p = argparse.ArgumentParser(
        prog="python -m synthetic",
        description="Does a sequence mixer track state, copy, compute and remember?",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")

    c = commands.add_parser(
        "train",
        help="train a model on a task and evaluate it over lengths",
        description="Train the run a YAML describes, or continue it after a kill. OVERRIDES are"
        " dotted keys, e.g. task.group=A5 model.mixer_rank=4; docs/synthetic.md lists all keys."
        " Exit status 2: trained, but below one of the config's bars.",
    )
    c.add_argument("--config", required=True, metavar="YAML")
    c.add_argument("--overwrite", action="store_true", help="delete the run of this name first")
    c.add_argument(
        "--job-index", type=Whole(0), metavar="I",
        help="train point I of the YAML's sweep, from 0 on",
    )  # fmt: skip
    c.add_argument("override", nargs="*", metavar="key=value")
    c.set_defaults(run_command=_train)

    c = commands.add_parser(
        "eval",
        help="evaluate a trained run over other lengths and seeds",
        description="Lengths: 16,32,48; 2:50:1 (from, to, step); 2:512 (from, to, ×√2 each).",
    )
    c.add_argument("run", metavar="RUN")
    c.add_argument("--lengths", type=_lengths, help="default: the config's eval.lengths")
    c.add_argument(
        "--seeds", type=SEED, nargs="+", metavar="SEED",
        help="of the test data, each at least 0 (default: the config's eval.seeds)",
    )  # fmt: skip
    c.add_argument("--out", help="results JSON (default: RUN/eval.json)")
    c.add_argument("override", nargs="*", metavar="key=value")
    c.set_defaults(run_command=_eval)

    c = commands.add_parser(
        "inspect",
        help="look inside: the decoded state and ℓ* at every token of one sequence",
        description="Show, in the terminal and on one HTML page, what a trained run makes of one"
        " sequence: the state it decodes at each token beside the right one, ℓ*, states, gates and"
        " decays. WORD: the input's tokens by name (213 231 for S3, '(2+(1-3))' for arithmetic, the"
        " string for copying); without, --length draws a test sequence. docs/inspect.md.",
    )
    c.add_argument("run", metavar="RUN")
    c.add_argument("word", nargs="*", metavar="WORD")
    c.add_argument(
        "--length", type=Whole(), metavar="N", help="draw a test sequence of this length instead"
    )
    c.add_argument("--seed", type=SEED, default=0, help="of the drawing, at least 0 (default: 0)")
    c.add_argument(
        "--out",
        metavar="HTML",
        help="the page (default: RUN/inspect.html); an earlier page of this command is replaced,"
        " any other file is not",
    )
    c.set_defaults(run_command=_inspect)

    c = commands.add_parser(
        "validate",
        help="the quick set on model configs: one table",
        description="State tracking, copying, arithmetic, memory: trains the four small recipes on"
        " the `model:` section of any YAML (several: side by side) and prints one table. Finished"
        " runs are kept, so a stopped command continues. Exit status 2: a bar was missed.",
    )
    c.add_argument(
        "config", nargs="+", metavar="CONFIG", help="also key=value, of model, solver and optim"
    )
    c.add_argument("--out-dir", default="runs/validate", metavar="DIR")
    c.add_argument(
        "--jobs", type=Whole(), default=1, metavar="N", help="runs at once, at least 1 (default: 1)"
    )
    c.set_defaults(run_command=_validate)

    c = commands.add_parser(
        "report",
        help="the paper's figures and tables from the runs that are finished",
        description="Without NAME: all reports and how many of their runs are found. With NAME:"
        " draw it, write its numbers as CSV, and print the commands of the runs that are missing."
        " OVERRIDES go over every run, e.g. task.data=data/babi/en-valid. Exit status 1: no run.",
    )
    c.add_argument("name", nargs="?", metavar="NAME", help="fig1, tab1, catbabi, … (see the list)")
    c.add_argument("--scale", choices=("small", "paper"), default="small", help="default: small")
    c.add_argument("--config", metavar="YAML", help="default: configs/synthetic/SCALE/NAME.yaml")
    c.add_argument("--run", dest="run_missing", action="store_true", help="train what is missing")
    c.add_argument(
        "--jobs", type=Whole(), default=1, metavar="N",
        help="with --run: processes at once, at least 1 (default: 1)",
    )  # fmt: skip
    c.add_argument("--out-dir", metavar="DIR", help="of the runs (default: the config's out_dir)")
    c.add_argument("--out", metavar="FOLDER", help="default: DIR/reports/SCALE")
    c.add_argument("override", nargs="*", metavar="key=value")
    c.set_defaults(run_command=_report)
    return p


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The arguments; key=value overrides may stand before and after options."""
    p = parser()
    args, rest = p.parse_known_args(argv)
    if args.command == "inspect":
        words, rest = words_after_options(rest)
        args.word = [*args.word, *words]
    if any("=" not in text or text.startswith("-") for text in rest):
        p.error(f"unrecognized arguments: {' '.join(rest)}")
    if args.command == "validate":  # which takes them among its configs
        args.config = [*args.config, *rest]
    elif rest:
        args.override = [*args.override, *rest]
    return args


def main(argv: list[str] | None = None) -> int:
    """Run one command; see `lm.arguments.run`."""
    return run(parse(argv))


if __name__ == "__main__":
    sys.exit(main())
