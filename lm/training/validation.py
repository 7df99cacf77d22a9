"""What a training is measured by on held-out text: loss, bits per byte, ℓ*, n-grams beside it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from lm.common.console import Progress, say
from lm.common.ranks import Ranks
from lm.config.schema import Config
from lm.data.batches.packing import IGNORE
from lm.data.batches.questions import question_batches
from lm.data.batches.text_bytes import (
    TextBytes,
    UncountableError,
    bits_per_byte,
    format_bits_per_byte,
)
from lm.data.sources.mixture import parts
from lm.runs.log import iterations
from lm.runs.metrics import FailureWatch, fixed_point_metrics, probe
from lm.runs.run_dir import RunDir
from lm.training.engine import Engine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Tokens of its micro-batch that a rank probes at most. Counting ℓ* takes up to 1,000 iterations a
# layer. On a CPU their time grows with the tokens from about 500 on. On a GPU an iteration launches
# about 50 kernels, and at d_inner 1,536 those take longer than their work below about 4,000 tokens.
MAX_PROBE_TOKENS = 4096


class Validation:
    """The held-out micro-batches of this rank, and what is measured on them.

    Args:
        held_out: the micro-batches of this rank of each source; of a single one under "".
        shares: of the sources in training; they weigh the mean.
        watch: is told of tokens that were not solved; None of a model without a solver.
        tokenizer: of the corpus, for bits per byte.
    """

    def __init__(
        self,
        cfg: Config,
        ranks: Ranks,
        held_out: dict[str, list],
        shares: dict[str, float],
        watch: FailureWatch | None,
        tokenizer: PreTrainedTokenizerBase,
    ):
        self.cfg, self.ranks, self.watch = cfg, ranks, watch
        self.held_out, self.shares = held_out, shares
        self.bytes = text_bytes_of(held_out, tokenizer, ranks)  # of all ranks
        self.asked = {
            name: question_batches(
                part.data.traces, tokenizer, cfg.train.micro_batch_size, cfg.data.seq_len
            )
            for name, part in parts(cfg).items()
            if part.data.source == "traces"
        }

    def measure(self, engine: Engine, step: int, alive: Callable[[], None]) -> dict:
        """The record of a validation after update `step`: loss, perplexity, bits per byte,
        ℓ*.

        Args:
            alive: called after each micro-batch.
        """
        scores = self._scores(engine, alive)
        record = {"step": step, "validation": scores, **self.probed(engine)}
        of_sources = ""
        for name, of in scores.get("sources", {}).items():
            of_sources += f"  {name} {of['perplexity']:.2f}{in_answers(of)}"
        bits = format_bits_per_byte(scores["bits_per_byte"])
        say(
            f"update {step:>6}  validation loss {scores['loss']:.4f}  perplexity"
            f" {scores['perplexity']:.2f}{bits}{in_answers(scores)}"
            f"{of_sources}"
            f"{iterations(record)}"
        )
        if self.watch is not None:
            self.watch.look(record["probe"], f"validation after update {step}")
        return record

    def _scores(self, engine: Engine, alive: Callable[[], None]) -> dict:
        """Loss, perplexity, bits per byte and tokens of the weights as they are; see `pooled`. Of
        traces also `answers`, see `likely`."""
        total = sum(len(batches) for batches in self.held_out.values())
        done, measured = 0, {}
        bar = Progress("validating", unit="batches")

        def progress(of_source, _):
            alive()
            bar.update(done + of_source, total)

        for name, batches in self.held_out.items():
            scores = engine.validate(batches, progress)
            text = self.bytes[name]
            bits = bits_per_byte(scores["loss"] * scores["tokens"], text)
            measured[name] = scores | {"bits_per_byte": bits, "bytes": text}
            if name in self.asked:
                measured[name]["answers"] = self.likely(engine, [name], alive)
            done += len(batches)
        return pooled(measured, self.shares)

    def likely(self, engine: Engine, names: list[str], alive: Callable[[], None]) -> float:
        """How likely the right answers to the questions of sources of traces are: the geometric
        mean, of that source where it is the least. An answer may be of several tokens."""
        losses = []
        for name in names:
            batches = self.asked[name]
            questions = sum(len(batch["labels"]) for batch in batches)
            targets = sum(int((batch["labels"] != IGNORE).sum()) for batch in batches)
            of_token = engine.validate(batches, lambda *_: alive())["loss"]
            losses.append(of_token * targets / questions)
        return math.exp(-max(losses, key=_worse))

    def probed(self, engine: Engine) -> dict:
        """Probe the solver on the same sequences each time, so that only the model changes.

        Every rank calls it. The sequences are those of `probe_sequences`, from the rank's first
        micro-batch of the source with the largest share.

        Returns:
            {"probe": what `fixed_point_metrics` gives, with ℓ* of each layer}; {} for a model
            without a solver.
        """
        if self.watch is None:
            return {}
        batch = self.held_out[max(self.shares, key=self.shares.__getitem__)][0]
        sequences = probe_sequences(batch["labels"])
        input_ids = batch["input_ids"][sequences].to(self.ranks.device)
        report = probe(engine.deepspeed, input_ids)
        rows = (batch["labels"][sequences] != IGNORE).any(-1)
        return {"probe": fixed_point_metrics([report], self.ranks.gather, rows)}

    def ngrams(self, run: RunDir, vocab_size: int) -> dict[str, dict]:
        """Return perplexities of unigrams and bigrams on the same text, which a model must beat;
        {} of a mixture."""
        from lm.data.batches import loader
        from lm.data.batches.ngram import ngram_baselines
        from lm.data.corpus.corpora import open_sources

        if self.cfg.data.mixture is not None:
            return {}
        corpus = open_sources(self.cfg, run.path)[""]
        size = self.cfg.train.micro_batch_size
        targets = loader.validation_blocks(corpus.val, self.cfg.data, size)
        return {"baselines": ngram_baselines(corpus.train, targets, vocab_size)}


def probe_sequences(labels: torch.Tensor) -> torch.Tensor:
    """Choose the sequences of a micro-batch that a probe reads.

    Their number depends only on the shape, so that it is the same on every rank.

    Args:
        labels: Targets, shape (batch, length); IGNORE marks tokens without one.

    Returns:
        Indices, shape (n,): at least one sequence, and at most MAX_PROBE_TOKENS tokens if there are
        more. Sequences with targets come first.
    """
    is_empty = (labels == IGNORE).all(-1)
    count = max(1, MAX_PROBE_TOKENS // labels.shape[1])
    return torch.argsort(is_empty.int(), stable=True)[:count]


def _worse(loss: float) -> tuple[bool, float]:
    """What a loss is compared by: NaN is worse than any."""
    return math.isnan(loss), loss


def in_answers(scores: dict) -> str:
    """For a line of the terminal: how likely the right answers of traces are; nothing of another
    source."""
    return f" (answers {scores['answers']:.2f})" if "answers" in scores else ""


def pooled(measured: dict[str, dict], shares: dict[str, float]) -> dict:
    """The scores of all sources as one: the mean of their losses, each weighed by its share in
    training (the loss that training lowers, on held-out text), its perplexity, and its bits per
    byte of text that is mixed so. A single source has its own.

    Args:
        measured: of each source its loss (nats a token), perplexity, tokens and bytes.
    """
    if list(measured) == [""]:
        return measured[""]
    loss = math.fsum(shares[name] * scores["loss"] for name, scores in measured.items())
    bits = text = None
    if all(scores["bytes"] for scores in measured.values()):
        text = sum(scores["bytes"] for scores in measured.values())
        bits = bits_per_byte(
            loss,
            sum(shares[name] * of["bytes"] / of["tokens"] for name, of in measured.items()),
        )
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "tokens": sum(scores["tokens"] for scores in measured.values()),
        "bits_per_byte": bits,
        "bytes": text,
        "sources": measured,
    }


def text_bytes_of(
    held_out: dict[str, list], tokenizer: PreTrainedTokenizerBase, ranks: Ranks
) -> dict[str, int | None]:
    """Of each source the UTF-8 bytes of the text that the targets of all ranks' micro-batches stand
    for, see data/batches/text_bytes.py; None, which is said, where the tokenizer does not tell.
    Every rank calls it."""
    try:
        of_ids = TextBytes(tokenizer)
    except UncountableError as e:
        say(f"note: no bits per byte: {e}")
        return dict.fromkeys(held_out)
    measured = {}
    for name, batches in held_out.items():
        counts = [of_ids.count(batch["input_ids"], batch["labels"]) for batch in batches]
        known = [count for count in counts if count is not None]
        total, unknown = ranks.sum(sum(known), len(counts) - len(known))
        measured[name] = None if unknown else int(total)
    if None in measured.values():
        say("note: no bits per byte: the validation text has tokens that may stand for any text")
    return measured
