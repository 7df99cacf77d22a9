"""Tests of the HuggingFace classes: loss, saving, loading, initialization, configuration."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import fprnn  # noqa: F401 (registers the Auto classes)
from lm.model.configuration_fprnn import REMOVED_FIELDS, FPRNNConfig
from lm.model.fields import FIELDS_BY_KIND, FIXED_POINT_KINDS, GATED_MIXERS
from lm.model.layers import ShortConv
from lm.model.modeling_fprnn import FPRNNForCausalLM, FPRNNModel


def small(**kwargs):
    torch.manual_seed(0)
    defaults = dict(vocab_size=50, d_model=16, n_layer=2, d_state=4, glu_in_loop=True)
    return FPRNNForCausalLM(FPRNNConfig(**{**defaults, **kwargs}))


def ids(b=2, length=12, seed=0):
    return torch.randint(1, 50, (b, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tied", [True, False])
def test_config_json_has_transformers_key_for_tied_heads(tied, tmp_path):
    FPRNNConfig(tie_embeddings=tied).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    written = json.loads(file.read_text())
    assert written["tie_word_embeddings"] is tied and "tie_embeddings" not in written
    assert FPRNNConfig.from_pretrained(tmp_path).to_dict()["tie_word_embeddings"] is tied
    # The key of older exports.
    written["tie_embeddings"] = written.pop("tie_word_embeddings")
    file.write_text(json.dumps(written))
    for loaded in (FPRNNConfig.from_pretrained(tmp_path), FPRNNConfig(**written)):
        assert loaded.tie_embeddings is loaded.tie_word_embeddings is tied
        assert loaded.to_dict()["tie_word_embeddings"] is tied
    changed = FPRNNConfig.from_pretrained(tmp_path, tie_embeddings=not tied)
    assert changed.tie_word_embeddings is not tied


def test_loss_shifts_labels_or_accepts_shift_labels():
    model = small().eval()
    x = ids()
    out = model(x, labels=x)
    expected = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)
    shifted = F.pad(x[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(model(x, shift_labels=shifted).loss, expected)


def test_chunked_loss_equals_the_loss_and_its_gradient(monkeypatch):
    from lm.model import modeling_fprnn

    monkeypatch.setattr(modeling_fprnn, "LOSS_CHUNK_TOKENS", 7)
    labels = ids(seed=1)
    labels[0, :5] = -100
    grads, losses = [], []
    for loss_only in (False, True):
        model = small().train()
        out = model(ids(), shift_labels=labels, loss_only=loss_only)
        assert (out.logits is None) == loss_only
        out.loss.backward()
        losses.append(out.loss.detach())
        grads.append({n: p.grad for n, p in model.named_parameters()})
    torch.testing.assert_close(losses[0], losses[1])
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, msg=name)


def test_loss_without_targets_is_zero():
    out = small()(ids(), shift_labels=torch.full((2, 12), -100), loss_only=True)
    assert out.loss.item() == 0
    out.loss.backward()


def test_initialization_equals_mambas():
    model = small(d_state=6, n_layer=4)
    block = model.backbone.layers[0].block
    expected = torch.arange(1, 7).float().log().expand(32, 6)
    torch.testing.assert_close(block.A_log.detach(), expected)
    assert (block.D == 1).all() and (block.out_norm.weight == 1).all()
    dt = F.softplus(block.dt_proj.bias)
    assert dt.min() >= 1e-3 * 0.99 and dt.max() <= 0.1 * 1.01 and dt.max() / dt.min() > 5
    assert abs(model.backbone.embeddings.weight.std() - 0.02) < 0.003
    bound = (1 / 32) ** 0.5 / 4**0.5  # kaiming_uniform(a=√5) on fan-in 32, over √n_layer
    assert block.out_proj.weight.abs().max() <= bound * 1.001
    assert block.out_proj.weight.abs().max() > bound * 0.9
    bc_y_proj = block.bc_y_proj
    torch.testing.assert_close(bc_y_proj.matrix(), bc_y_proj.direction)  # gain: the row's norm
    assert (block.mixer.alpha_proj.bias == 0).all()


def test_initial_output_scales_are_as_configured():
    """`embedding_init_std` and `out_proj_init_scale` change no other weights."""
    layers = dict(layers="fp_mamba1 mamba", n_layer=2)
    torch.manual_seed(3)
    plain = dict(small(**layers).named_parameters())
    torch.manual_seed(3)
    fields = dict(embedding_init_std=0.1, out_proj_init_scale=0.5)
    scaled = dict(small(**layers, **fields).named_parameters())
    factors = {
        "backbone.embeddings.weight": 5.0,  # 0.1 / 0.02, the default
        "backbone.layers.0.block.out_proj.weight": 0.5,
    }
    for name, weight in plain.items():
        torch.testing.assert_close(scaled[name], factors.get(name, 1.0) * weight)


@pytest.mark.parametrize(("kind", "count"), [("fp_mamba1", 1), ("fp_mamba2", 1), ("fp_rnn", 5)])
def test_convolutions_start_near_the_identity_if_configured(kind, count):
    def build_weights(identity):
        options = {"use_short_conv": True, "short_conv_identity_init": identity}
        layers = [{kind: options}, "mamba"]
        model = small(layers=layers, headdim=8, glu_in_loop=False)
        weights = model.state_dict()
        convolutions = [m for m in model.modules() if isinstance(m, ShortConv)]
        assert len(convolutions) == count + 1
        return weights, [conv.weight for conv in convolutions]

    weights, ordinary = build_weights(False)
    weights_near_identity, near_identity = build_weights(True)
    for old, new in zip(ordinary[:-1], near_identity[:-1], strict=True):
        torch.testing.assert_close(new, old + torch.tensor([0, 0, 0, 2.0]))
    same = [torch.equal(weight, weights_near_identity[name]) for name, weight in weights.items()]
    assert same.count(False) == count  # the convolution of the Mamba layer starts as always


def test_a_layer_may_be_narrower_than_the_model():
    model = small(layers=[{"fp_mamba1": {"expand": 0.25}}, "mamba"], n_layer=2)
    narrow, wide = (layer.block for layer in model.backbone.layers)
    assert narrow.out_proj.weight.shape == (16, 4) and wide.out_proj.weight.shape == (16, 32)
    assert model(ids()).logits.shape[-1] == model.config.vocab_size
    with pytest.raises(ValueError, match=r"expand is 0.3: .* 0.3 · 16 is not; 0.3125 gives 5"):
        small(expand=0.3)
    assert small(d_model=100, expand=0.57).config.d_inner == 57
    with pytest.raises(ValueError, match=r"0.3 · 7 is not; 0.285714286 gives 2"):
        small(d_model=7, expand=0.3)
    assert small(d_model=7, expand=0.285714286).config.d_inner == 2
    for kind, fields, message in [
        (
            "kda",
            {"expand": 0.25, "n_heads": 8},
            "also divide d_inner = expand · d_model = 4, for",
        ),
        ("slstm", {"n_heads": 16}, "normalises each head, so a head must have more than one"),
    ]:
        with pytest.raises(ValueError, match=message):
            small(layers=kind, **fields)
    whole = small(expand=2.0).config
    assert isinstance(whole.expand, int) and whole.d_inner == 32


# The lstm layer has no out_proj.
@pytest.mark.parametrize("kind", [kind for kind in FIELDS_BY_KIND if kind != "lstm"])
def test_every_layers_output_starts_small_in_a_deep_stack(kind, tmp_path):
    """Kaiming's bound over √n_layer; loaded weights are not scaled again."""
    n_layer = 4
    block = kind if kind in FIXED_POINT_KINDS else "fp_mamba1"
    fields = dict(layers=kind, block=block, headdim=8, glu_in_loop=False, mixer="dplr")
    model = small(n_layer=n_layer, **fields)
    for layer in model.backbone.layers:
        weight = layer.block.out_proj.weight.detach()
        bound = weight.shape[1] ** -0.5 / n_layer**0.5
        assert 0.9 * bound < weight.abs().max() <= bound * 1.001
    model.save_pretrained(tmp_path)
    loaded = FPRNNForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(v, loaded.state_dict()[k]) for k, v in model.state_dict().items())


