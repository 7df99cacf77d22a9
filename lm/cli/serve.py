"""`fprnn serve`: serve an export to OpenAI clients, with `transformers serve`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from lm.cli.arguments import Integer, add_trust
from lm.common.errors import require
from lm.runs.path_checks import PathError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PACKAGES = ("fastapi", "uvicorn", "openai")  # required by `transformers serve`


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "serve",
        help="serve an export to OpenAI clients (/v1/completions)",
        description="Load an export and answer requests to /v1/completions, complete or streamed,"
        " until Ctrl-C. It runs `transformers serve`, which cannot find the model classes of an"
        " export by itself, and needs the extra `serve` (docs/serving.md). Clients use CKPT, as"
        " written here, as the name of the model.",
    )
    command.add_argument("checkpoint", metavar="CKPT", help="an exported folder")
    command.add_argument(
        "--host", default="localhost", help="address to listen on (default: localhost)"
    )
    command.add_argument(
        "--port",
        type=Integer(1, 65535),
        default=8000,
        metavar="N",
        help="port to listen on, 1 to 65535 (default: 8000)",
    )
    add_trust(command)
    command.set_defaults(run_command=_serve)


def _serve(args: argparse.Namespace) -> int:
    from lm.common.console import say

    if not (Path(args.checkpoint) / "config.json").is_file():
        fix = f"make one with `fprnn export RUN {args.checkpoint}`"
        raise PathError(f"{args.checkpoint} is no export: {fix}")
    for package in PACKAGES:
        require(package, "fprnn serve")

    from lm.runs.exported import load_model, load_tokenizer

    # Refuse damaged weights, which the server would replace by random ones.
    config = load_model(args.checkpoint, args.trust).config
    load_tokenizer(args.checkpoint, args.trust)

    # Import the server after the model: transformers replaces its own module object when it first
    # imports models, and the server must see the object to which `provide_class` adds the class.
    from transformers.cli.serve import Serve

    provide_class(config)
    say(f"serving     {args.checkpoint} at http://{args.host}:{args.port}/v1")
    Serve(
        force_model=args.checkpoint,
        host=args.host,
        port=args.port,
        trust_remote_code=args.trust,
    )
    return 0


def provide_class(config: PreTrainedConfig) -> None:
    """Make a model's class an attribute of `transformers`, where `transformers serve` looks it up.

    The attribute is AutoModelForCausalLM, which loads the classes of this package and, if trusted,
    those of the export's own code.
    """
    import transformers

    for name in config.architectures or ():
        if not hasattr(transformers, name):
            setattr(transformers, name, transformers.AutoModelForCausalLM)
