"""The worker commands as processes: they end cleanly, and say who has replaced them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator

import pytest

import redrb
from redrb.stream.task.lookup import task_stats
from tests.servers import programs
from tests.worker_processes import WorkerProcess

Start = Callable[..., WorkerProcess]

on_one_server = pytest.mark.parametrize("real_url", list(programs())[:1], indirect=True)


@pytest.fixture
def run_id() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def start(real_url: str, run_id: str) -> Iterator[Start]:
    """Start workers of one run; all are ended with the test."""
    started: list[WorkerProcess] = []

    def begin(module: str, *arguments: str) -> WorkerProcess:
        started.append(WorkerProcess(real_url, module, "--namespace", run_id, *arguments))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


def stats_of(url: str, run_id: str) -> redrb.StreamStats:
    with redrb.connect(url) as client:
        return task_stats(client, "sort", namespace=run_id, group="default")


@on_one_server
def test_a_maker_that_waits_for_weights_ends_when_asked(start: Start) -> None:
    maker = start("workers.maker")
    maker.until("start")
    asked = time.monotonic()
    assert maker.end() == 0
    assert time.monotonic() - asked < 5
    assert maker.error_output() == ""


@pytest.mark.slow
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
