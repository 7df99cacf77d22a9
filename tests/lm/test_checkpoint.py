"""Manifests: complete checkpoints load, anything else is named and passed over."""

import json
import shutil

import pytest

from lm import checkpoint
from lm.checkpoint import CheckpointError, claim, newest, verify


@pytest.fixture
def copy(tiny_run, tmp_path):
    """A copy of the tiny run's newest checkpoint, to be damaged."""
    shutil.copytree(tiny_run / "checkpoints", tmp_path / "checkpoints")
    return tmp_path / "checkpoints/step-000008"


def test_a_complete_checkpoint_verifies(copy):
    manifest = verify(copy)
    assert manifest["step"] == 8 and manifest["world_size"] == 1 and manifest["zero_stage"] == 1
    assert any("loader-rank0000" in f for f in manifest["files"])


def test_every_kind_of_damage_is_named_and_passed_over(copy):
    victim = next(f for f in copy.iterdir() if "optim" in f.name)
    whole = victim.read_bytes()
    damages = {
        "has 5 bytes": lambda: victim.write_bytes(b"short"),
        "is damaged": lambda: victim.write_bytes(bytes([whole[0] ^ 1]) + whole[1:]),
        "is missing": victim.unlink,
        "it has no manifest.json": (copy / "manifest.json").unlink,
    }
    for sentence, damage in damages.items():
        damage()
        with pytest.raises(CheckpointError, match=sentence):
            verify(copy)
        said = []
        assert newest(copy.parent.parent, said.append).name == "step-000004"
        assert sentence in said[0]
    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        verify(copy / "nothing")


def test_no_checkpoint_is_none(tmp_path):
    assert newest(tmp_path) is None


def test_consolidated_weights_are_fp32_under_the_models_names(copy, tiny):
    from lm.build import build_model

    state = checkpoint.consolidated(copy)
    expected = build_model(tiny(), 304).state_dict()
    assert set(state) == set(expected)
    for name, tensor in state.items():
        assert tensor.shape == expected[name].shape and str(tensor.dtype) == "torch.float32", name


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x.json"
    checkpoint.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        checkpoint.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}


def test_another_number_of_ranks_or_stage_is_refused(tiny_run, tmp_path):
    from tests.running import fprnn

    shutil.copytree(tiny_run, tmp_path / "runs/tiny")
    done = fprnn(
        "train", "--config", "configs/tiny/lm.yaml", f"out_dir={tmp_path / 'runs'}", "resume=auto",
        "engine.zero_stage=2", "train.steps=9",
    )  # fmt: skip
    assert done.returncode == 1
    assert "was written with zero_stage 1, this run has 2" in done.stderr


def test_a_run_older_than_a_key_of_the_schema_goes_on(tiny):
    """A key that the run's config.yaml does not know yet has its default there."""
    cfg = tiny("resume=auto")
    checkpoint.claim(cfg, overwrite=False)
    (cfg.run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    saved = cfg.run_dir / "config.yaml"
    lines = saved.read_text().splitlines(keepends=True)
    saved.write_text("".join(line for line in lines if "mixer_h_dep" not in line))
    checkpoint.claim(cfg, overwrite=False)
    assert "mixer_h_dep: true" in saved.read_text()
    with pytest.raises(checkpoint.CheckpointError, match=r"model.mixer_h_dep was True, is False"):
        checkpoint.claim(tiny("resume=auto", "model.mixer_h_dep=false"), overwrite=False)


def test_a_run_from_before_there_was_an_auto_is_the_same_run(tiny):
    cfg = tiny()
    claim(cfg, False)
    (cfg.run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    saved = cfg.run_dir / "config.yaml"
    text = saved.read_text()
    old = text.replace("kronecker_norm: auto", "kronecker_norm: rows")
    old = old.replace("contractive: auto", "contractive: null")
    assert old != text
    saved.write_text(old)
    claim(tiny("resume=auto"), False)
    saved.write_text(old.replace("contractive: null", "contractive: 0.5"))
    with pytest.raises(CheckpointError, match=r"contractive was 0\.5, is None"):
        claim(tiny("resume=auto"), False)
