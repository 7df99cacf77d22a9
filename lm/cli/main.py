"""Command line `fprnn`, also `python -m lm`, with the commands of this package.

PyTorch and other slow packages are imported only when a command runs, so that `--help` and errors
in the arguments are printed at once. `synthetic.fprnn_command` adds its own commands.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import lm
from lm.cli import (
    doctor,
    eval,
    export,
    generate,
    inspect,
    plan,
    prepare,
    report,
    serve,
    status,
    sweep,
    train,
)
from lm.cli.arguments import HelpFormatter, add_examples, parse, run

AddCommand = Callable[[argparse._SubParsersAction], None]
# Modules of the commands, in the order in which a user needs them.
TRAINING_COMMANDS = (doctor, plan, prepare, train, sweep, status)
MODEL_COMMANDS = (report, inspect, export, eval, generate, serve)
EPILOG = """examples:
  fprnn train --config configs/lm/demo.yaml
  fprnn plan configs/lm/fpmamba_160m_fineweb2b.yaml --gpu a100-80g
  fprnn prepare configs/lm/demo.yaml
  deepspeed --num_gpus 4 --module lm train --config configs/lm/fpmamba_160m_fineweb2b.yaml
  fprnn generate runs/demo --prompt "The list"
  fprnn eval runs/demo --tasks catbabi_mini
  fprnn export runs/demo runs/demo/hf
  fprnn eval runs/demo/hf --suite paper
  fprnn serve runs/demo/hf
  fprnn inspect runs/demo "f(g(h(x), y))"
  fprnn report runs/demo
  fprnn report runs/first runs/second --out runs/both
  fprnn sweep configs/lm/compare/tiny.yaml --run
  fprnn status configs/lm/compare/tiny.yaml
  fprnn status runs/demo runs/other
  fprnn doctor
  fprnn demo s3
  fprnn synthetic train --config configs/synthetic/small/s3.yaml
"""


def make_parser(more_commands: Sequence[AddCommand] = ()) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Args:
        more_commands: Functions that add the commands of packages that import this one.
    """
    parser = argparse.ArgumentParser(
        prog="fprnn",
        description="Pretrain, export and evaluate fixed-point RNN language models.",
        epilog=EPILOG,
        formatter_class=HelpFormatter,
    )
    # DeepSpeed's launcher passes this option. It is ignored, because LOCAL_RANK has the same value.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"fprnn {lm.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (*TRAINING_COMMANDS, *MODEL_COMMANDS):
        module.add_command(commands)
    for add_command in more_commands:
        add_command(commands)
    add_examples(commands, EPILOG)
    return parser


def main(argv: list[str] | None = None, more_commands: Sequence[AddCommand] = ()) -> int:
    """Run one command and return its exit status.

    Args:
        argv: Words after `fprnn`; None: the words on the command line of this process.
        more_commands: As in `make_parser`.
    """
    return run(parse(make_parser(more_commands), argv))
