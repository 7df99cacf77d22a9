"""`init_from` of synthetic runs: initial outputs, centroids and refused sources."""

import json
import re
import shutil
from functools import partial

import numpy as np
import pytest
import torch

from lm.training.upcycle import SourceError
from synthetic import centroids, config
from synthetic.build import load_run
from synthetic.cli import main
from synthetic.runs import find_differences
from synthetic.tasks import IGNORE
from synthetic.train import Training, train
from tests.fabricated import TINY
from tests.refusals import refused as refused_by

TREE = {**TINY, "model": {**TINY["model"], "layers": "fp_mamba1", "n_layer": 1}}
HYBRID = ("model.layers=mamba fp_mamba1 mamba", "model.n_layer=3", "seed=7", "task.context=99")

refused = partial(refused_by, run=main, prog="python -m synthetic")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Directory of a trained run with one layer; tests must not change it."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "c.yaml").write_text(json.dumps(TREE))
    cfg = config.load(folder / "c.yaml", (f"out_dir={folder}",))
    train(cfg)
    return cfg.run_dir


@pytest.fixture
def args(tmp_path, source):
    """Arguments of `train` for a hybrid that starts from the source."""
    (tmp_path / "c.yaml").write_text(json.dumps(TREE))
    overrides = (f"out_dir={tmp_path}", f"init_from={source}", *HYBRID)
    return ("train", "--config", tmp_path / "c.yaml", *overrides)


def load_config(args, *overrides):
    """Load the config of arguments ("train", "--config", path, *overrides)."""
    _, _, path, *arg_overrides = args
    return config.load(path, (*arg_overrides, *overrides))


@pytest.fixture
def cfg(args):
    return load_config(args)


def compute_logits(model) -> torch.Tensor:
    ids = torch.arange(12).remainder(3).view(2, 6)
    with torch.no_grad():
        return model.eval()(ids).logits


def test_hybrid_starts_with_the_outputs_of_its_source(source, cfg):
    started = Training(cfg)
    random_logits = compute_logits(started.model)
    lines = started.initial_weights.apply()
    expected = compute_logits(load_run(source).model)
    assert torch.equal(compute_logits(started.model), expected)
    assert not torch.equal(random_logits, expected)
    assert lines[-1] == "outputs at the start are the source's"
    assert "new layers, whose out_proj is zero: 0 (mamba), 2 (mamba)" in lines


def test_resumed_run_does_not_read_the_source(source, cfg, capsys):
    copy = source.parent / "copy"
    shutil.copytree(source, copy)
    cfg = cfg.model_copy(update={"init_from": config.InitFrom(path=str(copy))})
    train(cfg)
    assert "outputs at the start are the source's" in capsys.readouterr().out
    record = json.loads((cfg.run_dir / "init_from.json").read_text())
    assert record["outputs_equal"] and [p["from"] for p in record["layers"]] == [None, 0, None]
    shutil.rmtree(copy)
    longer = cfg.train.model_copy(update={"steps": 4})
    assert train(cfg.model_copy(update={"train": longer}))["updates"] == 4
    assert "init     " not in capsys.readouterr().out
    result = (cfg.run_dir / "result.json").read_bytes()
    with pytest.raises(SourceError, match="which is no run"):
        train(cfg, overwrite=True)
    assert (cfg.run_dir / "result.json").read_bytes() == result  # not overwritten


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["init_from.path=nowhere"], "init_from.path is nowhere, which is no run"),
        (["model.d_model=32"], "d_model 16, model.d_model is 32: weights of another width"),
        (["task.group=S3"], "trained on another task (task.group Z3 there, S3 here)"),
        (["model.d_state=8"], "d_state is 8, in the source 4"),
        (["init_from.layer=[0]"], "unknown key `init_from.layer`"),
    ],
)
def test_mismatched_sources_are_refused(args, tmp_path, capsys, overrides, message):
    assert message in refused(capsys, *args, *overrides)
    assert not (tmp_path / "t").exists()


CENTROIDS = "model.layers=[mamba, {fp_mamba1: {state_centroids: 3}}, mamba]"
AUTO = CENTROIDS.replace("3", "auto"), "init_from.partial=true"


@pytest.fixture
def found(monkeypatch):
    """Three centroids that the search is made to find."""
    vectors = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    found = centroids.FoundCentroids({0: vectors}, "3 centroids, as searched")
    monkeypatch.setattr(centroids, "find_centroids", lambda source, layers: found)
    return found


def test_auto_takes_the_number_of_states_and_their_means(args, found):
    started = Training(load_config(args, *AUTO))
    assert started.initial_weights.apply()[-1] == "layer 1: 3 centroids, as searched"
    new_centroids = started.model.backbone.layers[1].block.centroids
    assert torch.equal(new_centroids.vectors, found.vectors[0])
    variance = found.vectors[0].var(0, unbiased=False).mean().item()
    expected_sharpness = centroids.SHARPNESS / variance
    assert new_centroids.log_sharpness.exp().item() == pytest.approx(expected_sharpness)


