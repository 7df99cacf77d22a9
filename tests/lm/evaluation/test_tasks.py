"""lm-eval tasks of this project: documents, as lm-eval reads them."""

import hashlib
import json
from collections import Counter

import pytest

from lm.config.data import Traces
from lm.data.sources import traces
from lm.evaluation.tasks import TASKS_DIR
from lm.evaluation.tasks.catbabi_mini import stories

# Name of the tag after "traces_" → numbers of elements between question and fact, one per task.
GAPS = {"a5": (4, 16, 64, 256), "repl": (4, 16, 64), "s3": (4, 16, 64, 256)}


def test_shipped_documents_are_unchanged():
    # Scores of different runs are comparable only if the documents are the same. If you change
    # them, raise the task's version, and check that the answers follow from the text, that no
    # answer dominates, and that shallow heuristics fail.
    splits = stories.load()
    digests = [
        hashlib.sha256(json.dumps(splits[name].to_list()).encode()).hexdigest()[:16]
        for name in ("test", "train")
    ]
    assert digests == ["083131bdf6e64b6a", "6c7f2af705aebc2e"]


def make_manager():
    tasks = pytest.importorskip("lm_eval.tasks")
    return tasks.TaskManager(include_path=str(TASKS_DIR), include_defaults=False)


def test_lm_eval_finds_the_tasks_and_tags():
    manager = make_manager()
    assert manager.all_subtasks == [
        "catbabi_mini",
        "catbabi_mini_gen",
        *sorted(f"catbabi_qa{task}" for task in range(1, 21)),
        "text_local",
        *sorted(f"traces_{source}_{gap}" for source, gaps in GAPS.items() for gap in gaps),
    ]
    assert manager.all_groups == ["catbabi_qa"]
    assert manager.all_tags == ["catbabi", *(f"traces_{source}" for source in sorted(GAPS))]


@pytest.mark.parametrize("source", GAPS)
def test_traces_in_lm_eval_equal_the_data_source(source):
    loaded = make_manager().load([f"traces_{source}"])["tasks"]
    assert set(loaded) == {f"traces_{source}_{gap}" for gap in GAPS[source]}
    config = Traces(form="repl") if source == "repl" else Traces(group=source.upper())
    for name, task in loaded.items():
        _, _, gap = name.rpartition("_")
        documents = list(task.eval_docs)
        turns = traces.iter_questions(config, int(gap), 500, "test")
        for document, turn in zip(documents, turns, strict=True):
            requests = task.construct_requests(document, task.doc_to_text(document))
            if source == "repl":
                assert turn.answer in task.doc_to_choice(document)
                assert [request.args for request in requests] == [
                    (turn.question, "\n1"),
                    (turn.question, "\n2"),
                    (turn.question, "\n3"),
                ]
            else:
                assert requests.args == (turn.question, turn.answer)


def test_a_right_value_counts_even_if_the_model_would_not_print_it():
    task = make_manager().load(["traces_repl_4"])["tasks"]["traces_repl_4"]
    document = next(document for document in task.eval_docs if document["answer"] == "\n2")

    def score(likelihoods, is_greedy):
        return task.process_results(document, list(zip(likelihoods, is_greedy, strict=True)))

    assert score([-9.0, -8.0, -9.0], [False] * 3) == {"acc": 1.0, "exact_match": 0}
    assert score([-9.0, -0.1, -9.0], [False, True, False]) == {"acc": 1.0, "exact_match": 1}
    assert score([-0.1, -8.0, -9.0], [True, False, False]) == {"acc": 0.0, "exact_match": 0}


def test_catbabi_mini_in_lm_eval_is_balanced():
    loaded = make_manager().load(["catbabi"])["tasks"]
    choice, generate = loaded["catbabi_mini"], loaded["catbabi_mini_gen"]
    for task in loaded.values():
        documents = list(task.eval_docs)
        assert len(documents) == 200
        for document in documents:
            assert task.doc_to_text(document) == document["context"] + " " + document["question"]
    documents_by_choice_count = Counter()
    for document in choice.eval_docs:
        choices = choice.doc_to_choice(document)
        assert choices[choice.doc_to_target(document)] == document["answer"]
        assert len(set(choices)) == len(choices)
        assert generate.doc_to_target(document) == document["answer"]
        documents_by_choice_count[len(choices)] += 1
    assert documents_by_choice_count == {6: 100, 4: 50, 2: 50}
    # Few-shot examples come from another split.
    texts = {choice.doc_to_text(d) for d in choice.eval_docs}
    examples = list(choice.fewshot_docs())
    assert len(examples) == 40 and not texts & {choice.doc_to_text(d) for d in examples}
