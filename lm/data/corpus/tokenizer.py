"""Tokenizers: a trained byte-level BPE, GPT-2 files, or any Hugging Face tokenizer."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast

from lm.common.console import say
from lm.common.files import read_json
from lm.config.data import Data
from lm.config.schema import Config
from lm.data.corpus import cache
from lm.data.sources.errors import DataError, first_line
from lm.data.sources.hub import check_hub
from lm.data.sources.mixture import configs_by_source, name_source_in_errors, tokenizer_bytes
from lm.data.sources.open import is_validation, iter_documents
from lm.model import checksums
from lm.runs.path_checks import looks_local

EOS, PAD = "<|endoftext|>", "<|pad|>"
RECORD = "made_from.json"  # file next to a saved tokenizer: the settings that it was made from


def load_tokenizer(cfg: Config, run_dir: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer in `run_dir/tokenizer`; make it and save it there if it is missing.

    Raises:
        DataError: If the tokenizer cannot be found, has no EOS, or differs from the run's.
    """
    folder = Path(run_dir) / "tokenizer"
    settings = _settings(cfg)
    if folder.is_dir():
        record_path = folder / RECORD
        saved_settings = read_json(record_path) if record_path.is_file() else settings
        if saved_settings != settings:
            raise DataError(
                f"{folder} was made from {saved_settings}, but the config has {settings}; "
                "use another run name, or the old tokenizer settings"
            )
        return _load_saved(folder)
    tokenizer = new_tokenizer(cfg)
    save(tokenizer, folder, settings)
    return tokenizer


def new_tokenizer(cfg: Config) -> PreTrainedTokenizerFast:
    """Load or train the tokenizer of a config, independently of a run directory.

    A BPE is trained only once per text: it is cached in `data.cache_dir`. If its vocabulary is
    smaller than configured, a line is printed.

    Raises:
        DataError: If the tokenizer cannot be found, or has no EOS.
    """
    name = cfg.tokenizer.name
    tokenizer = _load_bpe(cfg) if name == "bpe" else _load_huggingface(name)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise DataError(f"tokenizer {name} has no fast (`tokenizers`) implementation")
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"tokenizer {name} has no EOS token, which must end each document; set `eos_token` in"
            " its tokenizer_config.json, or use `tokenizer.name: bpe`"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _load_saved(folder: Path) -> PreTrainedTokenizerFast:
    """Load a tokenizer that `save` has written."""
    try:
        mismatch = checksums.describe_mismatch(folder, checksums.read_sums(folder))
    except (OSError, ValueError) as e:
        raise DataError(f"the tokenizer in {folder} cannot be loaded: {first_line(e)}") from None
    if mismatch:
        raise DataError(
            f"{folder / mismatch}: another tokenizer gives other tokens for the same text;"
            " restore the file"
        )
    return _load(str(folder), PreTrainedTokenizerFast)


def _load_bpe(cfg: Config) -> PreTrainedTokenizerFast:
    """Load the BPE of a config's text from the cache; train it if it is missing."""
    root = cache.root(cfg.data)
    if root is None:
        return train_bpe(cfg)
    entry = cache.tokenizer_folder(root, cfg)
    folder = entry / "tokenizer"

    def make() -> None:
        tokenizer = train_bpe(cfg)
        sources = [source_cfg.data for source_cfg in configs_by_source(cfg).values()]
        cache.require_unchanged(entry, cache.tokenizer_folder(root, cfg), sources)
        save(tokenizer, folder, _settings(cfg))

    is_new = cache.make_once(entry, folder.is_dir, make)
    try:
        tokenizer = _load_saved(folder)
    except DataError as e:
        raise DataError(f"{e}; delete {entry}, and the next start trains it again") from None
    if not is_new:  # `train_bpe` has warned about a new one
        _warn_if_small(len(tokenizer), cfg)
    return tokenizer


def train_bpe(cfg: Config) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on `tokenizer.train_bytes` of training documents.

    Its `tokenizer.vocab_size` tokens include all 256 bytes, so that decode(encode(text)) == text
    for any text, and EOS and PAD.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=cfg.tokenizer.vocab_size,
        min_frequency=2,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(training_texts(cfg), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        eos_token=EOS,
        pad_token=PAD,
    )
    _warn_if_small(len(tokenizer), cfg)
    return tokenizer


