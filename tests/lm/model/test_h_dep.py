"""Which of Q, B, C and Δ read sh(y) (the paper's Table 1): one iteration written out, solves."""

import itertools

import pytest
import torch

from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM

MAMBAS = ("fp_mamba1", "fp_mamba2")


def model_of(dtype=torch.float64, **kwargs):
    """Return a model whose iterations contract, with no bias left at zero."""
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


@pytest.mark.parametrize("name", MAMBAS)
def test_maps_of_y_have_the_width_of_their_results(name):
    k, dt_width = (4, 1) if name == "fp_mamba1" else (8, 4)  # n or groups · n; dt_rank or heads
    for b, c, dt in itertools.product([False, True], repeat=3):
        block = block_of(block=name, ngroups=k // 4, b_h_dep=b, c_h_dep=c, dt_h_dep=dt)
        shapes = {n: tuple(p.shape) for n, p in block.named_parameters()}
        expected = {"bc_y_proj.direction": (k * (b + c), 16), "bc_y_proj.gain": (k * (b + c), 1)}
        expected = expected if b or c else {}
        if dt:
            expected |= {"dt_y_proj.direction": (dt_width, 16), "dt_y_proj.gain": (dt_width, 1)}
        maps = {n: s for n, s in shapes.items() if n.startswith(("bc_y_proj", "dt_y_proj"))}
        assert maps == expected


@torch.no_grad()
def test_dt_y_proj_starts_as_the_other_weight_normalised_maps():
    torch.manual_seed(0)
    config = FPRNNConfig(vocab_size=8, d_model=32, n_layer=1, dt_h_dep=True)
    dt_y_proj = FPRNNForCausalLM(config).backbone.layers[0].block.dt_y_proj
    torch.testing.assert_close(dt_y_proj.matrix(), dt_y_proj.direction)  # gain is the row's norm
    bound = 64**-0.5  # kaiming_uniform(a=√5) on fan-in 64
    assert 0.9 * bound < dt_y_proj.weight.abs().max() <= bound


@pytest.mark.parametrize("name", MAMBAS)
def test_flops_count_the_maps_where_they_run(name):
    d, n = 16, 4
    dt_width = 1 if name == "fp_mamba1" else 4  # dt_rank or heads
    dt_proj = 2 * dt_width * d if name == "fp_mamba1" else 0  # FLOPs, once per step with dt_h_dep
    per_solve, per_step = block_of(block=name).flops_per_token()
    for b, c, dt in itertools.product([False, True], repeat=3):
        flops = block_of(block=name, b_h_dep=b, c_h_dep=c, dt_h_dep=dt).flops_per_token()
        missing_bc = 2 * d * n * (2 - b - c)  # the default has both maps
        expected_step = per_step - missing_bc + dt * (2 * d * dt_width + dt_proj)
        assert flops == (per_solve - dt * dt_proj, expected_step)


@pytest.mark.parametrize("name", MAMBAS)
def test_flops_of_the_scan_are_those_of_a_mamba_layer(name):
    """Mamba's authors count 9 FLOPs per number of the state."""
    small, large = (block_of(block=name, d_state=n, b_h_dep=False, c_h_dep=False) for n in (4, 12))
    assert large.flops_per_token()[1] - small.flops_per_token()[1] == 9 * 16 * (12 - 4)


@pytest.mark.parametrize("name", MAMBAS)
def test_the_gate_outside_reads_x_alone(name):
    """`gate_h_dep: false` removes the gate's map of sh(y), and changes nothing else."""
    with_map, without = block_of(block=name), block_of(block=name, gate_h_dep=False)
    removed = {"z_y_proj.direction", "z_y_proj.gain"}
    assert with_map.state_dict().keys() - without.state_dict().keys() == removed
    per_solve, per_step = with_map.flops_per_token()
    assert without.flops_per_token() == (per_solve - 2 * 16 * 16, per_step)
    without.load_state_dict({k: v for k, v in with_map.state_dict().items() if k not in removed})
    with torch.no_grad():
        with_map.z_y_proj.gain.zero_()
    u = torch.randn(2, 5, 8, dtype=without.D.dtype)
    torch.testing.assert_close(without(u), with_map(u))


def test_a_gate_inside_refuses_gate_h_dep_false():
    with pytest.raises(
        ValueError, match="gate_h_dep is False: with glu_in_loop the gate is inside"
    ):
        block_of(gate_h_dep=False, glu_in_loop=True)


@pytest.mark.parametrize("value", ["false", None, 0])
def test_value_that_is_no_bool_is_refused(value):
    for fields in ({"gate_h_dep": value}, {"layers": [{"fp_mamba1": {"gate_h_dep": value}}]}):
        with pytest.raises(ValueError, match=f"gate_h_dep is {value!r}: it must be true or false"):
            FPRNNConfig(n_layer=1, **fields)


def test_fp_rnn_refuses_fields_of_fp_mamba():
    invalid_fields = {"b_h_dep": False, "c_h_dep": False, "dt_h_dep": True, "gate_h_dep": False}
    for field, value in invalid_fields.items():
        for fp_rnn in ({"block": "fp_rnn"}, {"layers": "mamba fp_rnn", "n_layer": 2}):
            with pytest.raises(ValueError, match=f"{field} is {value}, which only fp_mamba1"):
                FPRNNConfig(**fp_rnn, **{field: value})
    FPRNNConfig(block="fp_rnn", b_h_dep=True, c_h_dep=True, dt_h_dep=False)
