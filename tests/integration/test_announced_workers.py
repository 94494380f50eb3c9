"""The processes of a job announce who they are, what they do and how it goes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import redrb
from redrb.watch.state.model import WorkerState
from redrb.watch.state.observer import Observer, View
from tests import warm
from tests.conftest import REAL

LEASE_MS = 1500


def test_processes_of_a_job_announce_themselves_and_their_end(
    server_urls: Callable[[str], str], namespace: str, tmp_path: Path
) -> None:
    real_url = server_urls(next(iter(REAL)))

    def start(kind: str, worker: str, *options: str) -> subprocess.Popen[bytes]:
        words = [
            "-m",
            f"redrb.cli.processes.{kind}",
            "sorting",
            "--url",
            real_url,
            "--namespace",
            namespace,
        ]
        words += ["--worker", worker, "--lease-ms", str(LEASE_MS), *options]
        with (tmp_path / f"{worker}.log").open("wb") as log:
            return warm.Popen([sys.executable, *words], stdout=log, stderr=log)

    processes = [
        start("trainer", "trainer", "--target-reward", "1e9"),
        start("maker", "maker-a"),
        start("maker", "maker-b"),
    ]
    try:
        with redrb.connect(real_url) as client, Observer(client, namespace) as observer:

            def all_work(found: dict[str, WorkerState]) -> bool:
                return len(found) == 3 and all(one.groups for one in found.values())

            found = seen(observer, all_work)
            assert {one.role for one in found.values()} == {"maker", "trainer"}
            assert found["maker-a"].pid == processes[1].pid
            seen(observer, lambda now: now["maker-a"].weight_version > 0)
            assert "reward" in seen(observer, lambda _: True)["maker-a"].metrics
            trainer = next(one for one in found.values() if one.role == "trainer")
            assert trainer.weight_version > 0
            assert trainer.metrics.keys() >= {"reward"}
            assert {one.weights_name for one in found.values()} == {trainer.weights_name} != {""}
            processes[2].send_signal(signal.SIGTERM)
            assert processes[2].wait(30) == 0
            seen(observer, lambda now: now["maker-b"].life == "ended")
    finally:
        for process in processes:
            process.kill()
            process.wait(10)


def seen(
    observer: Observer, wanted: Callable[[dict[str, WorkerState]], bool]
) -> dict[str, WorkerState]:
    """Return the workers by label, once they are as wanted."""
    until, view = time.monotonic() + 60, View(number=-1)
    while time.monotonic() < until:
        view = observer.wait(view.number, 2)
        tasks = view.state.tasks if view.state else ()
        found = {one.label: one for task in tasks for one in task.workers}
        try:
            if wanted(found):
                return found
        except KeyError:
            continue
    raise AssertionError(json.dumps(str(view.state)))
