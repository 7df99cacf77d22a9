"""`fprnn tokenizer train`: train a tokenizer on a source, and keep it in a folder."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from lm.common.errors import UserError, require
from lm.common.files import OutputError, check_folder, writing
from lm.config.schema import Config
from lm.data.corpus.documents import encode_documents
from lm.data.corpus.tokenizer import bpe_of, from_sentencepiece, save, training_texts
from lm.data.sources.errors import DataError

SENTENCE_BYTES = 2**30  # sentencepiece leaves longer lines out; its default is 4,192


def train_tokenizer(cfg: Config, kind: str, out: Path) -> str:
    """Train a tokenizer of `tokenizer.vocab_size` tokens, and write it to a folder.

    It reads `tokenizer.train_bytes` of the training documents that `data` describes. The folder can
    be a `tokenizer.name`. The same text and settings make the same files.

    Args:
        kind: "bpe" (byte-level) or "sentencepiece" (its BPE, which spells unknown text in bytes).

    Returns:
        A description of the tokenizer: its size, and how well it does on held-out documents.

    Raises:
        DataError: If the source cannot be read, or yields no such vocabulary.
        OutputError: If the folder holds something, or cannot be written.
        MissingPackageError: If sentencepiece is not installed.
    """
    if kind == "sentencepiece":
        require("sentencepiece", "a tokenizer of --type sentencepiece")
    check_folder(out)
    if out.is_dir() and any(out.iterdir()):
        raise OutputError(f"{out} is not empty: name a new folder")
    held_out: list[str] = []
    train = {"bpe": bpe_of, "sentencepiece": sentencepiece_of}[kind]
    wanted = {
        "vocab_size": cfg.tokenizer.vocab_size,
        "train_bytes": cfg.tokenizer.train_bytes,
    }
    tokenizer = train(training_texts(cfg, held_out.append), wanted["vocab_size"])
    with writing(out):
        save(tokenizer, out, {"name": kind, **wanted})
    return (
        f"tokenizer {kind}, {len(tokenizer)} of {wanted['vocab_size']} tokens\n"
        f"held out  {_measure(tokenizer, held_out)}\n"
        f"          {out}: tokenizer.name={out} trains with it"
    )


def _measure(tokenizer: PreTrainedTokenizerFast, held_out: list[str]) -> str:
    """Describe how well a tokenizer does on documents that it was not trained on."""
    if not held_out:
        return "no validation document went by (data.val_fraction): not measured"
    encoded = [encode_documents(tokenizer, [text])[:-1].tolist() for text in held_out]
    is_exact = all(tokenizer.decode(ids) == text for ids, text in zip(encoded, held_out))
    size = sum(len(text.encode()) for text in held_out)
    back = "each comes back exactly" if is_exact else "NOT each comes back as it was"
    return (
        f"{size / sum(map(len, encoded)):.3f} bytes per token on {size:,} bytes of validation"
        f" documents; {back}"
    )


def sentencepiece_of(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a sentencepiece BPE with decode(encode(text)) == text for any text.

    Nothing is normalised, no space is added or removed, and text without a piece is spelt in bytes.

    Raises:
        DataError: If the text yields no such vocabulary.
    """
    import sentencepiece

    model = io.BytesIO()
    failure: list[UserError] = []

    def lines() -> Iterator[str]:
        # An error would be lost in sentencepiece, which calls this.
        try:
            for text in texts:
                yield from text.splitlines(keepends=True)
        except UserError as e:
            failure.append(e)

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines(),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=SENTENCE_BYTES,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            minloglevel=2,
        )
    except RuntimeError as e:
        if failure:
            raise failure[0] from None
        reason = str(e).strip().splitlines()[-1].rpartition("] ")[2]  # without a place in C++
        raise DataError(
            f"sentencepiece cannot make {vocab_size} tokens of this text: {reason} (set"
            " tokenizer.vocab_size)"
        ) from None
    if failure:
        raise failure[0]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.model").write_bytes(model.getvalue())
        tokenizer = from_sentencepiece(Path(folder))
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
