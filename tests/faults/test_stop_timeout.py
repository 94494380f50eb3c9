"""Worker processes that get SIGTERM end within their stop timeout, whatever Redis does."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time

import pytest

import redrb
from redrb.environment import PREFIX, child_environment
from tests import warm
from tests.proxy import Proxy
from tests.samples import numbered
from tests.servers import programs
from tests.worker_processes import WorkerProcess

STOP_TIMEOUT_S = 1.0
MOST_S = STOP_TIMEOUT_S + 9.0
"""Ending a step and the interpreter takes 1 s, and many times as much on busy processors."""

on_one_server = pytest.mark.parametrize("own_server", list(programs())[:1], indirect=True)


def worker(module: str, port: int, namespace: str, *flags: str) -> WorkerProcess:
    shared = ("--namespace", namespace, "--stop-timeout", f"{STOP_TIMEOUT_S}")
    return WorkerProcess(f"redis://127.0.0.1:{port}", module, *shared, *flags)


def seconds_to_end(worker: WorkerProcess, since: float) -> float:
    """Wait for the end and return the seconds since `since`; fail if the process hangs."""
    try:
        worker.popen.communicate(timeout=max(0.1, since + MOST_S - time.monotonic()))
    except subprocess.TimeoutExpired:
        worker.popen.send_signal(signal.SIGABRT)  # faulthandler writes the stacks
        worker.popen.communicate(timeout=10)
        pytest.fail(f"the worker did not end: {worker.error_output()}")
    return time.monotonic() - since


@pytest.fixture
def server(own_server):
    return own_server()


@pytest.fixture
def workers():
    """The workers of a test, which are killed with it."""
    started: list[WorkerProcess] = []
    yield started
    for each in started:
        each.kill()


@on_one_server
@pytest.mark.parametrize("how", [pytest.param("refused", marks=pytest.mark.slow), "frozen"])
def test_workers_end_in_time(server, workers, namespace, how):
    with Proxy("127.0.0.1", server.port) as proxy:
        port = proxy.port if how == "frozen" else server.port
        trainer = worker("workers.trainer", port, namespace, "--target-reward", "2")
        workers += [
            trainer,
            worker("workers.maker", port, namespace),
            worker("workers.maker", port, namespace, "--in-flight-updates"),
        ]
        trainer.until("step")
        if how == "frozen":
            proxy.freeze()
        else:
            server.kill()
        time.sleep(1.0)
        since = time.monotonic()
        for each in workers:
            each.popen.send_signal(signal.SIGTERM)
        assert max(seconds_to_end(each, since) for each in workers) < MOST_S
        for each in workers:
            assert each.popen.returncode in (0, 1), each.error_output()
            assert "Traceback" not in each.error_output()


@on_one_server
def test_a_stage_ends_in_time(own_server, namespace):
    """The time counts until the last stream is closed, and not only in `run`."""
    server = own_server()
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed below)
    process = warm.Popen(
        [sys.executable, "-m", "workers.stage", "tests.contract.test_stage:score"]
        + ["--namespace", namespace, "--from", "a", "--to", "b"]
        + ["--stop-timeout", f"{STOP_TIMEOUT_S}"],
        env=child_environment(without=PREFIX, REDRB_URL=server.url),
        stderr=errors,
    )
    with errors, process:
        try:
            with (
                redrb.connect(server.url) as client,
                redrb.ExperienceStream(client, "a", namespace=namespace) as rollouts,
            ):
                rollouts.put([numbered(1)])
                with redrb.ExperienceStream(client, "b", namespace=namespace) as scored:
                    scored.take(1, timeout=60).ack()
            server.kill()
            since = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(MOST_S) in (0, 1)
            assert time.monotonic() - since < MOST_S
            errors.seek(0)
            assert "Traceback" not in errors.read()
        finally:
            process.kill()
