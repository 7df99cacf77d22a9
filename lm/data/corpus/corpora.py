"""The corpora of a run or a config, one of each source: made, looked up, opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedTokenizerFast

from lm.common.console import Progress, say
from lm.config.schema import Config
from lm.data.corpus.corpus import Corpus, open_folder
from lm.data.corpus.prepare import ensure_here, open_corpus, prepare, prepare_ahead
from lm.data.corpus.tokenizer import new_tokenizer
from lm.data.sources.mixture import described, naming, parts, shares

Result = TypeVar("Result")


def _for_each(cfg: Config, action: Callable[[Config, str], Result]) -> dict[str, Result]:
    """Return the result of an action on the config of each source, by the source's name.

    Raises:
        DataError: As the action; in a mixture it names the source.
    """
    results = {}
    for name, part in parts(cfg).items():
        with naming(name):
            results[name] = action(part, name)
    return results


def prepare_sources(
    cfg: Config,
    tokenizer: PreTrainedTokenizerFast,
    run_dir: Path,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Corpus]:
    """Prepare the corpus of each source; print the shares of a mixture.

    Raises:
        DataError, OutputError: As `prepare`.
    """
    corpora = _for_each(cfg, lambda part, name: prepare(part, tokenizer, run_dir, progress, name))
    if cfg.data.mixture is not None:
        tokens = {name: corpus.meta.train_tokens for name, corpus in corpora.items()}
        for name, share in shares(cfg.data).items():
            say(f"data     {name}: {share:.2%} of the sequences, from {tokens[name]:,} tokens")
    return corpora


def ensure_sources_here(cfg: Config, tokenizer: PreTrainedTokenizerFast, run_dir: Path) -> None:
    """Make the corpora of a run on this node too, if this node has a cache of its own.

    Raises:
        DataError, OutputError: As `prepare`.
    """
    _for_each(cfg, lambda part, name: ensure_here(part, tokenizer, run_dir, name))


def open_sources(cfg: Config, run_dir: Path) -> dict[str, Corpus]:
    """Open the corpus of each source, once `prepare_sources` has run.

    Raises:
        DataError: If one is not there, or its files do not have the recorded length.
    """
    return _for_each(cfg, lambda _, name: open_corpus(run_dir, name))


def prepare_config(cfg: Config) -> str:
    """Make, or verify, the corpora that a run of a config needs, in the cache.

    Returns:
        A description: documents, tokens, bytes and place of each corpus; shares of a mixture.

    Raises:
        DataError: If a source or the tokenizer cannot be read, or a corpus is damaged.
        OutputError: If the cache cannot be written.
    """
    say(f"data     {described(cfg.data)}; tokenizer {cfg.tokenizer.name}")
    tokenizer = new_tokenizer(cfg, say)
    bar = Progress("tokenised", unit="documents")

    def progress(documents: int, tokens: int) -> None:
        bar.update(documents)

    prepared = _for_each(cfg, lambda part, _: prepare_ahead(part, tokenizer, progress))
    if cfg.data.source == "fineweb" and cfg.data.download_dir:
        from lm.data.sources.hub_parquet import download_all

        count = download_all(cfg.data, Progress("downloaded", unit="files").update)
        source = f"{cfg.data.dataset} {cfg.data.dataset_config}"
        say(f"data     {count} files of {source} in {cfg.data.download_dir}")
    lines = []
    for name, share in shares(cfg.data).items():
        if name:
            lines.append(f"source   {name}: {share:.2%} of the sequences of a run")
        lines.append(_describe(*prepared[name]))
    if cfg.data.source == "fineweb":
        lines.append(
            "         the validation split: training text is read from the hub as it trains"
        )
    return "\n".join(lines)


def _describe(folder: Path, made: bool) -> str:
    meta = open_folder(folder).meta
    how = "made" if made else "there already, verified"
    return (
        f"corpus   {meta.documents} documents, {meta.tokens} tokens ({meta.val_tokens} of them for"
        f" validation), {meta.bytes} bytes, {how}\n         {folder}"
    )
