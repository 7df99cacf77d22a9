"""`fprnn compare`: several models against each other, by one YAML."""

from __future__ import annotations

import argparse

from lm.cli.arguments import Number, Whole


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command to those of the command line."""
    c = commands.add_parser(
        "compare",
        help="models of one size against each other: tuned alike, at equal tokens and equal time",
        description="Train what a comparison's YAML names and has not been trained yet: a grid for"
        " every model with the first seed, all seeds at what was best, then with as many updates as"
        " the reference's FLOPs or time pay for. Writes compare.json, tables (Markdown and"
        " LaTeX), curves (SVG and PDF) and page.html into out_dir/name. The same command goes on"
        " after a stop."
        " OVERRIDES are keys of the comparison, and of its trainings below config:"
        " seeds=[0] config.train.steps=100.",
    )
    c.add_argument("config", metavar="YAML")
    c.add_argument(
        "--jobs",
        type=Whole(1, 1024),
        default=1,
        metavar="N",
        help="trainings at once, at least 1 (default: 1); the cores are shared among them",
    )
    c.add_argument(
        "--gpus",
        type=Whole(1, 1_000_000),
        metavar="N",
        help="launch each training under DeepSpeed on N GPUs, at least 1 (default: one process)",
    )
    what = c.add_mutually_exclusive_group()
    what.add_argument(
        "--report", action="store_true", help="train nothing: write what is there so far"
    )
    what.add_argument(
        "--plan", action="store_true", help="train nothing: print parameters, hours and cost"
    )
    c.add_argument("--gpu", metavar="NAME", help="of --plan: the card (default: as `fprnn plan`)")
    c.add_argument(
        "--utilisation",
        type=Number(),
        metavar="U",
        help="of --plan: share of the card's peak that is reached, above 0 and at most 1 (default:"
        " 0.25, an assumption)",
    )
    c.add_argument(
        "--price",
        type=Number(),
        metavar="P",
        help="of --plan: what a GPU costs for an hour, above 0",
    )
    c.add_argument("override", nargs="*", metavar="key=value")
    c.set_defaults(run_command=_compare)


def _compare(args: argparse.Namespace) -> int:
    from lm.common.console import say
    from lm.common.errors import ConfigError
    from lm.report.compare import compare

    if (args.plan or args.report) and args.jobs > 1:
        option = "--plan" if args.plan else "--report"
        raise ConfigError(f"{option} trains nothing: leave --jobs out")
    if args.plan:
        say(_planned(args))
        return 0
    for name in ("gpu", "utilisation", "price"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name} is for --plan: training takes what is there")
    if args.gpus and args.jobs > 1:
        raise ConfigError("--gpus launches one training at a time: leave --jobs out")
    paths = compare(args.config, args.override, args.jobs, args.gpus, args.report)
    say(paths["tables"].read_text(encoding="utf-8"))
    for name, path in paths.items():
        say(f"{name:<9}{path}")
    return 0


def _planned(args: argparse.Namespace):
    from lm.report.compare import ahead, results, settings

    c = settings.load(args.config, args.override)
    results.check_parameters(c, {model: results.cost(c, model) for model in c.models})
    gpus = args.gpus or 1
    return ahead.describe(c, ahead.expected(c, gpus, args.gpu, args.utilisation), gpus, args.price)
