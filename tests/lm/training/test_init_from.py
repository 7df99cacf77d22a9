"""`init_from`: what is taken, equal outputs at the start, what is refused; runs that start so."""

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
from lm.report.plan import describe, plan
from lm.training import init_from, upcycle
from lm.training.foreign import SourceError, read_folder
from lm.training.preflight import check_config
from tests.foreign import binary_folder, ids_of, ours_of, transformers_folder
from tests.refusals import refused
from tests.running import run

FIELDS = dict(vocab_size=24, d_model=32, d_state=4, dt_rank=3, headdim=8, reset_at_eos=False)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """{kind: (Source, the model of transformers)} of two layers each."""
    found = {}
    for kind in ("mamba", "mamba2"):
        folder, theirs = transformers_folder(tmp_path_factory.mktemp("there") / kind, kind)
        found[kind] = read_folder(folder), theirs
    return found


def model(layers, n_layer, seed=5, **fields):
    torch.manual_seed(seed)
    config = FPRNNConfig(**{**FIELDS, "layers": layers, "n_layer": n_layer, **fields})
    return FPRNNForCausalLM(config).eval()


def started(source, target, **how):
    found = upcycle.match(source, target, **how)
    upcycle.apply(found, source, target)
    return found


@torch.no_grad()
def assert_equal_logits(sources, kind, target):
    """Compare with transformers in fp32, and with the source in our terms in fp64."""
    source, theirs = sources[kind]
    torch.testing.assert_close(target(ids_of()).logits, theirs(ids_of()).logits, atol=1e-5, rtol=0)
    found, expected = (m.double()(ids_of()).logits for m in (target, ours_of(source)))
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


# Layers that are inserted.


@pytest.mark.parametrize(
    "kind, layers, new",
    [
        ("mamba", "mamba fp_mamba1 mamba", [1]),
        ("mamba", "fp_rnn mamba*2", [0]),
        ("mamba2", "mamba2 fp_mamba2 mamba2 fp_mamba2", [1, 3]),
        ("mamba2", "mamba attention mamba2 mlp mamba2", [0, 1, 3]),
        ("mamba", "mamba*3", [2]),
        ("mamba", "mamba gated_deltanet mamba", [1]),
    ],
)
def test_an_inserted_layer_adds_nothing_and_learns(sources, kind, layers, new):
    n_layer = 2 + len(new)
    target = model(layers, n_layer)
    with torch.no_grad():  # whatever a layer begins with
        for p in target.parameters():
            p += 0.1
    found = started(sources[kind][0], target)
    assert (found.silent, found.differs) == (new, [])
    assert_equal_logits(sources, kind, target)
    target.train()(ids_of(), labels=ids_of()).loss.backward()
    for index in new:
        assert target.backbone.layers[index].block.out_proj.weight.grad.norm() > 1e-4


def test_a_head_of_its_own_takes_the_embedding(sources):
    target = model("mamba", 2, tie_embeddings=False)
    started(sources["mamba"][0], target)
    assert_equal_logits(sources, "mamba", target)
    assert target.lm_head.weight.data_ptr() != target.backbone.embeddings.weight.data_ptr()


# What is refused, and what is taken in part.


@pytest.mark.parametrize(
    "layers, n_layer, fields, how, said",
    [
        ("mamba", 2, {"d_model": 16}, {"partial": True}, "d_model 32, model.d_model is 16"),
        ("mamba", 2, {}, {"vocabulary": 32}, "a vocabulary of 24 tokens, .* one of 32"),
        ("mamba", 2, {}, {"other_tokens": "its tokenizer is another"}, "its tokenizer is another"),
        ("mamba", 2, {"d_state": 8}, {}, r"A_log \[64, 4\] there, \[64, 8\] here"),
        ("mamba", 1, {}, {}, "10 extra: backbone.layers.1"),
        ("mamba fp_mamba1", 2, {}, {}, r"layer 1 \(fp_mamba1, of its layer 1\): it is a mamba"),
        ("mamba attention", 2, {}, {}, "layer 1 .*: it is a mamba there"),
        ("attention*3", 3, {}, {}, "20 extra: "),
    ],
)
def test_what_does_not_match_is_named(sources, layers, n_layer, fields, how, said):
    with torch.device("meta"):
        target = model(layers, n_layer, **fields)
    with pytest.raises(ConfigError, match=said) as e:
        upcycle.match(sources["mamba"][0], target, **how)
    assert str(e.value).startswith("init_from") and "\n" not in str(e.value)


def test_a_source_with_a_head_of_its_own_needs_one_here(tmp_path):
    source = read_folder(transformers_folder(tmp_path, "mamba", tie_word_embeddings=False)[0])
    with pytest.raises(ConfigError, match=r"its head is not its embedding, and model.tie_embe"):
        upcycle.match(source, model("mamba", 2))
    assert "lm_head.weight" not in upcycle.match(source, model("mamba", 2), partial=True).taken


