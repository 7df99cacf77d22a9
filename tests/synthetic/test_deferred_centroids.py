"""Centroids that enter a model when its curriculum is over."""

import pytest
import torch

from lm.common.errors import ConfigError
from lm.runs.checkpoint import CheckpointError
from synthetic import centroids
from synthetic.build import LoadedRun, load_run
from synthetic.deferred_centroids import DeferredCentroids
from synthetic.tasks import IGNORE
from synthetic.train import Training, train
from tests.fabricated import TINY

TREE = {
    **TINY,
    "model": {**TINY["model"], "layers": "fp_mamba1", "n_layer": 1, "state_centroids": 4},
    "optim": {"lr": 1e-2, "warmup": 2},
    "train": {"steps": 8, "batch_size": 8, "length": 4, "curriculum": {"start": 4}},
    "eval": {"every": 4, "lengths": "2:4:2", "examples": 16, "batch_size": 8},
    "log": {"every": 1},
    "checkpoint": {"every": 2, "keep": 8},
}


@pytest.fixture
def three_states(monkeypatch):
    """Let the rule find three states in every model."""

    def find(run, layers, capacity):
        states = torch.eye(3, run.model.config.d_inner)
        found = centroids.compute_means(dict.fromkeys(layers, states), torch.arange(3))
        return centroids.FoundCentroids(found, 3, "3 centroids")

    monkeypatch.setattr(centroids, "find_centroids", find)
    monkeypatch.setattr("synthetic.train.MIN_SCORE", 0.0)  # attach whatever the model can do


def centroid_names(state_dict):
    return [name for name in state_dict if ".centroids." in name]


def test_layer_has_no_centroids_before_the_end_of_the_curriculum(make_cfg):
    training = Training(make_cfg())
    assert training.model.backbone.layers[0].block.centroids is None
    assert not centroid_names(training.model.state_dict())
    held = {id(p) for group in training.optimizer.param_groups for p in group["params"]}
    assert all(id(p) in held for p in training.centroids.modules[0].parameters())


@pytest.mark.parametrize("overrides", [("train.curriculum=null",)])
def test_run_without_a_curriculum_has_centroids_from_the_start(make_cfg, overrides):
    training = Training(make_cfg(*overrides))
    assert training.centroids is None
    assert len(centroid_names(training.model.state_dict())) == 3


def test_unused_centroids_have_no_weight_and_no_gradient(make_cfg, three_states):
    training = Training(make_cfg())
    run = LoadedRun(training.cfg, training.task, training.model, "fp32")
    centroids.find_and_attach(training.centroids, run)
    module = training.model.backbone.layers[0].block.centroids
    y = torch.randn(5, module.vectors.shape[1])
    assert not module.vectors[3].any()
    keys, key_bias, _ = module.maps(torch.float32)
    alpha = torch.softmax(y @ keys.T + key_bias, -1)
    assert (alpha[:, 3] == 0).all()
    module(y, None).square().sum().backward()
    for parameter in module.parameters():
        assert not parameter.grad[3].any() and parameter.grad[:3].abs().sum() > 0


@pytest.mark.parametrize("capacity", [2, 1])
def test_too_many_states_wait_for_a_later_validation(make_cfg, three_states, capacity, capsys):
    factor = 'optim.lr_factors={"*.centroids.*": 0.1}'
    cfg = make_cfg(f"model.state_centroids={capacity}", factor)
    train(cfg)
    out = capsys.readouterr().out
    assert "learning rate × 0.1: 3 tensors" in out
    assert f"distinguishes 3 states and model.state_centroids permits 2 to {capacity}" in out
    assert "none of its centroids: every search failed" in out
    assert not centroid_names(load_run(cfg.run_dir).model.state_dict())


@pytest.mark.parametrize("stop", [3, 6])
def test_resumed_run_repeats_the_uninterrupted_one(make_cfg, three_states, monkeypatch, stop):
    """Centroids enter at update 4; the run is killed before or after."""
    whole = make_cfg("name=whole")
    train(whole)
    real_update = Training.update

    def update_until_killed(self):
        if self.step == stop:
            raise KeyboardInterrupt
        real_update(self)

    parts = make_cfg("name=parts")
    with monkeypatch.context() as patch:
        patch.setattr(Training, "update", update_until_killed)
        with pytest.raises(KeyboardInterrupt):
            train(parts)
    train(parts)
    final = [load_run(cfg.run_dir).model.state_dict() for cfg in (whole, parts)]
    assert len(centroid_names(final[1])) == 3
    assert all(torch.equal(final[1][name], final[0][name]) for name in final[0])


