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
from lm.training.engine import MAX_EXPONENT, Engine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Largest number of tokens that a rank probes. A probe counts ℓ* (hooks.py) and takes up to 1,000
# iterations per layer. On a CPU their time grows with the number of tokens above about 500. On a
# GPU an iteration launches about 50 kernels, which take most of the time below about 4,000 tokens
# (at d_inner 1,536).
MAX_PROBE_TOKENS = 4096


class Validation:
    """Held-out micro-batches of this rank, and measurements on them.

    Args:
        cfg: Configuration of the run.
        ranks: Ranks of the run.
        held_out: {source: micro-batches of this rank}; a single source has the name "".
        shares: {source: its share in training}, which weights its loss in the mean.
        failure_watch: Warns of tokens that were not solved; None for a model without fixed-point
            layers.
        tokenizer: Tokenizer of the run.
    """

    def __init__(
        self,
        cfg: Config,
        ranks: Ranks,
        held_out: dict[str, list],
        shares: dict[str, float],
        failure_watch: FailureWatch | None,
        tokenizer: PreTrainedTokenizerBase,
    ):
        self.cfg, self.ranks, self.failure_watch = cfg, ranks, failure_watch
        self.held_out, self.shares = held_out, shares
        self.text_bytes = count_text_bytes(held_out, tokenizer, ranks)
        # {source of traces: micro-batches whose only targets are the answers to its questions}
        self.questions = {
            name: question_batches(
                part.data.traces, tokenizer, cfg.train.micro_batch_size, cfg.data.seq_len
            )
            for name, part in configs_by_source(cfg).items()
            if part.data.source == "traces"
        }

    def measure(self, engine: Engine, step: int, keep_alive: Callable[[], None]) -> dict:
        """Return and print the record of a validation after update `step`.

        Args:
            engine: Engine with the weights to measure.
            step: Number of updates made.
            keep_alive: Called after each micro-batch, so that the watchdog sees progress.
        """
        scores = self._score_sources(engine, keep_alive)
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
        if self.failure_watch is not None:
            self.failure_watch.check(record["probe"], f"validation after update {step}")
        return record

    def _score_sources(self, engine: Engine, keep_alive: Callable[[], None]) -> dict:
        """Return `pool_scores` of all sources; those of traces also have a score for answers."""
        total = sum(len(batches) for batches in self.held_out.values())
        finished_count, scores_by_source = 0, {}
        bar = Progress("validating", unit="batches")

        def progress(count: int, _: int) -> None:
            keep_alive()
            bar.update(finished_count + count, total)

        for name, batches in self.held_out.items():
            scores = engine.validate(batches, progress)
            text_bytes = self.text_bytes[name]
            bits = bits_per_byte(scores["loss"] * scores["tokens"], text_bytes)
            scores_by_source[name] = scores | {"bits_per_byte": bits, "bytes": text_bytes}
            if name in self.questions:
                answers = self.answer_probability(engine, [name], keep_alive)
                scores_by_source[name]["answers"] = answers
            finished_count += len(batches)
        return pool_scores(scores_by_source, self.shares)

    def answer_probability(
        self, engine: Engine, names: list[str], keep_alive: Callable[[], None]
    ) -> float:
        """Return the probability of the right answers to the questions of sources of traces.

        The probability of an answer is the product over its tokens. The result is the geometric
        mean over the questions of a source, and the minimum over the sources.

        Args:
            engine: Engine with the weights to measure.
            names: Names of the sources.
            keep_alive: Called after each micro-batch, so that the watchdog sees progress.
        """
        answer_losses = []  # mean of each source
        for name in names:
            batches = self.questions[name]
            questions = sum(len(batch["labels"]) for batch in batches)  # one per sequence
            targets = sum(int((batch["labels"] != IGNORE).sum()) for batch in batches)
            token_loss = engine.validate(batches, lambda *_: keep_alive())["loss"]
            answer_losses.append(token_loss * targets / questions)
        return math.exp(-max(answer_losses, key=_sort_nan_last))

    def probe_solver(self, engine: Engine) -> dict:
        """Count ℓ* on the same sequences each time, so that only the model changes.

        Every rank calls it. `probe_sequences` chooses the sequences from the rank's first
        micro-batch of the source with the largest share in training.

        Returns:
            {"probe": result of `fixed_point_metrics`, with ℓ* of each layer}; {} for a model
            without fixed-point layers.
        """
        if self.failure_watch is None:  # no fixed-point layers
            return {}
        main_source = max(self.shares, key=self.shares.__getitem__)
        batch = self.held_out[main_source][0]
        sequences = probe_sequences(batch["labels"])
        input_ids = batch["input_ids"][sequences].to(self.ranks.device)
        report = probe(engine.deepspeed, input_ids)
        has_targets = (batch["labels"][sequences] != IGNORE).any(-1)
        return {"probe": fixed_point_metrics([report], self.ranks.gather, has_targets)}

    def ngrams(self, run: RunDir, vocab_size: int) -> dict[str, dict]:
        """Return {"baselines": perplexities of unigrams and bigrams}; {} for a mixture."""
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

    Their number depends only on the shape, so every rank reads as many sequences.

    Args:
        labels: Targets, shape (batch, length); IGNORE marks tokens without one.

    Returns:
        Indices of sequences, shape (count,): sequences with targets first, as many as
        MAX_PROBE_TOKENS allows, at least one.
    """
    is_empty = (labels == IGNORE).all(-1)
    count = max(1, MAX_PROBE_TOKENS // labels.shape[1])
    return torch.argsort(is_empty.int(), stable=True)[:count]


def _sort_nan_last(loss: float) -> tuple[bool, float]:
    """Return a sort key with which NaN is larger than any number."""
    return math.isnan(loss), loss


def answers_suffix(scores: dict) -> str:
    """Format the probability of right answers for a line; "" for sources without questions."""
    return f" (answers {scores['answers']:.2f})" if "answers" in scores else ""


def pool_scores(scores_by_source: dict[str, dict], shares: dict[str, float]) -> dict:
    """Combine the scores of all sources.

    Like the training loss, the loss is the mean of the sources' losses, weighted by their shares in
    training. Bits per byte describe a text in which the sources have these shares. The scores of a
    single source are returned unchanged.

    Args:
        scores_by_source: {source: its loss (nats per token), perplexity, tokens and bytes}.
        shares: {source: its share in training}.
    """
    if list(scores_by_source) == [""]:  # the name of a single source
        return scores_by_source[""]
    sources, all_scores = list(scores_by_source), list(scores_by_source.values())
    loss = math.fsum(shares[name] * scores_by_source[name]["loss"] for name in sources)
    bits = text_bytes = None  # unless all sources know their bytes
    if all(scores["bytes"] for scores in all_scores):
        text_bytes = sum(scores["bytes"] for scores in all_scores)
        bytes_per_token = sum(
            shares[name] * scores["bytes"] / scores["tokens"]
            for name, scores in scores_by_source.items()
        )
        bits = bits_per_byte(loss, bytes_per_token)
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, MAX_EXPONENT)),
        "tokens": sum(scores["tokens"] for scores in all_scores),
        "bits_per_byte": bits,
        "bytes": text_bytes,
        "sources": scores_by_source,
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
        known_counts = [count for count in counts if count is not None]
        total, unknown = ranks.sum(sum(known_counts), len(counts) - len(known_counts))
        totals[name] = None if unknown else int(total)
    if None in totals.values():
        say("note: no bits per byte: the validation text has tokens that may stand for any text")
    return totals
