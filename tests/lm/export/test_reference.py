"""Checkpoints of the paper's code become ours number for number, or are refused name by name."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file

from lm.export import reference
from lm.export.reference import (
    ReferenceCheckpointError,
    import_reference,
    known_keys,
    reference_config,
    reference_name,
)
from tests import paper
from tests.golden import HERE
from tests.running import fprnn

CASE = json.loads((HERE / "lm_hh1_default.json").read_text())
TENSORS = load_file(HERE / "lm_hh1_default.safetensors")
STATE = {k[6:]: v for k, v in TENSORS.items() if k.startswith("param/")}
CONFIG = {k: CASE[k] for k in ("model_config", "ssm_cfg")}


@pytest.fixture
def files(tmp_path):
    """A checkpoint and its config as the paper's code leaves them."""
    torch.save({"state_dict": {f"module.{k}": v for k, v in STATE.items()}}, tmp_path / "run.pth")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_names():
    for theirs, ours in [
        ("mixer.uv_project.parametrizations.weight.original1", "mixer.uv_proj.direction"),
        ("mixer.u_proj.0.parametrizations.weight.original0", "mixer.u_down.gain"),
        ("mixer.u_proj.1.parametrizations.weight.original1", "mixer.u_proj.direction"),
        ("mixer.mixers.1.diag.bias", "mixer.parts.1.gate_proj.bias"),
        ("mixer.q_proj.parametrizations.weight.original", "mixer.q_proj.weight"),
        ("mixer.q_proj.parametrizations.weight.0.base", "mixer.q_proj.base"),
        ("backbone.embedding.weight", "backbone.embeddings.weight"),
        (
            "backbone.layers.3.mixer.mixer.alpha.bias",
            "backbone.layers.3.block.mixer.gate_proj.bias",
        ),
        ("backbone.layers.3.norm.weight", "backbone.layers.3.norm.weight"),
        ("backbone.layers.3.mixer.norm.weight", "backbone.layers.3.block.out_norm.weight"),
        ("output_norm.weight", "out_norm.weight"),
        ("mixer._orig_mod.u_proj.parametrizations.weight.original0", "mixer.u_proj.gain"),
        ("_orig_mod.backbone.norm_f.bias", "backbone.norm_f.bias"),
        ("backbone.layers.0.norm.bias", "backbone.layers.0.norm.bias"),
        ("input_trans.bias", "in_proj.bias"),
    ]:
        assert reference_name(theirs) == ours


def test_the_imported_model_computes_the_golden_logits(files):
    from transformers import AutoModelForCausalLM

    done = fprnn("import", files / "run.pth", files / "hf", "--config", files / "config.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(files / "hf")
    model = AutoModelForCausalLM.from_pretrained(files / "hf").double().eval()
    with torch.no_grad(), model.solving(token="iterate", eval_tol=1e-12):
        assert model.solver()["stopping"] == "paper"
        logits = model(TENSORS["input/input_ids"]).logits
    exact = TENSORS["exact_f64_eval/logits"]
    assert ((logits - exact).abs().max() / exact.abs().max()) < 1e-9
    # Of itself it is solved exactly, and says so.
    assert (model.config.token, model.config.gradient) == ("exact", "exact")
    assert "solved exactly (`token: exact`)" in done.stderr
    assert "solved exactly (`token: exact`)" in (files / "hf" / "README.md").read_text()
    assert model.config.patience == 15 and model.config.stepsize == 0.99  # the paper's damping


def test_every_wrong_name_is_listed_and_nothing_is_written(files):
    broken = dict(STATE)
    broken["backbone.layers.0.mixer.Delta"] = torch.zeros(3)
    del broken["backbone.layers.1.mixer.D"]
    broken["backbone.norm_f.weight"] = torch.zeros(7)
    torch.save(broken, files / "broken.pth")
    with pytest.raises(ReferenceCheckpointError) as e:
        import_reference(files / "broken.pth", files / "config.json", files / "hf")
    for part in ["1 missing: backbone.layers.1.block.D", "1 extra: backbone.layers.0.block.Delta",
                 "1 of another shape: backbone.norm_f.weight (7,), not (32,)"]:  # fmt: skip
        assert part in str(e.value)
    assert not (files / "hf").exists()


def test_another_architecture_is_refused(files):
    other = {**CONFIG, "ssm_cfg": {**CONFIG["ssm_cfg"], "mixer_type": "kronecker"}}
    (files / "other.json").write_text(json.dumps(other))
    with pytest.raises(ReferenceCheckpointError, match=r"does not fit .*uv_proj"):
        import_reference(files / "run.pth", files / "other.json", files / "hf")


def block(layer="FPMamba", /, **keys):
    """The FPRNNConfig of one block of the paper's code."""
    return reference_config({"cls": layer, "config": {"d_model": 32, **keys}})


def test_every_key_is_in_exactly_one_table():
    tables = [reference.MAPPED, reference.SPECIAL, reference.NO_EFFECT, reference.ONLY]
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names)) == len(known_keys())
    for unread in reference.UNREAD.values():
        assert unread.keys() <= known_keys()


