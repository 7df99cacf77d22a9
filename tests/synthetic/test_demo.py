"""`fprnn demo` and `fprnn synthetic` as typed."""

import json

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
    for name in ("demo.png", "demo.pdf", "demo.csv"):
        assert (out / name).stat().st_size > 500, name
    names = sorted(path.parent.name for path in out.rglob("result.json"))
    assert names == ["000-FP-Mamba", "001-Mamba"]
    assert "start  2 of 2" in printed and "FP-Mamba" in printed and "at 8" in printed
    runs = sorted(path.parent for path in out.rglob("result.json"))
    commands = [line.strip() for line in printed.splitlines() if "synthetic inspect" in line]
    assert commands == [f"fprnn synthetic inspect {run} --length 24" for run in runs]


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
