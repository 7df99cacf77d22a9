"""`fprnn prepare`: make the tokenizer and the tokenized corpus before training."""

from __future__ import annotations

import argparse

from lm.cli.arguments import add_job_index, add_overrides


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "prepare",
        help="make the tokenizer and the tokenized corpus before training",
        description="Train or download the tokenizer of a run, tokenize its text, and write both to"
        " the folder data.cache_dir, which all runs on the same data share. With local text,"
        " training then needs no network. With streamed text (fineweb), the command writes the"
        " validation split, and if data.download_dir is set, it also downloads all text files."
        " Training then still asks the Hugging Face hub for the list of files, and without"
        " data.download_dir also for the text. The same command continues after an interruption,"
        " and verifies files that are complete.",
    )
    command.add_argument("config", metavar="CONFIG", help="the YAML of a run, or of a sweep")
    add_job_index(
        command,
        "prepare only point I of the sweep in the YAML, counted from 0 (default: all points)",
    )
    add_overrides(command)
    command.set_defaults(run_command=_prepare)


def _prepare(args: argparse.Namespace) -> int:
    from lm.common.console import say
    from lm.config import load as config
    from lm.config.schema import check_state_noise, check_updates
    from lm.training.inputs import check_data, check_tokenizer

    tree = config.load_tree(args.config)
    config.set_overrides(tree, args.override)
    if args.job_index is None and tree.get("sweep"):
        configs = config.load_sweep(args.config, args.override)[1]
    else:
        configs = [config.load(args.config, args.override, args.job_index)]
    for cfg in configs:
        config.refuse_sweep(cfg, args.config)
        check_updates(cfg)
        check_state_noise(cfg)
        check_tokenizer(cfg)
        check_data(cfg)

    from lm.data.corpus.corpora import prepare_config

    prepared_settings = []
    for cfg in configs:
        settings = (cfg.data.model_dump(), cfg.tokenizer.model_dump())
        if settings not in prepared_settings:  # most points of a sweep train on the same data
            prepared_settings.append(settings)
            say(prepare_config(cfg))
    return 0
