"""Preparation and opening of the corpora of all sources of a run or a config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedTokenizerFast

from lm.common.console import Progress, say
from lm.config.schema import Config
from lm.data.corpus.corpus import Corpus, open_folder
from lm.data.corpus.prepare import ensure_on_node, open_corpus, prepare, prepare_ahead
from lm.data.corpus.tokenizer import new_tokenizer
from lm.data.sources.mixture import (
    configs_by_source,
    describe_data,
    name_source_in_errors,
    source_shares,
)

Result = TypeVar("Result")


def _for_each_source(cfg: Config, action: Callable[[Config, str], Result]) -> dict[str, Result]:
    """Call an action with the config and the name of each source; return the results by name.

    If it raises a DataError, the message names the source of a mixture.
    """
    results = {}
    for name, source_cfg in configs_by_source(cfg).items():
        with name_source_in_errors(name):
            results[name] = action(source_cfg, name)
    return results


def prepare_sources(
    cfg: Config,
    tokenizer: PreTrainedTokenizerFast,
    run_dir: Path,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Corpus]:
    """Prepare the corpus of each source; print the shares of a mixture.

    Args:
        progress: Called with the number of tokenised documents of a source.

    Raises:
        DataError, OutputError: As `prepare`.
    """
    corpora = _for_each_source(
        cfg, lambda source_cfg, name: prepare(source_cfg, tokenizer, run_dir, progress, name)
    )
    if cfg.data.mixture is not None:
        for name, share in source_shares(cfg.data).items():
            tokens = corpora[name].meta.train_tokens
            say(f"data     {name}: {share:.2%} of the sequences, from {tokens:,} tokens")
    return corpora


def ensure_sources_on_node(cfg: Config, tokenizer: PreTrainedTokenizerFast, run_dir: Path) -> None:
    """Make the corpora of a run on this node, unless the node can read them already.

    Raises:
        DataError, OutputError: As `prepare`.
    """
    _for_each_source(
        cfg, lambda source_cfg, name: ensure_on_node(source_cfg, tokenizer, run_dir, name)
    )


def open_sources(cfg: Config, run_dir: Path) -> dict[str, Corpus]:
    """Open the corpus of each source, which `prepare_sources` has made.

    Raises:
        DataError: If a corpus is missing, or a file does not have the recorded length.
    """
    return _for_each_source(cfg, lambda _, name: open_corpus(run_dir, name))


def prepare_config(cfg: Config) -> str:
    """Make or verify the corpora in the cache that a run with this config needs.

    Returns:
        A description: documents, tokens, bytes and folder of each corpus; shares of a mixture.

    Raises:
        DataError: If a source or the tokenizer cannot be read, or a corpus is damaged.
        OutputError: If the cache cannot be written.
    """
    say(f"data     {describe_data(cfg.data)}; tokenizer {cfg.tokenizer.name}")
    tokenizer = new_tokenizer(cfg)
    bar = Progress("tokenised", unit="documents")
    entries = _for_each_source(
        cfg, lambda source_cfg, _: prepare_ahead(source_cfg, tokenizer, bar.update)
    )
    is_stream = cfg.data.source == "fineweb"
    if is_stream and cfg.data.download_dir:
        from lm.data.sources.hub_parquet import download_all

        count = download_all(cfg.data, Progress("downloaded", unit="files").update)
        dataset = f"{cfg.data.dataset} {cfg.data.dataset_config}"
        say(f"data     {count} files of {dataset} in {cfg.data.download_dir}")
    lines = []
    for name, share in source_shares(cfg.data).items():
        if name:
            lines.append(f"source   {name}: {share:.2%} of the sequences of a run")
        lines.append(_describe_entry(*entries[name]))
    if is_stream:
        lines.append("         only the validation split: training reads its text from the hub")
    return "\n".join(lines)


def _describe_entry(folder: Path, is_new: bool) -> str:
    meta = open_folder(folder).meta
    return (
        f"corpus   {meta.documents} documents, {meta.tokens} tokens ({meta.val_tokens} of them for"
        f" validation), {meta.bytes} bytes, {'made' if is_new else 'existed already, verified'}\n"
        f"         {folder}"
    )
