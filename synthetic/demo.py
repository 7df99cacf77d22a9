"""`fprnn demo NAME`: two models, what each can do, a picture and a page, in minutes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lm.cli.arguments import Whole

if TYPE_CHECKING:
    from lm.evaluation.inspection.page import Inspection
    from synthetic.trained import Trained

WORDS = (8, 24, 48)  # the lengths of the words that the page shows token by token
SEED = 1  # of these words
MADE_BY = "<!-- made by fprnn demo -->"  # by which an earlier page is known


class Demo(NamedTuple):
    """A report that is trained and shown by one command."""

    report: str  # of synthetic/report.py, whose config lies in configs/synthetic/small
    what: str


DEMOS = {
    "s3": Demo(
        "demo",
        "Words of the group S3: the answer after each letter is the product of all so far. Both"
        " models learn on words of up to 16 letters, and then read words of up to 1,024. FP-Mamba"
        " learns them in a curriculum, with noise on its states; Mamba learns them at all lengths"
        " from the start, because a curriculum would keep it at short words.",
    )
}


def add(commands: argparse._SubParsersAction) -> None:
    """Adds the command to those of a command line. Nothing heavy is imported."""
    command = commands.add_parser(
        "demo",
        help="train FP-Mamba and Mamba side by side, and see what each can do: minutes, two cores",
        description="Train one layer of FP-Mamba and two of Mamba at once, and draw how far each"
        " follows a state: accuracy over length (PNG, PDF, CSV) and a page with the state that each"
        " decodes at every token. Some 80 seconds on two cores. A demo that was stopped goes on;"
        " one that is finished is only drawn. Demos: "
        + "; ".join(f"{name}: {demo.what}" for name, demo in DEMOS.items()),
    )
    command.add_argument("name", nargs="?", metavar="NAME", help=f"one of {', '.join(DEMOS)}")
    command.add_argument("--out", metavar="DIR", help="default: runs/demo_NAME")
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
    from synthetic.drawing import ReportError

    if args.name is None:
        for name, entry in DEMOS.items():
            say(f"fprnn demo {name}    {entry.what}")
        return 0
    if args.name not in DEMOS:
        raise ReportError(f"no demo `{args.name}`: there are {', '.join(DEMOS)}")
    run(args.name, Path(args.out or f"runs/demo_{args.name}"), tuple(args.override), args.jobs)
    return 0


def run(name: str, out: Path, overrides: tuple[str, ...] = (), jobs: int = 2) -> Path:
    """Train what is missing, draw the figure, and write the page `out`/index.html.

    Args:
        overrides: key=value of both models' configuration. jobs: models trained at once.
    Returns:
        the page.
    Raises:
        OutputError: `out` cannot be written, or holds somebody's index.html.
        ConfigError, TrainingError, Stopped: as `synthetic.report.report`.
    """
    from lm.common.console import say
    from lm.evaluation.inspection.show import check_page
    from synthetic.report import collect, config_path, expand, report

    # 1. The runs, the figure and the table.
    entry = DEMOS[name]
    overrides = (f"out_dir={json.dumps(str(out), ensure_ascii=False)}", *overrides)
    page = out / "index.html"
    check_page(page, MADE_BY)
    sweep = expand(config_path(entry.report, "small"), overrides)
    if sweep.missing():
        say(entry.what)
    else:
        say(f"both models are trained already, in {sweep.configs[0].run_dir.parent}")
    report(entry.report, "small", overrides, out=str(out), run=True, jobs=jobs)

    # 2. The page.
    _write_page(page, entry, collect(sweep, []))
    say(f"page     {page}")
    return page


def _write_page(page: Path, entry: Demo, runs: list[Trained]) -> None:
    import matplotlib.pyplot as plt
    from markupsafe import Markup

    from lm.common.files import write_text
    from lm.common.page import ink, render, svg
    from synthetic.inspection import inspect_run
    from synthetic.report import REPORTS, in_words

    report = REPORTS[entry.report]
    with ink():
        drawing = report.draw(runs, report.title)
        drawing.fit_to_phone()
        picture = svg(drawing.figure)
    plt.close(drawing.figure)
    words = []
    for length in WORDS:
        inspections = [inspect_run(run.run_dir, length=length, seed=SEED) for run in runs]
        decoded = [_decoded(run.model, found) for run, found in zip(runs, inspections)]
        words.append({"length": length, "models": decoded})
    head, *rows = in_words(drawing.summary)
    text = render(
        Path(__file__).with_name("demo.html"),
        title=report.title,
        made_by=Markup(MADE_BY),
        what=entry.what,
        picture=picture,
        head=head,
        rows=rows,
        words=words,
        trained=runs[0].cfg.train.lengths[1],
    )
    write_text(page, text)


def _decoded(model: str, found: Inspection) -> dict:
    """What a model makes of a word: of each token its name, the state decoded, and whether it is
    the right one."""
    answers = found.answers or []
    tokens = [
        {"shown": token.shown, "decoded": answer.predicted, "right": answer.right}
        for token, answer in zip(found.tokens, answers, strict=True)
    ]
    right = sum(token["decoded"] == token["right"] for token in tokens)
    return {"name": model, "tokens": tokens, "right": right}
