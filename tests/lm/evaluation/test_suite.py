"""The suite `paper`: lm-eval's own prompts and metrics on local files, scored by hand; refusals."""

import json
import math

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")
pytest.importorskip("rich")

import datasets
import torch

from lm.cli.main import main
from lm.evaluation.evaluate import (
    EvaluationError,
    _bits_per_byte,
    evaluate,
    load_tasks,
    table,
)
from lm.evaluation.tasks import TASKS_DIR, paper
from lm.evaluation.tasks.paper import SuiteError, choose
from lm.runs.exported import load_model, load_tokenizer

ARC = [
    {
        "id": f"q{i}",
        "question": question,
        "choices": {"text": texts, "label": labels},
        "answerKey": labels[i % len(labels)],
    }
    for i, (question, texts, labels) in enumerate(
        [
            ("What falls?", ["rain", "a very long wooden bridge", "air", "e"], list("ABCD")),
            ("Who reads?", ["nobody at all, ever", "Mary", "it"], list("123")),
            ("Where?", ["é", "in the garden of the house", "up", "in"], list("ABCD")),
            ("When?", ["now", "at the end of the long winter", "no"], list("ABC")),
        ]
        * 2
    )
]
# Rows as the hub has them, with columns that no task reads.
ROWS = {
    "lambada_openai": [
        {"text": "she opened the door and saw a naïve cat"},
        {"text": 'he said: "wait\n\nfor  me'},
        {"text": "one  two"},  # the second space belongs to the word
    ],
    "hellaswag_val": [
        {
            "ind": 24,
            "activity_label": "Roof shingle removal",
            "ctx_a": "A man is sitting on a roof [header] and.",
            "ctx_b": "he",
            "ctx": "A man is sitting on a roof. he",
            "endings": [
                "is using wrap  [title] to wrap.",
                "is ripping.",
                "sits",
                "starts [step] it.",
            ],
            "source_id": "x",
            "split": "val",
            "label": "3",
        },
        {
            "ind": 25,
            "activity_label": "Washing",
            "ctx_a": "Two hands.",
            "ctx_b": "",
            "ctx": "Two hands.",
            "endings": ["a", "bb", "ccc", "dddd"],
            "source_id": "y",
            "split": "val",
            "label": "0",
        },
    ],
    "piqa_val": [
        {"goal": "How do I eat?", "sol1": "With a spoon.", "sol2": "With a roof.", "label": 0},
        {"goal": "When?", "sol1": "a", "sol2": "b", "label": 1},
    ],
    "arc_easy_test": ARC,
    "arc_challenge_test": ARC[1:5],
    "winogrande_val": [
        {
            "sentence": "The cup did not fit the bag as the _ was too big.",
            "option1": "cup",
            "option2": "bag",
            "answer": "1",
        },
        {"sentence": "Sam won, _ lost.", "option1": "Sam", "option2": "Ann", "answer": "2"},
    ],
}
FIRST = {  # context and continuation of the first request for the first document, as lm-eval has it
    "lambada_openai": ("she opened the door and saw a naïve", " cat"),
    "hellaswag": (
        "Roof shingle removal: A man is sitting on a roof and. He",
        " is using wrap . to wrap.",
    ),
    "piqa": ("Question: How do I eat?\nAnswer:", " With a spoon."),
    "arc_easy": ("Question: What falls?\nAnswer:", " rain"),
    "arc_challenge": ("Question: Who reads?\nAnswer:", " nobody at all, ever"),
    "winogrande": ("The cup did not fit the bag as the cup", " was too big."),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with the six files, one of them parquet."""
    folder = tmp_path_factory.mktemp("data")
    for name, rows in ROWS.items():
        if name == "piqa_val":
            datasets.Dataset.from_list(rows).to_parquet(folder / f"{name}.parquet")
        else:
            write(folder, name, rows)
    return folder


def write(folder, name, rows):
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / f"{name}.jsonl").write_text(lines + "\n", encoding="utf-8")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def requests(task):
    """All (context, continuation) that a task asks a model about."""
    task.build_all_requests()
    return [instance.args for instance in task.instances]


def test_the_tasks_are_the_harness_own(data, monkeypatch):
    """Its definitions, given the same rows where it would download them: prompts, targets, metrics
    and version are equal."""
    ours = {task.config.task: task for task in load_tasks([], choose([], data))[1]}
    assert list(ours) == list(paper.TASKS)
    stem = {name: next(iter(task.files)) for name, task in paper.TASKS.items()}
    asked = []

    def load_dataset(path, name=None, **_):
        asked.append(path)
        rows = ROWS[stem[HUB[path, name]]]
        splits = ("train", "validation", "test")
        return datasets.DatasetDict({s: datasets.Dataset.from_list(rows) for s in splits})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    theirs = {task.config.task: task for task in load_tasks([], choose([], None))[1]}
    assert len(asked) == 6 and list(theirs) == list(ours)
    for name, own in theirs.items():
        here = ours[name]
        assert requests(here) == requests(own) and requests(own)[0] == FIRST[name], name
        for document, same in zip(here.eval_docs, own.eval_docs, strict=True):
            assert here.doc_to_target(document) == own.doc_to_target(same), name
        for part in (
            "metric_list",
            "output_type",
            "num_fewshot",
            "target_delimiter",
            "filter_list",
        ):
            assert getattr(here.config, part) == getattr(own.config, part), (name, part)
        assert here.VERSION == own.VERSION and here.aggregation() == own.aggregation()
        metrics = {metric["metric"] for metric in own.config.metric_list}
        assert paper.TASKS[name].metric in metrics
        # What lm-eval scores by itself is what a local file of the first name is taken for.
        scored = own.config.test_split or own.config.validation_split
        assert scored == paper.split_of_lm_eval(name), name


HUB = {
    ("EleutherAI/lambada_openai", "default"): "lambada_openai",
    ("Rowan/hellaswag", None): "hellaswag",
    ("baber/piqa", None): "piqa",
    ("allenai/ai2_arc", "ARC-Easy"): "arc_easy",
    ("allenai/ai2_arc", "ARC-Challenge"): "arc_challenge",
    ("allenai/winogrande", "winogrande_xl"): "winogrande",
}


class ByHand:
    """Log-likelihoods of an export whose tokenizer has a token for each byte."""

    def __init__(self, checkpoint):
        self.model, self.tokenizer = load_model(checkpoint).eval(), load_tokenizer(checkpoint)

    def __call__(self, context, continuation):
        """(nats, whether each token is the likeliest) of a continuation."""
        ids = self.tokenizer(context + continuation)["input_ids"]
        first = len(self.tokenizer(context)["input_ids"])
        with torch.no_grad():
            log_p = self.model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
        rows = range(first - 1, len(ids) - 1)
        greedy = all(log_p[i].argmax() == ids[i + 1] for i in rows)
        return sum(log_p[i, ids[i + 1]].item() for i in rows), greedy


@pytest.fixture(scope="module")
def results(small_export, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "r.json"
    found = evaluate(small_export, [], suite="paper", data=data, out=out)
    assert json.loads(out.read_text()) == found
    assert str(data) not in out.read_text()
    return found


def test_lambada_scored_by_hand(small_export, results):
    by_hand = ByHand(small_export)
    # The context of the third ends with a space, which lm-eval scores with the word.
    pairs = [("she opened the door and saw a naïve", " cat"),
             ('he said: "wait\n\nfor', "  me"), ("one", "  two")]  # fmt: skip
    scores = [by_hand(*pair) for pair in pairs]
    nats = -sum(score for score, _ in scores)
    text_bytes = sum(len(continuation.encode()) for _, continuation in pairs)
    metrics = results["tasks"]["lambada_openai"]["metrics"]
    assert metrics["perplexity"]["value"] == pytest.approx(math.exp(nats / 3), rel=1e-4)
    assert metrics["bits_per_byte"]["value"] == pytest.approx(
        nats / math.log(2) / text_bytes, rel=1e-5
    )
    assert metrics["acc"]["value"] == pytest.approx(sum(greedy for _, greedy in scores) / 3)


def test_the_suite_says_what_stands_for_each_task(results):
    suite = results["suite"]
    metrics = {name: row["metric"] for name, row in suite["tasks"].items()}
    assert metrics == {
        "lambada_openai": "acc", "hellaswag": "acc_norm", "piqa": "acc",
        "arc_easy": "acc", "arc_challenge": "acc_norm", "winogrande": "acc",
    }  # fmt: skip
    for name, row in suite["tasks"].items():
        assert row["value"] == results["tasks"][name]["metrics"][row["metric"]]["value"]
    values = [row["value"] for row in suite["tasks"].values()]
    assert suite["mean"] == pytest.approx(sum(values) / 6)
    assert suite["complete"] and suite["tasks"]["piqa"]["file"] == "piqa_val.parquet"
    sources = {name: paper.Source(row["split"]) for name, row in suite["tasks"].items()}
    assert not paper.scores(sources, results["tasks"], 3)["complete"]


def shown(results) -> str:
    from rich.console import Console

    console = Console(width=80)
    with console.capture() as capture:
        console.print(table(results))
    return " ".join(capture.get().split())


def test_the_table_of_a_suite(results):
    text = shown(results)
    order = [text.index(f"│ {name} ") for name in paper.TASKS]
    assert order == sorted(order)
    mean = results["suite"]["mean"]
    assert f"mean of 6 of the suite's 6 │ │ accuracies │ {mean:.4g} " in text
    assert text.count("acc_norm ↑") == 2 and text.count(" acc ↑") == 4
    assert "perplexity ↓" in text and "bits_per_byte ↓" in text and "validation" not in text


def test_some_tasks_of_another_split(small_export, tmp_path, capsys):
    write(tmp_path, "arc_easy_val", ARC)
    write(tmp_path, "lambada_openai", ROWS["lambada_openai"])
    out = tmp_path / "r.json"
    command = ["eval", str(small_export), "--suite", "paper", "--data", str(tmp_path)]
    assert main([*command, "--out", str(out)]) != 0
    message = capsys.readouterr().err
    assert "lacks the files of 4 tasks (hellaswag: hellaswag_val.jsonl (or .parquet); " in message
    assert "--tasks lambada_openai,arc_easy runs what is there" in message
    chosen = ("--tasks", "arc_easy,lambada_openai", "--limit", "3")
    assert main([*command, *chosen, "--out", str(out)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "│ arc_easy (validation) │ 3 │" in text and "mean of 2 of the suite's 6" in text
    suite = json.loads(out.read_text())["suite"]
    assert not suite["complete"]
    row = suite["tasks"]["arc_easy"]
    assert (row["split"], row["split_of_lm_eval"]) == ("validation", "test")


@pytest.mark.parametrize(
    "tasks, options, words",
    [
        ([], {"suite": "papers"}, "no suite `papers`: there is one, `paper`"),
        (["catbabi_mini"], {"suite": "paper"}, "the suite `paper` has no `catbabi_mini`: .*piqa"),
        (["piqa"], {"data": "."}, "--data is the folder of a suite's files: give --suite paper"),
        ([], {"suite": "paper", "data": "nowhere"}, "nowhere lacks the files of 6 tasks"),
        ([], {}, "no tasks given: --tasks catbabi_mini needs no network, --suite paper"),
    ],
)
def test_what_does_not_go_together_is_refused(small_export, tasks, options, words):
    with pytest.raises((EvaluationError, SuiteError), match=words):
        evaluate(small_export, tasks, **options)


@pytest.mark.parametrize(
    "name, row, words",
    [
        ("piqa_val", {"goal": "a", "sol1": "b", "label": 0}, "row 2 cannot be scored.* sol2,"),
        ("piqa_val", ROWS["piqa_val"][0] | {"label": -1}, "row 2 cannot be scored.*, label$"),
        ("piqa_val", ["a"], "piqa_val.jsonl cannot be read as json"),
        ("hellaswag_val", ROWS["hellaswag_val"][0] | {"label": ""}, "row 2 cannot be scored"),
        ("hellaswag_val", ROWS["hellaswag_val"][0] | {"label": 3.0}, "label. changed from string"),
        ("arc_challenge_test", ARC[0] | {"answerKey": ""}, "row 2 cannot be scored"),
        ("arc_easy_val", ARC[0] | {"choices": ["a", "b"]}, "choices. changed from object"),
        ("winogrande_val", ROWS["winogrande_val"][0] | {"answer": ""}, "row 2 cannot be scored"),
        ("lambada_openai", {"text": ""}, "row 2 cannot be scored.*text"),
    ],
)
def test_rows_without_an_answer_are_refused(tmp_path, name, row, words):
    """Splits that the hub publishes without answers would be scored as wrong."""
    first = ARC[0] if name.startswith("arc") else ROWS[name][0]
    write(tmp_path, name, [first, row])
    task = name.rpartition("_")[0] if name != "lambada_openai" else name
    with pytest.raises(SuiteError, match=words):
        load_tasks([], choose([task], tmp_path))


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("lambada_openai.jsonl", b'{"text": "a b"}\n{"text": ', "cannot be read as json"),
        ("lambada_openai.jsonl", b'{"text": "a \xff"}', "cannot be read as json: 'utf-8'"),
        ("lambada_openai.jsonl", b"\n", "(has no rows|cannot be read as json)"),
        ("lambada_openai.parquet", b"PAR1", "cannot be read as parquet"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SuiteError, match=rf"{name} {words}"):
        load_tasks([], choose(["lambada_openai"], tmp_path))


def test_the_hub_out_of_reach_names_the_local_files(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    words = r"`piqa` could not be loaded: no network; --suite paper --data DIR.* piqa_val\.jsonl"
    with pytest.raises(EvaluationError, match=words):
        load_tasks([], choose(["piqa"], None))


def test_bits_of_tasks_of_another_kind_are_not_made_up():
    sample = {"filter": "none", "arguments": [("a", " b")], "resps": [[(-math.log(4), True)]]}
    again = {"filter": "other", "resps": [[(-9.0, True)]]}
    assert _bits_per_byte([sample, sample | again]) == pytest.approx(1.0)
    two = sample | {"arguments": [("a", " b"), ("a", " c")]}
    assert _bits_per_byte([two]) is None and _bits_per_byte([]) is None
    assert _bits_per_byte([sample | {"resps": [["a text"]]}]) is None


def test_bits_per_byte_of_plain_text(small_export, tmp_path, monkeypatch):
    """The whole file, as it is, after an EOS that is not scored; no end."""
    text = "naïve 東京, [and] more.\n\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    monkeypatch.setenv("FPRNN_EVAL_DATA", str(tmp_path))
    out = tmp_path / "r.json"
    found = evaluate(small_export, ["text_local"], out=out)
    metrics = found["tasks"]["text_local"]["metrics"]
    nats = -ByHand(small_export)("<eos>", text)[0]
    bits = nats / math.log(2) / len(text.encode())
    assert metrics["bits_per_byte"]["value"] == pytest.approx(bits, rel=1e-5)
    assert metrics["byte_perplexity"]["value"] == pytest.approx(2**bits, rel=1e-5)
    monkeypatch.setenv("FPRNN_EVAL_DATA", str(TASKS_DIR))
    with pytest.raises(EvaluationError, match=r"has no \.txt file with text in it"):
        evaluate(small_export, ["text_local"])
