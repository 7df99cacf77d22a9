"""Check a machine with one GPU in ten minutes, without a network. `make gpu-check` runs it.

python -m benchmarks.gpu_check [--out DIR] [--parts train,tests] [--device cpu --quick]

The parts run in the order of their importance: a real training run of the 160M configuration under
DeepSpeed, the same run resumed, the Mamba baseline with our scan and with mamba-ssm, an export,
generation, lm-eval, kernel tests at the width of that model, and timings of training and decoding.
Every part is a process with its own time limit. A part that fails or hangs does not stop the next
one. DIR/summary.json is written after every part, so an interrupted check keeps its results.
DIR/check.log has all output. The exit status is 1 if a part failed and 2 if there is no GPU.

The machine needs torch, triton, transformers, pytest and the packages that `fprnn train` imports.
--card DIR names a folder with files that the machine lacks: the wheels in DIR/whl are installed for
this check only (`python -m benchmarks.card_wheels` makes them), and the parquet files of FineWeb in
DIR/fineweb are the training text. Without them the text is the built-in corpus.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TextIO

ROOT = Path(__file__).parents[1]
# Seconds for each part, 560 in all. A part may also use the seconds that earlier parts left over.
TIME_LIMITS_S = {
    "plan": 15,
    "plan_mamba": 15,
    "train": 165,
    "resume": 50,
    "mamba": 40,
    "mamba_ssm": 35,
    "export": 25,
    "generate": 40,
    "eval": 35,
    "tests": 60,
    "timings": 60,
    "decode": 20,
}
MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)")
FPMAMBA_CONFIG = "configs/lm/fpmamba_160m_fineweb2b.yaml"
MAMBA_CONFIG = "configs/lm/mamba_160m_fineweb2b.yaml"
UPDATES = 8  # of a training run
RESUMED_UPDATES = 10  # at which the resumed run ends
QUESTIONS = 20  # that lm-eval asks
REQUIRED_PARTS = {  # part → parts that must run before it
    "resume": {"train"},
    "export": {"train"},
    "generate": {"train", "export"},
    "eval": {"train", "export"},
}
STEADY_UPDATES = 4  # medians of throughput and MFU are over this many last updates
TRAINING_SIZES = {  # overrides of the shipped configuration: one micro-batch per update
    "data.val_tokens": 65536,
    "tokenizer.vocab_size": 8192,
    "tokenizer.train_bytes": 3_000_000,
    "train.global_batch_size": 32,
    "train.micro_batch_size": 32,
}
QUICK_TRAINING_SIZES = {  # a model that a CPU trains in seconds
    "data.val_tokens": 512,
    "data.seq_len": 64,
    "data.shuffle_buffer": 16,
    "tokenizer.vocab_size": 512,
    "tokenizer.train_bytes": 100_000,
    "train.global_batch_size": 2,
    "train.micro_batch_size": 2,
    "model.vocab_size": 512,
    "model.d_model": 16,
    "model.n_layer": 2,
}


class Outcome(NamedTuple):
    """Result of a part."""

    status: str  # ok, failed or skipped
    figures: dict  # numbers and texts of the table
    reason: str = ""  # reason of a failure or skip


class Part(NamedTuple):
    """Part of the check: a process, or the reason to skip it."""

    name: str
    command: list[str]
    judge: Callable[[int | None, list[str]], Outcome]  # (exit status, printed lines) → Outcome
    env: dict = {}  # noqa: RUF012
    skip_reason: str = ""  # "": run the part
    limit: float | None = None  # seconds; None: TIME_LIMITS_S[name]


def judge_tests(xml: Path, status: int | None, lines: list[str]) -> Outcome:
    """Judge the tests by pytest's XML; a file that needs a missing package counts as skipped."""
    ending = f"exit status {status}: {_find_last_line(lines)}"
    try:
        cases = list(ET.parse(xml).iter("testcase"))
        xml.unlink()
    except (OSError, ET.ParseError):
        return Outcome("failed", {}, f"pytest wrote no results, {ending}")
    counts, failures, missing_modules = Counter(), [], Counter()
    for case in cases:
        name = f"{case.get('classname')}.{case.get('name')}".strip(".")
        problems = [element for kind in ("failure", "error") for element in case.findall(kind)]
        if problems and (match := MISSING_MODULE.search(problems[0].text or "")):
            missing_modules[match[1]] += 1
        elif problems:
            counts["failed"] += 1
            first_line = (problems[0].get("message") or "").split("\n")[0]
            failures.append(f"{name}: {first_line[:200]}")
        else:
            counts["skipped" if case.find("skipped") is not None else "passed"] += 1
    skips = Counter(skip.get("message") for case in cases for skip in case.findall("skipped"))
    figures = {kind: counts[kind] for kind in ("passed", "failed", "skipped")}
    if missing_modules:
        figures["files skipped"] = ", ".join(
            f"{count} without {module}" for module, count in missing_modules.items()
        )
    if skips:
        figures["skip reasons"] = ", ".join(f"{n}: {reason}" for reason, n in skips.items())
    if failures:
        return Outcome("failed", figures, "; ".join(failures))
    # A file that cannot be imported sets the exit status as well.
    has_bad_status = status != 0 and not missing_modules
    if has_bad_status or not counts["passed"]:
        return Outcome("failed", figures, f"no test passed, or {ending}")
    return Outcome("ok", figures)


