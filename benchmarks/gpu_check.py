"""Everything that a machine with one GPU should verify, in under 10 minutes and without a network:
tests, kernels, training in bf16, benchmarks at the paper's 160M shape. `make gpu-check` runs it.

python -m benchmarks.gpu_check [--out DIR] [--parts tests,training] [--device cpu --quick]

It needs torch, triton, transformers, numpy, pytest, rich, PyYAML and tokenizers. Every part is a
process of its own with its own time; one that fails or hangs does not stop the next. At the end one
table, and in DIR summary.json, the parts' own JSON and all they printed. Exits with 1 when a part
failed and with 2 where there is no GPU.
"""

import argparse
import contextlib
import functools
import json
import os
import platform
import re
import signal
import subprocess
import sys
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

from lm.common.cards import usable_cores

ROOT = Path(__file__).parents[1]
# Seconds of each part, 565 in all. What one leaves over is for those after it.
LIMITS = {
    "tests": 110,
    "training": 100,
    "constants": 70,
    "scan": 25,
    "roots": 25,
    "iteration": 25,
    "solve": 45,
    "training_step": 55,
    "decode": 35,
    "kernels": 75,
}
# Width and batch are the paper's; length and layers are cut where plain PyTorch goes token by
# token: of a layer it takes an H100 7 ms for each, forward and backward.
OPTIONS = {
    "scan": ["--repeats", "5"],
    "roots": ["--batch", "1", "--repeats", "2"],
    "iteration": ["--repeats", "5"],
    "solve": ["--layers", "1", "--length", "512", "--repeats", "2"],
    "training_step": ["--layers", "2", "--length", "512", "--repeats", "2"],
    "decode": ["--layers", "4", "--repeats", "1", "--prompt", "64", "--new", "16"],
}
MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)")
SIZES = dict(layers=1, length=8, batch=2, vocab=64, repeats=1)
TINY = ["--d-model=16", *(f"--{name}={value}" for name, value in SIZES.items())]


class Outcome(NamedTuple):
    """How a part ended."""

    status: str  # ok, failed or skipped
    figures: dict  # what the table shows
    reason: str = ""  # of a failure, or why it was skipped


class Part(NamedTuple):
    """One process; or none, where `reason` says why the part is skipped."""

    name: str
    command: list[str]
    limit: float
    judge: Callable  # (exit status, last line that it printed) → Outcome
    env: dict = {}  # noqa: RUF012
    reason: str = ""


def judge_tests(xml: Path, rc: int | None, last: str) -> Outcome:
    """By pytest's XML: failures by name; a file that lacks a package is skipped, not failed."""
    try:
        cases = list(ET.parse(xml).iter("testcase"))
        xml.unlink()
    except (OSError, ET.ParseError):
        return Outcome("failed", {}, f"pytest wrote no results (exit status {rc}): {last}")
    counts, failures, missing = Counter(), [], Counter()
    for case in cases:
        name = f"{case.get('classname')}.{case.get('name')}".strip(".")
        wrong = [part for kind in ("failure", "error") for part in case.findall(kind)]
        if wrong and (found := MISSING.search(wrong[0].text or "")):
            missing[found[1]] += 1
        elif wrong:
            counts["failed"] += 1
            failures.append(f"{name}: {(wrong[0].get('message') or '')[:200].splitlines()[:1]}")
        else:
            counts["skipped" if case.find("skipped") is not None else "passed"] += 1
    skips = Counter(skip.get("message") for case in cases for skip in case.findall("skipped"))
    figures = {kind: counts[kind] for kind in ("passed", "failed", "skipped")}
    if missing:
        figures["files skipped"] = ", ".join(f"{n} without {name}" for name, n in missing.items())
    if skips:
        figures["why skipped"] = ", ".join(f"{n}: {why}" for why, n in skips.items())
    if failures:
        return Outcome("failed", figures, "; ".join(failures))
    if (rc and not missing) or not counts["passed"]:
        return Outcome("failed", figures, f"no test passed, or exit status {rc}: {last}")
    return Outcome("ok", figures)


