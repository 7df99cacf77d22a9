"""`python -m lm COMMAND` (and the console script `fprnn`): thin, one function a command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import lm
from lm.cli import inspect as cli_inspect
from lm.cli import serve as cli_serve
from lm.cli import status as cli_status
from lm.cli import sweep as cli_sweep
from lm.cli.arguments import (
    SEED,
    HelpFormatter,
    Number,
    Whole,
    add_examples,
    add_overrides,
    add_trust,
    parse,
    run,
)
from lm.cli.eval import add_eval

if TYPE_CHECKING:
    from lm.config.schema import Config

AddCommands = Callable[[argparse._SubParsersAction], None]
EPILOG = """examples:
  fprnn train --config configs/lm/demo.yaml
  fprnn plan configs/lm/fpmamba_160m_fineweb2b.yaml --gpu a100-80g
  fprnn prepare configs/lm/demo.yaml
  deepspeed --num_gpus 4 --module lm train --config configs/lm/fpmamba_160m_fineweb2b.yaml
  fprnn generate runs/demo --prompt "The list"
  fprnn eval runs/demo --tasks catbabi_mini
  fprnn export runs/demo runs/demo/hf
  fprnn eval runs/demo/hf --suite paper
  fprnn serve runs/demo/hf
  fprnn inspect runs/demo "f(g(h(x), y))"
  fprnn report runs/demo
  fprnn report runs/first runs/second --out runs/both
  fprnn sweep configs/lm/compare/tiny.yaml --run
  fprnn status configs/lm/compare/tiny.yaml
  fprnn status runs/demo runs/other
  fprnn doctor
  fprnn demo s3
  fprnn synthetic train --config configs/synthetic/small/s3.yaml
