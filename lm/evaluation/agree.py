"""How far the ways to solve a checkpoint agree: every schedule against its tight solution."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lm
from lm.common.errors import UserError
from lm.common.files import check_file, write_json
from lm.evaluation import facade
from lm.evaluation.generate import PAPER, GenerationError
from lm.export.measured import add_measured
from lm.runs import places

if TYPE_CHECKING:
    import torch
    from rich.table import Table
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lm.model.modeling_fprnn import FPRNNForCausalLM

SCHEDULES = ("sequential", "window:16", "parallel", PAPER)
# The solution that all are compared with: every token's own equation, one token after the other.
TIGHT = {"token": "exact", "schedule": "sequential", "stopping": "causal"}
LOGITS_AT_ONCE = 4096  # tokens
# Progress is reported as (solves done, of how many, what was just finished or None).
Report = Callable[[int, int | None, str | None], None]
MEANING = {
    "tight": "the solution all are compared with: token exact, sequential, which has no tolerance",
    "top1": "share of the tokens whose most likely next token is that of the tight solution",
    "difference": "the largest difference of a logit from the tight solution's",
    "bits_per_byte": "bits for each byte of UTF-8 text that the targets stand for; null where the"
    " tokenizer does not tell",
    "evaluations": "evaluations a token of the layer's map that were done; mean over layers",
    "failed": "share of the tokens not solved (paper: not within tol), of the layer that has most",
    "num_iters": "ℓ*, of every layer: iterations that the paper's procedure (all tokens at once,"
    " tolerance 0.1, from zero) needs for what that layer reads in the tight solution",
    "elsewhere": "of every layer: share of the tokens where that procedure ends in another"
    " solution",
    "seconds": "of the forward passes through the backbone, without the head",
}


class AgreementError(UserError, RuntimeError):
    """Solutions that cannot be compared; the message says why, and what would do."""


def agree(
    checkpoint: Path | str,
    text: Path | str | None = None,
    *,
    schedules: Sequence[str] = SCHEDULES,
    tol: float | None = None,
    sequences: int = 8,
    length: int = 256,
    batch_size: int = 4,
    seed: int = 0,
    out: Path | None = None,
    trust: bool = False,
    progress: Report | None = None,
) -> dict:
    """Solve the same text under every schedule and compare with its tight solution.

    Args:
        checkpoint: a run directory or an exported folder of a fixed-point model; computed in
            float32.
        text: a UTF-8 file; None: the held-out documents of the built-in corpus.
        schedules: with `token: exact`; and `paper`, the paper's procedure as the checkpoint's
            config describes it, for information.
        tol: relative residual of the schedules that iterate; None: the checkpoint's own, as of
            `paper`.
        sequences: how many of `length` tokens, drawn with `seed`; fewer if the text has fewer.
        batch_size: sequences solved at once; the paper's stopping depends on it.
        out: the JSON file, by default checkpoint/eval/agree.json.
    Returns:
        {"tight": {…}, "schedules": {name: {"top1", "difference", "perplexity", "bits_per_byte",
        "evaluations", "failed", "seconds", "tol"}}, "num_iters": [of every layer], "bytes",
        "meaning": {…}, …}, as written; tol is None where nothing is iterated.
    Raises:
        AgreementError: sizes below 1, tol ≤ 0, no such text, or one shorter than a sequence.
        PlaceError: no run and no export there. GenerationError: an unknown schedule.
        DataError: the text is not UTF-8, or empty. OutputError: `out` cannot be written.
    """
    check(schedules, sequences, length, batch_size, seed, tol)
    places.find_model(checkpoint, on_hub=False)
    path = Path(out) if out else Path(checkpoint) / "eval" / "agree.json"
    check_file(path)
    model, tokenizer = load(checkpoint, trust)
    ways = {name: way(model, name, tol) for name in schedules}
    blocks = text_blocks(model, tokenizer, text, sequences, length, seed, progress)
    rows = compare(model, blocks, ways, batch_size, progress)
    results = header(checkpoint, text, model, blocks, batch_size, seed)
    results |= add_bits_per_byte(rows, blocks, tokenizer)
    tight = rows.pop("tight")
    results |= {name: tight.pop(name) for name in ("num_iters", "elsewhere")}
    results |= {"tight": tight, "schedules": rows}
    write_json(path, results)
    if out is None:
        add_measured(checkpoint)
    return results


def way(model: FPRNNForCausalLM, schedule: str, tol: float | None) -> dict:
    """The solver's fields of a schedule with `token: exact`, or of `paper`.

    Raises:
        GenerationError: no such schedule, or not for this model.
    """
    fields: dict[str, Any] = {"token": "exact", "schedule": schedule, "stopping": "causal"}
    if tol is not None:
        fields["eval_tol"] = tol
    if schedule == PAPER:
        fields = {"token": "iterate", "schedule": "parallel", "stopping": "paper"}
    try:
        with model.solving(**fields):
            return fields
    except ValueError as e:
        paper = f"{PAPER} (the paper's procedure: all tokens, stopped as one batch)"
        raise GenerationError(f"{e}; {paper}") from None


def compare(
    model: FPRNNForCausalLM,
    blocks: torch.Tensor,
    ways: dict[str, dict],
    batch_size: int,
    progress: Report | None = None,
) -> dict:
    """Solve blocks of text in several ways and compare each with the tight solution.

    Args:
        model: an FPRNNForCausalLM in evaluation mode. blocks: (n, length + 1) ids; inputs are all
            but the last token of a block, targets all but the first.
        ways: name → solver fields (`model.solving`).
        batch_size: blocks solved at once.
    Returns:
        {"tight": …, name: …}: see `agree`; "num_iters" is among the tight solution's.
    Raises:
        AgreementError: a solve became NaN or infinite.
    """
    progress = progress or (lambda done, total, text: None)
    batches = blocks.to(model.device).split(batch_size)
    ways = {"tight": TIGHT} | ways
    sums = {name: _Sums() for name in ways}
    done, total = 0, len(batches) * len(ways)
    _backbone(model, TIGHT, batches[0][:, :2], "tight")  # what a first call sets up is not timed
    for i, batch in enumerate(batches):
        for name, fields in ways.items():
            output, seconds = _backbone(model, fields, batch[:, :-1], name)
            hidden = output.last_hidden_state
            if name == "tight":
                tight = hidden
                probed, _ = _backbone(model, fields, batch[:, :-1], name, count_iterations=True)
                sums[name].probed.append(probed.fixed_point)
            sums[name].add(model, hidden, tight, batch[:, 1:], output.fixed_point, seconds)
            done += 1
            progress(done, total, name if i + 1 == len(batches) else None)
    return {name: sums[name].row(model, fields) for name, fields in ways.items()}


def _backbone(model, fields: dict, ids, name: str, **options):
    """(output, seconds) of a forward pass through the backbone, solved so."""
    import torch

    from lm.model.solver import NonFiniteError

    wait = torch.cuda.synchronize if ids.device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    with torch.no_grad(), model.solving(**fields):
        try:
            output = model.backbone(ids, **options)
        except NonFiniteError as e:
            raise AgreementError(f"{name}: {e}") from None
    wait()
    return output, time.perf_counter() - began


class _Sums:
    """What is added up over the batches of one way to solve."""

    def __init__(self):
        self.loss, self.same, self.tokens, self.seconds, self.difference = 0.0, 0, 0, 0.0, 0.0
        self.stats, self.probed = [], []

    def add(self, model, hidden, tight, targets, stats, seconds: float) -> None:
        """hidden, tight: (b,l,d_model). targets: (b,l)"""
        import torch
        import torch.nn.functional as F

        parts = (t.flatten(0, 1).split(LOGITS_AT_ONCE) for t in (hidden, tight))
        for ours, theirs, target in zip(*parts, targets.flatten().split(LOGITS_AT_ONCE)):
            with torch.no_grad():
                logits, of_tight = (model.lm_head(part).float() for part in (ours, theirs))
            self.loss += F.cross_entropy(logits, target, reduction="sum").item()
            self.same += (logits.argmax(-1) == of_tight.argmax(-1)).sum().item()
            self.difference = max(self.difference, (logits - of_tight).abs().max().item())
        self.tokens += targets.numel()
        self.stats.append(stats)
        self.seconds += seconds

    def row(self, model, fields: dict) -> dict:
        from lm.runs.metrics import fixed_point_metrics

        cost = fixed_point_metrics(self.stats)
        with model.solving(**fields):
            tol = model.solver()["tol"]
        row = {
            "tol": tol,
            "top1": self.same / self.tokens,
            "difference": self.difference,
            "perplexity": math.exp(self.loss / self.tokens),
            "evaluations": sum(cost["evaluations"]) / len(cost["evaluations"]),
            "failed": max(cost["failed"]),
            "seconds": self.seconds,
        }
        if self.probed:
            found = fixed_point_metrics(self.probed)["num_iters"]
            row |= {"num_iters": found["mean"], "elsewhere": found["elsewhere"]}
        return row


def table(results: dict) -> Table:
    """What `agree` returned, as a table: a row for each schedule."""
    from rich import box
    from rich.table import Table

    from lm.runs.metrics import ELSEWHERE_NOTE, is_elsewhere, marked

    counted = {"mean": results["num_iters"], "elsewhere": results["elsewhere"]}
    iterations = ", ".join(marked(counted))
    caption = (
        "tight: token exact, sequential. top-1: same most likely token as tight.\n"
        "max Δ: largest difference of a logit from tight's. ppl: perplexity.\n"
        "eval.: evaluations a token, mean over layers. failed: tokens not solved, at most.\n"
        f"ℓ* (the paper's procedure at 0.1) of the layers: {iterations}."
        f"{bits_of_tight(results)}"
    )
    if any(is_elsewhere(counted)):
        caption += f"\n{ELSEWHERE_NOTE}"
    out = Table(
        title=title(results),
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    out.add_column("schedule", no_wrap=True)
    for head in ("tol", "top-1", "max Δ", "ppl", "eval.", "failed", "s"):
        out.add_column(head, justify="right", no_wrap=True)
    for name, r in ({"tight": results["tight"]} | results["schedules"]).items():
        out.add_row(
            name,
            "" if r["tol"] is None else f"{r['tol']:g}",
            f"{r['top1']:.2%}",
            f"{r['difference']:.1e}",
            f"{r['perplexity']:.2f}",
            f"{r['evaluations']:.1f}",
            f"{r['failed']:.2%}",
            f"{r['seconds']:.3g}",
        )
    return out


def bits_of_tight(results: dict) -> str:
    """A line below a table; nothing where the bytes of the text are not known."""
    bits = results["tight"]["bits_per_byte"]
    return "" if bits is None else f"\ntight: {bits:.4f} bits per byte of the text."


def title(results: dict) -> str:
    """The checkpoint and the text, in words."""
    return f"{results['checkpoint']}, {results['sequences']} × {results['length']:,} tokens"


def check(
    schedules: Sequence[str],
    sequences: int,
    length: int,
    batch_size: int,
    seed: int,
    tol: float | None,
) -> None:
    """Refuse what needs no model to be refused."""
    if not schedules:
        raise AgreementError(f"no schedules given; by default they are {', '.join(SCHEDULES)}")
    sizes = {"sequences": sequences, "length": length, "batch_size": batch_size}
    for name, value in sizes.items():
        if value < 1:
            raise AgreementError(f"{name} is {value}: it must be at least 1")
    if seed < 0:
        raise AgreementError(f"seed is {seed}: it must be at least 0")
    if tol is not None and not 0 < tol < math.inf:
        raise AgreementError(f"tol is {tol:g}: it is a relative residual, above 0")


def load(
    checkpoint: Path | str, trust: bool = False
) -> tuple[FPRNNForCausalLM, PreTrainedTokenizerBase]:
    """Load (model in float32, tokenizer) of a run or an exported folder of ours."""
    from lm.model.configuration_fprnn import MODEL_TYPES

    loaded = facade.load(checkpoint, trust)
    model, tokenizer = loaded.model, loaded.tokenizer
    if model.config.model_type not in MODEL_TYPES:
        raise AgreementError(
            f"{checkpoint} is a {model.config.model_type} model: it has no fixed point, so there is"
            " nothing to solve in several ways; give the export of a `model.name: fprnn` run"
        )
    if model.solver() == "none":
        raise AgreementError(
            f"{checkpoint} has the layers `{model.config.layers}`: none has a fixed point, so there"
            " is nothing to solve in several ways"
        )
    return model.float(), tokenizer


def text_blocks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: Path | str | None,
    sequences: int,
    length: int,
    seed: int,
    progress: Report | None = None,
) -> torch.Tensor:
    """Up to `sequences` blocks (n, length + 1) of the text, at random places."""
    import numpy as np
    import torch

    from lm.config.data import Data
    from lm.data.corpus.documents import encode_documents
    from lm.data.sources.open import documents, is_validation

    if text is not None and not Path(text).is_file():
        raise AgreementError(f"no text file at {text}")
    if getattr(tokenizer, "backend_tokenizer", None) is None or tokenizer.eos_token_id is None:
        raise AgreementError(
            "the checkpoint's tokenizer has no fast implementation or no EOS token"
        )
    if progress:
        progress(0, None, "reading the text")
    data = Data() if text is None else Data(source="text", path=str(text))
    texts = [t for t in documents(data) if text is not None or is_validation(t, data.val_fraction)]
    tokens = torch.from_numpy(encode_documents(tokenizer, texts))
    where = text or "the built-in corpus"
    if len(tokens) < length + 1:
        raise AgreementError(
            f"{where} has {len(tokens):,} tokens, but a sequence of length {length:,} needs"
            f" {length + 1:,} (with the last target): give a longer text, or a smaller length"
        )
    if tokens.max() >= model.config.vocab_size:
        raise AgreementError(
            f"the tokenizer makes token {tokens.max()}, but the model has a vocabulary of"
            f" {model.config.vocab_size}: they do not belong together"
        )
    starts = np.arange((len(tokens) - 1) // length) * length
    chosen = np.random.default_rng(seed).permutation(starts)[:sequences]
    return torch.stack([tokens[s : s + length + 1] for s in sorted(chosen)])


def add_bits_per_byte(
    rows: dict[str, dict], blocks: torch.Tensor, tokenizer: PreTrainedTokenizerBase
) -> dict:
    """Put "bits_per_byte" into rows of `compare`, beside their perplexity; None where the tokenizer
    does not tell how many bytes of text the targets stand for.

    Returns:
        {"bytes": of the targets' text, or None}.
    """
    from lm.data.batches.text_bytes import TextBytes, UncountableError, bits_per_byte

    try:
        text_bytes = TextBytes(tokenizer).count(blocks[:, :-1], blocks[:, 1:])
    except UncountableError:
        text_bytes = None
    targets = blocks[:, 1:].numel()
    for row in rows.values():
        row["bits_per_byte"] = bits_per_byte(math.log(row["perplexity"]) * targets, text_bytes)
    return {"bytes": text_bytes}


def header(
    checkpoint: Path | str,
    text: Path | str | None,
    model: FPRNNForCausalLM,
    blocks: torch.Tensor,
    batch_size: int,
    seed: int,
) -> dict:
    """What was compared, for the results file."""
    import torch
    import transformers

    return {
        "checkpoint": "/".join(Path(checkpoint).resolve().parts[-2:]).strip("/"),
        "text": Path(text).name if text else "the built-in corpus, held-out documents",
        "sequences": blocks.shape[0],
        "length": blocks.shape[1] - 1,
        "batch_size": batch_size,
        "seed": seed,
        "device": model.device.type,
        "evaluated_with": model.solver(),
        "max_iters": model.config.eval_max_iters,
        "versions": {
            "fprnn": lm.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "meaning": MEANING,
    }
