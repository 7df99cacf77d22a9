"""`init_from` of synthetic runs: initial outputs, centroids and refused sources."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from lm.common.errors import ConfigError
from lm.training.upcycle import SourceError
from synthetic import centroids, config
from synthetic.build import load_run
from synthetic.cli import main
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


def test_new_centroids_are_the_mean_state_of_each_answer(args, source):
    started = Training(load_config(args, CENTROIDS, "init_from.partial=true"))
    lines = started.initial_weights.apply()
    expected = "layer 1: 3 centroids, the means of 8,192 states by their 3 answers"
    assert lines[-1].startswith(expected)
    new_centroids = started.model.backbone.layers[1].block.centroids
    assert new_centroids.log_sharpness.exp().item() == pytest.approx(centroids.SHARPNESS)
    # In Z3 the answer is the sum modulo 3. The expected states are computed token by token.
    loaded, sequences = load_run(source), []
    for number in range(centroids.NUM_BATCHES):
        batch_size = centroids.SEQUENCES_PER_BATCH
        batch = loaded.task.batch(0, "train", number, batch_size, lengths=(4, 4))
        sequences += map(tuple, batch.input_ids.tolist())
    answers = [sum(sequence) % 3 for sequence in sequences]
    means, state_by_sequence = torch.zeros(3, 32), {}  # (answers,d_inner)
    for sequence in set(sequences):
        state = None
        for token in sequence:
            with torch.no_grad():
                ids = torch.tensor([[token]])
                state = loaded.model(input_ids=ids, state=state, return_state=True).state
        state_by_sequence[sequence] = state.layers[0].y[0]
    for answer, sequence in zip(answers, sequences):
        means[answer] += state_by_sequence[sequence] / answers.count(answer)
    torch.testing.assert_close(new_centroids.vectors, means, rtol=0, atol=1e-4)


def make_ends(answers, tokens, states):
    answers, tokens = torch.tensor(answers), torch.tensor(tokens)
    return centroids._SequenceEnds(answers, torch.stack([answers, tokens], dim=1), {0: states})


def make_sign_ends(times=30):  # MIN_STATES, as a number: a mutation changes the constant
    """Return ends of parity, whose states have the sign of the answer times that of the token."""
    answers, tokens = [0, 0, 1, 1] * times, [0, 1, 0, 1] * times
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0] * times).unsqueeze(1)
    return make_ends(answers, tokens, signs * torch.tensor([[3.0, 0.0]]) + torch.tensor([0.0, 5.0]))


def choose_means(k, ends):
    means, description = centroids._choose_means(k, ends.states[0], ends, Path("runs/z2"))
    return means.tolist(), description


def test_centroids_are_one_mean_per_answer():
    means, description = choose_means(2, make_sign_ends())
    assert means == [[0, 5], [0, 5]]
    assert description == "2 centroids, the means of 120 states by their 2 answers"


def test_centroids_are_one_mean_per_answer_and_token():
    means, description = choose_means(4, make_sign_ends())
    assert means == [[3, 5], [-3, 5], [-3, 5], [3, 5]]
    assert "4 pairs of answer and last token" in description


@pytest.mark.parametrize(
    "ends",
    [
        make_sign_ends(29),  # fewer states per pair than MIN_STATES
        make_ends([0, 1] * 40, [0, 0] * 40, torch.zeros(80, 2)),  # no more pairs than answers
        make_ends([0, 0, 1] * 40, [0, 1, 0] * 40, torch.zeros(120, 2)),  # one pair is missing
    ],
)
def test_message_omits_pairs_without_reliable_means(ends):
    with pytest.raises(ConfigError, match=r"has 2 answers: set 2$"):
        choose_means(5, ends)


def test_initial_score_is_printed_before_training(args, source, capsys):
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
    ends = centroids._read_sequence_ends(loaded)
    expected, states = [], []
    for row in range(512):
        if row % 5:
            ids = torch.from_numpy(batch.input_ids[row : row + 1, : lengths[row]])
            expected.append([int(batch.labels[row, lengths[row] - 1]), int(ids[0, -1])])
            if row < 20:  # enough states for a comparison
                with torch.no_grad():
                    state = loaded.model(input_ids=ids, return_state=True).state
                states.append(state.layers[0].y[0])
    assert ends.pairs.tolist() == expected and ends.answers.tolist() == [a for a, _ in expected]
    first_states = ends.states[0][: len(states)]
    torch.testing.assert_close(first_states, torch.stack(states), atol=1e-4, rtol=0)


def test_impossible_number_of_centroids_is_refused(args, tmp_path, capsys):
    overrides = CENTROIDS.replace("3", "8"), "init_from.partial=true"
    message = refused(capsys, *args, *overrides)
    assert "has 3 answers: set 3; for each pair of answer and last token: 9" in message
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    "overrides, reason",
    [
        (["task.group=S3"], "it was trained on another task (task.group Z3 there, S3 here)"),
        ([CENTROIDS.replace("3}", "3, expand: 1}")], "layer 0, has no states of 16 channels"),
    ],
)
def test_centroids_without_source_states_stay_random(args, overrides, reason):
    started = Training(load_config(args, CENTROIDS, "init_from.partial=true", *overrides))
    random_vectors = started.model.backbone.layers[1].block.centroids.vectors.clone()
    assert reason in started.initial_weights.apply()[-1]
    assert torch.equal(started.model.backbone.layers[1].block.centroids.vectors, random_vectors)


def test_run_cannot_start_from_itself(source, capsys):
    overrides = f"out_dir={source.parent}", f"init_from={source}"
    config_file = source.parent / "c.yaml"
    command = ("train", "--config", config_file, *overrides, "--overwrite")
    assert "this run itself" in refused(capsys, *command)
