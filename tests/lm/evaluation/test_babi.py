"""bAbI: the reader, compared with a simpler one on the real files; errors; the lm-eval task."""

import re
from pathlib import Path

import pytest

from lm.evaluation.tasks import TASKS_DIR, babi
from lm.evaluation.tasks.catbabi import stories as lm_eval_stories

SHARED = Path(__file__).parents[4] / "shared/data/babi/en-valid"
needs_real_files = pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/data/babi")

STORIES = """\
1 Mary moved to the bathroom.
2 Where is Mary? \tbathroom\t1
3 John went to the hallway.
4 Where is John?\thallway\t3
1 John got the milk.
2 What is John carrying? \tmilk,apple\t1
"""


def make_text(task: int, split: str) -> str:
    """Return the text of a file, with a word and an answer that no other file has."""
    return STORIES + f"1 The thing{task} is here.\n2 What is that? \t{split}{task}\t1\n"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "en-valid"
    path.mkdir()
    for task in babi.TASKS:
        for split in babi.SPLITS:
            (path / f"qa{task}_{split}.txt").write_text(make_text(task, split))
    return path


def test_story_is_one_sequence_with_its_answers(folder):
    first, second, last = babi.read(folder, "valid", [3])
    assert " ".join(first.tokens) == (
        "mary moved to the bathroom . where is mary ? bathroom "
        "john went to the hallway . where is john ? hallway"
    )
    assert [first.tokens[i] for i in first.answers] == ["bathroom", "hallway"]
    assert [second.tokens[i] for i in second.answers] == ["milk,apple"]
    assert last.task == 3 and last.tokens[last.answers[0]] == "valid3"
    for story in babi.read(folder, "train"):
        assert all(story.tokens[i - 1] == "?" for i in story.answers)
        assert len(story.answers) == story.tokens.count("?")


def test_read_lines_keeps_the_text_of_the_files(folder):
    task, lines = babi.read_lines(folder, "test", [7])[1]
    assert task == 7 and lines == [
        ("John got the milk.", None),
        ("What is John carrying?", "milk,apple"),
    ]


def test_vocabulary_is_sorted_after_padding_and_eos(folder):
    words = babi.make_vocabulary(
        story for split in babi.SPLITS for story in babi.read(folder, split)
    )
    assert words[:2] == ["<pad>", "<eos>"] and words[2:] == sorted(set(words[2:]))
    assert {"thing1", "thing20", "train1", "valid7", "test20", "milk,apple", ".", "?"} <= {*words}


@needs_real_files
def test_real_files_agree_with_a_simpler_parser():
    words, all_stories = set(), []
    for task in babi.TASKS:
        for split in babi.SPLITS:
            lines = (SHARED / f"qa{task}_{split}.txt").read_text().splitlines()
            questions = [line.split("\t") for line in lines if "\t" in line]
            tokens = [answer for _, answer, _ in questions]
            for line in lines:
                sentence = line.split("\t")[0].split(" ", 1)[1].strip()
                tokens += [*sentence[:-1].split(), sentence[-1]]
            stories = babi.read(SHARED, split, [task])
            assert len(stories) == sum(line.startswith("1 ") for line in lines), (task, split)
            assert sum(len(story.answers) for story in stories) == len(questions), (task, split)
            assert sum(len(story.tokens) for story in stories) == len(tokens), (task, split)
            assert split != "test" or len(questions) == 1000
            words |= {token.lower() for token in tokens}
            all_stories += stories
    assert babi.make_vocabulary(all_stories) == ["<pad>", "<eos>", *sorted(words)]
    assert len(words) == 176


def test_error_names_all_missing_files(folder, tmp_path):
    (folder / "qa3_valid.txt").unlink()
    (folder / "qa12_test.txt").unlink()
    with pytest.raises(babi.BabiError, match=r"lacks qa3_valid\.txt, qa12_test\.txt$"):
        babi.check(folder)
    with pytest.raises(babi.BabiError, match=r"lacks qa12_test\.txt$"):
        babi.read(folder, "test")
    assert babi.read(folder, "test", [3])
    for other in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(babi.BabiError, match=r"holds no bAbI files .*: `curl -L http.* | tar"):
            babi.read(other, "train")