def judge_figures(
    get_figures: Callable[[list[str]], dict], status: int | None, lines: list[str]
) -> Outcome:
    """Judge a part by its exit status (None: it ran into its time limit) and by its figures.

    A failed part keeps its figures. A part whose figures cannot be read has failed as well.
    """
    reason = "" if status == 0 else f"exit status {status}: {_find_last_line(lines)}"
    try:
        return Outcome("failed" if reason else "ok", get_figures(lines), reason)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        return Outcome("failed", {}, reason or f"its results cannot be read: {error!r}")


def make_judge(
    read_figures: Callable[..., dict], *args: object
) -> Callable[[int | None, list[str]], Outcome]:
    """Return `judge_figures` for the figures read_figures(*args, lines)."""
    return functools.partial(judge_figures, functools.partial(read_figures, *args))


def _find_last_line(lines: list[str]) -> str:
    """Return the last line that is not empty, or ""."""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def read_plan_figures(lines: list[str]) -> dict[str, float]:
    """Return the memory and throughput that `fprnn plan` printed; on a CPU, only the memory."""
    rows: dict[str, str] = {}  # label → value
    for line in lines:
        cells = [cell.strip() for cell in line.strip("│ \n").split("│")]
        if len(cells) == 2:
            label, value = cells
            # The plan has a row for the memory of each ZeRO stage.
            rows.setdefault("memory" if "as configured" in value else label, value)

    def read_number(pattern: str, label: str) -> float:
        match = re.search(pattern, rows[label])
        if match is None:
            raise ValueError(f"`{label}` of the plan is {rows[label]!r}")
        return float(match[1].replace(",", ""))

    gib_per_unit = 2**-10 if " MiB " in rows["memory"] else 1.0
    figures = {"memory_gib": gib_per_unit * read_number(r"([\d.]+) [MG]iB", "memory")}
    if re.match(r"[\d.]+\b", rows["hours"]):  # a plan for a CPU has no hours
        updates = read_number(r"in ([\d,]+) updates", "tokens trained on")
        tokens = updates * read_number(r"([\d,]+)", "tokens per update")
        figures["tokens_per_s"] = round(tokens / 3600 / read_number(r"([\d.]+)", "hours"))
    return figures


def read_training_figures(run: Path, steps: range, lines: list[str]) -> dict[str, Any]:
    """Return the figures of a run.

    Args:
        run: Folder of the run.
        steps: Numbers of the updates whose records in the log are read.
        lines: Printed lines.

    Raises:
        ValueError: If an update has no record, or a loss is not finite.
    """
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    records = {record["step"]: record for record in log if "grad_norm" in record}
    if unrecorded := [step for step in steps if step not in records]:
        raise ValueError(f"update {unrecorded[0]} has no record")
    updates = [records[step] for step in steps]
    losses = [update["loss"] for update in updates]
    if not all(map(math.isfinite, losses)):
        raise ValueError(f"the losses are {losses}")
    seconds = [update["spent"]["seconds"] for update in updates]

    def compute_steady_median(key: str) -> float | None:
        values = [update[key] for update in updates[-STEADY_UPDATES:] if key in update]
        return statistics.median(values) if values else None

    checkpoints = [record["checkpoint"] for record in log if "checkpoint" in record]
    validations = [record["validation"]["loss"] for record in log if "validation" in record]
    return {
        "first_update_s": seconds[0] if steps[0] == 1 else None,  # it compiles the kernels
        "tokens_per_s": compute_steady_median("tokens_per_s"),
        "mfu": compute_steady_median("mfu"),
        "peak_memory_gib": round(updates[-1]["peak_memory_bytes"] / 2**30, 2),
        "losses": [losses[0], losses[-1]],
        "validation_loss": validations[-1] if validations else None,
        "num_iters": next((r["probe"]["num_iters"]["mean"] for r in log if "probe" in r), None),
        "checkpoint_s": checkpoints[-1]["seconds"] if checkpoints else None,
        "kernels": next((x.partition("kernels: ")[2] for x in lines if "kernels: " in x), None),
        "fallback": next((x.strip() for x in lines if "is computed in plain PyTorch" in x), None),
    }