def test_a_part_is_taken_and_nothing_else_changes(sources):
    source = sources["mamba"][0]
    target = model("fp_mamba1 mlp mamba", 3, d_state=8)
    before = {name: p.clone() for name, p in target.named_parameters()}
    found = started(source, target, partial=True)
    assert (found.pairs, found.silent) == ([None, None, 0], [0, 1])
    assert len(found.taken) == 2 + 10 - 2  # of another d_state A_log and x_proj do not fit
    said = "; ".join(found.differs)
    for part in ("10 extra: ", "2 of another shape: ", "d_state is 8, and 4 there"):
        assert part in said
    parameters = dict(target.named_parameters())
    for name, there in found.taken.items():
        assert torch.equal(parameters[name], source.weights[there]), name
    changed = {name for name in found.new if not torch.equal(parameters[name], before[name])}
    assert changed == {f"backbone.layers.{i}.block.out_proj.weight" for i in (0, 1)}


def test_a_part_of_the_layers(sources):
    """Fewer layers, another kind, another vocabulary: taken under `partial`, and said."""
    source = sources["mamba"][0]
    found = upcycle.match(source, model("mamba", 1), partial=True)
    assert found.pairs == [0] and "10 extra" in found.differs[0]
    found = upcycle.match(source, model("mamba", 2), partial=True, vocabulary=32)
    assert found.new == ["backbone.embeddings.weight"]
    found = upcycle.match(source, model("attention mamba", 2), partial=True)
    assert found.silent == [0] and found.pairs == [None, 1]
    with pytest.raises(ConfigError, match="a new lstm, which cannot begin by adding nothing"):
        upcycle.match(source, model("lstm mamba", 2), partial=True)
    with pytest.raises(ConfigError, match=r"nothing in .* fits the model"):
        source = source._replace(weights={})
        upcycle.match(source, model("mamba", 2), partial=True)


def test_where_documents_start_is_noted(sources):
    found = upcycle.match(sources["mamba"][0], model("mamba", 2, reset_at_eos=True))
    assert found.differs == [] and found.notes == ["reset_at_eos is True here, and False there"]


# Configurations.

OURS = (
    "model.d_model=32",
    "model.layers=[mamba: {dt_rank: 3}, fp_mamba1: {dt_rank: 3}, mamba: {dt_rank: 3}]",
    "model.n_layer=3",
    "model.headdim=8",
)


def test_a_plan_says_what_is_taken_and_refuses_what_does_not_fit(tiny, tmp_path, capsys):
    from lm.cli.main import main

    folder, _ = binary_folder(tmp_path / "there", "mamba")
    cfg = tiny(*OURS, f"init_from={folder}")
    text = "\n".join(plan(cfg, 1)["init_from"])
    assert "(transformers' mamba): 22 weights (0.016 M) taken" in text
    assert "out_proj is zero: 1 (fp_mamba1)" in text and "start are the source's" in text
    rows = describe(plan(cfg, 1), cfg).columns
    assert list(rows[0].cells).count("init from") == 5  # and of reset_at_eos, the vocabulary
    check_config(cfg, 1)
    with pytest.raises(ConfigError, match=r"vocabulary of 24 tokens, .* one of 304"):
        check_config(tiny(*OURS, f"init_from={folder}", "model.vocab_size=304"), 1)
    for wrong, said in [
        ((f"init_from={tmp_path / 'no'}",), "no is no folder: it must be a run, a checkpoint"),
        ((f"init_from={tmp_path / 'runs/tiny/x'}",), "this run's own: choose another `name`"),
        ((f"init_from={folder}", f"resume={tmp_path}"), "both say where the weights come from"),
        (("init_from.partial=true",), "init_from.path` is missing"),
    ]:
        with pytest.raises((ConfigError, SourceError), match=said):
            check_config(tiny(*OURS, *wrong), 1)
    args = ["configs/tiny/lm.yaml", f"out_dir={tmp_path / 'runs'}", *OURS]
    assert main(["plan", *args, f"init_from={folder}"]) == 0
    assert "0.016 M" in capsys.readouterr().out.replace("\n", " ")
    said = refused(capsys, "plan", *args, f"init_from={folder}", "model.d_state=8")
    assert "4 of another shape: " in said
    said = refused(capsys, "train", "--config", *args, f"init_from={folder}", "model.d_state=8")
    assert "4 of another shape: " in said
    assert not (tmp_path / "runs").exists()


