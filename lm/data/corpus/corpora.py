"""The corpora of a run, one of each of its sources: made, found, opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from lm.common.console import say
from lm.config.schema import Config
from lm.data.corpus.corpus import Corpus
from lm.data.corpus.prepare import ensure_here, open_corpus, prepare
from lm.data.sources.mixture import naming, parts, shares


def prepare_sources(
    cfg: Config,
    tokenizer: PreTrainedTokenizerFast,
    run_dir: Path,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Corpus]:
    """`prepare` of each source, by name; says the shares of a mixture.

    Raises:
        DataError, OutputError: as `prepare`.
    """
    corpora = {}
    for name, part in parts(cfg).items():
        with naming(name):
            corpora[name] = prepare(part, tokenizer, run_dir, progress, name)
    if cfg.data.mixture is not None:
        tokens = {name: corpus.meta.train_tokens for name, corpus in corpora.items()}
        for name, share in shares(cfg.data).items():
            say(f"data     {name}: {share:.2%} of the sequences, from {tokens[name]:,} tokens")
    return corpora


def ensure_sources_here(cfg: Config, tokenizer: PreTrainedTokenizerFast, run_dir: Path) -> None:
    """`ensure_here` of each source.

    Raises:
        DataError, OutputError: as `prepare`.
    """
    for name, part in parts(cfg).items():
        with naming(name):
            ensure_here(part, tokenizer, run_dir, name)


def open_sources(cfg: Config, run_dir: Path) -> dict[str, Corpus]:
    """The corpus of each source, once `prepare_sources` has run.

    Raises:
        DataError: one is not there, or its files are not of the recorded length.
    """
    corpora = {}
    for name in parts(cfg):
        with naming(name):
            corpora[name] = open_corpus(run_dir, name)
    return corpora
