"""`fprnn demo s3`: FP-Mamba and Mamba side by side, a figure and a page, in minutes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lm.cli.arguments import Whole

REPORT = "demo"  # of synthetic/report.py
WHAT = (
    "Words of the group S3: the answer after each letter is the product of all so far. Both models"
    " learn on words of up to 16 letters, and then read words of up to 1,024. FP-Mamba learns them"
    " in a curriculum, with noise on its states; Mamba learns them at all lengths from the start,"
    " because a curriculum would keep it at short words."
)
WORDS = (8, 24, 48)  # the lengths of the words that the page shows token by token
SEED = 1  # of these words
MADE_BY = "<!-- made by fprnn demo -->"  # marks a page that may be replaced


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command to a command line. Nothing heavy is imported."""
    command = commands.add_parser(
        "demo",
        help="train FP-Mamba and Mamba side by side, and see what each can do: minutes, two cores",
        description="Train one layer of FP-Mamba and two of Mamba at once, and draw how far each"
        " follows a state: accuracy over length (PNG, PDF, CSV) and a page with the state that each"
        " decodes at every token. Some 80 seconds on two cores. A demo that was stopped goes on;"
        " one that is finished is only drawn. " + WHAT,
    )
    command.add_argument("name", nargs="?", choices=["s3"], default="s3", help="default: s3")
    command.add_argument(
        "--out", metavar="DIR", default="runs/demo_s3", help="default: %(default)s"
    )
    command.add_argument(
        "--jobs",
        type=Whole(),
        default=2,
        metavar="N",
        help="models at once, at least 1 (default: 2)",
    )
    command.add_argument("override", nargs="*", metavar="key=value", help="of both models' YAML")
    command.set_defaults(run_command=_demo)


def _demo(args: argparse.Namespace) -> int:
    from lm.common.console import say
    from lm.common.files import check_replaceable
    from synthetic.report import collect, config_path, expand, report

    out = Path(args.out)
    page = out / "index.html"
    check_replaceable(page, MADE_BY)
    overrides = (f"out_dir={json.dumps(args.out, ensure_ascii=False)}", *args.override)
    sweep = expand(config_path(REPORT, "small"), overrides)
    if sweep.missing():
        say(WHAT)
    else:
        say(f"both models are trained already, in {sweep.configs[0].run_dir.parent}")
    report(REPORT, "small", overrides, out=args.out, run=True, jobs=args.jobs)
    _write_page(page, [(run.model, run.run_dir) for run in collect(sweep)])
    say(f"page     {page}")
    return 0


def _write_page(page: Path, models: list[tuple[str, Path]]) -> None:
    """Write the page next to the report's figure.

    Args:
        page: The file.
        models: Name and run directory of each model.
    """
    from markupsafe import Markup

    from lm.common.files import write_text
    from lm.common.page import render
    from synthetic.report import REPORTS

    words = [
        {"length": length, "models": [_decode(name, run, length) for name, run in models]}
        for length in WORDS
    ]
    text = render(
        Path(__file__).with_name("demo.html"),
        title=REPORTS[REPORT].title,
        made_by=Markup(MADE_BY),
        what=WHAT,
        picture=f"{REPORT}.png",
        words=words,
    )
    write_text(page, text)


def _decode(name: str, run_dir: Path, length: int) -> dict:
    """Return the state that a model decodes at each token of a word, and the right one."""
    from synthetic.inspection import inspect_run

    found = inspect_run(run_dir, length=length, seed=SEED)
    tokens = [
        {"shown": token.shown, "decoded": answer.predicted, "right": answer.right}
        for token, answer in zip(found.tokens, found.answers or [], strict=True)
    ]
    right = sum(token["decoded"] == token["right"] for token in tokens)
    return {"name": name, "tokens": tokens, "right": right}
