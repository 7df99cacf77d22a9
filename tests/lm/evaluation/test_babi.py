"""bAbI: the reader against plain line handling of the real files, each refusal, the download."""

import io
import re
import socket
import subprocess
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lm.evaluation.tasks import TASKS_DIR, babi
from lm.evaluation.tasks.catbabi import stories as lm_eval_stories

ROOT = Path(__file__).parents[3]
SHARED = ROOT.parent / "shared/data/babi/en-valid"
shared = pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/data/babi")

STORIES = """\
1 Mary moved to the bathroom.
2 Where is Mary? \tbathroom\t1
3 John went to the hallway.
4 Where is John?\thallway\t3
1 John got the milk.
2 What is John carrying? \tmilk,apple\t1
"""


def text(task: int, split: str, count: int = 1) -> str:
    """A file's text, with a word and an answer that only this one has."""
    own = f"1 The thing{task} is here.\n2 What is that? \t{split}{task}\t1\n"
    return STORIES * count + own


def files(count: int = 1) -> dict[str, str]:
    return {
        f"qa{task}_{split}.txt": text(task, split, count)
        for task in babi.TASKS
        for split in babi.SPLITS
    }


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "en-valid"
    path.mkdir()
    for name, content in files().items():
        (path / name).write_text(content)
    return path


@pytest.fixture
def original(tmp_path):
    """The layout without a valid split: qa1_some-name_train.txt."""
    path = tmp_path / "en"
    path.mkdir()
    for task in babi.TASKS:
        for split in ("train", "test"):
            content = "".join(f"1 Story {split} {i}.\n2 Which? \t{i}\t1\n" for i in range(30))
            (path / f"qa{task}_some-name_{split}.txt").write_text(content)
    return path


def test_a_story_is_one_sequence_with_its_answers(folder):
    first, second, own = babi.read(folder, "valid", [3])
    assert " ".join(first.tokens) == (
        "mary moved to the bathroom . where is mary ? bathroom "
        "john went to the hallway . where is john ? hallway"
    )
    assert [first.tokens[i] for i in first.answers] == ["bathroom", "hallway"]
    assert [second.tokens[i] for i in second.answers] == ["milk,apple"]
    assert own.task == 3 and own.tokens[own.answers[0]] == "valid3"
    for story in babi.read(folder, "train"):
        assert all(story.tokens[i - 1] == "?" for i in story.answers)
        assert len(story.answers) == story.tokens.count("?")


def test_the_text_as_the_files_have_it(folder):
    task, lines = babi.read_lines(folder, "test", [7])[1]
    assert task == 7 and lines == [
        ("John got the milk.", None),
        ("What is John carrying?", "milk,apple"),
    ]


def test_tasks_come_in_the_order_asked_for(folder):
    assert [s.task for s in babi.read(folder, "train", [10, 1])] == [10] * 3 + [1] * 3


def test_the_vocabulary_is_of_all_tasks_and_splits(folder):
    words = babi.vocabulary(folder)
    assert words[:2] == ["<pad>", "<eos>"] and words[2:] == sorted(set(words[2:]))
    assert {"thing1", "thing20", "train1", "valid7", "test20", "milk,apple", ".", "?"} <= {*words}


def test_without_valid_files_the_end_of_train_is_valid(original):
    train, valid, test = (babi.read(original, split, [5, 11]) for split in babi.SPLITS)
    assert [s.tokens[2] for s in train] == [str(i) for i in range(27)] * 2
    assert [s.tokens[2] for s in valid] == ["27", "28", "29"] * 2
    assert {s.tokens[1] for s in valid} == {"train"} and len(test) == 60
    assert babi.counts(original)[11]["valid"] == (3, 3, 3 * 7)


@shared
def test_counts_of_the_real_files_by_plain_line_handling():
    counts, words = babi.counts(SHARED), set()
    for task in babi.TASKS:
        for split in babi.SPLITS:
            lines = (SHARED / f"qa{task}_{split}.txt").read_text().splitlines()
            stories = sum(line.startswith("1 ") for line in lines)
            asked = [line.split("\t") for line in lines if "\t" in line]
            tokens = [answer for _, answer, _ in asked]
            for line in lines:
                sentence = line.split("\t")[0].split(" ", 1)[1].strip()
                tokens += [*sentence[:-1].split(), sentence[-1]]
            assert counts[task][split] == (stories, len(asked), len(tokens)), (task, split)
            assert split != "test" or len(asked) == 1000
            words |= {token.lower() for token in tokens}
    assert babi.vocabulary(SHARED) == ["<pad>", "<eos>", *sorted(words)]
    assert len(words) == 176


@shared
def test_the_real_stories_word_for_word():
    for task in (1, 8, 15, 19):
        expected, raw = [], (SHARED / f"qa{task}_test.txt").read_text().lower()
        for story in re.split(r"^1 ", raw, flags=re.M)[1:]:
            story = re.sub(r"\n\d+ ", "\n", story)
            story = re.sub(r"\t([^\t\n]+)\t[\d ]+", r" \1", story)  # the answer, no supporting ids
            expected.append(re.sub(r"([.?])", r" \1 ", story).split())
        assert [s.tokens for s in babi.read(SHARED, "test", [task])] == expected


