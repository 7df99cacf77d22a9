"""Load or train the tokenizer: byte-level BPE, GPT-2 files, any HuggingFace tokenizer."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast

from lm.common.files import read_json
from lm.config.data import Data
from lm.config.schema import Config
from lm.data.corpus import cache
from lm.data.sources.errors import DataError, first_line
from lm.data.sources.hub import check_hub
from lm.data.sources.mixture import naming, parts, tokenizer_bytes
from lm.data.sources.open import documents, is_validation
from lm.model import checksums
from lm.runs.places import looks_local

EOS, PAD = "<|endoftext|>", "<|pad|>"
RECORD = "made_from.json"  # in the saved folder: the settings it answers to


def load_tokenizer(
    cfg: Config, run_dir: Path, log: Callable[[str], None] = warnings.warn
) -> PreTrainedTokenizerFast:
    """The run's tokenizer: the one in `run_dir/tokenizer`, else a new one, saved there at once.

    Args:
        log: receives a sentence when a trained vocabulary came out smaller than asked.

    Raises:
        DataError: it cannot be found, has no EOS, or the run already has another one.
    """
    folder, wanted = Path(run_dir) / "tokenizer", _wanted(cfg)
    if folder.is_dir():
        record = folder / RECORD
        made_from = read_json(record) if record.is_file() else wanted
        if made_from != wanted:
            raise DataError(
                f"{folder} was made from {made_from}, but the config asks for {wanted}; "
                "use another run name, or the old tokenizer settings"
            )
        return _read(folder)
    tokenizer = new_tokenizer(cfg, log)
    save(tokenizer, folder, wanted)
    return tokenizer


def new_tokenizer(
    cfg: Config, log: Callable[[str], None] = warnings.warn
) -> PreTrainedTokenizerFast:
    """The tokenizer of a config, before a run directory has it. A BPE is trained once for a text
    and kept in the cache of `data.cache_dir`; one of the hub, in the hub's own cache.

    Raises:
        DataError: it cannot be found, or has no EOS.
    """
    name = cfg.tokenizer.name
    tokenizer = _trained_once(cfg, log) if name == "bpe" else _from_huggingface(name)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise DataError(f"tokenizer {name} has no fast (`tokenizers`) implementation")
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"tokenizer {name} has no EOS token, which ends each document; set `eos_token` in its "
            "tokenizer_config.json, or use `tokenizer.name: bpe`"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _read(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that `save` has written into a folder.

    Raises:
        DataError: its files are damaged, or were changed.
    """
    try:
        how = checksums.difference(folder, checksums.read_sums(folder))
    except (OSError, ValueError) as e:
        raise DataError(f"the tokenizer in {folder} cannot be loaded: {first_line(e)}") from None
    if how:
        raise DataError(
            f"{folder / how}: with another tokenizer the same text is other tokens; bring the file"
            " back"
        )
    return _load(str(folder), PreTrainedTokenizerFast)


def _trained_once(cfg: Config, log: Callable[[str], None]) -> PreTrainedTokenizerFast:
    """The BPE of the text, from the cache; trained first where it is not there."""
    root = cache.root(cfg.data)
    if root is None:
        return train_bpe(cfg, log)
    entry = cache.tokenizer_folder(root, cfg)
    folder = entry / "tokenizer"

    def make() -> None:
        tokenizer = train_bpe(cfg, log)
        cache.check_unchanged(
            [part.data for part in parts(cfg).values()],
            lambda: cache.tokenizer_folder(root, cfg).name,
            entry.name,
        )
        save(tokenizer, folder, _wanted(cfg))

    made = cache.make_once(entry, folder.is_dir, make)
    try:
        tokenizer = _read(folder)
    except DataError as e:
        raise DataError(f"{e}; delete {entry}, and the next start trains it again") from None
    if not made:
        _say_if_small(len(tokenizer), cfg, log)
    return tokenizer