def read_resume_figures(run: Path, lines: list[str]) -> dict[str, Any]:
    """Return the figures of a resumed run.

    Raises:
        ValueError: If the run did not continue from a checkpoint.
    """
    resumed = [line.strip() for line in lines if line.startswith("resumed ")]
    if not resumed:
        raise ValueError("no line of the output begins with `resumed`")
    figures = read_training_figures(run, range(UPDATES + 1, RESUMED_UPDATES + 1), lines)
    return {"update": resumed[0].rpartition(" at update ")[2], **figures}


def read_eval_figures(path: Path, lines: list[str]) -> dict[str, Any]:
    """Return the scores in the JSON file of `fprnn eval`."""
    tasks = json.loads(path.read_text(encoding="utf-8"))["tasks"]
    return {
        f"{task} {name}": metric["value"]
        for task, scores in tasks.items()
        for name, metric in scores["metrics"].items()
    }


def read_timing_figures(path: Path, lines: list[str]) -> dict[str, Any]:
    """Return the figures of benchmarks.gpu_constants: rates, kernels and layers."""
    record = json.loads(path.read_text(encoding="utf-8"))
    figures = {**record["rates"], "graphs": record["graphs"]}
    for batch, kernels in record["kernels"].items():
        for name, seconds in kernels.items():
            figures[f"{batch} × {name}"] = f"{seconds * 1e6:.1f} µs"
    for batch, layers in record["layers"].items():
        for name, seconds in layers.items():
            figures[f"{batch} × {name}"] = f"{seconds * 1e3:,.2f} ms"
    return figures


def python_command(*arguments: object) -> list[str]:
    return [sys.executable, *map(str, arguments)]


def make_overrides(quick: bool, runs: Path, card: Path | None) -> list[str]:
    """Return the overrides `key=value` that every training of the check has."""
    source: dict[str, Any] = {"data.source": "builtin"}
    if card and (card / "fineweb").is_dir():
        source = {"data.source": "parquet", "data.path": card / "fineweb"}
    values = {
        **source,
        "tokenizer.name": "bpe",
        **TRAINING_SIZES,
        **(QUICK_TRAINING_SIZES if quick else {}),
        "log.every": 1,
        "log.probe_every": 0,
        "out_dir": runs,
    }
    return [f"{key}={value}" for key, value in values.items()]


