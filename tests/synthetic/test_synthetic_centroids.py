"""Search for centroids in the behaviour of hand-made automata, and of trained layers."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lm.model.baseline_layers import LSTMState
from lm.model.state import FPRNNState
from synthetic import centroids, config
from synthetic.build import LoadedRun, load_run
from synthetic.tasks import IGNORE, Batch
from synthetic.train import train
from tests.fabricated import TINY


def make_group(size):
    """Return the product table (a,b) → b ∘ a of the even permutations of `size` elements."""
    permutations = [
        p
        for p in itertools.permutations(range(size))
        if sum(p[i] > p[j] for i, j in itertools.combinations(range(size), 2)) % 2 == 0
    ]
    index = {p: i for i, p in enumerate(permutations)}
    return torch.tensor(
        [[index[tuple(b[i] for i in a)] for b in permutations] for a in permutations]
    )


@pytest.fixture(autouse=True)
def fewer_batches(monkeypatch):
    monkeypatch.setattr(centroids, "NUM_BATCHES", 6)


class Automaton(torch.nn.Module):
    """Model whose state is a code of an automaton's state, with mistakes.

    Args:
        table: Next state, (states,tokens).
        outputs: Answer in each state, (states,).
        codes: Vector that codes each state after each token, (tokens,states,d); tokens may be 1.
        mistakes: Probability of a wrong prediction.
        jumps: Probability of a wrong state after a token.
    """

    def __init__(self, table, outputs, codes, mistakes=0.0, jumps=0.0):
        super().__init__()
        self.table, self.outputs, self.codes = table, outputs, codes
        self.mistakes, self.jumps = mistakes, jumps
        self.generator = torch.Generator().manual_seed(0)
        self.register_parameter("unused", torch.nn.Parameter(torch.zeros(1)))
        block = SimpleNamespace(
            centroids=None,
            state_vector=lambda state: state.h,
            with_state_vector=lambda state, vector: state._replace(h=vector),
        )
        self.backbone = SimpleNamespace(layers=[SimpleNamespace(block=block)])

    def draw_errors(self, values, count, probability):
        """Replace some of the values by random ones below `count`."""
        is_wrong = torch.rand(values.shape, generator=self.generator) < probability
        others = torch.randint(count, values.shape, generator=self.generator)
        return torch.where(is_wrong, others, values)

    def forward(self, input_ids, attention_mask=None, state=None, return_state=True):
        current, predictions = torch.zeros(len(input_ids), dtype=torch.long), []
        if state is not None:
            h, last = state.layers[0]
            scores = torch.einsum("tsd,bd->tbs", self.codes, h)  # the highest is the nearest
            scores = scores - self.codes.square().sum(-1).unsqueeze(1) / 2
            current = scores.argmax(-1)[last[:, 0] % len(scores), torch.arange(len(h))]
        for tokens in input_ids.T:
            current = self.table[current, tokens]
            current = self.draw_errors(current, len(self.table), self.jumps)
            answer_count = int(self.outputs.max()) + 1
            predictions.append(self.draw_errors(self.outputs[current], answer_count, self.mistakes))
        h = self.codes[input_ids[:, -1] % len(self.codes), current]
        h = h + 0.05 * torch.randn(h.shape, generator=self.generator)
        logits = torch.nn.functional.one_hot(torch.stack(predictions, 1)).float()
        end = FPRNNState((LSTMState(h, input_ids[:, -1:]),), None)
        return SimpleNamespace(logits=logits, state=end)


def make_run(model, length=8):
    """Return a run of this model, whose task has the automaton's tokens and answers."""

    def batch(seed, split, index, size, lengths):
        rng = np.random.default_rng([seed, index])
        ids = rng.integers(model.table.shape[1], size=(size, length))
        return Batch(ids, ids)  # only the presence of labels matters

    task = SimpleNamespace(vocab_size=model.table.shape[1], batch=batch)
    return LoadedRun(config.Config(name="t"), task, model, "fp32")


