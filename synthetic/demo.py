"""`fprnn demo s3`: FP-Mamba and Mamba side by side, and a figure, in minutes."""

from __future__ import annotations

import argparse
import json

from lm.cli.arguments import Whole

REPORT = "demo"  # of synthetic/report.py
WHAT = (
    "Words of the group S3: the answer after each letter is the product of all so far. Both models"
    " learn on words of up to 16 letters, and then read words of up to 1,024. FP-Mamba learns them"
    " in a curriculum, with noise on its states; Mamba learns them at all lengths from the start,"
    " because a curriculum would keep it at short words."
)


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command to a command line. Nothing heavy is imported."""
    command = commands.add_parser(
        "demo",
        help="train FP-Mamba and Mamba side by side, and see what each can do: minutes, two cores",
        description="Train one layer of FP-Mamba and two of Mamba at once, and draw how far each"
        " follows a state: accuracy over length (PNG, PDF, CSV). Some 80 seconds on two cores. A"
        " demo that was stopped goes on; one that is finished is only drawn. " + WHAT,
    )
    command.add_argument("name", nargs="?", choices=["s3"], default="s3", help="default: s3")
    command.add_argument(
        "--out", metavar="DIR", default="runs/demo_s3", help="default: %(default)s"
    )
    command.add_argument(
        "--jobs",
        type=Whole(),
        default=2,
        metavar="N",
        help="models at once, at least 1 (default: 2)",
    )
    command.add_argument("override", nargs="*", metavar="key=value", help="of both models' YAML")
    command.set_defaults(run_command=_demo)


def _demo(args: argparse.Namespace) -> int:
    from lm.common.console import say
    from synthetic.report import config_path, expand, report

    overrides = (f"out_dir={json.dumps(args.out, ensure_ascii=False)}", *args.override)
    sweep = expand(config_path(REPORT, "small"), overrides)
    if sweep.missing():
        say(WHAT)
    else:
        say(f"both models are trained already, in {sweep.configs[0].run_dir.parent}")
    report(REPORT, "small", overrides, out=args.out, run=True, jobs=args.jobs)
    say("next, the state that a model decodes at each token:")
    for cfg in sweep.configs:
        say(f"  fprnn synthetic inspect {cfg.run_dir} --length 24")
    return 0
