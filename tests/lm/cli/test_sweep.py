"""`fprnn sweep --run`: which points it trains, by which command, and its exit status."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from lm.cli import sweep
from lm.cli.main import main
from lm.common.errors import BAD_CONFIG, DIVERGED, FAILED, PREEMPTED
from lm.config import load as config
from lm.runs.checkpoint import find_newest_checkpoint
from lm.runs.lease import is_alive
from tests.running import ENV, ROOT, read_losses

YAML = """
name: s
out_dir: {folder}
model: {{d_model: 16, n_layer: 1, d_state: 2}}
tokenizer: {{name: bpe, vocab_size: 300}}
data: {{seq_len: 16}}
train: {{steps: 4, global_batch_size: 2, micro_batch_size: 2}}
sweep:
  models:
    fp: {{}}
    mamba: {{model.layers: mamba}}
  seed: [0, 1]
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text(YAML.format(folder=tmp_path))
    return file


class FakePopen:
    """Replacement of subprocess.Popen that records commands and returns given exit statuses."""

    def __init__(self, *exit_statuses):
        self.exit_statuses, self.commands = list(exit_statuses), []

    def __call__(self, command, preexec_fn=None):
        self.commands.append(command)
        return self

    def poll(self):
        self.returncode = self.exit_statuses.pop(0)
        return self.returncode


def write_run(path: Path, index: int, file: str, value: dict) -> None:
    """Write the directory of a point as if it was trained, with a file that ends it."""
    cfg = config.load(path, job_index=index)
    cfg.run_dir.mkdir(parents=True)
    (cfg.run_dir / "config.yaml").write_text(cfg.to_yaml())
    (cfg.run_dir / file).write_text(json.dumps(value))


RESULT = {"updates": 4, "validation": {"loss": 2.0, "perplexity": 7.4}}
FAILURE = {"exit_code": DIVERGED, "sentence": "nan"}


def test_sweep_continues_after_a_failed_point(path, monkeypatch, capsys):
    write_run(path, 0, "result.json", RESULT)
    write_run(path, 1, "failure.json", FAILURE)
    popen = FakePopen(FAILED, 0)
    monkeypatch.setattr(sweep.subprocess, "Popen", popen)
    assert main(["sweep", str(path), "--run", "train.steps=4"]) == 1
    options = [command[command.index("--job-index") :] for command in popen.commands]
    expected = ["resume=auto", "train.steps=4"]
    assert options == [["--job-index", i, *expected] for i in ("2", "3")]
    output = capsys.readouterr().out
    for text in ("s/000-fp-seed=0: done", "s/001-fp-seed=1: diverged", "exit status"):
        assert text in output


@pytest.mark.parametrize(
    "override, command_count, difference",
    [
        ("train.steps=5", 4, ""),
        ("log.every=3", 2, ""),
        ("optim.lr=0.1", 2, "optim.lr was 0.004, is 0.1"),
        ("solver.state_noise=0.3", 2, "solver.state_noise was 0.0, is 0.3"),
    ],
)
def test_finished_point_of_another_config_is_continued_or_named(
    path, monkeypatch, capsys, override, command_count, difference
):
    path.write_text(path.read_text().replace("mamba: {model.layers: mamba}", "two: {}"))
    write_run(path, 0, "result.json", RESULT)
    write_run(path, 1, "failure.json", FAILURE)
    popen = FakePopen(0, 0, 0, 0)
    monkeypatch.setattr(sweep.subprocess, "Popen", popen)
    assert main(["sweep", str(path), "--run", override]) == bool(difference)
    assert len(popen.commands) == command_count
    output = " ".join(capsys.readouterr().out.split())
    assert output.count(f"with other settings ({difference})") == (2 if difference else 0)


