"""A private Slurm cluster on this host: munged, slurmctld and a slurmd for each node.

It needs Debian's slurmctld, slurmd, slurm-client and munge, and root. `stop` ends all its daemons.
"""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# Otherwise a requeued job waits two minutes.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2,sched_min_interval=0
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
JobRequeue=1
KillWait=20
ReturnToService=2
{nodes}
PartitionName=test Nodes=ALL Default=YES MaxTime=60 State=UP
"""


def find_missing() -> str:
    """Return the reason why Slurm cannot run here, or ""."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if absent:
        return f"needs {', '.join(absent)}: apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "needs root"


def find_free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Slurm:
    """A cluster of nodes n0, n1, … with 4 pretended cores each; a context manager."""

    def __init__(self, folder: Path, nodes: int = 2):
        self.folder = folder
        self.names = [f"n{i}" for i in range(nodes)]
        self.daemons = []
        path = f"{os.environ['PATH']}:/usr/sbin"
        self.env = {**os.environ, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc):
        self.stop()

    def _start(self) -> None:
        self.folder.mkdir(parents=True)
        (self.folder / "state").mkdir()
        host = socket.gethostname().partition(".")[0]
        control, *ports = find_free_ports(1 + len(self.names))
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4"
            for name, port in zip(self.names, ports)
        )
        text = CONF.format(host=host, control=control, folder=self.folder, nodes=nodes)
        (self.folder / "slurm.conf").write_text(text)
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))

        files = {"key-file": key, "socket": self.folder / "munge.socket"}
        for name in ("pid", "log", "seed"):
            files[f"{name}-file"] = self.folder / f"munge.{name}"
        options = [f"--{name}={path}" for name, path in files.items()]
        self._daemon("munged", "--foreground", "--force", *options)
        self._wait_for(files["socket"].exists, "munged's socket")
        self._daemon("slurmctld", "-D", "-c")
        for name in self.names:
            (self.folder / f"spool-{name}").mkdir()
            self._daemon("slurmd", "-D", "-N", name)
        self._wait_for(lambda: self.states() == ["idle"] * len(self.names), "idle nodes")

    def _daemon(self, *command) -> None:
        log = (self.folder / f"{command[0]}.out").open("a")
        process = subprocess.Popen(command, env=self.env, stdout=log, stderr=log)
        self.daemons.append(process)

    def _wait_for(self, condition, description: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                logs = [p.read_text()[-1500:] for p in sorted(self.folder.glob("*.log"))]
                raise AssertionError(f"no {description} after {seconds} s\n" + "\n--\n".join(logs))
            time.sleep(0.2)

    def states(self) -> list[str]:
        """Return the state of each node, as `sinfo` prints it."""
        output = self.call("sinfo", "--noheader", "--Node", "--format=%T", check=False)
        return output.split()

    def call(self, *command, check=True, **environment) -> str:
        """Run one of Slurm's programs, and return its output."""
        result = subprocess.run(
            [str(part) for part in command],
            env=self.env | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.returncode == 0 or not check, result.stdout + result.stderr
        return result.stdout

    def job(self, job) -> dict[str, str]:
        """Return the fields of `scontrol show job` for a job or an array's task (`12_3`)."""
        output = self.call("scontrol", "show", "job", "--oneliner", job)
        return dict(pair.split("=", 1) for pair in output.split() if "=" in pair)

    def wait(self, job, *states: str, seconds: float = 240) -> dict[str, str]:
        """Wait until a job has one of the states (COMPLETED, FAILED, …), and return its fields."""
        deadline = time.monotonic() + seconds
        while (fields := self.job(job))["JobState"] not in states:
            assert time.monotonic() < deadline, f"{job} is still {fields['JobState']}: {fields}"
            time.sleep(0.3)
        return fields

    def stop(self) -> None:
        """End all jobs, then the daemons, in reverse order of their start."""
        if len(self.daemons) > 1:
            self.call("scancel", "--state=RUNNING", "--full", "--signal=KILL", check=False)
            self.call("scancel", "--user=root", check=False)
            deadline = time.monotonic() + 20
            while self.call("squeue", "--noheader", check=False) and time.monotonic() < deadline:
                time.sleep(0.3)
        for process in reversed(self.daemons):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
