"""`init_from` of synthetic runs: outputs at the start, what is refused, what is left alone."""

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
    """A trained run of one layer; not to be changed."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "c.yaml").write_text(json.dumps(TREE))
    cfg = config.load(folder / "c.yaml", (f"out_dir={folder}",))
    train(cfg)
    return cfg.run_dir


@pytest.fixture
def args(tmp_path, source):
    """Of `train`, of a hybrid that starts from the source."""
    (tmp_path / "c.yaml").write_text(json.dumps(TREE))
    return (
        *("train", "--config", tmp_path / "c.yaml"),
        *(f"out_dir={tmp_path}", f"init_from={source}", *HYBRID),
    )


@pytest.fixture
def cfg(args):
    return config.load(args[2], args[3:])


def logits(model) -> torch.Tensor:
    ids = torch.arange(12).remainder(3).view(2, 6)
    with torch.no_grad():
        return model.eval()(ids).logits


def test_a_hybrid_starts_as_the_layer_it_was_made_of(source, cfg):
    started = Training(cfg)
    before = logits(started.model)
    said = started.init_from.apply()
    expected = logits(load_run(source).model)
    assert torch.equal(logits(started.model), expected) and not torch.equal(before, expected)
    assert said[-1] == "outputs at the start are the source's"
    assert "new layers, whose out_proj is zero: 0 (mamba), 2 (mamba)" in said


def test_a_run_that_goes_on_reads_nothing_of_it(source, cfg, capsys):
    lent = source.parent / "lent"
    shutil.copytree(source, lent)
    cfg = cfg.model_copy(update={"init_from": config.base.InitFrom(path=str(lent))})
    train(cfg)
    assert "outputs at the start are the source's" in capsys.readouterr().out
    written = json.loads((cfg.run_dir / "init_from.json").read_text())
    assert written["outputs_equal"] and [p["from"] for p in written["layers"]] == [None, 0, None]
    shutil.rmtree(lent)
    longer = cfg.train.model_copy(update={"steps": 4})
    assert train(cfg.model_copy(update={"train": longer}))["updates"] == 4
    assert "init     " not in capsys.readouterr().out
    result = (cfg.run_dir / "result.json").read_bytes()
    with pytest.raises(SourceError, match="which is no run"):
        train(cfg, overwrite=True)
    assert (cfg.run_dir / "result.json").read_bytes() == result  # refused before it is overwritten


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["init_from.path=nowhere"], "init_from.path is nowhere, which is no run"),
        (["model.d_model=32"], "d_model 16, model.d_model is 32: weights of another width"),
        (["task.group=S3"], "trained on another task (task.group Z3 there, S3 here)"),
        (["model.d_state=8"], "d_state is 8, in the source 4"),
        (["init_from.layer=[0]"], "unknown key `init_from.layer`"),
    ],
)
def test_what_does_not_fit_is_refused(args, tmp_path, capsys, overrides, words):
    assert words in refused(capsys, *args, *overrides)
    assert not (tmp_path / "t").exists()


SEED = torch.Generator().manual_seed(0)
THROUGH = "model.layers=[mamba, {fp_mamba1: {state_centroids: 3}}, mamba]"


def test_new_centroids_are_the_mean_state_of_each_answer(args, source):
    cfg = config.load(args[2], (*args[3:], THROUGH, "init_from.partial=true"))
    started = Training(cfg)
    said = started.init_from.apply()
    expected = "layer 1: 3 centroids, the means of 8,192 states by their 3 answers"
    assert said[-1].startswith(expected)
    centroids = started.model.backbone.layers[1].block.centroids
    assert centroids.log_sharpness.exp().item() == pytest.approx(64)
    # Z3: the answer is the sum modulo 3. One sequence at a time, one token at a time.
    loaded, sums, states = load_run(source), [], []
    for number in range(16):
        for ids in torch.from_numpy(loaded.task.batch(0, "train", number, 512, (4, 4)).input_ids):
            sums.append(int(ids.sum()) % 3)
            states.append(tuple(ids.tolist()))
    means, state_of = torch.zeros(3, 32), {}
    for word in set(states):
        state = None
        for token in word:
            with torch.no_grad():
                ids = torch.tensor([[token]])
                state = loaded.model(input_ids=ids, state=state, return_state=True).state
        state_of[word] = state.layers[0].y[0]
    for answer, word in zip(sums, states):
        means[answer] += state_of[word] / sums.count(answer)
    torch.testing.assert_close(centroids.vectors, means, rtol=0, atol=1e-4)


def ends_of(answers, tokens, states):
    answers, tokens = torch.tensor(answers), torch.tensor(tokens)
    return centroids._Ends(answers, torch.stack([answers, tokens], dim=1), {0: states})


def ends_of_signs(times=30):
    """States of parity whose sign is that of the answer times that of the last token."""
    answers, tokens = [0, 0, 1, 1] * times, [0, 1, 0, 1] * times
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0] * times).unsqueeze(1)
    return ends_of(answers, tokens, signs * torch.tensor([[3.0, 0.0]]) + torch.tensor([0.0, 5.0]))


def means_of(k, ends):
    means, description = centroids._choose_means(k, ends.states[0], ends, Path("runs/z2"))
    return means.tolist(), description


def test_one_mean_for_each_answer():
    means, description = means_of(2, ends_of_signs())
    assert means == [[0, 5], [0, 5]]
    assert description == "2 centroids, the means of 120 states by their 2 answers"


def test_a_mean_for_each_pair_of_answer_and_last_token():
    means, description = means_of(4, ends_of_signs())
    assert means == [[3, 5], [-3, 5], [-3, 5], [3, 5]]
    assert "4 pairs of answer and last token" in description


@pytest.mark.parametrize(
    "ends",
    [
        ends_of_signs(29),  # too few of each
        ends_of([0, 1] * 40, [0, 0] * 40, torch.zeros(80, 2)),  # as many pairs as answers
        ends_of([0, 0, 1] * 40, [0, 1, 0] * 40, torch.zeros(120, 2)),  # one pair is missing
    ],
)
def test_pairs_that_are_no_means_are_not_offered(ends):
    with pytest.raises(ConfigError, match=r"has 2 answers: set 2$"):
        means_of(5, ends)


def test_the_started_model_is_measured_before_training(args, source, capsys):
    train(config.load(args[2], (*args[3:], THROUGH, "init_from.partial=true")))
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"init [01]\.\d{3} of the sequences of 4 right before training", said)


def test_an_answer_and_its_token_stand_at_the_sequences_end(source, monkeypatch):
    """Sequences of 2, 4, 3, … tokens, padded; every fifth ends in no answer."""
    loaded = load_run(source)
    whole = loaded.task.batch(0, "train", 0, 512, (4, 4))
    lengths = np.tile([2, 4, 3, 4], 128)
    mask = np.arange(4) < lengths[:, None]
    labels = np.where(mask, whole.labels, IGNORE)
    labels[::5] = IGNORE
    padded = whole._replace(input_ids=whole.input_ids * mask, labels=labels, mask=mask)
    monkeypatch.setattr(loaded.task, "batch", lambda *_: padded)
    monkeypatch.setattr(centroids, "BATCHES", 1)
    ends = centroids._ends(loaded)
    expected, states = [], []
    for row in range(512):
        if row % 5:
            ids = torch.from_numpy(whole.input_ids[row : row + 1, : lengths[row]])
            expected.append([int(whole.labels[row, lengths[row] - 1]), int(ids[0, -1])])
            if row < 20:
                with torch.no_grad():
                    state = loaded.model(input_ids=ids, return_state=True).state
                states.append(state.layers[0].y[0])
    assert ends.pairs.tolist() == expected and ends.answers.tolist() == [a for a, _ in expected]
    torch.testing.assert_close(
        ends.states[0][: len(states)], torch.stack(states), atol=1e-4, rtol=0
    )


def test_another_number_of_centroids_than_answers_is_refused(args, tmp_path, capsys):
    more = THROUGH.replace("3", "8"), "init_from.partial=true"
    said = refused(capsys, *args, *more)
    assert "has 3 answers: set 3; for each pair of answer and last token: 9" in said
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    "others, why",
    [
        (["task.group=S3"], "it was trained on another task (task.group Z3 there, S3 here)"),
        ([THROUGH.replace("3}", "3, expand: 1}")], "layer 0, has no states of 16 channels"),
    ],
)
def test_centroids_without_states_to_start_from_stay_random(args, others, why):
    cfg = config.load(args[2], (*args[3:], THROUGH, "init_from.partial=true", *others))
    started = Training(cfg)
    before = started.model.backbone.layers[1].block.centroids.vectors.clone()
    assert why in started.init_from.apply()[-1]
    assert torch.equal(started.model.backbone.layers[1].block.centroids.vectors, before)


def test_a_run_is_no_start_of_itself(source, capsys):
    at_home = f"out_dir={source.parent}", f"init_from={source}"
    config_file = source.parent / "c.yaml"
    assert "this run itself" in refused(
        capsys, "train", "--config", config_file, *at_home, "--overwrite"
    )
