"""Complete runs: repeated, killed and resumed, stopped by a signal, and with wrong input."""

import json
import math
import shutil
import signal
import time

import pytest
import torch

from lm.cli.main import main
from lm.common.errors import PREEMPTED
from lm.runs.metrics import read_metrics
from tests.running import FORKS, REFUSED, ROOT, command, fprnn, read_losses, run

LONG = ("train.steps=60", "checkpoint.every=7", "checkpoint.keep=3")


def trace(records):
    return [(r["step"], r["loss"], r["lr"], r["grad_norm"]) for r in records]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Records of a run of 60 updates."""
    records, _ = run(tmp_path_factory.mktemp("whole") / "runs", *LONG)
    return records


def start_and_wait_for(step, out, *overrides):
    """Start a training in the background, and wait until it has logged `step`."""
    args = command(out, *LONG, *overrides)[3:]  # without `python -m lm`
    process = FORKS.start("lm", args)
    metrics = out / "tiny/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
        assert process.poll() is None and time.monotonic() < deadline, process.read_output()
        time.sleep(0.005)
    return process


def test_run_directory_has_all_files(tiny_run, tiny_losses):
    for name in ["config.yaml", "deepspeed.json", "environment.json", "result.json"]:
        assert (tiny_run / name).stat().st_size > 0, name
    names = sorted(p.name for p in (tiny_run / "checkpoints").glob("step-*"))
    assert names == ["step-000004", "step-000008"]
    assert [r["step"] for r in tiny_losses] == list(range(1, 9))
    record = tiny_losses[-1]
    # 8 updates, 2 micro-batches of 2 sequences of 16 tokens.
    assert record["tokens"] == 8 * 2 * 2 * 16 and record["tokens_per_s"] > 0
    assert record["failed"] == [0, 0] and min(record["evaluations"]) >= 1
    assert len(record["residual"]) == 2 and "num_iters" not in record
    assert record["perplexity"] == pytest.approx(torch.tensor(record["loss"]).exp().item())
    result = json.loads((tiny_run / "result.json").read_text())
    assert result["validation"]["perplexity"] > 1
    assert set(result["baselines"]) == {"unigram", "bigram"}
    iterations = result["probe"]["num_iters"]
    assert all(len(layers) == 2 for layers in iterations.values())
    assert 1 <= iterations["median"][0] <= iterations["max"][0]
    assert tiny_losses[-1]["loss"] < tiny_losses[0]["loss"]


def test_bits_per_byte_are_of_the_held_out_text(tiny_run):
    """The bytes are those of all held-out documents, except the first token, which is no target."""
    from transformers import PreTrainedTokenizerFast

    from lm.data.sources.open import is_validation

    lines = (ROOT / "tests/data/tiny.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    held_out = [text for text in texts if is_validation(text, 0.2)]  # data.val_fraction
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_run / "tokenizer")
    first_token = tokenizer.decode(tokenizer(held_out[0])["input_ids"][:1])
    text_bytes = sum(len(text.encode()) for text in held_out) - len(first_token.encode())
    result = json.loads((tiny_run / "result.json").read_text())["validation"]
    bits = result["loss"] * result["tokens"] / math.log(2) / text_bytes
    assert result["bytes"] == text_bytes
    assert result["bits_per_byte"] == pytest.approx(bits, rel=1e-12)
    logged = [r for r in read_metrics(tiny_run) if "validation" in r]
    assert [r["validation"] for r in logged] == [result]


def test_probes_and_validations_do_not_change_losses(tmp_path, tiny_losses):
    """There is a probe every 3 updates, a validation at 6 and one at the end."""
    losses, _ = run(tmp_path / "runs", "log.probe_every=3", "eval.every=6")
    assert trace(losses) == trace(tiny_losses)
    records = read_metrics(tmp_path / "runs/tiny")
    probes = [r for r in records if "probe" in r]
    assert [r["step"] for r in probes] == [3, 6, 8]
    assert ["validation" in r for r in probes] == [False, True, True]


def copy_run(tiny_run, folder):
    """Copy the tiny run without its export."""
    return shutil.copytree(tiny_run, folder, ignore=shutil.ignore_patterns("hf"))


def test_run_name_with_brackets_is_no_glob_pattern(tmp_path, tiny_run, tiny_losses):
    """As a pattern, exp[1] would match exp1, which here has other weights at update 4."""
    brackets, neighbor = (copy_run(tiny_run, tmp_path / name) for name in ("exp[1]", "exp1"))
    shutil.rmtree(neighbor / "checkpoints/step-000004")
    (brackets / "checkpoints/step-000008").rename(neighbor / "checkpoints/step-000004")
    (brackets / "result.json").unlink()
    actual, done = run(tmp_path, "resume=auto", "name=exp[1]", name="exp[1]")
    assert "at update 4" in done.stdout and trace(actual) == trace(tiny_losses)


def test_resume_after_kill_is_bit_identical(tmp_path, uninterrupted):
    process = start_and_wait_for(25, tmp_path / "runs")
    process.kill()
    process.wait(60)
    assert len(read_losses(tmp_path / "runs/tiny")) < 60
    # An incomplete checkpoint, as a kill leaves it, is skipped.
    newest = sorted((tmp_path / "runs/tiny/checkpoints").glob("step-*"))[-1]
    incomplete = newest.with_name("step-000059")
    shutil.copytree(newest, incomplete)
    (incomplete / "manifest.json").unlink(missing_ok=True)
    resumed, done = run(tmp_path / "runs", *LONG, "resume=auto")
    assert "skipped" in done.stdout and "resumed" in done.stdout
    assert trace(resumed) == trace(uninterrupted)


@pytest.mark.parametrize(
    "signal_number",
    [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)],
    ids=lambda n: n.name,
)
def test_a_signal_saves_and_stops(tmp_path, uninterrupted, signal_number):
    process = start_and_wait_for(10, tmp_path / "runs")
    for _ in range(3):  # launchers repeat the signal
        process.send_signal(signal_number)
        time.sleep(0.01)
    output = "".join(process.communicate(timeout=60))
    assert process.returncode == PREEMPTED and "stopped by a signal after update" in output
    assert "Traceback" not in output
    resumed, done = run(tmp_path / "runs", *LONG, "resume=auto")
    assert "resumed" in done.stdout
    assert trace(resumed) == trace(uninterrupted)


def run_refused(*args):
    """Return the line on stderr of a command that must fail without traceback."""
    done = fprnn(*args)
    assert done.returncode in REFUSED, done.stdout
    assert "Traceback" not in done.stderr, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def tiny_args(out, *overrides):
    return ("train", "--config", "configs/tiny/lm.yaml", f"out_dir={out}", *overrides)


def test_run_is_not_overwritten_without_overwrite(tiny_run):
    before = (tiny_run / "metrics.jsonl").read_text()
    message = run_refused(*tiny_args(tiny_run.parent))
    assert "already holds a run" in message and "--overwrite" in message
    message = run_refused(*tiny_args(tiny_run.parent, "resume=auto", "model.d_model=32"))
    assert "model.d_model was 16, is 32" in message
    assert (tiny_run / "metrics.jsonl").read_text() == before


def test_overwrite_restarts_and_finished_run_is_not_repeated(tmp_path, tiny_run, tiny_losses):
    short = ("train.steps=2", "checkpoint.every=2")
    copy_run(tiny_run, tmp_path / "runs/tiny")
    done = fprnn(*tiny_args(tmp_path / "runs", *short), "--overwrite")
    assert done.returncode == 0, done.stderr
    restarted_losses = [r["loss"] for r in read_losses(tmp_path / "runs/tiny")]
    assert restarted_losses == [r["loss"] for r in tiny_losses[:2]]
    second, done = run(tmp_path / "runs", *short, "resume=auto")
    assert "complete already" in done.stdout and [r["loss"] for r in second] == restarted_losses


@pytest.mark.parametrize(
    "override, words",
    [
        ("data.seq_len=100000", "seq_len"),
        ("model.vocab_size=100", "model.vocab_size to at least"),
        ("data.source=fineweb", "fineweb"),
    ],
)
def test_data_errors_are_one_line(tmp_path, override, words, capsys):
    assert main(list(tiny_args(tmp_path / "runs", override))) in REFUSED
    lines = capsys.readouterr().err.splitlines()
    (message,) = [line for line in lines if line.startswith("error: ")]
    assert words in message.lower()


def test_mamba_trains_through_the_same_config(tmp_path):
    model = ("model=mamba", "model.d_model=16", "model.n_layer=1", "model.d_state=4")
    records, _ = run(tmp_path / "runs", *model, "train.steps=6", "checkpoint.every=6")
    assert "evaluations" not in records[0]
    assert not any("probe" in r for r in read_metrics(tmp_path / "runs/tiny"))
    assert records[-1]["loss"] < records[0]["loss"]
    done = fprnn("export", tmp_path / "runs/tiny", tmp_path / "hf")
    assert done.returncode == 0, done.stderr


def test_resuming_from_older_checkpoint_deletes_later_ones(tmp_path, tiny_run, tiny_losses):
    checkpoints = copy_run(tiny_run, tmp_path / "tiny") / "checkpoints"
    older = checkpoints / "step-000004"
    resumed, _ = run(tmp_path, "checkpoint.every=3", "checkpoint.keep=1", f"resume={older}")
    assert trace(resumed) == trace(tiny_losses)
    assert [p.name for p in checkpoints.glob("step-*")] == ["step-000008"]
