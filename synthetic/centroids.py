"""Centroids (`model.state_centroids`), found when the curriculum of a run is over.

A layer with centroids reads a weighted mean of learned vectors, the centroids, instead of its state
or of a part of it (`lm.model.layers.Centroids`). Here their number k and their initial values come
from the states of the model and from its own behaviour after them: two sequences have the same
state if the model continues alike after both (Myhill and Nerode's theorem about automata). No
correct answer is needed, and an imperfect model's rare mistakes are outvoted.

Shapes: n sequences, m predictions of a signature, p probes, d numbers of a state, k centroids.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lm.common.console import Progress
from lm.common.errors import ConfigError
from lm.model.layers import Centroids
from lm.model.state import FPRNNState
from synthetic.build import LoadedRun
from synthetic.config import Config
from synthetic.deferred_centroids import DeferredCentroids
from synthetic.evaluate import move_to_device
from synthetic.tasks import IGNORE, Task

# Centroids enter a model after its curriculum, when the headline metric on validation data is at
# least this. The states of a worse model are not yet worth keeping.
MIN_SCORE = 0.9
# Training data from which the states come.
NUM_BATCHES = 16
SEQUENCES_PER_BATCH = 512
# Continuations after which the model's predictions are compared.
NUM_PROBES = 24
PROBE_LENGTH = 2
# Signatures are near each other if they differ in at most this share of their predictions.
MAX_DIFFERENCE = 0.2
# A signature near a behaviour is a noisy version of it if fewer than this share of all sequences
# near the behaviour have the signature.
MAX_NOISY_SHARE = 1 / 8
# Frequency of a behaviour relative to the most frequent one. Rarer ones are mistakes of the model.
MIN_FREQUENCY = 1 / 16
# Initial mean difference between the scores of two centroids, if there are many. With 16, a state
# of A5 reads a mixture of several centroids. 64 and 1,000 have the same results.
SHARPNESS = 64.0
UNUSED_BIAS = -1e4  # of an unused centroid, whose weight is then exactly 0
# Multiple of the mean variance within the states that is added to each variance. Measured on LSTMs
# and FP-Mamba: 0.03 to 0.1 classify most states correctly. Multiples of each variance itself are
# not better on A5, and worse on S5 (0.87 instead of 0.90).
SHRINKAGE = 0.1
# A centroid has failed if less than this share of its states continue alike from it. Measured with
# means: at least 0.75 for every behaviour of A5, 0 for a behaviour of parity with two clusters.
MIN_ALIKE = 0.65
MAX_SPLITS = 4  # rounds in which behaviours are split
NUM_CHECKED_BATCHES = 8  # batches whose states are continued from their centroids


class InitialCentroids(NamedTuple):
    """Initial values of the first k centroids of a layer."""

    vectors: torch.Tensor  # (k,d)
    keys: torch.Tensor  # (k,d)
    key_bias: torch.Tensor  # (k,)


class FoundCentroids(NamedTuple):
    """Centroids of some layers of a model, found by its behaviour."""

    layers: dict[int, InitialCentroids]
    num_centroids: int  # k
    description: str


def check_task(cfg: Config, task: Task) -> None:
    """Check that the rule can find states in the training data of a task.

    Raises:
        ConfigError: If batches continue each other, or if no sequence of the first batch ends in
            an answer.
    """
    if task.streams:
        raise ConfigError(
            f"model.state_centroids: batches of {cfg.task.name} continue each other, but the rule"
            " that finds centroids starts every sequence from an empty state; set"
            " model.state_centroids to 0"
        )
    batch = task.batch(cfg.seed, "train", 0, SEQUENCES_PER_BATCH, cfg.train.lengths)
    _, labels, mask = move_to_device(batch, "cpu")
    if not len(_find_answered_rows(labels, mask)[1]):
        raise ConfigError(
            f"model.state_centroids: no sequence of {cfg.task.name} ends in an answer, so that the"
            " states cannot be found: set it to 0"
        )


def find_and_attach(deferred: DeferredCentroids, run: LoadedRun) -> str:
    """Find the centroids of a model, and attach them if `state_centroids` permits their number.

    Args:
        deferred: Centroids of the model's layers, detached.
        run: Config and task of the run, and the model.

    Returns:
        A description of the centroids, or the reason for which they were not attached.
    """
    capacity = min(len(module.vectors) for module in deferred.modules.values())
    result = find_centroids(run, list(deferred.modules), capacity)
    if not 2 <= result.num_centroids <= capacity:
        return (
            f"none yet, because the model distinguishes {result.num_centroids} states and"
            f" model.state_centroids permits 2 to {capacity}"
        )
    for layer, module in deferred.modules.items():
        initialize_centroids(module, result.layers[layer])
    deferred.set_attached(True)
    return result.description


@torch.no_grad()
def initialize_centroids(module: Centroids, initial: InitialCentroids) -> None:
    """Set the first k centroids of a layer, and let the others have no weight."""
    k = len(initial.vectors)
    for parameter, values in zip((module.vectors, module.keys, module.key_bias), initial):
        parameter.zero_()
        parameter[:k] = values
    module.key_bias[k:] = UNUSED_BIAS


class _Candidate(NamedTuple):
    """Centroids, and how many states continue alike from them."""

    layers: dict[int, InitialCentroids]
    # States of each centroid: how many continue alike from it, and how many there are, (k,2)
    counts: torch.Tensor

    @property
    def share(self) -> float:
        """Share of all states that continue alike from their centroid."""
        return float(self.counts[:, 0].sum() / self.counts[:, 1].sum().clamp_min(1))

    @property
    def has_failed(self) -> torch.Tensor:
        """True for each centroid from which too few of its states continue alike, (k,)."""
        return self.counts[:, 0] < MIN_ALIKE * self.counts[:, 1]

    def replace_failed(self, vectors: dict[int, torch.Tensor]) -> dict[int, InitialCentroids]:
        """Return the centroids, with other vectors (k,d) for those that have failed."""
        has_failed = self.has_failed.unsqueeze(1)
        return {
            layer: initial._replace(
                vectors=torch.where(has_failed, vectors[layer], initial.vectors)
            )
            for layer, initial in self.layers.items()
        }


@torch.no_grad()
def find_centroids(run: LoadedRun, layers: list[int], capacity: int) -> FoundCentroids:
    """Find the centroids of a run's layers: a state for each behaviour of the model.

    The centroid of a behaviour is the mean of its states. If too many of them continue differently
    from the mean, the centroid is a sample, which is the state after one sequence. If the sample
    fails too, the states form several clusters in spite of their equal behaviour. They are then
    split in two, each half with its own centroid. Each of these steps gives a candidate: a set of
    centroids, and the share of the states that continue alike from them. `_select_candidate`
    prefers early candidates to slightly better ones.

    Args:
        run: The run.
        layers: Indices of layers that can have centroids.
        capacity: Maximum number of centroids.

    Returns:
        The centroids. With no or too many behaviours, only `num_centroids` is meaningful.
    """
    ends = _SequenceEnds.read(run, layers)
    behaviours = merge_signatures(ends.signatures)
    labels, signatures = behaviours.labels, behaviours.signatures
    candidates: list[_Candidate] = []
    if not 1 <= len(signatures) <= capacity:
        return FoundCentroids({}, len(signatures), "")
    for _ in range(1 + MAX_SPLITS):
        means = compute_means(ends.vectors, labels)
        candidate = ends.measure_centroids(run, means, signatures, labels)
        candidates.append(candidate)
        if candidate.has_failed.any():
            mistakes = (ends.signatures != signatures[labels]).sum(1)  # meaningless if label is −1
            samples = choose_samples(ends.vectors, labels, mistakes, means)
            sample_vectors = {i: x[samples] for i, x in ends.vectors.items()}
            new_centroids = candidate.replace_failed(sample_vectors)
            candidate = ends.measure_centroids(run, new_centroids, signatures, labels)
            candidates.append(candidate)
        failed_labels = candidate.has_failed.nonzero().flatten().tolist()
        split_count = len(signatures) + len(failed_labels)
        # If the share is 0.99, a split would be at most 0.01 better.
        if not failed_labels or candidate.share >= 0.99 or split_count > capacity:
            break
        all_vectors = torch.cat([ends.vectors[layer] for layer in layers], 1)
        labels, signatures = _split(failed_labels, all_vectors, labels, signatures)
    best = _select_candidate(candidates)
    count = len(best.counts)
    clusters = ""
    if count > len(behaviours.signatures):
        clusters = (
            f", {len(behaviours.signatures)} of them frequent, with {count} clusters of states"
        )
    return FoundCentroids(
        best.layers,
        count,
        f"{count} centroids, from {len(ends.signatures):,} states with"
        f" {behaviours.signature_count:,} different signatures{clusters}; from their centroids"
        f" {best.share:.1%} of {int(best.counts[:, 1].sum()):,} states continue alike",
    )


def _select_candidate(candidates: list[_Candidate]) -> _Candidate:
    """Return the first candidate whose share is at most 0.01 below the highest share."""
    highest_share = max(candidate.share for candidate in candidates)
    return next(c for c in candidates if c.share >= highest_share - 0.01)


class Behaviours(NamedTuple):
    """Frequent signatures, and the behaviour of every sequence."""

    signatures: torch.Tensor  # (k,m)
    labels: torch.Tensor  # (n,): index of the sequence's behaviour, or −1 if it is near to none
    signature_count: int  # number of different signatures


def merge_signatures(signatures: torch.Tensor) -> Behaviours:
    """Merge rare signatures (n,m), which contain mistakes of the model, into frequent ones.

    The most frequent signature is a behaviour, and the near and much rarer signatures are its noisy
    versions. The most frequent one of the rest is the next behaviour, and so on, until all others
    together are too rare. All sequences of a behaviour vote on each of its predictions. At last
    each sequence joins the nearest behaviour, if at most half of the predictions differ.
    """
    unique, inverse, counts = signatures.unique(dim=0, return_inverse=True, return_counts=True)
    remaining = counts.argsort(descending=True, stable=True)  # indices in `unique`
    centers: list[int] = []
    frequencies: list[int] = []  # number of sequences of each center and its noisy versions
    while len(remaining) and counts[remaining].sum() >= MIN_FREQUENCY * max(frequencies, default=0):
        center = int(remaining[0])
        differences = _differences(unique[remaining], unique[center : center + 1])[:, 0]
        is_near = differences <= MAX_DIFFERENCE
        is_rare = counts[remaining] < MAX_NOISY_SHARE * counts[remaining[is_near]].sum()
        is_merged = is_near & is_rare
        is_merged[0] = True
        centers.append(center)
        frequencies.append(int(counts[remaining[is_merged]].sum()))
        remaining = remaining[~is_merged]
    behaviours = unique[_select_frequent(torch.tensor(centers), torch.tensor(frequencies))]
    # The most frequent signature may itself contain mistakes: let all near ones vote.
    nearest = _differences(unique, behaviours).argmin(1)[inverse]
    votes = [signatures[nearest == i].mode(0).values for i in range(len(behaviours))]
    majorities = torch.stack(votes).unique(dim=0)
    nearest = _differences(unique, majorities).argmin(1)[inverse]
    majorities = _select_frequent(majorities, nearest.bincount(minlength=len(majorities)))
    distances, labels = _differences(unique, majorities).min(1)
    labels[distances > 0.5] = -1
    # A majority may be near to no signature: remove it, and number the others again.
    used_labels, labels = labels.unique(return_inverse=True)
    majorities = majorities[used_labels[used_labels >= 0]]
    labels -= int((used_labels < 0).sum())
    return Behaviours(majorities, labels[inverse], len(unique))


def compute_means(
    states: dict[int, torch.Tensor], labels: torch.Tensor
) -> dict[int, InitialCentroids]:
    """Compute the mean state of each label, and keys that recognize the label of a state.

    Args:
        states: Layer → the states of n sequences, (n,d).
        labels: Labels of the sequences, (n,), each number from 0 to k − 1 at least once. Sequences
            with label −1 are ignored.

    Returns:
        Layer → its centroids, whose vectors are the means.
    """
    is_labeled = labels >= 0
    return {
        layer: _fit_classifier(x[is_labeled].double(), labels[is_labeled])
        for layer, x in states.items()
    }


def choose_samples(
    states: dict[int, torch.Tensor],
    labels: torch.Tensor,
    mistakes: torch.Tensor,
    means: dict[int, InitialCentroids],
) -> torch.Tensor:
    """Choose one sequence for each label.

    Three criteria decide, in this order: the keys of the most layers recognize the sequence's
    label, it has the fewest mistakes, and its states are nearest to the means.

    Args:
        states: Layer → the states of n sequences, (n,d).
        labels: Labels of the sequences, (n,), as in `compute_means`.
        mistakes: Number of predictions after a sequence that differ from its label's signature,
            (n,).
        means: Layer → the result of `compute_means`.

    Returns:
        Indices of the sequences, (k,).
    """
    wrong_count = torch.zeros_like(labels)  # layers whose keys do not recognize the label
    distances = torch.zeros(len(labels)).double()
    for layer, x in states.items():
        x, vectors, keys, key_bias = (t.double() for t in (x, *means[layer]))  # no autocast
        wrong_count += (x @ keys.T + key_bias).argmax(1) != labels
        squared_distances = (x - vectors[labels]).square().sum(1)
        distances += squared_distances / squared_distances[labels >= 0].mean().clamp_min(1e-12)
    # Sort by label, then by the criteria: the first sequence of each label is chosen.
    order = distances.argsort(stable=True)
    for criterion in (mistakes, wrong_count, labels):
        order = order[criterion[order].argsort(stable=True)]
    order = order[labels[order] >= 0]
    counts = labels[labels >= 0].bincount()
    return order[counts.cumsum(0) - counts]


def _fit_classifier(x: torch.Tensor, labels: torch.Tensor) -> InitialCentroids:
    """Compute the means m_i of states (n,d) by labels (n,), and keys and biases of a classifier.

    Score i of a state y is −s/2 times its squared Mahalanobis distance (y − m_i)ᵀ Σ⁻¹ (y − m_i)
    from a mean, plus a term that is equal for all i; s makes the mean difference of two scores
    SHARPNESS · k/(k − 1). Σ is the covariance of the states within their labels, because a state
    can vary far more in directions that do not affect the model than in those that separate the
    labels.

    Source: regularized discriminant analysis (Friedman 1989), shrunk to a multiple of the identity.
    """
    counts = labels.bincount()
    sums = x.new_zeros(len(counts), x.shape[1]).index_add(0, labels, x)
    means = sums / counts.unsqueeze(1)
    center = means.mean(0)
    centered_means = means - center
    deviations = x - means[labels]
    covariance = deviations.T @ deviations / len(x)
    # The second term keeps Σ invertible if states do not vary within their labels.
    ridge = SHRINKAGE * covariance.trace() + 1e-3 * centered_means.square().mean(0).sum()
    covariance.diagonal().add_((ridge / x.shape[1]).clamp_min(1e-12))
    keys = torch.linalg.solve(covariance, centered_means.T).T
    mean_squared_distance = (keys * centered_means).sum(1).mean()
    keys *= SHARPNESS / mean_squared_distance.clamp_min(1e-12)
    key_bias = -((means + center) * keys).sum(1) / 2
    return InitialCentroids(means.float(), keys.float(), key_bias.float())


def _select_frequent(rows: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Return the rows (k,…) whose frequency (k,) is high enough for a behaviour."""
    return rows[frequencies >= MIN_FREQUENCY * frequencies.max()]