def judge_json(
    path: Path, figures_of: Callable[[dict], dict], rc: int | None, last: str
) -> Outcome:
    """By the exit status; the figures are from the JSON it wrote."""
    try:
        figures = figures_of(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"its results cannot be read: {error!r}"
        return Outcome("failed", {}, last if rc else why)
    return Outcome("failed" if rc else "ok", figures, last if rc else "")


def timings(record: dict, most: int = 8) -> dict[str, Any]:
    """The first rows of a benchmark, in milliseconds."""
    found = {}
    for row in record["rows"][:most]:
        label = " ".join(str(row[key]) for key in ("batch", "part", "name") if row.get(key))
        keys = [k for k in ("seconds", "seconds_per_token", "kernels", "plain") if k in row]
        times = ["–" if row[k] is None else f"{row[k] * 1e3:,.2f} ms" for k in keys]
        found[label] = " with kernels, plain ".join(times)
    return {**found, "rows": len(record["rows"])}


def measured(record: dict) -> dict[str, Any]:
    """Of benchmarks.gpu_constants: what lm/common/cards.py assumes, the kernels of a token, and
    each layer's milliseconds beside those predicted of an A100."""
    figures = {**record["rates"], "graphs": record["graphs"]}
    for batch, of_kernels in record["kernels"].items():
        for name, seconds in of_kernels.items():
            figures[f"{batch} × {name}"] = f"{seconds * 1e6:.1f} µs"
    for batch, layers in record["layers"].items():
        for name, seconds in layers.items():
            of_card = record["assumed"][batch][name]
            figures[f"{batch} × {name}"] = (
                f"{seconds * 1e3:,.2f} ms (predicted {of_card * 1e3:,.2f})"
            )
    return figures


def pytest_part(
    name: str, out: Path, arguments: list[str], env: dict[str, str] | None = None
) -> Part:
    xml = out / f"{name}.xml"
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-vv", "--tb=short", "--durations=5"]
    command += ["-o", "timeout=100", "--continue-on-collection-errors", f"--junitxml={xml}"]
    if find_spec("xdist"):  # most of the time goes into compiling, on one core a process
        command += ["-n", str(min(8, max(1, usable_cores() // 2)))]
    judge = functools.partial(judge_tests, xml)
    return Part(name, [sys.executable, *command, *arguments], LIMITS[name], judge, env or {})


def all_parts(out: Path, device: str, quick: bool) -> dict[str, Part]:
    """{name: Part}, in the order in which they run."""
    interpreted = {"TRITON_INTERPRET": "1", "FPRNN_TEST_DEVICE": "cpu"} if device == "cpu" else {}
    files = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("tests/**/test_*.py"))
    if device == "cpu":
        chosen = ["tests/lm/model/test_gpu.py", "-k", "later and fp_mamba1"]
    else:
        marked = [f for f in files if "mark.gpu" in (ROOT / f).read_text(encoding="utf-8")]
        chosen = ["-m", "gpu", *marked]
    # Kernels' outputs and gradients by name at real shapes are among the tests marked gpu. This
    # is for the rest of theirs, odd sizes and options; that they compile needs no GPU.
    of_kernels = [f for f in files if Path(f).name.startswith("test_triton")]
    # Of the exact token a few: each set of options is some ten seconds of compiling.
    of_cell = "chunks or recorded or bf16 or pieces"
    which = f"not compile and (not test_triton_cell or {of_cell})"
    which = "nothing_to_do or stride" if quick else which
    of_kernels += ["-m", "not gpu and not slow", "-k", which]

    training = ["-m", "benchmarks.gpu_training", "--device", device]
    training += ["--json", str(out / "training.json")]
    if quick:
        training += ["--quick", "--updates", "4", "--plain", "2", "--fall", "0", "--new", "2"]
    judge = functools.partial(judge_json, out / "training.json", lambda record: record["figures"])
    constants = ["-m", "benchmarks.gpu_constants", "--device", device]
    constants += ["--json", str(out / "constants.json")]
    if quick:
        constants += ["--batches=1,2", "--length=8", "--d-model=16", "--repeats=1"]
    judge_constants = functools.partial(judge_json, out / "constants.json", measured)
    parts = [
        pytest_part("tests", out, chosen, interpreted),
        Part("training", [sys.executable, *training], LIMITS["training"], judge, interpreted),
        Part(
            "constants",
            [sys.executable, *constants],
            LIMITS["constants"],
            judge_constants,
            interpreted,
        ),
    ]
    for name, options in OPTIONS.items():
        script, path = ROOT / f"benchmarks/{name}.py", out / f"{name}.json"
        shape = ["--shape", "words", *TINY] if quick else ["--shape", "160m", *options]
        shape += ["--new=4"] if quick and name == "decode" else []
        command = ["-m", f"benchmarks.{name}", *shape, "--device", device, "--json", str(path)]
        judge = functools.partial(judge_json, path, timings)
        reason = "" if script.exists() else f"there is no {script.relative_to(ROOT)}"
        parts.append(Part(name, [sys.executable, *command], LIMITS[name], judge, reason=reason))
    parts.append(pytest_part("kernels", out, of_kernels, interpreted))
    return {part.name: part for part in parts}


def run(part: Part, seconds: float, env: dict[str, str], log: TextIO) -> Outcome:
    """Run a part, its lines to the terminal and the log; end all of it when its time is over."""
    if part.reason:
        return Outcome("skipped", {}, part.reason)
    process = subprocess.Popen(
        part.command,
        cwd=ROOT,
        env={**env, **part.env},
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.STDOUT,
        errors="replace",
        start_new_session=True,
    )
    last = [""]

    def forward():
        for line in process.stdout:
            log.write(f"[{part.name}] {line}")
            log.flush()
            if line.strip():
                print(f"[{part.name}] {line.rstrip()}", flush=True)
                last[0] = line.strip()

    reader = threading.Thread(target=forward, daemon=True)
    reader.start()
    try:
        rc = process.wait(seconds)
    except subprocess.TimeoutExpired:
        rc = None
    finally:  # also what it left behind, and on Ctrl-C
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    reader.join(5)
    if rc is None:
        return Outcome("failed", {}, f"not done in {seconds:.0f} s; it last said: {last[0]}")
    return part.judge(rc, last[0])


def environment(device: str) -> tuple[dict[str, Any] | None, list[str]]:
    """Versions and the GPU, by a process that ends: a CUDA context would take memory."""
    found = {"python": platform.python_version(), "cores": os.cpu_count()}
    for package in ("torch", "triton", "transformers", "numpy"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    code = (
        "import json, torch; p = torch.cuda.get_device_properties(0);"
        " print(json.dumps([p.name, f'{p.major}.{p.minor}', p.total_memory]))"
    )
    if device == "cuda":
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        if done.returncode:
            return None, done.stderr.strip().splitlines()[-1:]
        lines = done.stdout.splitlines()
        found |= dict(zip(("gpu", "capability", "memory_bytes"), json.loads(lines[-1])))
    return found, []


def shown(value: object) -> str:
    if isinstance(value, list):
        return " → ".join(map(shown, value)) if len(value) == 2 else " ".join(map(shown, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(records: list[dict]) -> str:
    """The summary, a line a part."""
    lines = ["", f"{'part':<10} {'result':<8} {'seconds':>7}  key figures"]
    for r in records:
        said = [f"{k} {shown(v)}" for k, v in r["figures"].items() if v is not None]
        said = textwrap.wrap("; ".join([*said, r["reason"]] if r["reason"] else said), 100)
        lines.append(f"{r['part']:<10} {r['status']:<8} {r['seconds']:>7.1f}  ")
        lines[-1] += ("\n" + " " * 29).join(said)
    return "\n".join(lines)


def check(parts: list[Part], out: Path, env: dict[str, str], about: dict[str, Any]) -> int:
    """Run the parts one after the other and write the summary.

    Returns: the exit status, 1 if any failed.
    """
    began, allowed, records = time.perf_counter(), 0.0, []
    with (out / "check.log").open("w", encoding="utf-8") as log:
        for part in parts:
            start = time.perf_counter()
            allowed += part.limit
            seconds = allowed - (start - began)
            if not part.reason:
                print(f"== {part.name}, at most {seconds:.0f} s", flush=True)
            outcome = run(part, seconds, env, log)
            taken = round(time.perf_counter() - start, 1)
            records.append({"part": part.name, "seconds": taken, **outcome._asdict()})
            print(f"== {part.name} {outcome.status} after {taken} s", flush=True)
            summary = {
                "ok": not any(r["status"] == "failed" for r in records),
                "complete": len(records) == len(parts),
                "seconds": round(time.perf_counter() - began, 1),
                "environment": about,
                "parts": records,
            }
            text = json.dumps(summary, indent=1, ensure_ascii=False) + "\n"
            (out / "summary.json").write_text(text, encoding="utf-8")
    print(table(records))
    print(
        f"{'ok' if summary['ok'] else 'FAILED'} in {summary['seconds']:.0f} s; {out}/summary.json"
    )
    return 0 if summary["ok"] else 1


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--out", type=Path, default=ROOT / "build/gpu-check")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--quick", action="store_true", help="tiny sizes; what --device cpu needs")
    p.add_argument("--parts", help=f"only these of {','.join(LIMITS)}")
    a = p.parse_args()
    if a.device == "cpu" and not a.quick:
        p.error("on a CPU the kernels are interpreted: give --quick as well")
    wanted = a.parts.split(",") if a.parts else list(LIMITS)
    if unknown := set(wanted) - set(LIMITS):
        p.error(f"there is no part {', '.join(sorted(unknown))}: they are {', '.join(LIMITS)}")
    about, why = environment(a.device)
    if about is None:
        print(f"gpu-check needs a CUDA device, and torch finds none ({''.join(why)}).")
        return 2
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    out = a.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for old in [*out.glob("*.json"), *out.glob("*.xml")]:
        old.unlink()
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    if a.device == "cpu":
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    parts = all_parts(out, a.device, a.quick)
    return check([parts[name] for name in LIMITS if name in wanted], out, env, about)


if __name__ == "__main__":
    sys.exit(main())
