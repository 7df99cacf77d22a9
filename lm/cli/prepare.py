"""`fprnn prepare`: make the tokenizer and the tokenized corpus before training."""

from __future__ import annotations

import argparse

from lm.cli.arguments import Integer, add_overrides


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "prepare",
        help="make the tokenizer and the tokenized corpus before training",
        description="Train or download the tokenizer of a run and tokenize its text, into the"
        " folder data.cache_dir, which all runs on the same data share. Runs on local sources then"
        " start without a network. For a stream (fineweb), the command makes the validation split,"
        " and downloads all files if data.download_dir is set; training still asks the hub for the"
        " list of files, and without data.download_dir also for the text. For a sweep, all points"
        " are prepared unless --job-index names one. Calling the command again verifies the files;"
        " a command that was stopped continues.",
    )
    command.add_argument("config", metavar="CONFIG", help="the YAML of a run or sweep")
    command.add_argument(
        "--job-index",
        type=Integer(0),
        metavar="I",
        help="prepare only point I of the sweep, counted from 0",
    )
    add_overrides(command)
    command.set_defaults(run_command=_prepare)


def _prepare(args: argparse.Namespace) -> int:
    from lm.common.console import say
    from lm.config import load as config
    from lm.training.inputs import check_data, check_tokenizer

    tree = config.load_tree(args.config)
    config.set_overrides(tree, args.override)
    indices = [args.job_index]
    if args.job_index is None and tree.get("sweep"):
        indices = list(range(len(config.sweep_points(tree, args.config))))
    configs = [config.load(args.config, args.override, index) for index in indices]
    for cfg in configs:
        config.refuse_sweep(cfg, args.config)
        check_tokenizer(cfg)
        check_data(cfg)

    from lm.data.corpus.corpora import prepare_config

    prepared = []
    for cfg in configs:
        inputs = (cfg.data.model_dump(), cfg.tokenizer.model_dump())
        if inputs not in prepared:  # most points of a sweep train on the same data
            prepared.append(inputs)
            say(prepare_config(cfg))
    return 0
