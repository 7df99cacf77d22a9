"""`state_noise`: noise on sh(y) wherever the solve reads it, in training alone."""

import pytest
import torch

from lm.model import fixed_point
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM

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
PRECISE = dict(tol=1e-30, max_iters=99)  # windows go to the end


def model_of(name="fp_mamba1", n_layer=1, **fields):
    torch.manual_seed(0)
    sizes = dict(vocab_size=13, d_model=8, n_layer=n_layer, d_state=4, headdim=8, eos_token_id=0)
    config = FPRNNConfig(**{**sizes, **PRECISE, **MODELS[name], **fields})
    return FPRNNForCausalLM(config).double().train()


def tokens():
    ids = torch.randint(1, 13, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    ids[1, 5] = 0  # a document ends here
    return ids


def results(model, seed=2):
    """Logits and every gradient by name."""
    model.zero_grad()
    torch.manual_seed(seed)
    out = model(tokens(), labels=tokens())
    out.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {**found, "logits": out.logits.detach()}


def assert_same(ours, theirs, tol=1e-7):
    assert ours.keys() == theirs.keys()
    for name, right in theirs.items():
        torch.testing.assert_close(ours[name], right, rtol=tol, atol=tol, msg=name)


@pytest.mark.parametrize("kernels", ["auto", "plain"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
def test_it_is_noise_added_to_what_is_read_of_the_token_before(
    name, schedule, kernels, monkeypatch
):
    """Against a shift that adds the noise itself, on all tokens at once."""
    monkeypatch.setenv("FPRNN_KERNELS", kernels)
    ours = results(model_of(name, state_noise=SIGMA, schedule=schedule))
    model, shift = model_of(name, schedule="parallel"), fixed_point.shift
    torch.manual_seed(2)
    noise = SIGMA * torch.randn(2, LENGTH, model.config.d_inner)

    def noisy(y, seqs, name="y"):
        shifted = shift(y, seqs, name)
        return shifted + noise if name == "y" else shifted  # the output gate reads no noise

    monkeypatch.setattr(fixed_point, "shift", noisy)
    assert_same(ours, results(model))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_is_in_training_alone_and_the_seeds(schedule):
    noisy = model_of(n_layer=2, state_noise=SIGMA, schedule=schedule)
    silent = model_of(n_layer=2, schedule=schedule)
    first, again, other = results(noisy), results(noisy), results(noisy, seed=3)
    for name, value in first.items():
        assert torch.equal(again[name], value), name
    for different in (other, results(silent)):
        assert (first["logits"] - different["logits"]).abs().max() > 1e-3
    with torch.no_grad():
        expected = silent.eval()(tokens()).logits
        assert torch.equal(noisy.eval()(tokens()).logits, expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_checkpoint_computes_again_with_the_same_noise(schedule, reentrant):
    model = model_of(n_layer=2, state_noise=SIGMA, schedule=schedule)
    expected = results(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(results(model), expected, 1e-10)
