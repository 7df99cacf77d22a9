"""Validation on held-out text: loss, bits per byte, ℓ*, and n-gram models for comparison."""

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
from lm.data.sources.mixture import configs_by_source
from lm.runs.log import iterations_suffix
from lm.runs.metrics import FailureWatch, fixed_point_metrics, probe
from lm.runs.run_dir import RunDir
from lm.training.engine import Engine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Tokens that a rank probes at most. Counting ℓ* takes up to 1,000 iterations per layer. On a CPU
# their time grows with the number of tokens above about 500. On a GPU an iteration launches about
# 50 kernels, and at d_inner 1,536 the launches dominate below about 4,000 tokens.
MAX_PROBE_TOKENS = 4096


class Validation:
    """Held-out micro-batches of this rank, and measurements on them.

    Args:
        cfg: Configuration of the run.
        ranks: Ranks of the run.
        held_out: {source: micro-batches of this rank}; a single source has the name "".
        shares: Shares of the sources in training, which weight the mean loss.
        watch: Warns of tokens that were not solved; None for a model without a solver.
        tokenizer: Tokenizer of the corpus, for bits per byte.
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
        self.bytes = count_text_bytes(held_out, tokenizer, ranks)  # of all ranks
        self.asked = {
            name: question_batches(
                part.data.traces, tokenizer, cfg.train.micro_batch_size, cfg.data.seq_len
            )
            for name, part in configs_by_source(cfg).items()
            if part.data.source == "traces"
        }

    def measure(self, engine: Engine, step: int, alive: Callable[[], None]) -> dict:
        """Return and print the record of a validation after update `step`.

        Args:
            engine: Engine with the weights to measure.
            step: Number of updates made.
            alive: Called after each micro-batch.
        """
        scores = self._scores(engine, alive)
        record = {"step": step, "validation": scores, **self.probe_solver(engine)}
        sources = "".join(
            f"  {name} {source_scores['perplexity']:.2f}{answers_suffix(source_scores)}"
            for name, source_scores in scores.get("sources", {}).items()
        )
        bits = format_bits_per_byte(scores["bits_per_byte"])
        say(
            f"update {step:>6}  validation loss {scores['loss']:.4f}  perplexity"
            f" {scores['perplexity']:.2f}{bits}{answers_suffix(scores)}{sources}"
            f"{iterations_suffix(record)}"
        )
        if self.watch is not None:
            self.watch.check(record["probe"], f"validation after update {step}")
        return record

    def _scores(self, engine: Engine, alive: Callable[[], None]) -> dict:
        """Measure loss, perplexity, bits per byte and tokens; of traces also the answers."""
        total = sum(len(batches) for batches in self.held_out.values())
        finished, scores_by_source = 0, {}
        bar = Progress("validating", unit="batches")

        def progress(count, _):
            alive()
            bar.update(finished + count, total)

        for name, batches in self.held_out.items():
            scores = engine.validate(batches, progress)
            text = self.bytes[name]
            bits = bits_per_byte(scores["loss"] * scores["tokens"], text)
            scores_by_source[name] = scores | {"bits_per_byte": bits, "bytes": text}
            if name in self.asked:
                scores_by_source[name]["answers"] = self.answer_probability(engine, [name], alive)
            finished += len(batches)
        return pool_scores(scores_by_source, self.shares)

    def answer_probability(
        self, engine: Engine, names: list[str], alive: Callable[[], None]
    ) -> float:
        """Return the probability of the right answers to the questions of sources of traces.

        It is the geometric mean over the questions of a source (an answer may have several tokens),
        and the minimum over the sources.

        Args:
            engine: Engine with the weights to measure.
            names: Names of the sources.
            alive: Called after each micro-batch.
        """
        losses = []
        for name in names:
            batches = self.asked[name]
            questions = sum(len(batch["labels"]) for batch in batches)
            targets = sum(int((batch["labels"] != IGNORE).sum()) for batch in batches)
            token_loss = engine.validate(batches, lambda *_: alive())["loss"]
            losses.append(token_loss * targets / questions)
        return math.exp(-max(losses, key=_sort_nan_last))

    def probe_solver(self, engine: Engine) -> dict:
        """Count ℓ* on the same sequences each time, so that only the model changes.

        Every rank calls it. The sequences are chosen by `probe_sequences` from the rank's first
        micro-batch of the source with the largest share.

        Returns:
            {"probe": as `fixed_point_metrics`, with ℓ* of each layer}; {} for a model without a
            solver.
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
        """Return perplexities of unigrams and bigrams on the same text; {} for a mixture."""
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
        Indices, shape (n,), of as many sequences as MAX_PROBE_TOKENS allows, at least one.
        Sequences with targets come first.
    """
    is_empty = (labels == IGNORE).all(-1)
    count = max(1, MAX_PROBE_TOKENS // labels.shape[1])
    return torch.argsort(is_empty.int(), stable=True)[:count]


def _sort_nan_last(loss: float) -> tuple[bool, float]:
    """Return the key by which losses are compared: NaN is larger than any number."""
    return math.isnan(loss), loss


def answers_suffix(scores: dict) -> str:
    """Format the probability of right answers for a terminal line; "" for other sources."""
    return f" (answers {scores['answers']:.2f})" if "answers" in scores else ""


def pool_scores(measured: dict[str, dict], shares: dict[str, float]) -> dict:
    """Combine the scores of all sources.

    The loss is the mean of the sources' losses, weighted by their shares in training, as the
    training loss is. Bits per byte are of text mixed with the same shares. The scores of a single
    source are returned unchanged.

    Args:
        measured: {source: its loss (nats per token), perplexity, tokens and bytes}.
        shares: {source: its share in training}.
    """
    if list(measured) == [""]:
        return measured[""]
    loss = math.fsum(shares[name] * scores["loss"] for name, scores in measured.items())
    bits = text = None
    if all(scores["bytes"] for scores in measured.values()):
        text = sum(scores["bytes"] for scores in measured.values())
        bits = bits_per_byte(
            loss,
            sum(shares[name] * s["bytes"] / s["tokens"] for name, s in measured.items()),
        )
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "tokens": sum(scores["tokens"] for scores in measured.values()),
        "bits_per_byte": bits,
        "bytes": text,
        "sources": measured,
    }


def count_text_bytes(
    held_out: dict[str, list], tokenizer: PreTrainedTokenizerBase, ranks: Ranks
) -> dict[str, int | None]:
    """Count the UTF-8 bytes of the targets' text in all ranks' micro-batches, for each source.

    Every rank calls it. See data/batches/text_bytes.py.

    Returns:
        {source: bytes, or None if the tokenizer does not determine them}.
    """
    try:
        text_bytes = TextBytes(tokenizer)
    except UncountableError as e:
        say(f"note: no bits per byte: {e}")
        return dict.fromkeys(held_out)
    totals = {}
    for name, batches in held_out.items():
        counts = [text_bytes.count(batch["input_ids"], batch["labels"]) for batch in batches]
        numbers = [count for count in counts if count is not None]
        total, unknown = ranks.sum(sum(numbers), len(counts) - len(numbers))
        totals[name] = None if unknown else int(total)
    if None in totals.values():
        say("note: no bits per byte: the validation text has tokens that may stand for any text")
    return totals
