"""Error control of a trained model: the spread of its recurrent states around each right answer.

The class of a sequence after token t is the right answer at t. Its state is the vector of all
numbers in the model's recurrent state, each divided by its RMS at the training length T.

- Reference means are the mean states of the classes at T, of separate sequences. The differences
  between them span the separating subspace, in which all distances are measured.
- `spread` is the RMS distance of a state from the reference mean of its class, `separation` the
  distance of a reference mean from the nearest other one, averaged over classes. `ratio` is
  spread / separation.
- `contraction`: after token T the state moves by PERTURBATION × separation in a random direction.
  Contraction is the distance to the unperturbed state some tokens later, divided by the initial
  distance (median over sequences). A model that corrects small errors contracts to 0.
- `threshold` is the ratio at which the trained decoder fails: noise is added to the states at T
  until the scaled accuracy of the next answer (0 is guessing, 1 perfect) is below READABLE.
- The measured horizon is the first measured length with a scaled accuracy below READABLE. The
  predicted horizon is the length at which the ratio reaches the threshold, if it continues as the
  power of the length that fits it from T/2 to 2T.

Source: Chung, Choi and Kim 2026, "Rethinking State Tracking in Recurrent Models Through Error
Control Dynamics", arXiv 2605.07755, which compares spread / separation with the readability
threshold of the decoder. The noise and the power law are ours.

Shapes: n sequences, l tokens, c classes, d numbers in a state, k dimensions of the subspace.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from lm.model.baseline_layers import AttentionState
from lm.model.state import list_tensors, map_tensors
from synthetic.build import load_run
from synthetic.evaluate import (
    Answers,
    BatchTensors,
    compute_answers,
    move_to_device,
    override_solver,
)
from synthetic.tasks import Task, TaskError

MAX_LENGTH = 1024  # default of the longest measured length, unless 4T is longer
# Numbers of sequences: at least this many, and this many for each id of the task.
NUM_TEST, TEST_PER_ID = 256, 16
NUM_REFERENCE, REFERENCE_PER_ID = 4096, 128
BATCH_SIZE = 256
RANK_TOL = 1e-4  # smaller singular values, as fractions of the largest, count as zero
PERTURBATION = 0.1  # in units of the separation
DELAYS = (1, 4, 16, 64)  # tokens after which contraction is measured
NOISE_LEVELS = tuple(2 ** (i / 2) / 8 for i in range(15))  # RMS of the noise / separation
READABLE = 0.5  # scaled accuracy below which the state is lost
MAX_HORIZON = 1e6  # a longer predicted horizon counts as unlimited

Values = defaultdict[tuple[str, float], list[torch.Tensor]]  # (quantity, place) → batches


class ErrorControl(NamedTuple):
    """Measurements of a run; the docstring of the module defines them."""

    run_dir: Path
    task: str
    trained_length: int  # T
    by_length: dict[str, dict[int, float]]  # quantity → length → value
    contraction: dict[int, float]  # delay in tokens → value
    # infinity: no noise reaches it; NaN: the reference means do not identify the classes
    threshold: float
    measured_horizon: float  # infinity: longer than all measured lengths
    predicted_horizon: float  # infinity: unlimited; NaN: no threshold


class Subspace(NamedTuple):
    """Separating subspace of a model, with the reference means."""

    classes: torch.Tensor  # (c,) labels in ascending order
    scale: torch.Tensor  # (d,) RMS of each number
    center: torch.Tensor  # (d,) mean of the reference means, in units of `scale`
    basis: torch.Tensor  # (d,k) orthonormal columns
    means: torch.Tensor  # (c,k) reference means
    separation: float

    def project(self, state: Any) -> torch.Tensor:
        """Return the coordinates of recurrent states in the subspace, (n,k)."""
        return (flatten_state(state) / self.scale - self.center) @ self.basis

    def move(self, state: Any, offsets: torch.Tensor) -> Any:
        """Return the recurrent states after a step of `offsets` (n,k) in the subspace."""
        sizes = [tensor[0].numel() for layer in state.layers for tensor in list_tensors(layer)]
        parts = iter((offsets @ self.basis.T * self.scale).split(sizes, 1))
        layers = map_tensors(lambda t: t + next(parts).view_as(t), state.layers)
        return state._replace(layers=layers)


def flatten_state(state: Any) -> torch.Tensor:
    """Return the recurrent state of each sequence as a vector, (n,d)."""
    return torch.cat([t.flatten(1) for layer in state.layers for t in list_tensors(layer)], 1)


@torch.no_grad()
def measure_error_control(
    run_dir: Path | str, max_length: int | None = None, seed: int = 0, trust: bool = False
) -> ErrorControl:
    """Measure the error control of a trained run, in fp32.

    Args:
        run_dir: The run directory.
        max_length: Longest measured length, at least 4T; None: MAX_LENGTH or 4T.
        seed: Seed of the sequences and of the noise.
        trust: Run the code of a `module:Class` that the run's config.yaml names.

    Raises:
        TaskError: If the answers of the task are not states, if the model has attention, or if
            `max_length` is below 4T.
        CheckpointError: If the run has no checkpoint.
    """
    cfg, task, model, _ = load_run(run_dir, trust=trust)
    if not task.answers_are_states:
        raise TaskError(
            f"{run_dir}: the answers of task `{cfg.task.name}` do not name a state at every token:"
            " --errors measures word_problem, and parity and automaton with task.supervision: every"
        )
    trained_length = cfg.train.lengths[1]
    max_length = max_length or max(MAX_LENGTH, 4 * trained_length)
    if max_length < 4 * trained_length:
        raise TaskError(
            f"--length {max_length} is too short for {run_dir}: --errors needs at least four times"
            f" its training length, {4 * trained_length}"
        )
    with override_solver(model, eval_max_iters=cfg.eval.max_iters):
        subspace = find_subspace(model, task, trained_length, seed, str(run_dir))
        values = _read_test_sequences(model, task, subspace, trained_length, max_length, seed)
    return _summarize(Path(run_dir), task, trained_length, subspace.separation, values)


def find_subspace(model: nn.Module, task: Task, length: int, seed: int, name: str) -> Subspace:
    """Find the separating subspace from the states of validation sequences at this length.

    Raises:
        TaskError: If the model, whose name is given, has attention.
    """
    counts = sums = squares = torch.zeros((), dtype=torch.float64)
    total = max(NUM_REFERENCE, REFERENCE_PER_ID * task.vocab_size)
    for ids, labels, _ in _draw_batches(model, task, "valid", seed, total, length):
        state = _read(model, ids, None).state
        if any(isinstance(layer, AttentionState) for layer in state.layers):
            raise TaskError(f"{name}: --errors measures recurrent states, and attention has none")
        x = flatten_state(state).double()
        is_class = nn.functional.one_hot(labels[:, -1], task.vocab_size).double()  # (n,c)
        counts, sums = counts + is_class.sum(0), sums + is_class.T @ x
        squares = squares + x.square().sum(0)
    scale = (squares / counts.sum()).sqrt().clamp_min(1e-12)
    classes = counts.nonzero().squeeze(1)
    means = sums[classes] / counts[classes].unsqueeze(1) / scale
    center = means.mean(0)
    _, singular_values, directions = torch.linalg.svd(means - center, full_matrices=False)
    basis = directions[singular_values > RANK_TOL * singular_values[0]].T
    means = (means - center) @ basis
    distances = torch.cdist(means, means).fill_diagonal_(math.inf)
    scale, center, basis, means = (t.float() for t in (scale, center, basis, means))
    return Subspace(classes, scale, center, basis, means, float(distances.amin(1).mean()))


def _draw_batches(
    model: nn.Module, task: Task, split: str, seed: int, total: int, length: int
) -> Iterator[BatchTensors]:
    """Yield batches with at least `total` sequences of this length, on the model's device."""
    device = next(model.parameters()).device
    for index in range(math.ceil(total / BATCH_SIZE)):
        yield move_to_device(task.batch(seed, split, index, BATCH_SIZE, (length, length)), device)


