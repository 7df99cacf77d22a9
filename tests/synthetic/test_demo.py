"""`fprnn demo` and `fprnn synthetic` as typed: trained, drawn, and shown token by token."""

import json
import re

import pytest

from tests.running import FORKS

TINY = (
    "train.steps=4", "train.batch_size=4", "eval.every=2", "eval.examples=4", "log.every=2",
    "eval.lengths=4,8", "model.d_model=8", "model.d_state=2",
)  # fmt: skip


def fprnn(*arguments):
    return FORKS.run("fprnn", [str(a) for a in arguments], timeout=300)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A tiny demo's folder, and what was printed."""
    out = tmp_path_factory.mktemp("demo") / "s3"
    done = fprnn("demo", "s3", "--out", out, *TINY)
    assert done.returncode == 0, done.stderr[-3000:]
    return out, done.stdout


def test_both_models_are_trained_compared_and_drawn(demo):
    out, printed = demo
    for name in ("demo.png", "demo.pdf", "demo.csv", "index.html"):
        assert (out / name).stat().st_size > 500, name
    names = sorted(path.parent.name for path in out.rglob("result.json"))
    assert names == ["000-FP-Mamba", "001-Mamba"]
    assert "start  2 of 2" in printed and "FP-Mamba" in printed and "at 8" in printed
    assert str(out / "index.html") in printed


def test_the_page_has_what_the_models_decode(demo):
    """Every letter of three words, for both; a state is right where it is the running product."""
    out, _ = demo
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "<img src='demo.png'" in page and page.count("class='word'") == 6
    for said, word in re.findall(
        r": (\d+) of \d+ right</p>\s*<div class='word'>(.*?)</div>", page, re.S
    ):
        tokens = re.findall(r"<span(.*?)><small>(\d+)</small>\s*(\w+)(?: \((\d+)\))?</span>", word)
        product, right = (1, 2, 3), 0
        for kind, letter, decoded, correct in tokens:
            read = [int(digit) for digit in letter]
            product = tuple(read[i - 1] for i in product)
            name = "".join(map(str, product))
            assert ("wrong" in kind) == (decoded != name) == bool(correct)
            assert not correct or correct == name
            right += decoded == name
        assert len(tokens) in (8, 24, 48) and int(said) == right


def test_a_finished_demo_is_only_drawn(demo):
    out, _ = demo
    results = sorted(out.rglob("result.json"))
    before = [path.stat().st_mtime_ns for path in results]
    (out / "demo.png").unlink()
    done = fprnn("demo", "s3", "--out", out, *TINY)
    assert done.returncode == 0 and "both models are trained already" in done.stdout
    assert "start" not in done.stdout and (out / "demo.png").is_file()
    assert [path.stat().st_mtime_ns for path in results] == before
    assert json.loads(results[0].read_text())["updates"] == 4


def test_what_cannot_be_is_a_sentence(tmp_path):
    done = fprnn("demo", "a6")
    assert done.returncode == 2 and "invalid choice: 'a6' (choose from" in done.stderr
    (tmp_path / "index.html").write_text("somebody's")
    done = fprnn("demo", "s3", "--out", tmp_path)
    assert "index.html is there already, and this command did not write it" in done.stderr
    (tmp_path / "file").touch()
    done = fprnn("demo", "s3", "--out", tmp_path / "file")
    assert done.returncode != 0 and done.stderr.startswith("error: ")
    done = fprnn("demo", "s3", "--out", tmp_path / "x", "model.d_modle=3")
    assert "did you mean `model.d_model`" in done.stderr and not (tmp_path / "x").exists()


def test_the_suite_is_a_command(tmp_path):
    done = fprnn("--help")
    assert {"train", "demo", "synthetic"} <= set(done.stdout.split())
    done = fprnn("synthetic", "inspect", tmp_path, "213", "--out", tmp_path / "x.html", "321")
    assert done.returncode != 0 and done.stderr.startswith("error: ")  # both words are understood
    done = fprnn("synthetic", "train", "--confg", "x")
    assert done.returncode == 2 and "--config" in done.stderr
