"""examples/slurm under a real Slurm of four nodes on this machine."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import redrb
from redrb.stream.task.lookup import task_stats
from tests.integration.test_operations_pages import script, variables
from tests.servers import free_port, programs
from tests.slurm import Slurm
from tests.tools import need

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples" / "slurm"

ONE_EACH = ("--nodes=1", ":", "--nodes=2", "--ntasks-per-node=1")
"""Flags of sbatch: a node for the trainer, and two with a maker each."""
ONE_MAKER = ("--nodes=1", ":", "--nodes=1", "--ntasks-per-node=1")

WAITS = "trap 'echo {} >> ended; kill $!; exit 0' TERM; echo {} >> begun; sleep 60 & wait"
"""A program that says when it begins, and that it got SIGTERM."""


class Folder:
    """A folder with the scripts, and programs in the places of the recipe's processes.

    Attributes:
        started: What programs have written at their beginning.
    """

    def __init__(self, path: Path, slurm: Slurm) -> None:
        need("openssl")
        self.path, self.slurm = path, slurm
        for file in EXAMPLES.iterdir():
            shutil.copy(file, path)
        script(path, "bin/redis-server", f'exec {list(programs().values())[-1]} "$@"')
        script(path, "bin/redis-cli", f'exec {need("redis-cli")} "$@"')
        self._variables = variables(path, PORT=str(free_port()), GPUS="1")

    def submit(self, *words: str, **more: str) -> str:
        """Submit a script, and return the job's number."""
        known = self._variables | more
        return self.slurm.run("sbatch", "--parsable", *words, cwd=self.path, **known).strip()

    def of_job(self, job: str, name: str) -> str:
        """Return a field of `scontrol show job`."""
        found = re.search(rf"\b{name}=(\S+)", self.slurm.run("scontrol", "show", "job", job))
        assert found
        return found[1]

    def await_state(self, job: str, state: str, seconds: float = 120) -> None:
        """Wait until a job is in a state."""
        self.slurm.until(lambda: self.of_job(job, "JobState") == state, seconds)

    def lines(self, name: str) -> list[str]:
        """Return the lines of a file; () if it is not there."""
        path = self.path / name
        return sorted(path.read_text().split()) if path.exists() else []

    def await_lines(self, name: str, lines: list[str]) -> None:
        """Wait until a file has these lines."""
        self.slurm.until(lambda: self.lines(name) == lines)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    (tmp_path / "job").mkdir()
    slurm = Slurm(tmp_path / "slurm")
    try:
        yield Folder(tmp_path / "job", slurm)
    finally:
        slurm.close()


@pytest.mark.parametrize(("status", "state"), [(0, "COMPLETED"), (3, "FAILED")])
def test_the_job_ends_when_the_trainer_ends(folder: Folder, status: int, state: str) -> None:
    ask = f"{sys.executable} -c 'import redrb; redrb.connect().close()'"
    script(folder.path, "bin/torchrun", f'{ask} && echo "$@" > trainer; exit {status}')
    script(folder.path, "bin/redrb-maker", WAITS.format("maker", "maker"))
    job = folder.submit(*ONE_EACH, "job.sbatch")
    folder.await_state(job, state)
    assert folder.of_job(job, "ExitCode") == f"{status}:0"
    assert "-m redrb.cli.processes.trainer my_recipe.py" in (folder.path / "trainer").read_text()
    assert folder.lines("ended") == folder.lines("begun")
    for name in ("password", "url"):
        assert (folder.path / "runs" / "grpo" / name).stat().st_mode & 0o77 == 0


def test_the_job_ends_in_order_and_is_queued_again_at_its_time_limit(folder: Folder) -> None:
    script(folder.path, "bin/torchrun", WAITS.format("trainer", "trainer"))
    script(folder.path, "bin/redrb-maker", WAITS.format("maker", "maker"))
    job = folder.submit(*ONE_EACH, "job.sbatch")
    folder.await_lines("begun", ["maker", "maker", "trainer"])
    folder.slurm.run("scancel", "--batch", "--signal=USR1", job)  # as --signal=B:USR1@120 does
    folder.await_state(job, "PENDING")
    assert folder.lines("ended") == ["maker", "maker", "trainer"]
    assert folder.of_job(job, "Restarts") == "1"
    assert list((folder.path / "runs" / "grpo" / "redis").glob("appendonlydir/*"))


