"""`fprnn tokenizer train`: a tokenizer of its own, trained on a source and kept in a folder."""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from lm.common.errors import UserError, require
from lm.common.files import OutputError, check_folder, writing
from lm.config.schema import Config
from lm.data.corpus.documents import encode_documents
from lm.data.corpus.tokenizer import bpe_of, first_texts, from_sentencepiece, save
from lm.data.sources.errors import DataError
from lm.data.sources.mixture import naming, parts, tokenizer_bytes

HELD_OUT_BYTES = 1_000_000  # of held-out text that a tokenizer is measured on
SENTENCE_BYTES = 2**30  # sentencepiece leaves longer lines out; its default is 4,192


@dataclass(frozen=True)
class Trained:
    """What was trained, and how well it does on documents that it was not trained on.

    Fields:
        tokens: of its vocabulary. exact: every held-out document comes back as it was.
    """

    kind: str
    folder: Path
    tokens: int
    documents: int
    bytes: int
    held_out_bytes: int
    held_out_tokens: int
    exact: bool
    seconds: float


@dataclass
class _Read:
    """What went by while the documents were read."""

    documents: int = 0
    bytes: int = 0
    held_out: list[str] = field(default_factory=list)
    held_out_bytes: int = 0

    def keep(self, text: str) -> None:
        """A document of validation, for the measurement."""
        if self.held_out_bytes < HELD_OUT_BYTES:
            self.held_out.append(text)
            self.held_out_bytes += len(text.encode())


def train_tokenizer(
    cfg: Config, kind: str, out: Path, progress: Callable[[int], None] = lambda _: None
) -> Trained:
    """Trains a tokenizer of `tokenizer.vocab_size` tokens on `tokenizer.train_bytes` of the
    training documents that `data` describes, and writes it to a folder that `tokenizer.name` can
    name. The same text and settings make the same files.

    Args:
        kind: "bpe" (byte-level) or "sentencepiece" (its BPE, with bytes to fall back on).
        progress: called with the bytes read so far.

    Raises:
        DataError: the source cannot be read, or yields no such vocabulary.
        OutputError: the folder holds something, or cannot be written.
        MissingPackageError: sentencepiece is not installed.
    """
    began = time.monotonic()
    out = Path(out)
    if kind == "sentencepiece":
        require("sentencepiece", "a tokenizer of --type sentencepiece")
    check_folder(out)
    if out.is_dir() and any(out.iterdir()):
        raise OutputError(f"{out} is not empty: name a new folder")
    read = _Read()
    texts = _texts(cfg, read, progress)
    train = {"bpe": bpe_of, "sentencepiece": sentencepiece_of}[kind]
    tokenizer = train(texts, cfg.tokenizer.vocab_size)
    held_out = read.held_out
    exact = all(
        tokenizer.decode(encode_documents(tokenizer, [text])[:-1].tolist()) == text
        for text in held_out
    )
    size = {"vocab_size": cfg.tokenizer.vocab_size, "train_bytes": cfg.tokenizer.train_bytes}
    with writing(out):
        save(tokenizer, out, {"name": kind, **size})
    return Trained(
        kind=kind,
        folder=out,
        tokens=len(tokenizer),
        documents=read.documents,
        bytes=read.bytes,
        held_out_bytes=read.held_out_bytes,
        held_out_tokens=len(encode_documents(tokenizer, held_out)) - len(held_out),
        exact=exact,
        seconds=time.monotonic() - began,
    )


def _texts(cfg: Config, read: _Read, progress: Callable[[int], None]) -> Iterator[str]:
    """The training documents of all sources, up to the bytes of each."""
    budgets = tokenizer_bytes(cfg)
    for name, part in parts(cfg).items():
        if not budgets[name]:
            continue
        with naming(name):
            for text in first_texts(part.data, budgets[name], read.keep):
                read.documents += 1
                read.bytes += len(text.encode())
                progress(read.bytes)
                yield text


def sentencepiece_of(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A sentencepiece BPE whose decode(encode(text)) == text for any text: nothing is normalised,
    no space added or removed, and what has no piece is spelt in bytes.

    Raises:
        DataError: the text yields no such vocabulary.
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
            f"sentencepiece cannot make {vocab_size} tokens of this text: {reason} (it is"
            " --vocab-size, or tokenizer.vocab_size)"
        ) from None
    if failure:
        raise failure[0]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.model").write_bytes(model.getvalue())
        tokenizer = from_sentencepiece(Path(folder))
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def summary(trained: Trained) -> str:
    """What a person wants to know of a tokenizer that was trained."""
    t = trained
    lines = [
        f"tokenizer {t.kind}, {t.tokens} tokens, of {t.documents:,} documents ({t.bytes:,} bytes),"
        f" in {t.seconds:.1f} s"
    ]
    if t.held_out_tokens:
        back = "each comes back exactly" if t.exact else "NOT each comes back as it was"
        lines.append(
            f"held out  {t.held_out_bytes / t.held_out_tokens:.3f} bytes per token on"
            f" {t.held_out_bytes:,} bytes of validation documents; {back}"
        )
    else:
        lines.append("held out  no validation document went by (data.val_fraction): not measured")
    lines.append(f"          {t.folder}: tokenizer.name={t.folder} trains with it")
    return "\n".join(lines)
