"""Tests of layer patterns: their parser, layers next to transformers' layers, whole hybrids."""

import pytest
import torch
from transformers import (
    LlamaConfig,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRotaryEmbedding,
)

from lm.model.baseline_layers import Attention, GatedMLP, rotate
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.fields import FIELDS_BY_KIND, Layer, parse_layers
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.model.solver import NonFiniteError
from lm.model.state import Sequences

SIZES = dict(vocab_size=24, d_model=32, d_state=4, headdim=8, reset_at_eos=False)
HYBRID = "mamba fp_mamba1 attention mlp mamba2"
HYBRIDS = {
    "all": dict(layers=HYBRID, n_layer=5),
    "second": dict(layers="mamba2 fp_mamba2 attention", n_layer=3),
    "delta": dict(layers="gated_deltanet gated_deltaproduct fp_mamba1", n_layer=3),
    "baselines": dict(layers="lstm deltaproduct", n_layer=2),
    "newer": dict(layers="kda rwkv7 slstm fp_mamba1", n_layer=4),
    "newest": dict(layers="mamba3 m2rnn fp_mamba1", n_layer=3),
    "no fixed point": dict(layers="mamba attention", n_layer=2),
}


def build(seed=0, dtype=torch.float64, **fields):
    torch.manual_seed(seed)
    return FPRNNForCausalLM(FPRNNConfig(**{**SIZES, **fields})).to(dtype)


def ids_of(batch, length, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, SIZES["vocab_size"], (batch, length), generator=generator)


# The parser.


def test_a_text_and_a_list_name_the_same_layers():
    line = parse_layers("mamba*2 fp_mamba1 attention", 4)
    assert [layer.kind for layer in line] == ["mamba", "mamba", "fp_mamba1", "attention"]
    assert parse_layers(["mamba*2", "fp_mamba1 attention"], 4) == line
    assert parse_layers("mamba fp_mamba1", 4) == parse_layers("mamba fp_mamba1 mamba fp_mamba1", 4)
    with_options = parse_layers([{"fp_mamba1*2": {"mixer_rank": 3}}, "mlp"], 3)
    assert with_options == [Layer("fp_mamba1", {"mixer_rank": 3})] * 2 + [Layer("mlp", {})]


@pytest.mark.parametrize(
    "layers, n_layer, message",
    [
        ("mamba fp_mambo1", 2, r"`fp_mambo1` \(did you mean fp_mamba1\?\): the kinds are"),
        ("mamba*0", 1, r"`mamba\*0`: a count is a whole number above 0, as in mamba\*3"),
        ("mamba*x", 1, r"`mamba\*x`: a count"),
        ("", 1, "layers is empty"),
        ([], 1, "layers is empty"),
        (3, 1, "it must be a text such as"),
        (["mamba", 3], 2, "it must be a text such as"),
        ("mamba*3 fp_mamba1", 6, "4 layers, and n_layer is 6: n_layer must be 4, or a .* 8"),
        ([{"mamba": {"mixer": "dplr"}}], 1, "gives `mixer` to mamba: its options are expand"),
        ([{"mlp": {"dff": 3}}], 1, r"gives `dff` to mlp \(did you mean d_ff\?\)"),
        ([{"mlp": 3}], 1, "is a mapping of one kind to its options"),
        ([{"mlp": {}, "mamba": {}}], 1, "is a mapping of one kind to its options"),
        ("fp_mamba1 fp_rnn", 2, "fp_mamba1 and fp_rnn: all fixed-point layers of a model"),
        ([{"mamba2": {"headdim": 24}}], 1, "layers, mamba2: headdim is 24: it must divide"),
        ([{"attention": {"n_heads": 5}}], 1, "layers, attention: n_heads is 5 .* example 4"),
        ([{"attention": {"n_heads": 32}}], 1, "RoPE rotates pairs"),
        ([{"gated_deltanet": {"n_heads": 5}}], 1, "gated_deltanet: n_heads is 5 .* example 4"),
        ([{"gated_deltanet": {"n_householder": 2}}], 1, "gives `n_householder` to gated_deltanet"),
        ([{"gated_deltaproduct": {"n_householder": 0}}], 1, "n_householder is 0: it must be"),
        ([{"gated_deltaproduct": {"allow_neg_eigval": 3}}], 1, "must be true or false, or auto"),
        ("gated_delta_net", 1, r"did you mean gated_deltanet\?"),
        ([{"fp_mamba1": {"mixer": "monarch", "mixer_rank": 5}}], 1, "mixer_rank is 5: for monarch"),
    ],
)
def test_invalid_pattern_is_refused(layers, n_layer, message):
    with pytest.raises(ValueError, match=message):
        FPRNNConfig(**{**SIZES, "layers": layers, "n_layer": n_layer})