# The arguments of the paper's constructors (FPMamba, FPMamba2, FPRNN, MambaConfig), with defaults
# where another value than the default has no meaning here.
SIGNATURES = {
    "FPMamba": dict(
        d_state=8, d_conv=3, expand=3, dt_rank="auto", dt_min=0.01, dt_max=0.2, dt_init="constant",
        dt_scale=2.0, dt_init_floor=1e-3, conv_bias=True, bias=True, norm_eps=1e-4, bc_norm=False,
        glu_in_loop=True, d_mixer=7, mixer_type="dplr", mixer_rank=3, mixer_ac="relu",
        mixer_proj_rank=5, symm_mixer=True, mixer_h_dep=False, max_iter=77, use_short_conv=True,
        damping_decay_rate=0.8, convergence_threshold=0.05, n_backwards=2, layer_idx=3,
        device="cuda", dtype="float32",
    ),
    "FPMamba2": dict(
        d_state=8, d_conv=3, conv_init=0.1, expand=3, headdim=16, d_ssm=None, ngroups=2,
        A_init_range=[1, 8], D_has_hdim=False, rmsnorm=False, norm_before_gate=True, dt_min=0.01,
        dt_max=0.2, dt_init_floor=1e-3, dt_limit=[0.0, math.inf], bias=True, conv_bias=True,
        norm_eps=1e-4, bc_norm=False, glu_in_loop=False, d_mixer=7, mixer_type="dplr",
        mixer_rank=3, mixer_ac="relu", mixer_proj_rank=5, symm_mixer=True, mixer_h_dep=False,
        max_iter=77, use_short_conv=True, damping_decay_rate=0.8, convergence_threshold=0.05,
        n_backwards=2, chunk_size=64, use_mem_eff_path=False, layer_idx=3, process_group=None,
        sequence_parallel=False, device=None, dtype=None,
    ),
    "FPRNN": dict(
        d_mixer=7, d_conv=3, expand=3, mixer_ac="relu", mixer_rank=3, mixer_type="dplr",
        max_iter=77, mixer_proj_rank=5, symm_mixer=True, mixer_h_dep=False, n_backwards=2,
        damping_decay_rate=0.8, convergence_threshold=0.05, conv_bias=True, norm_eps=1e-4,
        use_short_conv=True, layer_idx=3, device=None, dtype=None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("layer", SIGNATURES)
def test_every_argument_of_a_layer_is_read(layer):
    config = block(layer, **SIGNATURES[layer])
    of_all = dict(
        d_conv=3, expand=3, out_norm_epsilon=1e-4, eps=1e-4, mixer="dplr", mixer_rank=3,
        mixer_act="relu", mixer_proj_rank=5, symm_mixer=True, mixer_h_dep=False, max_iters=77,
        use_short_conv=True, tol=0.05, n_backwards=2, schedule="parallel", stopping="paper",
        contractive=None, reset_at_eos=False, kronecker_norm="rows", eigen_range="signed",
    )  # fmt: skip
    of_one = {
        "FPMamba": dict(d_state=8, bias=True, bc_norm=False, glu_in_loop=True, stepsize_decay=0.8),
        "FPMamba2": dict(
            d_state=8, bias=True, bc_norm=True, headdim=16, ngroups=2, stepsize_decay=0.8
        ),
        "FPRNN": dict(stepsize_decay=1.0, quantile=0.9, stepsize=1.0),
    }
    for field, value in {**of_all, **of_one[layer]}.items():
        assert getattr(config, field) == value, field


@pytest.mark.parametrize(
    "layer, defaults",
    [
        ("FPMamba", dict(mixer="kronecker", d_state=16, max_iters=100, quantile=0.75)),
        ("FPMamba2", dict(mixer="kronecker", d_state=128, max_iters=100, quantile=0.9)),
        ("FPRNN", dict(mixer="householder", max_iters=1000, quantile=0.9, stepsize_decay=1.0)),
    ],
)
def test_what_is_not_given_has_the_papers_default(layer, defaults):
    config = block(layer)
    shared = dict(
        mixer_act="silu", mixer_rank=1, mixer_proj_rank=None, expand=2, d_conv=4, bias=False,
        rms_norm=True, glu_in_loop=False, bc_norm=True, use_short_conv=False, symm_mixer=False,
        mixer_h_dep=True, n_backwards=1, tol=0.1, out_norm_epsilon=1e-5, eps=1e-5, patience=15,
        headdim=64, ngroups=1, norm_epsilon=1e-5, residual_in_fp32=True, tie_embeddings=True,
    )  # fmt: skip
    for field, value in {**shared, **defaults}.items():
        assert getattr(config, field) == value, field


def test_the_language_model_as_save_pretrained_leaves_it():
    saved = {
        "d_model": 48, "d_intermediate": 0, "n_layer": 3, "vocab_size": 50257,
        "ssm_cfg": {"layer": "FPRNN", "mixer_type": "mixture", "mixer_rank": 2, "d_mixer": 9},
        "attn_layer_idx": [], "attn_cfg": {}, "rms_norm": False, "residual_in_fp32": False,
        "fused_add_norm": True, "pad_vocab_size_multiple": 16, "tie_embeddings": False,
    }  # fmt: skip
    config = reference_config(saved)
    found = config.d_model, config.n_layer, config.vocab_size, config.block, config.mixer
    assert found == (48, 3, 50272, "fp_rnn", "mixture")
    assert not (config.rms_norm or config.residual_in_fp32 or config.tie_embeddings)
    saved.pop("pad_vocab_size_multiple")
    assert reference_config(saved).vocab_size == 50264


@pytest.mark.parametrize(
    "given, ours", [("silu", "silu"), ("ReLU", "relu"), ("identity", "identity")]
)
def test_activations(given, ours):
    assert block(mixer_ac=given).mixer_act == ours


@pytest.mark.parametrize("layer", ["FPMamba", "FPMamba2", "FPRNN"])
@pytest.mark.parametrize("mixer", ["kronecker", "mixture"])
def test_only_fp_rnns_kronecker_divides_by_the_largest_eigenvalue(layer, mixer):
    norm = block(layer, mixer_type=mixer, mixer_rank=2).kronecker_norm
    assert norm == ("spectral" if (layer, mixer) == ("FPRNN", "kronecker") else "rows")


def test_the_parts_of_a_mixture_have_their_own_epsilon():
    config = block("FPRNN", mixer_type="mixture", mixer_rank=2, norm_eps=1e-3)
    assert (config.out_norm_epsilon, config.eps) == (1e-3, 1e-5)


@pytest.mark.parametrize("mixer", ["monarch", "nonselective", "mixture"])
def test_nothing_bounds_an_imported_mixer(mixer):
    """Ours are bounded in fp_rnn by default; the paper's are not."""
    assert block("FPRNN", mixer_type=mixer, mixer_rank=2).contractive is None


REFUSED = [
    ("FPMamba", dict(mixer_acc="relu"), "`config.mixer_acc` (did you mean mixer_ac?)"),
    ("FPMamba", dict(zzz=1), "keys that are not known here: `config.zzz`"),
    ("FPMamba", dict(mixer_ac="gelu"), "unknown activation mixer_ac `gelu`: one of silu, relu"),
    ("FPMamba", dict(mixer_ac=None), "unknown activation mixer_ac `none`"),
    ("FPMamba", dict(mixer_type="householderproducts"), "did you mean householderproduct"),
    ("FPMamba", dict(use_short_conv=True, conv_bias=False), "`conv_bias` is False"),
    ("FPMamba", dict(use_short_conv="yes"), "`use_short_conv` is 'yes'; it must be true or false"),
    ("FPMamba", dict(expand=1.5), "`expand` is 1.5; it must be a whole number"),
    ("FPMamba", dict(norm_eps="small"), "`norm_eps` is 'small'; it must be a number"),
    ("FPMamba", dict(n_backwards=0), "n_backwards is 0: it must be a whole number from 1 to"),
    ("FPMamba", dict(d_inner=65), "`d_inner` is 65, but expand · d_model is 64"),
    ("FPMamba", dict(mixer_proj_rank=4), "a low-rank map is supported for householderproduct and"),
    ("FPMamba", dict(mixer_type="dplr", mixer_proj_rank=0), "`mixer_proj_rank` is 0"),
    ("FPMamba", dict(layer="FPMamba2"), "its layers are FPMamba and FPMamba2"),
    ("FPMamba2", dict(D_has_hdim=True), "`D_has_hdim` is True: D would be one number a channel"),
    ("FPMamba2", dict(dt_limit=[0.0, 0.1]), "`dt_limit` is [0.0, 0.1]: the step sizes would be"),
    ("FPMamba2", dict(d_ssm=32), "`d_ssm` is 32, but expand · d_model is 64"),
    ("FPMamba2", dict(glu_in_loop=True), "FPMamba2 would gate twice there"),
    ("FPMamba2", dict(process_group="x"), "`process_group` is 'x'"),
    ("FPRNN", dict(glu_in_loop=True), "FPRNN has no such gate"),
    ("FPRNN", dict(mixer_type="selectivedense", d_model=48), "48 does not divide it"),
    ("FPRNN", dict(mixer_type="selectivedense", d_model=0), "`d_model` is 0; it must be at least"),
]  # fmt: skip


@pytest.mark.parametrize("layer, keys, sentence", REFUSED, ids=lambda v: str(v)[:40])
def test_what_we_cannot_have_is_refused_with_a_sentence(layer, keys, sentence):
    with pytest.raises(ReferenceCheckpointError, match=re.escape(sentence)):
        block(layer, **keys)


@pytest.mark.parametrize(
    "keys, sentence",
    [
        ({"d_intermediate": 64}, "there would be an MLP after every block"),
        ({"attn_layer_idx": [1]}, "some layers would be attention"),
        ({"n_layers": 3}, "`model_config.n_layers` (did you mean n_layer?)"),
        ({"n_layer": None}, "`n_layer` is None; it must be a whole number"),
        ({"pad_vocab_size_multiple": 0}, "`pad_vocab_size_multiple` is 0; it must be at least 1"),
    ],
)
def test_a_language_model_that_we_cannot_have(keys, sentence):
    with pytest.raises(ReferenceCheckpointError, match=re.escape(sentence)):
        reference_config({**CONFIG, "model_config": {**CONFIG["model_config"], **keys}})


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"d_model": 64}, "contradicts itself: model_config.d_model is 32, d_model is 64"),
        ({"d_state": 16}, "ssm_cfg.d_state is 8, d_state is 16"),
        ({"cls": "FPMamba2"}, "its layers are FPMamba1 and FPMamba2"),
        ({"max_iters": 3}, "`max_iters` (did you mean max_iter?)"),
        ({"stepsize_decay": 0.5, "damping_decay_rate": 0.9}, "another key says 0.5"),
        ({"ssm_cfg": {"d_state": 8}}, "the configuration names no layer"),
        ({"ssm_cfg": {"layer": "Mamba1"}}, "unknown layer `Mamba1`"),
        ({"ssm_cfg": "FPRNN"}, "`ssm_cfg` must be a mapping, not 'FPRNN'"),
        ({"model_config": {"n_layer": 2}}, "the configuration has no `d_model`"),
    ],
)
def test_a_description_that_contradicts_itself_or_lacks_something(change, sentence):
    with pytest.raises(ReferenceCheckpointError, match=re.escape(sentence)):
        reference_config({**CONFIG, **change})
    assert reference_config({**CONFIG, "d_model": 32}).d_model == 32  # twice the same is fine


