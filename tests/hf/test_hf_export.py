"""Exports in other processes: every Auto class, saved again; and which package `lm` is used."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lm
from lm.export import write_export
from lm.kernels import INTERFACE
from lm.model import scan
from tests.hf.models import BLOCKS, OUR_BASELINES, build, ids

HIDE = """
import importlib.util, json, os, sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in str(f)]
sys.path[:] = [p for p in sys.path if not os.path.isdir(p + "/lm")]
sys.path[:0] = json.loads(sys.argv[1])
"""
LOAD = """
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
ids = torch.tensor(json.loads(sys.argv[2]))
totals = {}
for path in sys.argv[3:]:
    for kind in (AutoModelForCausalLM, AutoModel):
        model = kind.from_pretrained(path, trust_remote_code=True).eval()
        assert type(model).__module__.startswith("transformers_modules"), type(model).__module__
        totals.setdefault(path, []).append(model(ids)[0].double().abs().sum().item())
    config = AutoConfig.from_pretrained(path, trust_remote_code=True)
    assert type(config).__module__.startswith("transformers_modules")
    again = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
    again.save_pretrained(path + "-again")
    for kind in (AutoModelForCausalLM, AutoModel):
        model = kind.from_pretrained(path + "-again", trust_remote_code=True).eval()
        totals[path].append(model(ids)[0].double().abs().sum().item())
print(json.dumps(totals))
"""
USES = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[2], trust_remote_code=True).eval()
with torch.no_grad():
    logits = [model(torch.tensor([[3, 4, 5, 6]])).logits for _ in range(2)][1]
scan = sys.modules[type(model).__module__.rpartition(".")[0] + ".scan"]
print(json.dumps([scan._kernels() is not None, logits.double().abs().sum().item()]))
"""


def elsewhere(code, tmp_path, *args, path=()):
    """What the code prints last in a process without this checkout's `lm`; stderr."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env.update(HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "home"), OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, "-P", "-c", HIDE + code, json.dumps([str(p) for p in path]), *args],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_every_auto_class_loads_an_export_and_what_is_saved_of_it(tmp_path):
    expected, paths = {}, []
    for name in (*BLOCKS, *OUR_BASELINES):
        model = build(name).eval()
        paths.append(str(write_export(model, tmp_path / name, None, name, "")))
        with torch.no_grad():
            pair = [
                part(ids())[0].double().abs().sum().item() for part in (model, model.base_model)
            ]
        expected[paths[-1]] = pair * 2
    found, _ = elsewhere(LOAD, tmp_path, json.dumps(ids().tolist()), *paths)
    assert found.keys() == expected.keys()
    for path, totals in expected.items():
        assert found[path] == pytest.approx(totals, rel=1e-5), path


SAID = "fprnn's kernels are not used, and the model is computed in plain PyTorch: "
STRANGERS = {
    "nothing": (None, "the package fprnn is not installed"),
    "a package without kernels": ({"__init__.py": "raise SystemExit(3)"}, "is not fprnn's"),
    "a module": ("raise SystemExit(3)", "is not fprnn's"),
    "kernels of another": (
        {"__init__.py": "", "kernels/__init__.py": "find = compute = print"},
        "offers None, not",
    ),
    "another version of ours": (
        {"__init__.py": "", "kernels/__init__.py": f"INTERFACE = ({INTERFACE[0]!r}, 99)"},
        "offers ('fprnn-kernels', 99), not",
    ),
    "one that raises": (
        {"__init__.py": "raise RuntimeError('broken')", "kernels/__init__.py": ""},
        "cannot be imported: RuntimeError: broken",
    ),
    "one that has no torch": (
        {"__init__.py": "", "kernels/__init__.py": "import torch_of_tomorrow"},
        "cannot be imported: ModuleNotFoundError: No module named 'torch_of_tomorrow'",
    ),
}


def lay(folder, files):
    """Write a package or a module called `lm` into a folder; None: nothing."""
    folder.mkdir()
    if isinstance(files, str):
        (folder / "lm.py").write_text(files)
    for name, text in (files or {}).items() if not isinstance(files, str) else ():
        (folder / "lm" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "lm" / name).write_text(text)
    return folder


@pytest.mark.parametrize("stranger", STRANGERS)
def test_kernels_of_a_stranger_are_not_used_which_is_said_once(stranger, tmp_path):
    files, why = STRANGERS[stranger]
    model = build("fp_mamba1").eval()
    with torch.no_grad():
        expected = model(torch.tensor([[3, 4, 5, 6]])).logits.double().abs().sum().item()
    out = write_export(model, tmp_path / "out", None, "x", "")
    folder = lay(tmp_path / "site", files)
    (used, total), said = elsewhere(USES, tmp_path, str(out), path=[folder])
    assert not used and total == pytest.approx(expected, rel=1e-5)
    assert said.count(SAID) == 1 and why in said


def test_our_own_kernels_are_used_and_nothing_is_said(tmp_path):
    out = write_export(build("fp_mamba1"), tmp_path / "out", None, "x", "")
    (used, _), said = elsewhere(USES, tmp_path, str(out), path=[Path(lm.__file__).parents[1]])
    assert used and SAID not in said
    assert scan._find_kernels()[1] == "" and scan.INTERFACE == INTERFACE