def test_a_cancelled_job_ends_and_does_not_come_back(folder: Folder) -> None:
    script(folder.path, "bin/torchrun", WAITS.format("trainer", "trainer"))
    script(folder.path, "bin/redrb-maker", WAITS.format("maker", "maker"))
    job = folder.submit(*ONE_EACH, "job.sbatch")
    folder.await_lines("begun", ["maker", "maker", "trainer"])
    folder.slurm.run("scancel", job)
    folder.await_lines("ended", ["maker", "maker", "trainer"])
    folder.slurm.until(lambda: not folder.slurm.run("squeue", "-h"))
    assert folder.of_job(job, "JobState") == "CANCELLED"
    assert folder.of_job(job, "Restarts") == "0"


def test_redis_outlives_the_workers_of_a_cancelled_job(folder: Folder) -> None:
    """Slurm may signal all processes of the script, and not only its shell."""
    asks = "trap 'sleep 1; redis-cli -p $PORT ping >> ended; exit 0' TERM"
    script(folder.path, "bin/torchrun", f"{asks}; echo trainer >> begun; sleep 60 & wait")
    script(folder.path, "bin/redrb-maker", f"{asks}; echo maker >> begun; sleep 60 & wait")
    job = folder.submit(*ONE_MAKER, "job.sbatch")
    folder.await_lines("begun", ["maker", "trainer"])
    folder.slurm.run("scancel", job)
    folder.slurm.until(lambda: not folder.slurm.run("squeue", "-h"))
    assert folder.lines("ended") == ["PONG", "PONG"]


def test_a_job_that_is_submitted_twice_waits_for_the_first(folder: Folder) -> None:
    """Two servers would append to the same file."""
    script(folder.path, "bin/torchrun", WAITS.format("trainer", "trainer"))
    script(folder.path, "bin/redrb-maker", WAITS.format("maker", "maker"))
    first = folder.submit(*ONE_MAKER, "job.sbatch")
    folder.await_lines("begun", ["maker", "trainer"])
    second = folder.submit(*ONE_MAKER, "job.sbatch")
    folder.slurm.until(lambda: folder.of_job(second, "Reason") == "Dependency")
    assert folder.of_job(second, "JobState") == "PENDING"
    folder.slurm.run("scancel", first)
    folder.await_lines("begun", ["maker", "maker", "trainer", "trainer"])
    assert folder.of_job(first, "JobState") == "CANCELLED"


def test_redis_outlives_makers_that_start_late_or_are_slow(folder: Folder) -> None:
    """A step that is only starting misses the signal; a second signal, USR1, comes meanwhile."""
    end = "trap 'echo ends >> begun; sleep 5; redis-cli -p $PORT ping >> ended; exit 0' TERM"
    script(folder.path, "bin/redrb-maker", f"{end}; echo maker >> begun; sleep 60 & wait")
    script(folder.path, "bin/torchrun", "echo trainer >> begun")
    real = shutil.which("srun")
    late = "until grep -q trainer begun; do sleep 0.2; done 2>/dev/null; sleep 4"
    script(folder.path, "bin/srun", f'[[ $1 != *=1 ]] || {{ {late}; }}; exec {real} "$@"')
    job = folder.submit(*ONE_MAKER, "job.sbatch")
    folder.await_lines("begun", ["ends", "maker", "trainer"])
    folder.slurm.run("scancel", "--batch", "--signal=USR1", job)
    folder.await_state(job, "COMPLETED")
    assert folder.lines("ended") == ["PONG"]
    assert folder.of_job(job, "Restarts") == "0"


