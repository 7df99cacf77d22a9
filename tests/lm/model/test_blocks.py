"""Tests of the fixed-point blocks: solver rules, invalid fields, training with every mixer."""

import pytest
import torch

from lm.model.blocks import BLOCKS, Sequences, build_block, shift
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.model.strategies import EVAL_TOL, TRAIN_TOL, choose_solver
from tests.marks import slow


def block(dtype=torch.float64, **kwargs):
    """Return a block with a contractive mixer, so that low tolerances are reached."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 8, "d_model": 8, "n_layer": 1, "d_state": 4, "headdim": 4}
    model = FPRNNForCausalLM(FPRNNConfig(**{**sizes, **kwargs})).backbone.layers[0].block.to(dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("alpha_proj.bias", "gate_proj.bias")):
                p.fill_(-3.0)  # gates near 0: a strong contraction
            if name == "bc_y_proj.gain":
                p.mul_(0.3)
        for name, tensor in model.named_buffers():
            if name.endswith("q_proj.base"):
                tensor.copy_(torch.eye(len(tensor)))
    return model


def draw_u(*shape, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("stopping", ["paper", "causal"])
def test_input_projections_are_computed_once_per_solve(monkeypatch, stopping):
    rule = dict(eval_tol=1e-12, eval_max_iters=10)
    model = block(torch.float32, schedule="parallel", stopping=stopping, token="iterate", **rule)
    calls = {"prepare": 0, "mix_channels": 0, "weights": 0}
    for owner, name in [(model, "prepare"), (model, "mix_channels"), (model.mixer, "weights")]:
        original = getattr(owner, name)

        def counting(*args, name=name, original=original):
            calls[name] += 1
            return original(*args)

        monkeypatch.setattr(owner, name, counting)
    with torch.no_grad():
        _, stats = model.eval()(draw_u(1, 6, 8).float())
    assert (stats.evaluations == 10).all()
    # The output needs one more step after the paper's solver, which does not return f(y).
    assert calls == {"prepare": 1, "mix_channels": 10 + (stopping == "paper"), "weights": 1}


def choose_rule(block, training=False):
    block.train(training)
    return choose_solver(block, block.config, length=16, like=block.out_proj.weight).rule


def test_evaluation_is_stricter_than_training():
    # The first three fields of a Rule are tol, max_iters and quantile.
    model = block(max_iters=7, eval_max_iters=9)
    assert choose_rule(model, training=True)[:3] == (TRAIN_TOL, 7, 0.75)
    assert choose_rule(model)[:3] == (EVAL_TOL[torch.float64], 9, 1.0)
    assert choose_rule(block(torch.float32)).tol == EVAL_TOL[torch.float32]
    with torch.autocast("cpu", torch.bfloat16):  # bf16 rounds by about TRAIN_TOL
        assert choose_rule(model).tol == TRAIN_TOL
    assert choose_rule(block(eval_tol=0.03)).tol == 0.03
    assert choose_rule(block(tol=1e-3), training=True).tol == 1e-3
    iterated = block(token="iterate", stopping="causal")
    assert (
        choose_rule(iterated, training=True).tol == 0.1 and choose_rule(iterated).tol == TRAIN_TOL
    )
    paper = block(schedule="parallel", stopping="paper")
    # The tolerance is as in training, but every sequence must reach it.
    assert choose_rule(paper)[:3] == (0.1, 1000, 1.0)


def test_shift_reads_the_previous_token_of_the_document():
    y = torch.arange(1.0, 7.0).reshape(1, 6, 1)
    assert shift(y, Sequences()).flatten().tolist() == [0, 1, 2, 3, 4, 5]
    starts = torch.tensor([[False, False, True, False, False, True]])
    assert shift(y, Sequences(starts=starts)).flatten().tolist() == [0, 1, 0, 3, 4, 0]


def test_invalid_fields_of_a_block_are_refused():
    with pytest.raises(ValueError, match="gradient is 'phantom:3': it must be one of auto, exact"):
        FPRNNConfig(gradient="phantom:3")
    with pytest.raises(ValueError, match="block is 'mamba': it must be one of"):
        build_block(FPRNNConfig(block="mamba"))
    with pytest.raises(
        ValueError, match=r"headdim is 5: it must divide d_inner .* = 16, for example 4"
    ):
        build_block(FPRNNConfig(block="fp_mamba2", d_model=8, headdim=5))
    with pytest.raises(
        ValueError, match=r"ngroups is 3: it must divide the 4 heads .*, for example 2"
    ):
        build_block(FPRNNConfig(block="fp_mamba2", d_model=8, headdim=4, ngroups=3))
    with pytest.raises(ValueError, match="glu_in_loop is only for"):
        build_block(FPRNNConfig(block="fp_rnn", d_model=8, glu_in_loop=True))


BOUNDED = {"contractive": 0.5}  # an untrained mixer of full rank may fail without a bound
MIXER_SETTINGS = {
    "householder": {},
    "dplr": {"mixer_rank": 2},
    "kronecker": BOUNDED,
    "monarch": {"mixer_rank": 4, **BOUNDED},
    "nonselective": BOUNDED,
    "mixture": {"mixer_rank": 2, **BOUNDED},
    "selective_dense": BOUNDED,
}


# Each mixer in one block, each block with householder, and the same in bf16. test_oracle.py has the
# other combinations.
SLOW_MIXERS = ("selective_dense", "kronecker", "monarch", "mixture")  # seconds each in bf16
TRAINED = [
    slow(name, mixer, bf16) if bf16 and mixer in SLOW_MIXERS else (name, mixer, bf16)
    for i, mixer in enumerate(MIXER_SETTINGS)
    for j, name in enumerate(BLOCKS)
    for bf16 in (False, True)
    if mixer == "householder" or i % 3 == j
]


@pytest.mark.parametrize("name, mixer, bf16", TRAINED)
def test_every_block_with_every_mixer_trains(name, mixer, bf16):
    torch.manual_seed(0)
    config = FPRNNConfig(
        vocab_size=16,
        d_model=8,
        n_layer=1,
        d_state=4,
        headdim=4,
        block=name,
        mixer=mixer,
        max_iters=20,
        **MIXER_SETTINGS[mixer],
    )
    model = FPRNNForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    ids = torch.randint(16, (2, 6))
    losses = []
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = model(ids, labels=ids)
        optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(output.loss.item())
        stats = output.fixed_point
        assert not stats.failed.any()
        assert (stats.evaluations >= 1).all()
    assert all(torch.isfinite(torch.tensor(losses))) and losses[-1] < losses[0]
