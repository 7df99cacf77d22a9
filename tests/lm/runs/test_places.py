"""Paths on the command line: found, or refused before slow imports."""

import subprocess
import sys
from pathlib import Path

import pytest

from lm.runs import places
from lm.runs.places import PlaceError, check_model, looks_local

ROOT = Path(__file__).parents[3]
DEMO = str(ROOT / "configs/lm/demo.yaml")
CATBABI = str(ROOT / "configs/synthetic/small/catbabi.yaml")
HEAVY = ("torch", "transformers", "deepspeed", "matplotlib", "datasets")

# Every command with a path, a wrong path, and words of the error.
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
    ("synthetic report fig1 --config nope.yaml", "--config nope.yaml: no such file"),
]


def test_mistyped_path_is_refused_without_slow_imports(tmp_path):
    """All commands run in one process, which must not import slow modules."""
    (tmp_path / "runs").mkdir()
    code = (
        "import sys\n"
        "from synthetic.fprnn_command import main\n"
        f"for words in {[words for words, _ in MISTYPED]!r}:\n"
        "    status = main(words.split())\n"
        f"    heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "    print(status, heavy, file=sys.stderr)\n"
        "    assert not heavy, words\n"
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
    for (words, refusal), message, ended in zip(MISTYPED, lines[::2], lines[1::2], strict=True):
        assert message.startswith("error: ") and refusal in message, (words, message)
        assert not ended.startswith("0 "), words
    assert [p.name for p in tmp_path.iterdir()] == ["runs"] and not list(tmp_path.glob("runs/*"))


def test_runs_exports_and_other_folders_are_distinguished(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place, file in (("runs/demo", "config.yaml"), ("runs/demo/hf", "config.json")):
        Path(place).mkdir(parents=True)
        Path(place, file).write_text("{}")
    assert check_model("runs/demo") == "run" and check_model("runs/demo/hf") == "export"
    for place, words in [
        ("runs/demp", "runs/demp: no such folder; .*; did you mean runs/demo?"),
        ("runs", "runs holds neither a run .* it contains runs, such as runs/demo"),
        ("runs/demo/config.yaml", "is a file"),
    ]:
        with pytest.raises(PlaceError, match=words):
            check_model(place)
    with pytest.raises(PlaceError, match=r"runs holds no run .*it contains runs"):
        places.check_run("runs")


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


def test_the_hub_is_asked_once(monkeypatch):
    import httpx
    from huggingface_hub import errors

    def ask(error):
        monkeypatch.setattr("huggingface_hub.HfApi", lambda: Hub(error))
        return check_model("owner/name")

    answer = httpx.Response(404, request=httpx.Request("GET", "https://hub"))
    with pytest.raises(PlaceError, match="no such folder, and not a model on the hub: 404"):
        ask(errors.RepositoryNotFoundError("404", response=answer))
    with pytest.raises(PlaceError, match="not a model on the hub: no route"):
        ask(httpx.ConnectError("no route"))
    assert ask(errors.GatedRepoError("ask first", response=answer)) == "hub"
    with pytest.raises(PlaceError, match="not a model on the hub: Repo id must use"):
        check_model("ow ner/name")


def test_options_with_missing_files_or_folders_are_refused(tmp_path):
    places.check_files({"--text": None, "--config": __file__})
    places.check_folders({"--data": tmp_path, "--tokenizer": None})
    with pytest.raises(PlaceError, match="--text nope: no such file"):
        places.check_files({"--text": "nope"})
    with pytest.raises(PlaceError, match=r"--text \S+ is a folder: name a file in it"):
        places.check_files({"--text": tmp_path})
    with pytest.raises(PlaceError, match="--data nope: no such folder"):
        places.check_folders({"--data": "nope"})
