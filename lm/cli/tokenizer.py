"""`fprnn tokenizer train`: its options, and the function that runs it."""

from __future__ import annotations

import argparse

from lm.cli.arguments import add_overrides


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command to the command line. Nothing heavy is imported."""
    c = commands.add_parser(
        "tokenizer",
        help="train a tokenizer on a source, for tokenizer.name (`fprnn tokenizer train`)",
        description="Tokenizers of their own. (A run with `tokenizer.name: bpe` trains its own.)",
    )
    actions = c.add_subparsers(dest="action", required=True, metavar="ACTION")
    t = actions.add_parser(
        "train",
        help="train one and write it to a folder",
        description="Train a tokenizer on the training documents of a source, or of a mixture, each"
        " source by its weight. Held-out documents are left out, and it is measured on them."
        " OVERRIDES are keys of the YAML: `fprnn tokenizer train --out tokenizers/web"
        " data.source=text data.path=data/web tokenizer.vocab_size=32000`.",
    )
    t.add_argument("--config", metavar="YAML", help="whose `data` and `tokenizer` (default: none)")
    t.add_argument(
        "--type",
        choices=("bpe", "sentencepiece"),
        default="bpe",
        dest="kind",
        help="byte-level BPE, or sentencepiece's BPE with bytes to fall back on (default: bpe)",
    )
    t.add_argument("--out", required=True, metavar="DIR", help="a new folder")
    add_overrides(t)
    t.set_defaults(run_command=_train)


def _train(args: argparse.Namespace) -> int:
    from pathlib import Path

    from lm.config import load as config
    from lm.training.inputs import check_data

    if args.config is None:
        tree: dict = {}
        config.set_overrides(tree, args.override)
        cfg = config.build(tree, "the options")
    else:
        cfg = config.load(args.config, args.override)
        config.refuse_sweep(cfg, args.config)
    check_data(cfg)

    from lm.common.console import say
    from lm.data.corpus.tokenizer_training import train_tokenizer
    from lm.data.sources.mixture import described

    say(f"data     {described(cfg.data)}; {cfg.tokenizer.vocab_size} tokens of {args.kind}")
    say(train_tokenizer(cfg, args.kind, Path(args.out)))
    return 0