def test_every_option_is_a_field():
    fields = FPRNNConfig().to_dict()
    assert {name for options in FIELDS_BY_KIND.values() for name in options} <= fields.keys()


def test_an_option_is_of_its_layer_alone():
    model = build(layers=["fp_mamba1", {"fp_mamba1": {"mixer_rank": 3, "d_state": 6}}], n_layer=2)
    one, other = (layer.block for layer in model.backbone.layers)
    assert (one.config.mixer_rank, other.config.mixer_rank) == (1, 3)
    assert (one.A_log.shape[1], other.A_log.shape[1]) == (4, 6)
    bounded = FPRNNConfig(**SIZES, n_layer=2, layers=["fp_rnn", {"fp_rnn": {"mixer": "monarch"}}])
    assert [bounded.layer_config(layer).contractive for layer in bounded.layer_list()] == [
        None,
        0.95,
    ]


# The layers.


def test_a_pattern_of_equal_layers_is_the_pure_stack():
    pure, pattern = build(n_layer=2), build(n_layer=2, layers="fp_mamba1")
    ids = ids_of(2, 9)
    assert torch.equal(pure(ids).logits, pattern(ids).logits)


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_mamba_equals_transformers_mamba(kind):
    ours = build(dtype=torch.float32, n_layer=2, layers=kind, tie_embeddings=False)
    common = dict(vocab_size=24, hidden_size=32, num_hidden_layers=2, state_size=4, expand=2)
    common |= dict(tie_word_embeddings=False, use_cache=False)
    if kind == "mamba":
        theirs = MambaForCausalLM(MambaConfig(time_step_rank=2, **common))
    else:
        theirs = Mamba2ForCausalLM(
            Mamba2Config(num_heads=8, head_dim=8, n_groups=1, chunk_size=16, **common)
        )
    names = {name.replace(".block.", ".mixer."): p for name, p in ours.state_dict().items()}
    assert theirs.load_state_dict(names, strict=False).unexpected_keys == []
    ids = ids_of(2, 20)
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=2e-5, rtol=1e-4)


def test_attention_equals_llamas():
    config = FPRNNConfig(**SIZES, n_layer=1, layers="attention", n_heads=4)
    torch.manual_seed(0)
    ours = Attention(config).double()
    llama = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=64)
    theirs = LlamaAttention(llama, 0).double()
    theirs.config._attn_implementation = "sdpa"
    names = {k.replace("out_proj", "o_proj"): p for k, p in ours.state_dict().items()}
    theirs.load_state_dict(names)
    u = torch.randn(2, 13, 32, dtype=torch.float64)
    rotary = LlamaRotaryEmbedding(llama).double()(u, torch.arange(13)[None])
    expected, _ = theirs(u, position_embeddings=rotary, attention_mask=None)
    torch.testing.assert_close(ours(u)[0], expected, atol=1e-6, rtol=1e-5)  # their angles are fp32


def test_the_mlp_equals_llamas():
    torch.manual_seed(0)
    ours = GatedMLP(FPRNNConfig(**SIZES, n_layer=1, layers="mlp"))
    theirs = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=128))
    gate, up = ours.in_proj.weight.chunk(2)
    parts = {"gate_proj": gate, "up_proj": up, "down_proj": ours.out_proj.weight}
    theirs.load_state_dict({f"{name}.weight": p for name, p in parts.items()})
    u = torch.randn(2, 5, 32)
    torch.testing.assert_close(ours(u)[0], theirs(u))


def test_attention_reads_only_earlier_tokens_of_its_document():
    """The test computes every query separately."""
    config = FPRNNConfig(**SIZES, n_layer=1, layers="attention", n_heads=2)
    torch.manual_seed(0)
    layer = Attention(config).double()
    u = torch.randn(1, 7, 32, dtype=torch.float64)
    starts = torch.tensor([[False, False, True, False, False, False, True]])
    output = layer(u, Sequences(starts=starts))[0]
    q, k, v = (p(u[0]).view(7, 2, 16) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = (rotate(x[None], torch.arange(7)[None])[0] for x in (q, k))
    for t, first in enumerate([0, 0, 2, 2, 2, 2, 6]):  # first token of t's document
        scores = torch.einsum("he,jhe->hj", q[t], k[first : t + 1]) / 4
        o = torch.einsum("hj,jhe->he", scores.softmax(-1), v[first : t + 1])
        torch.testing.assert_close(output[0, t], layer.out_proj(o.flatten()))


# The whole model.


@pytest.fixture(params=HYBRIDS)
def hybrid(request):
    return build(**HYBRIDS[request.param]).eval()


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-6)


