"""Commands `fprnn demo` and `fprnn synthetic`."""

from tests.running import FORKS

TINY = (
    "train.steps=4",
    "train.batch_size=4",
    "eval.every=2",
    "eval.examples=4",
    "log.every=2",
    "eval.lengths=4,8",
    "model.d_model=8",
    "model.d_state=2",
)


def fprnn(*arguments):
    return FORKS.run("fprnn", [str(a) for a in arguments], timeout=300)


def test_demo_trains_both_models_once_and_redraws(tmp_path):
    out = f"out_dir={tmp_path}"
    result = fprnn("demo", "s3", out, *TINY)
    assert result.returncode == 0, result.stderr[-3000:]
    for name in ("demo.png", "demo.pdf", "demo.csv"):
        assert (tmp_path / "reports/small" / name).stat().st_size > 500, name
    results = sorted(tmp_path.rglob("result.json"))
    assert [path.parent.name for path in results] == ["000-FP-Mamba", "001-Mamba"]
    assert "start  2 of 2" in result.stdout and "at 8" in result.stdout
    modified = [path.stat().st_mtime_ns for path in results]
    (tmp_path / "reports/small/demo.png").unlink()
    result = fprnn("demo", "s3", out, *TINY)
    assert result.returncode == 0 and "start" not in result.stdout
    assert (tmp_path / "reports/small/demo.png").is_file()
    assert [path.stat().st_mtime_ns for path in results] == modified


def test_synthetic_is_a_subcommand(tmp_path):
    result = fprnn("--help")
    assert {"train", "demo", "synthetic"} <= set(result.stdout.split())
    # Tokens before and after an option are accepted: the error is about the run.
    result = fprnn("synthetic", "inspect", tmp_path, "213", "--out", tmp_path / "x.html", "321")
    assert result.returncode != 0 and result.stderr.startswith("error: ")
    result = fprnn("synthetic", "train", "--confg", "x")
    assert result.returncode == 2 and "--config" in result.stderr
