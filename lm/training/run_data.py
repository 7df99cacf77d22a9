"""Data of a run: its tokenizer, its corpora, and the micro-batches of each rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lm.common.console import Progress, say
from lm.common.errors import Stopped
from lm.common.ranks import Ranks
from lm.common.signals import StopRequested, StopSignals
from lm.config.schema import Config
from lm.runs.run_dir import RunDir
from lm.training.resume import check_fingerprint, check_tokenizer, run_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

RESUME_ADVICE = "continue with resume=auto"


class RunData(NamedTuple):
    """Tokenizer and micro-batches of this rank."""

    tokenizer: PreTrainedTokenizerFast
    batches: Any  # endless iterator over training micro-batches, which can save its position
    held_out: dict[str, list]  # {source: validation micro-batches}; a single source is ""
    fingerprint: dict  # result of `run_fingerprint`


def open_run_data(
    cfg: Config,
    ranks: Ranks,
    run: RunDir,
    checkpoint: tuple[Path, dict] | None,
    signals: StopSignals,
) -> RunData:
    """Load the tokenizer, prepare the corpora, and open this rank's micro-batches.

    Rank 0 tokenises, and every rank that sees the files of rank 0 opens them. On other nodes one
    rank tokenises again, into the node's own cache.

    Args:
        cfg: Configuration of the run.
        ranks: Ranks of the run.
        run: Run directory.
        checkpoint: Folder and manifest of the checkpoint to resume, or None.
        signals: Stop signals, which may interrupt the preparation.

    Raises:
        RunDirError: If tokenizer, corpora or config differ from the checkpoint's.
        Stopped: If a stop signal arrived.
    """
    from lm.data.batches import loader
    from lm.data.corpus import corpora
    from lm.data.corpus.tokenizer import load_tokenizer
    from lm.data.sources import mixture

    folder = run.path
    say(f"data     {mixture.describe_data(cfg.data)}; tokenizer {cfg.tokenizer.name}")
    ranks.run_on_main(_run_interruptibly, signals, load_tokenizer, cfg, folder)
    ranks.run_on_main(_check_same_data, cfg, run, checkpoint)
    tokenizer = load_tokenizer(cfg, folder)
    bar = Progress("tokenised", unit="documents")
    prepare = corpora.prepare_sources
    ranks.run_on_main(_run_interruptibly, signals, prepare, cfg, tokenizer, folder, bar.update)
    ranks.run_on_main(_check_same_data, cfg, run, checkpoint)  # the corpora may be new
    fingerprint = ranks.run_on_main(run_fingerprint, cfg, run)
    ranks.run_on_all(corpora.ensure_sources_on_node, cfg, tokenizer, folder)
    batches, held_out = loader.build(cfg, tokenizer, folder, ranks.rank, ranks.world_size)
    return RunData(tokenizer, batches, held_out, fingerprint)


def _run_interruptibly(signals: StopSignals, prepare: Callable, *args: Any) -> None:
    """Call a function that may read, or wait for a hub, for hours; a stop signal ends it."""
    try:
        with signals.interruptible():
            prepare(*args)
    except StopRequested:
        raise Stopped(f"stopped by a signal before the first update: {RESUME_ADVICE}") from None


def _check_same_data(cfg: Config, run: RunDir, checkpoint: tuple[Path, dict] | None) -> None:
    """Raise RunDirError if tokenizer, corpora or config differ from the checkpoint's."""
    if checkpoint is None:
        return
    path, manifest = checkpoint
    if path.resolve().parent == run.checkpoints.resolve():
        check_fingerprint(path, manifest, run, cfg)
    else:  # a checkpoint of another run, perhaps of other data
        check_tokenizer(path, manifest, run)
