"""What a trained model makes of one sequence of its task: the state it decodes at every token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lm.evaluation.inspection.measure import (
    describe_model,
    name_guesses,
    run_with_probe,
    score_predictions,
)
from lm.evaluation.inspection.page import Inspection
from lm.evaluation.inspection.result import Answer
from lm.evaluation.inspection.tokens import Token
from synthetic.build import load_run
from synthetic.evaluate import as_tensors, solver_of, solving
from synthetic.tasks import IGNORE, Batch, Task, TaskError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LONGEST = 2048  # tokens that one page shows; ℓ* costs as many solves, and may grow with the length


def inspect_run(
    run_dir: Path | str,
    words: list[str] | None = None,
    length: int | None = None,
    seed: int = 0,
    trust: bool = False,
) -> Inspection:
    """Look inside a trained run while it reads one sequence.

    Args:
        words: the input's tokens by name, as `Task.typed` takes them; or
        length: draw a sequence of this length from the task's test data, with `seed`.
    Raises:
        TaskError: neither words nor a length, or both; a word that the task has not; a length that
            it cannot have. CheckpointError: nothing was trained there.
    """
    if bool(words) == (length is not None):
        raise TaskError(
            "give the input's tokens by name, or --length N to draw one of the task's test"
            " sequences, and not both"
        )
    cfg, task, model, precision = load_run(run_dir, trust=trust)
    if length is None:
        batch = task.typed(words or [])
    else:
        task.check_length(length)
        batch = task.batch(seed, "test", 0, 1, (length, length))
    return inspect_batch(model, task, batch, cfg.name, precision, cfg.eval.max_iters)


@torch.no_grad()
def inspect_batch(
    model: PreTrainedModel,
    task: Task,
    batch: Batch,
    name: str,
    precision: str = "fp32",
    max_iters: int | None = None,
) -> Inspection:
    """The same of a model in evaluation mode and a batch of one sequence without padding.

    Args:
        name: of the run. precision: "fp32" or "bf16". max_iters: ℓmax; None: as the model says.
    Raises:
        TaskError: more tokens than a page shows, or than memory holds.
    """
    device = next(model.parameters()).device
    size = batch.input_ids.shape[1] if batch.mask is None else int(batch.mask[0].sum())
    if size > LONGEST:
        raise TaskError(f"the sequence has {size:,} tokens: inspect shows at most {LONGEST:,}")
    ids, labels, _ = as_tensors(batch, device)
    ids, due = ids[:, :size], labels[0, :size].tolist()
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
    with solving(model, eval_max_iters=max_iters), autocast:
        logits, layers = run_with_probe(model, ids)
        solver = solver_of(model, size)
    targets = [None if label == IGNORE else label for label in due]
    found = score_predictions(logits, targets)
    guesses = name_guesses(found.guesses, lambda ids: [_answer_name(task, i) for i in ids])
    answers = [
        Answer(_answer_name(task, predicted), None if right is None else task.answer_name(right))
        for predicted, right in zip(logits.argmax(-1).tolist(), targets, strict=True)
    ]
    numbers = ids[0].tolist()
    return Inspection(
        name=name,
        model=describe_model(model),
        tokens=[Token(number, task.token_name(number)) for number in numbers],
        loss=found.loss,
        entropy=found.entropy,
        guesses=guesses,
        layers=layers,
        answers=answers,
        solver=solver,
    )


def _answer_name(task: Task, number: int) -> str:
    """Of any id that a model may predict: model.vocab_size may be more than the task has."""
    return task.answer_name(number) if number < task.vocab_size else f"<{number}>"
