"""Bad input to every command of `python -m synthetic`: one sentence, before anything starts."""

import shutil
from functools import partial
from pathlib import Path

import pytest

from lm.common.errors import BAD_CONFIG, ConfigError, MissingPackageError
from lm.common.files import DamagedError, OutputError
from synthetic import config
from synthetic.cli import main
from synthetic.runs import read_result, run_all
from synthetic.train import train
from tests.refusals import refused as refused_by

ROOT = Path(__file__).parents[2]
S3 = str(ROOT / "configs/synthetic/small/s3.yaml")
FIG3C = str(ROOT / "configs/synthetic/small/fig3c.yaml")
QUICK = ("train.steps=2", "eval.lengths=4", "eval.examples=4", "thresholds=[]", "model.d_model=16")
NOISELESS = ("train.adversarial_noise=0", "solver.state_noise=0")
MONARCH = ("model.mixer=monarch", "model.mixer_rank=7")

refused = partial(refused_by, run=main, prog="python -m synthetic")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Directory of a trained run; tests must not change it."""
    cfg = config.load(S3, [*QUICK, f"out_dir={tmp_path_factory.mktemp('runs')}"])
    train(cfg)
    return cfg.run_dir


@pytest.fixture
def blocked(tmp_path):
    """A path below a file, which cannot be created."""
    (tmp_path / "file").write_text("x")
    return tmp_path / "file" / "below"


# Values that the schema refuses.


@pytest.mark.parametrize(
    "override, message",
    [
        ("train.max_iters=lots", "'lots': it must be a valid integer or it must be 'config',"),
        ("eval.lengths=48:2", "`48:2` must be a length, START:STOP"),
        ("eval.lengths=2:1000000:1", "means 999,999 lengths, each of which is evaluated"),
        ("eval.during=4,1000000000", "with integers from 1 to 1,048,576 and START ≤ STOP"),
        ("eval.lengths=8,x", "`x` must be a length, START:STOP"),
        ("train={batch_size: 65536, length: 65536}", "has 4,294,967,296 ids, and the maximum"),
        ("train.length=1e9", "train.length"),
        ("train.length=[a, b]", "`train.length` is ['a', 'b']: it must be a valid integer"),
        ("train.length=[9, 4]", "length [9, 4] is empty: the shortest length"),
        ("train.curriculum.start=99", "curriculum.start is 99, and the longest of train.length"),
        ("train.curriculum={}", "`train.curriculum.start` is missing"),
        ("train.curriculum={start: 2, constant_tokens: 2}", "`train.curriculum.constant_tokens`"),
        ("model={layers: mamba}", "lstm and slstm have such noise"),
        (
            "thresholds=[{metric: a, mim: 1}]",
            "unknown key `thresholds[0].mim`; did you mean `thresholds.min`?",
        ),
        ("eval.seeds=[-1]", "`eval.seeds[0]` is -1: it must be greater than or equal to 0"),
        ("optim.warmup=99", "optim.warmup is 99 updates, but train.steps is only 2"),
    ],
)
def test_invalid_values_are_refused(capsys, tmp_path, override, message):
    out = f"out_dir={tmp_path / 'runs'}"
    assert message in refused(capsys, "train", "--config", S3, out, *QUICK, override)
    assert not (tmp_path / "runs").exists()


def test_language_model_is_refused_with_its_command(capsys):
    path = str(ROOT / "configs/lm/demo.yaml")
    assert f"train it with `fprnn train --config {path}`" in refused(
        capsys, "train", "--config", path
    )


# Sizes of models, and sweeps.


@pytest.mark.parametrize(
    "overrides, message",
    [
        (MONARCH, "mixer_rank is 7: for monarch it is the block size"),
        (["model.mixer=selective_dense", "model.d_model=512"], "d_model may be at most 256"),
        (["model.block=fp_mamba2", "model.headdim=7"], "headdim is 7: it must divide"),
        (
            ["model=transformer", "model.headdim=6", *NOISELESS],
            "model.headdim is 6: it must divide",
        ),
        (["model.vocab_size=2"], "model.vocab_size is 2, task `word_problem` has"),
    ],
)
def test_impossible_model_does_not_delete_the_run(capsys, trained, tmp_path, overrides, message):
    run = shutil.copytree(trained, tmp_path / "s3")
    command = ["train", "--config", S3, f"out_dir={tmp_path}", *QUICK, "--overwrite"]
    assert message in refused(capsys, *command, *overrides)
    assert (run / "result.json").exists()


def test_no_run_starts_if_one_config_is_impossible(capsys, tmp_path):
    message = "mixer_rank is 7: for monarch it is the block size"
    demo = str(ROOT / "configs/lm/demo.yaml")
    assert main(["validate", demo, "--out-dir", str(tmp_path / "runs"), *MONARCH]) == BAD_CONFIG
    assert message in capsys.readouterr().err
    first = config.load(S3, [*QUICK, f"out_dir={tmp_path / 'runs'}"])
    second = config.load(S3, [*QUICK, f"out_dir={tmp_path / 'runs'}", *MONARCH, "name=second"])
    for jobs in (1, 2):
        with pytest.raises(ConfigError, match=message):
            run_all([first, second], jobs)
    assert not (tmp_path / "runs").exists()


# Options.


@pytest.mark.parametrize(
    "args, message",
    [
        (["validate", S3, "--jobs", "0"], "argument --jobs: '0' is invalid: it must be an integer"),
        (["validate", S3, "--jobs", "-1"], "argument --jobs: '-1' is invalid"),
        (["report", "fig3c", "--jobs", "0"], "argument --jobs: '0' is invalid"),
        (["train", "--config", FIG3C, "--job-index", "-1"], "--job-index: '-1' is invalid"),
        (["validate", S3, "--seeds", "0", "-1"], "argument --seeds: '-1' is invalid"),
        (["report", "nope"], "no report `nope`: the reports are demo"),
        (["report", "fig3c", "nope"], "override `nope` must have the form key=value"),
        (["eval", "run", "nope"], "run: no such folder"),
        (["validate", "model.d_model=3"], "validate needs a config with a `model:` section"),
    ],
)
def test_invalid_options_are_refused(capsys, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, *args)


def test_validate_accepts_overrides_after_options(capsys, tmp_path):
    message = refused(capsys, "validate", S3, "--out-dir", tmp_path / "runs", "train.steps=3")
    expected = "validate accepts only keys of model, solver and optim"
    assert message == f"override `train.steps`: {expected}"


# Paths that cannot be written, and damaged files.


def test_unwritable_paths_are_refused(capsys, trained, tmp_path, blocked):
    message = "is a file"
    assert message in refused(capsys, "train", "--config", S3, *QUICK, f"out_dir={blocked}")
    assert message in refused(capsys, "validate", S3, "--out-dir", blocked)
    assert message in refused(capsys, "report", "fig3c", "--run", f"out_dir={blocked}")
    assert message in refused(capsys, "eval", trained, "eval.lengths=4", "--out", blocked / "x")
    folder = refused(capsys, "eval", trained, "eval.lengths=4", "--out", tmp_path)
    assert folder == f"{tmp_path} is a folder: name a file in it"
    cfg = config.load(S3, [*QUICK, f"out_dir={blocked}"])
    with pytest.raises(OutputError, match=message):
        run_all([cfg], jobs=2)


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_damaged_result_is_refused(tmp_path, text):
    cfg = config.load(S3, [f"out_dir={tmp_path}"])
    cfg.run_dir.mkdir()
    (cfg.run_dir / "result.json").write_text(text)
    with pytest.raises(DamagedError, match=r"result\.json is damaged"):
        read_result(cfg)


# Packages that are not installed.


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_missing_packages_are_named_before_training(monkeypatch, tmp_path, package):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a)
    )
    cfg = config.load(S3, [*QUICK, f"out_dir={tmp_path / 'runs'}", f"log.{package}=true"])
    with pytest.raises(MissingPackageError, match=f"log.{package} needs the package {package}"):
        train(cfg)
    assert not (tmp_path / "runs").exists()


def test_path_may_contain_an_equals_sign(capsys, tmp_path):
    path = tmp_path / "lr=1.yaml"
    path.write_text("[")
    assert "lr=1.yaml is not valid YAML" in refused(capsys, "validate", str(path), "--quick")
