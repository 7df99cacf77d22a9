"""Command line `fprnn synthetic COMMAND`, also `python -m synthetic`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lm.cli.arguments import (
    SEED,
    HelpFormatter,
    Integer,
    add_examples,
    add_job_index,
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
  fprnn synthetic inspect runs/synthetic/s3 runs/synthetic/a5 --errors --out runs/errors
  fprnn synthetic report fig3c --run
  fprnn synthetic validate configs/synthetic/models/*.yaml --jobs 2
"""
PARSER_OPTIONS: dict[str, Any] = {
    "description": "Can a sequence mixer track state, copy, compute and remember?",
    "epilog": EPILOG,
    "formatter_class": HelpFormatter,
}


def _train(args: argparse.Namespace) -> int:
    from lm.common.console import say
    from lm.config.load import refuse_sweep
    from lm.runs import path_checks
    from synthetic.config import load as load_config

    cfg = load_config(args.config, args.override, args.job_index)
    refuse_sweep(cfg, args.config)
    path_checks.check_folder("task.data", cfg.task.data)

    from lm.runs.run_dir import RunDir
    from synthetic.results import build_summary_table, format_thresholds
    from synthetic.train import train

    result = train(cfg, args.overwrite)
    duration = f"{result['updates']} updates in {result['training_seconds']:.0f} s"
    say(build_summary_table(result, f"{cfg.run_dir}: {duration}"))
    for line in format_thresholds(result):
        say(line)
    say(f"result   {RunDir(cfg.run_dir).result}")
    return 0 if all(entry["passed"] for entry in result["bars"]) else 2  # "bars": the thresholds


def _eval(args: argparse.Namespace) -> int:
    from lm.runs import path_checks

    path_checks.check_run(args.run)  # before the slow imports

    from lm.common.console import say
    from synthetic.evaluate import evaluate_run
    from synthetic.results import build_summary_table, format_thresholds

    result = evaluate_run(args.run, args.override, args.out, args.trust)
    say(build_summary_table(result, args.run))
    for line in format_thresholds(result):
        say(line)
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from lm.runs import path_checks

    path_checks.check_run(args.run)  # before the slow imports
    if args.errors:
        return _inspect_errors(args)

    from lm.evaluation.inspection.show import choose_page, show
    from synthetic.inspection import inspect_run

    out = choose_page(args.run, args.out)
    show(inspect_run(args.run, args.tokens, args.length, args.seed, args.trust), out)
    return 0


def _inspect_errors(args: argparse.Namespace) -> int:
    from lm.runs import path_checks

    runs = [args.run, *args.tokens]
    for run_dir in runs:
        path_checks.check_run(run_dir)

    from lm.common.console import say
    from lm.common.files import check_replaceable_with_record, writing
    from synthetic.error_control import MAX_LENGTH, measure_error_control
    from synthetic.error_figure import COLUMNS, FILES, draw_error_control
    from synthetic.results import build_table

    folder = Path(args.out or "runs/errors")
    record, figure = (folder / name for name in FILES)
    check_replaceable_with_record(record, ",".join(COLUMNS), figure)
    length = args.length or MAX_LENGTH
    drawing = draw_error_control(
        [measure_error_control(run_dir, length, args.seed, args.trust) for run_dir in runs]
    )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        drawing.table.to_csv(record, index=False)
        drawing.figure.savefig(figure, dpi=140)
    say(build_table(drawing.summary, "Error control: accuracies at T, horizons"))
    say("\n".join([*drawing.notes, *(f"wrote    {path}" for path in (record, figure))]))
    return 0


