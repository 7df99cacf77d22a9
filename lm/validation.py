"""What a training is measured by on held-out text: loss and perplexity, ℓ*, n-grams beside it."""

from __future__ import annotations

from collections.abc import Callable

from lm.config import Config
from lm.console import Progress, say
from lm.ema import Average
from lm.engine import Engine
from lm.log import iterations
from lm.metrics import FailureWatch, fixed_point_metrics, probe
from lm.ranks import Ranks
from lm.run_dir import RunDir


class Validation:
    """The held-out micro-batches of this rank, and what is measured on them.

    Args:
        batches: of this rank.
        watch: is told of tokens that were not solved; None of a model without a solver.
    """

    def __init__(self, cfg: Config, ranks: Ranks, batches: list, watch: FailureWatch | None):
        self.cfg, self.ranks, self.batches, self.watch = cfg, ranks, batches, watch

    def measure(
        self, engine: Engine, step: int, alive: Callable[[], None], average: Average | None = None
    ) -> dict:
        """The record of a validation after update `step`: loss, perplexity, ℓ*.

        Args:
            alive: called after each micro-batch. average: of the weights; its loss and perplexity
                are measured as well ("ema").
        """
        with Progress("validating", unit="batches") as bar:

            def progress(done, total):
                alive()
                bar.update(done, total)

            scores = engine.validate(self.batches, progress)
        record = {"step": step, "validation": scores, **self.probed(engine)}
        say(
            f"update {step:>6}  validation loss {scores['loss']:.4f}  perplexity"
            f" {scores['perplexity']:.2f}{iterations(record)}"
        )
        if average is not None:
            with average.in_place():
                record["ema"] = engine.validate(self.batches, lambda done, total: alive())
            say(f"update {step:>6}  … of the average of the weights {record['ema']['loss']:.4f}")
        if self.watch is not None:
            self.watch.look(record["probe"]["failed"], f"validation after update {step}")
        return record

    def probed(self, engine: Engine) -> dict:
        """{"probe": …} of the solver, ℓ* of each layer among it, on the same micro-batch each time:
        what changes is the model."""
        if self.watch is None:
            return {}
        batch = self.batches[0]
        report = probe(engine.deepspeed, batch["input_ids"].to(self.ranks.device))
        rows = (batch["labels"] != -100).any(-1)
        return {"probe": fixed_point_metrics([report], self.ranks.gather, rows)}

    def ngrams(self, run: RunDir, vocab_size: int) -> dict[str, float]:
        """Perplexities of unigrams and bigrams on the same text: what a model must beat."""
        from lm.data import loader, prepare
        from lm.data.ngram import ngram_baselines

        corpus = prepare.open_corpus(run.path)
        size = self.cfg.train.micro_batch_size
        targets = loader.validation_blocks(corpus.val, self.cfg.data, size)
        return ngram_baselines(corpus.train, targets, vocab_size)