def export_of(files, description, state):
    """The imported model of a description and a state dict of the paper's code."""
    from transformers import AutoModelForCausalLM

    torch.save(state, files / "changed.pth")
    (files / "changed.json").write_text(json.dumps(description))
    out = import_reference(files / "changed.pth", files / "changed.json", files / "changed")
    return AutoModelForCausalLM.from_pretrained(out)


def test_layer_norm_biases_and_an_untied_head_are_exported(files):
    description = {
        "model_config": {**CONFIG["model_config"], "rms_norm": False, "tie_embeddings": False},
        "ssm_cfg": {**CONFIG["ssm_cfg"], "bias": True, "mixer_ac": "identity", "n_backwards": 2},
    }
    state = paper.checkpoint(description)
    model = export_of(files, description, state)
    config = model.config
    assert not config.rms_norm and not config.tie_embeddings and config.bias
    assert (config.mixer_act, config.n_backwards) == ("identity", 2)
    theirs = {reference_name(k): v.float() for k, v in state.items()}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name


def test_the_head_is_as_the_tensors_and_the_configuration_say(files):
    head = torch.randn(64, 32)
    untied = export_of(files, CONFIG, {**STATE, "lm_head.weight": head})  # it says nothing
    assert torch.equal(untied.lm_head.weight, head) and not untied.config.tie_embeddings

    def said(value):
        return {**CONFIG, "model_config": {**CONFIG["model_config"], "tie_embeddings": value}}

    with pytest.raises(ReferenceCheckpointError, match="tie_embeddings is True, but lm_head"):
        export_of(files, said(True), {**STATE, "lm_head.weight": head})
    without = {k: v for k, v in STATE.items() if k != "lm_head.weight"}
    assert export_of(files, CONFIG, without).config.tie_embeddings
    with pytest.raises(ReferenceCheckpointError, match="tie_embeddings is False, but the"):
        export_of(files, said(False), without)


