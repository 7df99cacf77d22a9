"""Checkpoints and resumed configs: complete checkpoints load, others are refused."""

import json
import shutil

import pytest

from lm.common.files import OutputError, write_json
from lm.runs.run_dir import RunDir, RunDirError
from lm.training.reshard import consolidate_weights


def claim(cfg, overwrite=False, say=print):
    """Claim and release a run directory."""
    run = RunDir(cfg.run_dir)
    run.claim(cfg, overwrite, say)
    run.save_config(cfg)
    run.release()


def started(cfg):
    """A run directory with a trained checkpoint."""
    claim(cfg, False)
    (cfg.run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    return cfg.run_dir / "config.yaml"


@pytest.fixture
def copy(tiny_run, tmp_path):
    """A copy of the tiny run's newest checkpoint that a test may damage."""
    shutil.copytree(tiny_run / "checkpoints", tmp_path / "checkpoints")
    return tmp_path / "checkpoints/step-000008"


def test_consolidated_weights_are_fp32_with_model_names(copy, tiny):
    from lm.training.build import build_model

    state = consolidate_weights(copy)
    expected = build_model(tiny(), 304).state_dict()
    assert set(state) == set(expected)
    for name, tensor in state.items():
        assert tensor.shape == expected[name].shape and str(tensor.dtype) == "torch.float32", name


def test_path_with_brackets_is_no_glob_pattern(copy, tmp_path):
    """DeepSpeed globs its path: `exp[1]` must not match `exp1`."""
    own, neighbor = tmp_path / "exp[1]", tmp_path / "exp1"
    shutil.copytree(copy.parent, own)
    expected = consolidate_weights(copy)
    assert all(
        tensor.equal(expected[name])
        for name, tensor in consolidate_weights(own / copy.name).items()
    )
    shutil.copytree(copy.parent / "step-000004", neighbor / copy.name)  # other weights
    assert all(
        tensor.equal(expected[name])
        for name, tensor in consolidate_weights(own / copy.name).items()
    )


def test_temporary_folder_with_brackets_is_refused(copy, tmp_path, monkeypatch):
    folder = tmp_path / "tmp[1]"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    shutil.copytree(copy.parent, tmp_path / "exp[1]")
    with pytest.raises(OutputError, match="set TMPDIR"):
        consolidate_weights(tmp_path / "exp[1]" / copy.name)
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
    saved = started(cfg)
    lines = saved.read_text().splitlines(keepends=True)
    saved.write_text("".join(line for line in lines if "mixer_h_dep" not in line))
    claim(cfg, overwrite=False)
    assert "mixer_h_dep: true" in saved.read_text()
    with pytest.raises(RunDirError, match=r"model.mixer_h_dep was True, is False"):
        claim(tiny("resume=auto", "model.mixer_h_dep=false"), overwrite=False)


def test_run_older_than_auto_values_resumes(tiny):
    cfg = tiny()
    saved = started(cfg)
    text = saved.read_text()
    old = text.replace("kronecker_norm: auto", "kronecker_norm: rows")
    old = old.replace("contractive: auto", "contractive: null")
    assert old != text
    saved.write_text(old)
    claim(tiny("resume=auto"), False)
    saved.write_text(old.replace("contractive: null", "contractive: 0.5"))
    with pytest.raises(RunDirError, match=r"contractive was 0\.5, is None"):
        claim(tiny("resume=auto"), False)


def test_resumed_run_may_change_the_solver(tiny):
    saved = started(tiny())
    messages = []
    claim(
        tiny("resume=auto", "solver.gradient=one_step", "solver.eval_tol=0.5"),
        False,
        messages.append,
    )
    assert messages == [
        "note: solver.gradient was 'exact', is 'one_step': training continues with the new values"
    ]
    assert "eval_tol: 0.5" in saved.read_text()
    claim(tiny("resume=auto", "solver.token=iterate", "model.gradient_checkpointing=true"), False)


@pytest.mark.parametrize(
    "first, then",
    [
        ((), ("solver.token=exact", "solver.stopping=causal", "solver.gradient=exact")),
        (("model.name=lstm",), ("model.name=lstm", "solver.tol=0.5")),  # a model without a solver
    ],
)
def test_auto_values_and_baseline_solvers_are_no_change(tiny, first, then):
    started(tiny(*first))
    messages = []
    claim(tiny("resume=auto", *then), False, messages.append)
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
    started(tiny())
    key = change.partition("=")[0]
    with pytest.raises(RunDirError, match=rf"holds a run of another config \({key} was "):
        claim(tiny("resume=auto", change, "solver.tol=0.5"), False)
