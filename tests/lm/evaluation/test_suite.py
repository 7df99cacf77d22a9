"""The suite `paper` on rows like those on the hub; perplexity of text; errors."""

import json
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")
pytest.importorskip("rich")

import datasets
from lm_eval import tasks
from lm_eval.tasks import TaskManager

import fprnn
from lm.cli.main import main
from lm.evaluation.evaluate import PAPER_METRICS, EvaluationError, evaluate, load_tasks
from lm.evaluation.tasks import TASKS_DIR

CHOICES = {"text": ["rain", "a very long wooden bridge", "air"], "label": ["A", "B", "C"]}
ARC = {"id": "q", "question": "What falls?", "choices": CHOICES, "answerKey": "A"}
ROWS = {  # by data set that lm-eval downloads
    "EleutherAI/lambada_openai": [{"text": "she saw a naïve cat"}, {"text": "one two"}],
    "Rowan/hellaswag": [
        {
            "ind": 24,
            "activity_label": "Roof shingle removal",
            "ctx_a": "A man is sitting on a roof [header] and.",
            "ctx_b": "he",
            "ctx": "A man is sitting on a roof. he",
            "endings": ["is using wrap  [title] to wrap.", "is ripping.", "sits", "starts."],
            "source_id": "x",
            "split": "val",
            "label": "3",
        }
    ],
    "baber/piqa": [{"goal": "When?", "sol1": "a", "sol2": "b", "label": 1}],
    "allenai/ai2_arc": [ARC],
    "allenai/winogrande": [
        {"sentence": "Sam won, _ lost.", "option1": "Sam", "option2": "Ann", "answer": "2"}
    ],
}


def load_rows(path, name=None, **_):
    rows = datasets.Dataset.from_list(ROWS[path])
    return datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), rows))


@pytest.fixture(scope="module", autouse=True)
def few_tasks():
    """Let lm-eval read only the files of the suite's tasks; reading all takes seconds."""
    root = Path(tasks.__file__).parent
    folders = [str(root / name) for name in ("lambada", "hellaswag", "piqa", "arc", "winogrande")]

    def manager(include_path, include_defaults=True):
        return TaskManager(include_path=[*include_path, *folders], include_defaults=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "TaskManager", manager)
        patch.setattr(datasets, "load_dataset", load_rows)
        yield


@pytest.fixture(scope="module")
def results(small_export, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "r.json"
    results = evaluate(small_export, [], suite="paper", out=out)
    assert json.loads(out.read_text()) == results
    return results


def test_suite_has_one_metric_per_task_and_their_mean(results):
    suite = results["suite"]
    assert suite["metrics"] == PAPER_METRICS and suite["complete"]
    values = [
        results["tasks"][name]["metrics"][metric]["value"] for name, metric in PAPER_METRICS.items()
    ]
    assert suite["mean"] == pytest.approx(sum(values) / 6)


def test_command_prints_one_accuracy_per_task_and_the_mean(small_export, tmp_path, capsys):
    out = tmp_path / "r.json"
    command = ["eval", str(small_export), "--suite", "paper", "--limit", "1", "--out", str(out)]
    assert main(command) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(f"│ {name} " in text for name in PAPER_METRICS)
    suite = json.loads(out.read_text())["suite"]
    assert f"mean of the suite's 6 │ │ accuracies │ {suite['mean']:.4g} " in text
    assert text.count("acc_norm ↑") == 2 and text.count(" acc ↑") == 4
    assert not suite["complete"]


@pytest.mark.parametrize(
    "names, suite, message",
    [
        (["piqa"], "paper", "--suite paper defines the tasks: do not give --tasks"),
        ([], None, "no tasks are given: --tasks catbabi_mini needs no network, --suite paper"),
    ],
)
def test_conflicting_options_are_refused(small_export, names, suite, message):
    with pytest.raises(EvaluationError, match=message):
        evaluate(small_export, names, suite=suite)


def test_unreachable_hub_is_an_evaluation_error(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(EvaluationError, match="`piqa` could not be loaded: no network"):
        load_tasks(["piqa"])


def test_bits_per_byte_of_text_equal_those_of_inspect(small_export, tmp_path, monkeypatch):
    """Both score the unchanged text after an EOS token, and no EOS token."""
    text = "naïve 東京, [and] <eos> more.\n\n"
    (tmp_path / "a.txt").write_bytes(text.encode("utf-8-sig"))
    monkeypatch.setenv("FPRNN_EVAL_DATA", str(tmp_path))
    out = tmp_path / "r.json"
    results = evaluate(small_export, ["text_local"], out=out)
    metrics = results["tasks"]["text_local"]["metrics"]
    bits = fprnn.load(small_export).inspect(text).bits_per_byte
    assert metrics["bits_per_byte"]["value"] == pytest.approx(bits, rel=1e-5)
    assert metrics["byte_perplexity"]["value"] == pytest.approx(2**bits, rel=1e-5)
    (tmp_path / "b.txt").write_bytes(b"abc\xff")
    with pytest.raises(EvaluationError, match=r"b\.txt is not UTF-8"):
        evaluate(small_export, ["text_local"])
    monkeypatch.setenv("FPRNN_EVAL_DATA", str(TASKS_DIR))
    with pytest.raises(EvaluationError, match=r"has no \.txt file with text in it"):
        evaluate(small_export, ["text_local"])
