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
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from lm.model.baseline_layers import AttentionState
from lm.model.state import list_tensors, map_tensors
from synthetic.build import load_run
from synthetic.evaluate import compute_answers, move_to_device, override_solver
from synthetic.tasks import Task, TaskError

MAX_LENGTH = 1024  # default of the longest measured length
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
    separation: float
    contraction: dict[int, float]  # delay in tokens → value
    threshold: float  # infinity: no noise reaches it; NaN: unreadable with the least noise
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
    run_dir: Path | str, max_length: int = MAX_LENGTH, seed: int = 0, trust: bool = False
) -> ErrorControl:
    """Measure the error control of a trained run, in fp32.

    Args:
        run_dir: The run directory.
        max_length: Longest measured length; 4T if it is below.
        seed: Seed of the sequences and of the noise.
        trust: Run the code of a `module:Class` that the run's config.yaml names.

    Raises:
        TaskError: If the answers of the task are not states, or if the model has attention.
        CheckpointError: If the run has no checkpoint.
    """
    cfg, task, model, _ = load_run(run_dir, trust=trust)
    if not task.answers_are_states:
        raise TaskError(
            f"{run_dir}: the answers of task `{cfg.task.name}` do not name a state at every token:"
            " --errors measures word_problem, and parity and automaton with task.supervision: every"
        )
    trained_length = cfg.train.lengths[1]
    lengths = choose_lengths(trained_length, max(max_length, 4 * trained_length))
    with override_solver(model, eval_max_iters=cfg.eval.max_iters):
        subspace = find_subspace(model, task, trained_length, seed, str(run_dir))
        values = _read_test_sequences(model, task, subspace, lengths, trained_length, seed)
    return _summarize(Path(run_dir), task, trained_length, subspace.separation, values)


def find_subspace(model: nn.Module, task: Task, length: int, seed: int, name: str) -> Subspace:
    """Find the separating subspace from the states of validation sequences at this length.

    Raises:
        TaskError: If the model, whose name is given, has attention.
    """
    counts = sums = squares = torch.zeros((), dtype=torch.float64)
    total = max(NUM_REFERENCE, REFERENCE_PER_ID * task.vocab_size)
    for ids, labels in _draw_batches(model, task, "valid", seed, total, length):
        _, state = _read(model, ids, None)
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


def _draw_batches(model: nn.Module, task: Task, split: str, seed: int, total: int, length: int):
    """Yield ids and labels (n,length) of at least `total` sequences, on the model's device."""
    device = next(model.parameters()).device
    for index in range(math.ceil(total / BATCH_SIZE)):
        batch = task.batch(seed, split, index, BATCH_SIZE, (length, length))
        yield move_to_device(batch, device)[:2]


