"""`fprnn eval`: its options, and what it prints."""

from __future__ import annotations

import argparse

from lm.cli.arguments import Whole, add_trust, names


def add_eval(commands: argparse._SubParsersAction) -> None:
    """Add the command to those of a parser. Nothing heavy is imported for it."""
    c = commands.add_parser(
        "eval",
        help="lm-eval on a run or an exported directory",
        description="Run tasks of lm-eval, ours or its own, or a suite of them: `paper` is LAMBADA,"
        " HellaSwag, PIQA, ARC (easy, challenge) and WinoGrande, zero-shot. docs/evaluation.md has"
        " their names and metrics.",
    )
    c.add_argument("checkpoint", metavar="CKPT", help="a run directory or an exported folder")
    c.add_argument("--suite", choices=("paper",), help="paper: the six tasks, with their mean")
    c.add_argument(
        "--tasks",
        type=names,
        default=[],
        metavar="A,B,…",
        help="comma-separated; ours and lm-eval's own",
    )
    c.add_argument(
        "--limit", type=Whole(), metavar="N", help="documents per task, at least 1 (default: all)"
    )
    c.add_argument(
        "--batch-size",
        type=Whole(word="auto"),
        default=8,
        metavar="B",
        help="documents at once, at least 1, or auto: as many as memory holds, at most 64 (default:"
        " 8)",
    )
    c.add_argument("--out", help="results JSON (default: CKPT/eval/results.json)")
    add_trust(c)
    c.set_defaults(run_command=_eval)


def _eval(args: argparse.Namespace) -> int:
    from lm.runs import places

    places.find_model(args.checkpoint, on_hub=False)

    from lm.common.console import say
    from lm.evaluation.evaluate import evaluate, table

    results = evaluate(
        args.checkpoint,
        args.tasks,
        suite=args.suite,
        limit=args.limit,
        batch_size=args.batch_size,
        out=args.out,
        trust=args.trust,
    )
    say(table(results))
    return 0
