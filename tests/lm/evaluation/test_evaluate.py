"""Evaluation of tiny models with lm-eval: results file, table, and errors."""

import importlib.util
import json
import shutil

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")
pytest.importorskip("rich")

from lm_eval.tasks import TaskManager

from lm.common.errors import MissingPackageError
from lm.evaluation.evaluate import EvaluationError, evaluate, make_table
from lm.evaluation.tasks import TASKS_DIR
from lm.runs.path_checks import PathError
from tests.marks import slow
from tests.running import PLAIN_FORKS

REPOSITORY = TASKS_DIR.parents[2]


@pytest.fixture(scope="module")
def checkpoint(byte_tokenizer, tmp_path_factory):
    """A random transformers Mamba with a byte-level tokenizer."""
    import torch
    from transformers import MambaConfig, MambaForCausalLM

    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    shutil.copytree(byte_tokenizer, folder)
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=264, hidden_size=32, num_hidden_layers=1, state_size=4)
    MambaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("FPRNN_EVAL_DATA", str(tmp_path_factory.mktemp("data")))


def test_tasks_of_this_project_run_on_a_tiny_model(checkpoint, tmp_path, capsys):
    results = evaluate(checkpoint, ["catbabi"], limit=4)
    assert capsys.readouterr().out == ""
    results_file = checkpoint / "eval" / "results.json"
    assert json.loads(results_file.read_text()) == results
    assert list(results_file.parent.iterdir()) == [results_file]
    assert str(checkpoint.parent) not in results_file.read_text()
    assert str(REPOSITORY) not in results_file.read_text()
    assert (results["checkpoint"], results["limit"], results["device"]) == ("tiny", 4, "cpu")
    assert {"lm_eval", "transformers", "torch", "fprnn"} == set(results["versions"])
    assert (results["solver"], results["fixed_point"]) == ("none", {})
    metrics = {name: set(task["metrics"]) for name, task in results["tasks"].items()}
    assert metrics == {"catbabi_mini": {"acc", "acc_norm"}, "catbabi_mini_gen": {"exact_match"}}
    for task in results["tasks"].values():
        assert task["samples"] == 4 and task["version"] == 1.0
        for entry in task["metrics"].values():
            assert entry["stderr"] >= 0 and 0 <= entry["value"] <= 1 and entry["higher_is_better"]


def test_results_contain_the_cost_of_the_solves(small_export, tmp_path):
    results = evaluate(small_export, ["catbabi_mini"], limit=2, out=tmp_path / "r.json")
    assert results["solver"]["token"] == "exact"
    keys = {"evaluations", "failed", "bisected", "limited", "residual"}
    assert results["fixed_point"].keys() == keys
    assert results["fixed_point"]["evaluations"][0] >= 1 and results["fixed_point"]["failed"] == [0]
    assert make_table(results).caption is None


def test_second_evaluation_gives_the_same_numbers(checkpoint, tmp_path):
    out = tmp_path / "deep" / "down" / "r.json"
    first = evaluate(checkpoint, ["catbabi_mini"], limit=6, batch_size=4, out=out)
    assert json.loads(out.read_text()) == first
    second = evaluate(checkpoint, ["catbabi_mini"], limit=6, batch_size=1, out=out)
    assert first["tasks"] == second["tasks"]


def test_table_shows_each_metric_with_its_standard_error():
    from rich.console import Console

    results = {
        "checkpoint": "tiny",
        "limit": 20,
        "solver": {"token": "exact", "schedule": "sequential", "tol": None, "max_iters": None},
        "fixed_point": {"evaluations": [1.0, 1.0], "failed": [0.0, 0.02], "residual": [0.0, 0.0]},
        "tasks": {
            "catbabi_mini": {
                "samples": 20,
                "metrics": {
                    "acc": {"value": 0.25, "stderr": 0.0994, "higher_is_better": True},
                    "perplexity": {"value": None, "stderr": None, "higher_is_better": False},
                },
            }
        },
    }
    console = Console(width=100)
    with console.capture() as capture:
        console.print(make_table(results))
    text = capture.get()
    for part in ("tiny (first 20 documents)", "catbabi_mini", "acc ↑", "0.25 ± 0.099"):
        assert part in text
    assert "perplexity ↓" in text and "not finite" in text
    text = " ".join(text.split())
    assert "warning: the token's equation was not solved for 2.00% of the tokens of layer 1" in text


