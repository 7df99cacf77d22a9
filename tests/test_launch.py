"""The launch scripts, run with fake `deepspeed`, `scontrol` and Python that record their calls."""

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parent.parent / "launch"
SCRIPTS = ("deepspeed.sh", "slurm_array.sbatch", "synthetic_array.sbatch", "demo.sh")

# Starts two "workers" that, like a training run, note the signal, save for a moment and stop.
# Like the real launcher it dies of a signal without waiting for them.
FAKE_DEEPSPEED = """\
#!/usr/bin/env bash
echo "deepspeed $* port=${MASTER_PORT:-} gpus=${CUDA_VISIBLE_DEVICES:-}" >> "$LOG"
if [ -n "${EXIT_AT_ONCE:-}" ]; then exit "$EXIT_AT_ONCE"; fi
worker() {
    for s in TERM INT USR1; do trap "got=$s" $s; done
    echo "ready $BASHPID" >> "$LOG"
    while [ -z "${got:-}" ] || [ -n "${STUBBORN:-}" ]; do sleep 0.1; done
    echo "got $got" >> "$LOG"
    sleep 0.5
    echo "saved" >> "$LOG"
}
worker & worker &
wait
"""
FAKE_RECORDER = '#!/usr/bin/env bash\necho "$(basename "$0") $*" >> "$LOG"\n'


@pytest.fixture
def fake(tmp_path):
    """A folder of fake programs, first on PATH; `fake.lines()` is what they recorded."""
    return Fake(tmp_path)