def test_weights_missing_in_a_checkpoint_are_initialized(tmp_path):
    """A layer with its own parameters, without some of its children's."""
    model = small(n_layer=16, layers="fp_mamba1 attention", mixer_gate_init_bias=-3.0)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept_weights = {k: v for k, v in weights.items() if not ("mixer." in k or "out_proj" in k)}
    save_file(kept_weights, tmp_path / "model.safetensors")
    loaded = FPRNNForCausalLM.from_pretrained(tmp_path)
    for layer in loaded.backbone.layers:
        weight = layer.block.out_proj.weight
        bound = weight.shape[1] ** -0.5 / 16**0.5
        assert 0.9 * bound < weight.detach().abs().max() <= bound * 1.001
    assert loaded.backbone.layers[0].block.mixer.alpha_proj.bias.item() == -3.0
    state_dict = loaded.state_dict()
    assert all(torch.equal(state_dict[k], v) for k, v in kept_weights.items())


def test_loaded_layer_is_not_initialized(tmp_path, monkeypatch):
    """`_init_weights` gets no module with parameters: a quantizer may have moved them."""
    model = small(layers="fp_mamba1 attention mlp", n_layer=3)
    model.save_pretrained(tmp_path)
    initialized = []
    init_weights = FPRNNForCausalLM._init_weights

    def record_module(self, module):
        initialized.append(module)
        init_weights(self, module)

    monkeypatch.setattr(FPRNNForCausalLM, "_init_weights", record_module)
    FPRNNForCausalLM.from_pretrained(tmp_path)
    assert not any(list(module.parameters()) for module in initialized)