def test_missing_files_are_named(folder, tmp_path):
    (folder / "qa3_valid.txt").unlink()
    (folder / "qa12_test.txt").unlink()
    for function in (babi.vocabulary, babi.counts):
        with pytest.raises(babi.BabiError, match=r"lacks qa3_valid\.txt, qa12_test\.txt$"):
            function(folder)
    with pytest.raises(babi.BabiError, match=r"lacks qa12_test\.txt$"):
        babi.read(folder, "test")
    assert babi.read(folder, "test", [3])
    with pytest.raises(babi.BabiError, match=f"did you mean {re.escape(str(folder))}"):
        babi.read(tmp_path, "train")
    with pytest.raises(babi.BabiError, match=r"no folder .*nowhere"):
        babi.read(tmp_path / "nowhere", "train")


def test_missing_files_of_the_original_layout_are_named(original):
    (original / "qa2_some-name_train.txt").unlink()
    with pytest.raises(babi.BabiError, match=r"lacks qa2_\*_train\.txt$"):
        babi.vocabulary(original)


@pytest.mark.parametrize(
    "content, where, why",
    [
        ("1 Mary went home.\nJohn too.\n", 2, "must start with its number"),
        ("2 Mary went home.\n", 1, "line number 2 of the story, where 1 was due"),
        ("1 Mary went home.\n\n3 John too.\n", 3, "where 2, or 1 for a new story was due"),
        ("1 Mary went home.\n2 Where is Mary?\n", 2, "neither a statement"),
        ("1 Mary went home\n", 1, "neither a statement"),
        ("1 Where is Mary.\thome\t1\n", 1, "a question must read"),
        ("1 Where is Mary?\thome\t1\t2\n", 1, "a question must read"),
        ("1 Where is Mary?\t\t1\n", 1, "the answer must be one word"),
        ("1 Where is Mary?\tat home\t1\n", 1, "not `at home`"),
        (b"1 Mary went home.\n2 Mary \xff.\n", 2, "not UTF-8"),
        ("", None, "holds no stories"),
    ],
)
def test_a_malformed_line_is_named(folder, content, where, why):
    path = folder / "qa9_train.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(babi.BabiError, match=re.escape(why)) as e:
        babi.read(folder, "train")
    assert str(e.value).startswith(f"{path}:{where}: " if where else f"{path} ")


def test_line_ends_of_another_system_and_no_supporting_lines(folder):
    expected = babi.read(folder, "test", [1])
    plain = re.sub(r"\t\d+\n", "\n", text(1, "test"))
    (folder / "qa1_test.txt").write_bytes(plain.replace("\n", "\r\n").encode())
    assert babi.read(folder, "test", [1]) == expected


def test_no_such_split_or_task(folder):
    with pytest.raises(babi.BabiError, match="no split `dev`: there are train, valid, test"):
        babi.read(folder, "dev")
    with pytest.raises(babi.BabiError, match="no bAbI task 0, 21"):
        babi.read(folder, "train", [0, 1, 21])


def archive(entries: dict[str, str], links: dict[str, str] | None = None) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in entries.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content.encode()))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    return out.getvalue()


def whole(variants=("en-valid", "en-valid-10k")) -> dict[str, str]:
    top = "tasks_1-20_v1-2"
    entries = {
        f"{top}/{variant}/{name}": content
        for count, variant in enumerate(variants, 1)
        for name, content in files(count).items()
    }
    return entries | {f"{top}/README": "x", "../../escaped.txt": "x", f"{top}/en-valid/x.py": "x"}


@pytest.fixture
def serve():
    """A function (body, status, declared length) → the URL of a loopback server that sends it."""
    servers = []

    def start(body: bytes, status: int = 200, length: int | None = None) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status)
                self.send_header("Content-Length", str(len(body) if length is None else length))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/babi.tar.gz"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("variant, count", [("en-valid", 1), ("en-valid-10k", 2)])
def test_download_takes_only_the_variant(serve, tmp_path, variant, count):
    body, seen = archive(whole()), []
    url, base = serve(body), tmp_path / "data/babi"
    path = babi.download(base, variant, url=url, progress=lambda *n: seen.append(n), timeout=10)
    assert path == base / variant and [*base.iterdir()] == [path]
    assert {p.name: p.read_text() for p in path.iterdir()} == files(count)
    assert seen[-1] == (len(body), len(body)) and not [*tmp_path.rglob("escaped.txt")]
    assert babi.vocabulary(path)
    # A folder that is complete is not fetched again; one that is not is never overwritten.
    assert babi.download(base, variant, url="http://127.0.0.1:9/none") == path
    (path / "qa1_test.txt").unlink()
    with pytest.raises(babi.BabiError, match=r"lacks qa1_test\.txt"):
        babi.download(base, variant, url=url)