class Fake:
    def __init__(self, folder: Path):
        self.log = folder / "log"
        self.bin = folder / "bin"
        self.bin.mkdir()
        programs = {"deepspeed": FAKE_DEEPSPEED, "scontrol": FAKE_RECORDER, "py": FAKE_RECORDER}
        for name, text in programs.items():
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)
        self.started = []

    def start(self, script: str, *arguments: str, **environment: str) -> subprocess.Popen:
        clean = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("SLURM", "CUDA_VISIBLE", "MASTER_"))
        }
        paths = {"PATH": f"{self.bin}:{os.environ['PATH']}", "LOG": str(self.log)}
        process = subprocess.Popen(
            ["bash", str(LAUNCH / script), *arguments],
            env=clean | paths | environment,
            cwd=LAUNCH.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A test run in the background has SIGINT ignored, and a shell cannot undo that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.started.append(process)
        return process

    def run(self, script: str, *arguments: str, **environment: str) -> tuple[int, str]:
        process = self.start(script, *arguments, **environment)
        output, _ = process.communicate(timeout=30)
        return process.returncode, output

    def lines(self, start: str = "") -> list[str]:
        text = self.log.read_text() if self.log.exists() else ""
        return [line for line in text.splitlines() if line.startswith(start)]

    def wait_for(self, start: str, count: int) -> list[str]:
        deadline = time.monotonic() + 20
        while len(self.lines(start)) < count:
            assert time.monotonic() < deadline, f"no {count} × {start!r} in {self.lines()}"
            time.sleep(0.05)
        return self.lines(start)

    def workers(self) -> list[int]:
        return [int(line.split()[1]) for line in self.wait_for("ready", 2)]


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_parses_and_starts_with_its_usage(script):
    path = LAUNCH / script
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    first, second, *rest = path.read_text().splitlines()
    assert first == "#!/usr/bin/env bash"
    assert re.match(rf"# usage: .*launch/{re.escape(script)}", second)
    assert len(rest) <= 40 and max(map(len, [second, *rest])) <= 100
    assert os.access(path, os.X_OK)


def test_deepspeed_arguments(fake):
    status, _ = fake.run(
        "deepspeed.sh", "c.yaml", "2", "optim.lr=1e-3", "name=a b", EXIT_AT_ONCE="0"
    )
    assert status == 0
    assert fake.lines() == [
        "deepspeed --no_local_rank --num_gpus 2 --master_port 29500 --module lm train "
        "--config c.yaml resume=auto optim.lr=1e-3 name=a b port= gpus="
    ]


@pytest.mark.parametrize(
    "arguments, environment, expected",
    [
        ("c.yaml", {}, "--master_port 29500 --module lm train --config c.yaml resume=auto port="),
        ("c.yaml", {"CUDA_VISIBLE_DEVICES": "4,5"}, "--no_local_rank --master_port 29500"),
        ("c.yaml", {"CUDA_VISIBLE_DEVICES": "4,5"}, "gpus=4,5"),
        ("c.yaml 2", {"CUDA_VISIBLE_DEVICES": "4,5,7"}, "--no_local_rank --master_port 29500"),
        ("c.yaml 2", {"CUDA_VISIBLE_DEVICES": "4,5,7"}, "gpus=4,5"),
        ("c.yaml 1 a=b", {"MASTER_PORT": "1234"}, "--num_gpus 1 --master_port 1234 --module"),
        ("c.yaml --job-index 3 a=b", {}, "train --config c.yaml --job-index 3 resume=auto a=b "),
        ("c.yaml 4 --job-index 3", {}, "--num_gpus 4 --master_port 29500 --module lm train"),
    ],
)
def test_deepspeed_gpus_port_and_job_index(fake, arguments, environment, expected):
    status, _ = fake.run("deepspeed.sh", *arguments.split(), EXIT_AT_ONCE="0", **environment)
    (line,) = fake.lines()
    assert status == 0 and expected in f"{line} "
    assert not line.rstrip().endswith("gpus=4,5,7")


def test_deepspeed_refuses_what_cannot_be(fake):
    status, output = fake.run("deepspeed.sh")
    assert status == 2 and output.startswith("usage: launch/deepspeed.sh CONFIG")
    status, output = fake.run("deepspeed.sh", "c.yaml", "3", CUDA_VISIBLE_DEVICES="0,1")
    assert status == 2 and output == "3 GPUs asked, 2 visible\n"
    assert fake.lines() == []


@pytest.mark.parametrize("status", [0, 3])
def test_deepspeed_passes_the_exit_status_on(fake, status):
    assert fake.run("deepspeed.sh", "c.yaml", EXIT_AT_ONCE=str(status))[0] == status


@pytest.mark.parametrize("name", ["TERM", "INT", "USR1"])
def test_a_signal_reaches_the_workers_and_nothing_is_left(fake, name):
    process = fake.start("deepspeed.sh", "c.yaml")
    workers = fake.workers()
    process.send_signal(getattr(signal, f"SIG{name}"))
    process.communicate(timeout=20)
    # It ended only once both had saved, though the launcher died at once.
    assert fake.lines("got") == ["got USR1"] * 2  # see the script: never TERM or INT
    assert fake.lines("saved") == ["saved"] * 2
    assert process.returncode == 128 + signal.SIGUSR1
    assert not any(alive(pid) for pid in workers)


def test_workers_that_ignore_the_signal_are_killed_after_the_grace_period(fake):
    process = fake.start("deepspeed.sh", "c.yaml", GRACE="1", STUBBORN="1")
    workers = fake.workers()
    process.terminate()
    process.communicate(timeout=20)
    time.sleep(0.1)
    assert fake.lines("saved") == [] and not any(alive(pid) for pid in workers)


def test_workers_of_a_killed_launcher_do_not_stay(fake):
    process = fake.start("deepspeed.sh", "c.yaml", GRACE="1")
    workers = fake.workers()
    launcher = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0]
    os.kill(int(launcher), signal.SIGKILL)
    process.communicate(timeout=20)
    time.sleep(0.1)
    assert process.returncode == 137 and not any(alive(pid) for pid in workers)


SLURM = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "71234", "SLURM_ARRAY_JOB_ID": "71231"}


def test_sbatch_options():
    text = (LAUNCH / "slurm_array.sbatch").read_text()
    options = set(re.findall(r"^#SBATCH (\S+)$", text, re.M))
    assert options >= {
        "--requeue",
        "--open-mode=append",
        "--signal=B:USR1@120",
        "--gres=gpu:4",
        "--output=logs/%x-%A_%a.out",
    }
    assert not re.search(r"#SBATCH --(partition|account|qos|nodelist|array)", text)
    assert "mkdir -p logs" in text
    # Slurm stops reading options at the first command.
    assert text.rindex("#SBATCH") < text.index("set -euo")


def test_array_task_trains_its_sweep_point(fake):
    status, output = fake.run(
        "slurm_array.sbatch", "c.yaml", "optim.lr=1e-3", EXIT_AT_ONCE="0", **SLURM
    )
    assert status == 0 and "sweep point 3, job 71234" in output
    assert fake.lines() == [
        "deepspeed --no_local_rank --master_port 21234 --module lm train --config c.yaml "
        "--job-index 3 resume=auto optim.lr=1e-3 port=21234 gpus="
    ]