def test_more_makers_join_as_an_array_and_leave(folder: Folder) -> None:
    script(folder.path, "bin/torchrun", WAITS.format("trainer", "trainer"))
    script(folder.path, "bin/redrb-maker", WAITS.format("maker", "maker"))
    folder.await_state(folder.submit("--array=1", "makers.sbatch"), "FAILED")  # no job to join
    folder.submit(*ONE_EACH, "job.sbatch")
    folder.await_lines("begun", ["maker", "maker", "trainer"])
    makers = folder.submit("--array=1-3", "makers.sbatch")
    folder.await_lines("begun", ["maker"] * 5 + ["trainer"])
    folder.slurm.run("scancel", "--batch", "--signal=TERM", f"{makers}_2")
    folder.await_lines("ended", ["maker"])
    left = partial(folder.slurm.run, "squeue", "-h", "-j", makers, "-o", "%K %t")
    folder.slurm.until(lambda: sorted(left().splitlines()) == ["1 R", "3 R"])


def test_a_maker_samples_from_the_vllm_beside_it(folder: Folder) -> None:
    vllm = 'trap "echo vllm >> ended; kill \\$!; exit 0" TERM; echo "$@" > vllm; sleep 60 & wait'
    script(folder.path, "env/bin/vllm", vllm)
    script(folder.path, "bin/torchrun", WAITS.format("trainer", "trainer"))
    says = 'echo "$@" > flags; env > variables; ' + WAITS.format("maker", "maker")
    script(folder.path, "bin/redrb-maker", says)
    environment = {"VLLM": str(folder.path / "env"), "MODEL": "a/model"}
    job = folder.submit(*ONE_MAKER, "job.sbatch", **environment)
    folder.await_lines("begun", ["maker", "trainer"])
    folder.slurm.until((folder.path / "vllm").exists)
    port = re.search(r"--port (\d+)", (folder.path / "vllm").read_text())
    assert port
    assert (
        f"--engine vllm --engine-url http://127.0.0.1:{port[1]} "
        in (folder.path / "flags").read_text()
    )
    of_step = (folder.path / "variables").read_text().splitlines()
    assert {"SLURM_CPUS_PER_TASK=8", "SLURM_GPUS_ON_NODE=1"} <= set(of_step)
    assert "serve a/model " in (folder.path / "vllm").read_text()
    folder.slurm.run("scancel", "--batch", "--signal=TERM", job)
    folder.await_lines("ended", ["maker", "trainer", "vllm"])


def test_a_job_trains_and_goes_on_from_its_checkpoint(folder: Folder) -> None:
    """The real trainer under torchrun, and real makers; one of them comes by an array."""
    torchrun = f'exec {sys.executable} -m torch.distributed.run "$@"'
    script(folder.path, "bin/torchrun", torchrun)
    maker = f'exec {sys.executable} -m redrb.cli.processes.maker "$@"'
    script(folder.path, "bin/redrb-maker", maker)
    known = {"RECIPE": "sorting", "REDRB_STEPS": "100000", "REDRB_PROMPTS_PER_STEP": "8"}
    job = folder.submit(*ONE_MAKER, "job.sbatch", **known)
    url, log = folder.path / "runs" / "grpo" / "url", folder.path / "runs" / "grpo" / "trainer.log"
    folder.slurm.until(lambda: url.exists() and bool(url.read_text()))
    makers = folder.submit("--array=1", "makers.sbatch", **known)
    steps = partial(acknowledged, url.read_text().strip())
    folder.slurm.until(lambda: steps() > 100, 200)
    folder.slurm.run("scancel", "--batch", "--signal=USR1", job)
    folder.await_state(job, "PENDING", 120)
    assert list((folder.path / "runs" / "grpo" / "checkpoints").iterdir())
    folder.slurm.run("scancel", makers)
    folder.slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    folder.slurm.until(lambda: log.read_text().count(" begins: ") == 2, 120)
    assert int(re.findall(r"after (\d+) steps", log.read_text())[-1]) > 0


def acknowledged(url: str) -> int:
    """Return the groups that were trained; 0 before there is a task."""
    try:
        with redrb.connect(url) as client:
            return task_stats(client, "sort", namespace="default", group="default").ledger.acked
    except redrb.errors.RedrbError:
        return 0
