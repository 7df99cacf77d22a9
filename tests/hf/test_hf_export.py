"""Exports in other processes: every Auto class, saving again, and the choice of kernels."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lm
from lm.export.export import write_export
from lm.kernels import INTERFACE
from lm.kernels.cpu import build as cpu_build
from lm.kernels.cpu import scan as cpu
from lm.model import bundled_kernels, scan
from tests.hf.models import BASELINES, BLOCKS, build, ids
from tests.running import run_alone

LOAD = """
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
ids = torch.tensor(json.loads(sys.argv[1]))
totals = {}
for path in sys.argv[2:]:
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
import importlib, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
scan = sys.modules[type(model).__module__.rpartition(".")[0] + ".scan"]
found = {}
for folder in sys.argv[2:]:
    for name in [m for m in sys.modules if m == "lm" or m.startswith("lm.")]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    scan._kernels.cache_clear()
    print("##", folder, file=sys.stderr, flush=True)
    with torch.no_grad():
        logits = [model(torch.tensor([[3, 4, 5, 6]])).logits for _ in range(2)][1]
    found[folder] = getattr(scan._kernels(), "__name__", None), logits.double().abs().sum().item()
    sys.path.remove(folder)
print(json.dumps(found))
"""


def elsewhere(code, tmp_path, *args, **env_too):
    """Run code in a process without this checkout's `lm`; return its last line and stderr."""
    done = run_alone(code, *args, cwd=tmp_path, **env_too)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.slow
def test_every_auto_class_loads_and_saves_an_export(tmp_path):
    expected, paths = {}, []
    for name in (*BLOCKS, *BASELINES):
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


SAID = "fprnn's kernels are not used, and the model runs in plain PyTorch: "
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
    """Write a package or module called `lm` into a folder. None: write nothing."""
    folder.mkdir()
    if isinstance(files, str):
        (folder / "lm.py").write_text(files)
    for name, text in (files or {}).items() if not isinstance(files, str) else ():
        (folder / "lm" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "lm" / name).write_text(text)
    return folder


@pytest.fixture(
    scope="module", params=["with kernels", pytest.param("without", marks=pytest.mark.slow)]
)
def found(request, tmp_path_factory):
    """Run exports with and without bundled kernels, next to this checkout and every other `lm`.

    Returns:
        The kernels that were used, the outputs of two forward passes, and the messages.
    """
    tmp_path = tmp_path_factory.mktemp("strangers")
    model = build("fp_mamba1").eval()
    out = write_export(model, tmp_path / "out", None, "x", "")
    if request.param != "with kernels":
        shutil.copy(bundled_kernels.__file__, out)
    folders = {name: lay(tmp_path / str(i), STRANGERS[name][0]) for i, name in enumerate(STRANGERS)}
    folders["ours"] = Path(lm.__file__).parents[1]
    folders_too = map(str, folders.values())
    results, said = elsewhere(USES, tmp_path, str(out), *folders_too, **warm_cache(tmp_path))
    parts = dict(part.split("\n", 1) for part in said.split("## ")[1:])
    with torch.no_grad():
        total = model(torch.tensor([[3, 4, 5, 6]])).logits.double().abs().sum().item()
    assert [total] * len(folders) == pytest.approx([t for _, t in results.values()], rel=1e-5)
    whose = {name: (results[str(f)][0], parts[str(f)]) for name, f in folders.items()}
    return request.param == "with kernels", whose


def warm_cache(tmp_path):
    """Return an environment whose cache has only the library that was built for the tests."""
    cache = tmp_path / "cache"
    if cpu.usable()[0]:
        (cache / "fprnn/kernels").mkdir(parents=True)
        shutil.copy(cpu_build.build(), cache / "fprnn/kernels")
    return {"XDG_CACHE_HOME": str(cache)}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_kernels_of_another_package_are_not_used(stranger, found):
    carries, whose = found
    used, said = whose[stranger]
    if carries:
        assert used.startswith("fprnn_kernels_") and SAID not in said
    else:
        assert used is None and said.count(SAID) == 1 and STRANGERS[stranger][1] in said


def test_installed_kernels_are_used_without_warning(found):
    used, said = found[1]["ours"]
    assert used == "lm.kernels" and SAID not in said and bundled_kernels.NOTE not in said
    assert scan._find_kernels()[1] == "" and scan.INTERFACE == INTERFACE