def _validate(args: argparse.Namespace) -> int:
    from lm.config.yaml_text import load_tree

    # The directory of a sweep's point may contain `=`.
    paths = [text for text in args.config if "=" not in text or Path(text).is_file()]
    overrides = [text for text in args.config if text not in paths]
    for path in paths:
        load_tree(path)  # refuses an unreadable YAML before the slow imports

    from lm.common.console import say
    from synthetic.ability_table import (
        describe_runs,
        judge_abilities,
        summarize_abilities,
        write_files,
    )
    from synthetic.plots import draw_curves
    from synthetic.results import build_table
    from synthetic.validate import validate

    out_dir = args.out_dir or ("runs/validate_quick" if args.quick else "runs/validate")
    runs = validate(paths, overrides, out_dir, args.jobs, args.quick, args.seeds)
    say(build_table(summarize_abilities(runs), "Models and their abilities"))
    # log_ratio=1: the length axis is always logarithmic, because the test lengths double up to 64
    # times the training length, which may be below the default ratio.
    drawing = draw_curves(runs, "Abilities over test lengths", log_ratio=1)
    say("\n".join(describe_runs(runs, drawing)))
    for path in write_files(drawing, Path(out_dir)):
        say(f"wrote    {path}")
    return 0 if judge_abilities(runs)["passed"].all() else 2


