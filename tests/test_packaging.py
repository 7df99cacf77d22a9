"""Installation: pins resolve from the package index, and a wheel works without the checkout."""

import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.test_layers import ROOT, list_repository_files, relative

PACKAGES = ("fprnn", "lm", "synthetic")
EXTRAS = ("train", "eval", "docs", "dev")  # as in the Makefile
PLATFORM = "x86_64-manylinux_2_28"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Wheel built without a network from a copy of the repository's files."""
    folder = tmp_path_factory.mktemp("wheel")
    for path in list_repository_files():
        copy = folder / "source" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or path.is_file():
            shutil.copy2(path, copy, follow_symlinks=False)
    options = ["wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index", "-w"]
    command = [sys.executable, "-m", "pip", *options, folder, folder / "source"]
    subprocess.run(command, check=True, timeout=300)
    (path,) = folder.glob("fprnn-*.whl")
    return path


def test_wheel_has_every_file_of_the_packages(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    tracked = {relative(path) for path in list_repository_files() if path.is_file()}
    expected = {name for name in tracked if name.startswith(tuple(f"{p}/" for p in PACKAGES))}
    expected |= {f"fprnn/{name}" for name in tracked if name.startswith(("configs/", "launch/"))}
    assert names == expected
    assert "fprnn/configs/synthetic/small/s3.yaml" in names


@pytest.fixture
def run_installed(wheel, tmp_path):
    """Function that runs a program of a new environment with the wheel, in an empty folder.

    The environment also sees the packages of the present one, but not the checkout. With `until`,
    the program is terminated after a line with this text.
    """
    env_dir, folder = tmp_path / "env", tmp_path / "empty"
    folder.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", env_dir], check=True)
    python = env_dir / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", wheel], check=True)
    target = Path(sysconfig.get_path("purelib", vars={"base": env_dir, "platbase": env_dir}))
    # A .pth file lists folders that Python adds to sys.path. Python does not read the .pth files in
    # these folders, so an editable install of the checkout there has no effect.
    other_packages = [p for p in sys.path if p.endswith("site-packages") and p != str(target)]
    (target / "packages_of_the_tests.pth").write_text("\n".join(other_packages))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def run(*command, status=0, until=None):
        options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process = subprocess.Popen(
            [env_dir / "bin" / command[0], *command[1:]], cwd=folder, env=environment, **options
        )
        if until is not None:
            lines = iter(process.stdout.readline, "")
            assert any(until in line for line in lines), process.communicate()
            process.terminate()
        out, err = process.communicate(timeout=600)
        assert process.returncode == status, (command, out[-2000:], err[-3000:])
        return subprocess.CompletedProcess(command, status, out, err)

    result = run("python", "-c", "import lm, synthetic; print(lm.__file__, synthetic.__file__)")
    assert result.stdout.count(str(env_dir)) == 2 and str(ROOT) not in result.stdout
    return run


@pytest.mark.slow
@pytest.mark.timeout(1800)  # ten processes that import torch
def test_wheel_works_without_the_checkout(run_installed):
    # 1. Train and export; the refusal names the shipped configuration.
    refusal = run_installed("fprnn", "train", "--config", "configs/lm/demo.yaml", status=78).stderr
    config = re.search(r"the one that comes with fprnn is (\S+)", refusal)[1]
    small = ["model.d_model=16", "data.seq_len=16", "tokenizer.vocab_size=300", "train.steps=2"]
    data = ("data.source=jsonl", f"data.path={ROOT / 'tests/data/tiny.jsonl'}")
    run_installed("fprnn", "train", "--config", config, "name=run", *small, *data)
    run_installed("fprnn", "export", "runs/run", "export")
    run_installed("fprnn", "generate", "export", "--prompt", "a", "--max-new-tokens", "2")
    # 2. The synthetic tasks: a demo, a report, and the start of a validation.
    tiny = ("train.steps=2", "train.batch_size=2", "eval.examples=2", "eval.lengths=4")
    run_installed("fprnn", "demo", "s3", *tiny, "model.d_model=8")
    assert "fig3c" in run_installed("fprnn", "synthetic", "report").stdout
    missing = run_installed("fprnn", "synthetic", "report", "fig3c", status=1)
    assert "report fig3c has no finished run in" in missing.stderr
    models = Path(config).parents[1] / "synthetic" / "models"
    validate = ("synthetic", "validate", models / "mamba.yaml", "--quick", "model.d_model=8")
    run_installed("fprnn", *validate, until="update", status=75)  # stopped once it trains


INDEX = "pypi.org"


@pytest.fixture(scope="module")
def resolve(tmp_path_factory):
    """Function (python, requirements, constraints) → {name: version}, from the package index only.

    uv downloads no wheels for this; it reads their metadata by range requests.
    """
    try:
        socket.create_connection((INDEX, 443), timeout=5).close()
    except OSError as e:
        pytest.skip(f"{INDEX} does not answer: {e}")
    import uv

    folder = tmp_path_factory.mktemp("resolve")
    prefixes = ("UV_", "PIP_")  # of variables that name, for example, folders of wheels
    environment = {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}

    def run(python, requirements, constraints):
        (folder / "requirements.in").write_text("\n".join(requirements))
        (folder / "constraints.txt").write_text("\n".join(constraints))
        options = ["--quiet", "--no-config", "--no-header", "--no-annotate"]
        target = ["--python-version", python, "--python-platform", PLATFORM]
        files = ["-c", folder / "constraints.txt", folder / "requirements.in"]
        command = [uv.find_uv_bin(), "pip", "compile", *options, *target, *files]
        result = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stderr
        lines = (line.partition(" ")[0].partition("==") for line in result.stdout.splitlines())
        return {name.lower(): version for name, _, version in lines if version}

    return run


def read_pins():
    """Return the lines of constraints.txt."""
    return (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.11.0", "3.12.0"])
def test_makefile_installs_resolve_from_the_index(resolve, python):
    torch = resolve(python, ["torch"], read_pins())
    everything = resolve(python, [f"fprnn[{','.join(EXTRAS)}] @ {ROOT.as_uri()}"], read_pins())
    pinned = dict(line.split("==") for line in read_pins() if "==" in line)
    for versions in (torch, everything):
        assert versions["torch"] == pinned["torch"] and versions["triton"] == pinned["triton"]
    unpinned = everything.keys() - {name.lower().replace("_", "-") for name in pinned}
    # torch pins its CUDA packages itself, exactly; setuptools is a build tool that torch requires;
    # fprnn is this project.
    allowed_prefixes = ("nvidia-", "cuda-", "setuptools", "fprnn")
    assert [name for name in sorted(unpinned) if not name.startswith(allowed_prefixes)] == []


def test_extras_match_the_makefile():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f".[{','.join(EXTRAS)}]" in text and "-c constraints.txt" in text