@pytest.mark.parametrize("block", ["fp_mamba1", "fp_rnn"])
@pytest.mark.parametrize("mixer", GATED_MIXERS)
@torch.no_grad()
def test_a_mixer_starts_near_the_identity(mixer, block):
    """‖I − Q‖ of new weights falls with σ(mixer_gate_init_bias); loaded weights do not change."""
    norms = {}
    for start in (0.0, -3.0, -6.0):
        config = dict(mixer=mixer, mixer_rank=2, contractive=None, mixer_gate_init_bias=start)
        model = small(block=block, glu_in_loop=False, **config)
        module = model.backbone.layers[1].block.mixer
        P = torch.randn(5, 2 * module.d_inner, generator=torch.Generator().manual_seed(0))
        M = torch.eye(module.d_inner) - module.matrix(P)
        norms[start] = torch.linalg.matrix_norm(M, 2).max()
        biases = {k: v for k, v in model.state_dict().items() if k.endswith("_proj.bias")}
        gates = [v for k, v in biases.items() if "alpha_proj" in k or "gate_proj" in k]
        assert gates and all((gate == start).all() for gate in gates)
    assert norms[-3.0] < norms[0.0] / 2 and norms[-6.0] < 0.15 * norms[-3.0]


def test_full_rank_mixers_start_near_the_identity():
    """This holds for exact tokens of FP-Mamba, and only if the field is "auto"."""

    def resolve_bias(**fields):
        return FPRNNConfig(**fields).mixer_gate_init_bias

    assert {resolve_bias(mixer=mixer) for mixer in ("kronecker", "monarch", "mixture")} == {-3.0}
    assert {resolve_bias(mixer=mixer) for mixer in ("householder", "dplr", "nonselective")} == {0.0}
    for fields in (
        dict(token="iterate"),
        dict(stopping="paper"),
        dict(block="fp_rnn"),
        dict(mixer_gate_init_bias=0.0),
    ):
        assert resolve_bias(mixer="kronecker", **fields) == 0
    hybrid = FPRNNConfig(n_layer=2, layers=["fp_mamba1", {"fp_mamba1": {"mixer": "monarch"}}])
    assert [hybrid.layer_config(layer).mixer_gate_init_bias for layer in hybrid.layer_list()] == [
        0,
        -3,
    ]


def test_loaded_gate_is_not_initialized(tmp_path):
    model = small(mixer_gate_init_bias=-3.0)
    with torch.no_grad():
        model.backbone.layers[0].block.mixer.alpha_proj.bias.fill_(0.25)
    model.save_pretrained(tmp_path)
    loaded = FPRNNForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.mixer_gate_init_bias == -3.0
    biases = [layer.block.mixer.alpha_proj.bias.item() for layer in loaded.backbone.layers]
    assert biases == [0.25, -3.0]


