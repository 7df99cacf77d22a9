"""Paths on the command line: found, or refused before slow imports."""

import subprocess
import sys
from pathlib import Path

import pytest

from lm.runs import path_checks
from lm.runs.path_checks import PathError, check_model, looks_local

ROOT = Path(__file__).parents[3]
DEMO = str(ROOT / "configs/lm/demo.yaml")
CATBABI = str(ROOT / "configs/synthetic/small/catbabi.yaml")
HEAVY = ("torch", "transformers", "deepspeed", "matplotlib", "datasets")

# (command line with a wrong path, part of the error message).
MISTYPED = [
    ("generate runs/nope --prompt a", "runs/nope: no such folder; give a run or an export"),
    ("generate ./nope --prompt a", "./nope: no such folder"),
    ("inspect runs/nope a", "runs/nope: no such folder"),
    ("eval runs/nope --tasks catbabi_mini", "runs/nope: no such folder"),
    ("eval owner/nope --tasks catbabi_mini", "owner/nope: no such folder"),
    ("report runs/nope", "runs/nope: no such folder"),
    ("status runs/nope", "runs/nope: no such folder"),
    ("status nope.yaml", "nope.yaml: no such file"),
    ("export runs/nope out", "runs/nope: no such folder"),
    ("plan nope.yaml", "nope.yaml: no such file"),
    ("sweep nope.yaml --run", "nope.yaml: no such file"),
    (f"train --config {DEMO} data.source=text data.path=nope", "data.path nope: no such file"),
    (f"plan {DEMO} data.source=text data.path=nope", "data.path nope: no such file"),
    (f"prepare {DEMO} data.source=text data.path=nope", "data.path nope: no such file"),
    (f"train --config {DEMO} resume=runs/nope", "existing folder of a checkpoint"),
    (f"train --config {DEMO} init_from=runs/nope", "runs/nope is no folder"),
    (
        f"train --config {DEMO} engine.deepspeed=nope.json",
        "cannot read nope.json as JSON: it is no file",
    ),
    (f"train --config {DEMO} tokenizer.name=runs/nope", "tokenizer.name runs/nope: no such folder"),
    ("synthetic train --config nope.yaml", "nope.yaml: no such file"),
    (f"synthetic train --config {CATBABI} sweep={{}} task.data=nope", "task.data nope: no such"),
    ("synthetic eval nope", "nope: no such folder"),
    ("synthetic inspect nope a", "nope: no such folder"),
    ("synthetic validate nope.yaml", "nope.yaml: no such file"),
    ("synthetic report fig1 --config nope.yaml", "nope.yaml: no such file"),
]


def test_mistyped_path_is_refused_without_slow_imports(tmp_path):
    """All commands run in one process, which must not import slow modules."""
    (tmp_path / "runs").mkdir()
    code = (
        "import sys\n"
        "from synthetic.fprnn_command import main\n"
        f"for command in {[command for command, _ in MISTYPED]!r}:\n"
        "    status = main(command.split())\n"
        f"    heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "    print(status, heavy, file=sys.stderr)\n"
        "    assert not heavy, command\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
    )
    lines = result.stderr.splitlines()
    assert result.returncode == 0, result.stderr
    assert len(lines) == 2 * len(MISTYPED) and result.stdout == ""
    messages, statuses = lines[::2], lines[1::2]
    for (command, part), message, status in zip(MISTYPED, messages, statuses, strict=True):
        assert message.startswith("error: ") and part in message, (command, message)
        assert not status.startswith("0 "), command
    assert [p.name for p in tmp_path.iterdir()] == ["runs"] and not list(tmp_path.glob("runs/*"))


def test_runs_exports_and_other_folders_are_distinguished(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, file in (("runs/demo", "config.yaml"), ("runs/demo/hf", "config.json")):
        Path(folder).mkdir(parents=True)
        Path(folder, file).write_text("{}")
    assert check_model("runs/demo") == "run" and check_model("runs/demo/hf") == "export"
    for path, message in [
        ("runs/demp", "runs/demp: no such folder; .*; did you mean runs/demo?"),
        ("runs", "runs holds neither a run .* it contains runs, such as runs/demo"),
        ("runs/demo/config.yaml", "is a file"),
    ]:
        with pytest.raises(PathError, match=message):
            check_model(path)
    with pytest.raises(PathError, match=r"runs holds no run .*it contains runs"):
        path_checks.check_run("runs")


def test_hub_name_is_not_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not looks_local("owner/name")
    assert all(map(looks_local, ("./name", "/a/b", "~/b", "a", "a/b/c", "a/")))
    (tmp_path / "owner").mkdir()
    assert looks_local("owner/name")


class Hub:
    """A hub that answers every request with an error."""

    def __init__(self, error: Exception):
        self.error = error

    def model_info(self, name: str, timeout: float):
        assert timeout <= 5
        raise self.error


def test_error_of_the_hub_is_reported(monkeypatch):
    import httpx
    from huggingface_hub import errors

    def find_with(error):
        monkeypatch.setattr("huggingface_hub.HfApi", lambda: Hub(error))
        return check_model("owner/name")

    answer = httpx.Response(404, request=httpx.Request("GET", "https://hub"))
    with pytest.raises(PathError, match="no such folder, and not a model on the hub: 404"):
        find_with(errors.RepositoryNotFoundError("404", response=answer))
    with pytest.raises(PathError, match="not a model on the hub: no route"):
        find_with(httpx.ConnectError("no route"))
    assert find_with(errors.GatedRepoError("ask first", response=answer)) == "hub"
    with pytest.raises(PathError, match="not a model on the hub: Repo id must use"):
        check_model("ow ner/name")


def test_option_with_a_missing_folder_is_refused(tmp_path):
    path_checks.check_folder("--data", tmp_path)
    path_checks.check_folder("--tokenizer", None)
    with pytest.raises(PathError, match="--data nope: no such folder"):
        path_checks.check_folder("--data", "nope")
