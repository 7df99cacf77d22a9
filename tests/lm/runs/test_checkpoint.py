"""Manifests: complete checkpoints load, anything else is named and passed over."""

import json
import shutil

import pytest

from lm.common.files import OutputError, write_json
from lm.runs.run_dir import RunDir, RunDirError
from lm.training.reshard import consolidate_weights


def claim(cfg, overwrite=False, say=print):
    """As a run that ends at once."""
    run = RunDir(cfg.run_dir)
    run.claim(cfg, overwrite, say)
    run.save_config(cfg)
    run.release()


def started(cfg):
    """A run of which something was trained."""
    claim(cfg, False)
    (cfg.run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    return cfg.run_dir / "config.yaml"


@pytest.fixture
def copy(tiny_run, tmp_path):
    """A copy of the tiny run's newest checkpoint, to be damaged."""
    shutil.copytree(tiny_run / "checkpoints", tmp_path / "checkpoints")
    return tmp_path / "checkpoints/step-000008"


def test_consolidated_weights_are_fp32_under_the_models_names(copy, tiny):
    from lm.training.build import build_model

    state = consolidate_weights(copy)
    expected = build_model(tiny(), 304).state_dict()
    assert set(state) == set(expected)
    for name, tensor in state.items():
        assert tensor.shape == expected[name].shape and str(tensor.dtype) == "torch.float32", name


def test_brackets_in_a_path_are_no_pattern(copy, tmp_path):
    """DeepSpeed globs the path that it is given: `exp[1]` must not be read as `exp1`."""
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


def test_temporary_files_below_brackets_are_refused(copy, tmp_path, monkeypatch):
    folder = tmp_path / "tmp[1]"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    shutil.copytree(copy.parent, tmp_path / "exp[1]")
    with pytest.raises(OutputError, match="set TMPDIR"):
        consolidate_weights(tmp_path / "exp[1]" / copy.name)
    assert not list(folder.iterdir())


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}


def test_a_run_older_than_a_key_of_the_schema_goes_on(tiny):
    """A key that the run's config.yaml does not know yet has its default there."""
    cfg = tiny("resume=auto")
    saved = started(cfg)
    lines = saved.read_text().splitlines(keepends=True)
    saved.write_text("".join(line for line in lines if "mixer_h_dep" not in line))
    claim(cfg, overwrite=False)
    assert "mixer_h_dep: true" in saved.read_text()
    with pytest.raises(RunDirError, match=r"model.mixer_h_dep was True, is False"):
        claim(tiny("resume=auto", "model.mixer_h_dep=false"), overwrite=False)


def test_a_run_from_before_there_was_an_auto_is_the_same_run(tiny):
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


def test_a_resumed_run_may_have_another_solver(tiny):
    saved = started(tiny())
    said = []
    claim(
        tiny("resume=auto", "solver.gradient=one_step", "solver.eval_tol=0.5"), False, said.append
    )
    assert said == [
        "note: solver.gradient was 'exact', is 'one_step': training continues with the new values"
    ]
    assert "eval_tol: 0.5" in saved.read_text()
    claim(tiny("resume=auto", "solver.token=iterate", "model.gradient_checkpointing=true"), False)


@pytest.mark.parametrize(
    "first, then",
    [
        ((), ("solver.token=exact", "solver.stopping=causal", "solver.gradient=exact")),
        (("model.name=lstm",), ("model.name=lstm", "solver.tol=0.5")),  # which has no solver
    ],
)
def test_what_an_auto_stands_for_and_the_solver_of_a_baseline_are_no_change(tiny, first, then):
    started(tiny(*first))
    said = []
    claim(tiny("resume=auto", *then), False, said.append)
    assert said == []


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
def test_what_a_resumed_run_may_not_change_is_refused_by_name(tiny, change):
    started(tiny())
    key = change.partition("=")[0]
    with pytest.raises(RunDirError, match=rf"holds a run of another config \({key} was "):
        claim(tiny("resume=auto", change, "solver.tol=0.5"), False)
