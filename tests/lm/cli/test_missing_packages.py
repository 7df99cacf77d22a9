"""Errors for packages that are not installed name the package and the extra that contains it."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from lm.common import errors
from lm.common.errors import (
    BAD_CONFIG,
    EXTRAS,
    MissingPackageError,
    install_command,
    missing_package,
)
from tests.refusals import refused
from tests.running import ENV, PLAIN_FORKS

ROOT = Path(__file__).parents[3]
TINY = str(ROOT / "configs/tiny/lm.yaml")


def test_extras_equal_those_of_pyproject():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    # Package → the requirement that installs it, if the names differ.
    required_by = dict.fromkeys(("fastapi", "openai", "uvicorn"), "transformers")
    required_by |= {"accelerate": "lm_eval", "pyarrow": "datasets", "yaml": "pyyaml"}
    for package, extra in EXTRAS.items():
        requirements = [r.partition(">")[0].partition("[")[0].lower() for r in extras[extra]]
        assert required_by.get(package, package) in requirements, package


def test_install_command_names_the_missing_packages(monkeypatch, tmp_path):
    """A checkout names extras; a wheel, which no index contains, names their requirements."""
    constraints = ROOT / "constraints.txt"
    prefix = f"pip install -c {constraints} -e "
    assert install_command("wandb", "lm_eval", "rich") == f"{prefix}'{ROOT}[train,eval]'"
    assert install_command("torch") == prefix + str(ROOT)
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "lm/common/errors.py"))
    requirements = [
        "torch<2.14,>=2.11",
        'deepspeed<0.20,>=0.19; extra == "train"',
        'datasets<6,>=4.0; extra == "train"',
        'lm_eval[hf]<0.5,>=0.4.13; extra == "eval"',
    ]
    monkeypatch.setattr(errors.importlib.metadata, "requires", lambda name: requirements)
    train = "pip install 'deepspeed<0.20,>=0.19' 'datasets<6,>=4.0'"
    assert install_command("pyarrow") == train
    assert install_command("deepspeed", "accelerate") == f"{train} 'lm_eval[hf]<0.5,>=0.4.13'"
    assert install_command("torch") == "pip install 'torch<2.14,>=2.11'"


@pytest.fixture
def hide_package(monkeypatch):
    """Return a function that makes a package look as if it were not installed."""
    find = importlib.util.find_spec

    def hide(package):
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *a: None if name.partition(".")[0] == package else find(name, *a),
        )

    return hide


@pytest.mark.parametrize(
    "package, override, key",
    [
        ("wandb", "log.wandb=true", "log.wandb"),
        ("tensorboard", "log.tensorboard=true", "log.tensorboard"),
        ("pyarrow", "data.source=parquet", "data.source: parquet"),
        ("datasets", "data.source=fineweb", "data.source: fineweb"),
    ],
)
def test_missing_package_is_named_before_training(tiny, hide_package, package, override, key):
    from lm.training.preflight import check

    check(tiny(override), 1)
    hide_package(package)
    check(tiny(), 1)
    with pytest.raises(MissingPackageError) as e:
        check(tiny(override), 1)
    assert str(e.value) == str(missing_package(package, key))
    assert str(e.value).startswith(f"{key} needs the package {package}, which is not installed")


def test_report_without_matplotlib_is_refused(capsys, hide_package, tmp_path):
    (tmp_path / "config.yaml").write_text("name: x")
    hide_package("matplotlib")
    message = refused(capsys, "report", tmp_path)
    assert message.startswith("fprnn report needs the package matplotlib, which is not installed")


# Code that runs `python -m lm` as if a package were not installed: sys.argv[1] names it.
RUN_WITHOUT_PACKAGE = """
import runpy, sys
from importlib.machinery import PathFinder

absent, find = sys.argv[1], PathFinder.find_spec


def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] == absent else find(name, path, target)


PathFinder.find_spec = classmethod(find_spec)
for name in [name for name in sys.modules if name.partition(".")[0] == absent]:
    del sys.modules[name]
sys.argv[:2] = ["lm"]
runpy.run_module("lm", run_name="__main__")
"""


@pytest.mark.parametrize(
    "package, command",
    [
        ("pydantic", ["sweep", "configs/lm/sweep_mixers.yaml"]),
        ("deepspeed", ["train", "--config", TINY, "out_dir=OUT"]),
        ("torch", ["generate", "EXPORT", "--prompt", "a"]),
    ],
)
def test_missing_package_error_names_the_extra(tmp_path, small_export, package, command):
    paths = {"EXPORT": str(small_export), "out_dir=OUT": f"out_dir={tmp_path / 'runs'}"}
    code = [RUN_WITHOUT_PACKAGE, package, *(paths.get(word, word) for word in command)]
    if package == "torch":  # in a new interpreter, because torch cannot be removed from a process
        python = [sys.executable, "-c", *code]
        done = subprocess.run(
            python, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=120
        )
    else:
        done = PLAIN_FORKS.run("-c", code, timeout=120)
    last_line = done.stderr.splitlines()[-1]
    assert done.returncode == BAD_CONFIG, done.stderr
    assert last_line.startswith("error: ")
    assert f"needs the package {package}, which is not" in last_line
    assert last_line.endswith(install_command(package)) and "Traceback" not in done.stderr


def test_generate_needs_only_the_base_dependencies(small_export):
    command = ["generate", small_export, "--prompt", "a", "--max-new-tokens", "1"]
    done = PLAIN_FORKS.run("-c", [RUN_WITHOUT_PACKAGE, "pydantic", *command], timeout=120)
    assert done.returncode == 0, done.stderr