FORMAT = "a line must be `N A statement.`, or `N A question?` followed by"


@pytest.mark.parametrize(
    "content, line, reason",
    [
        ("1 Mary went home.\nJohn too.\n", 2, FORMAT),
        ("2 Mary went home.\n", 1, FORMAT),
        ("1 Mary went home.\n\n3 John too.\n", 3, FORMAT),
        ("1 Mary went home.\n2 Where is Mary?\n", 2, FORMAT),
        ("1 Where is Mary.\thome\t1\n", 1, FORMAT),
        ("1 Where is Mary?\tat home\t1\n", 1, FORMAT),
        (b"1 Mary went home.\n2 Mary \xff.\n", 2, "not UTF-8"),
        ("", None, "holds no stories"),
    ],
)
def test_error_names_the_malformed_line(folder, content, line, reason):
    path = folder / "qa9_train.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(babi.BabiError, match=re.escape(reason)) as e:
        babi.read(folder, "train")
    assert str(e.value).startswith(f"{path}:{line}: " if line else f"{path} ")


def test_crlf_and_missing_supporting_lines_are_accepted(folder):
    expected = babi.read(folder, "test", [1])
    shortened = re.sub(r"\t\d+\n", "\n", make_text(1, "test"))
    (folder / "qa1_test.txt").write_bytes(shortened.replace("\n", "\r\n").encode())
    assert babi.read(folder, "test", [1]) == expected


def test_documents_end_with_the_question(folder):
    stories = [lines for _, lines in babi.read_lines(folder, "test", [4])]
    documents = lm_eval_stories.make_documents(stories, ["a"], count=99, seed="seed")
    assert len(documents) == 4  # every question once
    assert len({(d["context"].split("\n")[-1], d["question"]) for d in documents}) == 4
    contexts = {lm_eval_stories.format_story(story) for story in stories}
    for document in documents:
        *other_stories, last_story = document["context"].split("\n")
        assert 1 <= len(other_stories) <= 2 and set(other_stories) < contexts
        end = f"{last_story} {document['question']} {document['answer']}."
        assert any(story.startswith(end) for story in contexts) and end not in other_stories
    assert documents == lm_eval_stories.make_documents(stories, ["a"], count=99, seed="seed")
    assert documents[:2] == lm_eval_stories.make_documents(stories, ["a"], count=2, seed="seed")


def make_manager(**metadata):
    tasks = pytest.importorskip("lm_eval.tasks")
    options = dict(include_path=str(TASKS_DIR), include_defaults=False)
    return tasks.TaskManager(**options, metadata=metadata or None)


def test_catbabi_qa_in_lm_eval(folder, monkeypatch):
    monkeypatch.setenv("FPRNN_BABI", str(folder))
    loaded = make_manager().load(["catbabi_qa"])
    assert loaded["group_map"] == {"catbabi_qa": [f"catbabi_qa{task}" for task in babi.TASKS]}
    for number in babi.TASKS:
        task = loaded["tasks"][f"catbabi_qa{number}"]
        documents = list(task.eval_docs)
        choices = ["bathroom", "hallway", "milk,apple", *(s + str(number) for s in babi.SPLITS)]
        answers = []
        for document in documents:
            assert task.doc_to_text(document) == f"{document['context']} {document['question']}"
            assert task.doc_to_choice(document) == sorted(choices)
            answers.append(sorted(choices)[task.doc_to_target(document)])
        assert sorted(answers) == ["bathroom", "hallway", "milk,apple", f"test{number}"]
        assert {d["answer"] for d in task.fewshot_docs()} & {f"train{number}"}


def test_metadata_of_lm_eval_names_the_folder(folder, monkeypatch):
    monkeypatch.delenv("FPRNN_BABI", raising=False)
    task = make_manager(data=str(folder), num_docs=2).load(["catbabi_qa2"])["tasks"]["catbabi_qa2"]
    assert len(task.eval_docs) == 2
    with pytest.raises(babi.BabiError, match="FPRNN_BABI names, which is not set"):
        make_manager().load(["catbabi_qa2"])
    (folder / "qa2_valid.txt").unlink()
    with pytest.raises(babi.BabiError, match=r"lacks qa2_valid\.txt"):
        make_manager(data=str(folder)).load(["catbabi_qa2"])
