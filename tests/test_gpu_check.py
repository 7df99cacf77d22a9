"""`make gpu-check`: run on a CPU at tiny sizes, and what it makes of parts that fail."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
XML = """<testsuites><testsuite>{}</testsuite></testsuites>"""
PASSED = '<testcase classname="a" name="one"/>'
SKIPPED = '<testcase classname="a" name="two"><skipped message="no mamba_ssm"/></testcase>'
FAILED = '<testcase classname="a" name="three"><failure message="off by 1">…</failure></testcase>'
BARE = """<testcase classname="" name="tests.b"><error message="collection failure">
E   ModuleNotFoundError: No module named 'pydantic'
</error></testcase>"""
# Its child holds the pipe open and must go with it.
HANGS = "import subprocess as s; print('so far', flush=True); s.run(['sleep', '99'])"
BROKEN = BARE.replace("ModuleNotFoundError: No module named 'pydantic'", "SyntaxError")


@pytest.fixture
def module(monkeypatch):
    """A function (name) → benchmarks.NAME."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def make(out, *args):
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--out", str(out), *args]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)


@pytest.mark.slow  # half a minute, of what a GPU runs
def test_a_quick_run_on_a_cpu(tmp_path):
    pytest.importorskip("triton")
    done = make(tmp_path, "--device", "cpu", "--quick", "--parts", "training,tests")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["ok"] and summary["complete"] and summary["environment"]["torch"]
    tests, training = summary["parts"]
    assert tests["part"] == "tests" and tests["figures"]["passed"] > 0
    figures = training["figures"]
    assert training["status"] == "ok" and figures["apart_from_plain"] < 0.01
    assert figures["tokens_per_s"] > 0 and len(figures["loss"]) == 2
    runs = json.loads((tmp_path / "training.json").read_text())["runs"]
    assert len(runs["triton"]["losses"]) == 4 and "step triton" in runs["triton"]["kernels"]
    assert len(runs["plain"]["losses"]) == 2 and "plain" in runs["plain"]["kernels"]
    assert "[training] update 4" in done.stdout and "training   ok" in done.stdout


def test_without_a_gpu_it_says_so(tmp_path):
    done = make(tmp_path / "out")
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert done.stdout.startswith("gpu-check needs a CUDA device") and done.stdout.count("\n") == 1
    assert "--quick" in make(tmp_path, "--device", "cpu").stderr
    assert "no part nothing" in make(tmp_path, "--parts", "nothing").stderr


def test_a_part_that_fails_or_hangs_stops_nothing(tmp_path, module, capsys):
    g = module("gpu_check")

    def part(name, code, limit=10.0, judge=None, **kwargs):
        judge = judge or (lambda rc, last: g.Outcome("failed" if rc else "ok", {"said": last}))
        return g.Part(name, [sys.executable, "-c", code], limit, judge, **kwargs)

    parts = [
        part("good", "print('fine')"),
        part("bad", "import sys; sys.exit('a reason')"),
        part("absent", "", reason="there is no such script"),
        # Its child holds the pipe open and must go with it.
        part(
            "hangs", "import subprocess as s; print('so far', flush=True); s.run(['sleep', '99'])"
        ),
        part("last", "print('fine again')", env={"PYTHONUNBUFFERED": "1"}),
    ]
    parts[3] = parts[3]._replace(limit=-25.0)  # of what the others leave over
    status = g.check(parts, tmp_path, dict(os.environ), {})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert status == 1 and not summary["ok"] and summary["complete"]
    found = {p["part"]: p for p in summary["parts"]}
    assert [p["status"] for p in found.values()] == ["ok", "failed", "skipped", "failed", "ok"]
    assert found["good"]["figures"] == {"said": "fine"} and found["hangs"]["seconds"] < 60
    assert "not done in" in found["hangs"]["reason"] and "so far" in found["hangs"]["reason"]
    printed = capsys.readouterr().out
    assert "[bad] a reason" in printed and printed.splitlines()[-1].startswith("FAILED in")
    assert "[last] fine again" in (tmp_path / "check.log").read_text()


@pytest.mark.parametrize(
    "cases, rc, status, said",
    [
        ([PASSED, SKIPPED], 0, "ok", "no mamba_ssm"),
        ([PASSED, BARE], 1, "ok", "1 without pydantic"),
        ([PASSED, FAILED], 1, "failed", "a.three: ['off by 1']"),
        ([PASSED, BROKEN], 1, "failed", "tests.b: ['collection failure']"),
        ([SKIPPED], 0, "failed", "no test passed"),
        ([PASSED], 3, "failed", "exit status 3"),
        ([], None, "failed", "wrote no results"),
    ],
)
def test_what_pytest_found(cases, rc, status, said, tmp_path, module):
    xml = tmp_path / "tests.xml"
    if cases:
        xml.write_text(XML.format("".join(cases)))
    outcome = module("gpu_check").judge_tests(xml, rc, "")
    assert outcome.status == status and said in str(outcome.figures) + outcome.reason
    assert outcome.figures.get("passed", 1) == int(PASSED in cases or not cases)


def test_the_figures_of_a_benchmark(tmp_path, module):
    g, path = module("gpu_check"), tmp_path / "x.json"
    rows = [{"part": "forward", "name": "ours", "seconds": 0.5}, {"name": "big", "seconds": None}]
    rows += [{"part": "mix", "plain": 0.2, "kernels": 0.1}]
    path.write_text(json.dumps({"rows": rows}))
    outcome = g.judge_json(path, g.timings, 0, "")
    assert outcome.status == "ok" and outcome.figures == {
        "forward ours": "500.00 ms",
        "big": "–",
        "mix": "100.00 ms with kernels, plain 200.00 ms",
        "rows": 3,
    }
    assert g.judge_json(path, g.timings, 1, "why").reason == "why"
    assert g.judge_json(tmp_path / "none.json", g.timings, 0, "").status == "failed"


def test_the_parts_fit_into_ten_minutes(tmp_path, module):
    g = module("gpu_check")
    assert sum(g.LIMITS.values()) <= 570
    parts = g.all_parts(tmp_path, "cuda", False)
    assert list(parts) == list(g.LIMITS)
    files = [a for a in parts["tests"].command if a.startswith("tests/")]
    assert {"tests/lm/model/test_gpu.py", "tests/lm/kernels/test_triton_scan.py"} <= set(files)
    assert all("160m" in parts[name].command for name in g.OPTIONS)


def test_the_loop_trains_the_demo_as_lm_train_does(module):
    """The same model, parameter groups and schedule, which it cannot import: they need pydantic."""
    from lm.config import load as config
    from lm.training import build, optim

    loop = module("gpu_training")
    cfg, tree = config.load(ROOT / "configs/lm/demo.yaml"), loop.settings(quick=False)
    bpe, _ = loop.tokens_of(["some text"], 300)
    ours, theirs = loop.build(tree, bpe), build.build_model(cfg, 264, 0, 0)
    assert ours.config.to_dict() == theirs.config.to_dict()
    assert loop.accumulation(tree) == cfg.train.accumulation(1) == 2
    adamw, schedule = loop.optimiser(tree, ours, 50)
    expected = optim.parameter_groups(ours, cfg.optim)
    for one, other in zip(adamw.param_groups, expected, strict=True):
        assert one["weight_decay"] == other["weight_decay"]
        assert [id(p) for p in one["params"]] == [id(p) for p in other["params"]]
    for update in range(1, 51):
        factor = optim.lr_factor(cfg.optim, 50, update)
        assert adamw.param_groups[0]["lr"] == pytest.approx(cfg.optim.lr * factor)
        adamw.step()
        schedule.step()