def test_a_failed_array_task_fails_and_is_not_requeued(fake):
    status, _ = fake.run("slurm_array.sbatch", "c.yaml", EXIT_AT_ONCE="5", **SLURM)
    assert status == 5 and fake.lines("scontrol") == []


def test_array_script_outside_an_array(fake):
    status, output = fake.run("slurm_array.sbatch", "c.yaml", SLURM_JOB_ID="1")
    assert status != 0 and "submit with sbatch --array" in output
    status, output = fake.run("slurm_array.sbatch", **SLURM)
    assert status != 0 and "usage: sbatch --array" in output
    assert fake.lines() == []


def test_usr1_saves_and_then_requeues(fake):
    process = fake.start("slurm_array.sbatch", "c.yaml", **SLURM)
    workers = fake.workers()
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=20)
    assert fake.lines()[-1] == "scontrol requeue 71231_3", "after the run has saved"
    assert fake.lines("got") == ["got USR1"] * 2 and len(fake.lines("saved")) == 2
    assert "queued again" in output and not any(alive(pid) for pid in workers)


def test_sigterm_saves_and_does_not_requeue(fake):
    process = fake.start("slurm_array.sbatch", "c.yaml", **SLURM)
    workers = fake.workers()
    process.terminate()
    process.communicate(timeout=20)
    assert fake.lines("got") == ["got USR1"] * 2 and len(fake.lines("saved")) == 2
    assert fake.lines("scontrol") == [] and process.returncode == 128 + signal.SIGUSR1
    assert not any(alive(pid) for pid in workers)


def test_demo_runs_its_steps_in_order(fake):
    status, output = fake.run("demo.sh", "train.steps=5", PY=str(fake.bin / "py"))
    assert status == 0
    assert [shlex.split(line)[3] for line in fake.lines()] == [
        *("train", "export", "eval", "generate", "report"),
    ]
    assert fake.lines() == [
        "py -m lm train --config configs/lm/demo.yaml train.steps=5",
        "py -m lm export runs/demo runs/demo/hf",
        "py -m lm eval runs/demo/hf --tasks catbabi_mini --limit 50",
        "py -m lm generate runs/demo/hf --prompt The following --out runs/demo/sample.txt",
        "py -m lm report runs/demo",
    ]
    assert len(re.findall(r"^== ", output, re.M)) == 5


def test_demo_stops_at_the_first_failure(fake):
    (fake.bin / "py").write_text(FAKE_RECORDER + 'case "$*" in *export*) exit 4;; esac\n')
    status, _ = fake.run("demo.sh", PY=str(fake.bin / "py"))
    assert status == 4 and len(fake.lines()) == 2


# Like a synthetic run: notes the signal, saves for a moment and stops.
FAKE_PYTHON = """\
#!/usr/bin/env bash
echo "python $*" >> "$LOG"
if [ -n "${EXIT_AT_ONCE:-}" ]; then exit "$EXIT_AT_ONCE"; fi
for s in TERM USR1; do trap "got=$s" $s; done
echo "ready $BASHPID" >> "$LOG"
while [ -z "${got:-}" ]; do sleep 0.1; done
sleep 0.5
echo "saved after $got" >> "$LOG"
exit 1
"""


@pytest.fixture
def fake_python(fake):
    (fake.bin / "python").write_text(FAKE_PYTHON)
    (fake.bin / "python").chmod(0o755)
    return fake


@pytest.mark.parametrize("left, status", [("0", 0), ("2", 0), ("1", 1)])
def test_a_synthetic_array_task_trains_its_point(fake_python, left, status):
    """Exit status 2 is a missed bar: a finding, not a failed job."""
    script = ("synthetic_array.sbatch", "c.yaml", "seed=1")
    found, output = fake_python.run(*script, EXIT_AT_ONCE=left, **SLURM)
    assert found == status and "sweep point 3, job 71234" in output
    assert fake_python.lines() == ["python -m synthetic train --config c.yaml --job-index 3 seed=1"]


@pytest.mark.parametrize("number, requeued", [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_synthetic_array_task_saves_and_is_requeued_near_its_time_limit(
    fake_python, number, requeued
):
    process = fake_python.start("synthetic_array.sbatch", "c.yaml", **SLURM)
    deadline = time.monotonic() + 20
    while not fake_python.lines("ready") and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=20)
    assert fake_python.lines("saved") == [f"saved after {number.name.removeprefix('SIG')}"]
    expected = ["scontrol requeue 71231_3"] if requeued else []
    assert fake_python.lines("scontrol") == expected
