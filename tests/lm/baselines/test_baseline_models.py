"""Every baseline: builds from the config, learns, saves, exports, pads; and what it refuses."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from lm.baselines import FIELDS
from lm.baselines.__main__ import count, table
from lm.baselines.deltanet import DeltaNetForCausalLM
from lm.common.errors import ConfigError
from lm.config import load as config
from lm.config.model import Model
from lm.config.schema import Config, Optim
from lm.export.export import write_export
from lm.training import optim
from lm.training.build import build_model

SIZES = {"d_model": 32, "n_layer": 2, "d_state": 8, "headdim": 16, "d_ff": 48}
BASELINES = {
    "mamba": {},
    "mamba2": {},
    "lstm": {},
    "gated_deltanet": {},
    "deltaproduct": {},
    "gated_deltaproduct": {"n_householder": 3},
    "rope": {"name": "transformer"},
    "nope": {"name": "transformer", "position": "nope"},
    "alibi": {"name": "transformer", "position": "alibi"},
}
OURS = [b for b in BASELINES if b not in ("mamba", "mamba2", "rope")]
each = pytest.mark.parametrize("baseline", BASELINES)
ours = pytest.mark.parametrize("baseline", OURS)


def build(baseline, seed=0, **fields):
    section = {"name": baseline, **SIZES, **BASELINES[baseline], **fields}
    torch.manual_seed(seed)
    return build_model(Config(model=section, data={"seq_len": 32}), 24, 0, 1)


def batch(rows=2, length=12, seed=0):
    return torch.randint(2, 24, (rows, length), generator=torch.Generator().manual_seed(seed))


@each
def test_the_loss_falls_on_one_batch(baseline):
    model = build(baseline).train()
    ids = batch(4, 17)
    labels = ids[:, 1:].contiguous()
    optimizer = torch.optim.AdamW(optim.parameter_groups(model, Optim(lr=1e-2)))
    losses = []
    for _ in range(20):
        loss = model(input_ids=ids[:, :-1], labels=labels, shift_labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.75 * losses[0], losses


@each
def test_loss_is_the_mean_cross_entropy_of_the_shifted_labels(baseline):
    model = build(baseline).eval()
    ids = batch()
    labels = ids.clone()
    labels[0, 5] = -100
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    with torch.no_grad():
        inside = model(input_ids=ids, labels=labels)
        outside = model(input_ids=ids, labels=shifted, shift_labels=shifted)
    expected = torch.nn.functional.cross_entropy(inside.logits.flatten(0, 1), shifted.flatten())
    assert inside.logits.dtype == torch.float32
    assert inside.loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert outside.loss.item() == pytest.approx(expected.item(), abs=1e-6)


@each
def test_causal(baseline):
    model = build(baseline).eval()
    ids = batch()
    changed = ids.clone()
    changed[:, 8:] = batch(seed=1)[:, 8:]
    with torch.no_grad():
        a, b = model(input_ids=ids).logits, model(input_ids=changed).logits
    torch.testing.assert_close(a[:, :8], b[:, :8], rtol=0, atol=1e-6)
    assert (a[:, 8:] - b[:, 8:]).abs().max() > 1e-3


@each
def test_bf16_autocast_is_finite_and_near(baseline):
    model = build(baseline).train()
    ids = batch()
    exact = model(input_ids=ids, labels=ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact.item(), abs=0.02)
    assert all(p.grad.isfinite().all() for p in model.parameters())


@each
def test_gradient_checkpointing_changes_nothing(baseline):
    ids, gradients = batch(), []
    for checkpointing in (False, True):
        model = build(baseline).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@each
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_save_and_load_is_exact(baseline, tied, tmp_path):
    model = build(baseline, tie_embeddings=tied).eval()
    same = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert same == tied
    model.save_pretrained(tmp_path)
    again, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.state_dict().keys() == again.state_dict().keys()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    with torch.no_grad():
        assert torch.equal(model(input_ids=batch()).logits, again.eval()(input_ids=batch()).logits)


@each
def test_left_padding_is_invisible(baseline):
    model = build(baseline).eval()
    ids = batch()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.no_grad():
        padded = model(input_ids=ids, attention_mask=mask).logits
        alone = model(input_ids=ids[:1, 5:]).logits
        plain = model(input_ids=ids).logits
    torch.testing.assert_close(padded[:1, 5:], alone, rtol=0, atol=2e-6)
    torch.testing.assert_close(padded[1:], plain[1:], rtol=0, atol=2e-6)
    assert padded.isfinite().all()


@pytest.mark.parametrize("baseline", [b for b in OURS if b not in ("nope", "alibi")])
def test_padding_in_the_middle_leaves_the_states_alone(baseline):
    model = build(baseline).eval()
    ids = batch(1)
    keep = [0, 1, 2, 5, 6, 8, 9, 10]
    mask = torch.zeros_like(ids)
    mask[:, keep] = 1
    with torch.no_grad():
        holed = model(input_ids=ids, attention_mask=mask).logits[:, keep]
        alone = model(input_ids=ids[:, keep]).logits
    torch.testing.assert_close(holed, alone, rtol=0, atol=2e-6)


@each
def test_greedy_generation_is_the_argmax_of_forward_passes(baseline):
    model = build(baseline).eval()
    ids = batch(1, 5)
    with torch.no_grad():
        expected = ids
        for _ in range(4):
            logits = model(input_ids=expected).logits[:, -1]
            logits[:, 0] = -torch.inf  # EOS would end it
            expected = torch.cat([expected, logits.argmax(-1, keepdim=True)], 1)
        got = model.generate(ids, max_new_tokens=4, do_sample=False, suppress_tokens=[0])
    assert torch.equal(got, expected)


@each
def test_weight_decay_spares_rates_norms_and_biases(baseline):
    model = build(baseline)
    _, without = optim.parameter_groups(model, Optim())
    names = {id(p): n for n, p in model.named_parameters()}
    spared = {names[id(p)] for p in without["params"]}
    rates = {n for n in names.values() if n.endswith("A_log")}  # a matrix in Mamba
    assert spared == rates | {n for n, p in model.named_parameters() if p.ndim < 2}
    assert any("norm" in n for n in spared)
    if baseline in ("gated_deltanet", "gated_deltaproduct"):
        assert {"model.layers.0.attn.A_log", "model.layers.0.attn.dt_bias"} <= spared


@each
def test_an_export_loads_and_computes_the_same(baseline, tmp_path):
    model = build(baseline).eval()
    write_export(model, tmp_path / "hf", None, baseline, "")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True).eval()
    assert type(again).__name__ == type(model).__name__
    assert type(again).__module__.startswith("transformers_modules") == (baseline in OURS)
    with torch.no_grad():
        assert torch.equal(model(input_ids=batch()).logits, again(input_ids=batch()).logits)


ELSEWHERE = """
import importlib.util, json, sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in str(f)]
sys.path[:] = [p for p in sys.path if not __import__("os").path.isdir(p + "/lm")]
assert importlib.util.find_spec("lm") is None
import torch
from transformers import AutoModelForCausalLM
totals = []
for path in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).eval()
    ids = torch.arange(2, 14).reshape(1, 12)
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape[1] > 12
    totals.append(model(input_ids=ids).logits.double().abs().sum().item())