def test_finished_point_without_a_readable_config_is_named(path, monkeypatch, capsys):
    write_run(path, 0, "result.json", RESULT)
    (config.load(path, job_index=0).run_dir / "config.yaml").write_text("train: {steps: 4, a: 1}")
    popen = FakePopen(0, 0, 0)
    monkeypatch.setattr(sweep.subprocess, "Popen", popen)
    assert main(["sweep", str(path), "--run"]) == 1 and len(popen.commands) == 3
    assert "unknown key `train.a`" in capsys.readouterr().out


@pytest.mark.parametrize("point_status, sweep_status", [(DIVERGED, 0), (PREEMPTED, PREEMPTED)])
def test_sweep_status_after_divergence_and_stop(path, monkeypatch, point_status, sweep_status):
    popen = FakePopen(point_status, 0, 0, 0)
    monkeypatch.setattr(sweep.subprocess, "Popen", popen)
    assert main(["sweep", str(path), "--run", "--gpus", "2"]) == sweep_status
    assert len(popen.commands) == (1 if sweep_status else 4)
    bash, script, *rest = popen.commands[0]
    assert (bash, Path(script).is_file()) == ("bash", True)
    assert rest == [str(path), "2", "--job-index", "0"]


def test_signal_is_forwarded_to_the_training_point(path, monkeypatch):
    stop_requests = []

    class Training(FakePopen):
        def poll(self):
            if not stop_requests:
                signal.raise_signal(signal.SIGTERM)
            return PREEMPTED if stop_requests else None

        def terminate(self):
            stop_requests.append(True)

        returncode = PREEMPTED

    before = {number: signal.getsignal(number) for number in sweep_signals()}
    monkeypatch.setattr(sweep.subprocess, "Popen", Training())
    try:
        assert main(["sweep", str(path), "--run"]) == PREEMPTED and stop_requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def sweep_signals():
    from lm.common.signals import STOP_SIGNALS

    return STOP_SIGNALS


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_training_of_a_killed_sweep_saves_and_ends(path, tmp_path):
    """Otherwise it would train on, next to the training of the next sweep."""
    path.write_text(path.read_text().replace("steps: 4", "steps: 100000"))
    command = [sys.executable, "-m", "lm", "sweep", str(path), "--run", "log.every=1"]
    run = tmp_path / "s/000-fp-seed=0"
    with subprocess.Popen(command, cwd=ROOT, env=ENV, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: (run / "metrics.jsonl").is_file() and read_losses(run))
        trainer = json.loads((run / "lease.json").read_text())
        process.kill()
    wait_until(lambda: is_alive(trainer) is False)
    assert (
        find_newest_checkpoint(run / "checkpoints") is not None
        and not (run / "lease.json").exists()
    )


def wait_until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_override_of_the_sweep_is_refused(path, capsys):
    assert main(["sweep", str(path), "sweep={seed: [2]}"]) == BAD_CONFIG
    assert "an override sets `sweep`" in capsys.readouterr().err


def test_gpus_option_needs_run(path, capsys):
    assert main(["sweep", str(path), "--gpus", "2"]) == BAD_CONFIG
    assert "--gpus needs --run" in capsys.readouterr().err


@pytest.mark.slow
def test_point_may_start_from_an_earlier_point(tmp_path):
    """As in configs/lm/compare/traces.yaml: a Mamba layer is added to a trained model."""
    tree = yaml.safe_load((ROOT / "configs/tiny/lm.yaml").read_text())
    first = tmp_path / "tiny/000-first"
    tree |= {"out_dir": str(tmp_path), "eval": {"every": 8}}
    tree["sweep"] = {
        "models": {
            "first": {"model.n_layer": 1},
            "then": {
                "model.layers": "fp_mamba1 mamba",
                "tokenizer.name": str(first / "tokenizer"),
                "init_from": str(first),
            },
        }
    }
    path = tmp_path / "chain.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert main(["sweep", str(path), "--run"]) == 0
    init_from = json.loads((tmp_path / "tiny/001-then/init_from.json").read_text())
    assert init_from["path"] == str(first / "checkpoints/step-000008"), init_from
