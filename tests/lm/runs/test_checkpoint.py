"""Checkpoints and resumed configs: complete checkpoints load, others are refused."""

import json
import shutil

import pytest

from lm.common.files import OutputError, write_json
from lm.runs.run_dir import RunDir, RunDirError
from lm.training.reshard import consolidate_weights


def claim(cfg, overwrite=False):
    """Claim and release a run directory."""
    run = RunDir(cfg.run_dir)
    run.claim(cfg, overwrite)
    run.save_config(cfg)
    run.release()


def start_run(cfg):
    """Make the directory of a run with one logged update, and return its config.yaml."""
    claim(cfg, False)
    (cfg.run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    return cfg.run_dir / "config.yaml"


@pytest.fixture
def checkpoint(tiny_run, tmp_path):
    """A checkpoint of the tiny run's newest checkpoint that a test may damage."""
    shutil.copytree(tiny_run / "checkpoints", tmp_path / "checkpoints")
    return tmp_path / "checkpoints/step-000008"


def test_consolidated_weights_are_fp32_with_model_names(checkpoint, tiny):
    from lm.training.build import build_model

    state = consolidate_weights(checkpoint)
    expected = build_model(tiny(), 304).state_dict()
    assert set(state) == set(expected)
    for name, tensor in state.items():
        assert tensor.shape == expected[name].shape and str(tensor.dtype) == "torch.float32", name


def test_path_with_brackets_is_no_glob_pattern(checkpoint, tmp_path):
    """DeepSpeed globs its path: `exp[1]` must not match `exp1`."""
    folder, neighbor = tmp_path / "exp[1]", tmp_path / "exp1"
    shutil.copytree(checkpoint.parent, folder)
    expected = consolidate_weights(checkpoint)

    def assert_expected_weights():
        for name, tensor in consolidate_weights(folder / checkpoint.name).items():
            assert tensor.equal(expected[name]), name

    assert_expected_weights()
    shutil.copytree(checkpoint.parent / "step-000004", neighbor / checkpoint.name)  # other weights
    assert_expected_weights()


def test_temporary_folder_with_brackets_is_refused(checkpoint, tmp_path, monkeypatch):
    folder = tmp_path / "tmp[1]"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    shutil.copytree(checkpoint.parent, tmp_path / "exp[1]")
    with pytest.raises(OutputError, match="set TMPDIR"):
        consolidate_weights(tmp_path / "exp[1]" / checkpoint.name)
    assert not list(folder.iterdir())


def test_json_is_written_atomically(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}


def test_run_older_than_a_schema_key_resumes(tiny):
    """A key that config.yaml lacks has its default."""
    cfg = tiny("resume=auto")
    config_path = start_run(cfg)
    lines = config_path.read_text().splitlines(keepends=True)
    config_path.write_text("".join(line for line in lines if "mixer_h_dep" not in line))
    claim(cfg, overwrite=False)
    assert "mixer_h_dep: true" in config_path.read_text()
    with pytest.raises(RunDirError, match=r"model.mixer_h_dep was True, is False"):
        claim(tiny("resume=auto", "model.mixer_h_dep=false"), overwrite=False)


def test_run_older_than_auto_values_resumes(tiny):
    cfg = tiny()
    config_path = start_run(cfg)
    text = config_path.read_text()
    old_text = text.replace("kronecker_norm: auto", "kronecker_norm: rows")
    old_text = old_text.replace("contractive: auto", "contractive: null")
    assert old_text != text
    config_path.write_text(old_text)
    claim(tiny("resume=auto"), False)
    config_path.write_text(old_text.replace("contractive: null", "contractive: 0.5"))
    with pytest.raises(RunDirError, match=r"contractive was 0\.5, is None"):
        claim(tiny("resume=auto"), False)


def test_resumed_run_may_change_the_solver(tiny, messages):
    config_path = start_run(tiny())
    claim(tiny("resume=auto", "solver.gradient=one_step", "solver.eval_tol=0.5"), False)
    assert messages == [
        "note: solver.gradient was 'exact', is 'one_step': training continues with the new values"
    ]
    assert "eval_tol: 0.5" in config_path.read_text()
    claim(tiny("resume=auto", "solver.token=iterate", "model.gradient_checkpointing=true"), False)


@pytest.mark.parametrize(
    "overrides, resumed_overrides",
    [
        ((), ("solver.token=exact", "solver.stopping=causal", "solver.gradient=exact")),
        (("model.name=lstm",), ("model.name=lstm", "solver.tol=0.5")),  # a model without a solver
    ],
)
def test_auto_values_and_baseline_solvers_are_no_change(
    tiny, messages, overrides, resumed_overrides
):
    start_run(tiny(*overrides))
    claim(tiny("resume=auto", *resumed_overrides), False)
    assert messages == []


@pytest.mark.parametrize(
    "change",
    [
        "seed=1",
        "model.out_norm_epsilon=1e-4",
        "tokenizer.vocab_size=310",
        "data.seq_len=8",
        "optim.lr=1e-3",
        "model.d_state=3",
    ],
)
def test_forbidden_changes_on_resume_are_named(tiny, change):
    start_run(tiny())
    key = change.partition("=")[0]
    with pytest.raises(RunDirError, match=rf"holds a run of another config \({key} was "):
        claim(tiny("resume=auto", change, "solver.tol=0.5"), False)