def _report(args: argparse.Namespace) -> int:
    from lm.config.yaml_text import load_tree

    if args.config is not None:
        load_tree(args.config)  # refuses an unreadable YAML before the slow imports

    from lm.common.console import say
    from synthetic.report import REPORTS, report
    from synthetic.results import build_table

    if args.name is None:
        entries = [
            {"report": name, "paper": entry.paper_label, "shows": entry.title}
            for name, entry in REPORTS.items()
        ]
        say(build_table(entries, "Reports"))
        return 0
    report(args.name, args.scale, tuple(args.override), args.config, args.run_missing, args.jobs)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Build the command line of `python -m synthetic`, without importing anything slow."""
    parser = argparse.ArgumentParser(prog="python -m synthetic", **PARSER_OPTIONS)
    _add_commands(parser)
    return parser


def add_synthetic(commands: argparse._SubParsersAction) -> None:
    """Add the command `synthetic`, with its subcommands, to another command line."""
    _add_commands(commands.add_parser("synthetic", help="the validation suite", **PARSER_OPTIONS))


def add_demo(commands: argparse._SubParsersAction) -> None:
    """Add the command `demo` to another command line."""
    command = commands.add_parser(
        "demo",
        help="train FP-Mamba and Mamba side by side and compare them: minutes on two cores",
        description="Train FP-Mamba (one layer) and Mamba (two layers) at once on the word problem"
        " of the group S3: the answer after each element is the product of all elements so far."
        " Both are trained on sequences of up to 16 elements and tested on up to 1,024. FP-Mamba"
        " uses a length curriculum and noise on its states. Mamba trains on all lengths from the"
        " start, because it does not advance in a curriculum. The figure is"
        " runs/demo_s3/reports/small/demo.png. It takes about 80 seconds on two cores. The same"
        " command continues a stopped demo and redraws a finished one. To see the state that a"
        " model decodes at each token: fprnn synthetic inspect RUN --length 24.",
    )
    command.add_argument("name", nargs="?", choices=["s3"], default="s3", help="default: s3")
    command.add_argument(
        "override", nargs="*", metavar="key=value", help="applied to both models' YAML"
    )
    command.set_defaults(run_command=_demo)


def _demo(args: argparse.Namespace) -> int:
    from synthetic.report import report

    report("demo", "small", ("out_dir=runs/demo_s3", *args.override), run_missing=True, jobs=2)
    return 0


def _add_commands(parent: argparse.ArgumentParser) -> None:
    commands = parent.add_subparsers(dest="synthetic", required=True, metavar="COMMAND")
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
        description="Train the run that a YAML describes, or continue it after a kill. OVERRIDES"
        " are dotted keys, e.g. task.group=A5 model.mixer_rank=4; docs/config-synthetic.md lists"
        " all keys. Exit status 2: the run finished, but missed one of the config's thresholds.",
    )
    command.add_argument("--config", required=True, metavar="YAML", help="the run to train")
    command.add_argument(
        "--overwrite", action="store_true", help="delete the run of this name first"
    )
    add_job_index(command, "train point I of the YAML's sweep, counted from 0")
    add_overrides(command)
    command.set_defaults(run_command=_train)


def _add_eval(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "eval",
        help="evaluate a trained run over other lengths and seeds",
        description="OVERRIDES are keys of eval and solver. Examples: eval.lengths=16,32,48 or"
        " 2:50:1 (from, to, step) or 2:512 (from, to, ×√2 each); eval.seeds=[0,1,2] for three test"
        " sets.",
    )
    command.add_argument("run", metavar="RUN", help="a run directory")
    command.add_argument("--out", help="results JSON (default: RUN/eval.json)")
    add_trust(command)
    add_overrides(command)
    command.set_defaults(run_command=_eval)


def _add_inspect(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "inspect",
        help="show the decoded state and ℓ* at every token of one sequence",
        description="Show how a trained run reads one sequence, in the terminal and on an HTML"
        " page: the state that it decodes at each token next to the correct one, ℓ* (iterations"
        " that the paper's solver needs), states, gates and decays. TOKEN is the name of an input"
        " token (213 231 for S3). Without TOKEN, --length draws a test sequence. See"
        " docs/inspect.md. With --errors, measure instead whether one or several runs correct"
        " errors of their recurrent states, and write a table and a figure. The task must label"
        " every token with a state (word_problem; parity or automaton with task.supervision:"
        " every), and no layer may be attention.",
    )
    command.add_argument("run", metavar="RUN", help="a run directory")
    command.add_argument(
        "tokens",
        nargs="*",
        metavar="TOKEN",
        help="the input, token by token; with --errors: further run directories",
    )
    command.add_argument(
        "--errors", action="store_true", help="measure the error control of all RUNs"
    )
    command.add_argument(
        "--length",
        type=Integer(1, MAX_LENGTH),
        metavar="N",
        help="draw a test sequence of this length, at least 1; with --errors: the longest measured"
        " length, raised to four times the training length if it is shorter (default: 1024)",
    )
    command.add_argument(
        "--seed", type=SEED, default=0, help="seed of the drawn sequences (default: 0)"
    )
    command.add_argument(
        "--out",
        metavar="PATH",
        help="the page (default: RUN/inspect.html), with --errors the folder (default:"
        " runs/errors); replaces only files that this command wrote",
    )
    add_trust(command)
    # `parse` adds the words that follow an option to the list `tokens`.
    command.set_defaults(run_command=_inspect, list_argument="tokens")


def _add_validate(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "validate",
        help="compare models on all abilities, over lengths and seeds",
        description="Compare models on state tracking, automata, brackets, arithmetic, copying,"
        " recall and more. A small recipe for each ability trains the `model:` section of each"
        " YAML and tests it on up to 64 times longer sequences. The command prints one table, and"
        " writes all measurements (validate.csv) and curves over lengths (lengths.png) into DIR."
        " Finished runs are kept, so the same command continues after a stop. Exit status 2: a"
        " threshold was missed.",
    )
    command.add_argument(
        "config",
        nargs="+",
        metavar="CONFIG",
        help="YAML with a `model:` section, or key=value of model, solver or optim",
    )
    command.add_argument(
        "--out-dir",
        metavar="DIR",
        help="default: runs/validate, or runs/validate_quick with --quick",
    )
    command.add_argument(
        "--quick",
        action="store_true",
        help="six of the thirteen abilities, one seed, fewer test sequences; minutes per model",
    )
    command.add_argument(
        "--seeds",
        type=SEED,
        nargs="+",
        metavar="SEED",
        help="training seeds, each at least 0 (default: 0 1 2; with --quick: 0)",
    )
    command.add_argument(
        "--jobs", type=Integer(), default=1, metavar="N", help="number of runs at once (default: 1)"
    )
    command.set_defaults(run_command=_validate, list_argument="config")


def _add_report(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "report",
        help="draw the paper's figures and tables from finished runs",
        description="Without NAME, list all reports. With NAME, draw the report into"
        " OUT_DIR/reports/SCALE, with its measurements as CSV, and print the commands of the"
        " missing runs. OVERRIDES apply to every run, e.g. task.data=data/babi/en-valid. Exit"
        " status 1: there is no finished run.",
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
        "--run", dest="run_missing", action="store_true", help="train the missing runs first"
    )
    command.add_argument(
        "--jobs",
        type=Integer(),
        default=1,
        metavar="N",
        help="with --run: number of processes at once (default: 1)",
    )
    add_overrides(command)
    command.set_defaults(run_command=_report)


def main(argv: list[str] | None = None) -> int:
    """Run one command; see `lm.cli.arguments.run`."""
    return run(parse(make_parser(), argv))
