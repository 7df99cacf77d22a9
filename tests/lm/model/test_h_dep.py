"""Which of Q, B, C and Δ read sh(y) (the paper's Table 1): one iteration written out, solves."""

import itertools

import pytest
import torch

from lm.model import blocks
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM

FIELDS = ("mixer_h_dep", "b_h_dep", "c_h_dep", "dt_h_dep")
MAMBAS = ("fp_mamba1", "fp_mamba2")
COMBINATIONS = [
    dict(zip(FIELDS, on), block=name)
    for name in MAMBAS
    for on in itertools.product([False, True], repeat=4)
]
# A few of them that between them turn everything on and off, with what else changes the step.
SETTINGS = {
    "dt": dict(dt_h_dep=True),
    "dt_alone": dict(dt_h_dep=True, b_h_dep=False, c_h_dep=False, mixer_h_dep=False),
    "dt_and_c": dict(dt_h_dep=True, b_h_dep=False, glu_in_loop=True, use_short_conv=True),
    "b": dict(c_h_dep=False, mixer_h_dep=False, bc_norm=False),
    "nothing": dict(b_h_dep=False, c_h_dep=False, mixer_h_dep=False),
    "gate": dict(gate_h_dep=False),
    "mamba2_dt": dict(block="fp_mamba2", dt_h_dep=True, ngroups=2),
    "mamba2_dt_alone": dict(
        block="fp_mamba2", dt_h_dep=True, b_h_dep=False, c_h_dep=False, mixer_h_dep=False
    ),
    "mamba2_dt_and_b": dict(
        block="fp_mamba2", dt_h_dep=True, c_h_dep=False, glu_in_loop=True, use_short_conv=True
    ),
    "mamba2_c": dict(
        block="fp_mamba2", b_h_dep=False, gate_h_dep=False, symm_mixer=True, ngroups=2
    ),
    "mamba2_nothing": dict(block="fp_mamba2", b_h_dep=False, c_h_dep=False, mixer_h_dep=False),
}
every_setting = pytest.mark.parametrize("name", SETTINGS)


def label(combination):
    on = [name.removesuffix("_h_dep") for name in FIELDS if combination[name]]
    return "-".join([combination["block"], *(on or ["nothing"])])


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


@pytest.mark.parametrize("combination", COMBINATIONS, ids=label)
@torch.no_grad()
def test_a_token_moves_what_reads_it_one_later_and_nothing_else(combination, monkeypatch):
    block, seen = block_of(**combination), []
    scan = "selective_scan" if combination["block"] == "fp_mamba1" else "ssd_scan"
    original = getattr(blocks, scan)
    # Decays are made once where they read x alone and the scan has a use for them.
    once = not combination["dt_h_dep"]
    once &= blocks.backend(scan, torch.zeros(())) is None

    def spy(x, dt, A, B, C, h0=None, keep=None, decays=None):
        assert (decays is not None) == once
        seen[-1].update(x=x.flatten(2), dt_h_dep=dt, b_h_dep=B.flatten(2), c_h_dep=C.flatten(2))
        return original(x, dt, A, B, C, h0, keep, decays)

    monkeypatch.setattr(blocks, scan, spy)
    mix = block.mixer.mix

    def reading(raw, *args):
        seen.append({"mixer_h_dep": raw})
        return mix(raw, *args)

    monkeypatch.setattr(block.mixer, "mix", reading)
    s, y = block.prepare(normal(1, 9, 8)), normal(1, 9, 16, seed=2)
    moved = y.clone()
    moved[:, 3] += normal(1, 16, seed=3)
    outputs = [block.step(s, y), block.step(s, moved)]
    assert len(seen) == 2

    def tokens(name):
        return (seen[0][name] != seen[1][name]).any(-1).flatten().nonzero().flatten().tolist()

    assert {name: tokens(name) for name in FIELDS} == {
        name: [4] if combination[name] else [] for name in FIELDS
    }
    # The iterate itself is mixed in whatever reads sh(y): x̃ = Q x + (I − Q) y.
    assert tokens("x") == ([3, 4] if combination["mixer_h_dep"] else [3])
    differ = (outputs[0] != outputs[1]).any(-1).flatten().nonzero().flatten().tolist()
    assert differ and min(differ) == 3


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


def test_the_defaults_have_the_parameters_they_had():
    common = {
        "A_log", "D", "bc_y_proj.gain", "bc_y_proj.direction", "in_proj.weight",
        "mixer.alpha_proj.bias", "mixer.alpha_proj.gain", "mixer.alpha_proj.direction",
        "mixer.u_proj.gain", "mixer.u_proj.direction", "out_norm.weight", "out_proj.weight",
        "z_y_proj.gain", "z_y_proj.direction",
    }  # fmt: skip
    own = {
        "fp_mamba1": {"dt_proj.bias", "dt_proj.weight", "out_norm.bias", "x_proj.weight"},
        "fp_mamba2": {"dt_bias"},
    }
    for name in MAMBAS:
        assert block_of(block=name, contractive=None).state_dict().keys() == common | own[name]


@torch.no_grad()
def test_dt_y_proj_starts_as_the_other_weight_normalised_maps():
    torch.manual_seed(0)
    config = FPRNNConfig(vocab_size=8, d_model=32, n_layer=1, dt_h_dep=True)
    weights = FPRNNForCausalLM(config).backbone.layers[0].block.dt_y_proj
    torch.testing.assert_close(weights.matrix(), weights.direction)  # gain is the row's norm
    bound = 64**-0.5  # kaiming_uniform(a=√5) on fan-in 64
    assert 0.9 * bound < weights.weight.abs().max() <= bound


# One iteration against docs/model.md, a token at a time.


# The solve.


@every_setting
def test_bf16_stays_near_fp32_and_trains(name, tmp_path):
    model = model_of(torch.float32, **SETTINGS[name], tol=1e-3)
    with torch.no_grad():
        exact = model(ids()).logits
        with torch.autocast("cpu", torch.bfloat16):
            low = model(ids()).logits
        model.save_pretrained(tmp_path)
        loaded = FPRNNForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        stored = loaded.eval()(ids()).logits
    for logits in (low, stored):
        assert logits.dtype == torch.float32
        assert (logits - exact).abs().max() < 0.1 * exact.abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        model.train()(ids(), labels=ids()).loss.backward()
    for parameter, p in model.named_parameters():
        assert torch.isfinite(p.grad).all() and p.grad.abs().max() > 0, parameter


# What stands around it.


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