def _read(model: nn.Module, ids: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
    """Read tokens (n,l) from recurrent states, or the start; return answers (n,l) and states."""
    logits, _, state = compute_answers(model, ids, None, state, True, token_by_token=False)
    return logits.argmax(-1), state


def choose_lengths(trained_length: int, max_length: int) -> list[int]:
    """Return the measured lengths: powers of two, T/2, T, 2T, 4T, and the longest."""
    lengths = {2**i for i in range(max_length.bit_length())} | {max_length}
    return sorted(lengths | {max(1, trained_length * i // 2) for i in (1, 2, 4, 8)})


def _read_test_sequences(
    model: nn.Module,
    task: Task,
    subspace: Subspace,
    lengths: list[int],
    trained_length: int,
    seed: int,
) -> Values:
    """Read test sequences once, from one measured length to the next; perturb the states at T."""
    values: Values = defaultdict(list)
    generator = torch.Generator().manual_seed(seed)
    total = max(NUM_TEST, TEST_PER_ID * task.vocab_size)
    longest = max(lengths[-1], trained_length + DELAYS[-1])
    for ids, labels in _draw_batches(model, task, "test", seed, total, longest):
        state = None
        for begin, end in pairwise([0, *lengths]):
            answers, state = _read(model, ids[:, begin:end], state)
            label = labels[:, end - 1]
            values["accuracy", end].append(answers[:, -1] == label)
            has_mean = torch.isin(label, subspace.classes)  # the first states may never return
            index = torch.searchsorted(subspace.classes, label[has_mean])
            distances = torch.cdist(subspace.project(state)[has_mean], subspace.means)  # (·,c)
            values["distance", end].append(distances.gather(1, index.unsqueeze(1)))
            values["nearest_accuracy", end].append(distances.argmin(1) == index)
            if end == trained_length:
                _perturb(model, subspace, state, ids[:, end:], labels[:, end], generator, values)
    return values


def _perturb(model, subspace, state, ids, labels, generator, values) -> None:
    """Add to `values` the contraction, and the accuracy after each level of noise.

    state: after T tokens. ids: the next tokens, (n,l). labels: right answers at the first, (n,).
    """
    shape = len(ids), subspace.basis.shape[1]
    noise = torch.randn(1 + len(NOISE_LEVELS), *shape, generator=generator).to(ids.device)
    offsets = PERTURBATION * subspace.separation * nn.functional.normalize(noise[0], dim=1)
    states = state, subspace.move(state, offsets)
    for begin, end in pairwise([0, *DELAYS]):
        states = tuple(_read(model, ids[:, begin:end], s)[1] for s in states)
        difference = subspace.project(states[1]) - subspace.project(states[0])
        values["contraction", end].append(difference.norm(dim=1) / offsets.norm(dim=1))
    for level, direction in zip(NOISE_LEVELS, noise[1:]):
        offsets = level * subspace.separation / math.sqrt(shape[1]) * direction
        answers, _ = _read(model, ids[:, :1], subspace.move(state, offsets))
        values["noisy_accuracy", level].append(answers[:, 0] == labels)


def _summarize(
    run_dir: Path, task: Task, trained_length: int, separation: float, values: Values
) -> ErrorControl:
    """Reduce the values of all sequences, and compute the threshold and the horizons."""
    places: dict[str, dict[Any, torch.Tensor]] = defaultdict(dict)
    for (quantity, place), batches in values.items():
        places[quantity][place] = torch.cat(batches).double()
    accuracy, nearest, noisy_accuracy = (
        {place: float(items.mean()) for place, items in places[name].items()}
        for name in ("accuracy", "nearest_accuracy", "noisy_accuracy")
    )
    spread = {n: float(items.square().mean().sqrt()) for n, items in places["distance"].items()}
    ratio = {n: value / separation for n, value in spread.items()}
    readable = task.chance + READABLE * (1 - task.chance)
    threshold = math.nan
    if nearest[trained_length] >= readable:
        threshold = find_threshold(ratio[trained_length], noisy_accuracy, readable)
    return ErrorControl(
        run_dir,
        task.name,
        trained_length,
        {"accuracy": accuracy, "nearest_accuracy": nearest, "spread": spread, "ratio": ratio},
        separation,
        {delay: float(items.median()) for delay, items in places["contraction"].items()},
        threshold,
        min((n for n, share in accuracy.items() if share < readable), default=math.inf),
        predict_horizon(ratio, trained_length, threshold),
    )


def find_threshold(ratio: float, noisy_accuracy: dict[float, float], readable: float) -> float:
    """Find the ratio at which noise makes the next answer unreadable.

    Args:
        ratio: Ratio without noise. The noise is independent of it, so their squares add.
        noisy_accuracy: Level of the noise → accuracy, in ascending order of the levels.
        readable: Accuracy below which the answer is unreadable.

    Returns:
        The threshold, interpolated between two levels; NaN if the lowest level is unreadable,
        infinity if no level is.
    """
    if next(iter(noisy_accuracy.values())) < readable:
        return math.nan
    for (low, accuracy), (high, next_accuracy) in pairwise(noisy_accuracy.items()):
        if next_accuracy < readable:
            fraction = (accuracy - readable) / (accuracy - next_accuracy)
            return math.hypot(ratio, low + fraction * (high - low))
    return math.inf


def predict_horizon(ratio: dict[int, float], trained_length: int, threshold: float) -> float:
    """Predict the length at which the ratio (by length) reaches the threshold.

    Returns:
        The length at which the power law fitted to the ratio from T/2 to 2T has the threshold;
        infinity above MAX_HORIZON or if the ratio does not grow; NaN without a threshold, or if
        the ratio is known at fewer than two of these lengths.
    """
    in_range = (n for n in ratio if trained_length <= 2 * n <= 4 * trained_length)
    lengths = [n for n in in_range if math.isfinite(ratio[n])]
    if math.isnan(threshold) or len(lengths) < 2:
        return math.nan
    exponent, log_factor = np.polyfit(np.log(lengths), np.log([ratio[n] for n in lengths]), 1)
    gap = math.log(threshold) - log_factor
    if exponent <= 0 or gap > exponent * math.log(MAX_HORIZON):
        return math.inf
    return math.exp(gap / exponent)
