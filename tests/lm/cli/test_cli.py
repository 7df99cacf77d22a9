"""Command line in new processes: quick start, one-line errors, no network."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lm import __version__
from lm.cli.main import main, make_parser
from lm.common.errors import BAD_CONFIG
from tests.running import FORKS, REFUSED

ROOT = Path(__file__).parents[3]
LM = ROOT / "configs/lm"
COMMANDS = "doctor plan prepare train sweep status report inspect export eval generate serve"

# Makes name resolution and connections fail, then runs `fprnn`.
WITHOUT_NETWORK = """\
import socket
import sys


def refuse(*args, **kwargs):
    sys.stderr.write("network used\\n")
    raise OSError("network used")


socket.getaddrinfo = socket.create_connection = refuse
socket.socket.connect = socket.socket.connect_ex = refuse
from lm.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def run_python(*args: str, cwd: Path):
    """Run a new Python process in `cwd`, with the repository on its path."""
    prefixes = ("HF_", "WORLD_SIZE", "RANK")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *args]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=120, env=environment
    )


def run_lm(*args: str, cwd: Path):
    return run_python("-m", "lm", *args, cwd=cwd)


def read_refusal(result) -> str:
    """Return the single line that a refused command printed."""
    assert result.returncode in REFUSED, result
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    assert result.stdout == ""
    return lines[0].removeprefix("error: ")


def test_help_is_quick_and_imports_nothing_slow(tmp_path):
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        result = run_lm("--help", cwd=tmp_path)
        seconds.append(time.perf_counter() - start)
        assert result.returncode == 0 and result.stdout.startswith("usage: fprnn")
    assert min(seconds) < 1

    code = (
        "import sys, lm.cli.main\n"
        "try:\n    lm.cli.main.main(['train', '--help'])\n"
        "except SystemExit:\n    pass\n"
        "print('\\nIMPORTED', *{name.partition('.')[0] for name in sys.modules})"
    )
    result = run_python("-c", code, cwd=tmp_path)
    imported = set(result.stdout.split("IMPORTED")[1].split())
    assert {"lm", "argparse"} <= imported
    slow = {"torch", "transformers", "pydantic", "deepspeed", "numpy", "yaml", "rich", "wandb"}
    assert not imported & slow


def test_every_command_has_help_with_an_example(capsys):
    from synthetic.fprnn_command import main as fprnn_main

    for command in {*COMMANDS.split(), "synthetic", "demo"}:
        with pytest.raises(SystemExit) as e:
            fprnn_main([command, "--help"])
        help_text = capsys.readouterr().out
        assert e.value.code == 0 and help_text.startswith(f"usage: fprnn {command}")
        examples = help_text.partition("examples:")[2]
        assert re.search(rf"^  .*(fprnn|lm) {command}( |$)", examples, re.M)


def test_list_of_commands(capsys):
    with pytest.raises(SystemExit) as e:
        main([])
    assert e.value.code == 2
    (commands,) = (a for a in make_parser()._actions if a.dest == "command")
    assert " ".join(commands.choices) == COMMANDS


def write_config(folder: Path, text: str) -> str:
    (folder / "c.yaml").write_text(text)
    return str(folder / "c.yaml")


def test_unknown_key_gives_one_line(tmp_path):
    path = write_config(tmp_path, "train: {lr: 1.0e-3}")
    message = read_refusal(run_lm("train", "--config", path, cwd=tmp_path))
    assert message == f"{path}: unknown key `train.lr`; did you mean `optim.lr`?"