def random_codes(table, d=20, seed=1):
    return torch.randn(1, len(table), d, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mistakes, jumps", [(0.0, 0.0), (0.003, 0.003), (0.06, 0.01)])
def test_all_states_of_a5_are_found_in_spite_of_mistakes(mistakes, jumps):
    """With 0.003 and 0.003, a sequence of 16 tokens is right with a probability of about 0.94."""
    table = make_group(5)
    codes = random_codes(table)
    run = make_run(Automaton(table, torch.arange(60), codes, mistakes, jumps))
    found = centroids.find_centroids(run, [0], 99)
    assert found.num_centroids == 60
    distances = torch.cdist(found.layers[0].vectors, codes[0])
    assert sorted(distances.argmin(1).tolist()) == list(range(60))
    assert distances.min(1).values.max() < (0.1 if mistakes < 0.01 else 1)
    assert found.description.startswith("60 centroids, from 3,072 states with ")


def test_states_with_equal_behaviour_share_a_centroid():
    """A counter modulo 3 in six states: state s + 3 answers and continues like state s."""
    table = torch.tensor([[(s + t) % 3 + 3 * ((s + t) % 2) for t in range(3)] for s in range(6)])
    codes = random_codes(table[:3]).repeat(1, 2, 1) + 0.1 * random_codes(table, seed=2)
    run = make_run(Automaton(table, torch.arange(6) % 3, codes))
    found = centroids.find_centroids(run, [0], 99)
    assert found.num_centroids == 3
    assert "with 3 different signatures; from" in found.description


def test_states_that_only_a_later_token_distinguishes_are_found():
    """The answer is 1 after the word 0 1 1; states before it differ only in their continuations."""
    table = torch.tensor([[1, 0], [1, 2], [1, 3], [3, 3]])
    model = Automaton(table, torch.tensor([0, 0, 0, 1]), random_codes(table))
    found = centroids.find_centroids(make_run(model, length=3), [0], 99)
    assert found.num_centroids == 4


def test_a_state_that_does_not_continue_from_its_mean_has_a_sample():
    """The mean of the first state's two codes is nearer to the second state than to these codes."""
    table = torch.tensor([[(s + t) % 3 + 3 * ((s + t) % 2) for t in range(3)] for s in range(6)])
    codes = torch.tensor([[3.0, 0.0, 1.0], [0.0, 0.0, 2.0], [0.0, 0.0, -2.0]]).repeat(2, 1)
    codes[3, 0] = -3
    codes = torch.nn.functional.pad(codes, (0, 20))  # a sample is far from the mean in 23 numbers
    run = make_run(Automaton(table, torch.arange(6) % 3, codes.unsqueeze(0)))
    found = centroids.find_centroids(run, [0], 99)
    assert found.num_centroids == 3
    distances = torch.cdist(found.layers[0].vectors, codes).min(1).values
    assert sorted((distances < 0.03).tolist()) == [False, True, True]
    assert distances.max() < 0.4
    assert "from their centroids 100.0%" in found.description


def test_a_behaviour_with_two_clusters_of_states_has_two_centroids():
    """Parity: the place of a state depends on the last token, and so does its meaning."""
    table = torch.tensor([[0, 1], [1, 0]])
    codes = torch.tensor([[[3.0, 0.0], [-3.0, 0.0]], [[-3.0, 1.0], [3.0, 1.0]]])
    found = centroids.find_centroids(make_run(Automaton(table, torch.arange(2), codes)), [0], 4)
    assert found.num_centroids == 4
    expected = sorted(codes.flatten(0, 1).tolist())
    assert sorted(found.layers[0].vectors.round().tolist()) == expected
    assert "2 of them frequent, with 4 clusters of states; from their centroids 100.0%" in (
        found.description
    )
    run = make_run(Automaton(table, torch.arange(2), codes))
    assert centroids.find_centroids(run, [0], 3).num_centroids == 2


def make_candidate(*counts):
    return centroids._Candidate({}, torch.tensor(counts, dtype=torch.float))


def test_a_centroid_fails_by_its_own_share_and_a_candidate_counts_states():
    candidate = make_candidate((80, 100), (6, 10), (0, 0))
    assert candidate.has_failed.tolist() == [False, True, False]
    assert candidate.share == pytest.approx(86 / 110)
    assert make_candidate((0, 0)).share == 0


def test_an_early_candidate_wins_against_a_slightly_better_one():
    first, second, third = (make_candidate((n, 1000)) for n in (980, 988, 992))
    assert centroids._select_candidate([first, second]) is first
    assert centroids._select_candidate([first, second, third]) is second


def test_a_state_continues_alike_if_few_predictions_differ():
    table = make_group(3)
    run = make_run(Automaton(table, torch.arange(3), random_codes(table)))
    ends = centroids._SequenceEnds.read(run, [0])
    signatures, labels = ends.signatures.unique(dim=0, return_inverse=True)
    means = centroids.compute_means(ends.vectors, labels)
    for wrong_share, expected in ((0.1, 1), (0.3, 0)):
        changed = signatures.clone()
        changed[:, 1 : 1 + int(wrong_share * signatures.shape[1])] += 1
        assert ends.measure_centroids(run, means, changed, labels).share == expected


def test_rare_signatures_join_a_near_one_or_none():
    signatures = torch.tensor(
        [[0] * 8] * 60 + [[1] * 8] * 50 + [[0] * 7 + [2]] * 8 + [[2] * 8] * 2 + [[0] * 6 + [2] * 2]
    )
    found = centroids.merge_signatures(signatures)
    assert found.signatures.tolist() == [[0] * 8, [1] * 8] and found.signature_count == 5
    assert found.labels.tolist() == [0] * 60 + [1] * 50 + [0] * 8 + [-1] * 2 + [0]
    near_and_frequent = torch.tensor([[0] * 8] * 60 + [[0] * 7 + [1]] * 20)
    assert len(centroids.merge_signatures(near_and_frequent).signatures) == 2


def compute(states, labels):
    """Compute the means and keys of a model's only layer."""
    return centroids.compute_means({3: states}, labels)[3]


def choose(states, labels, mistakes):
    """Choose samples of a model's only layer."""
    means = {3: compute(states, labels)}
    return centroids.choose_samples({3: states}, labels, mistakes, means).tolist()


def test_sample_is_near_the_mean_and_makes_no_mistake():
    states = torch.tensor([[1.0], [59.0], [100.0], [2.0], [4.0], [58.0], [57.0]])
    labels, mistakes = torch.tensor([0, 1, -1, 0, 0, 1, 1]), torch.tensor([0, 3, 0, 1, 0, 2, 2])
    assert choose(states, labels, mistakes) == [0, 5]


def test_sample_is_recognized_by_its_keys():
    """State 5 has the fewest mistakes of label 0, but the keys assign it label 1."""
    states = torch.tensor([[1.0], [1.2], [0.8], [1.0], [1.1], [9.0], [9.0], [9.0], [9.0]])
    labels, mistakes = torch.tensor([0] * 6 + [1] * 3), torch.tensor([1] * 5 + [0] * 4)
    assert choose(states, labels, mistakes)[0] < 5


def test_distances_of_all_layers_choose_a_sample():
    """Sequence 2 is the nearest in no layer; sequences 0 and 1 are far from a mean in one."""
    states = {
        0: torch.tensor([[0.0], [4.0], [1.0], [-5.0]]),
        7: torch.tensor([[400.0], [0.0], [100.0], [-500.0]]),
    }
    labels = torch.zeros(4, dtype=torch.long)
    means = centroids.compute_means(states, labels)
    assert centroids.choose_samples(states, labels, labels, means).tolist() == [2]


def test_autocast_does_not_change_the_samples():
    """In bfloat16 the keys would not distinguish the states. The last one has the other label."""
    states = torch.tensor([[100.0], [100.01], [100.02], [100.1], [100.11], [100.12], [100.01]])
    labels, mistakes = torch.tensor([0] * 3 + [1] * 4), torch.tensor([2, 1, 1, 1, 1, 1, 0])
    with torch.autocast("cpu", torch.bfloat16):
        assert choose(states, labels, mistakes) in ([1, 3], [1, 4], [1, 5])


def test_one_label_with_one_state_has_finite_keys():
    found = compute(torch.ones(1, 3), torch.zeros(1, dtype=torch.long))
    assert torch.isfinite(torch.cat([found.keys[0], found.key_bias])).all()


def test_scores_are_mahalanobis_distances():
    """States vary 100 times more in one direction, so their nearest mean is often wrong."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(7, 6, generator=generator).double()
    labels = torch.cat([torch.arange(7).repeat(400), torch.arange(2).repeat(700)])
    deviations = torch.randn(4200, 6, generator=generator).double()
    deviations = deviations @ torch.diag(torch.tensor([10.0] + [0.1] * 5).double())
    rotation = torch.linalg.qr(torch.randn(6, 6, generator=generator).double()).Q
    states = means[labels] + deviations @ rotation
    found = compute(states, labels)
    assert (torch.cdist(states, means).argmin(1) == labels).double().mean() < 0.5
    scores = states @ found.keys.double().T + found.key_bias
    assert (scores.argmax(1) == labels).double().mean() > 0.95

    # The scores of y, computed with an explicit inverse and the sharpness.
    means = torch.stack([states[labels == i].mean(0) for i in range(7)])
    covariance = (states - means[labels]).T @ (states - means[labels]) / 4200
    between = (means - means.mean(0)).T @ (means - means.mean(0)) / 7
    ridge = centroids.SHRINKAGE * covariance.trace() + 1e-3 * between.trace()
    inverse = torch.linalg.inv(covariance + ridge / 6 * torch.eye(6))
    scale = centroids.SHARPNESS / (inverse @ between).trace()
    y = states[:5]
    deviation = y[:, None] - means
    expected = -scale / 2 * torch.einsum("nki,ij,nkj->nk", deviation, inverse, deviation)
    torch.testing.assert_close(
        scores[:5] - scores[:5, :1], expected - expected[:, :1], rtol=1e-5, atol=1e-5
    )


def test_states_that_do_not_vary_within_their_labels_are_recognized():
    states = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 2.0], [1.0, 1.0, 2.0]])
    found = compute(states, torch.arange(3))
    assert torch.equal(found.vectors, states)
    scores = states @ found.keys.T + found.key_bias
    assert torch.isfinite(found.keys).all()
    assert torch.softmax(scores, 1).diagonal().min() > 0.99


def test_ends_are_read_at_the_last_token_of_padded_rows(tmp_path, monkeypatch):
    """Sequences have 2, 4, 3, … tokens and are padded; every fifth has no answer at its end."""
    (tmp_path / "c.yaml").write_text(json.dumps(TINY))
    cfg = config.load(tmp_path / "c.yaml", (f"out_dir={tmp_path}", "model.layers=fp_mamba1"))
    train(cfg)
    loaded = load_run(cfg.run_dir)
    batch = loaded.task.batch(0, "train", 0, 512, (4, 4))
    lengths = np.tile([2, 4, 3, 4], 128)
    mask = np.arange(4) < lengths[:, None]
    labels = np.where(mask, batch.labels, IGNORE)
    labels[::5] = IGNORE
    padded = batch._replace(input_ids=batch.input_ids * mask, labels=labels, mask=mask)
    monkeypatch.setattr(loaded.task, "batch", lambda *_: padded)
    monkeypatch.setattr(centroids, "NUM_BATCHES", 1)
    ends = centroids._SequenceEnds.read(loaded, [0])
    signatures, states = [], []
    for row in (row for row in range(25) if row % 5):
        ids = torch.from_numpy(batch.input_ids[row : row + 1, : lengths[row]])
        with torch.no_grad():
            output = loaded.model(input_ids=ids, return_state=True)
            whole = torch.cat([ids.expand(len(ends.probes), -1), ends.probes], 1)
            predictions = loaded.model(input_ids=whole).logits.argmax(-1)[:, lengths[row] :]
        states.append(output.state.layers[0].y[0])
        last_prediction = output.logits[0, -1:].argmax(-1)
        signatures.append(torch.cat([last_prediction, predictions.flatten()]))
    assert len(ends.signatures) == 512 - 103
    assert torch.equal(ends.signatures[: len(signatures)], torch.stack(signatures))
    torch.testing.assert_close(
        ends.vectors[0][: len(states)], torch.stack(states), atol=1e-4, rtol=0
    )


def test_an_lstm_reads_the_states_that_it_distinguishes(tmp_path, capsys):
    """Centroids enter during the training, and the accuracy is the same afterwards."""
    tree = {**TINY, "model": {"d_model": 16, "layers": "lstm", "n_layer": 1}}
    tree["model"]["state_centroids"] = 32
    tree["optim"] = {"lr": 1e-2, "schedule": "wsd", "wsd_decay": 0.3}
    tree["train"] = {"steps": 300, "batch_size": 64, "length": 6, "threads": 1}
    tree["train"]["curriculum"] = {"start": 6}
    tree["eval"] = {"lengths": "6", "examples": 64, "every": 100}
    (tmp_path / "c.yaml").write_text(json.dumps(tree))
    cfg = config.load(tmp_path / "c.yaml", (f"out_dir={tmp_path}",))
    assert train(cfg)["eval"][0]["metrics"]["sequence_accuracy"] > 0.9
    key_bias = load_run(cfg.run_dir).model.backbone.layers[0].block.centroids.key_bias
    k = int((key_bias > centroids.UNUSED_BIAS / 2).sum())
    assert f"centroids: {k} centroids, from 3,072 states with" in capsys.readouterr().out
    assert 3 <= k < 32