def make_training_parts(runs: Path, quick: bool, card: Path | None) -> list[Part]:
    """Return the parts that plan and train: the run, its resumption, and the Mamba baselines."""
    overrides = make_overrides(quick, runs, card)

    def make_command(config: str, name: str, updates: int, checkpoint_every: int) -> list[str]:
        options = [f"name={name}", f"train.steps={updates}", f"checkpoint.every={checkpoint_every}"]
        return python_command("-m", "lm", "train", "--config", config, *overrides, *options)

    def make_training_part(name: str, config: str, run: str, kernels: str = "") -> Part:
        judge = make_judge(read_training_figures, runs / run, range(1, UPDATES + 1))
        # Only the run that is resumed saves a checkpoint midway.
        checkpoint_every = UPDATES // 2 if run == "fp" else 10 * UPDATES
        command = make_command(config, run, UPDATES, checkpoint_every)
        return Part(name, command, judge, {"FPRNN_KERNELS": kernels} if kernels else {})

    def make_plan_part(name: str, config: str) -> Part:
        gpu = ["--gpu", "cpu"] if quick else []
        command = python_command("-m", "lm", "plan", config, "--gpus", 1, *gpu, *overrides)
        return Part(name, command, make_judge(read_plan_figures))

    resume_command = make_command(FPMAMBA_CONFIG, "fp", RESUMED_UPDATES, UPDATES // 2)
    missing_packages = [p for p in ("mamba_ssm", "causal_conv1d") if find_spec(p) is None]
    mamba_ssm_part = make_training_part("mamba_ssm", MAMBA_CONFIG, "mamba_ssm", "mamba_ssm")
    if missing_packages:
        reason = f"{' and '.join(missing_packages)}: not installed"
        mamba_ssm_part = mamba_ssm_part._replace(skip_reason=reason)
    elif quick:
        mamba_ssm_part = mamba_ssm_part._replace(skip_reason="it needs a GPU")
    return [
        make_plan_part("plan", FPMAMBA_CONFIG),
        make_plan_part("plan_mamba", MAMBA_CONFIG),
        make_training_part("train", FPMAMBA_CONFIG, "fp"),
        Part("resume", resume_command, make_judge(read_resume_figures, runs / "fp")),
        make_training_part("mamba", MAMBA_CONFIG, "mamba", "" if quick else "triton"),
        mamba_ssm_part,
    ]


def make_model_parts(out: Path, runs: Path, quick: bool) -> list[Part]:
    """Return the parts that use the trained model: export, generation, and lm-eval."""
    export = runs / "hf"

    def read_sample(lines: list[str]) -> dict[str, Any]:
        text = " ".join(line.strip() for line in lines)
        return {"text": textwrap.shorten(text, 120) or "(nothing but spaces)"}

    export_command = python_command("-m", "lm", "export", runs / "fp", export)
    generate_command = python_command("-m", "lm", "generate", export, "--prompt", "The court")
    generate_command += ["--max-new-tokens", "4" if quick else "32"]
    scores = out / "eval.json"
    eval_command = python_command("-m", "lm", "eval", export, "--tasks", "catbabi_mini")
    eval_command += ["--limit", str(QUESTIONS), "--out", str(scores)]
    skip_reason = "" if find_spec("lm_eval") else "lm_eval: not installed"
    judge_eval = make_judge(read_eval_figures, scores)
    return [
        Part(
            "export", export_command, make_judge(lambda lines: {"printed": _find_last_line(lines)})
        ),
        Part("generate", generate_command, make_judge(read_sample)),
        Part("eval", eval_command, judge_eval, skip_reason=skip_reason),
    ]


def make_pytest_part(out: Path, quick: bool) -> Part:
    """Return the kernel tests marked `gpu`, at the width of the model; if quick, a single test."""
    xml = out / "tests.xml"
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-vv", "--tb=short", "--durations=5"]
    command += ["-o", "timeout=100", "--continue-on-collection-errors", f"--junitxml={xml}"]
    if find_spec("xdist"):  # most of the time is compilation, which uses one core per process
        command += ["-n", str(min(8, max(1, len(os.sched_getaffinity(0)) // 2)))]
    if quick:
        command += ["tests/lm/model/test_gpu.py", "-k", "later and fp_mamba1"]
    else:
        files = sorted((ROOT / "tests/lm/kernels").glob("test_*.py"))
        gpu_files = [f for f in files if "mark.gpu" in f.read_text(encoding="utf-8")]
        command += ["-m", "gpu", *(str(f.relative_to(ROOT)) for f in gpu_files)]
    return Part("tests", python_command(*command), functools.partial(judge_tests, xml))


def make_timing_part(out: Path, device: str, quick: bool) -> Part:
    """Return the timings of benchmarks.gpu_constants."""
    path = out / "timings.json"
    command = ["-m", "benchmarks.gpu_constants", "--device", device, "--json", path]
    command += ["--batches", "1,2" if quick else "16,64", "--repeats", 1 if quick else 3]
    command += ["--length", 8, "--d-model", 16] if quick else []
    return Part("timings", python_command(*command), make_judge(read_timing_figures, path))


def read_decode_figures(path: Path, lines: list[str]) -> dict[str, str]:
    """Return the tokens per second that benchmarks.decode measured, by batch and model."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {
        f"{r['batch']} × {r['name']}": "out of memory"
        if r["seconds_per_token"] is None
        else f"{r['batch'] / r['seconds_per_token']:,.0f} tokens/s"
        for r in rows
    }


def make_decode_part(out: Path, device: str, quick: bool) -> Part:
    """Return the timings of benchmarks.decode for four layers at the width of the model."""
    path = out / "decode.json"
    sizes = "--shape 160m --rank 1 --layers 4 --vocab 8192 --batches 1,32,256 --prompt 16 --new 32"
    if quick:
        sizes = "--layers 1 --d-model 16 --batches 1,2 --prompt 2 --new 2"
    options = ["--repeats", 2, "--rows", "ours, cached|transformers", "--json", path]
    command = python_command("-m", "benchmarks.decode", "--device", device, *sizes.split())
    command += map(str, options)
    return Part("decode", command, make_judge(read_decode_figures, path))


def make_parts(
    out: Path, runs: Path, device: str, quick: bool, card: Path | None = None
) -> list[Part]:
    """Return the parts in the order in which they run."""
    kernel_env = {"TRITON_INTERPRET": "1", "FPRNN_TEST_DEVICE": "cpu"} if device == "cpu" else {}
    kernel_parts = [make_pytest_part(out, quick), make_timing_part(out, device, quick)]
    return [
        *make_training_parts(runs, quick, card),
        *make_model_parts(out, runs, quick),
        *(part._replace(env=part.env | kernel_env) for part in kernel_parts),
        make_decode_part(out, device, quick),
    ]


def run(part: Part, seconds: float, env: dict[str, str], log: TextIO) -> Outcome:
    """Run a part, print and log its output, and kill its processes at the time limit."""
    if part.skip_reason:
        return Outcome("skipped", {}, part.skip_reason)
    process = subprocess.Popen(
        part.command,
        cwd=ROOT,
        env={**env, **part.env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.STDOUT,
        errors="replace",
        start_new_session=True,
    )
    lines: list[str] = []

    def copy_output():
        for line in process.stdout:
            log.write(f"[{part.name}] {line}")
            log.flush()
            lines.append(line)
            if line.strip():
                print(f"[{part.name}] {line.rstrip()}", flush=True)

    reader = threading.Thread(target=copy_output, daemon=True)
    reader.start()
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        status = None
    finally:  # kills its child processes as well, also on Ctrl-C
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    reader.join(5)
    outcome = part.judge(status, lines)
    if status is None:
        reason = f"not finished in {seconds:.0f} s; last line: {_find_last_line(lines)}"
        return Outcome("failed", outcome.figures, reason)
    return outcome


def describe_environment(device: str) -> tuple[dict[str, Any] | None, str]:
    """Return versions and the GPU.

    A separate process looks at the GPU, because a CUDA context would occupy memory.

    Returns:
        The environment and "", or None and the reason when there is no GPU.
    """
    environment: dict[str, Any] = {"python": platform.python_version(), "cores": os.cpu_count()}
    for package in ("torch", "triton", "transformers", "deepspeed", "mamba_ssm", "causal_conv1d"):
        with contextlib.suppress(PackageNotFoundError):
            environment[package] = version(package)
    code = (
        "import json, torch; p = torch.cuda.get_device_properties(0);"
        " print(json.dumps([p.name, f'{p.major}.{p.minor}', p.total_memory]))"
    )
    if device == "cuda":
        result = subprocess.run(python_command("-c", code), capture_output=True, text=True)
        if result.returncode:
            return None, _find_last_line(result.stderr.splitlines())
        lines = result.stdout.splitlines()
        environment |= dict(zip(("gpu", "capability", "memory_bytes"), json.loads(lines[-1])))
    return environment, ""


def format_figure(value: object) -> str:
    """Return a figure as text; a list has the first and the last value of a run."""
    if isinstance(value, list):
        return " → ".join(map(format_figure, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def format_table(records: list[dict]) -> str:
    """Return the summary as text, one line per part."""
    lines = ["", f"{'part':<10} {'result':<8} {'seconds':>7}  key figures"]
    for record in records:
        cells = [
            f"{key} {format_figure(v)}" for key, v in record["figures"].items() if v is not None
        ]
        cells += [record["reason"]] if record["reason"] else []
        lines.append(f"{record['part']:<10} {record['status']:<8} {record['seconds']:>7.1f}  ")
        lines[-1] += ("\n" + " " * 29).join(textwrap.wrap("; ".join(cells), 100))
    return "\n".join(lines)


def run_parts(
    parts: list[Part],
    out: Path,
    env: dict[str, str],
    environment: dict[str, Any],
    runs: Path,
    start: float | None = None,
) -> int:
    """Run the parts one after the other; after each, write the summary and copy the run logs.

    Args:
        parts: The parts, in their order.
        out: Folder for results.
        env: Environment variables of the parts.
        environment: Versions and the GPU, for the summary.
        runs: Folder of the training runs.
        start: `time.perf_counter()` at the start of the check; default: now.

    Returns:
        The exit status, 1 if any part failed.
    """
    check_start = time.perf_counter() if start is None else start
    time_limit = 0.0  # seconds for this part and all parts before it
    records = []
    with (out / "check.log").open("w", encoding="utf-8") as log:
        for part in parts:
            part_start = time.perf_counter()
            time_limit += TIME_LIMITS_S[part.name] if part.limit is None else part.limit
            seconds = time_limit - (part_start - check_start)
            if not part.skip_reason:
                print(f"== {part.name}, at most {seconds:.0f} s", flush=True)
            outcome = run(part, seconds, env, log)
            duration = round(time.perf_counter() - part_start, 1)
            records.append({"part": part.name, "seconds": duration, **outcome._asdict()})
            print(f"== {part.name} {outcome.status} after {duration} s", flush=True)
            summary = {
                "ok": not any(r["status"] == "failed" for r in records),
                "complete": len(records) == len(parts),
                "seconds": round(time.perf_counter() - check_start, 1),
                "environment": environment,
                "parts": records,
            }
            text = json.dumps(summary, indent=1, ensure_ascii=False) + "\n"
            (out / "summary.json").write_text(text, encoding="utf-8")
            for metrics in runs.glob("*/metrics.jsonl"):
                (out / f"{metrics.parent.name}.jsonl").write_bytes(metrics.read_bytes())
    print(format_table(records))
    print(
        f"{'ok' if summary['ok'] else 'FAILED'} in {summary['seconds']:.0f} s; {out}/summary.json"
    )
    return 0 if summary["ok"] else 1


def install_wheels(wheels: list[Path], site: Path) -> None:
    """Install wheels into the folder `site`, which the processes have on PYTHONPATH.

    Raises:
        SystemExit: If pip cannot install them here.
    """
    print(f"installing {len(wheels)} wheels for this check", flush=True)
    options = ["-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
    command = python_command("-m", "pip", "install", *options, "--target", site, *wheels)
    if subprocess.run(command).returncode:
        sys.exit(f"gpu-check: pip cannot install the wheels of {wheels[0].parent}")
    sys.path.insert(0, str(site))


def make_env(site: Path, device: str) -> dict[str, str]:
    """Return the environment variables of all parts."""
    paths = [str(site), str(ROOT), os.environ.get("PYTHONPATH")]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "120",
        "HF_HUB_OFFLINE": "1",
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),  # one machine
    }
    cpu_env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return env | cpu_env if device == "cpu" else env


def main() -> int:
    formatter = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu-check")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; --device cpu needs it")
    parts_help = f"only these of {','.join(TIME_LIMITS_S)}, and the parts that they need"
    parser.add_argument("--parts", help=parts_help)
    parser.add_argument("--card", type=Path, help="a folder with whl/*.whl and fineweb/*.parquet")
    args, start = parser.parse_args(), time.perf_counter()
    if args.card and not args.card.is_dir():
        parser.error(f"--card {args.card}: no such folder")
    if args.device == "cpu" and not args.quick:
        parser.error("on a CPU the kernels are interpreted: give --quick as well")
    names = args.parts.split(",") if args.parts else list(TIME_LIMITS_S)
    if unknown := set(names) - set(TIME_LIMITS_S):
        known = ", ".join(TIME_LIMITS_S)
        parser.error(f"unknown part {', '.join(sorted(unknown))}: known are {known}")
    names += [required for name in names for required in REQUIRED_PARTS.get(name, ())]
    with tempfile.TemporaryDirectory(prefix="fprnn-gpu-check-") as scratch:
        runs, site = Path(scratch, "runs"), Path(scratch, "site")
        if wheels := sorted((args.card / "whl").glob("*.whl")) if args.card else []:
            install_wheels(wheels, site)
        environment, reason = describe_environment(args.device)
        if environment is None:
            print(f"gpu-check needs a CUDA device, and torch finds none ({reason}).")
            return 2
        print(", ".join(f"{name} {value}" for name, value in environment.items()), flush=True)
        out = args.out.resolve()
        out.mkdir(parents=True, exist_ok=True)
        for old_result in [*out.glob("*.json"), *out.glob("*.xml")]:
            old_result.unlink()
        env = make_env(site, args.device)
        card = args.card.resolve() if args.card else None
        parts = make_parts(out, runs, args.device, args.quick, card)
        parts = [part for part in parts if part.name in names]
        return run_parts(parts, out, env, environment, runs, start)


if __name__ == "__main__":
    sys.exit(main())