def train_bpe(cfg: Config, log: Callable[[str], None] = warnings.warn) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `tokenizer.vocab_size` tokens (256 bytes, EOS and PAD among them) trained
    on `tokenizer.train_bytes` of training documents; decode(encode(text)) == text for any text."""
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
    _say_if_small(len(tokenizer), cfg, log)
    return tokenizer


def _say_if_small(size: int, cfg: Config, log: Callable[[str], None]) -> None:
    if size < cfg.tokenizer.vocab_size:
        log(
            f"the corpus yields a vocabulary of {size} tokens only, fewer than the "
            f"{cfg.tokenizer.vocab_size} of tokenizer.vocab_size"
        )


def training_texts(cfg: Config) -> Iterator[str]:
    """Yield training documents of each source, up to its share of `tokenizer.train_bytes`.

    Raises:
        DataError: If a source cannot be read, or has no training document.
    """
    budgets = tokenizer_bytes(cfg)
    for name, part in parts(cfg).items():
        if budgets[name]:
            with naming(name):
                yield from _first_texts(part.data, budgets[name])


def _first_texts(data: Data, size: int) -> Iterator[str]:
    left = size
    for text in documents(data):
        if is_validation(text, data.val_fraction):
            continue
        yield text
        left -= len(text.encode())
        if left <= 0:
            return
    if left == size:
        raise DataError(
            "no training document to train a tokenizer on: every document of the corpus is held "
            "out; lower data.val_fraction or add documents"
        )


def _wanted(cfg: Config) -> dict:
    t = cfg.tokenizer
    return {"name": t.name} | ({"vocab_size": t.vocab_size} if t.name == "bpe" else {})


def _from_huggingface(name: str) -> PreTrainedTokenizerFast:
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _from_folder(folder)
    if "/" in name and looks_local(name):
        raise DataError(f"tokenizer.name {name}: no such folder")
    with contextlib.suppress(DataError):  # the hub's local cache
        return _load(name, AutoTokenizer, local_files_only=True)
    try:
        check_hub(f"tokenizer {name}")
    except DataError as e:
        raise DataError(
            f"{e}; `tokenizer.name: bpe` or the folder of a downloaded tokenizer works offline"
        ) from None
    return _load(name, AutoTokenizer)


def _from_folder(folder: Path) -> PreTrainedTokenizerFast:
    names = {path.name for path in folder.iterdir()}
    if names & {"tokenizer.json", "tokenizer_config.json"}:
        return _load(str(folder), AutoTokenizer, local_files_only=True)
    if {"vocab.json", "merges.txt"} <= names:
        return _load(str(folder), GPT2Tokenizer, local_files_only=True)
    raise DataError(
        f"{folder} holds no tokenizer: tokenizer.json, or vocab.json with merges.txt"
        f" (it holds {', '.join(sorted(names)) or 'nothing'})"
    )


def _load(name: str, kind: Any, **options: bool) -> PreTrainedTokenizerFast:
    """Load a tokenizer by a class of transformers, from a folder or the hub.

    Raises:
        DataError: If the class cannot load it, or would have to run its own code.
    """
    try:
        return kind.from_pretrained(name, trust_remote_code=False, **options)
    except Exception as e:  # the loaders raise whatever they meet, bare Exception included
        if "trust_remote_code" in str(e):
            raise DataError(
                f"tokenizer.name {name} is code of its own (`auto_map` in its"
                " tokenizer_config.json), which no training runs: name a tokenizer with a"
                " tokenizer.json"
            ) from None
        raise DataError(f"the tokenizer {name} cannot be loaded: {first_line(e)}") from None


def save(tokenizer: PreTrainedTokenizerFast, folder: Path, record: dict) -> None:
    """Writes the folder beside its place and moves it there, so that it is whole or absent."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".tokenizer-", dir=folder.parent))
    try:
        draft.chmod(0o755)
        tokenizer.save_pretrained(str(draft))
        (draft / RECORD).write_text(json.dumps(record), encoding="utf-8")
        checksums.write_sums(draft, [file.name for file in draft.iterdir()])
        try:
            os.replace(draft, folder)
        except OSError:
            if not folder.is_dir():  # else another process was first
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
