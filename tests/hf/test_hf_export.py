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
from tests.hf.models import BASELINES, BLOCKS, build, make_ids
from tests.running import run_alone

LOAD_AND_SAVE = """
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
FIND_KERNELS = """
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


def export_model(model, folder):
    """Export a model without a tokenizer, and return the folder as text."""
    return str(write_export(model, folder, tokenizer=None, name="x", origin=""))


def elsewhere(code, tmp_path, *args, **environment):
    """Run code in a process without this checkout's `lm`; return its last line and its stderr."""
    done = run_alone(code, *args, cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.slow
def test_every_auto_class_loads_and_saves_an_export(tmp_path):
    expected, paths = {}, []
    for name in (*BLOCKS, *BASELINES):
        model = build(name).eval()
        paths.append(export_model(model, tmp_path / name))
        with torch.no_grad():
            outputs = [part(make_ids())[0] for part in (model, model.base_model)]
        # LOAD_AND_SAVE returns the sums of both before and after saving again.
        expected[paths[-1]] = [output.double().abs().sum().item() for output in outputs] * 2
    outputs, _ = elsewhere(LOAD_AND_SAVE, tmp_path, json.dumps(make_ids().tolist()), *paths)
    assert outputs.keys() == expected.keys()
    for path, totals in expected.items():
        assert outputs[path] == pytest.approx(totals, rel=1e-5), path


WARNING = "fprnn's kernels are not used, and the model runs in plain PyTorch: "
# Other `lm` on the path → its files (see write_package), and the end of the warning.
OTHER_PACKAGES = {
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


def write_package(folder, files):
    """Write a package (dict of files), a module (str) or nothing (None), called `lm`."""
    folder.mkdir()
    if isinstance(files, str):
        (folder / "lm.py").write_text(files)
        return folder
    for name, text in (files or {}).items():
        (folder / "lm" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "lm" / name).write_text(text)
    return folder


@pytest.fixture(
    scope="module", params=["with kernels", pytest.param("without", marks=pytest.mark.slow)]
)
def kernel_choices(request, tmp_path_factory):
    """Run an export next to this checkout, and next to each of OTHER_PACKAGES.

    Returns:
        True if the export has bundled kernels; and by package, the module of the kernels that were
        used (None: plain PyTorch) and the messages.
    """
    tmp_path = tmp_path_factory.mktemp("packages")
    model = build("fp_mamba1").eval()
    out = export_model(model, tmp_path / "out")
    if request.param != "with kernels":
        shutil.copy(bundled_kernels.__file__, out)
    folders = {}
    for name, (files, _) in OTHER_PACKAGES.items():
        folders[name] = write_package(tmp_path / name, files)
    folders["ours"] = Path(lm.__file__).parents[1]
    arguments = map(str, (out, *folders.values()))
    results, stderr = elsewhere(FIND_KERNELS, tmp_path, *arguments, **warm_cache(tmp_path))
    # FIND_KERNELS prints "## FOLDER" before the messages of each folder.
    messages = dict(part.split("\n", 1) for part in stderr.split("## ")[1:])
    with torch.no_grad():
        total = model(torch.tensor([[3, 4, 5, 6]])).logits.double().abs().sum().item()
    assert [total] * len(folders) == pytest.approx([t for _, t in results.values()], rel=1e-5)
    choices = {name: (results[str(f)][0], messages[str(f)]) for name, f in folders.items()}
    return request.param == "with kernels", choices


def warm_cache(tmp_path):
    """Return an environment whose cache has only the library that was built for the tests."""
    cache = tmp_path / "cache"
    if cpu.usable()[0]:
        (cache / "fprnn/kernels").mkdir(parents=True)
        shutil.copy(cpu_build.build(), cache / "fprnn/kernels")
    return {"XDG_CACHE_HOME": str(cache)}


@pytest.mark.parametrize("other", OTHER_PACKAGES)
def test_kernels_of_another_package_are_not_used(other, kernel_choices):
    has_bundled_kernels, choices = kernel_choices
    used, stderr = choices[other]
    if has_bundled_kernels:
        assert used.startswith("fprnn_kernels_") and WARNING not in stderr
    else:
        assert used is None and stderr.count(WARNING) == 1 and OTHER_PACKAGES[other][1] in stderr


def test_installed_kernels_are_used_without_warning(kernel_choices):
    used, stderr = kernel_choices[1]["ours"]
    assert used == "lm.kernels" and WARNING not in stderr and bundled_kernels.NOTE not in stderr
    assert scan._find_kernels()[1] == "" and scan.INTERFACE == INTERFACE


LOAD_TWICE = """
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
    path = export_model(build("fp_mamba1"), tmp_path / "hf")
    env = {**os.environ, "PYTHONPATH": str(Path(lm.__file__).parents[1])}
    env["HF_MODULES_CACHE"] = str(tmp_path / "modules")
    done = subprocess.run(
        [sys.executable, "-c", LOAD_TWICE, path], capture_output=True, text=True, env=env
    )
    assert done.stdout.split() == ["transformers_modules"] * 2, done.stderr


TRAIN_STEP = """
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
    is_usable, reason = cpu.usable()
    if not is_usable:
        pytest.skip(reason)
    model = build("fp_mamba1").train()
    out = export_model(model, tmp_path / "out")
    ids = torch.tensor([[3, 4, 5, 6, 7, 8]])
    loss = model(ids, labels=ids).loss
    loss.backward()
    grads = sum(p.grad.double().abs().sum().item() for p in model.parameters())
    env = warm_cache(tmp_path)
    (*totals, (module,)), stderr = elsewhere(TRAIN_STEP, tmp_path, out, **env)
    assert totals == pytest.approx([loss.item(), grads], rel=1e-5)
    assert stderr.count(bundled_kernels.NOTE) == 1
    # A changed file in the cache is not run but written again; the library stays.
    file = tmp_path / "cache/fprnn/kernels" / (module.replace(".", "/") + ".py")
    text = file.read_text()
    file.write_text("raise SystemExit(3)")
    assert elsewhere(TRAIN_STEP, tmp_path, out, **env)[0][:2] == totals
    assert file.read_text() == text
    libraries = list((tmp_path / "cache/fprnn/kernels").glob("*.so"))
    assert len(libraries) == 1  # the installed package has the same sources


def test_kernel_folder_writable_by_others_is_refused(tmp_path):
    """Also if only a folder inside it is: others could replace its files."""
    folder = tmp_path / "kernels/of-a-version"
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o700)
    bundled_kernels._refuse_if_writable_by_others(folder)
    for place, mode in ((folder, 0o702), (folder, 0o720), (folder.parent, 0o777)):
        before = place.stat().st_mode
        place.chmod(mode)
        with pytest.raises(OSError, match=f"other users may write into {place}"):
            bundled_kernels._refuse_if_writable_by_others(folder)
        place.chmod(before)


@pytest.mark.slow
def test_kernel_cache_writable_by_others_is_not_run(tmp_path):
    out = export_model(build("fp_mamba1"), tmp_path / "out")
    env = warm_cache(tmp_path)
    (tmp_path / "cache/fprnn/kernels").mkdir(parents=True, exist_ok=True)
    (tmp_path / "cache/fprnn/kernels").chmod(0o777)
    (_, _, modules), stderr = elsewhere(TRAIN_STEP, tmp_path, out, **env)
    assert modules == [] and stderr.count("other users may write into") == 1


@pytest.mark.slow
def test_export_without_compiler_warns_that_it_is_slow(tmp_path):
    out = export_model(build("fp_mamba1"), tmp_path / "out")
    no_compiler = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    (loss, *_), stderr = elsewhere(TRAIN_STEP, tmp_path, out, **no_compiler)
    assert loss > 0 and stderr.count("in plain PyTorch: the CPU kernels cannot be built") == 1


def test_bundled_kernels_equal_the_package(tmp_path):
    out = export_model(build("fp_mamba1"), tmp_path / "out")
    module: dict = {}
    exec(compile(Path(out, "bundled_kernels.py").read_text(), "bundled_kernels.py", "exec"), module)
    folder = Path(lm.__file__).parent / "kernels"
    kinds = (".py", ".h", ".cpp", ".cu")
    texts = {
        str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.suffix in kinds
    }
    for name in ("errors.py", "secrets.py"):
        texts[name] = (folder.parent / "common" / name).read_text()
    assert module["FILES"] == texts
