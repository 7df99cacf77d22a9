"""Which of Q, B, C and Δ read sh(y) (the paper's Table 1): one iteration written out, solves."""

import itertools

import pytest
import torch

from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM

MAMBAS = ("fp_mamba1", "fp_mamba2")


def model_of(dtype=torch.float64, **kwargs):
    """A model whose iterations contract, with no bias left at zero."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=30, d_model=8, n_layer=1, d_state=4, headdim=4, eos_token_id=0)
    rule = dict(contractive=0.3, out_norm_epsilon=1.0, tol=1e-12, max_iters=300, eval_max_iters=300)
    model = FPRNNForCausalLM(FPRNNConfig(**{**sizes, **rule, **kwargs})).to(dtype).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.add_(0.3 * torch.randn_like(p))
            if name.endswith("bc_y_proj.gain"):
                p.mul_(0.1)
    return model


def block_of(**kwargs):
    return model_of(**kwargs).backbone.layers[0].block


def normal(*shape, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def ids(b=2, length=24, seed=0):
    return torch.randint(1, 30, (b, length), generator=torch.Generator().manual_seed(seed))


# What reads sh(y).


@pytest.mark.parametrize("name", MAMBAS)
def test_a_map_is_as_wide_as_what_reads_it(name):
    k, to_dt = (4, 1) if name == "fp_mamba1" else (8, 4)  # n or groups · n; dt_rank or heads
    for b, c, dt in itertools.product([False, True], repeat=3):
        block = block_of(block=name, ngroups=k // 4, b_h_dep=b, c_h_dep=c, dt_h_dep=dt)
        shapes = {n: tuple(p.shape) for n, p in block.named_parameters()}
        expected = {"bc_y_proj.direction": (k * (b + c), 16), "bc_y_proj.gain": (k * (b + c), 1)}
        expected = expected if b or c else {}
        if dt:
            expected |= {"dt_y_proj.direction": (to_dt, 16), "dt_y_proj.gain": (to_dt, 1)}
        maps = {n: s for n, s in shapes.items() if n.startswith(("bc_y_proj", "dt_y_proj"))}
        assert maps == expected


@torch.no_grad()
def test_dt_y_proj_starts_as_the_other_weight_normalised_maps():
    torch.manual_seed(0)
    config = FPRNNConfig(vocab_size=8, d_model=32, n_layer=1, dt_h_dep=True)
    weights = FPRNNForCausalLM(config).backbone.layers[0].block.dt_y_proj
    torch.testing.assert_close(weights.matrix(), weights.direction)  # gain is the row's norm
    bound = 64**-0.5  # kaiming_uniform(a=√5) on fan-in 64
    assert 0.9 * bound < weights.weight.abs().max() <= bound


@pytest.mark.parametrize("name", MAMBAS)
def test_flops_count_the_maps_where_they_run(name):
    d, n = 16, 4
    to_dt, through = (1, 2 * 1 * d) if name == "fp_mamba1" else (4, 0)  # dt_rank, dt_proj; heads
    once, step = block_of(block=name).flops_per_token()
    for b, c, dt in itertools.product([False, True], repeat=3):
        here = block_of(block=name, b_h_dep=b, c_h_dep=c, dt_h_dep=dt).flops_per_token()
        expected = step - 2 * d * n * (2 - b - c) + dt * (2 * d * to_dt + through)
        assert here == (once - dt * through, expected)


@pytest.mark.parametrize("name", MAMBAS)
def test_flops_of_the_scan_are_those_of_a_mamba_layer(name):
    """9 a number of the state, as Mamba's authors count a selective scan."""
    small, large = (block_of(block=name, d_state=n, b_h_dep=False, c_h_dep=False) for n in (4, 12))
    assert large.flops_per_token()[1] - small.flops_per_token()[1] == 9 * 16 * (12 - 4)


@pytest.mark.parametrize("name", MAMBAS)
def test_the_gate_outside_reads_x_alone(name):
    """Its map of sh(y) is gone, with its FLOPs; nothing else is another."""
    with_map, without = block_of(block=name), block_of(block=name, gate_h_dep=False)
    gone = {"z_y_proj.direction", "z_y_proj.gain"}
    assert with_map.state_dict().keys() - without.state_dict().keys() == gone
    once, step = with_map.flops_per_token()
    assert without.flops_per_token() == (once - 2 * 16 * 16, step)
    without.load_state_dict({k: v for k, v in with_map.state_dict().items() if k not in gone})
    with torch.no_grad():
        with_map.z_y_proj.gain.zero_()
    u = torch.randn(2, 5, 8, dtype=without.D.dtype)
    torch.testing.assert_close(without(u), with_map(u))


def test_a_gate_inside_reads_no_y_that_could_be_left_out():
    with pytest.raises(
        ValueError, match="gate_h_dep is False: with glu_in_loop the gate is inside"
    ):
        block_of(gate_h_dep=False, glu_in_loop=True)


@pytest.mark.parametrize("value", ["false", None, 0])
def test_what_is_neither_true_nor_false(value):
    for fields in ({"gate_h_dep": value}, {"layers": [{"fp_mamba1": {"gate_h_dep": value}}]}):
        with pytest.raises(ValueError, match=f"gate_h_dep is {value!r}: it must be true or false"):
            FPRNNConfig(n_layer=1, **fields)


def test_fp_rnn_names_the_field_that_it_cannot_have():
    others = {"b_h_dep": False, "c_h_dep": False, "dt_h_dep": True, "gate_h_dep": False}
    for field, value in others.items():
        for way in ({"block": "fp_rnn"}, {"layers": "mamba fp_rnn", "n_layer": 2}):
            with pytest.raises(ValueError, match=f"{field} is {value}, which only fp_mamba1"):
                FPRNNConfig(**way, **{field: value})
    FPRNNConfig(block="fp_rnn", b_h_dep=True, c_h_dep=True, dt_h_dep=False)
