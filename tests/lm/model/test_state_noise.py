"""Tests of `state_noise` and the Adversary: noise on sh(y) in training only."""

import contextlib
import copy
import math

import pytest
import torch

from lm.model import fixed_point
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.model.state import Adversary, draw_state_noise
from tests.marks import slow

SIGMA, LENGTH = 0.3, 9
MODELS = {
    "fp_mamba1": {},
    "fp_mamba1-dplr-dt-conv": dict(
        mixer="dplr", mixer_rank=2, dt_h_dep=True, use_short_conv=True, contractive=0.9
    ),
    "fp_mamba1-symm-kronecker": dict(symm_mixer=True, mixer="kronecker", contractive=0.5),
    "fp_mamba2-gate_inside": dict(block="fp_mamba2", mixer_rank=2, glu_in_loop=True),
    "fp_rnn": dict(block="fp_rnn", mixer_rank=2),
}
SCHEDULES = ("sequential", "window:4", "parallel")


def make_cases(values):
    """Return (model, schedule, value). Quick are a third of the cases, and a compiled solve."""
    return [
        case if (i + j) % 3 == 2 or (i, j) == (1, 0) else slow(*case)
        for i, name in enumerate(MODELS)
        for j, schedule in enumerate(SCHEDULES)
        for case in [(name, schedule, values[(i + j) % 2])]
    ]


PRECISE = dict(tol=1e-30, max_iters=99)  # windows run all iterations


def model_of(name="fp_mamba1", n_layer=1, **fields):
    torch.manual_seed(0)
    sizes = dict(vocab_size=13, d_model=8, n_layer=n_layer, d_state=4, headdim=8, eos_token_id=0)
    config = FPRNNConfig(**{**sizes, **PRECISE, **MODELS[name], **fields})
    model = FPRNNForCausalLM(config).double().train()
    for block in model.fixed_point_blocks():
        torch.nn.init.uniform_(block.out_norm.weight, 0.5, 1.5)
    return model


def tokens():
    ids = torch.randint(1, 13, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    ids[1, 5] = 0  # end of a document
    return ids


def compute_results(model, seed=2):
    """Return logits and every gradient by name."""
    model.zero_grad()
    torch.manual_seed(seed)
    out = model(tokens(), labels=tokens())
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {**grads, "logits": out.logits.detach()}


def assert_same(ours, theirs, tol=1e-7):
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=tol, atol=tol, msg=name)


@pytest.mark.parametrize("name, schedule, kernels", make_cases(("plain", "auto")))
def test_noise_is_added_to_the_state_that_is_read(name, schedule, kernels, monkeypatch):
    """Compare with a shift that adds the noise itself, for all tokens at once."""
    monkeypatch.setenv("FPRNN_KERNELS", kernels)
    ours = compute_results(model_of(name, state_noise=SIGMA, schedule=schedule))
    model = model_of(name, schedule="parallel")
    torch.manual_seed(2)
    noise = torch.randn(2, LENGTH, model.config.d_inner)
    with add_noise_in_shift(model, SIGMA * torch.rand(2, 1, 1) * noise, monkeypatch):
        assert_same(ours, compute_results(model))


@contextlib.contextmanager
def add_noise_in_shift(model, noise, monkeypatch):
    """Let `shift` add noise (b,l,d), in units of the norm's output before its weights."""
    shift, block = fixed_point.shift, model.backbone.layers[0].block

    def noisy(y, seqs, name="y"):
        shifted = shift(y, seqs, name)
        if name != "y":  # the output gate reads no noise
            return shifted
        has_norm = model.config.block != "fp_rnn"
        return shifted + (noise * block.out_norm.weight if has_norm else noise)

    with monkeypatch.context() as patched:
        patched.setattr(fixed_point, "shift", noisy)
        yield


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_noise_is_in_training_only_and_follows_the_seed(schedule):
    noisy = model_of(n_layer=2, state_noise=SIGMA, schedule=schedule)
    noiseless = model_of(n_layer=2, schedule=schedule)
    first, again, other = (compute_results(noisy, seed) for seed in (2, 2, 3))
    for name, value in first.items():
        assert torch.equal(again[name], value), name
    for different in (other, compute_results(noiseless)):
        assert (first["logits"] - different["logits"]).abs().max() > 1e-3
    with torch.no_grad():
        expected = noiseless.eval()(tokens()).logits
        assert torch.equal(noisy.eval()(tokens()).logits, expected)


