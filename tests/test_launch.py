"""The launch scripts with fake `deepspeed`, `srun`, `scontrol` and Python that record their calls.

tests/test_slurm.py runs them on a real Slurm.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lm.cli import main as lm_cli
from lm.cli.arguments import parse

LAUNCH = Path(__file__).parent.parent / "launch"
SCRIPTS = sorted(path.name for path in LAUNCH.iterdir())

# Starts two "workers" that, like a training run, record the signal, save for a moment and exit with
# 75. Like the real launcher it dies of TERM and INT without waiting for them, and of USR1 unless it
# is ignored. Otherwise it exits with the status of the first worker that ends.
FAKE_DEEPSPEED = f"""\
#!{sys.executable}
import os, signal, subprocess, sys, time

def note(*words):
    with open(os.environ["LOG"], "a") as f:
        print(*words, file=f)

def worker():
    received = []
    time.sleep(float(os.environ.get("STARTUP_SECONDS", 0)))
    for name in ("TERM", "INT", "USR1"):
        signal.signal(getattr(signal, f"SIG{{name}}"), lambda *_, name=name: received.append(name))
    note("ready", os.getpid())
    while not received or "STUBBORN" in os.environ:
        time.sleep(0.05)
    note("got", received[0])
    time.sleep(0.5)
    note("saved")
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # reset when the interpreter exits
    sys.exit(75)

if "WORKER" in os.environ:
    worker()
gpus, port = (os.environ.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "MASTER_PORT"))
note("deepspeed", *sys.argv[1:], f"gpus={{gpus}}")
if "EXIT_AT_ONCE" in os.environ:
    sys.exit(int(os.environ["EXIT_AT_ONCE"]))
env = os.environ | {{"WORKER": "1"}}
workers = [subprocess.Popen([sys.executable, __file__], env=env) for _ in range(2)]
sys.exit(max([w.wait() for w in workers]))
"""
# Runs the command as two tasks on each of two nodes.
FAKE_SRUN = """\
#!/usr/bin/env bash
echo "srun" >> "$LOG"
while [[ $1 = --* ]]; do echo "option $1" >> "$LOG"; shift; done
export SLURM_STEP_NUM_TASKS=4 status=0
for SLURM_PROCID in 0 1 2 3; do
    export SLURM_PROCID SLURM_LOCALID=$((SLURM_PROCID % 2))
    export SLURM_GTIDS=$([ "$SLURM_PROCID" -lt 2 ] && echo 0,1 || echo 2,3)
    "$@" || status=$?