def closed_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_download_without_a_network_says_what_to_do(tmp_path):
    url = f"http://127.0.0.1:{closed_port()}/babi.tar.gz"
    with pytest.raises(babi.BabiError) as e:
        babi.download(tmp_path, url=url, timeout=5)
    message = str(e.value)
    for part in (url, "tasks_1-20_v1-2.tar.gz", "tasks_1-20_v1-2/en-valid at", "refused"):
        assert part in message
    assert str(tmp_path / "en-valid") in message and "\n" not in message
    assert not [*tmp_path.iterdir()]


def test_download_refuses_what_is_not_the_archive(serve, tmp_path):
    good = archive(whole())
    truncated = archive({k: v * 99 for k, v in whole().items()})
    cases = {
        "the server answered 404": serve(b"", status=404),
        "connection ended after": serve(good, length=len(good) + 5),
        "did not give bAbI's archive": serve(b"<html>come in</html>"),
        "did not give bAbI's archive (": serve(truncated[: len(truncated) // 2]),
        "no files of bAbI in a folder en-valid": serve(archive({"a/b.txt": "x"})),
        "lacks qa20_test.txt": serve(
            archive({k: v for k, v in whole().items() if not k.endswith("qa20_test.txt")})
        ),
        "no files of bAbI": serve(archive({}, {"t/en-valid/qa1_train.txt": "/etc/passwd"})),
    }
    for why, url in cases.items():
        with pytest.raises(babi.BabiError, match=re.escape(why)):
            babi.download(tmp_path, url=url, timeout=10)
        assert not [*tmp_path.iterdir()], why
    with pytest.raises(babi.BabiError, match="no variant `hn`"):
        babi.download(tmp_path, "hn")
    (tmp_path / "file").write_text("")
    with pytest.raises(babi.BabiError, match="cannot be written"):
        babi.download(tmp_path / "file", url=cases["no files of bAbI"])


def test_the_command_line(folder, serve, tmp_path, capsys):
    assert babi.main(["counts", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 20 + 2 and lines[1].split()[:3] == ["qa1", "3", "4"]
    assert lines[-2].split()[:3] == ["all", "60", "80"]
    assert lines[-1].startswith(f"vocabulary: {len(babi.vocabulary(folder))} ")
    url = serve(archive(whole()))
    assert babi.main(["download", str(tmp_path / "new"), "--url", url]) == 0
    assert str(tmp_path / "new/en-valid") in capsys.readouterr().out
    assert babi.main(["counts", str(tmp_path / "nowhere")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: no folder ") and error.count("\n") == 1
    with pytest.raises(SystemExit, match="0"):
        babi.main(["download", "--help"])
    assert "en-valid-10k" in capsys.readouterr().out


def test_the_module_runs(folder):
    command = [sys.executable, "-m", "lm.evaluation.tasks.babi", "counts", str(folder / "nowhere")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: no folder")
    assert "Traceback" not in done.stderr and done.stdout == ""


# The lm-eval task


def lines_of(folder, task, split):
    return [lines for _, lines in babi.read_lines(folder, split, [task])]


def test_documents_are_stories_with_the_question_last(folder):
    stories = lines_of(folder, 4, "test")
    documents = lm_eval_stories.documents(stories, ["a"], 99, "seed")
    assert len(documents) == 4  # every question once
    assert len({(d["context"].split("\n")[-1], d["question"]) for d in documents}) == 4
    told = {lm_eval_stories.line(story) for story in stories}
    for document in documents:
        *before, last = document["context"].split("\n")
        assert 1 <= len(before) <= 2 and set(before) < told
        end = f"{last} {document['question']} {document['answer']}."
        assert any(story.startswith(end) for story in told) and not before.count(end)
    assert documents == lm_eval_stories.documents(stories, ["a"], 99, "seed")
    assert documents[:2] == lm_eval_stories.documents(stories, ["a"], 2, "seed")


def _manager(**metadata):
    tasks = pytest.importorskip("lm_eval.tasks")
    where = dict(include_path=str(TASKS_DIR), include_defaults=False)
    return tasks.TaskManager(**where, metadata=metadata or None)


def test_as_lm_eval_sees_it(folder, monkeypatch):
    monkeypatch.setenv("FPRNN_BABI", str(folder))
    loaded = _manager().load(["catbabi_qa"])
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


def test_its_folder_on_lm_evals_command_line(folder, monkeypatch):
    monkeypatch.delenv("FPRNN_BABI", raising=False)
    task = _manager(data=str(folder), num_docs=2).load(["catbabi_qa2"])["tasks"]["catbabi_qa2"]
    assert len(task.eval_docs) == 2
    with pytest.raises(babi.BabiError, match="FPRNN_BABI is not set"):
        _manager().load(["catbabi_qa2"])
    (folder / "qa2_valid.txt").unlink()
    with pytest.raises(babi.BabiError, match=r"lacks qa2_valid\.txt"):
        _manager(data=str(folder)).load(["catbabi_qa2"])


@shared
def test_the_documents_of_the_real_files():
    pytest.importorskip("datasets")
    for task in (1, 3, 19):
        data = lm_eval_stories.load(task, data=str(SHARED), config_source="x")
        assert (len(data["test"]), len(data["train"])) == (200, 40)
        assert all(d["answer"] in d["choices"] for d in data["test"])
        assert not {d["context"] for d in data["test"]} & {d["context"] for d in data["train"]}
