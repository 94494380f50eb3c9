"""`redrb run`: processes that die are restarted, Ctrl-C ends all in order, the next run goes on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

import redrb
from redrb.cli import __main__ as cli
from redrb.environment import PREFIX, child_environment
from tests.disks import fill, read_only, small_disk
from tests.terminals import Terminal

RECIPE = Path(__file__).parents[1] / "counting_recipe.py"


class Run:
    """A `redrb run` of the recipe that counts, whose output is read line by line."""

    def __init__(
        self, folder: Path, *flags: str, output: IO[str] | int = subprocess.PIPE, **variables: str
    ) -> None:
        self.folder = folder
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "redrb.cli", "run", str(RECIPE), "--out", str(folder), *flags],
            env=child_environment(without=PREFIX, **variables),
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""
        self.workers: list[psutil.Process] = []  # those that may outlive it

    def until(self, words: str) -> str:
        """Read lines until one has these words; returns it."""
        for line in self.popen.stdout:
            self.output += line
            if words in line:
                return line
        raise AssertionError(f"{words!r} is not in:\n{self.output}")

    def end(self, *numbers: signal.Signals, timeout: float = 90) -> int:
        """Send signals, read what is left and return the exit status."""
        for number in numbers:
            self.popen.send_signal(number)
        self.output += self.popen.communicate(timeout=timeout)[0] or ""
        return self.popen.returncode

    def process(self, words: str) -> psutil.Process:
        """Return the process below the run whose command has these words."""
        return next(
            child
            for child in psutil.Process(self.popen.pid).children(recursive=True)
            if words in " ".join(child.cmdline()) and "/bin/sh" not in child.cmdline()
        )

    def until_version(self, newer_by: int) -> int:
        """Wait until the trainer has published so many more versions of the weights."""
        with redrb.connect(f"unix://{self.folder}/redis/redis.sock") as client:
            weights = redrb.WeightSubscriber(client, "counting", namespace="counting")
            newest = weights.latest()
            before = newest.version if newest else 0
            return weights.wait(newer_than=before + newer_by - 1, timeout=90).version


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="run-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    """Runs that are ended with the test."""
    started: list[Run] = []
    yield started
    for run in started:
        below = run.workers
        if run.popen.poll() is None:
            below = psutil.Process(run.popen.pid).children(recursive=True)
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        run.popen.kill()
        run.popen.communicate()


def test_on_a_terminal_a_run_has_the_screen_of_top(folder: Path) -> None:
    words = ("run", str(RECIPE), "--out", str(folder), "--steps", "1000000", "--makers", "1")
    with Terminal([sys.executable, "-m", "redrb.cli", *words], width=120, height=40) as terminal:
        terminal.writes("WORKERS of counting")
        terminal.writes("1 maker, 1 trainer")
        terminal.writes("samples/s")
        children = psutil.Process(terminal.process.pid).children(recursive=True)
        [maker] = [each for each in children if "--worker=maker-1" in each.cmdline()]
        maker.kill()
        terminal.writes("maker-1 was killed by SIGKILL")
        terminal.press("\r")
        terminal.writes("TASK counting")
        terminal.press("\x03")
        assert terminal.end(60) == 130
        assert terminal.restored
        assert "maker-1 was killed by SIGKILL" in terminal.written  # again, below the command
        assert "the next run goes on from here" in terminal.written
        assert not any(each.is_running() for each in children)


@pytest.mark.slow
def test_kills_of_every_process_ctrl_c_and_the_next_run(folder: Path, runs: list[Run]) -> None:
    first = Run(folder, "--steps", "1000000")
    runs.append(first)
    url = f"unix://{folder}/redis/redis.sock"
    command = first.until("watch it in another terminal: ").partition(": ")[2].strip()
    assert command == f"REDRB_URL={url} redrb top --namespace counting"
    first.until_version(5)
    first.process("--worker=maker-1").kill()
    assert "restart in 1 s" in first.until("maker-1 was killed by SIGKILL")
    first.process("--worker=trainer").kill()
    assert "restart in 1 s" in first.until("trainer was killed by SIGKILL")
    first.until_version(5)
    first.process("redis.sock").kill()
    assert "restart in 1 s" in first.until("the server was killed by SIGKILL")
    first.until("the server was started again")
    first.until_version(5)
    before = len(first.output)
    first.process("redis.sock").kill()
    first.until("the server was killed by SIGKILL")
    assert first.end(signal.SIGINT) == 130, first.output  # while the server waits for its restart
    assert "the server was started again" in first.output[before:]
    assert "status 1" not in first.output[before:]  # workers put and acknowledge at their end
    assert re.search(r"ledger balanced +│ +yes", first.output), first.output
    assert "the next run goes on from here" in first.output
    diary = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    deaths = [event["worker"] for event in diary if event["event"] == "death"]
    assert deaths == ["maker-1", "trainer", "the server", "the server"]
    assert diary[-1]["why"] == "SIGINT has ended the run"
    assert "a line of the recipe" in (folder / "maker-1.log").read_text()

    events = [json.loads(line) for line in (folder / "trainer.jsonl").read_text().splitlines()]
    done = [event["step"] for event in events if event["event"] == "step"][-1]
    second = Run(folder, "--steps", str(done + 3), "--json", REDRB_URL=url)
    runs.append(second)
    assert second.end() == 0, second.output
    assert f"the trainer has ended: {done + 3} steps are done" in second.output
    figures = json.loads(second.output.splitlines()[-1])
    assert figures["reward_first"] == 0.0
    assert figures["reward_last"] == done + 3  # of weights that a checkpoint brought over
    assert figures["ledger_balanced"] is True


@pytest.mark.slow
def test_a_run_that_was_killed_takes_its_workers_along_and_the_next_one_waits(
    folder: Path, runs: list[Run]
) -> None:
    first = Run(folder, "--steps", "1000000")
    runs.append(first)
    first.until("watch it")
    first.until_version(3)
    workers = [first.process(f"--worker={name}") for name in ("trainer", "maker-1", "maker-2")]
    first.workers = workers
    stopped = workers[0]
    stopped.suspend()  # as one in a long system call
    first.popen.kill()
    psutil.wait_procs(workers[1:], timeout=20)
    assert [worker.is_running() for worker in workers] == [True, False, False]
    second = Run(folder, "--steps", "1000000")
    runs.append(second)
    with pytest.raises(subprocess.TimeoutExpired):
        second.popen.wait(3)
    assert not psutil.Process(second.popen.pid).children()  # neither server nor workers
    stopped.resume()
    second.until("goes on after")
    assert not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE
    second.until_version(3)
    assert second.end(signal.SIGINT) == 130, second.output
    assert re.search(r"ledger balanced +│ +yes", second.output), second.output


@pytest.mark.slow
def test_a_full_disk_under_logs_checkpoints_and_redis_loses_nothing(
    folder: Path, runs: list[Run]
) -> None:
    with small_disk(folder, "8m") as disk:
        run = Run(disk, "--steps", "1000000", "--restarts", "100")
        runs.append(run)
        run.until("watch it")
        run.until_version(3)
        filler = fill(disk)
        run.until("are dropped, and the job goes on: No space left on device")
        filler.unlink()
        run.until_version(3)
        assert run.end(signal.SIGINT) == 130, run.output
        assert re.search(r"ledger balanced +│ +yes", run.output), run.output
        assert "Traceback" not in run.output
        assert not list(disk.glob("checkpoints/.*"))


@pytest.mark.slow
def test_a_full_disk_under_the_output_of_the_run_ends_nothing(
    folder: Path, runs: list[Run]
) -> None:
    with small_disk(folder / "disk", "1m") as disk, (disk / "output").open("w") as output:
        run = Run(folder, "--steps", "1000000", output=output)
        runs.append(run)
        until = time.monotonic() + 60
        while "watch it" not in (disk / "output").read_text() and time.monotonic() < until:
            time.sleep(0.1)
        run.until_version(3)
        fill(disk)
        run.process("--worker=maker-1").kill()  # the run has something to say
        run.until_version(8)
        run.popen.send_signal(signal.SIGINT)
        assert run.popen.wait(40) == 130
    diary = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    assert "death" in [event["event"] for event in diary]


@pytest.mark.slow
def test_a_read_only_disk_of_checkpoints_costs_a_restart_of_the_trainer(
    folder: Path, runs: list[Run]
) -> None:
    with small_disk(folder / "disk", "8m") as disk:
        run = Run(folder, "--steps", "1000000", "--checkpoints", str(disk / "checkpoints"))
        runs.append(run)
        run.until("watch it")
        run.until_version(3)
        with read_only(disk):
            line = run.until("trainer ended with status 1; restart in 1 s")
        assert "no checkpoint can be written" in line
        assert "Read-only file system" in line
        run.until("trainer was started again")
        run.until_version(3)
        assert run.end(signal.SIGINT) == 130, run.output
        assert re.search(r"ledger balanced +│ +yes", run.output), run.output


@pytest.mark.slow
def test_a_maker_that_dies_at_once_is_given_up_with_its_reason(
    folder: Path, runs: list[Run]
) -> None:
    run = Run(folder, "--makers", "1", "--fails", "maker-1", "--restarts", "1")
    runs.append(run)
    assert run.end() == 1
    assert "ended with status 1; restart in 1 s: ValueError: maker-1 cannot count" in run.output
    assert "maker-1 ended with status 1, 2 times in a row, and was given up" in run.output
    assert "To start maker-1 again, repeat the command" in run.output
    assert "in prompts" in run.output  # the trace of the recipe's code
    assert "all makers were given up" in run.output


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(folder: Path, runs: list[Run]) -> None:
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    run = Run(folder, "--makers", "1", "--stuck", str(pipe))
    runs.append(run)
    run.until("server ")
    assert pipe.read_text() == "begun"
    trainer = run.process("--worker=trainer")
    run.popen.send_signal(signal.SIGINT)
    run.process("--worker=maker-1").wait(20)  # it ends in order; the trainer cannot
    assert run.end(signal.SIGINT, timeout=10) == 130
    trainer.wait(5)


@pytest.mark.slow
def test_ctrl_c_while_a_reward_function_hangs(folder: Path, runs: list[Run]) -> None:
    """Its maker ends within its time to stop; the others and the trainer end in order."""
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    run = Run(folder, "--steps", "1000000", "--hangs", str(pipe), "--stop-timeout", "4")
    runs.append(run)
    run.until("watch it")
    assert pipe.read_text() == "begun"
    run.until_version(2)
    began = time.monotonic()
    assert run.end(signal.SIGINT) == 130, run.output
    assert time.monotonic() - began < 20
    assert re.search(r"ledger balanced +│ +yes", run.output), run.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sorting", "--url", "fake://x"], "leave --url out"),
        (["sorting", "--worker", "me"], "--worker is for one worker"),
        (["sorting", "--makers", "0"], "--makers"),
        (["sorting", "--min-replicas", "1"], "has no replicas"),
        (["no.py"], "there is no recipe no.py"),
        (["broken.py"], "ZeroDivisionError"),
        (["sorting", "--out", "others"], "belongs to the recipe Other (other.py), and this is the"),
        (["sorting", "--out", "x" * 100], "give a shorter folder with --out"),
    ],
)
def test_a_wrong_command_line_starts_nothing(
    words: list[str],
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    (folder / "broken.py").write_text("1 / 0")
    (folder / "others").mkdir()
    began = {"event": "began", "recipe": "Other", "file": "other.py"}
    (folder / "others" / "run.jsonl").write_text(json.dumps(began) + "\n")
    assert cli.main(["run", *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(folder.glob("runs/*/*.log"))
