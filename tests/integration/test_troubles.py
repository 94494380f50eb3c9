"""Troubles of real processes show within five seconds in `redrb top`, on the page, in doctor."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

import redrb
from redrb import ExperienceStream
from redrb.environment import PREFIX, child_environment
from tests.conftest import REAL
from tests.finding_views import REDRB, FindingViews, Record, codes
from tests.integration.trouble_workers import work
from tests.samples import numbered
from tests.servers import Server

SOON_S = 5.0
START_S = 10.0
"""Longest start of a program while other tests run."""

TASKS = 6
CLIENT = "redis-cli"

Start = Callable[..., tuple[BaseProcess, Connection]]


@pytest.fixture
def server() -> Iterator[Server]:
    started = Server(next(iter(REAL.values())))
    yield started
    started.close()


@pytest.fixture
def start(server: Server, namespace: str) -> Iterator[Start]:
    """Start a process that works on a task; give it orders through the connection."""
    # a fork server: what is imported is imported once, and nothing of this process is inherited
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.integration.trouble_workers"])
    started: list[tuple[BaseProcess, Connection]] = []

    def run(role: str, task: str, **options: Any) -> tuple[BaseProcess, Connection]:
        theirs, ours = context.Pipe(duplex=False)
        process = context.Process(
            target=work, args=(role, server.url, namespace, task, options, theirs), daemon=True
        )
        process.start()
        started.append((process, ours))
        return started[-1]

    yield run
    for process, orders in started:
        process.kill()
        process.join(10)
        orders.close()
    forkserver._forkserver._stop()


def shows(code: str, subject: str, command: str) -> Callable[[Record], bool]:
    """Return whether a record has a finding, which says what to do."""

    def seen(record: Record) -> bool:
        for finding in record["findings"]:
            # "growing-dead-letters" for as long as rates count the letter, then "dead-letters"
            if finding["code"].endswith(code) and finding["subject"].endswith(subject):
                assert finding["command"].startswith(command)
                return True
        return False

    return seen


def at_work(record: Record) -> bool:
    """Return whether the workers of all tasks have announced what they hold."""
    state = record["state"] or {"tasks": []}  # none before the first look
    workers = {task["name"]: task["workers"] for task in state["tasks"]}
    takers = [one for task in ("stopped", "dead", "full") for one in workers.get(task, ())]
    return (
        len(workers) == TASKS
        and sum(one["leased"] for one in takers) == 3
        and all(workers.values())
    )


def test_troubles_show_with_what_to_do(server: Server, namespace: str, start: Start) -> None:
    with redrb.connect(server.url) as client, ExitStack() as streams:

        def opened(task: str, **options: Any) -> ExperienceStream:
            stream = ExperienceStream(client, task, namespace=namespace, **options)
            return streams.enter_context(stream)

        killed, to_killed = start("maker", "killed")
        stopped, _ = start("trainer", "stopped")
        dead, _ = start("trainer", "dead", lease_ms=600)
        start("trainer", "full", limit=2)
        _, to_full = start("old maker", "full", limit=2)
        _, to_blocked = start("maker", "blocked", limit=2)
        bounds = {"order": "admission", "max_staleness": 1, "groups_per_version": 4}
        poisoned = opened("poisoned", **bounds)
        start("failing", "poisoned", **bounds, max_deliveries=2)
        to_killed.send(1)
        to_full.send(1)
        to_blocked.send(1)
        for task in ("stopped", "dead"):
            with ExperienceStream(client, task, namespace=namespace) as stream:
                stream.put(numbered(1))
        views = streams.enter_context(FindingViews(server.url, namespace))
        views.until(at_work, time.monotonic() + 60, "top", "page")

        began = time.monotonic()
        killed.kill()
        dead.kill()
        assert stopped.pid
        os.kill(stopped.pid, signal.SIGSTOP)
        with poisoned.admit(1) as right:
            poisoned.put(numbered(1), policy_version=0, admission=right)
        to_full.send(2)
        to_blocked.send(3)
        expected = {
            ("silent-worker", "of killed"): f"ps -o pid,stat,etime,args -p {killed.pid}",
            ("silent-worker", "of stopped"): f"ps -o pid,stat,etime,args -p {stopped.pid}",
            ("dead-worker", "of dead"): f"redrb doctor dead --repair --namespace {namespace}",
            ("dead-letters", "task poisoned"): "redrb dead ls poisoned --namespace",
            ("mixed-redrb", f"namespace {namespace}"): "pip install --upgrade CLONE_OR_WHEEL",
            ("full-task", "task full"): "redrb set full limit=4 --namespace",
            ("blocked-makers", "task blocked"): "redrb stats blocked --namespace",
        }
        for (code, subject), command in expected.items():
            views.until(shows(code, subject, command), began + SOON_S)

        began = time.monotonic()
        os.kill(server.pid, signal.SIGSTOP)
        try:
            check = f"{CLIENT} -h 127.0.0.1 -p {server.port} PING"
            done = subprocess.run(
                [*REDRB, "doctor", "--json", "--namespace", namespace],
                env=child_environment(without=PREFIX, REDRB_URL=server.url),
                capture_output=True,
                timeout=30,
                check=False,
            )
            assert done.returncode == 1
            assert shows("connection", "server", check)(json.loads(done.stdout))
            assert time.monotonic() < began + SOON_S + START_S
            views.until(shows("connection", "server", check), began + SOON_S, "top", "page")
            age_s = views.newest["page"]["age_s"]
            views.until(lambda record: record["age_s"] > age_s, began + 10, "page")
        finally:
            os.kill(server.pid, signal.SIGCONT)
        views.until(lambda record: "connection" not in dict(codes(record)), began + 20)