def test_sweep_lists_the_points(tmp_path):
    result = run_lm("sweep", str(LM / "sweep_mixers.yaml"), cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    expected = [(m, lr) for m in ("householder", "dplr") for lr in ("0.002", "0.004", "0.008")]
    assert result.stdout.splitlines() == [
        f"sweep_mixers/{i:03d}-mixer={m}-lr={lr}" for i, (m, lr) in enumerate(expected)
    ]


@pytest.mark.parametrize(
    "name, parameters, flops",
    [
        ("fpmamba_160m_fineweb2b", "169.4 M", ", evaluations = 1"),
        pytest.param("mamba_160m_fineweb2b", "83.9 M", "", marks=pytest.mark.slow),
    ],
)
def test_dry_run_prints_the_cost_and_writes_no_files(tmp_path, name, parameters, flops):
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    environment = {"COLUMNS": "200", "HF_HOME": str(tmp_path / "hf")}  # no cell is wrapped
    arguments = ["train", "--config", str(LM / f"{name}.yaml"), "--dry-run"]
    result = FORKS.run("-c", [WITHOUT_NETWORK, *arguments], 120, environment, cwd)
    assert (result.returncode, result.stderr) == (0, "")
    rows = {}
    for line in result.stdout.splitlines():
        if line.startswith("│"):
            key, value = (cell.strip() for cell in line.strip("│").split("│"))
            rows[key] = value
    assert rows["parameters"] == parameters
    assert rows["sequences per update"] == "256 of 2,048 tokens"
    assert rows["tokens trained on"] == "2.517 B in 4,800 updates"
    assert rows[f"FLOPs per token{flops}"].endswith("in all)")
    assert "GiB (estimate): fits" in rows["memory per GPU, ZeRO-1"]
    assert f"name: {name}\n" in result.stdout  # the configuration with all defaults
    assert "  weight_decay: 0.1\n" in result.stdout and "  timeout_s: 1800\n" in result.stdout
    assert list(cwd.iterdir()) == []


def test_plan_prints_the_table_of_a_dry_run(tmp_path, capsys):
    path = write_config(tmp_path, "model: {d_model: 16, n_layer: 1}\ntrain: {micro_batch_size: 3}")
    assert main(["plan", path, "data.seq_len=7"]) == 0
    planned = capsys.readouterr().out
    assert "3 of 7 tokens" in planned and "seq_len" not in planned
    assert main(["train", "--config", path, "--dry-run", "data.seq_len=7"]) == 0
    assert capsys.readouterr().out.endswith(planned)


def test_plan_options_set_the_hardware(tmp_path, capsys):
    path = write_config(tmp_path, "model: {d_model: 16, n_layer: 1}\ntrain: {micro_batch_size: 3}")
    assert main(["plan", path, "--gpus", "16", "--gpu", "h200", "data.seq_len=7"]) == 0
    planned = capsys.readouterr().out
    assert "16 × h200" in planned and "48 of 7 tokens" in planned
    assert main(["plan", path, "--gpu", "h9000"]) == BAD_CONFIG
    assert "--gpu h9000: unknown card; known are" in capsys.readouterr().err
    for wrong in ("0", "-3", "two"):
        with pytest.raises(SystemExit):
            main(["plan", path, "--gpus", wrong])
        assert f"--gpus: '{wrong}' is invalid: it must be an integer 1" in capsys.readouterr().err


def test_local_rank_is_accepted_before_the_command(tmp_path, capsys):
    path = write_config(tmp_path, "model: {d_model: 16, n_layer: 1}")
    assert main(["--local_rank=0", "train", "--config", path, "--dry-run", "seed=4"]) == 0
    out, err = capsys.readouterr()
    assert "seed: 4\n" in out and not err


def test_run_without_records_has_a_report(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("name: x")
    assert main(["report", str(tmp_path)]) == 0
    assert "is stopped: not finished, and no process is running" in capsys.readouterr().out
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"config.yaml", "report.html", "summary.json"}


def test_interrupt_has_exit_status_130(monkeypatch, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("lm.config.load.load_tree", interrupt)
    assert main(["sweep", "any.yaml"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_version(capsys):
    with pytest.raises(SystemExit) as e:
        main(["--version"])
    assert e.value.code == 0
    assert capsys.readouterr().out == f"fprnn {__version__}\n"


@pytest.mark.parametrize(
    "micro_batch_size, seq_len, status", [(8, 128, 0), (64, 32_768, BAD_CONFIG)]
)
def test_exit_status_shows_whether_a_plan_fits(micro_batch_size, seq_len, status, tmp_path, capsys):
    path = write_config(tmp_path, "model: {d_model: 256, n_layer: 2}")
    overrides = [f"train.micro_batch_size={micro_batch_size}", f"data.seq_len={seq_len}"]
    assert main(["plan", path, "--gpu", "a100-40g", *overrides]) == status
    assert ("to make it fit" in capsys.readouterr().out) == bool(status)


@pytest.mark.parametrize(
    "name, gpu",
    [
        ("fpmamba_160m_fineweb2b", "a100-80g"),
        ("fpmamba_160m_fineweb2b_paper", "a100-40g"),
        ("mamba_160m_fineweb2b", "a100-40g"),
        ("mamba_169m_fineweb2b", "a100-40g"),
    ],
)
def test_160m_configurations_fit_their_gpus(name, gpu):
    from lm.config.load import load
    from lm.report.plan import parse_hardware, plan

    costs = plan(load(LM / f"{name}.yaml"), parse_hardware(4, gpu))
    assert costs["fits"] and costs["sequences_per_step"] == 256


def test_unknown_option_error_explains_overrides(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--config", "c.yaml", "--lr", "1e-3"])
    message = capsys.readouterr().err.splitlines()[-1]
    assert "unrecognized arguments: --lr. Keys of the YAML are set without dashes" in message


def test_dry_run_of_several_ranks_is_printed_once(tmp_path, capsys, monkeypatch):
    path = write_config(tmp_path, "model: {d_model: 16, n_layer: 1}")
    monkeypatch.setenv("WORLD_SIZE", "2")
    printed = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setattr("lm.common.console.say.enabled", True)
        assert main(["train", "--config", path, "--dry-run"]) == 0
        printed.append(capsys.readouterr().out)
    assert "parameters" in printed[0] and printed[1] == ""