def _read(model: nn.Module, ids: torch.Tensor, state: Any) -> Answers:
    """Read tokens (n,l) from recurrent states; None: from the start."""
    return compute_answers(model, ids, None, state, carries_state=True, token_by_token=False)


def choose_lengths(trained_length: int, max_length: int) -> list[int]:
    """Return the measured lengths: powers of two, T/2, T, 2T, 4T, and the longest."""
    powers = (2**i for i in range(max_length.bit_length()))
    multiples = (trained_length * i // 2 for i in (1, 2, 4, 8))
    return sorted({max(1, length) for length in (*powers, *multiples, max_length)})


def _read_test_sequences(
    model: nn.Module,
    task: Task,
    subspace: Subspace,
    trained_length: int,
    max_length: int,
    seed: int,
) -> Values:
    """Read test sequences once, from one measured length to the next; perturb them at T."""
    values: Values = defaultdict(list)
    generator = torch.Generator().manual_seed(seed)
    total = max(NUM_TEST, TEST_PER_ID * task.vocab_size)
    longest = max(max_length, trained_length + DELAYS[-1])
    for ids, labels, _ in _draw_batches(model, task, "test", seed, total, longest):
        state = None
        for begin, end in pairwise([0, *choose_lengths(trained_length, max_length)]):
            answers = _read(model, ids[:, begin:end], state)
            state, label = answers.state, labels[:, end - 1]
            values["accuracy", end].append(answers.logits[:, -1].argmax(-1) == label)
            has_mean = torch.isin(label, subspace.classes)  # the first states may never return
            index = torch.searchsorted(subspace.classes, label[has_mean])
            distances = torch.cdist(subspace.project(state)[has_mean], subspace.means)  # (·,c)
            values["distance", end].append(distances.gather(1, index.unsqueeze(1)))
            values["nearest_accuracy", end].append(distances.argmin(1) == index)
            if end == trained_length:
                _perturb(model, subspace, state, ids[:, end:], labels[:, end], generator, values)
    return values


def _perturb(
    model: nn.Module,
    subspace: Subspace,
    state: Any,
    ids: torch.Tensor,
    labels: torch.Tensor,
    generator: torch.Generator,
    values: Values,
) -> None:
    """Measure the contraction, and the accuracy of the next answer for each level of noise.

    Args:
        model: The model.
        subspace: Its separating subspace.
        state: Recurrent states after T tokens.
        ids: The next tokens, (n,l).
        labels: Right answers at the first of them, (n,).
        generator: Source of randomness.
        values: Receives the values.
    """
    shape = len(ids), subspace.basis.shape[1]
    noise = torch.randn(1 + len(NOISE_LEVELS), *shape, generator=generator).to(ids.device)
    offsets = PERTURBATION * subspace.separation * nn.functional.normalize(noise[0], dim=1)
    plain, moved = state, subspace.move(state, offsets)
    for begin, end in pairwise([0, *DELAYS]):
        plain, moved = (_read(model, ids[:, begin:end], s).state for s in (plain, moved))
        difference = subspace.project(moved) - subspace.project(plain)
        values["contraction", end].append(difference.norm(dim=1) / offsets.norm(dim=1))
    for level, direction in zip(NOISE_LEVELS, noise[1:]):
        offsets = level * subspace.separation / math.sqrt(shape[1]) * direction
        logits = _read(model, ids[:, :1], subspace.move(state, offsets)).logits
        values["noisy_accuracy", level].append(logits[:, 0].argmax(-1) == labels)


def _summarize(
    run_dir: Path, task: Task, trained_length: int, separation: float, values: Values
) -> ErrorControl:
    """Reduce the values of all sequences, and compute the threshold and the horizons."""
    places: dict[str, dict[Any, torch.Tensor]] = defaultdict(dict)
    for (quantity, place), batches in values.items():
        places[quantity][place] = torch.cat(batches).double()
    names = "accuracy", "nearest_accuracy", "noisy_accuracy"
    means = {name: {n: float(v.mean()) for n, v in places[name].items()} for name in names}
    spread = {n: float(v.square().mean().sqrt()) for n, v in places["distance"].items()}
    ratio = {n: value / separation for n, value in spread.items()}
    noisy_accuracy = means.pop("noisy_accuracy")
    readable = task.chance + READABLE * (1 - task.chance)
    threshold = math.nan
    if means["nearest_accuracy"][trained_length] >= readable:
        threshold = find_threshold(ratio[trained_length], noisy_accuracy, readable)
    lost = [n for n, accuracy in means["accuracy"].items() if accuracy < readable]
    return ErrorControl(
        run_dir,
        task.name,
        trained_length,
        {
            **means,
            "spread": spread,
            "separation": dict.fromkeys(spread, separation),
            "ratio": ratio,
        },
        {delay: float(v.median()) for delay, v in places["contraction"].items()},
        threshold,
        min(lost, default=math.inf),
        predict_horizon(ratio, trained_length, threshold),
    )


def find_threshold(ratio: float, noisy_accuracy: dict[float, float], readable: float) -> float:
    """Find the ratio at which noise makes the next answer unreadable.

    Args:
        ratio: Ratio without noise. The noise is independent of it, so their squares add.
        noisy_accuracy: Level of the noise → accuracy, in ascending order of the levels.
        readable: Accuracy below which the answer is unreadable.

    Returns:
        The threshold, interpolated between two levels; NaN if the answer is unreadable at the
        lowest level, infinity if it is readable at all levels.
    """
    if next(iter(noisy_accuracy.values())) < readable:
        return math.nan
    for (low, before), (high, after) in pairwise(noisy_accuracy.items()):
        if after < readable:
            fraction = (before - readable) / (before - after)
            return math.hypot(ratio, low + fraction * (high - low))
    return math.inf


def predict_horizon(ratio: dict[int, float], trained_length: int, threshold: float) -> float:
    """Predict the length at which the ratio reaches the threshold.

    Args:
        ratio: Length → ratio. Only lengths from T/2 to 2T are used.
        trained_length: T.
        threshold: Readability threshold.

    Returns:
        The length at which the fitted power law has the threshold; infinity above MAX_HORIZON, or
        if the fitted ratio does not grow and is below the threshold.
    """
    lengths = [n for n in ratio if trained_length <= 2 * n <= 4 * trained_length]
    exponent, log_factor = np.polyfit(np.log(lengths), np.log([ratio[n] for n in lengths]), 1)
    gap = math.log(threshold) - log_factor - exponent * math.log(trained_length)  # at T
    if exponent <= 0 or math.isnan(gap):
        return math.inf if gap > 0 else gap and trained_length
    log_horizon = math.log(trained_length) + gap / exponent
    return math.exp(log_horizon) if log_horizon < math.log(MAX_HORIZON) else math.inf