def test_the_vocabulary_is_that_of_the_configuration(files):
    other = {**CONFIG, "model_config": {**CONFIG["model_config"], "vocab_size": 65}}
    with pytest.raises(
        ReferenceCheckpointError, match=r"embeddings.weight \(64, 32\), not \(72, 32"
    ):
        export_of(files, other, STATE)
    unsaid = {k: v for k, v in CONFIG["model_config"].items() if k != "vocab_size"}
    assert export_of(files, {**CONFIG, "model_config": unsaid}, STATE).config.vocab_size == 64


def test_bad_files_are_sentences(files):
    (files / "text.pth").write_text("not a checkpoint")
    torch.save({"a": 1}, files / "empty.pth")
    torch.save({"w": torch.zeros(1)}, files / "other.pth")
    (files / "bad.json").write_text("{")
    good = files / "config.json"
    for checkpoint, config, sentence in [
        ("none.pth", good, "no checkpoint at"),
        ("text.pth", good, "holds more than tensors, or is damaged"),
        ("empty.pth", good, "holds no state dict"),
        ("other.pth", good, "no language model of the paper's code"),
        ("run.pth", files / "none.json", "no config at"),
        ("run.pth", files / "bad.json", "neither JSON nor YAML"),
    ]:
        with pytest.raises(ReferenceCheckpointError, match=sentence):
            import_reference(files / checkpoint, config, files / "hf")
