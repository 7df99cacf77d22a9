"""`fprnn generate`: continue a prompt."""

from __future__ import annotations

import argparse

from lm.cli.arguments import SEED, Integer, PositiveNumber, add_trust


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "generate",
        help="continue a prompt with a run or an export",
        description="Sample a continuation of a prompt from a model, and print both.",
    )
    command.add_argument(
        "checkpoint",
        metavar="CKPT",
        help="a run directory (its newest checkpoint), an exported folder, or the name of a model"
        " on the Hugging Face hub",
    )
    command.add_argument(
        "--prompt",
        required=True,
        metavar="TEXT",
        help="the text to continue, at least one character (required)",
    )
    command.add_argument(
        "--max-new-tokens",
        type=Integer(),
        default=64,
        metavar="N",
        help="number of tokens to generate, at least 1 (default: 64)",
    )
    command.add_argument(
        "--temperature",
        type=PositiveNumber(allow_zero=True),
        default=0.8,
        metavar="T",
        help="sampling temperature, at least 0.001; 0: greedy decoding (default: 0.8)",
    )
    command.add_argument(
        "--top-k",
        type=Integer(min=0),
        default=50,
        metavar="K",
        help="sample from the K most likely tokens, at least 1; 0: from all (default: 50)",
    )
    command.add_argument(
        "--seed",
        type=SEED,
        default=0,
        metavar="S",
        help="sampling seed, an integer of at least 0 (default: 0)",
    )
    add_trust(command)
    command.set_defaults(run_command=_generate)


def _generate(args: argparse.Namespace) -> int:
    from lm.evaluation.language_model import load

    text = load(args.checkpoint, args.trust).generate(
        args.prompt,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
    )
    print(text)
    return 0