print(json.dumps(totals))
"""


def test_exports_load_in_a_process_where_lm_is_not_importable(tmp_path):
    expected = []
    for baseline in OURS:
        model = build(baseline).eval()
        write_export(model, tmp_path / baseline, None, baseline, "")
        with torch.no_grad():
            logits = model(input_ids=torch.arange(2, 14).reshape(1, 12)).logits
        expected.append(logits.double().abs().sum().item())
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env.update(HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "home"), OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, "-P", "-c", ELSEWHERE, *(str(tmp_path / b) for b in OURS)],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == pytest.approx(expected, rel=1e-6)


# What the names and fields mean.


def test_deltaproduct_of_one_step_is_gated_deltanet():
    gated = build("gated_deltanet")
    product = build("gated_deltaproduct", n_householder=1, allow_neg_eigval=False)
    assert gated.state_dict().keys() == product.state_dict().keys()
    product.load_state_dict(gated.state_dict(), strict=True)
    with torch.no_grad():
        assert torch.equal(gated(input_ids=batch()).logits, product(input_ids=batch()).logits)


def test_negative_eigenvalues_by_name_and_by_field():
    def beta(*args, **kwargs):
        return build(*args, **kwargs).config.allow_neg_eigval

    assert not beta("gated_deltanet") and beta("deltaproduct") and beta("gated_deltaproduct")
    assert beta("gated_deltanet", allow_neg_eigval=True)
    assert not beta("gated_deltaproduct", allow_neg_eigval=False)


def test_fields_reach_the_model():
    model = build("gated_deltaproduct", n_heads=4, d_conv=3, expand=1, d_ff=40, n_householder=2)
    c = model.config
    sizes = (c.n_heads, c.d_conv, c.expand, c.d_ff, c.n_householder, c.forget_gate)
    assert sizes == (4, 3, 1, 40, 2, True)
    a = model.model.layers[0].attn
    assert a.k_proj.weight.shape == (64, 32) and a.q_conv1d.weight.shape == (32, 1, 3)
    assert (
        a.b_proj.weight.shape == (8, 32) and a.A_log.shape == (4,) and a.o_norm.weight.numel() == 8
    )
    assert not hasattr(build("deltaproduct").model.layers[0].attn, "A_log")
    mamba2 = build("mamba2", n_heads=8, ngroups=2).config
    assert (mamba2.num_heads, mamba2.head_dim, mamba2.n_groups) == (8, 8, 2)
    llama = build("rope", n_heads=2).config
    assert (llama.num_attention_heads, llama.head_dim, llama.intermediate_size) == (2, 16, 48)


@pytest.mark.parametrize("d_model, width", [(768, 2048), (512, 1408), (16, 64)])
def test_the_width_inside_the_swiglu(d_model, width):
    from lm.baselines.sizes import d_ff

    assert d_ff(Model(d_model=d_model)) == width


def test_the_short_convolution_and_the_gates_are_the_papers():
    """One DeltaNet layer written out in fp64, from its weights to its output."""
    model: DeltaNetForCausalLM = build("gated_deltaproduct", n_heads=2, n_householder=2).double()
    a = model.model.layers[0].attn
    x = torch.randn(1, 6, 32, dtype=torch.float64)

    def conv(proj, conv1d):
        u, w = proj(x)[0], conv1d.weight[:, 0]
        y = torch.zeros_like(u)
        for t in range(6):
            for lag in range(4):
                if t >= lag:
                    y[t] += w[:, 3 - lag] * u[t - lag]
        return torch.nn.functional.silu(y)

    q = conv(a.q_proj, a.q_conv1d).view(6, 2, 16)
    k = conv(a.k_proj, a.k_conv1d).view(6, 2, 2, 16)  # (token, step, head, dim)
    v = conv(a.v_proj, a.v_conv1d).view(6, 2, 2, 32)
    beta = 2 * torch.sigmoid(a.b_proj(x)[0]).view(6, 2, 2)
    softplus = torch.nn.functional.softplus(a.a_proj(x)[0] + a.dt_bias)
    alpha = torch.exp(-torch.exp(a.A_log) * softplus)
    z = a.g_proj(x)[0].view(6, 2, 32)
    o = torch.zeros(6, 2, 32, dtype=torch.float64)
    for h in range(2):
        S = torch.zeros(32, 16, dtype=torch.float64)
        for t in range(6):
            S = alpha[t, h] * S
            for j in range(2):
                kk = k[t, j, h] / torch.sqrt(k[t, j, h].square().sum() + 1e-6)
                S = S + beta[t, j, h] * torch.outer(v[t, j, h] - S @ kk, kk)
            o[t, h] = S @ q[t, h] / torch.sqrt(q[t, h].square().sum() + 1e-6) / 16**0.5
    o = o / torch.sqrt(o.square().mean(-1, keepdim=True) + 1e-5) * a.o_norm.weight
    expected = a.o_proj((o * torch.nn.functional.silu(z)).flatten(1))
    torch.testing.assert_close(a(x)[0], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("baseline", ["gated_deltanet", "deltaproduct", "gated_deltaproduct"])
def test_what_ends_a_residual_branch_starts_small(baseline):
    """σ = 0.02 / √(2 n_layer), whether the layer has parameters of its own or none."""
    model = build(baseline, n_layer=8)
    ends = [m for name, m in model.named_modules() if name.endswith(("o_proj", "down_proj"))]
    assert len(ends) == 16
    assert all(0.8 * 0.005 < end.weight.std() < 1.2 * 0.005 for end in ends)


def test_the_forget_gate_of_the_lstm_starts_open():
    bias = build("lstm").model.layers[1].lstm.bias_ih_l0
    assert bias[32:64].tolist() == [1.0] * 32 and bias.sum() == 32


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"name": "transformer", "n_heads": 5}, "model.n_heads is 5: it must divide d_model = 32"),
        ({"name": "gated_deltanet", "n_heads": 5}, "it must divide d_model = 32, as 4 does"),
        ({"name": "mamba2", "n_heads": 5}, "it must divide expand · d_model = 64, as 4 does"),
        ({"name": "mamba2", "headdim": 24}, "model.headdim is 24: it must divide expand"),
        ({"name": "mamba2", "ngroups": 3}, "model.ngroups is 3: it must divide the 4 heads"),
        ({"name": "transformer", "n_heads": 32}, "RoPE rotates pairs, so it must be even"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_go_together_are_refused(fields, message):
    with pytest.raises(ConfigError) as e:
        build_model(Config(model={**SIZES, **fields}), 16)
    assert message in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(
    "name, meant", [("mamba3", "mamba"), ("gated_delta_net", "gated_deltanet"), ("llstm", "lstm")]
)
def test_an_unknown_name_is_refused_with_the_nearest(name, meant):
    with pytest.raises(ConfigError, match=rf"did you mean `{meant}\d?`\?"):
        config.build({"model": name})


def test_fla_without_a_gpu_or_in_fp32_is_refused(monkeypatch):
    from lm.baselines import build as builders

    section = {"name": "gated_deltanet", "backend": "fla", **SIZES}
    monkeypatch.setattr(builders, "fla_missing", lambda: "there is no CUDA device")
    with pytest.raises(ConfigError, match="backend is fla, but there is no CUDA device: set it to"):
        build_model(Config(model=section), 16)
    monkeypatch.setattr(builders, "fla_missing", lambda: None)
    with pytest.raises(ConfigError, match=r"no fp32: set train\.precision to bf16, or"):
        build_model(Config(model=section), 16)
    cfg = Config(model=section, train={"precision": "bf16"})
    assert build_model(cfg, 16).config.backend == "auto"  # an export runs elsewhere too


def test_the_fields_of_the_baselines_are_in_the_schema():
    assert set(FIELDS) <= Model.model_fields.keys()


def test_the_table_counts_real_parameters():
    sizes = {"d_model": 32, "d_state": 8, "n_layer": 2, "d_ff": 48, "headdim": 16}
    total, rest = count(24, name="gated_deltanet", **sizes)
    assert total == sum(p.numel() for p in build("gated_deltanet").parameters())
    assert total - rest == 24 * 32


def test_the_page_shows_the_table():
    from tests.conftest import ROOT

    assert table() in (ROOT / "docs/baselines.md").read_text(encoding="utf-8")
