"""sh(y) read through centroids: what is read, by every schedule alike, and what is refused.

The equations are in test_oracle.py's cases, the compiled cell's in tests/lm/kernels.
"""

import math

import pytest
import torch

from lm.model import strategies
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.layers import Centroids
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.model.state import BlockState, Sequences, SolveOptions
from lm.training.optim import has_weight_decay

SIZES = dict(vocab_size=24, d_model=20, d_state=5, n_layer=1, headdim=10, expand=1)


def small(**fields):
    torch.manual_seed(0)
    return FPRNNForCausalLM(FPRNNConfig(**{**SIZES, "state_centroids": 13, **fields}))


def set_parameters(reading, vectors, keys, key_bias):
    with torch.no_grad():
        reading.vectors.copy_(torch.tensor(vectors))
        reading.keys.copy_(torch.tensor(keys))
        reading.key_bias.copy_(torch.tensor(key_bias))


def test_keys_and_biases_select_the_vectors():
    reading = Centroids(3, 2)
    vectors = [[1.0, 0.0], [9.0, 9.0], [0.0, 1.0]]
    set_parameters(reading, vectors, [[1e3, 0.0], [0.0, 1e3], [-1e3, 0.0]], [0.0, 0.0, 500.0])
    states = torch.tensor([[1.0, 0.2], [0.1, 1.2], [0.2, 0.2]])
    torch.testing.assert_close(reading(states, None), reading.vectors)
    set_parameters(reading, vectors, [[0.0, 0.0]] * 3, [math.log(2), 0.0, math.log(3)])
    expected = torch.tensor([[2 * 1.0 + 9.0, 9.0 + 3 * 1.0]]) / 6
    torch.testing.assert_close(reading(states[:1], None), expected)


def test_zero_is_read_where_no_token_is_before_and_nowhere_else():
    """A state between all centroids is nearest to zero, which must not capture it."""
    reading = Centroids(2, 2)
    vectors = [[1.0, 1.0], [1.0, -1.0]]
    set_parameters(reading, vectors, [[5e3, 5e3], [5e3, -5e3]], [0.0, 0.0])
    states = torch.tensor([[0.0, 0.0], [0.2, 0.1], [-0.1, -1.0]])
    for noise in (None, torch.full((3, 2), 0.01)):
        expected = torch.stack([torch.zeros(2), *reading.vectors])
        torch.testing.assert_close(reading(states, noise), expected)


def solved(model, u, seqs, monkeypatch, kernel, schedule="sequential"):
    """Output, state and every gradient, that of the noise among them, by the kernel or without."""
    calls = []
    plain = strategies.solve_sequential
    with monkeypatch.context() as patch:
        patch.setattr(strategies, "solve_sequential", lambda *a: (calls.append(1), plain(*a))[1])
        if not kernel:
            patch.setattr(strategies, "find_kernel", lambda *a: None)
        block, u = model.backbone.layers[0].block, u.clone().requires_grad_()
        noise = torch.randn(
            *u.shape[:2], 20, generator=torch.Generator().manual_seed(3), dtype=u.dtype
        ).requires_grad_()
        options = SolveOptions(draw_noise=lambda *_: noise)
        with model.solving(schedule=schedule, tol=1e-12):
            out, _, end = block(u, seqs._replace(options=options))
        wanted = [u, noise, *block.parameters()]
        grads = torch.autograd.grad(out.sin().sum(), wanted)
    if schedule == "sequential":
        assert len(calls) == (not kernel)
    return [out.detach(), end.y, end.h, *grads]


@pytest.mark.parametrize("block", ["fp_mamba1", "fp_mamba2"])
def test_kernel_and_loop_agree_with_noise_documents_and_a_state(block, monkeypatch):
    model = small(block=block, mixer_rank=2).double().train()
    u = torch.randn(3, 9, 20, dtype=torch.float64)
    starts = torch.zeros(3, 9, dtype=torch.bool)
    starts[0, 4] = starts[1, 0] = True
    h = torch.randn(3, 20, 5) if block == "fp_mamba1" else torch.randn(3, 2, 10, 5)
    y = torch.randn(3, 20, dtype=torch.float64)
    seqs = Sequences(starts=starts, state=BlockState(y, y, h.double(), ()), return_state=True)
    given = model, u, seqs, monkeypatch
    ours, theirs = solved(*given, kernel=True), solved(*given, kernel=False)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_windows_read_the_noise_of_their_own_tokens(monkeypatch):
    model = small(mixer_rank=2).double().train()
    u = torch.randn(2, 8, 20, dtype=torch.float64)
    given = model, u, Sequences(return_state=True), monkeypatch
    expected = solved(*given, kernel=False)
    for schedule in ("window:3", "parallel"):
        found = solved(*given, kernel=False, schedule=schedule)
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-6)


def test_at_first_the_nearest_vector_has_the_largest_weight():
    model = small(state_centroids=500)
    reading = model.backbone.layers[0].block.centroids
    states = torch.randn(9, 20)
    scores = states @ reading.keys.T + reading.key_bias
    squared_distances = torch.cdist(states, reading.vectors).square()
    expected = -16 / 20 / 2 * (squared_distances - states.square().sum(1, keepdim=True))
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-3)


def test_vectors_start_as_long_as_a_state_and_do_not_decay():
    model = small(state_centroids=500)
    assert abs(model.backbone.layers[0].block.centroids.vectors.square().mean() - 1) < 0.05
    names = [name for name, _ in model.named_parameters() if "centroids" in name]
    assert len(names) == 3 and not any(map(has_weight_decay, names))


def test_what_cannot_read_through_them_is_refused():
    with pytest.raises(ValueError, match=r"state_centroids is 4: it is only for .* not for fp_rnn"):
        FPRNNConfig(**SIZES, block="fp_rnn", state_centroids=4)
    alone = dict(mixer_h_dep=False, b_h_dep=False, c_h_dep=False)
    with pytest.raises(ValueError, match=r"nothing reads sh\(y\)"):
        FPRNNConfig(**SIZES, **alone, state_centroids=4)
    blind = dict(mixer="nonselective", b_h_dep=False, c_h_dep=False)
    with pytest.raises(ValueError, match=r"nothing reads sh\(y\)"):
        FPRNNConfig(**SIZES, **blind, state_centroids=4)
    with pytest.raises(ValueError, match="state_centroids"):
        FPRNNConfig(**SIZES, layers=[{"mamba": {"state_centroids": 4}}])


def test_operations_count_them():
    without, with_them = (small(state_centroids=k).backbone.layers[0].block for k in (0, 13))
    more = with_them.flops_per_token()[1] - without.flops_per_token()[1]
    assert more == 2 * 2 * 13 * 20  # two products of 13 vectors


@pytest.mark.parametrize("schedule", ["sequential", "window:3"])
def test_they_are_called_as_a_module_by_every_schedule(schedule):
    """Adapters and offloading act on nothing else."""
    model, calls = small().eval(), []
    reading = model.backbone.layers[0].block.centroids
    reading.register_forward_pre_hook(lambda *_: calls.append(1))
    with torch.no_grad(), model.solving(schedule=schedule):
        model(torch.arange(8).view(1, 8))
    assert calls