TWICE = """
import sys, torch
from transformers import AutoModelForCausalLM
for _ in range(2):
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
    model(torch.tensor([[1, 2, 3]]))
    assert "lm.kernels" in sys.modules  # they are used
    print(type(model).__module__.partition(".")[0])
"""


@pytest.mark.slow
def test_export_keeps_its_classes_after_importing_kernels(tmp_path):
    path = write_export(build("fp_mamba1"), tmp_path / "hf", None, "tiny", "A test.")
    env = {**os.environ, "PYTHONPATH": str(Path(lm.__file__).parents[1])}
    env["HF_MODULES_CACHE"] = str(tmp_path / "modules")
    done = subprocess.run(
        [sys.executable, "-c", TWICE, path], capture_output=True, text=True, env=env
    )
    assert done.stdout.split() == ["transformers_modules"] * 2, done.stderr


ALONE = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).train()
ids = torch.tensor([[3, 4, 5, 6, 7, 8]])
out = model(ids, labels=ids)
out.loss.backward()
grads = sum(p.grad.double().abs().sum().item() for p in model.parameters())
found = [out.loss.item(), grads, sorted(m for m in sys.modules if m.endswith(".cpu.cpu_cell"))]
print(json.dumps(found))
"""


def test_export_without_package_uses_bundled_kernels(tmp_path):
    works, why = cpu.usable()
    if not works:
        pytest.skip(why)
    model = build("fp_mamba1").train()
    out = str(write_export(model, tmp_path / "out", None, "x", ""))
    ids = torch.tensor([[3, 4, 5, 6, 7, 8]])
    loss = model(ids, labels=ids).loss
    loss.backward()
    grads = sum(p.grad.double().abs().sum().item() for p in model.parameters())
    env = warm_cache(tmp_path)
    (ours, theirs, (module,)), said = elsewhere(ALONE, tmp_path, out, **env)
    assert (ours, theirs) == pytest.approx((loss.item(), grads), rel=1e-5)
    assert said.count(bundled_kernels.NOTE) == 1
    # A changed file in the cache is not run but written again; the library stays.
    file = tmp_path / "cache/fprnn/kernels" / (module.replace(".", "/") + ".py")
    text = file.read_text()
    file.write_text("raise SystemExit(3)")
    assert elsewhere(ALONE, tmp_path, out, **env)[0][:2] == [ours, theirs]
    assert file.read_text() == text
    libraries = list((tmp_path / "cache/fprnn/kernels").glob("*.so"))
    assert len(libraries) == 1  # the installed package has the same sources


def test_kernel_folder_writable_by_others_is_refused(tmp_path):
    """Also if only a folder inside it is: others could replace its files."""
    folder = tmp_path / "kernels/of-a-version"
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o700)
    bundled_kernels._refuse_if_open(folder)
    for place, mode in ((folder, 0o702), (folder, 0o720), (folder.parent, 0o777)):
        before = place.stat().st_mode
        place.chmod(mode)
        with pytest.raises(OSError, match=f"other users may write into {place}"):
            bundled_kernels._refuse_if_open(folder)
        place.chmod(before)


@pytest.mark.slow
def test_kernel_cache_writable_by_others_is_not_run(tmp_path):
    out = str(write_export(build("fp_mamba1"), tmp_path / "out", None, "x", ""))
    env = warm_cache(tmp_path)
    (tmp_path / "cache/fprnn/kernels").mkdir(parents=True, exist_ok=True)
    (tmp_path / "cache/fprnn/kernels").chmod(0o777)
    (_, _, modules), said = elsewhere(ALONE, tmp_path, out, **env)
    assert modules == [] and said.count("other users may write into") == 1


@pytest.mark.slow
def test_export_without_compiler_warns_that_it_is_slow(tmp_path):
    out = str(write_export(build("fp_mamba1"), tmp_path / "out", None, "x", ""))
    found, said = elsewhere(ALONE, tmp_path, out, PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert found[0] > 0 and said.count(SAID + "the CPU kernels cannot be built") == 1


def test_bundled_kernels_equal_the_package(tmp_path):
    out = write_export(build("fp_mamba1"), tmp_path / "out", None, "x", "")
    found: dict = {}
    exec(compile((out / "bundled_kernels.py").read_text(), "bundled_kernels.py", "exec"), found)
    folder = Path(lm.__file__).parent / "kernels"
    kinds = (".py", ".h", ".cpp", ".cu")
    texts = {
        str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.suffix in kinds
    }
    for name in ("errors.py", "secrets.py"):
        texts[name] = (folder.parent / "common" / name).read_text()
    assert found["FILES"] == texts