def test_rollback_to_an_earlier_checkpoint_detaches_the_centroids(make_cfg, three_states):
    training = Training(make_cfg())
    before = training.model.state_dict()
    training.centroids.set_attached(True)
    assert len(centroid_names(training.model.state_dict())) == 3
    training.centroids.match(before)
    assert training.centroids.are_missing
    training.model.load_state_dict(before)


def test_deferred_centroids_return_to_the_same_layers():
    class Block(torch.nn.Module):
        def __init__(self, centroids):
            super().__init__()
            self.centroids = centroids

    parts = [torch.nn.Module() for _ in range(3)]
    parts[0].block, parts[1].block = Block(None), Block(torch.nn.Linear(1, 1))
    parts[2].block = torch.nn.Identity()  # a layer that never has centroids
    model = torch.nn.Module()
    model.backbone = torch.nn.Module()
    model.backbone.layers = torch.nn.ModuleList(parts)
    original = parts[1].block.centroids
    deferred = DeferredCentroids(model)
    assert parts[1].block.centroids is None and deferred.are_missing
    deferred.set_attached(True)
    assert parts[1].block.centroids is original and not deferred.are_missing
    assert parts[0].block.centroids is None


def test_centroids_wait_until_the_model_is_right(make_cfg, three_states, monkeypatch, capsys):
    monkeypatch.setattr("synthetic.train.MIN_SCORE", 1.01)
    cfg = make_cfg()
    train(cfg)
    out = capsys.readouterr().out
    assert "\ncentroids: " not in out and "none of its centroids: its score was below" in out
    assert not centroid_names(load_run(cfg.run_dir).model.state_dict())


def test_note_names_an_unfinished_curriculum(make_cfg, three_states, capsys):
    train(make_cfg("train.curriculum.start=2", "train.steps=2"))
    assert "none of its centroids: its curriculum has not ended" in capsys.readouterr().out


def test_a_search_without_success_is_repeated_after_a_tenth_more_updates(make_cfg, monkeypatch):
    training, searches = Training(make_cfg()), []
    training.fit_start = 0.0  # `fit` sets it
    monkeypatch.setattr(training, "_attach_centroids", lambda *_: searches.append(training.step))
    for step in range(100, 140, 5):
        training.step = step
        training._advance_or_stop(score=1.0)
        training.load_state_dict(training.state_dict())  # as a resumed run
    assert searches == [100, 110, 125]


def test_centroids_that_lower_the_score_are_detached_again(make_cfg, three_states, monkeypatch):
    training = Training(make_cfg())
    monkeypatch.setattr(
        training, "_measure_validation", lambda length: {"metrics": {"sequence_accuracy": 0.4}}
    )
    training.fit_start = training.window_start = 0.0
    training._attach_centroids(training.centroids, score=0.9)
    assert training.centroids.are_missing
    training._attach_centroids(training.centroids, score=0.7)
    assert training.centroids.is_attached


def test_optimizer_of_a_version_with_other_parameters_is_refused(make_cfg):
    training = Training(make_cfg())
    training.run, training.fit_start = "runs/a", 0.0
    saved = training.state_dict()
    saved["optimizer"]["param_groups"][-1]["params"].pop()
    with pytest.raises(CheckpointError, match="runs/a was trained by a version with other"):
        training.load_state_dict(saved)


def test_task_without_answers_at_the_end_is_refused_at_the_start(make_cfg, monkeypatch):
    task_class = type(Training(make_cfg()).task)
    real_batch = task_class.batch

    def unanswered_batch(self, *args):
        batch = real_batch(self, *args)
        batch.labels[:, -1] = IGNORE
        return batch

    monkeypatch.setattr(task_class, "batch", unanswered_batch)
    with pytest.raises(ConfigError, match="no sequence of word_problem ends in an answer"):
        Training(make_cfg())


def test_task_whose_batches_continue_each_other_is_refused(make_cfg, monkeypatch):
    training = Training(make_cfg())
    monkeypatch.setattr(type(training.task), "streams", True)
    with pytest.raises(ConfigError, match="batches of word_problem continue each other"):
        centroids.check_task(training.cfg, training.task)
