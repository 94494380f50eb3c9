"""A Slurm of four nodes on this machine: Debian's slurm-wlm and munge, on free ports."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.servers import free_port
from tests.tools import need, skip

NODES = 4

_CONFIGURATION = """
ClusterName=redrb
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1
SlurmdParameters=config_overrides
KillWait=5
GresTypes=gpu
"""
_NODE = (
    "NodeName=node{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
    " CPUs=64 RealMemory=900000 Gres=gpu:4"
)


class Slurm:
    """The processes of a cluster; needs root, as Slurm's nodes do.

    Attributes:
        environment: Variables with which `sbatch`, `srun` and others find it.
    """

    def __init__(self, folder: Path) -> None:
        if os.geteuid():
            skip("Slurm's nodes run as root")
        munged, controller = need("munged"), need("slurmctld")
        node_daemon = str(Path(controller).with_name("slurmd"))
        self.folder = folder
        self._scope = ExitStack()
        for name in ("munge", "state"):
            (folder / name).mkdir(parents=True)
        (folder / "munge").chmod(0o700)
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        nodes = [
            _NODE.format(number=number, host=os.uname().nodename, port=free_port())
            for number in range(1, NODES + 1)
        ]
        last = f"PartitionName=all Nodes=node[1-{NODES}] Default=YES State=UP MaxTime=INFINITE"
        settings = _CONFIGURATION.format(folder=folder, controller=free_port())
        configuration = folder / "slurm.conf"
        configuration.write_text("\n".join([settings, *nodes, last, ""]))
        gpus = f"NodeName=node[1-{NODES}] Name=gpu File={folder}/gpu[0-3]\n"
        (folder / "gres.conf").write_text(gpus)
        for number in range(4):
            (folder / f"gpu{number}").touch()
        self.environment = {**os.environ, "SLURM_CONF": str(configuration)}
        with ExitStack() as scope:
            self._scope = scope
            munge = [
                f"--{name}-file={folder}/munge/{name}" for name in ("key", "log", "pid", "seed")
            ]
            socket = f"--socket={folder}/munge/socket"
            self._start([munged, "--foreground", "--force", socket, *munge])
            self._start([controller, "-D", "-c", "-f", str(configuration)])
            for number in range(1, NODES + 1):
                node = ["-D", "-f", str(configuration), "-N", f"node{number}"]
                self._start([node_daemon, *node])
            self.until(
                lambda: self.run("sinfo", "-h", "-o", "%D %t", check=False) == f"{NODES} idle\n"
            )
            self._scope = scope.pop_all()

    def _start(self, words: list[str]) -> None:
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                words, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        self._scope.callback(process.wait)
        self._scope.callback(process.terminate)

    def run(self, *words: str, check: bool = True, cwd: Path | None = None, **more: str) -> str:
        """Return the output of one of Slurm's commands, with more variables."""
        done = subprocess.run(
            words,
            cwd=cwd,
            env={**self.environment, **more},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def until(self, true: Callable[[], bool], seconds: float = 120) -> None:
        """Wait until something is true."""
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, (self.folder / "log").read_text()[-4000:]
            time.sleep(0.2)

    def close(self) -> None:
        """Cancel all jobs, and end the processes."""
        try:
            self.run("scancel", "--user=root", check=False)
            self.until(lambda: not self.run("squeue", "-h"))
        finally:
            self._scope.close()
