"""`fprnn demo` and `fprnn synthetic` as typed."""

from tests.running import FORKS

TINY = (
    "train.steps=4", "train.batch_size=4", "eval.every=2", "eval.examples=4", "log.every=2",
    "eval.lengths=4,8", "model.d_model=8", "model.d_state=2",
)  # fmt: skip


def fprnn(*arguments):
    return FORKS.run("fprnn", [str(a) for a in arguments], timeout=300)


def test_both_models_are_trained_and_drawn_once(tmp_path):
    out = f"out_dir={tmp_path}"
    done = fprnn("demo", "s3", out, *TINY)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("demo.png", "demo.pdf", "demo.csv"):
        assert (tmp_path / "reports/small" / name).stat().st_size > 500, name
    results = sorted(tmp_path.rglob("result.json"))
    assert [path.parent.name for path in results] == ["000-FP-Mamba", "001-Mamba"]
    assert "start  2 of 2" in done.stdout and "at 8" in done.stdout
    before = [path.stat().st_mtime_ns for path in results]
    (tmp_path / "reports/small/demo.png").unlink()
    done = fprnn("demo", "s3", out, *TINY)
    assert done.returncode == 0 and "start" not in done.stdout
    assert (tmp_path / "reports/small/demo.png").is_file()
    assert [path.stat().st_mtime_ns for path in results] == before


def test_the_suite_is_a_command(tmp_path):
    done = fprnn("--help")
    assert {"train", "demo", "synthetic"} <= set(done.stdout.split())
    done = fprnn("synthetic", "inspect", tmp_path, "213", "--out", tmp_path / "x.html", "321")
    assert done.returncode != 0 and done.stderr.startswith("error: ")  # both words are understood
    done = fprnn("synthetic", "train", "--confg", "x")
    assert done.returncode == 2 and "--config" in done.stderr
