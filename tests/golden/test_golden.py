"""The paper's code, number for number: the four cases kept here, and all of ../shared/golden; and
that the runner fails whatever is wrong with a case."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lm.export.reference import ReferenceCheckpointError
from lm.model import fixed_point
from tests import golden
from tests.golden import HERE, TAGS, CaseError, Result, configuration, relative_error, run_case
from tests.golden.__main__ import main

SHARED = Path(__file__).parents[3] / "shared/golden"
CASES = sorted(HERE.glob("*.json")) + sorted(SHARED.glob("*.json"))


@pytest.mark.parametrize("path", CASES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_case(path):
    results = run_case(path)
    for result in results:
        assert not result.failures, f"{result.tag}: {result.failures}"
        assert not result.notes, f"{result.tag}: {result.notes}"
    if path.stem == "opt_linear":
        assert len(results) == 18
        return
    assert [result.tag for result in results] == list(TAGS)
    compared = set().union(*(r.errors for r in results))
    assert {"logits", "loss"} <= compared or {"y_star", "y_final"} <= compared
    assert sum(name.startswith("grad ") for name in compared) > 10


def test_four_cases_are_kept_here():
    assert len(list(HERE.glob("*.json"))) == 4


# A copy of a case, and something wrong with it.


@pytest.fixture
def folder(tmp_path):
    """A folder with one good case, m1_dplr2."""
    for file in HERE.glob("m1_dplr2.*"):
        shutil.copy(file, tmp_path)
    return tmp_path


def edit_record(folder, change, name="m1_dplr2"):
    path = folder / f"{name}.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def edit_tensors(folder, change, kind=""):
    path = folder / f"m1_dplr2{kind}.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def fails(folder, capsys, *sentences, passed=None):
    """The runner exits with 1 and says these; `passed`: how many settings pass all the same."""
    assert main([str(folder)]) == 1
    printed = capsys.readouterr().out
    for sentence in sentences:
        assert sentence in printed, printed
    if passed is not None:
        assert f"{passed} settings passed" in printed, printed


def test_a_good_case_passes(folder, capsys):
    assert main([str(folder)]) == 0
    assert "1 cases: 9 settings passed, 0 failed" in capsys.readouterr().out


def test_a_case_that_raises_does_not_hide_the_others(folder, capsys):
    (folder / "a_unknown.json").write_text('{"cls": "FPMamba9", "iters": {}}')
    shutil.copy(folder / "m1_dplr2.safetensors", folder / "a_unknown.safetensors")
    for kind in ("exact", "train"):
        name = f"grads_{kind}.safetensors"
        shutil.copy(folder / f"m1_dplr2.{name}", folder / f"a_unknown.{name}")
    (folder / "b_corrupt.json").write_text('{"cls": ')
    (folder / "c_alone.json").write_text('{"cls": "FPMamba", "config": {}}')
    (folder / "d_list.json").write_text("[]")
    (folder / "e_nothing.json").write_text("{}")
    fails(
        folder, capsys,
        "FAILED a_unknown", "unknown layer `FPMamba9`",
        "FAILED b_corrupt", "b_corrupt.json cannot be read: Expecting value",
        "FAILED c_alone", "c_alone.safetensors cannot be read",
        "FAILED d_list", "d_list.json holds no mapping",
        "FAILED e_nothing", "e_nothing.json has no `cls`",
        passed=9,
    )  # fmt: skip


def test_a_setting_that_raises_does_not_hide_the_others(folder, capsys, monkeypatch):
    original = golden.compare_values

    def raising(case, tag, *rest):
        if tag == "tight_f64_eval":
            raise ZeroDivisionError("by zero")
        original(case, tag, *rest)

    monkeypatch.setattr(golden, "compare_values", raising)
    fails(folder, capsys, "FAILED: raised ZeroDivisionError: by zero", passed=8)


def test_a_file_that_is_missing_or_truncated(folder, capsys):
    file = folder / "m1_dplr2.grads_train.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    fails(folder, capsys, "m1_dplr2.grads_train.safetensors cannot be read", passed=0)
    file.unlink()
    fails(folder, capsys, "m1_dplr2.grads_train.safetensors cannot be read", passed=0)


@pytest.mark.parametrize(
    "tag, missing",
    [("exact_f64_eval", "output, y_star, y_final"), ("default_f64_train", "output")],
)
def test_a_tag_without_tensors(folder, capsys, tag, missing):
    def drop(tensors):
        for key in [k for k in tensors if k.startswith(f"{tag}/")]:
            del tensors[key]

    edit_tensors(folder, drop)
    fails(folder, capsys, f"FAILED: the case has no {missing}", passed=8)


@pytest.mark.parametrize("key", ["tight_f32_eval/y_star", "default_f32_train/y_final"])
def test_a_promised_tensor_that_is_not_there(folder, capsys, key):
    edit_tensors(folder, lambda tensors: tensors.pop(key))
    fails(folder, capsys, f"the case has no {key.split('/')[1]}", passed=8)


def test_no_count_and_a_wrong_count_at_any_setting():
    for tag in TAGS:
        case = golden.Case(HERE / "m1_dplr2.json")
        count = case.record["iters"][tag]
        case.record["iters"][tag] = count + 2
        found = golden.run_tag(case, tag)
        assert found.failures == [f"iterations {found.iterations}, not [{count + 2}]"]
        assert abs(found.iterations[0] - count) <= ("f32" in tag)
        del case.record["iters"][tag]
        assert golden.run_tag(case, tag).failures == ["no iteration count for it (`iters`)"]


def test_a_count_may_differ_in_fp32_only_where_rounding_decides():
    def solve(lowest):
        rule = fixed_point.Rule(tol=1e-5, quantile=1.0)
        return golden.Solve(None, [(None, torch.tensor([v])) for v in lowest], rule)

    assert golden._explained(solve([1e-3, 1.02e-5, 0.8e-5]), 3)  # theirs stopped one earlier
    assert golden._explained(solve([1.3e-5, 0.99e-5]), 4)  # theirs went on
    assert golden._explained(solve([1.01e-5, 0.99e-5]), 5)
    assert not golden._explained(solve([1e-3, 1.2e-5, 0.8e-5]), 3)
    assert not golden._explained(solve([1e-3, 0.8e-5]), 4)
    assert not golden._explained(solve([1.3e-5, 0.99e-5]), 5)


def test_gradients_that_are_missing_extra_or_wrong(folder, capsys):
    name = "exact_f64_eval/grad/dt_proj.bias"
    edit_tensors(folder, lambda grads: grads.pop(name), ".grads_exact")
    fails(folder, capsys, "the case has no grad dt_proj.bias", passed=8)
    edit_tensors(folder, lambda grads: grads.update({name: torch.full((64,), 7.0)}), ".grads_exact")
    fails(folder, capsys, "FAILED: grad dt_proj.bias ", passed=8)
    edit_tensors(folder, lambda grads: grads.pop(name), ".grads_exact")
    edit_tensors(folder, lambda g: g.pop("exact_f64_eval/grad_input"), ".grads_exact")
    edit_tensors(
        folder, lambda g: g.update({"exact_f64_eval/grad/Delta": torch.ones(2)}), ".grads_exact"
    )
    fails(folder, capsys, "the case has no grad dt_proj.bias, grad input", "ours has no grad Delta")
    edit_tensors(folder, lambda grads: [grads.pop(k) for k in list(grads)], ".grads_exact")
    fails(folder, capsys, "the case has no gradients for it", passed=8)


def test_parameters_that_do_not_fit(folder, capsys):
    edit_tensors(folder, lambda t: t.update({"param/in_proj.bias": torch.zeros(128)}))
    edit_tensors(folder, lambda t: t.pop("param/D"))
    fails(folder, capsys, "1 missing: D; 1 extra: in_proj.bias", passed=0)


def test_a_key_of_the_configuration_that_is_not_known(folder, capsys):
    edit_record(folder, lambda r: r["config"].update(mixer_acc="relu"))
    fails(folder, capsys, "`config.mixer_acc` (did you mean mixer_ac?)", passed=0)


def test_what_a_record_says_besides_is_said_not_refused(folder, capsys):
    edit_record(folder, lambda r: r.update(weather="fine"))
    assert main([str(folder)]) == 0
    assert "note: not configuration, not read: weather" in capsys.readouterr().out
    read, others = configuration({"cls": "FPMamba", "n_backward": 2, "weather": "fine"})
    assert read == {"cls": "FPMamba", "n_backward": 2}  # mistyped: to be refused
    assert others == ["weather"]


def test_a_tensor_that_nothing_compares_is_named(folder, capsys):
    edit_tensors(folder, lambda t: t.update({"exact_f64_eval/heat": torch.ones(1)}))
    assert main([str(folder)]) == 0
    assert "note: not compared: heat" in capsys.readouterr().out
    edit_tensors(folder, lambda t: t.update({"exakt/output": torch.ones(1)}))
    fails(folder, capsys, "FAILED m1_dplr2 exakt", "an unknown setting: one of exact_f64_eval")


# Wrong models and solvers.


def test_a_wrong_solver_is_caught(monkeypatch, capsys):
    original = fixed_point.FixedPointBlock.step_residual

    def wrong(self, s, y):
        g, residual = original(self, s, y)
        return g, 1.2 * residual

    monkeypatch.setattr(fixed_point.FixedPointBlock, "step_residual", wrong)
    assert main([str(HERE)]) == 1
    printed = capsys.readouterr().out
    assert "iterations [65], not [48]" in printed
    assert "FAILED m1_hh1 tight_f64_eval" in printed


@pytest.mark.parametrize("tag", TAGS)
def test_a_wrong_mixer_fails_at_every_setting(tag):
    """An error of 0.2 % in what a mixer takes off the identity."""
    case = golden.Case(HERE / "m1_dplr2.json")
    assert not golden.run_tag(case, tag).failures
    case.module.mixer.scale *= 1.002
    failures = golden.run_tag(case, tag).failures
    assert any(f.startswith(("output", "y_star")) for f in failures), failures


@pytest.mark.parametrize("tag", TAGS)
def test_a_kronecker_of_another_norm_fails_at_every_setting(tag):
    case = golden.Case(HERE / "m1_kron_nonsq.json")
    case.module.mixer.norm = "spectral"
    result = golden.run_tag(case, tag)
    values = [name for name in ("output", "y_star", "y_final") if name in result.errors]
    assert values
    for name in values:
        assert result.errors[name] > 10 * result.limits[name], name


def test_wrong_values_and_nan_are_caught():
    def result(error):
        return Result("exact_f64_eval", errors={"output": error}, limits={"output": 1e-9})

    assert result(1e-8).failures
    assert result(float("nan")).failures
    assert not result(1e-10).failures
    assert relative_error(torch.ones(2), torch.ones(3)) == float("inf")


def test_a_folder_without_cases_is_an_error(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "no golden case" in capsys.readouterr().err


# Language models: the head.


@pytest.fixture
def language_model(tmp_path):
    """A function: change the record and the tensors of lm_hh1_default → the Case."""

    def changed(record_changes, tensor_changes):
        for file in HERE.glob("lm_hh1_default.*"):
            shutil.copy(file, tmp_path)
        path = tmp_path / "lm_hh1_default.json"
        edit_record(tmp_path, lambda r: r["model_config"].update(record_changes), path.stem)
        tensors = load_file(path.with_suffix(".safetensors"))
        for key, value in tensor_changes.items():
            tensors.pop(key)
            if value is not None:
                tensors[key] = value
        save_file(tensors, path.with_suffix(".safetensors"))
        return golden.Case(path)

    return changed


HEAD = "param/lm_head.weight"


def test_an_untied_head_is_loaded_and_not_overwritten(language_model):
    head = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    for said in ({}, {"tie_embeddings": False}):
        case = language_model(said, {HEAD: head})
        assert not case.module.config.tie_embeddings
        result = golden.run_tag(case, "tight_f32_train")
        assert torch.equal(case.module.lm_head.weight, head)
        assert not torch.equal(case.module.backbone.embeddings.weight, head)
        assert any(f.startswith("logits") for f in result.failures)  # the case's head is another
        assert "the case has no grad lm_head.weight" in " ".join(result.failures)


def test_a_tied_head_need_not_be_there(language_model):
    case = language_model({}, {HEAD: None})
    assert case.module.config.tie_embeddings
    assert not golden.run_tag(case, "exact_f64_eval").failures


def test_a_head_that_is_not_what_the_configuration_says(language_model):
    with pytest.raises(ReferenceCheckpointError, match="tie_embeddings is True, but lm_head"):
        language_model({"tie_embeddings": True}, {HEAD: torch.zeros(64, 32)})
    with pytest.raises(
        ReferenceCheckpointError, match="tie_embeddings is False, but the checkpoint has no"
    ):
        language_model({"tie_embeddings": False}, {HEAD: None})
    with pytest.raises(CaseError, match="have no backbone"):
        language_model({}, {"param/backbone.embedding.weight": None})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_against_zero_is_no_error_and_against_anything_else_a_large_one(dtype):
    zero = torch.zeros(3, dtype=dtype)
    assert relative_error(zero, zero) == 0
    assert relative_error(zero + 1e-30, zero) > 1


def test_only_low_rank_reflections_may_amplify_rounding():
    config = golden.Case(HERE / "m1_dplr2.json").module.config
    assert golden.setting_of("tight_f32_train", config) == golden.SETTINGS["tight_f32"]
    config.mixer_proj_rank = 2
    wider = golden.setting_of("tight_f32_train", config)
    assert 1.6e-3 < wider.values < 5e-3 and wider.tol == 1e-5  # the largest error that is known
