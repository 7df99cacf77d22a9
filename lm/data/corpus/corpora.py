"""The corpora of a run or a config, one of each source: made, found, opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from lm.common.console import Progress, say
from lm.config.schema import Config
from lm.data.corpus.corpus import Corpus
from lm.data.corpus.prepare import Prepared, ensure_here, open_corpus, prepare, prepare_ahead
from lm.data.corpus.tokenizer import new_tokenizer
from lm.data.sources.mixture import described, naming, parts, shares


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


def prepare_config(cfg: Config) -> dict[str, Prepared]:
    """Makes, or verifies, what a run of a config will look for: the corpus of each of its sources,
    by name; of a single one under "".

    Raises:
        DataError: the source or the tokenizer cannot be had, or what is there is damaged.
        OutputError: the cache cannot be written.
    """
    say(f"data     {described(cfg.data)}; tokenizer {cfg.tokenizer.name}")
    tokenizer = new_tokenizer(cfg, say)
    bar = Progress("tokenised", unit="documents")

    def progress(documents: int, tokens: int) -> None:
        bar.update(documents)

    prepared = {}
    for name, part in parts(cfg).items():
        with naming(name):
            prepared[name] = prepare_ahead(part, tokenizer, progress)
    if cfg.data.source == "fineweb" and cfg.data.download:
        from lm.data.sources.hub_parquet import download_all

        count = download_all(cfg.data, Progress("downloaded", unit="files").update)
        say(f"data     {count} files of {cfg.data.dataset} {cfg.data.name} in {cfg.data.download}")
    return prepared


def summary(cfg: Config, prepared: dict[str, Prepared]) -> str:
    """What was made: of each source documents, tokens, bytes, seconds, and where it lies; of a
    mixture the shares of its sources."""
    if cfg.data.mixture is None:
        return _summary(cfg, prepared[""])
    lines = []
    for name, share in shares(cfg.data).items():
        lines.append(f"source   {name}: {share:.2%} of the sequences of a run")
        lines.append(_summary(cfg, prepared[name]))
    return "\n".join(lines)


def _summary(cfg: Config, prepared: Prepared) -> str:
    meta = prepared.meta
    seconds = prepared.seconds
    counts = (
        f"{meta.documents} documents, {meta.tokens} tokens ({meta.val_tokens} of them for"
        f" validation), {meta.bytes} bytes"
    )
    if prepared.made:
        rate = meta.documents / max(seconds, 1e-9)
        how = f"made in {seconds:.1f} s ({rate:.0f} documents/s)"
    else:
        how = f"there already, verified in {seconds:.1f} s"
    text = f"corpus   {counts}, {how}\n         {prepared.folder}"
    if cfg.data.source == "fineweb":
        text += "\n         the validation split: training text is read from the hub as it trains"
    return text