def _differences(signatures, others):
    """Return the share of different predictions of signatures (n,m) and others (k,m), (n,k)."""
    counts = [(signatures != other).sum(1) for other in others]  # all at once: too much memory
    return torch.stack(counts, 1) / signatures.shape[1]


def _split(
    split_labels: list[int], vectors: torch.Tensor, labels: torch.Tensor, signatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split the states (n,d) of some behaviours in two, by 2-means.

    Returns:
        The new labels (n,), and the signature of each label.
    """
    labels, new_signatures = labels.clone(), [signatures]
    count = len(signatures)
    for label in split_labels:
        rows = (labels == label).nonzero().flatten()
        centered = vectors[rows].double()
        centered = centered - centered.mean(0)
        direction = torch.linalg.svd(centered, full_matrices=False).Vh[0]
        is_second = centered @ direction > 0
        for _ in range(10):
            if is_second.all() or not is_second.any():
                break
            middles = torch.stack([centered[~is_second].mean(0), centered[is_second].mean(0)])
            is_second = torch.cdist(centered, middles).argmin(1) == 1
        if is_second.all() or not is_second.any():
            continue
        labels[rows[is_second]] = count
        new_signatures.append(signatures[label : label + 1])
        count += 1
    return labels, torch.cat(new_signatures)


def _find_answered_rows(labels, mask):
    """Return the last position of each sequence (b,1), and the rows (·,) that end in an answer."""
    last_position = labels.new_full((len(labels), 1), labels.shape[1] - 1)
    if mask is not None:
        last_position = mask.sum(1, keepdim=True) - 1
    return last_position, (labels.gather(1, last_position)[:, 0] != IGNORE).nonzero().flatten()


class _SequenceEnds(NamedTuple):
    """States at the end of n training sequences, and the model's behaviour after them."""

    batches: list[FPRNNState]  # states of the sequences, of the first NUM_CHECKED_BATCHES batches
    vectors: dict[int, torch.Tensor]  # layer → the numbers that centroids read, (n,d)
    probes: torch.Tensor  # (p,PROBE_LENGTH)
    signatures: torch.Tensor  # (n,m): the last prediction, then the predictions after each probe

    @classmethod
    def read(cls, run: LoadedRun, layers: list[int]) -> _SequenceEnds:
        """Run the model on training sequences, and on the probes after their ends."""
        cfg, task, model = run.cfg, run.task, run.model
        device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(cfg.seed)
        probes = torch.randint(task.vocab_size, (NUM_PROBES, PROBE_LENGTH), generator=generator)
        batches: list[FPRNNState] = []
        signatures: list[torch.Tensor] = []
        vectors: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
        progress = Progress("finding centroids", NUM_BATCHES, "batches")
        for number in range(NUM_BATCHES):
            progress.update(number)
            batch = task.batch(cfg.seed, "train", number, SEQUENCES_PER_BATCH, cfg.train.lengths)
            ids, labels, mask = move_to_device(batch, device)
            last_position, rows = _find_answered_rows(labels, mask)
            if not len(rows):
                continue
            output = model(input_ids=ids, attention_mask=mask, return_state=True)
            prediction = output.logits.argmax(-1).gather(1, last_position)[rows]
            state = output.state.select(rows)
            continuation = _continue(model, state, probes.to(device))
            if len(batches) < NUM_CHECKED_BATCHES:
                batches.append(state)
            signatures.append(torch.cat([prediction, continuation], 1).cpu())
            for layer in layers:
                block = model.backbone.layers[layer].block
                vectors[layer].append(block.state_vector(state.layers[layer]).cpu())
        joined = {layer: torch.cat(parts) for layer, parts in vectors.items()}
        return cls(batches, joined, probes, torch.cat(signatures))

    def measure_centroids(
        self,
        run: LoadedRun,
        initial_centroids: dict[int, InitialCentroids],
        signatures: torch.Tensor,
        labels: torch.Tensor,
    ) -> _Candidate:
        """Count the states that continue alike if they are read through centroids.

        Args:
            run: The run.
            initial_centroids: Layer → its centroids.
            signatures: Signature of each centroid, (k,m).
            labels: Centroid of each sequence, (n,), or −1.

        Returns:
            The centroids and the counts.
        """
        counts = torch.zeros(len(signatures), 2)
        start = 0
        for state in self.batches:
            batch_labels = labels[start : start + len(state.stream_indices)]
            start += len(batch_labels)
            layers: list[Any] = list(state.layers)
            for layer, centroids in initial_centroids.items():
                block = run.model.backbone.layers[layer].block
                reader = Centroids(*centroids.vectors.shape).to(state.stream_indices.device)
                initialize_centroids(reader, centroids)
                vector = reader(block.state_vector(layers[layer]), None)
                layers[layer] = block.with_state_vector(layers[layer], vector)
            probes = self.probes.to(state.stream_indices.device)
            read_state = state._replace(layers=tuple(layers))
            continuation = _continue(run.model, read_state, probes).cpu()
            is_labeled = batch_labels >= 0
            batch_labels = batch_labels[is_labeled]
            expected = signatures[batch_labels, 1:]
            difference = (continuation[is_labeled] != expected).double().mean(1)
            is_alike = (difference <= MAX_DIFFERENCE).float()
            counts.index_add_(
                0, batch_labels, torch.stack([is_alike, torch.ones_like(is_alike)], 1)
            )
        return _Candidate(initial_centroids, counts)


def _continue(model, state, probes):
    """Return the predictions (n,p·PROBE_LENGTH) after each probe (p,PROBE_LENGTH) from n states."""
    n = len(state.stream_indices)
    rows = state.stream_indices.repeat_interleave(len(probes))
    output = model(input_ids=probes.repeat(n, 1), state=state.select(rows), return_state=True)
    return output.logits.argmax(-1).view(n, -1)
