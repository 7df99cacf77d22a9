"""`fprnn synthetic COMMAND`, also `python -m synthetic`: thin, one function a command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from lm.cli.arguments import (
    SEED,
    HelpFormatter,
    Integer,
    add_examples,
    add_overrides,
    add_trust,
    parse,
    run,
)
from synthetic.lengths import MAX_LENGTH

EPILOG = """examples:
  fprnn synthetic train --config configs/synthetic/small/s3.yaml
  fprnn synthetic eval runs/synthetic/s3 eval.lengths=2:512
  fprnn synthetic inspect runs/synthetic/s3 213 231 321
  fprnn synthetic report fig3c --run
  fprnn synthetic validate configs/synthetic/models/*.yaml --jobs 2
"""
ABOUT: dict[str, Any] = {
    "description": "Does a sequence mixer track state, copy, compute and remember?",
    "epilog": EPILOG,
    "formatter_class": HelpFormatter,
}


def _train(args: argparse.Namespace) -> int:
    from lm.common.console import say
    from lm.config.load import refuse_sweep
    from lm.runs import places
    from synthetic.config import load

    cfg = load(args.config, args.override, args.job_index)
    refuse_sweep(cfg, args.config)
    places.check_folders({"task.data": cfg.task.data})

    from lm.runs.run_dir import RunDir
    from synthetic.results import summary, verdict
    from synthetic.train import train

    result = train(cfg, args.overwrite)
    seconds = result["training_seconds"]
    say(summary(result, f"{cfg.run_dir}: {result['updates']} updates in {seconds:.0f} s"))
    for line in verdict(result):
        say(line)
    say(f"result   {RunDir(cfg.run_dir).result}")
    return 0 if all(bar["passed"] for bar in result["bars"]) else 2


def _eval(args: argparse.Namespace) -> int:
    from lm.runs import places

    places.check_run(args.run)

    from lm.common.console import say
    from synthetic.evaluate import evaluate_run
    from synthetic.results import summary, verdict

    result = evaluate_run(args.run, args.override, args.out, args.trust)
    say(summary(result, args.run))
    for line in verdict(result):
        say(line)
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from lm.runs import places

    places.check_run(args.run)

    from lm.evaluation.inspection.show import choose_page, show
    from synthetic.inspection import inspect_run

    out = choose_page(args.run, args.out)
    show(inspect_run(args.run, args.word, args.length, args.seed, args.trust), out)
    return 0


def _validate(args: argparse.Namespace) -> int:
    from lm.config.yaml_text import load_tree

    overrides = [text for text in args.config if "=" in text]
    paths = [text for text in args.config if "=" not in text]
    for path in paths:
        load_tree(path)

    from lm.common.console import say
    from synthetic.plots import curves
    from synthetic.profile import describe, judge, summarize, write
    from synthetic.results import table
    from synthetic.validate import validate

    out_dir = args.out_dir or f"runs/validate{'_quick' * args.quick}"
    runs = validate(paths, overrides, out_dir, args.jobs, args.quick, args.seeds)
    say(table(summarize(runs), "Models and their abilities"))
    drawing = curves(runs, "Abilities over test lengths", wide=1)
    say("\n".join(describe(runs, drawing)))
    for path in write(drawing, Path(out_dir)):
        say(f"wrote    {path}")
    return 0 if judge(runs)["passed"].all() else 2


def _report(args: argparse.Namespace) -> int:
    from lm.runs import places

    places.check_files({"--config": args.config})

    from lm.common.console import say
    from synthetic.report import REPORTS, report
    from synthetic.results import table

    if args.name is None:
        entries = [{"report": k, "paper": v.where, "shows": v.title} for k, v in REPORTS.items()]
        say(table(entries, "Reports"))
        return 0
    run, jobs = args.run_missing, args.jobs
    report(args.name, args.scale, tuple(args.override), args.config, run=run, jobs=jobs)
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line of `python -m synthetic`. Nothing heavy is imported to build it."""
    whole = argparse.ArgumentParser(prog="python -m synthetic", **ABOUT)
    _add_commands(whole)
    return whole


def add(commands: argparse._SubParsersAction) -> None:
    """Adds `synthetic`, with commands of its own, to those of another command line."""
    _add_commands(commands.add_parser("synthetic", help="the validation suite", **ABOUT))


def add_demo(commands: argparse._SubParsersAction) -> None:
    """Add `demo` to another command line."""
    command = commands.add_parser(
        "demo",
        help="train FP-Mamba and Mamba side by side, and see what each can do: minutes, two cores",
        description="Train one layer of FP-Mamba and two of Mamba at once on words of the group S3:"
        " the answer after each letter is the product of all so far. Both learn on words of up to"
        " 16 letters (FP-Mamba in a curriculum, with noise on its states; Mamba at all lengths from"
        " the start, because a curriculum would keep it at short words) and then read words of up"
        " to 1,024. The figure is runs/demo_s3/reports/small/demo.png. Some 80 seconds on two"
        " cores. A stopped demo goes on; a finished one is only drawn. The state that a"
        " model decodes at each token: fprnn synthetic inspect RUN --length 24.",
    )
    command.add_argument("name", nargs="?", choices=["s3"], default="s3", help="default: s3")
    command.add_argument("override", nargs="*", metavar="key=value", help="of both models' YAML")
    command.set_defaults(run_command=_demo)


def _demo(args: argparse.Namespace) -> int:
    from synthetic.report import report

    report("demo", "small", ("out_dir=runs/demo_s3", *args.override), run=True, jobs=2)
    return 0


def _add_commands(whole: argparse.ArgumentParser) -> None:
    commands = whole.add_subparsers(dest="synthetic", required=True, metavar="COMMAND")
    _add_train(commands)
    _add_eval(commands)
    _add_inspect(commands)
    _add_validate(commands)
    _add_report(commands)
    add_examples(commands, EPILOG)


def _add_train(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "train",
        help="train a model on a task and evaluate it over lengths",
        description="Train the run a YAML describes, or continue it after a kill. OVERRIDES are"
        " dotted keys, e.g. task.group=A5 model.mixer_rank=4; docs/config-synthetic.md lists all"
        " keys. Exit status 2: trained, but below one of the config's bars.",
    )
    command.add_argument("--config", required=True, metavar="YAML", help="the run to train")
    command.add_argument(
        "--overwrite", action="store_true", help="delete the run of this name first"
    )
    command.add_argument(
        "--job-index",
        type=Integer(0),
        metavar="I",
        help="train point I of the YAML's sweep, from 0 on",
    )
    add_overrides(command)
    command.set_defaults(run_command=_train)


def _add_eval(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "eval",
        help="evaluate a trained run over other lengths and seeds",
        description="OVERRIDES: eval.lengths=16,32,48 or 2:50:1 (from, to, step) or 2:512 (from,"
        " to, ×√2 each); eval.seeds=[0,1,2] of the test data; other keys of eval and solver.",
    )
    command.add_argument("run", metavar="RUN", help="a run directory")
    command.add_argument("--out", help="results JSON (default: RUN/eval.json)")
    add_trust(command)
    add_overrides(command)
    command.set_defaults(run_command=_eval)


def _add_inspect(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "inspect",
        help="look inside: the decoded state and ℓ* at every token of one sequence",
        description="Show, in the terminal and on one HTML page, what a trained run makes of one"
        " sequence: the state it decodes at each token beside the right one, ℓ*, states, gates and"
        " decays. WORD: the input's tokens by name (213 231 for S3); without,"
        " --length draws a test sequence. docs/inspect.md.",
    )
    command.add_argument("run", metavar="RUN", help="a run directory")
    command.add_argument("word", nargs="*", metavar="WORD", help="the input, token by token")
    command.add_argument(
        "--length",
        type=Integer(1, MAX_LENGTH),
        metavar="N",
        help="draw a test sequence of this length, at least 1, instead",
    )
    command.add_argument(
        "--seed", type=SEED, default=0, help="of the drawing, at least 0 (default: 0)"
    )
    command.add_argument(
        "--out",
        metavar="HTML",
        help="the page (default: RUN/inspect.html); an earlier page of this command is replaced,"
        " any other file is not",
    )
    add_trust(command)
    command.set_defaults(run_command=_inspect, list_argument="word")


def _add_validate(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "validate",
        help="the profile of models: abilities, over lengths and seeds",
        description="State tracking, automata, brackets, arithmetic, copying, recall, …: trains a"
        " small recipe for each ability on the `model:` section of any YAML (several: side by"
        " side), tries it on up to 64 times longer sequences, prints one table, and writes into DIR"
        " the numbers (validate.csv) and curves over lengths (lengths.png). Finished runs are kept,"
        " so a stopped command continues. Exit status 2: a bar was missed.",
    )
    command.add_argument(
        "config",
        nargs="+",
        metavar="CONFIG",
        help="YAMLs with a `model:`, and key=value of model, solver and optim",
    )
    command.add_argument(
        "--out-dir",
        metavar="DIR",
        help="default: runs/validate, of --quick runs/validate_quick",
    )
    command.add_argument(
        "--quick",
        action="store_true",
        help="six of the thirteen abilities, one seed, fewer test sequences: minutes a model",
    )
    command.add_argument(
        "--seeds",
        type=SEED,
        nargs="+",
        metavar="SEED",
        help="of training, each at least 0 (default: 0 1 2; with --quick: 0)",
    )
    command.add_argument(
        "--jobs",
        type=Integer(),
        default=1,
        metavar="N",
        help="runs at once, at least 1 (default: 1)",
    )
    command.set_defaults(run_command=_validate, list_argument="config")


def _add_report(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "report",
        help="the paper's figures and tables from the runs that are finished",
        description="Without NAME: all reports. With NAME:"
        " draw it into OUT_DIR/reports/SCALE, with its numbers as CSV, and print the commands of"
        " the runs that are missing. OVERRIDES go over every run, e.g."
        " task.data=data/babi/en-valid. Exit status 1: no run.",
    )
    command.add_argument(
        "name", nargs="?", metavar="NAME", help="fig1, tab1, catbabi, … (see the list)"
    )
    command.add_argument(
        "--scale", choices=("small", "paper"), default="small", help="default: small"
    )
    command.add_argument(
        "--config", metavar="YAML", help="default: configs/synthetic/SCALE/NAME.yaml"
    )
    command.add_argument(
        "--run", dest="run_missing", action="store_true", help="train what is missing"
    )
    command.add_argument(
        "--jobs",
        type=Integer(),
        default=1,
        metavar="N",
        help="with --run: processes at once, at least 1 (default: 1)",
    )
    add_overrides(command)
    command.set_defaults(run_command=_report)


def main(argv: list[str] | None = None) -> int:
    """Run one command; see `lm.cli.arguments.run`."""
    return run(parse(parser(), argv))


if __name__ == "__main__":
    sys.exit(main())
