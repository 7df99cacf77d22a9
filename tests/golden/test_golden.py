"""Golden cases of the paper's code, here and in ../shared/golden, and errors that must be found."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lm.model import solver
from tests import golden
from tests.golden import HERE, TAGS, Result, relative_error, run_case
from tests.golden.__main__ import main
from tests.golden.reference import reference_config
from tests.marks import slow

SHARED = Path(__file__).parents[3] / "shared/golden"
OWN_CASES = sorted(HERE.glob("*.json"))
OTHER_CASES = {path.stem: path for path in sorted(SHARED.glob("*.json"))}
for path in OWN_CASES:
    OTHER_CASES.pop(path.stem, None)  # a case in both folders has the same content


@pytest.mark.parametrize(
    "path",
    [*OWN_CASES, *map(slow, OTHER_CASES.values())],
    ids=lambda p: f"{p.parent.name}-{p.stem}",
)
def test_case(path):
    results = run_case(path)
    for result in results:
        assert not result.failures, f"{result.tag}: {result.failures}"
    if path.stem == "opt_linear":
        assert len(results) == 18
        return
    assert [result.tag for result in results] == list(TAGS)
    compared = set().union(*(r.errors for r in results))
    assert {"logits", "loss"} <= compared or {"y_star", "y_final"} <= compared
    assert sum(name.startswith("grad ") for name in compared) > 10


def test_repository_has_four_cases():
    assert len(OWN_CASES) == 4


# Damaged copies of a case.


@pytest.fixture
def folder(tmp_path):
    """Folder with one correct case, m1_dplr2."""
    for file in HERE.glob("m1_dplr2.*"):
        shutil.copy(file, tmp_path)
    return tmp_path


EXACT = "exact_f64_eval"


def drop_tag(tensors):
    for key in [key for key in tensors if key.startswith(f"{EXACT}/")]:
        del tensors[key]


@pytest.mark.parametrize(
    "kind, change, message",
    [
        ("", drop_tag, "the case has no output, y_star, y_final"),
        ("", lambda t: t.pop("tight_f32_eval/y_star"), "the case has no y_star"),
        ("", lambda t: t.update({f"{EXACT}/heat": torch.ones(1)}), "not compared: heat"),
        ("", lambda t: t.update({"exakt/output": torch.ones(1)}), "an unknown setting: one of"),
        ("", lambda t: t.pop("param/D"), 'Missing key(s) in state_dict: "D"'),
        (".grads_exact", drop_tag, "the case has no gradients for it"),
        (
            ".grads_exact",
            lambda t: t.pop(f"{EXACT}/grad/dt_proj.bias"),
            "the case has no grad dt_proj.bias",
        ),
        (
            ".grads_exact",
            lambda t: t.update({f"{EXACT}/grad/Delta": torch.ones(2)}),
            "ours has no grad Delta",
        ),
        (
            ".grads_exact",
            lambda t: t.update({f"{EXACT}/grad/dt_proj.bias": torch.full((64,), 7.0)}),
            "FAILED: grad dt_proj.bias ",
        ),
    ],
)
def test_incomplete_or_changed_case_fails(folder, capsys, kind, change, message):
    path = folder / f"m1_dplr2{kind}.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    assert main([str(folder)]) == 1
    assert message in capsys.readouterr().out


def test_case_that_raises_does_not_hide_the_others(folder, capsys):
    (folder / "a_corrupt.json").write_text('{"cls": ')
    assert main([str(folder)]) == 1
    output = capsys.readouterr().out
    assert "FAILED a_corrupt" in output and "9 settings passed, 1 failed" in output


def test_unknown_config_key_is_refused():
    record = json.loads((HERE / "m1_dplr2.json").read_text())
    record["config"]["mixer_acc"] = "relu"
    with pytest.raises(ValueError, match="unknown keys of the configuration: mixer_acc"):
        reference_config(record)


def test_folder_without_cases_is_an_error(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "no golden case" in capsys.readouterr().err


def test_missing_and_wrong_counts_fail_at_every_setting():
    for tag in TAGS:
        case = golden.Case(HERE / "m1_dplr2.json")
        count = case.record["iters"][tag]
        case.record["iters"][tag] = count + 2
        result = golden.run_tag(case, tag)
        assert result.failures == [f"iterations {result.iterations}, not [{count + 2}]"]
        assert abs(result.iterations[0] - count) <= ("f32" in tag)
        del case.record["iters"][tag]
        assert golden.run_tag(case, tag).failures == ["no iteration count for it (`iters`)"]


def test_counts_may_differ_only_if_rounding_decides():
    def solve(lowest):
        rule = solver.Rule(tol=1e-5, quantile=1.0)
        return golden.Solve(None, [(None, torch.tensor([v])) for v in lowest], rule)

    assert golden._explained(
        solve([1e-3, 1.02e-5, 0.8e-5]), 3
    )  # theirs stopped one iteration earlier
    assert golden._explained(solve([1.3e-5, 0.99e-5]), 4)  # theirs continued
    assert golden._explained(solve([1.01e-5, 0.99e-5]), 5)
    assert not golden._explained(solve([1e-3, 1.2e-5, 0.8e-5]), 3)
    assert not golden._explained(solve([1e-3, 0.8e-5]), 4)
    assert not golden._explained(solve([1.3e-5, 0.99e-5]), 5)


# Wrong models and solvers.


def test_wrong_solver_is_caught(monkeypatch, capsys):
    original = solver.token_residual
    monkeypatch.setattr(solver, "token_residual", lambda y, g: 1.2 * original(y, g))
    assert main([str(HERE)]) == 1
    output = capsys.readouterr().out
    assert "iterations [65], not [48]" in output
    assert "FAILED m1_hh1 tight_f64_eval" in output


@pytest.mark.parametrize("tag", TAGS)
def test_wrong_mixer_fails_at_every_setting(tag):
    """The mixer's difference from the identity is wrong by 0.2 %."""
    case = golden.Case(HERE / "m1_dplr2.json")
    assert not golden.run_tag(case, tag).failures
    case.module.mixer.scale *= 1.002
    failures = golden.run_tag(case, tag).failures
    assert any(f.startswith(("output", "y_star")) for f in failures), failures


@pytest.mark.parametrize("tag", TAGS)
def test_wrong_kronecker_norm_fails_at_every_setting(tag):
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_relative_error_of_zero(dtype):
    zero = torch.zeros(3, dtype=dtype)
    assert relative_error(zero, zero) == 0
    assert relative_error(zero + 1e-30, zero) > 1


def test_only_low_rank_reflections_may_amplify_rounding():
    config = golden.Case(HERE / "m1_dplr2.json").module.config
    assert golden.choose_setting("tight_f32_train", config) == golden.SETTINGS["tight_f32"]
    config.mixer_proj_rank = 2
    wider = golden.choose_setting("tight_f32_train", config)
    assert 1.6e-3 < wider.values < 5e-3 and wider.tol == 1e-5  # the largest known error is 1.6e-3
