"""`fprnn tokenizer train`: train a tokenizer on a source, and keep it in a folder."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from lm.common.files import OutputError, check_folder, writing
from lm.config.schema import Config
from lm.data.corpus.documents import encode_documents
from lm.data.corpus.tokenizer import bpe_of, save, training_texts


def train_tokenizer(cfg: Config, out: Path) -> str:
    """Train a byte-level BPE of `tokenizer.vocab_size` tokens, and write it to a folder.

    It reads `tokenizer.train_bytes` of the training documents that `data` describes. The folder can
    be a `tokenizer.name`. The same text and settings make the same files.

    Returns:
        A description of the tokenizer: its size, and how well it does on held-out documents.

    Raises:
        DataError: If the source cannot be read, or has no training document.
        OutputError: If the folder holds something, or cannot be written.
    """
    check_folder(out)
    if out.is_dir() and any(out.iterdir()):
        raise OutputError(f"{out} is not empty: name a new folder")
    held_out: list[str] = []
    wanted = {
        "vocab_size": cfg.tokenizer.vocab_size,
        "train_bytes": cfg.tokenizer.train_bytes,
    }
    tokenizer = bpe_of(training_texts(cfg, held_out.append), wanted["vocab_size"])
    with writing(out):
        save(tokenizer, out, {"name": "bpe", **wanted})
    return (
        f"tokenizer bpe, {len(tokenizer)} of {wanted['vocab_size']} tokens\n"
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
