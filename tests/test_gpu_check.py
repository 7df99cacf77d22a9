"""`make gpu-check`: a dry run on a CPU, failing parts, and the measurements it reads."""

import json
import os
import sys

import pytest

from benchmarks import gpu_check
from lm.config import load
from tests.running import FORKS, ROOT

XML = """<testsuites><testsuite>{}</testsuite></testsuites>"""
PASSED = '<testcase classname="a" name="one"/>'
SKIPPED = '<testcase classname="a" name="two"><skipped message="no mamba_ssm"/></testcase>'
FAILED = '<testcase classname="a" name="three"><failure message="off by 1">…</failure></testcase>'
IMPORT_ERROR = """<testcase classname="" name="tests.b"><error message="collection failure">
E   ModuleNotFoundError: No module named 'pydantic'
</error></testcase>"""
# The sleeping child keeps the output open and must end with its parent.
HANGING_CODE = "import subprocess as s; print('so far', flush=True); s.run(['sleep', '99'])"
SYNTAX_ERROR = IMPORT_ERROR.replace(
    "ModuleNotFoundError: No module named 'pydantic'", "SyntaxError"
)


def run_check(out, *args):
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    return FORKS.run("benchmarks.gpu_check", ["--out", out, *args], 200, environment)


@pytest.mark.slow  # a minute: eight processes that import everything
def test_quick_run_on_cpu(tmp_path):
    names = "plan,train,resume,mamba,export,generate,eval,decode"
    result = run_check(tmp_path, "--device", "cpu", "--quick", "--parts", names)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["ok"] and summary["complete"] and summary["environment"]["torch"]
    figures = {part["part"]: part["figures"] for part in summary["parts"]}
    assert list(figures) == names.split(",")
    assert figures["plan"]["memory_gib"] > 0
    for name in ("train", "mamba"):
        assert figures[name]["tokens_per_s"] > 0 and figures[name]["first_update_s"] > 0
    assert figures["resume"]["update"] == str(gpu_check.UPDATES) and figures["generate"]["text"]
    assert 0 <= figures["eval"]["catbabi_mini acc"] <= 1
    assert figures["decode"]["2 × ours, cached"].endswith(" tokens/s")
    steps = [json.loads(x)["step"] for x in (tmp_path / "fp.jsonl").read_text().splitlines()]
    assert max(steps) == gpu_check.RESUMED_UPDATES and (tmp_path / "mamba.jsonl").exists()


def test_missing_gpu_is_reported(tmp_path):
    result = run_check(tmp_path / "out")
    assert result.returncode == 2 and not (tmp_path / "out").exists()
    assert "gpu-check needs a CUDA device" in result.stdout.splitlines()[-1]
    assert "--quick" in run_check(tmp_path, "--device", "cpu").stderr
    assert "unknown part nothing" in run_check(tmp_path, "--parts", "nothing").stderr
    assert "no such folder" in run_check(tmp_path, "--card", str(tmp_path / "none")).stderr


def test_failing_or_hanging_part_does_not_stop_the_others(tmp_path, capsys):
    def make_part(name, code, limit=10.0, **kwargs):
        def judge(status, lines):
            text = lines[-1].strip() if lines else ""
            return gpu_check.Outcome("failed" if status else "ok", {"text": text})

        return gpu_check.Part(name, [sys.executable, "-c", code], judge, limit=limit, **kwargs)

    parts = [
        make_part("good", "print('fine')"),
        make_part("bad", "import sys; sys.exit('a reason')"),
        make_part("absent", "", skip_reason="there is no such script"),
        # The limits add up: 3 × 10 − 25 = 5 seconds are left for this part.
        make_part("hangs", HANGING_CODE, limit=-25.0),
        make_part("last", "print('fine again')", env={"PYTHONUNBUFFERED": "1"}),
    ]
    status = gpu_check.run_parts(parts, tmp_path, dict(os.environ), {}, tmp_path / "runs")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert status == 1 and not summary["ok"] and summary["complete"]
    records = {p["part"]: p for p in summary["parts"]}
    assert [p["status"] for p in records.values()] == ["ok", "failed", "skipped", "failed", "ok"]
    assert records["good"]["figures"] == {"text": "fine"} and records["hangs"]["seconds"] < 60
    assert records["hangs"]["figures"] == {"text": "so far"}
    reason = records["hangs"]["reason"]
    assert "not finished in" in reason and "so far" in reason
    output = capsys.readouterr().out
    assert "[bad] a reason" in output and output.splitlines()[-1].startswith("FAILED in")
    assert "[last] fine again" in (tmp_path / "check.log").read_text()


@pytest.mark.parametrize(
    "cases, exit_status, status, message",
    [
        ([PASSED, SKIPPED], 0, "ok", "no mamba_ssm"),
        ([PASSED, IMPORT_ERROR], 1, "ok", "1 without pydantic"),
        ([PASSED, FAILED], 1, "failed", "a.three: off by 1"),
        ([PASSED, SYNTAX_ERROR], 1, "failed", "tests.b: collection failure"),
        ([SKIPPED], 0, "failed", "no test passed"),
        ([PASSED], 3, "failed", "exit status 3"),
        ([], None, "failed", "wrote no results"),
    ],
)
def test_pytest_results_are_judged(cases, exit_status, status, message, tmp_path):
    xml = tmp_path / "tests.xml"
    if cases:
        xml.write_text(XML.format("".join(cases)))
    outcome = gpu_check.judge_tests(xml, exit_status, [])
    assert outcome.status == status and message in str(outcome.figures) + outcome.reason
    if cases:
        assert outcome.figures["passed"] == int(PASSED in cases)


def test_parts_fit_into_ten_minutes(tmp_path):
    assert sum(gpu_check.TIME_LIMITS_S.values()) <= 560
    parts = {
        part.name: part for part in gpu_check.make_parts(tmp_path, tmp_path / "runs", "cuda", False)
    }
    assert list(parts) == list(gpu_check.TIME_LIMITS_S)
    for name in ("test_triton_cell.py", "test_triton_scan.py"):
        assert f"tests/lm/kernels/{name}" in parts["tests"].command
    assert gpu_check.FPMAMBA_CONFIG in parts["train"].command
    assert gpu_check.MAMBA_CONFIG in parts["mamba"].command
    assert parts["mamba"].env == {"FPRNN_KERNELS": "triton"}
    assert parts["mamba_ssm"].env == {"FPRNN_KERNELS": "mamba_ssm"}


@pytest.mark.parametrize("name", ["FPMAMBA_CONFIG", "MAMBA_CONFIG"])
def test_overrides_give_a_valid_config(name, tmp_path):
    (tmp_path / "fineweb").mkdir()
    overrides = gpu_check.make_overrides(False, tmp_path, tmp_path)
    assert f"data.path={tmp_path / 'fineweb'}" in overrides
    assert "data.source=builtin" in gpu_check.make_overrides(False, tmp_path, None)
    cfg = load.load(ROOT / getattr(gpu_check, name), overrides)
    assert cfg.train.accumulation(1) == 1 and cfg.data.seq_len == 2048
    assert cfg.model.d_model == 768 and cfg.model.n_layer == 12
