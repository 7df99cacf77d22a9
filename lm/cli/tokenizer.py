"""`fprnn tokenizer train`: its options, and what it does with them."""

from __future__ import annotations

import argparse

from lm.cli.arguments import Whole
from lm.common.errors import ConfigError

OF_SOURCE = {"source": "data.source", "path": "data.path", "text_field": "data.text_field"}


def add(commands: argparse._SubParsersAction) -> None:
    """Adds the command to those of the command line. Nothing heavy is imported."""
    c = commands.add_parser(
        "tokenizer",
        help="train a tokenizer on a source, for tokenizer.name (`fprnn tokenizer train`)",
        description="Tokenizers of their own. (A run with `tokenizer.name: bpe` trains its own.)",
    )
    actions = c.add_subparsers(dest="action", required=True, metavar="ACTION")
    t = actions.add_parser(
        "train",
        help="train one and write it to a folder",
        description="Train a tokenizer on the training documents of a source, or of the mixture of"
        " a YAML, each source by its weight; the folder is what tokenizer.name takes. Held-out"
        " documents are left out, and it is measured on them. OVERRIDES are keys of the YAML.",
    )
    t.add_argument("--config", metavar="YAML", help="whose `data` and `tokenizer` (default: none)")
    t.add_argument(
        "--source",
        choices=("builtin", "fineweb", "parquet", "jsonl", "text", "traces"),
        help="in the place of the YAML's data.source",
    )
    t.add_argument("--path", help="a file, folder or glob: data.path")
    t.add_argument("--text-field", metavar="KEY", help="data.text_field")
    t.add_argument(
        "--type",
        choices=("bpe", "sentencepiece"),
        default="bpe",
        dest="kind",
        help="byte-level BPE, or sentencepiece's BPE with bytes to fall back on (default: bpe)",
    )
    t.add_argument(
        "--vocab-size",
        type=Whole(258, 2**31 - 1),
        metavar="N",
        help="tokens, at least 258 (default: tokenizer.vocab_size)",
    )
    t.add_argument(
        "--train-bytes",
        type=Whole(),
        metavar="B",
        help="bytes of text to read, at least 1 (default: tokenizer.train_bytes)",
    )
    t.add_argument("--out", required=True, metavar="DIR", help="a new folder")
    t.add_argument("override", nargs="*", metavar="key=value")
    t.set_defaults(run_command=_train)


def _config(args: argparse.Namespace):
    """The YAML, where there is one, with the options over it."""
    import json

    from lm.config import load as config

    options = {"vocab_size": "tokenizer.vocab_size", "train_bytes": "tokenizer.train_bytes"}
    given = {key: getattr(args, name) for name, key in (OF_SOURCE | options).items()}
    # JSON is YAML: a path of digits stays a text.
    texts = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    if args.source not in (None, "traces"):
        texts.append("data.traces=null")
    overrides = [*args.override, *texts]
    if args.config is None:
        tree: dict = {}
        config.set_overrides(tree, overrides)
        cfg = config.build(tree, "the options")
    else:
        cfg = config.load(args.config, overrides)
        config.refuse_sweep(cfg, args.config)
    if args.path is not None and cfg.data.source in ("builtin", "fineweb", "traces"):
        raise ConfigError(
            f"--path is a file of text, and the source is `{cfg.data.source}`, which reads none:"
            " give --source parquet, jsonl or text"
        )
    if args.text_field is not None and cfg.data.source in ("builtin", "text", "traces"):
        raise ConfigError(
            f"--text-field is a column of parquet or a key of jsonl, and the source is"
            f" `{cfg.data.source}`: leave it out"
        )
    return cfg


def _train(args: argparse.Namespace) -> int:
    from pathlib import Path

    from lm.training.inputs import check_data

    cfg = _config(args)
    check_data(cfg)

    from lm.common.console import Progress, say
    from lm.data.corpus.tokenizer_training import summary, train_tokenizer
    from lm.data.sources.mixture import described

    say(f"data     {described(cfg.data)}; {cfg.tokenizer.vocab_size} tokens of {args.kind}")
    with Progress("read", unit="bytes") as bar:
        trained = train_tokenizer(cfg, args.kind, Path(args.out), bar.update)
    if trained.tokens < cfg.tokenizer.vocab_size:
        say(f"note: the text yields {trained.tokens} of {cfg.tokenizer.vocab_size} tokens only")
    say(summary(trained))
    return 0
