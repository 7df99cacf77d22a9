"""`fprnn eval`: score a run or an export with lm-eval."""

from __future__ import annotations

import argparse

from lm.cli.arguments import Integer, add_trust, parse_names


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "eval",
        help="score a run or an export with lm-eval",
        description="Run tasks with lm-eval: tasks of this project, tasks of lm-eval, or a suite."
        " The suite `paper` is LAMBADA, HellaSwag, PIQA, ARC (easy and challenge) and WinoGrande,"
        " zero-shot. docs/evaluation.md lists the names and metrics.",
    )
    command.add_argument("checkpoint", metavar="CKPT", help="a run directory or an exported folder")
    command.add_argument(
        "--suite", choices=("paper",), help="the six tasks of the paper, and their mean"
    )
    command.add_argument(
        "--tasks",
        type=parse_names,
        default=[],
        metavar="A,B,…",
        help="comma-separated names of tasks",
    )
    command.add_argument(
        "--limit", type=Integer(), metavar="N", help="documents per task, at least 1 (default: all)"
    )
    command.add_argument(
        "--batch-size",
        type=Integer(keyword="auto"),
        default=8,
        metavar="B",
        help="documents in a batch, at least 1, or auto for as many as fit in memory, at most 64"
        " (default: 8)",
    )
    command.add_argument("--out", help="JSON file of the results (default: CKPT/eval/results.json)")
    add_trust(command)
    command.set_defaults(run_command=_eval)


def _eval(args: argparse.Namespace) -> int:
    from lm.runs import places

    places.check_model(args.checkpoint, on_hub=False)

    from lm.common.console import say
    from lm.evaluation.evaluate import evaluate, make_table

    results = evaluate(
        args.checkpoint,
        args.tasks,
        suite=args.suite,
        limit=args.limit,
        batch_size=args.batch_size,
        out=args.out,
        trust=args.trust,
    )
    say(make_table(results))
    return 0
