"""Regression tests of the exact token: dropped options, labels, copies."""

import copy
import os
import pickle

import pytest
import torch

from lm.model import full_rank
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM

SIZES = dict(vocab_size=13, d_model=16, n_layer=2, d_state=4, headdim=8)


def model_of(**fields):
    torch.manual_seed(0)
    return FPRNNForCausalLM(FPRNNConfig(**{**SIZES, **fields})).double()


def tokens(b=2, length=9):
    return torch.randint(0, 13, (b, length), generator=torch.Generator().manual_seed(1))


def gradients(model, ids, outside=False, reentrant=None, **fields):
    """Return the gradients of the loss under `model.solving(**fields)`.

    outside: Whether the backward runs after the context.
    """
    model.train()
    model.gradient_checkpointing_disable()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.zero_grad()
    torch.manual_seed(2)
    with model.solving(**fields):
        loss = model(ids, labels=ids).loss
        if not outside:
            loss.backward()
    if outside:
        loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        dict(gradient="one_step", n_backwards=2),
        dict(gradient="implicit", schedule="window:4"),
        dict(token="iterate"),
        dict(state_noise=0.2, schedule="parallel", gradient="exact"),
    ],
    ids=str,
)
def test_checkpoint_recomputes_with_the_settings_of_the_forward(fields, reentrant):
    model, ids = model_of(), tokens()
    expected = gradients(model, ids, **fields)
    found = gradients(model, ids, outside=True, reentrant=reentrant, **fields)
    for name, right in expected.items():
        torch.testing.assert_close(found[name], right, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("made", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copy_made_inside_solving_uses_its_config(made):
    model = model_of()
    with model.solving(schedule="parallel", tol=0.5):
        other = made(model)
        assert model.solver(9)["schedule"] == "parallel"
    assert other.solver(9) == model.solver(9)


def test_solver_token_is_not_used_as_a_password(tmp_path):
    model = model_of()
    model.save_pretrained(tmp_path)
    for load in (FPRNNForCausalLM, FPRNNConfig):
        with pytest.raises(ValueError, match="as an access token"):
            load.from_pretrained(tmp_path, token="iterate")
    config = FPRNNConfig(**SIZES, token="iterate")
    loaded = FPRNNForCausalLM.from_pretrained(tmp_path, config=config)
    assert loaded.solver()["token"] == "iterate"


def test_flops_grow_with_the_evaluations():
    model = model_of()
    step = sum(layer.block.flops_per_token()[1] for layer in model.backbone.layers)
    for fields in (dict(schedule="parallel"), dict(schedule="sequential")):
        with model.solving(**fields):
            zero, one, six = (model.flops_per_token(k) for k in (0, 1, 6))
            assert one - zero == step and six - one == 5 * step
    with model.solving(schedule="parallel"):
        windows = model.flops_per_token(1)
        with model.solving(n_backwards=3):  # the exact gradient does not use n_backwards
            assert model.flops_per_token(1) == windows
    with model.solving(schedule="sequential"):
        assert model.flops_per_token(1) == windows - step


def test_padding_does_not_dilute_the_share_of_failures(monkeypatch):
    """A kronecker mixer too wide for bisection, with too few iterations."""
    monkeypatch.setattr(full_rank, "MAX_DENSE_WIDTH", 0)
    monkeypatch.setattr(full_rank, "MAX_PICARD_STEPS", 55)
    monkeypatch.setattr(full_rank, "MAX_ACCELERATED_ITERS", 0)
    model, ids = (
        model_of(mixer="kronecker", n_layer=1, mixer_gate_init_bias=0.0).eval(),
        tokens(4, 9),
    )
    alone = model(ids).fixed_point.failed
    assert (alone > 0).all() and (alone < 1).all()
    padded = torch.cat([torch.zeros_like(ids), ids], 1)
    mask = torch.cat([torch.zeros_like(ids), torch.ones_like(ids)], 1)
    for schedule in ("sequential", "parallel"):
        with model.solving(schedule=schedule, eval_tol=1e-9):
            found = model(padded, attention_mask=mask).fixed_point.failed
        torch.testing.assert_close(found, alone)


def test_adjoint_norm_is_the_same_with_and_without_kernels(monkeypatch):
    """The norm is below 1 if gradients through time cancel those from above."""
    model, ids = model_of(block="fp_rnn"), tokens(3, 9)
    norms = []
    for kernels in ("auto", "plain"):
        monkeypatch.setitem(os.environ, "FPRNN_KERNELS", kernels)
        with model.train().solving(schedule="sequential"):
            output = model(ids, labels=ids)
        output.loss.backward()
        norms.append(torch.stack(output.fixed_point.adjoint_norm))
    assert (norms[0] > 0).all()
    torch.testing.assert_close(*norms)