"""


def _config_of_run(args: argparse.Namespace) -> Config:
    """Return the configuration of one run, all of whose paths lead somewhere."""
    from lm.config import load as config
    from lm.training.inputs import check_inputs

    cfg = config.load(args.config, args.override, args.job_index)
    config.refuse_sweep(cfg, args.config)
    check_inputs(cfg)
    return cfg


def _train(args: argparse.Namespace) -> int:
    cfg = _config_of_run(args)
    if args.dry_run:
        from lm.common.console import say
        from lm.common.ranks import read_launcher_ranks

        say.enabled = read_launcher_ranks()[0] == 0
        planned, status = _planned(cfg)
        say(cfg.to_yaml())
        say(planned)
        return status

    from lm.training.train import train

    train(cfg, overwrite=args.overwrite)
    return 0


def _plan(args: argparse.Namespace) -> int:
    from lm.common.console import say

    cfg = _config_of_run(args)
    planned, status = _planned(cfg, args.gpus, args.gpu, args.utilisation)
    say(planned)
    return status


def _planned(cfg, gpus=None, gpu=None, utilisation=None):
    """Return the table of `plan` and `train --dry-run`, and their exit status.

    The status is BAD_CONFIG if the run does not fit the card.
    """
    from lm.common.errors import BAD_CONFIG
    from lm.common.files import check_folder
    from lm.common.ranks import read_launcher_ranks
    from lm.report.plan import describe, plan, where
    from lm.training.build import with_built_in_mixers
    from lm.training.preflight import check_config

    gpus = gpus or read_launcher_ranks()[1]
    at = where(gpus, gpu, utilisation)
    check_config(with_built_in_mixers(cfg)[0], gpus)
    check_folder(cfg.run_dir)
    planned = plan(cfg, at)
    return describe(planned, cfg), 0 if planned["fits"] else BAD_CONFIG


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

    done = []
    for cfg in configs:
        made_of = (cfg.data.model_dump(), cfg.tokenizer.model_dump())
        if made_of not in done:  # most points of a sweep share theirs
            done.append(made_of)
            say(prepare_config(cfg))
    return 0


def _export(args: argparse.Namespace) -> int:
    from lm.runs import places

    places.check_run(args.run)
    places.check_folders({"--checkpoint": args.checkpoint})

    from lm.export.export import export

    print(
        export(
            args.run,
            args.out,
            args.checkpoint,
            args.licence,
            trust=args.trust,
            overwrite=args.overwrite,
        )
    )
    return 0


def _generate(args: argparse.Namespace) -> int:
    from lm.evaluation.facade import load

    text = load(args.checkpoint, args.trust).generate(
        args.prompt,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
    )
    print(text)
    return 0


def _report(args: argparse.Namespace) -> int:
    from lm.runs import places

    for folder in args.runs:
        places.check_run(folder)

    from lm.common.console import say
    from lm.report.report import report

    for printed in report(args.runs, args.out):
        say(printed)
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from lm.cli import doctor

    findings = doctor.examine()
    print(doctor.report(findings))
    return 0 if doctor.works(findings) else 1


def _add_train(commands: argparse._SubParsersAction) -> None:
    c = commands.add_parser(
        "train",
        help="train a run, or continue it (resume=auto)",
        description="Train the run a YAML describes. OVERRIDES are dotted keys of the YAML, e.g."
        " optim.lr=1e-3 model.mixer=dplr solver.schedule=parallel resume=auto; docs/config.md"
        " lists all keys, and what a resumed run may change (its solver, not its model).",
    )
    c.add_argument("--config", required=True, metavar="YAML", help="the run or sweep to train")
    c.add_argument("--overwrite", action="store_true", help="delete the run of this name first")
    c.add_argument("--dry-run", action="store_true", help="print config and cost, train nothing")
    c.add_argument(
        "--job-index",
        type=Whole(0),
        metavar="I",
        help="train point I of the YAML's sweep, from 0 on (`fprnn sweep` lists them)",
    )
    add_overrides(c)
    c.set_defaults(run_command=_train)


def _add_plan(commands: argparse._SubParsersAction) -> None:
    c = commands.add_parser(
        "plan",
        help="what a run will cost: parameters, FLOPs, hours, memory against the card",
        description="Print what the run a YAML describes will cost, and train nothing; `train"
        " --dry-run` prints the configuration as well. Nothing is downloaded, no GPU is needed."
        " Where the run does not fit the card the exit status is 78."
        " docs/scale.md says how the numbers are made.",
    )
    c.add_argument("config", metavar="CONFIG", help="the YAML of a run or sweep")
    c.add_argument(
        "--gpus",
        type=Whole(1, 1_000_000),
        metavar="N",
        help="GPUs to plan for, in all, at least 1 (default: those launched)",
    )
    c.add_argument(
        "--gpu",
        metavar="NAME",
        help="their kind: a100-40g, a100-80g, l40s, h100-80g or h200; any other by its data sheet,"
        " NAME:TFLOPS:GIB (b200:2250:178: dense TFLOP/s, memory in GiB); cpu: this machine"
        " (default: the one here, else a100-80g)",
    )
    c.add_argument(
        "--utilisation",
        type=Number(),
        metavar="U",
        help="share of the card's peak that matrix products reach, above 0 and at most 1 (default:"
        " 0.25, an assumption)",
    )
    c.add_argument(
        "--job-index",
        type=Whole(0),
        metavar="I",
        help="plan point I of the YAML's sweep, from 0 on",
    )
    add_overrides(c)
    c.set_defaults(run_command=_plan)


def _add_prepare(commands: argparse._SubParsersAction) -> None:
    c = commands.add_parser(
        "prepare",
        help="tokenizer and tokenised corpus, made ahead of runs in the corpus cache",
        description="Make what a run needs before it trains, for all runs that share it: the"
        " tokenizer, and the tokenised text, in the folder data.cache_dir. A second call verifies"
        " what is there; one that was stopped goes on. Of a sweep without --job-index all points"
        " are prepared. After it, runs on local sources start without a network. Of a stream"
        " (fineweb) it makes the validation split and, with data.download_dir, downloads all files;"
        " such a run still asks the hub for the list of its files, and without data.download_dir"
        " for its text.",
    )
    c.add_argument("config", metavar="CONFIG", help="the YAML of a run or sweep")
    c.add_argument(
        "--job-index", type=Whole(0), metavar="I", help="prepare point I of the sweep, from 0 on"
    )
    add_overrides(c)
    c.set_defaults(run_command=_prepare)


def _add_export(commands: argparse._SubParsersAction) -> None:
    c = commands.add_parser(
        "export",
        help="run directory → HuggingFace directory",
        description="Write a run as a folder that from_pretrained loads, with a model card."
        " huggingface_hub's `hf upload` brings it to the hub (docs/cluster-run.md).",
    )
    c.add_argument("run", metavar="RUN", help="a run directory")
    c.add_argument("out", metavar="OUT", help="the folder to write")
    c.add_argument("--checkpoint", help="a checkpoint folder (default: the newest complete one)")
    c.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the export of another run in OUT, or a model card that was changed by hand;"
        " files that no export wrote stay in any case",
    )
    c.add_argument(
        "--licence",
        metavar="ID",
        help="of the weights, as the hub names it: apache-2.0, … (default: unknown)",
    )
    add_trust(c)
    c.set_defaults(run_command=_export)


def _add_generate(commands: argparse._SubParsersAction) -> None:
    c = commands.add_parser("generate", help="sample from a run or an exported directory")
    c.add_argument(
        "checkpoint",
        metavar="CKPT",
        help="a run directory (its newest checkpoint), an exported folder, or a name on the hub",
    )
    c.add_argument("--prompt", required=True, help="text to go on from, at least one character")
    c.add_argument(
        "--max-new-tokens", type=Whole(), default=64, metavar="N", help="at least 1 (default: 64)"
    )
    c.add_argument(
        "--temperature",
        type=Number(zero=True),
        default=0.8,
        metavar="T",
        help="at least 0, which is greedy (default: 0.8)",
    )
    c.add_argument(
        "--top-k",
        type=Whole(0),
        default=50,
        metavar="K",
        help="draw from the K likeliest tokens; 0: from all (default: 50)",
    )
    c.add_argument("--seed", type=SEED, default=0, help="of the drawing, at least 0 (default: 0)")
    add_trust(c)
    c.set_defaults(run_command=_generate)


def _add_report(commands: argparse._SubParsersAction) -> None:
    c = commands.add_parser(
        "report",
        help="one page of a run or of several, also while they train; figures and a summary",
        description="Write report.html, one file with all figures, figures/ (PNG and PDF) and"
        " summary.json: losses, ℓ*, work, speed, memory, evaluations, configuration"
        " and provenance of a run that is finished or still trains. Several runs share one page,"
        " whose place --out names.",
    )
    c.add_argument("runs", nargs="+", metavar="RUN", help="run directories")
    c.add_argument(
        "--out",
        metavar="PLACE",
        help="a folder to write to instead of RUN",
    )
    c.set_defaults(run_command=_report)


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    c = commands.add_parser(
        "doctor",
        help="what is installed and works here, and what mends what does not",
        description="Try out what training needs on this machine, in seconds and without a network:"
        " exit status 0 where it works, 1 where something must be mended first.",
    )
    c.set_defaults(run_command=_doctor)


def parser(more: Sequence[AddCommands] = ()) -> argparse.ArgumentParser:
    """The command line. Nothing heavy is imported to build it or to print its help.

    Args: more: each adds commands of packages above this one.
    """
    p = argparse.ArgumentParser(
        prog="fprnn",
        description="Pretrain, export and evaluate fixed-point RNN language models.",
        epilog=EPILOG,
        formatter_class=HelpFormatter,
    )
    # DeepSpeed's launcher passes it; LOCAL_RANK in the environment says the same.
    p.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    p.add_argument("--version", action="version", version=f"fprnn {lm.__version__}")
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")

    # In the order in which one needs them.
    _add_doctor(commands)
    _add_plan(commands)
    _add_prepare(commands)
    _add_train(commands)
    cli_sweep.add(commands)
    cli_status.add(commands)
    _add_report(commands)
    cli_inspect.add(commands)
    _add_export(commands)
    add_eval(commands)
    _add_generate(commands)
    cli_serve.add(commands)
    for add in more:
        add(commands)
    add_examples(commands, EPILOG)
    return p


def main(argv: list[str] | None = None, more: Sequence[AddCommands] = ()) -> int:
    """Run one command; see `lm.cli.arguments.run`. more: as `parser`."""
    return run(parse(parser(more), argv))


if __name__ == "__main__":
    sys.exit(main())
