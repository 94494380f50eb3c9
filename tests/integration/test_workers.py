"""The worker commands as processes: they end cleanly, start late, die, and start again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import redrb
from redrb.environment import PREFIX, child_environment
from redrb.stream.task.inspection import task_stats
from tests.servers import programs

Event = dict[str, Any]
Start = Callable[..., "Process"]

on_one_server = pytest.mark.parametrize("real_url", list(programs())[:1], indirect=True)


class Process:
    """One worker, whose metrics are read line by line."""

    def __init__(self, url: str, module: str, *arguments: str) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the test)
        self.popen = subprocess.Popen(
            [sys.executable, "-m", module, "sorting", "--metrics", "-", *arguments],
            env=child_environment(without=PREFIX, REDRB_URL=url),
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def error_output(self) -> str:
        """Return what it wrote to standard error, after its end."""
        self.errors.seek(0)
        return self.errors.read()

    def until(self, event: str, count: int = 1) -> list[Event]:
        """Read metrics until `event` came `count` times; returns these."""
        found: list[Event] = []
        for line in self.popen.stdout:
            record = json.loads(line)
            if record["event"] == event:
                found.append(record)
                if len(found) == count:
                    return found
        raise AssertionError(f"the worker ended before event {event!r} came {count} times")

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, read what is left and return the exit status."""
        self.popen.send_signal(number)
        self.popen.communicate(timeout=30)
        return self.popen.returncode


@pytest.fixture
def run_id() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def start(real_url: str, run_id: str) -> Iterator[Start]:
    """Start workers of one run; all are ended with the test."""
    started: list[Process] = []

    def begin(module: str, *arguments: str) -> Process:
        started.append(Process(real_url, module, "--namespace", run_id, *arguments))
        return started[-1]

    yield begin
    for process in started:
        process.popen.kill()
        process.popen.communicate()
        process.errors.close()


def stats_of(url: str, run_id: str) -> redrb.StreamStats:
    with redrb.connect(url) as client:
        return task_stats(client, "sort", namespace=run_id, group="default")


def test_a_run_goes_on_when_makers_and_its_trainer_are_killed_and_ends_at_sigterm(
    start: Start, real_url: str, run_id: str
) -> None:
    arguments = ("--target-reward", "2", "--lease-ms", "1000")
    first = start("workers.trainer", *arguments)
    doomed = start("workers.maker", "--worker", "doomed")
    first.until("step", 2)
    assert doomed.end(signal.SIGKILL) == -signal.SIGKILL
    late = start("workers.maker", "--worker", "late")
    late.until("put", 3)
    before = first.until("step")[0]["step"]
    last = first.until("step", 3)[-1]
    assert last["step"] == before + 3
    first.end(signal.SIGKILL)
    second = start("workers.trainer", *arguments)
    evaluation = second.until("evaluation")[0]
    assert evaluation["step"] == 0
    assert evaluation["weight_version"] >= last["weight_version"]
    second.until("step", 5)
    assert second.end() == 0
    assert late.end() == 0
    ledger = stats_of(real_url, run_id).ledger
    assert ledger.acked >= (before + 5) * 32
    assert (ledger.dead, ledger.leased, ledger.balanced) == (0, 0, True)


@on_one_server
def test_a_maker_that_waits_for_weights_ends_when_asked(start: Start) -> None:
    maker = start("workers.maker")
    maker.until("start")
    asked = time.monotonic()
    assert maker.end() == 0
    assert time.monotonic() - asked < 5
    assert maker.error_output() == ""


@on_one_server
def test_a_second_trainer_takes_the_weights_over_and_the_first_says_so(
    start: Start, real_url: str, run_id: str
) -> None:
    first = start("workers.trainer", "--target-reward", "2")
    maker = start("workers.maker")
    first.until("step")
    second = start("workers.trainer", "--target-reward", "2", "--steps", "2")
    first.popen.communicate(timeout=60)
    assert first.popen.returncode == 1
    assert "another publisher of weights 'sort' was started" in first.error_output()
    assert "Traceback" not in first.error_output()
    second.popen.communicate(timeout=60)
    assert second.popen.returncode == 0
    assert "ends: 2 steps are done, at weight version" in second.error_output()
    assert maker.end() == 0
    assert stats_of(real_url, run_id).ledger.balanced