def test_loaded_convolution_is_not_initialized_again(tmp_path):
    options = {"use_short_conv": True, "short_conv_identity_init": True}
    model = small(layers=[{"fp_mamba1": options}], n_layer=1, glu_in_loop=False)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["backbone.layers.0.block.D"]  # the block then has a weight to initialize
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = FPRNNForCausalLM.from_pretrained(tmp_path)
    name = "backbone.layers.0.block.conv1d.weight"
    assert torch.equal(loaded.state_dict()[name], model.state_dict()[name])


def test_identity_init_without_a_convolution_is_refused():
    with pytest.raises(
        ValueError, match=r"fp_mamba1: short_conv_identity_init is True.* use_short_conv"
    ):
        small(layers=[{"fp_mamba1": {"short_conv_identity_init": True}}])


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            dict(mixer="nonselective", mixer_gate_init_bias=-3),
            "is only for mixers with gates .householder,",
        ),
        (dict(mixer_gate_init_bias=-21), "must be a number from -20 to 20"),
        (dict(mixer_gate_init_bias="closed"), "must be a number from -20 to 20, or auto"),
    ],
)
def test_invalid_gate_bias_is_refused(fields, message):
    with pytest.raises(ValueError, match=f"mixer_gate_init_bias.*{message}"):
        small(**fields)


def test_auto_classes_load_model_and_backbone():
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model("fprnn", vocab_size=50, d_model=16, n_layer=1)
    assert isinstance(AutoModel.from_config(config), FPRNNModel)


@pytest.mark.parametrize(
    "field, value",
    [
        ("mixer_act", "gelu"),
        ("eigen_range", "postive"),
        ("kronecker_norm", "spectrall"),
        ("contractive", 2.0),
        ("contractive", 0.0),
        ("contractive", "none"),
        ("tol", float("nan")),
        ("tol", -1.0),
        ("eval_tol", "loose"),
        ("quantile", -24),
        ("stepsize", 3),
        ("state_noise", -1.0),
        ("stopping", "papper"),
        ("dt_rank", 0),
    ],
)
def test_invalid_value_is_refused_also_when_set_later(field, value):
    with pytest.raises(ValueError, match=field):
        FPRNNConfig(**{field: value})
    config = FPRNNConfig(vocab_size=8, d_model=8, n_layer=1)
    setattr(config, field, value)  # as from_pretrained does with overrides
    with pytest.raises(ValueError, match=field):
        FPRNNForCausalLM(config)


@pytest.mark.parametrize("name, value", REMOVED_FIELDS.items())
def test_removed_field_is_read_with_its_only_value(name, value):
    assert name not in FPRNNConfig(**{name: value}).to_dict()
    with pytest.raises(ValueError, match=rf"{name} is 'x', and the field was removed: every model"):
        FPRNNConfig(**{name: "x"})


def test_auto_that_is_set_later_is_resolved():
    config = FPRNNConfig(vocab_size=8, d_model=8, n_layer=1, block="fp_rnn", mixer="kronecker")
    config.kronecker_norm = config.contractive = config.quantile = "auto"
    config = FPRNNForCausalLM(config).config
    assert (config.kronecker_norm, config.contractive, config.quantile) == ("spectral", None, 0.9)


def test_loss_only_refuses_logits_to_keep():
    model, ids = FPRNNForCausalLM(FPRNNConfig(vocab_size=8, d_model=8, n_layer=1)), torch.arange(8)
    with pytest.raises(ValueError, match="logits_to_keep must be 0"):
        model(ids[None], labels=ids[None], loss_only=True, logits_to_keep=3)


def test_eos_outside_the_vocabulary_matches_no_embedding():
    config = FPRNNConfig(vocab_size=8, d_model=8, n_layer=1, eos_token_id=99)
    model = FPRNNForCausalLM(config).eval()
    ids = torch.arange(8)[None]
    embedded = model.get_input_embeddings()(ids)
    torch.testing.assert_close(model(inputs_embeds=embedded).logits, model(ids).logits)
