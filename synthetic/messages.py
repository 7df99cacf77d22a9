"""Lines that a training run prints about itself: task, solver and validation scores."""

from __future__ import annotations

from torch import nn

from lm.runs.log import format_iterations
from synthetic import tasks
from synthetic.config import GAMMA_SHAPE, Config
from synthetic.evaluate import describe_solver
from synthetic.results import format_solver
from synthetic.update import choose_max_iters


def describe_task(cfg: Config, task: tasks.Task) -> str:
    """Describe the task, its number of ids, its training lengths and its chance level."""
    name = f"{cfg.task.name} {cfg.task.group}" if cfg.task.name == "word_problem" else cfg.task.name
    shortest, longest = cfg.train.lengths
    lengths = f"{shortest} to {longest}" if shortest < longest else f"{longest}"
    return f"{name}, {task.vocab_size} ids, training length {lengths} (chance {task.chance:.3g})"


def describe_solvers(model: nn.Module, cfg: Config) -> str:
    """Describe how the model solves in training and in evaluation; "none" without a solver."""
    training, evaluation = (describe_solver(model.train(mode)) for mode in (True, False))
    if isinstance(training, str) or isinstance(evaluation, str):
        return "none"
    if training["max_iters"] is not None:
        if cfg.train.max_iters == "gamma":
            training["max_iters"] = f"⌈Γ({GAMMA_SHAPE:g}, 1)⌉"
        else:
            training["max_iters"] = choose_max_iters(cfg, update=0)  # the same for every update
    if evaluation["max_iters"] is not None:
        evaluation["max_iters"] = cfg.eval.max_iters or evaluation["max_iters"]
    return (
        f"training: {format_solver(training)}, gradient {training['gradient']};"
        f" evaluation: {format_solver(evaluation)}"
    )


def format_scores(scores: dict) -> str:
    """Return metrics (except for single bAbI tasks) and ℓ* of `evaluate.measure` as text."""
    text = "  ".join(
        f"{name} {value:.3f}"
        for name, value in scores["metrics"].items()
        if not name.startswith("qa")
    )
    if iterations := scores.get("num_iters"):
        text += "  ℓ* " + format_iterations(iterations)
    return text
