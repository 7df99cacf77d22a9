"""`fprnn serve`: an OpenAI-compatible server for an export, which is `transformers serve`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from lm.cli.arguments import Whole, add_trust
from lm.common.errors import require
from lm.runs.places import PlaceError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PACKAGES = ("fastapi", "uvicorn", "openai")  # without them `transformers serve` does not start


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command to those of the command line. Nothing heavy is imported."""
    c = commands.add_parser(
        "serve",
        help="serve an exported directory to OpenAI clients (/v1/completions)",
        description="Load an export and answer /v1/completions, whole or streamed, until Ctrl-C:"
        " `transformers serve`, which does not find the model classes of a checkpoint by itself."
        " It needs the extra `serve` (docs/serving.md). A client names the model as CKPT is named"
        " here.",
    )
    c.add_argument("checkpoint", metavar="CKPT", help="an exported folder")
    c.add_argument("--host", default="localhost", help="address to listen on (default: localhost)")
    c.add_argument(
        "--port",
        type=Whole(1, 65535),
        default=8000,
        metavar="N",
        help="port to listen on, at least 1, at most 65535 (default: 8000)",
    )
    add_trust(c)
    c.set_defaults(run_command=_serve)


def _serve(args: argparse.Namespace) -> int:
    from lm.common.console import say

    if not (Path(args.checkpoint) / "config.json").is_file():
        cure = f"make one with `fprnn export RUN {args.checkpoint}`"
        raise PlaceError(f"{args.checkpoint} is no export: {cure}")
    for package in PACKAGES:
        require(package, "fprnn serve")

    from lm.runs.exported import load_model, load_tokenizer

    # The server would replace damaged weights by random ones; this refuses them.
    config = load_model(args.checkpoint, args.trust).config
    load_tokenizer(args.checkpoint, args.trust)

    # Only now: transformers replaces its own module object while its models are first imported, and
    # the server must see the object that has the class.
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
    """Make a model's class an attribute of the module `transformers`, as `transformers serve`
    expects of every model. AutoModelForCausalLM stands in for it: it knows the classes of this
    package and, if they are trusted, those that a checkpoint brings along."""
    import transformers

    for name in config.architectures or ():
        if not hasattr(transformers, name):
            setattr(transformers, name, transformers.AutoModelForCausalLM)
