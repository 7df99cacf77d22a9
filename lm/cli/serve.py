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
        description="Start a server that loads an export and answers OpenAI requests to"
        " /v1/completions, streamed or not, until Ctrl-C. The server is `transformers serve`; it"
        " needs the extra `serve` of fprnn (docs/serving.md). In a request, the name of the model"
        " is CKPT, exactly as in this command.",
    )
    command.add_argument("checkpoint", metavar="CKPT", help="an exported folder")
    command.add_argument(
        "--host", default="localhost", help="address to listen on (default: localhost)"
    )
    command.add_argument(
        "--port",
        type=Integer(min=1, max=65535),
        default=8000,
        metavar="N",
        help="port to listen on, 1 to 65535 (default: 8000)",
    )
    add_trust(command)
    command.set_defaults(run_command=_serve)


def _serve(args: argparse.Namespace) -> int:
    from lm.common.console import say

    if not (Path(args.checkpoint) / "config.json").is_file():
        export = f"{args.checkpoint}/hf"
        raise PathError(
            f"{args.checkpoint} is no export: if it is a run, call `fprnn export {args.checkpoint}"
            f" {export}` and `fprnn serve {export}`"
        )
    for package in PACKAGES:
        require(package, "fprnn serve")

    from lm.runs.exported import load_model, load_tokenizer

    # Refuse damaged weights, which the server would replace by random ones.
    config = load_model(args.checkpoint, args.trust).config
    load_tokenizer(args.checkpoint, args.trust)

    # Import the server after the model: transformers replaces its own module object when it first
    # imports models, and `add_model_class` must change the object that the server uses.
    from transformers.cli.serve import Serve

    add_model_class(config)
    say(f"serving     {args.checkpoint} at http://{args.host}:{args.port}/v1")
    Serve(force_model=args.checkpoint, host=args.host, port=args.port, trust_remote_code=args.trust)
    return 0


def add_model_class(config: PreTrainedConfig) -> None:
    """Add the name of a model's class to `transformers`, where `transformers serve` looks it up.

    It becomes another name of AutoModelForCausalLM, which loads the model classes of this package
    and, if trusted, of the export's own code.
    """
    import transformers

    for name in config.architectures or ():
        if not hasattr(transformers, name):
            setattr(transformers, name, transformers.AutoModelForCausalLM)