def test_a_run_of_ours_its_checkpoint_and_its_export_are_sources(tiny, tiny_run, tiny_export):
    """Each the same weights; the shapes are those of the whole."""
    checkpoint = max((tiny_run / "checkpoints").iterdir())
    sources = [init_from.read(path) for path in (tiny_run, checkpoint, tiny_export)]
    assert sources[0].what == sources[1].what == "our run, update 8"
    for source in sources[1:]:
        assert source.weights.keys() == sources[0].weights.keys()
        for name, t in source.weights.items():
            assert torch.equal(t, sources[0].weights[name]), name
    shapes = init_from.read(tiny_run, shapes_only=True).weights
    assert {n: t.shape for n, t in shapes.items()} == {
        n: t.shape for n, t in sources[0].weights.items()
    }
    hybrid = tiny("model.layers=fp_mamba1 mamba fp_mamba1", "model.n_layer=3")
    found = upcycle.match(sources[0], build_meta_model(hybrid, 304), vocabulary=304)
    assert (found.pairs, found.differs) == ([0, None, 1], [])
    paper = tiny("solver.stopping=paper")
    found = upcycle.match(sources[0], build_meta_model(paper, 304))
    assert "token is iterate here, and exact there" in found.notes and not found.differs
    other = tiny("model.glu_in_loop=false", "model.out_norm_epsilon=1e-3")
    with pytest.raises(ConfigError) as e:
        upcycle.match(sources[0], build_meta_model(other, 304))
    for said in ("missing: ", "out_norm_epsilon is 0.001, and 1e-05 there", "glu_in_loop is False"):
        assert said in str(e.value)


def test_another_tokenizer_is_refused(byte_tokenizer, tiny_run):
    from lm.runs.exported import load_tokenizer

    source = init_from.read(tiny_run, shapes_only=True)
    own, other = load_tokenizer(tiny_run / "tokenizer"), load_tokenizer(byte_tokenizer)
    assert init_from._other_tokens(source, own) == ""
    assert init_from._other_tokens(source._replace(tokenizer=None), other) == ""
    said = init_from._other_tokens(source, other)
    assert said.startswith("its tokenizer is another: ") and "tokenizer.name=" in said
    a, b = sorted(own.get_vocab())[:2]
    numbers = own.get_vocab()
    swapped = SimpleNamespace(get_vocab=lambda: {**numbers, a: numbers[b], b: numbers[a]})
    said = init_from._other_tokens(source, swapped)
    assert f"2 of its {len(own)} tokens have another number here, or none" in said
    own.add_tokens(["<more>"])
    assert init_from._other_tokens(source, own) == ""


# Runs.

START = ("model.layers=fp_mamba1 mamba fp_mamba1", "model.n_layer=3", "optim.schedule=constant")


def first_loss(model, cfg):
    """Of the first update of a run of cfg that was trained."""
    tokenizer = load_tokenizer(cfg, cfg.run_dir)
    batches, _ = loader.build(cfg, tokenizer, cfg.run_dir, 0, 1)
    micro = [next(batches) for _ in range(cfg.train.accumulation(1))]
    ids, labels = (torch.cat([batch[key] for batch in micro]) for key in ("input_ids", "labels"))
    with torch.no_grad():
        return model.eval()(ids, shift_labels=labels, loss_only=True).loss.item()


def test_a_run_starts_there_once_and_a_resumed_one_does_not(tmp_path, tiny_run, tiny):
    """The losses of a run that was stopped in the middle, and whose source is gone, are those of
    one that was not; the first is that of the source's own weights."""
    there = tmp_path / "there"
    shutil.copytree(tiny_run, there)
    start = (*START, f"init_from={there}")
    whole, done = run(tmp_path / "whole", *start)
    assert done.stdout.count("init     ") == 3
    source = init_from.read(there)
    alone = FPRNNForCausalLM(source.config)
    alone.load_state_dict(source.weights, strict=False)
    expected = first_loss(alone, tiny(*start, f"out_dir={tmp_path / 'whole'}"))
    assert whole[0]["loss"] == pytest.approx(expected, abs=1e-5)
    assert expected < 5.5  # random weights: log 304 = 5.7
    record = json.loads((tmp_path / "whole/tiny/init_from.json").read_text())
    assert record["outputs_equal"] and [layer["from"] for layer in record["layers"]] == [0, None, 1]
    # Stopped after the first checkpoint.
    half = tmp_path / "half"
    shutil.copytree(tmp_path / "whole", half)
    shutil.rmtree(half / "tiny/checkpoints/step-000008")
    (half / "tiny/result.json").unlink()
    shutil.rmtree(there)
    resumed, done = run(half, *start, "resume=auto")
    assert "init     " not in done.stdout
    assert [r["loss"] for r in resumed[-4:]] == [r["loss"] for r in whole[-4:]]
    assert (half / "tiny/init_from.json").is_file()


def test_a_resumed_run_keeps_where_it_started(tiny, tiny_run):
    from lm.runs.run_dir import RunDirError, _check_continued

    with pytest.raises(RunDirError, match=r"init_from.path was None, is '.*there'"):
        _check_continued(tiny("init_from=there"), tiny_run / "config.yaml", print)


@pytest.mark.slow
def test_two_ranks_under_zero_3_start_alike(tmp_path, tiny_run):
    start = (*START, f"init_from={tiny_run}", "train.global_batch_size=4")
    start += ("train.grad_accum_steps=null", "train.micro_batch_size=2")
    alone, _ = run(tmp_path / "alone", *start)
    both, done = run(tmp_path / "both", *start, "engine.zero_stage=3", processes=2)
    assert done.stdout.count("outputs at the start are the source's") == 1
    found, expected = ([r["loss"] for r in records] for records in (both, alone))
    assert found == pytest.approx(expected, rel=1e-4)
    assert expected[0] < 5.5  # random weights: 5.7
