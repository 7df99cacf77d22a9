"""`fprnn eval`: score a run or an export with lm-eval."""

from __future__ import annotations

import argparse

from lm.cli.arguments import Integer, add_trust, parse_names


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "eval",
        help="score a run or an export with lm-eval",
        description="Run lm-eval on a model, print the metrics and write them to a JSON file. Give"
        " either --tasks, with tasks of this project or of lm-eval, or --suite. The suite `paper`"
        " consists of LAMBADA, HellaSwag, PIQA, ARC (easy and challenge) and WinoGrande, all"
        " zero-shot. docs/evaluation.md lists the names and metrics of tasks.",
    )
    command.add_argument("checkpoint", metavar="CKPT", help="a run directory or an exported folder")
    command.add_argument(
        "--suite", choices=("paper",), help="run the six tasks of the paper and print their mean"
    )
    command.add_argument(
        "--tasks",
        type=parse_names,
        default=[],
        metavar="A,B,…",
        help="run these tasks: names separated by commas",
    )
    command.add_argument(
        "--limit",
        type=Integer(),
        metavar="N",
        help="number of documents per task, at least 1 (default: all)",
    )
    command.add_argument(
        "--batch-size",
        type=Integer(keyword="auto"),
        default=8,
        metavar="B",
        help="number of documents in a batch, at least 1; or auto: as many as fit in memory, but at"
        " most 64 (default: 8)",
    )
    command.add_argument(
        "--out", metavar="FILE", help="JSON file to write (default: CKPT/eval/results.json)"
    )
    add_trust(command)
    command.set_defaults(run_command=_eval)


def _eval(args: argparse.Namespace) -> int:
    from lm.runs.path_checks import check_model

    check_model(args.checkpoint, allow_hub=False)

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