def _warn_if_small(size: int, cfg: Config) -> None:
    if size < cfg.tokenizer.vocab_size:
        say(
            f"the corpus gives a vocabulary of only {size} tokens, fewer than tokenizer.vocab_size"
            f" {cfg.tokenizer.vocab_size}"
        )


def training_texts(cfg: Config) -> Iterator[str]:
    """Yield training documents from each source, up to its share of `tokenizer.train_bytes`.

    Raises:
        DataError: If a source cannot be read, or has no training document.
    """
    byte_counts = tokenizer_bytes(cfg)
    for name, source_cfg in configs_by_source(cfg).items():
        if byte_counts[name]:
            with name_source_in_errors(name):
                yield from _first_texts(source_cfg.data, byte_counts[name])


def _first_texts(data: Data, num_bytes: int) -> Iterator[str]:
    """Yield training documents until they have at least `num_bytes` bytes."""
    remaining_bytes = num_bytes
    for text in iter_documents(data):
        if is_validation(text, data.val_fraction):
            continue
        yield text
        remaining_bytes -= len(text.encode())
        if remaining_bytes <= 0:
            return
    if remaining_bytes == num_bytes:  # there was no training document, because none is empty
        raise DataError(
            "no training document to train a tokenizer on: every document of the corpus is held "
            "out; lower data.val_fraction or add documents"
        )


def _settings(cfg: Config) -> dict:
    """Return the settings of a config that determine its tokenizer, for RECORD."""
    if cfg.tokenizer.name == "bpe":
        return {"name": "bpe", "vocab_size": cfg.tokenizer.vocab_size}
    return {"name": cfg.tokenizer.name}


def _load_huggingface(name: str) -> PreTrainedTokenizerFast:
    """Load a tokenizer from a folder, from the local cache of the hub, or from the hub."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _load_folder(folder)
    if "/" in name and looks_local(name):
        raise DataError(f"tokenizer.name {name}: no such folder")
    with contextlib.suppress(DataError):  # not in the local cache
        return _load(name, AutoTokenizer, local_files_only=True)
    check_hub(
        f"tokenizer {name}",
        "`tokenizer.name: bpe` or the folder of a downloaded tokenizer works offline",
    )
    return _load(name, AutoTokenizer)


def _load_folder(folder: Path) -> PreTrainedTokenizerFast:
    """Load a tokenizer from its files, which may be GPT-2's vocab.json and merges.txt."""
    names = {path.name for path in folder.iterdir()}
    if names & {"tokenizer.json", "tokenizer_config.json"}:
        return _load(str(folder), AutoTokenizer, local_files_only=True)
    if {"vocab.json", "merges.txt"} <= names:
        return _load(str(folder), GPT2Tokenizer, local_files_only=True)
    raise DataError(
        f"{folder} contains no tokenizer: tokenizer.json, or vocab.json with merges.txt"
        f" (it contains {', '.join(sorted(names)) or 'nothing'})"
    )


def _load(name: str, tokenizer_class: Any, **options: bool) -> PreTrainedTokenizerFast:
    """Load a tokenizer from a folder or the hub, with a class of transformers."""
    try:
        return tokenizer_class.from_pretrained(name, trust_remote_code=False, **options)
    except Exception as e:  # the loaders raise many types, including a bare Exception
        if "trust_remote_code" in str(e):
            raise DataError(
                f"tokenizer.name {name} has its own code (`auto_map` in its"
                " tokenizer_config.json), which training never runs: use a tokenizer with a"
                " tokenizer.json"
            ) from None
        raise DataError(f"the tokenizer {name} cannot be loaded: {first_line(e)}") from None


def save(tokenizer: PreTrainedTokenizerFast, folder: Path, record: dict) -> None:
    """Save a tokenizer atomically: write a temporary folder next to `folder`, then rename it.

    Args:
        record: Settings that the tokenizer was made from.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary_folder = Path(tempfile.mkdtemp(prefix=".tokenizer-", dir=folder.parent))
    try:
        temporary_folder.chmod(0o755)  # mkdtemp makes it private
        tokenizer.save_pretrained(str(temporary_folder))
        (temporary_folder / RECORD).write_text(json.dumps(record), encoding="utf-8")
        names = [file.name for file in temporary_folder.iterdir()]
        checksums.write_sums(temporary_folder, names)
        try:
            os.replace(temporary_folder, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(temporary_folder, ignore_errors=True)
