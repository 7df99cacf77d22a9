"""`init_from` of synthetic runs: initial outputs and refused sources."""

import json
import shutil
from functools import partial

import pytest
import torch

from lm.training.upcycle import SourceError
from synthetic import config
from synthetic.build import load_run
from synthetic.cli import main
from synthetic.train import Training, train
from tests.fabricated import TINY
from tests.refusals import refused as refused_by

TREE = {**TINY, "model": {**TINY["model"], "layers": "fp_mamba1", "n_layer": 1}}
NEUTRAL = ("task.context=99", "task.noise=0.1", "task.supervision=every")  # change no id
HYBRID = ("model.layers=mamba fp_mamba1 mamba", "model.n_layer=3", "seed=7", *NEUTRAL)

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
    started.initial_weights.apply()
    lines = started.initial_weights.describe()
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


def test_run_cannot_start_from_itself(source, capsys):
    overrides = f"out_dir={source.parent}", f"init_from={source}"
    config_file = source.parent / "c.yaml"
    command = ("train", "--config", config_file, *overrides, "--overwrite")
    assert "this run itself" in refused(capsys, *command)