def test_segments_and_single_tokens_equal_the_whole(hybrid):
    ids = ids_of(2, 11)
    whole = hybrid(ids).logits
    state, parts = None, []
    for part in ids.split([4, 1, 5, 1], 1):
        output = hybrid(part, state=state, return_state=True)
        parts.append(output.logits)
        state = output.state
    assert_close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_state_after_padding_equals_the_state_without_padding(hybrid, side):
    ids, more = ids_of(2, 8), ids_of(2, 5, seed=2)
    mask = torch.ones_like(ids)
    mask[1, slice(0, 3) if side == "left" else slice(5, 8)] = 0
    state = hybrid(ids, attention_mask=mask, return_state=True).state
    logits = hybrid(more, state=state).logits
    alone = torch.cat([ids[1:, 3:] if side == "left" else ids[1:, :5], more[1:]], 1)
    assert_close(logits[:1], hybrid(torch.cat([ids, more], 1)[:1]).logits[:, 8:])
    assert_close(logits[1:], hybrid(alone).logits[:, 5:])


def test_packed_documents_equal_the_documents_alone(hybrid):
    ids = ids_of(1, 12)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4]])
    whole = hybrid(ids, position_ids=positions).logits
    for start, end in ((0, 5), (5, 7), (7, 12)):
        assert_close(whole[:, start:end], hybrid(ids[:, start:end]).logits)
    state = hybrid(ids[:, :9], position_ids=positions[:, :9], return_state=True).state
    assert_close(hybrid(ids[:, 9:], state=state).logits, whole[:, 9:])
    # The first token of a segment may start a document.
    new_document = hybrid(ids[:, 7:], state=state, position_ids=positions[:, 7:]).logits
    assert_close(new_document, whole[:, 7:])


def test_a_state_of_another_model_is_refused(hybrid):
    state = build(n_layer=len(hybrid.backbone.layers)).eval()(ids_of(2, 3), return_state=True).state
    with pytest.raises(ValueError, match="the state is of another model: layer 0 of the state has"):
        hybrid(ids_of(2, 3), state=state)
    own = hybrid(ids_of(2, 3), return_state=True).state
    with pytest.raises(ValueError, match="of a batch of 2 sequences, the input has 3"):
        hybrid(ids_of(3, 3), state=own)


def test_the_report_has_only_the_fixed_point_layers():
    model = build(layers="mamba fp_mamba1 attention fp_mamba1", n_layer=4)
    report = model(ids_of(2, 5), count_iterations=True).fixed_point
    assert report.evaluations.shape == (2, 2) and report.num_iters.shape == (2, 2)
    none = build(layers="mamba", n_layer=1)
    assert none(ids_of(1, 3)).fixed_point is None and none.solver() == "none"


def test_solver_fields_of_the_model_hold_in_its_layers():
    model = build(layers="mamba fp_mamba1", n_layer=2)
    model.config.tol, tolerances = 0.5, []
    block = model.fixed_point_blocks()[0]

    def record_tol(block, args):  # args: u, seqs, …
        tolerances.append(block.get_settings(args[1]).tol)

    block.register_forward_pre_hook(record_tol)
    model(ids_of(1, 3))
    with model.solving(schedule="parallel", tol=1e-3):
        model(ids_of(1, 3))
        assert model.solver()["schedule"] == "parallel"
    assert tolerances == [0.5, 1e-3]


def test_flops_are_those_of_the_layers():
    mamba, attention, both = (
        build(layers=layers, n_layer=len(layers.split())).flops_per_token(1, length=100)
        for layers in ("mamba", "attention", "mamba attention")
    )
    head = 3 * 2 * 24 * 32  # three times the forward: 2 · vocab_size · d_model
    assert both == mamba + attention - head
    # Four maps of 32 × 32; scores and values over 50 of 100 tokens on average.
    assert attention - head == 3 * (2 * 4 * 32 * 32 + 2 * 2 * 50 * 32)


def test_nonfinite_error_names_the_kind_of_the_layer():
    model = build(layers="mamba fp_rnn", n_layer=2, dtype=torch.float32)
    with torch.no_grad():
        model.backbone.layers[0].block.in_proj.weight.fill_(1e38)
    with pytest.raises(NonFiniteError, match=r"^layer 0: .* activations of the mamba grew") as e:
        model(ids_of(1, 3))
    assert "mixer" not in str(e.value)