def test_a_run_records_the_number_and_resumes_with_auto(args, found, capsys):
    cfg = load_config(args, *AUTO)
    train(cfg)
    saved = config.load(cfg.run_dir / "config.yaml")
    assert saved.model.layers[1] == {"fp_mamba1": {"state_centroids": 3}}
    longer = cfg.train.model_copy(update={"steps": 4})
    assert train(cfg.model_copy(update={"train": longer}))["updates"] == 4
    assert load_run(cfg.run_dir).model.backbone.layers[1].block.centroids.vectors.shape[0] == 3
    assert not find_differences(cfg.model_copy(update={"train": longer}))
    # A run that starts from this one takes its number.
    overrides = f"init_from={cfg.run_dir}", "name=third", AUTO[0]
    third = Training(load_config(args, *overrides))
    assert third.cfg.model.centroid_counts == [0, 3]
    assert third.initial_weights.apply()[-1] == "outputs at the start are the source's"


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            [CENTROIDS.replace("3", "8")],
            "is 8, but the model of {} tells 3 states apart: set 3",
        ),
        ([AUTO[0], "task.group=S3"], "auto, but {}: it was trained on another task (task.group"),
        (["model.layers=mamba", "model.state_centroids=auto"], "auto, but no layer of {} becomes"),
        ([AUTO[0], "init_from=null"], "auto, which counts the states of a trained run: set"),
        (["model.state_centroids=many"], "state_centroids"),
    ],
)
def test_impossible_numbers_of_centroids_are_refused(
    args, found, source, tmp_path, capsys, overrides, message
):
    assert message.format(source) in refused(capsys, *args, "init_from.partial=true", *overrides)
    assert not (tmp_path / "t").exists()


def test_initial_score_is_printed_before_training(args, found, capsys):
    train(load_config(args, CENTROIDS, "init_from.partial=true"))
    output = " ".join(capsys.readouterr().out.split())
    score = r"init before training, sequence accuracy is [01]\.\d{3} at length 4"
    assert re.search(score, output)


def test_ends_are_read_at_the_last_token_of_padded_rows(source, monkeypatch):
    """Sequences have 2, 4, 3, … tokens and are padded; every fifth has no answer at its end."""
    loaded = load_run(source)
    batch = loaded.task.batch(0, "train", 0, 512, (4, 4))
    lengths = np.tile([2, 4, 3, 4], 128)
    mask = np.arange(4) < lengths[:, None]
    labels = np.where(mask, batch.labels, IGNORE)
    labels[::5] = IGNORE
    padded = batch._replace(input_ids=batch.input_ids * mask, labels=labels, mask=mask)
    monkeypatch.setattr(loaded.task, "batch", lambda *_: padded)
    monkeypatch.setattr(centroids, "NUM_BATCHES", 1)
    ends = centroids._SequenceEnds.read(loaded, [0])
    signatures, states = [], []
    for row in (row for row in range(25) if row % 5):
        ids = torch.from_numpy(batch.input_ids[row : row + 1, : lengths[row]])
        with torch.no_grad():
            output = loaded.model(input_ids=ids, return_state=True)
            whole = torch.cat([ids.expand(len(ends.probes), -1), ends.probes], 1)
            predictions = loaded.model(input_ids=whole).logits.argmax(-1)[:, lengths[row] :]
        states.append(output.state.layers[0].y[0])
        last_prediction = output.logits[0, -1:].argmax(-1)
        signatures.append(torch.cat([last_prediction, predictions.flatten()]))
    assert len(ends.signatures) == 512 - 103
    assert torch.equal(ends.signatures[: len(signatures)], torch.stack(signatures))
    torch.testing.assert_close(
        ends.vectors[0][: len(states)], torch.stack(states), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(
    "overrides, reason",
    [
        (["task.group=S3"], "it was trained on another task (task.group Z3 there, S3 here)"),
        ([CENTROIDS.replace("3}", "3, expand: 1}")], "layer 0, has no states of 16 numbers"),
    ],
)
def test_centroids_without_source_states_stay_random(args, found, overrides, reason):
    started = Training(load_config(args, CENTROIDS, "init_from.partial=true", *overrides))
    random_vectors = started.model.backbone.layers[1].block.centroids.vectors.clone()
    assert reason in started.initial_weights.apply()[-1]
    assert torch.equal(started.model.backbone.layers[1].block.centroids.vectors, random_vectors)


def test_run_cannot_start_from_itself(source, capsys):
    overrides = f"out_dir={source.parent}", f"init_from={source}"
    config_file = source.parent / "c.yaml"
    command = ("train", "--config", config_file, *overrides, "--overwrite")
    assert "this run itself" in refused(capsys, *command)