def test_invalid_options_are_refused_before_loading(checkpoint, tmp_path, monkeypatch):
    with pytest.raises(PathError, match="nowhere: no such folder"):
        evaluate(tmp_path / "nowhere", ["catbabi_mini"])
    with pytest.raises(PathError, match=r"holds neither a run \(config\.yaml\) nor an export"):
        evaluate(tmp_path, ["catbabi_mini"])
    monkeypatch.delenv("FPRNN_EVAL_DATA")
    with pytest.raises(EvaluationError, match=r"`text_local` could not.*FPRNN_EVAL_DATA names"):
        evaluate(checkpoint, ["text_local"])


@pytest.mark.parametrize("package", ["lm_eval", "accelerate"])
def test_missing_package_error_has_the_install_command(checkpoint, monkeypatch, package):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a)
    )
    with pytest.raises(MissingPackageError, match=rf"{package}.*pip install .*\[eval\]'"):
        evaluate(checkpoint, ["catbabi_mini"])


class FewTasks(TaskManager):
    """TaskManager that knows only one of lm-eval's tasks, because reading all takes seconds."""

    def __init__(self, include_path, include_defaults=True):
        super().__init__(include_path=include_path, include_defaults=False)
        self.defaults = ["lambada_openai"] if include_defaults else []

    @property
    def all_tasks(self):
        return [*super().all_tasks, *self.defaults]


@pytest.mark.parametrize("manager", [FewTasks, slow(TaskManager)])
def test_unknown_task_error_suggests_similar_names(checkpoint, manager, monkeypatch):
    monkeypatch.setattr("lm_eval.tasks.TaskManager", manager)
    with pytest.raises(EvaluationError) as error:
        evaluate(checkpoint, ["catbabi_mni", "lambada_opnai", "qqqqqqqq", "catbabi_mini"])
    message = str(error.value)
    assert "unknown task `catbabi_mni`; similar names are `catbabi_mini`" in message
    assert "`lambada_openai`" in message
    assert "unknown task `qqqqqqqq` (" in message
    assert "unknown task `catbabi_mini`" not in message


FEW_TASKS = """
import functools
from lm_eval.tasks import TaskManager
init = TaskManager.__init__
TaskManager.__init__ = functools.partialmethod(init, include_defaults=False)
"""


@pytest.mark.parametrize("setup", [FEW_TASKS, slow("")], ids=["few", "all"])
def test_lm_eval_command_line_runs_our_tasks(checkpoint, tmp_path, setup):
    arguments = (
        f"--model hf --model_args pretrained={checkpoint} --tasks catbabi_mini,catbabi_mini_gen"
        f" --include_path {TASKS_DIR} --device cpu --limit 5 --output_path {tmp_path}/out"
    ).split()
    code = f"{setup}\nfrom lm_eval.__main__ import cli_evaluate\ncli_evaluate()"
    run = PLAIN_FORKS.run("-c", [code, *arguments], timeout=300)
    assert run.returncode == 0, run.stderr
    assert "|catbabi_mini " in run.stdout and "exact_match" in run.stdout
    (results_file,) = (tmp_path / "out").rglob("results_*.json")
    scores = json.loads(results_file.read_text())["results"]["catbabi_mini"]
    results = evaluate(checkpoint, ["catbabi_mini"], limit=5, out=tmp_path / "r.json")
    metrics = results["tasks"]["catbabi_mini"]["metrics"]
    assert scores["acc,none"] == metrics["acc"]["value"]
    assert scores["acc_norm,none"] == metrics["acc_norm"]["value"]


def test_run_and_its_export_have_the_same_results(tiny_run, tiny_export, tmp_path):
    run_results, export_results = (
        evaluate(model, ["catbabi_mini"], limit=3, out=tmp_path / "r.json")
        for model in (tiny_run, tiny_export)
    )
    assert run_results["tasks"] == export_results["tasks"]
    assert run_results["solver"] == export_results["solver"]
    assert (run_results["checkpoint"], run_results["step"]) == ("tiny", 8)
    assert export_results["step"] is None


@pytest.mark.slow
def test_batch_size_auto_is_chosen_by_lm_eval(small_export, tmp_path):
    out = tmp_path / "r.json"
    results = [
        evaluate(small_export, ["catbabi_mini"], limit=3, batch_size=size, out=out)
        for size in ("auto", 2)
    ]
    assert results[0]["batch_size"] == "auto" and results[0]["tasks"] == results[1]["tasks"]