def generators(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def test_noise_of_a_sequence_does_not_depend_on_its_batch():
    model, ids = model_of(n_layer=2, state_noise=SIGMA), tokens()
    with torch.no_grad():
        with model.override_solve_options(generators=generators(5, 6)):
            together = model(ids).logits
        with model.override_solve_options(generators=generators(6)):
            alone = model(ids[1:]).logits
        with model.override_solve_options(generators=generators(6, 6)):
            other_first = model(ids).logits  # row 0 has another seed, row 1 the same
    torch.testing.assert_close(alone, together[1:])
    torch.testing.assert_close(other_first[1:], together[1:])
    assert (other_first[0] - together[0]).abs().max() > 1e-3
    with (
        pytest.raises(ValueError, match="3 generators for 2 sequences"),
        model.override_solve_options(generators=generators(1, 2, 3)),
    ):
        model(ids)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_checkpoint_recomputes_with_the_same_noise(schedule, reentrant):
    model = model_of(n_layer=2, state_noise=SIGMA, schedule=schedule)
    expected = compute_results(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(compute_results(model), expected, 1e-10)


# The adversary.

MAX_LENGTH = 0.05  # `size` of the Adversary


def run_two_passes(model, seed=2):
    """Return the logits of both passes, the gradients of the mean loss, and the adversary."""
    model.zero_grad()
    torch.manual_seed(seed)
    adversary, logits = Adversary(model, MAX_LENGTH), []
    for enter in (adversary.first_pass, adversary.second_pass):
        with enter():
            out = model(tokens(), labels=tokens())
        (out.loss / 2).backward()
        logits.append(out.logits.detach())
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {**grads, "first": logits[0], "second": logits[1]}, adversary


@pytest.mark.parametrize("name, schedule, sigma", make_cases((SIGMA, 0.0)))
def test_second_pass_follows_the_gradient_of_the_first(name, schedule, sigma, monkeypatch):
    """Compare with finite differences of noise that the shift adds."""
    ours, adversary = run_two_passes(model_of(name, schedule=schedule, state_noise=sigma))
    (noise,) = adversary.noise.values()
    first = noise.detach().double()
    plain = model_of(name, schedule="parallel")

    def pass_with(noise):
        with add_noise_in_shift(plain, noise, monkeypatch), torch.no_grad():
            return plain(tokens(), labels=tokens())

    direction = torch.randn(first.shape, generator=torch.Generator().manual_seed(5)).double()
    above, below = (pass_with(first + step * direction).loss.item() for step in (1e-6, -1e-6))
    numeric = (above - below) / 2e-6
    # The backward was of half the loss.
    assert 2 * (noise.grad * direction).sum().item() == pytest.approx(numeric, rel=1e-4, abs=1e-7)

    torch.manual_seed(2)
    if sigma:
        torch.randn(first.shape), torch.rand(2, 1, 1)  # skip the random numbers of the first pass
    grad_norm = torch.linalg.vector_norm(noise.grad, dim=-1, keepdim=True)
    size = MAX_LENGTH * math.sqrt(first.shape[-1]) * torch.rand(2, 1, 1)
    adversarial_noise = (size * noise.grad / grad_norm.clamp_min(1e-30)).double()
    expected = pass_with(first + adversarial_noise).logits
    torch.testing.assert_close(ours["second"], expected, rtol=1e-6, atol=1e-6)
    assert pass_with(first + 1e-3 * adversarial_noise).loss > pass_with(first).loss


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_adversary_with_checkpoints_and_gaussian_noise(reentrant):
    model = model_of(n_layer=2, state_noise=SIGMA)
    expected, adversary = run_two_passes(model)
    assert all(noise.detach().abs().max() > 0 for noise in adversary.noise.values())
    assert len(adversary.noise) == 2
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(run_two_passes(model)[0], expected, 1e-10)


def test_an_adversary_spares_layers_that_do_not_read_their_state():
    layers = ["fp_mamba1", {"fp_mamba1": {"c_h_dep": True}}]
    _, adversary = run_two_passes(
        model_of(layers=layers, n_layer=2, mixer_h_dep=False, b_h_dep=False, c_h_dep=False)
    )
    unread, read = adversary.noise.values()
    assert unread.grad is None and read.grad.abs().max() > 0


def test_adversary_leaves_no_state_behind():
    model = model_of()
    adversary = Adversary(model, MAX_LENGTH)
    with pytest.raises(KeyError), adversary.first_pass():
        model_copy = copy.deepcopy(model)
        raise KeyError
    for each in (model, model_copy):
        assert each.backbone.solve_options.draw_noise is draw_state_noise
    with adversary.first_pass():
        model(tokens(), labels=tokens())
    with pytest.raises(RuntimeError, match="backward of the first"), adversary.second_pass():
        model(tokens())
