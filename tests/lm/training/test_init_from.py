"""`init_from`: weights that are taken, equal outputs at the start, refusals, complete runs."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from lm.common.errors import ConfigError
from lm.data.batches import loader
from lm.data.corpus.tokenizer import load_tokenizer
from lm.model.configuration_fprnn import FPRNNConfig
from lm.model.modeling_fprnn import FPRNNForCausalLM
from lm.report.estimate import build_meta_model
from lm.report.plan import make_table, plan
from lm.training import init_from
from lm.training.hf_mamba import read_folder
from lm.training.preflight import check_config
from lm.training.upcycle import SourceError, match_weights
from tests.hf_models import draw_ids, make_our_model, save_as_bin, save_hf_mamba
from tests.refusals import refused
from tests.running import run

# Sizes of the models in tests/hf_models.py.
FIELDS = dict(vocab_size=24, d_model=32, d_state=4, dt_rank=3, headdim=8, reset_at_eos=False)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """{kind: (SourceModel, model of transformers)}, with two layers each."""
    sources = {}
    for kind in ("mamba", "mamba2"):
        folder, hf_model = save_hf_mamba(tmp_path_factory.mktemp("source") / kind, kind)
        sources[kind] = read_folder(folder), hf_model
    return sources


def make_model(layers, n_layer, **fields):
    torch.manual_seed(5)
    config = FPRNNConfig(**{**FIELDS, "layers": layers, "n_layer": n_layer, **fields})
    return FPRNNForCausalLM(config).eval()


def copy_weights(source, target, **options):
    match = match_weights(source, target, **options)
    match.apply()
    return match


@torch.no_grad()
def assert_equal_logits(sources, kind, target):
    """Compare with transformers in fp32, and with our model of the source in fp64."""
    source, hf_model = sources[kind]
    torch.testing.assert_close(
        target(draw_ids()).logits, hf_model(draw_ids()).logits, atol=1e-5, rtol=0
    )
    actual, expected = (m.double()(draw_ids()).logits for m in (target, make_our_model(source)))
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=0)


# Inserted layers.


@pytest.mark.parametrize(
    "kind, layers, new_layers",
    [
        ("mamba", "mamba fp_mamba1 mamba", [1]),
        ("mamba", "fp_rnn mamba*2", [0]),
        ("mamba2", "mamba2 fp_mamba2 mamba2 fp_mamba2", [1, 3]),
        ("mamba2", "mamba attention mamba2 mlp mamba2", [0, 1, 3]),
        ("mamba", "mamba*3", [2]),
        ("mamba", "mamba gated_deltanet mamba", [1]),
    ],
)
def test_an_inserted_layer_adds_nothing_and_learns(sources, kind, layers, new_layers):
    target = make_model(layers, n_layer=2 + len(new_layers))
    with torch.no_grad():  # so that no out_proj is zero before the weights are copied
        for p in target.parameters():
            p += 0.1
    match = copy_weights(sources[kind][0], target)
    assert [i for i, partner in enumerate(match.partners) if partner is None] == new_layers
    assert match.differences == []
    assert_equal_logits(sources, kind, target)
    target.train()(draw_ids(), labels=draw_ids()).loss.backward()
    for index in new_layers:
        assert target.backbone.layers[index].block.out_proj.weight.grad.norm() > 1e-4


def test_untied_head_starts_as_the_embedding(sources):
    target = make_model("mamba", 2, tie_embeddings=False)
    copy_weights(sources["mamba"][0], target)
    assert_equal_logits(sources, "mamba", target)
    assert target.lm_head.weight.data_ptr() != target.backbone.embeddings.weight.data_ptr()


# Refusals and partial matches.


@pytest.mark.parametrize(
    "layers, n_layer, fields, options, message",
    [
        ("mamba", 2, {"d_model": 16}, {"partial": True}, "d_model 32, model.d_model is 16"),
        ("mamba", 2, {}, {"vocab_size": 32}, "vocabulary has 24 tokens, this run's 32"),
        ("mamba", 2, {}, {"token_difference": "its tokenizer differs"}, "its tokenizer differs"),
        ("mamba", 2, {"d_state": 8}, {}, r"layer 0 \(mamba\): d_state is 8, in the source 4"),
        ("mamba", 1, {}, {}, r"layer 1 of the source \(mamba\) is not used"),
        ("mamba fp_mamba1", 2, {}, {}, r"layer 1 of the source \(mamba\) is not used"),
    ],
)
def test_differences_from_the_source_are_refused(
    sources, layers, n_layer, fields, options, message
):
    with torch.device("meta"):
        target = make_model(layers, n_layer, **fields)
    with pytest.raises(ConfigError, match=message) as e:
        match_weights(sources["mamba"][0], target, **options)
    assert str(e.value).startswith("init_from") and "\n" not in str(e.value)


def test_an_untied_head_of_the_source_needs_an_untied_head(tmp_path):
    source = read_folder(save_hf_mamba(tmp_path, "mamba", tie_word_embeddings=False)[0])
    with pytest.raises(ConfigError, match=r"its head is not its embedding, and model.tie_embe"):
        match_weights(source, make_model("mamba", 2))
    assert (
        "lm_head.weight" not in match_weights(source, make_model("mamba", 2), partial=True).weights
    )


def test_partial_takes_the_weights_that_fit(sources):
    source = sources["mamba"][0]
    target = make_model("fp_mamba1 mlp mamba", 3, d_state=8)
    before = {name: p.clone() for name, p in target.named_parameters()}
    match = copy_weights(source, target, partial=True)
    assert match.partners == [None, None, 0]
    # Embedding and last norm, and the 10 weights of a layer except A_log and x_proj, whose shapes
    # depend on d_state.
    assert len(match.weights) == 2 + 10 - 2
    differences = "; ".join(match.differences)
    for words in ("layer 1 of the source", "A_log", "d_state is 8, in the source 4"):
        assert words in differences
    parameters = dict(target.named_parameters())
    for name, tensor in match.weights.items():
        assert torch.equal(parameters[name], tensor), name
    changed = {name for name in match.new if not torch.equal(parameters[name], before[name])}
    assert changed == {f"backbone.layers.{i}.block.out_proj.weight" for i in (0, 1)}


def test_partial_takes_some_of_the_layers(sources):
    source = sources["mamba"][0]
    assert match_weights(source, make_model("mamba", 1), partial=True).partners == [0]
    match = match_weights(source, make_model("mamba", 2), partial=True, vocab_size=32)
    assert match.new == ["backbone.embeddings.weight"]
    with pytest.raises(ConfigError, match="a new lstm, which cannot begin by adding nothing"):
        match_weights(source, make_model("lstm mamba", 2), partial=True)


def test_different_reset_at_eos_is_logged(sources):
    match = match_weights(sources["mamba"][0], make_model("mamba", 2, reset_at_eos=True))
    assert match.differences == []
    setting = "reset_at_eos is True, in the source False"
    outputs = "outputs at the start are the source's, except for the effect of other settings"
    assert match.describe()[-2:] == [outputs, setting]
    assert not match.record()["outputs_equal"] and match.record()["differs"] == [setting]


# Configurations.

MODEL_KEYS = (
    "model.d_model=32",
    "model.layers=[mamba: {dt_rank: 3}, fp_mamba1: {dt_rank: 3}, mamba: {dt_rank: 3}]",
    "model.n_layer=3",
    "model.headdim=8",
)


def test_plan_lists_taken_weights_and_refuses_mismatches(tiny, tmp_path, capsys):
    from lm.cli.main import main

    folder, _ = save_as_bin(tmp_path / "source", "mamba")
    cfg = tiny(*MODEL_KEYS, f"init_from={folder}")
    text = "\n".join(plan(cfg, 1)["init_from"])
    assert "(transformers' mamba): 22 weights (0.016 M) taken" in text
    assert "out_proj is zero: 1 (fp_mamba1)" in text and "start are the source's" in text
    labels, *_ = make_table(plan(cfg, 1), cfg).columns
    # Counts, new layers, equal outputs, reset_at_eos and the vocabulary.
    assert list(labels.cells).count("init from") == 5
    check_config(cfg, 1)
    with pytest.raises(ConfigError, match=r"vocabulary has 24 tokens, this run's 304"):
        check_config(tiny(*MODEL_KEYS, f"init_from={folder}", "model.vocab_size=304"), 1)
    for overrides, message in [
        ((f"init_from={tmp_path / 'no'}",), "no is no folder: init_from must name a run, a ch"),
        ((f"init_from={tmp_path / 'runs/tiny/x'}",), "belongs to this run: choose another `name`"),
        ((f"init_from={folder}", f"resume={tmp_path}"), "name two sources of the weights"),
        (("init_from.partial=true",), "init_from.path` is missing"),
    ]:
        with pytest.raises((ConfigError, SourceError), match=message):
            check_config(tiny(*MODEL_KEYS, *overrides), 1)
    args = ["configs/tiny/lm.yaml", f"out_dir={tmp_path / 'runs'}", *MODEL_KEYS]
    assert main(["plan", *args, f"init_from={folder}"]) == 0
    assert "0.016 M" in capsys.readouterr().out.replace("\n", " ")
    message = refused(capsys, "plan", *args, f"init_from={folder}", "model.d_state=8")
    assert "d_state is 8, in the source 4" in message
    message = refused(capsys, "train", "--config", *args, f"init_from={folder}", "model.d_state=8")
    assert "d_state is 8, in the source 4" in message
    assert not (tmp_path / "runs").exists()


def test_runs_checkpoints_and_exports_are_sources(tiny, tiny_run, tiny_export):
    checkpoint = max((tiny_run / "checkpoints").iterdir())
    sources = [init_from.read_source(path) for path in (tiny_run, checkpoint, tiny_export)]
    assert sources[0].description == sources[1].description == "our run, update 8"
    for source in sources[1:]:
        assert source.weights.keys() == sources[0].weights.keys()
        for name, t in source.weights.items():
            assert torch.equal(t, sources[0].weights[name]), name
    hybrid = tiny("model.layers=fp_mamba1 mamba fp_mamba1", "model.n_layer=3")
    match = match_weights(sources[0], build_meta_model(hybrid, 304), vocab_size=304)
    assert (match.partners, match.differences) == ([0, None, 1], [])
    paper = tiny("solver.stopping=paper")
    match = match_weights(sources[0], build_meta_model(paper, 304))
    assert "token is iterate, in the source exact" in match.describe() and not match.differences
    other = tiny("model.glu_in_loop=false", "model.out_norm_epsilon=1e-3")
    with pytest.raises(ConfigError) as e:
        match_weights(sources[0], build_meta_model(other, 304))
    for message in ("out_norm_epsilon is 0.001, in the source 1e-05", "glu_in_loop is False"):
        assert message in str(e.value)


def test_another_tokenizer_is_refused(byte_tokenizer, tiny_run):
    from lm.runs.exported import load_tokenizer

    source = init_from.read_source(tiny_run)
    same, other = load_tokenizer(tiny_run / "tokenizer"), load_tokenizer(byte_tokenizer)
    assert init_from.compare_tokenizers(source, same) == ""
    assert init_from.compare_tokenizers(source._replace(tokenizer=None), other) == ""
    message = init_from.compare_tokenizers(source, other)
    assert message.startswith("its tokenizer differs: ") and "tokenizer.name=" in message
    ids = same.get_vocab()
    a, b = sorted(ids)[:2]
    swapped = SimpleNamespace(get_vocab=lambda: {**ids, a: ids[b], b: ids[a]})
    message = init_from.compare_tokenizers(source, swapped)
    assert f"2 of its {len(ids)} tokens have another id in this run, or none" in message
    same.add_tokens(["<more>"])  # further tokens do not matter
    assert init_from.compare_tokenizers(source, same) == ""


# Runs.

RUN_KEYS = ("model.layers=fp_mamba1 mamba fp_mamba1", "model.n_layer=3", "optim.schedule=constant")


# A run whose weights come from a trained model has a lower loss. Random weights: log 304 = 5.7.
MAX_FIRST_LOSS = 5.5


def compute_first_loss(model, cfg):
    """Return the loss of a model on the batch of a trained run's first update."""
    tokenizer = load_tokenizer(cfg, cfg.run_dir)
    batches, _ = loader.build(cfg, tokenizer, cfg.run_dir, 0, 1)
    first = [next(batches) for _ in range(cfg.train.accumulation(1))]
    ids, labels = (torch.cat([batch[key] for batch in first]) for key in ("input_ids", "labels"))
    with torch.no_grad():
        return model.eval()(ids, shift_labels=labels, loss_only=True).loss.item()