done
exit "$status"
"""
FAKE_SCONTROL = """\
#!/usr/bin/env bash
if [ "$1" = show ]; then echo n7; echo n8; else echo "scontrol $*" >> "$LOG"; fi
"""
FAKE_RECORDER = '#!/usr/bin/env bash\necho "$(basename "$0") $*" >> "$LOG"\n'
QUOTING_RECORDER = '#!/usr/bin/env bash\nprintf "%s\\n" "${*@Q}" >> "$LOG"\n'  # only its arguments


@pytest.fixture
def fake(tmp_path):
    """Fake programs, first on PATH; `fake.lines()` returns the lines that they wrote."""
    return Fake(tmp_path)


class Fake:
    """Fake programs that write a line per call into `log`."""

    def __init__(self, folder: Path):
        self.log = folder / "log"
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.add("deepspeed", FAKE_DEEPSPEED)
        self.add("srun", FAKE_SRUN)
        self.add("scontrol", FAKE_SCONTROL)
        self.add("py", FAKE_RECORDER)

    def add(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def start(self, script: str, *arguments: str, **environment: str) -> subprocess.Popen:
        clean = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("SLURM", "CUDA_VISIBLE", "MASTER_"))
        }
        paths = {"PATH": f"{self.bin}:{os.environ['PATH']}", "LOG": str(self.log)}
        return subprocess.Popen(
            ["bash", str(LAUNCH / script), *arguments],
            env=clean | paths | environment,
            cwd=LAUNCH.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A test run in the background ignores SIGINT, and a shell cannot undo that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            start_new_session=True,  # a new process group, as in a terminal or batch job
        )

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


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_parse_and_start_with_usage(script):
    path = LAUNCH / script
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    first, second, *rest = path.read_text().splitlines()
    assert first == "#!/usr/bin/env bash"
    assert re.match(rf"# usage: .*launch/{re.escape(script)}", second)
    assert len(rest) <= 45 and max(map(len, [second, *rest])) <= 100
    assert os.access(path, os.X_OK)


@pytest.mark.parametrize(
    "arguments, visible, expected",
    [
        ("c.yaml", "", "--master_port 1234 --module lm train --config c.yaml resume=auto gpus="),
        ("c.yaml 2 a=b", "", "--num_gpus 2 --master_port 1234 --module lm train --config c.yaml"),
        ("c.yaml", "4,5", "--no_local_rank --master_port 1234"),
        ("c.yaml 2", "4,5,7", "--no_local_rank --master_port 1234"),
        ("c.yaml 2", "4,5,7", "gpus=4,5"),
        ("c.yaml --job-index 3 a=b", "", "train --config c.yaml --job-index 3 resume=auto a=b "),
        ("c.yaml 4 --job-index 3", "", "--num_gpus 4 --master_port 1234 --module lm train"),
    ],
)
def test_deepspeed_script_passes_gpus_and_job_index(fake, arguments, visible, expected):
    environment = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    status, _ = fake.run(
        "deepspeed.sh", *arguments.split(), EXIT_AT_ONCE="0", MASTER_PORT="1234", **environment
    )
    (line,) = fake.lines()
    assert status == 0 and expected in f"{line} "
    assert not line.rstrip().endswith("gpus=4,5,7")  # the cases with three ask for two


def test_two_runs_do_not_share_a_port(fake):
    for _ in range(2):
        assert fake.run("deepspeed.sh", "c.yaml", EXIT_AT_ONCE="0")[0] == 0
    first, second = (int(re.search(r"master_port (\d+)", line)[1]) for line in fake.lines())
    assert first != second and min(first, second) > 1024


def test_deepspeed_script_uses_hosts_of_a_file(fake, tmp_path):
    """The signal also goes to the first host, where a rank informs all others."""
    hosts = tmp_path / "hosts"
    hosts.write_text("# two nodes\n\nworker-1 slots=4\nworker-2 slots=4\n")
    fake.add("ssh", FAKE_RECORDER)
    process = fake.start(
        "deepspeed.sh", "c.yaml", "--hostfile", str(hosts), "--job-index", "1", MASTER_PORT="1234"
    )
    fake.workers()
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 75
    assert fake.lines("deepspeed") == [
        f"deepspeed --no_local_rank --hostfile {hosts} --master_port 1234 --module lm train "
        "--config c.yaml --job-index 1 resume=auto gpus="
    ]
    remote_command = "run=$(pgrep -d, -f '[-]-master_port=1234 ') && pkill -USR1 -P $run"
    assert set(fake.lines("ssh")) == {f"ssh -n worker-1 {remote_command}"}


def test_deepspeed_script_refuses_wrong_arguments(fake):
    status, output = fake.run("deepspeed.sh")
    assert status == 2 and output.startswith("usage: launch/deepspeed.sh CONFIG")
    status, output = fake.run("deepspeed.sh", "c.yaml", "3", CUDA_VISIBLE_DEVICES="0,1")
    assert status == 2 and output == "3 GPUs asked, 2 visible\n"
    assert fake.lines() == []


@pytest.mark.parametrize(
    "name, is_sent_to_group, wrapper",
    [
        ("TERM", False, ()),
        ("INT", False, ()),
        ("USR1", False, ()),
        # Ctrl-C, or a supervisor's TERM, also ends the script's `sleep`.
        ("TERM", True, ()),
        ("INT", True, ("again.sh", "3")),
    ],
)
def test_signal_reaches_workers_and_leaves_no_process(fake, name, is_sent_to_group, wrapper):
    script = [*wrapper, str(LAUNCH / "deepspeed.sh")] if wrapper else ["deepspeed.sh"]
    process = fake.start(*script, "c.yaml")
    workers = fake.workers()
    time.sleep(0.7 if is_sent_to_group else 0)  # until the script is in its `sleep`
    send = os.killpg if is_sent_to_group else os.kill
    send(process.pid, getattr(signal, f"SIG{name}"))
    process.communicate(timeout=20)
    # A signal to the group also reaches the workers; the script itself sends them only USR1.
    assert is_sent_to_group or fake.lines("got") == ["got USR1"] * 2
    # The script ended after both had saved, although the launcher died at once.
    assert fake.lines("saved") == ["saved"] * 2
    assert process.returncode == 75, "the exit status of the workers"
    assert not any(is_alive(pid) for pid in workers)


def test_signal_before_workers_listen_is_not_lost(fake):
    process = fake.start("deepspeed.sh", "c.yaml", STARTUP_SECONDS="2")
    fake.wait_for("deepspeed", 1)
    process.terminate()
    process.communicate(timeout=20)
    assert fake.lines("saved") == ["saved"] * 2 and process.returncode == 75


@pytest.mark.parametrize("is_killed", [False, True])
def test_workers_that_ignore_signals_are_killed(fake, is_killed):
    """After a signal to the script, or if the launcher is killed."""
    process = fake.start("deepspeed.sh", "c.yaml", GRACE="1", STUBBORN="1")
    workers = fake.workers()
    if is_killed:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        os.kill(int(children.split()[0]), signal.SIGKILL)
    else:
        process.terminate()
    process.communicate(timeout=20)
    time.sleep(0.1)
    assert fake.lines("saved") == [] and not any(is_alive(pid) for pid in workers)
    if is_killed:
        assert process.returncode == 137


JOB = {"SLURM_JOB_ID": "71234", "SLURM_JOB_NODELIST": "n[7-8]"}
SLURM = {**JOB, "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_JOB_ID": "71231"}


@pytest.mark.parametrize(
    "script, output", [("slurm.sbatch", "%x-%j"), ("slurm_array.sbatch", "%x-%A_%a")]
)
def test_sbatch_options_of_the_script_are_valid(script, output):
    text = (LAUNCH / script).read_text()
    options = set(re.findall(r"^#SBATCH (\S+)$", text, re.M))
    assert options >= {
        "--requeue",
        "--open-mode=append",
        "--signal=USR1@120",  # to the tasks, not to the script
        "--gres=gpu:4",
        "--ntasks-per-node=4",
        f"--output=logs/{output}.out",
    }
    assert not re.search(r"#SBATCH --(partition|account|qos|nodelist|array)", text)
    assert "mkdir -p logs" in text
    # Slurm reads options only before the first command.
    assert text.rindex("#SBATCH") < text.index("set -euo")


# Like a run: records its rank and the signal, saves for a moment and stops.
FAKE_PYTHON = """\
#!/usr/bin/env bash
echo "python $*" >> "$LOG"
echo "rank $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_SIZE $MASTER_ADDR:$MASTER_PORT" >> "$LOG"
if [ -n "${EXIT_AT_ONCE:-}" ]; then exit "$EXIT_AT_ONCE"; fi
for s in TERM USR1; do trap "got=$s" $s; done
echo "ready $BASHPID" >> "$LOG"
while [ -z "${got:-}" ]; do sleep 0.1; done
sleep 0.5
echo "saved after $got" >> "$LOG"
exit 75
"""


@pytest.fixture
def fake_python(fake):
    fake.add("python", FAKE_PYTHON)
    return fake


@pytest.mark.parametrize(
    "script, environment, point, words",
    [
        ("slurm.sbatch", JOB, "", "job 71234 on n[7-8], start 0"),
        ("slurm_array.sbatch", SLURM, " --job-index 3", "sweep point 3"),
    ],
)
def test_job_sets_the_rank_of_each_task(fake_python, script, environment, point, words):
    overrides = ("optim.lr=1e-3", "name=a b")
    status, output = fake_python.run(script, "c.yaml", *overrides, EXIT_AT_ONCE="0", **environment)
    assert status == 0 and words in output
    command = f"python -m lm train --config c.yaml resume=auto{point} optim.lr=1e-3 name=a b"
    assert fake_python.lines("python") == [command] * 4
    assert fake_python.lines("rank") == [
        "rank 0/4 0/2 n7:15234",
        "rank 1/4 1/2 n7:15234",
        "rank 2/4 0/2 n7:15234",
        "rank 3/4 1/2 n7:15234",
    ]
    assert "option --kill-on-bad-exit=0" in fake_python.lines("option")


@pytest.mark.parametrize(
    "script, status",
    [
        *(("slurm.sbatch", status) for status in (0, 1, 65, 69, 71, 75, 76, 77, 78, 137)),
        *(("slurm_array.sbatch", status) for status in (1, 75)),
    ],
)
def test_job_is_requeued_by_exit_status(fake_python, script, status):
    """A run is queued again after a signal, a hang, a network failure or a lost process only."""
    env, job = (SLURM, "71231_3") if "array" in script else (JOB, "71234")
    actual, _ = fake_python.run(script, "c.yaml", EXIT_AT_ONCE=str(status), **env)
    assert actual == status
    expected = [f"scontrol requeue {job}"] if status in (69, 71, 75, 77) else []
    assert fake_python.lines("scontrol") == expected


def test_job_is_requeued_a_limited_number_of_times(fake_python):
    environment = {**JOB, "EXIT_AT_ONCE": "77", "MAX_RESTARTS": "3"}
    for count in ("2", "3"):
        fake_python.run("slurm.sbatch", "c.yaml", SLURM_RESTART_COUNT=count, **environment)
        assert len(fake_python.lines("scontrol")) == 1


@pytest.mark.parametrize("name", ["TERM", "INT"])
def test_job_waits_for_its_run_after_a_signal(fake_python, name):
    fake_python.add(
        "srun",
        "#!/usr/bin/env bash\ntrap : TERM INT\nwhile [[ $1 = --* ]]; do shift; done\n"
        'export SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_GTIDS=0\n"$@"\n',
    )
    fake_python.add("python", FAKE_PYTHON.replace("for s in TERM USR1", "for s in TERM INT USR1"))
    process = fake_python.start("slurm.sbatch", "c.yaml", **JOB)
    fake_python.wait_for("ready", 1)
    os.killpg(process.pid, getattr(signal, f"SIG{name}"))
    process.communicate(timeout=20)
    assert fake_python.lines("saved") == [f"saved after {name}"]
    assert process.returncode == 75 and fake_python.lines("scontrol") == []


@pytest.mark.parametrize(
    "words, environment, message",
    [
        (["slurm_array.sbatch", "c.yaml"], JOB, "submit with sbatch --array"),
        (["slurm_array.sbatch"], SLURM, "usage: sbatch --array"),
        (["slurm.sbatch", "c.yaml"], {}, "submit with sbatch"),
        (["slurm.sbatch"], JOB, "usage: sbatch"),
    ],
)
def test_slurm_scripts_are_refused_outside_slurm(fake, words, environment, message):
    status, output = fake.run(*words, **environment)
    assert status != 0 and message in output and fake.lines() == []


def test_demo_runs_its_steps_in_order(fake, tmp_path):
    """The command line accepts its commands."""
    (tmp_path / "launch").mkdir()  # the script works in its parent folder
    (tmp_path / "runs/demo").mkdir(parents=True)
    script = shutil.copy(LAUNCH / "demo.sh", tmp_path / "launch")
    fake.add("py", QUOTING_RECORDER)
    status, output = fake.run(script, "train.steps=5", PY=str(fake.bin / "py"))
    assert status == 0 and len(re.findall(r"^== ", output, re.M)) == 5
    commands = [shlex.split(line) for line in fake.lines()]
    assert {tuple(words[:2]) for words in commands} == {("-m", "lm")}
    names = [parse(lm_cli.make_parser(), words[2:]).command for words in commands]
    assert names == ["train", "export", "eval", "generate", "report"]
    assert "train.steps=5" in commands[0]
    assert (tmp_path / "runs/demo/sample.txt").exists()


def test_demo_stops_at_the_first_failure(fake):
    fake.add("py", FAKE_RECORDER + 'case "$*" in *export*) exit 4;; esac\n')
    status, _ = fake.run("demo.sh", PY=str(fake.bin / "py"))
    assert status == 4 and len(fake.lines()) == 2


@pytest.mark.parametrize("exit_status, status", [("0", 0), ("2", 0), ("1", 1)])
def test_synthetic_array_task_trains_its_point(fake_python, exit_status, status):
    """Exit status 2 means a missed threshold: a result, not a failed job."""
    script = ("synthetic_array.sbatch", "c.yaml", "seed=1")
    actual, output = fake_python.run(*script, EXIT_AT_ONCE=exit_status, **SLURM)
    assert actual == status and "sweep point 3, job 71234" in output
    assert fake_python.lines("python") == [
        "python -m synthetic train --config c.yaml --job-index 3 seed=1"
    ]


@pytest.mark.parametrize("name, send", [("USR1", os.kill), ("TERM", os.kill), ("INT", os.killpg)])
def test_synthetic_array_task_is_requeued_at_time_limit(fake_python, name, send):
    process = fake_python.start("synthetic_array.sbatch", "c.yaml", **SLURM)
    (ready,) = fake_python.wait_for("ready", 1)
    send(process.pid, getattr(signal, f"SIG{name}"))
    process.communicate(timeout=20)
    assert fake_python.lines("saved") == [f"saved after {'USR1' if name == 'USR1' else 'TERM'}"]
    expected = ["scontrol requeue 71231_3"] if name == "USR1" else []
    assert fake_python.lines("scontrol") == expected
    assert process.returncode == 75 and not is_alive(int(ready.split()[1]))


def run_again(tmp_path, times, *endings):
    """Return (exit status, number of runs, stderr) of a command whose runs end with `endings`."""
    log = tmp_path / "runs"
    cases = " ".join(f"{i}) {command} ;;" for i, command in enumerate(endings, 1))
    command = f"echo run >> {log}; case $(wc -l < {log}) in {cases} esac"
    script = [LAUNCH / "again.sh", str(times), "bash", "-c", command]
    result = subprocess.run(script, capture_output=True, text=True, timeout=30)
    return result.returncode, log.read_text().count("run"), result.stderr


@pytest.mark.parametrize(
    "times, ends, status, runs",
    [
        (5, ("exit 77", "kill -9 $$", "exit 71", "exit 0"), 0, 4),
        (5, ("exit 69", "exit 0"), 0, 2),
        (1, ("exit 77", "exit 77", "exit 0"), 77, 2),
        (0, ("exit 77",), 77, 1),
        *((5, (f"exit {end}",), end, 1) for end in (1, 2, 65, 75, 76, 78)),
    ],
)
def test_again_retries_temporary_failures(tmp_path, monkeypatch, times, ends, status, runs):
    monkeypatch.setenv("PAUSE", "0.1")
    actual_status, actual_runs, message = run_again(tmp_path, times, *ends)
    assert (actual_status, actual_runs) == (status, runs)
    assert message.count(": again, at most") == runs - 1


def test_again_retries_a_command_that_ends_at_once(tmp_path, monkeypatch):
    """It may end before the script checks it: here every line of the script is delayed."""
    (tmp_path / "late").write_text("case $0 in *again.sh) trap 'sleep 0.1' DEBUG;; esac\n")
    monkeypatch.setenv("BASH_ENV", str(tmp_path / "late"))
    status, runs, _ = run_again(tmp_path, 5, "exit 77", "exit 78")
    assert (status, runs) == (78, 2)


def test_again_forwards_signals_and_ends(tmp_path):
    command = f"trap 'exit 77' TERM; touch {tmp_path / 'ready'}; while true; do sleep 0.05; done"
    process = subprocess.Popen([LAUNCH / "again.sh", "5", "bash", "-c", command])
    deadline = time.monotonic() + 20
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 77
