"""Inspection of a trained model on one sequence: the state that it decodes at every token."""

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
from synthetic.evaluate import describe_solver, move_to_device, override_solver
from synthetic.tasks import IGNORE, Batch, Task, TaskError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_TOKENS = 2048  # on one page; measuring ℓ* costs ℓ* solves, and ℓ* may grow with the length


def inspect_run(
    run_dir: Path | str,
    texts: list[str] | None = None,
    length: int | None = None,
    seed: int = 0,
    trust: bool = False,
) -> Inspection:
    """Inspect a trained run while it reads one sequence.

    Args:
        run_dir: The run directory.
        texts: Names of the input's tokens, as in `Task.parse_typed`; None: draw a sequence.
        length: Length of the sequence to draw from the task's test data; None: use `texts`.
        seed: Seed of the drawn sequence.
        trust: Run the code of a `module:Class` that the run's config.yaml names.

    Raises:
        TaskError: If neither texts nor a length is given, or both; if the task has no such token or
            length.
        CheckpointError: If the run has no checkpoint.
    """
    if bool(texts) == (length is not None):
        raise TaskError(
            "give the input's tokens by name, or --length N to draw one of the task's test"
            " sequences, and not both"
        )
    cfg, task, model, precision = load_run(run_dir, trust=trust)
    if length is None:
        batch = task.parse_typed(texts or [])
    else:
        task.check_length(length)
        batch = task.batch(seed, "test", index=0, batch_size=1, lengths=(length, length))
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
    """Inspect a model in evaluation mode on a batch of one sequence.

    Args:
        model: The model.
        task: Task of the model.
        batch: A batch with one row.
        name: Name of the run.
        precision: "fp32" or "bf16".
        max_iters: ℓmax; None: the ℓmax of the model.

    Raises:
        TaskError: If the sequence has more than MAX_TOKENS tokens.
    """
    device = next(model.parameters()).device
    length = batch.input_ids.shape[1] if batch.mask is None else int(batch.mask[0].sum())
    if length > MAX_TOKENS:
        raise TaskError(f"the sequence has {length:,} tokens: inspect shows at most {MAX_TOKENS:,}")
    ids, labels, _ = move_to_device(batch, device)
    ids = ids[:, :length]  # without padding, so that no mask is needed
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
    with override_solver(model, eval_max_iters=max_iters), autocast:
        logits, layers = run_with_probe(model, ids)
        solver = describe_solver(model, length)
    targets = [None if label == IGNORE else label for label in labels[0, :length].tolist()]
    scores = score_predictions(logits, targets)
    guesses = name_guesses(
        scores.guesses, lambda guessed_ids: [_name_answer(task, i) for i in guessed_ids]
    )
    answers = [
        Answer(_name_answer(task, predicted), None if target is None else task.answer_name(target))
        for predicted, target in zip(logits.argmax(-1).tolist(), targets, strict=True)
    ]
    token_ids = ids[0].tolist()
    return Inspection(
        name=name,
        model=describe_model(model),
        tokens=[Token(token_id, task.token_name(token_id)) for token_id in token_ids],
        loss=scores.loss,
        entropy=scores.entropy,
        guesses=guesses,
        layers=layers,
        answers=answers,
        solver=solver,
    )


def _name_answer(task: Task, token_id: int) -> str:
    """Return the name of a predicted id; the model may have more ids than the task."""
    return task.answer_name(token_id) if token_id < task.vocab_size else f"<{token_id}>"