def test_resumed_run_does_not_read_init_from_again(tmp_path, tiny_run, tiny):
    """A resumed run has the losses of an uninterrupted run although the source is deleted."""
    source_folder = tmp_path / "source"
    shutil.copytree(tiny_run, source_folder)
    keys = (*RUN_KEYS, f"init_from={source_folder}")
    whole, process = run(tmp_path / "whole", *keys)
    assert process.stdout.count("init     ") == 3  # counts, new layers, equal outputs
    source = init_from.read_source(source_folder)
    source_model = FPRNNForCausalLM(source.config)
    source_model.load_state_dict(source.weights, strict=False)
    expected = compute_first_loss(source_model, tiny(*keys, f"out_dir={tmp_path / 'whole'}"))
    assert whole[0]["loss"] == pytest.approx(expected, abs=1e-5)
    assert expected < MAX_FIRST_LOSS
    record = json.loads((tmp_path / "whole/tiny/init_from.json").read_text())
    assert record["outputs_equal"] and [layer["from"] for layer in record["layers"]] == [0, None, 1]
    # A copy that stopped after the first checkpoint.
    half = tmp_path / "half"
    shutil.copytree(tmp_path / "whole", half)
    shutil.rmtree(half / "tiny/checkpoints/step-000008")
    (half / "tiny/result.json").unlink()
    shutil.rmtree(source_folder)
    resumed, process = run(half, *keys, "resume=auto")
    assert "init     " not in process.stdout
    assert [r["loss"] for r in resumed[-4:]] == [r["loss"] for r in whole[-4:]]
    assert (half / "tiny/init_from.json").is_file()


def test_resumed_run_must_keep_init_from(tiny, tiny_run):
    from lm.runs.run_dir import RunDirError, _check_resumed_config

    with pytest.raises(RunDirError, match=r"init_from.path was None, is '.*there'"):
        _check_resumed_config(tiny("init_from=there"), tiny_run / "config.yaml")


@pytest.mark.slow
def test_two_ranks_under_zero_3_start_from_the_source(tmp_path, tiny_run):
    keys = (*RUN_KEYS, f"init_from={tiny_run}", "train.global_batch_size=4")
    keys += ("train.grad_accum_steps=null", "train.micro_batch_size=2")
    one_rank, _ = run(tmp_path / "one", *keys)
    two_ranks, process = run(tmp_path / "two", *keys, "engine.zero_stage=3", processes=2)
    assert process.stdout.count("outputs at the start are the source's") == 1
    actual, expected = ([r["loss"] for r in records] for records in (two_ranks, one_rank))
    assert actual == pytest.approx(expected, rel=1e-4)
    assert expected[0] < MAX_FIRST_LOSS
